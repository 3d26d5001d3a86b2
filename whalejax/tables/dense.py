"""The loss without its lookups, as a separate loss.

Its model has the parameters that are not tables, by their paths, and all non-trained
leaves; its batch has the looked-up vectors in addition to the user's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from whalejax.adapters.base import Adapter, adapt
from whalejax.adapters.leaves import is_key
from whalejax.capture import capture
from whalejax.capture.loss_options import as_planned
from whalejax.lowering.spmd.constraints import constraints_of
from whalejax.lowering.spmd.evaluate import evaluate, named_sharding
from whalejax.planner.plan.plan import Plan
from whalejax.planner.search.spmd_search import analysed_for
from whalejax.tables.recognize import TableProgram
from whalejax.user_code.losses import Aux, WeightedLoss


TENSOR: Final = "tensor"

BATCH_AXES: Final = ("data", "fsdp")
"""Mesh axes that divide the samples of the dense part."""

ALL_AXES: Final = (*BATCH_AXES, TENSOR)
"""Mesh axes that divide the samples of lookups, and the tables."""

UNUSED: Final = "unused"
"""Name of the placeholder parameter of a model that has only tables."""


def dense_paths(adapter: Adapter, program: TableProgram) -> list[str]:
    """Returns the paths of the trained leaves that are not tables, in order."""
    return [
        path
        for number, path in enumerate(adapter.param_paths)
        if number not in program.tables
    ]


def dense_params(
    adapter: Adapter, program: TableProgram, params: Any
) -> dict[str, Any]:
    """Returns the trained leaves that are not tables, by their paths.

    Args:
        adapter: The model.
        program: Loss of the model.
        params: Trained leaves, in the structure of ``adapter.params``.
    """
    leaves = zip(adapter.param_paths, jax.tree.leaves(params), strict=True)
    kept = set(dense_paths(adapter, program))
    found = {path: leaf for path, leaf in leaves if path in kept}
    return found or {UNUSED: np.zeros((), np.float32)}


def dense_model(adapter: Adapter, program: TableProgram) -> dict[str, Any]:
    """Returns the abstract model of the dense part.

    Args:
        adapter: The model, without values.
        program: Loss of the model.
    """
    rest = jax.tree.leaves(adapter.rest)
    return {
        "dense": dense_params(adapter, program, adapter.params),
        "rest": dict(zip(adapter.rest_paths, rest, strict=True)),
    }


def dense_outputs(
    adapter: Adapter,
    program: TableProgram,
    params: Mapping[str, Any],
    rest: Sequence[Any],
    batch: Sequence[Any],
    vectors: Sequence[Any],
    key: Any,
) -> tuple[Any, Any, Any, Any]:
    """Returns (total, weight, metrics, rest) of the loss.

    Args:
        adapter: The model.
        program: Loss of the model, cut at the lookups.
        params: Trained leaves that are not tables, by their paths.
        rest, batch: Leaves of the non-trained state, and of the batch.
        vectors: Vectors of each lookup.
        key: Random key of a loss that takes one, or None.
    """
    ordered = [params[path] for path in dense_paths(adapter, program)]
    others = [*rest, *batch, *([key] if adapter.takes_rng else [])]
    outputs = program.loss(ordered, others, vectors)
    count = len(jax.tree.leaves(adapter.rest))
    total, weight = outputs[:2]
    metrics = outputs[2 : len(outputs) - count]
    return total, weight, metrics, outputs[len(outputs) - count :]


def dense_batch(program: TableProgram, batch: Any) -> dict[str, Any]:
    """Returns the abstract batch of the dense part.

    Args:
        program: Loss of the model, cut at the lookups.
        batch: Global batch, abstract.
    """
    vectors = [
        jax.ShapeDtypeStruct(one.vectors_shape, one.dtype) for one in program.lookups
    ]
    return {"batch": batch, "vectors": vectors}


def dense_loss(adapter: Adapter, program: TableProgram) -> Callable[..., Any]:
    """Returns the loss of ``dense_model`` and a batch with vectors.

    It reports the metrics of the complete loss, followed by the new non-trained leaves
    except random keys.

    Args:
        adapter: The model, without values.
        program: Loss of the model, cut at the lookups.
    """

    def run(model: Any, batch: Any, key: Any) -> Any:
        rest = [model["rest"][path] for path in adapter.rest_paths]
        leaves = jax.tree.leaves(batch["batch"])
        total, weight, metrics, changed = dense_outputs(
            adapter, program, model["dense"], rest, leaves, batch["vectors"], key
        )
        if UNUSED in model["dense"]:
            total = total + 0 * model["dense"][UNUSED].astype(total.dtype)
        numbers = [leaf for leaf in changed if not is_key(leaf)]
        reported = {f"{n:05}": x for n, x in enumerate([*metrics, *numbers])}
        return WeightedLoss(total, weight), Aux(metrics=reported)

    if adapter.takes_rng:
        return lambda model, batch, rng: run(model, batch, rng)
    return lambda model, batch: run(model, batch, None)


class DensePart:
    """The loss without its lookups, as planned: with remat, precision and layout.

    Args:
        plan: Plan of the dense part.
        adapter: The model, without values.
        program: Loss of the model, cut at the lookups.
        batch: Global batch, abstract.
        mesh: Devices of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        adapter: Adapter,
        program: TableProgram,
        batch: Any,
        mesh: Mesh,
    ) -> None:
        model, loss = dense_model(adapter, program), dense_loss(adapter, program)
        own = adapt(model, loss, trainable="dense.*").without_values()
        captured = as_planned(capture(own, dense_batch(program, batch)), plan)
        analysed = analysed_for(plan, captured.graph)
        self._constraints = constraints_of(plan, analysed, captured)
        self._jaxpr, self._mesh, self._adapter = captured.jaxpr, mesh, adapter
        self._specs = [leaf.spec for leaf in plan.batch]
        self._num_metrics = program.metrics.num_leaves
        self._is_tensor_parallel = dict(mesh.shape)[TENSOR] > 1

    def __call__(
        self,
        params: Mapping[str, Any],
        rest: Sequence[Any],
        batch: Sequence[Any],
        vectors: Sequence[Any],
        key: Any,
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """Returns (total, weight, metrics, rest) of the loss.

        Args:
            params: Trained leaves that are not tables, by their paths.
            rest, batch: Leaves of the non-trained state, and of the batch.
            vectors: Vectors of each lookup.
            key: Random key; read only if the loss takes one.
        """
        model = dict(zip(self._adapter.rest_paths, rest, strict=True))
        batch = [*batch, *vectors]
        shared = [
            jax.lax.with_sharding_constraint(leaf, named_sharding(spec, self._mesh))
            for leaf, spec in zip(batch, self._specs, strict=True)
        ]
        keys = [key] if self._adapter.takes_rng else []
        given = [*jax.tree.leaves(params), *jax.tree.leaves(model), *shared, *keys]
        total, weight, *others = evaluate(
            self._jaxpr, given, self._constraints, self._mesh
        )
        metrics, others = others[: self._num_metrics], others[self._num_metrics :]
        changed = iter(others)
        kept = [leaf if is_key(leaf) else next(changed) for leaf in rest]
        return total, weight, metrics, kept

    def gather(self, vectors: Sequence[Any]) -> list[Any]:
        """Returns looked-up vectors as the dense part reads them.

        Devices of one tensor-parallel group look up vectors of different samples, and
        each needs the vectors of all.

        Args:
            vectors: Vectors of each lookup, divided over all devices.
        """
        return self._between(
            vectors,
            lambda x: jax.lax.all_gather(x, TENSOR, tiled=True),
            (ALL_AXES, BATCH_AXES),
        )

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients of vectors, divided over all devices: inverse of
        ``gather``.

        Args:
            gradients: Gradients of each lookup's vectors, complete.
        """
        count = self._mesh.shape[TENSOR]

        def own_samples(x: Any) -> Any:
            size = len(x) // count
            first = jax.lax.axis_index(TENSOR) * size
            return jax.lax.dynamic_slice_in_dim(x, first, size)

        return self._between(gradients, own_samples, (BATCH_AXES, ALL_AXES))

    def _between(
        self,
        arrays: Sequence[Any],
        run: Callable[[Any], Any],
        axes: tuple[tuple[str, ...], tuple[str, ...]],
    ) -> list[Any]:
        """Runs a function on each device's samples under tensor parallelism."""
        if not self._is_tensor_parallel:
            return [*arrays]
        given, result = map(PartitionSpec, axes)
        mapped: Any = jax.shard_map(
            lambda own: [run(x) for x in own],
            mesh=self._mesh,
            in_specs=(given,),
            out_specs=result,
            check_vma=False,
        )
        found: list[Any] = mapped([*arrays])
        return found
