"""What a supervisor refuses: strangers, other members, a second one, bad frames."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.whalejax.keys import OTHER
from tests.whalejax.messages import Loose, received
from whalejax.distributed.launch_env import KEY_FILE, split_address
from whalejax.elastic.environment import RUN
from whalejax.elastic.launching import AGAIN_BEAT_SECONDS
from whalejax.elastic.supervisor.supervisor import (
    ADDRESS,
    KEY,
    Supervised,
    Supervisor,
)
from whalejax.elastic.supervisor_client import (
    FIRST_SECONDS,
    Control,
    NoSupervisorError,
    RunStopped,
)
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.state.folder_lock import FolderLock, is_held
from whalejax.wire.connection import Channel, ConnectionClosedError, dial
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import Message, WireError
from whalejax.wire.run_messages import TO_MEMBER, Ready, ReportReceived, Saved


class Live:
    """A supervisor in a thread, whose members are connections of a test."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        given = {"least": 1, "most": 2, "gather_seconds": 0.01, **settings}
        self.folder = folder
        run = Supervised(
            command=(),
            folder=folder,
            settings=SupervisorSettings(**given),
            exit_seconds=1.0,
        )
        self.supervisor = Supervisor(run)
        self.thread = threading.Thread(target=self.supervisor.run)
        self.thread.start()
        address = folder / FOLDER / ADDRESS
        while not address.exists():
            time.sleep(0.001)
        self.where = json.loads(address.read_text())["address"]
        self.address = split_address(self.where)
        self.key = load_key(folder / FOLDER / KEY)

    def join(self, **changed: Any) -> tuple[Channel, Message]:
        """A member, and what it is answered."""
        channel = dial(self.address, self.key)
        channel.send(received("register", register(**changed)))
        return channel, channel.receive(TO_MEMBER, seconds=60)

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = journal.read(self.folder / FOLDER / journal.EVENTS)
        return [said for said in found if said["event"] == kind]


def register(**changed: Any) -> dict[str, Any]:
    facts = {"jax": "0.10.2", "optimizer": "abc"}
    return {
        "run": "",
        "name": "",
        "machine": "another",
        "pid": 1,
        "host": "127.0.0.1",
        "port": 1,
        "generation": 0,
        "step": -1,
        "micro_batches": 8,
        "steps": 10,
        "save": "",
        "facts": facts,
        "token": secrets.token_hex(8),
        **changed,
    }


@contextlib.contextmanager
def live(folder: Path, **settings: Any) -> Iterator[Live]:
    found = Live(folder, **settings)
    try:
        yield found
    finally:
        found.supervisor._terminated = True
        found.thread.join(60)
        assert not found.thread.is_alive()


def eventually(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that comes soon."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def until(channel: Channel, kind: str) -> Message:
    """The next message of a kind."""
    while (said := channel.receive(TO_MEMBER, seconds=60)).kind != kind:
        pass
    return said


def test_members_that_others_start_are_taken(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        one, welcome = there.join()
        assert welcome.kind == "welcome" and welcome.name == "x1"
        one.send(received("ready", {"number": 1}))
        asked = until(one, "prepare")
        generation = asked.generation
        told = {"number": 2, "generation": generation, "step": -1, "held": []}
        one.send(received("prepared", told))
        begin = until(one, "begin")
        assert begin.members == [("x1", "127.0.0.1", 1)]
        assert begin.first == {"x1": [(0, 8)]}
        one.close()


def test_a_report_without_a_number_is_refused(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        one, _ = there.join()
        one.send(received("ready", {}))
        with pytest.raises(ConnectionClosedError):
            until(one, "prepare")


def test_a_run_whose_journal_is_gone_is_not_begun_beside_its_processes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / FOLDER
    with live(tmp_path):
        pass
    (folder / journal.EVENTS).unlink()
    given = {KEY_FILE: str((folder / KEY).absolute()), RUN: "one"}
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, **given})
    run = Supervised(
        command=("sleep", "1000"),
        folder=tmp_path,
        settings=SupervisorSettings(least=1, most=1),
        again=True,
    )
    try:
        with pytest.raises(WhaleError, match=f"processes {left.pid} are of a run in"):
            Supervisor(run).run()
    finally:
        left.kill()
        left.wait()
    assert not journal.read(folder / journal.EVENTS)
    with live(tmp_path) as there:
        deadline = time.monotonic() + 60
        while not there.events("opened"):  # The address may be that of the first run.
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_members_that_differ_are_refused(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        one, _ = there.join()
        other, answer = there.join(
            facts={"jax": "0.10.3", "optimizer": "abd"}, micro_batches=4
        )
        assert answer.kind == "refused"
        assert answer.why == (
            "this member differs from the others: jax is 0.10.3, not 0.10.2; "
            "micro-batches is 4, not 8; optimizer is abd, not abc. Run the same code, "
            "options, versions, data and optimizer in all"
        )
        assert there.supervisor._state.members.keys() == {"x1"}
        assert [e["name"] for e in there.events("refused")] == ["x2"]
        one.close()
        other.close()


def test_a_member_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        one, welcome = there.join()
        run = welcome.run
        late = {"name": "m3", "generation": 17, "step": 500}
        other, answer = there.join(run="of an earlier one", **late)
        assert answer.kind == "refused"
        assert "is of an earlier run in the same folder" in answer.why
        assert there.supervisor._state.generation < 17
        again, answer = there.join(run=run)  # As after a lost connection.
        assert answer.kind == "welcome"
        for channel in (one, other, again):
            channel.close()


def test_a_wrong_key_has_no_effect(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        with pytest.raises(WireError, match="are of different runs"):
            dial(there.address, OTHER)
        make_key(tmp_path / "other")
        control = Control(there.where, str(tmp_path / "other"), register)
        with pytest.raises(
            WhaleError, match="are of different runs: this process and the .*keys"
        ):
            control.open()
        with pytest.raises(WhaleError, match="WHALEJAX_KEY_FILE is not set"):
            Control(there.where, "", register)
        assert not there.supervisor._state.members
        while sum(said["count"] for said in there.events("stranger")) < 2:
            time.sleep(0.001)
        why = there.events("stranger")[0]["why"]
        assert "its key and that of this process are of different runs" in why


def test_an_address_that_answers_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "key")
    monkeypatch.setattr("whalejax.elastic.supervisor_client.FIRST_SECONDS", 0.3)
    control = Control("127.0.0.1:1", str(tmp_path / "key"), register)
    with pytest.raises(WhaleError, match="no supervisor answers at 127.0.0.1:1"):
        control.open()


def test_processes_of_a_run_wait_for_the_next_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the launcher may need to find that one frozen and start another."""
    make_key(tmp_path / "key")
    waits: list[float] = []

    def connect(self: Control, end: float, *, first: bool) -> None:
        waits.append(end - time.monotonic())
        raise WhaleError("nobody")

    monkeypatch.setattr(Control, "_connect", connect)
    for run in ("", "run"):
        monkeypatch.setenv(RUN, run)
        with pytest.raises(WhaleError, match="nobody"):
            Control("127.0.0.1:1", str(tmp_path / "key"), register).open()
    assert waits[0] <= FIRST_SECONDS and waits[1] > 2 * AGAIN_BEAT_SECONDS


def test_a_second_supervisor_is_refused(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        run = Supervised(
            command=(), folder=tmp_path, settings=SupervisorSettings(least=1, most=1)
        )
        with pytest.raises(WhaleError, match="is in use by process"):
            Supervisor(run).run()
        channel, answer = there.join()
        assert answer.kind == "welcome"
        channel.close()


def test_checkpoints_of_another_run_are_left_alone(tmp_path: Path) -> None:
    save = tmp_path / "save"
    with FolderLock(save), live(tmp_path / "run") as there:
        channel, answer = there.join(save=str(save))
        assert answer.kind == "refused"
        assert "two runs would remove each other's checkpoints" in answer.why
        channel.close()


def test_malformed_messages_change_nothing(tmp_path: Path) -> None:
    drawn = random.Random(1)
    with live(tmp_path) as there:
        one, _ = there.join()
        membership = there.supervisor._state
        before = membership.generation, membership.phase, [*membership.members]
        for number in range(60):
            with socket.create_connection(there.address) as link:
                begun = b"\x16\x03\x01\x00\x50" if number % 2 else b""  # A handshake.
                link.sendall(begun + drawn.randbytes(drawn.randrange(1, 300)))
        for kind, fields in [
            ("beat", {"phase": 1, "step": 0, "done": 0}),
            ("beat", {}),
            ("prepared", {"generation": 0, "step": 0, "held": [[0]]}),
            ("__init__", {}),
            ("effects", {}),
            ("register", {**register(), "more": 1}),
        ]:
            channel = dial(there.address, there.key)
            channel.send(Loose({"kind": kind, **fields}))
            with pytest.raises(WireError):
                channel.receive(TO_MEMBER, seconds=60)
            channel.close()
        assert before == (
            membership.generation,
            membership.phase,
            [*membership.members],
        )
        one.send(received("ready", {"number": 1}))
        assert until(one, "prepare").generation == 1
        one.close()


def test_who_is_not_registered_is_not_heard(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        channel = dial(there.address, there.key)
        channel.send(received("finished", {"number": 1, "step": 10}))
        one, _ = there.join()
        assert there.supervisor._state.members["x1"].step == -1
        channel.close()
        one.close()


def test_a_supervisor_takes_back_members_of_one_that_was_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    facts = {"jax": "1", "micro-batches": "8", "steps": "10", "save": ""}
    lines = journal.JournalLines(folder / journal.EVENTS, durable=False)
    lines.write("opened", {"host": "127.0.0.1", "port": port})
    lines.write("facts", facts)
    for name in ("x1", "x2"):
        lines.write("registered", {"name": name, "host": "h", "step": -1})
        lines.write("ready", {"name": name})
    asked = {"generation": 7, "members": ["x1", "x2"], "after": -1}
    lines.write("preparing", {**asked, "phase": "preparing"})
    lines.write("begun", {"generation": 7, "members": ["x1", "x2"], "step": 3})
    lines.close()
    with (folder / journal.EVENTS).open("a") as file:
        file.write('{"event": "lo')  # Where the kill cut it short.
    settings = {"lease_seconds": 2.0, "rejoin_seconds": 2.0}
    with live(tmp_path, **settings) as there:
        assert there.address[1] == port
        again = {"facts": {"jax": "1"}, "generation": 7, "step": 5}
        one, answer = there.join(name="x1", **again)
        assert answer.kind == "welcome" and answer.name == "x1"
        assert there.supervisor._state.generation == 7
        # The other does not come back: this one goes on without it.
        beat = received("beat", {"phase": "x", "step": 5, "done": 1})
        said = None
        while said is None or said.kind != "prepare":
            one.send(beat)
            said = one.receive(TO_MEMBER, seconds=60)
        assert said.fields == {"generation": 8, "after": -1}
        assert [e["name"] for e in there.events("lost")] == ["x2"]
        # A zombie that comes back later is told that it is over.
        late, answer = there.join(name="x2", **again)
        assert answer.kind == "refused" and "was given up" in answer.why
        one.close()
        late.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    run = Supervised(
        command=(), folder=tmp_path, settings=SupervisorSettings(least=1, most=1)
    )
    with pytest.raises(WhaleError, match="cannot be written"):
        Supervisor(run).run()


def test_who_did_not_hear_its_name_is_no_second_member(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        one, welcome = there.join(token="drawn")
        one.close()  # As if the answer had been lost with the connection.
        again, answer = there.join(token="drawn")
        assert welcome.name == answer.name == "x1"
        other, answer = there.join()
        assert answer.name == "x2"
        again.close()
        other.close()


def test_the_folder_of_a_member_that_is_refused_is_not_held(tmp_path: Path) -> None:
    with live(tmp_path / "run") as there:
        one, _ = there.join()
        save = tmp_path / "save"
        other, answer = there.join(save=str(save))
        assert answer.kind == "refused" and "save is" in answer.why
        assert not save.exists()
        one.close()
        other.close()


def controlled(there: Live) -> Control:
    """A member's connection, of a thread of its own."""
    fields = register()
    own = ("run", "name", "machine", "pid", "step", "token")
    told = {name: value for name, value in fields.items() if name not in own}
    control = Control(there.where, str(there.folder / FOLDER / KEY), lambda: told)
    control.open()
    return control


def test_reports_are_kept_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()

    def write(opened: int, data: bytes) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os_write(opened, data)

    os_write = os.write
    with live(tmp_path) as there:
        control = controlled(there)
        monkeypatch.setattr(journal.os, "write", write)
        full.set()
        control.post(Ready())
        # The run goes on, and says so.
        asked = None
        while asked is None:
            asked = control.wait()
        assert asked.kind == "prepare" and len(control._reports) == 1
        assert not there.events("ready") and not there.events("preparing")
        assert there.supervisor._journal.problem == "No space left on device"
        full.clear()
        while control._reports:
            control.wait()
        assert [e["name"] for e in there.events("ready")] == ["x1"]
        assert len(there.events("preparing")) == 1
        monkeypatch.undo()
        control.close()


def test_reports_that_are_acknowledged_as_they_are_repeated_end_no_member(
    tmp_path: Path,
) -> None:
    """A connection broke, and the supervisor had taken what came over it."""
    make_key(tmp_path / "key")
    control = Control("127.0.0.1:1", str(tmp_path / "key"), register)
    sent: list[int] = []

    class Repeated:
        def send(self, message: Message) -> None:
            if message.kind != "beat":
                sent.append(message.number)
            if sent == [1]:
                control._hear(ReportReceived(goodput=1.0, number=300))

    for step in range(300):
        control.post(Saved(step=step, path=""))
    control._channel = Repeated()  # type: ignore[assignment]
    thread = threading.Thread(target=control._speak)
    thread.start()
    eventually(lambda: sent == [1] and not control._reports)
    for _ in range(2):
        control.post(Ready())
    eventually(lambda: len(sent) == 3 or not thread.is_alive())
    assert sent == [1, 301, 302] and thread.is_alive()
    with control._changed:
        control._closed = True
    thread.join(60)


def test_a_thread_of_a_connection_that_ends_by_an_error_is_heard_of(
    tmp_path: Path,
) -> None:
    with live(tmp_path) as there:
        control = controlled(there)
        control._hear = lambda said: 1 / 0  # type: ignore[method-assign, return-value]
        control.post(Ready())
        eventually(lambda: control._error is not None)
        with pytest.raises(WhaleError, match="to the supervisor failed: ZeroDivision"):
            while control.poll() is not None:  # What it had heard before.
                pass
        control.close()


def test_a_checkpoint_takes_its_name_unless_its_writer_was_given_up(
    tmp_path: Path,
) -> None:
    with live(tmp_path, lease_seconds=60.0) as there:
        control = controlled(there)
        save = tmp_path / "save"
        assert there.supervisor._lock_save(str(save)) == ""
        assert control.may_keep(50, save, seconds=60.0)
        member = there.supervisor._state.members["x1"]
        member.becomes("gone", 0.0)
        assert not control.may_keep(100, save, seconds=0.3)
        # An answer that came late is none to the next question about that step.
        control._kept.add(150)
        assert not control.may_keep(150, save, seconds=0.3)
        control.close()


def test_without_a_supervisor_checkpoints_take_their_names(tmp_path: Path) -> None:
    save = tmp_path / "save"
    save.mkdir()
    with live(tmp_path / "run") as there:
        control = controlled(there)
        held = FolderLock(save)
        held.__enter__()
    eventually(lambda: control._channel is None)
    # Somebody holds the folder: a supervisor that is cut off, or another run.
    assert not control.may_keep(50, save, seconds=0.3)
    held.__exit__(None, None, None)
    assert control.may_keep(50, save, seconds=60.0)
    control._error = NoSupervisorError("it did not come back")
    assert control.may_keep(60, save, seconds=60.0)
    control._error = RunStopped("it was given up")
    assert not control.may_keep(70, save, seconds=60.0)
    control.close()


def test_events_wait_for_space_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = journal.JournalLines(tmp_path / "events.jsonl", durable=True)
    lines.write("one", {})
    free, os_write = [0], os.write

    def write(opened: int, data: bytes) -> int:
        if not free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = min(free[0], len(data))
        free[0] -= size
        return os_write(opened, data[:size])

    monkeypatch.setattr(journal.os, "write", write)
    lines.write("two", {})
    assert not lines.is_written and lines.problem == "No space left on device"
    free[0] = 10  # A part of a line.
    lines.write("three", {})
    assert not lines.is_written
    free[0] = 1 << 20
    assert lines.flush() and lines.is_written and not lines.problem
    lines.close()
    found = journal.read(tmp_path / "events.jsonl")
    assert [said["event"] for said in found] == ["one", "two", "three"]


def test_a_full_disk_keeps_no_member_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save = tmp_path / "save"
    with live(tmp_path) as there:
        monkeypatch.setattr(Path, "write_text", full)
        assert there.supervisor._lock_save(str(save)) == ""
        assert is_held(save)
        monkeypatch.undo()
    said = capsys.readouterr().err
    assert f"{save / 'elastic.json'} cannot be written (No space" in said
    assert "the run goes on" in said


def test_a_key_that_is_there_needs_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make_key(tmp_path / "key")
    key = load_key(tmp_path / "key")
    monkeypatch.setattr(os, "open", full)
    make_key(tmp_path / "key")
    monkeypatch.undo()
    assert load_key(tmp_path / "key").run == key.run


def test_a_journal_that_is_removed_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = journal.JournalLines(path, durable=True)
    lines.write("opened", {"host": "here", "port": 1})
    lines.write("started", {"name": "m1", "slot": 0, "pid": 7, "began": "1"})
    path.unlink()
    assert lines.flush()  # As in every turn of a supervisor.
    assert [said["event"] for said in journal.read(path)] == ["opened", "started"]
    path.rename(tmp_path / "elsewhere")
    lines.write("ready", {"name": "m1"})
    found = [said["event"] for said in journal.read(path)]
    assert found == ["opened", "started", "ready"]
    path.unlink()
    tmp_path.joinpath("elsewhere").unlink()
    tmp_path.rename(tmp_path.with_name("gone"))
    lines.write("left", {"name": "m1", "step": 1})
    assert lines.problem == "No such file or directory"
    tmp_path.with_name("gone").rename(tmp_path)
    assert lines.flush() and len(journal.read(path)) == 4
    lines.close()


def test_a_supervisor_that_was_stopped_hears_what_came_before_it_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Supervised(
        command=(), folder=tmp_path, settings=SupervisorSettings(least=1, most=1)
    )
    supervisor = Supervisor(run)

    def other_threads(seconds: float) -> None:
        supervisor._events.put((object(), None))  # type: ignore[arg-type]

    monkeypatch.setattr(time, "sleep", other_threads)
    supervisor._take_all()
    assert supervisor._events.empty()  # No such turn was taken: nobody is waited for.
    supervisor._turn_at -= 100.0
    taken: list[int] = []
    take_events = supervisor._take_events

    def take() -> None:
        taken.append(supervisor._events.qsize())
        take_events()

    supervisor._take_events = take  # type: ignore[method-assign]
    supervisor._take_all()
    assert taken == [1]
    supervisor._held.close()
