"""GPT: its switches change how it computes and not what; masks, dropout, causality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import whalejax as wh
from whalejax import jobs
from whalejax.meshes import cluster
from whalejax.models import gpt


TEST = gpt.SIZES["test"]


def loss_and_gradients(model: gpt.GPT) -> tuple[Any, Any]:
    """Loss and gradients of a fixed batch; the gradients as nested dictionaries."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    batch = gpt.job("test").batch_at(0)

    def loss(params: Any) -> Any:
        return gpt.loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return value, nnx.to_pure_dict(gradients)


@pytest.fixture(scope="module")
def model() -> gpt.GPT:
    return make(TEST)


def make(config: gpt.GPTConfig) -> gpt.GPT:
    made: gpt.GPT = nnx.jit(lambda key: gpt.GPT(config, rngs=nnx.Rngs(key)))(
        jax.random.key(0, impl="rbg")
    )
    return made


@pytest.fixture(scope="module")
def expected(model: gpt.GPT) -> tuple[Any, Any]:
    return loss_and_gradients(model)


def stacked(tree: dict[str, Any]) -> dict[str, Any]:
    """A state or gradient of separate layers in the shape of scanned ones."""
    layers = [tree["blocks"][i] for i in range(TEST.layers)]
    return {**tree, "blocks": jax.tree.map(lambda *x: jnp.stack(x), *layers)}


def assert_close(found: Any, wanted: Any) -> None:
    (loss, gradients), (wanted_loss, wanted_gradients) = found, wanted
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(wanted_gradients)
    pairs = zip(
        jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_scanned_layers_compute_the_same(
    model: gpt.GPT, expected: tuple[Any, Any]
) -> None:
    """With remat inside the scan, so that one program speaks for both."""
    scanned = make(replace(TEST, scan_layers=True, remat=True))
    params = nnx.state(scanned, nnx.Param)
    same = stacked(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    nnx.replace_by_pure_dict(params, same)
    nnx.update(scanned, params)
    loss, gradients = expected
    assert_close(loss_and_gradients(scanned), (loss, stacked(gradients)))


@pytest.mark.full
def test_remat_changes_no_loss_and_no_gradient(expected: tuple[Any, Any]) -> None:
    assert_close(loss_and_gradients(make(replace(TEST, remat=True))), expected)


def test_remat_is_in_the_program() -> None:
    model = nnx.eval_shape(lambda: gpt.GPT(replace(TEST, remat=True), rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    tokens = jnp.zeros((2, 24), jnp.int32)
    traced = jax.make_jaxpr(lambda s: nnx.merge(graph, s, copy=True)(tokens))(state)
    names = [equation.primitive.name for equation in traced.eqns]
    assert sum(name in ("checkpoint", "remat2") for name in names) == TEST.layers


def test_a_fused_kernel_computes_the_same(model: gpt.GPT) -> None:
    separate = model
    fused = make(replace(TEST, fused_qkv=True))
    nnx.update(fused, nnx.state(separate, lambda path, _: "attention" not in path))
    for one, other in zip(separate.blocks, fused.blocks, strict=True):
        parts = [one.attention.query, one.attention.key, one.attention.value]
        joint = other.attention.query_key_value
        flat = [part.kernel[...].reshape(TEST.embed, -1) for part in parts]
        joint.kernel[...] = jnp.concatenate(flat, axis=1)
        nnx.update(other.attention.output, nnx.state(one.attention.output))
    tokens = jnp.asarray(gpt.job("test").batch_at(0)["tokens"][:, :-1])
    logits_of = nnx.jit(gpt.GPT.__call__)
    found, wanted = logits_of(fused, tokens), logits_of(separate, tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_heads_are_a_dimension_of_the_kernels(model: gpt.GPT) -> None:
    attention = model.blocks[0].attention
    assert attention.query.kernel.shape == (48, 8, 6)
    assert attention.output.kernel.shape == (8, 6, 48)


def test_a_tied_head_is_the_embedding() -> None:
    model = make(replace(TEST, tied_embedding=True))
    assert not hasattr(model, "head")
    hidden = jax.random.normal(jax.random.key(0), (2, 3, TEST.embed))
    table = model.tokens.embedding[...]
    expected = jnp.einsum("bse,ve->bsv", hidden, table)
    np.testing.assert_allclose(model.logits(hidden), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.relaxed_promotion  # Optax promotes its counts
def test_layers_that_share_a_block_are_planned_with_it_once() -> None:
    """The model is two blocks, each applied twice in a row."""
    config = replace(TEST, layers=4, shared_layers=2)
    model = make(config)
    x = jax.random.normal(jax.random.key(0), (1, 3, TEST.embed))

    @nnx.jit
    def both(model: gpt.GPT, x: Any) -> Any:
        one, other = model.blocks
        return model._run_blocks(x), other(other(one(one(x))))

    np.testing.assert_allclose(*both(model, x), rtol=1e-4, atol=1e-5)
    job = gpt.job("test", layers=4, shared_layers=2, annotated=False)
    shared = jobs.abstract_model(job)
    plan = jobs.make_plan(job, shared, jobs.first_batch(job, None), cluster("cpu:1"))
    _, params, _ = nnx.split(make(replace(TEST, layers=2)), nnx.Param, ...)
    assert plan.memory.params_bytes == sum(x.nbytes for x in jax.tree.leaves(params))
    for wrong in (0, 3):
        with pytest.raises(
            wh.WhaleError, match=f"shared_layers is {wrong} with layers=4"
        ):
            make(replace(config, shared_layers=wrong))


def test_no_position_sees_a_later_token(model: gpt.GPT) -> None:
    tokens = jnp.asarray(gpt.job("test").batch_at(0)["tokens"][:2, :-1])
    changed = tokens.at[:, 10].set((tokens[:, 10] + 1) % TEST.vocab)
    logits_of = nnx.jit(gpt.GPT.__call__)
    before, after = logits_of(model, tokens), logits_of(model, changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    for later in range(10, 24):
        assert (before[:, later] != after[:, later]).any()


def test_the_mean_runs_over_real_tokens(model: gpt.GPT) -> None:
    job = gpt.job("test", padded=True)
    batch = job.batch_at(0)
    result = nnx.jit(job.loss_fn)(model, batch)
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


def test_dropout_lives_in_the_model(model: gpt.GPT) -> None:
    dropped = make(replace(TEST, dropout_rate=0.3, layers=1))
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState))
    assert jax.tree.leaves(nnx.state(dropped, nnx.RngState))
    tokens = jnp.zeros((2, 24), jnp.int32)
    logits_of = nnx.jit(gpt.GPT.__call__)
    assert (logits_of(dropped, tokens) != logits_of(dropped, tokens)).any()
    dropped.eval()
    one, other = logits_of(dropped, tokens), logits_of(dropped, tokens)
    np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_stacked_layers_drop_differently() -> None:
    config = replace(TEST, dropout_rate=0.3, scan_layers=True, remat=True)
    model = make(config)
    keys = nnx.state(model.blocks, nnx.RngKey)
    for key in jax.tree.leaves(keys):
        data = jax.random.key_data(key)
        assert data.shape[0] == TEST.layers
        assert (data[0] != data[1]).any()
    logits_of = nnx.jit(gpt.GPT.__call__)
    tokens = jnp.zeros((2, 24), jnp.int32)
    assert (logits_of(model, tokens) != logits_of(model, tokens)).any()


@pytest.mark.full
def test_first_loss_of_the_quick_start_is_about_five_and_a_half() -> None:
    job = gpt.job(layers=1)
    made = make(replace(gpt.SIZES["quick"], layers=1))
    loss = nnx.jit(job.loss_fn)(made, job.batch_at(0, 8))
    assert 5.4 < float(loss) < 5.8
