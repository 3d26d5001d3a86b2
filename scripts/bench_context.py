"""Times ring attention against gathered keys and values, on eight virtual devices.

A small GPT on one long sequence is trained with its sequence over ``context`` 8, once
with attention in a ring and once with keys and values gathered, and on one device.
Steps are timed in pairs in one process.

    python scripts/bench_context.py [--sequence 4096] [--pairs 5]

The last line is one JSON object:

    sequence             tokens of the sequence
    ring_over_allgather  median over pairs of the ratio of step times
    ring_over_one        the same ratio, of the ring over one device
    allgather_over_one   the same ratio, of gathered keys over one device
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from paired import eight_devices, timed_pairs


eight_devices()

import jax  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence", type=int, default=4096, help="tokens")
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs")
    arguments = parser.parse_args()
    mesh = {"context": 8}
    ring = _stepper(arguments.sequence, mesh, "ring")
    gather = _stepper(arguments.sequence, mesh, "gather")
    single = _stepper(arguments.sequence, {}, "gather")
    ratios = {
        "ring_over_allgather": (ring, gather),
        "ring_over_one": (ring, single),
        "allgather_over_one": (gather, single),
    }
    medians = {}
    for name, (first, second) in ratios.items():
        pairs = timed_pairs(first, second, pairs=arguments.pairs, warm=1)
        medians[name] = round(pairs.ratio, 3)
        print(
            f"{name:20s} {pairs.ratio:.2f}: "
            f"{min(pairs.first_seconds):.2f} s and {min(pairs.second_seconds):.2f} s"
        )
    print(json.dumps({"sequence": arguments.sequence, **medians}))


def _stepper(sequence: int, mesh: dict[str, int], attention: str) -> Callable[[], Any]:
    """Returns a function that runs one training step."""
    job = models.job(
        "gpt-test",
        annotated=False,
        layers=2,
        embed=256,
        heads=4,
        mlp=1024,
        sequence=sequence,
    )
    count = 8 if mesh else 1
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 1),
        optimizer=job.optimizer,
        cluster=f"cpu:{count}",
        mesh=mesh,
        zero=0,
        num_micro_batches=1,
        remat="none",
        offload=(),
        attention=attention,
    )
    print(str(plan).splitlines()[0])
    step = wh.compile(
        plan,
        job.loss_fn,
        jobs.abstract_model(job),
        optimizer=job.optimizer,
        devices=jax.devices()[:count],
    )
    state = step.init(job.make_model, rng=jax.random.key(0))
    batch = job.batch_at(0, 1)

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return run


if __name__ == "__main__":
    main()
