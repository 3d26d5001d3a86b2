"""Simulated swarms: rebalancing under churn, and the setting of SWARM's paper.

    python scripts/swarm_simulated.py [--seeds 20]

The churn: 36 peers alike on links of 200 Mb/s and 20 ms serve 3 stages of 8 s a
micro-batch (forward 2 s, backward 6 s; one call in the last stage), 96 micro-batches a
step; lifetimes are exponential with a mean of 4,500 s over two hours, half of the
deaths are silent, and nobody comes, so the swarm dwindles to a fifth; 250 MB of state
are downloaded and 10 s compiled before a peer serves; a stage adds up 20 MB a step.
Throughput is held against the oracle's, which places peers at their best after each
change, at once and free of charge.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from typing import Any, Final

from whalejax.swarm.churn import Churn, Link, draw
from whalejax.swarm.rebalancing import Rule
from whalejax.swarm.simulator import Setting, Simulated, StageCost, simulate


LINK: Final = Link(
    up_bytes_per_second=25e6, down_bytes_per_second=25e6, latency_seconds=0.02
)
CHURN: Final = Churn(
    peers=36,
    lifetime_seconds=4500.0,
    join_seconds=math.inf,
    seconds=7200.0,
    silent=0.5,
    link=LINK,
)


def stage(forward_seconds: float, backward_seconds: float) -> StageCost:
    """Of 20 MB of gradients and 250 MB of state, with borders of 2 MB."""
    border = 2_000_000
    return StageCost(
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        forward_bytes=(border, border),
        backward_bytes=(2 * border, border),
        state_bytes=250_000_000,
        gradient_bytes=20_000_000,
        update_seconds=0.1,
    )


SETTING: Final = Setting(
    stages=(stage(2.0, 6.0), stage(2.0, 6.0), stage(0.0, 8.0)),
    micro_batches=96,
    compile_seconds=10.0,
)
WAYS: Final[dict[str, dict[str, Any]]] = {
    "optimum": {"oracle": True},
    "none": {"rule": Rule.NONE},
    "T=300": {"period": 300.0},
    "T=60": {"period": 60.0},
    "T=60, paper's rule": {"period": 60.0, "rule": Rule.PAPER},
}


def under_churn(seeds: int) -> dict[str, Any]:
    """Throughput of each way over seeds, as parts of the optimum's."""
    parts: dict[str, list[float]] = {way: [] for way in WAYS}
    found: dict[str, list[Simulated]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        trace = draw(CHURN, seed)
        for way, changes in WAYS.items():
            setting = dataclasses.replace(SETTING, **changes)
            found[way].append(simulate(setting, trace, CHURN.seconds))
            best = found["optimum"][-1].micro_batches
            parts[way].append(found[way][-1].micro_batches / best)
        shown = ", ".join(f"{way} {parts[way][-1]:.3f}" for way in WAYS)
        print(f"seed {seed}: {shown}", flush=True)
    looked = [one for way in WAYS if way != "optimum" for one in found[way]]
    return {
        "of_optimum_under_churn": round(statistics.mean(parts["T=60"]), 4),
        "without_rebalancing": round(statistics.mean(parts["none"]), 4),
        "of_optimum": {
            way: {
                "mean": round(statistics.mean(parts[way]), 4),
                "least": round(min(parts[way]), 4),
                "interval": round(interval(parts[way]), 4),
                "of_max_flow": round(
                    statistics.mean(one.of_max_flow for one in found[way]), 4
                ),
            }
            for way in WAYS
        },
        "emptied_by_moves": sum(one.emptied_by_moves for one in looked),
        "most_moves_a_change": round(
            max(one.moves / max(1, one.changes) for one in looked), 4
        ),
        "seeds": seeds,
    }


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of a mean."""
    if len(values) < 2:
        return 0.0
    return 1.96 * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    """Simulate, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps({"churn": under_churn(arguments.seeds)}))


if __name__ == "__main__":
    main()
