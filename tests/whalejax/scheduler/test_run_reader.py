"""What a scheduler reads from the journal of a run, and how it hands devices over."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership.exit_status import Ending
from whalejax.processes.local_processes import began_at
from whalejax.scheduler.live.device_assignment import MOST_LAUNCHES, Placing
from whalejax.scheduler.live.job_book import JobBook
from whalejax.scheduler.live.job_devices import JobDevices
from whalejax.scheduler.live.requests import Add
from whalejax.scheduler.live.run_reader import RunReader


class Journal:
    """Writes what a supervisor would."""

    def __init__(self, home: Path) -> None:
        self.folder = home / FOLDER
        self.folder.mkdir(parents=True)

    def write(self, name: str, *lines: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def event(self, at: float, event: str, **fields: Any) -> None:
        self.write(journal.EVENTS, {"time": at, "event": event, **fields})

    def begin(self, at: float, generation: int, size: int) -> None:
        members = [f"m{n}" for n in range(size)]
        told = {"generation": generation, "members": members, "step": 0}
        self.event(at, "begun", **told)

    def steps(self, generation: int, first: int, times: Sequence[float]) -> None:
        for step, at in enumerate(times, start=first):
            told = {"step": step, "generation": generation, "loss": 1.0 / step}
            self.write(journal.COMMITS, {"time": at, "event": "committed", **told})


def test_throughputs_and_costs_are_measured(tmp_path: Path) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    reader.record_decision(100.0, 0, 2)
    told.event(103.0, "opened")
    told.event(103.0, "resized", size=2)
    told.begin(108.0, 1, 2)
    told.steps(1, 1, [109.0 + n / 2 for n in range(11)])  # Two steps a second.
    reader.poll()
    assert (reader.size, reader.members, reader.step) == (2, 2, 11)
    assert reader.loss == pytest.approx(1 / 11) and reader.first_step_at == 109.0
    assert reader.steps_per_second() == {("", 2): pytest.approx(2.0)}
    assert reader.costs.means() == {"start_seconds": pytest.approx(9.0)}
    # It is given four devices at 114; they take part at 121.
    reader.record_decision(114.0, 2, 4)
    told.event(114.5, "resized", size=4)
    told.begin(121.0, 2, 4)
    told.steps(2, 12, [121.5 + n / 4 for n in range(9)])
    reader.poll()
    assert reader.steps_per_second()["", 4] == pytest.approx(4.0)
    assert reader.costs.joins == [pytest.approx(7.0)]
    # Between the steps at 114 and 121.5; that a step takes so long was not known yet.
    assert reader.costs.stills == [pytest.approx(7.5)]
    # Another reader, as of a scheduler that is started again, comes to the same.
    again = RunReader(tmp_path)
    again.record_decision(100.0, 0, 2)
    again.record_decision(114.0, 2, 4)
    again.poll()
    assert again.costs.joins == reader.costs.joins
    assert again.steps_per_second() == reader.steps_per_second()


def test_a_change_that_another_has_overtaken_is_not_measured(tmp_path: Path) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    reader.record_decision(100.0, 0, 2)
    told.begin(108.0, 1, 1)  # A member was lost meanwhile.
    told.steps(1, 1, [109.0, 110.0])
    reader.poll()
    assert reader.costs.means() == {} and reader.steps_per_second() == {}


def test_lines_that_are_cut_short_are_read_when_they_are_whole(tmp_path: Path) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    path = told.folder / journal.EVENTS
    path.write_text('{"time": 1.0, "event": "res')
    reader.poll()
    assert reader.size == 0
    with path.open("a") as file:
        file.write('ized", "size": 3}\nnonsense\n{"event": "resized", "time": 2.0}\n')
        file.write("[" * 100_000 + "\n")
    reader.poll()
    assert reader.size == 3


def test_a_journal_that_cannot_be_opened_now_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    told.event(1.0, "resized", size=3)

    def fails(*given: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fails)
        reader.poll()
    assert reader.size == 0
    reader.poll()
    assert reader.size == 3


def test_a_run_that_starts_again_is_another(tmp_path: Path) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    told.event(1.0, "opened")
    told.event(2.0, "draining")
    told.event(3.0, "ending", status=143, how="drained", why="it was told to")
    reader.poll()
    assert reader.ending == (Ending.DRAINED, "it was told to") and reader.drains
    told.event(4.0, "opened")
    reader.poll()
    assert reader.ending is None and not reader.drains and reader.starts == 2


def test_slots_are_held_until_their_processes_are_gone(tmp_path: Path) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    began = began_at(os.getpid())
    told.event(1.0, "started", name="m1", slot=0, pid=os.getpid(), began=began)
    told.event(1.0, "started", name="m2", slot=1, pid=os.getpid(), began="1")
    told.event(2.0, "lost", name="m1", why="it was silent", step=3)
    reader.poll()
    assert reader.held_slots == {0}  # It was given up, and is there still.


# Handing over.


class Run:
    """A run whose supervisor is the test."""

    def __init__(self) -> None:
        self.reader = self
        self.is_alive = self.has_opened = self.is_asking = self.drains = False
        self.size, self.held_slots = 0, set[int]()
        self.step, self.launched = 0, list[dict[str, Any]]()
        self.members, self.failures = 0, dict[int, int]()
        self.ending: tuple[Ending, str] | None = None
        self.started: list[tuple[int, list[str]]] = []
        self.resized: list[int] = []
        self.exit_status: int | None = None
        self.refusal = ""
        self.wanted_hosts: dict[str, float] = {}
        self.away: list[str] = []
        self.agents: set[str] = set()
        self.lacks_front = False
        self.refused: dict[str, str] = {}

    def summary(self) -> dict[str, Any]:
        return {"step": self.step, "loss": None, "costs": {}}

    def refused_hosts(self) -> dict[str, str]:
        return self.refused

    def alike_hosts(self, host: str) -> list[str]:
        return ["s-0", "s-1"]

    def want_hosts(self, hosts: Iterable[str]) -> None:
        self.wanted_hosts = dict.fromkeys(hosts, 0.0)

    def away_hosts(self, hosts: dict[str, float], at: float) -> list[str]:
        return [host for host in hosts if host in self.away]

    def poll(self) -> None:
        pass

    def status(self) -> int | None:
        return self.exit_status

    def end_of_log(self) -> str:
        return "the end of its log"

    def record_launch(self, at: float, batch: int, kind: str) -> None:
        pass

    def start(
        self, least: int, most: int, size: int, devices: list[str], **more: Any
    ) -> None:
        self.started.append((size, list(devices)))
        self.launched.append(more)
        self.is_alive, self.has_opened = True, False

    def resize(self, size: int, devices: list[str]) -> None:
        self.resized.append(size)

    def has(self, size: int, slots: int | None = None) -> None:
        self.is_alive = self.has_opened = True
        self.size = size
        self.held_slots = {*range(size if slots is None else slots)}

    def gone(self, ending: Ending | None = None) -> None:
        self.is_alive, self.held_slots, self.size = False, set(), 0
        self.ending = None if ending is None else (ending, "why")


class Host:
    """Four devices and some jobs."""

    def __init__(
        self,
        folder: Path,
        *names: str,
        masks: bool = False,
        kinds: Sequence[str] = ("",) * 4,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.book = JobBook(folder)
        self.runs = {name: Run() for name in names}
        for name in names:
            add = Add(name=name, model="m", steps=9, devices=(1, 4), folder="/")
            told = {k: v for k, v in add.fields.items() if k != "kind"}
            self.book.record("added", job=told)
            options = [{"kind": "", "devices": 1, "samples_per_second": 1.0}]
            options = [{**one, "layout": ""} for one in options]
            self.book.record("planned", name=name, batch=8, options=options)
        there = {f"d{n}": kind for n, kind in enumerate(kinds)}
        platforms = dict.fromkeys(kinds, "gpu" if masks else "cpu")
        runs: Any = self.runs
        self.placing = Placing(self.book, runs, JobDevices(there, platforms))

    def place(self, kind: str = "", **sizes: int) -> None:
        for name, size in sizes.items():
            self.book.record("placed", name=name, size=size, kind=kind if size else "")
        self.turn()

    def turn(self) -> None:
        self.placing.turn(may_start=True)

    def devices(self) -> dict[str, list[str]]:
        return {name: job.devices for name, job in self.book.jobs.items()}


def test_a_device_is_another_job_s_when_its_process_has_ended(tmp_path: Path) -> None:
    host = Host(tmp_path, "a", "b", masks=True)
    a, b = host.runs["a"], host.runs["b"]
    host.place(a=4)
    assert a.started == [(4, ["d0", "d1", "d2", "d3"])]
    a.has(4)
    host.place(a=1, b=3)
    assert a.resized == [1] and not b.started
    a.has(1, slots=4)  # It has heard of it, and three processes still end.
    host.turn()
    assert not b.started and len(host.devices()["a"]) == 4
    a.has(1, slots=2)
    host.turn()
    assert not b.started and host.devices()["a"] == ["d0", "d1"]
    a.has(1)
    host.turn()
    assert b.started == [(3, ["d1", "d2", "d3"])]
    b.has(3)
    b.gone(Ending.COMPLETE)
    host.place(a=4)
    host.turn()
    assert host.book.jobs["b"].how == "complete" and a.resized[-1] == 4
    assert host.devices()["a"] == ["d0", "d1", "d2", "d3"]


def test_another_kind_of_devices_takes_another_run(tmp_path: Path) -> None:
    kinds = ["fast", "fast", "slow", "slow"]
    host = Host(tmp_path, "a", "b", masks=True, kinds=kinds)
    a, b = host.runs["a"], host.runs["b"]
    host.place("fast", a=2)
    assert a.started == [(2, ["d0", "d1"])]
    a.has(2)
    host.place("fast", b=2)
    host.place("slow", a=1)
    assert a.resized == [0] and not b.started  # It ends, with a checkpoint.
    a.gone(Ending.DRAINED)
    host.turn()
    host.turn()
    assert a.started[-1] == (1, ["d2"]) and b.started == [(2, ["d0", "d1"])]
    a.has(1)
    a.ending = None
    host.place("slow", a=2)
    assert a.resized == [0, 2] and host.devices()["a"] == ["d2", "d3"]
    assert [placed[1:] for placed in host.book.jobs["a"].placed] == [
        (0, 2), (0, 1), (1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("ending", [Ending.DRAINED, Ending.INTERRUPTED, Ending.LOST])
def test_a_run_that_ends_otherwise_starts_again(tmp_path: Path, ending: Ending) -> None:
    """Somebody else told it to end, or its hosts were gone."""
    host = Host(tmp_path, "a")
    run = host.runs["a"]
    host.place(a=2)
    for _ in range(MOST_LAUNCHES - 1):
        run.has(2)
        run.gone(ending)
        host.turn()
    assert len(run.started) == MOST_LAUNCHES
    run.has(2)
    run.gone()
    host.turn()
    job = host.book.jobs["a"]
    assert job.how == "failed" and f"{MOST_LAUNCHES} times without a new" in job.why


def test_members_without_a_supervisor_are_taken_back(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")
    run = host.runs["a"]
    host.place(a=3)
    run.has(3)
    run.is_alive = False  # Both that and what would start it again were killed.
    host.turn()
    assert run.started[-1] == (3, []) and host.book.jobs["a"].launches == 1


def test_what_a_killed_scheduler_has_just_started_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have locked its folder yet, and would have other devices."""
    host = Host(tmp_path, "a")
    host.place(a=3)
    run = host.runs["a"]
    run.is_alive = False
    runs: Any = host.runs
    host.placing = Placing(host.book, runs, host.placing._devices)
    host.place(a=2)
    assert len(run.started) == 1
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 11)
    host.turn()
    assert len(run.started) == 2


def test_a_supervisor_that_does_not_start_fails_its_job(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")
    run = host.runs["a"]
    host.place(a=3)
    job = host.book.jobs["a"]
    run.is_alive, run.exit_status = False, 2
    host.turn()
    assert len(run.started) == 2 and not job.how  # Its port may have been taken.
    run.is_alive = False
    host.turn()
    assert (job.how, job.why) == (
        "failed",
        "its supervisor did not start: the end of its log",
    )
    assert host.placing.free() == ["d0", "d1", "d2", "d3"]


def test_a_folder_that_is_gone_fails_its_job(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")

    def start(*given: object, **more: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/gone")

    host.runs["a"].start = start  # type: ignore[method-assign]
    host.place(a=2)
    for _ in range(MOST_LAUNCHES):
        host.turn()
    job = host.book.jobs["a"]
    assert job.how == "failed" and "No such file or directory: '/gone'" in job.why


def test_a_pause_ends_the_run_and_frees_its_devices(tmp_path: Path) -> None:
    host = Host(tmp_path, "a", "b")
    a = host.runs["a"]
    host.place(a=4)
    a.has(4)
    host.book.record("paused", name="a")
    host.place(a=0)
    assert a.resized == [0]
    a.drains = True
    host.turn()
    assert a.resized == [0]
    a.gone(Ending.DRAINED)
    host.turn()
    assert host.devices()["a"] == [] and not host.book.jobs["a"].how
    host.book.record("resumed", name="a")
    host.place(a=2)
    assert a.started[-1][0] == 2


def test_a_device_that_fails_is_used_no_more(tmp_path: Path) -> None:
    host = Host(tmp_path, "a", "b", masks=True)
    a, b = host.runs["a"], host.runs["b"]
    host.place(a=4)
    a.has(4)
    a.members, a.failures = 3, {1: 2}
    host.turn()
    assert not host.placing.failed
    a.failures = {1: 3}
    host.turn()
    assert [*host.placing.failed] == ["d1"] and a.resized == [1]
    assert "3 processes of a in a row" in host.placing.failed["d1"]
    a.has(1)
    a.failures = {}
    host.place(a=2, b=1)  # As is decided for three devices.
    assert host.devices() == {"a": ["d0", "d2"], "b": ["d3"]} and a.resized[-1] == 2
    assert b.started == [(1, ["d3"])] and host.placing.free() == []


def test_an_error_of_the_job_is_none_of_a_device(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")
    host.place(a=4)
    host.runs["a"].has(4)
    host.runs["a"].failures = {0: 3, 1: 3, 2: 3, 3: 3}
    host.turn()
    assert not host.placing.failed


def test_failures_before_a_step_are_counted_by_slot(tmp_path: Path) -> None:
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    for number, name in enumerate(("m1", "m2", "m3")):
        told.event(1.0, "started", name=name, slot=1, pid=0, began="1")
        if number == 1:
            told.event(1.0, "ready", name=name)
        told.event(2.0, "lost", name=name, why="it ended", step=0)
        reader.poll()
        assert reader.failures == [{1: 1}, {}, {1: 1}][number]


def test_a_process_that_the_run_refuses_is_none_of_a_device(tmp_path: Path) -> None:
    """A script that is changed while it runs does not cost the cluster its devices."""
    told, reader = Journal(tmp_path), RunReader(tmp_path)
    for name in ("m1", "m2", "m3"):
        told.event(1.0, "started", name=name, slot=1, pid=0, began="1")
        told.event(1.5, "refused", name=name, why="code of the loss is other")
        told.event(2.0, "lost", name=name, why="it ended", step=0)
    reader.poll()
    assert reader.failures == {} and reader.refusal == "code of the loss is other"
    told.event(3.0, "started", name="m4", slot=1, pid=0, began="1")
    told.event(3.5, "ready", name="m4")
    reader.poll()
    assert reader.refusal == ""


def test_a_job_that_others_push_aside_has_not_failed(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")
    run = host.runs["a"]
    for _ in range(MOST_LAUNCHES + 1):
        host.place(a=2)
        run.has(2)
        host.place(a=0)  # Before its first step.
        run.gone(Ending.INTERRUPTED)
        host.turn()
    assert len(run.started) == MOST_LAUNCHES + 1 and not host.book.jobs["a"].how


@pytest.mark.parametrize("event", ["devices", "launched"])
def test_a_disk_that_fills_up_in_a_turn_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    host = Host(tmp_path, "a", masks=True)
    record, flush = host.book.record, host.book._lines.flush

    def fails() -> bool:
        host.book._lines.problem = "No space left on device"
        return False

    def fill(said: str, /, **fields: Any) -> None:
        if said == event:
            monkeypatch.setattr(host.book._lines, "flush", fails)
        record(said, **fields)

    monkeypatch.setattr(host.book, "record", fill)
    host.place(a=2)
    assert not host.runs["a"].started
    monkeypatch.setattr(host.book._lines, "flush", flush)
    monkeypatch.setattr(host.book, "record", record)
    assert host.book.write() == ""
    host.turn()
    assert host.runs["a"].started == [(2, ["d0", "d1"])]
    monkeypatch.setattr(host.book, "record", fill)
    host.runs["a"].has(2)
    host.place(a=4)
    assert bool(host.runs["a"].resized) == (event == "launched")


def test_nothing_is_started_that_is_not_written_down(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")
    host.book.record("placed", name="a", size=2)
    host.placing.turn(may_start=False)
    assert not host.runs["a"].started and host.devices()["a"] == []


def test_a_journal_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"event": "added", "job": 3}\n')
    with pytest.raises(Exception, match="jobs.jsonl"):
        JobBook(tmp_path)
