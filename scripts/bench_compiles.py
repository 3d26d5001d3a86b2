"""Compiles plans that are called feasible and counts those that compile and fit.

For each model and topology the script takes the planner's choice, and then the fastest
feasible layout of every other set of mesh axes, up to ``--most``. The real TPU or GPU
compiler compiles each training step. ``compiles.json`` beside this script has the
results, with the versions and the date; without options these are summed up. They are
of the layouts that were feasible on that date.

    python scripts/bench_compiles.py [--refresh] [--only TEXT] [--most N]

``--refresh`` compiles the programs that the file lacks (with ``--only``, all whose name
contains TEXT), in about an hour. The last line is one JSON object:

    programs    number of programs
    compiled    those that compiled
    fits        those that fit in memory
    understood  those whose every collective was read
    failed      names of those that did not compile or were not read
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import whalejax as wh
from whalejax import jobs, models


FILE = Path(__file__).with_name("compiles.json")
SECONDS = 1800.0
TOPOLOGIES = (
    *("v5e:2x2", "v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v5p:4x4x4", "v6e:8x8"),
    *("h100:8", "h100:2x8"),
)
AXIS = re.compile(r"(\w+) (\d+)")
ZERO = re.compile(r"ZeRO-(\d)")


@dataclass(frozen=True)
class Model:
    """A reference model and its options.

    Attributes:
        name: Name of the reference model.
        options: Options of its job.
        samples: Samples in the batch of one device.
        topologies: Clusters that it is compiled for.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 2
    topologies: tuple[str, ...] = TOPOLOGIES

    @property
    def label(self) -> str:
        """Name with the options that differ from the default."""
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


SCANNED = {"scan_layers": True}
MODELS = (
    Model("gpt"),
    Model("gpt", {"remat": "dots"}),
    Model("gpt", {**SCANNED, "remat": "full"}),
    Model("bert-test"),
    Model("bert-base", topologies=("v5e:4x4", "v6e:8x8", "h100:8")),
    Model("resnet50"),
    Model("moe"),
    Model("moe", {**SCANNED, "remat": "dots"}),
)


def make_plan(model: Model, topology: str, **fixed: Any) -> wh.Plan:
    """Returns the plan of a model under a fixed layout."""
    job = models.job(model.name, **model.options)
    cluster = wh.cluster(topology)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, model.samples * cluster.num_devices),
        optimizer=job.optimizer,
        cluster=cluster,
        precision="bf16",
        **jobs.split_settings(job),
        **fixed,
    )


def layouts(model: Model, topology: str, most: int) -> Iterator[tuple[str, wh.Plan]]:
    """Yields the layouts to compile: of each set of axes the fastest that fits."""
    best = make_plan(model, topology)
    seen: set[tuple[frozenset[str], bool]] = set()
    for candidate in best.candidates:
        if not candidate.fits:
            continue
        mesh = {a: int(n) for a, n in AXIS.findall(candidate.layout) if a in AXES}
        zero = ZERO.search(candidate.layout)
        kind = frozenset(mesh), zero is not None
        if kind in seen:
            continue
        seen.add(kind)
        full = {axis: mesh.get(axis, 1) for axis in AXES}
        level = int(zero[1]) if zero else 0
        yield candidate.layout, make_plan(model, topology, mesh=full, zero=level)
        if len(seen) == most:
            return


AXES = ("data", "fsdp", "expert", "context", "tensor")


def compile_plan(plan: wh.Plan, topology: str) -> dict[str, Any]:
    """Returns the compiler's results for a plan."""
    report = plan.verify(topology, timeout_seconds=SECONDS)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": report.versions,
        "fits": report.fits,
        "failure": report.failure[:300],
        "refused": report.refused[:300],
        "compile_seconds": round(report.compile_seconds, 1),
        "peak_bytes": {
            "predicted": plan.memory.total_bytes,
            "compiled": report.peak.compiled,
        },
    }


def refresh(kept: dict[str, Any], only: str, most: int) -> None:
    """Compiles the missing programs and stores their results."""
    programs, complete = kept["programs"], kept["complete"]
    for model in MODELS:
        for topology in model.topologies:
            label = f"{model.label} {topology}"
            is_complete = complete.get(label, 0) >= most
            if only not in label or (is_complete and not only):
                continue
            for name, record in results(model, topology, most):
                programs[f"{label}: {name}"] = record
                print(f"{label}: {name}", json.dumps(record), flush=True)
                write(kept)
            complete[label] = most
            write(kept)


def results(
    model: Model, topology: str, most: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields layouts and the compiler's results, or the reason why there is no plan."""
    try:
        for layout, plan in layouts(model, topology, most):
            try:
                yield layout, compile_plan(plan, topology)
            except wh.WhaleError as error:
                yield layout, failure_record(error)
    except wh.WhaleError as error:
        yield "no plan", failure_record(error)


def failure_record(error: wh.WhaleError) -> dict[str, Any]:
    """Returns the record of a program that did not compile."""
    return {"fits": False, "failure": str(error)[:300], "refused": ""}


def write(kept: Mapping[str, Any]) -> None:
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", metavar="TEXT", default="")
    parser.add_argument("--most", metavar="N", type=int, default=3)
    arguments = parser.parse_args()
    empty: dict[str, Any] = {"programs": {}, "complete": {}}
    stored = json.loads(FILE.read_text()) if FILE.exists() else empty
    if arguments.refresh:
        refresh(stored, arguments.only, arguments.most)
    records = {n: r for n, r in stored["programs"].items() if arguments.only in n}
    failures = [n for n, r in records.items() if r["failure"] or r["refused"]]
    for name in failures:
        print(f"{name}: {records[name]['failure'] or records[name]['refused']}")
    print(
        json.dumps(
            {
                "programs": len(records),
                "compiled": sum(not r["failure"] for r in records.values()),
                "fits": sum(r["fits"] for r in records.values()),
                "understood": sum(not r["refused"] for r in records.values()),
                "failed": failures,
            }
        )
    )


if __name__ == "__main__":
    main()
