"""Starts one program as several connected processes, and stops them together.

It is for plain machines, without Slurm or Kubernetes. Local processes are children of
this one; ssh starts those on other hosts. Each process gets its rank in its
environment, so that ``wh.init_distributed()`` needs no argument. The launcher uses no
JAX, because it must not take the devices of its processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

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
    say_in_background,
    wait_for_lines,
)
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.membership.fixed_run import FixedRun, rank_name
from whalejax.meshes.errors import WhaleError
from whalejax.processes.launch_spec import Launch as Launch
from whalejax.processes.launch_spec import is_here as is_here
from whalejax.processes.local_processes import (
    GRACE_SECONDS,
    handled_signals,
    log_folder,
)
from whalejax.processes.local_run import LocalRun
from whalejax.processes.process_output import Log, Pump, TerminalOutput
from whalejax.wire.keys import make_key


TAIL_LINES: Final = 20
"""Number of lines shown from the end of the first failed process's output."""

_UNREACHED: Final = 255
"""Exit status of ssh itself."""

_FILES_EACH: Final = 4
"""Number of file descriptors per rank, for its log, output, end and start."""

_OTHER_FILES: Final = 64

UNPRINTED: Final = 2
"""Exit status if all ranks succeeded but the output could not be printed."""


class RankReport(NamedTuple):
    """Values of a process in the JSON of a launch; None means unknown."""

    rank: int | None
    host: str | None
    kind: str | None
    devices: int | None
    cpu_quota_percent: float | None
    log: str


def run(launch: Launch) -> int:
    """Starts all processes, and waits for them.

    ``launch.stops`` decides which failures stop all ranks. Rank 0's output is shown,
    and the others write to their logs. If ranks fail, the first failed rank is named,
    with the end of its log unless its output was shown.

    With ``launch.json`` the output is one object instead. It has ``status``,
    ``failure`` (the text on the failed rank, or null) and ``ranks``. Each rank has
    ``rank``, ``host``, ``log``, ``kind`` and ``devices`` (null if unreported), and
    ``cpu_quota_percent`` (null without a quota).

    Returns:
        0 if all ranks succeeded, or 2 if the output could not be printed. After a
        failure, the status of the first failed rank, or 128 plus the number of the
        signal that ended it.

    Raises:
        WhaleError: A log or a process cannot be made, or the port is in use.
    """
    hold_standard_streams()
    _allow_files(_FILES_EACH * launch.processes + _OTHER_FILES)
    given = launch.shared_environment()
    if launch.is_local():
        shared_key(given)  # Loaded once here, not by every rank.
    log_folder(launch.logs)
    coordinator = launch.coordinator()
    with handled_signals(_interrupt), contextlib.ExitStack() as stack:
        stack.callback(release_port, split_address(coordinator)[1])
        if launch.is_local() and not given.get(KEY_FILE):
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="whalejax-key-")
            )
            given[KEY_FILE] = str(Path(folder) / "key")
            make_key(Path(given[KEY_FILE]))
        launched = _Launched(launch, stack, coordinator, given)
        return launched.outcome(launched.run())


_UNCONNECTED: Final = (
    "whalejax: no process called wh.init_distributed(), so each ran the whole script "
    "by itself. Call it at the start of the script to train together"
)


class _Launched:
    def __init__(
        self,
        launch: Launch,
        stack: contextlib.ExitStack,
        coordinator: str,
        given: Mapping[str, str],
    ) -> None:
        """Creates the logs; ``given`` are the environment variables of each rank."""
        self._launch, self._stack = launch, stack
        self._coordinator, self._given = coordinator, given
        self._policy = FixedRun(
            processes=launch.processes,
            stops=launch.stops,
            exit_seconds=launch.exit_seconds,
            now=time.monotonic(),
        )
        self._loop = LocalRun(
            self,
            launch.logs,
            say=say_in_background,
            end_with_this=True,
            groups=True,
            stopping=self._say_stopping,
        )
        self._pumps: list[Pump] = []
        self._threads: list[threading.Thread] = []
        self._shown = self._lacks_quotas = False
        self._terminal = TerminalOutput(say_in_background)
        self._logs = [
            Log(self.log(rank), say_in_background) for rank in range(launch.processes)
        ]
        for log in self._logs:
            stack.callback(log.close)

    def run(self) -> ev.End:
        launch = self._launch
        if launch.tells and not launch.json:
            say(f"whalejax: {launch.listens(self._coordinator)}")
            if warning := launch.gpus_shared():
                say(f"whalejax: {warning}")
        try:
            return self._loop.run()
        finally:
            self._read_all()  # also if a later rank could not be started
            end = time.monotonic() + GRACE_SECONDS / 2
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))

    def react(self, now: float, event: ev.Event) -> list[ev.Effect]:
        self._policy.written_at = {r: pump.last for r, pump in enumerate(self._pumps)}
        if isinstance(event, ev.Tick):
            there = self._loop.processes
            self._policy.states = {name: there.state(name) for name in there.names}
        return self._policy.react(now, event)

    def start(self, slot: int) -> None:
        launch, rank, name = self._launch, slot, rank_name(slot)
        own = {**launch.environment_of(rank, self._coordinator), **self._given}
        words = launch.words(rank, own)
        try:
            read, write = os.pipe()
            self._stack.callback(os.close, read)
            try:
                start = self._loop.processes.start
                pid, _ = start(name, own, command=words, output=write)
            finally:
                os.close(write)
        except OSError as error:
            raise WhaleError(
                f"rank {rank} cannot be started: {words[0]}: {error.strerror}"
            ) from error
        self._slow_down(rank, pid)
        self._loop.processes.release(name)
        shows = rank == 0 and not launch.json
        outputs = (self._logs[rank], *((self._terminal,) if shows else ()))
        told = functools.partial(self._on_report, rank)
        self._pumps.append(Pump(read, outputs, told))
        if len(self._pumps) == launch.processes:
            self._read_all()

    def _read_all(self) -> None:
        """Starts the threads that read output; no process may be started afterwards."""
        for pump in self._pumps[len(self._threads) :]:
            thread = threading.Thread(target=pump.run, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _on_report(self, rank: int, said: DeviceReport | BlameReport | Joining) -> bool:
        with self._loop.lock:
            is_true = self._policy.hear(rank, said)
        if len(self._policy.reports) == self._launch.processes:
            self._show()
        return is_true

    def _show(self) -> None:
        """Prints the table once, after all ranks have reported or ended."""
        with self._loop.lock:
            if self._launch.tells and not (self._shown or self._launch.json):
                self._shown = True
                say_in_background(self.table())

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
        return self._loop.processes.log(rank_name(rank))

    def _ranks(self) -> list[RankReport]:
        reports = []
        for rank in range(self._launch.processes):
            said = self._policy.reports.get(rank)
            report = RankReport(
                rank,
                self._launch.host_of(rank),
                None if said is None else said.kind,
                None if said is None else said.devices,
                self._launch.quotas[rank] if self._launch.quotas else None,
                str(self.log(rank)),
            )
            reports.append(report)
        return reports

    def table(self) -> str:
        rows: list[tuple[str, ...]]
        rows = [("rank", "host", "kind", "devices", "CPU quota", "log")]
        for *known, quota, log in self._ranks():
            words = (*known, None if quota is None else f"{quota:g} %", log)
            rows.append(tuple("-" if word is None else str(word) for word in words))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                word.ljust(width) for word, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        )

    # The end.

    def outcome(self, end: ev.End) -> int:
        if end.how is Ending.INTERRUPTED:
            if end.status == 128 + signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(end.status)
        self._show()
        failed, status = self._policy.failure, end.status
        if not failed and self._launch.tells and self._policy.is_unconnected:
            say_in_background(_UNCONNECTED)
        failure = self._failure(*failed) if failed else None
        if self._launch.json:
            printed = _print_json(status, failure, self._ranks())
            return status if printed else status or UNPRINTED
        shown = self._launch.tells or (failed and (failed[0] or self._remote(*failed)))
        if failure and shown:
            say_in_background(failure)
        wait_for_lines()
        # Without ``tells``, the logs are removed at the end, so messages omit them.
        lost = self._terminal.lost and not self._launch.tells
        return status or (UNPRINTED if lost else 0)

    def _failure(self, rank: int, how: str) -> str:
        stopped = self._launch.stops or 0 in self._policy.failed
        went = "all others were stopped" if stopped else "the others went on"
        said = f"whalejax: rank {rank} on {self._launch.host_of(rank)} {how}; {went}."
        said += self._remote(rank, how)
        if rank == 0 and not self._launch.json:
            log = f", and in {self.log(rank)}" if self._launch.tells else ""
            return f"{said} What it said stands above{log}"
        lines = [f"  [{rank}] {line}" for line in self._pumps[rank].tail(TAIL_LINES)]
        where = f"The end of {self.log(rank)}" if self._launch.tells else "It said"
        return "\n".join([f"{said} {where}:", *lines])

    def _remote(self, rank: int, how: str) -> str:
        """Returns the remedy if a rank's host was not reached, or an empty text."""
        host, shell = self._launch.host_of(rank), self._launch.remote_shell[0]
        if is_here(host) or not how.endswith(f"status {_UNREACHED}"):
            return ""
        return (
            f" Status {_UNREACHED} is that of a remote shell that does not reach its "
            f"host: {shell} {host} must work without a password, and --remote-shell "
            "names another shell."
        )

    def _say_stopping(self, names: Sequence[str]) -> None:
        if self._launch.tells and not self._launch.json:
            ranks = [name.rpartition("-")[2] for name in names]
            who = (
                f"rank {', '.join(ranks)}" if len(ranks) < 9 else f"{len(ranks)} ranks"
            )
            say_in_background(
                f"whalejax: stopping {who} by SIGTERM; what is left in "
                f"{GRACE_SECONDS:.0f} s is killed"
            )


def _print_json(status: int, failure: str | None, ranks: Sequence[RankReport]) -> bool:
    rows = [rank._asdict() for rank in ranks]
    said = {"status": status, "failure": failure, "ranks": rows}
    try:
        print(json.dumps(said), flush=True)
    except BrokenPipeError:  # the reader has closed the pipe
        drop_stdout()
    except (OSError, ValueError) as error:
        drop_stdout()
        say(f"whalejax: --json: {error}")
        return False
    return True


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _interrupt(number: int, _: object) -> None:
    """Handles a signal before the first process starts, like Ctrl-C."""
    raise SystemExit(128 + number)


def words_after(words: Sequence[str]) -> list[str]:
    """Inserts ``--`` before the script, so that later options belong to the script.

    >>> words_after(["--processes", "2", "train.py", "--steps", "3"])
    ['--processes', '2', '--', 'train.py', '--steps', '3']
    """
    for place, word in enumerate(words):
        if word == "--":
            break
        if word.endswith(".py"):
            return [*words[:place], "--", *words[place:]]
    return list(words)
