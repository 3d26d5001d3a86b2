"""Simulated swarms: rebalancing under churn, and the setting of SWARM's paper.

    python scripts/swarm_simulated.py [--seeds 20] [--only churn,paper]

The churn: 36 peers of speeds 0.5, 1 and 2 on links of 200 Mb/s and 20 ms serve 3 stages
of 8 s a micro-batch (forward 2 s, backward 6 s; one call in the last stage), 96
micro-batches a step; lifetimes are exponential with a mean of 4,000 s over two hours,
half of the deaths are silent, and nobody comes, so the swarm dwindles to a sixth; 250
MB of state are downloaded and 10 s compiled before a peer serves; a stage adds up 20 MB
a step, and there is a snapshot every other step. Throughput is held against the
oracle's, which places peers at their best after each change, at once and free of
charge.

The paper's setting: 1.01 billion shared parameters that 13 billion would compute with,
width 4,096, sequences of 2,048 tokens, one a micro-batch, 4,096 a step; 3 stages; 400
T4s on links of 200 Mb/s and 20 ms; int8 between stages, gradients added up in 8 bits
and, beside it, in 16. A T4 is taken to reach the catalogue's part of 65 TFLOP/s.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from typing import Any, Final

from whalejax.meshes import cluster
from whalejax.planner.swarm_data import wire_bytes
from whalejax.swarm.churn import Churn, PeerLink, draw
from whalejax.swarm.rebalancing import Rule
from whalejax.swarm.simulator import (
    Setting,
    StageCost,
    SwarmSimulation,
    simulate,
)


LINK: Final = PeerLink(
    up_bytes_per_second=25e6, down_bytes_per_second=25e6, latency_seconds=0.02
)
CHURN: Final = Churn(
    peers=36,
    lifetime_seconds=4000.0,
    join_seconds=math.inf,
    seconds=7200.0,
    speeds=(0.5, 1.0, 2.0),
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
    snapshot_every=2,
)
SEEDS: Final = 20
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
    found: dict[str, list[SwarmSimulation]] = {way: [] for way in WAYS}
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
        "most_moves_a_change": {
            way: round(max(one.moves / max(1, one.changes) for one in found[way]), 4)
            for way in WAYS
            if way != "optimum"
        },
        "seeds": seeds,
    }


PAPER_PARAMETERS: Final = 1.01e9
PAPER_UNSHARED: Final = 13e9
PAPER_WIDTH, PAPER_TOKENS, PAPER_BATCH, PAPER_PEERS = 4096, 2048, 4096, 400


def paper_setting(sum_bytes: int) -> Setting:
    """The setting of the paper.

    Args:
        sum_bytes: of each gradient, as it is added up.
    """
    kind = cluster("t4:1").kinds[0]
    flops_per_second = dict(kind.flops_per_second)["f16"] * kind.efficiency
    forward = 2 * PAPER_UNSHARED * PAPER_TOKENS / 3 / flops_per_second
    border = wire_bytes(PAPER_WIDTH * PAPER_TOKENS, "int8")
    stages = []
    for number in range(3):
        received = border if number else 4 * PAPER_TOKENS
        is_last = number == 2
        stages.append(
            StageCost(
                forward_seconds=0.0 if is_last else forward,
                # The last stage has one call, which computes forward once.
                backward_seconds=(2 if is_last else 3) * forward + is_last * forward,
                forward_bytes=(0, 0) if is_last else (received, border),
                backward_bytes=(received, border)
                if is_last
                else (received + border, border if number else 0),
                state_bytes=int(12 * PAPER_PARAMETERS / 3),
                gradient_bytes=int(sum_bytes * PAPER_PARAMETERS / 3),
            )
        )
    return Setting(
        stages=tuple(stages), micro_batches=PAPER_BATCH, compile_seconds=60.0
    )


def of_the_paper() -> dict[str, Any]:
    """Throughput of the paper's setting, without churn and with it."""
    alone = Churn(
        peers=PAPER_PEERS,
        lifetime_seconds=1e12,
        join_seconds=math.inf,
        seconds=1800.0,
        link=LINK,
    )
    # Each lives 4 hours on average, and as many come as go.
    churning = dataclasses.replace(
        alone, lifetime_seconds=14_400.0, join_seconds=14_400.0 / PAPER_PEERS
    )
    found = {}
    for name, churn, sum_bytes in (
        ("8-bit sum", alone, 1),
        ("16-bit sum", alone, 2),
        ("8-bit sum, churn", churning, 1),
    ):
        setting = paper_setting(sum_bytes)
        one = simulate(setting, draw(churn, 0), churn.seconds)
        found[name] = {
            "sequences_per_second": round(one.micro_batches_per_second, 2),
            "step_seconds": round(statistics.mean(one.step_seconds), 1),
            "utilization": round(one.utilization, 3),
            "of_max_flow": round(one.of_max_flow, 3),
            "changes": one.changes,
            "moves": one.moves,
        }
        print(f"{name}: {found[name]}", flush=True)
    return found


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of a mean."""
    if len(values) < 2:
        return 0.0
    return 1.96 * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    """Simulate, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="churn,paper", metavar="A,B")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    found: dict[str, Any] = {}
    if "paper" in wanted:
        found["paper"] = of_the_paper()
    if "churn" in wanted:
        found["churn"] = under_churn(arguments.seeds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
