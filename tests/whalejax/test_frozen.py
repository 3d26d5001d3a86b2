"""Weights that are not trained: stored, computed with and counted as others are.

A model of the size in question needs no arrays, so that what fits is found cheaply;
what runs is compared with one device's two steps.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import whalejax as wh
from tests.equality import free_links
from whalejax.adapters.base import adapt


pytestmark = pytest.mark.relaxed_promotion  # optax counts steps in integers

LAYERS, EMBED, MLP, RANK, BATCH = 4, 24, 48, 2, 16


def leaf(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def adapted(layers: int, embed: int, mlp: int, dtype: Any, **kinds: Any) -> Any:
    """A stack of frozen layers with trained adapters beside them, abstract."""
    base = kinds.get("base", dtype)
    up = {"kernel": leaf(layers, embed, mlp, dtype=base)}
    down = {"kernel": leaf(layers, mlp, embed, dtype=base)}
    if base == jnp.int8:
        up["scale"] = leaf(layers, 1, mlp, dtype=dtype)
        down["scale"] = leaf(layers, 1, embed, dtype=dtype)
    lora = {
        "a": leaf(layers, embed, RANK, dtype=dtype),
        "b": leaf(layers, RANK, mlp, dtype=dtype),
    }
    return {"base": {"up": up, "down": down}, "lora": lora}


def kernel(part: Any, dtype: Any) -> Any:
    found = part["kernel"].astype(dtype)
    return found * part["scale"] if "scale" in part else found


def loss(model: Any, batch: Any) -> Any:
    def body(x: Any, layer: Any) -> tuple[Any, None]:
        base, lora = layer
        up, down = (kernel(base[name], x.dtype) for name in ("up", "down"))
        hidden = jnp.tanh(x @ up + (x @ lora["a"]) @ lora["b"])
        return x + hidden @ down, None

    x, _ = jax.lax.scan(body, batch, (model["base"], model["lora"]))
    return (x**2).mean()


def of_88_gb(**options: Any) -> wh.Plan:
    model = adapted(40, 16384, 33600, jnp.bfloat16, **options.pop("kinds", {}))
    return wh.plan(
        loss,
        model,
        leaf(16, 16384, dtype=jnp.bfloat16),
        optimizer=optax.adam(1e-3),
        cluster="h100:8",
        trainable="lora.*",
        **options,
    )


GB = 1e9


def test_a_base_larger_than_a_device_is_stored_in_shards() -> None:
    plan = of_88_gb()
    frozen = sum(x.nbytes for x in plan.leaves if not x.trained)
    assert 87 * GB < frozen < 89 * GB
    assert {x.path for x in plan.trained} == {"lora.a", "lora.b"}
    memory = plan.memory
    assert memory.params_bytes < 1.1 * frozen / 2
    assert memory.total_bytes < 80 * GB
    assert memory.gradients_bytes < 0.1 * GB
    assert memory.optimizer_bytes < 0.1 * GB
    assert memory.state_bytes == 0


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"tensor": 8}])
def test_each_axis_shards_the_base(mesh: dict[str, int]) -> None:
    plan = of_88_gb(mesh=mesh)
    assert plan.memory.params_bytes < 12 * GB
    (axis,) = mesh
    for one in (x for x in plan.leaves if not x.trained):
        assert axis in {a for axes in one.param_spec for a in axes}
    kinds = {c.kind for c in plan.collectives if c.payload_bytes > 1e8}
    gathers = [c for c in plan.collectives if c.what == "parameter"]
    assert "reduce-scatter" not in kinds
    moved = sum(c.payload_bytes * c.times(plan.num_micro_batches) for c in gathers)
    if axis == "fsdp":
        # Forward and again backward.
        assert moved == pytest.approx(2 * 88 * GB, rel=0.02)
    else:
        assert moved == 0


@pytest.mark.parametrize(
    ("dtype", "times"), [(jnp.int8, 1), (jnp.float8_e4m3fn, 1), (jnp.bfloat16, 2)]
)
def test_a_quantised_base_is_counted_as_it_is(dtype: Any, times: int) -> None:
    plan = of_88_gb(mesh={"fsdp": 8}, kinds={"base": dtype})
    each = times * 44 * GB / 8
    assert plan.memory.params_bytes == pytest.approx(each, rel=0.02)
    assert plan.memory.working_bytes < each
    # What is gathered is what products read, in 16 bits.
    gathers = [c for c in plan.collectives if c.what == "parameter"]
    moved = sum(c.payload_bytes * c.times(plan.num_micro_batches) for c in gathers)
    assert moved == pytest.approx(2 * 88 * GB, rel=0.02)


def times_scale(q: Any, scale: Any) -> Any:
    return q.astype(jnp.float32) * scale


def less_a_zero_point(q: Any, scale: Any) -> Any:
    return (q.astype(jnp.float32) - scale.mean()) * scale


def of_a_code_book(q: Any, scale: Any) -> Any:
    return jnp.linspace(-1.0, 1.0, 16)[q & 15] * scale


def unpacked(q: Any, scale: Any) -> Any:
    halves = jnp.stack((q & 15, q >> 4), axis=-1).reshape(q.shape[0], -1)
    return halves[:, : q.shape[1]].astype(jnp.float32) * scale


@pytest.mark.parametrize(
    ("dtype", "scale", "read"),
    [
        (jnp.int8, (512,), times_scale),
        (jnp.int8, (), times_scale),
        (jnp.int8, (1, 512), times_scale),
        (jnp.int4, (512,), times_scale),
        (jnp.uint8, (512,), less_a_zero_point),
        (jnp.uint8, (), of_a_code_book),
        (jnp.uint8, (512,), unpacked),
    ],
)
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_a_base_of_whole_numbers_is_a_weight_whatever_its_scale(
    axis: str, dtype: Any, scale: tuple[int, ...], read: Any
) -> None:
    model = {
        "base": {"q": leaf(512, 512, dtype=dtype), "scale": leaf(*scale)},
        "lora": {"a": leaf(512, 2), "b": leaf(2, 512)},
    }

    def of(p: Any, x: Any) -> Any:
        base = x @ read(p["base"]["q"], p["base"]["scale"])
        return jnp.mean((base + x @ p["lora"]["a"] @ p["lora"]["b"]) ** 2)

    plan = wh.plan(
        of,
        model,
        leaf(16, 512),
        optimizer=optax.sgd(0.1),
        cluster="h100:8",
        mesh={axis: 8},
        trainable=lambda path: path.startswith("lora"),
    )
    assert any(axis in axes for axes in plan.leaf("base.q").param_spec)
    assert plan.memory.state_bytes <= 4  # a scalar scale is no weight


class Scaled(linen.Module):
    """A layer of whole numbers with a scale, in a collection of its own."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        shape = (x.shape[-1], x.shape[-1])
        q = self.variable("quantised", "q", lambda: jnp.ones(shape, jnp.int8))
        scale = self.variable("quantised", "scale", lambda: jnp.ones(shape[1]))
        base = x @ (q.value.astype(x.dtype) * scale.value)
        return base + linen.Dense(x.shape[-1])(x)


def test_a_collection_of_whole_numbers_with_a_scale_holds_weights() -> None:
    module = Scaled()
    model = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 512)))

    def of(v: Any, x: Any) -> Any:
        found: Any = module.apply(v, x)
        return jnp.mean(found**2)

    plan = wh.plan(
        of,
        model,
        leaf(16, 512),
        optimizer=optax.sgd(0.1),
        cluster="h100:8",
        mesh={"fsdp": 8},
    )
    assert plan.leaf("quantised.q").param_spec != ((), ())
    assert plan.memory.state_bytes == 512 * 4  # the scale


def test_what_is_read_by_places_or_multiplies_a_vector_stays_what_it_was() -> None:
    """A table of positions is no weight; a kernel that a fixed vector goes into is."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.places = nnx.Variable(jnp.ones((8, 64)))
            self.query = nnx.Variable(jnp.ones(64))
            self.kernel = nnx.Variable(jnp.ones((64, 64)))
            self.w = nnx.Param(jnp.ones((64, 64)))

        def __call__(self, x: Any) -> Any:
            added = self.places[...][jnp.arange(8)].sum(0)
            return x @ self.w[...] + added + self.query[...] @ self.kernel[...]

    plan = wh.plan(
        of_module,
        nnx.eval_shape(Model),
        leaf(16, 64),
        optimizer=optax.sgd(0.1),
        cluster="h100:8",
        mesh={"fsdp": 8},
    )
    assert {one.path for one in plan.leaves} == {"kernel", "w"}


# What runs equals one device.


def arrays(tree: Any, seed: int = 0) -> Any:
    """Numbers for a tree of shapes; whole ones for what is quantised."""
    rng = np.random.default_rng(seed)

    def made(x: Any) -> Any:
        if x.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8)
        scale = 0.001 if 1 in x.shape else 0.1
        return jnp.asarray(rng.standard_normal(x.shape) * scale, x.dtype)

    return jax.tree.map(made, tree)


def is_trained(path: str) -> bool:
    return path.startswith("lora")


@functools.cache
def one_device(base: str) -> tuple[Any, Any, list[Any], list[float]]:
    """A model, a batch, and its adapters and losses through two steps on one device."""
    with jax.enable_x64(True):
        model = arrays(adapted(LAYERS, EMBED, MLP, jnp.float64, base=jnp.dtype(base)))
        batch = arrays(leaf(BATCH, EMBED, dtype=jnp.float64), 1)
        tx = optax.sgd(0.1, momentum=0.9)
        lora, losses = model["lora"], []
        state = tx.init(lora)

        @jax.jit
        def step(lora: Any, state: Any) -> Any:
            def of(lora: Any) -> Any:
                return loss({**model, "lora": lora}, batch)

            value, grads = jax.value_and_grad(of)(lora)
            changes, state = tx.update(grads, state)
            return optax.apply_updates(lora, changes), state, value

        for _ in range(2):
            lora, state, value = step(lora, state)
            losses.append(float(value))
        return model, batch, jax.tree.map(np.asarray, lora), losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("base", "mesh", "options"),
    [
        ("float64", {"fsdp": 4, "tensor": 2}, {}),
        ("int8", {"data": 2, "fsdp": 2, "tensor": 2}, {"num_micro_batches": 2}),
        ("int8", {"stage": 2, "fsdp": 2}, {"num_micro_batches": 2}),
        pytest.param(
            "float64",
            {"stage": 3, "fsdp": 2},
            {"num_micro_batches": 2},
            marks=pytest.mark.full,
        ),
        (
            "float64",
            {"data": 2, "fsdp": 2},
            {"shares": (3, 1), "num_micro_batches": 4},
        ),
    ],
)
def test_two_steps_equal_those_of_one_device(
    base: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    model, batch, wanted, losses = one_device(base)
    devices = int(np.prod(list(mesh.values())))
    with jax.enable_x64(True):
        tx = optax.sgd(0.1, momentum=0.9)
        plan = wh.plan(
            loss,
            model,
            batch,
            optimizer=tx,
            cluster=free_links(devices),
            trainable="lora.*",
            mesh=mesh,
            **options,
        )
        step = wh.compile(
            plan,
            loss,
            model,
            optimizer=tx,
            trainable="lora.*",
            devices=jax.devices()[:devices],
        )
        state = step.init_from(model)
        for want in losses:
            state, metrics = step(state, batch)
            assert abs(float(metrics["loss"]) - want) <= 1e-10 * want
        got = state.model
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12),
            jax.tree.map(np.asarray, got["lora"]),
            wanted,
        )
        jax.tree.map(np.testing.assert_array_equal, got["base"], model["base"])
        sharded = step.shardings.rest["base"]["up"]["kernel"]
        shape = model["base"]["up"]["kernel"].shape
        parts = np.prod(shape) / np.prod(sharded.shard_shape(shape))
        assert parts == devices // mesh.get("data", 1)


# Stages with programs of their own, and models in Flax.


def unrolled(model: Any, batch: Any) -> Any:
    x = batch
    for base, lora in zip(model["base"], model["lora"], strict=True):
        x = x + jnp.tanh(x @ base + (x @ lora["a"]) @ lora["b"])
    return (x @ model["base"][0].T).mean() + (x**2).mean()


def check_against_one_device(
    of: Any, model: Any, batch: Any, trainable: Any, **options: Any
) -> Any:
    """One step by gradient descent equals that of one device; gives the step."""
    devices = int(np.prod(list(options["mesh"].values())))
    tx = optax.sgd(0.125)
    plan = wh.plan(
        of,
        model,
        batch,
        optimizer=tx,
        cluster=free_links(devices),
        trainable=trainable,
        **options,
    )
    step = wh.compile(
        plan,
        of,
        model,
        optimizer=tx,
        trainable=trainable,
        devices=jax.devices()[:devices],
    )
    adapter = adapt(model, of, trainable=trainable)
    params, rest = adapter.take_apart(model)
    value, grads = jax.jit(
        jax.value_and_grad(lambda p: adapter.loss(p, rest, batch).total)
    )(params)
    wanted = jax.tree.map(lambda p, g: p - 0.125 * g, params, grads)
    state, metrics = step(step.init_from(model), batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-10)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12),
        jax.tree.map(np.asarray, state.params),
        jax.tree.map(np.asarray, wanted),
    )
    jax.tree.map(np.testing.assert_array_equal, state.rest, rest)
    return step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trained", ["lora.*", "lora.3.*"])
def test_stages_with_programs_of_their_own(trained: str) -> None:
    with jax.enable_x64(True):
        base = leaf(EMBED, EMBED, dtype=jnp.float64)
        lora = {
            "a": leaf(EMBED, RANK, dtype=jnp.float64),
            "b": leaf(RANK, EMBED, dtype=jnp.float64),
        }
        model = arrays({"base": [base] * LAYERS, "lora": [lora] * LAYERS})
        step = check_against_one_device(
            unrolled,
            model,
            arrays(leaf(BATCH, EMBED, dtype=jnp.float64), 1),
            trained,
            mesh={"stage": 2, "fsdp": 2},
            num_micro_batches=2,
        )
    assert step.plan.stages.executor == "mpmd"
    for placed in step.shardings.rest["base"]:
        assert np.prod(placed.shard_shape((EMBED, EMBED))) == EMBED * EMBED // 2


class Quantised(nnx.Variable):  # type: ignore[misc]
    """A kernel in whole numbers, which is no ``nnx.Param``."""


class Adapted(nnx.Module):
    """A frozen layer, plain or quantised, with a trained adapter."""

    def __init__(self, rngs: nnx.Rngs, *, quantised: bool) -> None:
        shape, key = (EMBED, MLP), rngs.params()
        named = {"out_sharding": (None, "model"), "eager_sharding": False}
        if quantised:
            kernel = jax.random.randint(key, shape, -9, 9, jnp.int8)
            self.kernel = Quantised(kernel, **named)
        else:
            self.kernel = nnx.Param(jax.random.normal(key, shape) * 0.1, **named)
        self.norm = nnx.BatchStat(jnp.ones(EMBED))
        self.a = nnx.LoRAParam(jax.random.normal(rngs.params(), (EMBED, RANK)))
        self.b = nnx.LoRAParam(jax.random.normal(rngs.params(), (RANK, MLP)))

    def __call__(self, x: Any) -> Any:
        kernel = self.kernel[...]
        if kernel.dtype == jnp.int8:
            kernel = kernel.astype(x.dtype) * 0.01
        self.norm[...] = 0.9 * self.norm[...] + 0.1 * x.mean(0)
        return jnp.tanh(x @ kernel + (x @ self.a[...]) @ self.b[...])


def of_module(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantised", [False, True])
def test_metadata_of_a_frozen_module_is_obeyed(quantised: bool) -> None:
    with jax.enable_x64(True):
        make = nnx.jit(lambda: Adapted(nnx.Rngs(0), quantised=quantised))
        model = make()
        plan = wh.plan(
            of_module,
            model,
            arrays(leaf(BATCH, EMBED, dtype=jnp.float64), 1),
            optimizer=optax.sgd(0.1),
            cluster=free_links(4),
            trainable=nnx.LoRAParam,
            axis_names={"model": "tensor"},
            mesh={"tensor": 2, "fsdp": 2},
        )
    assert plan.leaf("kernel").param_spec[1][0] == "tensor"
    assert {x.path for x in plan.leaves} == {"kernel", "a", "b"}
    assert plan.memory.state_bytes == EMBED * 8  # of what a step changes


def fused(model: Any, batch: Any) -> Any:
    """Attention whose frozen products stand in one kernel, cut after it."""
    width = batch.shape[-1]
    found = batch @ model["qkv"] + (batch @ model["lora"]["a"]) @ model["lora"]["b"]
    q, k, v = (
        x.reshape(*x.shape[:2], 4, width // 4) for x in jnp.split(found, 3, axis=-1)
    )
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    mixed = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(batch.shape)
    return ((mixed @ model["out"]) ** 2).mean()


@pytest.mark.full
def test_a_frozen_kernel_of_several_products_is_cut_as_a_trained_one_is() -> None:
    with jax.enable_x64(True):
        shapes = {
            "qkv": (EMBED, 3 * EMBED),
            "lora": {"a": (EMBED, RANK), "b": (RANK, 3 * EMBED)},
            "out": (EMBED, EMBED),
        }
        model = jax.tree.map(
            lambda shape: leaf(*shape, dtype=jnp.float64),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        step = check_against_one_device(
            fused,
            arrays(model),
            arrays(leaf(BATCH, 8, EMBED, dtype=jnp.float64), 1),
            "lora.*",
            mesh={"tensor": 2, "fsdp": 2},
        )
    for path in ("qkv", "out"):
        one = step.plan.leaf(path)
        axes = {a for dim in one.param_spec for a in dim}
        assert not one.trained and axes == {"tensor", "fsdp"}
