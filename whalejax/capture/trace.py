"""Trace a loss at micro-batch shape and bring out its graph.

This is where capture begins: it checks the batch, flattens model and batch into one
flat function, traces that once with ``jax.make_jaxpr`` and hands the jaxpr to the walk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from whalejax import _compat
from whalejax.adapters import Adapter, dotted
from whalejax.annotations import recording, scope_name
from whalejax.capture.gradients import differentiable, saved_slots
from whalejax.capture.regions import found_marks, regions
from whalejax.capture.walk import Position, Value, Walk
from whalejax.meshes.problems import Problems, WhaleError
from whalejax.planner.graph import Graph, Mark, Op, Tensor, TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A traced loss: as plain data for the planner and as a jaxpr for lowering.

    Attributes:
        graph: what the planner reads.
        jaxpr: of the flat function ``fn(*params, *rest, *batch, [rng])`` which gives
            ``(total, weight, *metrics, *new_rest)``, all leaves in flatten order.
        adapter: the model that was traced.
        batch_tree: structure of the batch.
        out_tree: structure of ``(total, weight, metrics, new_rest)``.
        outputs: for every equation by position, call-like ones included, the tensor
            ids of its results; None for a scalar constant.
        results: the same for the flat function's own results.
        batch_axes: the batch dimension of each batch leaf; None where it has none.
        notes: what could not be counted, in words.
    """

    graph: Graph
    jaxpr: Any
    adapter: Adapter
    batch_tree: Any
    out_tree: Any
    outputs: dict[Position, tuple[Value, ...]]
    results: tuple[Value, ...]
    batch_axes: tuple[int | None, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchLeaf:
    """One leaf of the batch as it is traced."""

    path: str
    shape: tuple[int, ...]
    micro_shape: tuple[int, ...]
    dtype: Any
    axis: int | None


def capture(
    adapter: Adapter,
    batch: Any,
    rng: Any = None,
    *,
    num_micro_batches: int = 1,
    batch_axes: Any = 0,
) -> Captured:
    """Trace a loss and describe it as plain data.

    Args:
        adapter: the model and its loss.
        batch: the GLOBAL batch, arrays or anything with a shape and a dtype.
        rng: a random key like the one that training will use; any key where left out.
        num_micro_batches: into how many parts the batch is cut; one part is traced.
        batch_axes: the batch dimension of every leaf, or a pytree of them; None for a
            leaf without one.

    Returns:
        Graph, jaxpr and what lowering needs to call it.

    Raises:
        WhaleError: the loss is no scalar or depends on no parameter, the batch leaves
            disagree or do not divide, or annotations nest in a forbidden way. What the
            loss function itself raises is passed on unchanged.
    """
    leaves, batch_tree = _batch_leaves(batch, batch_axes, num_micro_batches)
    flat = _FlatLoss(adapter, batch_tree)
    arguments = [*flat.model_avals, *_micro_avals(leaves)]
    if adapter.takes_rng:
        arguments.append(_key_aval(rng))
    with recording() as record:
        jaxpr = _compat.trace(flat, arguments)
    walk = Walk()
    results = walk.run(jaxpr)
    loss = _loss_id(results)
    _name_inputs(walk, adapter, leaves)
    graph = _graph(walk, loss, leaves, num_micro_batches, flat.weighted, record.marks)
    return Captured(
        graph=graph,
        jaxpr=jaxpr,
        adapter=adapter,
        batch_tree=batch_tree,
        out_tree=flat.out_tree,
        outputs=walk.outputs,
        results=results,
        batch_axes=tuple(leaf.axis for leaf in leaves),
        notes=tuple(walk.notes),
    )


class _FlatLoss:
    """The loss from flat leaves to flat results; remembers what the trace showed."""

    def __init__(self, adapter: Adapter, batch_tree: Any) -> None:
        self.adapter = adapter
        self.batch_tree = batch_tree
        self.out_tree: Any = None
        self.weighted = False
        self._params_tree: Any
        self._rest_tree: Any
        params, self._params_tree = jax.tree.flatten(adapter.params)
        rest, self._rest_tree = jax.tree.flatten(adapter.rest)
        self.model_avals = [_aval(leaf) for leaf in (*params, *rest)]

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
        self.weighted = result.weighted
        results, self.out_tree = jax.tree.flatten(
            (result.total, result.weight, dict(result.metrics), result.rest)
        )
        return results


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf) if not hasattr(leaf, "dtype") else leaf
    return _compat.abstract(
        tuple(aval.shape), jax.dtypes.canonicalize_dtype(aval.dtype, True)
    )


def _key_aval(rng: Any) -> Any:
    if rng is None:
        return jax.eval_shape(lambda: jax.random.key(0))
    return _compat.abstract(tuple(rng.shape), rng.dtype)


def _micro_avals(leaves: Sequence[_BatchLeaf]) -> list[jax.ShapeDtypeStruct]:
    return [_compat.abstract(leaf.micro_shape, leaf.dtype) for leaf in leaves]


def _batch_leaves(
    batch: Any, batch_axes: Any, num_micro_batches: int
) -> tuple[list[_BatchLeaf], Any]:
    """The batch's leaves at micro-batch shape, checked; all problems at once."""
    count = num_micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise WhaleError(f"num_micro_batches={count!r}: expected a positive integer.")
    problems = Problems("batch")
    with_paths, tree = jax.tree_util.tree_flatten_with_path(batch)
    axes = _axes_of(batch_axes, tree)
    leaves: list[_BatchLeaf] = []
    sizes: dict[str, int] = {}
    for (path, value), axis in zip(with_paths, axes, strict=True):
        name, aval = f"batch.{dotted(path)}" if path else "batch", _aval(value)
        shape = tuple(aval.shape)
        micro = shape
        if axis is not None:
            if not -len(shape) <= axis < len(shape):
                problems.add(
                    f"{name}: shape {shape} has no dimension {axis}. Every leaf holds "
                    "its samples along dimension 0; say otherwise with batch_axes= "
                    "(None for a leaf without samples)."
                )
                continue
            axis %= len(shape)
            sizes[name] = shape[axis]
            part = shape[axis] // num_micro_batches
            micro = (*shape[:axis], part, *shape[axis + 1 :])
        leaves.append(
            _BatchLeaf(
                path=name, shape=shape, micro_shape=micro, dtype=aval.dtype, axis=axis
            )
        )
    _check_sizes(sizes, num_micro_batches, problems)
    problems.raise_if_any()
    return leaves, tree


def _axes_of(batch_axes: Any, tree: Any) -> list[int | None]:
    if batch_axes is None or isinstance(batch_axes, int):
        return [batch_axes] * tree.num_leaves
    axes, axes_tree = jax.tree.flatten(batch_axes, is_leaf=lambda x: x is None)
    if len(axes) != tree.num_leaves:
        raise WhaleError(
            f"batch_axes has the structure {axes_tree}, the batch {tree}. Give one "
            "integer, or one for every leaf of the batch."
        )
    return axes


def _check_sizes(
    sizes: dict[str, int], num_micro_batches: int, problems: Problems
) -> None:
    if not sizes:
        if not problems:
            problems.add("no leaf has a batch dimension. Give at least one array.")
        return
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        problems.add(
            f"the leaves differ in their number of samples: {listed}. Give all of them "
            "the same batch dimension, or say which it is with batch_axes=."
        )
        return
    size = next(iter(sizes.values()))
    if size == 0 or size % num_micro_batches:
        lower = size - size % num_micro_batches
        near = f"{lower} or " if lower else ""
        problems.add(
            f"{size} samples do not divide into {num_micro_batches} micro-batches. Use "
            f"a batch of {near}{lower + num_micro_batches}, or another "
            "num_micro_batches."
        )


def _loss_id(results: Sequence[Value]) -> int:
    loss = results[0]
    if loss is None:
        raise WhaleError(
            "the loss is a constant. It has to depend on the model's parameters; check "
            "that loss_fn uses the model that it is given."
        )
    return loss


def _check_gradient(walk: Walk, flows: Sequence[bool], loss: int) -> None:
    if not flows[loss]:
        paths = [t.path for t in walk.tensors if t.kind == "param"]
        listed = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
        raise WhaleError(
            f"the loss depends on none of the {len(paths)} trained parameters "
            f"({listed}). Check that loss_fn uses the model that it is given, and that "
            "no stop_gradient cuts it off."
        )


def _name_inputs(walk: Walk, adapter: Adapter, leaves: Sequence[_BatchLeaf]) -> None:
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
    for index in range(len(adapter.param_paths)):
        tensor = walk.tensors[index]
        tensor.names, tensor.pinned = adapter.names[index], adapter.pinned[index]


def _graph(
    walk: Walk,
    loss: int,
    leaves: Sequence[_BatchLeaf],
    num_micro_batches: int,
    weighted: bool,
    entered: Sequence[Mark],
) -> Graph:
    flows = differentiable(walk, loss)
    _check_gradient(walk, flows, loss)
    found = regions(walk.ops, walk.tensors)
    marks = found_marks(walk.ops)
    first_batch = next(i for i, t in enumerate(walk.tensors) if t.kind == "batch")
    batch_dims = tuple(
        (first_batch + index, leaf.axis)
        for index, leaf in enumerate(leaves)
        if leaf.axis is not None
    )
    some, axis = batch_dims[0]
    unknown = (op.kind for op in walk.ops if op.behaviour.unknown)
    return Graph(
        tensors=_tensors(walk, flows),
        ops=_ops(walk, flows, found.of_op),
        task_graphs=found.task_graphs,
        loss=loss,
        batch_size=walk.tensors[some].shape[axis],
        batch_dims=batch_dims,
        num_micro_batches=num_micro_batches,
        weighted=weighted,
        model_hash=_hash(walk, leaves, marks),
        unknown_primitives=tuple(dict.fromkeys(unknown)),
        undeclared_marks=tuple(str(mark) for mark in entered if mark not in marks),
    )


def _tensors(walk: Walk, flows: Sequence[bool]) -> tuple[Tensor, ...]:
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
            differentiable=flows[index],
        )
        for index, draft in enumerate(walk.tensors)
    )


def _ops(walk: Walk, flows: Sequence[bool], of_op: Sequence[int]) -> tuple[Op, ...]:
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
            scope=draft.scope,
            unknown=draft.behaviour.unknown,
        )
        for draft, region in zip(walk.ops, of_op, strict=True)
    )


def _hash(walk: Walk, leaves: Sequence[_BatchLeaf], marks: set[Mark]) -> str:
    """Sixteen hex digits over the leaves, the global batch and the marks."""
    model = [
        (t.kind, t.path, t.shape, t.dtype)
        for t in walk.tensors
        if t.kind in ("param", "state")
    ]
    batch = [(leaf.path, leaf.shape, str(leaf.dtype), leaf.axis) for leaf in leaves]
    text = json.dumps([model, batch, sorted(map(scope_name, marks))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
