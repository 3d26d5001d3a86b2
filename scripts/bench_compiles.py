"""Plans that are called feasible, compiled: does every one of them compile, and fit?

For each model and topology the planner's choice is taken, and then the fastest feasible
layout of every other set of mesh axes, as many as ``--most`` says. The real TPU or GPU
compiler compiles each training step. What came of it is kept in ``compiles.json``
beside this script, with the versions and the date; without options the kept results
are added up. They are of the layouts that were feasible on that date.

    python scripts/bench_compiles.py [--refresh] [--only TEXT] [--most N]

``--refresh`` compiles what is not in the file yet (with ``--only``, all whose name
holds TEXT); about an hour for everything. The last line is one JSON object: programs,
compiled (of these), fits (of these), understood (whose every collective was read), and
failed (their names).
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
        name: of the reference model.
        options: of its job.
        samples: in the batch of one device.
        topologies: what it is compiled for.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 2
    topologies: tuple[str, ...] = TOPOLOGIES

    @property
    def label(self) -> str:
        """The name and what differs from the default."""
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


def planned(model: Model, topology: str, **fixed: Any) -> wh.Plan:
    """A plan of a model, by the layout that is fixed."""
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
    """The layouts to compile: of each set of axes the fastest that fits."""
    best = planned(model, topology)
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
        yield candidate.layout, planned(model, topology, mesh=full, zero=level)
        if len(seen) == most:
            return


AXES = ("data", "fsdp", "expert", "context", "tensor")


def compiled(plan: wh.Plan, topology: str) -> dict[str, Any]:
    """What the compiler makes of a plan, as it is kept."""
    found = plan.verify(topology, timeout_seconds=SECONDS)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": found.versions,
        "fits": found.fits,
        "failure": found.failure[:300],
        "refused": found.refused[:300],
        "compile_seconds": round(found.compile_seconds, 1),
        "peak_bytes": {
            "predicted": plan.memory.total_bytes,
            "compiled": found.peak.compiled,
        },
    }


def refresh(kept: dict[str, Any], only: str, most: int) -> None:
    """Compile what is not kept, and keep it."""
    programs, complete = kept["programs"], kept["complete"]
    for model in MODELS:
        for topology in model.topologies:
            label = f"{model.label} {topology}"
            done = complete.get(label, 0) >= most
            if only not in label or (done and not only):
                continue
            for name, found in results(model, topology, most):
                programs[f"{label}: {name}"] = found
                print(f"{label}: {name}", json.dumps(found), flush=True)
                write(kept)
            complete[label] = most
            write(kept)


def results(
    model: Model, topology: str, most: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts and what the compiler makes of them, or why there is none."""
    try:
        for layout, plan in layouts(model, topology, most):
            try:
                yield layout, compiled(plan, topology)
            except wh.WhaleError as error:
                yield layout, failed(error)
    except wh.WhaleError as error:
        yield "no plan", failed(error)


def failed(error: wh.WhaleError) -> dict[str, Any]:
    """What is kept of a program that did not compile."""
    return {"fits": False, "failure": str(error)[:300], "refused": ""}


def write(kept: Mapping[str, Any]) -> None:
    """Keep the results."""
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", metavar="TEXT", default="")
    parser.add_argument("--most", metavar="N", type=int, default=3)
    arguments = parser.parse_args()
    empty: dict[str, Any] = {"programs": {}, "complete": {}}
    kept = json.loads(FILE.read_text()) if FILE.exists() else empty
    if arguments.refresh:
        refresh(kept, arguments.only, arguments.most)
    found = {n: r for n, r in kept["programs"].items() if arguments.only in n}
    bad = [n for n, r in found.items() if r["failure"] or r["refused"]]
    for name in bad:
        print(f"{name}: {found[name]['failure'] or found[name]['refused']}")
    print(
        json.dumps(
            {
                "programs": len(found),
                "compiled": sum(not r["failure"] for r in found.values()),
                "fits": sum(r["fits"] for r in found.values()),
                "understood": sum(not r["refused"] for r in found.values()),
                "failed": bad,
            }
        )
    )


if __name__ == "__main__":
    main()
