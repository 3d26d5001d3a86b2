"""Measures elastic runs under faults, against undisturbed runs and restarts.

    python scripts/bench_elastic.py --measure calibration,29,60,120,restart,recovery

Four members with 40 % of a core each (control groups, which need root) share 12
micro-batches. A random training member gets a fault at even intervals: 7 of 10 times
SIGKILL, else SIGSTOP, or SIGSTOP and within 4 s SIGCONT. The supervisor replaces
members, under the same quotas. ``bench_elastic.py`` adds these keys to its last line:

    throughput_kept (a fault every 29 s; ``_120``: every 120 s)
                    committed steps, over those that the living members would have done
                    undisturbed. The undisturbed rate of four is that of the minute
                    before the first fault; that of three is to it as in a run of three
                    (``calibration``), of fewer in proportion. A member lives if it was
                    once ready for steps (by the run's journal) and was not killed or
                    frozen (by the log of faults), or has thawed
    throughput_of_four   the same over the rate of four all the time
    over_restart    committed steps a second under faults every 29 s, over those of a
                    ``whalejax launch --processes 4`` with the same quotas, model and
                    faults. It restarts whenever one is killed or frozen for good, and
                    saves at the interval of Daly's formula for the measured save time
    goodput, goodput_predicted, goodput_error
                    goodput that the runs reported at a fault every 29, 60 and 120 s,
                    that of ``wh.goodput``, and the largest relative difference. The
                    prediction uses the rate of faults and the calibration: seconds from
                    a kill to the joining of another member, and the seconds that the
                    others lose. A frozen member costs its lease too, and one that thaws
                    the seconds for which it was frozen
    recovery_ratio  seconds from a kill to the next step with a spare, over those of a
                    launch from a checkpoint to its first step, without quotas
    spread_recovery seconds from a kill to the next step of a model that two processes
                    hold together, over those of the version in ``--beside FOLDER``, a
                    checkout of an earlier commit; medians of runs in turn
    spread_recovery_with_spares
                    the same with a spare for each process, over the earlier commit's
                    without
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
from elastic_runs import (
    END_SECONDS,
    HANGS_SECONDS,
    ROOT,
    STEPS,
    Launch,
    Run,
    environment,
)
from elastic_training import MICRO_BATCHES, Options, job_of

import whalejax as wh
from whalejax.distributed.cgroup_quota import Quota
from whalejax.journals.status import goodput_of
from whalejax.membership.settings import SupervisorSettings
from whalejax.planner.plan.goodput import daly_seconds
from whalejax.processes.local_processes import began_at


MEMBERS: Final = 4
QUOTA: Final = 40.0
MODEL: Final = {
    "size": MICRO_BATCHES * 1536,
    "hidden": 512,
    "layers": 1,
    "counted": False,
    "save_every": 100,
}
FLAGS: Final = "--xla_cpu_multi_thread_eigen=false"
INTERVALS: Final = (29, 60, 120)
THROUGHPUT_KEYS: Final = {29: "", 120: "_120"}
"""Intervals of the throughput keys, and the suffixes of these."""

UNDISTURBED_SECONDS: Final = 60.0
KILLS: Final = 4
AFTER_JOINING_SECONDS: Final = 8.0
SETTINGS: Final = SupervisorSettings(least=1, most=MEMBERS)
KILL, STOP, THAW = "SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT"
_TICK_SECONDS: Final = 0.1
_WEIGHT: Final = 30.0
"""CPU weight of a measured process, relative to other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planned fault.

    Attributes:
        at: Seconds from the beginning.
        kind: ``KILL``, ``STOP`` or ``THAW``.
        seconds: Seconds until a frozen member thaws.
    """

    at: float
    kind: str
    seconds: float


def schedule(interval: float, seconds: float, seed: int) -> list[Fault]:
    """Returns faults at even intervals, of random kinds."""
    rng = random.Random(seed)
    times = [interval / 2]
    while times[-1] + interval < seconds:
        times.append(times[-1] + interval)
    kills = round(0.7 * len(times))
    kinds = [KILL] * kills + [STOP, THAW] * len(times)
    kinds = kinds[: len(times)]
    rng.shuffle(kinds)
    return [
        Fault(at=at, kind=kind, seconds=rng.uniform(0.1, 4.0))
        for at, kind in zip(times, kinds, strict=True)
    ]


class Quotas:
    """Puts each process of a run under a quota of its own as soon as it exists.

    The process that starts and watches them has a core, and all precede other programs.
    """

    def __init__(self, first: int, find: Callable[[], Iterable[int]]) -> None:
        """Puts the first process under its quota.

        Args:
            first: Process that starts the others.
            find: Function that returns the others.
        """
        self._find = find
        self._of_process: dict[int, Quota] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._put(first, 100.0)
        self._first = first

    def __enter__(self) -> Quotas:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        end = time.monotonic() + END_SECONDS
        for pid, quota in self._of_process.items():
            # A group with a process that still ends cannot be removed.
            while pid != self._first and began_at(pid) and time.monotonic() < end:
                time.sleep(_TICK_SECONDS)
            quota.close()

    def _put(self, pid: int, percent: float) -> None:
        self._of_process[pid] = quota = Quota(percent)
        quota.weigh(_WEIGHT)
        with contextlib.suppress(wh.WhaleError):  # It has ended.
            quota.add(pid)

    def _watch(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            pids = {*self._find()}
            for pid in pids - self._of_process.keys():
                self._put(pid, QUOTA)
            for pid in self._of_process.keys() - pids - {self._first}:
                if not began_at(pid):
                    self._of_process.pop(pid).close()


@contextlib.contextmanager
def running(members: int) -> Iterator[Run]:
    """Starts a run under quotas, in which all members take part."""
    with tempfile.TemporaryDirectory(prefix="whalejax-elastic-") as name:
        settings = dataclasses.asdict(dataclasses.replace(SETTINGS, most=members))
        run = Run(Path(name), settings, MODEL, XLA_FLAGS=FLAGS)
        try:
            with Quotas(
                run.front.pid, lambda: [pid for _, pid in run.members().values()]
            ):
                _await(run, members, 0)
                yield run
                run.end()
        finally:
            run.end()


def _await(run: Run, members: int, spares: int) -> None:
    end = time.monotonic() + HANGS_SECONDS
    target = {"taking part": members, "standing by": spares}
    while True:
        counts = Counter(state for state, _ in run.members().values())
        if all(counts[state] == count for state, count in target.items()):
            return
        if time.monotonic() > end or run.front.poll() is not None:
            log = (run.folder / "front.log").read_text()[-2000:]
            raise SystemExit(f"not all members take part: {dict(counts)}\n{log}")
        time.sleep(_TICK_SECONDS)


def times_of(run: Run, begin: float, end: float) -> list[float]:
    """Returns the first commit time of each step, between two times."""
    first: dict[int, float] = {}
    for commit in run.commits():
        first.setdefault(commit["step"], commit["time"])
    return [first[step] for step in sorted(first) if begin <= first[step] <= end]


def undisturbed(run: Run, seconds: float) -> float:
    """Returns the steps a second over the next ``seconds``."""
    time.sleep(3.0)  # The first step of a generation connects.
    begin = time.time()
    time.sleep(seconds)
    times = times_of(run, begin, time.time())
    return (len(times) - 1) / (times[-1] - times[0])


# Calibration of the prediction.


def calibration() -> dict[str, Any]:
    """Returns the rate of three members over that of four, and the cost of a kill."""
    rng = random.Random(0)
    kills: list[tuple[float, float, int, float]] = []
    with running(MEMBERS) as run:
        rate = undisturbed(run, UNDISTURBED_SECONDS)
        while len(kills) < KILLS:
            kill_at = time.time()
            os.kill(_random_member(run, rng)[1], signal.SIGKILL)
            joined = _rejoin_time(run, kill_at)
            time.sleep(AFTER_JOINING_SECONDS)
            times = times_of(run, 0.0, time.time())
            last = max(at for at in times if at <= kill_at)
            after = [at for at in times if at > kill_at]
            kills.append(
                (joined - kill_at, joined - last, len(after), after[-1] - last)
            )
    with running(MEMBERS - 1) as run:
        fewer = undisturbed(run, UNDISTURBED_SECONDS)
    # Half of the loss, because the others stop for the kill and for the newcomer.
    lost_seconds = [
        (shared * fewer + (whole - shared) * rate - steps) / rate / 2
        for _, shared, steps, whole in kills
    ]
    rates = {str(n): n / MEMBERS for n in range(MEMBERS + 1)}
    return {
        "rate": rate,
        "rates": {**rates, str(MEMBERS - 1): fewer / rate},
        "away_seconds": [seconds_away for seconds_away, *_ in kills],
        "lost_seconds": lost_seconds,
    }


def _rejoin_time(run: Run, kill_time: float) -> float:
    """Returns the time at which all members took part again after a kill."""
    end = time.monotonic() + HANGS_SECONDS
    while time.monotonic() < end:
        for event in run.events():
            is_complete = event["event"] == "begun" and len(event["members"]) == MEMBERS
            if is_complete and event["time"] > kill_time:
                return float(event["time"])
        time.sleep(_TICK_SECONDS)
    raise SystemExit(f"no other took part {HANGS_SECONDS:.0f} s after a kill")


def _random_member(run: Run, rng: random.Random) -> tuple[str, int]:
    """Returns a random training member."""
    while True:
        members = run.members().items()
        busy = [(name, pid) for name, (state, pid) in members if state == "taking part"]
        if busy:
            return rng.choice(sorted(busy))
        time.sleep(_TICK_SECONDS)


# Under faults.


def cause_fault(pid: int, fault: Fault) -> None:
    """Causes a fault; a thawing member has thawed at the return."""
    os.kill(pid, signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP)
    if fault.kind == THAW:
        time.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def run_with_faults(interval: float, seconds: float) -> dict[str, Any]:
    """Returns the results of a run under faults."""
    faults = schedule(interval, seconds, seed=int(interval))
    rng = random.Random(1)
    log: list[dict[str, Any]] = []
    with running(MEMBERS) as run:
        rate = undisturbed(run, UNDISTURBED_SECONDS)
        begin = time.time()
        for fault in faults:
            time.sleep(max(begin + fault.at - time.time(), 0.0))
            with contextlib.suppress(ProcessLookupError):
                name, pid = _random_member(run, rng)
                fault_time = time.time()
                cause_fault(pid, fault)
                thaw_time = time.time() if fault.kind == THAW else None
                log.append({"name": name, "at": fault_time, "until": thaw_time})
        time.sleep(max(begin + seconds - time.time(), 0.0))
        end = time.time()
        times = times_of(run, begin, end)
        ready = {e["name"]: e["time"] for e in run.events() if e["event"] == "ready"}
        commits = [c for c in run.commits() if begin <= c["time"] <= end]
    goodput = goodput_of(commits)
    assert goodput is not None
    return {
        "interval": interval,
        "seconds": seconds,
        "faults": dict(Counter(fault.kind for fault in faults)),
        "steps_per_second": len(times) / seconds,
        "undisturbed_steps_per_second": rate,
        "alive_seconds": {str(n): s for n, s in alive(ready, log, begin, end).items()},
        "goodput": goodput,
    }


def throughput(
    result: Mapping[str, Any], calibrated: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the part of its speed that a run kept."""
    rates, counts = calibrated["rates"], result["alive_seconds"]
    possible = sum(rates[str(n)] * seconds for n, seconds in counts.items())
    steps = result["steps_per_second"] / result["undisturbed_steps_per_second"]
    return {
        "throughput_kept": steps * result["seconds"] / possible,
        "throughput_of_four": steps,
    }


def alive(
    ready: Mapping[str, float],
    log: Sequence[Mapping[str, Any]],
    begin: float,
    end: float,
) -> dict[int, float]:
    """Returns for how many seconds how many members were alive.

    Args:
        ready: Time at which each was ready for steps.
        log: Name, time and end of each fault; an end of None is for good.
        begin, end: Limits of the counted time.

    >>> alive({"a": 0.0, "b": 2.0}, [{"name": "a", "at": 3.0, "until": None}], 0.0, 9.0)
    {1: 8.0, 2: 1.0}
    """
    changes = [(at, 1) for at in ready.values()]
    for fault in log:
        changes.append((fault["at"], -1))
        if fault["until"] is not None:
            changes.append((fault["until"], 1))
    seconds_by_count: dict[int, float] = {}
    count, since = 0, begin
    for at, change in [*sorted(changes), (end, 0)]:
        at = min(max(at, begin), end)
        living = min(count, MEMBERS)
        seconds_by_count[living] = seconds_by_count.get(living, 0.0) + at - since
        count, since = count + change, at
    return {n: length for n, length in sorted(seconds_by_count.items()) if length}


def predicted_goodput(
    interval: float, seconds: float, calibrated: Mapping[str, Any]
) -> float:
    """Returns the goodput by ``wh.goodput``, with the results of ``calibration``."""
    faults = schedule(interval, seconds, seed=int(interval))
    options = Options(out="", steps=STEPS, **MODEL)
    job, key = job_of(options), jax.random.key(0)
    plan = wh.plan(
        job.loss_fn,
        jax.eval_shape(job.make_model, key),
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster=f"cpu:{MEMBERS}",
        num_micro_batches=MICRO_BATCHES // MEMBERS,
        mesh={"data": MEMBERS},
    )
    loss_seconds = max(statistics.mean(calibrated["lost_seconds"]), 0.0)
    lost = [fault for fault in faults if fault.kind != THAW]
    stopped = sum(fault.kind == STOP for fault in faults)
    cost = stopped * SETTINGS.lease_seconds
    cost += sum(fault.seconds for fault in faults if fault.kind == THAW)
    prediction = wh.goodput(
        plan,
        mtbf=MEMBERS * interval * len(faults) / len(lost),
        restart=statistics.median(calibrated["away_seconds"]),
        # The model counts it twice: at a failure, and when another member joins.
        recovery=loss_seconds + cost / 2 / len(lost),
        nodes=MEMBERS,
    )
    return prediction.elastic


# A restart of all.


@contextlib.contextmanager
def running_launch(launch: Launch) -> Iterator[None]:
    """Starts a launch under quotas; ends it at once after the block."""
    launch.start(XLA_FLAGS=FLAGS)
    try:
        assert launch.process is not None
        with Quotas(launch.process.pid, launch.ranks):
            yield
            launch.end()
    finally:
        launch.end()


def run_with_restarts(interval: float, seconds: float) -> dict[str, Any]:
    """Returns the steps a second of a launch that restarts at each fault."""
    faults = schedule(interval, seconds, seed=int(interval))
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="whalejax-restart-") as name:
        folder = Path(name) / "before"
        folder.mkdir()
        trial = Launch(folder, MEMBERS, {**MODEL, "save_every": 5})
        with running_launch(trial):
            trial.until(17)
        saves = [float(line) for line in (folder / "saves").read_text().split()]
        times = [at for _, at in sorted(trial.steps().items())]
        step = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
        save = statistics.median(saves[1:])
        every = max(1, round(daly_seconds(save, interval) / step))
        launch = Launch(Path(name), MEMBERS, {**MODEL, "save_every": every})
        (folder / "compiled").rename(Path(name) / "compiled")
        with contextlib.ExitStack() as stack:
            stack.enter_context(running_launch(launch))
            launch.until(every + 1)
            begin, restarts = time.time(), 0
            for fault in faults:
                time.sleep(max(begin + fault.at - time.time(), 0.0))
                if fault.kind != THAW:
                    stack.close()
                    stack.enter_context(running_launch(launch))
                    restarts += 1
                elif pids := launch.ranks():
                    cause_fault(rng.choice(pids), fault)
            time.sleep(max(begin + seconds - time.time(), 0.0))
            end = time.time()
        done = launch.steps()
        first = max(s for s, at in done.items() if at <= begin)
        last = max(s for s, at in done.items() if at <= end)
    return {
        "interval": interval,
        "seconds": seconds,
        "restarts": restarts,
        "steps_per_second": (last - first) / seconds,
        "step_seconds": step,
        "save_seconds": save,
        "save_every": every,
    }


# Without quotas.


def recovery(times: int) -> dict[str, Any]:
    """Measures a kill to the next step with a spare, over a cold restart."""
    warm_seconds, cold_seconds = [], []
    with tempfile.TemporaryDirectory(prefix="whalejax-elastic-") as name:
        settings = {"least": 1, "most": 2, "spares": 1, "lease_seconds": 8.0}
        for _ in range(times):
            start = time.time()
            run = Run(Path(name), settings, {"pause": 0.1})
            try:
                run.moves_on(run.step(), HANGS_SECONDS)
                cold_seconds.append(run.commits()[-1]["time"] - start)
                _await(run, 2, 1)
                members = run.members().values()
                pid = next(pid for state, pid in members if state == "taking part")
                generation = run.commits()[-1]["generation"]
                kill_time = time.time()
                os.kill(pid, signal.SIGKILL)
                # Earlier commits may still come; those of the next generation count.
                while not (after := _later(run.commits(), generation)):
                    time.sleep(0.02)
                warm_seconds.append(after[0]["time"] - kill_time)
                run.stop()
            finally:
                run.end()
    return {
        "recovery_ratio": statistics.median(warm_seconds)
        / statistics.median(cold_seconds),
        "warm_seconds": warm_seconds,
        "cold_seconds": cold_seconds,
    }


SPREAD_SCRIPT: Final = """
import json, os, sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import whalejax as wh

def make_model(key):
    keys = jax.random.split(key, 4)
    return {f"w{n}": jax.random.normal(k, (256, 256)) / 16 for n, k in enumerate(keys)}

def loss(model, batch):
    hidden = batch["x"]
    for n in range(4):
        hidden = jnp.tanh(hidden @ model[f"w{n}"])
    return jnp.mean((hidden - batch["y"]) ** 2)

def batch(step, size):
    rng = np.random.default_rng(step)
    return {k: rng.standard_normal((size, 256), np.float32) for k in "xy"}

job = wh.Job(loss, make_model, batch, optax.adam(1e-3), batch_size=16)
options = dict(save=sys.argv[2], save_every=50, copy_every=1, mesh={"fsdp": -1})
with open(f"{sys.argv[1]}/{os.getpid()}.jsonl", "a", buffering=1) as lines:
    for state, metrics in wh.train_elastic(job, steps=10**6, **options):
        row = {"step": int(state.step), "time": time.time()}
        lines.write(json.dumps(row | {"generation": metrics["generation"]}) + "\\n")
        time.sleep(0.1)
"""


class SpreadRun:
    """A model that two processes hold together, run by the code of a checkout.

    Args:
        root: Folder of the checkout.
        folder: Folder of the run.
        spares: Number of spare processes.
    """

    def __init__(self, root: Path, folder: Path, spares: int = 0) -> None:
        self._out = folder / "out"
        self._out.mkdir()
        script = folder / "script.py"
        script.write_text(SPREAD_SCRIPT)
        words = [
            "launch",
            "--processes",
            "2:2",
            "--spares",
            str(spares),
            "--logs",
            str(folder / "logs"),
        ]
        with (folder / "launch.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "whalejax", *words, str(script)]
                + [str(self._out), str(folder / "save")],
                env=environment(PYTHONPATH=str(root)),
                cwd=root,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def rows(self) -> list[dict[str, Any]]:
        """Returns the steps of all processes, in order, with their process ids."""
        rows = []
        for path in self._out.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # A kill may cut a line short.
                    rows.append({**json.loads(line), "pid": int(path.stem)})
        return sorted(rows, key=lambda row: float(row["time"]))

    def await_steps(self, generation: int, steps: int) -> list[dict[str, Any]]:
        """Returns the rows of later generations once there are enough.

        Args:
            generation: Number of the generation before.
            steps: Number of rows to wait for.
        """
        end = time.monotonic() + HANGS_SECONDS
        while True:
            rows = [row for row in self.rows() if row["generation"] > generation]
            if len(rows) >= steps:
                return rows
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(
                    f"no step of {self._out} after generation {generation}"
                )
            time.sleep(0.05)

    def recovery_seconds(self) -> float:
        """Kills a process after some steps; returns the seconds to the next step."""
        rows = self.await_steps(0, 40)
        generation, pid = rows[-1]["generation"], rows[-1]["pid"]
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        return float(self.await_steps(generation, 1)[0]["time"]) - killed

    def end(self) -> None:
        """Ends all processes of the run."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.process.kill()
        self.process.wait()


def spread_recovery(beside: Path, times: int) -> dict[str, Any]:
    """Measures the recovery of a model over two processes, in turn with older code.

    Args:
        beside: Checkout of the older code.
        times: Number of runs of each.
    """
    arms = {"now": (ROOT, 0), "with_spares": (ROOT, 2), "before": (beside, 0)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(times):
        for name, (root, spares) in arms.items():
            with tempfile.TemporaryDirectory(prefix="whalejax-elastic-") as folder:
                run = SpreadRun(root, Path(folder), spares)
                try:
                    seconds[name].append(run.recovery_seconds())
                finally:
                    run.end()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "spread_recovery": median["now"] / median["before"],
        "spread_recovery_with_spares": median["with_spares"] / median["before"],
        "seconds": seconds,
    }


def _later(commits: Sequence[dict[str, Any]], generation: int) -> list[dict[str, Any]]:
    return [commit for commit in commits if commit["generation"] > generation]


KINDS: Final = ("recovery", "spread", "calibration", *map(str, INTERVALS), "restart")


def measured(kind: str, seconds: float, beside: Path | None = None) -> dict[str, Any]:
    """Returns the results of one of ``KINDS``.

    Args:
        kind: What is measured.
        seconds: Seconds with faults.
        beside: Checkout of older code, for ``"spread"``.
    """
    match kind:
        case "spread":
            if beside is None:
                raise SystemExit("--measure spread needs --beside, an older checkout")
            return spread_recovery(beside, 5)
        case "recovery":
            return recovery(5)
        case "calibration":
            return calibration()
        case "restart":
            return run_with_restarts(INTERVALS[0], seconds)
    return run_with_faults(int(kind), seconds)


def bars(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the keys of the stored results of kinds."""
    report: dict[str, Any] = {}
    base, runs = stored.get("calibration"), {n: stored.get(str(n)) for n in INTERVALS}
    for interval, suffix in THROUGHPUT_KEYS.items():
        run = runs[interval]
        if run is not None and base is not None:
            for name, value in throughput(run, base).items():
                report[f"{name}{suffix}"] = round(value, 4)
    first, slow = runs[INTERVALS[0]], stored.get("restart")
    if first is not None and slow is not None:
        speeds = [run["steps_per_second"] for run in (first, slow)]
        report["over_restart"] = round(speeds[0] / speeds[1], 3) if speeds[1] else None
    if "recovery" in stored:
        report["recovery_ratio"] = round(stored["recovery"]["recovery_ratio"], 4)
    for name in ("spread_recovery", "spread_recovery_with_spares"):
        if "spread" in stored:
            report[name] = round(stored["spread"][name], 4)
    if base is not None and all(runs.values()):
        report |= goodputs([run for run in runs.values() if run is not None], base)
    return report


def goodputs(
    runs: Sequence[Mapping[str, Any]], calibrated: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns real and predicted goodputs of runs, and the largest difference."""
    reported = [run["goodput"] for run in runs]
    predictions = [
        predicted_goodput(run["interval"], run["seconds"], calibrated) for run in runs
    ]
    pairs = zip(reported, predictions, strict=True)
    return {
        "goodput": [round(x, 4) for x in reported],
        "goodput_predicted": [round(x, 4) for x in predictions],
        "goodput_error": round(max(abs(p / x - 1) for x, p in pairs), 4),
    }
