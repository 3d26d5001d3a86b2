"""Predicted against measured on one device: step time and peak memory.

Calibrates this machine's first device, then trains GPTs and a ResNet-50 on it for a few
steps over micro-batches and remat policies, each in a process of its own, because a
device's peak memory never goes down again. On accelerators the GPTs have 125 million to
1.5 billion parameters and compute in bfloat16; on a CPU they are small.

    python scripts/bench_device.py [--models gpt-small,resnet50] [--batches 1,4]
                                   [--remat none,full] [--steps 5] [--rows FILE.json]
                                   [--seconds 480] [--seed 0] [--jobs 3]
    python scripts/bench_device.py --topology h100:1

Cases run in an order drawn with --seed, and none is begun after --seconds; how many
were left out is said. --jobs of them are imported, planned and traced at a time; what
uses the device, autotuning included, one alone. With --topology nothing is run and
nothing timed: the real compiler of hardware that need not be here says what memory it
needs (``whalejax verify --setup-gpu`` once, or the extra tpu-compile). Memory that was
measured is what the device says it held at most; where a device does not say, as a CPU,
what its compiler says. --rows writes down all rows. The last line is one JSON object:
time_mean, time_max, memory_mean and memory_max (errors relative to what was measured),
false_fits (predicted to fit, and did not), left_out (cases that --seconds did not
reach).
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
        device: what it ran on.
        predicted_seconds, measured_seconds: of a step; measured is None where nothing
            was run.
        predicted_bytes, measured_bytes: of peak memory; predicted is 0 where there is
            no plan, and measured None where it did not fit.
        note: why a figure is missing.
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
        """Relative to the measured time; above zero the prediction is too slow."""
        seconds = self.measured_seconds
        return None if seconds is None else self.predicted_seconds / seconds - 1.0

    @property
    def memory_error(self) -> float | None:
        """Relative to the measured memory; above zero the prediction is too large."""
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
    """The job and its plan for one device."""
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
    """What the compiler of a topology makes of a case."""
    import whalejax as wh

    topology = case.topology
    _, plan = _plan(case, wh.cluster(topology), accelerator=topology != "local")
    found = plan.verify(topology).document()
    if found["refused"] or found["failure"]:
        raise SystemExit(f"{topology}: {found['refused'] or found['failure']}")
    memory = {one["name"]: one for one in found["memory"]}
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
    """A case as it runs on this machine's first device."""
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
        with _alone(case.lock):
            seconds = _timed(step, job, batch, case.steps)
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
def _alone(lock: str) -> Iterator[None]:
    """While no other case holds the lock, a file's path."""
    with open(lock or os.devnull, "w", encoding="utf-8") as file:
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _timed(step: Any, job: Any, batch: Any, steps: int) -> float:
    """Median seconds of a step, the first two left out."""
    import jax

    state = step.init(job.make_model, rng=jax.random.key(0))
    found = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


def one(case: argparse.Namespace) -> Row:
    """A case, in this process."""
    from whalejax import PlanError

    try:
        return compiled_row(case) if case.topology else measured_row(case)
    except PlanError as error:
        note = f"not planned: {str(error).splitlines()[0]}"
        return Row(case.model, case.batch, case.remat, case.topology, 0.0, 0, note=note)


def cases(arguments: argparse.Namespace) -> list[list[str]]:
    """The options of every process."""
    if arguments.topology:
        accelerator = arguments.topology != "local"
    else:
        ask = "import jax; print(jax.local_devices()[0].platform)"
        said = subprocess.run(
            [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True
        )
        accelerator = said.stdout.split()[-1] != "cpu"
    gpts = TRANSFORMERS if accelerator else SMALL
    found = []
    for model in arguments.models or (*gpts, IMAGES):
        usual = (IMAGE_BATCHES if model == IMAGES else BATCHES)[accelerator]
        for batch in arguments.batches or usual:
            for remat in arguments.remat:
                found.append(
                    ["--models", model, "--batches", str(batch), "--remat", remat]
                )
    random.Random(arguments.seed).shuffle(found)
    return found


def results(rows: list[Row]) -> dict[str, Any]:
    """What the last line says."""
    found: dict[str, Any] = {"rows": len(rows)}
    for name in ("time", "memory"):
        errors = [getattr(row, f"{name}_error") for row in rows]
        known = [abs(error) for error in errors if error is not None]
        found[f"{name}_mean"] = round(statistics.fmean(known), 4) if known else None
        found[f"{name}_max"] = round(max(known), 4) if known else None
    found["false_fits"] = sum(row.note == "did not fit" for row in rows)
    return found


def main() -> None:
    """Run every case in a process of its own."""
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
        print(json.dumps(asdict(one(arguments))))
        return
    print("\n".join(HEADER))
    started = time.perf_counter()
    rows: list[Row] = []
    options = ["--steps", str(arguments.steps), "--topology", arguments.topology]
    environment = dict(os.environ)
    if arguments.jobs > 1:
        # Processes that wait for their turn must leave the device's memory free.
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

    def done(case: list[str]) -> bool:
        """Whether there was time for it; its row is printed and kept."""
        if time.perf_counter() - started > arguments.seconds:
            return False
        command = [sys.executable, __file__, "--one", *case, *options]
        said = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        rows.append(Row(**json.loads(said.stdout.splitlines()[-1])))
        print(rows[-1], flush=True)
        if arguments.rows:
            text = json.dumps([asdict(row) for row in rows], indent=1)
            arguments.rows.write_text(text + "\n", encoding="utf-8")
        return True

    with tempfile.TemporaryDirectory() as folder:
        options += ["--lock", str(Path(folder) / "device")]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            left_out = list(pool.map(done, cases(arguments))).count(False)
    print(json.dumps({**results(rows), "left_out": left_out}))


if __name__ == "__main__":
    main()
