"""Compares the plan without options with plans that have one option fixed.

The script samples workloads: decoders, mixtures of experts and encoders, of many sizes,
lengths from 512 to a million tokens, batches from one sample, on 8 to 8,192 devices,
some of mixed kinds. Each is planned without options, and once with every single one:
every mesh of up to 64 devices (of more, a sample of forty), and every value of remat,
attention, num_micro_batches, zero and offload. The regret of a plan without options is
the part by which it is slower than the best with one.

    python scripts/bench_options.py [--refresh] [--only TEXT] [--fresh N] [--seed N]
        [--seconds N] [--verbose]

``options.json`` beside this script has the results, with commit, versions and seed.
Without options a fresh sample, chosen by today's date or by ``--seed``, is planned
within eight minutes. ``--refresh`` plans the draws that the file lacks (or those whose
name contains TEXT); it takes hours, and continues where it was interrupted. The last
line is one JSON object:

    workloads                workloads with a plan
    unplanned                those without a plan, with or without options
    planned_with_an_option_alone  those with a plan only if an option is fixed
    plans                    number of plans
    option_regret, worst     largest regret; its workload and option
    regretted                workloads whose regret is above 1 %
    seed, fresh, fresh_regret     seed, size and largest regret of the fresh sample
    commits                  commits of the stored results
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import sys
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
from whalejax.capture.split_checks import DependentSamplesError
from whalejax.planner.plan_errors import NothingFits
from whalejax.planner.sharding.layout import divisors


FILE: Final = Path(__file__).with_name("options.json")
SEED: Final = 20261128
DRAWS: Final = 60
FRESH: Final = 3
SECONDS: Final = 420.0
MOST_MESHED: Final = 64
"""Largest number of devices for which every mesh is an option."""

SAMPLED_MESHES: Final = 40
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
"""Tokens of a global batch, unless one sample has more."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batch and cluster.

    Attributes:
        name: Unique name.
        model, options: Arguments of ``whalejax.models.job``.
        batch: Samples of the global batch.
        cluster: Cluster as text.
    """

    name: str
    model: str
    options: dict[str, Any]
    batch: int
    cluster: str


def random_workload(number: int, seed: int) -> Workload:
    """Returns one workload of a seed."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(("dense", "dense", "dense", "experts", "encoder"))
    width, heads, kv_heads = rng.choice(WIDTHS)
    layers = rng.choice((4, 12, 24, 32))
    length = rng.choice(LENGTHS if kind == "dense" else LENGTHS[:3])
    batch = max(1, rng.choice(TOKENS) // length)
    sizes: dict[str, Any] = {"layers": layers, "sequence": length, "vocab": 32_768}
    sizes |= {"embed": width, "heads": heads, "mlp": 4 * width, "scan_layers": True}
    model = "llama-test"
    if kind == "dense":
        sizes |= {"kv_heads": kv_heads}
    elif kind == "experts":
        model = "moe"
        sizes |= {"experts": rng.choice((8, 32)), "annotated": False}
    else:
        model = "bert-base"
        del sizes["scan_layers"]
        sizes["layers"] = min(4, layers)
    cluster = rng.choice(CLUSTERS)
    text = f"{kind} {width}x{layers} {batch}x{length} {cluster}"
    return Workload(
        name=f"{text} {number} {seed}",
        model=model,
        options=sizes,
        batch=batch,
        cluster=cluster,
    )


def options_of(work: Workload, devices: int) -> Iterator[dict[str, Any]]:
    """Yields every single option, and of many devices a sample of the meshes."""
    meshes = [
        sizes
        for sizes in itertools.product(divisors(devices), repeat=len(AXES))
        if math.prod(sizes) == devices
        and (sizes[2] == 1 or work.model == "moe")
        and work.options["sequence"] % sizes[3] == 0
    ]
    if devices > MOST_MESHED and len(meshes) > SAMPLED_MESHES:
        meshes = random.Random(work.name).sample(meshes, SAMPLED_MESHES)
    yield from ({"mesh": dict(zip(AXES, sizes, strict=True))} for sizes in meshes)
    for remat in ("none", "dots", "full"):
        yield {"remat": remat}
    yield from ({"attention": attention} for attention in ("ring", "gather"))
    for count in divisors(work.batch):
        if count <= 64:
            yield {"num_micro_batches": count}
    yield from ({"zero": level} for level in (0, 1, 2))
    for offload in ((), ("optimizer",), ("activations",), ("params",)):
        yield {"offload": offload}


def planner(work: Workload) -> Any:
    """Returns a function from options to seconds of a step, or None.

    Without options there is a plan unless nothing fits, or the samples depend on each
    other; any other error goes to standard error.
    """
    job = models.job(work.model, **work.options)
    model = jobs.abstract_model(job)
    batch = jax.eval_shape(lambda: job.batch_at(0, work.batch))
    cluster = wh.cluster(work.cluster)

    def plan(**options: Any) -> float | None:
        try:
            plan = wh.plan(
                job.loss_fn,
                model,
                batch,
                optimizer=optax.adam(1e-4),
                cluster=cluster,
                precision="bf16",
                **options,
            )
        except (NothingFits, DependentSamplesError):
            return None
        except wh.WhaleError as error:
            if not options:
                print(f"{work.name}: {error}", file=sys.stderr, flush=True)
            return None
        return float(plan.time.step_seconds)

    return plan


def regret_of(work: Workload, until: float, verbose: bool) -> dict[str, Any] | None:
    """Plans one workload under every option; None if time runs out."""
    plan, start = planner(work), time.process_time()
    free = plan()
    best, option, plans = free, {}, 1
    for settings in options_of(work, wh.cluster(work.cluster).num_devices):
        if time.monotonic() > until:
            return None
        seconds = plan(**settings)
        plans += 1
        if seconds is not None and (best is None or seconds < best):
            best, option = seconds, settings
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
    """Returns the numbers of some workloads."""
    planned = [r for r in rows if r["regret"] is not None]
    # Without a plan, regret is infinite.
    unplanned = [r for r in rows if r["free_seconds"] is None and r["best_seconds"]]
    worst = max(planned, key=lambda r: r["regret"], default=None)
    return {
        "workloads": len(planned),
        "unplanned": len(rows) - len(planned) - len(unplanned),
        "planned_with_an_option_alone": len(unplanned),
        "plans": sum(r["plans"] for r in rows),
        "option_regret": worst["regret"] if worst else None,
        "regretted": sum(r["regret"] > 0.01 for r in planned),
        "worst": f"{worst['name']}: {worst['option']}" if worst else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--fresh", type=int, default=FRESH)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    today = int(datetime.date.today().strftime("%Y%m%d"))
    seed = today if args.seed is None else args.seed
    fresh: list[dict[str, Any]] = []
    if args.refresh:
        for number in range(DRAWS):
            work = random_workload(number, SEED)
            redo = args.only and args.only in work.name
            if redo or (work.name not in stored and not args.only):
                row = regret_of(work, math.inf, args.verbose)
                stored[work.name] = row
                FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    else:
        until = time.monotonic() + args.seconds
        for number in range(args.fresh):
            row = regret_of(random_workload(number, seed), until, args.verbose)
            if row is None:
                break
            fresh.append(row)
    rows = [row for row in stored.values() if args.only in row["name"]]
    report = {**summary(rows), "seed": seed, "fresh": len(fresh)}
    report["fresh_regret"] = summary(fresh)["option_regret"]
    report["commits"] = sorted({row["commit"] for row in rows})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
