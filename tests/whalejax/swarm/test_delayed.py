"""Updates that are applied one step late, beside the gradients of the next step."""

from __future__ import annotations

import functools
import threading
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import Fault, Swarm, same, swarm
from whalejax.state.state_bytes import digest_of
from whalejax.swarm_runtime.checkpoints import Checkpoints
from whalejax.swarm_runtime.peer_programs import StageState, ready_stage
from whalejax.swarm_runtime.staged_job import StagedJob


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS: Final = 5
COUNT: Final = 4
# Powers of two, so that no program rounds a product that another one fuses.
TX: Final = optax.sgd(0.125, momentum=0.5)


def loss_fn(model: Any, batch: Any) -> Any:
    hidden = batch["x"]
    for i in range(jobs.DEPTH):
        hidden = jnp.tanh(hidden @ model[f"w{i}"])
    return jnp.mean((hidden - batch["y"]) ** 2)


def batch(step: int, size: int) -> dict[str, np.ndarray]:
    found = jobs.batch(step, size)
    return {name: found[name] for name in ("x", "y")}


@functools.cache
def cut() -> StagedJob:
    job = wh.Job(loss_fn, jobs.make_model, batch, TX, batch_size=jobs.SIZE)
    return StagedJob(job, stages=jobs.STAGES, micro_batches=COUNT, delayed_updates=True)


def gradient(params: list[Any], step: int, number: int) -> list[Any]:
    """Loss and gradient of a micro-batch, by the programs of the stages in a row."""
    stages = [ready_stage(cut(), s) for s in range(jobs.STAGES)]
    states = [
        StageState(step=step, leaves=(*(params[n] for n in s.params), *s.numbers))
        for s in stages
    ]
    leaves = cut().micro_batch(step, number)
    given: list[list[np.ndarray]] = [[]]
    for stage, state in zip(stages[:-1], states[:-1], strict=True):
        given.append(stage.forward(state, number, leaves, given[-1]))
    found: dict[int, np.ndarray] = {}
    returned: list[np.ndarray] = []
    for stage, state in zip(stages[::-1], states[::-1], strict=True):
        back = stage.backward(state, number, leaves, given[stage.number], returned)
        returned = list(back.returns)
        found |= zip(stage.params, back.gradients, strict=True)
        if stage.last:
            found[-1] = back.sums[0]
    return [found[n] for n in sorted(found)]


@functools.cache
def reference(begins: int = 0) -> tuple[list[float], list[str]]:
    """Losses, and digests of each stage's parameters after the last step.

    Optax alone: each step's gradient is that of the parameters before the last update,
    and is applied to the newest. Where a run goes on from a checkpoint, its first step
    is computed with the newest, as at the beginning.
    """
    newest: Any = jax.tree.leaves(jax.jit(jobs.make_model)(jax.random.key(0)))
    before, losses = newest, []
    state: Any = TX.init(newest)
    for step in range(STEPS):
        if step == begins:
            before = newest
        parts = [gradient(before, step, n) for n in range(COUNT)]
        total = functools.reduce(
            lambda one, other: [
                np.asarray(a + b) for a, b in zip(one, other, strict=True)
            ],
            parts,
        )
        loss, *mean = [x / np.float32(COUNT) for x in total]
        losses.append(float(loss))
        updates, state = TX.update(mean, state, newest)
        before, newest = newest, optax.apply_updates(newest, updates)
    owned = [ready_stage(cut(), s).params for s in range(jobs.STAGES)]
    return losses, [digest_of([np.asarray(newest[n]) for n in p]) for p in owned]


def digests(found: Swarm) -> list[str]:
    """Of each stage's parameters after the last step, alike at all its peers."""
    seen: list[set[str]] = [set() for _ in range(jobs.STAGES)]
    for peer in found.peers:
        stage, state = peer.worker.stage, peer.worker._states.get(STEPS)
        if stage is not None and state is not None:
            owned = state.leaves[: len(stage.params)]
            seen[stage.number].add(digest_of([np.asarray(x) for x in owned]))
    assert all(len(each) == 1 for each in seen)
    return [each.pop() for each in seen]


def test_updates_are_one_step_late_bit_for_bit() -> None:
    """Also where all peers of a stage are replaced: all go back, and to the same."""
    losses: dict[int, float] = {}
    with swarm(cut(), steps=STEPS, snapshot_every=2, lease_seconds=2.0) as found:
        for number in range(jobs.STAGES):
            found.join(number)
        for step, metrics in found.serving.run():
            losses[step] = float(metrics["loss"])
            if step == 3 and len(found.peers) == jobs.STAGES:
                found.peers[1].close()
                found.when("waiting", lambda: found.join(1))
        back = [told["step"] for kind, told in found.told if kind == "went back"]
        assert back == [2]
        assert ([losses[n] for n in sorted(losses)], digests(found)) == reference()


def test_gradients_are_summed_while_the_next_step_is_computed() -> None:
    """A sum waits for a forward of the next step, and a peer that leaves for none.

    A mate is lost in that sum, and one comes; nothing that the others hold is computed
    again when one leaves.
    """
    ahead = threading.Event()
    waited: list[bool] = []

    def hook(point: str, step: int) -> None:
        if point == "forward" and step == 2:
            ahead.set()
        elif point == "sum" and step == 1:
            waited.append(ahead.wait(300))

    fault = Fault("sum", 1, "killed")
    losses, recomputed = [], 0
    with swarm(cut(), steps=STEPS) as found:
        counts = found.serving.trainer.counts
        for number in range(jobs.STAGES):
            found.join(number, hook=hook)
        fault.peer = found.join(1, hook=fault)
        for step, metrics in found.serving.run():
            losses.append(float(metrics["loss"]))
            if step == 2:
                assert fault.happened
                found.join(0)
            if step == 3:
                recomputed = counts.recomputed
                found.peers[0].leave()
                while not any(m.leaving for m in found.members()):
                    found.peers[0].wait(0.01)
        fault.release.set()
        assert all(waited) and len(waited) >= jobs.STAGES
        assert found.peers[0].wait(300) and found.peers[0].over == "left"
        assert found.peers[-1].worker.done > 0
        assert recomputed == counts.recomputed
        assert same(losses, reference()[0]) and len(digests(found)) == jobs.STAGES


def test_a_checkpoint_goes_on_as_a_run_begins() -> None:
    """With the newest parameters of an ordinary training state."""
    checkpoints = Checkpoints(cut())
    with swarm(cut(), steps=2) as found:
        for number in range(jobs.STAGES):
            found.join(number)
        found.run()
        state = checkpoints.state_of(found.serving.trainer.newest)
    more = {"snapshot": checkpoints.snapshot_of(state)}
    with swarm(cut(), steps=STEPS, more=more) as found:
        for number in range(jobs.STAGES):
            found.join(number)
        losses = found.run()
        assert (losses, digests(found)) == (
            reference(begins=2)[0][2:],
            reference(begins=2)[1],
        )
    assert losses != reference()[0][2:]
