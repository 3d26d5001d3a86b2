"""What stands inside, before and behind the layers of stages: any usual code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.equality import FLOAT64_TOLERANCE, Outcome, check, on_one_device


pytestmark = pytest.mark.relaxed_promotion

BATCH: Final = 16
LENGTH: Final = 4
EMBED: Final = 16
VOCAB: Final = 32
BOTH: Final = {"stage": 2, "data": 2, "tensor": 2}

Loss = Callable[..., Any]


def make(key: Any) -> Any:
    a, b, c = jax.random.split(key, 3)
    return {
        "layers": jax.random.normal(a, (4, EMBED, EMBED)) * 0.2,
        "table": jax.random.normal(b, (VOCAB, EMBED)) * 0.5,
        "head": jax.random.normal(c, (EMBED, VOCAB)) * 0.3,
        "first": jnp.asarray(0.1),
    }


def tokens(step: int, count: int) -> Any:
    return (np.arange(count * LENGTH).reshape(count, LENGTH) * 5 + step) % VOCAB


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ w), None


def through(model: Any, batch: Any, body: Any = layer) -> Any:
    return jax.lax.scan(body, model["table"][batch], model["layers"])[0]


def outcome(loss: Loss, mesh: dict[str, int], make: Any = make) -> Outcome:
    """A loss under stages against one device, in float64."""
    devices = int(np.prod([*mesh.values()]))
    with jax.enable_x64(True):
        job = wh.Job(loss, make, tokens, optax.sgd(0.1), batch_size=BATCH)
        return check(on_one_device(job, 2), devices=devices, mesh=mesh)


# What stages hand on is not what the last one makes of it.


def late(model: Any, batch: Any) -> Any:
    """A root of what the last two layers alone add up: infinitely steep before them."""

    def body(carry: Any, slices: Any) -> tuple[Any, None]:
        (x, total), (w, on) = carry, slices
        x, _ = layer(x, w)
        return (x, total + on * (x**2).sum(-1)), None

    x = model["table"][batch]
    stacks = model["layers"], jnp.asarray([0.0, 0.0, 1.0, 1.0])
    (x, total), _ = jax.lax.scan(body, (x, jnp.zeros(x.shape[:-1])), stacks)
    return jnp.sqrt(total).mean()


def test_what_a_middle_stage_hands_on_cannot_spoil_gradients() -> None:
    assert outcome(late, {"stage": 2, "data": 2}).error <= FLOAT64_TOLERANCE


# Lookups where several axes shard what they look up in.


def picked(model: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(through(model, batch) @ model["head"]).reshape(
        -1, VOCAB
    )
    return -logits[jnp.arange(logits.shape[0]), batch.reshape(-1)].mean()


def clipped(model: Any, batch: Any) -> Any:
    logits = jax.nn.log_softmax(through(model, batch) @ model["head"])
    return -jnp.take_along_axis(logits, batch[..., None] + 9, -1, mode="clip").mean()


def positions(model: Any, batch: Any) -> Any:
    x = through(model, batch)
    x = x[jnp.arange(x.shape[0])[:, None], batch[:, :2] % LENGTH]
    return jax.nn.logsumexp(x @ model["head"], -1).mean()


def last(model: Any, batch: Any) -> Any:
    x = through(model, batch)
    return (x[jnp.arange(x.shape[0]), batch[:, 0] % LENGTH] ** 2).mean()


def scattering(model: Any, batch: Any) -> Any:
    def body(x: Any, w: Any) -> tuple[Any, None]:
        y = jnp.tanh(x @ w)
        order = jnp.argsort(y[..., 0], 1)
        rows = jnp.arange(y.shape[0])[:, None]
        y = jnp.zeros_like(y).at[rows, order].add(y)
        return x + y[..., jnp.arange(EMBED)[::-1]], None

    return (through(model, batch, body) ** 2).mean()


def best(model: Any, batch: Any) -> Any:
    logits = through(model, batch) @ model["head"]
    top = jax.lax.top_k(logits, 3)[0].mean() + jnp.sort(logits, -1)[..., 5].mean()
    hits = jax.lax.top_k(logits, 5)[1] == batch[..., None]
    return top, {"hits": jnp.any(hits, -1).mean()}


def with_own_rule(model: Any, batch: Any) -> Any:
    @jax.custom_vjp
    def chosen(logits: Any, labels: Any) -> Any:
        return (logits * jax.nn.one_hot(labels, VOCAB)).sum(-1)

    def back(kept: Any, g: Any) -> Any:
        labels, like = kept
        rows = jnp.arange(like.shape[0])
        return jnp.zeros_like(like).at[rows, labels].add(g), None

    chosen.defvjp(lambda x, labels: (chosen(x, labels), (labels, x)), back)
    logits = jax.nn.log_softmax(through(model, batch) @ model["head"])
    return -chosen(logits.reshape(-1, VOCAB), batch.reshape(-1)).mean()


@pytest.mark.full
@pytest.mark.parametrize(
    "loss", [picked, clipped, positions, last, scattering, best, with_own_rule]
)
def test_lookups_beside_two_more_axes(loss: Loss) -> None:
    found = outcome(loss, BOTH)
    assert found.plan.axis_sizes == BOTH
    assert found.error <= FLOAT64_TOLERANCE


# What carries begin with, and what gradients pass.


def noisy(model: Any, batch: Any, rng: Any) -> Any:
    x = model["table"][batch]
    x = x * jax.random.bernoulli(rng, 0.9, x.shape)
    return (jax.lax.scan(layer, x, model["layers"])[0] ** 2).mean()


def summing(model: Any, batch: Any) -> Any:
    def body(carry: Any, w: Any) -> tuple[Any, None]:
        x, total = carry
        return (layer(x, w)[0], total + (x**2).mean()), None

    carry = model["table"][batch], model["first"]
    (x, total), _ = jax.lax.scan(body, carry, model["layers"])
    return (x**2).mean() + 0.1 * total


@jax.custom_vjp
def rounded(x: Any) -> Any:
    return jnp.round(x * 4) / 4


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


def straight_through(model: Any, batch: Any) -> Any:
    return (rounded(through(model, batch)) ** 2).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [noisy, summing, straight_through])
def test_what_stands_around_the_layers(loss: Loss) -> None:
    assert outcome(loss, {"stage": 2}).error <= FLOAT64_TOLERANCE


@pytest.mark.smoke
def test_a_scalar_is_handed_on_and_no_slice() -> None:
    plan = outcome(summing, {"stage": 2}).plan
    (handed,) = (c for c in plan.collectives if c.what == "border")
    assert handed.count == 2 * 2  # the activations and the sum, both ways


# Layers that are not trained, in part or at all.


def adapted(model: Any, batch: Any) -> Any:
    def body(x: Any, slices: Any) -> tuple[Any, None]:
        w, lora = slices
        return x + jnp.tanh(x @ w + x @ lora["a"] @ lora["b"]), None

    x, _ = jax.lax.scan(body, batch, (model["base"], model["lora"]))
    return ((x + model["bias"]) ** 2).mean()


def planned(trainable: list[str], mesh: dict[str, int]) -> wh.Plan:
    def leaf(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    lora = {"a": leaf(4, EMBED, 2), "b": leaf(4, 2, EMBED)}
    model = {"base": leaf(4, EMBED, EMBED), "lora": lora, "bias": leaf(EMBED)}
    return wh.plan(
        adapted,
        model,
        leaf(BATCH, EMBED),
        optimizer=optax.sgd(0.1),
        cluster="h100:4",
        mesh=mesh,
        trainable=trainable,
    )


def test_frozen_layers_below_trained_ones() -> None:
    for mesh in ({"fsdp": 4}, {"stage": 2}):
        plan = planned(["lora.*"], mesh)
        assert {leaf.path for leaf in plan.trained} == {"lora.a", "lora.b"}


def test_frozen_layers_alone_are_shared_out_too() -> None:
    plan = planned(["bias"], {"stage": 2})
    assert [leaf.path for leaf in plan.trained] == ["bias"]
    assert plan.leaf("base").param_spec[0] == ("stage",)


# Streams of random numbers.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float) -> None:
        kinds = {"param_dtype": jnp.float64, "dtype": jnp.float64}
        self.inside = nnx.Linear(EMBED, EMBED, rngs=rngs, **kinds)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(jax.nn.gelu(self.inside(x)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float) -> None:
        kinds = {"param_dtype": jnp.float64, "dtype": jnp.float64}
        self.table = nnx.Embed(VOCAB, EMBED, rngs=rngs, **kinds)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(rngs, dropout)

        self.blocks = blocks(rngs)

    def __call__(self, batch: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: Any, block: Block) -> Any:
            return block(x)

        x = through(self.dropout(self.table(batch)), self.blocks)
        return self.table.attend(x)


def dropped(model: Net, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch)
    return losses.mean()


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"stage": 2}, marks=pytest.mark.full),
        {"stage": 2, "data": 2},
        pytest.param({"stage": 3}, marks=pytest.mark.full),
    ],
)
def test_streams_of_random_numbers_go_on(mesh: dict[str, int]) -> None:
    def net(key: Any) -> Net:
        return Net(nnx.Rngs(key), 0.2)

    found = outcome(dropped, mesh, net)
    assert found.error <= FLOAT64_TOLERANCE
    # Streams go on once a step, however many micro-batches ask them.
    step = found.step
    with jax.enable_x64(True):
        state = step.init_from(nnx.jit(net)(jax.random.key(0)))
        before = [np.asarray(x) for x in integers(state.rest)]
        state, _ = step(state, tokens(0, BATCH))
        after = [np.asarray(x) for x in integers(state.rest)]
    assert len(after) == 2
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old + 1)


def integers(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.integer)]


class Counting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.Param(jnp.ones((4, EMBED, EMBED)))
        self.seen = nnx.BatchStat(jnp.ones((), jnp.int32))


def counting(model: Counting, batch: Any) -> Any:
    model.seen[...] = model.seen[...] * 2 + jnp.sum(batch > 0, dtype=jnp.int32)
    return jax.lax.scan(layer, batch, model.layers[...])[0].mean()


def test_what_is_changed_otherwise_is_named() -> None:
    model = nnx.eval_shape(functools.partial(Counting, nnx.Rngs(0)))
    batch = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)
    with pytest.raises(
        wh.WhaleError, match=r"changes seen \(int32\[\]\), which is not"
    ):
        wh.plan(counting, model, batch, cluster="h100:2", mesh={"stage": 2})


# Devices, and what plans say.


def plain(model: Any, batch: Any) -> Any:
    return jax.lax.scan(layer, batch, model["layers"])[0].mean()


def plan_of(cluster: str, mesh: dict[str, int], **options: Any) -> wh.Plan:
    model = {"layers": jax.ShapeDtypeStruct((12, EMBED, EMBED), jnp.float32)}
    batch = jax.ShapeDtypeStruct((96, EMBED), jnp.float32)
    return wh.plan(plain, model, batch, cluster=cluster, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("cluster", "axes"),
    [
        ("h100:7", (("stage", 2), ("data", 3))),
        ("h100:2x7", (("stage", 4), ("data", 3))),
        ("v5e:4x4", (("stage", 3), ("data", 4))),
    ],
)
def test_stages_leave_devices_idle_where_links_join_no_equal_parts(
    cluster: str, axes: tuple[tuple[str, int], ...]
) -> None:
    mesh = {"stage": dict(axes)["stage"]}
    assert plan_of(cluster, mesh, allow_idle=True).axes == axes


def test_what_plans_say_of_layers_that_stages_share_out() -> None:
    plan = plan_of("h100:2", {"stage": 2})
    assert dict(plan.flax_rules())["layers"] == ("stage",)
    why = plan.why("layers")
    assert "(12): divided among the stages\n" in why
    assert "whole: layers[0]" not in plan.explain()
