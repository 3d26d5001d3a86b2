"""The plan without options beside the same planner with one option given.

Workloads are drawn: decoders, mixtures of experts and encoders, of many sizes, lengths
from 512 to a million tokens, batches from one sample, on 8 to 8,192 devices, some of
them unlike. Each is planned without options, and once with every single one: every
mesh of up to 64 devices (of more, forty that are drawn), and every value of remat,
attention, num_micro_batches, zero and offload. A plan without options that is slower
than one with is regretted, by so much as it is.

    python scripts/bench_options.py [--refresh] [--only TEXT] [--fresh N] [--seed N]
        [--seconds N] [--verbose]

What was found is kept in ``options.json`` beside this script, with commit, versions
and seed; without options a fresh sample, drawn by today's date or by ``--seed``, is
planned beside it, within eight minutes. ``--refresh`` plans all of the kept draws that
are not in the file yet (or those whose name holds TEXT); it takes hours, and goes on
where it was interrupted. The last line is one JSON object: workloads (with a plan),
unplanned (which no layout serves, with or without options),
planned_with_an_option_alone, plans, option_regret (the
largest), regretted (workloads whose regret is above 1 %), worst (that workload, and the
option), fresh, fresh_regret and commits.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import checkout
import jax
import optax

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.sharding.layout import divisors


KEPT: Final = Path(__file__).with_name("options.json")
SEED: Final = 20261128
DRAWS: Final = 60
FRESH: Final = 3
SECONDS: Final = 420.0
MANY: Final = 64
"""Devices up to which every mesh is an option."""

DRAWN_MESHES: Final = 40
AXES: Final = ("data", "fsdp", "expert", "context", "tensor")

CLUSTERS: Final = (
    *("v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:16x16"),
    *("v6e:2x4", "v6e:4x4", "v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x16"),
    *("h100:8", "h100:2x8", "h100:8x8", "h100:128x8", "h100:1024x8"),
    *("a100-80:8", "a100-80:4x8", "a100-80:128x8"),
    *("h100:1x8+a100-80:1x8", "h100:4x8+a100-80:4x8"),
)
WIDTHS: Final = ((1024, 16, 4), (2048, 16, 8), (3072, 24, 8), (4096, 32, 8))
LENGTHS: Final = (512, 2048, 8192, 32_768, 131_072, 1_048_576)
TOKENS: Final = (2**17, 2**20, 2**22)
"""Of a global batch, as far as one sample has not more."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is planned.

    Attributes:
        name: unlike every other.
        model, options: of ``whalejax.models``.
        batch: samples of the global batch.
        cluster: as text.
    """

    name: str
    model: str
    options: dict[str, Any]
    batch: int
    cluster: str


def drawn(number: int, seed: int) -> Workload:
    """One workload of a seed."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(("dense", "dense", "dense", "experts", "encoder"))
    width, heads, kv_heads = chance.choice(WIDTHS)
    layers = chance.choice((4, 12, 24, 32))
    length = chance.choice(LENGTHS if kind == "dense" else LENGTHS[:3])
    batch = max(1, chance.choice(TOKENS) // length)
    sizes: dict[str, Any] = {"layers": layers, "sequence": length, "vocab": 32_768}
    sizes |= {"embed": width, "heads": heads, "mlp": 4 * width, "scan_layers": True}
    model = "llama-test"
    if kind == "dense":
        sizes |= {"kv_heads": kv_heads}
    elif kind == "experts":
        model = "moe"
        sizes |= {"experts": chance.choice((8, 32)), "annotated": False}
    else:
        model = "bert-base"
        del sizes["scan_layers"]
        sizes["layers"] = min(4, layers)
    cluster = chance.choice(CLUSTERS)
    words = f"{kind} {width}x{layers} {batch}x{length} {cluster}"
    return Workload(
        name=f"{words} {number} {seed}",
        model=model,
        options=sizes,
        batch=batch,
        cluster=cluster,
    )


def options_of(work: Workload, devices: int) -> Iterator[dict[str, Any]]:
    """Every single option, and of many devices some of the meshes."""
    every = [
        sizes
        for sizes in itertools.product(divisors(devices), repeat=len(AXES))
        if math.prod(sizes) == devices
        and (sizes[2] == 1 or work.model == "moe")
        and work.options["sequence"] % sizes[3] == 0
    ]
    if devices > MANY and len(every) > DRAWN_MESHES:
        every = random.Random(work.name).sample(every, DRAWN_MESHES)
    yield from ({"mesh": dict(zip(AXES, sizes, strict=True))} for sizes in every)
    for remat in ("none", "dots", "full"):
        yield {"remat": remat}
    yield from ({"attention": way} for way in ("ring", "gather"))
    for count in divisors(work.batch):
        if count <= 64:
            yield {"num_micro_batches": count}
    yield from ({"zero": level} for level in (0, 1, 2))
    for offload in ((), ("optimizer",), ("activations",), ("params",)):
        yield {"offload": offload}


def asked(work: Workload) -> Any:
    """What plans a workload under options; gives seconds of a step, or None."""
    job = models.job(work.model, **work.options)
    model = jobs.abstract_model(job)
    batch = jax.eval_shape(lambda: job.batch_at(0, work.batch))
    cluster = wh.cluster(work.cluster)

    def plan(**options: Any) -> float | None:
        try:
            found = wh.plan(
                job.loss_fn,
                model,
                batch,
                optimizer=optax.adam(1e-4),
                cluster=cluster,
                precision="bf16",
                **options,
            )
        except wh.WhaleError:
            return None
        return float(found.time.step_seconds)

    return plan


def regret_of(work: Workload, until: float, verbose: bool) -> dict[str, Any] | None:
    """One workload under every option; None where time is over before its end."""
    plan, start = asked(work), time.process_time()
    free = plan()
    best, option, plans = free, {}, 1
    for one in options_of(work, wh.cluster(work.cluster).num_devices):
        if time.monotonic() > until:
            return None
        found = plan(**one)
        plans += 1
        if found is not None and (best is None or found < best):
            best, option = found, one
    regret = None
    if best is not None:
        regret = None if free is None else round(free / best - 1, 5)
    row = {
        "name": work.name,
        "free_seconds": free,
        "best_seconds": best,
        "option": option,
        "regret": regret,
        "plans": plans,
        "cpu_seconds": round(time.process_time() - start, 1),
        "commit": checkout.commit(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }
    if verbose:
        print(json.dumps(row), flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of some workloads."""
    planned = [r for r in rows if r["regret"] is not None]
    # What is planned with an option alone is regretted without end.
    lost = [r for r in rows if r["free_seconds"] is None and r["best_seconds"]]
    worst = max(planned, key=lambda r: r["regret"], default=None)
    return {
        "workloads": len(planned),
        "unplanned": len(rows) - len(planned) - len(lost),
        "planned_with_an_option_alone": len(lost),
        "plans": sum(r["plans"] for r in rows),
        "option_regret": worst["regret"] if worst else None,
        "regretted": sum(r["regret"] > 0.01 for r in planned),
        "worst": f"{worst['name']}: {worst['option']}" if worst else None,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--fresh", type=int, default=FRESH)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    today = int(datetime.date.today().strftime("%Y%m%d"))
    seed = today if given.seed is None else given.seed
    fresh: list[dict[str, Any]] = []
    if given.refresh:
        for number in range(DRAWS):
            work = drawn(number, SEED)
            again = given.only and given.only in work.name
            if again or (work.name not in kept and not given.only):
                row = regret_of(work, math.inf, given.verbose)
                kept[work.name] = row
                KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    else:
        until = time.monotonic() + given.seconds
        for number in range(given.fresh):
            row = regret_of(drawn(number, seed), until, given.verbose)
            if row is None:
                break
            fresh.append(row)
    rows = [row for row in kept.values() if given.only in row["name"]]
    found = {**summary(rows), "seed": seed, "fresh": len(fresh)}
    found["fresh_regret"] = summary(fresh)["option_regret"]
    found["commits"] = sorted({row["commit"] for row in rows})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
