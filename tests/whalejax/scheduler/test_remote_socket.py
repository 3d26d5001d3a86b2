"""Commands to a scheduler on another machine, with its key."""

from __future__ import annotations

import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from whalejax.cli.main import main
from whalejax.distributed.reserved_port import release_port, reserve_port
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.job_service import JobService, ServeSettings
from whalejax.scheduler.live.remote_socket import KEY, SchedulerAddress, ask
from whalejax.scheduler.live.requests import (
    Add,
    JobChange,
    JobReport,
    Jobs,
    RequestDone,
    ShowJobs,
)
from whalejax.wire.connection import dial
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import Messages, WireError


def free_address() -> str:
    port = reserve_port("127.0.0.1")
    release_port(port)
    return f"127.0.0.1:{port}"


@pytest.fixture
def there(tmp_path: Path) -> Iterator[SchedulerAddress]:
    """A scheduler that listens, as another machine with a copy of the key sees it."""
    address, folder = free_address(), tmp_path / "jobs"
    service = JobService(ServeSettings(folder=folder, cluster="cpu:4", listen=address))
    is_over = threading.Event()
    service.open()
    try:
        service._planning.submit = lambda request: None  # type: ignore[method-assign]

        def serve() -> None:
            while not is_over.is_set():
                service.turn(0.05)

        serving = threading.Thread(target=serve)
        serving.start()
        copy = tmp_path / "copy"
        shutil.copy(folder / KEY, copy)
        yield SchedulerAddress(folder=tmp_path / "none", address=address, key=copy)
        is_over.set()
        serving.join()
    finally:
        is_over.set()
        service._held.close()


def test_jobs_are_added_from_elsewhere(
    there: SchedulerAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add = Add(name="one", model="mlp", steps=9, devices=(1, 2), folder=str(tmp_path))
    assert ask(there, add) == RequestDone()
    answer = ask(there, ShowJobs())
    assert isinstance(answer, Jobs)
    assert [job.name for job in answer.jobs] == ["one"]
    with pytest.raises(JobError, match="a job is named 'one' already"):
        ask(there, add)
    assert ask(there, JobChange(name="one", what="cancel")) == RequestDone()
    words = ["--at", str(there.address), "--key", str(there.key)]
    assert main(["jobs", "show", "--once", *words]) == 0
    assert "one" in capsys.readouterr().out


def test_who_has_no_key_is_refused(there: SchedulerAddress, tmp_path: Path) -> None:
    own = tmp_path / "own"
    make_key(own)
    wrong = SchedulerAddress(folder=tmp_path, address=there.address, key=own)
    with pytest.raises(JobError, match="Give as --key a copy of the file key"):
        ask(wrong, ShowJobs())
    none = SchedulerAddress(folder=tmp_path / "none", address=there.address)
    with pytest.raises(JobError, match="needs the key of the scheduler there"):
        ask(none, ShowJobs())
    assert there.key is not None and there.address is not None
    assert stat.S_IMODE((tmp_path / "jobs" / KEY).stat().st_mode) == 0o600
    host, _, port = there.address.rpartition(":")
    channel = dial((host, int(port)), load_key(there.key))
    channel.send(Jobs(jobs=[JobReport(name="x", status="waiting")], cluster="",
                      devices=1, pid=1, notes=[]))  # fmt: skip
    with pytest.raises(WireError):  # It takes requests alone.
        channel.receive(Messages(RequestDone), seconds=30.0)
    channel.close()
    assert isinstance(ask(there, ShowJobs()), Jobs)


def test_addresses_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, free = tmp_path / "key", free_address()
    make_key(key)
    for words, message in (
        (["--at", free, "--key", str(key)], f"no scheduler listens at {free}"),
        (["--at", "nowhere", "--key", str(key)], "--at is 'nowhere'; expected HOST"),
        (["--key", str(key)], "without --at, to which it belongs"),
    ):
        assert main(["jobs", "show", "--once", *words]) == 2
        assert message in capsys.readouterr().err
    save = ["--save", str(tmp_path / "jobs")]
    for listen in ("nowhere", "203.0.113.1:4000"):
        words = ["serve", "--cluster", "cpu:2", *save, "--listen", listen]
        assert main(["jobs", *words]) == 2
        assert f"--listen is {listen!r}"[:12] in capsys.readouterr().err
