"""Runs cases in processes of their own, all cores at once.

A case that hangs or crashes takes only its process with it, and the processes compile
with the optimisations off that no layout depends on: slower machine code, made in a
fraction of the time.

``python -m tests.workers`` is one such process: a case id on each line it reads, a
record in JSON on each that it writes.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Final

from tests import features
from tests.cases import Case, pairwise
from tests.flags import FLAGS
from tests.stages import subset


ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS_PER_CASE = 600.0
LINES_OF_A_CRASH: Final = 20
CASES_PER_PROCESS: Final = 200  # a process keeps what it has compiled

Record = dict[str, Any]


def run_all(
    cases: Sequence[Case], *, jobs: int | None = None, stop_at: float | None = None
) -> Generator[Record, None, None]:
    """Run cases and give their records as they come.

    Those that come first are run first. Closing the iterator ends the processes.

    Args:
        cases: what to run.
        jobs: how many processes at once; one for each core if left out.
        stop_at: a ``time.monotonic()`` after which no case is started.
    """
    pool = _Pool(cases, stop_at)
    jobs = os.cpu_count() or 1 if jobs is None else jobs
    threads = [threading.Thread(target=pool.serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    left = len(threads)
    try:
        while left:
            record = pool.found.get()
            if isinstance(record, BaseException):
                raise record
            if record is None:
                left -= 1
            else:
                yield record
    finally:
        pool.stop()
        for thread in threads:
            thread.join()


class _Pool:
    """What the threads share: groups that wait, records found, live processes."""

    def __init__(self, cases: Iterable[Case], stop_at: float | None) -> None:
        self.found: queue.SimpleQueue[Record | BaseException | None]
        self.found = queue.SimpleQueue()
        self.waiting: queue.SimpleQueue[list[Case]] = queue.SimpleQueue()
        self.stop_at = stop_at
        self.stopped = threading.Event()
        self.live: set[_Worker] = set()
        # Cases that share a model and a dtype share what one device computes.
        groups: dict[tuple[str, str], list[Case]] = {}
        for case in cases:
            groups.setdefault((case.model.name, case.dtype), []).append(case)
        for group in groups.values():
            self.waiting.put(group)

    def serve(self) -> None:
        """Take groups until there are none."""
        server = _Server(self)
        try:
            while not self.is_over():
                server.run(self.waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:  # the thread's own end would go unseen
            self.found.put(error)
        finally:
            server.close()
            self.found.put(None)

    def is_over(self) -> bool:
        """Whether no further case is to be started."""
        late = self.stop_at is not None and time.monotonic() > self.stop_at
        return late or self.stopped.is_set()

    def stop(self) -> None:
        """Start no further case, and end those that run."""
        self.stopped.set()
        for worker in list(self.live):
            worker.process.kill()


class _Server:
    """What one thread has: a process for its cases, and another one after that."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        self.worker: _Worker | None = None
        self.asked = 0

    def run(self, group: Iterable[Case]) -> None:
        """Run cases one after the other, until the pool is over."""
        for case in group:
            if self.pool.is_over():
                return
            worker = self._ready()
            record = worker.ask(case)
            if record is None and not self.pool.stopped.is_set():
                record = _record_of_a_crash(case, self.close())
            if record is not None:
                self.pool.found.put(record)

    def _ready(self) -> _Worker:
        if self.asked >= CASES_PER_PROCESS:
            self.close()
        if self.worker is None:
            self.worker, self.asked = _Worker(), 0
            self.pool.live.add(self.worker)
        self.asked += 1
        return self.worker

    def close(self) -> str:
        """End the process, if there is one; what it wrote to stderr."""
        worker, self.worker, self.asked = self.worker, None, 0
        if worker is None:
            return ""
        self.pool.live.discard(worker)
        return worker.close()


def _record_of_a_crash(case: Case, errors: str) -> Record:
    tail = "\n".join(errors.splitlines()[-LINES_OF_A_CRASH:])
    text = f"the process ended or gave no answer in {SECONDS_PER_CASE:g} s:\n{tail}"
    return {"id": case.id, "ok": False, "problems": [text]}


class _Worker:
    """A process that runs cases, one at a time."""

    def __init__(self) -> None:
        self.errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
        )

    def ask(self, case: Case) -> Record | None:
        """The record of a case, or None where the process gives none."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(case.id, file=self.process.stdin, flush=True)
        except OSError:
            return None
        # One line is on its way at a time, so nothing waits in Python's buffer.
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS_PER_CASE)
        line = self.process.stdout.readline() if ready else ""
        record: Record | None = json.loads(line) if line else None
        return record

    def close(self) -> str:
        """End the process; what it wrote to stderr."""
        self.process.kill()
        self.process.communicate()
        with self.errors:
            self.errors.seek(0)
            return self.errors.read()


def environment() -> dict[str, str]:
    """The environment of a worker: eight CPU devices, and quick compilation."""
    taken = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return {**taken, "XLA_FLAGS": " ".join(FLAGS), "JAX_PLATFORMS": "cpu"}


def record_of(case: Case) -> Record:
    """Run a case here.

    Returns:
        What there is to say about it, ready for JSON: ``id``, ``ok``, ``problems`` and,
        where it ran, the errors, tolerance, noise, mesh and seconds.
    """
    from tests.equality import run_case

    start = time.perf_counter()
    try:
        verdict = run_case(case)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"id": case.id, "ok": False, "problems": [text]}
    outcome = verdict.outcome
    return {
        "id": case.id,
        "ok": not verdict.problems,
        "problems": list(verdict.problems),
        "worst": outcome.worst,
        "worst_path": outcome.worst_path,
        "loss_error": outcome.loss_error,
        "metric_error": outcome.metric_error,
        "rest_error": outcome.rest_error,
        "update_error": outcome.update_error,
        "distance": outcome.distance,
        "tolerance": verdict.limits.each,
        "noise": verdict.limits.noise,
        "compilations": outcome.compilations,
        "mesh": {a: n for a, n in outcome.plan.axis_sizes.items() if n > 1},
        "seconds": round(time.perf_counter() - start, 2),
    }


def main() -> None:
    """Answer every case id on stdin with a record on stdout."""
    # As in tests/conftest.py: traces make many objects, and hardly any in circles.
    gc.set_threshold(50_000, 20, 20)
    import tests.equality  # noqa: F401  # before warnings are errors: others' imports

    warnings.simplefilter("error")
    # Cases take layers in a scan under schedules that stages alike do not follow.
    warnings.filterwarnings("ignore", "one of . stages takes", UserWarning)
    # The whole matrix takes seconds to make, and most are asked for a few cases of it.
    by_id = {case.id: case for case in (*pairwise(), *features.pairwise(), *subset())}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not stand between the records
    for line in sys.stdin:
        if line.strip() not in by_id:
            by_id = {case.id: case for case in features.whole()}
        print(json.dumps(record_of(by_id[line.strip()])), file=answers, flush=True)


if __name__ == "__main__":
    main()
