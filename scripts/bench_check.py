"""Checks plans of random models, layouts and options against one device.

Every pair and triple of mesh axes is sampled several times, with a model that has
something for each of them (``check_models.py``) and options of every kind. Each plan
runs at reduced sizes on virtual CPU devices, by ``wh.check``: its loss, every gradient
and the updated parameters are compared with those of one device. Axes that no plan has
together count as refused, with the planner's reason.

    python scripts/bench_check.py [--refresh] [--only TEXT] [--fresh N] [--seed N]
        [--seconds N] [--jobs N] [--verbose]

``check.json`` beside this script has the results, with commit, versions and seed.
Without options a fresh sample, chosen by today's date or by ``--seed``, is checked
within eight minutes. ``--refresh`` checks all draws anew (those whose name contains
TEXT, or which the file lacks); it takes an hour, and continues where it was
interrupted. The last line is one JSON object:

    checked, wrong           plans that were compared; plans that differ
    refused                  draws that the planner or an executor refuses with a reason
    unchecked                plans of which nothing could be run
    axis_pairs, axis_triples          pairs and triples of axes that were checked
    possible_pairs, possible_triples  their number, without those that no plan can have
    models                   number of models
    worst_error, worst_over_limit     largest error; largest error over its limit
    seed, fresh, fresh_wrong          seed, size and wrong plans of the fresh sample
    commits                  number of commits of the stored results
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import checkout
import jax
import jaxlib
from check_models import MODELS

import whalejax as wh
from whalejax import jobs
from whalejax.adapters.base import adapt
from whalejax.equality.check_plan import check_adapted
from whalejax.planner.sharding.layout import MESH_AXES, SPATIAL_AXES


FILE: Final = Path(__file__).with_name("check.json")
DRAWS: Final = 3
"""Repetitions of each pair and triple of axes."""

SEED: Final = 20261128
TRIES: Final = 6
"""Attempts to find a model and options with a plan."""

ROW_SECONDS: Final = 240.0
FRESH: Final = 24
SECONDS: Final = 480.0
CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "remat": (None, None, "none", "dots", "full"),
    "precision": ("f32", "f32", "f32", "f32", "bf16"),
    "offload": (None, None, None, None, ("optimizer",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A set of axes to check, with the number of the repetition.

    Attributes:
        axes: Mesh axes, with two devices along each.
        number: Index among the draws of these axes.
        seed: Seed of models, options and data.
    """

    axes: tuple[str, ...]
    number: int
    seed: int = SEED

    @property
    def name(self) -> str:
        """Unique name."""
        return f"{'-'.join(self.axes)} {self.number} {self.seed}"

    def chance(self) -> random.Random:
        """Returns the random numbers of the draw, the same at every call."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return random.Random(int.from_bytes(digest[:8], "big"))


def draws() -> list[Draw]:
    """Returns every single axis, pair and triple, several times."""
    return [
        Draw(axes=axes, number=number)
        for number in range(DRAWS)
        for size in (1, 2, 3)
        for axes in itertools.combinations(MESH_AXES, size)
        if is_possible(axes)
    ]


def is_possible(axes: Sequence[str]) -> bool:
    """Returns False for stages with spatial axes, which no model can have together."""
    return not ("stage" in axes and set(axes) & set(SPATIAL_AXES))


def random_options(axes: Sequence[str], chance: random.Random) -> dict[str, Any]:
    """Returns options of ``wh.plan`` that suit the axes."""
    opts: dict[str, Any] = {name: chance.choice(v) for name, v in CHOICES.items()}
    opts["num_micro_batches"] = chance.choice((4, 8) if "stage" in axes else (1, 2, 4))
    if "data" in axes:
        opts["zero"] = chance.choice((0, 1, 2))
        others = {"stage", *SPATIAL_AXES}
        if not others & set(axes) and chance.random() < 0.25:
            opts["combine"] = chance.choice(("adasum", "adasum_updates"))
            opts |= {"zero": 0, "offload": None, "precision": "f32"}
        elif not others & set(axes) and chance.random() < 0.25:
            opts |= {"shares": [3, 1], "num_micro_batches": None, "offload": None}
            opts["zero"] = min(opts["zero"], 1)
    if "context" in axes:
        opts["attention"] = chance.choice((None, "ring", "gather"))
    if "tensor" in axes:
        opts["sequence_parallel"] = chance.choice((None, True, False))
    if "stage" in axes:
        opts |= {"offload": None, "attention": None}
    elif chance.random() < 0.3:
        opts["loss_chunks"] = 4
    return {name: value for name, value in opts.items() if value is not None}


def plan_draw(draw: Draw) -> tuple[str, dict[str, Any], wh.Plan | None, list[str]]:
    """Returns a model, its options, a plan (or None) and the refusals."""
    chance, refusals = draw.chance(), list[str]()
    for _ in range(TRIES):
        settings = random_options(draw.axes, chance)
        names = [*MODELS]
        chance.shuffle(names)
        for name in names:
            job = MODELS[name]()
            try:
                plan = wh.plan(
                    job.loss_fn,
                    jobs.abstract_model(job),
                    job.batch,
                    optimizer=job.optimizer,
                    cluster=f"h100:{2 ** len(draw.axes)}",
                    mesh=dict.fromkeys(draw.axes, 2),
                    **settings,
                )
            except wh.WhaleError as error:
                refusals.append(f"{name}: {str(error).splitlines()[-1].strip():.200}")
                continue
            return name, settings, plan, refusals
    return "", {}, None, refusals


def check_draw(draw: Draw) -> dict[str, Any]:
    """Plans and checks one draw."""
    started = time.monotonic()
    name, settings, plan, refusals = plan_draw(draw)
    row: dict[str, Any] = {
        "name": draw.name,
        "axes": list(draw.axes),
        "seed": draw.seed,
        "model": name,
        "options": {key: settings[key] for key in sorted(settings)},
        "refusals": len(refusals),
    }
    if plan is None:
        return {**row, "refused": refusals[-1]}
    job = MODELS[name]()
    is_odd = draw.chance().random() < 0.5
    try:
        report = check_adapted(
            plan,
            adapt(jobs.abstract_model(job), job.loss_fn),
            job.batch,
            optimizer=job.optimizer,
            batch_axes=0,
            multiples=(3,) if is_odd else (2,),
            seed=draw.chance().randrange(2**31),
            timeout_seconds=ROW_SECONDS,
            memory_bytes=None,
        )
    except wh.WhaleError as error:
        return {**row, "unchecked": f"{error!s:.500}", "plan": plan.hash}
    run = report.worst
    return {
        **row,
        "plan": plan.hash,
        "extents": run.extents,
        "way": run.way,
        "reduced": {d.name: [d.size, d.reduced] for d in run.dimensions},
        "right": report.is_right,
        "error": run.error,
        "over_limit": run.error_over_limit,
        "worst": run.worst.path,
        "notes": [*run.kept, *run.refused],
        "seconds": round(time.monotonic() - started, 1),
    }


class Rows:
    """Results on disk, written after each addition."""

    def __init__(self) -> None:
        exists = FILE.is_file()
        rows = json.loads(FILE.read_text())["rows"] if exists else []
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["name"]] = {
            **row,
            "commit": checkout.commit(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
        }
        text = json.dumps({"rows": [*self.rows.values()]}, indent=1)
        unfinished = FILE.with_suffix(".part")
        unfinished.write_text(text + "\n")
        unfinished.replace(FILE)


def fresh_draws(count: int, seed: int) -> Iterator[Draw]:
    every = [draw.axes for draw in draws()]
    chance = random.Random(seed)
    for number, axes in enumerate(chance.choices(every, k=count)):
        yield Draw(axes=axes, number=number, seed=seed)


def run(
    wanted: Sequence[Draw], *, seconds: float, workers: int, verbose: bool
) -> Iterator[dict[str, Any]]:
    """Checks draws, as many as begin in the given seconds."""
    ends = time.monotonic() + seconds

    def check_in_time(draw: Draw) -> dict[str, Any] | None:
        return None if time.monotonic() > ends else check_draw(draw)

    with ThreadPoolExecutor(workers) as pool:
        for row in pool.map(check_in_time, wanted):
            if row is None:
                continue
            if verbose or not row.get("right", True) or "unchecked" in row:
                print(json.dumps(row), flush=True)
            yield row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judged = [row for row in rows if "right" in row]
    covered = {tuple(row["axes"]) for row in judged}
    # A triple contains its pairs.
    pairs = {p for axes in covered for p in itertools.combinations(axes, 2)}
    possible = [
        sum(is_possible(c) for c in itertools.combinations(MESH_AXES, size))
        for size in (2, 3)
    ]
    exact = [r["error"] for r in judged if r["options"].get("precision") != "bf16"]
    return {
        "checked": len(judged),
        "wrong": sum(not row["right"] for row in judged),
        "refused": sum("refused" in row for row in rows),
        "unchecked": sum("unchecked" in row for row in rows),
        "axis_pairs": len(pairs),
        "possible_pairs": possible[0],
        "axis_triples": sum(len(axes) == 3 for axes in covered),
        "possible_triples": possible[1],
        "models": len({row["model"] for row in judged}),
        "worst_error": max(exact, default=None),
        "worst_over_limit": max((row["over_limit"] for row in judged), default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--fresh", type=int, default=FRESH)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    stored, fresh = Rows(), list[dict[str, Any]]()
    today = int(datetime.date.today().strftime("%Y%m%d"))
    seed = today if args.seed is None else args.seed
    settings: dict[str, Any] = {"workers": args.jobs, "verbose": args.verbose}
    if args.refresh:
        wanted = [
            draw
            for draw in draws()
            if (args.only and args.only in draw.name) or draw.name not in stored.rows
        ]
        for row in run(wanted, seconds=float("inf"), **settings):
            stored.add(row)
    else:
        wanted = list(fresh_draws(args.fresh, seed))
        fresh = list(run(wanted, seconds=args.seconds, **settings))
    rows = [row for row in stored.rows.values() if args.only in row["name"]]
    report = {**summary(rows), "seed": seed, "fresh": summary(fresh)["checked"]}
    report["fresh_wrong"] = summary(fresh)["wrong"]
    report["commits"] = len({row["commit"] for row in rows})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
