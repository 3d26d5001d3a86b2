"""GNMT: it is what a loop over tokens computes; padding and later tokens are unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

import whalejax as wh
from whalejax.models import gnmt
from whalejax.models.common.recurrent import LSTM, AdditiveAttention


TEST = gnmt.SIZES["test"]
Floats = npt.NDArray[np.floating[Any]]
hidden_of = nnx.jit(gnmt.GNMT.hidden_states)


@pytest.fixture(scope="module")
def model() -> gnmt.GNMT:
    made: gnmt.GNMT = nnx.jit(lambda key: gnmt.make_model(TEST, key))(
        jax.random.key(0, impl="rbg")
    )
    return made


@pytest.fixture(scope="module")
def batch() -> Any:
    made = gnmt.translated_batch(TEST, 0, 4, seed=0)
    real = made["source_mask"].sum(1)
    assert 1 <= real.min() < real.max() < TEST.source_length
    return made


def hidden(model: gnmt.GNMT, batch: Any) -> Floats:
    source, real = jnp.asarray(batch["source"]), jnp.asarray(batch["source_mask"])
    return np.asarray(hidden_of(model, source, real, batch["target"][:, :-1]))


# Against loops over tokens, in NumPy and float64, one sequence at a time.


def array(variable: Any) -> Floats:
    return np.asarray(variable[...], np.float64)


def sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))


def recur(layer: LSTM, *inputs: Floats) -> Floats:
    """One LSTM over one sequence, its inputs side by side before one kernel."""
    kernel = np.concatenate([array(one.kernel) for one in layer.inputs])
    bias, recurrent = array(layer.inputs[0].bias), array(layer.recurrent.kernel)
    cell, shown = np.zeros(TEST.hidden), np.zeros(TEST.hidden)
    outputs = []
    for x in np.concatenate(inputs, axis=-1):
        gates = np.einsum("i,igh->gh", x, kernel) + bias
        taken, kept, offered, open_ = gates + np.einsum("i,igh->gh", shown, recurrent)
        cell = sigmoid(kept) * cell + sigmoid(taken) * np.tanh(offered)
        shown = sigmoid(open_) * np.tanh(cell)
        outputs.append(shown)
    return np.stack(outputs)


def read(attention: AdditiveAttention, asking: Floats, encoded: Floats) -> Floats:
    """What each target token reads of one source."""
    scorer = array(attention.scorer)
    scorer = float(array(attention.length)) * scorer / np.linalg.norm(scorer)
    keys = encoded @ array(attention.key.kernel)
    outputs = []
    for token in asking:
        query = token @ array(attention.query.kernel) + array(attention.query.bias)
        weights = np.exp(np.tanh(query + keys) @ scorer)
        outputs.append(weights / weights.sum() @ encoded)
    return np.stack(outputs)


def loop(model: gnmt.GNMT, source: Any, target: Any) -> Floats:
    """What the classifier sees for one pair of sequences without padding."""
    table, encoder, decoder = (
        array(model.tokens.embedding),
        model.encoder,
        model.decoder,
    )
    x = table[source]
    x = recur(
        encoder.upper[0],
        recur(encoder.forward, x),
        recur(encoder.backward, x[::-1])[::-1],
    )
    for layer in encoder.upper[1:]:
        x = recur(layer, x) + x
    y = recur(decoder.bottom, table[target])
    context = read(decoder.attention, y, x)
    y = recur(decoder.upper[0], y, context)
    for layer in decoder.upper[1:]:
        y = recur(layer, y, context) + y
    return y


@pytest.mark.full
def test_it_is_what_loops_over_the_real_tokens_compute(
    model: gnmt.GNMT, batch: Any
) -> None:
    found = hidden(model, batch)
    for row in range(2):
        source = batch["source"][row][batch["source_mask"][row]]
        expected = loop(model, source, batch["target"][row, :-1])
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-6)


# What cannot be seen.


def test_a_padded_source_token_changes_no_bit(model: gnmt.GNMT, batch: Any) -> None:
    other = np.where(batch["source_mask"], batch["source"], 7).astype(np.int32)
    assert (other != batch["source"]).any()
    before, after = hidden(model, batch), hidden(model, {**batch, "source": other})
    np.testing.assert_array_equal(before, after)


def test_a_real_source_token_changes_every_target_token(
    model: gnmt.GNMT, batch: Any
) -> None:
    other = batch["source"].copy()
    other[:, 0] = 7
    before, after = hidden(model, batch), hidden(model, {**batch, "source": other})
    assert (before != after).any(axis=-1).all()


def test_a_later_target_token_changes_no_earlier_one(
    model: gnmt.GNMT, batch: Any
) -> None:
    other = batch["target"].copy()
    other[:, 6:] = 7
    before, after = hidden(model, batch), hidden(model, {**batch, "target": other})
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(axis=-1).all()


def test_padded_targets_change_no_bit_of_the_loss(model: gnmt.GNMT, batch: Any) -> None:
    loss_fn = nnx.jit(gnmt.make_loss(TEST, deterministic=True))
    key = jax.random.key(0, impl="rbg")
    changed = {**batch, "target": batch["target"].copy()}
    changed["target"][:, 1:][~batch["target_mask"]] = 7
    assert (changed["target"] != batch["target"]).any()
    before, after = loss_fn(model, batch, key), loss_fn(model, changed, key)
    assert float(before.total) == float(after.total)
    assert float(before.weight) == float(after.weight) == batch["target_mask"].sum()


# The loss.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_mean_runs_over_real_targets(
    smoothing: float, model: gnmt.GNMT, batch: Any
) -> None:
    config = replace(TEST, label_smoothing=smoothing)
    loss_fn = nnx.jit(gnmt.make_loss(config, deterministic=True))
    result = loss_fn(model, batch, jax.random.key(0, impl="rbg"))
    assert isinstance(result, wh.WeightedLoss)
    scores = hidden(model, batch) @ array(model.classifier.kernel)
    scores += array(model.classifier.bias)
    nats = np.log(np.exp(scores).sum(-1, keepdims=True)) - scores
    wanted = np.full(scores.shape, smoothing / TEST.vocab)
    told = np.eye(TEST.vocab)[batch["target"][:, 1:]]
    wanted += (1.0 - smoothing) * told
    expected = (nats * wanted).sum(-1)[batch["target_mask"]].sum()
    np.testing.assert_allclose(float(result.total), expected, rtol=1e-5)


@pytest.mark.full
def test_dropout_follows_its_key(model: gnmt.GNMT, batch: Any) -> None:
    keys = [jax.random.key(seed, impl="rbg") for seed in (1, 1, 2)]
    for deterministic in (False, True):
        loss_fn = nnx.jit(gnmt.make_loss(TEST, deterministic=deterministic))
        one, again, other = (float(loss_fn(model, batch, key).total) for key in keys)
        assert one == again
        assert (one == other) == deterministic


# Batches and sizes.


def test_targets_are_translations_between_edges() -> None:
    batch = gnmt.translated_batch(TEST, 3, 32, seed=0)
    words = TEST.vocab - 1
    seen = set()
    for row in range(32):
        source = batch["source"][row][batch["source_mask"][row]]
        told = batch["target"][row, 1:][batch["target_mask"][row]]
        assert batch["target"][row, 0] == told[-1] == 0
        assert told[:-1].tolist() == [(7 * (w - 1) + 11) % words + 1 for w in source]
        assert source.min() > 0
        assert not batch["source"][row][~batch["source_mask"][row]].any()
        assert not batch["target"][row, 1 + len(told) :].any()
        seen.add(len(source))
    assert seen == set(range(1, TEST.target_length))


def lstm(hidden: int, *inputs: int) -> int:
    return 4 * hidden * (sum(inputs) + hidden + 1)


def closed_form(config: gnmt.GNMTConfig) -> int:
    width, upper = config.hidden, config.layers - 1
    encoder = 2 * lstm(width, config.embed) + lstm(width, width, width)
    encoder += (upper - 1) * lstm(width, width)
    decoder = lstm(width, config.embed) + upper * lstm(width, width, width)
    attention = 2 * width * width + 2 * width + 1
    return (
        config.vocab * config.embed
        + encoder
        + decoder
        + attention
        + (width + 1) * config.vocab
    )


def test_parameters_are_those_of_mlperf() -> None:
    base = gnmt.SIZES["base"]
    # MLPerf's model has 160,671,297, with a second bias in each of nine LSTMs.
    assert closed_form(base) == 160_671_297 - 9 * 4 * 1024
    for config in (base, TEST, replace(TEST, layers=2)):
        made = nnx.eval_shape(lambda c=config: gnmt.make_model(c, jax.random.key(0)))
        leaves = jax.tree.leaves(nnx.state(made, nnx.Param))
        assert sum(leaf.size for leaf in leaves) == closed_form(config)


def test_shapes_of_the_real_size() -> None:
    job = gnmt.job()
    batch = job.batch_at(0)
    made = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))
    assert made.encoder.upper[0].inputs[1].kernel.shape == (1024, 4, 1024)
    assert made.encoder.upper[0].recurrent.kernel.shape == (1024, 4, 1024)
    found = nnx.eval_shape(
        lambda model, batch: model(
            batch["source"], batch["source_mask"], batch["target"][:, :-1]
        ),
        made,
        batch,
    )
    assert found.shape == (128, 50, 32_320)


def test_one_layer_is_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        gnmt.job("test", layers=1)
    assert str(caught.value) == (
        "layers is 1; expected at least 2, since second layers join the directions of "
        "the encoder and read the decoder's attention"
    )
