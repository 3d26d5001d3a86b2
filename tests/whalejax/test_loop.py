"""The loop trains as plain steps do, stops at a bad loss, and survives a kill."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.runs import (
    batch_at,
    fresh_state,
    host_leaves,
    make_job,
    make_params,
    run_script,
    shared_step,
    step_of,
)
from whalejax.lowering.train_state import check_alive, consuming
from whalejax.runtime import loop
from whalejax.runtime.train_step import TrainState, TrainStep


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion


def batches(index: int) -> Any:
    return batch_at(index, 16)


def plain_losses(steps: int) -> tuple[list[float], TrainState]:
    """What step after step gives, each waited for."""
    step = shared_step()
    state = fresh_state(step)
    losses = []
    for index in range(steps):
        state, metrics = step(state, batches(index))
        losses.append(float(metrics["loss"]))
    return losses, state


def test_trains_as_plain_steps_do() -> None:
    step = shared_step()
    seen: list[loop.Progress] = []
    run = loop.train(step, fresh_state(step), batches, steps=6, on_step=seen.append)
    losses, state = plain_losses(6)
    assert list(run.losses) == losses
    assert host_leaves(run.state) == host_leaves(state)
    assert [(p.step, p.loss) for p in seen] == list(enumerate(losses, start=1))
    assert run.first_step == 0
    assert run.checkpoint is None
    assert run.step_seconds is not None and run.step_seconds > 0


def test_goes_on_where_the_state_stands() -> None:
    step = shared_step()
    half = loop.train(step, fresh_state(step), batches, steps=3)
    rest = loop.train(step, half.state, batches, steps=6)
    assert rest.first_step == 3
    assert [*half.losses, *rest.losses] == plain_losses(6)[0]


def test_a_state_that_a_loop_took_is_refused_in_words() -> None:
    step = shared_step()
    state = fresh_state(step)
    loop.train(step, state, batches, steps=1)
    with pytest.raises(wh.WhaleError, match="this state was donated to a step"):
        loop.train(step, state, batches, steps=2)  # the cell of a notebook, run again


def test_nothing_to_do() -> None:
    step = shared_step()
    done = loop.train(step, fresh_state(step), batches, steps=2)
    run = loop.train(step, done.state, batches, steps=2)
    assert (run.losses, run.step_seconds, run.checkpoint) == ((), None, None)


def test_checkpoints_hold_the_states_they_are_named_after(tmp_path: Path) -> None:
    step = shared_step()
    run = loop.train(
        step, fresh_state(step), batches, steps=7, save_dir=tmp_path, save_every=3
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step_000003", "step_000006", "step_000007"]
    assert run.checkpoint == loop.latest(tmp_path) == tmp_path / "step_000007"
    after_six = step.restore(tmp_path / "step_000006")
    assert host_leaves(after_six) == host_leaves(plain_losses(6)[1])
    again = loop.train(step, after_six, batches, steps=7)
    assert again.losses == run.losses[6:]


def test_the_latest_checkpoints_stay(tmp_path: Path) -> None:
    step = shared_step()
    for name in ("step_000001.deleted", "step_000002.unfinished", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    start = loop.train(step, fresh_state(step), batches, steps=1, save_dir=tmp_path)
    loop.train(
        step,
        start.state,
        batches,
        steps=6,
        save_dir=tmp_path,
        save_every=1,
        keep=2,
        resumed_from=start.checkpoint,
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes", "step_000001", "step_000005", "step_000006"]


def test_a_checkpoint_that_is_there_already_is_said_before_any_step(
    tmp_path: Path,
) -> None:
    step = shared_step()
    for name in ("step_000002", "step_000003", "step_000006", "step_000009"):
        (tmp_path / name).mkdir()
    asked: list[int] = []
    with pytest.raises(wh.WhaleError) as caught:
        loop.train(
            step,
            fresh_state(step),
            lambda index: asked.append(index),
            steps=7,
            save_dir=tmp_path,
            save_every=3,
        )
    assert not asked
    assert str(caught.value) == (
        f"save_dir is {tmp_path}, which holds step_000003, step_000006 already, and "
        "the state has 0 steps behind it: training to step 7 would write there. Give "
        "another directory, or go on from the latest checkpoint: "
        "step.restore(loop.latest(save_dir))"
    )


def test_latest_takes_no_leftovers(tmp_path: Path) -> None:
    assert loop.latest(tmp_path) is None
    assert loop.latest(tmp_path / "none") is None
    for name in (
        "step_000009",
        "step_000010",
        "step_1000000",
        "step_2000000.unfinished",
        "step_3000000.deleted",
        "other",
    ):
        (tmp_path / name).mkdir()
    assert loop.latest(tmp_path) == tmp_path / "step_1000000"


# What is not finite.


def poisoned(index: int) -> Any:
    """Batches of which the eighth is not a number."""
    batch = batches(index)
    return {**batch, "x": batch["x"] * np.float32(math.nan)} if index == 7 else batch


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    step = shared_step()
    seen: list[int] = []
    with pytest.raises(wh.WhaleError) as caught:
        loop.train(
            step,
            fresh_state(step),
            poisoned,
            steps=100,
            save_dir=tmp_path,
            save_every=5,
            on_step=lambda progress: seen.append(progress.step),
        )
    kept = tmp_path / "step_000005"
    assert str(caught.value) == (
        "step 8 of 100: the loss is nan; training has stopped. The last good "
        f"checkpoint is {kept}; training can go on from there: --resume, or "
        "step.restore. A lower learning rate, a longer warm-up or clipping the "
        "gradient's norm are the usual remedies"
    )
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert list(tmp_path.iterdir()) == [kept]
    assert host_leaves(step.restore(kept)) == host_leaves(plain_losses(5)[1])


def test_a_bad_loss_just_before_a_checkpoint_is_not_saved(tmp_path: Path) -> None:
    step = shared_step()
    with pytest.raises(wh.WhaleError, match="step 8 of 8: the loss is nan"):
        loop.train(
            step, fresh_state(step), poisoned, steps=8, save_dir=tmp_path, save_every=4
        )
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_without_checkpoints_the_message_says_so() -> None:
    step = shared_step()
    with pytest.raises(wh.WhaleError, match="No checkpoint was written; --save DIR"):
        loop.train(step, fresh_state(step), poisoned, steps=9)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, {"stage": 2}], ids=["spmd", "stages"])
def test_parameters_spoilt_by_the_last_update_are_not_saved(
    tmp_path: Path, mesh: dict[str, int] | None
) -> None:
    """All six losses are finite: each is computed before its update."""

    def rate(count: Any) -> Any:
        return jnp.where(count == 5, jnp.nan, 1e-2)

    step = step_of(make_job(optimizer=optax.sgd(rate)), mesh=mesh)
    assert len(step.plan.stage_plans) == (2 if mesh else 0)
    with pytest.raises(wh.WhaleError) as caught:
        loop.train(
            step, fresh_state(step), batches, steps=6, save_dir=tmp_path, save_every=3
        )
    assert str(caught.value).startswith(
        "step 6 of 6: parameters are not finite: bias, down, up; training has stopped. "
        f"The last good checkpoint is {tmp_path / 'step_000003'};"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


# Waiting and time, on a machine that is made up.


@dataclass
class Machine:
    """Steps that end when their loss is waited for, by a clock of their own."""

    seconds_of: Callable[[int], float]
    now: float = 0.0
    started: int = 0
    ended: int = 0
    most_in_flight: int = 0
    plan: Any = field(default_factory=lambda: SimpleNamespace(trained=()))

    def __call__(self, state: Any, batch: int) -> tuple[Any, dict[str, Any]]:
        self.started += 1
        self.most_in_flight = max(self.most_in_flight, self.started - self.ended)
        return state, {"loss": _Loss(self, self.started)}

    def clock(self) -> float:
        return self.now

    def save(self, path: Path, state: Any) -> None:
        assert self.started == self.ended, "saved while steps were in flight"
        self.now += 1000.0
        path.mkdir()


@dataclass
class _Loss:
    machine: Machine
    step: int

    def __float__(self) -> float:
        while self.machine.ended < self.step:
            self.machine.ended += 1
            self.machine.now += self.machine.seconds_of(self.machine.ended)
        return 1.0


def train_on(machine: Machine, steps: int, **options: Any) -> loop.LoopResult:
    state = cast(TrainState, SimpleNamespace(step=0, params={}))
    return loop.train(
        cast(TrainStep, machine),
        state,
        lambda index: index,
        steps=steps,
        clock=machine.clock,
        **options,
    )


def test_steps_are_started_before_earlier_ones_have_ended() -> None:
    machine = Machine(lambda step: 0.01)
    train_on(machine, 50)
    assert machine.most_in_flight == 3
    assert machine.ended == 50


def test_the_first_two_steps_are_not_measured(tmp_path: Path) -> None:
    machine = Machine(lambda step: 100.0 if step <= 2 else 0.25)
    assert train_on(machine, 40).step_seconds == pytest.approx(0.25)


def test_saving_is_not_measured(tmp_path: Path) -> None:
    machine = Machine(lambda step: 0.25)
    run = train_on(machine, 40, save_dir=tmp_path, save_every=3)
    assert run.step_seconds == pytest.approx(0.25)


def test_one_slow_window_does_not_move_the_median() -> None:
    machine = Machine(lambda step: 30.0 if step == 20 else 0.25)
    assert train_on(machine, 80).step_seconds == pytest.approx(0.25)


def test_two_steps_are_too_few_to_measure() -> None:
    machine = Machine(lambda step: 0.25)
    assert train_on(machine, 2).step_seconds is None
    machine = Machine(lambda step: 0.25)
    assert train_on(machine, 3).step_seconds == pytest.approx(0.25)


# A kill at any moment.

TRAINED_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.whalejax import runs
from whalejax.runtime import loop

def batches(index):
    if index == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return runs.batch_at(index, 16)

step = runs.shared_step()
loop.train(step, runs.fresh_state(step), batches, steps=12,
                 save_dir=Path(sys.argv[1]), save_every=4)
"""


@pytest.mark.full
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    done = run_script(TRAINED_UNTIL_KILLED, tmp_path / "run", 10, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert loop.latest(tmp_path / "run") == tmp_path / "run" / "step_000008"
    step = shared_step()
    state = step.restore(tmp_path / "run" / "step_000008")
    run = loop.train(step, state, batches, steps=12, save_dir=tmp_path / "run")
    losses, uninterrupted = plain_losses(12)
    assert list(run.losses) == losses[8:]
    assert host_leaves(run.state) == host_leaves(uninterrupted)
    assert run.checkpoint == tmp_path / "run" / "step_000012"
    # A fresh state would have given other numbers: the comparison means something.
    assert losses[:4] != losses[8:]
    fresh = shared_step().init(make_params, rng=jax.random.key(7))
    assert host_leaves(fresh) != host_leaves(uninterrupted)


class _Lost:
    def __float__(self) -> float:
        raise jax.errors.JaxRuntimeError("INTERNAL: Gloo: Connection closed by peer")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_lost_process_that_shows_in_a_loss(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are issued before they end, so that the error comes with the loss."""

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        del batch
        return state, {"loss": _Lost()}

    monkeypatch.setattr(jax, "process_count", lambda: processes)
    state = cast(TrainState, SimpleNamespace(step=0))
    kind = wh.WhaleError if processes > 1 else jax.errors.JaxRuntimeError
    says = "process of this step is gone.*step 1" if processes > 1 else "Gloo"
    with pytest.raises(kind, match=says):
        loop.train(cast(TrainStep, step), state, batches, steps=1)


def test_a_state_that_an_error_left_half_taken_is_not_alive() -> None:
    def state_of() -> Any:
        step = shared_step()
        return fresh_state(step)

    whole = state_of()
    with pytest.raises(KeyError), consuming(whole):
        raise KeyError
    check_alive(whole)
    half = state_of()
    with pytest.raises(KeyError), consuming(half):
        jax.tree.leaves(half.params)[0].delete()
        raise KeyError
    with pytest.raises(wh.WhaleError, match="donated"):
        check_alive(half)
