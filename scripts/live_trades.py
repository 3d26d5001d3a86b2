"""Live jobs on four processes: seeded arrivals and kills, and a trace to simulate.

``traded`` lets jobs come and kills processes until devices were traded so many times,
and audits every job. ``traced`` lets jobs come for a time and measures what they did;
``simulated_over_live`` plays the jobs of one trace through with what another, earlier
one has measured.
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
_TURN_SECONDS: Final = 0.3
_WORDS: Final = ("--set", f"seconds={INPUT_SECONDS}", "--no-wait")
_TRACE_WORDS: Final = ("--set", f"device_seconds={DEVICE_SECONDS}", "--no-wait")
_OPTIONS: Final = ("--every", f"{EVERY}", "--resize", f"{RESIZE}")
_OVER: Final = ("complete", "failed", "refused", "cancelled")


# Trades under kills.


def traded(folder: Path, seed: int, trades: int) -> dict[str, Any]:
    """Let jobs come and processes be killed until devices were traded so often.

    Args:
        folder: Of the scheduler.
        seed: Of arrivals, sizes and kills.
        trades: Number of changes of a running job's devices.

    Returns:
        The audit of all jobs together, in which every sample is counted.
    """
    drawn = random.Random(seed)
    serving = Serving(folder, *_OPTIONS)
    steps: dict[str, int] = {}
    done, kills, hangs = 0, Counter[str](), 0
    arrives = strikes = 0.0
    moved_at = time.monotonic()
    try:
        while True:
            now, shown = time.monotonic(), serving.shown()
            there = [n for n in steps if shown and shown[n].status not in _OVER]
            enough = serving.trades() >= trades
            if enough and not there:
                break
            if not enough and len(there) < AT_ONCE and now >= arrives:
                name = f"job{len(steps)}"
                steps[name] = drawn.randint(100, 300)
                serving.add(name, *_WORDS, steps=steps[name])
                arrives = now + drawn.expovariate(1 / 6)
            elif there and now >= strikes:
                kills[_strike(serving, drawn, there)] += 1
                strikes = now + 3 + drawn.expovariate(1 / 8)
            before, done = done, sum(len(serving.commits(n)) for n in steps)
            if done > before:
                moved_at = now
            elif now - moved_at > HANGS_SECONDS:
                hangs += 1
                break
            time.sleep(_TURN_SECONDS)
        expected = undisturbed(folder / "alone", max(steps.values()))
        found = [audited(serving, n, s, expected[:s]) for n, s in steps.items()]
        statuses = Counter(serving.shown()[name].status for name in steps)
        serving.until(lambda: not serving.leftovers([*steps]), 60.0)
        return {
            "live_trades": serving.trades(),
            "live_hangs": hangs,
            **summary(found),
            "live_leftovers": len(serving.leftovers([*steps])),
            "live_unlike_steps": sum(
                one["compared_losses"] != s
                for one, s in zip(found, steps.values(), strict=True)
            ),
            "jobs": len(steps),
            "ended": dict(statuses),
            "kills": dict(kills),
            "seed": seed,
        }
    finally:
        serving.end([*steps])


def _strike(serving: Serving, drawn: random.Random, there: Sequence[str]) -> str:
    name = drawn.choice(there)
    match drawn.randrange(5):
        case 0 | 1:
            place = drawn.randrange(DEVICES)
            return "member" if serving.kill_member(name, place) else "nobody"
        case 2:
            if drawn.random() < 0.3:
                return "all above" if serving.kill_all_above(name) else "nobody"
            return "supervisor" if serving.kill_supervisor(name) else "nobody"
        case 3:
            serving.kill_scheduler()
            return "scheduler"
    serving.ask("pause", name)
    time.sleep(drawn.uniform(0.0, 3.0))
    serving.ask("resume", name)
    return "paused"


# A trace, and its simulation.


def traced(folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Let jobs come for a time; what they did, and what was measured.

    Args:
        folder: Of the scheduler.
        seed: Of arrivals and sizes.
        seconds: In which jobs come.
    """
    drawn = random.Random(seed)
    serving = Serving(folder, *_OPTIONS)
    steps: dict[str, int] = {}
    began = time.monotonic()
    arrives = 0.0
    try:
        while True:
            now = time.monotonic() - began
            if now < seconds and now >= arrives:
                name = f"job{len(steps)}"
                steps[name] = drawn.randint(300, 900)
                serving.add(name, *_TRACE_WORDS, steps=steps[name])
                arrives += drawn.expovariate(1 / 60)
            elif now >= seconds:
                shown = serving.shown()
                if shown and all(shown[n].status in _OVER for n in steps):
                    break
                if now > seconds + 10 * HANGS_SECONDS:
                    raise SystemExit("jobs of the trace do not end")
            time.sleep(_TURN_SECONDS)
        return measurements(serving, steps)
    finally:
        serving.end([*steps])


def measurements(serving: Serving, steps: Mapping[str, int]) -> dict[str, Any]:
    """When jobs came and ended, how fast they were, and what changes cost."""
    moments: dict[str, dict[str, float]] = {name: {} for name in steps}
    placed: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    predicted: dict[int, float] = {}
    for said in serving.book():
        name = said["job"]["name"] if said["event"] == "added" else said.get("name")
        if said["event"] in ("added", "planned", "ended"):
            moments[name][said["event"]] = said["time"]
        if said["event"] == "planned":
            predicted = {o["devices"]: o["samples_per_second"] for o in said["options"]}
        if said["event"] == "placed":
            placed[name].append((said["time"], said["size"]))
    costs, speeds, ends = ChangeCosts(), {n: [] for n in predicted}, []
    for name in steps:
        reader = RunReader(serving.save / name)
        before = 0
        for at, size in placed[name]:
            reader.record_decision(at, before, size)
            before = size
        reader.poll()
        costs.add(reader.costs)
        for (_, count), speed in reader.steps_per_second().items():
            speeds.setdefault(count, []).append(SIZE * speed)
        last = max(said["time"] for said in serving.commits(name))
        ends.append(moments[name]["ended"] - last)
    return {
        "jobs": {
            name: {"steps": count, **moments[name]} for name, count in steps.items()
        },
        "predicted": predicted,
        "measured": {n: statistics.fmean(x) for n, x in speeds.items() if x},
        "costs": costs.means(),
        "plan_seconds": statistics.fmean(
            one["planned"] - one["added"] for one in moments.values()
        ),
        "end_seconds": statistics.fmean(ends),
        "resizes": serving.trades(),
    }


def simulated_over_live(
    live: Mapping[str, Any], earlier: Mapping[str, Any]
) -> dict[str, float]:
    """Mean completion by the simulator over that of the live trace.

    Args:
        live: A trace that ran.
        earlier: What an earlier one has measured: throughputs, and the seconds that
            planning, starts, resizes and ends take.
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
                samples=float(SIZE * one["steps"]),
                arrival=one["added"] + earlier["plan_seconds"],
                **earlier["costs"],
            ),
            measured,
        )
        for name, one in live["jobs"].items()
    ]
    there = {"": DEVICES}
    decide = elastic(there, "throughput", HORIZON)
    found = simulate(jobs, there, decide, every=EVERY)
    beside = earlier["plan_seconds"] + earlier["end_seconds"]
    simulated = found.mean_completion + beside
    ran = statistics.fmean(x["ended"] - x["added"] for x in live["jobs"].values())
    return {
        "sim_over_live": round(simulated / ran, 4),
        "simulated_completion_s": round(simulated, 2),
        "live_completion_s": round(ran, 2),
    }


# Kept results.


def refreshed(trades: int, seconds: float) -> None:
    """Measure anew: trades under kills, and two traces, each kept as it ends.

    Args:
        trades: Changes of running jobs' devices.
        seconds: In which jobs of a trace come.
    """
    if not checkout.is_clean():
        raise SystemExit("--live keeps nothing here: the working tree was changed")
    kept = read()
    cases = kept["trades"]
    with tempfile.TemporaryDirectory(prefix="whalejax-jobs-") as folder:
        case = traded(Path(folder), len(cases) + 1, trades)
    cases.append({**case, **_about()})
    _write(kept)
    traces = kept["traces"] = []
    for seed in (11, 12):
        with tempfile.TemporaryDirectory(prefix="whalejax-jobs-") as folder:
            traces.append({**traced(Path(folder), seed, seconds), **_about()})
        _write(kept)


def results() -> dict[str, Any]:
    """What is kept, as the keys of ``bench_jobs.py``; nothing where nothing is."""
    kept = read()
    found: dict[str, Any] = {}
    for key in ("trades", "hangs", "lost", "doubled", "leftovers"):
        if kept["trades"]:
            found[f"live_{key}"] = sum(one[f"live_{key}"] for one in kept["trades"])
    if kept["trades"]:
        name = "live_max_rel_loss_diff"
        found[name] = max(one[name] for one in kept["trades"])
        found["live_commits"] = sorted({one["commit"] for one in kept["trades"]})
    if len(kept["traces"]) == 2:
        earlier, live = kept["traces"]
        found |= simulated_over_live(live, earlier)
    return found


def read() -> dict[str, Any]:
    """What is kept."""
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {"trades": data.get("trades", []), "traces": data.get("traces", [])}


def _write(kept: Mapping[str, Any]) -> None:
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


def _about() -> dict[str, Any]:
    return {"commit": checkout.commit(), "cores": os.cpu_count()}
