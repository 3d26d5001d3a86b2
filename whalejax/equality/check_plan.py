"""``wh.check``: starts a process that compares a reduced plan with one device."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import optax

from whalejax.adapters.base import Adapter, adapt
from whalejax.capture.batch import aval_of
from whalejax.equality.check_errors import CheckError
from whalejax.equality.check_request import CheckRequest, virtual_devices
from whalejax.equality.check_run import CheckResult as CheckResult
from whalejax.equality.check_run import CheckRun
from whalejax.equality.mesh_reduction import reduced_mesh
from whalejax.equality.random_data import sample
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number, short_repr
from whalejax.meshes.errors import WhaleError, tell
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.runtime.plan_compatibility import check_planned, check_same_shapes
from whalejax.user_code.argument_checks import refuse_bad_optimizer
from whalejax.verification.processes import run


SECONDS: Final = 600.0
"""Default time limit of a check."""

MEMORY_PART: Final = 0.5
"""Default memory limit of a check, as a fraction of this machine's memory."""

_MOST_SECONDS: Final = 10**6
_WORKER: Final = "whalejax.equality.check_worker"

_QUICK: Final = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
"""Options that skip machine-code optimisation, which changes no layouts or
collectives.
"""


@names_arguments("wh.check")
def check(
    plan: Plan,
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    trainable: Any = None,
    axis_names: Any = None,
    batch_axes: Any = 0,
    odd: bool = True,
    seed: int = 0,
    timeout_seconds: float = SECONDS,
    memory_bytes: int | None = None,
) -> CheckResult:
    """Runs a plan at reduced sizes on virtual CPUs, and compares with one device.

    Another process runs one step with the layout, options and executor of the plan.
    Mesh axes above 1 stay above 1, and each shard of a dimension has a few elements.
    The error of a loss, gradient or updated parameter is ‖difference‖ / ‖true‖. The
    divisor is at least 1/1000 of the root mean square of the norms of all leaves.

    Args:
        plan: Plan from ``wh.plan`` or ``wh.Plan.load``.
        loss_fn: Loss of the plan.
        model: Model of the plan, abstract or real. From real arrays, a few values are
            taken and perturbed; otherwise values are random.
        batch: Global batch, abstract or real, with values as for ``model``. Indices
            are within the bounds of their tables.
        optimizer: Optax transformation; default: gradient descent.
        trainable, axis_names, batch_axes: Arguments of ``wh.plan``, unchanged.
        odd: Whether to run a second check, with an odd number of elements per device.
        seed: Seed of the random numbers.
        timeout_seconds: Seconds after which the process is killed.
        memory_bytes: Memory limit of the process; default: half of this machine's.

    Returns:
        Errors and reduced sizes, which ``print`` shows. ``is_right`` is True if all
        errors are within their limits.

    Raises:
        PlanError: The plan is an estimate, has tables, is for a swarm, or is for
            another model or batch.
        WhaleError: No run could be compared, the process died or took too long, or an
            argument is invalid.

    >>> import jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> def loss_fn(net, x):
    ...     return (jnp.tanh(x @ net["w"]) ** 2).mean()
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> plan = wh.plan(loss_fn, net, x, optimizer=optax.sgd(0.1), cluster="h100:8")
    >>> wh.check(plan, loss_fn, net, x, optimizer=optax.sgd(0.1)).is_right
    True
    """
    _check_arguments(plan, odd, seed, timeout_seconds, memory_bytes)
    if plan.tables is not None:
        raise PlanError(
            "this plan has embedding tables, which wh.check does not support. Train "
            "a few steps with smaller tables, with and without tables=, and compare; "
            "or compile the plan with plan.verify() or whalejax verify"
        )
    refuse_bad_optimizer(optimizer)
    check_planned(plan, batch, batch_axes)
    adapter = adapt(model, loss_fn, trainable=trainable, axis_names=axis_names)
    check_same_shapes(plan, adapter)
    return check_adapted(
        plan,
        adapter,
        batch,
        optimizer=optimizer,
        batch_axes=batch_axes,
        multiples=(2, 3) if odd else (2,),
        seed=seed,
        timeout_seconds=timeout_seconds,
        memory_bytes=memory_bytes,
    )


def _check_arguments(
    plan: Plan, odd: bool, seed: int, timeout_seconds: float, memory_bytes: int | None
) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan is {short_repr(plan)}; expected the result of wh.plan or "
            "wh.Plan.load"
        )
    if not plan.runnable:
        raise PlanError(
            "this plan is an estimate (runnable=False), and has no program to check. "
            "Plan again without runnable=False"
        )
    if plan.swarm is not None:
        raise PlanError(
            "this plan is for a swarm, whose peers run separate programs; wh.check "
            "does not support that. Plan without swarm=True"
        )
    problems = Arguments("wh.check")
    problems.switch("odd", odd)
    problems.whole("seed", seed, least=0, most=2**31 - 1)
    _check_seconds(timeout_seconds, problems)
    problems.whole("memory_bytes", memory_bytes, least=1, none=True)
    problems.raise_if_any()


def _check_seconds(seconds: float, problems: Arguments) -> None:
    if not is_number(seconds) or not 0 < seconds <= _MOST_SECONDS:
        problems.refuse(
            "timeout_seconds",
            seconds,
            f"a number of seconds above 0, at most {_MOST_SECONDS}",
        )


def check_adapted(
    plan: Plan,
    adapter: Adapter,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    batch_axes: Any,
    multiples: tuple[int, ...],
    seed: int,
    timeout_seconds: float,
    memory_bytes: int | None,
) -> CheckResult:
    """Runs ``check`` for an adapted model.

    Args:
        plan: A runnable plan.
        adapter: Adapter of the model, real or abstract.
        batch: Global batch, real or abstract.
        optimizer, batch_axes, seed, timeout_seconds, memory_bytes: Arguments of
            ``check``, unchanged.
        multiples: Number of elements per device along a sharded dimension, of each run.

    Raises:
        CheckError: No run could be compared; lists the reasons.
    """
    started = time.monotonic()
    request = check_request(
        plan,
        adapter,
        batch,
        optimizer=optimizer,
        batch_axes=batch_axes,
        multiples=multiples,
        seed=seed,
        limit_bytes=memory_bytes or _half_of_memory(),
    )
    devices = request.target.num_devices
    tell(f"checking on {devices} virtual devices, in another process")
    runs, failures = _run_checker(request, timeout_seconds)
    if any(not run.is_right and run.precision == "f32" for run in runs):
        left = max(1.0, timeout_seconds - (time.monotonic() - started))
        runs = _confirmed(request, runs, left)
    if not runs:
        raise CheckError(
            "the plan was not checked: " + "; ".join(failures or ["nothing to run"])
        )
    return CheckResult(
        plan_hash=plan.hash,
        runs=tuple(runs),
        unchecked=tuple(failures),
        seconds=time.monotonic() - started,
    )


def check_request(
    plan: Plan,
    adapter: Adapter,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    batch_axes: Any,
    multiples: tuple[int, ...],
    seed: int,
    limit_bytes: int,
) -> CheckRequest:
    """Returns the request to the checking process.

    Args:
        plan, adapter, batch, optimizer, batch_axes, multiples, seed: Arguments of
            ``check_adapted``, unchanged.
        limit_bytes: Memory limit of the process.
    """
    devices = max(reduced_mesh(plan, multiple).num_devices for multiple in multiples)
    leaves = jax.tree.leaves((adapter.params, adapter.rest))
    return CheckRequest(
        plan=_without_predictions(plan).document(),
        target=virtual_devices(devices),
        adapter=adapter.without_values(),
        optimizer=optimizer,
        batch=jax.tree.map(aval_of, batch),
        batch_axes=batch_axes,
        samples=(
            [sample(leaf) for leaf in leaves],
            [sample(leaf) for leaf in jax.tree.leaves(batch)],
        ),
        multiples=multiples,
        seed=seed,
        wide=False,
        limit_bytes=limit_bytes,
    )


def _without_predictions(plan: Plan) -> Plan:
    stages = plan.stages
    if stages is not None:
        plans = tuple(map(_without_predictions, stages.plans))
        stages = dataclasses.replace(stages, paces=(), plans=plans)
    return dataclasses.replace(
        plan,
        stages=stages,
        pipelines=tuple(map(_without_predictions, plan.pipelines)),
        candidates=(),
        question=None,
    )


def _run_checker(
    request: CheckRequest, timeout_seconds: float
) -> tuple[list[CheckRun], list[str]]:
    """Runs the checking process; returns its runs and failures."""
    answer = run(
        request,
        limit_seconds=timeout_seconds,
        worker=_WORKER,
        task="checking the plan at reduced sizes",
        limit_name="timeout_seconds= (--timeout)",
        xla_flags=_QUICK,
    ).data
    if "failure" in answer:
        raise CheckError(f"the plan was not checked: {answer['failure']}")
    runs = [CheckRun.from_data(data) for data in answer["runs"]]
    return runs, list(answer["failures"])


def _confirmed(
    request: CheckRequest, runs: list[CheckRun], timeout_seconds: float
) -> list[CheckRun]:
    """Repeats runs beyond their limit in float64, and replaces them by the repeated.

    If a repeated run is within its limit, the errors were due to rounding.
    """
    tell("repeating in float64 the runs that differ")
    wide = dataclasses.replace(request, wide=True)
    try:
        again, _ = _run_checker(wide, timeout_seconds)
    except WhaleError:
        return runs
    wide_runs = {(run.extents, run.precision): run for run in again}
    return [
        run if run.is_right else wide_runs.get((run.extents, run.precision), run)
        for run in runs
    ]


def _half_of_memory() -> int:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * 10**9
    return int(MEMORY_PART * pages * size)
