"""The loss without its lookups, as a separate loss.

Its model has the parameters that are not tables, by their paths, and all non-trained
leaves; its batch has the looked-up vectors in addition to the user's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from whalejax.adapters.base import Adapter
from whalejax.tables.recognize import TableProgram
from whalejax.user_code.losses import WeightedLoss


UNUSED: Final = "unused"
"""Replaces the parameters if a model has only tables."""


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


def dense_loss(adapter: Adapter, program: TableProgram) -> Callable[..., Any]:
    """Returns the loss of ``dense_model`` and a batch with vectors, for the planner.

    Args:
        adapter: The model, without values.
        program: Loss of the model, cut at the lookups.
    """

    def run(model: Any, batch: Any, key: Any) -> Any:
        rest = [model["rest"][path] for path in adapter.rest_paths]
        leaves = jax.tree.leaves(batch["batch"])
        total, weight, _, _ = dense_outputs(
            adapter, program, model["dense"], rest, leaves, batch["vectors"], key
        )
        if UNUSED in model["dense"]:
            total = total + model["dense"][UNUSED].astype(total.dtype)
        return WeightedLoss(total, weight)

    if adapter.takes_rng:
        return lambda model, batch, rng: run(model, batch, rng)
    return lambda model, batch: run(model, batch, None)
