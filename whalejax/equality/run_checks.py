"""Runs a step of a plan at reduced sizes and on one device, and compares each leaf.

This module runs in the process of ``check_worker``. It tries several reduced forms of
the model, and uses the first one that the executor accepts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.capture.batch import aval_of
from whalejax.capture.split_checks import check_split
from whalejax.equality import random_data
from whalejax.equality.check_errors import CheckError
from whalejax.equality.check_request import CheckRequest
from whalejax.equality.check_run import CheckRun, LeafError, ReducedDimension
from whalejax.equality.index_bounds import batch_bounds
from whalejax.equality.mesh_reduction import MeshReduction, reduced_mesh
from whalejax.equality.one_device import leaf_errors, recording
from whalejax.equality.reduced_model import (
    PlannedModel,
    ReducedModel,
    own_sizes,
    reduced_models,
    state_bytes,
)
from whalejax.equality.reduced_plan import reduced_plan
from whalejax.equality.role_sizes import reduced_sizes
from whalejax.equality.true_step import TrueStep, true_step
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.plan_compatibility import check_same_model
from whalejax.runtime.train_step import step_of


TOLERANCE: Final = 1e-5
"""Least error limit in float32; for 16 bits see ``_tolerance``."""

NOISE_FACTOR: Final = 3.0
"""Accepted ratio of an error to the noise of ``_limits``."""

MOST_LIMIT: Final = 0.4
"""Largest error limit; doubled, halved or incomplete gradients have larger errors."""

_COPIES: Final = 4
"""Copies of the model's size: parameters, gradients, their record, optimizer state."""


def run_checks(request: CheckRequest) -> tuple[list[CheckRun], list[str]]:
    """Checks a plan with each number of elements per device of a request.

    Args:
        request: Plan, model and limits of the check.

    Returns:
        Comparisons, and the reasons why others were impossible.

    Raises:
        PlanError: The plan was made for another model, loss or batch.
    """
    plan = Plan.from_document(request.plan)
    adapter, batch = request.adapter, request.batch
    if request.wide:
        adapter = dataclasses.replace(
            adapter, params=_widened(adapter.params), rest=_widened(adapter.rest)
        )
        batch = _widened(batch)
    runs: list[CheckRun] = []
    failures: list[str] = []
    seen: set[str] = set()
    for one, multiples in _variants(plan, request):
        model = PlannedModel.of(
            adapter, batch, request.batch_axes, one.num_micro_batches, one.precision
        )
        if one == plan and not request.wide:
            check_same_model(plan, model.captured, batch)
            check_split(model.captured, plan)
        for multiple in multiples:
            try:
                mesh = reduced_mesh(one, multiple)
                sizes = reduced_sizes(one, model.analysed, mesh, multiple)
                key = str((precision_text(one), mesh, sorted(sizes.items())))
                if key not in seen:
                    seen.add(key)
                    runs.append(_run(request, one, model, mesh, sizes, multiple))
            except CheckError as error:
                what = f"{_extents(multiple)} extents in {precision_text(one)}"
                failures.append(f"{what}: {error}")
    return runs, failures


def _variants(
    plan: Plan, request: CheckRequest
) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Yields the plan with the multiples to check, and a 16-bit plan in float32 before.

    Rounding errors in 16 bits may be larger than those of a wrong layout.
    """
    exact = dataclasses.replace(plan, precision="f32", precisions=())
    yield exact, request.multiples
    if exact != plan and not request.wide:
        yield plan, request.multiples[:1]


def precision_text(plan: Plan) -> str:
    """Describes the computing type of a plan."""
    narrow = [f"{name} {kind}" for name, kind in plan.precisions]
    return ", ".join(narrow) or plan.precision


def _extents(multiple: int) -> str:
    return "odd" if multiple % 2 else "even"


def _run(
    request: CheckRequest,
    plan: Plan,
    model: PlannedModel,
    mesh: MeshReduction,
    sizes: dict[int, int],
    multiple: int,
) -> CheckRun:
    reasons: list[str] = []
    for reduced in _ways(plan, model, sizes, mesh, reasons):
        started = time.monotonic()
        try:
            _check_memory(request, reduced, mesh)
            small = reduced_plan(plan, model, reduced, mesh)
            result = _compare_step(request, small, reduced)
        # If a form of the model fails before the comparison, try the next one.
        except Exception as error:
            text = str(error) or type(error).__name__
            reasons.append(f"{reduced.way}: {text.strip():.600}")
            continue
        dims = model.analysed.dims
        return dataclasses.replace(
            result,
            extents=_extents(multiple),
            precision=precision_text(plan),
            way=reduced.way,
            axes=small.axes,
            num_devices=small.num_devices,
            num_micro_batches=small.num_micro_batches,
            dimensions=tuple(_dimensions(dims, reduced)),
            kept=tuple(
                f"{dims.roles[role].name} of {dims.roles[role].size}: {why}"
                for role, why in reduced.kept
            ),
            refused=tuple(reasons),
            seconds=time.monotonic() - started,
        )
    raise CheckError("; ".join(dict.fromkeys(reasons)) or "there is no way to run it")


def _ways(
    plan: Plan,
    model: PlannedModel,
    sizes: dict[int, int],
    mesh: MeshReduction,
    reasons: list[str],
) -> Iterator[ReducedModel]:
    """Yields the forms of a model to try, the full model last."""
    try:
        # The layers of stages are numbered, so none may be skipped.
        skips = plan.stages is None
        yield from reduced_models(model, sizes, mesh.num_micro_batches, skips=skips)
    except CheckError as error:
        reasons.append(str(error))
    if sizes and not mesh.sizes and not mesh.stage_layers:
        yield own_sizes(model, mesh.num_micro_batches)


def _check_memory(
    request: CheckRequest, reduced: ReducedModel, mesh: MeshReduction
) -> None:
    copies = _COPIES * (1 + mesh.num_devices)
    needed = state_bytes(reduced.planned) * copies
    if needed > request.limit_bytes:
        raise CheckError(
            f"the check may need {needed / 1e9:.1f} GB on {mesh.num_devices} virtual "
            f"devices; the limit is {request.limit_bytes / 1e9:.1f} GB. Raise it with "
            "memory_bytes= of wh.check, or check a smaller model of this kind"
        )


def _dimensions(dims: Any, reduced: ReducedModel) -> Iterator[ReducedDimension]:
    if reduced.layers:
        yield ReducedDimension(name="layers", size=reduced.layers, reduced=3)
    rows = [(dims.roles[i], size) for i, size in reduced.sizes.items()]
    for role, size in sorted(rows, key=lambda row: (-row[0].size, row[0].name)):
        yield ReducedDimension(name=role.name, size=role.size, reduced=size)


def _widened(tree: Any) -> Any:
    def one(x: Any) -> Any:
        aval = aval_of(x)
        wide = jnp.float64 if aval.dtype == jnp.float32 else aval.dtype
        return _compat.abstract(aval.shape, wide)

    return jax.tree.map(one, tree)


# Values of the arrays.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    params: Any
    rest: Any
    batch: Any
    key: Any


def _draw_numbers(request: CheckRequest, reduced: ReducedModel) -> _Numbers:
    chance = np.random.default_rng(request.seed)
    planned = reduced.planned
    adapter = planned.adapter
    weights, samples = request.samples
    count = len(adapter.param_paths)

    def tree(like: Any, leaves: Sequence[Any]) -> Any:
        structure: Any = jax.tree.structure(like)
        return structure.unflatten(list(leaves))

    def avals(like: Any) -> list[Any]:
        return [aval_of(x) for x in jax.tree.leaves(like)]

    return _Numbers(
        params=tree(
            adapter.params,
            random_data.weights(
                avals(adapter.params), weights[:count], chance, trained=True
            ),
        ),
        rest=tree(
            adapter.rest,
            random_data.weights(
                avals(adapter.rest), weights[count:], chance, trained=False
            ),
        ),
        batch=tree(
            planned.batch,
            random_data.batch(
                avals(planned.batch), samples, batch_bounds(planned.captured), chance
            ),
        ),
        key=jax.random.key(request.seed),
    )


def _compare_step(request: CheckRequest, plan: Plan, reduced: ReducedModel) -> CheckRun:
    planned, numbers = reduced.planned, _draw_numbers(request, reduced)
    devices = jax.devices()[: plan.num_devices]
    step = step_of(
        plan,
        planned.adapter,
        planned.batch,
        optimizer=recording(request.optimizer),
        batch_axes=request.batch_axes,
        devices=devices,
    )
    model = step.adapter.rebuild(numbers.params, numbers.rest)
    state, metrics = step(step.init_from(model, rng=numbers.key), numbers.batch)
    recorded = [np.asarray(g) for g in jax.tree.leaves(state.opt_state["gradient"])]
    after = [np.asarray(p) for p in jax.tree.leaves(state.params)]
    loss = float(metrics["loss"])
    del state
    true = true_step(plan, planned, request.optimizer)
    expected = true(numbers, recorded)
    _check_finite(expected)
    limit, parameter_limit, noise = _limits(
        plan, planned, true, numbers, expected, recorded
    )
    if max(limit, parameter_limit) > MOST_LIMIT:
        raise CheckError(
            f"rounding alone changes a gradient of one device by {noise:.1g} of its "
            f"norm, which may hide errors (the largest limit is {MOST_LIMIT}). Check "
            "the same layout with precision f32, or with another seed="
        )
    paths = planned.adapter.param_paths
    updated = leaf_errors(after, expected.params)
    return CheckRun(
        loss=loss,
        true_loss=expected.loss,
        loss_error=abs(loss - expected.loss) / max(abs(expected.loss), 1e-30),
        gradients=_leaves(paths, leaf_errors(recorded, expected.gradients)),
        parameters=_leaves(paths, updated),
        limit=limit,
        parameter_limit=parameter_limit,
        noise=noise,
    )


def _leaves(
    paths: Sequence[str], errors: Sequence[tuple[float, float]]
) -> tuple[LeafError, ...]:
    return tuple(
        LeafError(path=path, error=error, norm=norm)
        for path, (error, norm) in zip(paths, errors, strict=True)
    )


def _check_finite(expected: Any) -> None:
    if not np.isfinite(expected.loss):
        raise CheckError(
            f"on random data the loss is {expected.loss} on one device too, so nothing "
            "can be compared. Give wh.check a model and a batch with real values"
        )
    if not any(np.any(g) for g in expected.gradients):
        raise CheckError(
            "on random data every gradient is zero on one device, so nothing can be "
            "compared. Give wh.check a model and a batch with real values"
        )


def _limits(
    plan: Plan,
    planned: PlannedModel,
    true: Callable[..., TrueStep],
    numbers: _Numbers,
    expected: TrueStep,
    recorded: Sequence[np.ndarray],
) -> tuple[float, float, float]:
    """Returns the error limits of gradients and of parameters, and the noise.

    The noise is the change of one device's gradients if parameters change by one unit
    in the last place of the computing type. Updates have noise only if each rank has
    its own optimizer. Otherwise both sides apply the same gradients, those of the plan.
    """
    tolerance, unit = _tolerance(plan, planned)
    chance = np.random.default_rng(1)

    def perturb(x: Any) -> Any:
        sign = np.sign(chance.standard_normal(np.shape(x)))
        return (np.asarray(x, np.float64) * (1 + unit * sign)).astype(x.dtype)

    other = dataclasses.replace(numbers, params=jax.tree.map(perturb, numbers.params))
    again = true(other, recorded)
    noise = _largest(again.gradients, expected.gradients)
    of_params = 0.0
    if plan.combine == "adasum_updates":
        of_params = _largest(again.params, expected.params)
    limit = max(tolerance, NOISE_FACTOR * noise)
    return limit, max(tolerance, NOISE_FACTOR * of_params), noise


def _largest(got: Sequence[np.ndarray], true: Sequence[np.ndarray]) -> float:
    return max(error for error, _ in leaf_errors(got, true))


def _tolerance(plan: Plan, planned: PlannedModel) -> tuple[float, float]:
    """Returns the least error limit and the unit in the last place of the type."""
    kinds = {plan.precision, *dict(plan.precisions).values()}
    kinds.update(tensor.dtype for tensor in planned.captured.graph.tensors)
    if kinds & {"bf16", "bfloat16"}:
        return 2e-2, 2.0**-8
    if kinds & {"f16", "float16"}:
        return 5e-3, 2.0**-11
    if "float32" not in kinds and "float64" in kinds:
        return 1e-9, 2.0**-52
    return TOLERANCE, 2.0**-23
