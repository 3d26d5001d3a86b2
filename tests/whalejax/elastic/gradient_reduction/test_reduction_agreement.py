"""One way of adding up for a whole run: asked, decided once, kept by its supervisor."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.elastic import job as example
from tests.whalejax.elastic.driven import Driven
from tests.whalejax.elastic.gradient_reduction import priced_script
from tests.whalejax.elastic.runs import Run, running
from tests.whalejax.elastic.test_runs import audit, expected_losses
from tests.whalejax.elastic.test_supervisor import Live, live
from whalejax.distributed.launch_env import KEY_FILE
from whalejax.elastic import replica_programs, supervisor_client
from whalejax.elastic.environment import RUN, SUPERVISOR
from whalejax.elastic.gradient_reduction import reduction_agreement, reduction_cost
from whalejax.elastic.gradient_reduction.reduction_agreement import Arbiter, agreed
from whalejax.elastic.gradient_reduction.reduction_cost import ReductionProcesses
from whalejax.elastic.replica_programs import planned_replica
from whalejax.elastic.supervisor.supervisor import KEY
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.journals.reduction_choice import (
    COLLECTIVES,
    MESSAGES,
    GradientReduction,
    Way,
)
from whalejax.journals.status import show, status_of
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.wire.keys import make_key
from whalejax.wire.messages import WireError


pytestmark = pytest.mark.relaxed_promotion

ASKED = GradientReduction(by=COLLECTIVES, why="mesh='auto' was given")


def arbiter(there: Live) -> Arbiter:
    return Arbiter(there.where, str(there.folder / FOLDER / KEY))


def not_yet() -> bool:
    return False


def no_room(processes: ReductionProcesses) -> None:
    return None


def test_the_first_answer_holds_for_all_and_is_kept(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        one = arbiter(there)
        known = one.ask()
        assert (known.by, known.hosts) == ("", 1)
        assert known.processes == there.supervisor._run.settings.most
        first = GradientReduction(by=MESSAGES, why="cheaper")
        assert one.decide(first) == first
        assert arbiter(there).decide(ASKED) == first
        assert arbiter(there).ask().by == MESSAGES
        (event,) = there.events("adding_up")
        assert (event["by"], event["why"]) == (MESSAGES, "cheaper")
    events = journal.read(tmp_path / FOLDER / journal.EVENTS)
    again = Driven(SupervisorSettings(least=1, most=2))
    again.go_on(0.0, events, {})
    assert again.add_up(ASKED.by, ASKED.why) == (MESSAGES, "cheaper")


def test_hosts_are_those_of_agents_that_are_there_or_awaited() -> None:
    there = Driven(SupervisorSettings(least=1, most=4))
    assert there.hosts() == 1
    there.placed = True
    there.agent_came(0.0, "a", "10.0.0.1", 2)
    assert there.hosts() == 2  # One more is needed for four processes.
    there.awaited = {"b", "c"}
    assert there.hosts() == 3
    there.agent_came(0.0, "d", "10.0.0.4", 8)
    assert there.hosts() == 4


def test_the_price_decides_and_who_comes_later_prices_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction_agreement, "own_devices", lambda: cluster("h100:1"))
    priced: list[ReductionProcesses] = []

    def replica(processes: ReductionProcesses) -> None:
        priced.append(processes)

    with live(tmp_path) as there:
        for _ in range(2):
            found = agreed(arbiter(there), None, replica, mtbf=3600.0, too_late=not_yet)
            assert found.by == COLLECTIVES and "(1 H100)" in found.why
    assert [p.count for p in priced] == [there.supervisor._run.settings.most]


def test_a_batch_that_starts_the_devices_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction_agreement, "own_devices", lambda: cluster("h100:1"))
    started: list[bool] = []
    settings = {"batch": None, "micro_batches": 8, "precision": "f32"}
    plan = planned_replica(example.make(), cluster("h100:1"), **settings).plan

    def replica(processes: ReductionProcesses) -> Plan:
        started.append(True)
        return plan

    def no_room_either(processes: ReductionProcesses) -> None:
        started.append(True)

    monkeypatch.setattr(
        reduction_cost, "MESSAGE_SECONDS", 1.0
    )  # Collectives are cheaper.
    options: dict[str, Any] = {"mtbf": 3600.0, "too_late": lambda: bool(started)}
    with live(tmp_path / "a") as there:
        found = agreed(arbiter(there), None, replica, **options)
        assert found.by == MESSAGES and "by the job's first batch" in found.why
    started.clear()
    with live(tmp_path / "b") as there:
        with pytest.raises(WhaleError, match="does not fit.*by the job's first batch"):
            agreed(arbiter(there), None, no_room_either, **options)


def test_a_batch_of_jax_arrays_is_priced_without_them() -> None:
    made: list[bool] = []

    def batch(step: int, size: int) -> dict[str, Any]:
        drawn = jax.random.normal(jax.random.key(step), (size, example.WIDTH))
        made.append(isinstance(drawn, jax.core.Tracer))
        return {**example.batch(step, size), "x": drawn}

    def untraceable(step: int, size: int) -> dict[str, Any]:
        return {k: np.asarray(x) for k, x in batch(step, size).items()}

    settings = {"batch": None, "micro_batches": 8, "precision": "f32"}
    for function, wanted in ((batch, [True]), (untraceable, [True, False])):
        job = dataclasses.replace(example.make(), batch=function)
        found = planned_replica(job, cluster("h100:1"), **settings, by_shapes=True)
        assert made == wanted
        assert found.plan.batch[0].shape[0] == example.SIZE
        made.clear()


def test_a_plan_for_another_platform_is_made_anew() -> None:
    settings: dict[str, Any] = {"batch": None, "micro_batches": 8, "precision": "f32"}
    for name, kept in (("h100:1", False), ("cpu:1", True)):
        planned = planned_replica(example.make(), cluster(name), **settings)
        found = replica_programs.ReplicaPrograms(
            example.make(), **settings, seed=0, planned=planned
        )
        assert found.step.plan.cluster.platform == "cpu"
        assert (found.step.plan is planned.plan) == kept


def test_what_the_planner_refuses_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tmp_path) as there:
        monkeypatch.setenv(SUPERVISOR, there.where)
        monkeypatch.setenv(KEY_FILE, str(there.folder / FOLDER / KEY))
        with pytest.raises(WhaleError, match="do not divide into 5 micro-batches"):
            wh.train_elastic(example.make(), steps=1, num_micro_batches=5)

        def refuses(*_: Any, **__: Any) -> None:
            raise PlanError("no 8 micro-batches")

        monkeypatch.setattr(replica_programs, "planned_replica", refuses)
        with pytest.raises(PlanError, match="^no 8 micro-batches$"):
            wh.train_elastic(example.make(), steps=1)
        assert there.events("adding_up") == []


def test_who_wants_it_otherwise_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction_agreement, "own_devices", lambda: cluster("h100:1"))
    with live(tmp_path) as there:
        options: dict[str, Any] = {"mtbf": 3600.0, "too_late": not_yet}
        assert agreed(arbiter(there), ASKED, no_room, **options) == ASKED
        other = GradientReduction(by=MESSAGES, why="mesh='replicas' was given")
        said = (
            r"reduces gradients by collectives \(mesh='auto' was given\), and this "
            "process was started with mesh='replicas' was given"
        )
        with pytest.raises(WhaleError, match=said):
            agreed(arbiter(there), other, no_room, **options)
        options["too_late"] = lambda: True
        late = "were started before wh.train_elastic.*'replicas'"
        with pytest.raises(WhaleError, match=late):
            agreed(arbiter(there), None, no_room, **options)
        with pytest.raises(WhaleError, match=late):
            agreed(arbiter(there), ASKED, no_room, **options)


def test_a_process_of_an_earlier_run_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tmp_path / "run") as there:
        monkeypatch.setenv(RUN, "of an earlier one")
        with pytest.raises(WhaleError, match="is of an earlier run in the same folder"):
            arbiter(there).decide(ASKED)
        monkeypatch.delenv(RUN)
        assert not arbiter(there).ask().by


def test_nobody_who_answers_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN, raising=False)
    monkeypatch.setattr(supervisor_client, "FIRST_SECONDS", 0.3)
    with live(tmp_path / "run") as there:
        key = str(there.folder / FOLDER / KEY)
        with pytest.raises(WhaleError, match="no supervisor answers at 127.0.0.1:1"):
            Arbiter("127.0.0.1:1", key).ask()
        with pytest.raises(WhaleError, match="WHALEJAX_KEY_FILE is not set"):
            Arbiter(there.where, "")


def test_a_process_of_a_run_asks_as_long_as_a_frozen_supervisor_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_client, "FIRST_SECONDS", 0.0)
    monkeypatch.setenv(RUN, "a run")
    make_key(tmp_path / "key")
    waits: list[float] = []

    def dial(address: Any, key: Any, seconds: float) -> Any:
        waits.append(seconds)
        raise WireError("nobody" if len(waits) < 3 else "the end")

    monkeypatch.setattr(reduction_agreement, "dial", dial)
    monkeypatch.setattr(
        reduction_agreement, "is_hopeless", lambda error: "end" in str(error)
    )
    with pytest.raises(WhaleError):
        Arbiter("127.0.0.1:1", str(tmp_path / "key")).ask()
    assert len(waits) == 3 and min(waits) > 1


def chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> GradientReduction:
    """How a run's gradients were added up, which its status shows."""
    found = status_of(folder)[-1].adding_up
    assert found is not None
    show(folder)
    assert f"reduction   by {found.by}: {found.why[:60]}" in capsys.readouterr().out
    return found


def test_replicas_are_chosen_on_cpus_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, {"steps": 4}, least=2, most=2) as run:
        assert run.wait() == 0, run.told()
        assert audit(run, 4) == pytest.approx(expected_losses(4), rel=1e-6)
        (event,) = run.events("adding_up")
    assert event["by"] == MESSAGES and "the default on CPUs" in event["why"]
    assert "2 processes of 1 CPU" in event["why"]
    assert chosen(tmp_path, capsys).why == event["why"]
    said = (tmp_path / "supervisor.log").read_text()
    assert f"whalejax: gradients are reduced by messages: {event['why']}" in said


def test_processes_whose_price_says_collectives_join_and_train(tmp_path: Path) -> None:
    command = [sys.executable, "-m", priced_script.__name__]
    run = Run(tmp_path, {}, {"least": 2, "most": 2}, command=command)
    try:
        assert run.wait() == 0, run.told()
        (event,) = run.events("adding_up")
        assert event["by"] == COLLECTIVES
        assert "2 processes of 1 H100" in event["why"]
        (begun,) = run.events("begun")
        assert len(begun["members"]) == 2
        losses = {said["step"]: said["loss"] for said in run.commits()}
    finally:
        run.end()
    assert [losses[n + 1] for n in range(priced_script.STEPS)] == pytest.approx(
        priced_script.losses(), rel=1e-6
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "by"), [("replicas", MESSAGES), ("auto", COLLECTIVES)]
)
def test_what_the_user_says_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str, by: Way
) -> None:
    with running(tmp_path, {"steps": 4, "mesh": mesh}, least=2, most=2) as run:
        assert run.wait() == 0, run.told()
        losses = {said["step"]: said["loss"] for said in run.commits()}
    assert [losses[n] for n in (1, 2, 3, 4)] == pytest.approx(
        expected_losses(4), rel=1e-6
    )
    assert chosen(tmp_path, capsys) == GradientReduction(
        by=by,
        why=f"mesh={mesh!r} was given",
    )
