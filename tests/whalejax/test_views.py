"""Fused dimensions are taken apart: same values, and the parts can be sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import hlo
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.capture.split_dims.rewrite import taken_apart
from whalejax.planner.model.logical_dimensions import analyse


BATCH, SEQ, EMBED, HEADS, HEAD_DIM, MLP, VOCAB = 8, 6, 16, 4, 2, 36, 10
INNER: Final = HEADS * HEAD_DIM

Array = jax.Array
Parts = Callable[[Array], Any]


def by_split(joint: Array) -> Any:
    return [_heads(x) for x in jnp.split(joint, 3, axis=-1)]


def by_slices(joint: Array) -> Any:
    return [_heads(joint[..., i * INNER : (i + 1) * INNER]) for i in range(3)]


def by_index(joint: Array) -> Any:
    apart = joint.reshape(*joint.shape[:2], 3, HEADS, HEAD_DIM)
    return [apart[:, :, i] for i in range(3)]


def by_transpose(joint: Array) -> Any:
    apart = joint.reshape(*joint.shape[:2], 3, HEADS, HEAD_DIM)
    return tuple(apart.transpose(2, 0, 1, 3, 4))


def _heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], HEADS, HEAD_DIM)


def parameters(layers: int = 0) -> dict[str, Any]:
    """Of one block, or of a stack of them."""
    shapes = {
        "qkv": (EMBED, 3 * INNER),
        "bias": (3 * INNER,),
        "out": (INNER, EMBED),
        "gate_up": (EMBED, 2 * MLP),
        "down": (MLP, EMBED),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    lead = (layers,) if layers else ()
    block = {
        name: jax.random.normal(key, (*lead, *shape)) / shape[0] ** 0.5
        for (name, shape), key in zip(shapes.items(), keys, strict=False)
    }
    return {"block": block, "head": jax.random.normal(keys[-1], (EMBED, VOCAB))}


def block(params: Any, x: Array, parts: Parts, last: int) -> Array:
    """Attention and a gated perceptron, each with one fused kernel.

    Args:
        params: of one block.
        x: its input.
        parts: how query, key and value are picked.
        last: the fused dimension of the kernels as the model holds them.
    """
    with wh.split(axis=f"block.qkv.{last}"):
        joint = x @ params["qkv"] + params["bias"][None, None]
        query, key, value = parts(joint)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.reshape(*x.shape[:2], INNER) @ params["out"]
    with wh.split(axis=f"block.gate_up.{last}"):
        gate, up = jnp.split(x @ params["gate_up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ params["down"]


def loss_of(parts: Parts, *, remat: bool = False) -> Callable[[Any, Any], Array]:
    """Squared error of one block, or of a scanned stack of them."""

    def run(params: Any, x: Array, last: int) -> Array:
        def one(params: Any, x: Array) -> Array:
            return block(params, x, parts, last)

        return (jax.checkpoint(one) if remat else one)(params, x)

    def loss(params: Any, batch: Any) -> Array:
        x, stack = batch["x"], params["block"]
        if stack["qkv"].ndim == 2:
            x = run(stack, x, 1)
        else:
            x, _ = jax.lax.scan(lambda x, p: (run(p, x, 2), None), x, stack)
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    return loss


def batch() -> dict[str, Array]:
    """Inputs and targets."""
    keys = jax.random.split(jax.random.key(1))
    return {
        "x": jax.random.normal(keys[0], (BATCH, SEQ, EMBED)),
        "y": jax.random.normal(keys[1], (BATCH, SEQ, VOCAB)),
    }


WAYS: Final = (by_split, by_slices, by_index, by_transpose)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", WAYS)
def test_however_the_parts_are_picked_both_kernels_are_seen_in_parts(
    parts: Parts,
) -> None:
    captured = capture(adapt(parameters(), loss_of(parts)), batch())
    shapes = Counter(t.shape for t in captured.graph.tensors)
    assert shapes[EMBED, 3, INNER] == 1
    assert shapes[EMBED, 2, MLP] == 1
    assert shapes[3, INNER] == 1
    # The values too, until they are picked from.
    assert shapes[BATCH, SEQ, 3, INNER] >= 2
    assert shapes[BATCH, SEQ, 3 * INNER] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("remat", [False, True])
def test_the_program_computes_the_same(layers: int, *, remat: bool) -> None:
    params, data = parameters(layers), batch()
    leaves, tree = jax.tree.flatten(params)
    loss = loss_of(by_index, remat=remat)

    def flat(*arrays: Array) -> Array:
        return loss(tree.unflatten(arrays), data)

    traced = jax.make_jaxpr(flat)(*leaves)
    cuts = {i: {x.ndim - 1: n} for i, x in enumerate(leaves) for n in _parts(x)}
    assert len(cuts) == 3
    apart = taken_apart(traced, cuts)
    assert str(apart) != str(traced)

    def again(*arrays: Array) -> Array:
        (total,) = jax.extend.core.jaxpr_as_fun(apart)(*arrays)
        return total

    every = range(len(leaves))
    before, after = (
        jax.jit(jax.grad(f, argnums=every))(*leaves) for f in (flat, again)
    )
    for wanted, found in zip(before, after, strict=True):
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max())
        )


def _parts(leaf: Array) -> list[int]:
    return [n for n, size in ((3, 3 * INNER), (2, 2 * MLP)) if leaf.shape[-1] == size]


@pytest.mark.full
@pytest.mark.parametrize(
    "layers, mesh",
    [
        (0, {"tensor": 4}),
        # XLA merges a ring of two devices with that of the backward pass on CPU, so
        # none is left open.
        (0, {"data": 2, "context": 1, "tensor": 2}),
        (0, {"fsdp": 2, "tensor": 4}),
        (2, {"data": 4, "tensor": 2}),
    ],
)
def test_fused_kernels_are_exchanged_and_not_gathered(
    layers: int, mesh: dict[str, int]
) -> None:
    loss, params, data = loss_of(by_split), parameters(layers), batch()
    optimizer = optax.sgd(1.0)
    plan = wh.plan(
        loss,
        params,
        data,
        optimizer=optimizer,
        mesh=mesh,
        cluster=wh.Cluster.detect(calibrate=False),
        allow_idle=True,
    )
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    found = hlo.collectives(step.lower().compile().as_text())
    predicted: Counter[str] = Counter()
    for c in plan.collectives:
        predicted[c.kind] += c.payload_bytes * c.times(plan.num_micro_batches)
    assert dict(predicted) == dict(found.nbytes)
    assert found.counts["all-to-all"] > 0
    kernels = [x for x in plan.leaves if x.path in ("block.gate_up", "block.qkv")]
    assert [x.compute_spec[-2:] for x in kernels] == [(("tensor",), ())] * 2


def halves(params: Any, data: Any) -> Array:
    """Two views of one batch, as contrastive losses have them."""
    z = jnp.tanh(data["x"] @ params["w"])
    first, second = z[: BATCH // 2], z[BATCH // 2 :]
    return jnp.mean((first - second) ** 2) + jnp.mean(z**2)


def rotated(params: Any, data: Any) -> Array:
    """Halves of a head's width, as rotary embeddings take them."""
    z = (data["x"] @ params["w"]).reshape(BATCH, SEQ, 3, INNER)
    first, second = z[..., : INNER // 2], z[..., INNER // 2 :]
    return jnp.mean((first * second) ** 2)


def convolved(params: Any, data: Any) -> Array:
    """A kernel that no view passes, split behind."""
    kernel = params["w"].reshape(1, 1, EMBED, 3 * INNER)
    image = data["x"][:, :, None]
    out = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    one, two, three = jnp.split(out, 3, axis=-1)
    return jnp.mean(one * two + three**2)


def regrouped(params: Any, data: Any) -> Array:
    """A projection whose width is only ever regrouped."""
    return jnp.mean((data["x"] @ params["w"]).reshape(BATCH, SEQ, 3, -1) ** 2)


def split_weights(params: Any, data: Any) -> Array:
    """Weights that are split before they are used."""
    one, two, three = (data["x"] @ w for w in jnp.split(params["w"], 3, axis=1))
    return jnp.mean(one * two + three**2)


@pytest.mark.parametrize("loss", [halves, rotated, convolved, regrouped, split_weights])
def test_what_is_not_fused_is_left_alone(loss: Any) -> None:
    params = {"w": jnp.ones((EMBED, 3 * INNER))}
    captured = capture(adapt(params, loss), batch())
    traced = jax.make_jaxpr(loss)(params, batch())
    assert len(captured.jaxpr.jaxpr.eqns) == len(traced.jaxpr.eqns)


def test_a_batch_cut_in_halves_is_still_one_dimension() -> None:
    params = {"w": jnp.ones((EMBED, 64))}
    captured = capture(adapt(params, halves), batch())
    dims = analyse(captured.graph)
    assert {role.size for role in dims.batch} == {BATCH}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fsdp", [4, 8])
def test_regrouped_weights_are_still_stored_in_shards(fsdp: int) -> None:
    """Also in more shards than their first part has."""

    def loss(params: Any, data: Any) -> Array:
        kernel = params["w"].reshape(15, HEADS, 8)
        z = jnp.einsum("bse,ehd->bshd", data["x"][..., :15], kernel)
        return jnp.mean((z + params["b"].reshape(1, 1, HEADS, 8)) ** 2)

    keys = jax.random.split(jax.random.key(2))
    params = {
        "w": jax.random.normal(keys[0], (15, HEADS * 8)),
        "b": jax.random.normal(keys[1], (HEADS * 8,)),
    }
    optimizer = optax.sgd(1.0)
    here = wh.Cluster.detect(calibrate=False)
    plan = wh.plan(
        loss,
        params,
        batch(),
        optimizer=optimizer,
        mesh={"fsdp": fsdp},
        cluster=here,
        allow_idle=True,
    )
    assert [leaf.param_spec[-1][-1:] for leaf in plan.leaves] == [("fsdp",)] * 2
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    state = step.init(lambda: jax.tree.map(jnp.copy, params), rng=jax.random.key(0))
    after, _ = step(state, batch())
    for leaf, old, slope in zip(
        jax.tree.leaves(after.params),
        jax.tree.leaves(params),
        jax.tree.leaves(jax.grad(loss)(params, batch())),
        strict=True,
    ):
        np.testing.assert_allclose(old - np.asarray(leaf), slope, rtol=1e-3, atol=1e-5)
