"""Computes the step of a plan on one device: loss, combined gradients, update.

The update uses the gradients of the plan's step instead of its own. Optimizers such as
Adam divide by gradients, so rounding errors of tiny gradients would change the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from whalejax.adapters.base import Adapter
from whalejax.capture.precision import at_precision
from whalejax.equality.one_device import Reference, reference
from whalejax.equality.reduced_model import PlannedModel, ResizedAdapter
from whalejax.equality.resized_program import ResizedProgram
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.optimizer_state import updates
from whalejax.planner.cost.adasum_cost import DATA, node_size
from whalejax.planner.model.repeated_layers import layers_by_path
from whalejax.planner.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueStep:
    """Results of a step on one device.

    Attributes:
        loss: Mean loss.
        gradients: Flat gradients that the optimizer would get.
        params: Flat parameters after the update.
    """

    loss: float
    gradients: list[np.ndarray]
    params: list[np.ndarray]


def true_step(
    plan: Plan, planned: PlannedModel, optimizer: optax.GradientTransformation | None
) -> Callable[..., TrueStep]:
    """Returns a function that computes a step on one device.

    Args:
        plan: Plan at reduced sizes.
        planned: Model at reduced sizes.
        optimizer: Optimizer of the user; None is gradient descent.

    Returns:
        Function of values (``params``, ``rest``, ``batch`` and ``key``) and of the flat
        gradients that the step of the plan gave to its optimizer.
    """
    adapter = _at_plan_precision(plan, planned)
    ranks = 1 if plan.combine == "mean" else plan.axis_sizes[DATA]
    run = reference(
        adapter, planned.captured.batch_axes, MicroBatchRows.of(plan), ranks=ranks
    )
    own = optax.with_extra_args_support(
        optax.sgd(0.125) if optimizer is None else optimizer
    )

    @jax.jit
    def change(gradients: Any, params: Any, loss: Any) -> Any:
        return updates(own, gradients, own.init(params), params, loss)[0]

    def step(numbers: Any, recorded: Sequence[np.ndarray]) -> TrueStep:
        result = run(numbers.params, numbers.rest, numbers.batch, numbers.key)
        structure: Any = jax.tree.structure(numbers.params)
        flat = structure.flatten_up_to(numbers.params)
        given = [np.asarray(g, p.dtype) for g, p in zip(recorded, flat, strict=True)]

        def apply_update(gradients: Sequence[Any]) -> list[Any]:
            tree = structure.unflatten(
                [np.asarray(g, p.dtype) for g, p in zip(gradients, flat, strict=True)]
            )
            return list(jax.tree.leaves(change(tree, numbers.params, result.loss)))

        if plan.combine == "adasum_updates":
            of_ranks = [apply_update(gradients) for gradients in result.gradients]
            added = _combine_ranks(plan, planned, of_ranks, [1.0] * ranks)
            gradients = _means(result.gradients, result.weights)
        else:
            gradients = _gradients(plan, planned, result)
            added = apply_update(given)
        tree = structure.unflatten(
            [np.asarray(u, p.dtype) for u, p in zip(added, flat, strict=True)]
        )
        after = jax.jit(optax.apply_updates)(numbers.params, tree)
        return TrueStep(
            loss=result.loss,
            gradients=gradients,
            params=[np.asarray(p) for p in jax.tree.leaves(after)],
        )

    return step


def _at_plan_precision(plan: Plan, planned: PlannedModel) -> Adapter:
    adapter = at_precision(planned.adapter, plan.precision)
    if not plan.precisions:
        return adapter
    narrow = planned.captured.with_precisions(plan.precisions)
    fields = {f.name: getattr(adapter, f.name) for f in dataclasses.fields(Adapter)}
    program = ResizedProgram(captured=narrow, analysed=planned.analysed, sizes={})
    return ResizedAdapter(**fields, program=program)


# Combination of the gradients of ranks.


def _gradients(plan: Plan, planned: PlannedModel, found: Reference) -> list[np.ndarray]:
    if plan.combine == "mean":
        return found.gradients[0]
    return _combine_ranks(plan, planned, found.gradients, found.weights)


def _means(
    of_ranks: Sequence[Sequence[Any]], weights: Sequence[float]
) -> list[np.ndarray]:
    total = sum(weights)
    return [
        np.asarray(
            sum(np.asarray(x, np.float64) * w for x, w in zip(xs, weights, strict=True))
            / total
        )
        for xs in zip(*of_ranks, strict=True)
    ]


def _combine_ranks(
    plan: Plan,
    planned: PlannedModel,
    of_ranks: Sequence[Sequence[Any]],
    weights: Sequence[float],
) -> list[np.ndarray]:
    size = node_size(plan.axis_sizes, plan.cluster, plan.combine)
    nodes = [
        _means(of_ranks[first : first + size], weights[first : first + size])
        for first in range(0, len(of_ranks), size)
    ]
    axes = layers_by_path(planned.captured.graph)
    result = []
    for path, tensors in zip(
        planned.adapter.param_paths, zip(*nodes, strict=True), strict=True
    ):
        one = axes.get(path)
        if one is None:
            result.append(adasum(tensors))
            continue
        layers = zip(*one.by_layer(np.stack(tensors)), strict=True)
        result.append(one.as_stored(np.stack([adasum(layer) for layer in layers])))
    return result


def adasum(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Computes adaptive summation (Maleki et al., 2021, eq. 5), pair by pair.

    Args:
        tensors: Tensors of one shape, in the order of their ranks.

    >>> adasum([np.array([1.0, 0.0]), np.array([0.0, 1.0])])
    array([1., 1.])
    """
    every = [np.asarray(x, np.float64) for x in tensors]
    while len(every) > 1:
        pairs = [every[i : i + 2] for i in range(0, len(every), 2)]
        every = [_pair(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return every[0]


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, one, other = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    first = 1 - (dot / (2 * one) if one else 0.0)
    second = 1 - (dot / (2 * other) if other else 0.0)
    return first * a + second * b
