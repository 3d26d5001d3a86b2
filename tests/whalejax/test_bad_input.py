"""What a user gets wrong, and what they are told: every text, to the letter.

One test for each way. The texts name the parameter, the numbers and the remedy, and
problems that stand side by side are listed together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import whalejax as wh


pytestmark = pytest.mark.relaxed_promotion

Loss = Callable[[Any, Any], Any]


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def net(*, embed: int = 48, classes: int = 40) -> Any:
    """A backbone ``24 → 320 → embed`` and a head, abstract."""
    return {
        "up": {"kernel": leaf(24, 320)},
        "down": {"kernel": leaf(320, embed)},
        "head": {"kernel": leaf(embed, classes)},
    }


def batch(samples: int = 16) -> Any:
    """The batch of such a net."""
    return {"x": leaf(samples, 24)}


def backbone(p: Any, b: Any) -> jax.Array:
    """What stands before the head."""
    hidden: jax.Array = jnp.tanh(b["x"] @ p["up"]["kernel"]) @ p["down"]["kernel"]
    return hidden


def losses(p: Any, hidden: jax.Array) -> jax.Array:
    """The head and its loss."""
    return jnp.mean(jax.nn.logsumexp(hidden @ p["head"]["kernel"], axis=-1))


def hybrid(head: Any = None) -> Loss:
    """The backbone replicated, the head under a mark."""
    mark = wh.split() if head is None else head

    def loss(p: Any, b: Any) -> jax.Array:
        with wh.replicate():
            hidden = backbone(p, b)
        with mark:
            return losses(p, hidden)

    return loss


def plain(p: Any, b: Any) -> jax.Array:
    """No mark at all."""
    return losses(p, backbone(p, b))


def planned(loss: Loss = plain, model: Any = None, **options: Any) -> wh.Plan:
    """A plan for eight described devices."""
    options = {"cluster": "h100:8", "optimizer": optax.sgd(0.1), **options}
    model = net() if model is None else model
    return wh.plan(loss, model, options.pop("batch", batch()), **options)


def refused(*arguments: Any, **options: Any) -> str:
    """The text of the error that planning ends in."""
    with pytest.raises(wh.WhaleError) as caught:
        planned(*arguments, **options)
    return str(caught.value)


# Dimensions and devices.


def test_a_dimension_that_no_axis_divides() -> None:
    head = wh.split(devices=8, axis="head.kernel.1")
    assert refused(hybrid(head), net(classes=10)) == (
        "no layout of 8 devices serves this model: 1 problem\n"
        "  1. head.kernel dim 1 is 10; an axis of 8 does not divide 10. Pad it to 16, "
        "split over 2 devices (split(devices=2)), or remove the split mark"
    )


def test_every_dimension_that_might_have_served_is_listed() -> None:
    text = refused(hybrid(wh.split(devices=8)), net(embed=45, classes=10))
    assert text == (
        "no layout of 8 devices serves this model: 2 problems\n"
        "  1. head.kernel dim 0 is 45; an axis of 8 does not divide 45. Pad it to 48, "
        "or remove the split mark\n"
        "  2. head.kernel dim 1 is 10; an axis of 8 does not divide 10. Pad it to 16, "
        "split over 2 devices (split(devices=2)), or remove the split mark"
    )


def test_a_dimension_that_the_fixed_axis_does_not_divide() -> None:
    model = {"w": leaf(24, 36)}

    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(b["x"] @ p["w"]))

    assert refused(loss, model, mesh={"tensor": 16}, cluster="h100:2x8") == (
        "no layout of 16 devices serves this model: 2 problems\n"
        "  1. w dim 0 is 24; an axis of 16 does not divide 24. Pad it to 32, split "
        "over 8 devices (split(devices=8)), or leave tensor out of mesh=\n"
        "  2. w dim 1 is 36; an axis of 16 does not divide 36. Pad it to 48, split "
        "over 4 devices (split(devices=4)), or leave tensor out of mesh="
    )


def test_a_dimension_of_which_the_axis_divides_only_the_whole() -> None:
    model = {"w": leaf(8, 3)}

    def loss(p: Any, b: Any) -> jax.Array:
        pairs = b["x"].reshape(len(b["x"]), 2, -1)[:, :, :4]
        rows = jnp.repeat(pairs.sum(1, keepdims=True), 2, axis=1)
        return jnp.mean(jnp.tanh(rows.reshape(-1, 8) @ p["w"]))

    assert refused(loss, model, mesh={"tensor": 8}) == (
        "no layout of 8 devices serves this model: 2 problems\n"
        "  1. w dim 0 is 8, which the model reshapes to 2 × 4, and only the first of "
        "these can be sharded: an axis of 8 does not divide 2. Split over 2 devices "
        "(split(devices=2)), or leave tensor out of mesh=\n"
        "  2. w dim 1 is 3; an axis of 8 does not divide 3. Pad it to 8, or leave "
        "tensor out of mesh="
    )


def test_more_devices_than_there_are() -> None:
    assert refused(hybrid(wh.split(devices=16))) == (
        "the marks cannot be obeyed: 1 problem\n"
        "  1. the marks ask for 16 devices (split: 16), but there are 8. Lower the "
        "counts, "
        "or leave devices= out to use all"
    )


def test_a_mesh_that_leaves_devices_idle() -> None:
    assert refused(mesh={"data": 3, "tensor": 2}) == (
        "data 3 × tensor 2 uses 6 of 8 devices. 8 = 8×1, 4×2, 2×4, 1×8. To leave some "
        "idle on purpose: allow_idle=True (--allow-idle)"
    )


@pytest.mark.parametrize("allow_idle", [False, True])
def test_a_mesh_of_more_devices_than_there_are(allow_idle: bool) -> None:
    assert refused(mesh={"data": 4, "tensor": 4}, allow_idle=allow_idle) == (
        "data 4 × tensor 4 needs 16 devices; there are 8. 8 = 8×1, 4×2, 2×4, 1×8"
    )


def test_a_mesh_of_unknown_axes_and_sizes() -> None:
    assert refused(mesh={"model": 8, "data": 0}) == (
        "wh.plan(mesh=…): 2 problems\n"
        "  1. there is no mesh axis 'model' to fix; expected one of stage, data, "
        "fsdp, expert, context, depth, height, width, tensor. Did you mean 'tensor'?\n"
        "  2. data is 0; expected a whole number, 1 or more"
    )


def test_a_mesh_without_an_axis_for_the_split() -> None:
    assert refused(hybrid(), mesh={"data": 8}) == (
        "no layout of 8 devices serves this model: 1 problem\n"
        "  1. a split region needs a tensor or an expert axis; mesh= fixes data 8. "
        "Leave devices for tensor or expert, or remove the mark"
    )


def test_a_mesh_with_experts_that_the_model_has_not() -> None:
    assert refused(mesh={"expert": 8}) == (
        "no layout of 8 devices serves this model: 1 problem\n"
        "  1. no dimension for an expert axis; mesh= fixes expert 8. No product of "
        "activations with weights has a batch dimension, such as an einsum over "
        "experts has: "
        "leave expert out"
    )


def test_only_axes_that_were_asked_for_are_said_to_have_no_dimension() -> None:
    """Those of a model whose weights no axis can share."""

    def loss(net: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] * net["scale"]) ** 2)

    net = {"scale": leaf()}
    text = refused(loss, net, mesh={"expert": 4})
    assert text.count("no dimension for an expert axis") == 1 and "tensor" not in text


# Batches.


def test_a_batch_smaller_than_the_data_axis() -> None:
    assert refused(batch=batch(4), mesh={"data": 8}) == (
        "no layout of 8 devices serves this model: 1 problem\n"
        "  1. the global batch has 4 samples; at least 8 devices would share them, but "
        "8 does not divide 4. Use a batch of 8, or another mesh="
    )


def test_a_batch_that_the_marks_cannot_share() -> None:
    assert refused(hybrid(), batch=batch(12)) == (
        "no layout of 8 devices serves this model: 1 problem\n"
        "  1. the global batch has 12 samples; at least 8 devices would share them, "
        "but 8 does not divide 12. Use a batch of 16 or 8, or 6 devices\n"
        "To leave some devices idle, give allow_idle=True (--allow-idle)"
    )


def test_micro_batches_smaller_than_the_data_axis() -> None:
    text = refused(default=wh.replicate(), num_micro_batches=4, batch=batch(24))
    assert text == (
        "no layout of 8 devices serves this model: 1 problem\n"
        "  1. the global batch has 24 samples, 6 in each of 4 micro-batches; at least "
        "8 devices would share them, but 8 does not divide 6. Use a batch of 32, or 6 "
        "devices, or fewer micro-batches\n"
        "To leave some devices idle, give allow_idle=True (--allow-idle)"
    )


@pytest.mark.parametrize("samples", [10**26, 2**40 + 8])
def test_a_batch_of_more_samples_than_anybody_has(samples: int) -> None:
    text = refused(batch=batch(samples))
    assert f"the batch has {samples} samples; expected at most {2**40}" in text


def test_a_batch_as_large_as_may_be() -> None:
    """Its divisors are found from its factors, not by trying all numbers."""
    assert refused(batch=batch(2**40)).startswith("no plan fits: the nearest")


# Annotations.


@pytest.mark.parametrize(
    ("outer", "inner", "problem"),
    [
        (wh.split(), wh.replicate(), "replicate() is inside split()"),
        (wh.split(), wh.pipeline(), "pipeline() is inside split()"),
        (wh.replicate(), wh.stage(), "stage() inside replicate() has no"),
    ],
)
def test_forbidden_nesting(outer: Any, inner: Any, problem: str) -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        with outer, inner:
            return plain(p, b)

    text = refused(loss)
    assert text.startswith(problem)
    assert "annotations nest as replicate > pipeline > stage > split" in text


def test_an_annotation_that_is_never_reached() -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        with wh.split(devices=2):
            pass
        with wh.replicate(devices=3):
            hidden = backbone(p, b)
        return losses(p, hidden)

    assert refused(loss) == (
        "the marks cannot be obeyed: 2 problems\n"
        "  1. the mark split(devices=2) covers no operation of the loss: tracing "
        "reached nothing inside it. Remove it or move it around what it "
        "should cover\n"
        "  2. one model replica takes 3 devices (replicate: 3), which does not divide "
        "8. Counts that do: 1, 2, 4, 8"
    )


def test_stages_of_counts_that_do_not_divide() -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        with wh.pipeline():
            with wh.stage(devices=3):
                hidden = backbone(p, b)
            with wh.stage(devices=3):
                return losses(p, hidden)

    text = refused(loss)
    assert text.startswith("the marks cannot be obeyed: 1 problem\n")
    assert "one model replica takes 6 devices (" in text
    assert "which does not divide 8. Counts that do: 1, 2, 4, 8" in text


def test_splits_of_different_widths() -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        with wh.split(devices=2):
            hidden = backbone(p, b)
        with wh.split(devices=4):
            return losses(p, hidden)

    assert "(split over 2, split.2 over 4), but they share one mesh" in refused(loss)


# The loss.


def test_a_loss_that_is_not_scalar() -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        return backbone(p, b) @ p["head"]["kernel"]

    assert refused(loss) == (
        "loss_fn: the loss has shape (16, 40); expected a scalar of shape (). Take the "
        "mean over samples, as in `losses.mean()`."
    )


# Hints.


class Named(nnx.Module):
    """One layer whose kernel's dimensions bear these names."""

    def __init__(self, names: tuple[str | None, ...], rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(
            nnx.initializers.normal(), names, eager_sharding=False
        )
        self.up = nnx.Linear(24, 48, kernel_init=init, rngs=rngs)
        self.head = nnx.Linear(48, 40, rngs=rngs)


def named(*names: str | None) -> Named:
    """The module, abstract."""
    return nnx.eval_shape(lambda: Named(names, nnx.Rngs(0)))


def named_loss(mark: Any) -> Loss:
    """Its loss, the first layer under a mark."""

    def loss(model: Named, b: Any) -> jax.Array:
        with mark:
            hidden = jnp.tanh(model.up(b["x"]))
        return jnp.mean(model.head(hidden) ** 2)

    return loss


def test_metadata_against_a_mark() -> None:
    text = refused(named_loss(wh.replicate()), named(None, "tensor"))
    assert text == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. up.kernel dim 1: its metadata shards it over tensor, but replicate "
        "replicates it. Drop one of the two hints"
    )


def test_metadata_against_the_dimension_of_a_mark() -> None:
    text = refused(named_loss(wh.split(axis="up.kernel.0")), named(None, "tensor"))
    assert text == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='up.kernel.0'), and up.kernel dim 1: its metadata "
        "shards it over tensor: both dimensions are in one operation, which an axis "
        "can shard along only one. Drop one of the two"
    )


def test_two_dimensions_on_one_axis() -> None:
    text = refused(named_loss(wh.split()), named("tensor", "tensor"))
    assert text == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. up.kernel: its metadata puts the axis tensor on dim 0 (24) and dim 1 "
        "(48), but one axis can shard only one dimension of a tensor. Keep one of them"
    )


def test_a_mesh_axis_of_the_users_own() -> None:
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.with_partitioning(nn.initializers.normal(), (None, "model"), mesh)
            return nn.Dense(40, kernel_init=init)(x)

    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    module = Boxed()
    variables = jax.eval_shape(module.init, jax.random.key(0), leaf(16, 24))

    def loss(v: Any, b: Any) -> jax.Array:
        y: Any = module.apply(v, b["x"])
        return jnp.mean(y**2)

    text = refused(loss, variables)
    assert "Dense_0.kernel: its metadata names the mesh axis 'model'" in text
    ours = "stage, data, fsdp, expert, context, depth, height, width, tensor"
    assert f"which is none of ours ({ours})" in text
    assert "Map it, as in axis_names={'model': 'tensor'}." in text
    found = planned(loss, variables, axis_names={"model": "tensor"}, mesh={"tensor": 8})
    assert found.leaf("Dense_0.kernel").compute_spec == ((), ("tensor",))


def test_a_mesh_axis_that_shards_no_weights() -> None:
    text = refused(named_loss(wh.split()), named("data", "context"))
    assert text == (
        "the hints cannot be obeyed: 2 problems\n"
        "  1. up.kernel dim 0: its metadata shards it over data, which shards the "
        "batch and, with ZeRO, optimizer state. To store the weight in shards, map "
        "that name: "
        "axis_names={'data': 'fsdp'}\n"
        "  2. up.kernel dim 1: its metadata shards it over context, which shards the "
        "sequence of activations. Drop that name"
    )


def test_metadata_on_a_dimension_that_no_axis_divides() -> None:
    class Odd(nnx.Module):
        def __init__(self, axis: str, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(
                nnx.initializers.normal(), (None, axis), eager_sharding=False
            )
            self.up = nnx.Linear(24, 45, kernel_init=init, use_bias=False, rngs=rngs)

    def loss(model: Odd, b: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(model.up(b["x"])) ** 2)

    for axis in ("tensor", "fsdp"):
        odd = nnx.eval_shape(lambda axis=axis: Odd(axis, nnx.Rngs(0)))
        assert refused(loss, odd) == (
            "no layout of 8 devices serves this model: 1 problem\n"
            f"  1. up.kernel dim 1: its metadata shards it over {axis}, and no size of "
            f"{axis} here (2, 4, 8) divides 45. Pad it to 46, or drop that name\n"
            "To leave some devices idle, give allow_idle=True (--allow-idle)"
        )


def test_split_does_not_take_the_batch() -> None:
    assert refused(hybrid(wh.split(axis="batch"))) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='batch') cannot be sharded: it is the batch, which "
        "belongs to replicate. Name another dimension, or leave axis= out"
    )


def test_a_hint_that_names_nothing() -> None:
    assert refused(hybrid(wh.split(axis="hed.kernel.1"))) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='hed.kernel.1') names no dimension of that region. "
        "Nearest: head.kernel.1, head.kernel.0, down.kernel.1"
    )


def test_a_logical_name_that_is_misspelt() -> None:
    text = refused(named_loss(wh.split(axis="mpl")), named("embed", "mlp"))
    assert text == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='mpl') names no dimension of that region. Nearest: "
        "mlp"
    )
    found = planned(named_loss(wh.split(axis="mlp")), named("embed", "mlp"))
    assert any("tensor" in axes for axes in found.leaf("up.kernel").compute_spec[1:])


# Memory.


def test_a_model_that_fits_under_no_plan() -> None:
    cluster = wh.cluster("h100:8").with_memory(10_000)
    text = refused(cluster=cluster, margin=0)
    assert text.startswith("no plan fits: the nearest (")
    plan = planned()
    nearest = min(c.memory_bytes for c in plan.candidates)
    lacking = int(text.split(" and lacks ")[1].split("(")[1].split(" bytes")[0])
    assert 0 < lacking <= nearest - 10_000
    assert "of 10 kB per device (" in text
    assert text.endswith("Use more devices, a smaller batch or a smaller model")


def test_a_fixed_number_of_micro_batches_that_does_not_fit() -> None:
    cluster = wh.cluster("h100:8").with_memory(10_000)
    text = refused(cluster=cluster, num_micro_batches=2)
    assert "more micro-batches than 2 or" in text


# Options.


def test_options_that_are_none() -> None:
    options = {
        "precision": "fp8",
        "num_micro_batches": 0,
        "zero": 3,
        "remat": "nope",
        "default": wh.stage(),
    }
    assert refused(**options) == (
        "wh.plan: 5 problems\n"
        "  1. remat is 'nope'; expected one of none, dots, named, full\n"
        "  2. precision is 'fp8'; expected one of f32, bf16, f16\n"
        "  3. num_micro_batches is 0; expected 1 or more, or None\n"
        "  4. zero is 3; expected 0, 1 or 2 (over the axis data). ZeRO-3 is the mesh "
        'axis fsdp: mesh={"fsdp": n}\n'
        "  5. default is wh.stage(); expected wh.replicate(), wh.split() or None"
    )


def test_a_default_takes_no_arguments() -> None:
    assert refused(default=wh.split(devices=4)) == (
        "wh.plan: 1 problem\n"
        "  1. default is wh.split(devices=4); a default takes no arguments. Give "
        "wh.split(), and mark the regions that need more"
    )


@pytest.mark.parametrize("default", ["replicate", 3, wh.pipeline()])
def test_a_default_that_is_none(default: Any) -> None:
    assert "expected wh.replicate(), wh.split() or None" in refused(default=default)


def test_a_cluster_that_is_none() -> None:
    assert refused(cluster=8) == (
        "cluster is 8; expected a Cluster or text such as 'h100:8', 'v5p:4x4x4', a "
        ".toml file or 'local'"
    )


# Options of the compiler.


def compile_here(plan: wh.Plan) -> Any:
    """The step of a plan of ``planned``, on the devices of this process."""
    return wh.compile(
        plan,
        plain,
        net(),
        optimizer=optax.sgd(0.1),
        batch=batch(),
        devices=jax.devices(),
    )


def test_compiler_options_of_no_kind() -> None:
    text = refused(compiler_options={"--xla_a": "/tmp", "xla_a": None})
    assert text == (
        "compiler_options: 2 problems\n"
        "  1. '--xla_a' names no option; expected one of XLA's without dashes, "
        "such as xla_tpu_enable_async_collective_fusion\n"
        "  2. xla_a is None; expected a number, a text, True or False"
    )


def test_compiler_options_that_a_plan_does_not_carry() -> None:
    options = {"xla_dump_to": "/tmp/x", "xla_gpu_autotune_level": "/tmp/y"}
    text = refused(compiler_options=options)
    assert text.startswith(
        "compiler_options: 2 problems\n  1. 'xla_dump_to' is not among the "
    )
    assert "options that a plan may carry (such as xla_tpu_enable_async" in text
    assert "Set another in the environment of the process: XLA_FLAGS, or LIB" in text
    assert "  2. xla_gpu_autotune_level is '/tmp/y'; expected a number, true or" in text


def test_a_compiler_option_that_this_compiler_does_not_take() -> None:
    plan = planned(compiler_options={"xla_tpu_rwb_fusion": True})
    with pytest.raises(wh.WhaleError) as caught:
        compile_here(plan)
    assert str(caught.value) == (
        "compiler_options: the compiler of this cpu does not accept "
        "xla_tpu_rwb_fusion=True (INVALID_ARGUMENT: No such compile option: "
        "'xla_tpu_rwb_fusion'). Correct the name or "
        "value, or plan without the option"
    )


def test_compiler_options_that_are_no_dict() -> None:
    assert refused(compiler_options="xla_a=true") == (
        "compiler_options is 'xla_a=true'; expected a dict of XLA's options, such as "
        '{"xla_tpu_enable_async_collective_fusion": True}'
    )


def test_a_compiler_option_of_the_wrong_type() -> None:
    plan = planned(compiler_options={"exec_time_optimization_effort": "much"})
    with pytest.raises(wh.WhaleError, match="exec_time_optimization_effort=much"):
        compile_here(plan)


# Plan files.


def test_a_corrupt_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned().save(path)
    path.write_text(path.read_text()[:500])
    with pytest.raises(wh.WhaleError, match="is not a plan: it is not JSON"):
        wh.Plan.load(path)


def test_a_newer_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "whalejax_plan": 99}))
    with pytest.raises(
        wh.WhaleError, match="has plan format 99; this WhaleJAX reads [0-9]+"
    ):
        wh.Plan.load(path)
