"""Stages with unequal numbers of layers: gradients, memory, traffic, checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.crossing import crossed
from tests.equality import (
    FLOAT64_TOLERANCE,
    build,
    check,
    compiled,
    on_one_device,
    peak_bytes,
)
from tests.whalejax.test_pipelines import Keyed, job_of
from whalejax import hlo, jobs
from whalejax.planner.pipeline.uneven_layers import with_layers


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

INSIDE = {"stage": 2, "data": 2, "tensor": 2}


def _full(*values: Any) -> Any:
    """A case that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("layers", "mesh", "options"),
    [
        _full((2, 2, 1, 1), {"stage": 4}, {}),
        _full((2, 1), {"stage": 2}, {"remat": "full"}),
        _full((2, 1), {**INSIDE}, {"sequence_parallel": True}),
    ],
    ids=["four", "remat", "sequence"],
)
def test_unequal_stages_compute_what_one_device_does(
    layers: tuple[int, ...], mesh: dict[str, int], options: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        job = job_of("gpt-test", layers=sum(layers), scan_layers=True)
        found = check(
            on_one_device(job, 4),
            steps=3,
            devices=int(np.prod([*mesh.values()])),
            mesh=mesh,
            **options,
        )
    assert found.plan.stages is not None
    assert found.plan.stages.layers == layers
    assert found.compilations == 1
    assert found.error <= FLOAT64_TOLERANCE


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "mesh"),
    crossed(["1f1b", "gpipe"], [{"stage": 2, "data": 2}, {"stage": 4}]),
)
def test_keys_weights_and_shared_tables(name: str, mesh: dict[str, int]) -> None:
    mark = wh.pipeline(num_stages=mesh["stage"], num_micro_batches=4, schedule=name)
    with jax.enable_x64(True):
        one = on_one_device(Keyed(mark, length=7).job(), 4)
        found = check(one, steps=2, devices=4, mesh={**mesh, "tensor": 1})
        state = found.step.init_from(one.model, rng=one.key)
        evaluated = found.step.eval(state, one.batch)
    assert found.error <= FLOAT64_TOLERANCE
    assert float(evaluated["loss"]) == pytest.approx(one.loss, rel=1e-12)


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [(1, 4), (4, 1)])
def test_any_numbers_of_layers(layers: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        one = on_one_device(Keyed(length=5).job(), 4)
        options = {"optimizer": optax.sgd(1.0), "num_micro_batches": 4}
        step = compiled(one.job, one.model, devices=2, mesh={"stage": 2}, **options)
        step = wh.compile(
            with_layers(step.plan, layers),
            one.job.loss_fn,
            one.model,
            optimizer=options["optimizer"],
            devices=jax.devices()[:2],
        )
        state = step.init_from(one.model, rng=one.key)
        before = [np.asarray(x) for x in jax.tree.leaves(state.params)]
        state, metrics = step(state, one.batch)
        after = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    assert float(metrics["loss"]) == pytest.approx(one.loss, rel=1e-12)
    for old, new, gradient in zip(before, after, one.gradients, strict=True):
        np.testing.assert_allclose(old - new, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_checkpoints_move_between_plans_with_and_without_stages(
    tmp_path: Path,
) -> None:
    job = job_of(
        "gpt-test", layers=6, scan_layers=True, dtype=None, param_dtype="float32"
    )
    model = build(job)
    options: dict[str, Any] = {
        "optimizer": optax.adamw(1e-2),
        "num_micro_batches": 4,
    }
    staged = compiled(job, model, devices=4, mesh={"stage": 4}, **options)
    whole = compiled(job, model, devices=2, mesh={"data": 1, "tensor": 2}, **options)
    state, _ = staged(staged.init_from(model), job.batch_at(0))
    for a, b in zip(jax.tree.leaves(state.model), jax.tree.leaves(model), strict=True):
        assert a.shape == b.shape
    staged.save(tmp_path / "one", state)
    other = whole.restore(tmp_path / "one")
    _assert_same(state, other)
    whole.save(tmp_path / "two", other)
    again = staged.restore(tmp_path / "two")
    _assert_same(again, other)
    _, one = staged(again, job.batch_at(1))
    _, two = whole(other, job.batch_at(1))
    assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=1e-5)


def _assert_same(state: Any, other: Any) -> None:
    for a, b in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((other.params, other.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.full
def test_memory_and_traffic_are_as_predicted() -> None:
    job = job_of(
        "gpt-test",
        layers=6,
        scan_layers=True,
        annotated=False,
        dtype=None,
        param_dtype="float32",
    )
    step = compiled(job, build(job), devices=4, mesh={"stage": 4}, num_micro_batches=4)
    plan, compiled_step = step.plan, step.lower().compile()
    peak = peak_bytes(compiled_step)
    assert plan.memory.total_bytes == pytest.approx(peak, rel=0.15)
    stack = plan.leaf("blocks.up.kernel")
    assert stack.shape[0] == 6 and stack.compute_spec[0] == ("stage",)
    assert stack.param_spec == ((), (), ("stage",))
    state = step.abstract_state()
    stored = state.params["blocks"]["up"]["kernel"]
    local = stored.sharding.shard_shape(stored.shape)
    assert np.prod(local) * 4 == np.prod(stored.shape)  # a quarter, of six layers
    planned: Counter[str] = Counter()
    for c in plan.collectives:
        planned[c.kind] += c.payload_bytes * plan.times(c)
    found: Counter[str] = Counter()
    for i in hlo.collectives(compiled_step.as_text()).instructions:
        found[i.kind] += i.payload_bytes * i.count
    assert set(found) == {"collective-permute", "all-reduce", "all-to-all"}
    assert found["collective-permute"] == planned["collective-permute"]
    assert found["all-to-all"] == planned["all-to-all"]


def test_plans_say_who_has_which_layers() -> None:
    kinds = {"param_dtype": "float32", "dtype": None}
    job = job_of("gpt-test", layers=7, scan_layers=True, vocab=200_000, **kinds)
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 64),
        optimizer=job.optimizer,
        cluster="h100:2",
        mesh={"stage": 2},
        num_micro_batches=4,
    )
    assert plan.stages is not None
    first, last = plan.stages.layers
    assert first + last == 7 and first > 4  # the head is more than a layer's work
    assert f"{last}–{first} layers each" in str(plan)
    assert any(f"stages have {first}, {last} layers" in note for note in plan.notes)
    assert "divided among the stages" in plan.why("blocks.up.kernel")
    assert "exchanged for layers" in plan.why("blocks.up.kernel")
    again = wh.Plan.from_document(plan.document())
    assert again == plan and again.hash == plan.hash
