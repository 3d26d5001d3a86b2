"""BERT: padding is unseen, the mean runs over hidden tokens, dropout has its key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
from whalejax.models import bert


TEST = bert.SIZES["test"]


@pytest.fixture(scope="module")
def variables() -> Any:
    return jax.jit(lambda key: bert.make_model(TEST, key))(
        jax.random.key(0, impl="rbg")
    )


def logits(variables: Any, batch: Any) -> np.ndarray[Any, Any]:
    apply = jax.jit(bert.Bert(TEST).apply)
    return np.asarray(apply(variables, batch["tokens"], batch["padding"]))


def test_padding_is_never_seen(variables: Any) -> None:
    batch = bert.masked_batch(TEST, 0, 4, seed=0)
    padding = batch["padding"]
    assert 0 < padding.sum() < padding.size
    changed = dict(batch)
    changed["tokens"] = np.where(padding, batch["tokens"], 7).astype(np.int32)
    assert (changed["tokens"] != batch["tokens"]).any()
    before, after = logits(variables, batch), logits(variables, changed)
    np.testing.assert_array_equal(before[padding], after[padding])
    assert (before[~padding] != after[~padding]).any()


def test_the_mean_runs_over_hidden_tokens(variables: Any) -> None:
    batch = bert.masked_batch(TEST, 0, 4, seed=0)
    loss_fn = jax.jit(bert.make_loss(TEST, deterministic=True))
    result = loss_fn(variables, batch, jax.random.key(0, impl="rbg"))
    assert isinstance(result, wh.WeightedLoss)
    scores = logits(variables, batch).astype(np.float64)
    nats = np.log(np.exp(scores).sum(-1))
    nats -= np.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    assert float(result.weight) == batch["predicted"].sum()
    np.testing.assert_allclose(
        float(result.total), nats[batch["predicted"]].sum(), rtol=1e-5
    )


def test_only_real_tokens_are_hidden() -> None:
    batch = bert.masked_batch(TEST, 3, 64, seed=0)
    assert not (batch["predicted"] & ~batch["padding"]).any()
    same = batch["tokens"] == batch["targets"]
    assert same[~batch["predicted"]].all()
    share = batch["predicted"][:, 1:].sum() / batch["padding"][:, 1:].sum()
    assert share == pytest.approx(0.15, abs=0.05)


def test_dropout_follows_its_key(variables: Any) -> None:
    batch = bert.masked_batch(TEST, 0, 4, seed=0)
    loss_fn = jax.jit(bert.make_loss(TEST))
    one, again = (
        loss_fn(variables, batch, jax.random.key(1, impl="rbg")) for _ in range(2)
    )
    other = loss_fn(variables, batch, jax.random.key(2, impl="rbg"))
    assert float(one.total) == float(again.total)
    assert float(one.total) != float(other.total)


def test_deterministic_ignores_the_key(variables: Any) -> None:
    batch = bert.masked_batch(TEST, 0, 4, seed=0)
    loss_fn = jax.jit(bert.make_loss(TEST, deterministic=True))
    one, other = (
        loss_fn(variables, batch, jax.random.key(i, impl="rbg")) for i in (1, 2)
    )
    assert float(one.total) == float(other.total)


def test_samples_drop_independently(variables: Any) -> None:
    """Two equal rows differ under dropout."""
    tokens = jnp.ones((2, TEST.sequence), jnp.int32)
    padding = jnp.ones((2, TEST.sequence), bool)
    found = jax.jit(
        lambda key: bert.Bert(TEST).apply(
            variables, tokens, padding, deterministic=False, rngs={"dropout": key}
        )
    )(jax.random.key(0, impl="rbg"))
    assert (found[0] != found[1]).any()


@pytest.mark.full
def test_logical_names_stand_on_the_kernels(variables: Any) -> None:
    config = replace(TEST, logical_names=True)
    boxed = jax.jit(lambda key: bert.make_model(config, key))(
        jax.random.key(0, impl="rbg")
    )
    specs = nn.get_partition_spec(boxed)["params"]
    layer = specs["layer_0"]
    assert tuple(specs["words"]["embedding"]) == ("vocab", "embed")
    assert tuple(layer["attention"]["query"]["kernel"]) == ("embed", "heads", "kv")
    assert tuple(layer["attention"]["out"]["kernel"]) == ("heads", "kv", "embed")
    assert tuple(layer["up"]["kernel"]) == ("embed", "mlp")
    assert tuple(layer["down"]["kernel"]) == ("mlp", "embed")
    plain = nn.meta.unbox(boxed)
    jax.tree.map(np.testing.assert_array_equal, plain, variables)
    batch = bert.masked_batch(TEST, 0, 2, seed=0)
    loss_fn = jax.jit(bert.make_loss(config, deterministic=True))
    named = loss_fn(boxed, batch, jax.random.key(0, impl="rbg"))
    unnamed = loss_fn(variables, batch, jax.random.key(0, impl="rbg"))
    assert float(named.total) == float(unnamed.total)
