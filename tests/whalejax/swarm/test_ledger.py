"""The ledger: nothing twice, nothing missing, through losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.ledger import (
    Attempt,
    Ledger,
    Phase,
    Task,
    Verdict,
    check_partition,
    committed,
    count_lost_and_doubled,
)


BACKWARD, FORWARD = Phase.BACKWARD, Phase.FORWARD


class Journal:
    """Records as JSON lines, as they would be on a disk."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        self.lines.append(json.dumps({"event": event, **fields}))

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def filled(stages: int = 2, numbers: int = 4, journal: Journal | None = None) -> Ledger:
    """All gradients held: even numbers by a, odd ones by b."""
    ledger = Ledger(
        step=7,
        stages=stages,
        micro_batches=numbers,
        write=journal.write if journal else None,
    )
    for stage in range(stages):
        for number in range(numbers):
            for phase in Phase:
                call = ledger.begin(stage, number, phase, "ab"[number % 2], 1)
                assert ledger.record_answer(call) is Verdict.COUNTED
    return ledger


def test_an_assignment_is_a_partition() -> None:
    assert filled().assignment(1) == {"a": (0, 2), "b": (1, 3)}


def test_who_is_lost_after_the_sum_is_in_it() -> None:
    journal = Journal()
    ledger = Ledger(step=3, stages=1, micro_batches=2, write=journal.write)
    assert ledger.missing_gradients == 2
    for number, peer in enumerate("ab"):
        ledger.record_answer(ledger.begin(0, number, BACKWARD, peer, 1))
    assert [attempt.peer for attempt in ledger.gradient_attempts(0)] == ["a", "b"]
    ledger.seal()
    ledger.summed(0, {"a": ([0, 1], [1, 1]), "b": ([0, 1, 1], [1, 1, 1])})
    ledger.lost_with("b", 1)
    assert ledger.missing_gradients == 1 and not ledger.is_sealed
    ledger.commit({0: "digest"})
    assert ledger.missing_gradients == 0 and count_lost_and_doubled(journal.read()) == (
        0,
        1,
    )


def test_what_is_missing_cannot_be_committed() -> None:
    ledger = Ledger(step=3, stages=1, micro_batches=12)
    ledger.record_answer(ledger.begin(0, 1, BACKWARD, "a", 1))
    with pytest.raises(
        WhaleError,
        match="step 3: stage 0 has the gradients of 1 of 12 micro-batches and cannot "
        "be committed; missing 0, 2, 3, 4, 5, 6, 7, 8 and 3 more",
    ):
        ledger.seal()


def test_an_answer_after_its_repetition_is_late() -> None:
    ledger = Ledger(step=0, stages=1, micro_batches=1)
    slow = ledger.begin(0, 0, BACKWARD, "slow", 1)
    ledger.give_up(slow)
    again = ledger.begin(0, 0, BACKWARD, "fast", 1)
    assert ledger.record_answer(slow) is Verdict.LATE
    assert ledger.record_answer(again) is Verdict.COUNTED
    assert ledger.record_answer(again) is Verdict.DUPLICATE
    assert ledger.record_answer(slow) is Verdict.LATE
    assert ledger.assignment(0) == {"fast": (0,)}


def test_an_answer_that_was_given_up_does_not_count_without_a_repetition() -> None:
    ledger = Ledger(step=0, stages=1, micro_batches=1)
    slow = ledger.begin(0, 0, BACKWARD, "slow", 1)
    ledger.give_up(slow)
    assert ledger.record_answer(slow) is Verdict.LATE and not ledger.is_complete(0)


def test_only_the_gradients_of_the_dead_are_computed_again() -> None:
    ledger = filled()
    lost = ledger.lost_with("b", 1)
    assert lost == tuple(
        Task(stage=stage, number=number, phase=BACKWARD)
        for stage in range(2)
        for number in (1, 3)
    )
    assert ledger.lost_with("b", 1) == ()
    for task in lost:
        ledger.record_answer(ledger.begin(task.stage, task.number, task.phase, "a", 1))
    assert ledger.assignment(0) == {"a": (0, 1, 2, 3)}


def test_what_was_under_way_at_the_dead_is_lost_too() -> None:
    ledger = Ledger(step=0, stages=1, micro_batches=2)
    call = ledger.begin(0, 1, FORWARD, "a", 1)
    assert ledger.lost_with("a", 1) == (Task(stage=0, number=1, phase=FORWARD),)
    assert ledger.record_answer(call) is Verdict.LATE


def test_a_restarted_peer_keeps_what_it_did_since() -> None:
    ledger = Ledger(step=0, stages=1, micro_batches=2)
    ledger.record_answer(ledger.begin(0, 0, BACKWARD, "a", 1))
    ledger.record_answer(ledger.begin(0, 1, BACKWARD, "a", 2))
    assert [task.number for task in ledger.lost_with("a", 1)] == [0]
    assert ledger.holders(0) == {"a": 2}


def test_a_death_during_the_sum_opens_the_step_again() -> None:
    ledger = filled()
    assert ledger.seal() == 1
    with pytest.raises(WhaleError, match="is done and cannot be given to c; ask lost"):
        ledger.begin(0, 0, BACKWARD, "c", 1)
    for task in ledger.lost_with("a", 1):
        ledger.record_answer(ledger.begin(task.stage, task.number, task.phase, "b", 1))
    assert ledger.seal() == 2
    ledger.commit({0: "d0", 1: "d1"})
    assert ledger.lost_with("b", 1) == ()
    assert ledger.digests == {0: "d0", 1: "d1"}


def test_a_commit_needs_a_seal_and_all_digests() -> None:
    ledger = filled()
    with pytest.raises(WhaleError, match=r"digests of stages \[0, 1\]; seal"):
        ledger.commit({0: "d0", 1: "d1"})
    ledger.seal()
    with pytest.raises(WhaleError, match="digest of each of the 2 stages"):
        ledger.commit({0: "d0"})


def test_a_journal_has_the_digests_of_committed_steps() -> None:
    journal = Journal()
    ledger = filled(journal=journal)
    ledger.seal()
    ledger.commit({0: "d0", 1: "d1"})
    Ledger(step=8, stages=2, micro_batches=4, write=journal.write)
    assert committed(journal.read()) == {7: {0: "d0", 1: "d1"}}


def test_a_record_that_cannot_be_written_changes_nothing() -> None:
    def full(event: str, fields: Mapping[str, object]) -> None:
        if event == "done":
            raise WhaleError("disk full")

    ledger = Ledger(step=0, stages=1, micro_batches=1, write=full)
    call = ledger.begin(0, 0, BACKWARD, "a", 1)
    with pytest.raises(WhaleError, match="disk full"):
        ledger.record_answer(call)
    assert not ledger.is_complete(0)


def test_partitions_are_checked_in_full() -> None:
    with pytest.raises(
        WhaleError,
        match="here: an assignment must name each of the micro-batches 0 to 3 once; "
        "1 is named by a and b; 3 named by nobody; 9 not of this step",
    ):
        check_partition({"a": (0, 1), "b": (1, 2, 9)}, 4, "here")


@pytest.mark.parametrize("place", [(1, 0), (0, 5)])
def test_what_is_not_of_the_step_is_refused(place: tuple[int, int]) -> None:
    ledger = Ledger(step=0, stages=1, micro_batches=5)
    with pytest.raises(WhaleError, match="micro-batches 0 to 4 and stages 0 to 0"):
        ledger.begin(*place, BACKWARD, "a", 1)


def test_attempts_of_other_trainers_have_other_numbers() -> None:
    """What was given out again counts; what comes of the time before does not."""
    ledger = Ledger(step=0, stages=1, micro_batches=1)
    ledger.count_from(0, 10)
    call = ledger.begin(0, 0, BACKWARD, "a", 1)
    assert call.attempt == 11
    ledger.give_up(call)
    assert ledger.take_in(replace(call, attempt=9), "t") is Verdict.LATE
    assert ledger.take_in(replace(call, attempt=12), "t") is Verdict.COUNTED
    assert ledger.assignment(0) == {"a": (0,)}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "done", "give up", "lose", "take in")),
        st.integers(0, 1),
        st.integers(0, 3),
        st.sampled_from("abc"),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_any_order_of_events_ends_in_a_partition(
    events: list[tuple[str, int, int, str]],
) -> None:
    journal = Journal()
    ledger = Ledger(step=0, stages=2, micro_batches=4, write=journal.write)
    calls, held = [], {}
    for event, stage, number, peer in events:
        if event == "begin" and not ledger.is_done(stage, number, BACKWARD):
            calls.append(ledger.begin(stage, number, BACKWARD, peer, 1))
        elif event in ("done", "give up") and calls:
            call = calls[number % len(calls)]
            if event == "give up":
                ledger.give_up(call)
            elif ledger.record_answer(call) is Verdict.COUNTED:
                assert (call.stage, call.number) not in held
                held[call.stage, call.number] = call.peer
        elif event == "take in":
            attempt = Attempt(
                stage=stage,
                number=number,
                phase=BACKWARD,
                peer=peer,
                incarnation=1,
                attempt=1000 * (1 + len(journal.read())),
            )
            counted = ledger.take_in(attempt, "t") is Verdict.COUNTED
            assert counted == ((stage, number) not in held)
            assert ledger.take_in(attempt, "t") is Verdict.DUPLICATE
            held.setdefault((stage, number), peer)
        elif event == "lose":
            ledger.lost_with(peer, 1)
            held = {place: by for place, by in held.items() if by != peer}
    for task in ledger.to_do():
        if task.phase is BACKWARD:
            assert (task.stage, task.number) not in held
            ledger.record_answer(
                ledger.begin(task.stage, task.number, BACKWARD, "d", 1)
            )
    ledger.seal()
    for stage in range(2):
        found = {n: p for p, ns in ledger.assignment(stage).items() for n in ns}
        assert sorted(found) == [0, 1, 2, 3]
        assert all(found[n] == by for (s, n), by in held.items() if s == stage)
