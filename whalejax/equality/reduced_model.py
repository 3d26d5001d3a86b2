"""Reduces the sizes of a model and its loss, where possible.

First the user's code is traced with smaller arrays. This fails if the code has fixed
sizes; then its traced program runs at the reduced sizes. If an equation is impossible
at these sizes, its dimensions are not reduced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.adapters.base import Adapter
from whalejax.capture import Captured, capture
from whalejax.capture.batch import aval_of
from whalejax.capture.precision import at_precision
from whalejax.equality.check_errors import CheckError
from whalejax.equality.resized_program import ResizedProgram, UnresizableError
from whalejax.equality.role_sizes import tied_roles
from whalejax.equality.skipped_layers import SkippedLayers, skipped_layers
from whalejax.planner.model.analysis import GraphAnalysis, analyse_graph
from whalejax.user_code.losses import LossResult


Way = Literal["code", "program", "own sizes"]

_MOST_TRIES: Final = 12
"""Largest number of traces; each trace restores a dimension that cannot be reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model with its traced loss.

    Attributes:
        adapter: Model, without values.
        batch: Abstract global batch.
        batch_axes: Argument of ``wh.plan``, unchanged.
        num_micro_batches: Number of micro-batches in a step.
        precision: Precision of the plan.
        captured: Traced loss at the precision of the plan.
        analysed: Logical dimensions of the loss.
    """

    adapter: Adapter
    batch: Any
    batch_axes: Any
    num_micro_batches: int
    precision: str
    captured: Captured
    analysed: GraphAnalysis

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        batch: Any,
        batch_axes: Any,
        num_micro_batches: int,
        precision: str,
    ) -> PlannedModel:
        """Traces a model's loss and finds its logical dimensions."""
        captured = capture(
            at_precision(adapter, precision),
            batch,
            num_micro_batches=num_micro_batches,
            batch_axes=batch_axes,
        )
        return cls(
            adapter=adapter,
            batch=batch,
            batch_axes=batch_axes,
            num_micro_batches=num_micro_batches,
            precision=precision,
            captured=captured,
            analysed=analyse_graph(captured.graph),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedModel:
    """A model at reduced sizes.

    Attributes:
        planned: Traced model at reduced sizes.
        way: Program of the run; see ``CheckRun.way``.
        sizes: Reduced size of each role.
        kept: Pairs of a role that could not be reduced, and the reason.
        layers: Number of layers in a Python loop of which only three run; 0 if all run.
    """

    planned: PlannedModel
    way: Way
    sizes: Mapping[int, int]
    kept: tuple[tuple[int, str], ...] = ()
    layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizedAdapter(Adapter):
    """Adapter of a model whose loss is a resized program."""

    program: ResizedProgram

    def loss(self, params: Any, rest: Any, batch: Any, rng: Any = None) -> LossResult:
        """Evaluates the resized program."""
        values = jax.tree.leaves((params, rest, batch))
        values += [rng] if self.takes_rng else []
        total, weight, *others = self.program.run(values)
        rest_tree: Any = jax.tree.structure(rest)
        after = others[len(others) - rest_tree.num_leaves :]
        return LossResult(
            total=jnp.asarray(total),
            weight=jnp.asarray(weight),
            weighted=self.program.captured.graph.weighted,
            rest=rest_tree.unflatten(after),
        )


def reduced_models(
    model: PlannedModel,
    sizes: Mapping[int, int],
    num_micro_batches: int,
    *,
    skips: bool,
) -> Iterator[ReducedModel]:
    """Yields forms of a model at reduced sizes, the best first.

    Args:
        model: Model at its own sizes.
        sizes: Reduced size of each role.
        num_micro_batches: Reduced number of micro-batches.
        skips: Whether equal layers of a Python loop may be skipped.

    Raises:
        CheckError: The traced program cannot run at other sizes.
    """
    skipped = skipped_layers(model.captured) if skips else None
    if skipped is not None:
        yield from _by_program(model, sizes, num_micro_batches, skipped)
    if not sizes and num_micro_batches == model.num_micro_batches:
        yield ReducedModel(planned=model, way="own sizes", sizes={})
        return
    # After any error of the user's code, its traced program can be tried.
    try:
        yield _by_code(model, sizes, num_micro_batches)
    except Exception:
        yield from _by_program(model, sizes, num_micro_batches)
        return
    yield from _by_program(model, sizes, num_micro_batches)


def own_sizes(model: PlannedModel, num_micro_batches: int) -> ReducedModel:
    """Returns a model at its own sizes, except for the number of samples."""
    roles = model.analysed.dims.batch
    same = num_micro_batches == model.num_micro_batches
    sizes = {} if same else {role.index: role.size for role in roles}
    shaped = _at_sizes(model, sizes, num_micro_batches, model.adapter)
    return ReducedModel(planned=shaped, way="own sizes", sizes={})


def _by_code(
    model: PlannedModel, sizes: Mapping[int, int], num_micro_batches: int
) -> ReducedModel:
    planned = _at_sizes(model, sizes, num_micro_batches, model.adapter)
    return ReducedModel(planned=planned, way="code", sizes=sizes)


def _by_program(
    model: PlannedModel,
    sizes: Mapping[int, int],
    num_micro_batches: int,
    skipped: SkippedLayers | None = None,
) -> Iterator[ReducedModel]:
    if model.captured.axes:
        raise CheckError(
            f"the loss uses the mesh axes {', '.join(model.captured.axes)} by name, so "
            "its traced program cannot run at other sizes"
        )
    sizes, kept = dict(sizes), list[tuple[int, str]]()
    tied = [*tied_roles(model.analysed.graph, model.analysed.dims)]
    for _ in range(_MOST_TRIES):
        try:
            adapter = _resize_model(model, sizes, skipped)
            planned = _at_sizes(model, sizes, num_micro_batches, adapter)
        except UnresizableError as error:
            blamed = error.roles & sizes.keys()
            batch = {role.index for role in model.analysed.dims.batch}
            if not sizes:
                raise CheckError(error.text) from error
            # Restore other dimensions before that of the samples.
            blamed = blamed - batch or blamed or frozenset(sizes)
            blamed = blamed.union(*(group for group in tied if blamed & group.keys()))
            for role in blamed & sizes.keys():
                kept.append((role, error.text))
                sizes.pop(role)
            continue
        yield ReducedModel(
            planned=planned,
            way="program",
            sizes=sizes,
            kept=tuple(kept),
            layers=0 if skipped is None else skipped.layers,
        )
        return


def _resize_model(
    model: PlannedModel, sizes: Mapping[int, int], skipped: SkippedLayers | None
) -> ResizedAdapter:
    own = model.adapter
    fields = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
    program = ResizedProgram(
        captured=model.captured,
        analysed=model.analysed,
        sizes=dict(sizes),
        skipped=skipped,
    )
    return ResizedAdapter(**fields, program=program)


def _at_sizes(
    model: PlannedModel,
    sizes: Mapping[int, int],
    num_micro_batches: int,
    adapter: Adapter,
) -> PlannedModel:
    shapes = ResizedProgram(
        captured=model.captured, analysed=model.analysed, sizes=sizes
    )
    numbers = iter(range(len(model.captured.graph.tensors)))

    def leaf(x: Any) -> Any:
        aval, tensor = aval_of(x), next(numbers)
        return _compat.abstract(shapes.shape(tensor), aval.dtype)

    params = jax.tree.map(leaf, adapter.params)
    rest = jax.tree.map(leaf, adapter.rest)
    axes = model.captured.batch_axes
    leaves, result = jax.tree.flatten(model.batch)
    tree: Any = result
    batch = [
        _global(leaf(x), axis, num_micro_batches)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    adapter = dataclasses.replace(adapter, params=params, rest=rest)
    return PlannedModel.of(
        adapter.without_values(),
        tree.unflatten(batch),
        model.batch_axes,
        num_micro_batches,
        model.precision,
    )


def _global(leaf: Any, axis: int | None, num_micro_batches: int) -> Any:
    if axis is None:
        return leaf
    shape = list(leaf.shape)
    shape[axis] *= num_micro_batches
    return _compat.abstract(tuple(shape), leaf.dtype)


def state_bytes(model: PlannedModel) -> int:
    """Returns the bytes of a model's parameters, other state and batch."""
    leaves = jax.tree.leaves((model.adapter.params, model.adapter.rest, model.batch))
    avals = [aval_of(x) for x in leaves]
    return sum(math.prod(x.shape) * _compat.itemsize_bytes(x.dtype) for x in avals)
