"""Values that lose their last tokens, carried on at full length: same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_sequence_whole import (
    BATCH,
    CONTEXT,
    SEQ,
    VOCAB,
    attend,
    embedded,
    parameters,
    planned,
)
from whalejax._compat import bind
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.jaxpr import rebuild
from whalejax.planner.model.analysis import gathered_bytes


Array = jax.Array


def logits_of(params: Any, tokens: Array) -> Array:
    return attend(params, embedded(params, tokens)) @ params["words"].T


def by_label(params: Any, tokens: Array) -> Array:
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, tokens)[:, :-1], tokens[:, 1:]
    )
    return jnp.mean(each)


def by_start_and_length(params: Any, tokens: Array) -> Array:
    each = optax.softmax_cross_entropy_with_integer_labels(
        jax.lax.dynamic_slice_in_dim(logits_of(params, tokens), 0, SEQ - 1, 1),
        jax.lax.dynamic_slice(tokens, (0, 1), (BATCH, SEQ - 1)),
    )
    return jnp.mean(each)


def by_one_hot(params: Any, tokens: Array) -> Array:
    likely = jax.nn.log_softmax(logits_of(params, tokens)[..., :-1, :])
    right = jax.nn.one_hot(tokens[..., 1:], VOCAB, dtype=likely.dtype)
    return -jnp.mean(jnp.sum(right * likely, axis=-1))


def of_real_tokens(params: Any, tokens: Array) -> Array:
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, tokens)[:, :-1], tokens[:, 1:]
    )
    real = (tokens[:, 1:] > 2).astype(each.dtype)
    return jnp.sum(each * real) / jnp.maximum(jnp.sum(real), 1)


def cut_before_the_product(params: Any, tokens: Array) -> Array:
    x = attend(params, embedded(params, tokens))[:, :-1]
    best = jnp.max(x @ params["words"].T, axis=1)
    return jnp.mean(jnp.square(best))


def without_a_slope_at_zero(params: Any, tokens: Array) -> Array:
    """Of what was cut off, zero, the root has an infinite derivative."""
    x = attend(params, embedded(params, tokens))[:, :-1]
    before = jnp.sqrt(jnp.sum(jnp.square(x * params["begin"][None, None]), axis=-1))
    behind = jnp.sqrt(jnp.sum(jnp.square(x @ params["words"].T), axis=-1))
    return jnp.mean(before) + jnp.mean(behind)


LOSSES: Final[tuple[Callable[[Any, Array], Array], ...]] = (
    by_label,
    by_start_and_length,
    by_one_hot,
    of_real_tokens,
    cut_before_the_product,
    without_a_slope_at_zero,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_program_gives_the_same_loss_and_gradients(
    loss: Callable[[Any, Array], Array],
) -> None:
    with jax.enable_x64(True):
        first = jax.jit(parameters)()
        tokens: Any = np.random.default_rng(0).integers(
            0, VOCAB, (BATCH, SEQ), np.int32
        )
        found = capture(adapt(first, loss), tokens)
        assert gathered_bytes(found.graph) < gathered_bytes(
            found.reader.read(_as_written(loss))[0]
        )

        def program(params: Any) -> Array:
            leaves = [*jax.tree.leaves(params), tokens]
            return rebuild.run(found.jaxpr, leaves, bind)[0]

        got, want = (
            jax.jit(jax.value_and_grad(f))(first)
            for f in (program, lambda params: loss(params, tokens))
        )
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def _as_written(loss: Callable[[Any, Array], Array]) -> Any:
    def flat(*leaves: Any) -> tuple[Array, Array]:
        *params, tokens = leaves
        tree = jax.tree.structure(jax.eval_shape(parameters))
        return loss(tree.unflatten(params), tokens), jnp.ones(())

    avals = jax.tree.leaves(jax.eval_shape(parameters))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), np.int32)
    return jax.make_jaxpr(flat)(*avals, tokens)


@pytest.mark.parametrize("loss", [by_label, by_start_and_length])
def test_logits_of_all_but_the_last_token_are_made_in_parts(
    loss: Callable[[Any, Array], Array],
) -> None:
    plan = planned(loss, loss_chunks=2, **CONTEXT)
    assert plan.loss_chunks == 2
    gathered = sum(c.payload_bytes for c in plan.collectives if c.what == "border")
    assert gathered < BATCH * SEQ * VOCAB * 4, "no logits among them"


def test_a_mean_over_tokens_stays_one() -> None:
    first = jax.eval_shape(parameters)
    tokens = jax.ShapeDtypeStruct((2 * BATCH, SEQ), np.int32)
    found = capture(adapt(first, by_label), tokens, num_micro_batches=2)
    assert found.independence(BATCH, 2 * BATCH, None).proven
    assert isinstance(planned(by_label, num_micro_batches=2), wh.Plan)
