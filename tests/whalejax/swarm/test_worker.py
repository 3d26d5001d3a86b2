"""What a peer keeps and refuses, with a stage that computes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.whalejax.messages import SWARM, received
from tests.whalejax.swarm.swarm_jobs import COUNT
from whalejax.planner.plan_entries import BLOCK, SUM_WIRES, sum_bytes
from whalejax.state.state_bytes import digest_of
from whalejax.swarm_runtime.peer_programs import StageState
from whalejax.swarm_runtime.peer_store.gradient_sums import GradientSum
from whalejax.swarm_runtime.peer_worker import Worker
from whalejax.swarm_runtime.wire.state_transfer import piece
from whalejax.wire.messages import Message
from whalejax.wire.service import RefusedRequestError
from whalejax.wire.swarm_messages import Fetch, FetchState, Forward, Summed, Tensors


SIZE = 4
RAW = [np.arange(SIZE, dtype=np.float32)]
AT = {"run": "run", "generation": 0, "step": 0}


def stage_of(number: int = 0, born: Any = None) -> Any:
    """A stage with one array."""
    return SimpleNamespace(
        number=number,
        imports=[],
        gradients=[SimpleNamespace(shape=(SIZE,), dtype=np.dtype(np.float32))],
        place=SimpleNamespace(batch=[0], part=SimpleNamespace(exports=[])),
        init_state=lambda: StageState(step=0, leaves=tuple(RAW)),
        raw=lambda state: list(state.leaves),
        typed=lambda arrays, step: StageState(step=step, leaves=tuple(arrays)),
    )


def worker_of(ask: Any = None) -> Worker:
    cut: Any = SimpleNamespace(
        stages=2,
        count=COUNT,
        params=0,
        rest=0,
        program=SimpleNamespace(batch_axes=[0]),
        state_bytes=lambda stage: 4 * SIZE,
        split=lambda stage, data: [data.view(np.float32)],
        sources=lambda stage: {},
    )
    caller: Any = SimpleNamespace(ask=ask)
    found = Worker(cut, caller, "p", wire="f32", pull_seconds=1.0)
    found.stage = stage_of()
    found.enter("run")
    return found


def sync(worker: Worker, **change: Any) -> str:
    fields = {**AT, "stage": 0, "keeps": False, "sources": [], **change}
    return str(worker._sync(received("sync", fields, SWARM)).digest)


def test_another_run_is_entered_by_joining_alone() -> None:
    worker = worker_of()
    sync(worker, generation=7)
    with pytest.raises(
        RefusedRequestError, match="in generation 7 of run 'run'.*generation 6"
    ):
        sync(worker, generation=6)
    with pytest.raises(
        RefusedRequestError, match="was asked for generation 8 of run 'other'"
    ):
        sync(worker, run="other", generation=8)
    worker.enter("other")
    assert sync(worker, run="other", keeps=True) == digest_of(RAW)
    with pytest.raises(
        RefusedRequestError, match="of run 'other', and was asked for step 0"
    ):
        worker._at(FetchState(**{**AT, "generation": 7}, stage=0, place=0))


@pytest.mark.parametrize("change", ["another stage", "a newer state"])
def test_a_state_that_comes_too_late_is_not_kept(change: str) -> None:
    def ask(address: Any, question: Any, **more: Any) -> Message:
        if change == "another stage":
            worker.stage = stage_of(0)
        elif question.step == 0:
            sync(worker, step=1, sources=sources)
        return piece(RAW[0].view(np.uint8), question.place, digest_of(RAW))

    worker, sources = worker_of(ask), [["q", ["h", 1], [], []]]
    with pytest.raises(
        RefusedRequestError, match="was given another stage or step"
    ) as found:
        sync(worker, sources=sources)
    assert found.value.code == "stale"
    assert worker.step == (1 if change == "a newer state" else -1)


def test_inputs_of_a_generation_that_is_over_are_not_kept() -> None:
    def ask(*given: Any, **more: Any) -> Message:
        sync(worker, generation=1)
        return Tensors(arrays=(RAW[0],))

    worker = worker_of(ask)
    sync(worker)
    call = {"state": 0, "stage": 0, "number": 0, "attempt": 1, "sources": []}
    assert worker.stage is not None
    with pytest.raises(RefusedRequestError, match="has moved on while it computed"):
        worker._call_inputs(worker.stage, Forward(**AT, **call, batch=("h", 1)))
    assert not worker._inputs


def test_what_no_stage_reads_is_not_given() -> None:
    worker = worker_of()
    sync(worker)
    key = {"phase": "forward", "number": 0, "attempt": 1}
    worker._tensors[0, "forward", 0, 1] = []
    for target in (-1, 2):
        with pytest.raises(
            RefusedRequestError, match=f"stage {target} reads; there are"
        ):
            worker._fetch(Fetch(**AT, **key, target=target))


def summed(worker: Worker, gradients: np.ndarray) -> Summed:
    for number in range(COUNT):
        worker._gradients[0, number, 1] = [gradients]
    holders = [["p", ["h", 1], [*range(COUNT)], [1] * COUNT]]
    fields = {**AT, "stage": 0, "round": 1, "peers": holders}
    return worker._sum(received("sum", fields, SWARM))


def test_a_sum_says_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of()
    sync(worker)
    answer = summed(worker, RAW[0])
    added = {"numbers": [*range(COUNT)], "attempts": [1] * COUNT}
    assert answer.fields == {**added, "lost": 0.0, "whole": 0.0}
    assert np.array_equal(worker._parts[0, 1][0], COUNT * RAW[0])
    add = GradientSum.add

    def twice(self: GradientSum, numbers: list[int], *given: Any) -> None:
        for _ in range(1 + (numbers == [2])):
            add(self, numbers, *given)

    monkeypatch.setattr(GradientSum, "add", twice)
    assert summed(worker, RAW[0]).fields["numbers"] == [0, 1, 2, 2, 3, 4, 5]


def test_sums_and_states_that_are_not_finite_are_not_kept() -> None:
    worker = worker_of()
    sync(worker)
    huge = np.full(SIZE, 3e38, np.float32)
    with pytest.raises(
        RefusedRequestError, match="sum of the gradients of step 0, stage 0"
    ) as one:
        summed(worker, huge)
    assert one.value.code == "overflow" and not worker._parts
    before = StageState(step=0, leaves=(huge, np.full(SIZE, np.inf)))
    infinite = np.full(SIZE, np.inf, np.float32)
    stage = stage_of()
    worker._check_state(stage, before, [huge, infinite])  # As it was before.
    with pytest.raises(
        RefusedRequestError, match="the state after step 0, stage 0.*4 of 4 values"
    ):
        worker._check_state(stage, before, [infinite, infinite])


@pytest.mark.parametrize("sum_wire", SUM_WIRES)
def test_bytes_of_a_sum_are_those_that_are_sent(sum_wire: str) -> None:
    """Of two peers, each of which holds half of the gradients."""
    peers = [
        [name, ["h", 1], [*range(n, COUNT, 2)], [1] * (COUNT // 2)]
        for n, name in enumerate(("p", "q"))
    ]
    sent = 0

    def answering(worker: Worker) -> Any:
        def ask(address: Any, question: Any, **more: Any) -> Any:
            nonlocal sent
            answer: Any = worker.handlers[type(question)](question)
            sent += sum(x.nbytes for x in answer.arrays)
            return answer

        return ask

    size = 2 * BLOCK
    gradients = np.arange(size, dtype=np.float32)
    one, other = worker_of(), worker_of()
    for worker in (one, other):
        worker.sum_wire = sum_wire
        assert worker.stage is not None
        worker.stage.gradients[0].shape = (size,)
    one.name, other.name = "p", "q"
    one._caller = SimpleNamespace(ask=answering(other))  # type: ignore[assignment]
    other._caller = SimpleNamespace(ask=answering(one))  # type: ignore[assignment]
    fields = {**AT, "stage": 0, "round": 1, "peers": peers}
    for number, worker in enumerate((one, other)):
        sync(worker)
        for held in range(number, COUNT, 2):
            worker._gradients[0, held, 1] = [gradients + held]
    question = received("sum", fields, SWARM)
    summed = [w._sum(question).fields for w in (one, other)]
    update = received("update", {**fields, "level": 0, "heard": []}, SWARM)
    whole = [
        w._collect_sum(w.stage, update)[0]  # type: ignore[arg-type]
        for w in (one, other)
    ]
    exact = COUNT * gradients + 15
    assert np.array_equal(whole[0], whole[1])
    lost = np.linalg.norm(whole[0] - exact) / np.linalg.norm(exact)
    squares = [sum(f[name] for f in summed) for name in ("lost", "whole")]
    told = np.sqrt(squares[0] / max(1, squares[1]))
    assert sent == 2 * sum_bytes(4 * size, 2, sum_wire)
    if sum_wire == "f32":
        assert not lost and not told
    else:
        assert 0 < lost < 2 * told < 0.01


def test_a_sum_that_its_format_cannot_hold_says_so() -> None:
    worker = worker_of()
    worker.sum_wire = "f16"
    sync(worker)
    with pytest.raises(
        RefusedRequestError, match=r"in f16: .*not finite.*--sum-wire int8"
    ) as one:
        summed(worker, np.full(SIZE, 6e4, np.float32))
    assert one.value.code == "overflow" and not worker._parts
