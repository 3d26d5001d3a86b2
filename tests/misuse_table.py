"""How every public callable is called rightly, and which odd values are right for it.

``misuse`` says how it is used. A public callable or parameter that is not here fails
``tests/whalejax/test_misuse.py``: add it, with the values of ``misuse.VALUES`` that are
right for it and why.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh
from tests.misuse import ALL, Entry
from whalejax import meshes
from whalejax.planner.cost import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One small model, planned, compiled and saved, and what came of it."""

    folder: Path
    model: Any
    batch: Any
    plan: wh.Plan
    step: wh.TrainStep
    state: wh.TrainState
    found: Any
    sliders: Any
    document: dict[str, Any]

    @property
    def cluster(self) -> wh.Cluster:
        return self.plan.cluster

    @property
    def kind(self) -> meshes.DeviceKind:
        return self.cluster.kinds[0]


def loss(model: Any, batch: Any) -> jax.Array:
    """Of a product."""
    return jnp.mean((batch["x"] @ model["w"]) ** 2)


def make_model(key: Any) -> Any:
    """Its weights."""
    return {"w": jax.random.normal(key, (8, 16))}


OPTIMIZER: Final = optax.sgd(0.1)


def planned() -> wh.Plan:
    """The plan of the small model, on the devices of this process."""
    model, batch = make_model(jax.random.key(0)), {"x": np.ones((16, 8), np.float32)}
    cluster = wh.Cluster.detect(calibrate=False)
    return wh.plan(loss, model, batch, optimizer=OPTIMIZER, cluster=cluster)


def world(folder: Path) -> World:
    """Everything that calls need, made once.

    Args:
        folder: an empty one.
    """
    model, batch = make_model(jax.random.key(0)), {"x": np.ones((16, 8), np.float32)}
    plan = planned()
    step = wh.compile(plan, loss, model, optimizer=OPTIMIZER)
    state = step.init(make_model, rng=jax.random.key(1))
    step.save(folder / "checkpoint", state)
    plan.save(folder / "plan.json")
    plan.cluster.save(folder / "cluster.toml")
    found = wh.search(loss, model, batch, clusters=["h100:8"], optimizer=OPTIMIZER)
    return World(
        folder=folder,
        model=model,
        batch=batch,
        plan=plan,
        step=step,
        state=state,
        found=found,
        sliders=plan.sliders(),
        document=plan.document(),
    )


NONE: Final = ("none", "it may be left out")
SWITCH: Final = ("true", "it is a switch")
COUNT: Final = ("", "")
FILE: Final = ("text", "any name will do for a file")
NUMBER: Final = ("zero half", "any number from 0")
POSITIVE: Final = ("half", "any number above 0")
_SIZES: Final = (
    "minus zero huge endless",
    "the kind or cluster that holds it refuses it, with its place among others",
)
_RATES: Final = (f"{_SIZES[0]} nan inf half", _SIZES[1])
PLANNING: Final = ("whalejax.planning:Asked._programs", "whalejax.meshes.detect:detect")

_OF_MODEL: Final[dict[str, Callable[[World], Any]]] = {
    "loss_fn": lambda w: loss,
    "model": lambda w: w.model,
    "batch": lambda w: w.batch,
}


def _given(*names: str, **values: Any) -> Callable[[World], dict[str, Any]]:
    """Arguments from the world by name, and others as they are."""
    return lambda w: {name: getattr(w, name) for name in names} | values


def _plan_arguments(w: World) -> dict[str, Any]:
    return {
        "loss_fn": loss,
        "model": w.model,
        "batch": w.batch,
        "optimizer": OPTIMIZER,
        "cluster": w.cluster,
        "default": None,
        "precision": "f32",
        "num_micro_batches": None,
        "allow_idle": False,
        "sync_batch_stats": False,
        "axis_names": None,
        "trainable": None,
        "batch_axes": 0,
        "mesh": None,
        "zero": None,
        "runnable": True,
        "remat": None,
        "offload": None,
        "sequence_parallel": None,
        "attention": None,
        "loss_chunks": None,
        "shares": None,
        "compiler_options": None,
    }


_PLAN_LEGAL: Final[dict[str, tuple[str, str]]] = {
    "batch": ("array?", "a batch of three samples, for another loss"),
    "optimizer": ("none", "evaluation needs none"),
    "cluster": ("none", "the devices of this process"),
    "default": NONE,
    "num_micro_batches": ("none", "the planner chooses"),
    "allow_idle": SWITCH,
    "sync_batch_stats": SWITCH,
    "axis_names": ("none dict", "no names to map"),
    "trainable": ("none", "everything that can be"),
    "batch_axes": ("zero minus", "the first dimension, or the last"),
    "mesh": ("none dict", "nothing is fixed"),
    "zero": ("none zero", "the planner chooses, or level 0"),
    "runnable": SWITCH,
    "remat": ("none dict text?", "the planner chooses; the model knows what it names"),
    "offload": ("none list", "the planner chooses, or nothing"),
    "sequence_parallel": ("none true", "it is a switch, or the planner's choice"),
    "attention": (
        "none dict text?",
        "the planner chooses; the model knows what it has",
    ),
    "loss_chunks": ("none", "the planner chooses"),
    "shares": ("none array?", "the planner chooses; devices must divide so"),
    "compiler_options": ("none dict entry?", "no options; XLA knows its options"),
}

_SIZE: Final = ("half", "a measured size need not be whole")
_LEVEL: Final = lambda w: w.cluster.levels[0]  # noqa: E731
_ANY: Final = (ALL, "JAX rebuilds it around placeholders of any kind")
_FLAGS: Final = {
    f.name: SWITCH
    for f in dataclasses.fields(meshes.CompilerProfile)
    if f.name != "lanes"
}


def fields_of(value: Any) -> dict[str, Any]:
    """What a dataclass was made of, by name."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


NOT_WHOLE: Final[Mapping[str, str]] = {
    "Cluster.from_paddle": "a file of Paddle's is none that these tests write",
    "Plan.batch_slices": "this plan has no shares",
    "TrainStep": "it is made by wh.compile alone",
    "TrainStep.__call__": "it would consume the state that the others need",
    "TrainStep.rebalances=": "this plan has no shares",
    "TrainStep.rehearse": "this plan is one program",
    "TrainStep.save": "there is a checkpoint at its path",
    "TrainStep.shares=": "this plan has no shares",
}
"""Callables whose right call is refused here, and why."""

ENTRIES: Final[Mapping[str, Entry]] = {
    # Losses and jobs.
    "Aux": Entry(
        given=_given(metrics={}, sums={}, samples={}, variables={}),
        legal=dict.fromkeys(
            ("metrics", "sums", "samples", "variables"),
            ("dict entry", "values by name; a loss that returns them is checked"),
        ),
    ),
    "WeightedLoss": Entry(
        given=_given(total=1.0, weight=1.0),
        legal=dict.fromkeys(
            ("total", "weight"),
            (
                "nan inf minus zero half huge endless array",
                "numbers; what a loss returns is checked",
            ),
        ),
    ),
    "Job": Entry(
        given=lambda w: {
            "loss_fn": loss,
            "make_model": make_model,
            "batch": w.batch,
            "optimizer": OPTIMIZER,
            "batch_size": 4,
            "name": "job",
        },
        legal={
            "loss_fn": ("function class", "its parameters are looked at when planning"),
            "make_model": ("function class", "it is called when planning"),
            "batch": ("array function class", "samples, or what makes them"),
            "optimizer": ("none", "evaluation needs none"),
            "batch_size": ("none", "the command line may say it"),
            "name": ("text", "any words"),
        },
    ),
    "Job.batch_at": Entry(
        of=lambda w: wh.Job(loss, make_model, w.batch, OPTIMIZER, 4),
        given=_given(step=0, size=4),
        legal={"step": ("zero", "the first"), "size": ("none", "the job's own")},
    ),
    # Feeds.
    "Feed": Entry(
        given=_given(
            source=[1, 2, 3], batch_size=2, step=None, seed=0, first=0, epochs=1
        ),
        legal={
            "source": ("array", "three samples"),
            "step": ("none", "whole global batches"),
            "seed": ("none zero", "the order of the source; a seed"),
            "first": ("zero", "the first step"),
            "epochs": ("none zero", "no end; an end at once"),
        },
        says={"source": "source|samples"},
    ),
    "Feed.get_state": Entry(of=lambda w: wh.Feed([1, 2], 1)),
    "Feed.set_state": Entry(
        of=lambda w: wh.Feed([1, 2], 1), given=_given(state={"step": 1})
    ),
    # Marks.
    "replicate": Entry(given=_given(devices=1), legal={"devices": NONE}),
    "split": Entry(
        given=_given(devices=1, axis="mlp"),
        legal={"devices": NONE, "axis": ("none text", "the planner's choice; a name")},
    ),
    "stage": Entry(given=_given(devices=1), legal={"devices": NONE}),
    "pipeline": Entry(
        given=_given(num_stages=2, num_micro_batches=2, schedule="auto"),
        legal={"num_stages": NONE, "num_micro_batches": NONE},
    ),
    "Annotation.__call__": Entry(
        of=lambda w: wh.split(),
        given=_given(function=loss),
        legal={"function": ("function", "what is to be marked")},
        says={"function": "decorates"},
    ),
    "attention": Entry(
        given=lambda w: {
            **dict.fromkeys(("query", "key", "value"), jnp.ones((2, 4, 2, 4))),
            "bias": None,
            "mask": None,
            "is_causal": False,
            "scale": None,
        },
        legal={
            "bias": NONE,
            "mask": NONE,
            "is_causal": SWITCH,
            "scale": ("none minus zero half huge", "any number"),
        },
    ),
    # Planning.
    "plan": Entry(given=_plan_arguments, legal=_PLAN_LEGAL, stops=PLANNING),
    "search": Entry(
        given=lambda w: {
            **{k: v for k, v in _plan_arguments(w).items() if k != "cluster"},
            "clusters": ["h100:8"],
            "prices": {"h100": 2.0},
            "each": 1,
        },
        legal={**_PLAN_LEGAL, "prices": ("none dict", "no price is known")},
        stops=PLANNING,
    ),
    "Plan.what_if": Entry(
        of=lambda w: w.plan,
        given=lambda w: (
            {
                name: value
                for name, value in _plan_arguments(w).items()
                if name
                not in (
                    "loss_fn model optimizer default sync_batch_stats axis_names "
                    "trainable batch_axes"
                ).split()
            }
            | {"batch": 16}
        ),
        legal={k: v for k, v in _PLAN_LEGAL.items() if k not in ("batch", "cluster")},
        stops=PLANNING,
    ),
    "Plan": Entry(
        given=lambda w: fields_of(w.plan),
        legal={
            "model_hash": ("empty text", "any words"),
            "zero": ("zero", "level 0"),
            "sequence_parallel": SWITCH,
            "default": ("empty text", "any words"),
            "batch_tree": ("empty text", "any words"),
            "product_flops": ("zero huge", "estimates count none; large models many"),
            "optimizer_bytes": ("none zero huge", "not known, none, or any number"),
            "stages": NONE,
            "runnable": SWITCH,
            "beyond": NONE,
            "question": (ALL, "it is kept, and asked only where it can be"),
        },
    ),
    "Plan.alternatives": Entry(
        of=lambda w: w.plan, given=_given(n=2), legal={"n": ("zero", "none of them")}
    ),
    "Plan.batch_slices": Entry(
        of=lambda w: w.plan, given=_given(node=0), says={"node": "nodes?"}
    ),
    "Plan.describe": Entry(of=lambda w: w.plan),
    "Plan.device_map": Entry(
        of=lambda w: w.plan, given=_given(path="w", of="params"), says={"of": "of"}
    ),
    "Plan.diff": Entry(
        of=lambda w: w.plan, given=lambda w: {"other": w.plan}, legal={}
    ),
    "Plan.document": Entry(of=lambda w: w.plan),
    "Plan.explain": Entry(of=lambda w: w.plan),
    "Plan.flax_rules": Entry(of=lambda w: w.plan),
    "Plan.from_document": Entry(
        given=_given("document", name="a plan"),
        legal={"name": ("text", "any words")},
        says={"document": "document|a plan"},
    ),
    "Plan.home": Entry(
        of=lambda w: w.plan,
        given=_given(path="w"),
        legal={"path": ("text", "a plan without stages is home to all")},
    ),
    "Plan.leaf": Entry(of=lambda w: w.plan, given=_given(path="w")),
    "Plan.load": Entry(
        given=lambda w: {"path": w.folder / "plan.json"},
        says={"path": "path|plan file"},
    ),
    "Plan.maxtext_flags": Entry(of=lambda w: w.plan),
    "Plan.memory_chart": Entry(of=lambda w: w.plan),
    "Plan.mesh": Entry(
        of=lambda w: w.plan,
        given=lambda w: {"devices": jax.devices()},
        legal={"devices": ("none", "all of them")},
    ),
    "Plan.partition_specs": Entry(of=lambda w: w.plan),
    "Plan.save": Entry(
        of=lambda w: w.plan,
        given=lambda w: {"path": w.folder / "again.json"},
        legal={"path": FILE},
    ),
    "Plan.sliders": Entry(
        of=lambda w: w.plan,
        given=_given(batches=[16], clusters=["h100:8"]),
        legal={
            "batches": ("none list", "a choice of sizes"),
            "clusters": ("list", "no other clusters"),
        },
    ),
    "Plan.table": Entry(
        of=lambda w: w.plan, given=_given(all_rows=False), legal={"all_rows": SWITCH}
    ),
    "Plan.timeline": Entry(of=lambda w: w.plan),
    "Plan.times": Entry(
        of=lambda w: w.plan, given=lambda w: {"collective": _collective(w)}
    ),
    "Plan.verify": Entry(
        of=lambda w: w.plan,
        given=_given(topology="local", timeout_seconds=60.0),
        legal={
            "topology": ("none", "the plan's own cluster"),
            "timeout_seconds": POSITIVE,
        },
        stops=("whalejax.verification.checking:run",),
        kept=("whalejax.verification.checking:run",),
    ),
    "Plan.why": Entry(of=lambda w: w.plan, given=_given(path="w")),
    # Running.
    "compile": Entry(
        given=lambda w: {
            "plan": w.plan,
            "loss_fn": loss,
            "model": w.model,
            "optimizer": OPTIMIZER,
            "batch": w.batch,
            "trainable": None,
            "axis_names": None,
            "batch_axes": 0,
            "devices": None,
        },
        legal={
            "optimizer": ("none", "evaluation needs none"),
            "batch": ("none", "the plan knows it"),
            "trainable": NONE,
            "axis_names": ("none dict", "no names to map"),
            "batch_axes": ("zero", "the dimension it was planned with"),
            "devices": ("none", "all of them"),
        },
    ),
    "TrainStep": Entry(
        given=lambda w: dict.fromkeys(
            (
                "plan",
                "adapter",
                "captured",
                "optimizer",
                "devices",
                "batch",
                "batch_axes",
            )
        ),
        says=dict.fromkeys(
            (
                "plan",
                "adapter",
                "captured",
                "optimizer",
                "devices",
                "batch",
                "batch_axes",
            ),
            "wh.compile",
        ),
    ),
    "TrainStep.__call__": Entry(of=lambda w: w.step, given=_given("state", "batch")),
    "TrainStep.abstract_state": Entry(of=lambda w: w.step),
    "TrainStep.batch_rows": Entry(of=lambda w: w.step),
    "TrainStep.eval": Entry(of=lambda w: w.step, given=_given("state", "batch")),
    "TrainStep.init": Entry(
        of=lambda w: w.step,
        given=lambda w: {"make_model": make_model, "rng": jax.random.key(0)},
        says={"make_model": "make_model|model that was built"},
    ),
    "TrainStep.init_from": Entry(
        of=lambda w: w.step,
        given=lambda w: {"model": w.model, "rng": jax.random.key(0)},
        legal={"rng": ("none", "key 0")},
    ),
    "TrainStep.lower": Entry(
        of=lambda w: w.step,
        given=_given("state"),
        legal={"state": ("none", "an abstract one")},
    ),
    "TrainStep.rebalances=": Entry(
        of=lambda w: w.step,
        given=_given(wanted=False),
        says={"wanted": "rebalances|shares"},
    ),
    "TrainStep.rehearse": Entry(of=lambda w: w.step),
    "TrainStep.restore": Entry(
        of=lambda w: w.step, given=lambda w: {"path": w.folder / "checkpoint"}
    ),
    "TrainStep.save": Entry(
        of=lambda w: w.step,
        given=lambda w: {"path": w.folder / "checkpoint", "state": w.state},
        legal={"path": FILE},
        stops=("whalejax.checkpoint:_write_arrays",),
    ),
    "TrainStep.shares=": Entry(of=lambda w: w.step, given=_given(shares=[1])),
    "TrainState": Entry(
        given=lambda w: fields_of(w.state),
        legal=dict.fromkeys(
            ("params", "rest", "opt_state", "step", "rng", "loss_scale", "origin"), _ANY
        ),
    ),
    "init_distributed": Entry(
        given=_given(
            coordinator="localhost:8476",
            num_processes=2,
            process_id=0,
            timeout_seconds=2.0,
            heartbeat_seconds=2.0,
        ),
        legal={
            "process_id": ("zero", "the first one"),
            "timeout_seconds": POSITIVE,
            "heartbeat_seconds": POSITIVE,
        },
        stops=("jax:distributed.initialize",),
        kept=("jax:distributed.initialize",),
    ),
    # Hardware.
    "cluster": Entry(given=_given(text="h100:8"), says={"text": "cluster"}),
    "Cluster": Entry(
        given=lambda w: fields_of(w.cluster), says={"nodes": "nodes|levels"}
    ),
    "Cluster.describe": Entry(of=lambda w: w.cluster),
    "Cluster.detect": Entry(
        given=_given(calibrate=False),
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
    "Cluster.load": Entry(
        given=lambda w: {"path": w.folder / "cluster.toml"},
        says={"path": "path|cluster file"},
    ),
    "Cluster.part": Entry(
        of=lambda w: w.cluster,
        given=_given(num_devices=4, first=0),
        legal={"first": ("zero", "the first device")},
    ),
    "Cluster.save": Entry(
        of=lambda w: w.cluster,
        given=lambda w: {"path": w.folder / "again.toml"},
        legal={"path": FILE},
    ),
    "Cluster.slowest_for": Entry(of=lambda w: w.cluster, given=_given(dtype="f32")),
    "Cluster.to_json": Entry(of=lambda w: w.cluster),
    "Cluster.under": Entry(
        of=lambda w: w.cluster,
        given=_given(options={}),
        legal={"options": ("dict entry", "those not known change nothing")},
    ),
    "Cluster.with_memory": Entry(of=lambda w: w.cluster, given=_given(memory_bytes=1)),
    "Cluster.with_prices": Entry(
        of=lambda w: w.cluster,
        given=_given(prices={}),
        legal={"prices": ("dict entry", "kinds that it lacks are passed over")},
    ),
    "meshes.BandwidthPoint": Entry(
        given=_given(moved_bytes=1, bytes_per_second=1.0),
        legal={"moved_bytes": _SIZES, "bytes_per_second": _RATES},
    ),
    "meshes.CompilerProfile": Entry(
        given=lambda w: fields_of(w.cluster.compiler), legal=_FLAGS
    ),
    "meshes.CompilerProfile.under": Entry(
        of=lambda w: w.cluster.compiler,
        given=_given(options={}),
        legal={"options": ("dict entry", "those not known change nothing")},
    ),
    "meshes.DeviceKind": Entry(
        given=lambda w: fields_of(w.kind),
        legal={
            "name": ("text", "any words"),
            "memory_bytes_per_second": ("half huge", "any number above 0"),
            "label": ("empty text", "any words"),
            "host_memory_bytes": NONE,
            "op_overhead_seconds": ("zero half huge", "any number from 0"),
            "curve": ("empty", "what was measured holds"),
            "matmul_half_size": ("zero half huge", "any number from 0"),
            **dict.fromkeys(
                (
                    "host_link_bytes_per_second",
                    "transcendentals_per_second",
                    "fresh_bytes_per_second",
                    "turned_bytes_per_second",
                    "convolution_share",
                    "price_per_hour",
                ),
                ("none half huge", "not known, or a number above 0"),
            ),
            "cores": ("zero", "tiles do not matter"),
        },
    ),
    "meshes.DeviceKind.display_name": Entry(of=lambda w: w.kind),
    "meshes.DeviceKind.elementwise_seconds": Entry(
        of=lambda w: w.kind,
        given=_given(moved_bytes=1024, transcendentals=0),
        legal=dict.fromkeys(
            ("moved_bytes", "transcendentals"),
            ("zero half huge array", "numbers, also in arrays"),
        ),
    ),
    "meshes.DeviceKind.fresh_seconds": Entry(
        of=lambda w: w.kind,
        given=_given(nbytes=1024),
        legal={"nbytes": ("zero half huge", "any number")},
    ),
    "meshes.DeviceKind.turned_seconds": Entry(
        of=lambda w: w.kind,
        given=_given(nbytes=1024),
        legal={"nbytes": ("zero half huge array", "numbers, also in arrays")},
    ),
    "meshes.DeviceKind.matmul_seconds": Entry(
        of=lambda w: w.kind,
        given=_given(dtype="f32", m=8, k=8, n=8, count=1),
        legal=dict.fromkeys(("m", "k", "n", "count"), ("half", "numbers above 0")),
    ),
    "meshes.DeviceKind.matmul_flops_per_second": Entry(
        of=lambda w: w.kind,
        given=_given(dtype="f32", m=8, k=8, n=8, batch=1),
        legal=dict.fromkeys(("m", "k", "n", "batch"), ("half", "numbers above 0")),
    ),
    "meshes.DeviceKind.peak_flops": Entry(
        of=lambda w: w.kind, given=_given(dtype="f32")
    ),
    "meshes.Level": Entry(
        given=lambda w: fields_of(_LEVEL(w)),
        legal={
            "name": ("empty text", "any words"),
            "size": _SIZES,
            "bandwidth_bytes_per_second": _RATES,
            "latency_seconds": _RATES,
            "torus": SWITCH,
            "shared": SWITCH,
            "peers": _SIZES,
        },
    ),
    "meshes.Node": Entry(
        given=lambda w: fields_of(w.cluster.nodes[0]), legal={"count": _SIZES}
    ),
    "meshes.MatmulPoint": Entry(
        given=_given(dtype="f32", m=1, k=1, n=1, flops_per_second=1.0, batch=1),
        legal={
            "flops_per_second": _RATES,
            "dtype": ("empty text", _SIZES[1]),
            **dict.fromkeys(("m", "k", "n", "batch"), _SIZES),
        },
    ),
    "meshes.Source": Entry(
        given=_given(field="*", url="measured: x", title="", date="2026-01"),
        legal=dict.fromkeys(("field", "url", "title", "date"), ("empty text", "words")),
    ),
    "meshes.TimedModel": Entry(
        given=_given(
            weights="a", samples=1, seconds=1.0, predicted_seconds=1.0, title=""
        ),
        legal={
            "weights": ("empty text", "any words"),
            "samples": _SIZES,
            "seconds": _RATES,
            "predicted_seconds": _RATES,
            "title": ("empty text", "any words"),
        },
    ),
    "meshes.device_kind": Entry(
        given=_given(name="h100"), says={"name": "device kind"}
    ),
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
        stops=("whalejax.meshes.calibrate:_machine",),
        kept=("whalejax.meshes.calibrate:_machine",),
    ),
    "build_mesh": Entry(
        given=lambda w: {
            "axes": (("data", 8),),
            "devices": jax.devices(),
            "allow_idle": False,
            "order": (),
        },
        legal={"devices": NONE, "allow_idle": SWITCH},
    ),
    "partition_spec": Entry(
        given=_given(spec=((), ("data",))), legal={"spec": ("list", "no dimension")}
    ),
    # Reference models.
    "models.available": Entry(),
    "models.job": Entry(given=_given(name="mlp-test"), says={"name": "model"}),
    "models.widened": Entry(
        given=_given(name="mlp-test", overrides={}),
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
    "Found.chart": Entry(of=lambda w: w.found),
    "Found.document": Entry(of=lambda w: w.found),
    "Found.head": Entry(of=lambda w: w.found),
    "Found.lines": Entry(
        of=lambda w: w.found, given=_given(width=80), legal={"width": NONE}
    ),
    "Found.rows": Entry(of=lambda w: w.found),
    "Found.step_price": Entry(
        of=lambda w: w.found,
        given=_given(index=0),
        legal={"index": ("zero minus", "the first, or the last")},
    ),
    "Weighed.costs": Entry(
        of=lambda w: w.found.weighed[0],
        given=_given(n=1),
        legal={"n": ("zero", "none of them")},
    ),
    "PlanDiff.document": Entry(of=lambda w: w.plan.diff(w.plan)),
    "PlanDiff.lines": Entry(
        of=lambda w: w.plan.diff(w.plan),
        given=_given(width=80, all_rows=False),
        legal={"width": NONE, "all_rows": SWITCH},
    ),
}


def _collective(w: World) -> Collective:
    return w.plan.collectives[0]
