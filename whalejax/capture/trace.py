"""Traces a loss at micro-batch shape and returns its graph.

Capture begins here. The module checks the batch, and makes one flat function of model
and batch. It traces that function with ``jax.make_jaxpr``, and gives the jaxpr to
``FlatProgram``.

The module is long because ``Captured`` returns every other form of a traced loss, and
all of them come from one trace.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.adapters.base import Adapter
from whalejax.adapters.leaves import is_key
from whalejax.adapters.loss_inputs import TRACED
from whalejax.capture.assemble import graph_of, loss_id, name_inputs, with_stacked
from whalejax.capture.batch import TracedLeaf, aval_of, batch_leaves
from whalejax.capture.batch_independent_state import (
    BatchIndependentState,
    advances,
    held_back,
    left_alone,
)
from whalejax.capture.named_axes import (
    aligned,
    bound,
    constraint_notes,
    mesh_error_text,
    refuse_explicit_axes,
    traced_with_axes,
)
from whalejax.capture.passes.mixed_precision import left_wide, narrowed, wide_products
from whalejax.capture.passes.remat_pass import applicable, recomputed
from whalejax.capture.patterns.full_length import lengthened
from whalejax.capture.patterns.named_calls import (
    calls_attention,
    possible_calls,
    with_calls,
    with_logits,
)
from whalejax.capture.reported_values.combinations import (
    Reports,
    check_clear,
    check_keys,
    reports,
    undivided,
)
from whalejax.capture.reported_values.paired_traces import Trace
from whalejax.capture.rules.behaviour import Position, Value
from whalejax.capture.separability.proof import (
    LossInput,
    LossPrograms,
    Separability,
    known_inputs,
    prove,
)
from whalejax.capture.sorted_rows import holds_sort, rows_after, with_sorted_rows
from whalejax.capture.split_dims.rewrite import taken_apart
from whalejax.capture.table_reads import short_table_notes
from whalejax.capture.walk import FlatProgram, KnownRules, SortedRows, holds_tiles
from whalejax.jaxpr.fewer_rows import BatchRows
from whalejax.jaxpr.positions import equation_at
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import ALL, precision_words
from whalejax.planner.model.analysis import (
    analyse_graph,
    gathered_bytes,
    last_tokens_cut,
)
from whalejax.planner.model.graph import ATTENTION, Graph, Mark, Op
from whalejax.planner.sharding.fused_parameters import (
    fused_dimensions,
    merging_reshapes,
    picks,
)
from whalejax.planner.sharding.program_regions import precision_for, regions, ringed
from whalejax.user_code.ambient_mesh import tracing
from whalejax.user_code.annotations import parse_scope, recording
from whalejax.user_code.losses import check_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A traced loss: as plain data for the planner and as a jaxpr for lowering.

    Attributes:
        graph: Graph for the planner.
        jaxpr: Jaxpr of the flat function ``fn(*params, *rest, *batch, [rng])``, which
            returns ``(total, weight, *metrics, *new_rest)``; leaves in flatten order.
        adapter: The model that was traced.
        batch_tree: Structure of the batch.
        out_tree: Structure of ``(total, weight, metrics, new_rest)``.
        outputs: Tensor ids of the results of every equation, call-like ones included,
            by the equation's position; None for a scalar constant.
        results: Tensor ids of the results of the flat function.
        given: Tensor ids of the inputs of every checkpointed region, by its position.
        given_rules: Tensor ids of the inputs of every call with a derivative rule of
            its own, by its position.
        sorted_rows: Calls that sort rows across the batch, by position.
        batch_axes: Batch dimension of each batch leaf; None for a leaf without one.
        reader: Reader of other programs with the same inputs and results.
        apart: Function that returns how the reported values of micro-batches are
            combined.
        notes: Sentences on work that could not be counted.
        attention: (TaskGraph, ``"ring"`` or ``"gather"``) of attention in blocks.
        precisions: (TaskGraph, precision) pairs if only some compute in 16 bits.
        chunks: Number of chunks of tokens in which logits are computed.
        axes: Names of unbound axes that the loss uses; they stand for all samples.
        steady: State that changes once a step; the program passes it on unchanged.
        changing: Paths of non-trained leaves that change with each micro-batch.
        whole: Position and reason of each attention that cannot run in blocks.
        independence: Function that proves that parts of a batch compute the same as the
            whole batch. Its arguments are the number of samples of a part, of the whole
            batch, and of neighbours that stay together (None for as many as the program
            needs).
    """

    graph: Graph
    jaxpr: Any
    adapter: Adapter
    batch_tree: Any
    out_tree: Any
    outputs: dict[Position, tuple[Value, ...]]
    results: tuple[Value, ...]
    given: dict[Position, tuple[Value, ...]]
    given_rules: dict[Position, tuple[Value, ...]]
    sorted_rows: dict[Position, SortedRows]
    batch_axes: tuple[int | None, ...]
    reader: _Reader
    apart: Callable[[], Reports]
    notes: tuple[str, ...] = ()
    attention: tuple[tuple[str, str], ...] = ()
    whole: tuple[str, ...] = ()
    precisions: tuple[tuple[str, str], ...] = ()
    chunks: int = 1
    axes: tuple[str, ...] = ()
    steady: BatchIndependentState = BatchIndependentState()
    changing: tuple[str, ...] = ()
    independence: Callable[[int, int, int | None], Separability]

    @property
    def weights(self) -> tuple[bool, ...]:
        """Whether each input of the flat function is a weight, trained or not."""
        inputs = len(_compat.open_jaxpr(self.jaxpr)[0].invars)
        return tuple(t.kind == "param" for t in self.graph.tensors[:inputs])

    @property
    def frozen(self) -> frozenset[int]:
        """Indices of the non-trained leaves that are weights."""
        first = len(self.adapter.param_paths)
        return frozenset(i for i, own in enumerate(self.weights[first:]) if own)

    @property
    def wide_products(self) -> Counter[str]:
        """Number of float32 products by the reason why they cannot compute in 16 bits.

        The reason is empty for products that can. Products count if a gradient flows
        through them, or if they read weights.
        """
        weight = self.graph.weight_tensors()
        reads = {
            op.position
            for op in self.graph.ops
            if op.matmul is not None
            and (
                any(self.graph.tensors[t].differentiable for t in op.results)
                or any(weight[t] for t in op.operands)
            )
        }
        return Counter(why for at, why in wide_products(self.jaxpr) if at in reads)

    @property
    def float32_part(self) -> float:
        """Share of FLOPs in float32 products that could compute in 16 bits."""
        every = sum(op.flops * op.trip for op in self.graph.ops)
        return sum(op.flops * op.trip for op in self._free_float32) / max(1, every)

    @property
    def float32_line(self) -> str:
        """Source line of the largest of these products; empty without one."""
        free = self._free_float32
        widest = max(free, key=lambda op: op.flops * op.trip, default=None)
        if widest is None:
            return ""
        return _compat.line_text(equation_at(self.jaxpr, widest.position))

    @property
    def _free_float32(self) -> list[Op]:
        free = {at for at, why in wide_products(self.jaxpr) if not why}
        return [op for op in self.graph.ops if op.position in free]

    def with_precisions(self, precisions: Sequence[tuple[str, str]]) -> Captured:
        """Returns the same loss, with some TaskGraphs computing in 16 bits.

        Args:
            precisions: (TaskGraph, ``"f32"``, ``"bf16"`` or ``"f16"``) pairs, as in a
                plan.

        Returns:
            The loss; with an unchanged program if no TaskGraph computes in 16 bits.
        """
        chosen, graph = dict(precisions), analyse_graph(self.graph).graph
        kinds = [precision_for(g.name, chosen) for g in graph.task_graphs]
        where = {op.position: kinds[op.task_graph] for op in graph.ops}
        narrow = {at: kind for at, kind in where.items() if kind != "f32"}
        if not narrow:
            return self if not chosen else self._with_precisions(precisions)
        weights, first = [*self.weights], len(self.adapter.param_paths)
        for number, frozen in enumerate(self.adapter.frozen):
            weights[first + number] |= frozen
        result = self._with(narrowed(self.jaxpr, narrow, weights), self.attention)
        casts = len(result.graph.ops) > len(self.graph.ops)
        wide = left_wide(self.jaxpr, narrow)
        return result._with_precisions(precisions, casts=casts, wide=wide)

    def _with_precisions(
        self,
        precisions: Sequence[tuple[str, str]],
        *,
        casts: bool = False,
        wide: Mapping[str, int] | None = None,
    ) -> Captured:
        words, notes = ", ".join(precision_words(tuple(precisions))), [*self.notes]
        for where, count in (wide or {}).items():
            some = count_text(count, "product")
            stay = "stays" if count == 1 else "stay"
            notes.append(f"{words}: {some} {where} {stay} in float32")
        if not (wide or casts):
            notes.append(
                f"{words} has no effect: no product of float32 was found there"
            )
        return replace(self, precisions=tuple(precisions), notes=tuple(notes))

    def with_attention(self, chosen: Sequence[tuple[str, str]]) -> Captured:
        """Returns the same loss, with some attention in blocks.

        Args:
            chosen: (TaskGraph, ``"ring"`` or ``"gather"``) pairs, as in a plan.

        Returns:
            The loss. If no attention can run in blocks, ``whole`` has the reasons and
            the program is unchanged.
        """
        if "ring" not in dict(chosen).values():
            return self
        inputs = len(_compat.open_jaxpr(self.jaxpr)[0].invars)
        trained = [t.differentiable for t in self.graph.tensors[:inputs]]
        program, reasons = with_calls(self.jaxpr, trained)
        if not calls_attention(program):
            return replace(self, whole=reasons)
        attention = self._with(program, tuple(chosen))
        some = any(op.kind == ATTENTION for op in attention.graph.ops)
        return replace(attention if some else self, whole=reasons)

    def with_chunks(self, count: int) -> Captured:
        """Returns the same loss, with logits computed in chunks of tokens.

        Args:
            count: Number of chunks of a device's tokens; 1 changes nothing.

        Returns:
            The loss; this loss itself if no logits can be computed in chunks.
        """
        if count == 1:
            return self
        inputs = len(_compat.open_jaxpr(self.jaxpr)[0].invars)
        trained = [t.differentiable for t in self.graph.tensors[:inputs]]
        program = with_logits(self.jaxpr, trained)
        chunks = replace(self, chunks=count)._with(program, self.attention)
        return chunks if any(op.chunks > 1 for op in chunks.graph.ops) else self

    def _with(self, program: Any, attention: Sequence[tuple[str, str]]) -> Captured:
        rows = rows_after(self.reader.rows, self.jaxpr, program)
        reader = replace(self.reader, rows=rows)
        graph, walk, results = reader.read(
            program, attention=attention, chunks=self.chunks
        )
        return replace(
            self,
            reader=reader,
            # The loss is the same, so a plan for one program is valid for both.
            graph=replace(with_stacked(graph, walk), model_hash=self.graph.model_hash),
            jaxpr=program,
            outputs=walk.outputs,
            given=walk.given,
            given_rules=walk.given_rules,
            sorted_rows=walk.sorted_rows,
            results=results,
            attention=tuple(attention),
            notes=tuple(dict.fromkeys(walk.notes)),
        )

    def with_remat(self, remat: Sequence[tuple[str, str]]) -> Captured:
        """Returns the same loss, with remat of some parts in the backward pass.

        Args:
            remat: (TaskGraph, policy) pairs, as in a plan.
        """
        if not remat:
            return self
        # TaskGraphs without a mark are found only if remat names a TaskGraph.
        named = {name for name, _ in remat} - {ALL}
        graph = analyse_graph(self.graph).graph if named else self.graph
        result = regions(graph, dict(remat))
        where = applicable(self.jaxpr, result)
        if not where:
            return self
        return self._with(recomputed(self.jaxpr, where), self.attention)


@dataclass(frozen=True, slots=True)
class _Reader:
    adapter: Adapter
    leaves: Sequence[TracedLeaf]
    marks: Sequence[Mark]
    weighted: bool
    num_micro_batches: int
    rows: Mapping[str, BatchRows] = field(default_factory=dict)
    rules: KnownRules = field(default_factory=KnownRules)

    def read(
        self,
        program: Any,
        *,
        tiled: bool = False,
        attention: Sequence[tuple[str, str]] = (),
        chunks: int = 1,
    ) -> tuple[Graph, FlatProgram, tuple[Value, ...]]:
        """Returns a program as plain data.

        With ``tiled``, slices that cut a value into equal parts are read as one split.
        """
        if not attention:
            walk = FlatProgram(
                tiled=tiled,
                chunks=chunks,
                rows=self.rows,
                rules=self.rules,
            )
            return self._read(walk, program)
        # A first read makes one operation of each attention, and shows which can be so.
        every = FlatProgram(
            rings=lambda position: True, chunks=chunks, rows=self.rows, rules=self.rules
        )
        read = self._read(every, program)
        where = ringed(read[0], dict(attention))
        if all(op.position in where for op in read[0].ops if op.kind == ATTENTION):
            return read
        walk = FlatProgram(
            rings=where.__contains__, chunks=chunks, rows=self.rows, rules=self.rules
        )
        return self._read(walk, program)

    def _read(
        self, walk: FlatProgram, program: Any
    ) -> tuple[Graph, FlatProgram, tuple[Value, ...]]:
        results = walk.run(program)
        loss = loss_id(results)
        body, _ = _compat.open_jaxpr(program)
        added = advances(self.adapter.rest, body, len(self.adapter.param_paths))
        name_inputs(walk, self.adapter, self.leaves, [more == 0 for more in added])
        graph = graph_of(
            walk,
            loss,
            self.leaves,
            self.num_micro_batches,
            self.weighted,
            self.marks,
            results[1:],
        )
        graph, notes = aligned(graph, self.adapter.short)
        walk.notes += [*notes, *constraint_notes(program)]
        walk.notes += short_table_notes(program, self.adapter.param_paths)
        return graph, walk, results


_Read = tuple[Graph, FlatProgram, tuple[Value, ...]]
"""Result of reading a program."""


def _rewritten(jaxpr: Any, reader: _Reader, read: _Read) -> tuple[Any, _Read]:
    jaxpr, (graph, walk, results) = _lengthened(jaxpr, reader, read)
    if picks(graph):
        whole, plain = jaxpr, graph

        def tiled(program: Any) -> Graph:
            if program is whole and not holds_tiles(program):
                return plain  # This program was read before, and has no tiles.
            return reader.read(program, tiled=True)[0]

        apart = _taken_apart(jaxpr, tiled)
        if apart is not jaxpr:
            jaxpr = apart
            graph, walk, results = reader.read(jaxpr)
    merges, hiding = merging_reshapes(graph)
    if merges and hiding:
        apart = taken_apart(jaxpr, {}, merges)
        read = reader.read(apart)
        fewer = merging_reshapes(read[0])[1] < hiding
        if fewer and _keeps_calls(jaxpr, apart, graph):
            jaxpr, (graph, walk, results) = apart, read
    return jaxpr, (graph, walk, results)


def capture(
    adapter: Adapter,
    batch: Any,
    rng: Any = None,
    *,
    num_micro_batches: int = 1,
    batch_axes: Any = 0,
) -> Captured:
    """Traces a loss and describes it as plain data.

    Args:
        adapter: The model and its loss.
        batch: The GLOBAL batch: arrays, or objects with a shape and a dtype.
        rng: A random key like the one that training will use; any key by default.
        num_micro_batches: Number of micro-batches into which the batch is cut. One is
            traced.
        batch_axes: Batch dimension of all leaves, or a pytree with one for each leaf.
            None stands for a leaf without samples.

    Returns:
        Graph, jaxpr, and the data that lowering needs to call it.

    Raises:
        WhaleError: The loss is not a scalar or depends on no parameter; leaves of the
            batch disagree or do not divide; annotations nest in a forbidden way; or the
            loss fails for a micro-batch but not for the whole batch. An error for the
            whole batch passes unchanged.
    """
    leaves, batch_tree = batch_leaves(batch, batch_axes, num_micro_batches)
    size = next(x.micro_shape[x.axis] for x in leaves if x.axis is not None)
    flat = _FlatLoss(adapter, batch_tree, size)
    arguments = [*flat.model_avals, *(leaf.aval for leaf in leaves)]
    arguments += [_key_aval(rng)] if adapter.takes_rng else []
    given = adapter, batch, rng, batch_axes, num_micro_batches
    with recording() as record, _of_a_part(*given):
        written, axes = _traced(flat, arguments, _part(size, num_micro_batches))
    jaxpr = _compat.without_dead_equations(written, _is_staged)
    unread = _unread_marks(record.marks, written, jaxpr)
    jaxpr, steady, changing = held_back(
        jaxpr,
        adapter.rest,
        len(adapter.param_paths),
        size,
        lambda: _traced_twice_as_large(adapter, leaves, batch_tree, arguments, axes),
    )
    marks = [mark for mark in record.marks if mark not in unread]
    reader = _Reader(adapter, leaves, marks, flat.weighted, num_micro_batches)
    read = reader.read(jaxpr)
    again = functools.partial(_with_samples, flat, reader, arguments, axes)
    out_tree, apart = _reported_values(_traced_as(jaxpr, read), flat, again, changing)
    programs = _loss_programs(flat, reader, arguments, axes, changing)
    traced = functools.partial(_program_of, flat, leaves, arguments, axes)
    jaxpr, rows = _sorting_rows(jaxpr, traced, reader, steady, programs.inputs)
    if rows:
        reader = replace(reader, rows=rows)
        read = reader.read(jaxpr)
    jaxpr, (graph, walk, results) = _rewritten(jaxpr, reader, read)
    return Captured(
        graph=with_stacked(graph, walk),
        jaxpr=jaxpr,
        adapter=adapter,
        batch_tree=batch_tree,
        out_tree=out_tree,
        outputs=walk.outputs,
        given=walk.given,
        given_rules=walk.given_rules,
        sorted_rows=walk.sorted_rows,
        results=results,
        batch_axes=tuple(leaf.axis for leaf in leaves),
        reader=reader,
        apart=apart,
        notes=tuple(dict.fromkeys([*walk.notes, *map(_unread_note, unread)])),
        axes=axes,
        steady=steady,
        changing=tuple(adapter.rest_paths[i] for i in changing),
        independence=functools.cache(functools.partial(prove, programs)),
    )


def _sorting_rows(
    jaxpr: Any,
    traced: Callable[[int], Any],
    reader: _Reader,
    steady: BatchIndependentState,
    inputs: Sequence[LossInput],
) -> tuple[Any, dict[str, BatchRows]]:
    size = next(x.micro_shape[x.axis] for x in reader.leaves if x.axis is not None)
    if size == 1 or not holds_sort(jaxpr):
        return jaxpr, {}
    try:
        with warnings.catch_warnings():  # Warnings about this size would only confuse.
            warnings.simplefilter("ignore")
            other = traced(2 * size)
    except Exception:  # The loss does not accept this number of samples.
        return jaxpr, {}
    adapter = reader.adapter
    first, count = len(adapter.param_paths), len(adapter.rest_paths)
    other = left_alone(other, steady.leaves, first, count)
    known = known_inputs(inputs, (jaxpr, other), 0.5)
    return with_sorted_rows(jaxpr, other, known, (size, 2 * size))


def _loss_programs(
    flat: _FlatLoss,
    reader: _Reader,
    arguments: Sequence[Any],
    axes: Sequence[str],
    changing: Sequence[int],
) -> LossPrograms:
    adapter, leaves = flat.adapter, reader.leaves
    first = len(jax.tree.leaves(flat.out_tree.unflatten(range(flat.num_results))[:3]))
    places = [0, 1, *(first + i for i in changing)]

    @functools.cache
    def at(size: int) -> Any:
        program = _program_of(flat, leaves, arguments, axes, size)
        return _compat.needed_closed(program, places)

    rest = [
        # Step and micro-batch are folded into the model's keys as into the loss's rng.
        LossInput(
            key="rng" if is_key(leaf) else "",
            state=adapter.rest_paths[i] if i in changing else "",
        )
        for i, leaf in enumerate(jax.tree.leaves(adapter.rest))
    ]
    batch = [
        LossInput(axis=leaf.axis)
        if leaf.axis is not None or not _compat.is_key_dtype(leaf.dtype)
        else LossInput(key="foreign")
        for leaf in leaves
    ]
    params = [LossInput()] * len(adapter.param_paths)
    rng = [LossInput(key="rng")] * adapter.takes_rng
    return LossPrograms(
        at=at,
        inputs=(*params, *rest, *batch, *rng),
        state=tuple(adapter.rest_paths[i] for i in changing),
        weighted=reader.weighted,
    )


def _program_of(
    flat: _FlatLoss,
    leaves: Sequence[TracedLeaf],
    arguments: Sequence[Any],
    axes: Sequence[str],
    size: int,
) -> Any:
    other = [replace(leaf, micro_shape=leaf.sized(size)) for leaf in leaves]
    first = len(flat.model_avals)
    given = [*flat.model_avals, *(leaf.aval for leaf in other)]
    given += arguments[first + len(other) :]
    with recording():
        again = bound(_FlatLoss(flat.adapter, flat.batch_tree, size), axes)
        return tracing(_trace)(again, given)


def _lengthened(jaxpr: Any, reader: _Reader, read: _Read) -> tuple[Any, _Read]:
    cuts = last_tokens_cut(read[0])
    if cuts:
        program = lengthened(jaxpr, cuts)
        other = reader.read(program)
        if gathered_bytes(other[0]) < gathered_bytes(read[0]):
            return program, other
    return jaxpr, read


def _reported_values(
    trace: Trace,
    flat: _FlatLoss,
    again: Callable[[int], Trace],
    changing: Sequence[int],
) -> tuple[Any, Callable[[], Reports]]:
    """Returns the tree of the loss's results, and how its reported values are combined.

    The second is a function. It traces the loss once more, so it is called here only if
    there are several micro-batches. Values that cannot be combined are refused then.
    """
    check_keys(trace, flat.out_tree)
    first, rest = len(flat.adapter.param_paths), jax.tree.leaves(flat.adapter.rest)
    noise = {first + i for i in changing}
    noise |= {first + i for i, leaf in enumerate(rest) if is_key(leaf)}
    noise |= {t.id for t in trace.graph.tensors if t.kind == "rng"}
    apart = functools.cache(
        functools.partial(reports, trace, flat.out_tree, again, noise)
    )
    if trace.graph.num_micro_batches == 1:
        return undivided(flat.out_tree), apart
    check_clear(apart().unclear, flat.size)
    return apart().out_tree, apart


def _with_samples(
    flat: _FlatLoss,
    reader: _Reader,
    arguments: Sequence[Any],
    axes: Sequence[str],
    size: int,
) -> Trace:
    other = [replace(leaf, micro_shape=leaf.sized(size)) for leaf in reader.leaves]
    program = _program_of(flat, reader.leaves, arguments, axes, size)
    return _traced_as(program, replace(reader, leaves=other).read(program))


def _traced_as(program: Any, read: _Read) -> Trace:
    graph, walk, results = read
    return Trace(program=program, graph=graph, walk=walk, results=results)


def _keeps_calls(jaxpr: Any, other: Any, graph: Graph) -> bool:
    inputs = len(_compat.open_jaxpr(jaxpr)[0].invars)
    trained = [t.differentiable for t in graph.tensors[:inputs]]
    before, after = (possible_calls(x, trained) for x in (jaxpr, other))
    return all(b <= a for b, a in zip(before, after, strict=True))


def _taken_apart(jaxpr: Any, graph_of_program: Callable[[Any], Graph]) -> Any:
    """Returns a program with fused dimensions cut, if their parts become separate."""
    fused = fused_dimensions(graph_of_program(jaxpr))
    while fused:
        apart = taken_apart(jaxpr, fused)
        still = fused_dimensions(graph_of_program(apart))
        helped = {n: cuts for n, cuts in fused.items() if n not in still}
        if len(helped) == len(fused):
            return apart
        fused = helped
    return jaxpr


def _trace(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Returns the jaxpr of a loss without values that no result needs.

    XLA removes them too.
    """
    traced = _compat.trace(function, arguments)
    return _compat.without_dead_equations(traced, _is_staged)


@functools.lru_cache(maxsize=2**12)
def _is_staged(scope: str) -> bool:
    """Returns whether a scope is in a stage; unneeded equations there are kept.

    A stage that no result needs can then be named in an error.
    """
    marks = map(parse_scope, scope.split("/"))
    return any(mark is not None and mark.kind == "stage" for mark in marks)


def _unread_marks(marks: Sequence[Mark], written: Any, needed: Any) -> list[Mark]:
    if needed is written or not marks:
        return []
    covering, kept = (
        {parse_scope(x) for text in _compat.scopes_in(one) for x in text.split("/")}
        for one in (written, needed)
    )
    return [mark for mark in marks if mark in covering - kept]


def _unread_note(mark: Mark) -> str:
    return f"{mark} covers only values that no result of the loss needs: no effect"


def _traced(
    flat: _FlatLoss, arguments: list[Any], part: str
) -> tuple[Any, tuple[str, ...]]:
    try:
        jaxpr, axes = traced_with_axes(tracing(_compat.trace), flat, arguments)
    except Exception as error:
        message = mesh_error_text(error)
        if message:
            raise WhaleError(message) from error
        if isinstance(error, VALUE_ERRORS):
            raise WhaleError(_value_read(error, part)) from error
        if not isinstance(error, WhaleError):
            error.add_note(f"whalejax: {TRACED}{part}")
        raise
    refuse_explicit_axes(jaxpr)
    return jaxpr, axes


VALUE_ERRORS: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors that JAX raises where a program reads the value of a traced array."""


def _value_read(error: Exception, part: str) -> str:
    ours = Path(__file__).parents[1]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(ours)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = (frames[-1].line or "") if frames else ""
    line = f": {text:.80}{'…' if len(text) > 80 else ''}" if text else ""
    return (
        f"loss_fn reads the value of an array{where}{part}{line}. It is traced with "
        "shapes alone, as in jax.jit, so float(), bool(), int(), if, .item() and numpy "
        "functions fail. Use jnp functions, jnp.where or jax.lax.cond"
    )


@contextlib.contextmanager
def _of_a_part(
    adapter: Adapter, batch: Any, rng: Any, batch_axes: Any, num_micro_batches: int
) -> Iterator[None]:
    try:
        yield
    except WhaleError:
        raise
    except Exception as error:
        if num_micro_batches == 1:
            raise
        size = _samples_taken(adapter, batch, rng, batch_axes)
        if not size:
            raise
        first = str(error).splitlines()[0] if str(error) else ""
        raise WhaleError(
            f"num_micro_batches={num_micro_batches}: the loss accepts the batch of "
            f"{count_text(size, 'sample')}, but no micro-batch of "
            f"{size // num_micro_batches}: {type(error).__name__}: {first} "
            f"({_compat.raised_at(error)}). Use fewer micro-batches, so that each has "
            "all samples that the loss takes together, with group_size= for "
            "neighbouring samples; or num_micro_batches=1"
        ) from error


def _samples_taken(adapter: Adapter, batch: Any, rng: Any, batch_axes: Any) -> int:
    try:
        return capture(adapter, batch, rng, batch_axes=batch_axes).graph.batch_size
    except Exception:
        return 0


def _part(size: int, count: int) -> str:
    if count == 1:
        return ""
    return (
        f" for a micro-batch of {size} of the batch's "
        f"{count_text(size * count, 'sample')}"
    )


def _traced_twice_as_large(
    adapter: Adapter,
    leaves: Sequence[TracedLeaf],
    batch_tree: Any,
    arguments: list[Any],
    axes: Sequence[str],
) -> Any:
    larger = [leaf.with_more_samples(2) for leaf in leaves]
    size = next(x.micro_shape[x.axis] for x in larger if x.axis is not None)
    first = len(adapter.param_paths) + len(adapter.rest_paths)
    given = [*arguments[:first], *(x.aval for x in larger)]
    given += arguments[first + len(leaves) :]
    with recording():
        flat = bound(_FlatLoss(adapter, batch_tree, size), axes)
        return tracing(_trace)(flat, given)


class _FlatLoss:
    def __init__(self, adapter: Adapter, batch_tree: Any, size: int) -> None:
        self.adapter = adapter
        self.size = size
        self.batch_tree = batch_tree
        self.out_tree: Any = None
        self.weighted = False
        self.num_results = 0
        self._params_tree: Any
        self._rest_tree: Any
        params, self._params_tree = jax.tree.flatten(adapter.params)
        rest, self._rest_tree = jax.tree.flatten(adapter.rest)
        self.model_avals = [aval_of(leaf) for leaf in (*params, *rest)]

    def __call__(self, *leaves: Any) -> list[Any]:
        first = self._params_tree.num_leaves
        second = first + self._rest_tree.num_leaves
        third = second + self.batch_tree.num_leaves
        result = self.adapter.loss(
            self._params_tree.unflatten(leaves[:first]),
            self._rest_tree.unflatten(leaves[first:second]),
            self.batch_tree.unflatten(leaves[second:third]),
            leaves[third] if self.adapter.takes_rng else None,
        )
        check_metrics(result.metrics, self.size)
        self.weighted = result.weighted
        results, self.out_tree = jax.tree.flatten(
            (result.total, result.weight, dict(result.metrics), result.rest)
        )
        self.num_results = len(results)
        return results


def _key_aval(rng: Any) -> Any:
    if rng is None:
        return jax.eval_shape(lambda: jax.random.key(0))
    return _compat.abstract(tuple(rng.shape), rng.dtype)
