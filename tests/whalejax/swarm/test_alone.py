"""The trainer's side of a step, with a caller that answers in place of peers."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.keys import KEY
from whalejax.elastic.environment import MEMBER_HOST
from whalejax.swarm.ledger import Ledger
from whalejax.swarm_runtime.commit import SwarmStepCommit
from whalejax.swarm_runtime.micro_batch_route import (
    Counts,
    MicroBatchRoute,
    StepContext,
)
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.peer_fleet import Fleet
from whalejax.swarm_runtime.registry import Registry
from whalejax.swarm_runtime.stage_moves import StageMover
from whalejax.swarm_runtime.trainer import Trainer
from whalejax.swarm_runtime.trainers.trainer_state import Settings, SnapshotDownload
from whalejax.wire.messages import Message
from whalejax.wire.service import (
    Address,
    RefusedRequestError,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import (
    AnnouncementReceived,
    Batch,
    PeerWelcome,
    Pong,
    Receipt,
    StageValues,
    StateChunk,
    Summed,
)


STATE = 8
"""Bytes of a stage's state."""


def cut_of(stages: int) -> Any:
    """A chain of stages that computes nothing."""
    return SimpleNamespace(
        stages=stages,
        count=1,
        seed=0,
        flat_sums=[],
        delayed_updates=False,
        update=SimpleNamespace(rounds=1),
        sources=lambda stage: {stage - 1: [0]} if stage else {},
        sinks=lambda stage: [stage + 1] if stage + 1 < stages else [],
        state_bytes=lambda stage: STATE,
        gradient_bytes=lambda stage: STATE,
        split=lambda stage, data: [data] if data.size == STATE else None,
    )


def receipt(*given: Any, **more: Any) -> Message:
    return Receipt(seconds=0.0, lost=0.0)


def untold(*given: Any, **more: Any) -> None:
    pass


def registry_of(stages: int) -> Registry:
    return Registry({}, stages=stages, lease_seconds=1e6)


def fleet_of(registry: Registry, stages: int, mates: int = 1) -> Fleet:
    fleet = Fleet(registry.members, stages)
    for number in range(stages * mates):
        stage, mate = divmod(number, mates)
        address = ("host", number + 1)
        member = registry.join(f"p{stage}.{mate}", address, stage, fleet.now())
        registry.announce(member.name, fleet.now(), incarnation=1, ready=True, step=0)
        fleet.add(member)
    return fleet


def context_of(
    stages: int,
    mates: int = 1,
    tell: Callable[..., None] = untold,
    ask: Callable[..., Message] = receipt,
) -> StepContext:
    caller: Any = SimpleNamespace(ask=ask, forget=untold)
    return StepContext(
        cut=cut_of(stages),
        fleet=fleet_of(registry_of(stages), stages, mates),
        caller=caller,
        ledger=Ledger(step=0, stages=stages, micro_batches=1),
        lock=threading.RLock(),
        run="run",
        generation=0,
        step=0,
        state=0,
        batch=("host", 9),
        sum_wire="f32",
        call_seconds=1.0,
        await_peer=lambda stage: None,
        tell=tell,
        counts=Counts(),
    )


def test_the_limit_of_attempts_is_that_of_each_part() -> None:
    """With sixty stages there are 119 calls, and none is a second attempt."""
    context = context_of(60)
    MicroBatchRoute(context, 0).run()
    assert all(context.ledger.is_complete(stage) for stage in range(60))


def test_the_state_that_most_mates_have_is_kept() -> None:
    told: list[str] = []
    context = context_of(1, 3, lambda kind, **more: told.append(more["peer"]))
    commit = SwarmStepCommit(context, [], None)  # type: ignore[arg-type]
    commit._members[0] = context.fleet.synced(0)
    names = [member.name for member in commit._members[0]]
    answers = {
        name: StageValues(numbers=[], digest=digest)
        for name, digest in zip(names, ("other", "same", "same"), strict=True)
    }
    commit._majority_values(0, 0, answers)
    assert commit.digests[0] == "same" and told == names[:1]
    assert [m.name for m in context.fleet.synced(0)] == names[1:]


def trainer_with(ask: Callable[..., Message]) -> Trainer:
    caller: Any = SimpleNamespace(ask=ask)
    registry = registry_of(1)
    found = Trainer(cut_of(1), registry, caller, Settings(steps=1))
    found.fleet = fleet_of(registry, 1)
    return found


def test_a_run_whose_last_state_is_lost_does_not_end_as_if_all_were_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*given: Any, **more: Any) -> Message:
        raise UnreachableProcessError("host:1 (state): no answer", late=True)

    trainer = trainer_with(ask)

    def one() -> dict[str, Any]:
        trainer.step += 1
        return {}

    monkeypatch.setattr(trainer, "_ready", lambda: None)
    monkeypatch.setattr(trainer, "_one", one)
    run = trainer.run()
    assert next(run)[0] == 1
    with pytest.raises(wh.WhaleError, match="step 1, the last, is done, and no peer"):
        next(run)


@pytest.mark.parametrize(
    "answer",
    [
        StateChunk(count=10**12, digest="", arrays=(np.zeros(STATE, np.uint8),)),
        StateChunk(count=10**12, digest=""),
        RefusedRequestError(
            "answer", "h:1 answered 'fetch_state' wrongly: it lacks count"
        ),
    ],
    ids=["endless", "without pieces", "without fields"],
)
def test_a_peer_that_sends_no_state_is_passed_over(
    answer: StateChunk | RefusedRequestError,
) -> None:
    asked: list[str] = []

    def ask(address: Any, question: Any, **more: Any) -> Message:
        asked.append(question.kind)
        if isinstance(answer, RefusedRequestError):
            raise answer
        return answer

    assert trainer_with(ask)._state_of(0, SnapshotDownload()) is None
    assert len(asked) <= 2


# Who is at fault.


def name_of(address: tuple[str, int], mates: int) -> str:
    stage, mate = divmod(address[1] - 1, mates)
    return f"p{stage}.{mate}"


@pytest.mark.parametrize("number", range(4))
def test_a_peer_that_does_not_reach_its_mates_is_dropped_and_they_are_not(
    number: int,
) -> None:
    told: list[dict[str, Any]] = []

    def tell(kind: str, **more: Any) -> None:
        if kind == "unreached":
            told.append(more)

    def ask(address: Any, question: Any, **more: Any) -> Message:
        if question.kind == "ping":
            return Pong(name="")
        others = [*question.sources, *getattr(question, "cotangents", ())]
        if name_of(address, 2) == "p1.1" and others:
            raise RefusedRequestError("source", "No route to host", others[0][1])
        return receipt()

    context = context_of(3, 2, tell, ask)
    # Whoever is asked first, so that the order of the wiring does not matter.
    for _ in range(number):
        context.fleet.choose(1, 1.0)
    route = MicroBatchRoute(context, 0)
    route.run()
    names = {m.name for m in context.fleet.usable()}
    assert all(one["dropped"] == one["peer"] == "p1.1" for one in told)
    assert names == {"p0.0", "p0.1", "p1.0", "p2.0", "p2.1"} | (
        set() if told else {"p1.1"}
    )
    assert told or number % 2
    assert all(context.ledger.is_complete(stage) for stage in range(3))


def test_a_peer_that_does_not_reach_the_trainer_is_dropped() -> None:
    def ask(address: Any, *given: Any, **more: Any) -> Message:
        if name_of(address, 2) == "p0.1":
            raise RefusedRequestError(
                "source", "the trainer did not give batch: No route to host"
            )
        return receipt()

    context = context_of(1, 2, ask=ask)
    for _ in range(3):  # Each of the two is asked.
        context.ledger = Ledger(step=0, stages=1, micro_batches=1)
        MicroBatchRoute(context, 0).run()
    assert [m.name for m in context.fleet.synced(0)] == ["p0.0"]


def test_whoever_fails_with_several_is_dropped_however_it_answers_the_trainer() -> None:
    context = context_of(2, 3)
    first, second, bad = (context.member(n) for n in ("p1.0", "p1.1", "p0.0"))
    assert first is not None and second is not None and bad is not None
    context.unreached(first, bad, "no answer")
    context.unreached(second, bad, "no answer")
    assert [m.name for m in context.fleet.synced(0)] == ["p0.1", "p0.2"]
    assert second.name in {m.name for m in context.fleet.synced(1)}
    assert context.fleet.is_paused(bad) and context.fleet.is_paused(first)


def test_who_waited_for_a_peer_that_stood_still_is_not_dropped_for_it() -> None:
    """It was stopped for longer than others wait, and answers again by now."""
    context = context_of(2, 2)
    everybody = {m.name for m in context.fleet.usable()}
    mate, stopped = context.member("p1.0"), context.member("p0.0")
    assert mate is not None and stopped is not None
    context.unreached(mate, stopped, "no answer in 10 s", late=True)
    assert {m.name for m in context.fleet.usable()} == everybody
    # Again and again is another matter: their link is too slow.
    context.unreached(mate, stopped, "no answer in 10 s", late=True)
    assert {m.name for m in context.fleet.usable()} == everybody - {"p1.0"}


def test_a_peer_that_is_gone_is_blamed_and_not_who_reports_it() -> None:
    def ask(*given: Any, **more: Any) -> Message:
        raise UnreachableProcessError("host:1 (ping): no answer", late=True)

    context = context_of(2, 2, ask=ask)
    first, gone = context.member("p1.0"), context.member("p0.0")
    assert first is not None and gone is not None
    context.unreached(first, gone, "no answer")
    assert {m.name for m in context.fleet.usable()} == {"p0.1", "p1.0", "p1.1"}


def test_the_error_after_the_last_attempt_names_the_peer() -> None:
    def ask(*given: Any, **more: Any) -> Message:
        raise RefusedRequestError("missing", "it holds nothing")

    with pytest.raises(wh.WhaleError, match=r"tried 100 times.*p0\.0: it holds noth"):
        MicroBatchRoute(context_of(1, ask=ask), 0).run()


@pytest.mark.parametrize("kind", ["forward", "backward", "sum", "update"])
def test_an_error_that_all_peers_raise_ends_the_run_soon(kind: str) -> None:
    """With its words; where one peer alone raises it, the others go on."""
    asked: list[str] = []
    broken = {"p0.0", "p0.1"}

    def ask(address: Any, question: Any, **more: Any) -> Message:
        name = name_of(address, 3)
        if question.kind == kind and name in broken:
            asked.append(name)
            raise RefusedRequestError("failed", "ZeroDivisionError: of the model")
        if question.kind == "update":
            return has_state()
        return added() if question.kind == "sum" else receipt()

    def step() -> None:
        commit = summing(context)
        commit._sum(0)
        commit._level(0, 0, ())

    context = context_of(2, 3, ask=ask)
    step()
    assert "p0.2" in {m.name for m in context.fleet.synced(0)}
    broken.add("p0.2")
    context = context_of(2, 3, ask=ask)
    match = f"{kind} of stage 0 raises.*p0.0, p0.1, p0.2.*ZeroDivisionError: of the mod"
    with pytest.raises(wh.WhaleError, match=match):
        step()
    assert len(asked) < 12


# The sum.


def added(*given: Any, **more: Any) -> Message:
    return Summed(numbers=[0], attempts=[1], lost=0.0, whole=0.0)


def summing(context: StepContext) -> SwarmStepCommit:
    """A commit whose micro-batch has its way behind it."""
    route = MicroBatchRoute(context, 0)
    route.run()
    return SwarmStepCommit(context, [route], ThreadPoolExecutor(1))


def test_peers_that_are_lost_while_lost_parts_are_made_again_end_nothing() -> None:
    sums: list[int] = []

    def ask(address: Any, question: Any, **more: Any) -> Message:
        if question.kind != "sum":
            return receipt()
        stage, mates = question.stage, [p for p in question.peers if p[2]]
        sums.append(stage)
        # Whoever holds the gradient of the other stage, which was summed before.
        if name_of(address, 2) == mates[0][0] and sums.count(stage) in (1, 2):
            other = context.ledger.gradient_attempts(1 - stage) if len(sums) > 2 else []
            for attempt in other[:1]:
                member = context.member(attempt.peer)
                assert member is not None
                context.lose(member, "it died")
        return added()

    context = context_of(2, 2, ask=ask)
    commit = summing(context)
    commit._each(commit._sum, range(2))
    commit._complete()
    assert context.ledger.is_sealed and len(sums) > 4


def test_what_is_made_again_meanwhile_is_assigned_by_the_ledger_alone() -> None:
    context = context_of(1)
    commit = summing(context)
    commit._routes[0].backward.clear()
    holders = commit._assigned(0, context.fleet.usable(0))
    assert holders == [("p0.0", ("host", 1), [0], [1])]


def test_an_overflow_is_the_models_when_a_second_peer_has_it() -> None:
    context = context_of(1, 2)
    commit = SwarmStepCommit(context, [], ThreadPoolExecutor(1))
    first, second = context.fleet.synced(0)
    error = RefusedRequestError(
        "overflow", "the sum of step 0, stage 0: 3 of 4 are not finite"
    )
    commit._failed(0, first, "sum", error)
    assert [m.name for m in context.fleet.synced(0)] == [second.name]
    with pytest.raises(wh.WhaleError, match=r"step 0, stage 0: the sum.*not applied"):
        commit._failed(0, second, "sum", error)


def test_the_last_failure_of_a_sum_is_said() -> None:
    def ask(address: Any, question: Any, **more: Any) -> Message:
        if question.kind == "sum":
            raise RefusedRequestError("missing", "it holds no gradient")
        return receipt()

    commit = summing(context_of(1, ask=ask))
    with pytest.raises(wh.WhaleError, match=r"not sum.*p0\.0: it holds no gradient"):
        commit._sum(0)


# The trainer.


def test_a_failure_of_an_earlier_process_bans_no_later_one() -> None:
    context, registry = context_of(1, 2), registry_of(1)
    context.fleet = fleet_of(registry, 1, 2)
    (old, _), now = context.fleet.synced(0), context.fleet.now()
    new = registry.join(old.name, old.address, 0, now)
    context.fleet.add(new)
    assert new.incarnation == 2 and len(context.fleet.usable(0)) == 2
    context.fleet.failed(old, 1.0, 1.0, ban=True)
    context.lose(old, "it died")
    assert len(context.fleet.usable(0)) == 2


def test_a_batch_of_another_step_is_not_computed() -> None:
    trainer = trainer_with(receipt)
    at = {"run": trainer.run_id, "generation": 0, "number": 0, "places": []}
    for change in ({"step": 10**12}, {"step": 0, "run": "other"}):
        with pytest.raises(RefusedRequestError, match="the trainer is at") as found:
            trainer.give_batch(Batch(**{**at, **change}))
        assert found.value.code == "stale"


class Interrupts:
    """A micro-batch during which Ctrl-C is pressed."""

    def __init__(self) -> None:
        self.runs = 0
        self.once = threading.Lock()
        self.context = context_of(1)

    def run(self, first: int = 0) -> None:
        self.runs += 1
        if self.once.acquire(blocking=False):
            self._press()
            # Python drops an interrupt that arrives in a callback of its collector.
            while not self.context.stop.wait(30):
                self._press()
        self.context.stop.wait(300)

    def _press(self) -> None:
        # A signal, as interrupt_main wakes no thread that waits.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, which a process started in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_does_not_wait_for_micro_batches_that_have_not_begun() -> None:
    one: Any = Interrupts()
    trainer = trainer_with(receipt)
    with pytest.raises(KeyboardInterrupt):
        trainer._travel(one.context, [one] * 20)
    assert one.context.stop.is_set() and one.runs <= 2


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def newcomers(
    ask: Callable[..., Message], stages: list[int], **settings: Any
) -> tuple[Trainer, Registry, Clock, list[str]]:
    """A trainer at step 0 and peers that are ready, none of which has the state."""
    told: list[str] = []
    clock, caller = Clock(), SimpleNamespace(ask=ask)
    registry = registry_of(max(stages) + 1)
    for number, stage in enumerate(stages):
        registry.join(f"p{number}", ("host", number + 1), stage, 0.0)
        registry.announce(f"p{number}", 0.0, incarnation=1, ready=True)
    trainer = Trainer(
        cut_of(max(stages) + 1),
        registry,
        caller,  # type: ignore[arg-type]
        Settings(steps=1, **settings),
        clock=clock,
        tell=lambda kind, **more: told.append(kind),
    )
    return trainer, registry, clock, told


def settled(trainer: Trainer) -> None:
    """Nobody takes the state any more."""
    while trainer._coming:
        trainer._changed.wait(0.01)


def has_state(digest: str = "d") -> Message:
    return StageValues(numbers=[], digest=digest)


def test_a_peer_that_refuses_is_asked_again_after_growing_pauses() -> None:
    asked: list[float] = []

    def ask(*given: Any, **more: Any) -> Message:
        asked.append(clock.now)
        raise RefusedRequestError("stale", "p0 is in generation 1 of another run")

    trainer, _, clock, told = newcomers(ask, [0])
    for tenth in range(100):
        clock.now = tenth / 10
        trainer._bring()
        settled(trainer)
    assert asked == [0.0, 1.0, 3.0, 7.0] and told.count("not synced") == 4


def test_a_peer_that_does_not_answer_is_not_waited_for_at_the_next_step() -> None:
    trainer, registry, clock, _ = newcomers(lambda *given, **more: has_state(), [0, 0])
    member = trainer.fleet.members()[0]
    trainer.fleet.failed(member, 1.0, 1.0, ban=True)
    for now, expected in ((0.0, {"p1"}), (1.0, {"p0", "p1"})):
        clock.now = now
        if now:
            registry.announce("p0", now, incarnation=1)
        trainer._bring()
        settled(trainer)
        assert {m.name for m in trainer.fleet.synced()} == expected


def test_of_two_that_begin_with_other_states_one_is_taken() -> None:
    both = threading.Barrier(2)

    def ask(address: Any, *given: Any, **more: Any) -> Message:
        both.wait(300)
        return has_state(f"of {address[1]}")

    trainer, _, _, told = newcomers(ask, [0, 0])
    trainer._bring()
    settled(trainer)
    assert sorted(told) == ["differs", "joined"]
    assert len(trainer.fleet.synced(0)) == 1


def test_steps_go_on_while_a_newcomer_takes_the_state() -> None:
    """It is waited for as long as is set; what it takes too late is not counted."""
    free = threading.Event()

    def ask(address: Any, *given: Any, **more: Any) -> Message:
        if address[1] == 3:
            free.wait(300)
        return has_state()

    trainer, _, _, told = newcomers(ask, [0, 1, 0], newcomer_seconds=1e-9)
    trainer.fleet._clock = time.monotonic  # So that waiting has an end.
    trainer.registry.lease.seconds = 1e9
    trainer.registry._members.update(
        (n, dataclasses.replace(m, expires=1e12))
        for n, m in trainer.registry._members.items()
    )
    trainer._ready()
    assert {m.name for m in trainer.fleet.usable()} == {"p0", "p1"}
    trainer._await_newcomers()
    trainer._applied({"p0", "p1"}, {0: "e", 1: "e"})
    free.set()
    settled(trainer)
    assert {m.name for m in trainer.fleet.usable()} == {"p0", "p1"}
    assert told.count("joined") == 2 and told[-1] == "not synced"
    late = next(m for m in trainer.fleet.members() if m.name == "p2")
    assert trainer.step == 1 and trainer.fleet.is_paused(late)


def test_who_comes_while_gradients_are_summed_takes_the_next_state() -> None:
    """It is not in the sum, so that it has the state of the step before."""
    free = threading.Event()

    def ask(*given: Any, **more: Any) -> Message:
        free.wait(300)
        return has_state()

    trainer, _, _, told = newcomers(ask, [0])
    trainer._bring()
    with trainer._summing():
        free.set()
        settled(trainer)
    assert told == ["not synced"] and not trainer.fleet.synced()
    (member,) = trainer.fleet.members()
    # What it has lost counts when a step is to wait for it, and it is tried at once.
    assert (member.name, member.incarnation) in trainer._late
    assert not trainer.fleet.is_paused(member)
    trainer._bring()
    settled(trainer)
    assert told[-1] == "joined" and not trainer._late


def test_nobody_waits_for_a_newcomer_whose_lease_has_ended() -> None:
    free = threading.Event()

    def ask(*given: Any, **more: Any) -> Message:
        free.wait(300)
        return has_state()

    trainer, _, clock, _ = newcomers(ask, [0])
    trainer._bring()
    assert trainer._waits_for_newcomers(0.0)
    clock.now = trainer.registry.lease.seconds + 0.1
    assert not trainer._waits_for_newcomers(clock.now)
    free.set()
    settled(trainer)


def test_a_snapshot_is_given_up_when_its_source_is_gone() -> None:
    free, asked = threading.Event(), threading.Event()

    def ask(address: Any, question: Any, **more: Any) -> Message:
        if question.kind == "fetch_state":
            asked.set()
            free.wait(300)
            raise UnreachableProcessError("it stands still", late=True)
        return has_state()

    trainer, _, clock, told = newcomers(ask, [0], snapshot_every=1)
    trainer._bring()
    settled(trainer)
    trainer.step = 1
    trainer._begin_snapshot()
    assert asked.wait(300)
    clock.now = trainer.registry.lease.seconds + 0.1
    trainer._await_snapshot()  # It stands still for longer than this test may take.
    assert trainer._owed and trainer.newest.step == 0
    free.set()
    assert told == ["joined"]


def test_a_peer_that_has_failed_is_no_mate_of_one_that_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its announcement holds, and the other is all that its stage has."""
    monkeypatch.setattr(
        "whalejax.swarm_runtime.peer_fleet.Fleet.seconds_per_task",
        lambda self, member: 4.0 if member.name == "p2" else 1.0,
    )
    trainer, _, _, told = newcomers(lambda *given, **more: has_state(), [0, 0, 1])
    trainer._bring()
    settled(trainer)
    first = next(m for m in trainer.fleet.members() if m.name == "p0")
    trainer.fleet.failed(first, 1.0, 0.0, ban=True)
    moves: list[str] = []
    monkeypatch.setattr(trainer, "move", lambda member, target: moves.append(member))
    StageMover(2, period=1e-6)(trainer)
    assert not moves and told.count("joined") == 3


@pytest.mark.parametrize("others", [1, 3])
def test_a_stage_that_nobody_serves_is_given_a_newcomer_of_another(others: int) -> None:
    """Which waits in a stage that has others; else nobody ends the step."""
    asked: list[str] = []

    def ask(address: Any, question: Any, **more: Any) -> Message:
        asked.append(question.kind)
        if question.kind == "move":
            name = f"p{address[1] - 1}"
            registry.announce(
                name, 0.0, incarnation=1, stage=question.stage, ready=True
            )
        return has_state()

    trainer, registry, _, told = newcomers(ask, [0] * others + [2], spare_seconds=0.0)
    for _ in range(3):
        trainer._bring()
        settled(trainer)
        lacking = [s for s in range(3) if not trainer.fleet.usable(s)]
        trainer._send_spare(lacking)
    assert asked.count("move") == (1 if others > 1 else 0)
    if others > 1:
        while trainer.moving:
            trainer._bring()
            settled(trainer)
        assert len(trainer.fleet.usable(1)) == 1
        assert "moves" in told and "moved" in told


def test_the_last_of_a_stage_is_not_let_go_while_it_is_banned() -> None:
    def ask(*given: Any, **more: Any) -> Message:
        raise UnreachableProcessError("host:1 (state): no answer", late=True)

    trainer = trainer_with(ask)
    (member,) = trainer.fleet.synced(0)
    trainer.step = 3
    trainer.registry.announce(
        member.name, trainer.fleet.now(), incarnation=1, leaving=True
    )
    trainer.fleet.failed(member, 1.0, 1.0, ban=True)
    trainer._let_go()
    assert not trainer.registry.is_free(member.name)


# A peer.


def peer_with(ask: Callable[..., Message], **more: Any) -> Peer:
    cut: Any = SimpleNamespace(stages=3, facts=dict)
    found = Peer(cut, KEY, ("monkey-1", 9), beat_seconds=0.001, **more)
    found._caller.close()
    caller: Any = SimpleNamespace(ask=ask, close=untold)
    found._caller = caller
    return found


def heard(*, known: bool = True, free: bool = False) -> Message:
    return AnnouncementReceived(known=known, free=free)


def welcome() -> Message:
    return PeerWelcome(stage=1, incarnation=1, run="run")


def test_a_peer_that_leaves_stays_as_long_as_the_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 20.0).__next__)
    monkeypatch.setattr("whalejax.swarm_runtime.swarm_process.time", clock)
    monkeypatch.setattr("whalejax.swarm_runtime.peer.LEAVE_BEAT_SECONDS", 0.001)
    answers = iter([*[heard()] * 20, heard(known=False, free=True)])
    peer = peer_with(lambda *given, **more: next(answers))
    peer.leave()
    peer._beat()
    assert peer.over == "left" and not peer.failed
    peer.close()


def test_a_host_named_like_a_key_is_asked_again() -> None:
    answers: list[Any] = [
        UnreachableProcessError("monkey-1:9: Connection refused", late=False),
        welcome(),
    ]

    def ask(*given: Any, **more: Any) -> Message:
        found = answers.pop(0)
        if isinstance(found, UnreachableProcessError):
            raise found
        return found

    peer = peer_with(ask)
    peer._join()
    assert peer.worker.run == "run" and not answers
    answers.append(
        UnreachableProcessError("h:9: refused the key", late=False, hopeless=True)
    )
    with pytest.raises(wh.WhaleError, match="its key file"):
        peer._join()
    peer.close()


def test_a_peer_on_another_network_joins_again_with_its_address_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts: list[str] = []

    def ask(registry: Address, join: Any, **more: Any) -> Message:
        hosts.append(join.address[0])
        return welcome()

    monkeypatch.setenv(MEMBER_HOST, "10.0.0.1")
    peer = peer_with(ask, host="0.0.0.0")
    peer._join_once()
    monkeypatch.setenv(MEMBER_HOST, "10.0.0.2")
    peer._join_once()
    assert hosts == ["10.0.0.1", "10.0.0.2"]
    peer.close()


def test_a_registry_that_forgot_a_peer_and_is_away_ends_nothing() -> None:
    answers: list[Any] = [
        RefusedRequestError("failed", "a moment"),
        heard(known=False),
        UnreachableProcessError("monkey-1:9 (join): no answer", late=True),
        heard(known=False),
        welcome(),
    ]

    def ask(*given: Any, **more: Any) -> Message:
        found = answers.pop(0)
        if isinstance(found, wh.WhaleError):
            raise found
        return found

    peer = peer_with(ask)
    peer._try_to_announce()
    assert peer.refused == "a moment"
    peer._try_to_announce()
    assert not peer.over
    peer._try_to_announce()
    assert not peer.refused and not peer.over and not answers
    peer._patience_seconds, peer._heard_at = 1.0, -1e9
    peer._end_if_alone()
    assert peer.failed and "has not answered for" in peer.over
    peer.close()
