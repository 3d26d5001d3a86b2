"""Compares the predictions for one layout, by all functions that make them.

The script samples layouts: a program, devices, sizes of the mesh axes (stages and mixed
kinds among them), ZeRO, remat, attention and micro-batches. Each is planned with all of
that fixed (``alone``), and its time and memory are compared, term by term, with the
predictions for the same layout

    row        among the candidates of a plan with a free mesh
    what_if    by ``plan.what_if`` of a plan on another mesh
    together   by the evaluator, in an array of every layout of its program
    paper      as an estimate (``runnable=False``)

A term may differ by rounding: disagreement is the largest difference of a term, as a
part of the step or of all memory.

    python scripts/bench_one_evaluator.py [--refresh] [--fresh N] [--seed N]
        [--seconds N] [--verbose]

``one_evaluator.json`` beside this script has the results, with commit, versions and
seed. Without options a fresh sample, chosen by today's date or by ``--seed``, is
compared within seven minutes. ``--refresh`` compares the draws that the file lacks, and
continues where it was interrupted. The last line is one JSON object:

    layouts, refused          layouts that were planned; those without an executor
    max_disagreement          largest disagreement
    disagreement, compared    largest disagreement and number of layouts, by function
    worst                     layout with the largest disagreement
    seed, fresh, fresh_max_disagreement  seed, size and disagreement of the fresh sample
    commits                   commits of the stored results
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


FILE: Final = Path(__file__).with_name("one_evaluator.json")
SEED: Final = 20261129
DRAWS: Final = 300
FRESH: Final = 24
SECONDS: Final = 420.0
SOURCES: Final = ("row", "what_if", "together", "paper")

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
class LayoutSample:
    """A layout.

    Attributes:
        program, cluster: Program to plan, and its cluster.
        batch: Samples of the global batch.
        options: Options of ``wh.plan`` with the mesh.
    """

    program: str
    cluster: str
    batch: int
    options: dict[str, Any]


def random_layout(number: int, seed: int) -> LayoutSample:
    """Returns one layout of a seed."""
    rng = random.Random(f"{seed} {number}")
    program = rng.choice([*PROGRAMS])
    cluster = rng.choice(CLUSTERS)
    devices_left = wh.cluster(cluster).num_devices
    mesh = dict.fromkeys(AXES, 1)
    names = ["data", "fsdp", "tensor"]
    if program != "images":
        names += ["context"]
    if program in ("scanned", "llama"):
        names += ["stage"] * (rng.random() < 0.4)
    names += ["expert"] * (program == "experts")
    rng.shuffle(names)
    for name in names[:-1]:
        mesh[name] = rng.choice(divisors(devices_left))
        devices_left //= mesh[name]
    mesh[names[-1]] = devices_left
    is_one_kind = "+" not in cluster
    parts = (1,) if program in ("images", "experts") else (1, 1, 2, 4)
    if mesh["stage"] > 1 or not is_one_kind:
        parts = tuple(max(n, 4) for n in parts)
    options: dict[str, Any] = {
        "mesh": {a: n for a, n in mesh.items() if n > 1 or a != "stage"},
        "num_micro_batches": rng.choice(parts),
        "remat": rng.choice(("none", "none", "dots", "full")),
    }
    if mesh["stage"] == 1 and mesh["data"] > 1 and is_one_kind:
        options["zero"] = rng.choice((0, 0, 1, 2))
    if mesh["stage"] == 1 and program != "images":
        options["attention"] = rng.choice(("gather", "gather", "ring"))
        options["loss_chunks"] = rng.choice((1, 1, 4))
    return LayoutSample(program=program, cluster=cluster, batch=64, options=options)


@functools.cache
def planner(program: str, cluster: str, batch: int) -> Callable[..., Any]:
    """Returns the function that plans a program on a cluster under options."""
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


def terms(prediction: Any) -> dict[str, float]:
    """Returns the seconds and bytes of a plan or of a row, by term."""
    return {
        **dataclasses.asdict(prediction.time),
        **dataclasses.asdict(prediction.memory),
    }


def difference(prediction: Any, other: dict[str, float]) -> float:
    """Returns the largest difference of a term, as a part of its total."""
    totals = {
        "_seconds": prediction.time.step_seconds,
        "_bytes": prediction.memory.total_bytes,
    }
    return max(
        abs(value - other[name]) / total
        for name, value in terms(prediction).items()
        for ending, total in totals.items()
        if name.endswith(ending)
    )


def predictions(
    layout: LayoutSample,
) -> tuple[Any, Iterator[tuple[str, dict[str, float]]]]:
    """Returns the plan of a layout, and an iterator over its other predictions.

    Raises:
        PlanError: No executor runs it, or nothing fits.
    """
    plan = planner(layout.program, layout.cluster, layout.batch)
    searches: list[Search] = []
    original = spmd_search.searches

    def recording(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        searches.extend(search for _, search in result.found)
        return result

    spmd_search.searches = recording
    try:
        alone = plan(**layout.options, offload=())
    finally:
        spmd_search.searches = original
    return alone, _other_predictions(layout, plan, alone, searches)


def _other_predictions(
    sample: LayoutSample, plan: Callable[..., Any], alone: Any, searches: list[Search]
) -> Iterator[tuple[str, dict[str, float]]]:
    others = {k: v for k, v in sample.options.items() if k != "mesh"}
    layout = alone.candidates[0].layout
    stages = sample.options["mesh"].get("stage", 1)
    fixed_mesh = {"mesh": {"stage": stages}} if stages > 1 else {}
    free = _plan_or_none(plan, **others, **fixed_mesh, offload=())
    rows = [] if free is None else [c for c in free.candidates if c.layout == layout]
    for row in rows[:1]:
        yield "row", terms(row)
    changed = _plan_or_none(plan, offload=()) if free is None else free
    if changed is not None:
        yield "what_if", terms(changed.what_if(**sample.options))
    # For stages in lockstep, only estimates have ring attention or chunks of logits.
    settings = {"attention": "gather", "loss_chunks": 1, **sample.options}
    paper = _plan_or_none(plan, **settings, offload=(), runnable=False)
    if paper is not None:
        yield "paper", terms(paper)
    candidate = _find_candidate(alone, searches) if stages == 1 else None
    if candidate is not None:
        search, scored = candidate
        predicted = _predict_in_array(search, scored)
        if predicted is not None:
            yield "together", predicted


def _plan_or_none(plan: Callable[..., Any], **options: Any) -> Any:
    try:
        return plan(**options)
    except wh.PlanError:
        return None


def _find_candidate(
    alone: Any, searches: list[Search]
) -> tuple[Search, LayoutCandidate] | None:
    """Returns the search that found a plan, and its candidate."""
    for search in searches:
        for scored in search.scored:
            if scored.time == alone.time and scored.memory == alone.memory:
                return search, scored
    return None


def _predict_in_array(
    search: Search, scored: LayoutCandidate
) -> dict[str, float] | None:
    """Evaluates the layout in an array of every layout of its program."""
    all_layouts = Search(
        search.graph,
        search.dims,
        search.cluster,
        dataclasses.replace(search.request, mesh=None, zero=None),
        beside=None if search.split is None else search,
        split=search.split,
        program=search.program,
    )
    layouts = all_layouts._layouts(all_layouts.meshes(scored.mesh["context"]))
    number = len(layouts.cases)
    cases = layouts.cases.with_count(np.full(number, scored.num_micro_batches))
    for index, row in enumerate(cases.row.tolist()):
        is_equal = layouts.meshes[row] == scored.mesh
        is_equal = is_equal and cases.tables_at(index) == scored.tables
        if is_equal and int(cases.zero[index]) == scored.zero:
            times = all_layouts.evaluator.times(cases).at(index)
            memory = all_layouts.evaluator.memory(cases, ()).at(index)
            fresh = search.cluster.slowest.fresh_seconds(memory.temporary_bytes)
            times = dataclasses.replace(times, allocation_seconds=fresh)
            return {**dataclasses.asdict(times), **dataclasses.asdict(memory)}
    return None


def compare_layout(layout: LayoutSample) -> dict[str, Any]:
    """Returns the record of a layout with the disagreement of each function."""
    row: dict[str, Any] = {
        "cluster": layout.cluster,
        "commit": checkout.commit(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "options": layout.options,
        "program": layout.program,
    }
    try:
        alone, others = predictions(layout)
    except wh.WhaleError as error:
        return {**row, "refused": str(error)[:120]}
    row["layout"] = alone.candidates[0].layout
    row["off"] = {source: difference(alone, predicted) for source, predicted in others}
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of some layouts."""
    planned = [row for row in rows if "off" in row]
    gaps = {
        source: [row["off"][source] for row in planned if source in row["off"]]
        for source in SOURCES
    }
    worst = max(
        planned,
        key=lambda row: max(
            (row["off"].get(source, 0.0) for source in SOURCES), default=0.0
        ),
        default=None,
    )
    return {
        "layouts": len(planned),
        "refused": len(rows) - len(planned),
        "max_disagreement": max(
            (max(gaps[w], default=0.0) for w in SOURCES), default=None
        ),
        "disagreement": {
            source: max(values, default=None) for source, values in gaps.items()
        },
        "compared": {source: len(values) for source, values in gaps.items()},
        "worst": worst and f"{worst['program']} {worst['cluster']}: {worst['layout']}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--fresh", type=int, default=FRESH)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    today = int(datetime.date.today().strftime("%Y%m%d"))
    seed = today if args.seed is None else args.seed
    until = time.monotonic() + args.seconds
    fresh: list[dict[str, Any]] = []
    for number in range(DRAWS if args.refresh else args.fresh):
        if args.refresh and str(number) in stored:
            continue
        if not args.refresh and time.monotonic() > until:
            break
        row = compare_layout(random_layout(number, SEED if args.refresh else seed))
        if args.verbose:
            print(json.dumps(row), flush=True)
        if args.refresh:
            stored[str(number)] = row
            FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        else:
            fresh.append(row)
    rows = [*stored.values()]
    report = {**summary(rows), "seed": seed, "fresh": len(fresh)}
    report["fresh_max_disagreement"] = summary(fresh)["max_disagreement"]
    report["commits"] = sorted({row["commit"] for row in rows})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
