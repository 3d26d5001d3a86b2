"""Agents of a run on named hosts, started by a remote shell and started again."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from whalejax.elastic.agents.agent import FOLDER
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.membership.exit_status import exit_text
from whalejax.processes.launch_spec import is_here, words_there
from whalejax.wire.keys import make_key


KEY: Final = "key"
_HOLD_SECONDS: Final = 1.0
_MOST_HOLD_SECONDS: Final = 60.0
_END_SECONDS: Final = 30.0


def agent_words(supervisor: str, logs: Path, name: str, processes: int) -> list[str]:
    """The words behind a Python that start an agent of a run with these logs."""
    return [
        *("-m", "whalejax", "agent", supervisor, "--name", name),
        *("--key", str((logs / FOLDER / KEY).absolute()), "--logs", str(logs)),
        *("--processes", str(processes)),
    ]


class HostAgents:
    """One agent on each host while a block runs; one that fails is started again."""

    def __init__(
        self,
        hosts: Sequence[str],
        supervisor: str,
        logs: Path,
        *,
        processes: int,
        remote_shell: Sequence[str],
    ) -> None:
        """Names the hosts; starts no agent yet.

        Args:
            hosts: Their names, which are the agents' too.
            supervisor: Host and port where it listens.
            logs: Folder of ``--logs``, of the same name on all hosts.
            processes: Largest number of processes on each host.
            remote_shell: Words before a host's name and the command for it.
        """
        self._hosts, self._supervisor, self._logs = hosts, supervisor, logs
        self._processes, self._remote_shell = processes, remote_shell
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> HostAgents:
        """Starts them.

        Raises:
            WhaleError: The key of the run cannot be written.
        """
        make_key(self._logs / FOLDER / KEY)
        for host in self._hosts:
            thread = threading.Thread(target=self._keep, args=(host,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the agents that have not ended with the run."""
        self._over.set()
        with self._lock:
            running = [*self._running.values()]
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS if exc is None else 0.0)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def words(self, host: str) -> list[str]:
        """The command that starts the agent of a host, from here.

        >>> agents = HostAgents(
        ...     ["b"], "a:1", Path("logs"), processes=2, remote_shell=["ssh"]
        ... )
        >>> agents.words("b")[:2]
        ['ssh', 'b']
        """
        words = agent_words(self._supervisor, self._logs, host, self._processes)
        agent = [sys.executable, *words]
        if is_here(host):
            return agent
        return words_there(self._remote_shell, host, agent)

    def _keep(self, host: str) -> None:
        """Starts an agent, again where it fails, after a growing while."""
        hold = _HOLD_SECONDS
        path = self._logs / FOLDER / f"agent-{host.replace('/', '_')}.log"
        while not self._over.is_set():
            try:
                with path.open("ab") as log:
                    process = subprocess.Popen(
                        self.words(host),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                tell_user(f"the agent of {host} cannot be started: {error.strerror}")
                self._over.wait(hold)
                continue
            with self._lock:
                self._running[host] = process
            status = process.wait()
            if status == 0 or self._over.is_set():
                return
            why = f"ended {exit_text(status)}; {path} says more"
            tell_user(f"the agent of {host} {why}. It is started again in {hold:.0f} s")
            self._over.wait(hold)
            hold = min(2 * hold, _MOST_HOLD_SECONDS)
