"""Measures how evenly embedding tables are placed, against other rules.

    python scripts/bench_tables.py

Criteo-Kaggle's 26 tables and those of MLPerf's DLRM-v2 at 4, 8 and 16 ranks, and the 11
of MLPerf Training v6.1's DLRMv4 on ``h100:2x8`` and ``v5p:4x4x4``. The other rules are
LPT (whole tables, the largest first, to the emptiest rank) and a model of TorchRec's
greedy rule (in falling order of storage, to the device with the fewest lookups so far,
whole or as column shards of 128 columns, without a limit of tables a rank). The last
line is one JSON object, each value the worst over the cases:

    kaggle_rows  largest rank over the mean, elements stored alone, Kaggle
    v2_lookups   the same of elements looked up, DLRM-v2
    v2_rows      the same of elements stored, DLRM-v2
    both         the worse of both measures when both are balanced at once, both sets
    pieces       shards over tables in these
    padding      bytes of an exchange that is padded to the fullest rank, over the mean
                 in these
    time_padding the same if the time of a step is balanced
    seconds      processor seconds to place 26 to 1,000 tables; ``elapsed`` by the clock
    v4_gap       DLRMv4's largest load over the bound of every placement, minus 1
    step_growth  time of a step of Kaggle's model with a tenth of its rows over that
                 with a hundredth, on four virtual devices; plan_growth the same of a
                 step by wh.plan, whose optimizer updates whole tables
    lpt          largest rank over the mean of LPT, by case
    torchrec     the same of TorchRec's rule
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax  # noqa: E402


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import whalejax as wh  # noqa: E402
from whalejax import models  # noqa: E402
from whalejax.planner.tables.place import place_tables  # noqa: E402
from whalejax.planner.tables.placement import TablePlacement  # noqa: E402
from whalejax.planner.tables.published import (  # noqa: E402
    dlrm_v2_tables,
    dlrm_v4_tables,
    kaggle_tables,
)
from whalejax.planner.tables.table import Ranks, Table  # noqa: E402


CLUSTERS = {4: "h100:4", 8: "h100:8", 16: "h100:2x8"}
BATCH = 65_536


ELAPSED = [0.0]
"""Longest time of a placement."""


def place(*arguments: object, **options: object) -> tuple[TablePlacement, float]:
    """Returns a placement and its processor seconds."""
    start, clock = time.process_time(), time.perf_counter()
    placement = place_tables(*arguments, **options)  # type: ignore[arg-type]
    ELAPSED[0] = max(ELAPSED[0], time.perf_counter() - clock)
    return placement, time.process_time() - start


def lpt(sizes: Sequence[float], ranks: int) -> float:
    """Returns the largest rank over the mean of the greedy rule on whole tables."""
    loads = [0.0] * ranks
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads) * ranks / sum(loads)


def torchrec(tables: Sequence[Table], measure: str, ranks: int) -> float:
    """Returns the largest rank over the mean of TorchRec's greedy partitioner.

    Tables in falling order of storage, each shard to the device with the least perf so
    far; tables wider than 128 columns in shards of 128.
    """
    loads = [(0.0, r) for r in range(ranks)]
    measured = [0.0] * ranks
    for table in sorted(tables, key=lambda t: -t.nbytes):
        parts = max(1, table.width // 128)
        for _ in range(parts):
            perf = table.lookups_per_sample * table.width / parts
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + perf, rank))
            stored = table.rows * table.width / parts
            measured[rank] += stored if measure == "rows" else perf
    return max(measured) * ranks / sum(measured)


def many_tables(count: int) -> list[Table]:
    """Returns tables of sizes and lookups that fall by a power law."""
    return [
        Table(
            name=f"t{i}",
            rows=20_000_000 // (1 + i),
            width=(32, 64, 128)[i % 3],
            lookups_per_sample=1 + (i * 7) % 11,
        )
        for i in range(count)
    ]


def step_seconds(scale: float) -> tuple[float, float]:
    """Returns the least seconds of a step with tables, and of one by ``wh.plan``."""
    job = models.job("dlrm", scale=scale, batch_size=1024)
    model, batch = job.make_model(jax.random.key(0)), job.batch_at(0)
    rows = wh.sparse_optimizer("adagrad", 0.02)
    options: dict[str, Any] = {"optimizer": job.optimizer, "cluster": "cpu:4"}
    tables = wh.plan_tables(job.loss_fn, model, batch, rows=rows, **options)
    plan = wh.plan(job.loss_fn, model, batch, mesh={"data": 4}, **options)
    job_parts = job.loss_fn, model
    steps = (
        wh.compile_tables(tables, *job_parts, optimizer=job.optimizer),
        wh.compile(plan, *job_parts, optimizer=job.optimizer),
    )
    least = []
    for step in steps:
        state, times = step.init_from(model), []
        for number in range(8):
            batch = job.batch_at(number)
            start = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - start)
        least.append(min(times))
    return least[0], least[1]


def balance_cases(
    kaggle: list[Table], v2: list[Table]
) -> list[tuple[str, list[Table], str]]:
    """Returns (key, tables, objective) of each case."""
    return [
        ("kaggle_rows", kaggle, "rows"),
        ("v2_lookups", v2, "lookups"),
        ("v2_rows", v2, "rows"),
        ("both", kaggle, "both"),
        ("both", v2, "both"),
    ]


def growths() -> list[tuple[str, float, float]]:
    """Returns (key, step seconds, seconds with ten times the rows)."""
    names = "step_growth", "plan_growth"
    small, large = step_seconds(0.01), step_seconds(0.1)
    return list(zip(names, small, large, strict=True))


def main() -> None:
    kaggle, v2 = kaggle_tables(), dlrm_v2_tables()
    cases = balance_cases(kaggle, v2)
    worst: dict[str, float] = {}
    peers: dict[str, dict[str, list[float]]] = {"lpt": {}, "torchrec": {}}

    def note(key: str, value: float) -> None:
        worst[key] = max(worst.get(key, 0.0), value)

    for key, tables, objective in cases:
        for count, text in CLUSTERS.items():
            ranks = Ranks.of(wh.cluster(text))
            spread, seconds = place(
                tables, ranks, batch_size=BATCH, objective=objective
            )
            note(key, spread.imbalance)
            note("pieces", sum(spread.slots) / len(tables))
            note("padding", spread.padding)
            note("seconds", seconds)
            print(
                f"{key:<12} {len(tables)} tables {count:>2} ranks: "
                f"{spread.imbalance:.3f} of the mean, {sum(spread.slots)} shards, "
                f"padding {spread.padding:.3f}, gap {spread.gap:.2%}, "
                f"{seconds:.2f} s"
            )
            if objective != "both":
                sizes = [
                    t.width * (t.rows if objective == "rows" else t.lookups_per_sample)
                    for t in tables
                ]
                values = {
                    "lpt": lpt(sizes, count),
                    "torchrec": torchrec(tables, objective, count),
                }
                print(
                    "             "
                    + ", ".join(f"{k} {v:.2f}" for k, v in values.items())
                )
                for name, value in values.items():
                    peers[name].setdefault(key, []).append(round(value, 3))
    for tables in (kaggle, v2):
        for count, text in CLUSTERS.items():
            spread, seconds = place(tables, wh.cluster(text), batch_size=BATCH)
            note("time_padding", spread.padding)
            note("seconds", seconds)
            print(f"time, {count:>2} ranks: {spread.imbalance:.3f}, {seconds:.2f} s")
    for count in (26, 100, 300, 1000):
        _, seconds = place(many_tables(count), wh.cluster("h100:2x8"), batch_size=BATCH)
        note("seconds", seconds)
        print(f"{count} tables: {seconds:.2f} s")
    for text in ("h100:2x8", "v5p:4x4x4"):
        spread, seconds = place(dlrm_v4_tables(), wh.cluster(text), batch_size=8192)
        note("v4_gap", spread.gap)
        note("seconds", seconds)
        print(f"DLRMv4 on {text}: gap {spread.gap:.2%}, {seconds:.2f} s")
    note("elapsed", ELAPSED[0])
    for key, few, many in growths():
        note(key, many / few)
        print(f"{key}: {few * 1e3:.1f} ms to {many * 1e3:.1f} ms")
    print(json.dumps({**{k: round(v, 4) for k, v in worst.items()}, **peers}))


if __name__ == "__main__":
    main()
