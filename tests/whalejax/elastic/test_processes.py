"""Processes of a supervisor: started once, ended whole, and never those of others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.whalejax.elastic.runs import ROOT, runs
from tests.whalejax.elastic.runs import START as SUPERVISE
from whalejax.distributed.standard_streams import BackgroundLines
from whalejax.elastic import launching
from whalejax.elastic.environment import AT_ONCE, SUPERVISOR_SECONDS
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.elastic.supervisor.supervisor import Supervised, Supervisor
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership import events as ev
from whalejax.membership.events import Event, Tick
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import Processes, _Process, began_at


SLEEPS = ("sleep", "1000")


@contextlib.contextmanager
def started(folder: Path, *command: str) -> Iterator[Processes]:
    with selectors.DefaultSelector() as selector:
        found = Processes(command, {}, folder, selector)
        try:
            yield found
        finally:
            for name in found.names:
                found.take_exit_status(name)


def test_a_process_runs_when_it_was_written_down(tmp_path: Path) -> None:
    with started(tmp_path, "sh", "-c", "cat; echo $$") as found:
        pid, began = found.start("m1")
        assert began_at(pid) == began
        found.release("m1")
        found._selector.select()  # Until it has ended.
        assert found.take_exit_status("m1") == 0
        assert found.log_tail("m1") == f"{pid}\n", "the same process, without input"


def test_a_process_that_was_not_written_down_ends_by_itself(tmp_path: Path) -> None:
    with started(tmp_path, "echo", "it ran") as found:
        found.start("m1")
        os.close(found._held.pop("m1"))  # As by the end of its supervisor.
        assert found._there["m1"].child is not None
        assert found._there["m1"].child.wait() == 1
        assert found.log_tail("m1") == ""


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with started(tmp_path, "no-such-program") as found:
        with pytest.raises(WhaleError, match="no-such-program cannot be started"):
            found.start("m1")


def test_a_group_whose_number_is_used_again_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(SLEEPS, start_new_session=True)
    gone = subprocess.Popen(SLEEPS)
    watched = os.pidfd_open(gone.pid)
    gone.kill()
    gone.wait()
    try:
        with started(tmp_path, *SLEEPS) as found:
            # It had this number, and another process has it now.
            adopted = _Process(pid=other.pid, began="1", watched=watched, child=None)
            found._end_group(adopted)
    finally:
        os.close(watched)
        other.terminate()
    assert other.wait() == -signal.SIGTERM


def supervised(folder: Path, *command: str, **more: Any) -> Supervisor:
    settings = SupervisorSettings(least=1, most=2)
    run = Supervised(command=command, folder=folder, settings=settings, **more)
    return Supervisor(run)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = journal.read(folder / FOLDER / journal.EVENTS)
    return [said for said in found if said["event"] == kind]


def ends_when(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, work: Any
) -> None:
    """Call something in every turn of the loop."""
    take = supervisor._take

    def turn(now: float, event: Event) -> None:
        if isinstance(event, Tick):
            work()
        take(now, event)

    monkeypatch.setattr(supervisor, "_take", turn)


def test_a_system_that_has_no_room_for_a_process_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = Processes.start, [1, 2]

    def full(self: Processes, name: str, own: Mapping[str, str]) -> tuple[int, str]:
        if failures:
            failures.pop()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(self, name, own)

    monkeypatch.setattr(Processes, "start", full)
    supervisor = supervised(tmp_path, *SLEEPS)

    def work() -> None:
        supervisor._terminated = len(events(tmp_path, "started")) == 2

    ends_when(supervisor, monkeypatch, work)
    assert supervisor.run() == 143
    assert [e["why"] for e in events(tmp_path, "not_started")] == [
        "Resource temporarily unavailable"
    ] * 2


def test_an_error_of_the_supervisor_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervised(tmp_path, *SLEEPS)

    def fails() -> None:
        if len(events(tmp_path, "started")) == 2:
            raise RuntimeError("a bug")

    ends_when(supervisor, monkeypatch, fails)
    with pytest.raises(RuntimeError, match="a bug"):
        supervisor.run()
    found = events(tmp_path, "started")
    assert len(found) == 2 and not any(runs(e["pid"], e["began"]) for e in found)


def test_a_reader_that_is_gone_ends_no_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    tell_user("m1 is lost")


def test_who_says_something_does_not_wait_for_a_stream_that_takes_nothing() -> None:
    """As a terminal after Ctrl-S: what was said comes in order when it takes again."""
    goes_on, taken = threading.Event(), list[bytes]()

    def write(line: bytes) -> None:
        assert goes_on.wait(300)
        taken.append(line)

    lines = BackgroundLines(write)
    for number in range(1500):
        lines.put(f"{number}\n")
    assert not taken and not lines.flush(0.1)
    goes_on.set()
    assert lines.flush(300)
    wanted = [f"{number}\n".encode() for number in range(1000)]
    assert taken == [*wanted, b"whalejax: 500 lines more were left out\n"]
    lines.put("more\n")  # As without any of it: it is written when this returns.
    assert taken[-1] == b"more\n"


def test_a_supervisor_goes_on_while_its_terminal_takes_nothing(
    tmp_path: Path,
) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    fcntl.fcntl(write, fcntl.F_SETFL, 0)
    command = ["sh", "-c", "sleep 0.5; exit 3"]
    settings = {"least": 1, "most": 1, "fruitless": 2}
    given = {"command": command, "folder": str(tmp_path), "settings": settings}
    there = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=write,
    )
    os.close(write)
    assert there.wait(300) == 1  # It came to the end of its run, and ended.
    os.close(read)
    assert len(events(tmp_path, "lost")) == 2


# A run that was, in the same folder.


def written(folder: Path, *more: tuple[str, dict[str, Any]]) -> None:
    """The journal of a run whose processes are gone."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    lines = journal.JournalLines(folder / FOLDER / journal.EVENTS, durable=False)
    lines.write("opened", {"host": "127.0.0.1", "port": 0})
    facts = {"jax": "of before", "micro-batches": "8", "steps": "10", "save": ""}
    lines.write("started", {"name": "m1", "slot": 0, "pid": 1, "began": "never"})
    lines.write("facts", facts)
    lines.write("registered", {"name": "m1", "token": "t", "generation": 0})
    for event, fields in more:
        lines.write(event, fields)
    lines.close()


ENDING = {"how": "complete", "status": 0, "why": "", "saver": ""}


def test_a_run_whose_processes_are_all_gone_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    supervisor = supervised(tmp_path, *SLEEPS)
    known = []

    def work() -> None:
        known.append(supervisor._state.facts)
        supervisor._terminated = True

    ends_when(supervisor, monkeypatch, work)
    assert supervisor.run() == 143
    assert known[0] == {}, "another script may run there now"
    assert len(events(tmp_path, "opened")) == 2
    assert [e["name"] for e in events(tmp_path, "started")] == ["m1", "m2", "m3"]


def test_behind_its_end_a_run_does_not_begin_again(tmp_path: Path) -> None:
    written(tmp_path, ("ending", ENDING))
    assert supervised(tmp_path, *SLEEPS, again=True).run() == 0
    assert len(events(tmp_path, "opened")) == len(events(tmp_path, "started")) == 1
    assert [e["how"] for e in events(tmp_path, "ended")] == ["complete"]


def test_a_supervisor_that_is_started_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    supervisor = supervised(tmp_path, *SLEEPS, again=True)

    def work() -> None:
        supervisor._terminated = len(events(tmp_path, "started")) == 3

    ends_when(supervisor, monkeypatch, work)
    assert supervisor.run() == 143
    assert len(events(tmp_path, "opened")) == 1
    assert [e["name"] for e in events(tmp_path, "lost")] == ["m1"]


# The launcher.


def launcher_of(folder: Path, **settings: Any) -> launching._SupervisorProcess:
    """What keeps a supervisor running, before its start."""
    settings = {"least": 1, "most": 1, **settings}
    run = Supervised(
        command=SLEEPS, folder=folder, settings=SupervisorSettings(**settings)
    )
    return launching._SupervisorProcess(run)


STARTS = [ev.StartEffect(0)]
BEATS = ev.Tick(beating=["supervisor"])
TERMINATES = [ev.TerminateEffect("supervisor")]


def react(
    rules: launching._SupervisorProcess, now: float, event: ev.Event
) -> list[ev.Effect]:
    return [*rules.react(now, event)]


def test_a_signal_waits_until_the_supervisor_can_hear_it(tmp_path: Path) -> None:
    rules = launcher_of(tmp_path)
    assert react(rules, 0.0, ev.StartsAllowedEvent()) == STARTS
    assert not react(rules, 1.0, ev.Terminate(at_once=False))
    assert not react(rules, 1.0, Tick()), "it would end it while it starts"
    assert react(rules, 2.0, BEATS) == TERMINATES
    assert not react(rules, 3.0, BEATS)
    # One that takes its place is told again.
    told = react(rules, 4.0, ev.ProcessExitEvent("supervisor", -9))
    said = "the supervisor ended by SIGKILL; it is started again"
    assert told == [ev.SayEffect(said), *STARTS]
    assert react(rules, 5.0, BEATS) == TERMINATES
    (end,) = react(rules, 6.0, ev.ProcessExitEvent("supervisor", 143))
    assert isinstance(end, ev.End) and end.status == 143


def test_a_supervisor_that_is_frozen_as_it_starts_again_is_ended_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members wait for one long enough that another can take its place."""
    assert 2 * launching.AGAIN_BEAT_SECONDS < SUPERVISOR_SECONDS
    monkeypatch.setattr(launching, "AGAIN_BEAT_SECONDS", 0.2)
    monkeypatch.setattr(launching, "_MOST_RESTARTS", 3)
    rules = launcher_of(tmp_path)
    processes = rules._loop.processes
    start, waits = processes.start, ["sleep", "1000"]
    commands: list[str] = []

    def sleeps(*given: Any, command: list[str], **more: Any) -> Any:
        commands.append(command[-1])
        first = ["sh", "-c", "kill -9 $$"]
        return start(*given, command=waits if commands[1:] else first, **more)

    monkeypatch.setattr(processes, "start", sleeps)
    assert rules.run() == 1
    again = [json.loads(text)["again"] for text in commands]
    assert again == [False, True, True]


def test_a_supervisor_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members go on meanwhile; without a first one, there are none."""
    rules = launcher_of(tmp_path)
    failed = ev.NotStarted(0, "Cannot allocate memory")
    (end,) = react(rules, 0.0, failed)
    assert isinstance(end, ev.End) and end.status == 2
    monkeypatch.setattr(rules._loop.processes, "start", lambda *_, **__: (1, ""))
    rules.start(0)
    (said,) = react(rules, 1.0, failed)
    assert isinstance(said, ev.SayEffect) and "it is tried again" in said.text
    assert react(rules, 2.0, Tick()) == STARTS and not react(rules, 2.0, failed)
    rules.start(0)
    assert not react(rules, 3.0, Tick())


def test_the_third_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    rules = launcher_of(tmp_path)
    react(rules, 0.0, BEATS)
    assert react(rules, 1.0, ev.Terminate(at_once=False)) == TERMINATES
    said: list[str] = []
    for number in range(1, 4):
        interrupt = ev.Terminate(at_once=True, number=signal.SIGINT)
        text, *asks = react(rules, 1.0 + number, interrupt)
        assert isinstance(text, ev.SayEffect)
        said.append(text.text)
        at_once = [ev.TerminateEffect("supervisor", AT_ONCE)] * (number == 3)
        assert asks == [*TERMINATES, *at_once]
    first, second, third = said
    assert "the run ends after a step" in first and "third time" in third
    assert "once more ends all processes at once" in second


START = """
import json, sys
from pathlib import Path
from whalejax.elastic.launching import supervise
from whalejax.membership.settings import Supervised, SupervisorSettings
settings = SupervisorSettings(least=1, most=1)
run = Supervised(
    command=("sleep", "1000"), folder=Path(sys.argv[1]), settings=settings
)
sys.exit(supervise(run))
"""


def test_a_launcher_that_is_told_to_end_while_its_supervisor_starts(
    tmp_path: Path,
) -> None:
    front = subprocess.Popen(
        [sys.executable, "-c", START, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{front.pid}/task/{front.pid}/children")
    while not children.read_text():
        assert front.poll() is None
    front.send_signal(signal.SIGTERM)
    _, said = front.communicate(timeout=400)
    assert front.returncode == 143, said
    assert "it is started again" not in said
    assert [e["how"] for e in events(tmp_path, "ending")] == ["interrupted"]


def test_an_end_is_written_before_it_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def remove_copies(key: Path) -> None:
        written.append(len(events(tmp_path, "ending")))

    monkeypatch.setattr(f"{Supervisor.__module__}.remove_copies", remove_copies)
    assert supervised(tmp_path, "true").run() == 2  # Its members never join.
    assert written == [0, 1]  # At the start, and at the end.
