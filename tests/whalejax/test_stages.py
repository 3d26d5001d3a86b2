"""The family of cases with stages: what it covers, and what it would not let pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from tests import cases, stages
from tests.cases import Case
from tests.compilations import count_compilations
from tests.equality import free_links, run_case
from whalejax import jobs


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms


def _case(name: str) -> Case:
    return next(case for case in stages.every_combination() if case.id == name)


def _plan(case: Case) -> wh.Plan:
    job = case.model.job(case.dtype, annotated=case.strategy.annotated)
    job = stages.scheduled(job, case.strategy.stages, case.strategy.schedule)
    with jax.enable_x64(True):
        return wh.plan(
            job.loss_fn,
            jobs.abstract_model(job),
            job.batch_at(0),
            optimizer=job.optimizer,
            cluster=free_links(case.devices),
            num_micro_batches=case.num_micro_batches,
            **case.options,
        )


def test_the_subset_brings_together_all_that_the_family_does() -> None:
    made, every = (
        {one for case in some for one in stages.meetings(case)}
        for some in (stages.subset(), stages.whole())
    )
    assert made == every
    assert len(stages.subset()) <= 26


def test_the_family_is_whole() -> None:
    combinations = len(stages.MODELS) * len(stages.KINDS) * len(stages.STAGES)
    combinations *= len(stages.SCHEDULES) * len(stages.INSIDE) * len(cases.DEVICES)
    combinations *= len(stages.REMATS)
    assert len(stages.whole()) + sum(stages.skipped().values()) == combinations
    kinds = {(stages.program(c), c.model.family) for c in stages.whole()}
    families = {model.family for model in stages.MODELS}
    for name in ("apart", "zb-h1", "interleaved"):
        assert {family for other, family in kinds if other == name} == families
    for kept in ("inputs", "residuals"):
        assert (f"lockstep, {kept}", "scan") in kinds


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "strategy", "text"),
    [
        ("gpt", "stages-4-interleaved-alone", "num_micro_batches is 2; interleaved"),
        ("gpt-uneven", "stages-8-1f1b-alone", "the model has 5 layers"),
        ("gpt-deep", "stages-8-zb-h1-alone", "into at most 6 parts"),
        ("gpt-deep", "stages-4-interleaved-data", "into at most 6 parts"),
    ],
)
def test_what_is_no_case_is_refused(name: str, strategy: str, text: str) -> None:
    case = next(
        case
        for case in stages.every_combination()
        if (case.model.name, case.strategy.name) == (name, strategy)
        and case.strategy.mesh(case.devices)
    )
    if "parts" in text:
        case = dataclasses.replace(case, num_micro_batches=8)
    assert stages.reason_to_skip(case) is not None
    with pytest.raises(wh.WhaleError, match=text):
        _plan(case)


@functools.cache
def _planned(name: str) -> tuple[Case, wh.Plan]:
    return _case(name), _plan(_case(name))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        "gpt-deep/stages-2-1f1b-data/4/m2/float64",
        "gpt/stages-2-1f1b-data/4/m2/float64",
    ],
)
def test_a_plan_with_other_stages_is_seen(name: str) -> None:
    case, plan = _planned(name)

    def wrong(other: Case) -> set[str]:
        found = stages.unlike(other, plan)
        return {what for what, (is_, wanted) in found.items() if is_ != wanted}

    def changed(**changes: Any) -> Case:
        strategy = dataclasses.replace(case.strategy, **changes)
        return dataclasses.replace(case, strategy=strategy)

    def like(other: str) -> Case:
        return dataclasses.replace(case, strategy=_case(other).strategy)

    assert wrong(case) == set()
    assert wrong(changed(schedule="gpipe")) == {"schedule"}
    assert wrong(changed(annotated=True)) == {"mesh of stages"}
    assert wrong(like("gpt/stages-2-1f1b-fsdp/4/m2/float64")) == {"mesh of stages"}
    assert wrong(changed(stages=1)) == {"stages"}
    assert "parts of a stage" in wrong(changed(schedule="interleaved"))
    plain = next(c for c in cases.full_matrix() if c.strategy.name == "dp")
    assert wrong(plain) == {"stages"}


def test_what_is_compiled_again_is_seen() -> None:
    @functools.partial(jax.jit, static_argnums=1)
    def forward_0(x: Any, by: int) -> Any:
        return x * by

    with count_compilations() as compiles:
        for by in (2, 2, 3):
            forward_0(1.0, by)
    assert compiles.count == 2


@pytest.mark.full
def test_gradients_apart_read_nothing_that_is_gone() -> None:
    """What the forward pass keeps is not made again of what it does not keep."""
    name = "bert/stages-4-zb-h1-tensor/8/m2/float64"
    (case,) = [case for case in stages.whole() if case.id == name]
    with jax.enable_x64(True):
        assert not run_case(case, steps=1).problems


@pytest.mark.full
def test_two_pipelines_are_one() -> None:
    def loss(model: Any, batch: Any, marked: bool) -> Any:
        for layers in "ab", "cd":
            with wh.pipeline(num_stages=None if marked else 2):
                for name in layers:
                    with wh.stage() if marked else contextlib.nullcontext():
                        batch = jnp.tanh(batch @ model[name])
            batch = jnp.sin(batch)
        return batch.mean()

    net = {name: jnp.zeros((8, 8)) for name in "abcd"}

    def planned(marked: bool) -> wh.Plan:
        return wh.plan(
            functools.partial(loss, marked=marked),
            net,
            jnp.zeros((16, 8)),
            cluster="h100:4",
        )

    plan = planned(marked=False)
    assert plan.axis_sizes["stage"] == 2
    assert any("2 regions are marked, and the whole model" in n for n in plan.notes)
    text = r"flow backwards .*\npipeline: 2 are marked, of 2 and 2 stages, .* Put one"
    with pytest.raises(wh.WhaleError, match=f"(?s){text}"):
        planned(marked=True)


def test_stages_that_are_called_twice_are_one() -> None:
    def towers(model: Any, pair: Any) -> Any:
        found = []
        for x in pair:
            with wh.pipeline():
                for name in "ab":
                    with wh.stage():
                        x = jnp.tanh(x @ model[name])
            found.append(x)
        return ((found[0] - found[1]) ** 2).mean()

    net = {name: jnp.eye(8) for name in "ab"}
    pair = (jnp.ones((16, 8)), jnp.zeros((16, 8)))
    sgd = optax.sgd(0.1)
    plan = wh.plan(towers, net, pair, optimizer=sgd, cluster="h100:4")
    assert plan.axis_sizes["stage"] == 2
    assert any("stages of equal number are one stage" in note for note in plan.notes)
    devices = jax.devices()[:4]
    step = wh.compile(plan, towers, net, optimizer=sgd, devices=devices, batch=pair)
    _, metrics = step(step.init_from(net), pair)
    assert float(metrics["loss"]) == pytest.approx(float(towers(net, pair)), rel=1e-5)


@pytest.mark.parametrize("marked", [False, True])
def test_one_device_runs_a_marked_model_as_it_is(marked: bool) -> None:
    def loss(net: Any, x: Any) -> Any:
        with wh.pipeline(num_stages=None if marked else 2, num_micro_batches=2):
            for name in "ab":
                with wh.stage() if marked else contextlib.nullcontext():
                    x = jnp.tanh(x @ net[name])
        return (x**2).mean()

    net, x = {name: jnp.eye(8) for name in "ab"}, jnp.ones((16, 8))
    sgd = optax.sgd(0.1)
    plan = wh.plan(loss, net, x, optimizer=sgd, cluster="h100:1")
    assert plan.stages is None and plan.num_micro_batches == 2
    devices = jax.devices()[:1]
    step = wh.compile(plan, loss, net, optimizer=sgd, devices=devices)
    _, metrics = step(step.init_from(net), x)
    assert float(metrics["loss"]) == pytest.approx(float(loss(net, x)), rel=1e-5)
