"""Plans of drawn models, layouts and options, held against one device.

Every pair and triple of mesh axes is drawn several times, with a model that has
something for each of them (``check_models.py``), and options of every kind beside it.
Each plan runs at reduced sizes on virtual CPU devices, by ``wh.check``: its loss, every
gradient and the updated parameters are compared with those of one device. Axes that no
plan has together are counted as refused, with the planner's reason.

    python scripts/bench_check.py [--refresh] [--only TEXT] [--fresh N] [--seed N]
        [--seconds N] [--jobs N] [--verbose]

What was found is kept in ``check.json`` beside this script, with commit, versions and
seed; without options a fresh sample, drawn by today's date or by ``--seed``, is checked
beside it, within eight minutes. ``--refresh`` checks all draws anew (those whose name
holds TEXT, or which are not in the file yet); it takes an hour, and goes on where it
was interrupted. The last line is one JSON object: checked, wrong, refused (draws that
the planner or an executor refuses in words), unchecked (plans of which nothing could be
run), axis_pairs, axis_triples, their numbers possible_pairs and possible_triples (what
no plan can have left out), models, worst_error, worst_over_limit, fresh, fresh_wrong
and commits.
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


KEPT: Final = Path(__file__).with_name("check.json")
DRAWS: Final = 3
"""Times that each pair and triple of axes is drawn."""

SEED: Final = 20261128
TRIES: Final = 6
"""Draws of models and options until one is planned."""

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
    """A set of axes that is to be checked, for the time-th time.

    Attributes:
        axes: mesh axes, two devices along each.
        number: which draw of these axes.
        seed: of models, options and data.
    """

    axes: tuple[str, ...]
    number: int
    seed: int = SEED

    @property
    def name(self) -> str:
        """Unlike every other."""
        return f"{'-'.join(self.axes)} {self.number} {self.seed}"

    def chance(self) -> random.Random:
        """The same random numbers for the same draw."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return random.Random(int.from_bytes(digest[:8], "big"))


def draws() -> list[Draw]:
    """Every single axis, pair and triple, several times."""
    return [
        Draw(axes=axes, number=number)
        for number in range(DRAWS)
        for size in (1, 2, 3)
        for axes in itertools.combinations(MESH_AXES, size)
        if is_possible(axes)
    ]


def is_possible(axes: Sequence[str]) -> bool:
    """Stages of a pipeline do not share the space of samples, whatever the model."""
    return not ("stage" in axes and set(axes) & set(SPATIAL_AXES))


def options(axes: Sequence[str], chance: random.Random) -> dict[str, Any]:
    """Options of ``wh.plan`` that go with some axes."""
    found: dict[str, Any] = {name: chance.choice(v) for name, v in CHOICES.items()}
    found["num_micro_batches"] = chance.choice((4, 8) if "stage" in axes else (1, 2, 4))
    if "data" in axes:
        found["zero"] = chance.choice((0, 1, 2))
        others = {"stage", *SPATIAL_AXES}
        if not others & set(axes) and chance.random() < 0.25:
            found["combine"] = chance.choice(("adasum", "adasum_updates"))
            found |= {"zero": 0, "offload": None, "precision": "f32"}
        elif not others & set(axes) and chance.random() < 0.25:
            found |= {"shares": [3, 1], "num_micro_batches": None, "offload": None}
            found["zero"] = min(found["zero"], 1)
    if "context" in axes:
        found["attention"] = chance.choice((None, "ring", "gather"))
    if "tensor" in axes:
        found["sequence_parallel"] = chance.choice((None, True, False))
    if "stage" in axes:
        found |= {"offload": None, "attention": None}
    elif chance.random() < 0.3:
        found["loss_chunks"] = 4
    return {name: value for name, value in found.items() if value is not None}


def planned(draw: Draw) -> tuple[str, dict[str, Any], wh.Plan | None, list[str]]:
    """A model, options and a plan of a draw; None where all tries were refused."""
    chance, refusals = draw.chance(), list[str]()
    for _ in range(TRIES):
        given = options(draw.axes, chance)
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
                    **given,
                )
            except wh.WhaleError as error:
                refusals.append(f"{name}: {str(error).splitlines()[-1].strip():.200}")
                continue
            return name, given, plan, refusals
    return "", {}, None, refusals


def checked(draw: Draw) -> dict[str, Any]:
    """One draw, planned and checked."""
    started = time.monotonic()
    name, given, plan, refusals = planned(draw)
    row: dict[str, Any] = {
        "name": draw.name,
        "axes": list(draw.axes),
        "seed": draw.seed,
        "model": name,
        "options": {key: given[key] for key in sorted(given)},
        "refusals": len(refusals),
    }
    if plan is None:
        return {**row, "refused": refusals[-1]}
    job = MODELS[name]()
    odd = draw.chance().random() < 0.5
    try:
        found = check_adapted(
            plan,
            adapt(jobs.abstract_model(job), job.loss_fn),
            job.batch,
            optimizer=job.optimizer,
            batch_axes=0,
            multiples=(3,) if odd else (2,),
            seed=draw.chance().randrange(2**31),
            timeout_seconds=ROW_SECONDS,
            memory_bytes=None,
        )
    except wh.WhaleError as error:
        return {**row, "unchecked": f"{error!s:.500}", "plan": plan.hash}
    run = found.worst
    return {
        **row,
        "plan": plan.hash,
        "extents": run.extents,
        "way": run.way,
        "reduced": {d.name: [d.size, d.reduced] for d in run.dimensions},
        "right": found.is_right,
        "error": run.error,
        "over_limit": run.error_over_limit,
        "worst": run.worst.path,
        "notes": [*run.kept, *run.refused],
        "seconds": round(time.monotonic() - started, 1),
    }


class Kept:
    """Results on disk, written after each."""

    def __init__(self) -> None:
        there = KEPT.is_file()
        rows = json.loads(KEPT.read_text())["rows"] if there else []
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, with where it was made."""
        self.rows[row["name"]] = {
            **row,
            "commit": checkout.commit(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
        }
        text = json.dumps({"rows": [*self.rows.values()]}, indent=1)
        part = KEPT.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(KEPT)


def fresh_draws(count: int, seed: int) -> Iterator[Draw]:
    """Draws that nobody has seen."""
    every = [draw.axes for draw in draws()]
    chance = random.Random(seed)
    for number, axes in enumerate(chance.choices(every, k=count)):
        yield Draw(axes=axes, number=number, seed=seed)


def run(
    wanted: Sequence[Draw], *, seconds: float, workers: int, verbose: bool
) -> Iterator[dict[str, Any]]:
    """Check draws, as many as begin in the time given."""
    ends = time.monotonic() + seconds

    def one(draw: Draw) -> dict[str, Any] | None:
        return None if time.monotonic() > ends else checked(draw)

    with ThreadPoolExecutor(workers) as pool:
        for row in pool.map(one, wanted):
            if row is None:
                continue
            if verbose or not row.get("right", True) or "unchecked" in row:
                print(json.dumps(row), flush=True)
            yield row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of some rows."""
    judged = [row for row in rows if "right" in row]
    covered = {tuple(row["axes"]) for row in judged}
    # A triple holds its pairs.
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
    """Checks what is asked for, and prints the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--fresh", type=int, default=FRESH)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    kept, fresh = Kept(), list[dict[str, Any]]()
    today = int(datetime.date.today().strftime("%Y%m%d"))
    seed = today if given.seed is None else given.seed
    how: dict[str, Any] = {"workers": given.jobs, "verbose": given.verbose}
    if given.refresh:
        wanted = [
            draw
            for draw in draws()
            if (given.only and given.only in draw.name) or draw.name not in kept.rows
        ]
        for row in run(wanted, seconds=float("inf"), **how):
            kept.add(row)
    else:
        wanted = list(fresh_draws(given.fresh, seed))
        fresh = list(run(wanted, seconds=given.seconds, **how))
    rows = [row for row in kept.rows.values() if given.only in row["name"]]
    found = {**summary(rows), "seed": seed, "fresh": summary(fresh)["checked"]}
    found["fresh_wrong"] = summary(fresh)["wrong"]
    found["commits"] = len({row["commit"] for row in rows})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
