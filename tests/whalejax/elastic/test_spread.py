"""One model over all processes: planned again for those that are there."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.elastic import job as example
from tests.whalejax.elastic.runs import Run
from tests.whalejax.elastic.test_restarting import Scripts
from tests.whalejax.messages import received
from whalejax.elastic import sharded_member
from whalejax.elastic.member import Training
from whalejax.elastic.mesh_sizes import mesh_of
from whalejax.elastic.sharded_member import SpreadMember
from whalejax.elastic.sharded_programs import SpreadPrograms
from whalejax.elastic.supervisor.run_folder import COMPILED
from whalejax.journals.journal import FOLDER
from whalejax.membership.elastic_run import AT_STEPS
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan_errors import PlanError
from whalejax.wire.run_messages import Prepared, Report, Unfit


pytestmark = pytest.mark.relaxed_promotion

BATCH = 12


def said(there: Scripts, now: float, name: str, kind: str, **fields: Any) -> None:
    there.membership.heard(now, name, received(kind, fields))
    there.do(now)


def commit(there: Scripts, now: float, step: int) -> None:
    generation = there.membership.generation
    fields = {"generation": generation, "step": step, "loss": 1.0, "seconds": 0.0}
    said(there, now, there.membership.active[0], "committed", **fields, parts={})


def wait(there: Scripts, now: float) -> None:
    """A second and more, in ticks of the supervisor's."""
    for tick in range(10):
        there.membership.tick(now + 0.15 * tick)
        there.do(now + 0.15 * tick)


def members(least: int, most: int, *, gather_seconds: float = 60.0) -> Scripts:
    return Scripts(least, most, mode=AT_STEPS, gather_seconds=gather_seconds)


def test_others_are_taken_in_at_a_step() -> None:
    there = members(2, 3, gather_seconds=0.5)
    there.join(1.0, "m1", "m2")
    wait(there, 1.0)  # The third one is not waited for any longer.
    assert there.begun == [["m1", "m2"]]
    there.join(3.0, "m3")
    assert not there.kills  # Before its first step a generation is left alone.
    commit(there, 4.0, 1)
    there.membership.tick(4.0)
    there.do(4.0)
    # Both stopped, with their state saved, and all begin anew: m3 is there already.
    assert there.kills == ["m1", "m2"]
    wait(there, 4.0)
    there.join(6.0, "m4", "m5")
    assert sorted(there.begun[1]) == ["m3", "m4", "m5"]
    assert there.membership.failures.exceeded(6.0) == ""


def test_who_is_to_leave_stops_all_at_a_step() -> None:
    there = members(1, 2)
    there.join(1.0, "m1", "m2")
    commit(there, 2.0, 1)
    said(there, 3.0, "m2", "leaving", why="SIGTERM")
    assert there.kills == ["m1", "m2"] and there.end is None
    wait(there, 3.0)
    there.join(5.0, *there.started())
    assert len(there.begun[1]) == 2


def test_a_number_without_a_plan_is_not_used() -> None:
    there = members(1, 3)
    there.join(1.0, "m1", "m2", "m3")
    said(there, 2.0, "m1", "unfit", count=3, why="16 is no multiple of 3")
    said(there, 2.0, "m2", "unfit", count=3, why="16 is no multiple of 3")
    assert sorted(there.kills) == ["m1", "m2", "m3"]
    wait(there, 2.0)
    there.join(4.0, *there.started())
    wait(there, 4.0)
    assert [len(names) for names in there.begun] == [3, 2]
    # The third one waits; it alone changes nothing.
    commit(there, 6.0, 1)
    assert len(there.begun) == 2 and there.membership.phase == "running"
    for count, why in ((1, "no"), (2, "nor that")):
        said(there, 7.0, there.membership.active[0], "unfit", count=count, why=why)
    assert there.end is not None
    assert "there is no plan for 1 to 3 processes: no; nor that" in there.end.text


def test_the_run_ends_at_a_step_with_a_checkpoint() -> None:
    there = members(2, 2)
    there.join(1.0, "m1", "m2")
    commit(there, 2.0, 7)
    there.step = 7
    there.membership.terminate(3.0)
    there.do(3.0)
    assert there.end is not None and there.end.status == 143
    assert there.end.text == "the run was asked to end, after step 7"


def test_a_loss_while_all_stop_starts_the_world_again() -> None:
    there = members(2, 2)
    there.join(1.0, "m1", "m2")
    commit(there, 2.0, 1)
    there.answers = False
    said(there, 3.0, "m2", "leaving", why="SIGTERM")
    there.membership.exited(4.0, "m1", -9, "")
    there.do(4.0)
    assert "m2" in there.kills and there.membership.phase == "gathering"


def test_sizes_of_a_mesh_follow_the_devices() -> None:
    assert mesh_of(lambda n: {"tensor": n}, 3) == {"tensor": 3}
    with pytest.raises(PlanError, match="make 4, and there are 3 devices, not as many"):
        mesh_of({"data": 2, "tensor": 2}, 3)
    with pytest.raises(PlanError, match="no multiple of that.*give -1"):
        mesh_of({"fsdp": -1, "tensor": 2}, 3)
    with pytest.raises(PlanError, match=r"mesh gave \{'data': 0\} for 3 devices"):
        mesh_of(lambda n: {"data": 0}, 3)
    for bad in ({"fsdp": -1, "data": -1}, {"fsdp": 0}, 3, "fsdp"):
        with pytest.raises(WhaleError, match="mesh is"):
            wh.train_elastic(example.make(), steps=1, mesh=bad)  # type: ignore[arg-type]


def test_one_process_alone_goes_on_under_another_mesh(tmp_path: Path) -> None:
    """Two processes would save what eight devices restore."""
    losses = {}
    for steps, mesh in ((2, {"fsdp": -1}), (4, {"data": 4, "tensor": 2})):
        for state, metrics in wh.train_elastic(
            example.make(), steps=steps, save=tmp_path, save_every=1, keep=2, mesh=mesh
        ):
            losses[int(state.step)] = float(metrics["loss"])
            assert (metrics["generation"], metrics["goodput"]) == (0, 1.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    known = reference(4, batch=example.SIZE)
    np.testing.assert_allclose([losses[n] for n in (1, 2, 3, 4)], known, rtol=1e-6)


def reference(steps: int, *, batch: int, micro_batches: int = 1) -> list[float]:
    """Losses of one device."""
    job, key = example.make(), jax.random.key(0)
    model = jax.eval_shape(job.make_model, key)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0, batch),
        optimizer=job.optimizer,
        cluster="cpu:1",
        num_micro_batches=micro_batches,
    )
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=jax.devices()[:1]
    )
    state, losses = step.init(job.make_model, rng=key), []
    for number in range(steps):
        state, metrics = step(state, job.batch_at(number, batch))
        losses.append(float(metrics["loss"]))
    return losses


class SpreadRun(Run):
    """A run of ``spread_script``, or of another script with its options."""

    module = "tests.whalejax.elastic.spread_script"

    def __init__(self, folder: Path, mesh: str, *, seats: int, **options: Any) -> None:
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir()
        self.seats(seats)
        given = {"mesh": mesh, "out": str(self.out), "save": str(folder / "save")}
        words = json.dumps({**given, "pause": 0.1, "save_every": 2, **options})
        self.given = {
            "command": [sys.executable, "-m", self.module, words],
            "folder": str(folder),
            "settings": {
                "least": 1,
                "most": seats,
                "lease_seconds": 30.0,
                "gather_seconds": 12.0,
            },
        }
        self.start()

    def seats(self, number: int) -> None:
        draft = self.out / "draft"
        draft.write_text(str(number))
        draft.replace(self.out / "seats")

    def until_steps_of(self, count: int) -> None:
        """Wait until a generation of so many has done two steps."""

        def done() -> bool:
            newest = max((s["generation"] for s in self.samples()), default=0)
            found = [s for s in self.samples() if s["generation"] == newest]
            return len({s["step"] for s in found if s["count"] == count}) >= 2

        self.until(done)

    def shrink(self, seats: int, count: int) -> None:
        """Let fewer in, kill one, and wait for a generation of so many."""
        self.seats(seats)
        self.kill(0)
        self.until_steps_of(count)


def to_its_end(run: SpreadRun, steps: int) -> list[int]:
    """Let a run end, to the losses of one device; its numbers of processes."""
    assert run.wait() == 0, run.told()
    found: dict[int, set[float]] = {}
    for line in run.samples():
        found.setdefault(line["step"], set()).add(line["loss"])
    options = json.loads(run.given["command"][-1])
    known = reference(steps, batch=BATCH, micro_batches=options["micro_batches"] or 1)
    assert sorted(found) == list(range(1, steps + 1))
    for step, losses in found.items():
        for loss in losses:
            assert loss == pytest.approx(known[step - 1], rel=1e-6)
    return [len(event["members"]) for event in run.events("begun")]


def in_order(wanted: list[int], counts: list[int]) -> bool:
    """Whether these numbers came in this order; on a busy machine others come too,
    where one that starts is not waited for and is taken in later."""
    rest = iter(counts)
    return all(number in rest for number in wanted)


def within(
    folder: Path, mesh: str, work: Callable[[SpreadRun], None], **more: Any
) -> tuple[list[int], list[dict[str, Any]]]:
    """Numbers of processes of a run that is disturbed by ``work``, and its journal."""
    run = SpreadRun(folder, mesh, **more)
    try:
        work(run)
        return to_its_end(run, more["steps"]), run.events()
    finally:
        run.end()


@pytest.mark.full
def test_fsdp_over_four_three_two_and_four_processes(tmp_path: Path) -> None:
    def work(run: SpreadRun) -> None:
        run.until_steps_of(4)
        run.shrink(3, 3)
        run.shrink(2, 2)
        run.seats(4)
        run.until_steps_of(4)

    counts, events = within(
        tmp_path, "fsdp", work, seats=4, steps=200, micro_batches=None
    )
    assert in_order([4, 3, 2, 4], counts)
    # Nothing is done again where others come: the newest state was saved before.
    recovered = [e["step"] for e in events if e["event"] == "recovered"]
    saved = [e["step"] for e in events if e["event"] == "saved"]
    assert recovered[-1] in saved and recovered[-1] > recovered[-2]


@pytest.mark.full
def test_three_processes_whose_mesh_does_not_divide(tmp_path: Path) -> None:
    def work(run: SpreadRun) -> None:
        run.until_steps_of(4)
        run.shrink(3, 2)

    counts, events = within(
        tmp_path, "tensor", work, seats=4, steps=60, micro_batches=None
    )
    assert counts[0] == 4 and 2 in counts and 3 not in counts[1:]
    assert any(e["event"] == "unfit" and e["count"] == 3 for e in events)


@pytest.mark.full
def test_stages_over_two_one_and_two_processes(tmp_path: Path) -> None:
    def work(run: SpreadRun) -> None:
        run.until_steps_of(2)
        run.shrink(1, 1)
        run.seats(2)
        run.until_steps_of(2)

    counts, _ = within(tmp_path, "stage", work, seats=2, steps=120, micro_batches=4)
    assert in_order([2, 1, 2], counts)


@pytest.mark.full
def test_who_is_left_alone_has_its_step_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run has a cache of its own.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def steps(run: SpreadRun) -> list[str]:
        """Programs of a step in the cache."""
        folder = run.folder / FOLDER / COMPILED
        return sorted(x.name for x in folder.glob("jit__advance-*-cache"))

    known: list[list[str]] = []

    def work(run: SpreadRun) -> None:
        run.until_steps_of(2)
        run.until(lambda: bool(run.events("compiled_ahead")))
        known.append(steps(run))
        run.shrink(1, 1)
        known.append(steps(run))

    _, events = within(tmp_path, "fsdp", work, seats=2, steps=200, micro_batches=None)
    found = next(e for e in events if e["event"] == "compiled_ahead")
    assert found["count"] == 1 and found["seconds"] > 0
    assert len(known[0]) == 2 and known[1] == known[0]


def test_steps_of_fewer_devices_are_compiled_and_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = SpreadPrograms(
        example.make(),
        mesh={"fsdp": -1},
        batch=16,
        micro_batches=None,
        precision="f32",
        seed=0,
    )
    monkeypatch.setattr(example.wh.Job, "batch_at", None)  # Shapes are enough.
    half = programs.plan.what_if(cluster="cpu:4", mesh={"fsdp": 4})
    assert programs.compile_for(half)
    gpus = programs.plan.what_if(cluster="h100:4", mesh={"fsdp": 4})
    assert not programs.compile_for(gpus)
    # As if this process had fewer of them: others would not find what it compiles.
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert not programs.compile_for(half)


@pytest.mark.full
def test_a_notice_loses_no_step(tmp_path: Path) -> None:
    def work(run: SpreadRun) -> None:
        run.until_steps_of(2)
        os.kill(run.members()[next(iter(run.members()))], signal.SIGTERM)
        run.until(lambda: len(run.events("recovered")) == 2)

    _, events = within(tmp_path, "fsdp", work, seats=2, steps=60, micro_batches=None)
    assert not [e for e in events if e["event"] == "lost"]


def test_a_notice_before_the_first_step_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A supervisor lets a generation do a step before it asks it to stop."""
    posted: list[Report] = []
    stopped: list[int] = []
    control = SimpleNamespace(post=posted.append, step=0, generation=1, name="m1")
    training = Training(steps=9, save=None, save_every=1, keep=1)
    member = SpreadMember(lambda: None, training, {}, supervised=True)  # type: ignore[arg-type,return-value]
    member._control = control  # type: ignore[assignment]
    member._programs = SimpleNamespace(count=1)  # type: ignore[assignment]
    monkeypatch.setattr(sharded_member, "told_by_all", lambda mine, what: [mine])
    monkeypatch.setattr(member, "_stop", lambda state, done: stopped.append(done))
    member._leave()
    member._agree(None, 4)  # type: ignore[arg-type]
    assert [type(report).__name__ for report in posted] == ["Leaving"]
    assert not stopped
    member._committed(5, 1.0)
    member._agree(None, 5)  # type: ignore[arg-type]
    assert stopped == [5]


def test_a_job_that_has_no_plan_from_the_first_step_on_is_refused() -> None:
    there = members(1, 2)
    there.join(1.0, "m1", "m2")
    for count in (1, 2):
        said(there, 2.0, "m1", "unfit", count=count, why="it compares samples")
    assert there.end is not None and there.end.status == 2
    assert there.end.text == (
        "there is no plan for 1 to 2 processes: it compares samples"
    )


def test_a_process_that_stopped_ends_where_its_supervisor_does_not_come_back() -> None:
    class Gone:
        def post(self, report: Report) -> None:
            assert isinstance(report, Prepared | Unfit)

        def check(self) -> None:
            raise WhaleError("the supervisor is gone")

    def none() -> SpreadPrograms:
        raise PlanError("there is none")

    training = Training(steps=1, save=None, save_every=1, keep=1)
    member = SpreadMember(none, training, {}, supervised=True)
    member._control, member._asked = Gone(), 2  # type: ignore[assignment]
    with pytest.raises(WhaleError, match="the supervisor is gone"):
        member._stop(None, 0)  # type: ignore[arg-type]
    with pytest.raises(WhaleError, match="the supervisor is gone"):
        member._plan()
