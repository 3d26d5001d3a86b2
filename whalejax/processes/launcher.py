"""Starts one program as several connected processes, and stops them together.

It is for plain machines, without Slurm or Kubernetes: local processes are children of
this one, processes on other hosts start by ssh. JAX reads the ranks from the
environment of each, so that ``wh.init_distributed()`` needs no argument. It uses no
JAX: a launcher must not take the devices of its processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import selectors
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from whalejax.distributed.cgroup_quota import Quota
from whalejax.distributed.first_connection import shared_key
from whalejax.distributed.launch_env import (
    KEY_FILE,
    BlameReport,
    DeviceReport,
    Joining,
    split_address,
)
from whalejax.distributed.reserved_port import release_port
from whalejax.distributed.standard_streams import (
    drop_stdout,
    hold_standard_streams,
    say,
)
from whalejax.membership.fixed_run import LOOK_SECONDS, FixedRun
from whalejax.meshes.errors import WhaleError
from whalejax.processes.launch_spec import Launch as Launch
from whalejax.processes.launch_spec import is_here as is_here
from whalejax.processes.local_processes import (
    GRACE_SECONDS,
    Processes,
    handled_signals,
)
from whalejax.processes.process_output import Log, Pump, TerminalOutput
from whalejax.wire.keys import make_key


TAIL_LINES: Final = 20
"""Number of lines that are shown of the output of the first failed process."""

_FILES_EACH: Final = 4
"""File descriptors of a rank: its log, its pipe, one for its end, one for its start."""

_OTHER_FILES: Final = 64

UNPRINTED: Final = 2
"""Exit status if all ended well but the output could not be printed."""


def run(launch: Launch) -> int:
    """Starts all processes and waits for them; when one fails, stops all.

    Rank 0's output is shown, the others write to their logs. If one fails, the first
    that did is named, with the end of its log, unless that was shown. As JSON:
    ``status``, ``failure`` (that text, or null) and ``ranks``, each with its ``rank``,
    ``host``, ``kind`` and ``devices`` (null if it did not report them),
    ``cpu_quota_percent`` (null without one) and ``log``.

    Returns:
        0 if all ended well; else the status of the first that did not (128 plus the
        number of a signal that ended it); 2 if all ended well but the output could not
        be printed.

    Raises:
        WhaleError: A log or a process cannot be made, or the port is in use.
    """
    hold_standard_streams()
    _allow_files(_FILES_EACH * launch.processes + _OTHER_FILES)
    given = launch.shared_environment()
    if launch.is_local():
        shared_key(given)  # Loaded once here, not by every rank.
    try:
        launch.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhaleError(
            f"--logs {launch.logs}: {error.strerror}. Name a folder that can be made"
        ) from error
    coordinator = launch.coordinator()
    with handled_signals(_interrupt), contextlib.ExitStack() as stack:
        stack.callback(release_port, split_address(coordinator)[1])
        if launch.is_local() and not given.get(KEY_FILE):
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="whalejax-key-")
            )
            given[KEY_FILE] = str(Path(folder) / "key")
            make_key(Path(given[KEY_FILE]))
        group = _Launched(launch, stack)
        try:
            group.start(coordinator, given)
            return group.wait()
        finally:
            group.stop()


class _Launched:
    def __init__(self, launch: Launch, stack: contextlib.ExitStack) -> None:
        """Creates the logs; starts no process yet.

        Raises:
            WhaleError: A log cannot be created.
        """
        self._launch, self._stack = launch, stack
        self._run = FixedRun(
            processes=launch.processes,
            stops=launch.stops,
            exit_seconds=launch.exit_seconds,
            now=time.monotonic(),
        )
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._processes = Processes(
            launch.command, {}, launch.logs, self._selector, end_with_this=True
        )
        self._pumps: list[Pump] = []
        self._threads: list[threading.Thread] = []
        self._shown = self._lacks_quotas = False
        self._terminal = TerminalOutput(say)
        self._lock = threading.Lock()
        self._logs = [Log(self.log(rank), say) for rank in range(launch.processes)]
        for log in self._logs:
            stack.callback(log.close)

    def start(self, coordinator: str, given: Mapping[str, str]) -> None:
        """Starts every rank, then the threads, as forks and threads do not mix.

        Args:
            coordinator: Address of process 0.
            given: Environment variables of each process, except its identity.

        Raises:
            WhaleError: A rank cannot be started.
        """
        launch = self._launch
        if launch.tells and not launch.json:
            say(f"whalejax: {launch.listens(coordinator)}")
            if warning := launch.gpus_shared():
                say(f"whalejax: {warning}")
        for rank in range(launch.processes):
            own = {**launch.environment_of(rank, coordinator), **given}
            words = launch.words(rank, own)
            read, write = os.pipe()
            self._stack.callback(os.close, read)
            try:
                pid, _ = self._processes.start(
                    str(rank), own, command=words, output=write
                )
            except OSError as error:
                raise WhaleError(
                    f"rank {rank} cannot be started: {words[0]}: {error.strerror}"
                ) from error
            finally:
                os.close(write)
            self._slow_down(rank, pid)
            self._processes.release(str(rank))
            shows = rank == 0 and not launch.json
            outputs = (self._logs[rank], *((self._terminal,) if shows else ()))
            told = functools.partial(self._on_report, rank)
            self._pumps.append(Pump(read, outputs, told))
        for pump in self._pumps:
            thread = threading.Thread(target=pump.run, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _on_report(self, rank: int, said: DeviceReport | BlameReport | Joining) -> bool:
        """Records a rank's report; returns False if it is invalid."""
        with self._lock:
            is_true = self._run.hear(rank, said)
        if len(self._run.reports) == self._launch.processes:
            self._show()
        return is_true

    def _show(self) -> None:
        """Prints the table once, after all ranks have reported or ended."""
        with self._lock:
            if self._launch.tells and not (self._shown or self._launch.json):
                self._shown = True
                say(self.table())

    def _slow_down(self, rank: int, pid: int) -> None:
        """Sets a rank's quota before it runs, or prints why there are no quotas."""
        if self._launch.quotas and not self._lacks_quotas:
            try:
                quota = Quota(self._launch.quotas[rank])
                self._stack.enter_context(quota).add(pid)
            except WhaleError as error:
                self._lacks_quotas = True
                say(f"whalejax: running without CPU quotas: {error}")

    def log(self, rank: int) -> Path:
        """Returns the path of a rank's log."""
        return self._launch.logs / f"rank-{rank}.log"

    def table(self) -> str:
        """Returns a table with one line for each rank."""
        quotas = self._launch.quotas
        rows = [("rank", "host", "kind", "devices", "CPU quota", "log")]
        for rank in range(self._launch.processes):
            said = self._run.reports.get(rank)
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
        """Waits for all ranks, or for the first failure, which it prints."""
        run = self._run
        look_at = time.monotonic() + LOOK_SECONDS
        while left := run.seconds_left(now := time.monotonic()):
            if now >= look_at:
                look_at = now + LOOK_SECONDS
                with self._lock:
                    heard_at = {r: pump.last for r, pump in enumerate(self._pumps)}
                    run.look(now, self._state, heard_at)
            self._turn(min(left, max(0.0, look_at - now)))
        failed = run.who_failed(self._state) if run.failed else None
        status = run.status
        self.stop()
        self._show()
        failure = self._failure(*failed) if failed else None
        if self._launch.json:
            return status if self._print(status, failure) else status or UNPRINTED
        if failed and failure and (self._launch.tells or failed[0]):
            say(failure)
        # Without ``tells``, the logs are removed at the end.
        lost = self._terminal.lost and not self._launch.tells
        return status or (UNPRINTED if lost else 0)

    def _turn(self, seconds: float) -> None:
        """Waits at most ``seconds`` for processes to end, and records their ends."""
        for key, _ in self._selector.select(seconds):
            status = self._processes.take_exit_status(key.data)
            assert status is not None  # Each is a child of this process.
            with self._lock:
                self._run.end(time.monotonic(), int(key.data), status)

    def _state(self, rank: int) -> str:
        return self._processes.state(str(rank))

    def _print(self, status: int, failure: str | None) -> bool:
        """Prints one line of JSON; returns False if that fails."""
        quotas = self._launch.quotas
        ranks = []
        for rank in range(self._launch.processes):
            said = self._run.reports.get(rank)
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
        except BrokenPipeError:  # the reader has closed the pipe
            drop_stdout()
        except (OSError, ValueError) as error:
            drop_stdout()
            say(f"whalejax: --json: {error}")
            return False
        return True

    def _failure(self, rank: int, how: str) -> str:
        """Describes the first failure, with the end of its output."""
        stopped = self._launch.stops or 0 in self._run.failed
        went = "all others were stopped" if stopped else "the others went on"
        said = f"whalejax: rank {rank} on {self._launch.host_of(rank)} {how}; {went}."
        if rank == 0 and not self._launch.json:
            return f"{said} What it said stands above, and in {self.log(rank)}"
        lines = [f"  [{rank}] {line}" for line in self._pumps[rank].tail(TAIL_LINES)]
        where = f"The end of {self.log(rank)}" if self._launch.tells else "It said"
        return "\n".join([f"{said} {where}:", *lines])

    # Stopping.

    def stop(self) -> None:
        """Ends the processes that still run, and those they started, within one
        deadline.
        """
        alive = self._processes.names
        try:
            if alive and self._launch.tells and not self._launch.json:
                who = f"rank {', '.join(alive)}"
                say(
                    f"whalejax: stopping {who if len(alive) < 9 else len(alive)} "
                    f"{'' if len(alive) < 9 else 'ranks '}by SIGTERM; what is left in "
                    f"{GRACE_SECONDS:.0f} s is killed"
                )
            for name in alive:
                self._processes.terminate(name, group=True)
            self._wait_for_ends(GRACE_SECONDS)
        finally:  # also after a second Ctrl-C
            for name in self._processes.names:
                self._processes.kill(name)
            # A process in a system call that does not return cannot even be killed.
            end = time.monotonic() + GRACE_SECONDS / 2
            self._wait_for_ends(GRACE_SECONDS / 2)
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))

    def _wait_for_ends(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._processes.names and (left := end - time.monotonic()) > 0:
            self._turn(left)


def _allow_files(count: int) -> None:
    """Raises this process's limit of open files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _interrupt(number: int, _: object) -> None:
    """Ends a launch on SIGTERM and SIGHUP as on Ctrl-C."""
    raise SystemExit(128 + number)


def words_after(words: Sequence[str]) -> list[str]:
    """Inserts ``--`` before the script of a command line.

    Words after the script belong to the script, options included.

    >>> words_after(["--processes", "2", "train.py", "--steps", "3"])
    ['--processes', '2', '--', 'train.py', '--steps', '3']
    """
    for place, word in enumerate(words):
        if word == "--":
            break
        if word.endswith(".py"):
            return [*words[:place], "--", *words[place:]]
    return list(words)
