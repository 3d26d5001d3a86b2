"""Attention over a sharded sequence, a block of scores at a time.

Keys and values move from device to device, while every device computes with those that
it has (Liu et al., "Ring Attention", 2023). Each row has a running maximum and a
running sum, so only one block of scores exists at a time. The backward pass recomputes
the scores (Dao et al., "FlashAttention", 2022). The model's own operations on scores
before the softmax run block by block. On one device the ring has one round, with the
same blocks.

The module is long because the backward pass has its own ring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from whalejax import _compat
from whalejax.capture.patterns.attention_pattern import (
    AttentionPattern,
    attention_of,
    product_tags,
)
from whalejax.capture.patterns.blockwise import Tags
from whalejax.lowering.spmd.skipped_blocks import SkippedBlocks
from whalejax.lowering.spmd.zigzag import dealt_out
from whalejax.meshes.jax_mesh import on_automatic_axes, partition_spec
from whalejax.planner.cost.blocked_attention import Ring, ring
from whalejax.planner.sharding.layout import Spec


def attend(
    equation: Any, values: Sequence[Any], specs: Sequence[Spec], mesh: Mesh
) -> Any:
    """Runs a call of attention.

    A ring runs only if a sequence dimension of the query has the key's sharding.
    Otherwise the sequences of query and key are unsharded.

    Args:
        equation: Call of attention.
        values: Query, key, value and the other inputs of the scores.
        specs: Specs of the values.
        mesh: Mesh of the devices.

    Returns:
        Result of the call, in the query's sharding.
    """
    jaxpr = _compat.inner_jaxprs(equation)[0]
    one = attention_of(jaxpr)
    order = [_compat.open_jaxpr(jaxpr)[0].invars.index(v) for v in one.inputs]
    given = [values[place] for place in order]
    laid = _AttentionLayout.of(one, [specs[place] for place in order], mesh)
    return laid.function()(*given)


@dataclass(frozen=True, slots=True)
class _AttentionLayout:
    """An attention with its layout.

    ``axes`` shard the sequence; there are none without a ring. ``row`` is the index of
    the sequence in ``one.rows``. ``filled`` is the score in skipped blocks, if they
    affect a result.
    """

    one: AttentionPattern
    specs: tuple[Spec, ...]
    out: Spec
    axes: tuple[str, ...]
    row: int
    ring: Ring
    filled: float | None
    mesh: Mesh

    @classmethod
    def of(
        cls, one: AttentionPattern, specs: Sequence[Spec], mesh: Mesh
    ) -> _AttentionLayout:
        query, key, value = specs[:3]
        axes = key[one.column[0]]
        lengths = [one.query.aval.shape[place] for place, _ in one.rows]
        sharded = [n for n, (q, _) in enumerate(one.rows) if axes and query[q] == axes]
        open_ = [n for n, (q, _) in enumerate(one.rows) if not query[q]]
        some = sharded or open_ or range(len(lengths))
        row = max(some, key=lambda n: lengths[n])
        if not sharded:  # Without sharded rows there is no ring.
            axes, places = (), (one.rows[row][0], *one.column[:2])
            query, key, value = (
                (*spec[:place], (), *spec[place + 1 :])
                for spec, place in zip((query, key, value), places, strict=True)
            )
        size = math.prod(mesh.shape[a] for a in axes)
        tag, column = one.rows[row][1], one.column[2]
        dealt = ring(
            lengths[row],
            one.key.aval.shape[one.column[0]],
            size,
            lambda a, b: one.scores.masked_blocks(a, b, tag, column),
        )
        by_tag = {t: query[q] for q, _, _, t in one.batch}
        by_tag |= {t: query[q] for q, t in one.rows}
        out = tuple(
            by_tag[n] if what == "scores" else value[n] for what, n in one.output_dims
        )
        others = tuple(_of_tags(ways, by_tag) for ways in one.scores.tags)
        whole = (query, key, value, *others)
        parts = dealt.rows.size, dealt.columns.size
        filled = one.scores.filled(*parts, tag, column)
        return cls(one, whole, out, axes, row, dealt, filled, mesh)

    def function(self) -> Any:
        """Returns the function from global arrays to the output, with a custom VJP."""
        specs = [partition_spec(spec) for spec in self.specs]
        out = partition_spec(self.out)
        inner = _Local(self)
        kept = inner.kept_specs()

        def ahead(*values: Any) -> Any:
            return self._mapped(inner.ahead, specs, (out, *kept))(*values)

        @jax.custom_vjp
        def attention(*values: Any) -> Any:
            return ahead(*values)[0]

        def forward(*values: Any) -> Any:
            output, *residuals = ahead(*values)
            return output, (output, residuals, values[3:])

        def backward(saved: Any, cotangent: Any) -> Any:
            output, residuals, others = saved
            run = self._mapped(
                inner.back, (out, out, *kept, *specs[3:]), tuple(specs[:3])
            )
            gradients = run(cotangent, output, *residuals, *others)
            return (*gradients, *(None for _ in others))

        attention.defvjp(forward, backward)
        return attention

    def _mapped(self, function: Any, inputs: Any, outputs: Any) -> Any:
        return on_automatic_axes(function, self.mesh, tuple(inputs), tuple(outputs))


def _of_tags(ways: set[Tags], by_tag: Mapping[int, Any]) -> Spec:
    """Returns the spec of another input: rows as the query's, columns unsharded."""
    result = []
    for tags in zip(*ways, strict=True):
        tag = tags[0] if len(set(tags)) == 1 else None
        result.append(() if tag is None else by_tag.get(tag, ()))
    return tuple(result)


class _Local:
    """One device's part of an attention.

    Its queries are ``[batch, group, rows, depth]``. ``batch`` is one dimension for all
    that queries and keys share, ``group`` one for the other dimensions of queries
    except the sequence.
    """

    def __init__(self, laid: _AttentionLayout) -> None:
        self.laid = laid
        self.one = laid.one
        self.ring = laid.ring
        one, row = self.one, laid.row
        self.groups = [r for n, r in enumerate(one.rows) if n != row]
        self.place, self.tag = one.rows[row]
        self.column = one.column[2]
        bits: Any = jnp.finfo(one.query.aval.dtype)  # type: ignore[no-untyped-call]
        self.wide = jnp.float64 if bits.bits > 32 else jnp.float32

    # Layouts.

    def kept_specs(self) -> list[Any]:
        """Returns specs of residuals: query, key, value, row maxima, row sums."""
        one, (query, _, value) = self.one, self.laid.specs[:3]
        batch = [query[q] for q, *_ in one.batch]
        groups = [query[q] for q, _ in self.groups]
        axes, empty = self.laid.axes, ()
        flat = [_flatten_axes(batch), _flatten_axes(groups), axes]
        width = _flatten_axes([value[place] for place in one.width])
        return [
            partition_spec(tuple(spec))
            for spec in (
                [*flat, empty],
                [flat[0], axes, empty],
                [flat[0], axes, width],
                flat,
                flat,
            )
        ]

    def _parts(self, slot: int) -> list[list[int]]:
        one = self.one
        if slot == 0:
            return [
                [q for q, *_ in one.batch],
                [q for q, _ in self.groups],
                [self.place],
                [q for q, _ in one.depth],
            ]
        if slot == 1:
            batch = [k for _, k, *_ in one.batch]
            return [batch, [one.column[0]], [k for _, k in one.depth]]
        if slot == 2:
            return [[v for *_, v, _ in one.batch], [one.column[1]], [*one.width]]
        places = {what: n for n, what in self._named_dims()}
        return [
            [places["scores", t] for *_, t in one.batch],
            [places["scores", t] for _, t in self.groups],
            [places["scores", self.tag]],
            [places["width", n] for n in one.width],
        ]

    def _named_dims(self) -> list[tuple[int, tuple[str, int]]]:
        return list(enumerate(self.one.output_dims))

    def _flat(self, x: Any, slot: int) -> Any:
        parts = self._parts(slot)
        shape = [math.prod(x.shape[d] for d in part) for part in parts]
        return x.transpose([d for part in parts for d in part]).reshape(shape)

    def _unflat(self, x: Any, slot: int) -> Any:
        values = (*self.one.inputs[:3], self.one.output)
        specs = (*self.laid.specs[:3], self.laid.out)
        shape = values[slot].aval.shape
        spec = specs[slot]
        like = _local_shape(shape, spec, self.laid.mesh)
        order = [d for part in self._parts(slot) for d in part]
        return x.reshape([like[d] for d in order]).transpose(np.argsort(order))

    def flat_output(self, x: Any) -> Any:
        return self._flat(x, 3)

    def sizes(self, query: Any) -> dict[int, int]:
        sizes = {t: query.shape[q] for q, *_, t in self.one.batch}
        return sizes | {t: query.shape[q] for q, t in self.one.rows}

    # Order of the sequence on devices.

    def deal(self, x: Any, dim: int, *, back: bool = False) -> Any:
        if not self.ring.zigzag:
            return x
        return dealt_out(x, dim, self.laid.axes, self.ring.size, back=back)

    def onward(self, x: Any) -> Any:
        n = self.ring.size
        return lax.ppermute(x, self.laid.axes, [(d, (d + 1) % n) for d in range(n)])

    def outside(self, others: Sequence[Any]) -> list[Any]:
        """Returns the other inputs; sharded rows are in the order of the queries."""
        outside = []
        for value, ways, spec in zip(
            others, self.one.scores.tags, self.laid.specs[3:], strict=True
        ):
            for dim, tags in enumerate(zip(*ways, strict=True)):
                if set(tags) == {self.tag} and spec[dim] == self.laid.axes:
                    value = self.deal(value, dim)
            outside.append(value)
        return outside

    # Blocks.

    def scores(
        self,
        query: Any,
        key: Any,
        pair: Any,
        sizes: Mapping[int, int],
        others: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Returns a block's scores ``[batch, group, rows, columns]`` and their VJP."""
        one, ring = self.one, self.ring
        here = {**sizes, self.tag: ring.row_size, self.column: ring.column_size}
        offsets = {
            **self._starts(sizes),
            self.tag: pair[2] * ring.row_size,
            self.column: pair[3] * ring.column_size,
        }

        def outside(number: int, tags: Tags) -> Any:
            x = others[number]
            sharded = self.laid.specs[3 + number]
            for dim, tag in enumerate(tags):
                if tag == self.column:
                    start = pair[3] * ring.column_size
                    x = lax.dynamic_slice_in_dim(x, start, ring.column_size, dim)
                elif tag == self.tag:
                    # A reordered value contains the row blocks of this device.
                    block = pair[0] if sharded[dim] or not self.laid.axes else pair[2]
                    start = block * ring.row_size
                    x = lax.dynamic_slice_in_dim(x, start, ring.row_size, dim)
            return x

        flat_order = [
            *(t for *_, t in one.batch),
            *(t for _, t in self.groups),
            self.tag,
            self.column,
        ]

        def modified(product: Any) -> Any:
            tags = product_tags(one)
            shape = [here[t] for t in flat_order]
            laid = product.reshape(shape).transpose([flat_order.index(t) for t in tags])
            result = one.scores.block(laid, here, offsets, outside)
            return result.transpose(flat_order).reshape(product.shape).astype(self.wide)

        kind = one.first.outvars[0].aval.dtype
        product = jnp.einsum(
            "bgtd,bsd->bgts",
            query,
            key,
            preferred_element_type=kind,
            precision=one.first.params["precision"],
        )
        found, pullback = jax.vjp(modified, product)
        return found, pullback

    def _starts(self, sizes: Mapping[int, int]) -> dict[int, Any]:
        query = self.laid.specs[0]
        places = {t: q for q, *_, t in self.one.batch} | {t: q for q, t in self.groups}
        return {
            tag: lax.axis_index(query[place]) * sizes[tag]
            for tag, place in places.items()
            if query[place]
        }

    def ahead(self, query: Any, key: Any, value: Any, *given: Any) -> Any:
        sizes = self.sizes(query)
        here, query = self._tied(query)
        query = self.deal(self._flat(query, 0), 2)
        key, value = (self.deal(self._flat(x, n), 1) for n, x in ((1, key), (2, value)))
        others = self.outside(given)
        rows = query.shape[:3]
        none_yet = (
            jnp.zeros((*rows, value.shape[2]), self.wide),
            jnp.full(rows, -jnp.inf, self.wide),
            jnp.zeros(rows, self.wide),
        )

        left_out = self._left_out()

        def block(pair: Any, moving: Any, sums: Any, state: Any) -> Any:
            rows, rest = state
            rows = self._block_ahead(query, moving, pair, rows, sizes, others)
            return (rows, rest), sums

        def rest(step: Any, moving: Any, sums: Any, state: Any) -> Any:
            if left_out is None:
                return state, sums
            return (state[0], left_out.summed(step, moving[1], state[1])), sums

        start = none_yet, () if left_out is None else left_out.none_yet(value)
        (state, hidden), _ = self._rounds(here, (key, value), (), start, block, rest)
        if left_out is not None:
            state = left_out.blended(hidden, *state)
        total, peak, below = state
        level = jnp.where(jnp.isfinite(peak), peak, 0)
        # If all scores of a row are -inf, ``below`` is 0 and the output NaN, as usual.
        output = total / below[..., None]
        kind = self.one.output.aval.dtype
        output = self.deal(output.astype(kind), 2, back=True)
        return self._unflat(output, 3), query, key, value, level, below

    def _starts_of(self, pair: Any) -> tuple[Any, Any]:
        return pair[0] * self.ring.row_size, pair[1] * self.ring.column_size

    def _rows(self, pair: Any, values: Sequence[Any]) -> list[Any]:
        start, size = self._starts_of(pair)[0], self.ring.row_size
        return [lax.dynamic_slice_in_dim(x, start, size, 2) for x in values]

    def _columns(self, pair: Any, values: Sequence[Any]) -> list[Any]:
        start, size = self._starts_of(pair)[1], self.ring.column_size
        return [lax.dynamic_slice_in_dim(x, start, size, 1) for x in values]

    def _block_ahead(
        self,
        query: Any,
        moving: Any,
        pair: Any,
        state: Any,
        sizes: Mapping[int, int],
        others: Sequence[Any],
    ) -> Any:
        a, _ = self._starts_of(pair)
        key, value = self._columns(pair, moving)
        mine, total, peak, below = self._rows(pair, (query, *state))
        scores, _ = self.scores(mine, key, pair, sizes, others)
        higher = jnp.maximum(peak, scores.max(axis=-1))
        # The maximum of a row is -inf while all its scores so far are masked.
        level = jnp.where(jnp.isfinite(higher), higher, 0)
        weights = jnp.exp(scores - level[..., None])
        shrink = jnp.exp(peak - level)
        rounded = weights.astype(self.one.weights_dtype)
        precision = self.one.second.params["precision"]
        added = self._product("bgts,bse->bgte", rounded, value, precision)
        fresh = (
            total * shrink[..., None] + added,
            higher,
            below * shrink + weights.sum(axis=-1),
        )
        return tuple(
            lax.dynamic_update_slice_in_dim(x, y, a, 2)
            for x, y in zip(state, fresh, strict=True)
        )

    def back(self, cotangent: Any, output: Any, *saved: Any) -> Any:
        # The operands of scores are tied too. Otherwise compilers find the scores of a
        # single block in the forward pass, and keep those of all layers in memory.
        here, tied = self._tied((cotangent, *saved[:3]))
        cotangent, query, key, value = tied
        level, below = saved[3:5]
        sizes = {
            t: output.shape[n] for n, (w, t) in self._named_dims() if w == "scores"
        }
        others = self.outside(saved[5:])
        given = self.flat_output(cotangent)
        inner = given.astype(self.wide) * self.flat_output(output).astype(self.wide)
        given, inner = self.deal(given, 2), self.deal(inner.sum(axis=-1), 2)

        def block(pair: Any, moving: Any, sums: Any, state: Any) -> Any:
            held = (query, given, inner, level, below)
            return self._block_back(held, moving, pair, sums, state, sizes, others)

        left_out = self._left_out()
        kind = self.one.weights_dtype
        pulled = left_out and left_out.pulled(level, below, given, kind)

        def rest(step: Any, moving: Any, sums: Any, state: Any) -> Any:
            if left_out is None:
                return state, sums
            return state, (sums[0], left_out.returned(step, pulled, sums[1]))

        zeros = tuple(jnp.zeros(x.shape, self.wide) for x in (key, value))
        state = jnp.zeros(query.shape, self.wide)
        state, sums = self._rounds(here, (key, value), zeros, state, block, rest)
        back = [
            self.deal(x.astype(like.dtype), dim, back=True)
            for x, like, dim in zip(
                (state, *sums), (query, key, value), (2, 1, 1), strict=True
            )
        ]
        # Heads on several devices may share keys, so their gradients are summed.
        apart = _flatten_axes([self.laid.specs[0][q] for q, _ in self.groups])
        if apart:
            back[1:] = (lax.psum(x, apart) for x in back[1:])
        return tuple(self._unflat(x, slot) for slot, x in enumerate(back))

    def _block_back(
        self,
        held: Sequence[Any],
        moving: Any,
        pair: Any,
        sums: Any,
        state: Any,
        sizes: Mapping[int, int],
        others: Sequence[Any],
    ) -> Any:
        a, b = self._starts_of(pair)
        key, value = self._columns(pair, moving)
        query, given, inner, level, below = self._rows(pair, held)
        scores, pullback = self.scores(query, key, pair, sizes, others)
        # A log-sum-exp would round away the sum's logarithm beside large masked scores.
        weights = jnp.exp(scores - level[..., None]) / below[..., None]
        ahead, behind = (
            product.params["precision"] for product in (self.one.first, self.one.second)
        )
        raised = self._product("bgte,bse->bgts", given, value, behind)
        (change,) = pullback(weights * (raised - inner[..., None]))
        rounded = weights.astype(self.one.weights_dtype)
        fresh = (
            self._product("bgts,bgtd->bsd", change, query, ahead),
            self._product("bgts,bgte->bse", rounded, given, behind),
        )
        mine = self._product("bgts,bsd->bgtd", change, key, ahead)
        return (
            _added(state, mine, a, 2),
            tuple(_added(x, y, b, 1) for x, y in zip(sums, fresh, strict=True)),
        )

    def _product(self, text: str, left: Any, right: Any, precision: Any) -> Any:
        return jnp.einsum(
            text, left, right, preferred_element_type=self.wide, precision=precision
        )

    # Rounds.

    def _left_out(self) -> SkippedBlocks | None:
        if self.laid.filled is None:
            return None
        here = lax.axis_index(self.laid.axes) if self.ring.size > 1 else 0
        return SkippedBlocks(self.ring, self.laid.filled, here, self.wide)

    def _tied(self, values: Any) -> Any:
        """Returns this device's pairs of blocks, their number, and unchanged values.

        The barrier makes indices depend on the values. Without it, JAX moves what
        depends on indices alone out of a loop over layers. Among it are the masks of
        all blocks, whose memory is quadratic in the sequence length.
        """
        here = lax.axis_index(self.laid.axes) if self.ring.size > 1 else 0
        own = tuple(jnp.asarray(x)[here] for x in (self.ring.pairs, self.ring.counts))
        return lax.optimization_barrier((own, values))

    def _rounds(
        self,
        here: tuple[Any, Any],
        moving: Any,
        sums: Any,
        state: Any,
        block: Any,
        rest: Any,
    ) -> Any:
        """Runs all pairs of blocks of this device, round by round.

        All devices run as many steps as the device with the most pairs, so the program
        is static. A device skips the steps for which it has no pair. ``moving`` goes
        round the ring. ``sums`` has its cotangents, which move with it and return; it
        may be (). ``rest`` is like ``block``, for the skipped pairs of a round.
        """
        n, counts = self.ring.size, self.ring.counts
        pairs, own = here
        later, first = counts[:, 1:], counts[:, :1]
        most = int(later.max() if n > 1 else first.max())
        alike = first.min() == first.max() >= most and (later == most).all()

        def compute_blocks(
            step: Any, moving: Any, sums: Any, state: Any, start: int, end: int
        ) -> Any:
            def one(number: Any, carry: Any) -> Any:
                return block(pairs[step, number], moving, carry[1], carry[0])

            def perhaps(number: Any, carry: Any) -> Any:
                there = number < own[step]
                return lax.cond(there, lambda c: one(number, c), lambda c: c, carry)

            turn = one if alike else perhaps
            if end - start == 1:
                return turn(start, (state, sums))
            return lax.fori_loop(start, end, turn, (state, sums))

        # The first round, with the diagonal, may have more pairs than the others.
        if first.max() > most:
            state, sums = compute_blocks(0, moving, sums, state, most, int(first.max()))

        def turn(step: Any, carry: Any) -> Any:
            moving, sums, state = carry
            # Sent before use, so the transfer overlaps with the computation.
            later = jax.tree.map(self.onward, moving)
            state, sums = compute_blocks(step, moving, sums, state, 0, most)
            state, sums = rest(step, moving, sums, state)
            return later, jax.tree.map(self.onward, sums), state

        if n > 1:
            carry = (moving, sums, state)
            moving, sums, state = lax.fori_loop(0, n - 1, turn, carry)
        state, sums = compute_blocks(n - 1, moving, sums, state, 0, most)
        state, sums = rest(n - 1, moving, sums, state)
        if n > 1:
            sums = jax.tree.map(self.onward, sums)
        return state, sums


def _added(whole: Any, part: Any, start: Any, dim: int) -> Any:
    before = lax.dynamic_slice_in_dim(whole, start, part.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(whole, before + part, start, dim)


def _flatten_axes(several: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(axis for axes in several for axis in axes)


def _local_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> list[int]:
    return [
        size // math.prod(mesh.shape[a] for a in axes)
        for size, axes in zip(shape, spec, strict=True)
    ]
