"""Other keys, other code, damaged messages and wrong numbers change nothing."""

from __future__ import annotations

import ast
import dataclasses
import random
import socket
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax.swarm
import whalejax.swarm_runtime
from tests.whalejax.keys import KEY, OTHER
from tests.whalejax.messages import SWARM, Loose
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import same, swarm
from tests.whalejax.wire.test_connections import push
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan_errors import PlanError
from whalejax.swarm_runtime import registry_server
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.peer_programs import BackwardResult, StagePrograms
from whalejax.swarm_runtime.registry import Registry, facts_of
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.wire.connection import _HEADER, dial
from whalejax.wire.messages import DATA_BYTES, Message, Messages, Question, WireError
from whalejax.wire.service import (
    Address,
    Caller,
    Declined,
    RefusedRequestError,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import Join, Ping


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts


def test_another_key_is_refused() -> None:
    with swarm(steps=1) as found:
        peer = Peer(found.cut, OTHER, found.serving.address)
        with pytest.raises(WhaleError, match=r"are of different runs.*its key file"):
            peer.start()
        peer.close()
        assert found.serving.registry.members(0.0) == []


@pytest.mark.parametrize(
    ("facts", "stage", "reach", "said"),
    [
        ({"plan": "b"}, -1, "", r"plan is b, not a.*Run the same code"),
        ({}, -1, "", r"plan is not given, not a"),
        (
            {"plan": "a"},
            3,
            "",
            r"asks for stage 3; there are stages 0 to 2\. Give --st",
        ),
        (
            {"plan": "a"},
            0,
            "no answer in 5.0 s",
            r"listens at h:1, which cannot be reached from here \(no answer.*--host",
        ),
    ],
)
def test_the_registry_refuses(
    facts: dict[str, str], stage: int, reach: str, said: str
) -> None:
    registry = Registry({"plan": "a"}, stages=3, reach=lambda address: reach)
    with pytest.raises(RefusedRequestError, match=said):
        registry.admit("p", ("h", 1), stage, facts)
    assert registry.members(0.0) == []


def test_an_ipv6_address_is_named_in_brackets() -> None:
    registry = Registry({}, stages=1, reach=lambda address: "no answer")
    with pytest.raises(RefusedRequestError, match=r"listens at \[fd00::2\]:8476, "):
        registry.admit("p", ("fd00::2", 8476), 0, {})


def test_leases_end_and_are_renewed() -> None:
    registry = Registry({}, stages=2, lease_seconds=5.0)
    first = registry.join("p", ("h", 1), -1, 0.0)
    second = registry.join("q", ("h", 2), -1, 0.0)
    assert [first.stage, second.stage] == [0, 1]
    assert registry.announce("p", 4.0, incarnation=1, step=7) is not None
    assert [m.name for m in registry.members(5.1)] == ["p"]
    assert registry.announce("q", 5.1, incarnation=1) is None
    assert registry.join("q", ("h", 2), -1, 5.1).incarnation == 2


def test_a_lease_begins_when_a_newcomer_has_been_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that answers nothing may take longer than a lease to give up on."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        registry_server, "time", types.SimpleNamespace(monotonic=lambda: clock.now)
    )
    with swarm(steps=1, lease_seconds=10.0) as found:
        registry = found.serving.registry

        def reach(address: Address) -> str:
            clock.now += 30.0
            return ""

        registry._reach = reach
        facts = facts_of(found.cut, "f32", "f32")
        question = Join(name="p", address=("127.0.0.1", 1), stage=0, facts=facts)
        found.serving._join(question)
        assert [m.name for m in registry.members(clock.now)] == ["p"]


class Wrong:
    """Makes a stage of one peer give something else, once or always."""

    def __init__(self, peer: Peer, change: Any, *, times: int = 1 << 30) -> None:
        stage = peer.worker.stage
        assert stage is not None
        self._stage, self._change, self._left = stage, change, times
        peer.worker.stage = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def backward(self, *given: Any) -> BackwardResult:
        found = self._stage.backward(*given)
        self._left -= 1
        return found if self._left < 0 else self._change(found)


def not_finite(found: BackwardResult) -> BackwardResult:
    first, *others = found.gradients
    wrong = np.full_like(first, np.nan)
    return BackwardResult(
        sums=found.sums, returns=found.returns, gradients=(wrong, *others)
    )


def other_shape(found: BackwardResult) -> BackwardResult:
    returns = tuple(x[:1] for x in found.returns)
    return BackwardResult(sums=found.sums, returns=returns, gradients=found.gradients)


@pytest.mark.parametrize("change", [not_finite, other_shape])
def test_wrong_numbers_of_a_peer_are_refused_and_it_is_named(change: Any) -> None:
    with swarm(steps=2) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        bad = found.join(1)
        Wrong(bad, change, times=2)
        assert same(found.run(), jobs.losses(2))
        refused = [told for kind, told in found.told if kind == "refused"]
        assert refused and all(told["peer"] == bad.name for told in refused)
        assert bad.name in refused[0]["why"]


def test_numbers_that_no_peer_can_make_end_the_run() -> None:
    with swarm(steps=2) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        Wrong(found.peers[1], not_finite)
        with pytest.raises(
            WhaleError, match=r"stage 1 is not finite at .*rate.*another peer"
        ):
            found.run()
        # They are told, with the reason, and do not wait for ever.
        for peer in found.peers:
            assert peer.wait(300) and peer.failed
            assert "the run has failed: step 0" in peer.over


def test_a_peer_that_alone_serves_its_stage_is_replaced_by_one_that_waits() -> None:
    """What it makes is not finite, and what another makes there is."""
    with swarm(steps=3, spare_seconds=0.1, snapshot_every=1) as found:
        for stage in (0, 1, 2, 0):
            found.join(stage)
        bad = found.peers[1]
        Wrong(bad, not_finite)
        assert same(found.run(), jobs.losses(3))
        refused = [told for kind, told in found.told if kind == "refused"]
        assert [told["peer"] for told in refused] == [bad.name]
        assert "moved" in [kind for kind, _ in found.told]


def test_numbers_that_several_peers_make_alike_end_the_run() -> None:
    with swarm(steps=3, spare_seconds=0.1) as found:
        for stage in (0, 1, 2, 1):
            found.join(stage)
        for peer in (found.peers[1], found.peers[3]):
            Wrong(peer, not_finite)
        with pytest.raises(WhaleError, match=r"is not finite wherever it is computed"):
            found.run()


def test_a_peer_with_a_mate_that_makes_nothing_finite_is_left_alone() -> None:
    with swarm(steps=30) as found:
        for stage in (0, 1, 2):
            found.join(stage)
        bad = found.join(1)
        Wrong(bad, not_finite)
        assert same(found.run(), jobs.losses(30))
        refused = [told["why"] for kind, told in found.told if kind == "refused"]
        # Only what it was asked for before the first answer of it was looked at.
        assert 0 < len(refused) <= found.cut.count


def huge(found: BackwardResult) -> BackwardResult:
    gradients = tuple(np.full_like(x, 3e38) for x in found.gradients)
    return BackwardResult(sums=found.sums, returns=found.returns, gradients=gradients)


def test_sums_that_overflow_are_neither_applied_nor_kept() -> None:
    kept: list[int] = []
    more = {"on_snapshot": lambda shot: kept.append(shot.step)}
    with swarm(steps=2, snapshot_every=1, more=more) as found:
        for stage in (0, 1, 1, 2):
            found.join(stage)
        for peer in found.peers[1:3]:
            Wrong(peer, huge)
        with pytest.raises(
            WhaleError,
            match=r"step 0, stage 1: .*the sum of the gradients.*not applied",
        ):
            found.run()
        assert not kept and found.serving.trainer.step == 0


def cut_off(peer: Peer, *kinds: str) -> None:
    """It gets no answer to these questions."""
    ask = peer._caller.ask

    def asks(address: Any, question: Any, **more: Any) -> Message:
        if question.kind in kinds:
            raise UnreachableProcessError(
                f"{address[0]}:{address[1]}: No route to host", late=False
            )
        return ask(address, question, **more)

    peer._caller.ask = asks  # type: ignore[method-assign]


def test_a_peer_that_others_do_not_reach_is_told_when_it_joins() -> None:
    with swarm(steps=1) as found:
        first = found.join(0)
        newcomer = Peer(found.cut, KEY, found.serving.address)
        cut_off(newcomer, "ping")
        with pytest.raises(
            WhaleError, match=rf"does not reach {first.name} .*No route.*give --host"
        ):
            newcomer.start()
        newcomer.close()
        cut_off(first, "ping")
        newcomer = Peer(found.cut, KEY, found.serving.address)
        with pytest.raises(
            WhaleError, match=rf"{first.name} does not reach it \(.*No route"
        ):
            newcomer.start()
        newcomer.close()
        # A peer that is gone says nothing of others.
        first.close()
        other = found.join(1)
        assert other.worker.stage is not None
        assert "note" not in found.kinds()


def questions() -> list[tuple[str, dict[str, Any]]]:
    """Of every kind, with values that are none."""
    values = [
        None,
        -7,
        1 << 62,
        "x",
        "",
        [],
        {},
        [1],
        ["a", 0],
        1.5,
        float("nan"),
        True,
    ]
    draw = random.Random(0)
    found = []
    for kind, one in SWARM.kinds.items():
        if kind == "stop" or not issubclass(one, Question):
            continue
        for _ in range(4):
            names = one.__struct_fields__
            found.append((kind, {name: draw.choice(values) for name in names}))
    return found


def test_questions_that_are_none_are_not_answered() -> None:
    answers = Messages[Any](Declined, *SWARM.kinds.values())
    with swarm(steps=1) as found:
        peer = found.join(0)
        for address in (found.serving.address, peer._service.address):
            for kind, fields in questions():
                channel = dial(address, KEY, most_bytes=DATA_BYTES)
                try:
                    channel.send(Loose({"kind": kind, **fields}))  # type: ignore[arg-type]
                    answer = channel.receive(answers, seconds=60)
                except WireError:
                    continue  # It ended the connection.
                finally:
                    channel.close()
                assert answer.kind in ("refused", "pong", "shown", "terms")
        caller = Caller(KEY)
        assert caller.ask(peer._service.address, Ping(), seconds=60).name == peer.name
        caller.close()


def fuzzed(address: tuple[str, int], count: int) -> None:
    """Send bytes that are no frames."""
    draw = random.Random(1)
    for _ in range(count):
        link = socket.create_connection(address, timeout=60)
        data = draw.randbytes(draw.choice((0, 1, 19, 51, 83, 200, 1000)))
        if draw.random() < 0.5:
            data = b"\x16\x03\x01\x02\x00" + data
        try:
            link.sendall(data)
        except OSError:
            pass  # It was ended meanwhile, which is right.
        link.close()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_bytes_that_are_no_frames_stop_nothing(count: int) -> None:
    with swarm(steps=1) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        fuzzed(found.serving.address, count // 2)
        fuzzed(found.peers[0]._service.address, count // 2)
        assert same(found.run(), jobs.losses(1))


def test_frames_over_the_limit_take_no_memory() -> None:
    with swarm(steps=1) as found:
        channel = dial(found.serving.address, KEY, most_bytes=1 << 62)
        try:
            push(channel, _HEADER.pack(1 << 20, 1 << 40) + bytes(32))
            with pytest.raises(WireError):
                channel.receive(SWARM, seconds=60)
        finally:
            channel.close()


def test_nothing_of_a_swarm_is_unpickled() -> None:
    folders = [
        Path(*room.__path__) for room in (whalejax.swarm, whalejax.swarm_runtime)
    ]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert {"ledger.py", "tensor_codec.py"} <= {path.name for path in files}
    for path in files:
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        } | {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        assert not names & {"pickle", "cloudpickle", "marshal", "shelve"}, path


def test_other_initial_values_are_other_facts() -> None:
    def other(key: Any) -> Any:
        return {name: 3 * value for name, value in jobs.make_model(key).items()}

    job = dataclasses.replace(jobs.make(), make_model=other)
    facts = StagedJob(job, stages=jobs.STAGES, micro_batches=jobs.COUNT).facts()
    own = jobs.cut().facts()
    assert [name for name in own if own[name] != facts[name]] == ["initial values"]


def test_what_a_swarm_cannot_train_is_said() -> None:
    def tied(model: Any, batch: Any) -> Any:
        hidden = batch["x"]
        for name in ("w0", "w1", "w2", "w3", "w0"):
            hidden = jnp.tanh(hidden @ model[name])
        return jnp.mean((hidden - batch["y"]) ** 2)

    job = dataclasses.replace(jobs.make(), loss_fn=tied)
    with pytest.raises(PlanError, match=r"w0 is read by stages 0, 2.*tied_embedding"):
        StagedJob(job, stages=3, micro_batches=2)

    def scanned(model: Any, batch: Any) -> Any:
        layers = jnp.stack([model[f"w{i}"] for i in range(jobs.DEPTH)])
        hidden, _ = jax.lax.scan(
            lambda h, w: (jnp.tanh(h @ w), None), batch["x"], layers
        )
        return jnp.mean((hidden - batch["y"]) ** 2)

    job = dataclasses.replace(jobs.make(), loss_fn=scanned)
    with pytest.raises(PlanError):
        StagedJob(job, stages=3, micro_batches=2)


def test_a_batch_unlike_the_planned_one_is_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def longer(step: int, size: int) -> dict[str, np.ndarray]:
        return jobs.batch(step, size + step)

    cut = jobs.cut()
    monkeypatch.setattr(cut, "job", dataclasses.replace(cut.job, batch=longer))
    monkeypatch.setattr(cut, "_batches", {})
    assert len(cut.micro_batch(0, 0)[0]) == jobs.SIZE // jobs.COUNT
    message = r"the batch of step 2 does not match the plan: 3 problems"
    with pytest.raises(PlanError, match=message):
        cut.micro_batch(1, 0)


def test_a_stage_whose_messages_are_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = jobs.cut()
    assert not cut._too_large(0)
    monkeypatch.setattr("whalejax.swarm_runtime.staged_job.MOST_ARRAY_BYTES", 100)
    monkeypatch.setattr("whalejax.swarm_runtime.staged_job.MOST_ARRAYS", 2)
    border, half, count = cut._too_large(0)
    assert "stage 0 hands on" in border and "micro-batches" in border
    assert "sums gradients in parts of" in half and "more stages" in half
    assert "sends 3 parameters at once" in count and "at most 2 arrays" in count


def test_a_stage_is_compiled_once_for_all_peers_of_a_process() -> None:
    cut = jobs.cut()
    with swarm(steps=1) as found:
        one, other = found.join(0), found.join(0)
        assert one.worker.stage is other.worker.stage
        assert isinstance(cut.ready[0], StagePrograms)


def test_more_stages_than_parts_are_refused_with_the_number_of_parts() -> None:
    """Without the advice on scans, which swarms do not divide."""
    with pytest.raises(
        PlanError, match=r"^stage is 20, .* at most 6 .* Use at most 6$"
    ):
        StagedJob(jobs.make(), stages=20, micro_batches=2)
