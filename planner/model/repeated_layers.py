"""The repeated layers of a model: found, not marked, and written once.

Layers are the body of a scan that holds most of the work, or parameters whose paths
differ in one number and whose shapes agree. Where an unrolled model's layers are equal
operation by operation, all but two are left out: the second stands for the rest by its
trip count, as a scan's body does, so that depth costs a search nothing.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from whalejax.planner.entries import starred
from whalejax.planner.model.graph import LOOPS, Graph, Op, Tensor, makes_weights


_NUMBER = re.compile(r"^(.*?)(\d+)(?=\.|$)(.*)$")

FEWEST = 4
"""Layers from which writing them once pays."""

LeafKind = tuple[str, tuple[int, ...], bool]
"""A parameter's path with stars for numbers, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A graph and its layers.

    Attributes:
        graph: the graph, equal layers written once where they can be.
        count: how many layers there are; 1 where none were found.
        scanned: they are one body with a trip count.
        layer_of: for each operation, the layer that it stands in (0 for a scanned
            body), -1 before the layers and ``count`` behind them.
        leaf_times: by path, for how many leaves one stands where layers are written
            once; 1 for those that are left out here.
    """

    graph: Graph
    count: int
    scanned: bool
    layer_of: tuple[int, ...]
    leaf_times: Mapping[str, int] = field(default_factory=dict)


def kind_of(leaf: Tensor) -> LeafKind:
    """What leaves of equal layers have in common."""
    return starred(leaf.path), leaf.shape, leaf.frozen


def find_layers(graph: Graph) -> Layers:
    """Find a graph's layers, and write equal ones once.

    Args:
        graph: the captured loss.
    """
    weight = graph.weight_tensors()
    trip = _stacked_trip(graph, weight)
    if trip > 1:
        inside = [i for i, op in enumerate(graph.ops) if op.trip == trip]
        return Layers(
            graph=graph,
            count=trip,
            scanned=True,
            layer_of=_spread(graph, dict.fromkeys(inside, 0), trip),
        )
    found, of_tensor = _unrolled(graph, weight)
    if found.count < FEWEST:
        return found
    for layer_of in _shifted(found, weight):
        even = dataclasses.replace(found, layer_of=layer_of)
        once = _written_once(even, weight, of_tensor)
        if once is not None:
            return once
    return found


def layer_starts(graph: Graph) -> tuple[int, ...]:
    """Where the layers of an unrolled model begin, and the last one ends.

    Args:
        graph: the captured loss.

    Returns:
        Numbers of operations: the first that reads a layer's weights, for each layer,
        and the one behind the last that does. Empty where no layers were found.
    """
    found, _ = _unrolled(graph, graph.weight_tensors())
    if found.count < 2:
        return ()
    starts = [found.layer_of.index(layer) for layer in range(found.count)]
    return (*starts, len(found.layer_of) - found.layer_of.count(found.count))


def stacked_loop(graph: Graph) -> tuple[int, ...] | None:
    """The position of the scan over slices of weights that does most work, or None.

    A few layers below a large vocabulary hold less than half of the parameters, and
    are layers all the same.

    Args:
        graph: the captured loss.
    """
    weight = graph.weight_tensors()
    slicing: set[tuple[int, ...]] = set()
    for op in graph.ops:
        if op.kind == "scan" and op.trip == 1 and len(op.operands) == 1:
            stack, one = op.operands[0], op.results
            if weight[stack] and one and weight[one[0]]:
                before, after = graph.tensors[stack].shape, graph.tensors[one[0]].shape
                if len(before) == len(after) + 1 and before[1:] == after:
                    slicing.add(op.position)
    work: Counter[tuple[int, ...]] = Counter()
    for op in graph.ops:
        for place in range(1, len(op.position), 2):
            if op.position[:place] in slicing:
                work[op.position[:place]] += op.flops * op.trip
    return max(work, key=lambda position: work[position], default=None)


def sliced_params(graph: Graph) -> frozenset[int]:
    """Ids of the parameters that loops slice, through casts and the like."""
    tensors = graph.tensors
    same = {t.id: t.id for t in graph.params}
    sliced: set[int] = set()
    for op in graph.ops:
        if len(op.operands) != 1 or len(op.results) != 1:
            continue
        leaf, before = same.get(op.operands[0]), tensors[op.operands[0]].shape
        after = tensors[op.results[0]].shape
        slices = len(before) == len(after) + 1 and after == before[1:]
        if leaf is not None and op.kind in LOOPS and slices:
            sliced.add(leaf)
        elif leaf is not None and (op.elementwise or op.reshape):
            if after[:1] == before[:1]:
                same[op.results[0]] = leaf
    return frozenset(sliced)


def _unrolled(graph: Graph, weight: Sequence[bool]) -> tuple[Layers, dict[int, int]]:
    """The layers as their weights are read, and the layer of each weight."""
    none = Layers(graph=graph, count=1, scanned=False, layer_of=(0,) * len(graph.ops))
    of_tensor, starts = _by_use(graph, weight, _numbered(graph))
    order = list(starts.values())
    layers = len(set(order))
    if layers < 2 or order != sorted(order):
        # None, or a model that passes through its layers more than once.
        return none, of_tensor
    layer_of = _spread(graph, starts, layers)
    return dataclasses.replace(none, count=layers, layer_of=layer_of), of_tensor


def _stacked_trip(graph: Graph, weight: Sequence[bool]) -> int:
    """Trips of the scan whose slices are most of the parameters; 1 where none is.

    A scan over time reads the same weights in every turn and is no stack of layers.
    """
    stacked: Counter[int] = Counter()
    trips = {op.trip for op in graph.ops if op.trip > 1}
    seen: set[int] = set()
    for op in graph.ops:
        for t in op.operands if op.kind == "scan" else ():
            tensor = graph.tensors[t]
            if weight[t] and t not in seen and tensor.shape:
                seen.add(t)
                if tensor.shape[0] in trips:
                    stacked[tensor.shape[0]] += tensor.size
    trip, size = max(stacked.items(), key=lambda i: i[1], default=(1, 0))
    whole = sum(t.size for t in graph.params)
    return trip if 2 * size >= whole else 1


def _by_use(
    graph: Graph, weight: Sequence[bool], numbered: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Layers by their first use: of weights, and of the operations that read them."""
    of_tensor = dict(numbered)
    reads: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        known = [of_tensor[t] for t in op.operands if t in of_tensor]
        if known and all(weight[t] for t in op.results):
            of_tensor.update(dict.fromkeys(op.results, known[0]))
        elif known:
            reads[index] = known[-1]
    place = {number: i for i, number in enumerate(dict.fromkeys(reads.values()))}
    return (
        {t: place[n] for t, n in of_tensor.items() if n in place},
        {index: place[number] for index, number in reads.items()},
    )


def _shifted(found: Layers, weight: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Ways to divide operations into layers of one length.

    Between two layers' weights stand operations of the one and of the other; the last
    layer says where it ends, as nothing of a next layer follows it.
    """
    graph = found.graph
    computed = [i for i, op in enumerate(graph.ops) if not makes_weights(op, weight)]
    at = [found.layer_of[i] for i in computed]
    starts = [at.index(layer) for layer in range(found.count)]
    size = starts[2] - starts[1]
    missing = size - at.count(found.count - 1)
    for shift in range(min(missing, starts[0]), -1, -1):
        bounds = [start - shift for start in starts]
        bounds.append(bounds[-1] + size)
        if bounds[-1] > len(computed):
            continue
        layer_of = list(found.layer_of)
        for place, index in enumerate(computed):
            here = bisect_right(bounds, place) - 1
            layer_of[index] = here
        yield tuple(layer_of)


def _spread(graph: Graph, known: Mapping[int, int], layers: int) -> tuple[int, ...]:
    """Operations between two of one layer are of that layer."""
    first, last = min(known), max(known)
    found = []
    here = -1
    for index in range(len(graph.ops)):
        if index > last:
            here = layers
        elif index >= first:
            here = max(here, known.get(index, 0))
        found.append(here)
    return tuple(found)


def _numbered(graph: Graph) -> dict[int, int]:
    """Parameters of equal layers: tensor id to the number of its layer."""
    families: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for t in graph.params:
        found = _NUMBER.match(t.path)
        if found:
            before, number, rest = found.groups()
            families[before][int(number)].append((rest, t.id))
    best: dict[int, int] = {}
    most = 0
    for members in families.values():
        kinds = {
            tuple(sorted((r, graph.tensors[i].shape) for r, i in leaves))
            for leaves in members.values()
        }
        nbytes = sum(graph.tensors[i].nbytes for v in members.values() for _, i in v)
        if len(kinds) == 1 and len(members) > 1 and nbytes > most:
            most = nbytes
            order = {number: place for place, number in enumerate(sorted(members))}
            best = {i: order[n] for n, v in members.items() for _, i in v}
    return best


def _written_once(
    found: Layers, weight: Sequence[bool], of_tensor: Mapping[int, int]
) -> Layers | None:
    """The layers with all but the first two left out; None if they are not alike."""
    graph = found.graph
    members: dict[int, list[int]] = defaultdict(list)
    homes = list(found.layer_of)
    for index, op in enumerate(graph.ops):
        if makes_weights(op, weight):
            homes[index] = of_tensor.get(op.operands[0], -1) if op.operands else -1
        if 0 <= homes[index] < found.count:
            members[homes[index]].append(index)
    like = _Alike(graph, members)
    if not all(like.check(layer) for layer in range(2, found.count)):
        return None
    kept = [i for i, home in enumerate(homes) if not 2 <= home < found.count]
    ops = [
        dataclasses.replace(graph.ops[i], trip=graph.ops[i].trip * (found.count - 1))
        if homes[i] == 1
        else graph.ops[i]
        for i in kept
    ]
    gone = {t for t, layer in of_tensor.items() if layer >= 2}
    second = [t for t in graph.params if of_tensor.get(t.id) == 1]
    return dataclasses.replace(
        found,
        graph=_renumbered(graph, ops, like.second, gone),
        layer_of=tuple(found.layer_of[i] for i in kept),
        leaf_times={t.path: found.count - 1 for t in second},
    )


class _Alike:
    """Compares layers with the second, and remembers what corresponds.

    Attributes:
        second: tensors of later layers to those of the second.
    """

    def __init__(self, graph: Graph, members: Mapping[int, list[int]]) -> None:
        self.graph = graph
        self.members = members
        self.second: dict[int, int] = {}
        self.signatures = [_signature(graph.ops[i]) for i in members[1]]
        self.made: dict[int, tuple[int, int, int]] = {}
        for layer, indices in members.items():
            for place, index in enumerate(indices):
                for slot, t in enumerate(graph.ops[index].results):
                    self.made[t] = layer, place, slot

    def check(self, layer: int) -> bool:
        """Whether a layer is as the second."""
        here, there = self.members[layer], self.members[1]
        return len(here) == len(there) and all(
            _signature(self.graph.ops[a]) == signature
            and self._op(self.graph.ops[a], self.graph.ops[b], layer)
            for a, b, signature in zip(here, there, self.signatures, strict=True)
        )

    def _op(self, here: Op, there: Op, layer: int) -> bool:
        same = all(
            self._operand(a, b, layer)
            for a, b in zip(here.operands, there.operands, strict=True)
        )
        if same:
            for a, b in zip(here.results, there.results, strict=True):
                one, other = self.graph.tensors[a], self.graph.tensors[b]
                same = same and (one.shape, one.dtype) == (other.shape, other.dtype)
                self.second[a] = b
        return same

    def _operand(self, here: int, there: int, layer: int) -> bool:
        if here == there:
            return True
        one, other = self.graph.tensors[here], self.graph.tensors[there]
        if (one.shape, one.dtype, one.kind) != (other.shape, other.dtype, other.kind):
            return False
        if one.kind == "param":
            return kind_of(one) == kind_of(other)
        mine, its = self.made.get(here), self.made.get(there)
        if mine is None or its is None:
            # Of no layer: keys and constants may differ, activations may not.
            return mine is its and not one.differentiable
        return mine[0] - its[0] == layer - 1 and mine[1:] == its[1:]


def _signature(op: Op) -> tuple[Any, ...]:
    return (
        op.kind,
        op.factors,
        op.task_graph,
        op.trip,
        op.flops,
        op.saves,
        op.remat is None,
        op.kept,
        len(op.operands),
        len(op.results),
        op.unknown,
        op.share,
    )


def _renumbered(
    graph: Graph, ops: Sequence[Op], second: Mapping[int, int], gone: Set[int]
) -> Graph:
    """The graph of some operations, with the tensors that are left.

    Parameters that nothing reads stay: they take memory.
    """
    used: dict[int, None] = dict.fromkeys(t for t, _ in graph.batch_dims)
    used |= {t.id: None for t in graph.tensors if t.kind == "batch"}
    used |= {t.id: None for t in graph.params if t.id not in gone}
    for op in ops:
        for t in (*op.operands, *op.results):
            used[second.get(t, t)] = None
    whole = dict.fromkeys(second.get(t, t) for t in graph.whole)
    used[second.get(graph.loss, graph.loss)] = None
    used |= whole
    number = {t: i for i, t in enumerate(sorted(used))}

    def new(t: int) -> int:
        return number[second.get(t, t)]

    return dataclasses.replace(
        graph,
        tensors=tuple(
            dataclasses.replace(graph.tensors[t], id=i) for t, i in number.items()
        ),
        ops=tuple(
            dataclasses.replace(
                op,
                operands=tuple(map(new, op.operands)),
                results=tuple(map(new, op.results)),
            )
            for op in ops
        ),
        loss=new(graph.loss),
        batch_dims=tuple((new(t), dim) for t, dim in graph.batch_dims),
        whole=tuple(dict.fromkeys(map(new, graph.whole))),
    )
