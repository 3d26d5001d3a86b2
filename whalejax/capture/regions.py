"""Turns the marks around each operation into TaskGraphs.

An entry of an annotation is a *mark instance*; the operations directly inside one are a
region. Equal layers enter equal marks repeatedly. Instances with the same mark,
surrounding region and operations become one TaskGraph. Only pipelines stay separate, as
their stages have devices of their own. The position of a call decides its instance,
because JAX traces a jitted block once and calls it often.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from whalejax.capture.walk_records import Label, OpDraft, TensorDraft
from whalejax.meshes.errors import Problems
from whalejax.planner.model.graph import Mark, TaskGraph
from whalejax.user_code.annotations import nesting_problem


_COPY = re.compile(r"\d+|\b(?:jvp|transpose|vmap|checkpoint)\(|\)")

_DERIVED_STAGE = re.compile(r"transpose\(.*wh\.stage\[")
"""Matches a stage inside a differentiated function, not one that differentiates."""


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
    """TaskGraphs, and for every operation the index of its TaskGraph."""

    task_graphs: tuple[TaskGraph, ...]
    of_op: tuple[int, ...]


def regions(ops: Sequence[OpDraft], tensors: Sequence[TensorDraft]) -> Regions:
    """Finds the TaskGraphs of a walked program.

    Args:
        ops: Operations in program order.
        tensors: Tensors that the operations compute.

    Raises:
        WhaleError: Marks nest in a forbidden way; lists all.
    """
    _check_nesting(ops)
    tree = _Tree()
    of_op = [tree.enter(op) for op in ops]
    for op, instance in zip(ops, of_op, strict=True):
        shapes = tuple(tensors[t].shape for t in op.results)
        tree.instances[instance].operations.append((op.kind, shapes))
    return tree.fold(of_op)


def found_marks(ops: Sequence[OpDraft]) -> set[Mark]:
    """Returns all marks that cover an operation, as the user entered them."""
    return {mark for labels in {op.labels for op in ops} for mark, _ in labels}


def _check_nesting(ops: Sequence[OpDraft]) -> None:
    problems = Problems()
    if any(_DERIVED_STAGE.search(scope) for scope in {op.scope for op in ops}):
        problems.add(
            "stages are marked inside a function that the loss differentiates "
            "(jax.grad, jax.vjp): its backward pass runs through them from the last to "
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
        """Returns the innermost instance around an operation."""
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
        """Returns the depth of the first new mark; a lower stage starts a pipeline."""
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
        """Returns the stage numbered among the stages that really ran."""
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
        """Folds equal instances and numbers those with operations."""
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
