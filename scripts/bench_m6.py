"""Plans M6-10B for 64 and 256 V100 as Whale ran it: in 8 stages of 35 micro-batches.

Ten billion parameters in 24 layers of encoder and 24 of decoder, trained by Adafactor
on nodes of eight V100 with 32 GB. All plans are estimates (``runnable=False``): the
layers are two scans, of which each stage has an equal part, in lockstep.
The batch grows with the nodes.

    python scripts/bench_m6.py [--rounds 3]

The last line is one JSON object:

    efficiency         predicted samples per second of 32 nodes, over four times those
                       of 8. Whale published 0.91
    plan_seconds       median seconds of ``wh.plan`` for 256, traced anew: at most 2
    plan_cpu_seconds   median seconds of the processor
    unasked_over_asked predicted samples per second for 256 of the planner's own choice
                       of stages and micro-batches, over those of the fixed ones

After Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs"
(USENIX ATC 2022), section 4.4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402


STAGES: Final = 8
MICRO_BATCHES: Final = 35
SAMPLES: Final = 8
"""Samples of a micro-batch, on each of a stage's devices, one per node. The paper does
not give their number."""

PUBLISHED: Final = 0.91


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="timed plans")
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "mesh": {"stage": STAGES},
        "num_micro_batches": MICRO_BATCHES,
    }
    few, _ = _timed_plan(8, options)
    rounds = [_timed_plan(32, options) for _ in range(arguments.rounds)]
    many = rounds[0][0]
    own_choice, _ = _timed_plan(32, {})
    for nodes, plan in ((8, few), (32, many), (32, own_choice)):
        print(*str(plan).splitlines()[:3], sep="\n")
        print(f"{_rate(nodes, plan):.1f} samples per second, predicted\n")
    seconds, cpu = zip(*(seconds_pair for _, seconds_pair in rounds), strict=True)
    efficiency = _rate(32, many) / (4 * _rate(8, few))
    print(f"8 to 32 nodes: {efficiency:.3f} predicted, {PUBLISHED} published by Whale")
    report = {
        "efficiency": round(efficiency, 3),
        "plan_seconds": round(statistics.median(seconds), 2),
        "plan_cpu_seconds": round(statistics.median(cpu), 2),
        "unasked_over_asked": round(_rate(32, own_choice) / _rate(32, many), 3),
    }
    print(json.dumps(report))


def _timed_plan(
    nodes: int, options: dict[str, Any]
) -> tuple[wh.Plan, tuple[float, float]]:
    """Returns a plan, and its seconds by the clock and of the processor."""
    job = models.job("m6-10b")
    model, batch = jobs.abstract_model(job), job.batch_at(0, _samples(nodes))
    start, cpu = time.perf_counter(), time.process_time()
    plan = wh.plan(
        job.loss_fn,
        model,
        batch,
        optimizer=job.optimizer,
        cluster=f"v100:{nodes}x8",
        runnable=False,
        **options,
    )
    return plan, (time.perf_counter() - start, time.process_time() - cpu)


def _samples(nodes: int) -> int:
    """Returns the samples of the global batch."""
    return MICRO_BATCHES * SAMPLES * nodes * 8 // STAGES


def _rate(nodes: int, plan: wh.Plan) -> float:
    """Returns the predicted samples per second."""
    return _samples(nodes) / plan.time.step_seconds


if __name__ == "__main__":
    main()
