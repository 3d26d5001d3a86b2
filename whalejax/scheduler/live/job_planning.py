"""Plans jobs in the background, each in its own process.

Usually one job is planned at a time. If its planning takes long or hangs, the next job
is planned in parallel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from whalejax.meshes import Cluster
from whalejax.meshes.errors import visible
from whalejax.processes.local_processes import start_child
from whalejax.scheduler.live.requests import Add


_MOST_SECONDS: Final = 900.0
_ALONE_SECONDS: Final = 20.0
"""Seconds of planning a job after which the next one is planned in parallel."""

_MOST_AT_ONCE: Final = 4
_RESULTS: Final = ({"refused"}, {"batch", "options"})
"""Fields of the last line that a planning process prints."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanProcess:
    """A process that plans a job.

    ``output`` is the descriptor of its output file; ``began`` is a monotonic time.
    """

    name: str
    process: subprocess.Popen[bytes]
    output: int
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.output)


class Planning:
    """Queue of jobs to plan, and the processes that plan."""

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
        self._running: list[_PlanProcess] = []

    def submit(self, request: Add) -> None:
        """Adds a job to the end of the queue."""
        self._waiting.append(request)

    def withdraw(self, name: str) -> None:
        """Removes a job from the queue, or ends its planning."""
        self._waiting = deque(one for one in self._waiting if one.name != name)
        for one in [one for one in self._running if one.name == name]:
            self._running.remove(one)
            one.close()

    def close(self) -> None:
        """Ends all planning."""
        while self._running:
            self._running.pop().close()

    def poll(self) -> PlannedJob | None:
        """Returns a job whose planning has ended, or None.

        It starts to plan the next job if all running plannings take long.
        """
        for one in self._running:
            if one.process.poll() is not None:
                self._running.remove(one)
                return _planned_job(one)
            if one.seconds >= _MOST_SECONDS:
                self._running.remove(one)
                one.close()
                why = f"it was not planned in {_MOST_SECONDS:.0f} s"
                return PlannedJob(name=one.name, refusal=why)
        take_long = all(one.seconds >= _ALONE_SECONDS for one in self._running)
        if self._waiting and take_long and len(self._running) < _MOST_AT_ONCE:
            return self._begin(self._waiting.popleft())
        return None

    def _begin(self, request: Add) -> PlannedJob | None:
        """Starts to plan a job; returns its refusal if that fails."""
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
            process = start_child(
                [sys.executable, "-m", "whalejax.scheduler.live.plan_worker"],
                # Planning must not touch the jobs' devices.
                environment={"JAX_PLATFORMS": "cpu"},
                folder=request.folder,
                given=read,
                output=write,
            )
        except OSError as error:
            if write >= 0:
                os.close(write)
            return PlannedJob(
                name=request.name, refusal=f"it cannot be planned ({error})"
            )
        finally:
            if read >= 0:
                os.close(read)
        self._running.append(
            _PlanProcess(
                name=request.name,
                process=process,
                output=write,
                began=time.monotonic(),
            )
        )
        return None


def _result_in(lines: Sequence[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and told.keys() in _RESULTS:
            return told
    return None


def _planned_job(ended: _PlanProcess) -> PlannedJob:
    name = ended.name
    os.lseek(ended.output, 0, os.SEEK_SET)
    with os.fdopen(ended.output, "rb") as file:
        lines = file.read().decode(errors="replace").splitlines()
    told = _result_in(lines)
    if told is None:
        end = "\n".join(lines[-5:]) or "it printed nothing"
        status = ended.process.returncode
        text = f"planning it ended with status {status}: {visible(end)[-1000:]}"
        return PlannedJob(name=name, refusal=text)
    if "refused" in told:
        return PlannedJob(name=name, refusal=told["refused"])
    return PlannedJob(name=name, batch=told["batch"], options=tuple(told["options"]))
