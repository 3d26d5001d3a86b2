"""Runs live jobs on four processes: seeded arrivals and kills, and traces to simulate.

``traded`` adds jobs and kills processes until devices were traded a number of times,
and audits every job. ``traced`` adds jobs for a time and measures them;
``simulated_over_live`` simulates the jobs of one trace with the measurements of an
earlier one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import checkout
from live_jobs import HANGS_SECONDS, SIZE, Serving, audited, summary, undisturbed

from whalejax.scheduler.job_table import JobOption, ScheduledJob, with_measured
from whalejax.scheduler.live.run_reader import ChangeCosts, RunReader
from whalejax.scheduler.schedule import elastic
from whalejax.scheduler.simulation import simulate


FILE: Final = Path(__file__).with_name("live_jobs.json")
DEVICES: Final = 4
AT_ONCE: Final = 3
INPUT_SECONDS: Final = 0.03
DEVICE_SECONDS: Final = 0.02
EVERY: Final = 10.0
RESIZE: Final = 8.0
HORIZON: Final = 600.0
_POLL_SECONDS: Final = 0.3
_WORDS: Final = ("--set", f"seconds={INPUT_SECONDS}", "--no-wait")
_TRACE_WORDS: Final = ("--set", f"device_seconds={DEVICE_SECONDS}", "--no-wait")
_OPTIONS: Final = ("--every", f"{EVERY}", "--resize", f"{RESIZE}")
_ENDED: Final = ("complete", "failed", "refused", "cancelled")


# Trades under kills.


def traded(folder: Path, seed: int, trades: int) -> dict[str, Any]:
    """Adds jobs and kills processes until devices were traded ``trades`` times.

    Returns:
        Totals of the audits of all jobs, in which every sample is counted.
    """
    rng = random.Random(seed)
    serving = Serving(folder, *_OPTIONS)
    steps: dict[str, int] = {}
    commits, kills, hangs = 0, Counter[str](), 0
    next_arrival = next_fault = 0.0
    moved_at = time.monotonic()
    try:
        while True:
            now, jobs = time.monotonic(), serving.shown()
            alive = [n for n in steps if jobs and jobs[n].status not in _ENDED]
            is_enough = serving.trades() >= trades
            if is_enough and not alive:
                break
            if not is_enough and len(alive) < AT_ONCE and now >= next_arrival:
                name = f"job{len(steps)}"
                steps[name] = rng.randint(100, 300)
                serving.add(name, *_WORDS, steps=steps[name])
                next_arrival = now + rng.expovariate(1 / 6)
            elif alive and now >= next_fault:
                kills[_cause_fault(serving, rng, alive)] += 1
                next_fault = now + 3 + rng.expovariate(1 / 8)
            old_commits, commits = commits, sum(len(serving.commits(n)) for n in steps)
            if commits > old_commits:
                moved_at = now
            elif now - moved_at > HANGS_SECONDS:
                hangs += 1
                break
            time.sleep(_POLL_SECONDS)
        expected = undisturbed(folder / "alone", max(steps.values()))
        audits = [audited(serving, n, s, expected[:s]) for n, s in steps.items()]
        statuses = Counter(serving.shown()[name].status for name in steps)
        serving.until(lambda: not serving.leftovers([*steps]), 60.0)
        return {
            "live_trades": serving.trades(),
            "live_hangs": hangs,
            **summary(audits),
            "live_leftovers": len(serving.leftovers([*steps])),
            "live_unlike_steps": sum(
                audit["compared_losses"] != s
                for audit, s in zip(audits, steps.values(), strict=True)
            ),
            "jobs": len(steps),
            "ended": dict(statuses),
            "kills": dict(kills),
            "seed": seed,
        }
    finally:
        serving.end([*steps])


def _cause_fault(serving: Serving, rng: random.Random, names: Sequence[str]) -> str:
    name = rng.choice(names)
    match rng.randrange(5):
        case 0 | 1:
            place = rng.randrange(DEVICES)
            return "member" if serving.kill_member(name, place) else "nobody"
        case 2:
            if rng.random() < 0.3:
                return "all above" if serving.kill_all_above(name) else "nobody"
            return "supervisor" if serving.kill_supervisor(name) else "nobody"
        case 3:
            serving.kill_scheduler()
            return "scheduler"
    serving.ask("pause", name)
    time.sleep(rng.uniform(0.0, 3.0))
    serving.ask("resume", name)
    return "paused"


# A trace, and its simulation.


def traced(folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Adds jobs for some seconds; returns their measurements."""
    rng = random.Random(seed)
    serving = Serving(folder, *_OPTIONS)
    steps: dict[str, int] = {}
    start = time.monotonic()
    next_arrival = 0.0
    try:
        while True:
            now = time.monotonic() - start
            if now < seconds and now >= next_arrival:
                name = f"job{len(steps)}"
                steps[name] = rng.randint(300, 900)
                serving.add(name, *_TRACE_WORDS, steps=steps[name])
                next_arrival += rng.expovariate(1 / 60)
            elif now >= seconds:
                shown = serving.shown()
                if shown and all(shown[n].status in _ENDED for n in steps):
                    break
                if now > seconds + 10 * HANGS_SECONDS:
                    raise SystemExit("jobs of the trace do not end")
            time.sleep(_POLL_SECONDS)
        return measurements(serving, steps)
    finally:
        serving.end([*steps])


def measurements(serving: Serving, steps: Mapping[str, int]) -> dict[str, Any]:
    """Returns the times of jobs, their speeds, and the costs of changes."""
    moments: dict[str, dict[str, float]] = {name: {} for name in steps}
    placed: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    predicted: dict[int, float] = {}
    for e in serving.book():
        name = e["job"]["name"] if e["event"] == "added" else e.get("name")
        if e["event"] in ("added", "planned", "ended"):
            moments[name][e["event"]] = e["time"]
        if e["event"] == "planned":
            predicted = {o["devices"]: o["samples_per_second"] for o in e["options"]}
        if e["event"] == "placed":
            placed[name].append((e["time"], e["size"]))
    costs, speeds, ends = ChangeCosts(), {n: [] for n in predicted}, []
    for name in steps:
        reader = RunReader(serving.save / name)
        old_size = 0
        for at, size in placed[name]:
            reader.record_decision(at, old_size, size)
            old_size = size
        reader.poll()
        costs.add(reader.costs)
        for (_, count), speed in reader.steps_per_second().items():
            speeds.setdefault(count, []).append(SIZE * speed)
        last = max(e["time"] for e in serving.commits(name))
        ends.append(moments[name]["ended"] - last)
    return {
        "jobs": {
            name: {"steps": count, **moments[name]} for name, count in steps.items()
        },
        "predicted": predicted,
        "measured": {n: statistics.fmean(x) for n, x in speeds.items() if x},
        "costs": costs.means(),
        "plan_seconds": statistics.fmean(
            times["planned"] - times["added"] for times in moments.values()
        ),
        "end_seconds": statistics.fmean(ends),
        "resizes": serving.trades(),
    }


def simulated_over_live(
    live: Mapping[str, Any], earlier: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the simulated mean completion over that of the live trace.

    Args:
        live: Trace that ran.
        earlier: Measurements of an earlier one: throughputs, and the seconds of
            planning, starts, resizes and ends.
    """
    options = {
        ("", int(n)): JobOption(place=("", int(n)), samples_per_second=speed)
        for n, speed in earlier["predicted"].items()
    }
    measured = {("", int(n)): speed for n, speed in earlier["measured"].items()}
    jobs = [
        with_measured(
            ScheduledJob(
                name=name,
                options=options,
                samples=float(SIZE * job["steps"]),
                arrival=job["added"] + earlier["plan_seconds"],
                **earlier["costs"],
            ),
            measured,
        )
        for name, job in live["jobs"].items()
    ]
    devices = {"": DEVICES}
    decide = elastic(devices, "throughput", HORIZON)
    simulation = simulate(jobs, devices, decide, every=EVERY)
    overhead = earlier["plan_seconds"] + earlier["end_seconds"]
    simulated = simulation.mean_completion + overhead
    live_mean = statistics.fmean(x["ended"] - x["added"] for x in live["jobs"].values())
    return {
        "sim_over_live": round(simulated / live_mean, 4),
        "simulated_completion_s": round(simulated, 2),
        "live_completion_s": round(live_mean, 2),
    }


# Stored results.


def refreshed(trades: int, seconds: float) -> None:
    """Measures trades under kills, and two traces, and stores each as it ends.

    Args:
        trades: Changes of running jobs' devices.
        seconds: Seconds in which jobs of a trace arrive.
    """
    if not checkout.is_clean():
        raise SystemExit("--live stores nothing here: the working tree was changed")
    stored = read()
    cases = stored["trades"]
    with tempfile.TemporaryDirectory(prefix="whalejax-jobs-") as folder:
        case = traded(Path(folder), len(cases) + 1, trades)
    cases.append({**case, **_about()})
    _write(stored)
    traces = stored["traces"] = []
    for seed in (11, 12):
        with tempfile.TemporaryDirectory(prefix="whalejax-jobs-") as folder:
            traces.append({**traced(Path(folder), seed, seconds), **_about()})
        _write(stored)


def results() -> dict[str, Any]:
    """Returns the stored results as the keys of ``bench_jobs.py``; may be empty."""
    stored = read()
    report: dict[str, Any] = {}
    for key in ("trades", "hangs", "lost", "doubled", "leftovers"):
        if stored["trades"]:
            report[f"live_{key}"] = sum(c[f"live_{key}"] for c in stored["trades"])
    if stored["trades"]:
        name = "live_max_rel_loss_diff"
        report[name] = max(c[name] for c in stored["trades"])
        report["live_commits"] = sorted({c["commit"] for c in stored["trades"]})
    if len(stored["traces"]) == 2:
        earlier, live = stored["traces"]
        report |= simulated_over_live(live, earlier)
    return report


def read() -> dict[str, Any]:
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {"trades": data.get("trades", []), "traces": data.get("traces", [])}


def _write(stored: Mapping[str, Any]) -> None:
    FILE.write_text(json.dumps(stored, indent=1) + "\n")


def _about() -> dict[str, Any]:
    return {"commit": checkout.commit(), "cores": os.cpu_count()}
