"""What the scheduler of live jobs takes, refuses, and takes back."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from whalejax.cli.jobs.job_commands import request_of
from whalejax.cli.jobs.jobs_options import JobsAddCommand
from whalejax.cli.jobs.jobs_table import live_table
from whalejax.cli.main import main
from whalejax.meshes import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.scheduler.job_table import NOWHERE, JobError
from whalejax.scheduler.live import local_socket, plan_worker
from whalejax.scheduler.live.job_book import JobBook
from whalejax.scheduler.live.job_devices import job_devices
from whalejax.scheduler.live.job_planning import PlannedJob, Planning
from whalejax.scheduler.live.job_run import read_hosts
from whalejax.scheduler.live.job_service import JobService, ServeSettings
from whalejax.scheduler.live.local_socket import SOCKET, LocalSocket, ask, make_private
from whalejax.scheduler.live.requests import (
    Add,
    Answer,
    JobChange,
    JobReport,
    Jobs,
    RequestDone,
    RequestRefused,
    ShowJobs,
    encoded,
)


class Held(JobService):
    """A scheduler whose folder is taken until the test ends."""

    def close(self) -> None:
        self._held.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Opens schedulers in a folder, one after the other."""
    there: list[Held] = []

    def make(text: str = "cpu:4") -> Held:
        while there:
            there.pop().close()
        found = Held(ServeSettings(folder=tmp_path / "jobs", cluster=text))
        there.append(found)
        found.open()
        return found

    yield make
    while there:
        there.pop().close()


def job(folder: Path, name: str = "one", **fields: Any) -> Add:
    given = {"steps": 10, "devices": (1, 4), "model": "mlp", **fields}
    return Add(name=name, folder=str(folder), **given)


def refused(answer: Answer) -> str:
    assert isinstance(answer, RequestRefused), answer
    return answer.why


def jobs(service: JobService) -> Jobs:
    answer = service.answer(ShowJobs())
    assert isinstance(answer, Jobs)
    return answer


def plan(service: JobService, name: str, *speeds: float) -> None:
    """Give a job a table without planning it."""
    options = [
        {"kind": "", "devices": n, "samples_per_second": speed, "layout": ""}
        for n, speed in enumerate(speeds, start=1)
    ]
    service._book.record("planned", name=name, batch=8, options=options)


# What is added.


def test_a_name_is_a_job_s_own(opened: Any, tmp_path: Path) -> None:
    service = opened()
    assert service.answer(job(tmp_path)) == RequestDone()
    why = refused(service.answer(job(tmp_path)))
    assert "a job is named 'one' already (it is there); give another --name" in why
    assert [one.name for one in jobs(service).jobs] == ["one"]


@pytest.mark.parametrize("name", ["socket", "key", "jobs.jsonl", "whalejax.lock"])
def test_a_name_of_the_scheduler_s_own_files_is_refused(
    opened: Any, tmp_path: Path, name: str
) -> None:
    why = refused(opened().answer(job(tmp_path, name)))
    assert f"--name is {name!r}" in why and "is the scheduler's own" in why


def test_checkpoints_of_a_job_that_is_not_known_are_not_taken(
    opened: Any, tmp_path: Path
) -> None:
    service = opened()
    (tmp_path / "jobs" / "one").mkdir()  # Its journal was removed.
    why = refused(service.answer(job(tmp_path)))
    assert "whose checkpoints this job would take. Give another --name" in why
    assert jobs(service).jobs == []


def test_more_devices_than_there_are_are_refused(opened: Any, tmp_path: Path) -> None:
    why = refused(opened().answer(job(tmp_path, devices=(6, 8))))
    assert "--devices is 6:8" in why and "has 4: 2 too few" in why
    why = refused(opened().answer(job(tmp_path, devices=(3, 2))))
    assert "--devices is 3:2; expected MIN at most MAX" in why


def test_a_folder_that_is_none_is_refused(opened: Any, tmp_path: Path) -> None:
    assert "is no folder" in refused(opened().answer(job(tmp_path / "none")))


def test_a_job_that_has_ended_cannot_be_changed(opened: Any, tmp_path: Path) -> None:
    service = opened()
    service.answer(job(tmp_path))
    service._book.record("ended", name="one", how="complete", why="")
    for what in ("cancel", "pause", "resume"):
        why = refused(service.answer(JobChange(name="one", what=what)))
        assert f"job 'one' has ended (complete); there is nothing to {what}" in why
    why = refused(service.answer(JobChange(name="two", what="cancel")))
    assert "there is no job 'two'; there are: one" in why


def test_jobs_are_paused_resumed_and_cancelled_once(
    opened: Any, tmp_path: Path
) -> None:
    service = opened()
    service.answer(job(tmp_path))
    assert "is not paused" in refused(
        service.answer(JobChange(name="one", what="resume"))
    )
    assert service.answer(JobChange(name="one", what="pause")) == RequestDone()
    assert jobs(service).jobs[0].status == "paused"
    assert "paused already" in refused(
        service.answer(JobChange(name="one", what="pause"))
    )
    service = opened()  # Another one takes it back from the journal.
    assert jobs(service).jobs[0].status == "paused"
    assert service.answer(JobChange(name="one", what="resume")) == RequestDone()
    assert service.answer(JobChange(name="one", what="cancel")) == RequestDone()
    why = refused(service.answer(JobChange(name="one", what="cancel")))
    assert "job 'one' is cancelled already" in why
    service.turn(0.0)
    assert jobs(service).jobs[0].status == "cancelled"


@pytest.mark.parametrize(
    ("event", "status"), [("paused", "paused"), ("cancelled", "cancelled")]
)
def test_a_kill_within_a_change_leaves_no_devices(
    opened: Any, tmp_path: Path, event: str, status: str
) -> None:
    service = opened()
    service.answer(job(tmp_path))
    plan(service, "one", 1.0, 2.0)
    service._book.record("placed", name="one", kind="", size=2)
    service._book.record(event, name="one")  # Here it was killed.
    service = opened()
    service.turn(0.0)
    service.turn(0.0)
    (report,) = jobs(service).jobs
    assert (report.status, report.target) == (status, 0)
    assert not service._runs["one"].is_alive


def test_a_decision_outlives_the_scheduler(opened: Any, tmp_path: Path) -> None:
    service = opened()
    for name in ("one", "two"):
        service.answer(job(tmp_path, name))
        plan(service, name, 1.0, 2.0, 3.0, 4.0)
    service = opened()
    service._decide(0.0)
    assert [one.target for one in jobs(service).jobs] == [2, 2]
    service = opened()
    assert [one.target for one in jobs(service).jobs] == [2, 2]
    assert service._schedule.places() == {"one": ("", 2), "two": ("", 2)}


def test_the_journal_of_a_run_that_has_ended_is_not_read_again(
    opened: Any, tmp_path: Path
) -> None:
    service = opened()
    for name in ("one", "two"):
        service.answer(job(tmp_path, name))
        plan(service, name, 1.0, 2.0)
    reader = service._runs["one"].reader
    reader.step, reader.loss, reader.costs.starts = 7, 0.5, [12.0]
    service._placing._end_job(service._book.jobs["one"], "complete", "")
    folder = tmp_path / "jobs" / "one" / "elastic"
    folder.mkdir(parents=True)
    (folder / "commits.jsonl").write_text("unread\n")
    service = opened()
    report = jobs(service).jobs[0]
    assert (report.step, report.loss, report.status) == (7, 0.5, "complete")
    assert service._costs()["start_seconds"] == 12.0
    assert service._runs["one"].reader._commits._read_bytes == 0


# The cluster.


def test_jobs_keep_the_cluster_that_they_were_planned_for(
    opened: Any, tmp_path: Path
) -> None:
    opened().answer(job(tmp_path))
    with pytest.raises(JobError, match=r"has jobs on .* that have not ended \(one\)"):
        opened("cpu:2")
    opened().answer(JobChange(name="one", what="cancel"))
    service = opened()
    service.turn(0.0)
    assert opened("cpu:2")._book.cluster == cluster("cpu:2").describe()


def test_a_cluster_file_that_changes_is_told(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    cluster("cpu:4").save(path)
    service = opened(str(path))
    assert jobs(service).notes == []
    cluster("cpu:2").save(path)
    (note,) = jobs(service).notes
    assert "host.toml has changed since the scheduler read it" in note
    assert jobs(service).devices == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100:2x8", "has 2 hosts, and without --hosts jobs run on this one alone"),
        ("v5e:2x2", "divides CPUs and GPUs"),
        ("h100:8", "this host shows 0 GPUs"),
    ],
)
def test_clusters_that_this_host_does_not_have(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(JobError, match=message):
        job_devices(cluster(text))


def test_jobs_share_the_devices_that_have_not_failed(
    opened: Any, tmp_path: Path
) -> None:
    service = opened()
    service.answer(job(tmp_path, "one"))
    plan(service, "one", 1.0, 2.0, 3.0, 4.0)
    service.answer(job(tmp_path, "two", devices=(4, 4)))
    options = [{"kind": "", "devices": 4, "samples_per_second": 1.0, "layout": ""}]
    service._book.record("planned", name="two", batch=8, options=options)
    for name in ("one", "two"):
        service._schedule.add(service._table(service._book.jobs[name]), 80.0)
    service._placing.failed["cpu1"] = "it broke"
    service._count_devices()
    service._decide(0.0)
    assert [one.target for one in jobs(service).jobs] == [3, 0]
    (note,) = jobs(service).notes
    assert note == "devices that failed are used no more: cpu1 (it broke)"
    assert jobs(service).devices == 4


# The disk.


def test_a_full_disk_loses_nothing_and_is_told(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    write, full = os.write, [True]

    def fails(opened: int, data: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(opened, data)

    monkeypatch.setattr("whalejax.journals.journal.os.write", fails)
    answer = service.answer(job(tmp_path))
    assert isinstance(answer, RequestDone) and "No space left on device" in answer.note
    plan(service, "one", 1.0)
    service._planning.withdraw("one")
    service._schedule.add(service._table(service._book.jobs["one"]), 80.0)
    service.turn(0.0)
    (report,) = jobs(service).jobs
    assert report.target == 1 and not service._runs["one"].is_alive  # Not started.
    assert "none is started until there is space" in jobs(service).notes[0]
    full[0] = False
    service._book.record("paused", name="one")  # So that nothing is started here.
    service._place(service._book.jobs["one"], NOWHERE)
    service.turn(0.0)
    assert jobs(service).notes == []
    assert JobBook(tmp_path / "jobs").jobs["one"].options


def test_nothing_is_started_on_a_disk_that_is_almost_full(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal has room yet, and a supervisor would not."""
    service = opened()
    free = types.SimpleNamespace(f_bavail=1000, f_frsize=4096)
    with monkeypatch.context() as patched:
        patched.setattr("os.statvfs", lambda folder: free)
        answer = service.answer(job(tmp_path))
        assert isinstance(answer, RequestDone)
        assert "has 4.1 MB left, less than 16 MB: jobs go on, and none" in answer.note
        service._planning.withdraw("one")
        plan(service, "one", 1.0)
        service._enter(service._book.jobs["one"])
        service.turn(0.0)
        (report,) = jobs(service).jobs
        assert report.target == 1 and not service._runs["one"].is_alive
        assert jobs(service).notes == [answer.note]
    service.answer(JobChange(name="one", what="cancel"))
    service.turn(0.0)
    assert jobs(service).notes == []


# The socket.


def test_only_its_user_may_open_the_socket(opened: Any, tmp_path: Path) -> None:
    opened()
    folder = tmp_path / "jobs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o777)
    make_private(open_to_all)
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o700


def test_a_folder_with_other_files_is_not_closed_to_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "data.csv").touch()
    with pytest.raises(JobError, match="has other files, and other users may open it"):
        make_private(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (shared / "jobs.jsonl").touch()  # Its own, whose mode somebody has changed.
    make_private(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    with pytest.raises(JobError, match="who may add a job there runs code as you"):
        make_private(tmp_path)


def test_another_version_is_named_on_both_sides(tmp_path: Path) -> None:
    listening = LocalSocket(tmp_path)
    try:
        with (
            socket.socket(socket.AF_UNIX) as link,
            local_socket._short(tmp_path / SOCKET) as path,
        ):
            link.connect(path)
            link.sendall(b"whalejax-jobs/9 {}\n")
            answer = link.recv(4096)
        assert answer.startswith(b"whalejax-jobs/1 ")
        assert b"the command speaks 'whalejax-jobs/9'" in answer
        with (
            socket.socket(socket.AF_UNIX) as link,
            local_socket._short(tmp_path / SOCKET) as path,
        ):
            link.connect(path)
            link.sendall(encoded(ShowJobs()).replace(b"show", b"shoo"))
            assert b"sent no valid message" in link.recv(4096)
    finally:
        listening.close()


def test_a_scheduler_of_another_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        with local_socket._short(tmp_path / SOCKET) as path:
            listening.bind(path)
        listening.listen()
        monkeypatch.setattr(local_socket, "_line", lambda link: b"whalejax-jobs/2 {}\n")
        with pytest.raises(JobError, match="the scheduler speaks 'whalejax-jobs/2'"):
            ask(tmp_path, ShowJobs())


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "show", "--once", "--save", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "no scheduler listens at" in error and "whalejax jobs serve" in error


def test_a_second_scheduler_of_a_folder_is_refused(opened: Any, tmp_path: Path) -> None:
    opened()
    other = Held(ServeSettings(folder=tmp_path / "jobs", cluster="cpu:4"))
    with pytest.raises(WhaleError, match="is in use by process"):
        other.open()


# The command line.


def test_words_of_add_that_cannot_be_used_are_named_at_once(tmp_path: Path) -> None:
    command = JobsAddCommand(
        model="mlp", devices="4:1", batch="64:1024", name="../x", steps=0, priority=200
    )
    with pytest.raises(JobError) as caught:
        request_of(command, tmp_path)
    for said in (
        "--name is '../x'",
        "--devices is '4:1'; expected N from 1 to 1,048,576, or MIN:MAX",
        "--batch is 64:1024 without --rate-rule: a larger batch needs a larger",
        "--steps is 0",
        "--priority is 200; expected 0 to 100",
    ):
        assert said in str(caught.value)


# Planning.


def next_planned(planning: Planning) -> PlannedJob:
    """Returns the next job whose planning ends."""
    end = time.monotonic() + 120
    while (planned := planning.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    return planned


def refusal_of(script: str, folder: Path) -> str:
    """Returns the refusal of a job with this script."""
    (folder / "script.py").write_text(script)
    planning = Planning(cluster("cpu:4"))
    try:
        planning.submit(job(folder, model=f"{folder}/script.py:make"))
        return next_planned(planning).refusal
    finally:
        planning.close()


def test_a_folder_that_is_gone_is_said_by_planning(tmp_path: Path) -> None:
    planning = Planning(cluster("cpu:4"))
    planning.submit(job(tmp_path / "gone"))
    planned = planning.poll()
    assert planned is not None and planned.name == "one"
    assert "it cannot be planned" in planned.refusal and "gone" in planned.refusal
    assert planning.poll() is None


def test_a_job_whose_code_hangs_does_not_keep_others_from_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1e6)\n")
    monkeypatch.setattr("whalejax.scheduler.live.job_planning._ALONE_SECONDS", 0.0)
    planning = Planning(cluster("cpu:4"))
    try:
        planning.submit(job(tmp_path, "hangs", model=f"{tmp_path}/hangs.py:make"))
        planning.submit(job(tmp_path, "gone", model="no-such-model"))
        planned: PlannedJob | None = next_planned(planning)
        assert planned is not None
        assert planned.name == "gone" and "no-such-model" in planned.refusal
        monkeypatch.setattr("whalejax.scheduler.live.job_planning._MOST_SECONDS", 0.0)
        planned = planning.poll()
        assert planned is not None and planned.name == "hangs"
        assert planned.refusal == "it was not planned in 0 s"
        planning.submit(job(tmp_path, "hangs", model=f"{tmp_path}/hangs.py:make"))
        assert planning.poll() is None
        (process,) = [one.process for one in planning._running]
        planning.withdraw("hangs")
        assert process.returncode is not None and planning.poll() is None
    finally:
        planning.close()


TALKS = """
import atexit, sys

def make():
    print("half a line", end="")
    atexit.register(lambda: print("goodbye\\n{}", file=sys.stderr))
    raise ValueError("no model")
"""


def test_what_user_code_prints_is_no_plan(tmp_path: Path) -> None:
    assert "ValueError: no model (at " in refusal_of(TALKS, tmp_path)
    settings = 'import os\nprint(\'{"options": {"lr": 1}}\', flush=True)\nos._exit(9)\n'
    assert "planning it ended with status 9" in refusal_of(settings, tmp_path)


BROKEN = """
import jax.numpy as jnp, numpy as np, optax
import whalejax as wh

def make():
    def loss_fn(model, batch):
        if batch["x"].sum() > 0:
            return 0.0
        return jnp.mean(batch["x"] @ model["w"])
    data = {"x": np.ones((8, 4), np.float32)}
    return wh.Job(loss_fn, lambda: {"w": jnp.ones((4, 2))}, data, optax.sgd(0.1),
                  batch_size=8)
"""


def told(request: Add, text: str) -> dict[str, Any]:
    fields = {**request.fields, "cluster": cluster(text).to_json(), "units": {}}
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields))
    return found


def test_a_model_that_does_not_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    request = job(tmp_path, model=f"{tmp_path / 'broken.py'}:make")
    words = "reads the value of an array at .*broken.py:7"
    with pytest.raises(Exception, match=words) as caught:
        plan_worker.planned(told(request, "cpu:4"))
    text = plan_worker.error_text(caught.value)
    assert "broken.py:7" in text and "\n" not in text


def test_a_job_that_no_devices_hold_is_refused_by_how_much(tmp_path: Path) -> None:
    settings = ["inputs=1000000"]
    request = job(tmp_path, settings=settings, batch=8, devices=(1, 1))
    with pytest.raises(JobError, match="no number of devices from 1 to 1") as caught:
        plan_worker.planned(told(request, "cpu:4"))
    assert " and lacks " in str(caught.value) and " GB " in str(caught.value)


def test_a_table_has_as_many_devices_as_there_are_micro_batches(tmp_path: Path) -> None:
    request = job(tmp_path, batch=34)  # Two micro-batches of 17 samples.
    found = plan_worker.planned(told(request, "cpu:4"))
    assert found["batch"] == 34
    assert {one["devices"] for one in found["options"]} == {1, 2}


# What is shown.


def test_a_table_goes_on_without_a_scheduler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = JobReport(
        name="one", status="running", held=1, target=2, step=3, steps=9, loss=0.5,
        predicted=20.0, seconds_left=75.4, why="first line\nsecond line",
    )  # fmt: skip
    found = Jobs(jobs=[report], cluster="4×CPU", devices=4, pid=1, notes=["a note"])
    answers: list[Jobs | JobError] = [found, JobError("no scheduler listens"), found]

    def find() -> Jobs:
        if not answers:
            raise KeyboardInterrupt
        answer = answers.pop(0)
        if isinstance(answer, JobError):
            raise answer
        return answer

    monkeypatch.setattr("whalejax.cli.jobs.jobs_table._AGAIN_SECONDS", 0.0)
    live_table(find)
    shown = capsys.readouterr().out
    for text in ("1 → 2", "3/9", "~20", "1:15", "1 of 4 devices held"):
        assert text in shown
    assert "one: first line\nsecond line" in shown
    assert "a note" in shown and not answers


def test_jobs_that_have_ended_are_below_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [
        JobReport(
            name=f"old{n}", status="failed", ended_at=float(n), why=f"{n} " + "it " * 99
        )
        for n in range(7)
    ]
    reports += [
        JobReport(name=name, status="waiting", why="devices that others have")
        for name in ("new", "newer")
    ]
    found = Jobs(jobs=reports, cluster="4×CPU", devices=4, pid=1, notes=[])
    monkeypatch.setattr("whalejax.cli.jobs.job_commands.ask", lambda *_, **__: found)
    assert main(["jobs", "show"]) == 0  # The output is no terminal.
    assert "old6" in capsys.readouterr().out
    assert main(["jobs", "show", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in lines if line.strip()]
    assert first[1:9] == ["new", "newer", "ended", *(f"old{n}" for n in range(2, 7))]
    assert "; 2 more jobs have ended (--all)" in lines[9]
    assert lines[10] == "new, newer: devices that others have"
    assert " ".join(lines).count("it ") == 5 * 99  # Reasons are whole.
    assert main(["jobs", "show", "--once", "--all"]) == 0
    text = capsys.readouterr().out
    assert "old0" in text and "(--all)" not in text


def test_reports_of_many_jobs_are_one_answer(tmp_path: Path) -> None:
    listening = LocalSocket(tmp_path)
    reports = [JobReport(name=f"j{n}", status="failed", why="x" * 5000)
               for n in range(2000)]  # fmt: skip
    answer = Jobs(jobs=reports, cluster="", devices=1, pid=1, notes=[])
    answering = threading.Thread(
        target=lambda: listening.requests.get().answer.put(answer)
    )
    answering.start()
    try:
        assert ask(tmp_path, ShowJobs()) == answer
    finally:
        answering.join()
        listening.close()


def test_a_client_that_goes_away_is_served_once(opened: Any, tmp_path: Path) -> None:
    """Its job is added without it, and a repeated command adds nothing."""
    service = opened()
    with (
        socket.socket(socket.AF_UNIX) as link,
        local_socket._short(tmp_path / "jobs" / SOCKET) as path,
    ):
        link.connect(path)
        link.sendall(encoded(job(tmp_path)))
    service._planning.submit = lambda request: None
    while not service._book.jobs:
        service.turn(0.05)
    why = refused(service.answer(job(tmp_path)))
    assert "a job is named 'one' already" in why
    assert [one.name for one in jobs(service).jobs] == ["one"]


def test_an_answer_that_does_not_come_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "_send_request", lambda *_: b"")
    with pytest.raises(JobError, match="may have carried out the request. See whale"):
        ask(tmp_path, ShowJobs())


def test_commands_to_live_jobs_import_no_jax() -> None:
    code = (
        "import sys; from whalejax.cli.main import main; "
        "main(['jobs', 'show', '--once', '--save', '/none']); "
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_a_job_that_has_more_devices_than_micro_batches_is_refused(
    tmp_path: Path,
) -> None:
    request = job(tmp_path, batch=32, micro_batches=1, devices=(1, 4))
    told_two = {**told(request, "cpu:4"), "units": {"": 2}}
    with pytest.raises(JobError, match="1 micro-batch, at least one for each CPU"):
        plan_worker.planned(told_two)


def test_a_damaged_file_of_hosts_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text("")
    assert read_hosts(tmp_path) == {}


def test_logs_of_a_job_that_never_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = JobReport(
        name="one", status="refused", why="it fits nowhere", folder=str(tmp_path / "x")
    )
    answer = Jobs(jobs=[report], cluster="4×CPU", devices=4, pid=1, notes=[])
    monkeypatch.setattr("whalejax.cli.jobs.job_commands.ask", lambda *_, **__: answer)
    assert main(["jobs", "logs", "one"]) == 2
    error = capsys.readouterr().err
    assert "has not started, and has no logs. It is refused: it fits nowhere" in error


@pytest.mark.parametrize(
    ("status", "what", "expected"),
    [
        ("running", "pause", "one writes a checkpoint after a step and pauses"),
        ("starting", "cancel", "one is cancelled, and ends after a step"),
        ("waiting", "pause", "one is paused"),
        ("planning", "cancel", "one is cancelled"),
        ("paused", "resume", "one continues as soon as devices are free"),
    ],
)
def test_a_change_of_a_job_says_what_happens(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    what: str,
    expected: str,
) -> None:
    report = JobReport(name="one", status=status)
    reports = Jobs(jobs=[report], cluster="4×CPU", devices=4, pid=1, notes=[])

    def ask(place: object, request: object) -> object:
        return RequestDone() if isinstance(request, JobChange) else reports

    monkeypatch.setattr("whalejax.cli.jobs.job_commands.ask", ask)
    assert main(["jobs", what, "one"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"devices": "1:2000000"},
            "--devices is '1:2000000'; expected N from 1 to 1,0",
        ),
        ({"devices": "0"}, "--devices is '0'; expected N from 1 to 1,048,576, or MIN"),
        ({"micro_batches": 2000000}, "--micro-batches is 2000000; expected 1 to 1,048"),
        ({"micro_batches": 0}, "--micro-batches is 0; expected 1 to 1,048,576"),
        ({"steps": 0}, "--steps is 0; expected 1 to "),
        ({"batch": "1:1", "rate_rule": "sqrt"}, "the largest needs 2 samples or more"),
    ],
)
def test_numbers_of_a_job_are_refused_with_their_limits(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    given = {"model": "mlp", "name": "one", "devices": "1:4", "steps": 9, **options}
    with pytest.raises(JobError) as caught:
        request_of(JobsAddCommand(**given), tmp_path)
    assert expected in str(caught.value)
