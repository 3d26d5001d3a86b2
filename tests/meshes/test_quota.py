"""CPU quotas: real ones where they can be set, and clear words where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import whalejax as wh
from whalejax.distributed.cgroup_quota import Quota, why_no_quota


BUSY = (
    "import sys, time\nsys.stdin.read()\n"
    "start, used = time.time(), time.process_time()\n"
    "while time.time() - start < 1: pass\nprint(time.process_time() - used)"
)


@pytest.mark.skipif(bool(why_no_quota()), reason="no control group can be made here")
def test_a_process_gets_its_part_of_a_core() -> None:
    with Quota(20) as quota:
        process = subprocess.Popen(
            [sys.executable, "-c", BUSY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        quota.add(process.pid)
        used = float(process.communicate("")[0])
        path = quota._path
    assert used < 0.35
    assert path is not None and not path.exists()


def test_where_no_group_can_be_made_the_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(wh.WhaleError, match="no control group .* Run as root"):
        Quota(50, root=tmp_path / "none")


def test_the_second_version_is_written_as_it_is_read(tmp_path: Path) -> None:
    quota = Quota(50, root=tmp_path)
    (group,) = tmp_path.glob("whalejax-*")
    assert (group / "cpu.max").read_text() == "10000 20000"
    quota.weigh(30)
    assert (group / "cpu.weight").read_text() == "3000"
    quota.add(os.getpid())
    assert (group / "cgroup.procs").read_text() == str(os.getpid())


@pytest.mark.parametrize("percent", [0, -5, 1e9])
def test_no_percentage(percent: float) -> None:
    with pytest.raises(wh.WhaleError, match="expected 1 to"):
        Quota(percent)


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="needs a user to change from"
)
@pytest.mark.filterwarnings("ignore:.*fork")  # the child does nothing with JAX
def test_who_may_write_no_control_group_is_told_so() -> None:
    """A process of nobody's: the kernel refuses, and the reason is said."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            os.write(writer, why_no_quota().encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        text = said.read()
    assert "no control group for CPU quotas can be made here (" in text
    assert "Run as root" in text and "or go on without quotas" in text
