"""Simulates swarms: rebalancing under churn, and the setting of SWARM's paper.

    python scripts/swarm_simulated.py [--seeds 20] [--only churn,paper]

The churn: 36 peers of speeds 0.5, 1 and 2 on links of 200 Mb/s and 20 ms serve 3 stages
of 8 s a micro-batch (forward 2 s, backward 6 s; one call in the last stage), 96
micro-batches a step; lifetimes are exponential with a mean of 4,000 s over two hours,
half of the deaths are silent, and nobody joins, so the swarm shrinks to a sixth; a peer
downloads 250 MB of state and compiles for 10 s before it serves; a stage reduces 20 MB
of gradients a step, and there is a snapshot every other step. Throughput is compared
with the oracle's, which places peers at their best after each change, at once and free
of charge.

The paper's setting: 1.01 billion shared parameters that 13 billion would compute with,
width 4,096, sequences of 2,048 tokens, one a micro-batch, 4,096 a step; 3 stages; 400
T4s on links of 200 Mb/s and 20 ms; int8 between stages, gradients reduced in 8 bits
and, for comparison, in 16. A T4 reaches the catalogue's part of 65 TFLOP/s.

The last line is one JSON object with the results of both under ``churn`` and ``paper``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from typing import Any, Final

from whalejax.meshes import cluster
from whalejax.planner.plan_entries import wire_bytes
from whalejax.swarm.churn import Churn, PeerLink, draw
from whalejax.swarm.simulator import (
    Setting,
    StageCost,
    SwarmSimulation,
    simulate,
)
from whalejax.swarm.stage_assignment import Rule


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
    """Returns a stage of 20 MB of gradients and 250 MB of state, with cuts of 2 MB."""
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
RULES: Final[dict[str, dict[str, Any]]] = {
    "optimum": {"oracle": True},
    "none": {"rule": Rule.NONE},
    "T=300": {"period": 300.0},
    "T=60": {"period": 60.0},
    "T=60, paper's rule": {"period": 60.0, "rule": Rule.PAPER},
}


def under_churn(seeds: int) -> dict[str, Any]:
    """Returns the throughput of each rule over seeds, as parts of the optimum's."""
    parts: dict[str, list[float]] = {rule: [] for rule in RULES}
    runs: dict[str, list[SwarmSimulation]] = {rule: [] for rule in RULES}
    for seed in range(seeds):
        trace = draw(CHURN, seed)
        for rule, changes in RULES.items():
            setting = dataclasses.replace(SETTING, **changes)
            runs[rule].append(simulate(setting, trace, CHURN.seconds))
            best = runs["optimum"][-1].micro_batches
            parts[rule].append(runs[rule][-1].micro_batches / best)
        shown = ", ".join(f"{rule} {parts[rule][-1]:.3f}" for rule in RULES)
        print(f"seed {seed}: {shown}", flush=True)
    real_runs = [run for rule in RULES if rule != "optimum" for run in runs[rule]]
    return {
        "of_optimum_under_churn": round(statistics.mean(parts["T=60"]), 4),
        "without_rebalancing": round(statistics.mean(parts["none"]), 4),
        "of_optimum": {
            rule: {
                "mean": round(statistics.mean(parts[rule]), 4),
                "least": round(min(parts[rule]), 4),
                "interval": round(interval(parts[rule]), 4),
                "of_max_flow": round(
                    statistics.mean(run.of_max_flow for run in runs[rule]), 4
                ),
            }
            for rule in RULES
        },
        "emptied_by_moves": sum(run.emptied_by_moves for run in real_runs),
        "most_moves_a_change": {
            rule: round(max(run.moves / max(1, run.changes) for run in runs[rule]), 4)
            for rule in RULES
            if rule != "optimum"
        },
        "seeds": seeds,
    }


PAPER_PARAMETERS: Final = 1.01e9
PAPER_UNSHARED: Final = 13e9
PAPER_WIDTH, PAPER_TOKENS, PAPER_BATCH, PAPER_PEERS = 4096, 2048, 4096, 400


def paper_setting(sum_bytes: int) -> Setting:
    """Returns the paper's setting, with ``sum_bytes`` for each reduced gradient."""
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


def paper_results() -> dict[str, Any]:
    """Returns the throughput of the paper's setting, with and without churn."""
    quiet = Churn(
        peers=PAPER_PEERS,
        lifetime_seconds=1e12,
        join_seconds=math.inf,
        seconds=1800.0,
        link=LINK,
    )
    # Each lives 4 hours on average, and as many come as go.
    churning = dataclasses.replace(
        quiet, lifetime_seconds=14_400.0, join_seconds=14_400.0 / PAPER_PEERS
    )
    report = {}
    for name, churn, sum_bytes in (
        ("8-bit sum", quiet, 1),
        ("16-bit sum", quiet, 2),
        ("8-bit sum, churn", churning, 1),
    ):
        setting = paper_setting(sum_bytes)
        run = simulate(setting, draw(churn, 0), churn.seconds)
        report[name] = {
            "sequences_per_second": round(run.micro_batches_per_second, 2),
            "step_seconds": round(statistics.mean(run.step_seconds), 1),
            "utilization": round(run.utilization, 3),
            "of_max_flow": round(run.of_max_flow, 3),
            "changes": run.changes,
            "moves": run.moves,
        }
        print(f"{name}: {report[name]}", flush=True)
    return report


def interval(values: list[float]) -> float:
    """Returns half of the 95 % interval of a mean."""
    if len(values) < 2:
        return 0.0
    return 1.96 * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="churn,paper", metavar="A,B")
    arguments = parser.parse_args()
    selected = arguments.only.split(",")
    report: dict[str, Any] = {}
    if "paper" in selected:
        report["paper"] = paper_results()
    if "churn" in selected:
        report["churn"] = under_churn(arguments.seeds)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
