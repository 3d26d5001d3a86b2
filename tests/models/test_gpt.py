"""GPT: its switches change how it computes and not what; masks, dropout, causality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import whalejax as wh
from whalejax.models import gpt


TEST = gpt.SIZES["test"]


def loss_and_gradients(model: gpt.GPT, batch: Any) -> tuple[Any, Any]:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any) -> Any:
        return gpt.loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

    return jax.jit(jax.value_and_grad(loss))(params)


def stacked(unrolled: gpt.GPT) -> gpt.GPT:
    """The scanned model with the same parameters."""
    config = replace(unrolled.config, scan_layers=True)
    scanned = gpt.GPT(config, rngs=nnx.Rngs(1))
    state = nnx.to_pure_dict(nnx.state(unrolled, nnx.Param))
    layers = [state["blocks"][i] for i in range(config.layers)]
    state["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    target = nnx.state(scanned, nnx.Param)
    nnx.replace_by_pure_dict(target, state)
    nnx.update(scanned, target)
    return scanned


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_compute_the_same(remat: bool) -> None:
    batch = gpt.job("test").batch_at(0)
    unrolled = gpt.GPT(replace(TEST, remat=remat), rngs=nnx.Rngs(0))
    loss, gradients = loss_and_gradients(unrolled, batch)
    scanned_loss, scanned = loss_and_gradients(stacked(unrolled), batch)
    np.testing.assert_allclose(scanned_loss, loss, rtol=1e-6)
    blocks = scanned["blocks"]
    for i in range(TEST.layers):
        expected = gradients["blocks"][i]
        found = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)
        for one, other in zip(
            jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_remat_changes_no_loss_and_no_gradient() -> None:
    batch = gpt.job("test").batch_at(0)
    (loss, gradients), (other_loss, others) = (
        loss_and_gradients(gpt.GPT(replace(TEST, remat=on), rngs=nnx.Rngs(0)), batch)
        for on in (False, True)
    )
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


def test_remat_is_in_the_program() -> None:
    model = gpt.GPT(replace(TEST, remat=True), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    tokens = jnp.zeros((2, 24), jnp.int32)
    traced = jax.make_jaxpr(lambda s: nnx.merge(graph, s, copy=True)(tokens))(state)
    names = [equation.primitive.name for equation in traced.eqns]
    assert sum(name in ("checkpoint", "remat2") for name in names) == TEST.layers


def test_a_fused_kernel_computes_the_same() -> None:
    separate = gpt.GPT(TEST, rngs=nnx.Rngs(0))
    fused = gpt.GPT(replace(TEST, fused_qkv=True), rngs=nnx.Rngs(0))
    nnx.update(fused, nnx.state(separate, lambda path, _: "attention" not in path))
    for one, other in zip(separate.blocks, fused.blocks, strict=True):
        parts = [one.attention.query, one.attention.key, one.attention.value]
        joint = other.attention.query_key_value
        flat = [part.kernel[...].reshape(TEST.embed, -1) for part in parts]
        joint.kernel[...] = jnp.concatenate(flat, axis=1)
        nnx.update(other.attention.output, nnx.state(one.attention.output))
    tokens = jnp.asarray(gpt.job("test").batch_at(0)["tokens"][:, :-1])
    np.testing.assert_allclose(fused(tokens), separate(tokens), rtol=1e-4, atol=1e-5)


def test_heads_are_a_dimension_of_the_kernels() -> None:
    attention = gpt.GPT(TEST, rngs=nnx.Rngs(0)).blocks[0].attention
    assert attention.query.kernel.shape == (48, 8, 6)
    assert attention.output.kernel.shape == (8, 6, 48)


def test_a_tied_head_is_the_embedding() -> None:
    model = gpt.GPT(replace(TEST, tied_embedding=True), rngs=nnx.Rngs(0))
    assert not hasattr(model, "head")
    hidden = jax.random.normal(jax.random.key(0), (2, 3, TEST.embed))
    table = model.tokens.embedding[...]
    expected = jnp.einsum("bse,ve->bsv", hidden, table)
    np.testing.assert_allclose(model.logits(hidden), expected, rtol=1e-4, atol=1e-5)


def test_no_position_sees_a_later_token() -> None:
    model = gpt.GPT(TEST, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(gpt.job("test").batch_at(0)["tokens"][:2, :-1])
    changed = tokens.at[:, 10].set((tokens[:, 10] + 1) % TEST.vocab)
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    for later in range(10, 24):
        assert (before[:, later] != after[:, later]).any()


def test_the_mean_runs_over_real_tokens() -> None:
    job = gpt.job("test", padded=True)
    batch = job.batch_at(0)
    model = job.make_model(jax.random.key(0))
    result = job.loss_fn(model, batch)
    assert isinstance(result, wh.WeightedLoss)
    logits = np.asarray(model(jnp.asarray(batch["tokens"][:, :-1])), np.float64)
    total, weight = 0.0, 0
    for row, targets, mask in zip(
        logits, batch["tokens"][:, 1:], batch["mask"], strict=True
    ):
        for scores, target, real in zip(row, targets, mask, strict=True):
            if real:
                total += np.log(np.exp(scores).sum()) - scores[target]
                weight += 1
    assert 0 < weight < batch["mask"].size
    assert int(result.weight) == weight
    np.testing.assert_allclose(float(result.total), total, rtol=1e-5)


def test_dropout_lives_in_the_model() -> None:
    dropped = gpt.GPT(replace(TEST, dropout_rate=0.3), rngs=nnx.Rngs(0))
    whole = gpt.GPT(TEST, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(whole, nnx.RngState))
    assert jax.tree.leaves(nnx.state(dropped, nnx.RngState))
    tokens = jnp.zeros((2, 24), jnp.int32)
    np.testing.assert_array_equal(whole(tokens), whole(tokens))
    assert (dropped(tokens) != dropped(tokens)).any()
    dropped.eval()
    np.testing.assert_array_equal(dropped(tokens), dropped(tokens))


def test_stacked_layers_drop_differently() -> None:
    config = replace(TEST, dropout_rate=0.3, scan_layers=True, remat=True)
    model = gpt.GPT(config, rngs=nnx.Rngs(0))
    keys = nnx.state(model.blocks, nnx.RngKey)
    for key in jax.tree.leaves(keys):
        data = jax.random.key_data(key)
        assert data.shape[0] == TEST.layers
        assert (data[0] != data[1]).any()
    tokens = jnp.zeros((2, 24), jnp.int32)
    assert (model(tokens) != model(tokens)).any()


def test_first_loss_is_that_of_guessing(on_one_device: Callable[..., Any]) -> None:
    job = gpt.job()
    placed = on_one_device(job)
    loss = jax.jit(placed.loss)(placed.params, job.batch_at(0, 8))
    np.testing.assert_allclose(loss, np.log(256), atol=0.15)
