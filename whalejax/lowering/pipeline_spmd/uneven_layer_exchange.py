"""Distributes stacked layers to stages with unequal numbers of layers.

A stack of layers cannot be stored in unequal parts. So each stage stores a part of
every layer: the axis ``stage`` shards another dimension. At the start of a step, stages
exchange these parts for full layers. At the end, they exchange gradients of layers for
gradients of parts. Each stage has as many slots as the stage with the most layers has
layers. Surplus slots contain the stage's last layer, and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.capture.layer_scan import Stack
from whalejax.lowering.spmd.spmd_executor import Program
from whalejax.planner.pipeline.layer_stack import STAGE, of_stage
from whalejax.planner.sharding.layout import Spec


def rows_of(layers: Sequence[int]) -> np.ndarray:
    """Returns the layer in each slot of each stage.

    Args:
        layers: Number of layers of each stage.

    Returns:
        ``int32[stages, most]``, where ``most`` is the largest number of layers.

    >>> rows_of([3, 1]).tolist()
    [[0, 1, 2], [3, 3, 3]]
    """
    counts = np.asarray(layers)[:, None]
    first = np.cumsum(counts)[:, None] - counts
    place = np.minimum(np.arange(max(layers)), counts - 1)
    rows: np.ndarray = (first + place).astype(np.int32)
    return rows


def places_of(layers: Sequence[int]) -> np.ndarray:
    """Returns the slot of each layer among the slots of all stages.

    >>> places_of([3, 1]).tolist()
    [0, 1, 2, 3]
    >>> places_of([1, 3]).tolist()
    [0, 3, 4, 5]
    """
    most = max(layers)
    places = [s * most + np.arange(count) for s, count in enumerate(layers)]
    return np.concatenate(places).astype(np.int32)


def distribute_layers(
    program: Program, stack: Stack, params: Sequence[Any], layers: Sequence[int]
) -> list[Any]:
    """Regroups stored parameters by the stages that compute with them.

    Args:
        program: Loss, optimizer and plan to run.
        stack: Scan over layers, with its parameters.
        params: Flat parameters, as stored.
        layers: Number of layers of each stage.
    """
    leaves, result = program.plan.trained, list(params)
    for i in stack.params:
        result[i] = _own_layers(program, params[i], leaves[i].param_spec, layers)
    return result


def dealt_rest(program: Program, stack: Stack, rest: Any, layers: Sequence[int]) -> Any:
    """Regroups the non-trainable state of layers by the stages that compute with it.

    Args:
        program: Loss, optimizer and plan to run.
        stack: Scan over layers, with its parameters.
        rest: Non-trainable state, as stored.
        layers: Number of layers of each stage.
    """
    if min(layers) == max(layers) or not stack.frozen:
        return rest
    tree: Any = jax.tree.structure(rest)
    result = jax.tree.leaves(rest)
    for i in stack.frozen:
        stored = program.plan.leaf(program.adapter.rest_paths[i]).param_spec
        result[i] = _own_layers(program, result[i], stored, layers)
    return tree.unflatten(result)


def _own_layers(program: Program, x: Any, stored: Spec, layers: Sequence[int]) -> Any:
    rows = rows_of(layers).reshape(-1)
    padded = jnp.take(x, rows, axis=0, mode="clip")
    (own_layers,) = _through(program, padded, stored, _staged(stored))
    return own_layers


def collected(
    program: Program, stack: Stack, gradients: Sequence[Any], layers: Sequence[int]
) -> tuple[Any, ...]:
    """Regroups gradients of the stages as parameters are stored.

    Args:
        program: Loss, optimizer and plan to run.
        stack: Scan over layers, with its parameters.
        gradients: Gradients of the regrouped parameters.
        layers: Number of layers of each stage.
    """
    result = list(gradients)
    for i in stack.params:
        kept = program.plan.trained[i].gradient_spec
        (padded,) = _through(program, gradients[i], _staged(kept), kept)
        result[i] = jnp.take(padded, places_of(layers), axis=0, mode="clip")
        (result[i],) = program.constrain([result[i]], [kept])
    return tuple(result)


def _staged(spec: Spec) -> Spec:
    first, *others = of_stage(spec)
    return ((STAGE, *first), *others)


def _through(program: Program, x: Any, before: Spec, after: Spec) -> list[Any]:
    return program.constrain(program.constrain([x], [before]), [after])
