"""The chosen plan beside every layout that could have been chosen, measured.

Calibrates this machine's eight virtual devices, then trains gpt, bert, resnet50 and moe
for a few steps under every mesh and ZeRO level that is feasible, all of them in turn,
round by round. Layouts that compile to one program are one layout of several names.
Printed for each are the predicted and the measured step time and how far its fastest
and slowest steps lie apart; per model the regret (the chosen plan's time over the best
one's, less one), Kendall's tau of the two orders and, as ``tau_of_rounds``, that of the
first and the last round's: how far the order can be measured; null with one round.

    python scripts/bench_regret.py [--models gpt,moe] [--steps 3] [--rounds 2]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paired import eight_devices


eight_devices()

MODELS = ("gpt", "bert", "resnet50", "moe")
DEVICES = 8
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"batch_size": 16}),
    "bert": ("bert-base", {"layers": 2, "batch_size": 16}),
    "resnet50": ("resnet50", {"batch_size": 16, "image_size": 96}),
    "moe": ("moe", {"batch_size": 16, "layers": 2, "experts": 8}),
}
"""What stands for each model: its reference job, small enough for two cores."""


@dataclass
class Layout:
    """A layout with its prediction and its timings."""

    words: str
    predicted: float
    seconds: list[float]

    @property
    def spread(self) -> float:
        """The slowest step over the fastest, less one."""
        return max(self.seconds) / min(self.seconds) - 1

    @property
    def measured(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        predicted, measured = self.predicted * 1e3, self.measured * 1e3
        return (
            f"{self.words:54} predicted {predicted:8.1f} ms  measured "
            f"{measured:8.1f} ms  spread {self.spread:4.0%}"
        )


def layouts() -> Iterator[tuple[dict[str, int], int]]:
    """Every mesh of eight devices, with every ZeRO level that it has."""
    sizes = [n for n in range(1, DEVICES + 1) if DEVICES % n == 0]
    for data, fsdp, expert in itertools.product(sizes, sizes, sizes):
        tensor, over = divmod(DEVICES, data * fsdp * expert)
        if over or not tensor:
            continue
        mesh = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
        for zero in (0, 1, 2) if data > 1 else (0,):
            yield mesh, zero


def measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Plan, run and compare all layouts of one model, in this process."""
    import numpy as np
    from scipy.stats import kendalltau

    import whalejax as wh
    from whalejax import jobs, models

    reference, options = JOBS[name]
    job = models.job(reference, **options, annotated=False)
    model = jobs.abstract_model(job)
    batch = job.batch_at(0)
    common = {"optimizer": job.optimizer, "cluster": wh.Cluster.detect()}
    chosen = wh.plan(job.loss_fn, model, batch, **common)
    found: dict[str, Layout] = {}
    compiled: dict[str, Any] = {}
    programs: dict[str, str] = {}
    for mesh, zero in layouts():
        try:
            plan = wh.plan(job.loss_fn, model, batch, mesh=mesh, zero=zero, **common)
        except wh.PlanError:
            continue
        words = words_of(plan)
        if words in found:
            continue
        step = wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer)
        first = programs.setdefault(program_of(step), words)
        if first != words:
            print(f"{words}: the same program as {first}")
            found[words] = found[first]
            continue
        compiled[words] = step
        found[words] = Layout(words, plan.time.step_seconds, [])
    # In turns, so that a slow minute of the machine meets all layouts alike.
    for _ in range(rounds):
        for words, step in compiled.items():
            found[words].seconds += timed(step, job, steps)
            gc.collect()
    order = [found[words] for words in compiled]
    for layout in order:
        print(layout, flush=True)
    best = min(order, key=lambda x: x.measured)
    tau = kendalltau([x.predicted for x in order], [x.measured for x in order])
    again = kendalltau(
        [statistics.median(x.seconds[:steps]) for x in order],
        [statistics.median(x.seconds[-steps:]) for x in order],
    )
    own = found[words_of(chosen)]
    print(f"{name}: chosen {own.words}; best {best.words}; {len(order)} layouts")
    return {
        f"regret_{name}": round(own.measured / best.measured - 1, 4),
        f"tau_{name}": round(float(np.asarray(tau)[0]), 3),
        f"tau_of_rounds_{name}": (
            round(float(np.asarray(again)[0]), 3) if rounds > 1 else None
        ),
        f"layouts_{name}": len(order),
    }


def words_of(plan: Any) -> str:
    """The layout of a plan in words."""
    return next(c.layout for c in plan.candidates if c.verdict == "chosen")


def program_of(step: Any) -> str:
    """The compiled program of a step, without what only says where it comes from."""
    return re.sub(r", metadata={[^}]*}", "", step.lower().compile().as_text())


def timed(step: Any, job: Any, steps: int) -> list[float]:
    """Seconds of steps, the first left out."""
    import jax

    batch, seconds = job.batch_at(0), []
    state = step.init(job.make_model, rng=jax.random.key(0))
    for index in range(steps + 1):
        started = time.perf_counter()
        state, _ = step(state, batch)
        jax.block_until_ready(state.params)
        if index:
            seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Run every model in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        found = measure(arguments.model, arguments.steps, arguments.rounds)
        print(json.dumps(found))
        return
    results: dict[str, Any] = {}
    for name in arguments.models.split(","):
        command = [sys.executable, __file__, "--model", name]
        command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
        # Calibrated now: the machine may have been faster or slower when last it was.
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"WHALEJAX_CACHE": cache}
            # What is compiled to be compared is not compiled again to be run.
            environment["JAX_COMPILATION_CACHE_DIR"] = cache
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
        lines = done.stdout.splitlines()
        print("\n".join(lines[:-1]), flush=True)
        results |= json.loads(lines[-1])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
