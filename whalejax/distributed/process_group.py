"""The processes of one launch: started, looked after, stopped together.

Apart from what is launched (``launch_spec``) and from what becomes of their output
(``process_output``). Every wait here has an end: for one that fails, that stands still,
that does not end with the others, or that does not obey.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from whalejax.distributed.cgroup_quota import Quota
from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    Blamed,
    Introduced,
    Joining,
)
from whalejax.distributed.launch_spec import Launch
from whalejax.distributed.process_output import Log, Pump, TerminalOutput
from whalejax.distributed.standard_streams import drop_stdout, say
from whalejax.meshes.errors import WhaleError


GRACE_SECONDS: Final = 10.0
"""From the signal that asks processes to end to the one that ends them."""

SOON_SECONDS: Final = 1.0
"""Ranks that fail so soon after the first may have failed before it."""

LOOK_SECONDS: Final = 1.0
"""Between two looks at ranks that may stand still."""

STOPPED_LOOKS: Final = 20
"""A rank that a signal has stopped for so many looks is taken for failed."""

TAIL_LINES: Final = 20
"""So much of what it said is shown of the process that failed first."""

UNPRINTED: Final = 2
"""Status where all ended well, and how they did cannot be printed."""

_FOR_ANOTHER: Final = (ENDS_FOR_ANOTHER, -signal.SIGABRT)
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG, linux/prctl.h


class ProcessGroup:
    """The processes of one launch."""

    def __init__(self, launch: Launch, stack: contextlib.ExitStack) -> None:
        """Make the logs; start nothing yet.

        Args:
            launch: what is started.
            stack: closes what is opened here.

        Raises:
            WhaleError: a log cannot be made.
        """
        self._launch = launch
        self._stack = stack
        self._running: list[subprocess.Popen[bytes]] = []
        self._pumps: list[Pump] = []
        self._threads: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._said: dict[int, Introduced] = {}
        self._blamed: dict[int, str] = {}
        self._joining: set[int] = set()
        self._stopped: dict[int, int] = {}
        self._over: set[int] = set()
        self._shown = False
        self._terminal = TerminalOutput(say)
        self._lock = threading.Lock()
        self._logs = []
        for rank in range(launch.processes):
            log = Log(self.log(rank), say)
            self._stack.callback(log.close)
            self._logs.append(log)

    def start(self, coordinator: str, given: Mapping[str, str]) -> None:
        """Start every rank; only then threads, as forks and threads do not mix.

        Args:
            coordinator: where process 0 listens.
            given: what the environment of each gets beside who is who.
        """
        launch = self._launch
        if launch.tells and not launch.json:
            say(f"whalejax: {launch.listens(coordinator)}")
            if warning := launch.gpus_shared():
                say(f"whalejax: {warning}")
        for rank in range(launch.processes):
            own = {**launch.environment_of(rank, coordinator), **given}
            words = launch.words(rank, own)
            try:
                process = subprocess.Popen(
                    words,
                    env={**os.environ, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=die_with_parent,  # noqa: PLW1509
                )
            except OSError as error:
                raise WhaleError(
                    f"rank {rank} cannot be started: {words[0]}: {error.strerror}"
                ) from error
            self._running.append(process)
        self._slow_down()
        for rank, process in enumerate(self._running):
            self._pumps.append(self._pump(rank, process))
            self._thread(self._pumps[rank].run)
            self._thread(self._reap, rank, process)

    def _thread(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _reap(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ended.put((rank, process.wait()))

    def _pump(self, rank: int, process: subprocess.Popen[bytes]) -> Pump:
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        shows = rank == 0 and not self._launch.json
        outputs = (self._logs[rank], *((self._terminal,) if shows else ()))
        return Pump(
            process.stdout.fileno(), outputs, lambda found: self._told(rank, found)
        )

    def _told(self, rank: int, found: Introduced | Blamed | Joining) -> bool:
        """Note what a rank says; False if it cannot be true."""
        if isinstance(found, Joining):
            self._joining.add(rank)
            return True
        if isinstance(found, Blamed):
            if not (found.rank < len(self._running) and found.rank != rank):
                return False
            self._blamed.setdefault(found.rank, found.why)
            return True
        self._said[rank] = found
        if len(self._said) == len(self._running):
            self._show()
        return True

    def _show(self) -> None:
        """Print the table, once: when all said what they have, or have ended."""
        with self._lock:
            if self._launch.tells and not (self._shown or self._launch.json):
                self._shown = True
                say(self.table())

    def _slow_down(self) -> None:
        """Set the quotas, or say in one line why there are none."""
        try:
            for percent, process in zip(
                self._launch.quotas, self._running, strict=False
            ):
                self._stack.enter_context(Quota(percent)).add(process.pid)
        except WhaleError as error:
            say(f"whalejax: running without CPU quotas: {error}")

    def log(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self._launch.logs / f"rank-{rank}.log"

    def table(self) -> str:
        """One line for each rank."""
        quotas = self._launch.quotas
        rows = [("rank", "host", "kind", "devices", "CPU quota", "log")]
        for rank in range(len(self._running)):
            said = self._said.get(rank)
            rows.append(
                (
                    str(rank),
                    self._launch.host_of(rank),
                    "-" if said is None else said.kind,
                    "-" if said is None else str(said.devices),
                    f"{quotas[rank]:g} %" if quotas else "-",
                    str(self.log(rank)),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                word.ljust(width) for word, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        )

    # Waiting.

    def wait(self) -> int:
        """Wait for all, or for the first that fails, which is said."""
        failed: dict[int, int] = {}
        while len(self._over) < len(self._running):
            rank, status = self._next()
            self._over.add(rank)
            if status and (self._launch.stops or rank == 0):
                failed |= {rank: status, **self._failing()}
                self._ask_who_stands(failed)
                break
            if status:
                failed[rank] = status
        self.stop()
        self._show()
        rank, status = next(iter(failed.items()), (0, 0))
        status = status if status >= 0 else 128 - status
        failure = self._failure(failed) if failed else None
        if self._launch.json:
            return status if self._print(status, failure) else status or UNPRINTED
        if failure and (self._launch.tells or rank):
            say(failure)
        # Logs of what tells nothing of its ranks are gone when it ends.
        lost = self._terminal.lost and not self._launch.tells
        return status or (UNPRINTED if lost else 0)

    def _next(self) -> tuple[int, int]:
        """The next rank that ends and its status, or one that never will, and 1."""
        first_ended = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ended.get(timeout=LOOK_SECONDS)
            for rank in self._left():
                if self._is_stopped(rank):
                    return rank, 1
            if (absent := self._absent()) is not None:
                return absent, 1
            seconds = self._launch.exit_seconds
            heard = [first_ended, *(self._pumps[rank].last for rank in self._left())]
            silent = time.monotonic() - max(heard)
            if self._over and self._launch.stops and silent > seconds:
                rank = self._left()[0]
                self._blamed.setdefault(
                    rank,
                    f"has not ended {seconds:.0f} s after others had, and has said "
                    "nothing in this time: it stands still at its exit (one that "
                    "works on there needs a longer --exit-timeout)",
                )
                return rank, 1

    def _absent(self) -> int | None:
        """A rank that has ended well, without joining others that wait for it."""
        if not (self._joining - self._said.keys() - self._over):
            return None
        for rank in sorted(self._over - self._said.keys()):
            self._blamed.setdefault(
                rank,
                "ended with exit status 0 before it had joined the others, which wait "
                "for it in init_distributed",
            )
            return rank
        return None

    def _left(self) -> list[int]:
        return [r for r in range(len(self._running)) if r not in self._over]

    def _is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped a rank for so long that others wait for it."""
        looks = self._stopped.get(rank, 0) + 1 if self._state(rank) == "T" else 0
        self._stopped[rank] = looks
        if looks < STOPPED_LOOKS:
            return False
        self._blame_stopped(rank)
        return True

    def _blame_stopped(self, rank: int) -> None:
        self._blamed.setdefault(
            rank, "is stopped by a signal (SIGSTOP or SIGTSTP) and stands still"
        )

    def _ask_who_stands(self, failed: Mapping[int, int]) -> None:
        """Where all ended for another one and none could say for whom: see."""
        if not self._blamed and set(failed.values()) <= set(_FOR_ANOTHER):
            for rank in self._left():
                if self._state(rank) == "T":
                    self._blame_stopped(rank)

    def _state(self, rank: int) -> str:
        """The letter that Linux gives the state of a rank; empty elsewhere."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self._running[rank].pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0]
        return ""

    def _print(self, status: int, failure: str | None) -> bool:
        """Print one line of JSON; False if that cannot be."""
        quotas = self._launch.quotas
        ranks = []
        for rank in range(len(self._running)):
            said = self._said.get(rank)
            ranks.append(
                {
                    "rank": rank,
                    "host": self._launch.host_of(rank),
                    "kind": None if said is None else said.kind,
                    "devices": None if said is None else said.devices,
                    "cpu_quota_percent": quotas[rank] if quotas else None,
                    "log": str(self.log(rank)),
                }
            )
        try:
            print(
                json.dumps({"status": status, "failure": failure, "ranks": ranks}),
                flush=True,
            )
        except BrokenPipeError:  # who read has seen enough
            drop_stdout()
        except (OSError, ValueError) as error:
            drop_stdout()
            say(f"whalejax: --json: {error}")
            return False
        return True

    def _failing(self) -> dict[int, int]:
        """Ranks that fail in the moments after the first, and their status."""
        found = {}
        end = time.monotonic() + SOON_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                left = max(0.0, end - time.monotonic())
                rank, status = self._ended.get(timeout=left)
                self._over.add(rank)
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
        killed = [rank for rank in own if failed[rank] < 0]
        rank = next(iter((*killed, *self._blamed, *own, first)))
        if rank in killed or (rank in own and rank not in self._blamed):
            how = f"failed first, with {_words(failed[rank])}"
        elif rank in self._blamed:
            how = self._blamed[rank]
            how += "" if first == rank else f" (rank {first} ended for it)"
        else:
            how = f"failed first, with {_words(failed[rank])}"
        stopped = self._launch.stops or 0 in failed
        went = "all others were stopped" if stopped else "the others went on"
        said = f"whalejax: rank {rank} on {self._launch.host_of(rank)} {how}; {went}."
        if rank == 0 and not self._launch.json:
            return f"{said} What it said stands above, and in {self.log(rank)}"
        lines = [f"  [{rank}] {line}" for line in self._pumps[rank].tail(TAIL_LINES)]
        # Logs of what tells nothing of its ranks are gone when it ends.
        where = f"The end of {self.log(rank)}" if self._launch.tells else "It said"
        return "\n".join([f"{said} {where}:", *lines])

    # Stopping.

    def stop(self) -> None:
        """End what still runs, and what it has started, within one deadline."""
        alive = [n for n, p in enumerate(self._running) if p.poll() is None]
        end = time.monotonic() + GRACE_SECONDS
        try:
            if alive and self._launch.tells and not self._launch.json:
                who = f"rank {', '.join(map(str, alive))}"
                say(
                    f"whalejax: stopping {who if len(alive) < 9 else len(alive)} "
                    f"{'' if len(alive) < 9 else 'ranks '}by SIGTERM; what is left in "
                    f"{GRACE_SECONDS:.0f} s is killed"
                )
            for rank in alive:
                _signal(self._running[rank], signal.SIGTERM)
                # One that stands still hears nothing.
                _signal(self._running[rank], signal.SIGCONT)
            for rank in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running[rank].wait(max(0.0, end - time.monotonic()))
        finally:  # also where a second Ctrl-C is not patient
            self._kill()

    def _kill(self) -> None:
        for process in self._running:
            _signal(process, signal.SIGKILL)
        # A process in a system call that does not return cannot even be killed.
        end = time.monotonic() + GRACE_SECONDS / 2
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _words(status: int) -> str:
    return f"signal {signal_name(-status)}" if status < 0 else f"status {status}"


def signal_name(number: int) -> str:
    """The name of a signal; Python knows only the first and last realtime ones.

    >>> signal_name(9), signal_name(signal.SIGRTMIN + 3)
    ('SIGKILL', 'SIGRTMIN+3')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", number)
        return f"SIGRTMIN+{number - first}" if number > first else f"number {number}"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The session that a rank began outlives it where its children do.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def die_with_parent() -> None:
    """A launcher that is killed outright takes its processes with it, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
