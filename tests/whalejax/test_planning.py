"""``wh.plan`` and its options: each does what it says, and no device works."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search import spmd_search
from whalejax.planner.search.layout_search import Search


pytestmark = pytest.mark.relaxed_promotion

ROOT = Path(__file__).resolve().parents[2]
SGD = optax.sgd(0.1, momentum=0.9)


def abstract(job: wh.Job) -> tuple[Any, Any]:
    """Model and batch of a job as shapes."""
    make = functools.partial(job.make_model, jax.random.key(0))
    name = job.name
    flax = name.startswith(("gpt", "moe", "resnet"))
    return (nnx.eval_shape if flax else jax.eval_shape)(make), job.batch_at(0)


def planned(name: str, *, job: dict[str, Any] | None = None, **options: Any) -> wh.Plan:
    """The plan of a reference model on eight described devices."""
    found = models.job(name, **(job or {}))
    model, batch = abstract(found)
    options = {"cluster": "h100:8", "optimizer": found.optimizer, **options}
    return wh.plan(found.loss_fn, model, batch, **options)


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def square(p: Any, x: Any) -> jax.Array:
    """A loss of one layer."""
    return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)


# The batch.


def test_what_of_the_batch_is_not_sharded_is_whole_on_every_device() -> None:
    batch = {"x": leaf(64, 512), "table": leaf(1000, 16)}
    plan = wh.plan(
        lambda p, b: square(p, b["x"]) + b["table"].sum(),
        {"w": leaf(512, 512)},
        batch,
        optimizer=SGD,
        cluster="h100:8",
        mesh={"data": 8},
        batch_axes={"x": 0, "table": None},
    )
    assert plan.memory.batch_bytes == 4 * (64 * 512 // 8 + 1000 * 16)


# No device.


def test_planning_starts_no_backend() -> None:
    code = (
        "import jax, jax.numpy as jnp, optax, whalejax as wh\n"
        "net = {'w': jax.ShapeDtypeStruct((512, 512), jnp.float32)}\n"
        "x = jax.ShapeDtypeStruct((64, 512), jnp.float32)\n"
        "loss = lambda net, x: (x @ net['w']).mean()\n"
        "plan = wh.plan(loss, net, x, optimizer=optax.adam(1e-3), cluster='h100:8')\n"
        "print(plan.num_devices)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "no_such_platform", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.stdout.strip(), run.returncode) == ("8", 0), run.stderr[-2000:]


def test_abstract_and_real_models_give_one_plan() -> None:
    job = models.job("mlp-test")
    model = job.make_model(jax.random.key(0))
    shapes = jax.eval_shape(job.make_model, jax.random.key(0))
    plans = [
        wh.plan(job.loss_fn, m, job.batch_at(0), optimizer=SGD, cluster="h100:8")
        for m in (model, shapes)
    ]
    assert plans[0] == plans[1]


# default.


def test_default_replicate_is_data_parallelism() -> None:
    plan = planned("mlp-test", default=wh.replicate())
    assert set(plan.axis_sizes) <= {"data", "fsdp"}
    assert plan.default == "replicate"
    (region,) = plan.compute
    assert all(names == ("batch",) for _, names in region.axes)


def test_default_split_shards_what_no_mark_covers() -> None:
    plan = planned("mlp-test", default=wh.split())
    assert plan.axis_sizes["tensor"] > 1
    assert any("tensor" in axes for x in plan.leaves for axes in x.compute_spec)


def test_a_mark_overrides_the_default() -> None:
    def loss(p: Any, x: Any) -> jax.Array:
        with wh.split():
            return square(p, x)

    plan = wh.plan(
        loss,
        {"w": leaf(64, 64)},
        leaf(16, 64),
        cluster="h100:8",
        default=wh.replicate(),
    )
    assert plan.axis_sizes["tensor"] > 1


def test_the_default_holds_for_experts_that_no_mark_covers() -> None:
    plan = planned("moe-test", job={"annotated": False}, default=wh.replicate())
    assert set(plan.axis_sizes) <= {"data", "fsdp"}


@pytest.mark.full
def test_experts_split_and_the_rest_replicated_by_default() -> None:
    plan = planned("moe-test", default=wh.replicate(), mesh={"expert": 8})
    axes = {r.task_graph: dict(r.axes) for r in plan.compute}
    marked = [r.task_graph for r in plan.compute if r.marks and "split" in r.marks[-1]]
    assert marked
    for name, table in axes.items():
        assert table["expert"] == (("experts",) if name in marked else ("batch",))


# allow_idle.


def test_seven_samples_leave_one_device_idle_if_allowed() -> None:
    net, x = {"w": leaf(13, 13)}, leaf(7, 13)
    options: dict[str, Any] = {"cluster": "h100:8", "default": wh.replicate()}
    with pytest.raises(wh.WhaleError, match="8 does not divide 7"):
        wh.plan(square, net, x, **options)
    plan = wh.plan(square, net, x, allow_idle=True, **options)
    assert plan.num_devices == 7
    assert plan.cluster.num_devices == 8
    note = "1 of 8 devices is left idle: device 7, in node order (they count from 0)"
    assert note in plan.notes and note in str(plan)


def test_idle_devices_are_a_last_resort() -> None:
    plan = planned("mlp-test", allow_idle=True)
    assert plan.num_devices == 8
    assert plan == planned("mlp-test") and not any("idle" in n for n in plan.notes)


def test_a_plan_with_idle_devices_runs() -> None:
    net, x = {"w": jnp.eye(13)}, jnp.ones((7, 13))
    plan = wh.plan(
        square,
        net,
        x,
        optimizer=SGD,
        cluster="h100:8",
        default=wh.replicate(),
        allow_idle=True,
    )
    step = wh.compile(plan, square, net, optimizer=SGD, devices=jax.devices()[:7])
    _, metrics = step(step.init_from(net), x)
    assert float(metrics["loss"]) == pytest.approx(float(square(net, x)), rel=1e-5)


def test_a_fixed_mesh_may_leave_devices_idle() -> None:
    mesh = {"data": 3, "fsdp": 1, "expert": 1, "tensor": 2}
    net, x = {"w": leaf(12, 12)}, leaf(6, 12)
    plan = wh.plan(square, net, x, cluster="h100:8", mesh=mesh, allow_idle=True)
    assert plan.axis_sizes == {"data": 3, "tensor": 2}
    assert any("2 of 8 devices are left idle: devices 6 to 7" in n for n in plan.notes)
    plan = wh.plan(square, net, x, cluster="h100:8", mesh={"data": 3}, allow_idle=True)
    assert plan.num_devices == 6


# Micro-batches and statistics.


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_number_of_micro_batches_is_obeyed(count: int) -> None:
    mesh, job = {"data": 4, "fsdp": 2}, {"batch_size": 32}
    plan = planned("mlp-test", job=job, num_micro_batches=count, mesh=mesh)
    assert plan.num_micro_batches == count


def test_the_fewest_micro_batches_that_fit_are_taken() -> None:
    job = {"batch_size": 512}
    mesh = {"data": 8}
    free = planned("mlp-test", job=job, mesh=mesh, zero=0)
    assert free.num_micro_batches == 1
    needed = free.memory.total_bytes - free.memory.activations_bytes // 2
    tight = wh.cluster("h100:8").with_memory(needed)
    fixed: dict[str, Any] = {"mesh": mesh, "zero": 0, "offload": ()}
    plan = planned("mlp-test", job=job, cluster=tight, remat="none", **fixed)
    assert plan.num_micro_batches > 1
    fewer = plan.num_micro_batches // 2
    with pytest.raises(wh.WhaleError, match="no plan fits"):
        planned("mlp-test", job=job, cluster=tight, num_micro_batches=fewer, **fixed)


NORM = "per_micro_batch=True: each of the micro-batches of 8 of the batch's 16 samples"


def test_statistics_per_micro_batch_are_taken_with_consent_and_said_so() -> None:
    options: dict[str, Any] = {"default": wh.replicate(), "per_micro_batch": True}
    plan = planned("resnet-test", num_micro_batches=2, **options)
    assert any(NORM in note for note in plan.notes) and plan.per_micro_batch
    whole = planned("resnet-test", num_micro_batches=1, **options)
    assert not any("per_micro_batch" in note for note in whole.notes)
    assert not whole.per_micro_batch
    with pytest.raises(wh.PlanError, match="would train something else") as caught:
        planned("resnet-test", num_micro_batches=2, default=wh.replicate())
    assert "combines each sample with a sum over all of them" in str(caught.value)


@pytest.mark.full
def test_a_model_without_statistics_has_no_such_note() -> None:
    plan = planned("gpt-test", num_micro_batches=2)
    assert not any("per micro-batch" in note for note in plan.notes)


def test_linen_statistics_are_found_too() -> None:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False)(nn.Dense(32)(x))

    module = Normed()
    variables = jax.eval_shape(module.init, jax.random.key(0), leaf(16, 24))

    def loss(v: Any, x: Any) -> Any:
        y, changed = module.apply(v, x, mutable=["batch_stats"])
        return jnp.mean(y**2), wh.Aux(variables=changed)

    options: Any = {"cluster": "h100:2", "num_micro_batches": 2}
    where = r"sub \(test_planning.py:\d+, in flax's normalization.py:"
    with pytest.raises(wh.PlanError, match=where):
        wh.plan(loss, variables, leaf(16, 24), **options)
    plan = wh.plan(loss, variables, leaf(16, 24), per_micro_batch=True, **options)
    assert any(NORM in note for note in plan.notes)


@pytest.mark.full
def test_synchronised_statistics_take_one_micro_batch() -> None:
    plan = planned("resnet-test", sync_batch_stats=True)
    assert plan.num_micro_batches == 1
    for parts in ({"num_micro_batches": 2}, {"shares": [3, 1]}):
        with pytest.raises(wh.PlanError, match="would train something else"):
            planned("resnet-test", sync_batch_stats=True, **parts)
    with pytest.raises(wh.PlanError, match="Drop one of the two"):
        planned("resnet-test", sync_batch_stats=True, per_micro_batch=True)


def test_models_without_statistics_do_not_mind_synchronising_them() -> None:
    plan = planned("gpt-test", sync_batch_stats=True, num_micro_batches=2)
    assert plan.num_micro_batches == 2


# Precision.


@pytest.mark.full
def test_bf16_keeps_masters_and_halves_activations() -> None:
    options: dict[str, Any] = {"mesh": {"data": 8}, "zero": 0, "num_micro_batches": 1}
    # Wide enough that its products are not as short in both types.
    wide = {"embed": 1024, "mlp": 4096, "heads": 16}
    job = {"annotated": False, "batch_size": 256, **wide}
    full = planned("gpt-test", job=job, **options)
    half = planned("gpt-test", job=job, precision="bf16", **options)
    assert half.precision == "bf16"
    assert half.memory.params_bytes == full.memory.params_bytes
    assert half.memory.temporary_bytes < 0.75 * full.memory.temporary_bytes
    assert half.time.compute_seconds < full.time.compute_seconds


# Meshes, ZeRO, metadata.


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"fsdp": 8}, {"tensor": 8}, {"data": 2, "fsdp": 2}]
)
def test_a_fixed_mesh_is_obeyed(mesh: dict[str, int]) -> None:
    plan = planned("mlp-test", mesh=mesh)
    assert {a: plan.axis_sizes.get(a, 1) for a in mesh} == mesh
    assert plan.num_devices == 8


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_fixed_zero_level_is_obeyed(zero: int) -> None:
    plan = planned("mlp-test", mesh={"data": 8}, zero=zero)
    assert plan.zero == zero
    (biggest,) = [x for x in plan.leaves if x.path == "layer_0.w"]
    assert any(biggest.optimizer_spec) == (zero >= 1)
    assert any(biggest.gradient_spec) == (zero >= 2)
    assert not any(biggest.param_spec)


def test_metadata_that_fixes_an_axis_is_obeyed() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(
                nnx.initializers.normal(), ("tensor", None), eager_sharding=False
            )
            self.up = nnx.Linear(48, 64, kernel_init=init, rngs=rngs)

    def loss(model: Layer, x: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(model.up(x)) ** 2)

    model = nnx.eval_shape(lambda: Layer(nnx.Rngs(0)))
    plan = wh.plan(loss, model, leaf(16, 48), cluster="h100:8", mesh={"tensor": 8})
    assert plan.leaf("up.kernel").compute_spec == (("tensor",), ())
    plan = wh.plan(loss, model, leaf(16, 48), cluster="h100:8")
    assert plan.axis_sizes["tensor"] > 1
    assert plan.leaf("up.kernel").compute_spec == (("tensor",), ())
    plan = wh.plan(loss, model, leaf(16, 48), cluster="h100:8", mesh={"data": 8})
    assert any(
        "1 leaf names the mesh axis tensor (up.kernel), which has" in note
        for note in plan.notes
    )


@pytest.mark.parametrize("devices", [2, 8])
def test_metadata_of_several_axes_is_obeyed_as_far_as_the_devices_go(
    devices: int,
) -> None:
    def loss(net: Any, x: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ net["up"]) @ net["down"])

    net = {
        "up": nn.Partitioned(leaf(48, 64), names=("rows", "model")),
        "down": nn.Partitioned(leaf(64, 48), names=("model", "rows")),
    }
    plan = wh.plan(
        loss,
        net,
        leaf(16, 48),
        cluster=f"h100:{devices}",
        axis_names={"model": "tensor", "rows": "fsdp"},
    )
    named = [a for a in ("fsdp", "tensor") if plan.axis_sizes.get(a, 1) > 1]
    assert len(named) == (2 if devices == 8 else 1)
    expected = tuple((a,) if a in named else () for a in ("fsdp", "tensor"))
    assert plan.leaf("up").param_spec == expected
    assert plan.leaf("down").param_spec == expected[::-1]
    unobeyed = [n for n in plan.notes if "the name has no effect" in n]
    assert len(unobeyed) == 2 - len(named)


# Whale's example with a million classes.


@pytest.mark.full
def test_a_million_classes_need_the_hybrid() -> None:
    cluster = wh.cluster("v100-16:8").with_memory(4 * 2**30)
    options: dict[str, Any] = {"cluster": cluster, "optimizer": SGD}
    job = {"classes": 1_000_000, "batch_size": 64}
    with pytest.raises(wh.WhaleError) as caught:
        planned(
            "resnet50", job={**job, "annotated": False}, mesh={"data": 8}, **options
        )
    text = str(caught.value)
    assert text.startswith("no plan fits: the nearest (data 8")
    lacking = int(text.split("(")[2].split(" bytes")[0])
    head = 4 * 2048 * 1_000_000
    # The head alone is twice a device's memory, and its gradient as much again.
    assert lacking > 1.4 * head
    plan = planned("resnet50", job=job, **options)
    assert plan.axis_sizes == {"tensor": 8}
    assert plan.leaf("classifier.kernel").compute_spec == ((), ("tensor",))
    assert plan.leaf("stem.conv.kernel").compute_spec == ((),) * 4
    assert plan.memory.total_bytes <= cluster.memory_bytes
    assert plan.batch[0].spec[0] == ("tensor",)


# The quick start.


def test_the_quick_start_is_planned_with_its_marks() -> None:
    plan = planned("gpt", optimizer=optax.adamw(1e-3))
    names = [r.task_graph for r in plan.compute]
    assert {"replicate", "split"} <= set(names)
    assert plan.axis_sizes["tensor"] > 1
    assert "2 marked TaskGraphs obeyed" in plan.notes
    assert np.isfinite(plan.time.step_seconds)


# The sequence.


def attention(p: Any, x: Any) -> jax.Array:
    """A loss of one layer of attention whose sizes are odd."""
    batch, length, _ = x.shape
    heads = (x @ p["w"]).reshape(batch, length, 3, 5)
    return jnp.mean(jax.nn.dot_product_attention(heads, heads, heads) ** 2)


def attended(length: int = 64, **options: Any) -> wh.Plan:
    """The plan of one long sample on eight devices, which only its sequence fills."""
    options = {"optimizer": SGD, "cluster": "h100:8", **options}
    return wh.plan(attention, {"w": leaf(7, 15)}, leaf(1, length, 7), **options)


def test_a_single_sample_is_shared_along_its_sequence() -> None:
    assert attended().axis_sizes == {"context": 8}
    assert attended(mesh={"context": 8}).axis_sizes == {"context": 8}
    assert attended(mesh={"data": 1}).axis_sizes == {"context": 8}


def test_context_is_left_alone_where_another_axis_does() -> None:
    assert "context" not in planned("gpt", job={"layers": 2}).axis_sizes


def test_a_context_axis_needs_a_sequence_that_it_divides() -> None:
    with pytest.raises(wh.PlanError, match="divide by context.* 60 long: pad it"):
        attended(60, mesh={"context": 8})
    net = {"w": leaf(16, 16)}
    with pytest.raises(wh.PlanError, match="leave context out"):
        wh.plan(square, net, leaf(8, 16), cluster="h100:8", mesh={"context": 8})


def test_a_weight_that_meets_itself_is_no_sequence() -> None:
    def penalised(p: Any, x: Any) -> jax.Array:
        return attention(p, x) + jnp.mean((p["w"].T @ p["w"]) ** 2)

    options: dict[str, Any] = {"cluster": "h100:8", "mesh": {"context": 8}}
    plan = wh.plan(penalised, {"w": leaf(8, 15)}, leaf(1, 64, 8), **options)
    assert plan.leaf("w").param_spec == ((), ())


def test_of_two_sequences_that_meet_the_longer_one_is_sharded() -> None:
    def crossed(p: Any, batch: Any) -> jax.Array:
        x, y = (batch[k] @ p["w"] for k in ("x", "y"))
        x, y = (jax.nn.dot_product_attention(v, v, v) for v in (x, y))
        return jnp.mean(jax.nn.dot_product_attention(y, x, x) ** 2)

    batch = {"x": leaf(1, 64, 3, 5), "y": leaf(1, 30, 3, 5)}
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": {"context": 8}}
    plan = wh.plan(crossed, {"w": leaf(5, 5)}, batch, **options)
    specs = {x.path: x.spec for x in plan.batch}
    assert specs["['x']"] == ((), ("context",), (), ())
    assert specs["['y']"] == ((), (), (), ())


def test_why_no_fewer_devices_serve_is_said_of_those_that_could() -> None:
    """Not of counts that the mesh or the marks rule out by themselves."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def staged(model: Any, x: Any) -> Any:
        with wh.pipeline(num_micro_batches=4):
            with wh.stage(devices=3):
                h = jnp.tanh(x @ model["a"])
            with wh.stage(devices=3):
                return (h @ model["b"]).mean()

    def plain(model: Any, x: Any) -> Any:
        return jnp.tanh(x @ model["a"] @ model["b"]).mean()

    for loss, mesh, text in (
        (plain, {"data": 3}, "at least 3 devices would share them, but 3 does not"),
        (staged, None, "at least 3 devices would share them, but 3 does not divide 8"),
    ):
        options: Any = {"optimizer": optax.sgd(0.1), "cluster": "h100:8", "mesh": mesh}
        with pytest.raises(wh.WhaleError) as caught:
            wh.plan(loss, {"a": w, "b": w}, x, allow_idle=True, **options)
        assert text in str(caught.value)


def _any(value: Any) -> Any:
    """What a type checker would refuse."""
    return value


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda plan: wh.compile(_any("p.json"), square, None),
            "plan is 'p.json'; expected",
        ),
        (
            lambda plan: wh.compile(plan, square, None, devices="cpu"),
            "devices is 'cpu'; expected devices in node order",
        ),
        (
            lambda plan: wh.pipeline(_any(square)),
            "is called before it decorates: @wh.pipe",
        ),
    ],
)
def test_arguments_of_another_type(call: Any, text: str) -> None:
    plan = planned("mlp-test")
    with pytest.raises(wh.WhaleError) as caught:
        call(plan)
    assert text in str(caught.value)


def test_masks_that_are_drawn_are_kept_on_gpu() -> None:
    def loss_fn(model: Any, batch: Any, rng: Any, *, draws: bool) -> Any:
        hidden = batch["x"] @ model["a"]
        if draws:
            kept = jax.random.bernoulli(rng, 0.9, hidden.shape)
            hidden = jnp.where(kept, hidden, jnp.zeros_like(hidden))
        return jnp.mean((hidden @ model["b"]) ** 2)

    model, batch = {n: leaf(128, 128) for n in "ab"}, {"x": leaf(4096, 128)}
    kept = [
        wh.plan(
            functools.partial(loss_fn, draws=draws),
            model,
            batch,
            optimizer=SGD,
            cluster="h100:1",
        ).memory.activations_bytes
        for draws in (False, True)
    ]
    assert kept[1] - kept[0] == 4096 * 128  # A byte for each.


@pytest.mark.parametrize(
    "mesh",
    [
        {"stage": 2, "data": 2, "fsdp": 2},
        {"stage": 2, "tensor": 2, "fsdp": 2},
        {"stage": 2, "context": 2, "data": 2},
    ],
)
def test_stages_of_small_layers_take_time_both_ways(mesh: dict[str, int]) -> None:
    """Collectives take longer than products there; such a plan is kept and read."""
    layers = {"layers": 6, "annotated": False, "scan_layers": True}
    plan = planned("gpt-test", job=layers, mesh=mesh)
    assert plan.stages is not None
    for pace in plan.stages.paces:
        assert pace.forward_seconds > 0 and pace.backward_seconds > 0
    assert wh.Plan.from_document(plan.document(), "it") == plan


LONG = {"embed": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192}
WIDE = {"layers": 4, "embed": 3072, "heads": 24, "mlp": 12_288, "scan_layers": True}
REGRETTED: Final[list[Any]] = [
    (
        "llama-test",
        "v5e:4x8",
        1,
        {"layers": 6, "sequence": 131_072, "vocab": 32_000, **LONG},
        [{"mesh": {"context": 16, "tensor": 2}}, {"mesh": {"context": 32}}],
    ),
    pytest.param(
        "llama-test",
        "v5p:4x4x4",
        4,
        {"layers": 28, "sequence": 131_072, "vocab": 128_256, **LONG},
        [{"num_micro_batches": 4}, {"mesh": {"context": 16}}],
        marks=pytest.mark.full,
    ),
    pytest.param(
        "llama-8b",
        "v5e:8x8",
        16,
        {"sequence": 65_536},
        [{"remat": "dots"}],
        marks=pytest.mark.full,
    ),
    ("gpt-small", "v6e:4", 8, {"sequence": 1024, **WIDE}, [{"attention": "ring"}]),
    ("gpt-small", "h100:8x8", 64, {"sequence": 1024, **WIDE}, [{"attention": "ring"}]),
]
"""Model, cluster, batch, its options, and options of plans that were faster once."""


@pytest.mark.parametrize(("name", "cluster", "batch", "sizes", "options"), REGRETTED)
def test_no_option_is_faster_than_none(
    name: str,
    cluster: str,
    batch: int,
    sizes: dict[str, Any],
    options: list[dict[str, Any]],
) -> None:
    """The planner without options finds what it finds with one of them."""
    asked = {"cluster": cluster, "precision": "bf16"}
    sizes = {"batch_size": batch, **sizes}
    free = planned(name, job=sizes, **asked)
    for option in options:
        with_it = planned(name, job=sizes, **asked, **option)
        assert free.time.step_seconds <= 1.01 * with_it.time.step_seconds, option


def refused_searches(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Search]:
    """All searches of a plan for devices with a kilobyte of memory."""
    found: list[Search] = []

    def refusal(searches: list[Search], **_: Any) -> PlanError:
        found.extend(searches)
        return PlanError("nothing fits")

    monkeypatch.setattr(spmd_search, "refusal", refusal)
    with pytest.raises(PlanError, match="nothing fits"):
        planned(name, cluster=wh.cluster("h100:8").with_memory(1 << 10))
    return found


def test_where_nothing_fits_by_far_two_programs_are_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal takes no longer than a plan: the leanest program speaks for others."""
    searches = refused_searches(monkeypatch, "gpt-test")
    asked = [search.request for search in searches]
    programs = [(one.remat, one.attention, one.loss_chunks) for one in asked]
    leanest = (("*", "full"),), (("*", "ring"),), 16
    assert [*dict.fromkeys(programs)] == [((), (), 1), leanest]


@pytest.mark.parametrize("name", ["gpt-test", "bert-test"])
def test_no_program_takes_less_memory_than_the_leanest(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But for what ``HOPELESS`` allows."""
    monkeypatch.setattr(spmd_search, "HOPELESS", float("inf"))
    least: dict[Any, int] = {}
    for search in refused_searches(monkeypatch, name):
        asked = search.request
        program = asked.remat, asked.attention, asked.loss_chunks
        nbytes = min(one.memory.total_bytes for one in search.scored)
        least[program] = min(least.get(program, nbytes), nbytes)
    # Behind the loss as it was written, the leanest is searched before any other.
    _, leanest, *others = least.values()
    assert len(others) > 3
    assert leanest <= 1.1 * min(others)


def test_a_model_of_many_layers_is_described_without_a_search_of_its_equations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each random stream asks for ``sharding``, whose error would search them all."""
    searched: list[Any] = []
    look = partial_eval.DynamicJaxprTracer._origin_msg
    monkeypatch.setattr(
        partial_eval.DynamicJaxprTracer,
        "_origin_msg",
        lambda tracer: (searched.append(tracer), look(tracer))[1],
    )
    jobs.abstract_model(models.job("gpt-test", scan_layers=False))
    assert not searched
    with pytest.raises(AttributeError, match="traced array"):
        jax.eval_shape(lambda x: x.sharding, 1.0)
    assert searched


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5])
def test_where_memory_is_short_what_was_asked_for_is_kept(share: float) -> None:
    """No plan without sequence parallelism takes the place of those with it."""
    job = {"layers": 8, "embed": 256, "heads": 4, "scan_layers": True}
    options: dict[str, Any] = {"mesh": {"tensor": 2}, "sequence_parallel": True}
    roomy = planned("gpt-test", job=job, cluster="h100:2", **options)
    assert roomy.sequence_parallel
    room = int(share * roomy.memory.total_bytes / 0.85)
    machine = wh.cluster("h100:2").with_memory(room)
    try:
        plan = planned("gpt-test", job=job, cluster=machine, **options)
    except PlanError as error:
        assert "sequence parallel" in str(error)
    else:
        assert plan.sequence_parallel


def test_a_parameter_that_the_loss_does_not_read_is_named() -> None:
    net = {name: jnp.zeros((8, 32, 32)) for name in ("up", "down", "extra", "count")}
    net |= {"one": jnp.zeros((32, 32)), "two": jnp.zeros((32, 32))}

    def loss(net: Any, x: Any) -> Any:
        def layer(carry: Any, layer: Any) -> Any:
            hidden, first, second = carry
            # What a later turn of the loop reads is read.
            hidden = jnp.tanh(hidden @ layer["up"] + first)
            return (hidden, second, first @ net["one"]), layer["count"].sum()

        begin = (x, jnp.zeros_like(x), x)
        layers = {key: net[key] for key in ("up", "down", "extra", "count")}
        (hidden, _, _), counts = jax.lax.scan(layer, begin, layers)
        return hidden.mean(), {"counts": counts.sum()}

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = wh.plan(loss, net, x, optimizer=optax.adam(1e-3), cluster="h100:8")
    (note,) = [note for note in plan.notes if "no gradient of" in note]
    assert note.startswith("count, down, extra and 1 more (102 kB): no gradient of the")
    assert "two" in "".join(x.path for x in plan.leaves if x.note)
    assert "whole: the loss does not read it" in plan.why("two")
    kept = wh.plan(
        loss,
        net,
        x,
        optimizer=optax.adam(1e-3),
        cluster="h100:8",
        trainable=["up", "one"],
    )
    assert not any("no gradient of" in note for note in kept.notes)


def test_a_parameter_behind_a_stopped_gradient_is_named() -> None:
    net = {"w": jnp.zeros((32, 32)), "u": jnp.zeros((32, 32))}
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = wh.plan(
        lambda net, x: jnp.tanh(
            x @ net["w"] + jax.lax.stop_gradient(x @ net["u"])
        ).sum(),
        net,
        x,
        optimizer=optax.adam(1e-3),
        cluster="h100:8",
    )
    (note,) = [note for note in plan.notes if "no gradient of" in note]
    assert note.startswith("u (4.1 kB): no gradient of the loss reaches it")
    assert "does not read" not in plan.why("u")


@jax.custom_vjp
def rounded(x: jax.Array) -> jax.Array:
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@jax.custom_jvp
def spiked(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0.1, 1.0, 0.0)


spiked.defjvp(lambda x, t: (spiked(*x), t[0] / (1 + x[0] ** 2)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("combine", ["mean", "adasum"])
@pytest.mark.parametrize("rule", [rounded, spiked])
@pytest.mark.parametrize("where", ["value", "weight", "scan"])
def test_gradients_of_custom_rules_reach_the_weights(
    rule: Any, where: str, combine: str
) -> None:
    """The bodies of these rules have operations without a gradient."""

    def loss(net: Any, x: Any) -> Any:
        if where == "scan":
            x = jax.lax.scan(lambda x, w: (rule(x @ w), None), x, net["u"][None])[0]
        else:
            x = rule(x @ net["u"]) if where == "value" else x @ rule(net["u"])
        return ((x @ net["w"]) ** 2).mean()

    u, w, key = jax.random.split(jax.random.key(0), 3)
    net = {name: jax.random.normal(k, (8, 8)) for name, k in (("u", u), ("w", w))}
    x = jax.random.normal(key, (16, 8))
    assert all(jnp.abs(g).max() > 0 for g in jax.grad(loss)(net, x).values())
    plan = wh.plan(
        loss, net, x, optimizer=optax.sgd(0.1), cluster="h100:8", combine=combine
    )
    assert not [note for note in plan.notes if "no gradient" in note]


def test_a_plan_without_an_optimizer_says_so() -> None:
    net = {"w": jnp.zeros((32, 32))}
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x, cluster="h100:8")
    assert any(note.startswith("no optimizer was given") for note in plan.notes)


def test_forgotten_statistics_of_a_linen_module_are_named() -> None:
    net = nn.BatchNorm(use_running_average=False)
    variables = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 8)))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32)

    def loss(variables: Any, x: Any, *, forgotten: bool) -> Any:
        result, updated = net.apply(variables, x, mutable=["batch_stats"])
        return (result**2).mean(), wh.Aux(variables={} if forgotten else updated)

    plans = [
        wh.plan(
            functools.partial(loss, forgotten=forgotten),
            variables,
            x,
            optimizer=optax.adam(1e-3),
            cluster="h100:8",
        )
        for forgotten in (True, False)
    ]
    notes = [[n for n in plan.notes if "neither reads" in n] for plan in plans]
    assert len(notes[0]) == 1 and not notes[1]
    assert notes[0][0] == (
        "batch_stats.mean, batch_stats.var: the loss neither reads nor changes them. "
        "Collections that apply updates are returned as (loss, "
        "wh.Aux(variables=updated))"
    )


def test_linen_parameters_without_their_collection_are_explained() -> None:
    net = nn.Dense(4)
    variables = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 8)))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    with pytest.raises(Exception, match="kernel") as caught:
        wh.plan(
            lambda v, x: net.apply(v, x).mean(),
            variables["params"],
            x,
            optimizer=optax.adam(1e-3),
            cluster="h100:8",
        )
    assert any("Pass everything that init returned" in n for n in notes_of(caught))


def notes_of(caught: pytest.ExceptionInfo[Exception]) -> list[str]:
    return list(getattr(caught.value, "__notes__", ()))


def test_a_difference_is_no_rounding_and_a_batch_is_no_other_model() -> None:
    net = {"w": jnp.zeros((32, 32))}
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = wh.plan(
        lambda net, x: (x @ net["w"]).mean(),
        net,
        x,
        optimizer=optax.adam(1e-3),
        cluster="h100:8",
    )
    longer = plan.time.launch_seconds * (1 + 1e-14)
    assert longer != plan.time.launch_seconds
    other = dataclasses.replace(
        plan, time=dataclasses.replace(plan.time, launch_seconds=longer)
    )
    assert not plan.diff(other).time_terms
    larger = plan.diff(plan.what_if(batch=128, mesh=dict(plan.axes)))
    assert [change.what for change in larger.changes] == ["batch"]
    assert larger.time_terms


def test_parameters_of_a_diff_have_parts_of_the_traffic() -> None:
    """The compiler combines collectives, so none has a latency of its own."""
    net = {f"w{n}": jnp.zeros((512, 512)) for n in range(4)}
    net |= {f"b{n}": jnp.zeros((512,)) for n in range(4)}

    def loss(net: Any, x: Any) -> Any:
        for n in range(4):
            x = jnp.tanh(x @ net[f"w{n}"] + net[f"b{n}"][None])
        return (x**2).mean()

    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plans = [
        wh.plan(loss, net, x, optimizer=optax.sgd(0.1), cluster=cluster, mesh=mesh)
        for cluster, mesh in (("h100:8", {"data": 8}), ("a100-80:2x4", {"data": 8}))
    ]
    diff = plans[0].diff(plans[1])
    moved = sum(t.seconds_after for t in diff.traffic if " of gradient" in t.what)
    assert sum(x.seconds_after for x in diff.leaves) == pytest.approx(moved, rel=1e-6)
    bias, weight = (
        next(x for x in diff.leaves if x.label.startswith(name)) for name in "bw"
    )
    assert bias.seconds_after * 512 == pytest.approx(weight.seconds_after)
