"""Stages and replicas that nobody asked for; what bounds and estimates they have."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.meshes import Cluster
from whalejax.planner.plan import pipeline_mpmd, uneven_replica_plans
from whalejax.planner.search import least_paces
from whalejax.planner.search.least_paces import StageBounds
from whalejax.planner.search.likely_replicas import LikelyReplicas
from whalejax.planner.search.uneven_replicas import Replicas


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion


@functools.cache
def asked(name: str, batch: int, scanned: bool) -> tuple[Any, Any, Any]:
    """A GPT's loss, model and batch."""
    job = models.job(name, annotated=False, scan_layers=scanned)
    given = jax.eval_shape(lambda: job.batch_at(0, batch))
    return job.loss_fn, jobs.abstract_model(job), given


def planned(
    name: str,
    batch: int,
    machine: Cluster | str,
    *,
    scanned: bool = True,
    **options: Any,
) -> wh.Plan:
    given = asked(name, batch, scanned)
    return wh.plan(
        *given, optimizer=optax.adam(1e-3), cluster=machine, precision="bf16", **options
    )


def slow_network(text: str, times: float) -> Cluster:
    """A cluster whose nodes have so many times less bandwidth between them."""
    machine = wh.cluster(text)
    *inner, network = machine.levels
    bandwidth = network.bandwidth_bytes_per_second / times
    network = dataclasses.replace(network, bandwidth_bytes_per_second=bandwidth)
    return dataclasses.replace(machine, levels=(*inner, network))


def test_stages_are_taken_where_links_are_slow() -> None:
    machine = slow_network("a100-80:4x1", 20)
    plan = planned("gpt-xl", 16, machine)
    assert plan.runnable and plan.axis_sizes == {"stage": 4}
    one_program = planned("gpt-xl", 16, machine, mesh={"stage": 1})
    assert plan.time.step_seconds * 1.1 < one_program.time.step_seconds
    stages = planned("gpt-xl", 16, machine, mesh={"stage": 4})
    assert plan.time == stages.time
    assert one_program.candidates[0].layout in {c.layout for c in plan.candidates}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["h100:1x2+v100-32:1x2", "h100:1x2+p100-16:1x2"])
def test_no_number_of_micro_batches_beats_an_open_one_on_mixed_kinds(text: str) -> None:
    job = models.job(
        "llama-test",
        layers=2,
        embed=1024,
        heads=8,
        kv_heads=4,
        mlp=4096,
        sequence=2048,
        vocab=32_768,
        scan_layers=True,
    )
    batch = jax.eval_shape(lambda: job.batch_at(0, 2))

    def seconds(**options: Any) -> float:
        plan = wh.plan(
            job.loss_fn,
            jobs.abstract_model(job),
            batch,
            optimizer=optax.adam(1e-4),
            cluster=text,
            precision="bf16",
            **options,
        )
        return plan.time.step_seconds

    chosen = seconds()
    for count in (1, 2):
        assert chosen <= 1.01 * seconds(num_micro_batches=count)


def test_slow_kinds_may_idle_with_few_micro_batches() -> None:
    sizes = {"layers": 2, "embed": 512, "heads": 8, "mlp": 2048}
    job = models.job("bert-base", **sizes, sequence=512, vocab=8192)
    batch = jax.eval_shape(lambda: job.batch_at(0, 16))

    def seconds(**options: Any) -> float:
        given = job.loss_fn, jobs.abstract_model(job), batch
        options |= {"cluster": "h100:1x2+v100-32:1x2", "precision": "bf16"}
        plan = wh.plan(*given, optimizer=optax.adam(1e-4), **options)
        return plan.time.step_seconds

    assert seconds() <= 1.01 * seconds(num_micro_batches=1)


@pytest.mark.parametrize(
    ("name", "batch", "text", "scanned"),
    [
        ("gpt-test", 16, "h100:4", True),
        ("gpt-test", 16, "a100-80:2x2", False),
        pytest.param("gpt-small", 64, "v5e:2x4", True, marks=pytest.mark.full),
        pytest.param("gpt-small", 32, "v100-32:8", False, marks=pytest.mark.full),
    ],
)
def test_no_stages_are_faster_than_their_bound(
    name: str,
    batch: int,
    text: str,
    scanned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[int, float] = {}
    bound = least_paces.least_stage_steps

    def kept(
        *given: Any, most_seconds: float = math.inf, **options: Any
    ) -> dict[int, float]:
        every = bound(*given, **options)
        found.update(every)
        for seconds in (most_seconds, *(s * (1 + 1e-9) for s in every.values())):
            some = bound(*given, most_seconds=seconds, **options)
            needed = {n: least for n, least in every.items() if least <= seconds}
            assert needed == {n: some.get(n) for n in needed}
        return {}

    choice = "whalejax.api.executor_choice"
    monkeypatch.setattr(f"{choice}.least_stage_steps", kept)
    monkeypatch.setattr(f"{choice}._stages_may_gain", lambda plan: True)
    planned(name, batch, text, scanned=scanned, runnable=False)
    plans = {}
    for stages in found:
        with contextlib.suppress(wh.PlanError):  # It has fewer layers.
            asked_for = {"scanned": scanned, "mesh": {"stage": stages}}
            plans[stages] = planned(name, batch, text, **asked_for)
    assert plans
    for stages, plan in plans.items():
        seconds = found[stages]
        assert 0 < seconds <= plan.time.step_seconds * (1 + 1e-9), stages


@pytest.mark.parametrize(
    ("name", "batch", "text"),
    [
        ("gpt-test", 64, "h100:2x2+v100-32:2x2"),
        pytest.param("gpt-xl", 128, "h100:8+a100-40:8", marks=pytest.mark.full),
    ],
)
def test_replicas_take_what_is_estimated(
    name: str, batch: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[LikelyReplicas] = []
    likely = uneven_replica_plans.likely_replicas

    def kept(*given: Any, **options: Any) -> list[LikelyReplicas]:
        found.extend(likely(*given, **options))
        return found

    monkeypatch.setattr(uneven_replica_plans, "likely_replicas", kept)
    monkeypatch.setattr(uneven_replica_plans, "MANY_DEVICES", 1)
    monkeypatch.setattr(uneven_replica_plans, "MANY_CASES", 1)
    best = planned(name, batch, text)
    devices = best.cluster.num_devices
    estimates = [*found]
    assert len(estimates) > 1
    compared = 0
    for one in estimates[:4]:
        case = one.case
        plan = planned(
            name,
            batch,
            text,
            mesh={"data": devices // case.size},
            num_micro_batches=case.count,
            zero=case.zero,
            sequence_parallel=False,
            offload="none",
        )
        # What replicas gather of slices is estimated by the bytes of gradients.
        exact = 1e-9 if not case.zero else 0.01
        assert plan.time.step_seconds == pytest.approx(one.seconds, rel=exact)
        compared += not case.zero
    assert compared


def test_a_plan_says_what_a_faster_one_that_nothing_runs_would_gain() -> None:
    machine = wh.cluster("gh200:1").with_memory(1_600_000_000)
    given = asked("gpt-small", 8, True)
    ask = functools.partial(
        wh.plan,
        *given,
        optimizer=optax.adafactor(1e-3),
        cluster=machine,
        precision="bf16",
    )
    plan = ask()
    (note,) = (text for text in plan.notes if text.startswith("on paper "))
    assert plan.runnable and "this optimizer does not update parameters" in note
    paper = ask(runnable=False)
    layout = next(c.layout for c in paper.candidates if c.verdict == "chosen")
    assert not paper.runnable and f"on paper {layout} takes" in note
    less = 1 - paper.time.step_seconds / plan.time.step_seconds
    assert f", {less:.0%} less; it does not run because: " in note and less > 0.1
    roomy = ask(cluster="gh200:1")
    assert not any(text.startswith("on paper ") for text in roomy.notes)


def test_a_plan_says_by_how_much_another_can_be_faster() -> None:
    plan = planned("gpt-small", 64, "h100:8")
    assert plan.gap is not None
    fastest = min(c.time.step_seconds for c in plan.candidates if c.fits)
    assert plan.time.step_seconds * (1 - plan.gap) <= fastest * (1 + 1e-12)
    words = f"be more than {plan.gap:.2%} faster" if plan.gap >= 5e-5 else "is faster"
    assert words in str(plan) and words in plan.explain()
    data = plan.document()
    assert wh.Plan.from_document(data).gap == plan.gap
    assert dataclasses.replace(plan, gap=None).hash == plan.hash
    with pytest.raises(wh.PlanError, match="gap is 2"):
        dataclasses.replace(plan, gap=2.0)


def test_stages_that_no_device_holds_are_not_weighed() -> None:
    machine = wh.cluster("a100-40:2").with_memory(700_000_000)
    plan = planned("gpt-small", 8, machine)
    assert plan.stages is None and "params" in plan.offload
    assert plan.memory.total_bytes <= machine.memory_bytes


SMALL_TIED: dict[str, Any] = {
    "layers": 4,
    "embed": 512,
    "heads": 8,
    "mlp": 2048,
    "vocab": 8192,
    "sequence": 256,
}
"""A GPT that reads its table of tokens in the first and the last stage."""


def small_tied_plan(
    machine: str, batch: int, sizes: dict[str, Any] = SMALL_TIED, **options: Any
) -> wh.Plan:
    job = models.job("gpt-small", **sizes)
    given = jax.eval_shape(lambda: job.batch_at(0, batch))
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        given,
        optimizer=optax.adam(1e-4),
        cluster=machine,
        precision="bf16",
        **options,
    )


def test_a_stage_takes_the_layout_that_is_best_for_the_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = functools.partial(small_tied_plan, "v5e:8", 32, mesh={"stage": 2})
    plan = ask()
    monkeypatch.setattr(pipeline_mpmd, "MOST_IMPROVED", 0)
    alone = ask()
    assert plan.time.step_seconds < alone.time.step_seconds * 0.99
    assert plan.num_micro_batches == alone.num_micro_batches
    assert plan.memory.total_bytes <= plan.cluster.memory_bytes


def test_bounds_on_shares_leave_out_no_faster_pipelines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, batch = "a100-40:1x4+h100:1x4", 32
    ask = functools.partial(small_tied_plan, machine, batch, mesh={"stage": 2})
    counts: list[tuple[int, int]] = []
    most_within = StageBounds.most_within

    def all_of_them(self: StageBounds, seconds: float, count: int) -> int:
        counts.append((most_within(self, seconds, count), count))
        return count

    plan = ask()
    monkeypatch.setattr(StageBounds, "most_within", all_of_them)
    unbounded = ask()
    assert plan.time == unbounded.time and plan.shares == unbounded.shares
    assert any(most < count for most, count in counts)


def test_a_number_of_pipelines_that_kinds_do_not_allow_leaves_the_others() -> None:
    # Of three pipelines the first would have a stage on both kinds.
    thirds = {"layers": 2, "embed": 384, "heads": 6, "mlp": 1536, "vocab": 3072}
    machine, sizes = "h100:1x3+a100-40:2x4+a100-40:1x1", {**SMALL_TIED, **thirds}
    asked = {"mesh": {"stage": 2}, "num_micro_batches": 8}
    plan = small_tied_plan(machine, 48, sizes, **asked)
    assert len(plan.pipelines) in (2, 6)


def test_no_replicas_are_faster_than_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weigh = uneven_replica_plans._weigh
    found: list[tuple[float, Replicas]] = []

    def compared(
        graph: Any, cluster: Cluster, request: Any, case: Any, *others: Any
    ) -> Replicas:
        result = weigh(graph, cluster, request, case, *others)
        programs = {name: others[-1].get(name) for name in ("again", "known")}
        given = graph, cluster, request, case.size, [case.count]
        least = uneven_replica_plans._least_seconds(*given, **programs)
        found.append((least[case.count], result))
        return result

    monkeypatch.setattr(uneven_replica_plans, "_weigh", compared)
    sizes = {"layers": 2, "embed": 512, "heads": 8, "kv_heads": 8, "mlp": 2048}
    job = models.job(
        "llama-test", **sizes, sequence=16_384, vocab=2048, scan_layers=True
    )
    batch = jax.eval_shape(lambda: job.batch_at(0, 8))
    given = job.loss_fn, jobs.abstract_model(job), batch
    options: dict[str, Any] = {"optimizer": optax.adam(1e-3), "precision": "bf16"}
    wh.plan(*given, cluster="h100:1x2+a100-40:1x2", shares=None, **options)
    assert any(result.plan.attention for _, result in found)
    for least, result in found:
        assert 0 < least <= result.step_seconds * (1 + 1e-9), result.case
