"""Members of one machine have GPUs of their own, and one that replaces a lost one has
those that it had. The GPUs are names only."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from whalejax.elastic.agents.agent import Agent, AgentOptions
from whalejax.elastic.supervisor.event_messages import event_message
from whalejax.elastic.supervisor.supervisor import Supervised, Supervisor
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership.events import Started, WriteEvent
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.processes import local_gpus
from whalejax.processes.local_gpus import VISIBLE, SlotGpus


SECONDS = 120.0

WRITES = f"""
import os, time
from pathlib import Path
draft = Path(os.environ["OUT"]) / f"draft{{os.getpid()}}"
draft.write_text(os.environ["{VISIBLE}"])
draft.rename(draft.with_name(str(os.getpid())))
time.sleep(600)
"""
"""Tells what it sees, under its number."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpus, "_has_plugin", lambda: True)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_who_replaces_a_lost_member_gets_its_gpus(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run = Supervised(
        command=(sys.executable, "-c", WRITES),
        folder=tmp_path / "run",
        settings=SupervisorSettings(least=1, most=2, spares=1),
        environment={
            "OUT": str(out),
            VISIBLE: "4,5,6,7,8,9",
            "JAX_PLATFORMS": "cuda",
        },
        exit_seconds=5.0,
    )
    supervisor = Supervisor(run)
    thread = threading.Thread(target=supervisor.run)
    thread.start()

    def seen() -> dict[int, str]:
        return {int(x.name): x.read_text() for x in out.iterdir() if x.name.isdigit()}

    try:
        until(lambda: len(seen()) == 3)
        first = seen()
        assert sorted(first.values()) == ["4,5", "6,7", "8,9"]
        lost = next(pid for pid, gpus in first.items() if gpus == "6,7")
        os.kill(lost, signal.SIGKILL)
        until(lambda: len(seen()) == 4)
        (new,) = seen().keys() - first.keys()
        assert seen()[new] == "6,7"
    finally:
        supervisor._terminated = True
        thread.join(60)
    assert not thread.is_alive()


def test_gpus_are_another_s_until_its_process_has_ended(tmp_path: Path) -> None:
    run = Supervised(
        command=("true",),
        folder=tmp_path,
        settings=SupervisorSettings(least=1, most=2),
        environment={VISIBLE: "0,1", "JAX_PLATFORMS": "cuda"},
    )
    supervisor = Supervisor(run)
    assert supervisor._gpus.gpus == ("0", "1")

    class Held:
        names: tuple[str, ...] = ("m1",)

    supervisor._processes = Held()  # type: ignore[assignment]
    supervisor._take(0.0, Started(name="m1", slot=1, pid=7))
    told = supervisor._effects
    told.clear()
    for now in (0.0, 29.0):
        assert supervisor._is_taken(now, 1) and not supervisor._is_taken(now, 0)
    assert told == []
    for now in (30.0, 31.0, 300.0):
        assert supervisor._is_taken(now, 1)
    (event,) = told
    assert isinstance(event, WriteEvent) and event.event == "slot_held"
    assert (event.fields["name"], event.fields["pid"]) == ("m1", 7)
    assert "process 7 (m1) keeps its GPUs" in event_message(event.event, event.fields)
    Held.names = ()
    assert not supervisor._is_taken(301.0, 1)
    supervisor._held.close()


def test_a_supervisor_goes_on_with_the_gpus_of_its_run() -> None:
    """Whatever it is asked for now: its members have theirs."""
    environment = {VISIBLE: "4,5,6,7", "JAX_PLATFORMS": "cuda"}
    opened = SlotGpus(environment, 2).journal_fields()
    for asked in (1, 4):
        again = SlotGpus({**environment, VISIBLE: "0"}, asked)
        again.go_on(opened)
        assert [again.of(slot)[VISIBLE] for slot in range(2)] == ["4,5", "6,7"]
        with pytest.raises(WhaleError, match="divided among 2 processes"):
            again.of(2)
    old = SlotGpus(environment, 4)
    old.go_on({})  # Of a journal that tells nothing of them.
    assert old.of(3) == {VISIBLE: "7"}


def test_more_processes_than_a_run_began_with_get_no_gpus(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "run" / FOLDER
    out.mkdir()
    folder.mkdir(parents=True)
    lines = journal.JournalLines(folder / journal.EVENTS, durable=True)
    gpus = {"gpus": ["4", "5", "6", "7"], "places": 2}
    lines.write("opened", {"host": "127.0.0.1", "port": 0, **gpus})
    lines.close()
    run = Supervised(
        command=(sys.executable, "-c", WRITES),
        folder=tmp_path / "run",
        settings=SupervisorSettings(least=1, most=3),
        environment={"OUT": str(out), VISIBLE: "4,5,6,7", "JAX_PLATFORMS": "cuda"},
        exit_seconds=5.0,
        again=True,
    )
    supervisor = Supervisor(run)
    thread = threading.Thread(target=supervisor.run)
    thread.start()

    def seen() -> list[str]:
        return sorted(x.read_text() for x in out.iterdir() if x.name.isdigit())

    try:
        until(lambda: len(seen()) == 2)
        assert seen() == ["4,5", "6,7"]
    finally:
        supervisor._terminated = True
        thread.join(60)
    assert not thread.is_alive()
    events = journal.read(folder / journal.EVENTS)
    (refused,) = [e for e in events if e["event"] == "not_started"]
    assert refused["slot"] == 2 and "among 2 processes" in refused["why"]


def options(folder: Path, processes: int) -> AgentOptions:
    return AgentOptions(
        supervisor="127.0.0.1:1",
        key=folder / "key",
        processes=processes,
        name="here",
        logs=folder,
    )


def test_an_agent_gives_each_process_gpus_that_no_other_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv(VISIBLE, "3,5,7,9")
    agent = Agent(options(tmp_path, 2))
    assert agent._own_gpus("m1") == {VISIBLE: "3,5"}
    assert agent._own_gpus("m2") == {VISIBLE: "7,9"}
    with pytest.raises(WhaleError, match="it holds 2 of 2 processes"):
        agent._own_gpus("m3")
    del agent._places["m1"]
    assert agent._own_gpus("m3") == {VISIBLE: "3,5"}
    with pytest.raises(WhaleError, match="--processes of this agent: 5 processes on"):
        Agent(options(tmp_path, 5))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert Agent(options(tmp_path, 5))._own_gpus("m1") == {}
