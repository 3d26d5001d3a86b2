"""Starts and restarts agents of a run on hosts, through a remote shell."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from whalejax.elastic.agents.agent import FOLDER
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.membership.exit_status import exit_text
from whalejax.processes.launch_spec import is_here, words_there
from whalejax.processes.local_processes import began_at, runs, start_child
from whalejax.wire.keys import make_key


KEY: Final = "key"
AGENTS: Final = "agents.json"
"""File with the commands of agents that run: their process ids and start times."""

_LOOK_SECONDS: Final = 0.2
_LOST_STATUS: Final = 1
_HOLD_SECONDS: Final = 1.0
_MOST_HOLD_SECONDS: Final = 60.0
_LEFT_SECONDS: Final = 5.0
_END_SECONDS: Final = 30.0
_MOST_OUTPUT: Final = 10_000
_MOST_REFUSALS: Final = 3
"""Number of refusals of a command in a row after which it is not started again."""


def agent_words(supervisor: str, logs: Path, name: str, processes: int) -> list[str]:
    """Returns the arguments of Python that start an agent of a run with these logs."""
    return [
        *("-m", "whalejax", "agent", supervisor, "--name", name),
        *("--key", str((logs / FOLDER / KEY).absolute()), "--logs", str(logs)),
        *("--processes", str(processes)),
    ]


class _EarlierAgent:
    """Command of an agent, started by an earlier process that was killed."""

    def __init__(self, pid: int, began: str) -> None:
        self.pid, self._began = pid, began

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; its status is not known.

        Raises:
            TimeoutExpired: It still runs after that many seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while runs(self.pid, self._began):
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return _LOST_STATUS

    def terminate(self) -> None:
        """Asks it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if runs(self.pid, self._began):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class HostAgents:
    """One agent on each host while a block runs; one that fails is restarted.

    The commands that run are in a file of the run's folder: if this process is killed,
    the next one takes them over, or ends them if they are agents of another supervisor.

    Attributes:
        refused: Reasons of hosts whose command is not started again, by host.
    """

    def __init__(
        self,
        shells: Mapping[str, Sequence[str]],
        supervisor: str,
        logs: Path,
        *,
        processes: int,
        hosts: Iterable[str] | None = None,
        is_queued: bool = False,
        refusal: Callable[[str], str] | None = None,
    ) -> None:
        """Stores the hosts; starts no agent yet.

        Args:
            shells: Command that runs another on a host, by the host's name, which is
                appended to it. Agents have the names of the hosts.
            supervisor: Host and port where the supervisor listens.
            logs: Folder of ``--logs``, with the same path on all hosts.
            processes: Largest number of processes on each host.
            hosts: Hosts that get an agent when the block begins; default: all.
            is_queued: Whether the command waits in a queue for a host of any name: an
                agent that was asked to leave is then started again, on another one.
            refusal: Function that returns the reason of a refusal that the output of a
                command contains, or an empty text; default: nothing is a refusal.
        """
        self.refused: dict[str, str] = {}
        self._refusal = refusal
        self._shells, self._supervisor, self._logs = shells, supervisor, logs
        self._processes, self._is_queued = processes, is_queued
        self._first = [*(shells if hosts is None else hosts)]
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._running: dict[str, subprocess.Popen[bytes] | _EarlierAgent] = {}
        self._threads: dict[str, threading.Thread] = {}

    def __enter__(self) -> HostAgents:
        """Starts the first agents.

        Raises:
            WhaleError: The key of the run cannot be written.
        """
        make_key(self._logs / FOLDER / KEY)
        self._take_over()
        self.set_hosts(self._first)
        return self

    def _take_over(self) -> None:
        """Takes over the commands of an earlier process that still run."""
        path = self._logs / FOLDER / AGENTS
        try:
            told = json.loads(path.read_text())
            earlier = {
                host: _EarlierAgent(int(pid), str(began))
                for host, (pid, began) in told["agents"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        for host, agent in earlier.items():
            if told.get("supervisor") == self._supervisor and host in self._shells:
                self._running[host] = agent
                thread = threading.Thread(target=self._keep, args=(host,), daemon=True)
                self._threads[host] = thread
                thread.start()
            else:
                agent.terminate()

    def _record(self) -> None:
        """Writes the commands that run to a file, for a process that takes over."""
        agents = {h: [p.pid, began_at(p.pid)] for h, p in self._running.items()}
        told = {"supervisor": self._supervisor, "agents": agents}
        path = self._logs / FOLDER / AGENTS
        with contextlib.suppress(OSError):  # Of a full disk: nothing can take over.
            part = path.with_name(f"{AGENTS}.part")
            part.write_text(json.dumps(told))
            part.replace(path)

    def set_hosts(self, hosts: Iterable[str]) -> None:
        """Starts agents on hosts that have none, and ends those of other hosts.

        Args:
            hosts: Names of hosts that have a shell.
        """
        wanted = {host for host in hosts if host in self._shells}
        with self._lock:
            ended = [p for host, p in self._running.items() if host not in wanted]
            new, self._wanted = wanted - self._wanted, wanted
            for host in sorted(new - self._threads.keys() - self.refused.keys()):
                thread = threading.Thread(target=self._keep, args=(host,), daemon=True)
                self._threads[host] = thread
                thread.start()
        for process in ended:
            process.terminate()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the agents that have not ended with the run."""
        self._over.set()
        with self._lock:
            running, threads = [*self._running.values()], [*self._threads.values()]
        end = time.monotonic() + (_END_SECONDS if exc is None else 0.0)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.terminate()
        end = time.monotonic() + _END_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
        for thread in threads:
            thread.join(_END_SECONDS)

    def words(self, host: str) -> list[str]:
        """Returns the command that starts the agent of a host, from here.

        >>> agents = HostAgents({"b": ["ssh"]}, "a:1", Path("logs"), processes=2)
        >>> agents.words("b")[:2]
        ['ssh', 'b']
        """
        words = agent_words(self._supervisor, self._logs, host, self._processes)
        agent = [sys.executable, *words]
        if is_here(host):
            return agent
        return words_there(self._shells[host], host, agent)

    def _is_wanted(self, host: str) -> bool:
        return host in self._wanted and not self._over.is_set()

    def _keep(self, host: str) -> None:
        """Starts an agent; restarts it after increasing delays if it fails."""
        hold, refusals = _HOLD_SECONDS, 0
        path = self._logs / FOLDER / f"agent-{host.replace('/', '_')}.log"
        while True:
            place = path.stat().st_size if path.exists() else 0
            with self._lock:
                process = self._running.get(host)  # Of an earlier process.
                if process is None and not self._is_wanted(host):
                    del self._threads[host]
                    return
                try:
                    if process is None:
                        process = self._running[host] = self._start(host, path)
                        self._record()
                except OSError as error:
                    why = error.strerror
            if process is None:
                tell_user(f"the agent of {host} cannot be started: {why}")
                self._over.wait(hold)
                continue
            began, status = time.monotonic(), process.wait()
            refused = self._refusal_since(path, place) if status else ""
            refusals = refusals + 1 if refused else 0
            if time.monotonic() - began > _MOST_HOLD_SECONDS:
                hold = _HOLD_SECONDS
            with self._lock:
                del self._running[host]
                self._record()
                if not self._is_wanted(host):
                    continue
                if refusals >= _MOST_REFUSALS:
                    self.refused[host] = refused
                    del self._threads[host]
                    tell_user(f"{host} is not asked for again: {refused}")
                    return
                if status == 0 and not self._is_queued:
                    del self._threads[host]
                    return
            if status == 0:
                # The run is over, or somebody else asked the agent to leave.
                self._over.wait(_LEFT_SECONDS)
                continue
            why = f"ended {exit_text(status)}; {path} says more"
            tell_user(f"the agent of {host} {why}. It is started again in {hold:.0f} s")
            self._over.wait(hold)
            hold = min(2 * hold, _MOST_HOLD_SECONDS)

    def _refusal_since(self, path: Path, place: int) -> str:
        """Returns the reason of a refusal in the output of a command that has ended."""
        if self._refusal is None:
            return ""
        try:
            with path.open("rb") as log:
                log.seek(place)
                return self._refusal(log.read(_MOST_OUTPUT).decode(errors="replace"))
        except OSError:
            return ""

    def _start(self, host: str, path: Path) -> subprocess.Popen[bytes]:
        with path.open("ab") as log:
            return start_child(self.words(host), output=log.fileno())
