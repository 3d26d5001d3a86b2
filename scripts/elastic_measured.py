"""Speed of elastic runs under faults: beside the undisturbed one, a restart, and paper.

    python scripts/bench_elastic.py --measure calibration,29,60,120,restart,recovery

Four members with 40 % of a core each (control groups, so that root is needed) share 12
micro-batches. A drawn one that takes part is struck every so many seconds: 7 of 10
times by SIGKILL, else by SIGSTOP, or by SIGSTOP and within 4 s by SIGCONT. The
supervisor starts others in their place, under the same quotas.

``throughput_kept`` (a fault every 29 s; ``_120``: every 120 s): steps that were
committed, over those that the members that were alive would have done undisturbed. The
undisturbed rate of four is that of the minute before the first fault;
that of three is to it as in a run of three (``calibration``), and of fewer as their
number. Alive is who was ready for steps once (by the run's journal) and was not struck,
or has thawed (by the injector's log): a frozen member is not, nor is one that starts.
``throughput_of_four``: over the rate of four all the time.

``over_restart``: committed steps a second under the faults every 29 s, over those of a
``whalejax launch --processes 4`` with the same quotas, model, and moments and kinds of
faults. It is ended and started again as soon as one is killed or frozen for good, and
saves at the interval that Daly's formula finds for the measured cost of a save.

``goodput_error``: largest relative difference between the goodput that the run reported
at a fault every 29, 60 and 120 s and that of ``wh.goodput``. This is told the rate of
faults, and what the calibration found: seconds from a kill to when another takes part,
and what the others lose when one is killed, or joins. A frozen member costs its lease
besides, and one that thaws what it was frozen for.

``recovery_ratio``: seconds from a kill to the next step with a spare, over those of a
launch that goes on from a checkpoint to its first step, without quotas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
from elastic_runs import END_SECONDS, HANGS_SECONDS, STEPS, Launch, Run
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
KEPT: Final = {29: "", 120: "_120"}
"""Those of which throughput is told, and the ends of its names."""

UNDISTURBED_SECONDS: Final = 60.0
KILLS: Final = 4
AFTER_JOINING_SECONDS: Final = 8.0
SETTINGS: Final = SupervisorSettings(least=1, most=MEMBERS)
KILL, STOP, THAW = "SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT"
_TICK_SECONDS: Final = 0.1
_WEIGHT: Final = 30.0
"""Of a process that is measured, beside one of another program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that is to come.

    Attributes:
        at: seconds from the beginning.
        kind: of it.
        seconds: until one that thaws does.
    """

    at: float
    kind: str
    seconds: float


def schedule(interval: float, seconds: float, seed: int) -> list[Fault]:
    """Faults in even distances, of drawn kinds.

    Args:
        interval: from one to the next.
        seconds: of all.
        seed: of the draw.
    """
    drawn = random.Random(seed)
    times = [interval / 2]
    while times[-1] + interval < seconds:
        times.append(times[-1] + interval)
    kills = round(0.7 * len(times))
    kinds = [KILL] * kills + [STOP, THAW] * len(times)
    kinds = kinds[: len(times)]
    drawn.shuffle(kinds)
    return [
        Fault(at=at, kind=kind, seconds=drawn.uniform(0.1, 4.0))
        for at, kind in zip(times, kinds, strict=True)
    ]


class Quotas:
    """Puts each process of a run under a quota of its own, as soon as it is there.

    What starts and watches them has a core, and all come before other programs.
    """

    def __init__(self, first: int, there: Callable[[], Iterable[int]]) -> None:
        """Put the first process under its quota.

        Args:
            first: the process that starts the others.
            there: gives these.
        """
        self._there = there
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
            there = {*self._there()}
            for pid in there - self._of_process.keys():
                self._put(pid, QUOTA)
            for pid in self._of_process.keys() - there - {self._first}:
                if not began_at(pid):
                    self._of_process.pop(pid).close()


@contextlib.contextmanager
def running(members: int) -> Iterator[Run]:
    """A run under quotas, in which all members take part."""
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
    wanted = {"taking part": members, "standing by": spares}
    while True:
        there = Counter(what for what, _ in run.members().values())
        if all(there[what] == count for what, count in wanted.items()):
            return
        if time.monotonic() > end or run.front.poll() is not None:
            log = (run.folder / "front.log").read_text()[-2000:]
            raise SystemExit(f"not all members take part: {dict(there)}\n{log}")
        time.sleep(_TICK_SECONDS)


def times_of(run: Run, begin: float, end: float) -> list[float]:
    """When each step was first committed, between two times."""
    first: dict[int, float] = {}
    for said in run.commits():
        first.setdefault(said["step"], said["time"])
    return [first[step] for step in sorted(first) if begin <= first[step] <= end]


def undisturbed(run: Run, seconds: float) -> float:
    """Steps a second, for so long from now."""
    time.sleep(3.0)  # The first step of a generation connects.
    begin = time.time()
    time.sleep(seconds)
    times = times_of(run, begin, time.time())
    return (len(times) - 1) / (times[-1] - times[0])


# Before: what parts of the prediction cost.


def calibration() -> dict[str, Any]:
    """Rate of three members over that of four, and what a kill costs."""
    drawn = random.Random(0)
    kills: list[tuple[float, float, int, float]] = []
    with running(MEMBERS) as run:
        rate = undisturbed(run, UNDISTURBED_SECONDS)
        while len(kills) < KILLS:
            killed = time.time()
            os.kill(_drawn(run, drawn)[1], signal.SIGKILL)
            joined = _joined(run, killed)
            time.sleep(AFTER_JOINING_SECONDS)
            times = times_of(run, 0.0, time.time())
            last = max(at for at in times if at <= killed)
            after = [at for at in times if at > killed]
            kills.append((joined - killed, joined - last, len(after), after[-1] - last))
    with running(MEMBERS - 1) as run:
        fewer = undisturbed(run, UNDISTURBED_SECONDS)
    # Half of what is lost, since the others stop for the kill and for who joins.
    lost = [
        (shared * fewer + (whole - shared) * rate - steps) / rate / 2
        for _, shared, steps, whole in kills
    ]
    rates = {str(n): n / MEMBERS for n in range(MEMBERS + 1)}
    return {
        "rate": rate,
        "rates": {**rates, str(MEMBERS - 1): fewer / rate},
        "away_seconds": [away for away, *_ in kills],
        "lost_seconds": lost,
    }


def _joined(run: Run, killed: float) -> float:
    """When all members took part again after a kill."""
    end = time.monotonic() + HANGS_SECONDS
    while time.monotonic() < end:
        for said in run.events():
            whole = said["event"] == "begun" and len(said["members"]) == MEMBERS
            if whole and said["time"] > killed:
                return float(said["time"])
        time.sleep(_TICK_SECONDS)
    raise SystemExit(f"no other took part {HANGS_SECONDS:.0f} s after a kill")


def _drawn(run: Run, drawn: random.Random) -> tuple[str, int]:
    """A member that takes part."""
    while True:
        there = run.members().items()
        found = [(name, pid) for name, (what, pid) in there if what == "taking part"]
        if found:
            return drawn.choice(sorted(found))
        time.sleep(_TICK_SECONDS)


# Under faults.


def strike(pid: int, fault: Fault) -> None:
    """Let it come about; one that thaws has thawed at the return."""
    os.kill(pid, signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP)
    if fault.kind == THAW:
        time.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def disturbed(interval: float, seconds: float) -> dict[str, Any]:
    """What a run does under faults.

    Args:
        interval: from one to the next.
        seconds: of all.
    """
    faults = schedule(interval, seconds, seed=int(interval))
    drawn = random.Random(1)
    log: list[dict[str, Any]] = []
    with running(MEMBERS) as run:
        rate = undisturbed(run, UNDISTURBED_SECONDS)
        begin = time.time()
        for fault in faults:
            time.sleep(max(begin + fault.at - time.time(), 0.0))
            with contextlib.suppress(ProcessLookupError):
                name, pid = _drawn(run, drawn)
                at = time.time()
                strike(pid, fault)
                thawed = time.time() if fault.kind == THAW else None
                log.append({"name": name, "at": at, "until": thawed})
        time.sleep(max(begin + seconds - time.time(), 0.0))
        end = time.time()
        times = times_of(run, begin, end)
        ready = {e["name"]: e["time"] for e in run.events() if e["event"] == "ready"}
        commits = [c for c in run.commits() if begin <= c["time"] <= end]
    told = goodput_of(commits)
    assert told is not None
    return {
        "interval": interval,
        "seconds": seconds,
        "faults": dict(Counter(fault.kind for fault in faults)),
        "steps_per_second": len(times) / seconds,
        "undisturbed_steps_per_second": rate,
        "alive_seconds": {str(n): s for n, s in alive(ready, log, begin, end).items()},
        "goodput": told,
    }


def throughput(one: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """What a run kept of its speed.

    Args:
        one: what ``disturbed`` gave.
        before: what ``calibration`` did.
    """
    rates, counts = before["rates"], one["alive_seconds"]
    possible = sum(rates[str(n)] * seconds for n, seconds in counts.items())
    steps = one["steps_per_second"] / one["undisturbed_steps_per_second"]
    return {
        "throughput_kept": steps * one["seconds"] / possible,
        "throughput_of_four": steps,
    }


def alive(
    ready: Mapping[str, float],
    log: Sequence[Mapping[str, Any]],
    begin: float,
    end: float,
) -> dict[int, float]:
    """For how many seconds so many members were alive.

    Args:
        ready: when each was ready for steps.
        log: who was struck when, and until when; None for good.
        begin, end: seconds between which they are counted.

    >>> alive({"a": 0.0, "b": 2.0}, [{"name": "a", "at": 3.0, "until": None}], 0.0, 9.0)
    {1: 8.0, 2: 1.0}
    """
    changes = [(at, 1) for at in ready.values()]
    for one in log:
        changes.append((one["at"], -1))
        if one["until"] is not None:
            changes.append((one["until"], 1))
    found: dict[int, float] = {}
    count, since = 0, begin
    for at, change in [*sorted(changes), (end, 0)]:
        at = min(max(at, begin), end)
        there = min(count, MEMBERS)
        found[there] = found.get(there, 0.0) + at - since
        count, since = count + change, at
    return {n: length for n, length in sorted(found.items()) if length}


def predicted(interval: float, seconds: float, before: Mapping[str, Any]) -> float:
    """Goodput by ``wh.goodput``.

    Args:
        interval: from one fault to the next.
        seconds: of all.
        before: what ``calibration`` found.
    """
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
    each = max(statistics.mean(before["lost_seconds"]), 0.0)
    lost = [fault for fault in faults if fault.kind != THAW]
    stopped = sum(fault.kind == STOP for fault in faults)
    cost = stopped * SETTINGS.lease_seconds
    cost += sum(fault.seconds for fault in faults if fault.kind == THAW)
    found = wh.goodput(
        plan,
        mtbf=MEMBERS * interval * len(faults) / len(lost),
        restart=statistics.median(before["away_seconds"]),
        # The model counts it twice: when one is lost, and when another joins.
        recovery=each + cost / 2 / len(lost),
        nodes=MEMBERS,
    )
    return found.elastic


# A restart of all.


@contextlib.contextmanager
def started(launch: Launch) -> Iterator[None]:
    """A launch under quotas, which is ended at once."""
    launch.start(XLA_FLAGS=FLAGS)
    try:
        assert launch.process is not None
        with Quotas(launch.process.pid, launch.ranks):
            yield
            launch.end()
    finally:
        launch.end()


def restarted(interval: float, seconds: float) -> dict[str, Any]:
    """Steps a second of a launch that is started again at each fault.

    Args:
        interval: from one fault to the next.
        seconds: of all.
    """
    faults = schedule(interval, seconds, seed=int(interval))
    drawn = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="whalejax-restart-") as name:
        folder = Path(name) / "before"
        folder.mkdir()
        before = Launch(folder, MEMBERS, {**MODEL, "save_every": 5})
        with started(before):
            before.until(17)
        saves = [float(line) for line in (folder / "saves").read_text().split()]
        times = [at for _, at in sorted(before.steps().items())]
        step = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
        save = statistics.median(saves[1:])
        every = max(1, round(daly_seconds(save, interval) / step))
        launch = Launch(Path(name), MEMBERS, {**MODEL, "save_every": every})
        (folder / "compiled").rename(Path(name) / "compiled")
        with contextlib.ExitStack() as stack:
            stack.enter_context(started(launch))
            launch.until(every + 1)
            begin, restarts = time.time(), 0
            for fault in faults:
                time.sleep(max(begin + fault.at - time.time(), 0.0))
                if fault.kind != THAW:
                    stack.close()
                    stack.enter_context(started(launch))
                    restarts += 1
                elif there := launch.ranks():
                    strike(drawn.choice(there), fault)
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
    """From a kill to the next committed step with a spare, over a cold restart."""
    warm, cold = [], []
    with tempfile.TemporaryDirectory(prefix="whalejax-elastic-") as name:
        settings = {"least": 1, "most": 2, "spares": 1, "lease_seconds": 8.0}
        for _ in range(times):
            began = time.time()
            run = Run(Path(name), settings, {"pause": 0.1})
            try:
                run.moves_on(run.step(), HANGS_SECONDS)
                cold.append(run.commits()[-1]["time"] - began)
                _await(run, 2, 1)
                there = run.members().values()
                pid = next(pid for what, pid in there if what == "taking part")
                generation = run.commits()[-1]["generation"]
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                # What was under way may still come; the next generation tells.
                while not (after := _later(run.commits(), generation)):
                    time.sleep(0.02)
                warm.append(after[0]["time"] - killed)
                run.stop()
            finally:
                run.end()
    return {
        "recovery_ratio": statistics.median(warm) / statistics.median(cold),
        "warm_seconds": warm,
        "cold_seconds": cold,
    }


def _later(commits: Sequence[dict[str, Any]], generation: int) -> list[dict[str, Any]]:
    return [said for said in commits if said["generation"] > generation]


KINDS: Final = ("recovery", "calibration", *map(str, INTERVALS), "restart")


def measured(kind: str, seconds: float) -> dict[str, Any]:
    """What one kind gives.

    Args:
        kind: one of ``KINDS``.
        seconds: of faults.
    """
    match kind:
        case "recovery":
            return recovery(5)
        case "calibration":
            return calibration()
        case "restart":
            return restarted(INTERVALS[0], seconds)
    return disturbed(int(kind), seconds)


def bars(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers that are asked for, of what is there.

    Args:
        kept: what kinds gave.
    """
    found: dict[str, Any] = {}
    before, runs = kept.get("calibration"), {n: kept.get(str(n)) for n in INTERVALS}
    for interval, suffix in KEPT.items():
        one = runs[interval]
        if one is not None and before is not None:
            for name, value in throughput(one, before).items():
                found[f"{name}{suffix}"] = round(value, 4)
    first, slow = runs[INTERVALS[0]], kept.get("restart")
    if first is not None and slow is not None:
        speeds = [one["steps_per_second"] for one in (first, slow)]
        found["over_restart"] = round(speeds[0] / speeds[1], 3) if speeds[1] else None
    if "recovery" in kept:
        found["recovery_ratio"] = round(kept["recovery"]["recovery_ratio"], 4)
    if before is not None and all(runs.values()):
        found |= goodputs([one for one in runs.values() if one is not None], before)
    return found


def goodputs(
    runs: Sequence[Mapping[str, Any]], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Live ones and predicted ones of runs, and the largest difference.

    Args:
        runs: what ``disturbed`` gave.
        before: what ``calibration`` did.
    """
    live = [one["goodput"] for one in runs]
    paper = [predicted(one["interval"], one["seconds"], before) for one in runs]
    pairs = zip(live, paper, strict=True)
    return {
        "goodput": [round(x, 4) for x in live],
        "goodput_predicted": [round(x, 4) for x in paper],
        "goodput_error": round(max(abs(p / x - 1) for x, p in pairs), 4),
    }
