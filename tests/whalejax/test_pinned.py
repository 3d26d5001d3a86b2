"""Metadata that names mesh axes as Flax's own examples do, and what comes of it.

Such a table stores weights in shards over axes along which they need not be computed:
the compiler gathers them. The same is planned, and equals one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import whalejax as wh
from tests.equality import FLOAT64_TOLERANCE, check, free_links, on_one_device
from whalejax.user_code.losses import Job


pytestmark = pytest.mark.relaxed_promotion  # norms rely on it

EMBED, HEADS, WIDTH, MLP, VOCAB, LENGTH, BATCH = 16, 4, 8, 32, 64, 8, 8
KINDS: Any = {"param_dtype": jnp.float64, "dtype": jnp.float64}


def param(key: Any, shape: tuple[int, ...], *names: str | None) -> Any:
    value = jax.random.normal(key, shape, jnp.float64) * shape[0] ** -0.5
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


class Block(nnx.Module):
    """A decoder layer whose norms' scales lie on the axis of its products."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        keys = [rngs.params() for _ in range(6)]
        self.before = param(keys[0], (EMBED,), "tensor")
        self.qkv = param(
            keys[1], (3, HEADS, EMBED, WIDTH), None, "tensor", "fsdp", None
        )
        self.out = param(keys[2], (HEADS, WIDTH, EMBED), "tensor", None, "fsdp")
        self.behind = param(keys[3], (EMBED,), "tensor")
        self.up = param(keys[4], (EMBED, MLP), "fsdp", "tensor")
        self.down = param(keys[5], (MLP, EMBED), "tensor", "fsdp")

    def __call__(self, x: Any) -> Any:
        h = norm(x, self.before[...])
        q, k, v = (jnp.einsum("bte,hed->bthd", h, self.qkv[i]) for i in range(3))
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        mixed = jnp.einsum("bhts,bshd->bthd", scores, v)
        x = x + jnp.einsum("bthd,hde->bte", mixed, self.out[...])
        h = norm(x, self.behind[...])
        return x + jax.nn.gelu(h @ self.up[...]) @ self.down[...]


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = param(rngs.params(), (VOCAB, EMBED), "tensor", "fsdp")
        self.block = Block(rngs)
        self.last = param(rngs.params(), (EMBED,), "tensor")

    def __call__(self, tokens: Any) -> Any:
        x = self.block(self.table[...][tokens])
        return norm(x, self.last[...]) @ self.table[...].T


def loss(model: Decoder, batch: Any) -> Any:
    logits = model(batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()


def job() -> Job:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)

    return Job(
        loss_fn=loss,
        make_model=lambda key: Decoder(nnx.Rngs(key)),
        batch=tokens,
        batch_size=BATCH,
        optimizer=optax.sgd(0.1),
    )


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 4}])
def test_axes_of_storage_are_gathered_for_use(mesh: dict[str, int]) -> None:
    with jax.enable_x64(True):
        found = check(on_one_device(job()), mesh=mesh)
    assert found.error <= FLOAT64_TOLERANCE
    plan = found.plan
    for path in ("last", "block.before", "block.behind"):
        scale = plan.leaf(path)
        assert scale.param_spec[0][0] == "tensor" and scale.compute_spec == ((),)
    assert plan.leaf("block.up").param_spec == (("fsdp",), ("tensor",))
    assert plan.leaf("block.qkv").param_spec == ((), ("tensor",), ("fsdp",), ())
    assert plan.leaf("table").param_spec == (("tensor",), ("fsdp",))
    assert any(n.startswith("stored over tensor as the metadata") for n in plan.notes)


# Names of layers.


class Layers(nnx.Module):
    """Stacked layers; ``named`` says what the new dimension is called."""

    def __init__(self, rngs: nnx.Rngs, named: dict[str, Any]) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=named)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: Any, layer: Layer) -> Any:
            return layer(x)

        return through(x, self.layers)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = param(rngs.params(), (EMBED, MLP), "fsdp", "tensor")
        self.down = param(rngs.params(), (MLP, EMBED), "tensor", "fsdp")

    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


def of_layers(model: Layers, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


def planned(named: dict[str, Any], **options: Any) -> wh.Plan:
    with jax.enable_x64(True):
        return wh.plan(
            of_layers,
            nnx.eval_shape(lambda: Layers(nnx.Rngs(0), named)),
            jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float64),
            optimizer=optax.sgd(0.1),
            cluster=free_links(8),
            **{"mesh": {"fsdp": 2, "tensor": 4}, **options},
        )


def test_metadata_without_the_layers_is_that_of_a_layer() -> None:
    with_name = planned({nnx.PARTITION_NAME: None})
    without = planned({})
    assert with_name.partition_specs() == without.partition_specs()
    assert without.leaf("layers.up").param_spec == ((), ("fsdp",), ("tensor",))
    assert any("names 2 of its 3 dimensions" in note for note in without.notes)
    assert not any("of its 3 dimensions" in note for note in with_name.notes)


class Members(nnx.Module):
    """Stacked kernels of (8, 32), and how a model uses them."""

    def __init__(self, call: Any, out_axes: int = 0, named: Any = None) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=out_axes, transform_metadata=named or {})
        def make(rngs: nnx.Rngs) -> Any:
            key = rngs.params()
            value = jax.random.normal(key, (8, 32), jnp.float32)
            return nnx.Param(value, out_sharding=("embed", "mlp"), eager_sharding=False)

        self.w = make(nnx.Rngs(0))
        self.call = call

    def __call__(self, x: Any) -> Any:
        return self.call(self.w[...], x)


def of_members(call: Any, x: Any = (16, 8), **making: Any) -> wh.Plan:
    return wh.plan(
        lambda model, batch: (jnp.tanh(model(batch)) ** 2).mean(),
        nnx.eval_shape(lambda: Members(call, **making)),
        jax.ShapeDtypeStruct(x, jnp.float32),
        optimizer=optax.sgd(0.1),
        cluster="cpu:8",
        axis_names={"mlp": "tensor"},
        mesh={"tensor": 8},
    )


def vmapped(w: Any, x: Any) -> Any:
    return jax.vmap(lambda member: jnp.tanh(x @ member))(w).mean(0)


UNTOLD: list[Any] = [
    (vmapped, (16, 8)),
    (lambda w, x: jnp.einsum("bd,edf->bef", x, w), (16, 8)),
    (lambda w, x: jnp.einsum("bed,edf->bef", x, w), (16, 4, 8)),
    (lambda w, x: jnp.einsum("bed,edf->bf", x, w), (16, 4, 8)),
    (lambda w, x: x @ w.mean(0), (16, 8)),
    (lambda w, x: x @ w.reshape(2, 16, 32)[0, :8], (16, 8)),
]


@pytest.mark.parametrize(("call", "x"), UNTOLD)
def test_names_are_missing_where_nothing_tells_which(call: Any, x: Any) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        of_members(call, x)
    assert str(caught.value) == (
        "model: 1 problem\n"
        "  1. w: its metadata names 2 of its 3 dimensions (4, 8, 32), and nothing "
        "shows which of them has no name. nnx.vmap without a name for its dimension "
        "does this. Name each dimension, with None for one that has no name, or give "
        "transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap"
    )


@pytest.mark.parametrize(
    ("call", "out_axes", "mlp"),
    [
        (lambda w, x: sum(jnp.tanh(x @ w[i]) for i in range(4)), 0, 2),
        (lambda w, x: sum(jnp.tanh(x @ one) for one in w), 0, 2),
        (lambda w, x: sum(jnp.tanh(x @ w[:, i]) for i in range(4)), 1, 2),
        (lambda w, x: sum(jnp.tanh(x @ w[..., i]) for i in range(4)), -1, 1),
        (lambda w, x: jnp.tanh(x @ jnp.moveaxis(w, 1, 0)[2]), 1, 2),
        (
            lambda w, x: jax.lax.map(lambda one: x @ one, jnp.moveaxis(w, -1, 0)),
            -1,
            1,
        ),
    ],
)
def test_the_dimension_that_is_taken_one_by_one_has_no_name(
    call: Any, out_axes: int, mlp: int
) -> None:
    plan = of_members(call, out_axes=out_axes)
    assert [d for d, axes in enumerate(plan.leaf("w").param_spec) if axes] == [mlp]
    said = f"they are taken for those besides dimension {out_axes % 3}, which the model"
    assert any(said in note for note in plan.notes)


def test_a_dimension_that_is_said_to_have_no_name_has_none() -> None:
    plan = of_members(vmapped, named={nnx.PARTITION_NAME: None})
    assert plan.leaf("w").param_spec == ((), (), ("tensor",))


class Nested(nnx.Module):
    """Kernels that two loops, one in the other, take slices of."""

    def __init__(self, *names: str | None) -> None:
        self.w = param(jax.random.key(0), (2, 3, 16, 16), *names)

    def __call__(self, x: Any) -> Any:
        def inner(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        def outer(x: Any, w: Any) -> Any:
            return jax.lax.scan(inner, x, w)

        return jax.lax.scan(outer, x, self.w[...])[0]


def test_loops_tell_of_several_dimensions() -> None:
    def planned(*names: str | None) -> wh.Plan:
        return wh.plan(
            of_layers,
            nnx.eval_shape(lambda: Nested(*names)),
            jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float64),
            optimizer=optax.sgd(0.1),
            cluster="cpu:8",
            mesh={"fsdp": 2, "tensor": 4},
        )

    with jax.enable_x64(True):
        plan = planned("fsdp", "tensor")
        assert plan.leaf("w").param_spec == ((), (), ("fsdp",), ("tensor",))
        with pytest.raises(wh.WhaleError, match="names 1 of its 4 dimensions"):
            planned("tensor")


def test_layers_may_be_named_for_the_stages() -> None:
    named = {nnx.PARTITION_NAME: "layers"}
    mesh = {"stage": 2, "fsdp": 2, "tensor": 2}
    plan = planned(named, axis_names={"layers": "stage"}, mesh=mesh)
    assert plan.leaf("layers.up").param_spec == (("stage",), ("fsdp",), ("tensor",))
    plan = planned(named, axis_names={"layers": "stage"})
    assert any("stage" in note and "has size 1" in note for note in plan.notes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ({}, {"stage": 2, "fsdp": 2, "tensor": 2}),
        ({"fsdp": 2}, {"stage": 2, "fsdp": 2, "tensor": 2}),
        ({"fsdp": 1}, {"stage": None, "tensor": None}),
        ({"stage": 1}, {"fsdp": None, "tensor": None}),
        ({"data": 8}, {"data": 8}),
        ({"stage": 4}, {"stage": 4}),
    ],
)
def test_layers_that_are_named_for_the_stages_get_them(
    mesh: dict[str, int], sizes: dict[str, int | None]
) -> None:
    named = {nnx.PARTITION_NAME: "layers"}
    plan = planned(named, axis_names={"layers": "stage"}, mesh=mesh)
    found = {axis: n for axis, n in plan.axis_sizes.items() if n > 1}
    assert found.items() >= {a: n for a, n in sizes.items() if n}.items()
    assert found.keys() >= sizes.keys()
    staged = "stage" in sizes
    assert (plan.leaf("layers.up").param_spec[0] == ("stage",)) == staged
    said = "2 leaves name the mesh axis stage (layers.down first), which has size 1"
    assert any(said in note for note in plan.notes) == (not staged)


def test_layers_that_no_stages_divide_are_planned_without() -> None:
    def loss(p: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0] ** 2).mean()

    shape = jax.ShapeDtypeStruct((3, EMBED, EMBED), jnp.float32)
    plan = wh.plan(
        lambda p, x: loss(p["w"], x),
        {"w": linen.Partitioned(shape, names=("layers", None, None))},
        jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32),
        optimizer=optax.sgd(0.1),
        cluster="cpu:8",
        axis_names={"layers": "stage"},
    )
    assert plan.axis_sizes["data"] == 8
    assert any(
        "1 leaf names the mesh axis stage (w), which has size 1" in note
        for note in plan.notes
    )


def test_what_is_no_layer_cannot_be_named_for_the_stages() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        planned(
            {nnx.PARTITION_NAME: None}, axis_names={"fsdp": "stage", "tensor": "fsdp"}
        )
    assert (
        "layers.up dim 1: its metadata shards it over stage, which divides only "
        "layers, the first dimension of parameters that a scan slices. Drop "
        "that name there"
    ) in str(caught.value)


@pytest.mark.parametrize("names", [("embed", "mlp"), ("embed", ("tensor", "mlp"))])
def test_the_remedy_for_an_axis_of_no_weights_has_the_models_own_name(
    names: Any,
) -> None:
    net = {
        "w": linen.Partitioned(jax.ShapeDtypeStruct((8, 32), jnp.float32), names=names)
    }

    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(b["x"] @ p["w"]))

    batch = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(loss, net, batch, cluster="cpu:8", axis_names={"mlp": "data"})
    assert "w dim 1: its metadata shards it over data, which shards the batch" in (
        str(caught.value)
    )
    assert "map that name: axis_names={'mlp': 'fsdp'}" in str(caught.value)
    plan = wh.plan(loss, net, batch, cluster="cpu:8", axis_names={"mlp": "fsdp"})
    assert "fsdp" in plan.leaf("w").param_spec[1]


# Layouts of values that the model fixes itself.


def constrained(params: Any, batch: Any) -> Any:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("rows", "model"), axis_types=auto)
    fixed = jax.NamedSharding(mesh, jax.P("rows", "model"))
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(batch @ params["up"]), fixed)
    return ((hidden @ params["down"]) ** 2).mean()


def test_layouts_of_values_are_the_plans_own() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    with jax.enable_x64(True):
        shapes = ((BATCH, EMBED), (EMBED, MLP), (MLP, EMBED))
        batch, up, down = (
            jax.random.normal(k, shape, jnp.float64)
            for k, shape in zip(keys, shapes, strict=True)
        )
        job = Job(
            loss_fn=constrained,
            make_model=lambda key: {"up": up, "down": down},
            batch=np.asarray(batch),
            optimizer=optax.sgd(0.1),
            batch_size=BATCH,
        )
        found = check(on_one_device(job), mesh={"data": 4}, devices=4)
    assert found.error <= FLOAT64_TOLERANCE
    (said,) = (n for n in found.plan.notes if "with_sharding_constraint" in n)
    assert said.startswith("1 layout of values that the model fixes by with_sharding_")
    assert "('rows', 'model') in test_pinned.py:" in said
