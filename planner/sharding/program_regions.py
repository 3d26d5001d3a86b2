"""Finds the parts of a program that options change, by TaskGraph.

- Precision: some TaskGraphs compute in 16 bits, the others in the model's own dtypes.
  The captured program has the dtype in which each parameter is read. This dtype sets
  the bytes that are gathered and stored.
- Attention in blocks (ring): keys and values go round a ring of devices. One block of
  scores is in memory at a time, and the backward pass recomputes it. Other attention
  gathers keys and values of a sharded sequence, with all scores of a device's rows in
  memory.
- Remat: a region is a run of equations of one TaskGraph in one repeated layer, inside
  one ``jax.checkpoint``. Equations with the policy ``none``, and equations that the
  user has wrapped in ``jax.checkpoint``, are in no region.

Of the remat policies, ``none`` recomputes nothing. ``dots`` saves results of products
with weights. ``named`` and ``named:a,b`` save values that the model names. ``full``
saves only the inputs of a region.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.errors import Problems
from whalejax.planner.cost_terms import ALL, Chosen
from whalejax.planner.model.analysis import analyse_graph, check_task_graphs
from whalejax.planner.model.dimensions import roles_of
from whalejax.planner.model.graph import (
    ATTENTION,
    LOOPS,
    Graph,
    Op,
    Tensor,
    makes_weights,
)
from whalejax.planner.model.repeated_layers import layer_starts, stacked_loop
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.step_options import REMAT_POLICIES, named_in


def precision_for(task_graph: str, precisions: Mapping[str, str]) -> str:
    """Returns the precision of a TaskGraph: its own, or else that of ``"*"``.

    >>> precision_for("split", {"*": "bf16", "replicate": "f32"})
    'bf16'
    """
    return precisions.get(task_graph, precisions.get(ALL, "f32"))


def checked_precisions(asked: Mapping[str, str], graph: Graph) -> Chosen:
    """Returns the user's choices as (TaskGraph, precision) pairs.

    Args:
        asked: Precision by name of a TaskGraph; ``"*"`` stands for all others.
        graph: Captured loss.

    Returns:
        Pairs with precisions other than ``f32``, and with exceptions from ``"*"``.

    Raises:
        PlanError: A precision or TaskGraph does not exist; lists all.
    """
    problems = Problems("precision", PlanError)
    given = dict(asked)
    check_task_graphs(given, graph, problems)
    for text in dict.fromkeys(repr(p) for p in given.values() if p not in PRECISIONS):
        problems.add(
            f"{text:.60} is not a precision; expected one of {', '.join(PRECISIONS)}"
        )
    problems.raise_if_any()
    rest = given.pop(ALL, "f32")
    kept = [(name, precision) for name, precision in given.items() if precision != rest]
    return (*kept, *([(ALL, rest)] if rest != "f32" else []))


def read_bytes(graph: Graph, weight: Sequence[bool]) -> dict[int, float]:
    """Returns parameters' bytes in the widest dtype as read, over their stored bytes.

    Args:
        graph: Captured loss.
        weight: Whether each tensor depends on parameters alone.

    Returns:
        Ratio by tensor id; above 1 for quantised weights.
    """
    widest: dict[int, float] = {}
    for op in reversed(graph.ops):
        if op.kind in LOOPS and not op.results:
            continue  # The operation ties dimensions and reads nothing.
        passed = makes_weights(op, weight)
        for t in {t for t in op.operands if weight[t]}:
            own = _itemsize(graph.tensors[t])
            if passed:
                own = max((widest.get(r, 0.0) for r in op.results), default=0.0)
            widest[t] = max(widest.get(t, 0.0), own)
    return {t.id: widest.get(t.id, 0.0) / _itemsize(t) or 1.0 for t in graph.params}


def _itemsize(tensor: Tensor) -> float:
    return tensor.nbytes / max(1, math.prod(tensor.shape)) or 1.0


KINDS = ("gather", "ring")
"""Kinds of attention: as the model computes it, or in blocks."""


def checked_attention(
    asked: str | Mapping[str, str] | None, graph: Graph
) -> Chosen | None:
    """Returns the user's choices as (TaskGraph, kind) pairs; None without choices.

    Args:
        asked: Kind for all TaskGraphs, or kinds by name of a TaskGraph.
        graph: Captured loss.

    Raises:
        PlanError: A kind or TaskGraph does not exist; lists all.
    """
    if asked is None:
        return None
    problems = Problems("attention", PlanError)
    if not isinstance(asked, str | Mapping):
        problems.add(f"{asked!r:.60} is neither a kind nor one for each TaskGraph")
        asked = {}
    given = {ALL: asked} if isinstance(asked, str) else dict(asked)
    check_task_graphs(given, graph, problems)
    for kind in given.values():
        if kind not in KINDS:
            problems.add(
                f"{kind!r:.60} is not a kind; expected one of {', '.join(KINDS)}"
            )
    problems.raise_if_any()
    rest = given.pop(ALL, "gather")
    kept = [(name, kind) for name, kind in given.items() if kind != rest]
    return (*kept, *([(ALL, rest)] if rest != "gather" else []))


def check_rings(
    graph: Graph,
    attention: Chosen,
    reasons: Sequence[str],
    everywhere: Callable[[], Graph],
) -> None:
    """Refuses a request for attention in blocks if no attention can run so.

    Args:
        graph: Loss with the requested attention in blocks, where that is possible.
        attention: Choices of the user.
        reasons: Reasons why other attention cannot run in blocks.
        everywhere: Function that returns the loss with all possible attention in
            blocks.

    Raises:
        PlanError: No attention runs in blocks.
    """
    if "ring" not in dict(attention).values():
        return
    if any(op.kind == ATTENTION for op in graph.ops):
        return
    ops, regions = everywhere().ops, graph.task_graphs
    where = {regions[op.task_graph].name for op in ops if op.kind == ATTENTION}
    if where:
        asked = ", ".join(name for name, kind in attention if kind == "ring")
        raise PlanError(
            f"attention: ring is requested for {asked}, where no attention can run in "
            f"blocks. {', '.join(sorted(where))} has some that can: name that, or '*' "
            "for all"
        )
    why = "; ".join(reasons) or (
        "no softmax between two products was found whose queries and keys are of one "
        "sequence. Call wh.attention, or jax.nn.dot_product_attention, for the "
        "model's attention"
    )
    raise PlanError(
        f"attention: ring is requested, but no attention can run in blocks: {why}. Or "
        "drop attention="
    )


def ringed(graph: Graph, kinds: Mapping[str, str]) -> frozenset[tuple[int, ...]]:
    """Returns the positions of the attention that runs in blocks.

    Attention runs in blocks if ``kinds`` chooses that for its TaskGraph. Its queries
    and keys must belong to one sequence, and no operand may depend on parameters alone.

    Args:
        graph: Captured loss with each attention as one operation.
        kinds: Kind of ``KINDS`` by name of a TaskGraph; ``"*"`` stands for all others.
    """
    analysed = analyse_graph(graph)
    graph, dims = analysed.graph, analysed.dims
    weight = graph.weight_tensors()
    result = set()
    for index, op in enumerate(graph.ops):
        if op.kind != ATTENTION or any(weight[t] for t in op.operands):
            continue
        name = graph.task_graphs[op.task_graph].name
        layouts = [
            dims.seen.get((index, slot), dims.layouts[t])
            for slot, t in enumerate(op.operands)
        ]
        column = {*layouts[1][op.column]}
        alike = column and column <= roles_of(layouts[0])
        if alike and kinds.get(name, kinds.get(ALL, "gather")) == "ring":
            result.add(op.position)
    return frozenset(result)


Position = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Equations that are recomputed together.

    Attributes:
        prefix: Position of the jaxpr that contains them.
        first, end: Half-open range of its equations.
        policy: Remat policy, which sets the values to save.
    """

    prefix: Position
    first: int
    end: int
    policy: str


def policy_for(task_graph: str, policies: Mapping[str, str]) -> str:
    """Returns the remat policy of a TaskGraph: its own, or else that of ``"*"``.

    >>> policy_for("split", {"*": "full", "replicate": "dots"})
    'full'
    """
    return policies.get(task_graph, policies.get(ALL, "none"))


def checked_policies(
    remat: str | Mapping[str, str] | None, graph: Graph, names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Returns the user's choices other than ``none`` as (TaskGraph, policy) pairs.

    Args:
        remat: Policy for all TaskGraphs, or policies by name of a TaskGraph.
        graph: Captured loss.
        names: Names that the model gives to values with ``checkpoint_name``.

    Raises:
        PlanError: A policy, TaskGraph or name does not exist; lists all.
    """
    problems = Problems("remat", PlanError)
    if remat is not None and not isinstance(remat, str | Mapping):
        problems.add(f"{remat!r:.60} is neither a policy nor one for each TaskGraph")
        remat = None
    given = {ALL: remat} if isinstance(remat, str) else dict(remat or {})
    check_task_graphs(given, graph, problems)
    for text in dict.fromkeys(map(repr, given.values())):
        _check(next(p for p in given.values() if repr(p) == text), names, problems)
    problems.raise_if_any()
    rest = given.pop(ALL, "none")
    kept = [(name, policy) for name, policy in given.items() if policy != rest]
    return (*kept, *([(ALL, rest)] if rest != "none" else []))


def _check(policy: object, names: Sequence[str], problems: Problems) -> None:
    kind, colon, _ = str(policy).partition(":")
    listed = named_in(str(policy))
    if not isinstance(policy, str) or kind not in REMAT_POLICIES:
        problems.add(
            f"{policy!r} is not a policy; expected one of {', '.join(REMAT_POLICIES)}"
        )
    elif colon and not listed:
        problems.add(
            f"{policy!r} lists no name; expected names as in named:attention,mlp"
        )
    elif kind == "named" and not names:
        problems.add(
            f"{policy!r} saves values that the model names, but it names none: put "
            "jax.ad_checkpoint.checkpoint_name(x, name) into it, or choose dots"
        )
    for name in listed:
        if names and name not in names:
            problems.add(
                f"{policy!r}: the model names no value {name!r}; it has the names "
                f"{', '.join(names)}"
            )


def regions(graph: Graph, policies: Mapping[str, str]) -> tuple[Region, ...]:
    """Returns the regions to checkpoint.

    Args:
        graph: Captured loss.
        policies: Policy by name of a TaskGraph; TaskGraphs without one have ``none``.

    Returns:
        Regions in program order; empty if the program cannot be divided.
    """
    level = _Level.of(graph)
    if level is None:
        return ()
    runs = itertools.groupby(level.equations(policies), key=lambda e: e[1])
    result = []
    for (layer, policy), members in runs:
        if layer < 0 or policy == "none":
            continue
        indices = [index for index, _ in members]
        for first, end in level.pieces(indices[0], indices[-1] + 1):
            region = Region(prefix=level.prefix, first=first, end=end, policy=policy)
            if level.saves(region):
                result.append(region)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Level:
    """Jaxpr with the layers in sequence, or loop body whose iterations are the layers.

    ``ops`` has the operations inside each equation that computes values. ``starts`` has
    the first equation of each layer, and the end of the last layer. ``parts`` says
    whether the layers are parts of a model without repeated layers.
    """

    graph: Graph
    prefix: Position
    ops: Mapping[int, tuple[Op, ...]]
    starts: tuple[int, ...]
    parts: bool = False

    @classmethod
    def of(cls, graph: Graph) -> _Level | None:
        """Returns the jaxpr; None if the layers are not equations of one jaxpr.

        A model without repeated layers is divided at its narrowest cut points. The
        number of parts is about the square root of its number of products, which saves
        the fewest bytes in total.
        """
        weight = graph.weight_tensors()
        computed = [
            op
            for op in graph.ops
            if op.kind not in LOOPS and not all(weight[t] for t in op.results)
        ]
        loop = stacked_loop(graph)
        if not computed:
            return None
        if loop is not None:
            prefix = (*loop, 0)
            inside = _by_equation(computed, prefix)
            bounds = (min(inside), max(inside) + 1) if inside else ()
            return cls(graph, prefix, inside, bounds) if inside else None
        starts = layer_starts(graph)
        if not starts:
            prefix = _common([op.position for op in computed])
            level = cls(graph, prefix, _by_equation(computed, prefix), ())
            parts = level._parts()
            # A single part would save all its values while it is recomputed.
            several = len(parts) > 2
            return cls(graph, prefix, level.ops, parts, parts=True) if several else None
        layers = [graph.ops[i] for i in range(starts[0], starts[-1])]
        positions = [op.position for op in layers if op.kind not in LOOPS]
        prefix = _common(positions)
        inside = _by_equation(computed, prefix)
        depth = len(prefix)
        firsts = [_next_position(graph, at, prefix)[depth] for at in starts[:-1]]
        end = max(p[depth] for p in positions) + 1
        if len(set(firsts)) < len(firsts):
            return None  # One equation, such as another loop, has several layers.
        level = cls(graph, prefix, inside, (*firsts, end))
        return cls(graph, prefix, inside, level._narrowest())

    def equations(
        self, policies: Mapping[str, str]
    ) -> Iterator[tuple[int, tuple[int, str]]]:
        """Yields each equation with its layer (-1 for none) and policy."""
        names = [g.name for g in self.graph.task_graphs]
        kept = (-1, "none")
        before = kept
        layer = -1
        for index in range(self.starts[0], self.starts[-1]):
            if layer + 1 < len(self.starts) - 1 and index >= self.starts[layer + 1]:
                layer += 1
                before = (layer, before[1])
            ops = self.ops.get(index, ())
            # Checkpoints of the user stay unchanged. So do loops outside layers: their
            # recomputation would save the residuals of all iterations.
            loops = self.parts and any(op.trip > 1 for op in ops)
            if loops or any(op.remat is not None for op in ops):
                before = kept
            elif ops:
                before = layer, policy_for(names[ops[0].task_graph], policies)
            yield index, before

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields a run of equations, divided where a mark crosses one of its ends.

        A mark may be inside a region or around it. A mark that crosses the end of a
        region would become two marks.
        """
        before, *marks, behind = self._marked(first - 1, end + 1)
        opens = marks[0] and marks[0] == before
        goes_on = marks[-1] and marks[-1] == behind
        if len(set(marks)) == 1 or not (opens or goes_on):
            yield first, end
            return
        at = first
        for _, members in itertools.groupby(marks):
            size = len(list(members))
            yield at, at + size
            at += size

    def _marked(self, first: int, end: int) -> list[int]:
        """Returns the marked TaskGraph of each equation, or 0 without marks.

        An equation without operations has the TaskGraph of the equation before it.
        """
        index, least = first, min(self.ops)
        while index not in self.ops and index >= least:
            index -= 1
        result: list[int] = []
        graph = 0
        for at in range(min(index, first), end):
            if at in self.ops:
                graph = self.ops[at][0].task_graph
            result.append(graph if self.graph.task_graphs[graph].marks else 0)
        return result[first - end :]

    def saves(self, region: Region) -> bool:
        inside = range(region.first, region.end)
        return any(op.saves for index in inside for op in self.ops.get(index, ()))

    def _narrowest(self) -> tuple[int, ...]:
        """Returns the bounds of the layers, all shifted to cut the fewest bytes.

        Layers of equal length may be cut at any of their equations. A cut inside a
        residual branch would save more than a cut between two blocks.
        """
        lengths = {b - a for a, b in itertools.pairwise(self.starts[:-1])}
        if len(lengths) != 1:
            return self.starts
        (period,) = lengths
        crossing = self._border_bytes()
        first = min(self.ops)
        shifts = range(-min(period // 2, self.starts[0] - first), (period + 1) // 2)
        # Values at the first bound may be wider, so the second represents all bounds.
        border = self.starts[min(1, len(self.starts) - 2)]
        shift = min(shifts, key=lambda s: (crossing.get(border + s, 0), abs(s)))
        last = min(self.starts[-2] + period, max(self.ops) + 1)
        return (*(s + shift for s in self.starts[:-1]), last + shift)

    def _parts(self) -> tuple[int, ...]:
        """Returns the bounds of parts of about equal bytes, at narrow cut points."""
        kept = {index: self._kept_bytes(ops) for index, ops in self.ops.items()}
        products = sum(op.matmul is not None for ops in self.ops.values() for op in ops)
        crossing, total = self._border_bytes(), sum(kept.values())
        parts = [min(self.ops, default=0)]
        sums = dict(zip(kept, itertools.accumulate(kept.values()), strict=True))
        for part in range(1, math.isqrt(products)):
            ideal, reach = part * total / math.isqrt(products), total / products
            near = [i + 1 for i, n in sums.items() if abs(n - ideal) <= reach]
            if near:
                parts.append(min(near, key=lambda border: crossing.get(border, 0)))
        return (*dict.fromkeys(parts), max(self.ops, default=0) + 1)

    def _kept_bytes(self, ops: Sequence[Op]) -> int:
        slots = {(op.operands + op.results)[s] for op in ops for s in op.saves}
        return sum(self.graph.tensors[t].nbytes for t in slots)

    def _border_bytes(self) -> dict[int, int]:
        """Returns the bytes of differentiable values at each cut between equations."""
        made: dict[int, int] = {}
        until: dict[int, int] = {}
        for index, ops in self.ops.items():
            for op in ops:
                until.update(dict.fromkeys(op.operands, index))
                for t in op.results:
                    made.setdefault(t, index)
        border_bytes: dict[int, int] = {}
        for t, first in made.items():
            if self.graph.tensors[t].differentiable:
                nbytes = self.graph.tensors[t].nbytes
                for border in range(first + 1, until.get(t, first) + 1):
                    border_bytes[border] = border_bytes.get(border, 0) + nbytes
        return border_bytes


def _by_equation(ops: Sequence[Op], prefix: Position) -> dict[int, tuple[Op, ...]]:
    depth = len(prefix)
    equation: dict[int, list[Op]] = {}
    for op in ops:
        if op.position[:depth] == prefix and len(op.position) > depth:
            equation.setdefault(op.position[depth], []).append(op)
    return {index: tuple(several) for index, several in sorted(equation.items())}


def _common(positions: Sequence[Position]) -> Position:
    least, most = min(positions), max(positions)
    equal = itertools.takewhile(lambda p: p[0] == p[1], zip(least, most, strict=False))
    depth = len(list(equal))
    return least[: depth - depth % 2]


def _next_position(graph: Graph, at: int, prefix: Position) -> Position:
    depth = len(prefix)
    return next(op.position for op in graph.ops[at:] if op.position[:depth] == prefix)
