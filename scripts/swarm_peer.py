"""Serves a stage as a peer that can end or freeze at a point of the protocol.

``bench_swarm.py`` and the tests start it as processes of their own. A fault is
``[point, step, signal]``: the first time that the peer reaches that point in that step
or a later one, it writes a line into the file ``mark`` and sends itself that signal.

    python scripts/swarm_peer.py '{"job": "…", "registry": ["127.0.0.1", 8476], …}'

``spare`` is for forked processes: it cuts the job and compiles, and waits until the
parent sends further options.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.peer_programs import StagePrograms, ready_stage
from whalejax.swarm_runtime.registry import facts_of
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.secondary_trainer import SecondaryTrainer
from whalejax.wire.keys import load_key


class Fault:
    """Sends this process a signal, once."""

    def __init__(self, point: str, step: int, name: str, *, mark: str = "") -> None:
        self._mark = mark
        self._point, self._step, self._name = point, step, name
        self._lock, self._done = threading.Lock(), False

    def __call__(self, point: str, step: int) -> None:
        with self._lock:
            if self._done or point != self._point or step < self._step:
                return
            self._done = True
            if self._mark:
                with open(self._mark, "w", encoding="utf-8") as file:
                    file.write(f"{point} of step {step}\n")
            os.kill(os.getpid(), getattr(signal, self._name))


def job_of(options: dict[str, Any]) -> Any:
    """Returns the job of the options: a module's function, or a reference model."""
    if ":" in options["job"]:
        module, _, function = options["job"].partition(":")
        return getattr(importlib.import_module(module), function)()
    from whalejax import models

    return models.job(options["job"], **options.get("options", {}))


def cut_of(options: dict[str, Any]) -> StagedJob:
    """Returns the job in stages."""
    return StagedJob(
        job_of(options),
        stages=options["stages"],
        micro_batches=options["micro_batches"],
        seed=options.get("seed", 0),
    )


def sleep_in_calls(forward: float, backward: float) -> None:
    """Makes calls of this process take these seconds, the last stage's both."""
    real_forward, real_backward = StagePrograms.forward, StagePrograms.backward

    def run_slowly(real: Any, seconds: float, stage: StagePrograms, given: Any) -> Any:
        start = time.monotonic()
        result = real(stage, *given)
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        return result

    def slow_forward(self: StagePrograms, *given: Any) -> Any:
        return run_slowly(real_forward, forward, self, given)

    def slow_backward(self: StagePrograms, *given: Any) -> Any:
        seconds = backward + (forward if self.last else 0.0)
        return run_slowly(real_backward, seconds, self, given)

    StagePrograms.forward = slow_forward  # type: ignore[method-assign]
    StagePrograms.backward = slow_backward  # type: ignore[method-assign]


def trainer_of(options: dict[str, Any], cut: StagedJob) -> SecondaryTrainer:
    """Returns a secondary trainer."""
    host, port = options["registry"]
    return SecondaryTrainer(
        cut,
        load_key(Path(options["key"])),
        (host, port),
        host=options.get("host", "127.0.0.1"),
        wire=options.get("wire", "f32"),
        call_seconds=options.get("call_seconds", 10.0),
    )


def peer_of(options: dict[str, Any], cut: StagedJob) -> Peer:
    fault, mark = options.get("fault"), options.get("mark", "")
    host, port = options["registry"]
    return Peer(
        cut,
        load_key(Path(options["key"])),
        (host, port),
        stage=options["stage"],
        host=options.get("host", "127.0.0.1"),
        wire=options.get("wire", "f32"),
        pull_seconds=options.get("pull_seconds", 10.0),
        hook=Fault(*fault, mark=mark) if fault else lambda point, step: None,
    )


def main(options: dict[str, Any], cut: StagedJob | None = None) -> None:
    """Serves a stage, or runs a secondary trainer, until the run is over."""
    cut = cut or cut_of(options)
    if "call_takes" in options:
        sleep_in_calls(*options["call_takes"])
    is_trainer = options["stage"] == "trainer"
    peer = trainer_of(options, cut) if is_trainer else peer_of(options, cut)
    signal.signal(signal.SIGTERM, lambda *_: peer.leave())
    peer.start()
    while not peer.wait(0.5):
        pass
    print(json.dumps({"name": peer.name, "over": peer.over}), flush=True)
    peer.close()


def spare(options: dict[str, Any], pipe: Connection, log: str) -> None:
    """Prepares a stage; then serves with the parent's options, until the run is over.

    SIGUSR1 writes the stacks of all threads into the log.

    Args:
        options: Options that are known by now.
        pipe: Connection for the other options as JSON; the process ends if it is
            closed.
        log: File for all output of the process.
    """
    with open(log, "wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1)
    cut = cut_of(options)
    facts_of(cut, "f32", "f32")
    if options["stage"] != "trainer":
        ready_stage(cut, options["stage"])
    try:
        further = json.loads(pipe.recv_bytes())
    except EOFError:
        return
    main({**options, **further}, cut)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
