"""Makes the planner's graph of a flat program: names, gradients, TaskGraphs, hash.

Inputs and results are plain data, so this module needs no JAX.

Which values have gradients is decided for the whole program, as a loop's carry may
depend on parameters only through the end of the loop's body. A call with a derivative
rule of its own may pass gradients from any of its inputs to any of its results. A
straight-through estimator, for instance, contains a rounding and yet passes gradients.

Each time the program enters an annotation, a *mark instance* begins. Equal layers enter
equal marks repeatedly. Instances become one TaskGraph if their marks, their surrounding
instances and their operations are equal. Pipelines alone stay separate, as their stages
have devices of their own. JAX traces a jitted block once and calls it often, so the
position of the call decides the instance.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from whalejax.adapters.base import Adapter
from whalejax.capture.batch import TracedLeaf
from whalejax.capture.rules.behaviour import Label, OpDraft, TensorDraft, Value
from whalejax.capture.walk import FlatProgram
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.model.graph import (
    LOOKUPS,
    Graph,
    LoopResiduals,
    Mark,
    Op,
    TaskGraph,
    Tensor,
    TensorKind,
)
from whalejax.user_code.annotations import nesting_problem, scope_name


_COPY = re.compile(r"\d+|\b(?:jvp|transpose|vmap|checkpoint)\(|\)")

_DERIVED_STAGE = re.compile(r"transpose\(.*wh\.stage\[")
"""Matches a stage inside a differentiated function, but no derivative in a stage."""


@dataclass(slots=True, kw_only=True)
class _Instance:
    parent: int
    mark: Mark | None
    label: Label | None
    scope: str = ""
    stages: int = 0
    operations: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """TaskGraphs of a program, and for every operation the index of its TaskGraph."""

    task_graphs: tuple[TaskGraph, ...]
    of_op: tuple[int, ...]


def regions(ops: Sequence[OpDraft], tensors: Sequence[TensorDraft]) -> Regions:
    """Returns the TaskGraphs of a flat program.

    Args:
        ops: Operations in program order.
        tensors: Tensors that the operations compute.

    Raises:
        WhaleError: Marks nest in a forbidden way. The message lists every case.
    """
    _check_nesting(ops)
    tree = _Tree()
    of_op = [tree.enter(op) for op in ops]
    for op, instance in zip(ops, of_op, strict=True):
        shapes = tuple(tensors[t].shape for t in op.results)
        tree.instances[instance].operations.append((op.kind, shapes))
    return tree.fold(of_op)


def _check_nesting(ops: Sequence[OpDraft]) -> None:
    problems = Problems()
    if any(_DERIVED_STAGE.search(scope) for scope in {op.scope for op in ops}):
        problems.add(
            "the loss differentiates a function in which stages are marked (jax.grad, "
            "jax.vjp): the backward pass runs through the stages from the last to "
            "the first. Put the whole derivative into one stage, or drop the stage "
            "marks and give the pipeline num_stages"
        )
        problems.raise_if_any(title="annotations of the model")
    seen: set[str] = set()
    for labels in dict.fromkeys(op.labels for op in ops):
        marks = tuple(mark for mark, _ in labels)
        for depth, mark in enumerate(marks):
            problem = nesting_problem(marks[:depth], mark)
            if problem is not None and problem not in seen:
                seen.add(problem)
                problems.add(problem)
    problems.raise_if_any(title="annotations of the model")


class _Tree:
    def __init__(self) -> None:
        self.instances = [_Instance(parent=-1, mark=None, label=None)]
        self._open: list[int] = []

    def enter(self, op: OpDraft) -> int:
        shared = 0
        for label, index in zip(op.labels, self._open, strict=False):
            if self.instances[index].label != label:
                break
            shared += 1
        if shared < len(op.labels) and shared < len(self._open):
            shared = self._restart(op.labels, shared)
        del self._open[shared:]
        for label in op.labels[shared:]:
            self._open.append(self._add(label, op.scope))
        return self._open[-1] if self._open else 0

    def _restart(self, labels: Sequence[Label], depth: int) -> int:
        """Returns the depth from which marks open again.

        A stage with a lower number than the open one starts its pipeline again.
        """
        old, site = self.instances[self._open[depth]].label or labels[depth]
        mark, new_site = labels[depth]
        if old.kind == mark.kind == "stage" and site == new_site:
            if int(mark.get("i") or 0) < int(old.get("i") or 0):
                kinds = [m.kind for m, _ in labels[:depth]]
                return kinds.index("pipeline") if "pipeline" in kinds else depth
        return depth

    def _add(self, label: Label, scope: str) -> int:
        parent = self._open[-1] if self._open else 0
        mark = label[0]
        if mark.kind == "stage":
            mark = self._numbered(mark, parent)
        self.instances.append(
            _Instance(parent=parent, mark=mark, label=label, scope=scope)
        )
        return len(self.instances) - 1

    def _numbered(self, mark: Mark, parent: int) -> Mark:
        """Returns the mark of a stage, numbered by the order in which stages run."""
        around = parent
        while around and self._kind(around) != "pipeline":
            around = self.instances[around].parent
        ordinal = self.instances[around].stages
        self.instances[around].stages += 1
        others = tuple(pair for pair in mark.attributes if pair[0] != "i")
        return Mark(
            kind="stage", attributes=tuple(sorted((*others, ("i", str(ordinal)))))
        )

    def _kind(self, index: int) -> str:
        mark = self.instances[index].mark
        return "" if mark is None else mark.kind

    def fold(self, of_op: Sequence[int]) -> Regions:
        """Makes one TaskGraph of equal instances; drops those without operations."""
        groups: dict[object, int] = {None: 0}
        group_of = [0]
        for index, instance in enumerate(self.instances[1:], start=1):
            key = (
                group_of[instance.parent],
                instance.mark,
                index if self._kind(index) == "pipeline" else 0,
                _starred(instance.scope),
                tuple(instance.operations),
            )
            group_of.append(groups.setdefault(key, len(groups)))
        index_of: dict[int, int] = {0: 0}
        first: dict[int, int] = {0: 0}
        for instance_index in of_op:
            group = group_of[instance_index]
            index_of.setdefault(group, len(index_of))
            first.setdefault(group, instance_index)
        repeats = Counter(group_of)
        taken: Counter[str] = Counter()
        task_graphs = tuple(
            self._task_graph(index, first[group], repeats[group], taken)
            for group, index in index_of.items()
        )
        return Regions(
            task_graphs=task_graphs,
            of_op=tuple(index_of[group_of[i]] for i in of_op),
        )

    def _task_graph(
        self, index: int, instance_index: int, repeats: int, taken: Counter[str]
    ) -> TaskGraph:
        marks: list[Mark] = []
        path: list[int] = []
        at = instance_index
        while at:
            mark = self.instances[at].mark
            if mark is not None:
                marks.insert(0, mark)
                path.insert(0, at)
            at = self.instances[at].parent
        name = marks[-1].kind if marks else "default"
        taken[name] += 1
        return TaskGraph(
            index=index,
            marks=tuple(marks),
            name=name if taken[name] == 1 else f"{name}.{taken[name]}",
            scope=self.instances[instance_index].scope,
            repeats=repeats,
            path=tuple(path),
        )


def _starred(scope: str) -> str:
    return _COPY.sub("", scope)


def saved_slots(op: OpDraft, flows: Sequence[bool]) -> tuple[int, ...]:
    """Returns the slots of an operation that its backward pass reads."""
    saves = op.behaviour.saves
    if not saves or not any(flows[t] for t in op.results):
        return ()
    slots = (slot for slot, wrt in saves if flows[op.operands[wrt]])
    return tuple(sorted(set(slots)))


def _forward(walk: FlatProgram) -> list[bool]:
    """Returns whether each tensor is trained, or depends on a trained one."""
    reached = [tensor.trained for tensor in walk.tensors]
    inexact = [tensor.inexact for tensor in walk.tensors]
    changed = True
    while changed:
        changed = False
        for op in walk.ops:
            if op.behaviour.stops_gradient:
                continue
            if any(reached[t] for t in op.operands):
                for t in op.results:
                    reached[t] = inexact[t]
        for given, results in walk.ruled:
            if any(reached[t] for t in given):
                for t in results:
                    if inexact[t] and not reached[t]:
                        reached[t] = changed = True
        for produced, consumed in walk.loops:
            if reached[produced] and inexact[consumed] and not reached[consumed]:
                reached[consumed] = changed = True
    return reached


def _backward(walk: FlatProgram, loss: int, reached: Sequence[bool]) -> list[bool]:
    """Returns whether the loss's gradient reaches each tensor; see ``_forward``."""
    needed = [False] * len(walk.tensors)
    needed[loss] = True
    changed = True
    while changed:
        changed = False
        for op in reversed(walk.ops):
            if op.behaviour.stops_gradient:
                continue
            if any(needed[t] for t in op.results):
                for t in op.operands:
                    needed[t] = needed[t] or reached[t]
        for given, results in walk.ruled:
            if any(needed[t] for t in results):
                for t in given:
                    if reached[t] and not needed[t]:
                        needed[t] = changed = True
        for produced, consumed in walk.loops:
            if needed[consumed] and reached[produced] and not needed[produced]:
                needed[produced] = changed = True
    return needed


def loss_id(results: Sequence[Value]) -> int:
    """Returns the id of the tensor that is the loss's total.

    Raises:
        WhaleError: The loss is a constant.
    """
    loss = results[0]
    if loss is None:
        raise WhaleError(
            "the loss is a constant. It has to depend on the model's parameters; check "
            "that loss_fn uses the model that it is given."
        )
    return loss


def _check_gradient(walk: FlatProgram, flows: Sequence[bool], loss: int) -> None:
    if not flows[loss]:
        paths = [t.path for t in walk.tensors if t.trained]
        listed = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
        raise WhaleError(
            f"the loss depends on none of the {len(paths)} trained parameters "
            f"({listed}). Check that loss_fn uses the model that it is given, and that "
            "no stop_gradient cuts it off."
        )


def name_inputs(
    walk: FlatProgram,
    adapter: Adapter,
    leaves: Sequence[TracedLeaf],
    still: Sequence[bool],
) -> None:
    """Sets kinds, paths and metadata of the tensors that are inputs.

    Args:
        walk: The flat program.
        adapter: The model.
        leaves: Leaves of the batch.
        still: For each non-trained leaf, whether a step leaves it unchanged.
    """
    kinds: tuple[tuple[TensorKind, Sequence[str]], ...] = (
        ("param", adapter.param_paths),
        ("state", adapter.rest_paths),
        ("batch", [leaf.path for leaf in leaves]),
        ("rng", ["rng"] * adapter.takes_rng),
    )
    tensors = iter(walk.tensors)
    for kind, paths in kinds:
        for path in paths:
            tensor = next(tensors)
            tensor.kind, tensor.path = kind, path
    trained = len(adapter.param_paths)
    for tensor in walk.tensors[:trained]:
        tensor.trained = True
    for number in adapter.batch_gradients:
        walk.tensors[trained + len(adapter.rest_paths) + number].trained = True
    for number in _frozen_weights(walk, adapter, still):
        walk.tensors[trained + number].kind = "param"
    names = (*adapter.names, *adapter.rest_names)
    pinned = (*adapter.pinned, *adapter.rest_pinned)
    called = (*adapter.called, *adapter.rest_called)
    for tensor, *own in zip(walk.tensors, names, pinned, called, strict=False):
        if tensor.kind == "param":
            tensor.names, tensor.pinned, tensor.called = own


def _frozen_weights(
    walk: FlatProgram, adapter: Adapter, still: Sequence[bool]
) -> list[int]:
    """Returns the indices of the non-trained leaves that are weights.

    A weight is a leaf that no step changes. It is a parameter of the model, or products
    multiply values by it, such as a quantised kernel in a variable of another kind.
    """
    first = len(adapter.param_paths)
    rest = walk.tensors[first : first + len(still)]
    may = [n for n, (same, leaf) in enumerate(zip(still, rest, strict=True)) if same]
    large = {first + n for n in may if len(rest[n].shape) > 1}
    kernels = _multiplied(walk, large, {first + n for n in may} - large)
    return [
        n for n in may if (adapter.frozen[n] and rest[n].shape) or first + n in kernels
    ]


def _multiplied(walk: FlatProgram, given: set[int], small: set[int]) -> set[int]:
    """Returns the inputs by which products multiply values, through casts and scales.

    ``small`` has the inputs that no step changes and that have at most one dimension,
    such as scales and zero points. A value that is computed from them and from
    constants alone is neither a weight nor a value of the batch.
    """
    if not given:
        return set()
    params = {t for t, tensor in enumerate(walk.tensors) if tensor.kind == "param"}
    weight = params | given
    fixed = small | {t for t, v in enumerate(walk.tensors) if v.kind == "const"}
    carried = {consumed for _, consumed in walk.loops}
    source = {t: frozenset({t}) for t in given}
    result: set[int] = set()
    for op in walk.ops:
        own = [source.get(t, frozenset[int]()) for t in op.operands]
        strangers = [t for t in op.operands if t not in weight]
        values = _reads_values(op, weight)
        if len(strangers) == len(op.operands) and fixed.issuperset(strangers):
            fixed.update(t for t in op.results if t not in carried)
        elif not strangers or (not values and fixed.issuperset(strangers)):
            weight.update(op.results)
            source |= dict.fromkeys(op.results, frozenset[int]().union(*own))
        elif op.kind in LOOKUPS:
            # A table of positions is no weight, but a table of quantised embeddings is.
            table = walk.tensors[op.operands[0]]
            quantised = table.itemsize_bytes == 1 and table.dtype != "bool"
            result |= own[0] if quantised else set[int]()
        elif op.behaviour.matmul is not None:
            sides = [t in weight for t in op.operands[:2]]
            if sum(sides) == 1:
                result |= own[sides.index(True)]
    return result


def _reads_values(op: OpDraft, weight: set[int]) -> bool:
    return op.behaviour.matmul is not None or (
        op.kind in LOOKUPS and op.operands[0] in weight
    )


def graph_of(
    walk: FlatProgram,
    loss: int,
    leaves: Sequence[TracedLeaf],
    num_micro_batches: int,
    weighted: bool,
    entered: Sequence[Mark],
    others: Sequence[Value] = (),
) -> Graph:
    """Returns the graph of a flat program whose inputs have been named.

    The graph lacks the residuals of loops; ``with_stacked`` adds them, because they
    need a derivative of each loop.

    Args:
        walk: The flat program.
        loss: Id of the tensor that is the loss's total.
        leaves: Leaves of the batch.
        num_micro_batches: Number of micro-batches into which the batch was cut.
        weighted: Whether the user gave the loss's weight.
        entered: Marks that were entered while tracing.
        others: Results of the program besides the total.

    Raises:
        WhaleError: No parameter reaches the loss, or marks nest in a forbidden way.
    """
    # A trained tensor counts as differentiable even if no gradient reaches it.
    reached = _forward(walk)
    needed = _backward(walk, loss, reached)
    flows = [
        tensor.trained or (reached[t] and needed[t])
        for t, tensor in enumerate(walk.tensors)
    ]
    _check_gradient(walk, flows, loss)
    result = regions(walk.ops, walk.tensors)
    labels = {op.labels for op in walk.ops}
    marks = {mark for one in labels for mark, _ in one}
    first_batch = next(i for i, t in enumerate(walk.tensors) if t.kind == "batch")
    batch_dims = tuple(
        (first_batch + index, leaf.axis)
        for index, leaf in enumerate(leaves)
        if leaf.axis is not None
    )
    some, axis = batch_dims[0]
    unknown = (op.kind for op in walk.ops if op.behaviour.unknown)
    graph = Graph(
        tensors=_tensors(walk, flows),
        ops=_ops(walk, flows, result.of_op),
        task_graphs=result.task_graphs,
        loss=loss,
        batch_size=walk.tensors[some].shape[axis],
        batch_dims=batch_dims,
        num_micro_batches=num_micro_batches,
        weighted=weighted,
        unknown_primitives=tuple(dict.fromkeys(unknown)),
        undeclared_marks=tuple(str(mark) for mark in entered if mark not in marks),
        whole=tuple(dict.fromkeys(v for v in others if v is not None)),
        without_gradient=frozenset(
            t for t, x in enumerate(walk.tensors) if x.trained and not needed[t]
        ),
    )
    return replace(graph, model_hash=model_hash(graph, leaves))


def with_stacked(graph: Graph, walk: FlatProgram) -> Graph:
    """Returns a graph to which the residuals of loops were added.

    Args:
        graph: Graph from ``graph_of``.
        walk: The flat program of the graph.
    """
    flows = [tensor.differentiable for tensor in graph.tensors]
    if not walk.kept:
        return graph
    return replace(
        graph, stacked=LoopResiduals(functools.partial(walk.scan_residuals, flows))
    )


def _tensors(walk: FlatProgram, flows: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            id=index,
            shape=draft.shape,
            dtype=draft.dtype,
            itemsize_bytes=draft.itemsize_bytes,
            kind=draft.kind,
            path=draft.path,
            names=draft.names,
            pinned=draft.pinned,
            called=draft.called,
            differentiable=flows[index],
        )
        for index, draft in enumerate(walk.tensors)
    )


def _ops(
    walk: FlatProgram, flows: Sequence[bool], of_op: Sequence[int]
) -> tuple[Op, ...]:
    return tuple(
        Op(
            kind=draft.kind,
            position=draft.position,
            operands=draft.operands,
            results=draft.results,
            factors=draft.behaviour.factors,
            reshape=draft.behaviour.reshape,
            elementwise=draft.behaviour.elementwise,
            flops=draft.behaviour.flops,
            matmul=draft.behaviour.matmul,
            saves=saved_slots(draft, flows),
            trip=draft.trip,
            task_graph=region,
            remat=draft.remat,
            kept=draft.kept,
            scope=draft.scope,
            unknown=draft.behaviour.unknown,
            mask=draft.behaviour.mask,
            chunks=draft.chunks,
            windows=draft.behaviour.windows,
        )
        for draft, region in zip(walk.ops, of_op, strict=True)
    )


def model_hash(graph: Graph, leaves: Sequence[TracedLeaf]) -> str:
    """Returns the hash by which plans recognise their model and loss.

    Sixteen hex digits cover leaves, global batch, marks and the number of products of
    each kind. After a dash, eight digits cover the operations of the loss.

    Args:
        graph: Graph of the loss as the user wrote it.
        leaves: Leaves of the batch.
    """
    model = [
        ("state" if t.frozen else t.kind, t.path, t.shape, t.dtype)
        for t in graph.tensors
        if t.kind in ("param", "state")
    ]
    batch = [(leaf.path, leaf.shape, str(leaf.dtype), leaf.axis) for leaf in leaves]
    # The number of products of each kind is the same in other versions of JAX and with
    # other micro-batches, and yet distinguishes two losses of one model.
    kinds = Counter(op.kind for op in graph.ops if op.matmul is not None)
    marks = {mark for region in graph.task_graphs for mark in region.marks}
    marked = sorted(map(scope_name, marks))
    text = json.dumps([model, batch, marked, sorted(kinds.items())])
    digits = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{digits}-{_loss_hash(graph)}"


_OF_SHAPES: Final = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "reshape",
    "squeeze",
    "transpose",
}
"""Operations that change the shape or the dtype alone; sizes decide how many occur."""


def _loss_hash(graph: Graph) -> str:
    # Literal numbers are left out, as a mean divides by the size of a micro-batch.
    kinds = Counter(op.kind for op in graph.ops if op.kind not in _OF_SHAPES)
    text = json.dumps(sorted(kinds.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:8]
