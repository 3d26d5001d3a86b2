"""Start one program as several processes that know each other, and stop them together.

For plain machines, without Slurm or Kubernetes: processes here are children of this
one, processes on other hosts come by ssh. JAX reads who is who from the environment
that each is given, so that ``wh.init_distributed()`` needs no argument. No JAX here: a
launcher must not take the devices of those that it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from whalejax.meshes.launched import (
    COORDINATOR,
    ENDS_FOR_ANOTHER,
    MARK,
    NUM_PROCESSES,
    PORT,
    PROCESS_ID,
)
from whalejax.meshes.problems import Problems, WhaleError
from whalejax.meshes.quota import Quota, check_quota


REMOTE_SHELL: Final = ("ssh", "-tt", "-o", "BatchMode=yes")
"""What a host and a command are handed to. ``-tt``: they end with the connection."""

GRACE_SECONDS: Final = 10.0
"""From the signal that asks processes to end to the one that ends them."""

SOON_SECONDS: Final = 1.0
"""Ranks that fail so soon after the first may have failed before it."""

TAIL_LINES: Final = 20
"""So much of a log is shown of the process that failed first."""

_FOR_ANOTHER: Final = (ENDS_FOR_ANOTHER, -signal.SIGABRT)
_HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG, linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is started, and where.

    Attributes:
        command: the words of the program, alike in all processes.
        processes: how many there are.
        hosts: names, in the order of ranks; each gets its part of the processes.
        quotas: CPU quotas in percent of a core, one per process; none: no quota.
        logs: folder of one log per rank, on this machine.
        port: where process 0 listens; a free one if left out and all is here.
        remote_shell: the words before a host's name and the command for it.
        tells: print the table of ranks, and rank 0's failure, which it has said itself.
        stops: when another rank than 0 fails, stop all; else the rest go on to their
            end, and it is named then.
        json: print how all ended as one line of JSON, and nothing else.
    """

    command: tuple[str, ...]
    processes: int
    hosts: tuple[str, ...] = ("localhost",)
    quotas: tuple[float, ...] = ()
    logs: Path = Path("logs")
    port: int | None = None
    remote_shell: tuple[str, ...] = REMOTE_SHELL
    tells: bool = True
    stops: bool = True
    json: bool = False

    def __post_init__(self) -> None:
        with Problems("launch") as problems:
            self._check(problems)

    def _check(self, problems: Problems) -> None:
        if self.processes < 1:
            problems.add(f"--processes is {self.processes}; expected at least 1")
        if not self.hosts or not all(self.hosts):
            problems.add("--hosts has an empty name; expected one or more, as in a,b")
        elif len(set(self.hosts)) < len(self.hosts):
            problems.add(f"--hosts {','.join(self.hosts)} has a host twice")
        elif self.processes < len(self.hosts):
            problems.add(
                f"--processes is {self.processes} on {len(self.hosts)} hosts; expected "
                f"at least one on each. Raise it to {len(self.hosts)}, or leave hosts "
                "out"
            )
        away = [host for host in self.hosts if not is_here(host)]
        if away and self.hosts[0] in _HERE:
            problems.add(
                f"--hosts begins with {self.hosts[0]}, which {', '.join(away)} cannot "
                f"reach under that name. Give it as {socket.gethostname()}"
            )
        if away and not shutil.which(self.remote_shell[0]):
            problems.add(
                f"--remote-shell: there is no program {self.remote_shell[0]!r} here, "
                f"and {', '.join(away)} are other hosts. Install it, or name another"
            )
        if self.port is not None and not 0 < self.port < 65536:
            problems.add(f"--port is {self.port}; expected 1 to 65535")
        if self.quotas and len(self.quotas) != self.processes:
            problems.add(
                f"--cpu-quota has {len(self.quotas)} values for {self.processes} "
                "processes; expected one for each"
            )
        for percent in self.quotas:
            try:
                check_quota(percent)
            except WhaleError as error:
                problems.add(f"--cpu-quota: {error}")
        if self.quotas and away:
            problems.add(
                f"--cpu-quota works on this machine only, and {', '.join(away)} are "
                "others"
            )

    def host_of(self, rank: int) -> str:
        """Where a rank runs; hosts get equal parts, in order."""
        return self.hosts[rank * len(self.hosts) // self.processes]

    def coordinator(self) -> str:
        """Where process 0 listens, ``"host:port"``."""
        if all(map(is_here, self.hosts)):
            return f"127.0.0.1:{self.port or free_port()}"
        return f"{self.hosts[0]}:{self.port or PORT}"

    def words(self, rank: int, environment: Mapping[str, str]) -> list[str]:
        """The command that starts a rank, from here.

        Args:
            rank: which.
            environment: what it is given beside the environment of its host.

        >>> launch = Launch(command=("python", "a b.py"), processes=1)
        >>> launch.words(0, {"X": "1"})
        ['python', 'a b.py']
        """
        host = self.host_of(rank)
        if is_here(host):
            return list(self.command)
        given = [f"{name}={value}" for name, value in environment.items()]
        there = f"cd {shlex.quote(os.getcwd())} && exec "
        there += shlex.join(["env", *given, *self.command])
        return [*self.remote_shell, host, there]


def is_here(host: str) -> bool:
    """Whether a host's name is one of this machine's.

    >>> is_here("localhost")
    True
    """
    return host in _HERE or host in (socket.gethostname(), socket.getfqdn())


def environment_of(rank: int, launch: Launch, coordinator: str) -> dict[str, str]:
    """What tells a process who is who."""
    return {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(launch.processes),
        PROCESS_ID: str(rank),
        "PYTHONUNBUFFERED": "1",
    }


def run(launch: Launch) -> int:
    """Start all processes and wait for them; when one fails, all are stopped.

    Rank 0 is shown as it writes, the others write their logs. Where one fails, the
    first that did is named, with the end of its log, if that was not shown. As JSON:
    ``status``, ``failure`` (that text, or null) and ``ranks``, each with its ``rank``,
    ``host``, ``kind`` and ``devices`` (null where it said nothing of them),
    ``cpu_quota_percent`` (null without one) and ``log``.

    Args:
        launch: what and where.

    Returns:
        0 if all ended well; else the status of the first that did not, 128 and its
        number where a signal ended it.

    Raises:
        WhaleError: the folder of logs or a process cannot be made.
    """
    try:
        launch.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhaleError(
            f"--logs {launch.logs}: {error.strerror}. Name a folder that can be made"
        ) from error
    with _terminated(), contextlib.ExitStack() as stack:
        group = _Group(launch, stack)
        try:
            group.start()
            return group.wait()
        finally:
            group.stop()


class _Group:
    """The processes of one launch."""

    def __init__(self, launch: Launch, stack: contextlib.ExitStack) -> None:
        self._launch = launch
        self._stack = stack
        self._running: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._said: dict[int, tuple[str, str]] = {}
        self._blamed: dict[int, str] = {}
        self._shown = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start every rank; only then threads, as forks and threads do not mix."""
        launch, coordinator = self._launch, self._launch.coordinator()
        for rank in range(launch.processes):
            given = environment_of(rank, launch, coordinator)
            words = launch.words(rank, given)
            try:
                process = subprocess.Popen(
                    words,
                    env={**os.environ, **given},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,  # noqa: PLW1509
                )
            except OSError as error:
                raise WhaleError(
                    f"rank {rank} cannot be started: {words[0]}: {error.strerror}"
                ) from error
            self._running.append(process)
        self._slow_down()
        for rank, process in enumerate(self._running):
            log = self._stack.enter_context(self.log(rank).open("wb"))
            self._thread(self._pump, rank, process, log)
            self._thread(self._reap, rank, process)

    def _thread(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _reap(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ended.put((rank, process.wait()))

    def _pump(
        self, rank: int, process: subprocess.Popen[bytes], log: IO[bytes]
    ) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # the log is closed: all has ended
            for line in process.stdout:
                if line.startswith(MARK.encode()):
                    self._introduced(rank, line.decode().removeprefix(MARK))
                    continue
                log.write(line)
                log.flush()
                if rank == 0 and not self._launch.json:
                    with contextlib.suppress(OSError):
                        sys.stdout.write(line.decode(errors="replace"))
                        sys.stdout.flush()
        process.stdout.close()

    def _introduced(self, rank: int, said: str) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(said)
            if "blames" in found:
                self._blamed.setdefault(int(found["blames"]), str(found["why"]))
                return
            self._said[rank] = str(found["kind"]), str(found["devices"])
        if len(self._said) == len(self._running):
            self._show()

    def _show(self) -> None:
        """Print the table, once: when all said what they have, or have ended."""
        with self._lock:
            if self._launch.tells and not (self._shown or self._launch.json):
                self._shown = True
                _say(self.table())

    def _slow_down(self) -> None:
        """Set the quotas, or say in one line why there are none."""
        try:
            for percent, process in zip(
                self._launch.quotas, self._running, strict=False
            ):
                self._stack.enter_context(Quota(percent)).add(process.pid)
        except WhaleError as error:
            _say(f"whalejax: running without CPU quotas: {error}")

    def log(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self._launch.logs / f"rank-{rank}.log"

    def table(self) -> str:
        """One line for each rank."""
        quotas = self._launch.quotas
        rows = [("rank", "host", "kind", "devices", "CPU quota", "log")] + [
            (
                str(rank),
                self._launch.host_of(rank),
                *self._said.get(rank, ("-", "-")),
                f"{quotas[rank]:g} %" if quotas else "-",
                str(self.log(rank)),
            )
            for rank in range(len(self._running))
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                word.ljust(width) for word, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        )

    def wait(self) -> int:
        """Wait for all, or for the first that fails, which is said."""
        failed: dict[int, int] = {}
        for _ in self._running:
            rank, status = self._ended.get()
            if status and (self._launch.stops or rank == 0):
                failed |= {rank: status, **self._failing()}
                break
            if status:
                failed[rank] = status
        self.stop()
        self._show()
        rank, status = next(iter(failed.items()), (0, 0))
        status = status if status >= 0 else 128 - status
        failure = self._failure(failed) if failed else None
        if self._launch.json:
            self._print(status, failure)
        elif failure and (self._launch.tells or rank):
            _say(failure)
        return status

    def _print(self, status: int, failure: str | None) -> None:
        """One line of JSON."""
        quotas = self._launch.quotas
        ranks = []
        for rank in range(len(self._running)):
            kind, devices = self._said.get(rank, (None, None))
            ranks.append(
                {
                    "rank": rank,
                    "host": self._launch.host_of(rank),
                    "kind": kind,
                    "devices": None if devices is None else int(devices),
                    "cpu_quota_percent": quotas[rank] if quotas else None,
                    "log": str(self.log(rank)),
                }
            )
        print(json.dumps({"status": status, "failure": failure, "ranks": ranks}))

    def _failing(self) -> dict[int, int]:
        """Ranks that fail in the moments after the first, and their status."""
        found = {}
        end = time.monotonic() + SOON_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                left = max(0.0, end - time.monotonic())
                rank, status = self._ended.get(timeout=left)
                if status:
                    found[rank] = status
        return found

    def _failure(self, failed: Mapping[int, int]) -> str:
        """Who failed first, and how.

        Args:
            failed: ranks in the order in which they did, and their status.
        """
        first = next(iter(failed))
        # Who ends for another one says so; JAX aborts those that a service has left.
        own = [rank for rank, status in failed.items() if status not in _FOR_ANOTHER]
        rank = next(iter((*self._blamed, *own, first)))
        if rank in failed and (rank in own or not self._blamed):
            how = f"failed first, with {_words(failed[rank])}"
        else:
            how = f"{self._blamed[rank]} (rank {first} ended for it)"
        stopped = self._launch.stops or 0 in failed
        went = "all others were stopped" if stopped else "the others went on"
        said = f"whalejax: rank {rank} on {self._launch.host_of(rank)} {how}; {went}."
        if rank == 0 and not self._launch.json:
            return f"{said} What it said stands above, and in {self.log(rank)}"
        text = self.log(rank).read_text(encoding="utf-8", errors="replace")
        lines = [f"  [{rank}] {line}" for line in text.splitlines()[-TAIL_LINES:]]
        # Logs of what tells nothing of its ranks are gone when it ends.
        where = f"The end of {self.log(rank)}" if self._launch.tells else "It said"
        return "\n".join([f"{said} {where}:", *lines])

    def stop(self) -> None:
        """End what still runs, and what it has started."""
        ask, force = signal.SIGTERM, signal.SIGKILL
        alive = [process for process in self._running if process.poll() is None]
        for process in alive:
            _signal(process, ask)
            _signal(process, signal.SIGCONT)  # one that stands still hears nothing
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        for process in self._running:
            _signal(process, force)
            process.wait()
        for thread in self._threads:
            thread.join(GRACE_SECONDS)


def _words(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The session that a rank began outlives it where its children do.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _die_with_parent() -> None:
    """A launcher that is killed outright takes its processes with it, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def words_after(words: Sequence[str]) -> list[str]:
    """The command line with the script and all behind it set apart by ``--``.

    What stands behind the script is the script's own, options too.

    >>> words_after(["--processes", "2", "train.py", "--steps", "3"])
    ['--processes', '2', '--', 'train.py', '--steps', '3']
    """
    for place, word in enumerate(words):
        if word == "--":
            break
        if word.endswith(".py"):
            return [*words[:place], "--", *words[place:]]
    return list(words)
