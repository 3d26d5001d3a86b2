"""Plans jobs in the background, one at a time, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from whalejax.meshes import Cluster
from whalejax.meshes.texts import visible
from whalejax.scheduler.live.requests import Add


_MOST_SECONDS: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """Result of planning a job.

    Attributes:
        name: Name of the job.
        batch: Samples of its global batch.
        options: Options of its table, as fields of the journal.
        refusal: Reason why there is no plan; empty if there is one.
    """

    name: str
    batch: int = 0
    options: tuple[dict[str, Any], ...] = ()
    refusal: str = ""


class Planning:
    """Queue of jobs to plan, and the job that is being planned."""

    def __init__(
        self, cluster: Cluster, units: Mapping[str, int] | None = None
    ) -> None:
        """Prepares the queue; plans nothing yet.

        Args:
            cluster: Devices that the jobs share.
            units: Number of devices that a job gets together, by kind; default: 1.
        """
        self._cluster, self._units = cluster, dict(units or {})
        self._waiting: deque[Add] = deque()
        self._planned: Add | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._output = 0.0, -1

    def submit(self, request: Add) -> None:
        """Adds a job to the end of the queue."""
        self._waiting.append(request)

    def withdraw(self, name: str) -> None:
        """Removes a job from the queue, or ends its planning."""
        self._waiting = deque(one for one in self._waiting if one.name != name)
        if self._planned is not None and self._planned.name == name:
            self.close()

    def close(self) -> None:
        """Ends the current planning."""
        if self._process is not None:
            _end_group(self._process)
            os.close(self._output)
        self._process = self._planned = None

    def poll(self) -> PlannedJob | None:
        """Returns the job whose planning has ended, or None; starts the next one if
        nothing is being planned.
        """
        if self._process is None:
            return self._begin()
        if self._process.poll() is None:
            if time.monotonic() - self._began < _MOST_SECONDS:
                return None
            _end_group(self._process)
            return self._finish_planning(f"it was not planned in {_MOST_SECONDS:.0f} s")
        return self._finish_planning("")

    def _begin(self) -> PlannedJob | None:
        """Begins to plan the next job; returns its refusal if that fails."""
        if not self._waiting:
            return None
        request = self._planned = self._waiting.popleft()
        cluster, units = self._cluster.to_json(), self._units
        told = {**request.fields, "cluster": cluster, "units": units}
        most = min(request.devices[1], self._cluster.num_devices)
        told["devices"] = [request.devices[0], most]
        read = write = -1
        try:
            read = os.memfd_create("plan")
            write = os.memfd_create("table")
            os.write(read, json.dumps(told).encode())
            os.lseek(read, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "whalejax.scheduler.live.plan_worker"],
                cwd=request.folder,
                # It touches no device of the jobs.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdin=read,
                stdout=write,
                stderr=write,
                start_new_session=True,
            )
        except OSError as error:  # Too many files or processes, or its folder is gone.
            if write >= 0:
                os.close(write)
            return PlannedJob(
                name=request.name, refusal=f"it cannot be planned ({error})"
            )
        finally:
            if read >= 0:
                os.close(read)
        self._output, self._began = write, time.monotonic()
        return None

    def _finish_planning(self, why: str) -> PlannedJob:
        assert self._process is not None and self._planned is not None
        name, status = self._planned.name, self._process.wait()
        self._process = self._planned = None
        os.lseek(self._output, 0, os.SEEK_SET)
        with os.fdopen(self._output, "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
        if why:
            return PlannedJob(name=name, refusal=why)
        try:
            told = json.loads(lines[-1])
        except (ValueError, IndexError):
            end = "\n".join(lines[-5:]) or "it printed nothing"
            text = f"planning it ended with status {status}: {visible(end)[-1000:]}"
            return PlannedJob(name=name, refusal=text)
        if "refused" in told:
            return PlannedJob(name=name, refusal=told["refused"])
        options = tuple(told["options"])
        return PlannedJob(name=name, batch=told["batch"], options=options)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
