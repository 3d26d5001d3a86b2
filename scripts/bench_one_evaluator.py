"""What is said of one layout, by whichever way it is asked for.

Layouts are drawn: a program, devices, sizes of the mesh axes (stages and unlike kinds
among them), ZeRO, what is computed again, how attention runs and micro-batches. Each is
planned with all of that fixed (``alone``), and its time and memory, term by term, are
compared with what is said of the same layout

    row        beside the plan for which the mesh is left open
    what_if    by ``plan.what_if`` of a plan on another mesh
    together   by the evaluator, in an array of every layout of its program
    paper      where what no executor runs may be planned, too (``runnable=False``)

A term may differ by rounding: disagreement is the largest difference of a term, as a
part of the step or of all memory.

    python scripts/bench_one_evaluator.py [--refresh] [--fresh N] [--seed N]
        [--seconds N] [--verbose]

What was found is kept in ``one_evaluator.json`` beside this script, with commit,
versions and seed; without options a fresh sample, drawn by today's date or by
``--seed``, is compared beside it, within seven minutes. ``--refresh`` compares those of
the kept draws that are not in the file yet, and goes on where it was interrupted. The
last line is one JSON object: layouts (drawn and planned), refused (drawn, and served by
no executor), max_disagreement (of all ways), disagreement (of each way), compared
(layouts of which each way says something), worst, fresh, fresh_max_disagreement and
commits.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import checkout
import jax
import numpy as np
import optax

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.search import spmd_search
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import LayoutCandidate
from whalejax.planner.sharding.layout import divisors


KEPT: Final = Path(__file__).with_name("one_evaluator.json")
SEED: Final = 20261129
DRAWS: Final = 300
FRESH: Final = 24
SECONDS: Final = 420.0
WAYS: Final = ("row", "what_if", "together", "paper")

SMALL: Final[dict[str, Any]] = {
    "layers": 4,
    "embed": 256,
    "heads": 8,
    "mlp": 1024,
    "sequence": 128,
    "vocab": 4096,
    "annotated": False,
}
PROGRAMS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "scanned": ("gpt-small", {**SMALL, "scan_layers": True}),
    "written out": ("gpt-small", {**SMALL, "layers": 2}),
    "experts": ("moe", {**SMALL, "experts": 4, "scan_layers": True}),
    "llama": (
        "llama-test",
        {**{k: v for k, v in SMALL.items() if k != "annotated"}, "kv_heads": 4},
    ),
    "images": ("resnet50", {}),
}
CLUSTERS: Final = (
    *("h100:8", "a100-80:2x8", "v100-32:4", "v5e:2x4", "v5e:4x4", "v5p:2x2x2"),
    *("cpu:8", "v100-32:4+p100-16:4", "a100-80:1x4+v100-32:1x4"),
)
AXES: Final = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A layout.

    Attributes:
        program, cluster: what is planned, and for what.
        batch: samples of the global batch.
        options: of ``wh.plan``, the mesh among them.
    """

    program: str
    cluster: str
    batch: int
    options: dict[str, Any]


def drawn(number: int, seed: int) -> Drawn:
    """One layout of a seed."""
    chance = random.Random(f"{seed} {number}")
    program = chance.choice([*PROGRAMS])
    cluster = chance.choice(CLUSTERS)
    left = wh.cluster(cluster).num_devices
    mesh = dict.fromkeys(AXES, 1)
    names = ["data", "fsdp", "tensor"]
    if program != "images":
        names += ["context"]
    if program in ("scanned", "llama"):
        names += ["stage"] * (chance.random() < 0.4)
    names += ["expert"] * (program == "experts")
    chance.shuffle(names)
    for name in names[:-1]:
        mesh[name] = chance.choice(divisors(left))
        left //= mesh[name]
    mesh[names[-1]] = left
    alike = "+" not in cluster
    parts = (1,) if program in ("images", "experts") else (1, 1, 2, 4)
    if mesh["stage"] > 1 or not alike:
        parts = tuple(max(n, 4) for n in parts)
    options: dict[str, Any] = {
        "mesh": {a: n for a, n in mesh.items() if n > 1 or a != "stage"},
        "num_micro_batches": chance.choice(parts),
        "remat": chance.choice(("none", "none", "dots", "full")),
    }
    if mesh["stage"] == 1 and mesh["data"] > 1 and alike:
        options["zero"] = chance.choice((0, 0, 1, 2))
    if mesh["stage"] == 1 and program != "images":
        options["attention"] = chance.choice(("gather", "gather", "ring"))
        options["loss_chunks"] = chance.choice((1, 1, 4))
    return Drawn(program=program, cluster=cluster, batch=64, options=options)


@functools.cache
def planner(program: str, cluster: str, batch: int) -> Callable[..., Any]:
    """What plans a program on a cluster under options."""
    model, sizes = PROGRAMS[program]
    job = models.job(model, **sizes)
    return functools.partial(
        wh.plan,
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        optimizer=optax.adam(1e-3),
        cluster=wh.cluster(cluster),
        precision="bf16",
    )


def terms(one: Any) -> dict[str, float]:
    """Seconds and bytes of a plan or of a row, by term."""
    return {**dataclasses.asdict(one.time), **dataclasses.asdict(one.memory)}


def difference(one: Any, other: dict[str, float]) -> float:
    """The largest difference of a term, as a part of the step or of all memory."""
    wholes = {"_seconds": one.time.step_seconds, "_bytes": one.memory.total_bytes}
    return max(
        abs(value - other[name]) / whole
        for name, value in terms(one).items()
        for ending, whole in wholes.items()
        if name.endswith(ending)
    )


def said(one: Drawn) -> tuple[Any, Iterator[tuple[str, dict[str, float]]]]:
    """The plan of a layout, and what else is said of it, in each way that there is.

    Raises:
        PlanError: no executor serves it, or nothing fits.
    """
    plan = planner(one.program, one.cluster, one.batch)
    searches: list[Search] = []
    searched = spmd_search.searches

    def kept(*arguments: Any, **options: Any) -> Any:
        found = searched(*arguments, **options)
        searches.extend(search for _, search in found.found)
        return found

    spmd_search.searches = kept
    try:
        alone = plan(**one.options, offload=())
    finally:
        spmd_search.searches = searched
    return alone, _others(one, plan, alone, searches)


def _others(
    one: Drawn, plan: Callable[..., Any], alone: Any, searches: list[Search]
) -> Iterator[tuple[str, dict[str, float]]]:
    others = {k: v for k, v in one.options.items() if k != "mesh"}
    layout = alone.candidates[0].layout
    stages = one.options["mesh"].get("stage", 1)
    left = {"mesh": {"stage": stages}} if stages > 1 else {}
    free = _planned(plan, **others, **left, offload=())
    rows = [] if free is None else [c for c in free.candidates if c.layout == layout]
    for row in rows[:1]:
        yield "row", terms(row)
    changed = _planned(plan, offload=()) if free is None else free
    if changed is not None:
        yield "what_if", terms(changed.what_if(**one.options))
    # Of stages in lockstep, only estimates have attention in blocks or logits in parts.
    kept = {"attention": "gather", "loss_chunks": 1, **one.options}
    paper = _planned(plan, **kept, offload=(), runnable=False)
    if paper is not None:
        yield "paper", terms(paper)
    chosen = _chosen(alone, searches) if stages == 1 else None
    if chosen is not None:
        search, scored = chosen
        found = _together(search, scored)
        if found is not None:
            yield "together", found


def _planned(plan: Callable[..., Any], **options: Any) -> Any:
    try:
        return plan(**options)
    except wh.PlanError:
        return None


def _chosen(
    alone: Any, searches: list[Search]
) -> tuple[Search, LayoutCandidate] | None:
    """The search that found a plan, and what it found."""
    for search in searches:
        for scored in search.scored:
            if scored.time == alone.time and scored.memory == alone.memory:
                return search, scored
    return None


def _together(search: Search, scored: LayoutCandidate) -> dict[str, float] | None:
    """The layout in an array of every layout of its program."""
    every = Search(
        search.graph,
        search.dims,
        search.cluster,
        dataclasses.replace(search.request, mesh=None, zero=None),
        beside=None if search.split is None else search,
        split=search.split,
        program=search.program,
    )
    layouts = every._layouts(every.meshes(scored.mesh["context"]))
    number = len(layouts.cases)
    cases = layouts.cases.with_count(np.full(number, scored.num_micro_batches))
    for index, row in enumerate(cases.row.tolist()):
        same = layouts.meshes[row] == scored.mesh
        same = same and cases.tables_at(index) == scored.tables
        if same and int(cases.zero[index]) == scored.zero:
            times = every.evaluator.times(cases).at(index)
            memory = every.evaluator.memory(cases, ()).at(index)
            fresh = search.cluster.slowest.fresh_seconds(memory.temporary_bytes)
            times = dataclasses.replace(times, allocation_seconds=fresh)
            return {**dataclasses.asdict(times), **dataclasses.asdict(memory)}
    return None


def compared(one: Drawn) -> dict[str, Any]:
    """A layout, and by how much each way disagrees of it."""
    row: dict[str, Any] = {
        "cluster": one.cluster,
        "commit": checkout.commit(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "options": one.options,
        "program": one.program,
    }
    try:
        alone, others = said(one)
    except wh.WhaleError as error:
        return {**row, "refused": str(error)[:120]}
    row["layout"] = alone.candidates[0].layout
    row["off"] = {way: difference(alone, found) for way, found in others}
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of some layouts."""
    planned = [row for row in rows if "off" in row]
    off = {
        way: [row["off"][way] for row in planned if way in row["off"]] for way in WAYS
    }
    worst = max(
        planned,
        key=lambda row: max((row["off"].get(way, 0.0) for way in WAYS), default=0.0),
        default=None,
    )
    return {
        "layouts": len(planned),
        "refused": len(rows) - len(planned),
        "max_disagreement": max((max(off[w], default=0.0) for w in WAYS), default=None),
        "disagreement": {way: max(found, default=None) for way, found in off.items()},
        "compared": {way: len(found) for way, found in off.items()},
        "worst": worst and f"{worst['program']} {worst['cluster']}: {worst['layout']}",
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--fresh", type=int, default=FRESH)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    today = int(datetime.date.today().strftime("%Y%m%d"))
    seed = today if given.seed is None else given.seed
    until = time.monotonic() + given.seconds
    fresh: list[dict[str, Any]] = []
    for number in range(DRAWS if given.refresh else given.fresh):
        if given.refresh and str(number) in kept:
            continue
        if not given.refresh and time.monotonic() > until:
            break
        row = compared(drawn(number, SEED if given.refresh else seed))
        if given.verbose:
            print(json.dumps(row), flush=True)
        if given.refresh:
            kept[str(number)] = row
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        else:
            fresh.append(row)
    rows = [*kept.values()]
    found = {**summary(rows), "seed": seed, "fresh": len(fresh)}
    found["fresh_max_disagreement"] = summary(fresh)["max_disagreement"]
    found["commits"] = sorted({row["commit"] for row in rows})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
