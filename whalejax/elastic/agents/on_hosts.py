"""Starts and restarts agents of a run on hosts, through a remote shell."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.elastic.supervisor.run_folder import KEY
from whalejax.journals.journal import FOLDER
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending, exit_text
from whalejax.membership.restart_policy import Failures
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.processes.launch_spec import is_here, words_there
from whalejax.processes.local_processes import handled_signals, runs
from whalejax.processes.local_run import LocalRun
from whalejax.wire.keys import make_key


AGENTS: Final = "agents.json"
"""File with the process ids and start times of the commands that run agents."""

_LEFT_SECONDS: Final = 5.0
_END_SECONDS: Final = 30.0
_MOST_OUTPUT: Final = 10_000
_MOST_REFUSALS: Final = 3
"""Number of successive refusals after which a command is not started again."""


def agent_words(supervisor: str, logs: Path, name: str, processes: int) -> list[str]:
    """Returns the arguments with which Python starts an agent of a run."""
    return [
        *("-m", "whalejax", "agent", supervisor, "--name", name),
        *("--key", str((logs / FOLDER / KEY).absolute()), "--logs", str(logs)),
        *("--processes", str(processes)),
    ]


class HostAgents:
    """One agent on each host while a block runs; one that fails is restarted.

    A file in the run's folder lists the running commands. If this process is killed,
    its successor takes over the commands with the same supervisor address, and ends the
    others.

    Attributes:
        refused: Reason why a command is not started again, by host.
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
        environments: Mapping[str, Mapping[str, str]] = {},
        releases: Mapping[str, Sequence[str]] = {},
    ) -> None:
        """Stores the hosts; starts no agent yet.

        Args:
            shells: Remote shell by host, to which the host's name and a command are
                appended. Agents have the names of their hosts.
            supervisor: Host and port where the supervisor listens.
            logs: Folder of ``--logs``, with the same path on all hosts.
            processes: Largest number of processes on each host.
            hosts: Hosts that get an agent when the block begins; default: all.
            is_queued: Whether the command waits in a queue for any host. If so, an
                agent that was asked to leave is started again, possibly elsewhere.
            refusal: Function that finds the reason for a refusal in the output of a
                command, or returns an empty text. Default: no output is a refusal.
            environments: Environment variables of the command, by host.
            releases: Command that frees what a killed command leaves, by host.
        """
        self.refused: dict[str, str] = {}
        self._refusal = refusal
        self._shells, self._supervisor, self._logs = shells, supervisor, logs
        self._processes, self._is_queued = processes, is_queued
        self._environments = environments
        self._wanted = {*(shells if hosts is None else hosts)}
        self._over: Ending | None = None
        self._asked: set[str] = set()
        self._not_again: set[str] = set()
        self._due: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._output_from: dict[str, int] = {}
        self._failures = Failures(SupervisorSettings(least=1, most=1))
        self._loop = LocalRun(
            self,
            logs / FOLDER,
            say=tell_user,
            own_seconds=_END_SECONDS,
            asks=(_END_SECONDS,),
            releases=releases,
        )
        self._commands = self._loop.processes
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HostAgents:
        """Starts the first agents.

        Raises:
            WhaleError: The key of the run cannot be written.
        """
        make_key(self._logs / FOLDER / KEY)
        self._take_over()
        self._thread.start()
        return self

    def _take_over(self) -> None:
        """Takes over the commands of an earlier process that still run."""
        path = self._logs / FOLDER / AGENTS
        try:
            told = json.loads(path.read_text())
            earlier = {
                host: (int(pid), str(began))
                for host, (pid, began) in told["agents"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        for host, (pid, began) in earlier.items():
            if told.get("supervisor") == self._supervisor and host in self._shells:
                self._commands.adopt(host, pid, began)
                with contextlib.suppress(OSError):
                    self._output_from[host] = self._log(host).stat().st_size
            elif runs(pid, began):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _record(self) -> None:
        """Writes the commands that run to a file, for a process that takes over."""
        told = {"supervisor": self._supervisor, "agents": self._commands.identities()}
        path = self._logs / FOLDER / AGENTS
        with contextlib.suppress(OSError):  # Without the file nothing is taken over.
            part = path.with_name(f"{AGENTS}.part")
            part.write_text(json.dumps(told))
            part.replace(path)

    def set_hosts(self, hosts: Iterable[str]) -> None:
        """Starts agents on hosts that have none, and ends those of other hosts.

        Args:
            hosts: Names of hosts that have a shell.
        """
        wanted = {host for host in hosts if host in self._shells}
        with self._loop.lock:
            self._not_again -= wanted - self._wanted
            self._wanted = wanted

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the agents that have not ended with the run."""
        self._over = Ending.COMPLETE if exc is None else Ending.INTERRUPTED
        with handled_signals(lambda *_: None, signal.SIGINT):
            self._thread.join()

    def _run(self) -> None:
        self._loop.run()
        self._record()

    def words(self, host: str) -> list[str]:
        """Returns the local command that starts the agent of a host.

        >>> agents = HostAgents({"b": ["ssh"]}, "a:1", Path("logs"), processes=2)
        >>> agents.words("b")[:2]
        ['ssh', 'b']
        """
        words = agent_words(self._supervisor, self._logs, host, self._processes)
        agent = [sys.executable, *words]
        if is_here(host):
            return agent
        return words_there(self._shells[host], host, agent)

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        """Applies an event, and yields its effects; see ``RunPolicy``."""
        match event:
            case ev.Tick() if self._over is not None:
                yield ev.End(self._over, "")
            case ev.Tick():
                running = {*self._commands.names}
                for host in running - self._wanted - self._asked:
                    self._asked.add(host)
                    yield ev.TerminateEffect(host)
                missing = self._wanted - running - self._not_again - {*self.refused}
                for slot, host in enumerate(self._shells):
                    if host in missing:
                        if self._due.get(host, now) <= now:
                            yield ev.StartEffect(slot)
            case ev.NotStarted(slot=slot, why=why):
                host = [*self._shells][slot]
                yield self._restart(now, host, f"cannot be started: {why}")
            case ev.ProcessExitEvent(name=host, status=status):
                self._record()
                yield from self._on_end(now, host, status)

    def _on_end(self, now: float, host: str, status: int | None) -> Iterator[ev.Effect]:
        failed = status != 0  # None: the status of a command that was taken over.
        refused = self._refusal_since(host) if failed else ""
        self._refusals[host] = self._refusals.get(host, 0) + 1 if refused else 0
        was_asked = host in self._asked
        self._asked.discard(host)
        if was_asked or host not in self._wanted:
            return
        if self._refusals[host] >= _MOST_REFUSALS:
            self.refused[host] = refused
            yield ev.SayEffect(f"{host} is not asked for again: {refused}")
        elif failed:
            why = f"ended {exit_text(status)}; {self._log(host)} says more"
            yield self._restart(now, host, why)
        elif self._is_queued:
            # The run is over, or somebody else asked the agent to leave.
            self._due[host] = now + _LEFT_SECONDS
        else:
            self._not_again.add(host)

    def _restart(self, now: float, host: str, why: str) -> ev.Effect:
        seconds = self._failures.hold(now, [*self._shells].index(host))
        self._due[host] = now + seconds
        when = f" in {seconds:.0f} s" if seconds else ""
        return ev.SayEffect(f"the agent of {host} {why}. It is started again{when}")

    def _log(self, host: str) -> Path:
        return self._logs / FOLDER / f"agent-{host.replace('/', '_')}.log"

    def _refusal_since(self, host: str) -> str:
        if self._refusal is None:
            return ""
        try:
            with self._log(host).open("rb") as log:
                log.seek(self._output_from.get(host, 0))
                return self._refusal(log.read(_MOST_OUTPUT).decode(errors="replace"))
        except OSError:
            return ""

    def start(self, slot: int) -> None:
        """Starts the command of a host's agent.

        Raises:
            OSError: The command cannot be started now.
        """
        host = [*self._shells][slot]
        with self._log(host).open("ab") as log:
            self._output_from[host] = log.tell()
            try:
                self._commands.start(
                    host,
                    self._environments.get(host, {}),
                    command=self.words(host),
                    output=log.fileno(),
                )
            except WhaleError as error:  # It is tried again.
                raise OSError(str(error)) from error
        self._record()
        self._commands.release(host)
