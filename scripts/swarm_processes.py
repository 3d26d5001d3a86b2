"""Runs peers and trainers of a swarm as processes that fail and are replaced.

Each is forked from a server that has imported everything, cuts the job and compiles the
programs of a stage in advance, and waits: so that a replacement joins at once.
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
"""Variables with which a replacement compiles nothing."""

MOST_STEPS: Final = 3
"""Steps after which a peer whose fault did not happen is killed."""

TRAINER_STEPS: Final = 10
"""Steps after which a secondary trainer is ended, and another started."""

SPARES: Final = 2
"""Spares of each stage; starting one takes longer than most steps."""

READY_SECONDS: Final = 1200.0
_STACKS_SECONDS: Final = 2.0
_MOST_CHARACTERS: Final = 6000


def prepare() -> None:
    """Sets up a fork server with all modules; call it before any process starts."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    os.environ.update(CACHED, PYTHONPATH=path)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(
        ["swarm_peer", "swarm_measured", "swarm_processes", "whalejax.models"]
    )


@dataclass(kw_only=True)
class Forked:
    """A forked process with a pipe for its options.

    Attributes:
        process: Process of the operating system.
        pipe: Connection to it.
        stage: Stage for which it is ready.
        host: Address among the registry's peers.
        log: File of its output.
        due: Step of its fault; None without one.
    """

    process: Any
    pipe: Connection
    stage: int | str
    host: str
    log: Path
    due: int | None = None

    def tell(self, options: dict[str, Any]) -> None:
        """Sends the options with which it serves."""
        with contextlib.suppress(OSError):  # It has ended.
            self.pipe.send_bytes(json.dumps(options).encode())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    @property
    def state(self) -> str:
        """Letter of its state: T if it is stopped; empty if it has ended."""
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{self.process.pid}/stat").read_text()
                return text.rpartition(")")[2].split()[0]
        return ""


class Processes:
    """Peers, replaced if they have ended or are stopped.

    Attributes:
        left: Number of faults that peers will get.
        faults: Faults that peers got, as text.
        outside: Peers that were killed because they did not reach their fault.
        waited: Seconds in which the run waited for peers.
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
        """Prepares the options; starts nothing yet.

        Args:
            serving: Registry that they join.
            options: Options of their job.
            key: File of the key of the swarm.
            draw: Random choice of signals.
            faults: Number of faults that peers get.
            steps: Steps of the run.
            call_seconds: Deadline of a secondary trainer's calls.
            write: Function that records ended peers, with the time.
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
        """Starts spares of each stage, while faults are left, and a trainer."""
        targets: list[tuple[int | str, int]] = [("trainer", 1)]
        if self.left:
            targets += [(stage, SPARES) for stage in range(self._options["stages"])]
        for stage, count in targets:
            present = sum(
                process.stage == stage for process in self._spares if process.state
            )
            self._spares += [self._fork(stage) for _ in range(count - present)]

    def _take(self, stage: int | str) -> Forked:
        """Returns a spare, or a new process without one."""
        for process in self._spares:
            if process.stage == stage and process.state:
                self._spares.remove(process)
                return process
        return self._fork(stage)

    def start(self, stage: int, step: int, *, faulty: bool) -> None:
        """Starts a peer; with a fault from a step on, if faults are left."""
        peer, options = self._take(stage), {}
        if faulty and self.left:
            self.left -= 1
            number = len(self.faults)
            point, name = POINTS[number % len(POINTS)], SIGNALS[self._draw.randrange(2)]
            if point == "forward" and stage == self._options["stages"] - 1:
                point = "backward"  # The last stage has one call.
            # A newcomer takes the state once, as soon as it is ready.
            first = 0 if point == "download" else step
            options = {
                "fault": [point, first, name],
                "mark": str(self.marks / str(number)),
            }
            peer.due = step
            self.faults.append(f"{point} {name} stage {stage} step {step}")
        peer.tell(options)
        self._running.append(peer)

    def lead(self, step: int) -> None:
        """Starts and ends secondary trainers, by the number of done steps."""
        if step % TRAINER_STEPS == 0 and step < self._steps - TRAINER_STEPS:
            trainer = self._take("trainer")
            trainer.tell({})
            self._trainers.append(trainer)
        elif step % TRAINER_STEPS == TRAINER_STEPS - 1 and self._trainers:
            name = SIGNALS[(len(self._trainers) - 1) % 2]
            pid = self._trainers[-1].process.pid
            threading.Timer(0.2, _send, [pid, getattr(signal, name)]).start()

    def replace(self, step: int) -> None:
        """Replaces ended peers, and waits until all are ready."""
        start = time.monotonic()
        while waiting := self._replace_ended(step):
            if time.monotonic() - start > READY_SECONDS:
                raise SystemExit(self._waiting_text(waiting))
            time.sleep(0.05)
        self.waited += time.monotonic() - start
        self._prepare()

    def _replace_ended(self, step: int) -> list[Forked]:
        """Replaces ended peers; returns those that are not ready."""
        for peer in [*self._running]:
            if peer.due is not None and step > peer.due + MOST_STEPS and peer.state:
                # It did not reach the point of its fault.
                self.outside += 1
                peer.process.kill()
                peer.process.join()
            state = peer.state
            if state not in ("", "T"):
                continue
            self._write("ended", {"host": peer.host, "stage": peer.stage, "was": state})
            peer.end()
            self._running.remove(peer)
            assert isinstance(peer.stage, int)
            self.start(peer.stage, step + 1, faulty=True)
        members = self._serving.trainer.fleet.members()
        ready = {m.address[0] for m in members if m.ready}
        return [peer for peer in self._running if peer.host not in ready]

    def _waiting_text(self, waiting: list[Forked]) -> str:
        """Returns the unready peers with the registry's entries and their stacks."""
        members = {m.address[0]: m for m in self._serving.trainer.fleet.members()}
        texts = []
        for peer in waiting:
            state = peer.state
            if state:
                _send(peer.process.pid, signal.SIGUSR1)
                time.sleep(_STACKS_SECONDS)
            written = peer.log.read_text(errors="replace") if peer.log.is_file() else ""
            texts.append(
                f"stage {peer.stage} at {peer.host}, state {state or 'ended'!r}, "
                f"{members.get(peer.host)}:\n{written[-_MOST_CHARACTERS:]}"
            )
        return "\n".join([f"after {READY_SECONDS} s peers are not ready:", *texts])

    @property
    def happened(self) -> list[str]:
        """Faults that peers recorded before they happened."""
        return [
            f"{fault}: {path.read_text().strip()}"
            for number, fault in enumerate(self.faults)
            if (path := self.marks / str(number)).is_file()
        ]

    def close(self) -> None:
        for process in [*self._running, *self._trainers, *self._spares]:
            process.end()
        shutil.rmtree(self.marks, ignore_errors=True)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
