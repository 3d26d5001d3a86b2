"""Finds the repeated layers of a model, and dimensions that count layers.

Layers are the body of a scan with most of the work, or parameters with equal shapes
whose paths differ in one number.

Scans (nested, or over parts of a stack), loop indices or constant indices select a
layer of a stack. The analysis follows values that are computed from one parameter. Each
of their dimensions is a list of *atoms*, which are runs of elements of one dimension of
the parameter. A dimension counts layers if single elements of all its atoms are
selected before an operation combines the value with samples.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.planner.model.graph import LOOPS, Graph, Op
from whalejax.planner.plan_entries import Spec


_PICKS = frozenset(
    ("slice", "dynamic_slice", "gather", "unstack", "split", "dynamic_index_in_dim")
)
"""Kinds of operations whose result may have single elements of a dimension."""

_COUNTED = frozenset(("dynamic_slice", "gather"))
"""Kinds among ``_PICKS`` that select elements by an index."""

_TURNS = frozenset(("rev", "concatenate", "pad", "roll"))
"""Kinds that keep a dimension's elements, perhaps reordered or among others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAxes:
    """Division of a parameter's dimensions into layers and other dimensions.

    Attributes:
        sizes: Dimensions of the parameter. A dimension that counts layers and also has
            other elements is divided into several.
        sources: Dimension of the parameter from which each of ``sizes`` comes.
        layers: Indices in ``sizes`` of the dimensions that count layers.
    """

    sizes: tuple[int, ...]
    sources: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of layers."""
        return math.prod(self.sizes[i] for i in self.layers)

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of ``sizes``; those of dimensions that count layers come first."""
        rest = (i for i in range(len(self.sizes)) if i not in self.layers)
        return (*self.layers, *rest)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape with all layers along the first dimension.

        >>> LayerAxes(sizes=(2, 3, 8), sources=(0, 0, 1), layers=(0, 1)).stacked_shape
        (6, 8)
        """
        return (self.count, *(self.sizes[i] for i in self.order[len(self.layers) :]))

    def by_layer(self, of_ranks: Any) -> Any:
        """Returns the arrays of all ranks with the layers along the second dimension.

        Args:
            of_ranks: Array with a dimension of ranks before the parameter's shape.
        """
        cut = of_ranks.reshape(-1, *self.sizes)
        moved = cut.transpose(0, *(1 + i for i in self.order))
        return moved.reshape(-1, *self.stacked_shape)

    def as_stored(self, stacked: Any) -> Any:
        """Returns an array in the parameter's shape.

        Args:
            stacked: Array with all layers along the first dimension.
        """
        cut = stacked.reshape(*(self.sizes[i] for i in self.order))
        places = range(len(self.order))
        shape = [1] * (max(self.sources) + 1)
        for size, source in zip(self.sizes, self.sources, strict=True):
            shape[source] *= size
        return cut.transpose(*(self.order.index(i) for i in places)).reshape(shape)

    def stacked_spec(self, spec: Spec, mesh: Mapping[str, int]) -> Spec:
        """Returns the spec of ``stacked_shape``.

        If several dimensions count layers, only the outermost is sharded.

        Args:
            spec: Spec of the parameter.
            mesh: Axis sizes.
        """
        stacked_spec: list[tuple[str, ...]] = []
        for place, source in enumerate(self.sources):
            axes = () if source in self.sources[:place] else spec[source]
            parts = math.prod(mesh[axis] for axis in axes)
            inner = place in self.layers[1:]
            stacked_spec.append(() if inner or self.sizes[place] % parts else axes)
        rest = self.order[len(self.layers) :]
        return tuple(stacked_spec[i] for i in (*self.layers[:1], *rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Atom:
    """Elements of one dimension of a parameter at a stride; none if ``dim`` is -1.

    Attributes:
        dim: Dimension of the parameter.
        size: Number of elements.
        step: Stride between elements.
        cut: Whether the value has only some of the elements, or has further ones.
    """

    dim: int
    size: int
    step: int = 1
    cut: bool = False


_Atoms = tuple[_Atom, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Value that is computed from a parameter, and perhaps from others.

    Attributes:
        param: Tensor of the parameter.
        dims: Atoms of each dimension.
        taken: Atoms from which the value has a single element.
        counted: Dimensions of the parameter from which a loop selects an element.
    """

    param: int
    dims: tuple[_Atoms, ...]
    taken: frozenset[_Atom] = frozenset()
    counted: frozenset[int] = frozenset()

    @property
    def reads_elements(self) -> bool:
        """Whether some elements are those of the parameter, instead of sums."""
        return any(a.dim >= 0 for atoms in self.dims for a in atoms)

    def without(self, dim: int, *, counted: bool) -> _View:
        """Returns the view with one element of a dimension, which has size 1."""
        atoms = [a for a in self.dims[dim] if a.dim >= 0]
        dims = (*self.dims[:dim], (), *self.dims[dim + 1 :])
        by = {a.dim for a in atoms} if counted else set[int]()
        return replace(
            self, dims=dims, taken=self.taken | set(atoms), counted=self.counted | by
        )


def layer_axes(graph: Graph) -> dict[int, LayerAxes | None]:
    """Returns the parameters that stack layers.

    A dimension counts layers if a loop reads its elements in turn, or if all readers of
    the parameter read one element.

    Args:
        graph: The captured loss.

    Returns:
        Division by the parameter's tensor id; None if the parameter is read in blocks
        that are not single layers. Parameters without layers are absent.
    """
    axes: dict[int, LayerAxes | None] = {}
    for param, reads in _ParameterFollower(graph).reads().items():
        shape = graph.tensors[param].shape
        dims = [_counting(dim, size, reads) for dim, size in enumerate(shape)]
        if any(cut is None for cut in dims):
            axes[param] = None
            continue
        sizes, sources, layers = list[int](), list[int](), list[int]()
        for dim, cut in enumerate(dims):
            for size, counts in cut or ((shape[dim], False),):
                if counts:
                    layers.append(len(sizes))
                sizes.append(size)
                sources.append(dim)
        if layers:
            axes[param] = LayerAxes(
                sizes=tuple(sizes), sources=tuple(sources), layers=tuple(layers)
            )
    return axes


def layers_by_path(graph: Graph) -> dict[str, LayerAxes]:
    """Returns the layer divisions of stacked parameters, by path.

    Args:
        graph: The captured loss.
    """
    layers = layer_axes(graph).items()
    return {graph.tensors[t].path: axes for t, axes in layers if axes is not None}


_Cut = tuple[tuple[int, bool], ...]
"""(Sizes into which a dimension is divided, which of them count layers)."""


def _counting(dim: int, size: int, reads: Sequence[_View]) -> _Cut | None:
    """Returns the division of a dimension: empty without layers, None if unclear."""
    took = [view for view in reads if any(a.dim == dim for a in view.taken)]
    looped = any(dim in view.counted for view in took)
    whole = any(view not in took and view.reads_elements for view in reads)
    if size == 1 or not took or (whole and not looped):
        return ()
    cuts = {_division(dim, size, view) for view in took}
    every = ((size, True),)
    if every in cuts:
        return every
    return None if len(cuts) > 1 else cuts.pop()


def _division(dim: int, size: int, view: _View) -> _Cut | None:
    """Returns the division that one read implies; None if it reads blocks of a part."""
    taken = sorted((a for a in view.taken if a.dim == dim), key=lambda a: -a.step)
    left = any(a.dim == dim for atoms in view.dims for a in atoms)
    if any(a.cut for a in taken):
        return None if left or taken[-1].step > 1 else ((size, True),)
    division, inside = list[tuple[int, bool]](), size
    for atom in taken:
        division.append((inside // (atom.size * atom.step), False))
        division.append((atom.size, True))
        inside = atom.step
    division = [(n, counts) for n, counts in (*division, (inside, False)) if n > 1]
    return tuple(division) if not all(c for _, c in division) else ((size, True),)


class _ParameterFollower:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors = graph.tensors
        self.varying = _varying(graph)
        self.views: dict[int, tuple[_View, ...]] = {
            t.id: (
                _View(
                    param=t.id,
                    dims=tuple(
                        (_Atom(dim=d, size=n),) if n > 1 else ()
                        for d, n in enumerate(t.shape)
                    ),
                ),
            )
            for t in graph.params
            if not t.frozen
        }

    def reads(self) -> dict[int, list[_View]]:
        """Returns the forms in which operations combine each parameter with samples."""
        reads: dict[int, list[_View]] = defaultdict(list)
        for op in self.graph.ops:
            own = [t for t in op.operands if t in self.views]
            if not own or not op.results:
                continue
            if any(self.varying[t] for t in (*op.operands, *op.results)):
                for t in dict.fromkeys(own):
                    for view in self.views[t]:
                        reads[view.param].append(view)
                continue
            for slot, result in enumerate(op.results):
                views = tuple(self._passed(op, slot))
                known = self.views.get(result, ())
                self.views[result] = tuple(dict.fromkeys((*known, *views)))
        for t in (self.graph.loss, *self.graph.whole):
            for view in self.views.get(t, ()):
                reads[view.param].append(view)
        return reads

    def _passed(self, op: Op, slot: int) -> Iterator[_View]:
        for place, operand in enumerate(op.operands):
            for view in self.views.get(operand, ()):
                if op.reshape:
                    shape = self.tensors[op.results[slot]].shape
                    yield replace(view, dims=_regrouped(view.dims, shape))
                else:
                    yield self._move_view(op, slot, place, view)

    def _move_view(self, op: Op, slot: int, place: int, view: _View) -> _View:
        before = self.tensors[op.operands[place]].shape
        after = self.tensors[op.results[slot]].shape
        there = _links(op, place, len(op.operands) + slot)
        dims: list[_Atoms] = [_unknown(size) for size in after]
        looped = op.kind in LOOPS and len(before) == len(after) + 1
        picks = place == 0 and (op.kind in _PICKS or looped)
        counted = looped or (op.kind in _COUNTED and op.trip > 1)
        for dim in (d for d, size in enumerate(before) if size > 1):
            out = there.get(dim)
            if out is not None:
                dims[out] = view.dims[dim]
                continue
            out = _others(op, dim, before, after, there)
            if picks and out is None:
                view = view.without(dim, counted=counted)
            elif out is not None and (picks or op.kind in _TURNS):
                dims[out] = _part(view.dims[dim], after[out])
        return replace(view, dims=tuple(dims))


def _unknown(size: int) -> _Atoms:
    return (_Atom(dim=-1, size=size),) if size > 1 else ()


def _part(atoms: _Atoms, size: int) -> _Atoms:
    if len(atoms) == 1:
        return (replace(atoms[0], size=size, cut=True),)
    return tuple(replace(a, cut=True) for a in atoms)


def _links(op: Op, place: int, slot: int) -> dict[int, int]:
    """Returns an operand's dimensions that a result has too, with the result's."""
    links = {}
    for factor in op.factors:
        if factor.needs_all and op.kind != "rev":
            continue
        ends = dict(factor.members)
        if place in ends and slot in ends:
            links[ends[place]] = ends[slot]
    return links


def _others(
    op: Op,
    dim: int,
    before: Sequence[int],
    after: Sequence[int],
    there: Mapping[int, int],
) -> int | None:
    """Returns a result's dimension with several elements of an operand's, or None."""
    if op.kind == "gather":
        rows = (d for d in range(len(after)) if d not in there.values())
        return next((d for d in rows if after[d] > 1), None)
    same = len(before) == len(after) and after[dim] > 1
    return dim if same else None


def _regrouped(dims: Sequence[_Atoms], shape: Sequence[int]) -> tuple[_Atoms, ...]:
    """Returns the atoms of a reshape's result; unknown atoms if it splits them."""
    waiting = [a for atoms in dims for a in atoms]
    result: list[_Atoms] = []
    for size in shape:
        here, left = list[_Atom](), size
        while left > 1 and waiting:
            atom = waiting.pop(0)
            if left % atom.size == 0:
                here.append(atom)
                left //= atom.size
            elif atom.size % left == 0:
                inner = atom.size // left
                here.append(replace(atom, size=left, step=atom.step * inner))
                waiting.insert(0, replace(atom, size=inner))
                left = 1
            else:
                break
        if left > 1:
            return tuple(map(_unknown, shape))
        result.append(tuple(here))
    return tuple(map(_unknown, shape)) if waiting else tuple(result)


def _varying(graph: Graph) -> list[bool]:
    varying = [t.kind in ("batch", "rng") for t in graph.tensors]
    changed = True
    while changed:
        changed = False
        for op in graph.ops:
            if not any(varying[t] for t in op.operands):
                continue
            # A loop reads its results again in the next iteration.
            carried = op.operands[1:] if op.kind in ("scan", "while") else ()
            for t in (*op.results, *carried):
                changed |= not varying[t]
                varying[t] = True
    return varying


_NUMBER = re.compile(r"^(.*?)(\d+)(?=\.|$)(.*)$")


def layer_starts(graph: Graph) -> tuple[int, ...]:
    """Returns where the layers of an unrolled model begin, and where the last ends.

    Args:
        graph: The captured loss.

    Returns:
        For each layer, the index of the first operation that reads its weights; then
        the index after the last such operation. Empty if no layers are found.
    """
    layers = _by_use(graph, graph.weight_tensors(), _numbered(graph))
    order = list(layers.values())
    if len(set(order)) < 2 or order != sorted(order):
        # The model has no layers, or uses them more than once.
        return ()
    first = {layer: index for index, layer in reversed(layers.items())}
    return (*sorted(first.values()), max(layers) + 1)


def stacked_loop(graph: Graph) -> tuple[int, ...] | None:
    """Returns the position of the scan over layers with most of the work, or None.

    Args:
        graph: The captured loss.
    """
    return next(iter(stacked_loops(graph)), None)


def stacked_loops(graph: Graph) -> list[tuple[int, ...]]:
    """Returns the positions of scans over slices of weights, most work first.

    The layers of a small model with a large vocabulary may have less than half of the
    parameters. They count too.

    Args:
        graph: The captured loss.
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
    return [position for position, _ in work.most_common()]


def sliced_params(graph: Graph) -> frozenset[int]:
    """Returns the ids of parameters that loops slice, also after casts and the like."""
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


def _by_use(
    graph: Graph, weight: Sequence[bool], numbered: Mapping[int, int]
) -> dict[int, int]:
    of_tensor = dict(numbered)
    reads: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        known = [of_tensor[t] for t in op.operands if t in of_tensor]
        if known and all(weight[t] for t in op.results):
            of_tensor.update(dict.fromkeys(op.results, known[0]))
        elif known:
            reads[index] = known[-1]
    place = {number: i for i, number in enumerate(dict.fromkeys(reads.values()))}
    return {index: place[number] for index, number in reads.items()}


def _numbered(graph: Graph) -> dict[int, int]:
    families: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for t in graph.params:
        match = _NUMBER.match(t.path)
        if match:
            before, number, rest = match.groups()
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
