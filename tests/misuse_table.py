"""How every public callable is called rightly, and which odd values are right for it.

``misuse`` says how it is used. A public callable or parameter that is not here fails
``tests/whalejax/test_misuse.py``: add it, with the values of ``misuse.VALUES`` that are
right for it and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

import whalejax as wh
from tests.misuse import ALL, Entry
from tests.misuse_hardware import HARDWARE
from tests.misuse_recommenders import RECOMMENDERS, TABLE_ARGUMENTS
from tests.misuse_world import (
    FILE,
    NONE,
    OPTIMIZER,
    PLANNING,
    POSITIVE,
    SWITCH,
    World,
    fields_of,
    given,
    loss,
    make_model,
)


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
        "group_size": None,
        "per_micro_batch": False,
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
        "combine": "mean",
        "shares": None,
        "compiler_options": None,
        "margin": None,
        "verified": False,
        "swarm": False,
        "bandwidth": None,
        "wire": None,
        "sum_wire": None,
    }


_PLAN_LEGAL: Final[dict[str, tuple[str, str]]] = {
    "batch": ("array? arange? shape?", "a batch of three samples, for another loss"),
    "optimizer": ("none", "evaluation needs none"),
    "cluster": ("none", "the devices of this process"),
    "default": NONE,
    "precision": ("dict", "no TaskGraph is named, so all stay as they are"),
    "num_micro_batches": ("none", "the planner chooses"),
    "allow_idle": SWITCH,
    "sync_batch_stats": SWITCH,
    "group_size": ("none", "no samples belong together"),
    "per_micro_batch": ("true?", "a loss may need no consent"),
    "axis_names": ("none dict", "no names to map"),
    "trainable": ("none", "everything that can be"),
    "batch_axes": ("zero minus", "the first dimension, or the last"),
    "mesh": ("none dict", "nothing is fixed"),
    "zero": ("none zero", "the planner chooses, or level 0"),
    "runnable": SWITCH,
    "remat": ("none dict text?", "the planner chooses; the model knows what it names"),
    "offload": ("none list", "the planner chooses, or nothing"),
    "sequence_parallel": ("none true?", "the planner chooses; a model has a sequence"),
    "attention": (
        "none dict text?",
        "the planner chooses; the model knows what it has",
    ),
    "loss_chunks": ("none", "the planner chooses"),
    "shares": ("none array?", "the planner chooses; devices must divide so"),
    "compiler_options": ("none dict entry?", "no options; XLA knows its options"),
    "margin": ("none zero", "as compiled programs tell; or none is left"),
    "verified": SWITCH,
    "bandwidth": ("none", "only a swarm has one"),
    "wire": ("none", "only a swarm has one"),
    "sum_wire": ("none", "only a swarm has one"),
}

_ANY: Final = (ALL, "JAX rebuilds it around placeholders of any kind")

NOT_WHOLE: Final[Mapping[str, str]] = {
    "Cluster.from_paddle": "a file of Paddle's is none that these tests write",
    "Plan.batch_slices": "this plan has no shares",
    "square_cube": "this plan has no stages",
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
        given=given(metrics={}, means={}, sums={}, samples={}, variables={}),
        legal=dict.fromkeys(
            ("metrics", "means", "sums", "samples", "variables"),
            ("dict entry", "values by name; a loss that returns them is checked"),
        ),
    ),
    "WeightedLoss": Entry(
        given=given(total=1.0, weight=1.0),
        legal=dict.fromkeys(
            ("total", "weight"),
            (
                "nan inf minus zero half huge array single jax arange shape key",
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
            "group_size": None,
            "per_micro_batch": False,
            "eval_batches": None,
        },
        legal={
            "eval_batches": (
                "none list texts function class",
                "no evaluation; or batches, which are looked at when evaluating",
            ),
            "loss_fn": ("function class", "its parameters are looked at when planning"),
            "make_model": ("function class", "it is called when planning"),
            "batch": (
                "array single jax arange shape key class",
                "samples, or what makes them",
            ),
            "optimizer": ("none", "evaluation needs none"),
            "batch_size": ("none", "the command line may say it"),
            "name": ("text", "any words"),
            "group_size": ("none", "no samples belong together"),
            "per_micro_batch": SWITCH,
        },
    ),
    "Job.batch_at": Entry(
        of=lambda w: wh.Job(loss, make_model, w.batch, OPTIMIZER, 4),
        given=given(step=0, size=4),
        legal={"step": ("zero", "the first"), "size": ("none", "the job's own")},
    ),
    # Feeds.
    "Feed": Entry(
        given=given(
            source=[1, 2, 3],
            batch_size=2,
            step=None,
            seed=0,
            first=0,
            first_sample=0,
            epochs=1,
        ),
        legal={
            "source": ("array arange generator", "samples, or none"),
            "step": ("none", "whole global batches"),
            "seed": ("none zero", "the order of the source; a seed"),
            "first": ("zero", "the first step"),
            "first_sample": ("zero", "the first sample"),
            "epochs": ("none zero", "no end; an end at once"),
        },
        says={"source": "source|samples"},
    ),
    "Volumes": Entry(
        given=given(leaves={"x": [1, 2]}, step=None), legal={"step": NONE}
    ),
    "Feed.get_state": Entry(of=lambda w: wh.Feed([1, 2], 1)),
    "Feed.set_state": Entry(
        of=lambda w: wh.Feed([1, 2], 1), given=given(state={"step": 1})
    ),
    # Marks.
    "replicate": Entry(given=given(devices=1), legal={"devices": NONE}),
    "split": Entry(
        given=given(devices=1, axis="mlp"),
        legal={"devices": NONE, "axis": ("none text", "the planner's choice; a name")},
    ),
    "stage": Entry(given=given(devices=1), legal={"devices": NONE}),
    "pipeline": Entry(
        given=given(num_stages=2, num_micro_batches=2, schedule="auto"),
        legal={"num_stages": NONE, "num_micro_batches": NONE},
    ),
    "Annotation.__call__": Entry(
        of=lambda w: wh.split(),
        given=given(function=loss),
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
            "scale": ("none minus zero half huge single jax", "any number"),
        },
    ),
    # Planning.
    "plan": Entry(
        given=lambda w: _plan_arguments(w) | TABLE_ARGUMENTS,
        legal=_PLAN_LEGAL
        | {
            "tables": NONE,
            "pins": NONE,
            "counts": NONE,
            "staleness": ("zero", "no lookup lacks an update"),
            "times": NONE,
            "in_processes": NONE,
        },
        stops=PLANNING,
    ),
    "PlanRequest": Entry(
        given=lambda w: {
            name: value
            for name, value in _plan_arguments(w).items()
            if name not in ("loss_fn", "model", "batch")
        },
        legal=_PLAN_LEGAL
        | dict.fromkeys(
            ("axis_names", "trainable", "batch_axes"),
            (ALL, "a model says what they may be"),
        ),
    ),
    "PlanRequest.plan": Entry(
        of=lambda w: wh.PlanRequest(cluster="h100:8"),
        given=given("model", "batch", loss_fn=loss),
        legal=_PLAN_LEGAL,
        stops=PLANNING,
    ),
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
    "largest_batch": Entry(
        given=lambda w: {
            **{k: v for k, v in _plan_arguments(w).items() if k != "cluster"},
            "clusters": ["h100:8"],
            "prices": {"h100": 2.0},
        },
        legal={**_PLAN_LEGAL, "prices": ("none dict", "no price is known")},
        stops=PLANNING,
    ),
    "Plan.throughput": Entry(
        of=lambda w: w.plan,
        given=given(step_seconds=0.5),
        legal={"step_seconds": ("none half huge", "the predicted ones, or some")},
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
            "per_micro_batch": SWITCH,
            "zero": ("zero", "level 0"),
            "sequence_parallel": SWITCH,
            "default": ("empty text", "any words"),
            "batch_tree": ("empty text", "any words"),
            "product_flops": ("zero huge", "estimates count none; large models many"),
            "gap": ("none zero", "not known, or none"),
            "work": ("none", "not known, as in files of older versions"),
            "optimizer_bytes": ("none zero huge", "not known, none, or any number"),
            "stages": NONE,
            "tables": NONE,
            "runnable": SWITCH,
            "beyond": NONE,
            "swarm": NONE,
            "question": (ALL, "it is kept, and asked only where it can be"),
        },
    ),
    "Plan.alternatives": Entry(
        of=lambda w: w.plan, given=given(n=2), legal={"n": ("zero", "none of them")}
    ),
    "Plan.axis_mappings": Entry(of=lambda w: w.plan),
    "Plan.batch_slices": Entry(
        of=lambda w: w.plan, given=given(node=0), says={"node": "nodes?"}
    ),
    "Plan.describe": Entry(of=lambda w: w.plan),
    "Plan.device_map": Entry(
        of=lambda w: w.plan, given=given(path="w", of="params"), says={"of": "of"}
    ),
    "Plan.diff": Entry(
        of=lambda w: w.plan, given=lambda w: {"other": w.plan}, legal={}
    ),
    "Plan.document": Entry(of=lambda w: w.plan),
    "Plan.explain": Entry(of=lambda w: w.plan),
    "Plan.export": Entry(
        of=lambda w: w.plan,
        given=given(form="jobset", name="train", image="an/image", command="python x"),
        legal={
            "name": ("text", "a word in small letters"),
            "image": ("text", "any words"),
            "command": ("none text", "the usual command, or any words"),
        },
    ),
    "Plan.flax_rules": Entry(of=lambda w: w.plan),
    "Plan.logical_axes": Entry(of=lambda w: w.plan),
    "Plan.from_document": Entry(
        given=given("document", name="a plan"),
        legal={"name": ("text", "any words")},
        says={"document": "document|a plan"},
    ),
    "Plan.home": Entry(
        of=lambda w: w.plan,
        given=given(path="w"),
        legal={"path": ("text", "a plan without stages is home to all")},
    ),
    "Plan.leaf": Entry(of=lambda w: w.plan, given=given(path="w")),
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
        given=given(batches=[16], clusters=["h100:8"]),
        legal={
            "batches": ("none list", "a choice of sizes"),
            "clusters": ("list", "no other clusters"),
        },
    ),
    "Plan.table": Entry(
        of=lambda w: w.plan, given=given(all_rows=False), legal={"all_rows": SWITCH}
    ),
    "Plan.timeline": Entry(of=lambda w: w.plan),
    "Plan.times": Entry(
        of=lambda w: w.plan, given=lambda w: {"collective": w.plan.collectives[0]}
    ),
    "Plan.topology": Entry(of=lambda w: w.plan),
    "Plan.verify": Entry(
        of=lambda w: w.plan,
        given=given(topology="local", timeout_seconds=60.0),
        legal={
            "topology": ("none", "the plan's own cluster"),
            "timeout_seconds": POSITIVE,
        },
        stops=("whalejax.verification.checking:run",),
        kept=("whalejax.verification.checking:run",),
    ),
    "Plan.why": Entry(of=lambda w: w.plan, given=given(path="w")),
    "check": Entry(
        given=lambda w: {
            "plan": w.plan,
            "loss_fn": loss,
            "model": w.model,
            "batch": w.batch,
            "optimizer": OPTIMIZER,
            "trainable": None,
            "axis_names": None,
            "batch_axes": 0,
            "odd": True,
            "seed": 0,
            "timeout_seconds": 60.0,
            "memory_bytes": None,
        },
        legal={
            "optimizer": ("none", "gradient descent"),
            "trainable": NONE,
            "axis_names": ("none dict", "no names to map"),
            "batch_axes": (
                "zero minus",
                "the dimension it was planned with; of another the process that traces "
                "the loss says so",
            ),
            "odd": ("true", "odd extents too"),
            "seed": ("zero numpy?", "a seed"),
            "timeout_seconds": POSITIVE,
            "memory_bytes": ("none numpy?", "half of this machine's; bytes"),
        },
        stops=("whalejax.equality.check_plan:check_adapted",),
        kept=("whalejax.equality.check_plan:check_adapted",),
    ),
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
            "out_of_range": "error",
            "job": None,
            "job_settings": None,
            "replace_every": None,
            "section_run": None,
        },
        legal={
            "replace_every": NONE,
            "section_run": NONE,
            "job": NONE,
            "job_settings": NONE,
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
                "traced",
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
                "traced",
            ),
            "wh.compile",
        ),
    ),
    "TrainStep.__call__": Entry(of=lambda w: w.step, given=given("state", "batch")),
    "TrainStep.abstract_state": Entry(of=lambda w: w.step),
    "TrainStep.batch_regions": Entry(of=lambda w: w.step),
    "TrainStep.batch_rows": Entry(of=lambda w: w.step),
    "TrainStep.adopt": Entry(of=lambda w: w.step, given=given("state")),
    "TrainStep.profile": Entry(
        of=lambda w: w.step,
        given=lambda w: {
            "state": w.step.init(make_model, rng=jax.random.key(0)),  # is consumed
            "batch": w.batch,
            "steps": 1,
        },
    ),
    "TrainStep.eval": Entry(
        of=lambda w: w.step,
        given=lambda w: {"state": w.state, "batch": w.batch, "training": False},
        legal={"training": SWITCH},
    ),
    "TrainStep.init": Entry(
        of=lambda w: w.step,
        given=lambda w: {"make_model": make_model, "rng": jax.random.key(0)},
        says={"make_model": "make_model|model that was built"},
        legal={"rng": ("key", "another key")},
    ),
    "TrainStep.init_from": Entry(
        of=lambda w: w.step,
        given=lambda w: {"model": w.model, "rng": jax.random.key(0)},
        legal={"rng": ("none key", "key 0, or another one")},
    ),
    "TrainStep.lower": Entry(
        of=lambda w: w.step,
        given=given("state"),
        legal={"state": ("none", "an abstract one")},
    ),
    "TrainStep.rebalances=": Entry(
        of=lambda w: w.step,
        given=given(wanted=False),
        says={"wanted": "rebalances|shares"},
    ),
    "TrainStep.rehearse": Entry(of=lambda w: w.step),
    "TrainStep.restore": Entry(
        of=lambda w: w.step,
        given=lambda w: {
            **{"path": w.folder / "checkpoint", "only": None},
            "keep_schedule": None,
        },
        legal={"only": NONE, "keep_schedule": NONE},
    ),
    "TrainStep.restore_or_init": Entry(
        of=lambda w: w.step,
        given=lambda w: {
            "folder": w.folder / "none",
            "make_model": make_model,
            "rng": jax.random.key(0),
        },
        says={"make_model": "make_model|model that was built"},
        legal={"folder": FILE, "rng": ("key", "another key")},
    ),
    "goodput": Entry(
        given=lambda w: {
            "plan": w.plan,
            "mtbf": 1000.0,
            "restart": 10.0,
            "snapshot_every": None,
            "spares": 0,
            "snapshot": 1.0,
            "recovery": 1.0,
            "repair": 0.0,
            "nodes": None,
            "trace": None,
        },
        legal={
            "mtbf": POSITIVE,
            "restart": ("zero half", "any number of at least 0"),
            "snapshot": ("zero half", "any number of at least 0"),
            "recovery": ("zero half", "any number of at least 0"),
            "repair": ("zero half", "any number of at least 0"),
            "snapshot_every": ("none", "the best"),
            "spares": ("zero", "none"),
            "nodes": ("none", "those of the cluster"),
            "trace": NONE,
        },
    ),
    "run_timeline": Entry(
        given=lambda w: {"folder": w.folder, "run": None},
        legal={"run": ("none", "the newest")},
    ),
    "jobs_timeline": Entry(
        given=lambda w: {"folder": w.folder, "predicted": True},
        legal={"predicted": SWITCH},
    ),
    "square_cube": Entry(
        given=lambda w: {"plan": w.plan, "bandwidths": ["1Gb/s"], "wire": "f32"},
        legal={},
    ),
    "train_elastic": Entry(
        given=lambda w: {
            "job": wh.Job(
                loss_fn=loss,
                make_model=make_model,
                batch=w.batch,
                optimizer=OPTIMIZER,
                batch_size=16,
            ),
            "steps": 1,
            "save": None,
            "save_every": 1,
            "keep": 1,
            "batch": None,
            "num_micro_batches": None,
            "precision": "f32",
            "seed": 0,
            "mesh": None,
            "copy_every": None,
            "mtbf": 60.0,
            "noise_scale": False,
            "tables": None,
            "replace_every": None,
        },
        legal={
            "tables": NONE,
            "replace_every": NONE,
            "save": ("none text", "no checkpoints, or a folder of any name"),
            "copy_every": ("none zero", "the best number, or no copies"),
            "mtbf": ("half", "any positive number of seconds"),
            "noise_scale": SWITCH,
            "mesh": (
                "none dict class",
                "the cheaper way, no size that is fixed, or what gives sizes for a "
                "number of devices, which wh.plan checks",
            ),
            "batch": ("none", "the job's own"),
            "num_micro_batches": ("none", "the largest that divides the batch"),
            "precision": ("dict", "no TaskGraph has one of its own"),
            "seed": ("zero", "any whole number of at least 0"),
        },
    ),
    "TrainStep.save": Entry(
        of=lambda w: w.step,
        given=lambda w: {"path": w.folder / "checkpoint", "state": w.state},
        legal={"path": FILE},
        stops=("whalejax.state.checkpoint:write_arrays",),
    ),
    "TrainStep.shares=": Entry(of=lambda w: w.step, given=given(shares=[1])),
    "TrainState": Entry(
        given=lambda w: fields_of(w.state),
        legal=dict.fromkeys(
            (
                "params",
                "rest",
                "opt_state",
                "step",
                "rng",
                "loss_scale",
                "origin",
                "samples",
            ),
            _ANY,
        ),
    ),
    "init_distributed": Entry(
        given=given(
            coordinator="localhost:8476",
            num_processes=2,
            process_id=0,
            timeout_seconds=2.0,
            heartbeat_seconds=2.0,
            preemption=False,
        ),
        legal={
            "preemption": SWITCH,
            "process_id": ("zero", "the first one"),
            "timeout_seconds": POSITIVE,
            "heartbeat_seconds": POSITIVE,
        },
        stops=("whalejax.elastic.init_distributed:_join",),
        kept=("whalejax.elastic.init_distributed:_join",),
    ),
    **HARDWARE,
    **RECOMMENDERS,
}
