"""What a member computes equals what one device does, whoever adds the parts up."""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.compilations import count_compilations
from tests.whalejax.elastic import job as example
from whalejax.adapters.leaves import is_key
from whalejax.elastic.gradient_reduction.message_all_reduce import _added
from whalejax.elastic.replica_programs import Buffers, ReplicaPrograms
from whalejax.membership.assignment import Node, assign_micro_batches, cover, total
from whalejax.meshes.errors import WhaleError
from whalejax.state.async_checkpoints import Saver
from whalejax.wire.run_messages import Report, State


# Optax promotes the number of a step.
pytestmark = pytest.mark.relaxed_promotion


@pytest.fixture(scope="module")
def programs() -> ReplicaPrograms:
    job = example.make()
    return ReplicaPrograms(job, batch=None, micro_batches=8, precision="f32", seed=3)


def nothing() -> None:
    pass


def sums_by(programs: ReplicaPrograms, state: Any, step: int, members: int) -> Buffers:
    names = [f"m{n}" for n in range(members)]
    parts: dict[Node, Buffers] = {}
    for nodes in assign_micro_batches(names, {}, programs.count).values():
        held: dict[Node, Buffers] = {}
        programs.add_up(state, programs.batch(step), nodes, held, nothing)
        assert sorted(held) == sorted(nodes)
        parts.update(held)
    return total(parts, programs.count, _added)


def test_sums_are_the_same_to_the_bit_with_any_members(
    programs: ReplicaPrograms,
) -> None:
    state = programs.init_state()
    one, *others = (sums_by(programs, state, 0, n) for n in (1, 2, 3, 5))
    for other in others:
        for x, y in zip(one, other, strict=True):
            assert x.tobytes() == y.tobytes()


def test_steps_are_those_of_one_device(programs: ReplicaPrograms) -> None:
    state, other = programs.init_state(), programs.init_state()
    for step in range(3):
        sums = sums_by(programs, state, step, 3)
        state, metrics = programs.finish(state, sums)
        batch = programs.job.batch_at(step, programs.size)
        other, expected = programs.step(other, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
        assert metrics["number"].tolist() == batch["number"].tolist()
    assert int(state.step) == 3 and state.samples == 48
    for x, y in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_what_was_done_before_an_interruption_is_kept(
    programs: ReplicaPrograms,
) -> None:
    state, batch = programs.init_state(), programs.batch(0)
    held: dict[Node, Buffers] = {}
    looks = iter(range(3))

    def look() -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        programs.add_up(state, batch, [(0, 8)], held, look)
    assert sorted(held) == [(0, 2), (2, 3)]
    kept = held[0, 2]
    programs.add_up(state, batch, cover(range(4), 8), held, nothing)
    assert sorted(held) == [(0, 4)] and kept is not None


def test_a_state_goes_to_another_member_to_the_bit(programs: ReplicaPrograms) -> None:
    state = programs.init_state()
    state, _ = programs.finish(state, sums_by(programs, state, 0, 1))
    pieces = iter([*programs.pieces(state)])
    found = programs.assembled(lambda: next(pieces), "m1")
    assert found.samples == 16 and int(found.step) == 1
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        if is_key(x):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    # It is a state like any other: steps take it.
    again, _ = programs.finish(found, sums_by(programs, found, 1, 2))
    assert int(again.step) == 2


def test_a_copy_and_a_state_of_another_compile_nothing_after_the_warm_up() -> None:
    jax.clear_caches()
    job = example.make()
    found = ReplicaPrograms(job, batch=None, micro_batches=8, precision="f32", seed=3)
    with count_compilations() as compiles:
        found.warm_up()
    assert compiles.names
    state = found.init_state()
    with count_compilations() as compiles:
        pieces = iter([*found.pieces(found.copy_state(state))])
        state = found.assembled(lambda: next(pieces), "m1")
        found.finish(state, sums_by(found, state, 0, 2))
    assert not compiles.names


def test_another_state_is_refused(programs: ReplicaPrograms) -> None:
    (piece,) = programs.pieces(programs.init_state())
    piece.arrays[0][3] ^= 1
    with pytest.raises(WhaleError, match="was changed on the way"):
        programs.assembled(lambda: piece, "m1")
    for text in ("", "[]", "{}", '{"sha256": "", "samples": null}'):
        other = State(place=0, count=1, text=text, arrays=piece.arrays)
        with pytest.raises(WhaleError, match="m1 sent a state without its hash"):
            programs.assembled(functools.partial(next, iter([other])), "m1")


def test_facts_tell_another_loss_and_optimizer(programs: ReplicaPrograms) -> None:
    facts = programs.facts()
    assert len(set(facts.values())) > 6 and facts == programs.facts()


def test_a_failed_save_is_told_and_ends_nothing(
    programs: ReplicaPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def tell(report: Report) -> None:
        told.append({"kind": report.kind, **report.fields})

    saver = Saver(programs, tmp_path, every=2, keep=2, tell=tell)
    assert [step for step in range(8) if saver.is_due(step, 7)] == [2, 4, 6, 7]
    state = programs.init_state()
    for step in (2, 4):
        saver.save(state, step)
    saver.wait()
    with monkeypatch.context() as full:

        def fails(path: object, state: object, before: object) -> None:
            raise WhaleError("no space is left on the device")

        full.setattr(programs, "save", fails)
        saver.save(state, 6)
        saver.wait()
    assert [one["kind"] for one in told] == ["saved", "saved", "not_saved"]
    assert told[-1] == {
        "kind": "not_saved",
        "number": 0,
        "step": 6,
        "why": "no space is left on the device",
    }
    assert int(programs.newest(tmp_path).step) == 0  # The state that was saved.
    saver.save(state, 7)
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000004", "step_000007"]
    assert not saver.is_due(7, 7)


def test_a_checkpoint_that_may_not_appear_leaves_nothing(
    programs: ReplicaPrograms, tmp_path: Path
) -> None:
    told: list[str] = []

    def tell(report: Report) -> None:
        told.append(report.fields.get("why", report.kind))

    asked: list[int] = []

    def may_keep(step: int) -> bool:
        asked.append(step)
        return step > 2

    saver = Saver(programs, tmp_path, every=2, keep=2, tell=tell, may_keep=may_keep)
    state = programs.init_state()
    saver.save(state, 2)
    saver.wait()
    assert "this member was given up" in told[0] and not [*tmp_path.iterdir()]
    saver.save(state, 4)
    saver.wait()
    assert told[1:] == ["saved"] and asked == [2, 4]


def test_a_slow_checkpoint_is_not_forgotten(
    programs: ReplicaPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    goes_on, looks = threading.Event(), []

    def tell(report: Report) -> None:
        told.append((report.kind, report.fields["step"]))

    def slow(path: Path, state: object, before: object) -> None:
        goes_on.wait()
        path.mkdir()

    monkeypatch.setattr(programs, "save", slow)
    monkeypatch.setattr("whalejax.state.async_checkpoints.SAVE_SECONDS", 0.2)
    (tmp_path / "step_000001.deleted").mkdir()  # Of one that was killed meanwhile.
    saver = Saver(programs, tmp_path, every=2, keep=2, tell=tell)
    state = programs.init_state()
    saver.save(state, 2)
    assert not saver.is_due(2, 9), "it is being written"
    saver.save(state, 4, lambda: looks.append(1))
    assert told == [("not_saved", 4)] and looks
    goes_on.set()
    monkeypatch.setattr("whalejax.state.async_checkpoints.SAVE_SECONDS", 400.0)
    assert saver.wait() and told[1:] == [("saved", 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def test_damaged_checkpoints_that_are_passed_over_are_told(
    programs: ReplicaPrograms, tmp_path: Path
) -> None:
    told: list[tuple[str, Any]] = []

    def tell(report: Report) -> None:
        fields = report.fields
        why = fields.get("why") or (fields["step"], fields["source"])
        told.append((report.kind, why))

    state = programs.newest(tmp_path, tell)
    assert told == [("recovered", (0, "a new state"))]
    saver = Saver(programs, tmp_path, every=1, keep=9, tell=lambda report: None)
    for step in (1, 2):
        state = dataclasses.replace(state, step=jax.numpy.asarray(step))
        saver.save(state, step)
        saver.wait()
    for file in (tmp_path / "step_000002").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(bytes(file.stat().st_size))
    told.clear()
    assert int(programs.newest(tmp_path, tell).step) == 1
    (note, why), recovered = told
    assert note == "note" and recovered == ("recovered", (1, "step_000001"))
    assert "Going on from step_000001" in why and "step_000002.damaged" in why
