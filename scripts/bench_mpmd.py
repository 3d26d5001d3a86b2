"""Times stage programs against stages in lockstep and one device.

One small GPT is trained with the same micro-batches in two stages with programs of
their own, in two stages of one program (its layers in one scan), and on one device, in
turn on two virtual CPU devices.

    python scripts/bench_mpmd.py [--rounds 7] [--micro-batches 16] [--default-malloc]

The last line is one JSON object:

    mpmd_over_best     median over rounds of its step time over the better of the two
                       others: at most 1.05
    mpmd_over_one, mpmd_over_spmd
                       the same over each of them
    mpmd_over_one_cpu  the same in seconds of the processor

The C library keeps freed memory (``paired.KEPT_MEMORY``). Otherwise CPU programs that
run once for every micro-batch make the kernel clear their temporary memory as often,
which no other device does: ``--default-malloc`` measures that too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from paired import eight_devices, keep_memory


if "--default-malloc" not in sys.argv:
    keep_memory()
eight_devices()

import jax  # noqa: E402
import optax  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402


SIZES = {
    "layers": 8,
    "embed": 256,
    "heads": 4,
    "mlp": 1024,
    "sequence": 128,
    "vocab": 512,
}
SAMPLES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--micro-batches", type=int, default=16, help="per step")
    parser.add_argument("--default-malloc", action="store_true", help="see above")
    arguments = parser.parse_args()
    count = arguments.micro_batches
    runs = {
        "mpmd": _stepper(count, 2, scanned=False),
        "spmd": _stepper(count, 2, scanned=True),
        "one": _stepper(count, 1, scanned=False),
    }
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(arguments.rounds + 1):
        for name, run in runs.items():
            start, work = time.perf_counter(), time.process_time()
            run()
            if index:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - work)
    best = [min(pair) for pair in zip(wall["spmd"], wall["one"], strict=True)]
    ratios = {
        "mpmd_over_best": _ratio(wall["mpmd"], best),
        "mpmd_over_one": _ratio(wall["mpmd"], wall["one"]),
        "mpmd_over_spmd": _ratio(wall["mpmd"], wall["spmd"]),
        "mpmd_over_one_cpu": _ratio(cpu["mpmd"], cpu["one"]),
    }
    print(json.dumps({key: round(value, 4) for key, value in ratios.items()}))


def _ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def _stepper(count: int, devices: int, *, scanned: bool) -> Callable[[], Any]:
    """Returns a function that runs one step and waits for it."""
    job = models.job("gpt-test", annotated=False, scan_layers=scanned, **SIZES)
    batch, optimizer = job.batch_at(0, count * SAMPLES), optax.sgd(0.01)
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        batch,
        optimizer=optimizer,
        cluster=f"cpu:{devices}",
        num_micro_batches=count,
        mesh={"stage": devices},
    )
    print(str(plan).splitlines()[0], flush=True)
    step = wh.compile(
        plan,
        job.loss_fn,
        jobs.abstract_model(job),
        optimizer=optimizer,
        devices=jax.devices()[:devices],
    )
    states = [step.init(job.make_model, rng=jax.random.key(0))]

    def run() -> None:
        states[0], metrics = step(states[0], batch)
        jax.block_until_ready((states[0].params, metrics))

    return run


if __name__ == "__main__":
    main()
