"""Seeded faults against elastic runs: none hangs, loses a sample or changes a loss.

Each case is a run of 2 to 4 processes, with a spare or none, in float32 or float64.
At drawn moments a drawn process of it, whatever that does just then (starting,
compiling, standing by, or taking part), or the supervisor, gets a drawn signal: SIGKILL
(7 of 10), SIGSTOP, or SIGSTOP and later SIGCONT. Then the next committed step is waited
for. In the end the run is told to end, and is compared with one that nothing disturbed.

Where this is root, there are also cases with links: each process of the run is held by
an agent in a network namespace of its own, agents get signals too, and 6 of 10 faults
are those of a drawn link. It goes down for a drawn time that is shorter than the lease,
or longer, or it is slowed to 200 Mb/s for a while; the model is larger, so that steps
feel that. One that ended, or was frozen for 30 s, is started again, as on a host.

    python scripts/bench_elastic.py [--faults 6] [--seed N] [--each N]
    python scripts/bench_elastic.py --refresh --faults 300
    python scripts/bench_elastic.py --measure calibration,29,60,120,restart,recovery

Results are kept in ``elastic.json`` beside this script, with commits, versions and
seeds; those of a changed working tree are not. Without options some faults more are
tried, for at most five minutes, and what was kept is printed with them. ``--refresh``
adds cases to the kept ones until these hold so many faults; each is written down as it
ends. ``--measure`` measures speed anew, as ``elastic_measured.py`` describes. The last
line is one JSON object, over kept and fresh faults:

    hangs              faults after which no step came in 300 s
    recovered          part of the faults after which one came
    samples_lost       (step, sample) pairs of undisturbed runs that are missing
    samples_doubled    pairs that a committed step held twice
    max_rel_loss_diff  over the first 30 steps in float32; _f64: over all in float64
    leftovers          processes, ports and unfinished files that stayed
    recompiled_models  programs that a member compiled after its first step, as others
                       left or came, and the persistent cache did not hold
    measured_at        commits of the kept speeds, which stand beside it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import checkout
import elastic_measured
import jax
from elastic_runs import HANGS_SECONDS, Run, audited
from network_namespaces import namespaces, set_link, shape, unshape, why_none

from whalejax.processes.local_processes import began_at


FILE: Final = Path(__file__).with_name("elastic.json")
LEASE_SECONDS: Final = 8.0
PAUSE_SECONDS: Final = 0.1
LINK_PART: Final = 0.15
"""Of all faults, those of links."""

LINK_PART_OF_CASE: Final = 0.6
"""Of the faults of a case with links."""

MEGABITS: Final = 200
LINKED: Final = {"hidden": 8192}
"""A model whose sums take longer over slow links than the rest of a step."""

FRESH_SECONDS: Final = 300.0
FRESH_EACH: Final = 3
REFRESH_EACH: Final = 10
PACKAGES: Final = ("jax", "jaxlib", "optax", "orbax-checkpoint", "msgspec", "numpy")


def strike(run: Run, drawn: random.Random) -> dict[str, Any] | None:
    """Bring a drawn fault about, and wait for the next step."""
    if run.agents is not None and drawn.random() < LINK_PART_OF_CASE:
        return _disturb_link(run, drawn)
    return _signal(run, drawn)


def _signal(run: Run, drawn: random.Random) -> dict[str, Any] | None:
    there = run.processes()
    if not there:
        return None
    what, pid = drawn.choice(there)
    kill, thaws = drawn.random() < 0.7, drawn.random() < 0.5
    thaw_seconds = drawn.uniform(0.1, LEASE_SECONDS / 2)
    step = run.step()
    began = began_at(pid)
    try:
        os.kill(pid, signal.SIGKILL if kill else signal.SIGSTOP)
    except ProcessLookupError:
        return None
    if what == "agent" and not kill and not thaws and run.agents is not None:
        run.agents.freezes(pid)
    if not kill and thaws:
        time.sleep(thaw_seconds)
        if began_at(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    took = run.moves_on(step + 1, HANGS_SECONDS)
    name = "SIGKILL" if kill else "SIGSTOP, SIGCONT" if thaws else "SIGSTOP"
    return {"what": what, "signal": name, "step": step, "seconds": took}


def _disturb_link(run: Run, drawn: random.Random) -> dict[str, Any]:
    assert run.agents is not None
    space = drawn.choice(run.agents.spaces)
    inside = drawn.random() < 0.5
    kind = drawn.choice(("down", "down beyond the lease", f"{MEGABITS} Mb/s"))
    seconds = {
        "down": drawn.uniform(0.5, LEASE_SECONDS / 2),
        "down beyond the lease": drawn.uniform(LEASE_SECONDS * 1.25, LEASE_SECONDS * 3),
        f"{MEGABITS} Mb/s": drawn.uniform(5.0, 20.0),
    }[kind]
    is_down = kind != f"{MEGABITS} Mb/s"

    def mend() -> None:
        if is_down:
            set_link(space, "up", inside=inside)
        else:
            unshape(space)

    step = run.step()
    if is_down:
        set_link(space, "down", inside=inside)
    else:
        shape(space, MEGABITS)
    timer = threading.Timer(seconds, mend)
    timer.start()
    took = run.moves_on(step + 1, HANGS_SECONDS)
    timer.join()
    return {
        "what": "link",
        "signal": kind,
        "inside": inside,
        "for_seconds": seconds,
        "step": step,
        "seconds": took,
    }


def measure(seed: int, faults: int, *, links: bool) -> dict[str, Any]:
    """One run and its faults.

    Args:
        seed: of what is drawn.
        faults: how many.
        links: processes are in network namespaces, and links fail too.
    """
    drawn = random.Random(seed)
    most = drawn.choice((2, 3, 4))
    spares = drawn.choice((0, 1)) if most < 4 else 0
    x64 = drawn.random() < 0.5
    settings = {
        "least": 1,
        "most": most,
        "spares": spares,
        "lease_seconds": LEASE_SECONDS,
        "fruitless": 30,
    }
    options = {"x64": x64, "pause": PAUSE_SECONDS, **(LINKED if links else {})}
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="whalejax-elastic-")
        )
        spaces = stack.enter_context(namespaces(most + spares)) if links else []
        run = Run(Path(name), settings, options, spaces)
        stack.callback(run.end)
        found: list[dict[str, Any]] = []
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
            "most": most,
            "spares": spares,
            "x64": x64,
            "links": links,
            "faults": found,
            **audited(run),
        }


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
        # Of cases that say which.
        "recompiled_models": sum(len(c.get("recompiled", [])) for c in cases),
        "seconds_to_next_step": statistics.median(took) if took else None,
        "link_faults": sum(f["what"] == "link" for f in faults),
        "steps": sum(c["steps"] for c in cases),
        "whats": dict(Counter(f["what"] for f in faults)),
    }


def about() -> dict[str, Any]:
    """Commit, versions and machine."""
    return {
        "commit": checkout.commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def read() -> dict[str, Any]:
    """What is kept."""
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {"cases": data.get("cases", []), "measured": data.get("measured", {})}


def write(kept: Mapping[str, Any]) -> None:
    """Keep results; the file is whole at any time."""
    data = {"result": summary(kept["cases"]), **kept}
    beside = FILE.with_suffix(".part")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    beside.replace(FILE)


def measure_speed(kept: dict[str, Any], kinds: Sequence[str], seconds: float) -> None:
    """Measure kinds anew, each of which is kept as it ends."""
    for kind in kinds:
        found = elastic_measured.measured(kind, seconds)
        kept["measured"][kind] = {**found, "about": about()}
        print(json.dumps({kind: found}), flush=True)
        if checkout.is_clean():
            write(kept)


def add_cases(kept: dict[str, Any], faults: int, each: int) -> None:
    """Add cases to the kept ones until these hold so many faults."""
    cases = kept["cases"]
    while (left := faults - summary(cases)["faults"]) > 0:
        links = summary(cases)["link_faults"] < LINK_PART * faults
        case = measure(len(cases), min(each, left), links=links)
        print(json.dumps(case), flush=True)
        if not case["faults"]:
            raise SystemExit("a run ended before its first fault")
        cases.append({**case, "about": about()})
        write(kept)


def fresh_cases(
    seed: int, faults: int, each: int, *, links: bool
) -> list[dict[str, Any]]:
    """Cases that are not kept, with links and without in turn."""
    cases: list[dict[str, Any]] = []
    end = time.monotonic() + FRESH_SECONDS
    while (left := faults - summary(cases)["faults"]) > 0:
        if time.monotonic() > end:
            break
        with_links = links and len(cases) % 2 == 1
        case = measure(seed + len(cases), min(each, left), links=with_links)
        print(json.dumps(case), flush=True)
        cases.append(case)
        if not case["faults"]:
            break
    return cases


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--each", type=int, default=None, help="faults of one run")
    parser.add_argument("--seed", type=int, default=None, help="of the first fresh run")
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--measure", default="", metavar="KINDS")
    parser.add_argument("--seconds", type=float, default=600.0, help="of --measure")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    why = why_none()
    kept, fresh = read(), []
    if options.refresh and (why or not checkout.is_clean()):
        why = why or "the working tree was changed"
        raise SystemExit(f"--refresh keeps nothing here: {why}")
    if options.measure:
        measure_speed(kept, options.measure.split(","), options.seconds)
    elif options.refresh:
        add_cases(kept, options.faults, options.each or REFRESH_EACH)
    else:
        seed = options.seed
        if seed is None:
            seed = random.SystemRandom().randrange(10**6)
        each = options.each or FRESH_EACH
        fresh = fresh_cases(seed, options.faults, each, links=not why)
    speeds = kept["measured"]
    told = {
        **summary([*kept["cases"], *fresh]),
        **elastic_measured.bars(speeds),
        "kept": summary(kept["cases"])["faults"],
        "measured_at": {kind: one["about"]["commit"] for kind, one in speeds.items()},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
