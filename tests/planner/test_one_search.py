"""One search and one evaluator: what a plan says of itself and of others is the same.

Every row among a plan's candidates is what planning that row alone gives.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

from whalejax import jobs, models
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture
from whalejax.capture.precision import at_precision
from whalejax.lowering.batch_record import batch_leaves
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.meshes import Cluster, cluster
from whalejax.planner.cost_terms import ALL, Chosen, Remat
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.spmd_plan import decide
from whalejax.planner.plan_entries import BatchLeaf, Candidate
from whalejax.planner.search.layout_search import PLANNED_AXES
from whalejax.planner.search.request import Request


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
def plan(asked: Question) -> Plan:
    """The best plan."""
    return asked.runs()


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
        "attention": ((ALL, "ring"),) if "attention" in layout else (),
        "loss_chunks": number(r"logits in (\d+) chunks", 1),
    }


@pytest.mark.sampled(3)
def test_a_plan_is_its_own_row(plan: Plan) -> None:
    row = own_row(plan)
    assert row.time == plan.time
    assert row.memory == plan.memory


def test_the_runner_up_differs_as_its_row_says(plan: Plan) -> None:
    other = plan.runner_up
    assert other is not None
    slower = (other.step_seconds - plan.time.step_seconds) * 1e3
    said = re.match(r"([\d.]+) ms slower", other.verdict)
    assert (float(said[1]) if said else 0.0) == pytest.approx(
        max(0.0, slower), abs=0.006
    )
    assert f"runner-up: {other}" in plan.explain()


@pytest.mark.sampled(3)
def test_a_row_is_what_planning_it_alone_gives(asked: Question, plan: Plan) -> None:
    for row in plan.candidates[:6]:
        if row.fits:
            alone = asked.runs(**choices(row.layout))
            assert own_row(alone).layout == row.layout
            assert alone.time.step_seconds == pytest.approx(row.step_seconds, rel=1e-9)
            assert alone.memory == row.memory
