"""How what describes hardware and what comes back is called rightly.

The second half of ``misuse_table``, which says how it is used.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Final

import jax

from tests.misuse import Entry
from tests.misuse_world import (
    FILE,
    NONE,
    RATES,
    SIZES,
    SWITCH,
    fields_of,
    given,
)
from whalejax import meshes


_FLAGS: Final = {
    f.name: SWITCH
    for f in dataclasses.fields(meshes.CompilerProfile)
    if f.name != "lanes"
}

ABOVE: Final = ("half single", "numbers above 0")

HARDWARE: Final[Mapping[str, Entry]] = {
    # Hardware.
    "cluster": Entry(given=given(text="h100:8"), says={"text": "cluster"}),
    "Cluster": Entry(
        given=lambda w: fields_of(w.cluster), says={"nodes": "nodes|levels"}
    ),
    "Cluster.describe": Entry(of=lambda w: w.cluster),
    "Cluster.detect": Entry(
        given=given(calibrate=False),
        legal={"calibrate": SWITCH},
        stops=("whalejax.meshes.detect:detect",),
    ),
    "Cluster.from_json": Entry(
        given=lambda w: {"data": w.cluster.to_json()}, says={"data": "data|cluster"}
    ),
    "Cluster.from_paddle": Entry(
        given=lambda w: {"path": w.folder / "none.json"},
        says={"path": "path|cluster file"},
    ),
    "Cluster.of": Entry(given=lambda w: {"data": w.cluster}),
    "Cluster.load": Entry(
        given=lambda w: {"path": w.folder / "cluster.toml"},
        says={"path": "path|cluster file"},
    ),
    "Cluster.part": Entry(
        of=lambda w: w.cluster,
        given=given(num_devices=4, first=0),
        legal={"first": ("zero", "the first device")},
    ),
    "Cluster.save": Entry(
        of=lambda w: w.cluster,
        given=lambda w: {"path": w.folder / "again.toml"},
        legal={"path": FILE},
    ),
    "Cluster.slowest_for": Entry(of=lambda w: w.cluster, given=given(dtype="f32")),
    "Cluster.to_json": Entry(of=lambda w: w.cluster),
    "Cluster.under": Entry(
        of=lambda w: w.cluster,
        given=given(options={}),
        legal={"options": ("dict entry", "those not known change nothing")},
    ),
    "Cluster.with_memory": Entry(of=lambda w: w.cluster, given=given(memory_bytes=1)),
    "Cluster.with_memory_of": Entry(
        of=lambda w: w.cluster,
        given=given(memory_bytes={}),
        legal={"memory_bytes": ("dict entry", "other kinds stay as they are")},
    ),
    "Cluster.with_prices": Entry(
        of=lambda w: w.cluster,
        given=given(prices={}),
        legal={"prices": ("dict entry", "kinds that it lacks are passed over")},
    ),
    "meshes.BandwidthPoint": Entry(
        given=given(moved_bytes=1, bytes_per_second=1.0),
        legal={"moved_bytes": SIZES, "bytes_per_second": RATES},
    ),
    "meshes.CompilerProfile": Entry(
        given=lambda w: fields_of(w.cluster.compiler), legal=_FLAGS
    ),
    "meshes.CompilerProfile.under": Entry(
        of=lambda w: w.cluster.compiler,
        given=given(options={}),
        legal={"options": ("dict entry", "those not known change nothing")},
    ),
    "meshes.DeviceKind": Entry(
        given=lambda w: fields_of(w.kind),
        legal={
            "name": ("text", "any words"),
            "memory_bytes_per_second": ("half", "a number above 0, below 1e24"),
            "label": ("empty text", "any words"),
            "host_memory_bytes": NONE,
            "op_overhead_seconds": ("zero half", "any number from 0"),
            "curve": ("empty", "what was measured holds"),
            "generation": ("empty text", "any words"),
            "watts": ("none half", "not known, or a number above 0"),
            "matmul_half_size": ("zero half", "any number from 0"),
            **dict.fromkeys(
                (
                    "host_link_bytes_per_second",
                    "transcendentals_per_second",
                    "fresh_bytes_per_second",
                    "turned_bytes_per_second",
                    "convolution_share",
                    "price_per_hour",
                ),
                ("none half", "not known, or a number above 0"),
            ),
            "cores": ("zero", "tiles do not matter"),
        },
    ),
    "meshes.DeviceKind.display_name": Entry(of=lambda w: w.kind),
    "meshes.DeviceKind.efficiency_in": Entry(
        of=lambda w: w.kind, given=given(dtype="f32")
    ),
    "meshes.DeviceKind.multiplies_in": Entry(
        of=lambda w: w.kind,
        given=given(dtype="f32", exact=False),
        legal={"exact": SWITCH},
    ),
    "meshes.DeviceKind.was_measured": Entry(
        of=lambda w: w.kind, given=given(dtype="f32")
    ),
    "meshes.DeviceKind.elementwise_seconds": Entry(
        of=lambda w: w.kind,
        given=given(moved_bytes=1024, transcendentals=0),
        legal=dict.fromkeys(
            ("moved_bytes", "transcendentals"),
            ("zero half huge array single", "numbers, also in arrays"),
        ),
    ),
    "meshes.DeviceKind.fresh_seconds": Entry(
        of=lambda w: w.kind,
        given=given(nbytes=1024),
        legal={"nbytes": ("zero half huge", "any number")},
    ),
    "meshes.DeviceKind.turned_seconds": Entry(
        of=lambda w: w.kind,
        given=given(nbytes=1024),
        legal={"nbytes": ("zero half huge array single", "numbers, also in arrays")},
    ),
    "meshes.DeviceKind.matmul_seconds": Entry(
        of=lambda w: w.kind,
        given=given(dtype="f32", m=8, k=8, n=8, count=1),
        legal=dict.fromkeys(
            ("m", "k", "n", "count"), ("half single", "numbers above 0")
        ),
    ),
    "meshes.DeviceKind.matmul_flops_per_second": Entry(
        of=lambda w: w.kind,
        given=given(dtype="f32", m=8, k=8, n=8, batch=1),
        legal=dict.fromkeys(
            ("m", "k", "n", "batch"), ("half single", "numbers above 0")
        ),
    ),
    "meshes.DeviceKind.peak_flops": Entry(
        of=lambda w: w.kind, given=given(dtype="f32")
    ),
    "meshes.Level": Entry(
        given=lambda w: fields_of(w.cluster.levels[0]),
        legal={
            "name": ("empty text", "any words"),
            "size": SIZES,
            "bandwidth_bytes_per_second": RATES,
            "latency_seconds": RATES,
            "torus": SWITCH,
            "shared": SWITCH,
            "peers": SIZES,
        },
    ),
    "meshes.Node": Entry(
        given=lambda w: fields_of(w.cluster.nodes[0]), legal={"count": SIZES}
    ),
    "meshes.MatmulPoint": Entry(
        given=given(dtype="f32", m=1, k=1, n=1, flops_per_second=1.0, batch=1),
        legal={
            "flops_per_second": RATES,
            "dtype": ("empty text", SIZES[1]),
            **dict.fromkeys(("m", "k", "n", "batch"), SIZES),
        },
    ),
    "meshes.Source": Entry(
        given=given(field="*", url="measured: x", title="", date="2026-01"),
        legal=dict.fromkeys(("field", "url", "title", "date"), ("empty text", "words")),
    ),
    "meshes.TimedModel": Entry(
        given=given(
            weights="a", samples=1, seconds=1.0, predicted_seconds=1.0, title=""
        ),
        legal={
            "weights": ("empty text", "any words"),
            "samples": SIZES,
            "seconds": RATES,
            "predicted_seconds": RATES,
            "title": ("empty text", "any words"),
        },
    ),
    "meshes.device_kind": Entry(given=given(name="h100"), says={"name": "device kind"}),
    "meshes.kind_names": Entry(),
    "calibrate": Entry(
        given=lambda w: {
            "budget_seconds": 1.0,
            "use_cache": True,
            "clock": time.perf_counter,
            "today": None,
        },
        legal={
            "budget_seconds": ("half huge", "any number above 0"),
            "use_cache": SWITCH,
            "clock": ("function class", "it is called when something is timed"),
            "today": NONE,
        },
        stops=("whalejax.meshes.calibration.calibrate:_machine",),
        kept=("whalejax.meshes.calibration.calibrate:_machine",),
    ),
    "build_mesh": Entry(
        given=lambda w: {
            "axes": (("data", 8),),
            "devices": jax.devices(),
            "allow_idle": False,
            "order": (),
        },
        legal={
            "devices": NONE,
            "allow_idle": SWITCH,
            "order": ("list", "as they come"),
        },
    ),
    "partition_spec": Entry(
        given=given(spec=((), ("data",))), legal={"spec": ("list", "no dimension")}
    ),
    # Reference models.
    "models.available": Entry(),
    "models.job": Entry(given=given(name="mlp-test"), says={"name": "model"}),
    "models.widened": Entry(
        given=given(name="mlp-test", overrides={}),
        legal={"overrides": ("dict entry", "the model refuses options that it lacks")},
        says={"name": "model"},
    ),
    # What comes back.
    **{
        f"{kind}.save": Entry(
            of=of,
            given=lambda w: {"path": w.folder / "picture.html"},
            says={"path": "path|written as"},
        )
        for kind, of in {
            "DeviceMap": lambda w: w.plan.device_map("w"),
            "MemoryChart": lambda w: w.plan.memory_chart(),
            "SearchChart": lambda w: w.found.chart(),
            "StepTimeline": lambda w: w.plan.timeline(),
        }.items()
    },
    "StepTimeline.trace": Entry(of=lambda w: w.plan.timeline()),
    "SearchResult.chart": Entry(of=lambda w: w.found),
    "SearchResult.document": Entry(of=lambda w: w.found),
    "SearchResult.export": Entry(
        of=lambda w: w.found,
        given=given(form="jobset", name="train", image="an/image", command="python x"),
        legal={
            "name": ("text", "a word in small letters"),
            "image": ("text", "any words"),
            "command": ("none text", "the usual command, or any words"),
        },
    ),
    "SearchResult.head": Entry(of=lambda w: w.found),
    "SearchResult.lines": Entry(
        of=lambda w: w.found, given=given(width=80), legal={"width": NONE}
    ),
    "SearchResult.rows": Entry(of=lambda w: w.found),
    "SearchResult.step_price": Entry(
        of=lambda w: w.found,
        given=given(index=0),
        legal={"index": ("zero minus", "the first, or the last")},
    ),
    "ClusterCandidate.costs": Entry(
        of=lambda w: w.found.weighed[0],
        given=given(n=1),
        legal={"n": ("zero", "none of them")},
    ),
    "PlanDiff.document": Entry(of=lambda w: w.plan.diff(w.plan)),
    "PlanDiff.lines": Entry(
        of=lambda w: w.plan.diff(w.plan),
        given=given(width=80, all_rows=False),
        legal={"width": NONE, "all_rows": SWITCH},
    ),
}
