"""Injects seeded faults into elastic runs and checks that they continue correctly.

Each case is a run of 2 to 4 processes, with or without a spare, in float32 or float64.
At random moments a random process of it, in whatever state (starting, compiling,
standing by, or training), or the supervisor, gets a random signal: SIGKILL (7 of 10),
SIGSTOP, or SIGSTOP and later SIGCONT. One of five faults hits several: the supervisor
and its successor, all members at once, or the journal's disk, which is filled while the
supervisor is killed. Then the script waits for the next committed step. In the end it
ends the run, and compares it with an undisturbed run.

As root, there are also cases with links: an agent in a network namespace of its own
holds each process of the run, agents get signals too, and 6 of 10 faults are those of a
random link. It goes down for a time that is shorter or longer than the lease, or it is
slowed to 200 Mb/s for a while; the model is larger, so that steps slow down. An agent
that ended, or was frozen for 30 s, is started again, as on a host.

    python scripts/bench_elastic.py [--faults 6] [--seed N] [--each N]
    python scripts/bench_elastic.py --refresh --faults 300
    python scripts/bench_elastic.py --measure calibration,29,60,120,restart,recovery
    python scripts/bench_elastic.py --measure spread --beside FOLDER

``elastic.json`` beside this script has the results, with commits, versions and seeds;
those of a changed working tree are not stored. Without options the script tries a few
more faults, for at most five minutes, and adds the stored ones to its report.
``--refresh`` adds cases to the file until it has so many faults, and writes each as it
ends. ``--measure`` measures speed anew, as ``elastic_measured.py`` describes. The last
line is one JSON object, over stored and fresh faults:

    hangs              faults after which no step came in 300 s
    recovered          part of the faults after which one came
    samples_lost       (step, sample) pairs of undisturbed runs that are missing
    samples_doubled    pairs that occur twice in a committed step
    wrong_victims      members that were given up without a fault that could end them
    rolled_back        committed steps that were computed again although a member of
                       the generation before was alive
    blamed_right       fraction of the killed members that were given up by name
    max_rel_loss_diff  over the first 30 steps in float32; _f64: over all in float64
    leftovers          processes, ports and unfinished files that remained
    recompiled_models  programs that a member compiled after its first step, as others
                       left or came, and that the persistent cache lacked
    measured_at        commits of the stored speeds, which are in the same object
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import checkout
import elastic_measured
import jax
from elastic_faults import LEASE_SECONDS, audited_losses, cause_fault, small_disk
from elastic_runs import Run, audited
from network_namespaces import namespaces, why_none


FILE: Final = Path(__file__).with_name("elastic.json")
PAUSE_SECONDS: Final = 0.1
LINK_PART: Final = 0.15
"""Part of all faults that links have."""

DISK_PART: Final = 0.25
"""Fraction of the cases without links whose journal is on a small disk."""

LINKED: Final = {"hidden": 8192}
"""Model whose gradient sums dominate a step over slow links."""

FRESH_SECONDS: Final = 300.0
FRESH_EACH: Final = 3
REFRESH_EACH: Final = 10
PACKAGES: Final = ("jax", "jaxlib", "optax", "orbax-checkpoint", "msgspec", "numpy")


def measure(
    seed: int, faults: int, *, links: bool, disks: bool = False
) -> dict[str, Any]:
    """Runs one case with its faults.

    Args:
        seed: Seed of the random choices.
        faults: Number of faults.
        links: Whether processes are in network namespaces, and links fail too.
        disks: Whether the journal may be on a small disk, which is filled.
    """
    rng = random.Random(seed)
    most = rng.choice((2, 3, 4))
    spares = rng.choice((0, 1)) if most < 4 else 0
    x64 = rng.random() < 0.5
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
        if disks and not links and rng.random() < DISK_PART:
            stack.enter_context(small_disk(Path(name)))
        run = Run(Path(name), settings, options, spaces)
        stack.callback(run.end)
        results: list[dict[str, Any]] = []
        # The first fault may come before there is a step.
        time.sleep(rng.uniform(0.0, 20.0))
        while len(results) < faults and run.front.poll() is None:
            fault = cause_fault(run, rng)
            if fault is not None:
                results.append(fault)
                if fault["seconds"] is None:
                    break
            time.sleep(min(rng.expovariate(1 / 5.0), 30.0))
        return {
            "seed": seed,
            "most": most,
            "spares": spares,
            "x64": x64,
            "links": links,
            "faults": results,
            **audited(run),
            **audited_losses(run, results),
        }


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of all cases together."""
    faults = [fault for case in cases for fault in case["faults"]]
    waits = [f["seconds"] for f in faults if f["seconds"] is not None]
    in_f32 = [c["max_rel_loss_diff"] for c in cases if not c["x64"]]
    in_f64 = [c["max_rel_loss_diff"] for c in cases if c["x64"]]
    return {
        "faults": len(faults),
        "hangs": len(faults) - len(waits),
        "recovered": _fraction(len(waits), len(faults)),
        "samples_lost": sum(c["samples_lost"] for c in cases),
        "samples_doubled": sum(c["samples_doubled"] for c in cases),
        "unlike_losses": sum(c["unlike_losses"] for c in cases),
        "max_rel_loss_diff": max(in_f32, default=None),
        "max_rel_loss_diff_f64": max(in_f64, default=None),
        "wrong_victims": sum(len(c.get("wrong_victims", [])) for c in cases),
        "rolled_back": sum(c.get("rolled_back", 0) for c in cases),
        "blamed_right": _fraction(
            sum(c.get("blamed", 0) for c in cases),
            sum(c.get("killed", 0) for c in cases),
        ),
        "leftovers": sum(len(c["leftovers"]) for c in cases),
        "recompiled_models": sum(len(c.get("recompiled", [])) for c in cases),
        "seconds_to_next_step": statistics.median(waits) if waits else None,
        "link_faults": sum(f["what"] == "link" for f in faults),
        "steps": sum(c["steps"] for c in cases),
        "whats": dict(Counter(f["what"] for f in faults)),
    }


def _fraction(part: int, total: int) -> float | None:
    return part / total if total else None


def about() -> dict[str, Any]:
    return {
        "commit": checkout.commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def read() -> dict[str, Any]:
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {"cases": data.get("cases", []), "measured": data.get("measured", {})}


def write(stored: Mapping[str, Any]) -> None:
    """Writes the results; the file is complete at any time."""
    data = {"result": summary(stored["cases"]), **stored}
    unfinished = FILE.with_suffix(".part")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(FILE)


def measure_speed(
    stored: dict[str, Any], kinds: Sequence[str], seconds: float, beside: Path | None
) -> None:
    """Measures kinds anew, and stores each as it ends."""
    for kind in kinds:
        result = elastic_measured.measured(kind, seconds, beside)
        stored["measured"][kind] = {**result, "about": about()}
        print(json.dumps({kind: result}), flush=True)
        if checkout.is_clean():
            write(stored)


def add_cases(stored: dict[str, Any], faults: int, each: int) -> None:
    """Adds cases to the stored ones until these have ``faults`` faults."""
    cases = stored["cases"]
    while (left := faults - summary(cases)["faults"]) > 0:
        links = summary(cases)["link_faults"] < LINK_PART * faults
        seed = 1 + max((case["seed"] for case in cases), default=-1)
        case = measure(seed, min(each, left), links=links, disks=True)
        print(json.dumps(case), flush=True)
        if not case["faults"]:
            raise SystemExit("a run ended before its first fault")
        cases.append({**case, "about": about()})
        write(stored)


def fresh_cases(
    seed: int, faults: int, each: int, *, links: bool
) -> list[dict[str, Any]]:
    """Runs cases that are not stored, with links and without in turn."""
    cases: list[dict[str, Any]] = []
    end = time.monotonic() + FRESH_SECONDS
    while (left := faults - summary(cases)["faults"]) > 0:
        if time.monotonic() > end:
            break
        with_links = links and len(cases) % 2 == 1
        case = measure(
            seed + len(cases), min(each, left), links=with_links, disks=links
        )
        print(json.dumps(case), flush=True)
        cases.append(case)
        if not case["faults"]:
            break
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--each", type=int, default=None, help="faults of one run")
    parser.add_argument("--seed", type=int, default=None, help="of fresh runs")
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--measure", default="", metavar="KINDS")
    parser.add_argument("--seconds", type=float, default=600.0, help="for --measure")
    parser.add_argument("--beside", type=Path, help="an older checkout, for spread")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    reason = why_none()
    stored, fresh = read(), []
    if options.refresh and (reason or not checkout.is_clean()):
        reason = reason or "the working tree was changed"
        raise SystemExit(f"--refresh stores nothing here: {reason}")
    if options.measure:
        kinds = options.measure.split(",")
        measure_speed(stored, kinds, options.seconds, options.beside)
    elif options.refresh:
        add_cases(stored, options.faults, options.each or REFRESH_EACH)
    else:
        seed = options.seed
        if seed is None:
            seed = random.SystemRandom().randrange(10**6)
        each = options.each or FRESH_EACH
        fresh = fresh_cases(seed, options.faults, each, links=not reason)
    speeds = stored["measured"]
    report = {
        **summary([*stored["cases"], *fresh]),
        **elastic_measured.bars(speeds),
        "kept": summary(stored["cases"])["faults"],
        "measured_at": {kind: row["about"]["commit"] for kind, row in speeds.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
