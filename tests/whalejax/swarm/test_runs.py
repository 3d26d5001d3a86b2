"""Swarms train as one process does, whoever computes what."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import PEERS, Swarm, same, swarm
from whalejax.swarm_runtime.staged_job import StagedJob


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_losses_are_those_of_one_process(clip: float | None) -> None:
    with swarm(jobs.cut(clip), steps=STEPS) as found:
        for number in range(PEERS):
            found.join(number % jobs.STAGES)
        assert same(found.run(), jobs.losses(STEPS, clip))
        assert len(digests(found, STEPS)) == jobs.STAGES
        assert all(p.wait(60) and p.over == "all steps are done" for p in found.peers)


def digests(found: Swarm, step: int) -> set[tuple[int, str]]:
    """Stages and digests of their states at all peers."""
    return {
        (p.worker.stage.number, p.worker._digests[step])
        for p in found.peers
        if p.worker.stage is not None
    }


@pytest.mark.parametrize(
    ("sum_wire", "error"), [("f32", None), ("f16", 1e-3), ("int8", 2e-2)]
)
def test_mates_that_add_up_in_fewer_bits_have_the_same_state(
    sum_wire: str, error: float | None
) -> None:
    with swarm(steps=3, sum_wire=sum_wire) as found:
        for number in range(2 * jobs.STAGES):
            found.join(number % jobs.STAGES)
        every = [metrics for _, metrics in found.serving.run()]
        assert len(digests(found, 3)) == jobs.STAGES
    losses, whole = [float(m["loss"]) for m in every], jobs.losses(STEPS)[:3]
    errors = [m.get("sum_error") for m in every]
    if error is None:
        assert errors == [None] * 3 and same(losses, whole)
    else:
        # Adam's first steps hide what f16 loses from the losses, not from the error.
        assert all(0 < e < error for e in errors if e is not None)
        assert None not in errors and same(losses, whole, 10 * error)


def test_layers_that_share_weights_stay_in_one_stage() -> None:
    """Each weight is used by two layers that are one behind the other."""

    def loss_fn(model: Any, batch: Any) -> Any:
        hidden = batch["x"]
        for n in range(6):
            hidden = jnp.tanh(hidden @ model[f"w{n // 2}"])
        return jnp.mean((hidden - batch["y"]) ** 2)

    def make_model(key: Any) -> Any:
        made = jobs.make_model(key)
        return {f"w{n}": made[f"w{n}"] for n in range(3)}

    job = wh.Job(loss_fn, make_model, jobs.batch, optax.sgd(0.1), batch_size=jobs.SIZE)
    cut = StagedJob(job, stages=jobs.STAGES, micro_batches=jobs.COUNT)
    assert [cut.readers(n) for n in range(3)] == [[0], [1], [2]]
    params = jax.jit(make_model)(jax.random.key(0))
    wanted = []
    for step in range(2):
        loss, gradient = jax.value_and_grad(loss_fn)(params, jobs.batch(step, 24))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        wanted.append(float(loss))
    with swarm(cut, steps=2) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        assert same(found.run(), wanted, 1e-5)


@pytest.mark.parametrize(
    ("wire", "tolerance"),
    [pytest.param("bf16", 1e-3, marks=pytest.mark.full), ("int8", 1e-2)],
)
def test_a_narrow_wire_changes_little(wire: str, tolerance: float) -> None:
    with swarm(steps=3, wire=wire) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        losses = found.run()
    whole = jobs.losses(STEPS)[:3]
    assert same(losses, whole, tolerance) and not same(losses, whole, 1e-7)
