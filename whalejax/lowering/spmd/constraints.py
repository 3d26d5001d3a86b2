"""Finds which values a plan constrains, equation by equation.

The compiler propagates shardings from constrained values to others. It follows the plan
only if three kinds of values are constrained: results of products, lookups and other
operations that mix dimensions; values before and after each reshard; and every
parameter where it is used. Positions are those of capture, so the evaluator can match
equations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from whalejax.jaxpr.fewer_rows import BatchRows
from whalejax.lowering.spmd.gather_scatter import INDEXED
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.dimensions import Layout
from whalejax.planner.model.graph import ATTENTION, CONVOLUTION, LOOPS, Graph, Op
from whalejax.planner.pipeline.layer_stack import StackedLayers, of_stage
from whalejax.planner.sharding.layout import Spec, Table, spec_of
from whalejax.planner.sharding.offload_candidates import waiting_values


if TYPE_CHECKING:
    from whalejax.capture import Captured
    from whalejax.planner.plan.plan import Plan


Position = tuple[int, ...]
Outputs = Mapping[Position, tuple[int | None, ...]]
Waiting = Mapping[Position, frozenset[int]]
SharedRows = tuple[BatchRows, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Layout constraints for the evaluation of a traced loss.

    Attributes:
        results: Specs to which each result is constrained in turn, by (position,
            result).
        operands: Specs to which each operand is constrained in turn, by (position,
            operand).
        gathers: Specs of parameters that are stored in more shards than used, from
            stored to used, by (position, operand).
        regathers: Positions that gather parameters again for the backward pass.
        rings: Specs of the operands of blockwise attention, by position.
        lookups: Specs of the operands of lookups, scatters, sorts, convolutions and
            poolings, by position.
        sorted_rows: Rows, and axes that shard the samples, of calls that sort rows
            across the batch, by position.
        chunks: Number of chunks of a device's tokens in calls that compute logits.
        waiting: Values that are offloaded until the backward pass. At the position of a
            checkpointed region it has numbers of inputs, at the position of an equation
            inside one it has numbers of results.
        carried: Specs of the layers' outputs for the next stage; empty without stages.
        flows: Whether a gradient flows through each operand, by position of a call with
            its own derivative rule.
    """

    results: Mapping[tuple[Position, int], tuple[Spec, ...]] = field(
        default_factory=dict
    )
    operands: Mapping[tuple[Position, int], tuple[Spec, ...]] = field(
        default_factory=dict
    )
    gathers: Mapping[tuple[Position, int], tuple[Spec, ...]] = field(
        default_factory=dict
    )
    regathers: frozenset[Position] = frozenset()
    rings: Mapping[Position, tuple[Spec, ...]] = field(default_factory=dict)
    lookups: Mapping[Position, tuple[Spec, ...]] = field(default_factory=dict)
    sorted_rows: Mapping[Position, SharedRows] = field(default_factory=dict)
    chunks: int = 1
    waiting: Waiting = field(default_factory=dict)
    carried: tuple[Spec, ...] = ()
    flows: Mapping[Position, tuple[bool, ...]] = field(default_factory=dict)


def tables_of(plan: Plan, analysed: GraphAnalysis) -> dict[int, Table]:
    """Returns a plan's compute tables in terms of a new trace, by TaskGraph index.

    Roles are matched by name. A role that the trace lacks shards nothing.
    """
    by_name = {region.task_graph: region for region in plan.compute}
    fallback = plan.compute[0]
    tables: dict[int, Table] = {}
    for task_graph in analysed.graph.task_graphs:
        region = by_name.get(task_graph.name, fallback)
        table: dict[str, tuple[int, ...]] = {}
        for axis, names in region.axes:
            roles = [analysed.dims.find(name) for name in names]
            table[axis] = tuple(r.index for r in roles if r is not None)
        tables[task_graph.index] = table
    return tables


class _Collector:
    def __init__(self, plan: Plan, analysed: GraphAnalysis, captured: Captured) -> None:
        self.outputs = captured.outputs
        self.calls = captured.sorted_rows
        self.graph = analysed.graph
        self.dims = analysed.dims
        self.mesh = plan.axis_sizes
        self.tables = tables_of(plan, analysed)
        self.weight = self.graph.weight_tensors()
        self.stored = self._stored(plan)
        self.results: dict[tuple[Position, int], tuple[Spec, ...]] = {}
        self.operands: dict[tuple[Position, int], tuple[Spec, ...]] = {}
        self.gathers: dict[tuple[Position, int], tuple[Spec, ...]] = {}
        self.regathers: set[Position] = set()
        self.chunks = plan.loss_chunks
        self.read: dict[str, dict[Position, tuple[Spec, ...]]] = defaultdict(dict)
        self.home: dict[int, int] = {}
        self.made: dict[int, tuple[Position, int]] = {}

    def _stored(self, plan: Plan) -> dict[int, dict[int, tuple[str, ...]]]:
        values: dict[int, dict[int, tuple[str, ...]]] = {}
        leaves = {leaf.path: leaf for leaf in plan.leaves}
        for t in self.graph.params:
            spec = of_stage(leaves[t.path].param_spec)
            layout = self.dims.layouts[t.id]
            values[t.id] = {
                atoms[0]: axes
                for atoms, axes in zip(layout, spec, strict=True)
                if atoms and axes
            }
        for op in self.graph.ops:
            for result in op.results:
                if self.weight[result]:
                    known = [o for o in op.operands if o in values]
                    # The operand with the most axes decides, such as a kernel, which
                    # has more than its scale.
                    source = max(known, key=lambda o: len(values[o]), default=None)
                    values[result] = {} if source is None else values[source]
        return values

    def collect(self) -> Constraints:
        seen: set[Position] = set()
        for index, op in enumerate(self.graph.ops):
            if op.kind in LOOPS:
                self._pass_homes(op.operands, op.results, op.task_graph)
                continue
            table = self.tables[op.task_graph]
            if self._in_sorted_rows(op.position):
                self._of_sorted_rows(index, table)
                continue
            # One equation may be two operations; the first has the operands.
            if op.position not in seen:
                for slot, tensor in enumerate(op.operands):
                    self._operand(index, slot, tensor, table)
            seen.add(op.position)
            slides = op.kind == CONVOLUTION or bool(op.windows)
            by_part = op.kind in INDEXED or slides
            kind = "lookup" if by_part else op.kind
            if kind in ("lookup", ATTENTION):
                self.read[kind][op.position] = tuple(
                    self._read(index, slot, tensor, table)
                    for slot, tensor in enumerate(op.operands)
                )
            produced = self.outputs.get(op.position, ())
            for tensor in op.results:
                self.home[tensor] = op.task_graph
                if op.elementwise and tensor in produced:
                    self.made[tensor] = op.position, produced.index(tensor)
                mixes = not (op.elementwise or op.reshape)
                if mixes and not self.weight[tensor] and tensor in produced:
                    slot = produced.index(tensor)
                    final = self._spec(tensor, table)
                    place = (index, len(op.operands) + op.results.index(tensor))
                    if place in self.dims.whole:
                        made = self._read(*place, tensor, table)
                        way = tuple(dict.fromkeys((made, final)))
                    else:
                        way = _from_whole(op, final)
                    self.results[op.position, slot] = way
        return Constraints(
            results=self.results,
            operands=self.operands,
            gathers=self.gathers,
            regathers=frozenset(self.regathers),
            rings=self.read[ATTENTION],
            lookups=self.read["lookup"],
            sorted_rows=self._shared_rows(),
            chunks=self.chunks,
        )

    def _in_sorted_rows(self, position: Position) -> bool:
        return any(position[: len(call)] == call for call in self.calls)

    def _of_sorted_rows(self, index: int, table: Table) -> None:
        """Collects the constraints of weights alone, as devices have their own rows."""
        op = self.graph.ops[index]
        for slot, tensor in enumerate(op.operands):
            if self.weight[tensor]:
                self._operand(index, slot, tensor, table)
        for tensor in op.results:
            self.home[tensor] = op.task_graph

    def _shared_rows(self) -> dict[Position, SharedRows]:
        """Returns the calls in which all operations shard the rows in the same way."""
        shared_rows = {}
        for position, call in self.calls.items():
            fronts = {
                self._spec(t, self.tables[self.home[t]])[0]
                for t in call.tensors
                if t in self.home
            }
            if len(fronts) == 1:
                (axes,) = fronts
                if axes:
                    shared_rows[position] = call.rows, axes
        return shared_rows

    def carry_specs(self) -> tuple[Spec, ...]:
        return tuple(
            self._spec(t, self.tables[self.home.get(t, 0)])
            for t in StackedLayers.of(self.graph).carried
        )

    def _pass_homes(
        self, operands: tuple[int, ...], results: tuple[int, ...], task_graph: int
    ) -> None:
        for tensor in (*operands, *results):
            self.home.setdefault(tensor, task_graph)

    def _spec(self, tensor: int, table: Table) -> Spec:
        layout, sizes = self.dims.layouts[tensor], self.dims.sizes[tensor]
        return spec_of(layout, sizes, table, self.mesh)

    def _read(self, index: int, slot: int, tensor: int, table: Table) -> Spec:
        layout = self.dims.seen.get((index, slot), self.dims.layouts[tensor])
        return spec_of(layout, self.dims.sizes[tensor], table, self.mesh)

    def _operand(self, index: int, slot: int, tensor: int, table: Table) -> None:
        op = self.graph.ops[index]
        key = (op.position, slot)
        if self.weight[tensor]:
            if not all(self.weight[t] for t in op.results):
                place = (index, slot)
                layout = self.dims.seen[place] if place in self.dims.whole else None
                self._gather(op, key, tensor, table, layout)
            return
        seen = self.dims.seen.get((index, slot))
        home = self.home.setdefault(tensor, op.task_graph)
        if seen is None and home == op.task_graph:
            return
        before = self._spec(tensor, self.tables[home])
        after = self._read(index, slot, tensor, table)
        if before != after:
            self.operands[key] = _reshard_steps(before, after)
            if tensor in self.made:
                # Without this the compiler would give other readers this reader's spec.
                self.results.setdefault(self.made[tensor], (before,))

    def _gather(
        self,
        op: Op,
        key: tuple[Position, int],
        tensor: int,
        table: Table,
        read: Layout | None = None,
    ) -> None:
        layout = self.dims.layouts[tensor]
        if not layout:
            return
        used = spec_of(read or layout, self.dims.sizes[tensor], table, self.mesh)
        by_role = self.stored.get(tensor, {})
        # The shards of a fused dimension may not divide the first part of it.
        axes = [by_role.get(atoms[0], ()) if atoms else () for atoms in layout]
        parts = [math.prod(self.mesh[a] for a in several) for several in axes]
        sizes = self.dims.sizes[tensor]
        stored = tuple(
            several if size and size[0] % count == 0 else ()
            for several, count, size in zip(axes, parts, sizes, strict=True)
        )
        if stored != used:
            self.gathers[key] = _reshard_steps(stored, used)
            if op.regathers:
                self.regathers.add(op.position)


def layouts_of(
    plan: Plan, analysed: GraphAnalysis, tensors: Sequence[int]
) -> dict[int, Spec]:
    """Returns the specs of values where they are computed, or read first.

    Args:
        plan: Plan of the model.
        analysed: Analysis of a trace of the model.
        tensors: Ids of the values.
    """
    graph, dims = analysed.graph, analysed.dims
    tables = tables_of(plan, analysed)
    homes = graph.homes()
    return {
        t: spec_of(
            dims.layouts[t], dims.sizes[t], tables[homes.get(t, 0)], plan.axis_sizes
        )
        for t in tensors
    }


def _reshard_steps(before: Spec, after: Spec) -> tuple[Spec, ...]:
    """Returns the specs of a reshard, in steps that the compiler can do efficiently.

    The first step gathers axes that the target does not use, the second moves axes to
    other dimensions, the third shards over further axes. In one step the compiler would
    replicate the full array, with a warning.
    """
    path = [before, _only(before, after), _only(after, before), after]
    return tuple(spec for i, spec in enumerate(path) if i == 0 or spec != path[i - 1])


def _only(spec: Spec, other: Spec) -> Spec:
    kept = {axis for axes in other for axis in axes}
    return tuple(tuple(axis for axis in axes if axis in kept) for axes in spec)


def _from_whole(op: Op, final: Spec) -> tuple[Spec, ...]:
    """Returns the specs of a result; that of a slice is sharded after the slice.

    Otherwise the compiler would shard the input of the slice unevenly, and exchange its
    edges.
    """
    if op.kind not in ("slice", "dynamic_slice"):
        return (final,)
    own = len(op.operands)
    tied = {dim for f in op.factors for slot, dim in f.members if slot == own}
    born = tuple(axes if dim in tied else () for dim, axes in enumerate(final))
    return (born, final) if born != final else (final,)


def _waiting(graph: Graph, outputs: Outputs, given: Outputs) -> Waiting:
    moves = waiting_values(graph).keys()
    kept = {t for op in graph.ops if op.kept for t in op.results} & moves
    waiting = {position: _among(tensors, moves) for position, tensors in given.items()}
    for op in graph.ops:
        if op.kept and kept.intersection(op.results):
            waiting[op.position] = _among(outputs[op.position], kept)
    return waiting


def _among(tensors: Sequence[int | None], wanted: Set[int]) -> frozenset[int]:
    return frozenset(place for place, t in enumerate(tensors) if t in wanted)


def _flows(captured: Captured) -> dict[Position, tuple[bool, ...]]:
    tensors = captured.graph.tensors
    return {
        position: tuple(t is not None and tensors[t].differentiable for t in given)
        for position, given in captured.given_rules.items()
    }


def constraints_of(
    plan: Plan, analysed: GraphAnalysis, captured: Captured
) -> Constraints:
    """Returns the constraints that make a traced loss follow a plan.

    Args:
        plan: Plan of the model.
        analysed: Analysis of the traced loss.
        captured: Traced loss for which the plan was made.
    """
    collector = _Collector(plan, analysed, captured)
    constraints = replace(collector.collect(), flows=_flows(captured))
    if plan.stages is not None:
        constraints = replace(constraints, carried=collector.carry_specs())
    if "activations" not in plan.offload:
        return constraints
    waiting = _waiting(analysed.graph, captured.outputs, captured.given)
    return replace(constraints, waiting=waiting)
