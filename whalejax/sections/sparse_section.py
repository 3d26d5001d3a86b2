"""Starts, monitors and replaces the processes of the sparse section.

The processes run on this machine, or on other hosts by ssh. ``whalejax.processes``
starts them, and ``whalejax.membership`` decides about restarts and the end of the run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax

from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.membership.kept_run import KeptRun
from whalejax.membership.lease import Lease
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.processes.heartbeat_pipe import begin_beats
from whalejax.processes.launch_spec import is_here, words_there
from whalejax.processes.local_processes import log_folder
from whalejax.processes.local_run import LocalRun
from whalejax.sections.section_run import SectionRun
from whalejax.wire.connection import listen
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import A, Question
from whalejax.wire.section_messages import Address, Hello, HelloHeard
from whalejax.wire.service import Caller, Service, UnreachableProcessError


PROGRAM: Final = "whalejax.api.sparse_process"
"""Module that a process of the section runs."""

ANSWER_SECONDS: Final = 60.0
"""Seconds without an answer after which a process is replaced."""

_SLOWEST_BYTES_PER_SECOND: Final = 1e7
_LONGEST_TURN_SECONDS: Final = 5.0


@dataclass(slots=True, kw_only=True)
class _Slot:
    incarnation: int = -1
    address: Address | None = None


class SparseSection:
    """Processes that hold tables, by rank.

    Attributes:
        count: Number of processes.
        folder: Folder of keys, logs and snapshots; removed at the end if created here.
        replaced: Number of processes that ended before the section was closed.
    """

    def __init__(
        self,
        count: int,
        notify: Callable[[], None],
        fail: Callable[[Exception], None],
        *,
        run: SectionRun | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Starts the processes without waiting for them.

        Args:
            count: Number of processes.
            notify: Function called when a process has registered or ended.
            fail: Function called with the error when the run is given up.
            run: Hosts and folder of the run; None starts all on this machine.
            answer_seconds: Seconds without an answer after which a process is replaced.
        """
        self.count, self.replaced = count, 0
        self._notify, self._fail, self._seconds = notify, fail, answer_seconds
        self._run = SectionRun() if run is None else run
        own = self._run.folder is None
        self.folder = (
            Path(tempfile.mkdtemp(prefix="whalejax-tables-"))
            if self._run.folder is None
            else Path(self._run.folder)
        )
        for left in self.folder.glob("run-*"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        self._key_path = self.folder / f"run-{os.getpid()}-{time.time_ns()}" / "key"
        self._key_path.parent.mkdir(parents=True)
        make_key(self._key_path)
        key = load_key(self._key_path)
        self._service = Service(listen(self._run.host), key, {Hello: self._hello})
        self._caller = Caller(key)
        self._rules = KeptRun(
            [*map(_name, range(count))], leads=False, what="the sparse section"
        )
        logs = log_folder(self.folder / "logs")
        # ``LocalRun`` calls this with a line when a process has ended.
        self._loop = LocalRun(self, logs, say=lambda _: notify(), asks=())
        self._lock = self._loop.lock
        self._slots = [_Slot() for _ in range(count)]
        self._suspects: set[tuple[int, int]] = set()
        self._lease: Lease[int] = Lease(
            SupervisorSettings(least=count, most=count).start_seconds,
            _LONGEST_TURN_SECONDS,
        )
        self._closing = threading.Event()
        self._pids: dict[int, int] = {}
        self._thread = threading.Thread(target=self._manage, daemon=True)
        self._thread.start()
        closes = (
            self._closing,
            self._thread,
            self.folder if own else self._key_path.parent,
            begin_beats(),
        )
        self.close_processes = weakref.finalize(self, _close, *closes)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank that has a process."""
        with self._lock:
            return dict(self._pids)

    def snapshot_folder(self, rank: int) -> Path:
        """Returns the folder of a rank's snapshots."""
        return self.folder / f"rows-{rank}"

    def close(self) -> None:
        """Ends all processes and connections."""
        self.close_processes()
        self._caller.close()
        self._service.close()

    def at(self, rank: int) -> tuple[int, Address] | None:
        """Returns (incarnation, address) of a rank's process; None until registered.

        Args:
            rank: Rank of the process.
        """
        with self._lock:
            slot = self._slots[rank]
            return None if slot.address is None else (slot.incarnation, slot.address)

    def ask(
        self, rank: int, incarnation: int, question: Question[A], num_bytes: int = 0
    ) -> A | None:
        """Returns the answer of a rank's process; None if it will be replaced.

        Args:
            rank, incarnation: Rank, and incarnation of its process.
            question: Question to ask.
            num_bytes: Size of the answer.

        Raises:
            RefusedRequestError: The process refused the request.
        """
        found = self.at(rank)
        if found is None or found[0] != incarnation:
            return None
        arrays = getattr(question, "arrays", ())
        size = num_bytes + sum(x.nbytes for x in arrays)
        seconds = self._seconds + size / _SLOWEST_BYTES_PER_SECOND
        try:
            answer = self._caller.ask(found[1], question, seconds=seconds)
        except UnreachableProcessError:
            with self._lock:
                self._suspects.add((rank, incarnation))
            return None
        with self._lock:
            self._rules.useful.add(_name(rank))
        return answer

    def progressed(self, step: int) -> None:
        """Records a finished step, so that earlier failures count as recovered.

        Args:
            step: Number of steps done.
        """
        with self._lock:
            self._rules.failures.progressed(step)

    def _hello(self, asked: Hello) -> HelloHeard:
        with self._lock:
            slot = self._slots[asked.rank] if asked.rank < self.count else _Slot()
            if slot.incarnation != asked.incarnation:
                return HelloHeard(known=False)
            slot.address = asked.address
            self._lease.forget(asked.rank)
        self._notify()
        return HelloHeard(known=True)

    # Runs in the thread that manages processes.

    def _manage(self) -> None:
        try:
            end = self._loop.run()
        except Exception as error:  # A thread's error would be lost.
            self._fail(error)
            return
        if end.how is not Ending.COMPLETE:
            where = self.folder / "logs"
            self._fail(WhaleError(f"{end.text}. Its logs are in {where}"))

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        """Applies an event, and yields its effects; see ``RunPolicy``."""
        match event:
            case ev.Tick() if self._closing.is_set():
                yield ev.End(Ending.COMPLETE, "")
                return
            case ev.Tick():
                self._lease.turn(now)
                late = self._lease.overdue(now)
                late_now = {(rank, self._slots[rank].incarnation) for rank in late}
                suspects, self._suspects = self._suspects | late_now, set()
                for rank, incarnation in suspects:
                    if self._slots[rank].incarnation == incarnation:
                        yield ev.KillEffect(_name(rank), 0)
            case ev.ProcessExitEvent(name=name):
                rank = int(name.rpartition("-")[2])
                self._slots[rank].address = None
                self._pids.pop(rank, None)
                self._lease.forget(rank)
                self.replaced += 1
        yield from self._rules.react(now, event)

    def start(self, slot: int) -> None:
        """Starts the process of a rank, on its host."""
        rank, held = slot, self._slots[slot]
        with self._lock:
            held.incarnation += 1
            self._lease.renew(rank, time.monotonic())
        settings = {
            "rank": rank,
            "incarnation": held.incarnation,
            "address": self._service.address,
            "key": str(self._key_path),
            "folder": str(self.snapshot_folder(rank)),
            "parent": os.getpid(),
            "host": self._run.host,
        }
        name, own = _name(rank), _environment(self.folder)
        hosts = self._run.hosts
        if not is_here(host := hosts[rank % len(hosts)]):
            settings |= {"parent": 0, "host": host}
        command = [sys.executable, "-m", PROGRAM, json.dumps(settings)]
        if not settings["parent"]:
            given = [f"{key}={value}" for key, value in own.items()]
            words = ["env", *given, *command]
            command = words_there(self._run.remote_shell, host, words)
        self._pids[rank], _ = self._loop.processes.start(name, own, command=command)
        self._loop.processes.release(name)


def _name(rank: int) -> str:
    return f"sparse-{rank}"


def _environment(folder: Path) -> dict[str, str]:
    config: Any = jax.config
    cache = config.jax_compilation_cache_dir or str(folder / "compiled")
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1" if config.jax_enable_x64 else "0",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def _close(
    closing: threading.Event,
    thread: threading.Thread,
    made: Path,
    end_beats: Callable[[], None],
) -> None:
    closing.set()
    end_beats()
    if thread is not threading.current_thread():
        thread.join(30.0)
    shutil.rmtree(made, ignore_errors=True)
