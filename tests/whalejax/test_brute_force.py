"""Every plan of small models, priced one and all: the planner chooses the best of them.

Nothing is ruled out before it is priced: every program, mesh, table, level of ZeRO,
number of micro-batches, set in host memory and set of dimensions beside which the
sequence is sharded, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.cost_terms import ALL
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search import spmd_search
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.ranking import TIE
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.sharding.sequence_parallel import shared_roles
from whalejax.planner.step_options import LOSS_CHUNKS


pytestmark = pytest.mark.relaxed_promotion

SCANNED = {"scan_layers": True}
FOUR = {"layers": 4, "sequence": 512, **SCANNED}


def every_mesh(search: Search) -> list[dict[str, int]]:
    """All meshes of a search, spatial axes among them."""
    contexts = divisors(search.request.num_devices)
    found = [mesh for size in contexts for mesh in search.meshes(size)]
    if any(search.options.space.values()) and search.split is None:
        found += [
            mesh for space in search.spaces() for mesh in search.meshes(space=space)
        ]
    return found


def steps_of(search: Search) -> Iterator[float]:
    """Step seconds of all that fits on the meshes of a search."""
    pairs = [(mesh, t) for mesh in every_mesh(search) for t in search._tables(mesh)]
    if not pairs:
        return
    layouts = search._on_grid(pairs)
    layouts = layouts.take(search._allowed(layouts.cases))
    every = np.arange(len(layouts.cases))
    counts = layouts.counts_of(every)
    each = np.repeat(every, [len(one) for one in counts])
    if not len(each):
        return
    cases = layouts.cases.take(each).with_count(np.concatenate(counts))
    evaluator, times = search.evaluator, search.evaluator.times(cases)
    for offload in itertools.chain(*search.hosting.options()):
        memory = evaluator.memory(cases, offload)
        fits = evaluator.fits(memory) & evaluator.serves(cases, offload)
        moves = evaluator.offload_seconds(cases, offload, times, memory)
        for row in np.flatnonzero(fits).tolist():
            fresh = memory.at(row).temporary_bytes
            yield dataclasses.replace(
                times.at(row),
                allocation_seconds=search.cluster.slowest.fresh_seconds(fresh),
                offload_seconds=float(moves[row]),
            ).step_seconds


def every_step(graph: Any, cluster: Any, request: Any, again: Any) -> Iterator[float]:
    """Step seconds of all that fits, whichever program computes it."""
    remats = [((ALL, p),) if p != "none" else () for p in request.policies]
    seen = []
    for remat, attention, chunks in itertools.product(
        remats, ((), ((ALL, "ring"),)), (1, LOSS_CHUNKS)
    ):
        plain = not (remat or attention or chunks > 1)
        program = graph if plain else again(remat, attention, chunks)
        if any(program is one for one in seen):
            continue
        seen.append(program)
        analysed = analyse_graph(program)
        asked = dataclasses.replace(
            request, remat=remat, attention=attention, loss_chunks=chunks
        )
        search = Search(analysed.graph, analysed.dims, cluster, asked)
        yield from steps_of(search)
        if not search.options.sequence:
            continue
        shared = {
            shared_roles(tables, search.options.batch): None
            for mesh in every_mesh(search)
            if mesh["tensor"] > 1
            for tables in search._tables(mesh)
        }
        sets = [roles for roles in shared if roles]
        for split in map(search.program.splits.of, sets):
            beside = {"beside": search, "split": split}
            yield from steps_of(
                Search(split.graph, analysed.dims, cluster, asked, **beside)
            )


@pytest.mark.parametrize(
    ("name", "sizes", "cluster", "batch", "precision", "share"),
    [
        ("gpt-test", SCANNED, "h100:4", 16, "f32", 1.2),
        ("gpt-small", FOUR, "h100:4", 32, "bf16", 0.35),
        ("gpt-small", FOUR, "v5e:2x2", 32, "bf16", 0.5),
        ("gpt-test", SCANNED, "cpu:4", 16, "f32", 0.7),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("gpt-test", SCANNED, "h100:8", 16, "f32", 0.5),
                ("gpt-small", FOUR, "h100:8", 16, "f32", 0.9),
                ("gpt-small", FOUR, "v6e:2x2", 8, "bf16", 0.35),
                ("moe-test", {}, "h100:4", 16, "f32", 0.7),
                ("llama-test", {}, "v5e:2x2", 16, "bf16", 0.5),
                ("resnet50", {}, "h100:4", 64, "f32", 0.7),
                ("unet3d-test", {}, "v5e:2x2", 16, "bf16", 0.35),
            )
        ),
    ],
)
def test_the_best_of_all_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sizes: dict[str, Any],
    cluster: str,
    batch: int,
    precision: str,
    share: float,
) -> None:
    """Whatever part of the memory there is that the plan would take with enough."""
    job = models.job(name, **sizes)
    ask = functools.partial(
        wh.plan,
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        optimizer=job.optimizer,
        precision=precision,
        margin=0.0,
    )
    machine = wh.cluster(cluster)
    roomy = ask(cluster=machine.with_memory(10**13)).memory.total_bytes
    given: list[Any] = []
    search = spmd_search.searches

    def remembered(*arguments: Any) -> Any:
        given.append(arguments[:4])  # The first is of all devices, others of stages.
        return search(*arguments)

    monkeypatch.setattr(spmd_search, "searches", remembered)
    try:
        plan = ask(cluster=machine.with_memory(int(share * roomy) + 1))
    except PlanError:
        assert not [*every_step(*given[0])]
        return
    best = min(every_step(*given[0]))
    kept = min(c.time.step_seconds for c in plan.candidates if c.fits)
    assert kept == pytest.approx(best, rel=1e-9)
    assert plan.time.step_seconds <= best * (1 + TIE)
    if (
        plan.gap is not None
    ):  # Only stages take another plan than the best of one program.
        assert plan.time.step_seconds * (1 - plan.gap) <= best * (1 + 1e-9)


def test_the_four_best_of_the_layouts_that_lack_memory_come_last() -> None:
    job = models.job("gpt-test", annotated=False)
    given = job.loss_fn, jobs.abstract_model(job), job.batch_at(0, 64)
    plan = wh.plan(
        *given,
        optimizer=optax.adam(1e-3),
        cluster=wh.cluster("h100:8").with_memory(1_600_000),
        margin=0.0,
        remat="none",
        num_micro_batches=2,
        offload=(),
    )
    fitting = [c for c in plan.candidates if c.fits]
    refused = [c for c in plan.candidates if not c.fits]
    assert plan.candidates == (*fitting, *refused) and len(refused) == 4
    steps = [c.step_seconds for c in refused]
    assert steps == sorted(steps)
