"""Peers and trainers of a swarm as processes that are to fail, and those after them.

Each is forked from a server that has imported everything, cuts the job and compiles the
programs of a stage before anybody needs it, and waits: so one that takes the place of
another joins at once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import swarm_peer

from whalejax.swarm_runtime.registry_server import RegistryServer


ROOT: Final = Path(__file__).resolve().parents[1]
POINTS: Final = ("forward", "backward", "sum", "apply", "download", "save")
SIGNALS: Final = ("SIGKILL", "SIGSTOP")
CACHED: Final = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""So that a peer that takes another's place compiles nothing."""

MOST_STEPS: Final = 3
"""A peer whose fault has not come about after so many is killed from outside."""

TRAINER_STEPS: Final = 10
"""After which a further trainer is ended, and another started."""

SPARES: Final = 2
"""Of each stage; starting one takes longer than most steps."""

READY_SECONDS: Final = 1200.0
_STACKS_SECONDS: Final = 2.0
_MOST_WORDS: Final = 6000


def prepare() -> None:
    """Have processes forked from a server with all modules; call it before any is."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    os.environ.update(CACHED, PYTHONPATH=path)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(
        ["swarm_peer", "swarm_measured", "swarm_processes", "whalejax.models"]
    )


@dataclass(kw_only=True)
class Forked:
    """A process, and the way to tell it what to serve.

    Attributes:
        process: of the operating system.
        pipe: to it.
        stage: that it is ready for.
        host: address by which it is known among the registry's peers.
        log: what it writes.
        due: step of its fault; None where it has none.
    """

    process: Any
    pipe: Connection
    stage: int | str
    host: str
    log: Path
    due: int | None = None

    def tell(self, options: dict[str, Any]) -> None:
        """Let it serve."""
        with contextlib.suppress(OSError):  # It has ended; that is found later.
            self.pipe.send_bytes(json.dumps(options).encode())

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    @property
    def state(self) -> str:
        """Letter of its state: T where it stands still; empty where it has ended."""
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                said = Path(f"/proc/{self.process.pid}/stat").read_text()
                return said.rpartition(")")[2].split()[0]
        return ""


class Processes:
    """Peers, replaced where they have ended or stand still.

    Attributes:
        left: faults that are to be given to peers yet.
        faults: that were given, in words.
        outside: peers that were killed because nobody asked for what they were to end
            at.
        waited: seconds in which the run stood still until peers were ready.
    """

    def __init__(
        self,
        serving: RegistryServer,
        options: dict[str, Any],
        *,
        key: Path,
        draw: random.Random,
        faults: int,
        steps: int,
        call_seconds: float,
        write: Callable[..., None],
    ) -> None:
        """Start nothing yet.

        Args:
            serving: that they join.
            options: of their job.
            key: file of the key of the swarm.
            draw: gives signals.
            faults: to be given to peers.
            steps: of the run.
            call_seconds: deadline of a further trainer's calls.
            write: is told, with the time, what befell whom.
        """
        self._serving, self._draw, self._write = serving, draw, write
        self._options = {
            **options,
            "registry": list(serving.address),
            "key": str(key),
            "pull_seconds": call_seconds / 2,
            "call_seconds": call_seconds,
        }
        self._steps, self.left = steps, faults
        self.faults: list[str] = []
        self.outside, self.waited = 0, 0.0
        self.marks = Path(tempfile.mkdtemp(prefix="swarm-"))
        self._count = 0
        self._spares: list[Forked] = []
        self._running: list[Forked] = []
        self._trainers: list[Forked] = []

    def _fork(self, stage: int | str) -> Forked:
        self._count += 1
        host = f"127.0.{1 + self._count // 200}.{2 + self._count % 200}"
        log = self.marks / f"log-{self._count}"
        theirs, ours = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(
            target=swarm_peer.spare,
            args=(
                {**self._options, "stage": stage, "host": host},
                theirs,
                str(log),
            ),
            daemon=True,
        )
        process.start()
        theirs.close()
        return Forked(process=process, pipe=ours, stage=stage, host=host, log=log)

    def _prepare(self) -> None:
        """Have spares of each stage, as long as faults are left, and a trainer."""
        wanted: list[tuple[int | str, int]] = [("trainer", 1)]
        if self.left:
            wanted += [(stage, SPARES) for stage in range(self._options["stages"])]
        for stage, count in wanted:
            there = sum(one.stage == stage for one in self._spares if one.state)
            self._spares += [self._fork(stage) for _ in range(count - there)]

    def _taken(self, stage: int | str) -> Forked:
        """A spare; a new process where there is none."""
        for one in self._spares:
            if one.stage == stage and one.state:
                self._spares.remove(one)
                return one
        return self._fork(stage)

    def start(self, stage: int, step: int, *, faulty: bool) -> None:
        """One more peer; with a fault from a step on, where there are faults left."""
        one, options = self._taken(stage), {}
        if faulty and self.left:
            self.left -= 1
            number = len(self.faults)
            point, name = POINTS[number % len(POINTS)], SIGNALS[self._draw.randrange(2)]
            if point == "forward" and stage == self._options["stages"] - 1:
                point = "backward"  # There both are one call.
            # A newcomer takes the state once, as soon as it is ready.
            first = 0 if point == "download" else step
            options = {
                "fault": [point, first, name],
                "mark": str(self.marks / str(number)),
            }
            one.due = step
            self.faults.append(f"{point} {name} stage {stage} step {step}")
        one.tell(options)
        self._running.append(one)

    def lead(self, step: int) -> None:
        """Start and end further trainers, by the steps that are done."""
        if step % TRAINER_STEPS == 0 and step < self._steps - TRAINER_STEPS:
            one = self._taken("trainer")
            one.tell({})
            self._trainers.append(one)
        elif step % TRAINER_STEPS == TRAINER_STEPS - 1 and self._trainers:
            name = SIGNALS[(len(self._trainers) - 1) % 2]
            pid = self._trainers[-1].process.pid
            threading.Timer(0.2, _send, [pid, getattr(signal, name)]).start()

    def replace(self, step: int) -> None:
        """Replace those that are gone, and wait until all are ready."""
        begun = time.monotonic()
        while waiting := self._replaced(step):
            if time.monotonic() - begun > READY_SECONDS:
                raise SystemExit(self._said(waiting))
            time.sleep(0.05)
        self.waited += time.monotonic() - begun
        self._prepare()

    def _replaced(self, step: int) -> list[Forked]:
        """Replace those that are gone; those that are not ready."""
        for one in [*self._running]:
            if one.due is not None and step > one.due + MOST_STEPS and one.state:
                # Nobody has asked it for what it was to end at.
                self.outside += 1
                one.process.kill()
                one.process.join()
            state = one.state
            if state not in ("", "T"):
                continue
            self._write("ended", {"host": one.host, "stage": one.stage, "was": state})
            one.end()
            self._running.remove(one)
            assert isinstance(one.stage, int)
            self.start(one.stage, step + 1, faulty=True)
        members = self._serving.trainer.fleet.members()
        ready = {m.address[0] for m in members if m.ready}
        return [one for one in self._running if one.host not in ready]

    def _said(self, waiting: list[Forked]) -> str:
        """Who is not ready, what the registry knows of it, and what it does."""
        members = {m.address[0]: m for m in self._serving.trainer.fleet.members()}
        texts = []
        for one in waiting:
            state = one.state
            if state:
                _send(one.process.pid, signal.SIGUSR1)
                time.sleep(_STACKS_SECONDS)
            written = one.log.read_text(errors="replace") if one.log.is_file() else ""
            texts.append(
                f"stage {one.stage} at {one.host}, state {state or 'ended'!r}, "
                f"{members.get(one.host)}:\n{written[-_MOST_WORDS:]}"
            )
        return "\n".join([f"after {READY_SECONDS} s peers are not ready:", *texts])

    @property
    def happened(self) -> list[str]:
        """Of the faults, those that peers wrote of before they came about."""
        return [
            f"{fault}: {path.read_text().strip()}"
            for number, fault in enumerate(self.faults)
            if (path := self.marks / str(number)).is_file()
        ]

    def close(self) -> None:
        """End all, and forget what they wrote."""
        for one in [*self._running, *self._trainers, *self._spares]:
            one.end()
        shutil.rmtree(self.marks, ignore_errors=True)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
