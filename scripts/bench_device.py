"""Measures the error of predicted step time and peak memory on one device.

Calibrates this machine's first device, then trains GPTs and a ResNet-50 on it for a few
steps over micro-batches and remat policies, each in a process of its own, because a
device's recorded peak memory never falls. On accelerators the GPTs have 125 million to
1.5 billion parameters and compute in bfloat16; on a CPU they are small.

    python scripts/bench_device.py [--models gpt-small,resnet50] [--batches 1,4]
                                   [--remat none,full] [--steps 5] [--rows FILE.json]
                                   [--seconds 480] [--seed 0] [--jobs 3]
    python scripts/bench_device.py --topology h100:1

Cases run in an order chosen by --seed, and none begins after --seconds. --jobs of them
are imported, planned and traced at a time; only one at a time uses the device, also for
autotuning. With --topology nothing runs: the real compiler of hardware that may be
absent reports the memory (``whalejax verify --setup-gpu`` once, or the extra
tpu-compile). Measured memory is the peak that the device reports, or, if it reports
none, as a CPU, the compiler's figure. --rows writes all rows. The last line is one JSON
object:

    rows                     number of rows
    time_mean, time_max      error of the step time relative to the measured time
    memory_mean, memory_max  error of the peak memory relative to the measured memory
    false_fits               cases that were predicted to fit, and did not
    left_out                 cases that --seconds did not reach
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TRANSFORMERS = ("gpt-small", "gpt-medium", "gpt-large", "gpt-xl")
SMALL = ("gpt", "gpt-small")
IMAGES = "resnet50"
BATCHES = {True: (1, 4, 16), False: (1, 2, 4)}
"""Samples of a micro-batch, on an accelerator and on a CPU."""

IMAGE_BATCHES = {True: (32, 64, 128), False: (4, 8)}
POLICIES = ("none", "dots", "full")
FULL_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Row:
    """One model, micro-batch and remat policy, predicted and measured.

    Attributes:
        device: Kind of the device, or the topology.
        predicted_seconds, measured_seconds: Seconds of a step; measured is None if
            nothing ran.
        predicted_bytes, measured_bytes: Bytes of peak memory; predicted is 0 without a
            plan, and measured None if it did not fit.
        note: Reason for a missing figure.
    """

    model: str
    batch: int
    remat: str
    device: str
    predicted_seconds: float
    predicted_bytes: int
    measured_seconds: float | None = None
    measured_bytes: int | None = None
    note: str = ""

    @property
    def time_error(self) -> float | None:
        """Error relative to the measured time; positive if it is too slow."""
        seconds = self.measured_seconds
        return None if seconds is None else self.predicted_seconds / seconds - 1.0

    @property
    def memory_error(self) -> float | None:
        """Error relative to the measured memory; positive if it is too large."""
        nbytes = self.measured_bytes
        return None if nbytes is None else self.predicted_bytes / nbytes - 1.0

    def __str__(self) -> str:
        seconds = "–" if self.measured_seconds is None else _ms(self.measured_seconds)
        memory = "–" if self.measured_bytes is None else _gb(self.measured_bytes)
        case = f"| {self.model} | {self.batch} | {self.remat} |"
        if not self.predicted_bytes:
            return f"{case}{' – |' * 6} {self.note} |"
        return (
            f"{case} {_ms(self.predicted_seconds)} | {seconds} | "
            f"{_share(self.time_error)} | {_gb(self.predicted_bytes)} | {memory} | "
            f"{_share(self.memory_error)} | {self.note} |"
        )


HEADER = (
    "| model | micro-batch | remat | predicted, ms | measured, ms | error | "
    "predicted, GB | measured, GB | error | |",
    "|---|---:|---|---:|---:|---:|---:|---:|---:|---|",
)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _plan(case: argparse.Namespace, cluster: Any, accelerator: bool) -> tuple[Any, Any]:
    """Returns the job and its plan for one device."""
    import whalejax as wh
    from whalejax import jobs, models

    job = models.job(case.model, annotated=False)
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, case.batch),
        optimizer=job.optimizer,
        cluster=cluster,
        precision="bf16" if accelerator else "f32",
        num_micro_batches=1,
        remat=case.remat,
        offload=(),
        attention="gather",
        loss_chunks=1,
    )
    return job, plan


def compiled_row(case: argparse.Namespace) -> Row:
    """Compiles a case for a topology."""
    import whalejax as wh

    topology = case.topology
    _, plan = _plan(case, wh.cluster(topology), accelerator=topology != "local")
    report = plan.verify(topology).document()
    if report["refused"] or report["failure"]:
        raise SystemExit(f"{topology}: {report['refused'] or report['failure']}")
    memory = {term["name"]: term for term in report["memory"]}
    peak = memory.get("peak", {}).get("compiled")
    return Row(
        model=case.model,
        batch=case.batch,
        remat=case.remat,
        device=topology,
        predicted_seconds=plan.time.step_seconds,
        predicted_bytes=plan.memory.total_bytes,
        measured_bytes=peak,
        note="" if peak else "did not fit",
    )


def measured_row(case: argparse.Namespace) -> Row:
    """Runs a case on this machine's first device."""
    import jax

    import whalejax as wh
    from whalejax import jobs

    device = jax.local_devices()[0]
    cluster = wh.Cluster.detect().part(1)
    job, plan = _plan(case, cluster, accelerator=device.platform != "cpu")
    row = {
        "model": case.model,
        "batch": case.batch,
        "remat": case.remat,
        "device": device.device_kind,
        "predicted_seconds": plan.time.step_seconds,
        "predicted_bytes": plan.memory.total_bytes,
    }
    batch = job.batch_at(0, case.batch)
    step = wh.compile(
        plan,
        job.loss_fn,
        jobs.abstract_model(job),
        optimizer=job.optimizer,
        batch=batch,
        devices=[device],
    )
    step.lower()
    try:
        with _device_lock(case.lock):
            seconds = _median_seconds(step, job, batch, case.steps)
    except jax.errors.JaxRuntimeError as error:
        if FULL_MEMORY not in str(error):
            raise
        return Row(**row, note="did not fit")
    nbytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if nbytes is None:
        stats = step.lower().compile().memory_analysis()
        nbytes = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return Row(**row, measured_seconds=seconds, measured_bytes=int(nbytes))


@contextmanager
def _device_lock(lock: str) -> Iterator[None]:
    """Holds a lock on a file, so that no other case uses the device."""
    with open(lock or os.devnull, "w", encoding="utf-8") as file:
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _median_seconds(step: Any, job: Any, batch: Any, steps: int) -> float:
    """Returns the median seconds of a step, without the first two."""
    import jax

    state = step.init(job.make_model, rng=jax.random.key(0))
    seconds = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def run_in_process(case: argparse.Namespace) -> Row:
    """Runs a case in this process."""
    from whalejax import PlanError

    try:
        return compiled_row(case) if case.topology else measured_row(case)
    except PlanError as error:
        note = f"not planned: {str(error).splitlines()[0]}"
        return Row(case.model, case.batch, case.remat, case.topology, 0.0, 0, note=note)


def cases(arguments: argparse.Namespace) -> list[list[str]]:
    """Returns the options of every process."""
    if arguments.topology:
        accelerator = arguments.topology != "local"
    else:
        code = "import jax; print(jax.local_devices()[0].platform)"
        process = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        )
        accelerator = process.stdout.split()[-1] != "cpu"
    gpts = TRANSFORMERS if accelerator else SMALL
    options = []
    for model in arguments.models or (*gpts, IMAGES):
        default_batches = (IMAGE_BATCHES if model == IMAGES else BATCHES)[accelerator]
        for batch in arguments.batches or default_batches:
            for remat in arguments.remat:
                options.append(
                    ["--models", model, "--batches", str(batch), "--remat", remat]
                )
    random.Random(arguments.seed).shuffle(options)
    return options


def results(rows: list[Row]) -> dict[str, Any]:
    """Returns the numbers of the last line."""
    report: dict[str, Any] = {"rows": len(rows)}
    for name in ("time", "memory"):
        errors = [getattr(row, f"{name}_error") for row in rows]
        sizes = [abs(error) for error in errors if error is not None]
        report[f"{name}_mean"] = round(statistics.fmean(sizes), 4) if sizes else None
        report[f"{name}_max"] = round(max(sizes), 4) if sizes else None
    report["false_fits"] = sum(row.note == "did not fit" for row in rows)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=())
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default=()
    )
    parser.add_argument(
        "--remat", type=lambda text: text.split(","), default=list(POLICIES)
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--topology", default="", metavar="h100:1")
    parser.add_argument("--rows", type=Path, metavar="FILE.json")
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        (arguments.model,) = arguments.models
        (arguments.batch,) = arguments.batches
        (arguments.remat,) = arguments.remat
        print(json.dumps(asdict(run_in_process(arguments))))
        return
    print("\n".join(HEADER))
    started = time.perf_counter()
    rows: list[Row] = []
    options = ["--steps", str(arguments.steps), "--topology", arguments.topology]
    environment = dict(os.environ)
    if arguments.jobs > 1:
        # Processes that wait for their turn must leave the device's memory free.
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

    def run_case(case: list[str]) -> bool:
        """Runs a case, prints and stores its row; returns False if no time was left."""
        if time.perf_counter() - started > arguments.seconds:
            return False
        command = [sys.executable, __file__, "--one", *case, *options]
        process = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        rows.append(Row(**json.loads(process.stdout.splitlines()[-1])))
        print(rows[-1], flush=True)
        if arguments.rows:
            text = json.dumps([asdict(row) for row in rows], indent=1)
            arguments.rows.write_text(text + "\n", encoding="utf-8")
        return True

    with tempfile.TemporaryDirectory() as folder:
        options += ["--lock", str(Path(folder) / "device")]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            left_out = list(pool.map(run_case, cases(arguments))).count(False)
    print(json.dumps({**results(rows), "left_out": left_out}))


if __name__ == "__main__":
    main()
