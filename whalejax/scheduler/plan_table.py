"""Makes the table of a job: its best plan for each number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from whalejax.api import job_plans
from whalejax.api.plan import plan as make_plan
from whalejax.meshes import Cluster, DeviceKind
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.why import layout_text
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.uneven_replicas import devices_of_kind
from whalejax.planner.step_options import options_of
from whalejax.scheduler.job_table import JobOption, batch_efficiency
from whalejax.user_code.losses import Job


def planned_options(
    job: Job,
    cluster: Cluster,
    numbers: Iterable[int],
    *,
    batches: Sequence[int] = (),
    noise_scale: float = 0.0,
    **settings: Any,
) -> list[JobOption]:
    """Plans a job for numbers of devices of each kind, and returns its options.

    Args:
        job: Job with its model, batches and optimizer.
        cluster: Devices on which it may run.
        numbers: Numbers of devices.
        batches: Samples of each global batch, the job's own first; default: its own.
        noise_scale: Gradient-noise scale in samples, for larger batches.
        settings: Settings of ``wh.plan``, such as ``precision``.

    Returns:
        An option for each kind, number and batch that has a plan.
    """
    result = []
    own = batches[0] if batches else job.batch_size or 1
    for kind in {node.kind.name: node.kind for node in cluster.nodes}.values():
        name = kind.name if len(cluster.kinds) > 1 else ""
        part = devices_of_kind(cluster, kind, _count(cluster, kind))
        for batch in batches or (own,):
            efficiency = batch_efficiency(batch, own, noise_scale)
            plans = plans_by_number(job, part, numbers, batch=batch, **settings)
            result += [
                option_of(plan, name, number, batch, efficiency)
                for number, plan in plans.items()
            ]
    return result


def plans_by_number(
    job: Job,
    cluster: Cluster,
    numbers: Iterable[int],
    *,
    batch: int | None = None,
    **settings: Any,
) -> dict[int, Plan]:
    """Returns for each number of devices the best plan of a job on at most that number.

    A number that is not a power of two is skipped if half of it gains nothing over
    fewer devices: its odd factor then divides no dimension.

    Args:
        job: Job with its model, batches and optimizer.
        cluster: Devices of one kind.
        numbers: Numbers of devices.
        batch: Samples of a global batch; default: the job's own number.
        settings: Settings of ``wh.plan``.

    Returns:
        Plans by number of devices; numbers without a plan are left out.
    """
    plans: dict[int, Plan] = {}
    best: Plan | None = None
    (kind,) = cluster.kinds
    gains_nothing: set[int] = set()
    for number in sorted({n for n in numbers if n <= cluster.num_devices}):
        fewer, is_odd = best, bool(number & (number - 1))
        if not (is_odd and number / 2 in gains_nothing):
            part = devices_of_kind(cluster, kind, number)
            best = _plan_on(job, part, batch, fewer, settings)
        if best is fewer is not None:
            gains_nothing.add(number)
        if best is not None:
            plans[number] = best
    return plans


def _count(cluster: Cluster, kind: DeviceKind) -> int:
    return sum(n.count for n in cluster.nodes if n.kind.name == kind.name)


def option_of(
    plan: Plan,
    kind: str,
    number: int,
    batch: int,
    efficiency: float = 1.0,
) -> JobOption:
    """Returns a plan as an option of a job.

    Args:
        plan: Plan to convert.
        kind: Device kind; empty if there is only one.
        number: Number of devices that the job gets.
        batch: Samples of a global batch.
        efficiency: Progress per sample relative to the job's own batch.
    """
    return JobOption(
        place=(kind, number),
        samples_per_second=batch / plan.time.step_seconds,
        efficiency=efficiency,
        batch=batch,
        layout=layout_text(plan),
    )


def _plan_on(
    job: Job, part: Cluster, batch: int | None, fewer: Plan | None, settings: Any
) -> Plan | None:
    """Returns the best plan on some devices, or ``fewer`` if that is as fast."""
    if fewer is not None and fewer.question is not None:
        try:
            # Plans that leave devices idle are plans for fewer devices.
            plan = fewer.what_if(cluster=part, allow_idle=False)
        except PlanError:
            return fewer
    else:
        shapes = jax.eval_shape(lambda: job_plans.first_batch(job, batch))
        try:
            plan = make_plan(
                job.loss_fn,
                job_plans.abstract_model(job),
                shapes,
                optimizer=job.optimizer,
                cluster=part,
                allow_idle=True,
                **settings,
            )
        except PlanError:
            return fewer
    if fewer is not None and fewer.time.step_seconds <= plan.time.step_seconds:
        return fewer
    return plan


def fixed_plan_options(
    plan: Plan, cluster: Cluster, numbers: Iterable[int], batch: int
) -> Iterator[JobOption]:
    """Yields the options of a job whose plan may change only its number of replicas.

    Args:
        plan: Plan on some devices of one kind.
        cluster: Devices on which it may run, of the same kind.
        numbers: Numbers of devices.
        batch: Samples of a global batch.

    Yields:
        An option for each number of devices that makes whole replicas which divide the
        batch equally.
    """
    sizes = plan.axis_sizes
    spread = "fsdp" if "fsdp" in sizes else "data"
    kept = {axis: size for axis, size in sizes.items() if axis != spread}
    size = math.prod(kept.values())
    fixed = {
        **options_of(plan),
        "zero": plan.zero,
        "num_micro_batches": None,
        "remat": dict(plan.remat) or "none",
        "attention": dict(plan.attention) or "gather",
        "offload": plan.offload or "none",
    }
    for number in sorted({n for n in numbers if n % size == 0}):
        part = devices_of_kind(cluster, cluster.kinds[0], number)
        mesh = {**kept, spread: number // size}
        try:
            other = plan.what_if(cluster=part, mesh=mesh, **fixed)
        except PlanError:
            continue
        yield option_of(other, "", number, batch)


def tried_numbers(least: int, most: int) -> list[int]:
    """Returns the numbers of devices to plan: both limits, and 1, 2, 3, 4, 6, 8, 12 …

    Args:
        least, most: Minimum and maximum number of devices.

    >>> tried_numbers(1, 20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    steps = (base << shift for shift in range(most.bit_length()) for base in (1, 3))
    return sorted({least, most, *(n for n in steps if least <= n <= most)})


def larger_batches(least: int, most: int) -> list[int]:
    """Returns the allowed batches of a job: its own, and its doublings.

    Args:
        least, most: Samples of its own batch, and of its largest allowed batch.

    >>> larger_batches(64, 400)
    [64, 128, 256]
    """
    batches = [least]
    while 2 * batches[-1] <= most:
        batches.append(2 * batches[-1])
    return batches
