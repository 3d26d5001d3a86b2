"""CPU quotas by Linux control groups, to test mixed speeds on one machine.

A process with a quota of 33 percent of a core runs for that part of each period of 20
ms and then waits, so on average it is like a slower processor. Quotas need write access
to the ``cpu`` controller (version 1) or the unified hierarchy (version 2), which
usually only root has.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from whalejax.meshes.errors import WhaleError


ROOT: Final = Path("/sys/fs/cgroup")

PERIOD_MICROSECONDS: Final = 20_000
"""Period of a quota, which is short so that steps have an even speed."""


class Quota:
    """A control group whose processes together get a fraction of a core.

    Use it in a ``with`` statement: on exit the group is removed, and its running
    processes return to the parent group.
    """

    def __init__(self, percent: float, *, root: Path = ROOT) -> None:
        """Creates the control group.

        Args:
            percent: Percentage of one core; above 100 for more than one.
            root: Mount point of the control groups.

        Raises:
            WhaleError: ``percent`` is less than 1 or more than all cores have, or no
                group can be created here.
        """
        self._path: Path | None = None
        check_quota(percent)
        problem = "nothing is mounted"
        for parent, v2 in ((root / "cpu", False), (root, True)):
            path = parent / f"whalejax-{os.getpid()}-{id(self):x}"
            try:
                if v2:
                    (parent / "cgroup.subtree_control").write_text("+cpu")
                path.mkdir()
            except OSError as error:
                problem = f"{parent}: {error.strerror}"
                continue
            self._path, self._v2 = path, v2
            try:
                self.set(percent)
            except OSError as error:
                self.close()
                problem = f"{path}: {error.strerror}"
                continue
            return
        raise WhaleError(
            f"no control group for CPU quotas can be made here ({problem}). Run as "
            "root where the cpu controller is mounted for writing, or go on without "
            "quotas"
        )

    def set(self, percent: float) -> None:
        """Changes the quota.

        Args:
            percent: Percentage of one core.

        Raises:
            WhaleError: It is less than 1, or more than all cores have.
        """
        check_quota(percent)
        assert self._path is not None
        quota = round(PERIOD_MICROSECONDS * percent / 100)
        if self._v2:
            (self._path / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
            return
        (self._path / "cpu.cfs_quota_us").write_text("-1")
        (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (self._path / "cpu.cfs_quota_us").write_text(str(quota))

    def weigh(self, times: float) -> None:
        """Sets the group's weight, so that it gets its quota even on a busy machine.

        Args:
            times: Weight relative to one other process of the machine.
        """
        assert self._path is not None
        if self._v2:
            (self._path / "cpu.weight").write_text(str(round(100 * times)))
        else:
            (self._path / "cpu.shares").write_text(str(round(1024 * times)))

    def add(self, pid: int) -> None:
        """Applies the quota to a process and to its later children.

        Raises:
            WhaleError: The process does not exist.
        """
        assert self._path is not None
        try:
            (self._path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise WhaleError(
                f"process {pid} cannot be put under a quota ({error.strerror}); has it "
                "ended?"
            ) from error

    def close(self) -> None:
        """Removes the group; running processes return to the parent group."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            for pid in (self._path / "cgroup.procs").read_text().split():
                (self._path.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            self._path.rmdir()
        self._path = None

    def __enter__(self) -> Quota:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def why_no_quota() -> str:
    """Returns why no CPU quota can be set here; empty if one can."""
    try:
        with Quota(100):
            return ""
    except WhaleError as error:
        return str(error)


def check_quota(percent: float) -> None:
    """Refuses an invalid quota.

    Args:
        percent: Percentage of one core.

    Raises:
        WhaleError: It is less than 1, or more than all cores have.
    """
    if not 1 <= percent <= 100 * (os.cpu_count() or 1):
        raise WhaleError(
            f"a CPU quota of {percent} percent of a core; expected 1 to "
            f"{100 * (os.cpu_count() or 1)}"
        )
