"""Seeded faults against elastic runs: none hangs, loses a sample or changes a loss.

Each case is a run of 2 to 4 processes, with a spare or none, in float32 or float64.
At drawn moments a drawn process of it, whatever that does just then (starting,
compiling, standing by, or taking part), or the supervisor, gets a drawn signal: SIGKILL
(7 of 10), SIGSTOP, or SIGSTOP and later SIGCONT. Then the next committed step is waited
for. In the end the run is told to end, and is compared with one that nothing disturbed.
What was measured is kept in ``elastic.json`` beside this script, with commits, versions
and seeds; without options that is printed, and some faults more are tried.

    python scripts/bench_elastic.py [--faults 6] [--seed N] [--refresh] [--each 10]
    python scripts/bench_elastic.py --recovery 3

``--recovery`` prints ``recovery_ratio`` instead: seconds from a kill to the next step
with a spare, over those of a launch that goes on from a checkpoint to its first step.
``--refresh`` adds cases to the kept ones until these hold so many faults; each is
written down as it ends. The last line is one JSON object, over kept and fresh faults:

    hangs              faults after which no step came in 300 s
    recovered          part of the faults after which one came
    samples_lost       (step, sample) pairs of undisturbed runs that are missing
    samples_doubled    pairs that a committed step held twice
    max_rel_loss_diff  over the first 30 steps in float32; _f64: over all in float64
    leftovers          processes, ports and unfinished files that stayed
    recompiled_models  programs that a member compiled after its first step, as others
                       left or came, and the persistent cache did not hold
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from whalejax.elastic.status import goodput_of
from whalejax.elastic.supervisor import journal
from whalejax.elastic.supervisor.processes import began_at


ROOT: Final = Path(__file__).resolve().parents[1]
FILE: Final = Path(__file__).with_name("elastic.json")
TRAINING: Final = Path(__file__).with_name("elastic_training.py")
HANGS_SECONDS: Final = 300.0
END_SECONDS: Final = 120.0
LEASE_SECONDS: Final = 8.0
PAUSE_SECONDS: Final = 0.1
FEW_STEPS: Final = 30
PACKAGES: Final = ("jax", "jaxlib", "optax", "orbax-checkpoint", "msgpack", "numpy")

START: Final = """
import json, sys
from pathlib import Path
from whalejax.elastic.launching import supervise
from whalejax.elastic.supervisor.settings import SupervisorSettings
words, folder, settings = json.loads(sys.argv[1])
sys.exit(supervise(words, Path(folder), SupervisorSettings(**settings), seconds=60.0))
"""


class Run:
    """An elastic run that is disturbed from outside."""

    def __init__(self, folder: Path, most: int, spares: int, *, x64: bool) -> None:
        self.folder, self.most, self.spares, self.x64 = folder, most, spares, x64
        self.out = folder / "out"
        self.out.mkdir(exist_ok=True)
        options = {
            "out": str(self.out),
            "save": str(folder / "save"),
            "steps": 10**6,
            "x64": self.x64,
            "pause": PAUSE_SECONDS,
        }
        (folder / "options.json").write_text(json.dumps(options))
        words = [sys.executable, str(TRAINING), str(folder / "options.json")]
        settings = {
            "least": 1,
            "most": self.most,
            "spares": self.spares,
            "lease_seconds": LEASE_SECONDS,
            "fruitless": 30,
        }
        with (folder / "front.log").open("w") as log:
            self.front = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    START,
                    json.dumps([words, str(folder), settings]),
                ],
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def events(self) -> list[dict[str, Any]]:
        """What the journal holds."""
        return journal.read(self.folder / "elastic" / journal.EVENTS)

    def commits(self) -> list[dict[str, Any]]:
        """What was committed."""
        return journal.read(self.folder / "elastic" / journal.COMMITS)

    def processes(self) -> list[tuple[str, int]]:
        """What each process does, and its number."""
        pids, what = {}, {}
        for said in self.events():
            name = said.get("name")
            match said["event"]:
                case "started":
                    if began_at(said["pid"]) == said["began"]:
                        pids[name], what[name] = said["pid"], "starting"
                case "registered" if what.get(name) == "starting":
                    what[name] = "compiling"
                case "ready":
                    what[name] = "standing by"
                case "begun":
                    what.update({n: "taking part" for n in said["members"]})
                case "lost" | "ended":
                    pids.pop(name, None)
        found = [(what[name], pid) for name, pid in pids.items()]
        if supervisor := self.supervisor():
            found.append(("supervisor", supervisor))
        return found

    def supervisor(self) -> int | None:
        """Its process."""
        found = Path(f"/proc/{self.front.pid}/task/{self.front.pid}/children")
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(found.read_text().split()[0])
        return None

    def moves_on(self, step: int, seconds: float) -> float | None:
        """How long it takes until a step behind this one is committed."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if newest(self.commits()) > step:
                return time.monotonic() - began
            if self.front.poll() is not None:
                return None
            time.sleep(0.02)
        return None


def newest(commits: Sequence[Mapping[str, Any]]) -> int:
    """The newest committed step."""
    return max((said["step"] for said in commits), default=0)


def environment() -> dict[str, str]:
    """Of the processes: CPU only, and this checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def strike(run: Run, drawn: random.Random) -> dict[str, Any] | None:
    """Send a drawn process a drawn signal, and wait for the next step."""
    there = run.processes()
    if not there:
        return None
    what, pid = drawn.choice(there)
    kill, thaws = drawn.random() < 0.7, drawn.random() < 0.5
    thaw_seconds = drawn.uniform(0.1, LEASE_SECONDS / 2)
    step = newest(run.commits())
    began = began_at(pid)
    try:
        os.kill(pid, signal.SIGKILL if kill else signal.SIGSTOP)
    except ProcessLookupError:
        return None
    if not kill and thaws:
        time.sleep(thaw_seconds)
        if began_at(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    took = run.moves_on(step + 1, HANGS_SECONDS)
    name = "SIGKILL" if kill else "SIGSTOP, SIGCONT" if thaws else "SIGSTOP"
    return {"what": what, "signal": name, "step": step, "seconds": took}


def measure(seed: int, faults: int) -> dict[str, Any]:
    """One run and its faults."""
    drawn = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="whalejax-elastic-") as name:
        most = drawn.choice((2, 3, 4))
        spares = drawn.choice((0, 1)) if most < 4 else 0
        run = Run(Path(name), most, spares, x64=drawn.random() < 0.5)
        found: list[dict[str, Any]] = []
        try:
            # The first fault may come before there is a step.
            time.sleep(drawn.uniform(0.0, 20.0))
            while len(found) < faults and run.front.poll() is None:
                one = strike(run, drawn)
                if one is not None:
                    found.append(one)
                    if one["seconds"] is None:
                        break
                time.sleep(min(drawn.expovariate(1 / 5.0), 30.0))
            return {
                "seed": seed,
                "most": run.most,
                "spares": run.spares,
                "x64": run.x64,
                "faults": found,
                **finish(run),
            }
        finally:
            end(run)


def recovery(times: int) -> dict[str, Any]:
    """From a kill to the next committed step with a spare, over a cold restart.

    A cold restart is a launch that goes on from a checkpoint, up to its first step.
    """
    warm, cold = [], []
    with tempfile.TemporaryDirectory(prefix="whalejax-elastic-") as name:
        for _ in range(times):
            run = Run(Path(name), 2, 1, x64=False)
            began = time.time()
            try:
                run.moves_on(newest(run.commits()), HANGS_SECONDS)
                cold.append(run.commits()[-1]["time"] - began)
                while (there := Counter(run.processes())) and "standing by" not in [
                    what for what, _ in there
                ]:
                    time.sleep(0.1)
                pid = next(pid for what, pid in there if what == "taking part")
                generation = run.commits()[-1]["generation"]
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                # What was under way may still come; the next generation tells.
                while not (after := _later(run.commits(), generation)):
                    time.sleep(0.02)
                warm.append(after[0]["time"] - killed)
                run.front.send_signal(signal.SIGTERM)
                run.front.wait(END_SECONDS)
            finally:
                end(run)
    return {
        "recovery_ratio": statistics.median(warm) / statistics.median(cold),
        "warm_seconds": warm,
        "cold_seconds": cold,
        **about(),
    }


def _later(commits: Sequence[dict[str, Any]], generation: int) -> list[dict[str, Any]]:
    return [said for said in commits if said["generation"] > generation]


def finish(run: Run) -> dict[str, Any]:
    """Tell the run to end, and look at what it did."""
    run.front.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.front.wait(END_SECONDS)
    commits, said = run.commits(), _said(run)
    steps = newest(commits)
    losses = {c["step"]: c["loss"] for c in commits}
    expected = undisturbed(run, steps)
    seen: dict[int, Counter[int]] = {}
    for one in said:
        if one["step"] <= steps:
            seen[one["step"]] = Counter(one["samples"])
    size = len(expected[0]["samples"]) if expected else 0
    wanted = {step: range((step - 1) * size, step * size) for step in losses}
    lost = [s for s in range(1, steps + 1) if s not in losses]
    lost += [s for s in wanted if s in seen and not set(wanted[s]) <= set(seen[s])]
    doubled = [s for s, n in seen.items() if max(n.values(), default=0) > 1]
    differences = [
        abs(losses[e["step"]] - e["loss"]) / max(abs(e["loss"]), 1e-30)
        for e in expected[: None if run.x64 else FEW_STEPS]
        if e["step"] in losses
    ]
    unlike = [o["step"] for o in said if losses.get(o["step"], o["loss"]) != o["loss"]]
    return {
        "status": run.front.poll(),
        "steps": steps,
        "samples_lost": size * len(lost),
        "samples_doubled": size * len(doubled),
        "unlike_losses": len(unlike),
        "max_rel_loss_diff": max(differences, default=0.0),
        "leftovers": leftovers(run),
        "recompiled_models": recompiled(run),
        "goodput": goodput_of(commits),
        "generations": sum(e["event"] == "begun" for e in run.events()),
    }


def _said(run: Run) -> list[dict[str, Any]]:
    return [one for path in run.out.glob("*.jsonl") for one in _lines(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # A kill may cut a line short.
            found.append(json.loads(line))
    return found


def recompiled(run: Run) -> int:
    """Programs that members compiled after their first step."""
    found = 0
    for path in run.out.glob("*.jsonl"):
        counts = [one["compiled"] for one in _lines(path)]
        found += counts[-1] - counts[0] if counts else 0
    return found


def undisturbed(run: Run, steps: int) -> list[dict[str, Any]]:
    """The same steps in one process that nothing disturbs."""
    if not steps:
        return []
    out = run.folder / "alone"
    out.mkdir()
    count = steps if run.x64 else min(steps, FEW_STEPS)
    options = {"out": str(out), "steps": count, "x64": run.x64, "pause": 0.0}
    path = run.folder / "alone.json"
    path.write_text(json.dumps(options))
    subprocess.run(
        [sys.executable, str(TRAINING), str(path)],
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (lines,) = (p.read_text().splitlines() for p in out.glob("*.jsonl"))
    return [json.loads(line) for line in lines]


def leftovers(run: Run) -> list[str]:
    """What stayed behind."""
    found = []
    for said in run.events():
        if said["event"] == "started" and _runs(said["pid"], said["began"]):
            found.append(f"process {said['name']}")
        if said["event"] == "opened":
            with socket.socket() as probe:
                if probe.connect_ex((said["host"], said["port"])) == 0:
                    found.append("port")
    save = run.folder / "save"
    known = ("step_", "whalejax.lock", "elastic.json")
    if save.is_dir():
        for path in save.iterdir():
            if not path.name.startswith(known) or path.suffix:
                found += [path.name] * (path.name != "elastic.json")
    return found


def _runs(pid: int, began: str) -> bool:
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return began_at(pid) == began and said.rpartition(")")[2].split()[0] not in "ZX"


def end(run: Run) -> None:
    """Leave nothing behind, whatever happened."""
    for what, pid in run.processes():
        with contextlib.suppress(ProcessLookupError):
            (os.kill if what == "supervisor" else os.killpg)(pid, signal.SIGKILL)
    run.front.kill()
    run.front.wait()


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of all cases together."""
    faults = [fault for case in cases for fault in case["faults"]]
    took = [f["seconds"] for f in faults if f["seconds"] is not None]
    in_f32 = [c["max_rel_loss_diff"] for c in cases if not c["x64"]]
    in_f64 = [c["max_rel_loss_diff"] for c in cases if c["x64"]]
    return {
        "faults": len(faults),
        "hangs": len(faults) - len(took),
        "recovered": len(took) / len(faults) if faults else None,
        "samples_lost": sum(c["samples_lost"] for c in cases),
        "samples_doubled": sum(c["samples_doubled"] for c in cases),
        "unlike_losses": sum(c["unlike_losses"] for c in cases),
        "max_rel_loss_diff": max(in_f32, default=None),
        "max_rel_loss_diff_f64": max(in_f64, default=None),
        "leftovers": sum(len(c["leftovers"]) for c in cases),
        # Earlier cases did not count them.
        "recompiled_models": sum(c.get("recompiled_models", 0) for c in cases),
        "seconds_to_next_step": statistics.median(took) if took else None,
        "steps": sum(c["steps"] for c in cases),
        "whats": dict(Counter(f["what"] for f in faults)),
    }


def about() -> dict[str, Any]:
    """Commit, versions and machine."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return {
        "commit": told.stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def read() -> list[dict[str, Any]]:
    """The kept cases."""
    return json.loads(FILE.read_text())["cases"] if FILE.exists() else []


def write(cases: Sequence[Mapping[str, Any]]) -> None:
    """Keep cases; the file is whole at any time."""
    data = {"result": summary(cases), "cases": cases}
    beside = FILE.with_suffix(".part")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    beside.replace(FILE)


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--each", type=int, default=10, help="faults of one run")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--recovery", type=int, default=0, metavar="TIMES")
    options = parser.parse_args()
    if options.recovery:
        print(json.dumps(recovery(options.recovery)))
        return
    kept = read()
    fresh: list[dict[str, Any]] = []
    seed = options.seed
    if seed is None:
        seed = len(kept) if options.refresh else random.SystemRandom().randrange(10**6)

    def count() -> int:
        cases = kept if options.refresh else fresh
        return sum(len(case["faults"]) for case in cases)

    while count() < options.faults:
        case = measure(seed, min(options.each, options.faults - count()))
        case["about"] = about()
        seed += 1
        print(json.dumps({k: v for k, v in case.items() if k != "about"}), flush=True)
        if options.refresh:
            kept.append(case)
            write(kept)
        else:
            fresh.append(case)
        if not case["faults"]:
            break
    kept_faults = sum(len(case["faults"]) for case in kept)
    print(json.dumps({**summary([*kept, *fresh]), "kept": kept_faults}))


if __name__ == "__main__":
    main()
