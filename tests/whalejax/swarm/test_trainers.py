"""Several trainers of a run: micro-batches are shared, none counts twice or is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Final

import msgspec
import pytest

from tests.whalejax.keys import OTHER
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import Swarm, same, swarm
from tests.whalejax.swarm.test_faults import Journal, counted_once
from tests.whalejax.swarm.test_processes import processes
from whalejax.meshes.errors import WhaleError
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.micro_batch_queue import (
    ATTEMPTS,
    OWN,
    MicroBatchLease,
    MicroBatchQueue,
)
from whalejax.swarm_runtime.trainers.secondary_trainer import SecondaryTrainer
from whalejax.wire.service import RefusedRequestError
from whalejax.wire.swarm_messages import Led, PeersReached, Reach, ShowSwarm


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS: Final = 4
_SECONDS: Final = 300.0


def until(true: Any) -> None:
    """Wait until something is so."""
    end = time.monotonic() + _SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def further(found: Swarm) -> list[dict[str, Any]]:
    """The further trainers, as they are shown."""
    return found.serving.trainer.sharing.status_rows()[1:]


def led(found: Swarm) -> list[int]:
    """Micro-batches that counted, of each trainer that is there."""
    return [one["led"] for one in found.serving.trainer.sharing.status_rows()]


def slow(point: str, step: int) -> None:
    """A peer that takes a moment, so that no trainer is through before others come."""
    if point == "backward":
        time.sleep(0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 2])
def test_trainers_share_the_micro_batches(count: int) -> None:
    journal = Journal()
    with swarm(steps=STEPS, more={"write": journal}) as found:
        for stage in range(jobs.STAGES):
            found.join(stage, hook=slow)
        for _ in range(count):
            found.lead()
        losses = found.run()
        assert same(losses, jobs.losses(STEPS))
        counted_once(journal, STEPS)
        each = led(found)
        assert len(each) == 1 + count
        assert sum(each) == STEPS * jobs.COUNT
        assert all(each)
        assert [t.led for t in found.trainers] != [0] * count
        taken = [r["trainer"] for r in journal.lines if r["event"] == "taken in"]
        assert {*taken} == {t.name for t in found.trainers}
        assert len(taken) == jobs.STAGES * sum(each[1:])
        assert all(t.wait(_SECONDS) and not t.failed for t in found.trainers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "name"),
    [
        pytest.param(
            point, name, marks=() if (point, name) in DEFAULT else pytest.mark.full
        )
        for DEFAULT in [(("backward", "SIGKILL"),)]
        for point in ("forward", "backward", "sum")
        for name in ("SIGKILL", "SIGSTOP")
    ],
)
def test_a_trainer_that_dies_or_stands_still_loses_nothing(
    point: str, name: str
) -> None:
    """A stopped one goes on later, and what it says then is refused."""
    journal, done = Journal(), threading.Event()
    pids: list[int] = []
    with swarm(steps=STEPS, more={"write": journal}) as found:

        def hook(at: str, step: int) -> None:
            slow(at, step)
            if at != point or step < 1 or done.is_set():
                return
            if point != "sum" and not any(t["leads"] for t in further(found)):
                return
            done.set()
            os.kill(pids[0], getattr(signal, name))

        for stage in range(jobs.STAGES):
            found.join(stage, hook=hook)
        given = [{"stage": "trainer", "call_seconds": _SECONDS}]
        with processes(found.serving.address, given) as running:
            until(lambda: further(found))
            pids.append(running[0].pid)
            losses = []
            for _, metrics in found.serving.run():
                losses.append(float(metrics["loss"]))
                if name == "SIGSTOP" and len(losses) == STEPS - 1:
                    os.kill(pids[0], signal.SIGCONT)
                    until(lambda: further(found))
            assert done.is_set()
            assert same(losses, jobs.losses(STEPS))
            counted_once(journal, STEPS)
            if point != "sum":
                assert "trainer lost" in found.kinds()
            if name == "SIGKILL":
                assert running[0].wait(_SECONDS) == -9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [0, 2])
def test_what_the_wire_loses_is_told(count: int) -> None:
    """Of the first micro-batch of a step, whoever leads it."""
    with swarm(steps=2, wire="int8") as found:
        for stage in range(jobs.STAGES):
            found.join(stage, hook=slow)
        for _ in range(count):
            found.lead()
        errors = [metrics["wire_error"] for _, metrics in found.serving.run()]
        assert len(errors) == 2
        assert all(1e-4 < error < 0.02 for error in errors)
        shown = found.serving._show(ShowSwarm()).fields
        assert shown["wire_error"] == errors[-1]
        assert shown["sum_error"] is None


def test_one_that_leaves_and_one_that_comes_while_a_step_goes_on() -> None:
    with swarm(steps=STEPS) as found:
        for stage in range(jobs.STAGES):
            found.join(stage, hook=slow)
        first = found.lead()
        losses = []
        for step, metrics in found.serving.run():
            losses.append(float(metrics["loss"]))
            if step == 1:
                first.leave()
                found.lead()
        assert same(losses, jobs.losses(STEPS))
        assert first.wait(300) and first.over == "left"
        assert found.kinds().count("trainer left") == 1
        assert found.trainers[1].led > 0


def test_what_it_cannot_lead_is_led_by_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its data raises an error, and so its micro-batches are given back."""

    def broken(*_: Any) -> Any:
        raise OSError("the disk is gone")

    with swarm(steps=2) as found:
        for stage in range(jobs.STAGES):
            found.join(stage, hook=slow)
        trainer = found.lead()
        monkeypatch.setattr(trainer, "_micro_batch", broken)
        assert same(found.run(), jobs.losses(2))
        why = [told["why"] for kind, told in found.told if kind == "gave back"]
        assert why
        assert all("the disk is gone" in one for one in why)
        assert led(found) == [2 * jobs.COUNT, 0]


def test_a_wrong_result_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(steps=2) as found:
        for stage in range(jobs.STAGES):
            found.join(stage, hook=slow)
        trainer = found.lead()
        ask = trainer._caller.ask

        def wrong(address: Any, question: Any, **more: Any):
            if question.kind == "led" and question.made:
                question = msgspec.structs.replace(question, made=question.made[1:])
            return ask(address, question, **more)

        monkeypatch.setattr(trainer._caller, "ask", wrong)
        assert same(found.run(), jobs.losses(2))
        why = [told["why"] for kind, told in found.told if kind == "gave back"]
        assert why
        assert all("sent an invalid result of micro-batch" in one for one in why)


def test_what_comes_for_a_share_that_another_has_is_refused() -> None:
    """The numbers of a share, of the step and of the run are checked."""
    with swarm(steps=1) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        sharing = found.serving.trainer.sharing
        fields = {
            "run": found.serving.trainer.run_id,
            "generation": 0,
            "step": 0,
            "name": "a",
            "number": 0,
            "times": 0,
            "made": [],
            "why": "",
        }
        with pytest.raises(RefusedRequestError, match="not with a any more") as refused:
            sharing.take_in(Led(**fields))
        assert refused.value.code == "stale"
        seen: list[str] = []

        def hook(point: str, step: int) -> None:
            for more in ({}, {"step": 1}, {"number": 99}, {"why": "x"}):
                try:
                    sharing.take_in(Led(**{**fields, **more}))
                except RefusedRequestError as error:
                    seen.append(error.code)

        found.peers[0].worker._hook = hook
        assert same(found.run(), jobs.losses(1))
        assert len(seen) >= 4
        assert {*seen} == {"stale"}


def test_a_trainer_of_another_job_seed_or_key_is_refused() -> None:
    with swarm(steps=1) as found:
        other = StagedJob(
            jobs.make(), stages=jobs.STAGES, micro_batches=jobs.COUNT, seed=1
        )
        with pytest.raises(WhaleError, match=r"trainer .* differs from .*: .*seed"):
            found.lead(cut=other)
        with pytest.raises(WhaleError, match=r"wire is int8, not f32"):
            found.lead(wire="int8")
        trainer = SecondaryTrainer(jobs.cut(), OTHER, found.serving.address)
        with pytest.raises(WhaleError, match="--key"):
            trainer.start()
        trainer.close()


def test_a_trainer_that_peers_do_not_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with swarm(steps=1) as found:
        found.join(0)

        def reach(asked: Reach) -> PeersReached:
            (name, _), *_ = asked.peers
            return PeersReached(unreached={name: "no route"})

        service = found.peers[0]._service
        handlers = {**service._handlers, Reach: reach}
        monkeypatch.setattr(service, "_handlers", handlers)
        with pytest.raises(WhaleError, match=r"does not reach it .*give --host"):
            found.lead()


def test_shares_are_given_out_again_under_higher_numbers() -> None:
    shares = MicroBatchQueue(3, threading.Event())
    own = shares.take(OWN, 2)
    assert own == MicroBatchLease(number=0, times=0, trainer=OWN)
    first, second = shares.take("a", 2), shares.take("a", 2)
    assert first is not None
    assert second is not None
    assert shares.take("a", 2) is None
    assert shares.take(OWN, 9) is None
    assert shares.lose("a", but={(second.number, second.times)}) == [1]
    again = shares.take("b", 2)
    assert again is not None
    assert again == MicroBatchLease(number=1, times=1, trainer="b")
    assert not {*first.attempts} & {*again.attempts[:10]}
    assert again.attempts.start == ATTEMPTS + 1
    assert not shares.finish(first, lambda: pytest.fail("it is not its any more"))
    assert shares.give_back(second)
    assert shares.take("b", 9) is None  # The first trainer is to lead it.
    assert shares.overdue(1e9) == []
    assert shares.overdue(-1.0) == [again]
    for share in (own, again, shares.take(OWN, 9)):
        assert share is not None
        assert shares.finish(share, lambda: None)
    assert shares.is_over


def test_what_stands_still_at_a_trainer_that_answers_is_taken_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    with swarm(steps=1, call_seconds=3.0) as found:
        for stage in range(jobs.STAGES):
            found.join(stage, hook=slow)
        trainer = found.lead()
        monkeypatch.setattr(trainer, "_micro_batch", lambda *_: release.wait(_SECONDS))
        try:
            assert same(found.run(), jobs.losses(1))
        finally:
            release.set()
        why = [told["why"] for kind, told in found.told if kind == "gave back"]
        assert why
        assert all("not finished after 12 s" in one for one in why)
