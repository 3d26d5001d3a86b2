"""Which reductions over the batch a part of the batch would compute differently."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.capture_zoo import (
    EMBED,
    MLP,
    captured,
    conv_batch,
    conv_loss,
    conv_net,
    linen_batch,
    linen_loss,
    linen_variables,
    mlp_batch,
    mlp_loss,
    mlp_params,
    transformer,
    transformer_batch,
    transformer_loss,
)
from whalejax.capture import batch_reductions


pytestmark = pytest.mark.relaxed_promotion


def found(loss: Any, model: Any = None, batch: Any = None) -> list[tuple[str, str]]:
    """(scope, what) of every reduction."""
    result = captured(
        mlp_params() if model is None else model,
        loss,
        mlp_batch() if batch is None else batch,
    )
    return [(r.scope, r.what) for r in batch_reductions(result)]


def hidden(params: Any, batch: Any) -> jax.Array:
    return jnp.square(batch["x"] @ params["up"]["w"])


def test_means_over_samples_are_harmless() -> None:
    assert found(mlp_loss) == []
    for form in ("unrolled", "scan"):
        assert found(transformer_loss, transformer(form), transformer_batch()) == []


def test_linear_terms_and_metrics_are_harmless() -> None:
    def loss(params: Any, batch: Any) -> Any:
        out = hidden(params, batch)
        penalty = jnp.sqrt(jnp.sum(params["up"]["w"] ** 2))
        total = 2 * jnp.mean(out) - jnp.sum(out) / 3 + penalty
        return total, {"spread": jnp.std(out), "squared": jnp.mean(out) ** 2}

    assert found(loss) == []


def test_a_sum_over_samples_is_no_mean() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.square(hidden(params, batch) - 1).sum()

    def mean(params: Any, batch: Any) -> Any:
        return loss(params, batch) * (1 / batch["x"].shape[0])

    def weighted(params: Any, batch: Any) -> Any:
        return wh.WeightedLoss(loss(params, batch), batch["x"].shape[0])

    def counted(params: Any, batch: Any) -> Any:
        return loss(params, batch) / jnp.ones_like(batch["x"][:, 0]).sum()

    def guarded(params: Any, batch: Any) -> Any:
        number = (batch["x"][:, 0] > 0).sum().astype(jnp.float32)
        return jnp.where(number > 0, loss(params, batch) / number, 0.0)

    def shared(params: Any, batch: Any) -> Any:
        number = (batch["x"][:, 0] > 0).sum().astype(jnp.float32)
        each = jnp.square(hidden(params, batch) - 1)
        return jnp.sum(each * (jnp.ones_like(each) / jnp.maximum(number, 1)))

    assert found(loss) == [("", "sum")]
    assert found(mean) == found(weighted) == []
    for other in (counted, guarded, shared):
        assert ("", "sum") not in found(other)


def test_batch_normalisation_is_a_statistic() -> None:
    linen = found(linen_loss, linen_variables(), linen_batch())
    assert linen == [("LinenNet/BatchNorm_0", "statistic")]
    conv = found(conv_loss, conv_net(), conv_batch())
    assert conv == [("wh.replicate[]", "statistic")]


GUARDS: dict[str, Any] = {
    "maximum": lambda n: jnp.maximum(n, 1),
    "clip": lambda n: jnp.clip(n, 1, 1e9),
    "where": lambda n: jnp.where(n > 0, n, 1),
    "where zero": lambda n: jnp.where(n == 0, 1, n),
    "added": lambda n: n + 1e-6,
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_division_by_a_count_that_is_not_zero_is_a_weight(guard: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        valid = (batch["x"][:, 0] > 0).astype(jnp.float32)
        total = jnp.sum(hidden(params, batch).sum(-1) * valid)
        return total / GUARDS[guard](jnp.sum(valid))

    assert found(loss) == [("", "weight")]


INVERSES: dict[str, Any] = {
    "times the inverse": lambda each, ok, n: each.sum() * (1 / jnp.maximum(n, 1)),
    "of the samples": lambda each, ok, n: (each * (1 / jnp.maximum(n, 1))).sum(),
    "divided samples": lambda each, ok, n: jnp.sum(each / jnp.maximum(n, 1)),
    "in the mask": lambda each, ok, n: jnp.sum(each * (ok / n)),
    "in a product": lambda each, ok, n: jnp.dot(each, ok / n),
    "chosen inverse": lambda each, ok, n: each.sum() * jnp.where(n > 0, 1 / n, 0.0),
    "chosen mean": lambda each, ok, n: jnp.where(n > 0, each.sum() / n, 0.0),
    "safe and chosen": lambda each, ok, n: jnp.where(
        n > 0, each.sum() / jnp.where(n > 0, n, 1), 0.0
    ),
    "reciprocal": lambda each, ok, n: each.sum() * jnp.reciprocal(n),
    "power": lambda each, ok, n: each.sum() * n**-1,
    "scaled": lambda each, ok, n: 0.5 * each.sum() * (2 * (1 / n).astype(jnp.float32)),
    "mean of shares": lambda each, ok, n: jnp.mean(each * (ok / jnp.mean(ok))),
    "the inverse divided by": lambda each, ok, n: each.sum() / (1 / (1 / n)),
}


@pytest.mark.parametrize("form", INVERSES)
def test_a_mean_with_its_count_in_another_place_is_a_weight(form: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        valid = (batch["x"][:, 0] > 0).astype(jnp.float32)
        each = hidden(params, batch).sum(-1) * valid
        return INVERSES[form](each, valid, jnp.sum(valid))

    assert {what for _, what in found(loss)} == {"weight"}


NO_WEIGHTS: dict[str, Any] = {
    "inverse added": lambda each, n: each.mean() + 1 / n,
    "inverse bent": lambda each, n: each.sum() * jnp.log(1 / n),
    "square": lambda each, n: each.sum() * (1 / n) * (1 / n),
    "divided twice": lambda each, n: each.sum() / n / n,
    "by what is trained": lambda each, n: jnp.sum(each * (each / jnp.sum(each))),
    "samples off a share": lambda each, n: jnp.sum(jnp.abs(each / n - each.mean())),
    "of an inverse": lambda each, n: each.sum() * (1 / n) * (1 / (1 / n)),
    "shares bent": lambda each, n: jnp.sum((each / n) ** 2),
    "shares of shares": lambda each, n: jnp.sum((each / n) * (each / n)),
    "by the largest": lambda each, n: jnp.sum(each / jnp.max(each)),
    "by the deviation": lambda each, n: jnp.sum(each / jnp.std(each)),
    "largest share": lambda each, n: jnp.max(each / n),
    "times the count": lambda each, n: jnp.mean(each * n),
    "a mean off": lambda each, n: jnp.mean((each - each.sum() / n) ** 2),
    "chosen samples": lambda each, n: jnp.mean(jnp.where(n > 3, each, 0.0)),
}


@pytest.mark.parametrize("form", NO_WEIGHTS)
def test_what_no_weight_makes_right_is_none(form: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        valid = (batch["x"][:, 0] > 0).astype(jnp.float32)
        each = hidden(params, batch).sum(-1) * valid
        return NO_WEIGHTS[form](each, jnp.sum(valid))

    assert {what for _, what in found(loss)} & {"auxiliary", "statistic"}


def test_what_is_kept_from_zero_and_no_divisor_is_an_auxiliary_term() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.maximum(jnp.mean(hidden(params, batch)), 1.0)

    assert ("", "auxiliary") in found(loss)


def test_a_division_by_a_count_is_a_weight() -> None:
    def loss(params: Any, batch: Any) -> Any:
        valid = (batch["y"][:, 0] > 0).astype(jnp.float32)
        return jnp.sum(jnp.mean(hidden(params, batch), -1) * valid) / jnp.sum(valid)

    assert found(loss) == [("", "weight")]


def test_the_same_count_as_a_weighted_loss_is_harmless() -> None:
    def loss(params: Any, batch: Any) -> Any:
        valid = (batch["y"][:, 0] > 0).astype(jnp.float32)
        total = jnp.sum(jnp.mean(hidden(params, batch), -1) * valid)
        return wh.WeightedLoss(total, jnp.sum(valid))

    assert found(loss) == []


def test_a_balance_term_is_auxiliary() -> None:
    def loss(params: Any, batch: Any) -> Any:
        gates = jax.nn.softmax(hidden(params, batch))
        with jax.named_scope("balance"):
            share = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, -1), MLP), 0)
            term = jnp.sum(jnp.mean(gates, 0) * share)
        return jnp.mean(gates**2) + term

    assert found(loss) == [("balance", "auxiliary")]


@pytest.mark.parametrize("bend", [jnp.log, jnp.sqrt, lambda x: x * x, lambda x: 1 / x])
def test_a_bent_mean_is_auxiliary(bend: Any) -> None:
    assert found(lambda p, b: bend(jnp.mean(hidden(p, b)))) == [("", "auxiliary")]


def test_samples_against_samples_are_auxiliary() -> None:
    def loss(params: Any, batch: Any) -> Any:
        z = batch["x"] @ params["up"]["w"]
        return -jnp.mean(jax.nn.log_softmax(z @ z.T)[0])

    assert ("", "auxiliary") in found(loss)


def test_a_running_sum_over_samples_is_a_statistic() -> None:
    def loss(params: Any, batch: Any) -> Any:
        out = hidden(params, batch)
        place = jnp.cumsum(out > 1, axis=0)
        return jnp.mean(jnp.where(place < 3, out, 0))

    assert found(loss) == [("", "statistic")]


def test_the_batch_is_followed_through_reshapes() -> None:
    def loss(params: Any, batch: Any) -> Any:
        flat = batch["tokens"].reshape(-1, EMBED)
        centred = flat - jnp.mean(flat, 0)
        return jnp.mean(jnp.square(centred @ params["up"]["w"]))

    batch = {"tokens": jax.ShapeDtypeStruct((6, 10, EMBED), np.float32)}
    assert found(loss, batch=batch) == [("", "statistic")]


def test_a_statistic_of_each_sample_is_harmless() -> None:
    def loss(params: Any, batch: Any) -> Any:
        centred = batch["tokens"] - jnp.mean(batch["tokens"], 1, keepdims=True)
        return jnp.mean(jnp.square(centred @ params["up"]["w"]))

    batch = {"tokens": jax.ShapeDtypeStruct((6, 10, EMBED), np.float32)}
    assert found(loss, batch=batch) == []
