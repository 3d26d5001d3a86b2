"""``whalejax check`` and ``whalejax train --check``: compare a plan with one device."""

from __future__ import annotations

import json
from typing import Any, Final

from rich.console import Console

from whalejax.adapters.base import adapt
from whalejax.api import job_plans
from whalejax.cli.options import CheckCommand
from whalejax.cli.plan_source import planned_job
from whalejax.cli.progress import Working, make_console
from whalejax.distributed.standard_streams import say
from whalejax.equality.check_plan import check as check_plan
from whalejax.equality.check_plan import check_adapted
from whalejax.equality.check_run import CheckResult
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.user_code.losses import Job


TRAIN_SECONDS: Final = 60.0
"""Maximum time of the check before the first training step."""


def check(command: CheckCommand) -> int:
    """Compares a plan file with one device, and prints the result.

    Args:
        command: Options of the command.

    Returns:
        Exit status: 0, or 1 if the plan differs from one device.
    """
    job, plan = planned_job(command.plan, command.model, command.set)
    with Working("checking", quiet=command.quiet):
        result = check_plan(
            plan,
            job.loss_fn,
            job_plans.abstract_model(job),
            job_plans.first_batch(job, plan.batch[0].shape[0]),
            optimizer=job.optimizer,
            odd=not command.even,
            seed=command.seed,
            timeout_seconds=command.timeout,
        )
    if command.json:
        print(json.dumps(result.document()))
    else:
        make_console().print(str(result), markup=False, highlight=False, soft_wrap=True)
    return 0 if result.is_right else 1


def check_before_training(
    job: Job, model: Any, batch: Any, plan: Plan, console: Console
) -> CheckResult | None:
    """Compares the plan of a training run with one device, for at most a minute.

    Args:
        job: Job to train.
        model: Abstract model.
        batch: The first global batch.
        plan: Plan of the training.
        console: Console to write to.

    Returns:
        The result. None if time ran out or the check could not run; the reason is
        printed.

    Raises:
        WhaleError: The plan differs from one device.
    """
    try:
        with Working("checking", quiet=console.quiet):
            result = check_adapted(
                plan,
                adapt(model, job.loss_fn),
                batch,
                optimizer=job.optimizer,
                batch_axes=0,
                multiples=(2,),
                seed=0,
                timeout_seconds=TRAIN_SECONDS,
                memory_bytes=None,
            )
    except WhaleError as error:
        say(f"whalejax: --check: {error}")
        return None
    if not result.is_right:
        raise WhaleError(
            f"--check: {result}\nNothing was trained. Train with another plan, such as "
            "one with another --mesh, and please report this plan"
        )
    worst = result.worst
    console.print(
        "checked at reduced sizes on "
        f"{count_text(worst.num_devices, 'virtual device')} in {result.seconds:.0f} "
        f"s: the largest error of a gradient or parameter is {worst.error:.1e} (limit "
        f"{worst.limit:.1e})",
        markup=False,
    )
    return result
