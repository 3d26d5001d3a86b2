"""Plans that can be estimated only: what they say, and that nothing runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import models
from whalejax.cli import main
from whalejax.jobs import abstract_model
from whalejax.planner.pipeline.schedules import NAMES
from whalejax.planner.plan.pipeline_mpmd import SCHEDULES as RUN_SCHEDULES
from whalejax.planner.plan.plan import PLAN_VERSION
from whalejax.user_code.annotations import SCHEDULES


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion


def llama(**changes: Any) -> tuple[wh.Job, Any, Any]:
    """A Llama of a few layers, and a batch of 64, in shapes alone."""
    options = {"embed": 1024, "heads": 8, "mlp": 4096, "sequence": 256, "layers": 12}
    job = models.job("llama-test", **{**options, **changes})
    batch = jax.eval_shape(lambda: job.batch_at(0, 64))
    return job, abstract_model(job), batch


def planned(memory: float = 1.5e9, devices: int = 8, **options: Any) -> wh.Plan:
    job, model, batch = llama()
    machine = wh.cluster(f"h100:{devices}").with_memory(int(memory))
    return wh.plan(
        job.loss_fn,
        model,
        batch,
        optimizer=optax.adam(1e-3),
        cluster=machine,
        runnable=False,
        **options,
    )


@pytest.fixture(scope="module")
def estimate() -> wh.Plan:
    return planned(mesh={"stage": 4}, offload="optimizer")


def test_a_pipeline_is_said_in_full(estimate: wh.Plan) -> None:
    assert not estimate.runnable
    stages = estimate.stages
    assert stages is not None
    assert stages.layers == (3, 3, 3, 3)
    assert estimate.time.bubble_seconds > 0
    assert estimate.time.offload_seconds > 0
    assert estimate.memory.host_bytes > 0
    text = str(estimate)
    assert "stage 4" in text and stages.schedule in text
    assert "an estimate: no executor of this version runs it" in text
    assert (
        "it does not run because: offload is optimizer: stages keep nothing in host "
        "memory in this version"
    ) in estimate.notes
    assert any(n.startswith("none runs: offload is optimizer") for n in estimate.notes)
    assert "plans those that run" not in text
    assert estimate.runner_up is not None
    assert estimate.memory.total_bytes <= 1.5e9


def test_stacked_layers_lie_in_parts_on_the_stages(estimate: wh.Plan) -> None:
    assert estimate.leaf("blocks.up.kernel").param_spec[0] == ("stage",)
    assert "stage" not in str(estimate.leaf("head.kernel").param_spec)


def test_it_travels_as_a_file_and_asks_no_more(
    estimate: wh.Plan, tmp_path: Path
) -> None:
    estimate.save(tmp_path / "plan.json")
    loaded = wh.Plan.load(tmp_path / "plan.json")
    assert loaded == estimate
    assert loaded.hash == estimate.hash
    with pytest.raises(wh.WhaleError, match="was read from a file, without its model"):
        loaded.what_if(batch=32)


def test_compile_refuses_it(estimate: wh.Plan) -> None:
    job, model, _ = llama()
    with pytest.raises(wh.WhaleError, match=r"is an estimate \(runnable=False\)"):
        wh.compile(estimate, job.loss_fn, model, optimizer=optax.adam(1e-3))


def test_what_nothing_keeps_from_running_is_runnable() -> None:
    plan = planned(80e9, mesh={"tensor": 1, "stage": 1, "context": 1}, remat="none")
    assert plan.runnable and plan.beyond is None


@pytest.mark.full
def test_what_if_keeps_what_was_asked(estimate: wh.Plan) -> None:
    other = estimate.what_if(cluster="h100:2x8", mesh={"stage": 2})
    assert other.num_devices == 16
    assert other.axis_sizes["stage"] == 2
    half = estimate.what_if(batch=np.int64(32))
    assert half.batch[0].shape[0] == 32
    assert half.time.step_seconds < estimate.time.step_seconds
    full = estimate.what_if(remat="full")
    assert full.remat == (("*", "full"),) and "remat full" in str(full)
    with pytest.raises(wh.WhaleError) as caught:
        estimate.what_if(colour=3, batch=0)
    assert "there is no 'colour' to change" in str(caught.value)
    assert "batch is 0; expected a number of samples" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero": True}, "zero is True; expected 0, 1 or 2"),
        ({"zero": "1"}, "zero is '1'; expected 0, 1 or 2"),
        ({"batch": True}, "batch is True; expected a number of samples"),
        ({"runnable": "no"}, "runnable is 'no'; expected True or False"),
        ({"num_micro_batches": "4"}, "num_micro_batches is '4'; expected 1 or more"),
        ({"mesh": 8}, "mesh is 8; expected sizes by axis"),
        ({"mesh": "data"}, "mesh is 'data'; expected sizes by axis"),
        ({"cluster": None}, "cluster is None; expected a Cluster or text"),
    ],
)
def test_what_if_refuses_what_is_no_answer(
    changes: dict[str, Any], words: str, estimate: wh.Plan
) -> None:
    with pytest.raises(wh.WhaleError, match=words):
        estimate.what_if(**changes)


@pytest.mark.full
def test_what_if_leaves_devices_idle_where_asked(estimate: wh.Plan) -> None:
    mesh = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1)
    found = estimate.what_if(mesh={**mesh, "stage": 4}, allow_idle=True)
    assert found.num_devices == 4


def test_what_if_of_a_runnable_plan_is_runnable() -> None:
    net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x, cluster="h100:8")
    assert plan.what_if(cluster="h100:4").num_devices == 4
    assert plan.what_if(zero=1).runnable


def test_the_command_line_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "plan llama-test --set layers=12 embed=1024 --cluster h100:8 --batch 64 "
        "--estimate --json"
    ).split()
    assert main.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["whalejax_plan"] == PLAN_VERSION


def pipelined(schedule: str) -> wh.Plan:
    """The plan of eight layers on two stages under a schedule."""

    def loss(net: Any, x: jax.Array) -> jax.Array:
        with wh.pipeline(num_stages=2, num_micro_batches=4, schedule=schedule):
            for layer in net["layers"]:
                x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x)

    w = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    return wh.plan(loss, {"layers": [w] * 8}, x, cluster="h100:8", runnable=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "1f1b-ahead", "interleaved", "zb-h1"]
)
def test_a_pipeline_mark_is_obeyed(schedule: str) -> None:
    plan = pipelined(schedule)
    assert plan.runnable and plan.axis_sizes["stage"] == 2
    assert plan.num_micro_batches == 4
    stages = plan.stages
    assert stages is not None and stages.schedule == schedule
    assert (stages.chunks > 1) == (schedule == "interleaved")


def test_what_may_be_asked_is_weighed() -> None:
    assert set(SCHEDULES) == {"auto", *RUN_SCHEDULES}
    assert set(SCHEDULES) < {"auto", *NAMES}


def test_hints_that_contradict_are_both_named() -> None:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        with wh.pipeline(num_stages=2):
            return jnp.mean(x @ net["w"])

    net = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(loss, net, x, cluster="h100:8", mesh={"stage": 4}, runnable=False)
    text = str(caught.value)
    assert "pipeline(num_stages=2) asks for num_stages 2" in text
    assert "mesh={'stage': 4} for 4" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cluster": "h100:7", "mesh": {"data": 7}}, "7"),
        ({"mesh": {"context": 8}}, "a split region needs a tensor or an expert axis"),
        ({"mesh": {"stage": 3}}, "stage 3 uses 3 of 8 devices"),
    ],
)
def test_what_no_mesh_serves_is_said(options: dict[str, Any], words: str) -> None:
    job = models.job("gpt-test")
    asked = {"cluster": "h100:8", **options}
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(
            job.loss_fn,
            abstract_model(job),
            job.batch_at(0, 4),
            optimizer=optax.adam(1e-3),
            runnable=False,
            **asked,
        )
    assert words in str(caught.value)


@pytest.mark.full
def test_where_only_what_runs_serves_a_mesh_that_is_the_plan() -> None:
    job = models.job("gpt-test")
    given = job.loss_fn, abstract_model(job), job.batch_at(0, 4)
    asked = {"optimizer": optax.adam(1e-3), "cluster": "h100:8", "mesh": {"stage": 8}}
    plan = wh.plan(*given, runnable=False, **asked)
    assert plan.hash == wh.plan(*given, **asked).hash


def test_sizes_of_axes_are_whole_numbers() -> None:
    for size in ("2", 2.0, True):
        with pytest.raises(wh.WhaleError, match="expected a whole number, 1 or more"):
            planned(mesh={"stage": size})


def test_a_marked_pipeline_of_one_stage_is_a_plan_that_runs() -> None:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        with wh.pipeline():
            for layer in net["layers"]:
                x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x)

    w = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    plan = wh.plan(
        loss,
        {"layers": [w] * 4},
        x,
        cluster="h100:8",
        mesh={"stage": 1},
        remat="none",
        runnable=False,
    )
    assert plan.runnable and plan.stages is None


def test_a_parameter_that_nothing_reads_is_planned_too() -> None:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        for layer in net["layers"]:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x)

    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    net = {"layers": [w] * 6, "unused": jax.ShapeDtypeStruct((128, 128), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    plan = wh.plan(loss, net, x, cluster="h100:8", remat="full", runnable=False)
    assert len(plan.leaves) == 7


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "mesh"),
    [
        ("optimizer", {"stage": 4}),
        ("activations", {"data": 4, "stage": 2}),
        ("params", {"data": 8}),
    ],
)
def test_host_memory_of_which_nothing_is_known_is_taken_as_asked(
    what: str, mesh: dict[str, int]
) -> None:
    machine = wh.cluster("cpu:8")
    assert not any(k.host_link_bytes_per_second for k in machine.kinds)
    job, model, batch = llama(layers=4)
    plan = wh.plan(
        job.loss_fn,
        model,
        batch,
        optimizer=optax.adam(1e-3),
        cluster=machine,
        runnable=False,
        mesh=mesh,
        zero=0,
        remat="full",
        offload=what,
    )
    assert plan.offload == (what,)
    assert f"{what} in host memory" in str(plan).splitlines()[0]
    assert plan.memory.host_bytes > 0 or not plan.runnable
    assert plan.time.offload_seconds == 0
    assert sum("are not counted" in note for note in plan.notes) == 1
    assert not plan.what_if(offload=None).offload


def gpt(
    cluster: str,
    batch: int,
    optimizer: optax.GradientTransformation | None = None,
    *,
    name: str = "gpt-test",
    runnable: bool = False,
    **options: Any,
) -> wh.Plan:
    """The plan of a GPT whose layers are one scan."""
    job = models.job(name, annotated=False, scan_layers=True)
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        optimizer=optimizer or optax.adam(1e-3),
        cluster=cluster,
        runnable=runnable,
        **options,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "offload", "why"),
    [
        (
            optax.sgd(0.1),
            ["params", "gradients"],
            "no executor of this version keeps gradients in host memory",
        ),
        (optax.sgd(0.1), "optimizer", "this optimizer has no state that is updated"),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
            "optimizer",
            "this optimizer has no state that is updated element by element",
        ),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
            "params",
            "this optimizer does not update parameters element by element",
        ),
    ],
)
def test_what_no_executor_keeps_in_host_memory_is_an_estimate(
    optimizer: optax.GradientTransformation, offload: Any, why: str
) -> None:
    asked: dict[str, Any] = {"mesh": {"data": 2}, "zero": 0, "offload": offload}
    with pytest.raises(wh.WhaleError, match="offload: 1 problem"):
        gpt("cpu:2", 4, optimizer, runnable=True, **asked)
    plan = gpt("cpu:2", 4, optimizer, **asked)
    assert not plan.runnable
    assert any(f"does not run because: {why}" in note for note in plan.notes)
    assert any(note.startswith("none runs: offload: 1 problem") for note in plan.notes)


@pytest.mark.full
def test_one_program_over_unlike_devices_is_an_estimate() -> None:
    asked: dict[str, Any] = {"cluster": "h100:2+v100-32:2", "mesh": {"tensor": 4}}
    with pytest.raises(wh.WhaleError, match="none has a multiple of 4"):
        gpt(batch=8, runnable=True, **asked)
    plan = gpt(batch=8, **asked)
    assert not plan.runnable
    assert any("one program runs on devices of one kind" in n for n in plan.notes)


@pytest.mark.full
def test_micro_batches_are_those_of_all_replicas_whether_they_run_or_not() -> None:
    asked: dict[str, Any] = {"cluster": "h100:2+v100-32:2", "num_micro_batches": 12}
    plan, runs = (
        gpt(batch=48, mesh={"data": 4}, runnable=r, **asked) for r in (False, True)
    )
    assert plan.num_micro_batches == 12
    assert plan.runnable and plan.hash == runs.hash
    # With shares of their own, replicas that cut gradients do not run.
    plan = gpt(batch=48, mesh={"data": 2, "tensor": 2}, zero=2, **asked)
    assert plan.num_micro_batches == 12
    assert not plan.runnable
    assert any(n.startswith("none runs: zero is 2, but repl") for n in plan.notes)
    assert "it does not run because: one program runs on devices of one kind" in (
        plan.notes
    )


@pytest.mark.filterwarnings("ignore:one of 2 stages")
def test_each_stage_is_held_to_the_memory_of_its_own_device() -> None:
    asked: dict[str, Any] = {"mesh": {"stage": 2}, "remat": "none", "offload": ()}
    asked["num_micro_batches"] = 4
    plan = gpt("h100:1+v100-16:1", 8, name="gpt-xl", **asked)
    # Together they hold what neither holds alone; most layers lie on the larger one.
    assert plan.runnable and plan.stages is not None


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:one of 2 stages")
@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        ("h100:2+v100-32:2", {}),
        ("h100:2+v100-32:2", {"mesh": {"data": 2, "tensor": 2}}),
        ("h100:2+v100-32:2", {"shares": "even", "zero": 1}),
        ("h100:1+v100-16:1", {"mesh": {"stage": 2}, "num_micro_batches": 8}),
    ],
)
def test_on_unlike_devices_what_need_not_run_is_never_slower(
    cluster: str, asked: dict[str, Any]
) -> None:
    plan, runs = (gpt(cluster, 16, runnable=r, **asked) for r in (False, True))
    assert plan.time.step_seconds <= runs.time.step_seconds
    if plan.runnable:
        assert plan.hash == runs.hash
    else:
        (own,) = (c for c in runs.candidates if c.verdict == "chosen")
        said = f"the best plan that runs ({own.layout}) takes"
        assert any(note.startswith(said) for note in plan.notes)
