"""Plans a job in a separate process, because planning runs the user's code.

The process reads the job from its standard input. The last JSON line of its output is
the table, or the reason why there is none.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from whalejax.api import job_plans
from whalejax.api.named_jobs import find_job, named_values
from whalejax.elastic.elastic_worker import precision_asked
from whalejax.elastic.replica_programs import MICRO_BATCHES, possible_counts
from whalejax.meshes import Cluster
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.job_book import told_options
from whalejax.scheduler.plan_table import (
    larger_batches,
    planned_options,
    tried_numbers,
)
from whalejax.user_code.losses import Job


_PACKAGE: Final = Path(__file__).resolve().parents[2]


def main() -> int:
    """Plans the job on standard input; prints the result."""
    told = json.loads(sys.stdin.read())
    try:
        result = planned(told)
    except WhaleError as error:
        result = {"refused": str(error)}
    except Exception as error:  # any error of the user's code
        result = {"refused": error_text(error)}
    print(f"\n{json.dumps(result)}", flush=True)  # after a possible incomplete line
    return 0


def planned(told: dict[str, Any]) -> dict[str, Any]:
    """Returns the table of a job, and the samples of its global batch.

    Args:
        told: Fields of the job's request, ``cluster`` as JSON, and ``units``, the
            number of devices that a job gets together, by kind.

    Raises:
        JobError: The job fits on no allowed number of devices, or its batch is unknown
            or cannot be divided.
    """
    cluster = Cluster.from_json(told["cluster"])
    job = find_job(told["model"], named_values(told["settings"]))
    batch = told["batch"] or job.batch_size
    if batch is None:
        raise JobError(
            f"{told['model']} does not say how many samples a batch has. Give --batch"
        )
    least, most = told["devices"]
    units: dict[str, int] = told["units"]
    numbers = {
        number * unit
        for unit in {*units.values()} or {1}
        if -(-least // unit) <= most // unit
        for number in tried_numbers(-(-least // unit), most // unit)
    }
    precision = precision_asked(told["precision"])
    options = planned_options(
        job,
        cluster,
        numbers,
        batches=larger_batches(batch, told["most_batch"] or batch),
        precision=precision,
    )
    options = [o for o in options if o.place[1] % units.get(o.place[0], 1) == 0]
    if not options:
        raise JobError(_refusal(job, cluster, batch, told, precision))
    micro_batches = told["micro_batches"] or possible_counts(batch, job.group_size)[0]
    if told["most_batch"] and micro_batches < 2:
        groups = f" in groups of {job.group_size}" if job.group_size else ""
        raise JobError(
            f"a batch of {count_text(batch, 'sample')}{groups} cannot be divided into "
            f"2 to {MICRO_BATCHES} micro-batches, so its step has one micro-batch. "
            "Larger batches are chosen by the gradient-noise scale, which needs two. "
            "Give another --batch, or --micro-batches"
        )
    if not told["mesh"]:
        platforms = {kind.name: kind.platform for kind in cluster.kinds}
        one = cluster.kinds[0].platform
        options = [
            option
            for option in options
            if platforms.get(option.place[0], one) != "cpu"
            # Each replica on CPUs gets a whole number of micro-batches.
            or option.place[1] <= max(micro_batches, least)
        ]
    if not options:
        raise JobError(
            f"a step of {count_text(batch, 'sample')} has "
            f"{count_text(micro_batches, 'micro-batch')}, at least "
            f"one for each CPU, and the job fits only on more CPUs than that. Give "
            "--micro-batches as many as devices, or a larger --batch"
        )
    return {"batch": batch, "options": told_options(options)}


def error_text(error: Exception) -> str:
    """Returns an error of the user's code in one line, with file and line number."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(_PACKAGE)
        and Path(frame.filename).is_file()
    ]
    place = f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
    text = str(error).partition("\n")[0]
    return f"the model cannot be traced: {type(error).__name__}: {text}{place}"


def _refusal(
    job: Job, cluster: Cluster, batch: int, told: dict[str, Any], precision: Any
) -> str:
    """Returns the planner's reason why a job fits on no number of devices."""
    least, most = told["devices"]
    why = ""
    try:
        shapes = job_plans.first_batch(job, batch)
        model = job_plans.abstract_model(job)
        job_plans.make_plan(job, model, shapes, cluster, precision=precision)
    except WhaleError as error:
        why = f": {error}"
    return (
        f"no number of devices from {least} to {most} of {cluster.describe()} holds a "
        f"batch of {count_text(batch, 'sample')} of {told['model']}{why}"
    )


if __name__ == "__main__":
    sys.exit(main())
