"""Answers are checked where they arrive, and come before their deadline."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.whalejax.keys import KEY
from tests.whalejax.messages import SWARM, Loose
from whalejax.swarm_runtime.commit import SwarmStepCommit
from whalejax.swarm_runtime.wire.state_transfer import downloaded
from whalejax.wire.connection import listen
from whalejax.wire.messages import Message, Question, answer_type
from whalejax.wire.service import (
    Caller,
    RefusedRequestError,
    Service,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import (
    At,
    FetchState,
    Ping,
    Pong,
    ShowSwarm,
    StageCall,
    StageValues,
    StateChunk,
)


STATE = FetchState(run="r", generation=0, step=0, stage=0, place=0)


@pytest.fixture
def asked() -> Iterator[Any]:
    """Asks a process that answers with what it is given; closed afterwards."""
    answers: list[Message] = []
    handlers = {kind: lambda _: answers[-1] for kind in (Ping, FetchState, ShowSwarm)}
    service = Service(listen(), KEY, handlers)
    caller = Caller(KEY)

    def ask(question: Any, answer: Any) -> Any:
        answers.append(answer)
        return caller.ask(service.address, question, seconds=300)

    yield ask
    caller.close()
    with pytest.raises(UnreachableProcessError, match="this process ends"):
        ask(Ping(), answers[-1])
    service.close()


def test_each_question_has_an_answer() -> None:
    kinds = SWARM.kinds.values()
    questions = [one for one in kinds if issubclass(one, Question)]
    assert {*map(answer_type, questions)} == {*kinds} - {*questions, At, StageCall}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("pong", {"name": "x"}, "Invalid value 'pong'"),
        ("state_chunk", {}, "missing required field `count`"),
        ("state_chunk", {"count": "1", "digest": ""}, "`int`, got `str` - at `.*count"),
        ("state_chunk", {"count": 1, "digest": "", "more": 1}, "field `more`"),
    ],
)
def test_answers_that_are_none_are_refused(
    asked: Any, kind: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        RefusedRequestError, match=f"'fetch_state' wrongly: .*{said}"
    ) as found:
        asked(STATE, Loose({"kind": kind, **fields}))
    assert found.value.code == "answer"
    assert asked(Ping(), Pong(name="x")).name == "x"


def test_an_answer_that_is_too_large_is_said(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalejax.wire.messages.MOST_ARRAY_BYTES", 100)
    large = StateChunk(count=1, digest="", arrays=(np.zeros(101, np.uint8),))
    with pytest.raises(RefusedRequestError, match="101 of arrays.*Send it in parts"):
        asked(STATE, large)
    many = StateChunk(count=1, digest="", arrays=(np.zeros(0, np.uint8),) * 4097)
    with pytest.raises(
        RefusedRequestError, match="4097 arrays, of at most 4096.*Send it in par"
    ):
        asked(STATE, many)


@pytest.mark.parametrize(
    ("count", "arrays", "digest"),
    [
        (2, [np.zeros(8, np.uint8)], ""),
        (1, [np.zeros(9, np.uint8)], ""),
        (1, [np.zeros(2, np.float32)], ""),
        (1, [], ""),
        (1, [np.zeros(8, np.uint8)], "of other bytes"),
    ],
)
def test_what_is_no_state_of_a_stage_is_refused(
    count: int, arrays: list[np.ndarray], digest: str
) -> None:
    layout: Any = SimpleNamespace(
        state_bytes=lambda stage: 8, split=lambda stage, data: [data]
    )
    asked = []

    def ask(place: int) -> StateChunk:
        asked.append(place)
        return StateChunk(count=count, digest=digest, arrays=tuple(arrays))

    with pytest.raises(RefusedRequestError, match=r"state of stage 3.*") as found:
        downloaded(ask, layout, 3, "p")
    assert found.value.blame == "p" and asked == [0]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_values_of_a_round_are_those_of_most_peers(wrong: int) -> None:
    """Whoever answers first, one wrong peer does not decide for all stages."""
    members = [SimpleNamespace(name=f"p{number}") for number in range(3)]
    told: list[str] = []
    dropped: list[str] = []
    context = SimpleNamespace(
        cut=SimpleNamespace(update=SimpleNamespace(rounds=2)),
        step=4,
        tell=lambda kind, peer, why: told.append(f"{kind} {peer}"),
        fleet=SimpleNamespace(drop=dropped.append),
    )
    commit = SwarmStepCommit(context, [], None)  # type: ignore[arg-type]
    commit._members[0] = members  # type: ignore[assignment]
    answers = {
        member.name: StageValues(
            numbers=[7],
            arrays=(np.float32([3 if number == wrong else 2]),),
            digest=f"state {number == wrong}",
        )
        for number, member in enumerate(members)
        if number != (wrong + 1) % 3  # This one has not answered.
    }
    answers["p9"] = next(one for name, one in answers.items() if name != f"p{wrong}")
    found = commit._majority_values(0, 0, answers)
    assert {number: value.tolist() for number, value in found.items()} == {7: [2.0]}
    assert told == [f"differs p{wrong}"]
    assert dropped == [f"p{wrong}"]
    assert not commit.digests
    assert not commit._majority_values(0, 1, answers)
    assert commit.digests == {0: "state False"}
    assert {f"p{(wrong + 1) % 3}", f"p{wrong}"} <= {*dropped}
