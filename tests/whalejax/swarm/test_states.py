"""Stages without peers, peers that leave, checkpoints: the run goes on where it was."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.whalejax.keys import KEY
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import same, swarm
from whalejax.meshes.errors import WhaleError
from whalejax.state.checkpoint import save
from whalejax.state.folder_lock import FolderLock
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.swarm_run import SwarmRun, SwarmRunPaths
from whalejax.swarm_runtime.trainers.trainer_state import Settings


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 5


def test_a_stage_without_peers_is_waited_for() -> None:
    with swarm(steps=2) as found:
        for stage in (0, 2):
            found.join(stage)

        found.when("waiting", lambda: found.join(1))
        assert same(found.run(), jobs.losses(2))
        assert ("waiting", {"stages": [1], "step": 0}) in found.told
        assert "resumed" in found.kinds()


def test_waiting_has_an_end() -> None:
    with swarm(steps=1, patience_seconds=0.0) as found:
        found.join(0)
        with pytest.raises(
            WhaleError, match=r"no peer serves stage 1, 2 of 3.*--stage"
        ):
            found.run()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [100, 2])
def test_a_lost_stage_goes_back_to_the_snapshot(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the newest one, or to the beginning; all stages, and to the same losses."""
    # Until the lease ends, the stage is waited for, which is no attempt.
    monkeypatch.setattr("whalejax.swarm_runtime.micro_batch_route.MOST_ATTEMPTS", 8)
    with swarm(steps=STEPS, snapshot_every=every, lease_seconds=2.0) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        losses: dict[int, float] = {}
        for step, metrics in found.serving.run():
            losses[step] = float(metrics["loss"])
            if step == 3 and len(found.peers) == jobs.STAGES:
                found.peers[1].close()
                found.when("waiting", lambda: found.join(1))
        assert same([losses[k] for k in sorted(losses)], jobs.losses(STEPS))
        back = [told for kind, told in found.told if kind == "went back"]
        assert [b["step"] for b in back] == [2 if every == 2 else 0]
        assert back[0]["stage"] == 1


def test_a_peer_leaves_in_order() -> None:
    with swarm(steps=STEPS) as found:
        for number in range(4):
            found.join(number % jobs.STAGES)
        losses = []
        for step, metrics in found.serving.run():
            losses.append(float(metrics["loss"]))
            if step == 2:
                found.peers[0].leave()
                while not any(m.leaving for m in found.members()):
                    found.peers[0].wait(0.01)
            if step == 3:
                assert found.peers[0].wait(60) and found.peers[0].over == "left"
        assert same(losses, jobs.losses(STEPS))
        assert "left" in found.kinds() and "lost" not in found.kinds()
        assert found.serving.trainer.counts.recomputed == 0


def test_the_last_of_a_stage_hands_its_state_over() -> None:
    with swarm(steps=STEPS) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        losses = []
        for step, metrics in found.serving.run():
            losses.append(float(metrics["loss"]))
            if step == 2:
                found.peers[2].leave()
                found.join(2)
        assert same(losses, jobs.losses(STEPS))
        assert "went back" not in found.kinds()


def test_a_newcomer_works_in_the_next_step() -> None:
    with swarm(steps=3) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        for step, _ in found.serving.run():
            if step == 1:
                assert found.join().worker.stage is not None
            if step == 2:
                joined = [t for k, t in found.told if k == "joined"][-1]
                assert joined["step"] == 1
                assert found.peers[-1].worker.done > 0


def test_a_newcomer_that_stands_still_stops_nobody() -> None:
    free = threading.Event()

    def hook(point: str, step: int) -> None:
        if point == "downloading":
            free.wait(300)

    with swarm(steps=STEPS, newcomer_seconds=0.01) as found:
        losses = []
        for stage in range(jobs.STAGES):
            found.join(stage)
        for step, metrics in found.serving.run():
            losses.append(float(metrics["loss"]))
            if step == 1:
                found.join(1, hook=hook)
        assert same(losses, jobs.losses(STEPS))
        assert found.peers[-1].worker.step == -1
        free.set()


def run(folder: Path, steps: int, every: int = 2) -> list[float]:
    place = SwarmRunPaths(save=folder, key=folder.parent / "key", save_every=every)
    settings = Settings(steps=steps, snapshot_every=every)
    told: list[str] = []
    found = SwarmRun(
        jobs.cut(), place, settings, lambda kind, **_: told.append(kind), peers=3
    )
    return [float(metrics["loss"]) for _, metrics in found.run()]


def test_a_run_that_cannot_listen_frees_its_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place = SwarmRunPaths(save=tmp_path / "s", key=tmp_path / "key", port=port)
        with pytest.raises(WhaleError, match=f"{port}"):
            SwarmRun(jobs.cut(), place, Settings(steps=1), lambda *_, **__: None)
    with FolderLock(tmp_path / "s"):
        pass


def test_checkpoints_are_those_of_ordinary_plans(tmp_path: Path) -> None:
    """A swarm goes on from its own, an ordinary plan from a swarm's, and back."""
    whole = jobs.losses(STEPS + 1)
    assert same(run(tmp_path / "s", 2), whole[:2])
    assert same(run(tmp_path / "s", 3), whole[2:3])
    step, job = jobs.step(), jobs.make()
    state = step.restore(tmp_path / "s" / "step_000003")
    assert int(state.step) == 3 and state.samples == 3 * jobs.SIZE
    losses = []
    for number in range(3, 5):
        state, metrics = step(state, job.batch_at(number))
        losses.append(float(metrics["loss"]))
    assert same(losses, whole[3:5])
    step.save(tmp_path / "s" / "step_000005", state)
    assert same(run(tmp_path / "s", 6), whole[5:6])


def test_a_full_disk_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whalejax.swarm_runtime.checkpoints.save", full)
    monkeypatch.setattr("whalejax.swarm_runtime.swarm_run.RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("whalejax.journals.journal.os.write", full)
    told: list[tuple[str, dict[str, Any]]] = []
    place = SwarmRunPaths(save=tmp_path / "s", key=tmp_path / "key", save_every=1)
    found = SwarmRun(
        jobs.cut(),
        place,
        Settings(steps=2, snapshot_every=1),
        lambda kind, **more: told.append((kind, more)),
        peers=3,
    )
    losses = [float(metrics["loss"]) for _, metrics in found.run()]
    assert same(losses, jobs.losses(2))
    kinds = [kind for kind, _ in told]
    assert "not_saved" in kinds and "not written" in kinds
    assert any("No space left" in more.get("why", "") for _, more in told)


def test_the_last_checkpoint_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk was full once; a run that goes on from it does nothing more."""
    failures = [OSError(28, "No space left on device")]

    def sometimes(*given: Any, **more: Any) -> None:
        if failures:
            raise failures.pop()
        save(*given, **more)

    monkeypatch.setattr("whalejax.swarm_runtime.checkpoints.save", sometimes)
    monkeypatch.setattr("whalejax.swarm_runtime.swarm_run.RETRY_SECONDS", (0.0, 0.0))
    told: list[str] = []
    found = SwarmRun(
        jobs.cut(),
        SwarmRunPaths(save=tmp_path / "s", key=tmp_path / "key", save_every=5),
        Settings(steps=2, snapshot_every=5),
        lambda kind, **more: told.append(kind),
        peers=3,
    )
    assert len([*found.run()]) == 2
    assert told.count("not_saved") == 1
    assert told.count("saved") == 1
    assert (tmp_path / "s" / "step_000002").is_dir()


def test_a_step_waits_for_a_newcomer_that_takes_longer() -> None:
    def slowly(point: str, step: int) -> None:
        if point == "download":
            threading.Event().wait(1.0)

    with swarm(steps=4, newcomer_seconds=0.0) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        losses = []
        for step, metrics in found.serving.run():
            losses.append(float(metrics["loss"]))
            if step == 1:
                found.join(1, hook=slowly)
        assert same(losses, jobs.losses(4))
        kinds = found.kinds()
        assert kinds.count("joined") == jobs.STAGES + 1
        assert "not synced" not in kinds


def test_a_peer_says_that_it_cannot_listen() -> None:
    with pytest.raises(WhaleError, match=r"host 203\.0\.113\.1.*cannot listen there"):
        Peer(jobs.cut(), KEY, ("127.0.0.1", 9), host="203.0.113.1")


def test_the_state_is_the_whole_models() -> None:
    cut = jobs.cut()
    parts = {
        s: jax.jit(cut.init_function(s))(jax.random.key(0)) for s in range(cut.stages)
    }
    state = cut.full_state(parts)
    own = jobs.step().init(jobs.make_model, rng=jax.random.key(0))
    for one, other in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((own.params, own.opt_state)),
        strict=True,
    ):
        assert np.array_equal(np.asarray(one), np.asarray(other))
