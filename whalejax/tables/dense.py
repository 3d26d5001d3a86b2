"""The loss without its lookups, as a loss and a model of its own.

Its trained leaves are the parameters that are not tables, by their paths. Its batch has
the looked-up vectors in addition to the user's batch, and a step returns their
gradients. So executors run it like any other loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from whalejax.adapters.base import Adapter
from whalejax.capture.batch import aval_of
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.recognize import TableProgram
from whalejax.user_code.losses import Aux, WeightedLoss


STAGE: Final = "stage"

UNUSED: Final = "unused"
"""Name of the placeholder parameter of a model that has only tables."""

OLD_PREFIXES: Final = ("dense.", "rest.")
"""Prefixes of paths of the dense part in older plans."""


def lookup_axes(plan: Plan) -> dict[str, int]:
    """Returns the mesh axes that divide lookups and tables, with their sizes.

    They are all axes of size above 1; the axis of pipeline stages comes last. If each
    stage has axes of its own, or no axis is above 1, the result is one axis ``data``.

    Args:
        plan: Plan of the dense part.
    """
    if plan.stage_plans:  # Each stage has axes of its own.
        return {"data": plan.num_devices}
    sizes = {name: plan.axis_sizes.get(name, 1) for name in MESH_AXES}
    stages = sizes.pop(STAGE)
    found = {name: size for name, size in {**sizes, STAGE: stages}.items() if size > 1}
    return found or {"data": 1}


def dense_params(
    adapter: Adapter, program: TableProgram, params: Any
) -> dict[str, Any]:
    """Returns the trained leaves that are not tables, by their paths.

    If all leaves are tables, it returns the placeholder ``UNUSED``.

    Args:
        adapter: The model.
        program: Loss of the model, cut at its lookups.
        params: Trained leaves, in the structure of ``adapter.params``.
    """
    leaves = zip(adapter.param_paths, jax.tree.leaves(params), strict=True)
    tables = {adapter.param_paths[number] for number in program.tables}
    found = {path: leaf for path, leaf in leaves if path not in tables}
    return found or {UNUSED: np.zeros((), np.float32)}


def by_path(paths: Sequence[str], tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their dotted paths.

    Args:
        paths: Path of each leaf, in flatten order.
        tree: The tree.
    """
    return dict(zip(paths, jax.tree.leaves(tree), strict=True))


def dense_batch(program: TableProgram, batch: Any) -> dict[str, Any]:
    """Returns the abstract batch of the dense part.

    Args:
        program: Loss of the model, cut at its lookups.
        batch: Abstract global batch.
    """
    vectors = [
        jax.ShapeDtypeStruct(one.vectors_shape, one.dtype) for one in program.lookups
    ]
    return {"batch": batch, "vectors": vectors}


def dense_adapter(adapter: Adapter, program: TableProgram, batch: Any) -> Adapter:
    """Returns the dense part as a model with a loss.

    Args:
        adapter: The model, without values.
        program: Loss of the model, cut at its lookups.
        batch: Abstract global batch.
    """
    params = dense_params(adapter, program, adapter.params)
    rest = by_path(adapter.rest_paths, adapter.rest)
    paths, others = tuple(sorted(params)), tuple(sorted(rest))
    first = len(jax.tree.leaves(batch))

    def of_params(values: Sequence[tuple[str | None, ...]]) -> Any:
        known = dict(zip(adapter.param_paths, values, strict=True))
        return tuple(known.get(path, ()) for path in paths)

    def of_rest(values: Sequence[tuple[str | None, ...]]) -> Any:
        known = dict(zip(adapter.rest_paths, values, strict=True))
        return tuple(known[path] for path in others)

    form: Any = DenseForm(adapter)
    return dataclasses.replace(
        adapter,
        kind="pytree",
        params={path: aval_of(params[path]) for path in paths},
        rest=jax.tree.map(aval_of, rest),
        param_paths=paths,
        rest_paths=others,
        names=of_params(adapter.names),
        pinned=of_params(adapter.pinned),
        called=of_params(adapter.called),
        rest_names=of_rest(adapter.rest_names),
        rest_pinned=of_rest(adapter.rest_pinned),
        rest_called=of_rest(adapter.rest_called),
        short={path: n for path, n in adapter.short.items() if path in paths},
        batch_gradients=tuple(range(first, first + len(program.lookups))),
        _form=form,
        _loss_fn=DenseLoss(adapter, program),
    )


class DenseForm:
    """Form of the dense part: its parameters and other leaves, by their paths.

    Attributes:
        frozen: Paths of the model's weights that are not trained.
    """

    def __init__(self, adapter: Adapter) -> None:
        pairs = zip(adapter.rest_paths, adapter.frozen, strict=True)
        self.frozen = frozenset(path for path, is_frozen in pairs if is_frozen)

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        return model["params"], model["rest"]

    def join(self, params: Any, rest: Any) -> Any:
        return {"params": params, "rest": rest}

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        del model, rest
        return dict(variables)

    def rebuild(self, params: Any, rest: Any) -> Any:
        return self.join(params, rest)

    def evaluating(self) -> None:
        return None

    def without_values(self) -> DenseForm:
        return self


class DenseLoss:
    """Loss of the dense part, for batches of any number of samples.

    The user's loss is traced and cut at its lookups once per shape of the batch.
    """

    def __init__(self, adapter: Adapter, program: TableProgram) -> None:
        self._adapter, self._program = adapter, program
        self._cut: dict[str, TableProgram] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the model without programs, which hold variables of JAX."""
        return _dense_loss, (self._adapter, self._program.batch)

    def __call__(self, model: Any, batch: Any, key: Any = None) -> Any:
        adapter, program = self._adapter, self._program_for(batch["batch"])
        ordered = [model["params"][path] for path in self._paths(program)]
        leaves = [model["rest"][path] for path in adapter.rest_paths]
        leaves += jax.tree.leaves(batch["batch"])
        leaves += [key] if adapter.takes_rng else []
        outputs = program.loss(ordered, leaves, batch["vectors"])
        count = len(jax.tree.leaves(adapter.rest))
        total, weight = outputs[:2]
        if UNUSED in model["params"]:
            total = total + 0 * model["params"][UNUSED].astype(total.dtype)
        last = len(outputs) - count
        return (
            WeightedLoss(total, weight) if program.weighted else total,
            Aux(
                metrics=program.metrics.unflatten(outputs[2:last]),
                variables=by_path(adapter.rest_paths, outputs[last:]),
            ),
        )

    def _paths(self, program: TableProgram) -> list[str]:
        paths = enumerate(self._adapter.param_paths)
        return [path for number, path in paths if number not in program.tables]

    def _program_for(self, batch: Any) -> TableProgram:
        avals = jax.tree.map(aval_of, batch)
        text = str(jax.tree.leaves(avals))
        if text not in self._cut:
            found = cut_program(self._adapter, avals)
            if lookup_forms(found) != lookup_forms(self._program):
                raise PlanError(
                    "with another number of samples, the loss looks up other tables, "
                    "or other numbers of rows per sample. Look up the same rows for "
                    "each sample, or plan with num_micro_batches=1"
                )
            self._cut[text] = found
        return self._cut[text]


def lookup_forms(program: TableProgram) -> list[tuple[Any, ...]]:
    """Returns the properties of lookups that are equal for any number of samples.

    Args:
        program: Loss of the model, cut at its lookups.
    """
    return [
        (one.param, one.shape[1:], one.pooled, one.vectors_shape[1:])
        for one in program.lookups
    ]


def _dense_loss(adapter: Adapter, batch: Any) -> DenseLoss:
    return DenseLoss(adapter, cut_program(adapter, batch))
