"""Adasum of what the ranks of ``data`` hold; see ``planner.cost.adasum``.

Every device has a part of every tensor, of all ranks: so the same numbers are combined
at one place, and all ranks are given the same bits. Dot products and norms are summed
as pairs of floats, with an exponent for each tensor, so that they neither lose digits
nor overflow where the tensors themselves do not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from whalejax.meshes.jax_mesh import partition_spec
from whalejax.planner.cost.adasum import COLUMN, DATA, Part
from whalejax.planner.sharding.layout import Spec


Pair = tuple[Any, Any]
"""A number as the sum of two floats, the second smaller than the first's last digit, or
None where it is 0."""

_LEAST, _MOST = -100, 100
"""Exponents of scales, so that each and its inverse is a float."""


def combined(
    stacked: Sequence[Any],
    weights: Any,
    specs: Sequence[Spec],
    slices: Sequence[int],
    mesh: Mesh,
    *,
    node: int = 1,
) -> list[Any]:
    """Tensors combined over the ranks of ``data``, alike on all of them.

    Args:
        stacked: for each parameter sums over a rank's samples, with the ranks along a
            leading dimension that ``data`` shards.
        weights: of each rank's samples: what its sums are divided by.
        specs: layout of each parameter on the axes beside ``data``.
        slices: how many layers each stacks, which are tensors of their own.
        mesh: the devices.
        node: ranks, one after the other, that are averaged before.
    """
    dtype = jnp.result_type(jnp.float32, *(x.dtype for x in stacked))
    sizes = dict(mesh.shape)
    shapes = [x.shape[1:] for x in stacked]
    parts = [Part.of(*one, sizes) for one in zip(shapes, specs, slices, strict=True)]
    order = sorted(range(len(parts)), key=lambda i: parts[i].columns)
    packing = _Packing(parts=tuple(parts[i] for i in order), ranks=sizes[DATA])
    laid = tuple(specs[i] for i in order)

    def local(stacked: Sequence[Any], weights: Any) -> list[Any]:
        own = [stacked[i][0].astype(dtype) for i in order]
        shapes = [x.shape for x in own]
        buffer = packing.packed(own, weights.astype(dtype))
        rows = jax.lax.all_to_all(buffer, DATA, 0, 0, tiled=True)
        rows = _means(rows[:, :, :-1], rows[:, 0, -1], node)
        telling = _Telling(packing=packing, specs=laid, mesh=mesh)
        while len(rows[0]) > 1:
            # Each level is computed once, not again for each of its readers.
            rows = jax.lax.optimization_barrier(_level(rows, telling))
        whole = jax.lax.all_gather(rows[0][0], DATA)
        found = dict(zip(order, packing.unpacked(whole, shapes), strict=True))
        return [found[i] for i in range(len(found))]

    plain = [partition_spec(spec) for spec in specs]
    ranked = [PartitionSpec(DATA, *spec) for spec in plain]
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(ranked, PartitionSpec(DATA)),
        out_specs=plain,
        check_vma=False,  # What was gathered is alike on all ranks.
    )
    found: list[Any] = mapped(list(stacked), weights)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """Tensors in one buffer of columns, in equal parts for all ranks.

    Attributes:
        parts: of each tensor; those of as many columns stand together.
        ranks: how many parts.
    """

    parts: tuple[Part, ...]
    ranks: int

    def packed(self, tensors: Sequence[Any], weight: Any) -> Any:
        """(rank, number, column), and the weight in a last column."""
        found = []
        for x, part in zip(tensors, self.parts, strict=True):
            flat = x.reshape(part.here, part.numbers)
            room = self.ranks * COLUMN * part.columns
            flat = jnp.pad(flat, ((0, 0), (0, room - part.numbers)))
            cut = flat.reshape(part.here, self.ranks, COLUMN, part.columns)
            cut = cut.transpose(1, 2, 0, 3)
            found.append(cut.reshape(self.ranks, COLUMN, part.width))
        last = jnp.broadcast_to(weight, (self.ranks, COLUMN, 1))
        return jnp.concatenate([*found, last], axis=2)

    def unpacked(self, whole: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The tensors of all ranks' parts."""
        found, first = [], 0
        for shape, part in zip(shapes, self.parts, strict=True):
            cut = whole[:, :, first : first + part.width]
            first += part.width
            cut = cut.reshape(self.ranks, COLUMN, part.here, part.columns)
            flat = cut.transpose(2, 0, 1, 3).reshape(part.here, -1)
            found.append(flat[:, : part.numbers].reshape(shape))
        return found

    @property
    def tensor_of(self) -> np.ndarray:
        """The tensor of each column, numbered over all that the device holds."""
        widths = [part.columns for part in self.parts for _ in range(part.here)]
        return np.repeat(np.arange(len(widths)), widths)

    def by_tensor(self, columns: Any) -> list[Any]:
        """(…, column) numbers as (…, tensor, column), of as many columns each."""
        found, first = [], 0
        for count, several in itertools.groupby(self.parts, lambda x: x.columns):
            tensors = sum(part.here for part in several)
            cut = columns[..., first : first + tensors * count]
            first += tensors * count
            found.append(cut.reshape(*columns.shape[:-1], tensors, count))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Telling:
    """What devices tell each other of dot products.

    Attributes:
        packing: of the tensors.
        specs: of the parameters.
        mesh: the devices.
    """

    packing: _Packing
    specs: tuple[Spec, ...]
    mesh: Mesh

    def gathered(self, own: Any) -> Any:
        """What all devices tell of all tensors, from what one tells of those it holds.

        Args:
            own: (number, pair, tensor on this device).

        Returns:
            (device, number, pair, tensor); zero where a device says nothing, because it
            holds nothing of the tensor or the same as another.
        """
        axes = [axis for axis, size in self.mesh.shape.items() if size > 1]
        found, first = [], 0
        for part, spec in zip(self.packing.parts, self.specs, strict=True):
            mine = own[..., first : first + part.here]
            first += part.here
            sharing = {DATA, *(axis for several in spec for axis in several)}
            for axis in axes:
                if axis not in sharing:
                    speaks = jax.lax.axis_index(axis) == 0
                    mine = jnp.where(speaks, mine, jnp.zeros_like(mine))
            if part.here < part.slices:
                whole = jnp.zeros((*mine.shape[:-1], part.slices), mine.dtype)
                start = jax.lax.axis_index(spec[0]) * part.here
                mine = jax.lax.dynamic_update_slice_in_dim(whole, mine, start, -1)
            found.append(mine)
        return jax.lax.all_gather(jnp.concatenate(found, -1), tuple(axes))

    def here(self, every: Any) -> Any:
        """Of numbers of all tensors, (pair, tensor), those on this device."""
        found, first = [], 0
        for part, spec in zip(self.packing.parts, self.specs, strict=True):
            whole = every[:, first : first + part.slices]
            first += part.slices
            if part.here < part.slices:
                start = jax.lax.axis_index(spec[0]) * part.here
                whole = jax.lax.dynamic_slice_in_dim(whole, start, part.here, -1)
            found.append(whole)
        return jnp.concatenate(found, -1)


def _means(rows: Any, weights: Any, node: int) -> Pair:
    """Rows of ranks' sums as means over the samples of a node's ranks."""
    groups = len(rows) // node
    sums = rows.reshape(groups, node, *rows.shape[1:]).sum(1)
    return weighted_means(sums, weights.reshape(groups, node).sum(1)), None


def weighted_means(sums: Any, weights: Any) -> Any:
    """Sums over samples as means, zero where the samples have no weight.

    Args:
        sums: of several ranks, along the first dimension.
        weights: of the samples of each.
    """
    by = weights.reshape(-1, *[1] * (sums.ndim - 1)).astype(sums.dtype)
    some = by != 0
    # A rank whose samples have no weight has perhaps divided by it.
    return jnp.where(some, sums / jnp.where(some, by, 1), jnp.zeros_like(sums))


def _level(rows: Pair, telling: _Telling) -> Pair:
    """Pairs of rows combined; one without a partner stays as it is."""
    pairs = len(rows[0]) // 2
    ones = _each(functools.partial(_every_other, 0, 2 * pairs), rows)
    others = _each(functools.partial(_every_other, 1, 2 * pairs), rows)
    packing, dtype = telling.packing, rows[0].dtype
    of = packing.tensor_of
    exponents = [_exponents(x[0], packing) for x in (ones, others)]
    scales = [_power(-e, dtype)[:, of][:, None] for e in exponents]
    scaled = [
        _each(functools.partial(jnp.multiply, scale), own)
        for own, scale in zip((ones, others), scales, strict=True)
    ]
    sums = _by_tensor(_columns(*scaled), packing)
    told = [*(x for pair in sums for x in pair), *exponents]
    every = telling.gathered(jnp.stack([x.astype(dtype) for x in told]))
    products = []
    for factor, own in zip(_factors(every), (ones, others), strict=True):
        here = [telling.here(x)[:, of][:, None] for x in factor]
        high, low = (jnp.broadcast_to(x, own[0].shape) for x in here)
        products.append(_multiplied((high, low), own))
    high, low = _added(*products)
    if rows[1] is None:
        rows = rows[0], jnp.zeros_like(rows[0])
    left = [x[2 * pairs :] for x in rows]
    return jnp.concatenate([high, left[0]]), jnp.concatenate([low, left[1]])


def _every_other(first: int, end: int, rows: Any) -> Any:
    return rows[first:end:2]


def _exponents(rows: Any, packing: _Packing) -> Any:
    """For each pair and tensor, a power of two near its largest number here, as a
    whole number; 0 of a tensor that is zero, which says nothing then."""
    largest = jnp.abs(rows).max(1)
    found = [x.max(-1, initial=0.0) for x in packing.by_tensor(largest)]
    most = jnp.concatenate(found, -1)
    _, exponent = jnp.frexp(most)
    finite = jnp.where((most > 0) & jnp.isfinite(most), exponent, 0)
    return jnp.clip(finite, _LEAST, _MOST)


def _power(exponent: Any, dtype: Any) -> Any:
    """Two to some whole powers, exactly."""
    exponent = jnp.asarray(exponent, jnp.int32)
    found = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    return found.astype(dtype)


def _columns(ones: Pair, others: Pair) -> tuple[Pair, Pair, Pair]:
    """Of every pair of columns the dot product and both squared norms."""

    def body(number: Any, sums: Any) -> Any:
        def row(x: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False)

        a, b = (_each(row, pair) for pair in (ones, others))
        products = (_multiplied(a, b), _multiplied(a, a), _multiplied(b, b))
        pairs = zip(sums, products, strict=True)
        return tuple(_added(x, y) for x, y in pairs)

    high = ones[0]
    nothing = jnp.zeros((high.shape[0], high.shape[2]), high.dtype)
    start = ((nothing, nothing),) * 3
    found: tuple[Pair, Pair, Pair] = jax.lax.fori_loop(0, COLUMN, body, start)
    return found


def _by_tensor(sums: Sequence[Pair], packing: _Packing) -> list[Pair]:
    """Sums of columns as sums of tensors, (pair, tensor)."""
    high, low = (jnp.stack(x) for x in zip(*sums, strict=True))
    cut = zip(packing.by_tensor(high), packing.by_tensor(low), strict=True)
    each = [_total(pair, 3) for pair in cut]
    highs, lows = (jnp.concatenate(x, -1) for x in zip(*each, strict=True))
    return [*zip(highs, lows, strict=True)]


def _factors(told: Any) -> tuple[Pair, Pair]:
    """By what the two of each pair are multiplied, (pair, tensor).

    Args:
        told: (device, number, pair, tensor), as ``_Telling.gathered`` gives it.
    """
    told = jnp.moveaxis(told, 1, 0)
    highs, lows, exponents = told[0:6:2], told[1:6:2], told[6:].astype(jnp.int32)
    there = highs[1:] > 0
    ends = jnp.where(there, exponents, _LEAST).max(1, keepdims=True)
    shifts = _power(jnp.clip(exponents - ends, _LEAST, 0), told.dtype)
    # Of the dot product, and of both norms: each number with its own exponents.
    by = jnp.stack([shifts[0], shifts[0], shifts[1]])
    again = jnp.stack([shifts[1], shifts[0], shifts[1]])
    high, low = _total((highs * by * again, lows * by * again), 1)
    apart = jnp.clip(ends[1, 0] - ends[0, 0], _LEAST, _MOST)
    scale = _power(jnp.stack([apart, -apart]), told.dtype)
    dot = tuple(jnp.broadcast_to(x[:1], scale.shape) for x in (high, low))
    some = high[1:] > 0
    square = jnp.where(some, 2 * high[1:], 1), jnp.where(some, 2 * low[1:], 0)
    share = _quotient((dot[0], dot[1]), square)
    less = [jnp.where(some, -x * scale, 0) for x in share]
    one = jnp.ones_like(scale)
    high, low = _added((one, jnp.zeros_like(one)), (less[0], less[1]))
    return (high[0], low[0]), (high[1], low[1])


# Numbers as pairs of floats (Dekker, "A floating-point technique for extending the
# available precision", 1971; Ogita, Rump and Oishi, "Accurate sum and dot product",
# 2005).


def _two_sum(a: Any, b: Any) -> Pair:
    """A sum, and what its rounding lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _added(x: Pair, y: Pair) -> Pair:
    total, lost = _two_sum(x[0], y[0])
    low = lost + (x[1] + y[1])
    high = total + low
    return high, low - (high - total)


def _product(a: Any, b: Any) -> Pair:
    """A product, and what its rounding lost."""
    high = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return high, ((a1 * b1 - high) + a1 * b2 + a2 * b1) + a2 * b2


def _multiplied(x: Pair, y: Pair) -> Pair:
    high, low = _product(x[0], y[0])
    for one, other in ((x[0], y[1]), (y[0], x[1])):
        if other is not None:
            low = low + one * other
    return high, low


def _each(of: Callable[[Any], Any], pair: Pair) -> Pair:
    """A function of both floats, the second of which may be none."""
    return of(pair[0]), None if pair[1] is None else of(pair[1])


def _quotient(x: Pair, y: Pair) -> Pair:
    high = x[0] / y[0]
    near = _multiplied((high, None), y)
    left = _added(x, (-near[0], -near[1]))
    return _two_sum(high, left[0] / y[0])


def _halves(a: Any) -> Pair:
    """A number as two of half as many digits."""
    digits = 12 if a.dtype == jnp.float32 else 27  # half of those of the fraction
    scaled = a * (2**digits + 1)
    high = scaled - (scaled - a)
    return high, a - high


def _total(pair: Pair, axis: int) -> Pair:
    """The sum along a dimension."""
    high, low = pair
    nothing = jnp.zeros((), high.dtype)

    def add(x: Any, y: Any) -> Any:
        return _added(x, y)

    found: Pair = jax.lax.reduce((high, low), (nothing, nothing), add, (axis,))
    return found
