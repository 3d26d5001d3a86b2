"""One search and one evaluator: what a plan says of itself and of others is the same.

Every row among a plan's candidates is what planning that row alone gives, what need not
run is never worse than what runs, and the arrays of the wide search take as long as the
plans that they stand for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest

from whalejax import jobs, models
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture
from whalejax.capture.precision import at_precision
from whalejax.lowering.batch_record import batch_leaves
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.meshes import Cluster, cluster
from whalejax.planner.entries import BatchLeaf, Candidate
from whalejax.planner.errors import PlanError
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.plan_any import decide_any
from whalejax.planner.plan.spmd import decide
from whalejax.planner.search.batched.branch_and_bound import Case, WideSearch
from whalejax.planner.search.batched.cases import Cases
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.mesh_grid import Frames
from whalejax.planner.search.batched.partition import cut_layers
from whalejax.planner.search.batched.step_time import settle, weigh
from whalejax.planner.search.enumerate import PLANNED_AXES
from whalejax.planner.search.request import Request, Scored
from whalejax.planner.search.spmd import searches
from whalejax.planner.sharding.layout import Table
from whalejax.planner.terms import ALL, OFFLOADS, Chosen, MemoryTerms, Remat


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion

POLICIES = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned: a model's programs, a machine and what is asked."""

    graph: Graph
    batch: tuple[BatchLeaf, ...]
    again: Callable[[Remat, Chosen, int], Graph]
    machine: Cluster
    request: Request

    def runs(self, **changes: Any) -> Plan:
        request = dataclasses.replace(self.request, **changes)
        given = self.graph, self.machine, request
        return decide(*given, batch=self.batch, again=self.again)

    def any(self) -> Plan:
        given = self.graph, self.machine, self.request
        return decide_any(*given, batch=self.batch, again=self.again)


@functools.cache
def captured(name: str, batch: int, precision: str, options: Any) -> tuple[Any, ...]:
    """A reference model's loss, captured, its batch and what its optimizer takes."""
    job = models.job(name, **dict(options))
    model = jobs.abstract_model(job)
    adapter = at_precision(adapt(model, job.loss_fn), precision)
    given = jax.eval_shape(lambda: job.batch_at(0, batch))
    found = capture(adapter, given, num_micro_batches=1, batch_axes=0)
    return found, batch_leaves(given), optimizer_bytes(adapter, optax.adam(1e-3))


def question(
    name: str,
    text: str,
    batch: int,
    *,
    memory: float | None = None,
    precision: str = "f32",
    options: dict[str, Any] | None = None,
    **asked: Any,
) -> Question:
    machine = cluster(text)
    if memory is not None:
        machine = machine.with_memory(int(memory))
    key = tuple(sorted((options or {}).items()))
    loss, leaves, state = captured(name, batch, precision, key)

    @functools.cache
    def again(remat: Remat, attention: Chosen, chunks: int) -> Graph:
        found: Captured = loss.with_attention(attention).with_chunks(chunks)
        return found.with_remat(remat).graph

    request = Request(
        optimizer=state,
        cast_bytes=0.5 if precision == "bf16" else 1.0,
        num_devices=machine.num_devices,
        policies=POLICIES,
        **asked,
    )
    return Question(
        graph=loss.graph, batch=leaves, again=again, machine=machine, request=request
    )


GPT = {"annotated": False, "scan_layers": True, "layers": 4, "embed": 256, "heads": 4}

QUESTIONS: dict[str, Callable[[], Question]] = {
    "gpt": lambda: question("gpt-test", "h100:4", 16, options=GPT),
    "sequence": lambda: question(
        "gpt-test", "v5e:2x2", 8, options=GPT, mesh={"context": 2}, precision="bf16"
    ),
    "unrolled": lambda: question(
        "gpt-test", "a100-80:2x2", 8, options={"annotated": False}, precision="bf16"
    ),
    "marked": lambda: question("gpt-test", "h100:4", 8),
    "tight": lambda: question("gpt-test", "h100:4", 64, options=GPT, memory=3e8),
    "tensor": lambda: question(
        "gpt-test", "v5p:2x2x1", 8, options=GPT, mesh={"tensor": 2}
    ),
    "parts": lambda: question(
        "gpt-test", "a100-80:2x2", 16, options=GPT, num_micro_batches=4
    ),
    "mlp": lambda: question("mlp-test", "v5e:2x2", 16),
    "experts": lambda: question("moe-test", "h100:4", 16),
}


SMALL = {"annotated": False, "scan_layers": True}

LARGER: dict[str, Callable[[], Question]] = {
    "a node": lambda: question("gpt-small", "h100:8", 64, options=SMALL),
    "a torus": lambda: question("gpt-small", "v5p:2x2x4", 128, options=SMALL),
}


@pytest.fixture(
    params=[*QUESTIONS, *(pytest.param(n, marks=pytest.mark.full) for n in LARGER)],
    scope="module",
)
def asked(request: pytest.FixtureRequest) -> Question:
    return (QUESTIONS | LARGER)[request.param]()


@pytest.fixture(scope="module")
def plans(asked: Question) -> tuple[Plan, Plan]:
    """The best that runs, and the best."""
    return asked.runs(), asked.any()


def own_row(plan: Plan) -> Candidate:
    (found,) = (c for c in plan.candidates if c.verdict == "chosen")
    return found


def choices(layout: str) -> dict[str, Any]:
    """What the words of a row fix, as a request takes it."""
    mesh = dict.fromkeys(PLANNED_AXES, 1)
    mesh |= {a: int(n) for a, n in re.findall(r"([a-z]+) (\d+)(?: ×|,|$)", layout)}

    def number(pattern: str, default: int) -> int:
        found = re.search(pattern, layout)
        return int(found[1]) if found else default

    policy = re.search(r"remat (\w+)", layout)
    hosted = re.search(r"([\w ]+) in host memory", layout)
    return {
        "mesh": mesh,
        "zero": number(r"ZeRO-(\d)", 0),
        "num_micro_batches": number(r"(\d+) micro-batches", 1),
        "remat": ((ALL, policy[1]),) if policy else (),
        "offload": tuple(hosted[1].split(" and ")) if hosted else (),
        "sequence_parallel": "sequence parallel" in layout,
        "attention": ((ALL, "ring"),) if "ring attention" in layout else (),
        "loss_chunks": number(r"logits in (\d+) chunks", 1),
    }


@pytest.mark.sampled(3)
def test_a_plan_is_its_own_row(plans: tuple[Plan, Plan]) -> None:
    for plan in plans:
        row = own_row(plan)
        assert row.time == plan.time
        assert row.memory == plan.memory


@pytest.mark.sampled(3)
def test_what_need_not_run_is_never_worse(plans: tuple[Plan, Plan]) -> None:
    runs, best = plans
    assert best.time.step_seconds <= runs.time.step_seconds
    if best.runnable:
        assert best.hash == runs.hash
    else:
        layouts = {c.layout: c for c in best.candidates}
        assert layouts[own_row(runs).layout].time == runs.time


def test_the_runner_up_differs_as_its_row_says(plans: tuple[Plan, Plan]) -> None:
    for plan in plans:
        other = plan.runner_up
        if other is None:
            continue
        slower = (other.step_seconds - plan.time.step_seconds) * 1e3
        said = re.match(r"([\d.]+) ms slower", other.verdict)
        assert (float(said[1]) if said else 0.0) == pytest.approx(
            max(0.0, slower), abs=0.006
        )
        assert f"runner-up: {other}" in plan.explain()


@pytest.mark.sampled(3)
def test_a_row_is_what_planning_it_alone_gives(
    asked: Question, plans: tuple[Plan, Plan]
) -> None:
    runs, _ = plans
    for row in runs.candidates[:6]:
        if row.fits:
            alone = asked.runs(**choices(row.layout))
            assert own_row(alone).layout == row.layout
            assert alone.time.step_seconds == pytest.approx(row.step_seconds, rel=1e-9)
            assert alone.memory == row.memory


def named(
    tables: Mapping[int, Table], dims: Dimensions, mesh: Mapping[str, int]
) -> Any:
    """Compute tables by names, as far as axes shard anything."""
    return {
        (region, axis): {dims.roles[role].name for role in roles}
        for region, table in tables.items()
        for axis, roles in table.items()
        if mesh[axis] > 1 and axis in ("expert", "tensor")
    }


def frames_like(
    search: WideSearch, scored: Scored, dims: Dimensions
) -> Iterator[Frames]:
    """The cases of the wide search with tables such as a plan's."""
    mesh, sizes = scored.mesh, search.space.sizes
    parts = mesh["data"] * mesh["fsdp"] * mesh["expert"] * scored.num_micro_batches
    same = sizes["samples"] == search.batch // parts
    for axis in ("expert", "context", "tensor"):
        same &= sizes[axis] == mesh[axis]
    for cell in np.flatnonzero(same):
        variant = search.served[int(search.model.cells[Column("variant")][cell])]
        tables = {g: t for g, t in scored.tables.items() if g in variant.tables}
        if variant.sequence_parallel != scored.sequence_parallel:
            continue
        if named(variant.tables, search.dims, mesh) != named(tables, dims, mesh):
            continue
        given = {f.name: 0 for f in dataclasses.fields(Frames)}
        given |= {"cell": cell, "stage": 1, "chunks": 1, "zero": scored.zero}
        given |= {"data": mesh["data"], "fsdp": mesh["fsdp"]}
        given |= {"micro_batches": scored.num_micro_batches}
        away = (OFFLOADS.index(name) for name in scored.offload)
        given |= {"offload": sum(1 << place for place in away)}
        yield Frames(**{k: np.array([n]) for k, n in given.items()})


def arrays_of(
    search: WideSearch, scored: Scored, dims: Dimensions
) -> Iterator[tuple[float, MemoryTerms | None]]:
    """Step time of such cases, and their memory where liveness tells it."""
    for frames in frames_like(search, scored, dims):
        model = dataclasses.replace(search.model, exact=search.liveness)
        cases = Cases(model, frames, search.placements()[0], None)
        cut_layers(cases)
        found = weigh(cases)
        settle(cases, found, np.arange(1), frames.micro_batches)
        told = search.liveness.covers(cases)
        yield float(found.step[0]), found.memory_terms(0) if told else None


@pytest.mark.sampled(3)
def test_cases_take_the_time_and_memory_of_plans_that_they_stand_for(
    asked: Question,
) -> None:
    compared = known = 0
    given = asked.graph, asked.machine, asked.request, asked.again
    for analysed, one in searches(*given):
        of = one.request
        program = (of.remat or (), of.attention or (), of.loss_chunks or 1)
        plain = dataclasses.replace(asked.request, remat=())
        search = WideSearch(asked.again(*program), asked.machine, plain)
        pairs = (
            (scored, step, terms)
            for scored in sorted(one.scored, key=lambda s: s.time.step_seconds)
            if not scored.offload
            for step, terms in arrays_of(search, scored, analysed.dims)
        )
        for scored, step, terms in itertools.islice(pairs, 8):
            # A byte of the payload is rounded, and a part of what ZeRO-2 scatters.
            alike = step == pytest.approx(scored.time.step_seconds, rel=1e-9)
            assert alike, (scored.layout, step, scored.time)
            assert terms in (None, scored.memory)
            compared += 1
            known += terms is not None
    assert compared and known


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_cases_wait_for_the_host_as_plans_do(policy: str) -> None:
    """Transfers run beside all that is computed; what is longer is exposed."""
    kept: dict[str, Any] = {"offload": ("activations",), "remat": ((ALL, policy),)}
    asked = question("gpt-test", "h100:4", 64, options=GPT, **kept)
    (node,) = asked.machine.nodes
    kind = dataclasses.replace(node.kind, host_link_bytes_per_second=2e9)
    node = dataclasses.replace(node, kind=kind)
    asked = dataclasses.replace(
        asked, machine=dataclasses.replace(asked.machine, nodes=(node,))
    )
    graph = asked.again(((ALL, policy),), (), 1)
    plain = dataclasses.replace(asked.request, remat=())
    search = WideSearch(graph, asked.machine, plain)
    given = asked.graph, asked.machine, asked.request, asked.again
    ((analysed, one), *_) = searches(*given)
    waited = 0
    for scored in sorted(one.scored, key=lambda s: s.time.step_seconds)[:12]:
        for step, terms in arrays_of(search, scored, analysed.dims):
            assert terms == scored.memory
            exposed = scored.time.offload_seconds
            assert step == pytest.approx(scored.time.step_seconds, rel=0.02)
            waited += exposed > 0.05 * step
    assert waited


@pytest.mark.full
def test_what_memory_does_not_hold_after_all_leaves_a_gap() -> None:
    tight = {"memory": 5e7, "mesh": {"stage": 2}, "remat": ()}
    asked = question("gpt-test", "h100:4", 64, options=GPT, **tight)
    plan = asked.any()
    search = WideSearch(asked.graph, asked.machine, asked.request, rings=False)
    # Its best case does not fit by liveness: nothing bounds slower ones.
    assert search.run() and search.tally.bound < plan.time.step_seconds
    open_part = 1 - search.tally.bound / plan.time.step_seconds
    assert plan.beyond is not None and plan.beyond.gap >= open_part - 1e-9
    assert any(f"(gap {plan.beyond.gap:.2%})" in note for note in plan.notes)


@pytest.mark.full
def test_a_case_that_its_own_program_does_not_hold_is_looked_for_in_less_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = ((ALL, "full"),)
    tight = {"memory": 2e7, "mesh": {"stage": 2}, "remat": full}
    asked = question("gpt-test", "h100:4", 64, options=GPT, **tight)
    rooms: list[float] = []
    run = WideSearch.run

    def none_again(search: WideSearch) -> list[Case]:
        """Nothing is found on programs that compute again."""
        rooms.append(search.room)
        return run(search) if search.request.remat == full else []

    monkeypatch.setattr(WideSearch, "run", none_again)
    with pytest.raises(PlanError) as caught:
        asked.any()
    assert min(rooms) < 1
    assert "(0 bytes)" not in str(caught.value)
