"""The elastic run of a job: starts its supervisor, resizes it and reads its journal.

The supervisor and its members are separate processes, which continue if the scheduler
ends. Their state is in the job's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from whalejax.elastic.supervisor.supervisor import ADDRESS, KEY
from whalejax.journals.journal import FOLDER
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import end_of_log, start_child
from whalejax.scheduler.live.job_hosts import JobHosts
from whalejax.scheduler.live.requests import Add
from whalejax.scheduler.live.run_reader import METRICS, RunReader
from whalejax.state.folder_lock import is_held
from whalejax.wire.connection import dial
from whalejax.wire.keys import load_key
from whalejax.wire.messages import WireError
from whalejax.wire.run_messages import TO_SCHEDULER, RegistrationRefused, Resize


FRONT: Final = "front"
"""Folder locked by the process that keeps the supervisor running."""

LOG: Final = "supervisor.log"
PORT: Final = "port"
HOSTS: Final = "hosts.json"
"""File with the hosts on which the run needs an agent, and the Unix times of need."""

REFUSALS: Final = "refusals.json"
"""File with the hosts that are no longer requested, and the reasons."""

CHECKPOINTS: Final = "checkpoints"
_ASK_SECONDS: Final = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobLaunch:
    """Command of the process that keeps a job's supervisor running.

    Attributes:
        home: Folder of the job.
        options: Options of ``whalejax train`` for a member.
        least, most: Minimum and maximum number of members of the run.
        first: Number of members at its start.
        devices: Names of devices, as from ``JobDevices.masks``; None on the CPUs of one
            host.
        hosts: Hosts on which the members run; None for this machine alone.
        port: Port at which agents of these hosts reach the supervisor.
        platform: Platform of the devices, ``"cpu"`` or ``"gpu"``; JAX chooses if empty.
    """

    home: str
    options: dict[str, Any]
    least: int
    most: int
    first: int
    devices: list[str] | None = None
    hosts: JobHosts | None = None
    port: int = 0
    platform: str = ""


class JobRun:
    """The run of one job.

    Attributes:
        home: Folder of the job.
        reader: Reader of its journal.
        refusal: Reason why its supervisor last refused a resize or could not start.
        wanted_hosts: Hosts that need an agent, with the Unix time since which they do.
    """

    def __init__(
        self,
        home: Path,
        request: Add,
        pool: ThreadPoolExecutor,
        hosts: JobHosts | None = None,
    ) -> None:
        """Stores the folder; starts no process.

        Args:
            home: Folder of the job.
            request: Request that added the job.
            pool: Threads that send requests to supervisors.
            hosts: Hosts on which its members run; None for this machine alone.
        """
        self.home, self._request, self._pool = home, request, pool
        self._hosts = hosts
        self.reader = RunReader(home, reads_noise=request.most_batch is not None)
        self.refusal = ""
        self._front: subprocess.Popen[bytes] | None = None
        self._asking: Future[str] | None = None
        self._starts_before = 0
        self.wanted_hosts: dict[str, float] = read_hosts(home)

    def poll(self) -> None:
        """Reads events of the journal, and the answer to a request."""
        if self._asking is not None and self._asking.done():
            self.refusal, self._asking = self._asking.result(), None
        self.reader.poll()

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor, or the process that restarts it, is running."""
        if self._front is not None and self._front.poll() is None:
            return True
        return is_held(self.home / FRONT) or is_held(self.home / FOLDER)

    @property
    def lacks_front(self) -> bool:
        """Whether its supervisor runs, but not the process that keeps the agents."""
        is_there = self._front is not None and self._front.poll() is None
        if self._hosts is None or is_there or is_held(self.home / FRONT):
            return False
        return is_held(self.home / FOLDER)

    @property
    def has_opened(self) -> bool:
        """Whether the last started supervisor has written to its journal."""
        return self.reader.starts > self._starts_before

    @property
    def is_asking(self) -> bool:
        """Whether a request to the supervisor is unanswered."""
        return self._asking is not None

    def status(self) -> int | None:
        """Returns the exit status of the last started process, or None."""
        return None if self._front is None else self._front.poll()

    def start(
        self,
        least: int,
        most: int,
        size: int,
        devices: Sequence[str],
        *,
        batch: int = 0,
        steps: int = 0,
        rate: float = 1.0,
        platform: str = "",
    ) -> None:
        """Starts the run, from its newest checkpoint if there is one.

        The supervisor takes over members that have lost an earlier supervisor.

        Args:
            least, most: Minimum and maximum number of members.
            size: Number of members at the start.
            devices: Names of the members' devices, by slot; empty on the CPUs of one
                host.
            batch: Samples of the global batch; 0 for the request's value.
            steps: Number of steps after which the run ends; 0 for the request's value.
            rate: Ratio of the learning rate to that of the job's own batch.
            platform: ``"cpu"`` or ``"gpu"``; JAX chooses if empty.

        Raises:
            OSError: The process cannot be started.
        """
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        request = self._request
        launched = JobLaunch(
            home=str(self.home.absolute()),
            options={
                "model": request.model,
                "set": request.settings,
                "batch": batch or request.batch,
                "steps": steps or request.steps,
                "noise_scale": request.most_batch is not None,
                "rate_factor": rate,
                "save": str((self.home / CHECKPOINTS).absolute()),
                "save_every": request.save_every,
                "micro_batches": request.micro_batches,
                "precision": request.precision,
                "seed": request.seed,
                "mesh": request.mesh,
                "metrics": str((self.home / METRICS).absolute()),
            },
            least=least,
            most=most,
            first=size,
            devices=list(devices) or None,
            hosts=self._hosts,
            port=0 if self._hosts is None else self._port(),
            platform=platform,
        )
        (self.home / REFUSALS).unlink(missing_ok=True)
        if not is_held(self.home / FOLDER):
            self._starts_before = self.reader.starts
        words = [sys.executable, "-m", "whalejax.scheduler.live.job_supervisor"]
        with (self.home / LOG).open("ab") as log:
            self._front = start_child(
                [*words, json.dumps(dataclasses.asdict(launched))],
                folder=request.folder,
                output=log.fileno(),
            )

    def want_hosts(self, hosts: Iterable[str]) -> None:
        """Sets the hosts on which the run needs an agent.

        Args:
            hosts: Names of the hosts.
        """
        now = time.time()
        wanted = {host: self.wanted_hosts.get(host, now) for host in hosts}
        if wanted == self.wanted_hosts:
            return
        with contextlib.suppress(OSError):  # The next turn retries.
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace_json(self.home / HOSTS, wanted)
            self.wanted_hosts = wanted

    def refused_hosts(self) -> dict[str, str]:
        """Returns the hosts that the run no longer requests, with the reasons."""
        if self._hosts is None or not self.is_alive:
            return {}
        try:
            return _read_json(self.home / REFUSALS)
        except OSError:  # The next turn retries.
            return {}

    def alike_hosts(self, host: str) -> list[str]:
        """Returns all hosts with the same command as a host, including that host."""
        shells = {} if self._hosts is None else self._hosts.shells
        return [name for name, words in shells.items() if words == shells.get(host)]

    def _port(self) -> int:
        """Returns a free port, or the one at which its members expect a supervisor."""
        path = self.home / PORT
        if self.reader.held_slots and path.exists():
            with contextlib.suppress(ValueError):  # an empty file after a crash
                return int(path.read_text())
        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        path.write_text(str(port))
        return port

    def resize(self, size: int, devices: Sequence[str]) -> None:
        """Asks the supervisor for another number of members; 0 ends the run.

        It does nothing while another request is unanswered. The result is in the run's
        journal; the reason of a refusal is in ``refusal``.

        Args:
            size: Number of members.
            devices: Argument of ``start``.
        """
        if self._asking is None:
            told = list(devices) or None
            self._asking = self._pool.submit(_ask, self.home, size, told)

    def end_of_log(self) -> str:
        """Returns the last lines of the supervisor's log."""
        return _last_lines(self.home / LOG, 3)

    def missing_agent(self) -> str:
        """Returns text about a host without an agent; empty if all have one."""
        for host in self.wanted_hosts if self.is_alive else ():
            if host not in self.reader.agents:
                line = _last_lines(self.home / FOLDER / f"agent-{host}.log", 1)
                return f"{host} has no agent yet{f': {line}' if line else ''}"
        return ""


def _last_lines(path: Path, count: int) -> str:
    lines = end_of_log(path).splitlines()
    return "\n".join([line for line in lines if line.strip()][-count:])


def read_hosts(home: Path) -> dict[str, float]:
    """Returns the hosts on which a job's run needs an agent, with the times of need.

    Args:
        home: Folder of the job.
    """
    return _read_json(home / HOSTS)


def write_refusals(home: Path, refused: Mapping[str, str]) -> None:
    """Writes the hosts that a job's run no longer requests.

    Args:
        home: Folder of the job.
        refused: Reasons by host.

    Raises:
        OSError: The file cannot be written.
    """
    _replace_json(home / REFUSALS, refused)


def _replace_json(path: Path, value: Mapping[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):  # an empty file after a crash
        return {}


def _ask(home: Path, size: int, devices: list[str] | None) -> str:
    """Asks a supervisor to resize its run; returns why it refuses, or an empty text."""
    folder = home / FOLDER
    try:
        said = json.loads((folder / ADDRESS).read_text())["address"]
        host, _, port = said.rpartition(":")
        key = load_key(folder / KEY)
        channel = dial((host.strip("[]"), int(port)), key, seconds=_ASK_SECONDS)
    except (OSError, ValueError, KeyError, WhaleError) as error:
        return f"its supervisor does not answer ({error})"
    try:
        channel.send(Resize(size=size, devices=devices), seconds=_ASK_SECONDS)
        answer = channel.receive(TO_SCHEDULER, seconds=_ASK_SECONDS)
    except WireError as error:
        return f"its supervisor does not answer ({error})"
    finally:
        channel.close()
    return answer.why if isinstance(answer, RegistrationRefused) else ""
