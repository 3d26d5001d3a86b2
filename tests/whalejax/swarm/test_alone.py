"""The trainer's side of a step, with a caller that answers in place of peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import whalejax as wh
from whalejax.elastic.wire.framing import Message
from whalejax.swarm.commit import Commit
from whalejax.swarm.fleet import Fleet
from whalejax.swarm.ledger import Ledger
from whalejax.swarm.passage import Counts, Passage, StepContext
from whalejax.swarm.registry import Registry
from whalejax.swarm.trainer import Settings, Trainer
from whalejax.swarm.wire.service import Gone


STATE = 8
"""Bytes of a stage's state."""


def cut_of(stages: int) -> Any:
    """A chain of stages that computes nothing."""
    return SimpleNamespace(
        stages=stages,
        count=1,
        seed=0,
        flat_sums=[],
        update=SimpleNamespace(rounds=1),
        sources=lambda stage: {stage - 1: [0]} if stage else {},
        sinks=lambda stage: [stage + 1] if stage + 1 < stages else [],
        state_bytes=lambda stage: STATE,
        split=lambda stage, data: [data] if data.size == STATE else None,
    )


def receipt(*given: Any, **more: Any) -> Message:
    return Message(kind="receipt", fields={"seconds": 0.0})


def untold(*given: Any, **more: Any) -> None:
    pass


def registry_of(stages: int) -> Registry:
    return Registry({}, stages=stages, lease_seconds=1e6)


def fleet_of(registry: Registry, stages: int, mates: int = 1) -> Fleet:
    fleet = Fleet(registry, stages)
    for number in range(stages * mates):
        stage, mate = divmod(number, mates)
        address = ("host", number + 1)
        member = registry.join(f"p{stage}.{mate}", address, stage, {}, fleet.now())
        registry.announce(member.name, fleet.now(), incarnation=1, ready=True, step=0)
        fleet.add(member)
    return fleet


def context_of(
    stages: int, mates: int = 1, tell: Callable[..., None] = untold
) -> StepContext:
    return StepContext(
        cut=cut_of(stages),
        fleet=fleet_of(registry_of(stages), stages, mates),
        caller=SimpleNamespace(ask=receipt),  # type: ignore[arg-type]
        ledger=Ledger(step=0, stages=stages, micro_batches=1),
        lock=threading.RLock(),
        run="run",
        generation=0,
        step=0,
        batch=("host", 9),
        call_seconds=1.0,
        await_peer=lambda stage: None,
        tell=tell,
        counts=Counts(),
    )


def test_the_limit_of_attempts_is_that_of_each_part() -> None:
    """With sixty stages there are 119 calls, and none is a second attempt."""
    context = context_of(60)
    Passage(context, 0).run()
    assert all(context.ledger.is_complete(stage) for stage in range(60))


def test_the_state_that_most_mates_have_is_kept() -> None:
    told: list[str] = []
    context = context_of(1, 3, lambda kind, **more: told.append(more["peer"]))
    commit = Commit(context, [], None)  # type: ignore[arg-type]
    commit._members[0] = context.fleet.synced(0)
    names = [member.name for member in commit._members[0]]
    answers = {
        name: Message(kind="told", fields={"numbers": [], "digest": digest})
        for name, digest in zip(names, ("other", "same", "same"), strict=True)
    }
    commit._taken(0, 0, answers)
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
        raise Gone("host:1 (state): no answer", late=True)

    trainer = trainer_with(ask)

    def one() -> dict[str, Any]:
        trainer.step += 1
        return {}

    monkeypatch.setattr(trainer, "_ready", lambda: None)
    monkeypatch.setattr(trainer, "_one", one)
    run = trainer.run()
    assert next(run)[0] == 1
    with pytest.raises(wh.WhaleError, match="all 1 steps are done, and no peer gave"):
        next(run)


@pytest.mark.parametrize(
    "answer",
    [
        Message(
            kind="state",
            fields={"count": 10**12, "digest": ""},
            arrays=(np.zeros(STATE, np.uint8),),
        ),
        Message(kind="state", fields={"count": 10**12, "digest": ""}),
        Message(kind="state", fields={}),
    ],
    ids=["endless", "without pieces", "without fields"],
)
def test_a_peer_that_sends_no_state_is_passed_over(answer: Message) -> None:
    asked: list[str] = []

    def ask(address: Any, kind: str, *given: Any, **more: Any) -> Message:
        asked.append(kind)
        return answer

    assert trainer_with(ask)._state_of(0) is None
    assert len(asked) <= 2
