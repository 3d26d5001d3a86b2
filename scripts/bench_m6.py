"""Plans M6-10B for 64 and 256 V100 as Whale ran it: in 8 stages of 35 micro-batches.

Ten billion parameters in 24 layers of encoder and 24 of decoder, trained by Adafactor
on nodes of eight V100 with 32 GB. All plans are estimates (``runnable=False``): the
layers are two scans, of which each stage holds an equal part, in lockstep.
The batch grows with the nodes. The last line printed is one JSON object:

    efficiency         predicted samples per second of 32 nodes, over four times those
                       of 8. Whale published 0.91
    plan_seconds       median seconds of ``wh.plan`` for 256, traced anew: at most 2
    plan_cpu_seconds   the same of the processor's time
    unasked_over_asked predicted samples per second of what is chosen for 256 where
                       neither stages nor micro-batches are asked for, over the above

    python scripts/bench_m6.py [--rounds 3]

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
"""Of a micro-batch, on each of a stage's devices, of which there is one for each node.
The paper does not say how many."""

PUBLISHED: Final = 0.91


def main() -> None:
    """Plan, and print how predicted throughput grows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="timed plans")
    arguments = parser.parse_args()
    asked: dict[str, Any] = {
        "mesh": {"stage": STAGES},
        "num_micro_batches": MICRO_BATCHES,
    }
    few, _ = _planned(8, asked)
    rounds = [_planned(32, asked) for _ in range(arguments.rounds)]
    many = rounds[0][0]
    unasked, _ = _planned(32, {})
    for nodes, plan in ((8, few), (32, many), (32, unasked)):
        print(*str(plan).splitlines()[:3], sep="\n")
        print(f"{_rate(nodes, plan):.1f} samples per second, predicted\n")
    seconds, cpu = zip(*(taken for _, taken in rounds), strict=True)
    efficiency = _rate(32, many) / (4 * _rate(8, few))
    print(f"8 to 32 nodes: {efficiency:.3f} predicted, {PUBLISHED} published by Whale")
    found = {
        "efficiency": round(efficiency, 3),
        "plan_seconds": round(statistics.median(seconds), 2),
        "plan_cpu_seconds": round(statistics.median(cpu), 2),
        "unasked_over_asked": round(_rate(32, unasked) / _rate(32, many), 3),
    }
    print(json.dumps(found))


def _planned(
    nodes: int, options: dict[str, Any]
) -> tuple[wh.Plan, tuple[float, float]]:
    """A plan, and its seconds by the clock and of the processor."""
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
    """Of the global batch."""
    return MICRO_BATCHES * SAMPLES * nodes * 8 // STAGES


def _rate(nodes: int, plan: wh.Plan) -> float:
    """Predicted samples per second."""
    return _samples(nodes) / plan.time.step_seconds


if __name__ == "__main__":
    main()
