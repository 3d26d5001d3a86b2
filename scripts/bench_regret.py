"""Measures the regret of chosen plans: every possible layout runs on this machine.

Calibrates this machine's eight virtual devices, then trains gpt, bert, resnet50 and moe
for a few steps under every feasible mesh and ZeRO level, in turns, round by round.
Layouts that compile to one program count once. Each layout's predicted and measured
step time and the spread of its steps are printed.

    python scripts/bench_regret.py [--models gpt,moe] [--steps 3] [--rounds 2]

The last line is one JSON object, for each model:

    regret_NAME         the chosen plan's time over the best one's, less one
    tau_NAME            Kendall's tau of predicted and measured order
    tau_of_rounds_NAME  the same of the first and the last round, which shows how well
                        the order can be measured; null with one round
    layouts_NAME        number of layouts
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
"""Reference job of each model, small enough for two cores."""


@dataclass
class Layout:
    text: str
    predicted: float
    seconds: list[float]

    @property
    def spread(self) -> float:
        """Slowest step over the fastest, less one."""
        return max(self.seconds) / min(self.seconds) - 1

    @property
    def measured(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        predicted, measured = self.predicted * 1e3, self.measured * 1e3
        return (
            f"{self.text:54} predicted {predicted:8.1f} ms  measured "
            f"{measured:8.1f} ms  spread {self.spread:4.0%}"
        )


def layouts() -> Iterator[tuple[dict[str, int], int]]:
    """Yields every mesh of eight devices, with each of its ZeRO levels."""
    sizes = [n for n in range(1, DEVICES + 1) if DEVICES % n == 0]
    for data, fsdp, expert in itertools.product(sizes, sizes, sizes):
        tensor, over = divmod(DEVICES, data * fsdp * expert)
        if over or not tensor:
            continue
        mesh = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
        for zero in (0, 1, 2) if data > 1 else (0,):
            yield mesh, zero


def measure(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Plans, runs and compares all layouts of one model, in this process."""
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
    layouts_by_text: dict[str, Layout] = {}
    compiled: dict[str, Any] = {}
    programs: dict[str, str] = {}
    for mesh, zero in layouts():
        try:
            plan = wh.plan(job.loss_fn, model, batch, mesh=mesh, zero=zero, **common)
        except wh.PlanError:
            continue
        text = layout_text(plan)
        if text in layouts_by_text:
            continue
        step = wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer)
        first = programs.setdefault(program_of(step), text)
        if first != text:
            print(f"{text}: the same program as {first}")
            layouts_by_text[text] = layouts_by_text[first]
            continue
        compiled[text] = step
        layouts_by_text[text] = Layout(text, plan.time.step_seconds, [])
    # In turns, so that a slow minute of the machine affects all layouts equally.
    for _ in range(rounds):
        for text, step in compiled.items():
            layouts_by_text[text].seconds += step_seconds(step, job, steps)
            gc.collect()
    order = [layouts_by_text[text] for text in compiled]
    for layout in order:
        print(layout, flush=True)
    best = min(order, key=lambda x: x.measured)
    tau = kendalltau([x.predicted for x in order], [x.measured for x in order])
    tau_of_rounds = kendalltau(
        [statistics.median(x.seconds[:steps]) for x in order],
        [statistics.median(x.seconds[-steps:]) for x in order],
    )
    mine = layouts_by_text[layout_text(chosen)]
    print(f"{name}: chosen {mine.text}; best {best.text}; {len(order)} layouts")
    return {
        f"regret_{name}": round(mine.measured / best.measured - 1, 4),
        f"tau_{name}": round(float(np.asarray(tau)[0]), 3),
        f"tau_of_rounds_{name}": (
            round(float(np.asarray(tau_of_rounds)[0]), 3) if rounds > 1 else None
        ),
        f"layouts_{name}": len(order),
    }


def layout_text(plan: Any) -> str:
    return next(c.layout for c in plan.candidates if c.verdict == "chosen")


def program_of(step: Any) -> str:
    """Returns the compiled program of a step, without metadata."""
    return re.sub(r", metadata={[^}]*}", "", step.lower().compile().as_text())


def step_seconds(step: Any, job: Any, steps: int) -> list[float]:
    """Returns the seconds of steps, without the first."""
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
    """Runs every model in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        result = measure(arguments.model, arguments.steps, arguments.rounds)
        print(json.dumps(result))
        return
    results: dict[str, Any] = {}
    for name in arguments.models.split(","):
        command = [sys.executable, __file__, "--model", name]
        command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
        # Calibrated now, because the speed of the machine changes.
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"WHALEJAX_CACHE": cache}
            # Programs that were compiled for comparison are not compiled again.
            environment["JAX_COMPILATION_CACHE_DIR"] = cache
            process = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
        lines = process.stdout.splitlines()
        print("\n".join(lines[:-1]), flush=True)
        results |= json.loads(lines[-1])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
