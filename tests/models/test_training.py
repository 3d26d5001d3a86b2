"""Every model on one device: it learns, marks change nothing, types stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax.models as models


# The first loss of an untrained classifier is near the logarithm of its classes.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt-test": {"warmup_steps": 1},
    "bert-test": {"learning_rate": 1e-2, "warmup_steps": 1},
    "resnet-test": {},
    "mlp-test": {"learning_rate": 1e-2},
    "moe-test": {"warmup_steps": 1, "learning_rate": 2e-3},
}
STEPS: Final = 12


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_falls(name: str, on_one_device: Callable[..., Any]) -> None:
    job = models.job(name, **FAMILIES[name])
    losses = on_one_device(job).losses([job.batch_at(i % 2) for i in range(STEPS)])
    assert np.isfinite(losses).all()
    assert np.mean(losses[-2:]) < losses[0] - 0.1, losses


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_change_no_bit(name: str, on_one_device: Callable[..., Any]) -> None:
    marked, plain = (models.job(name, annotated=on) for on in (True, False))
    batch = plain.batch_at(0)
    expected_loss, expected = on_one_device(plain).loss_and_gradients(batch)
    loss, gradients = on_one_device(marked).loss_and_gradients(batch)
    assert np.isfinite(loss)
    assert loss == expected_loss
    assert len(gradients) == len(expected) > 0
    for found, wanted in zip(gradients, expected, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, wanted)


MARKS: Final = {
    "gpt-test": {"wh.replicate[]", "wh.split[]"},
    "bert-test": {"wh.replicate[]", "wh.split[]"},
    "resnet-test": {"wh.replicate[]", "wh.split[]"},
    "mlp-test": {"wh.replicate[]", "wh.split[]"},
    "moe-test": {"wh.split[axis=experts]"},
}


@pytest.mark.parametrize("name", MARKS)
def test_marks_are_where_the_configuration_says(
    name: str, on_one_device: Callable[..., Any]
) -> None:
    every = set().union(*MARKS.values())
    for annotated, expected in ((True, MARKS[name]), (False, set())):
        job = models.job(name, annotated=annotated)
        placed = on_one_device(job)
        lowered = jax.jit(placed.loss).lower(placed.params, job.batch_at(0))
        text = lowered.as_text(debug_info=True)
        assert {mark for mark in every if mark in text} == expected


@pytest.mark.relaxed_promotion  # Flax's norms compare float64 with float32
@pytest.mark.parametrize("name", FAMILIES)
def test_all_in_float64(name: str, on_one_device: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        job = models.job(name, param_dtype="float64")
        placed = on_one_device(job)
        assert {x.dtype for x in jax.tree.leaves(placed.params)} == {jnp.float64}
        traced = jax.make_jaxpr(jax.value_and_grad(placed.loss))(
            placed.params, job.batch_at(0)
        )
        assert {aval.dtype for aval in traced.out_avals} == {jnp.float64}
        narrow = [
            str(equation)
            for equation in traced.eqns
            if equation.primitive.name in ("dot_general", "conv_general_dilated")
            for out in equation.outvars
            if out.aval.dtype != jnp.float64
        ]
        assert not narrow


@pytest.mark.relaxed_promotion  # Flax promotes bfloat16 to float32 in its norms
@pytest.mark.parametrize("name", FAMILIES)
def test_products_follow_parameters_cast_to_bfloat16(
    name: str, on_one_device: Callable[..., Any]
) -> None:
    job = models.job(name)
    placed = on_one_device(job)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), placed.params)
    traced = jax.make_jaxpr(placed.loss)(cast, job.batch_at(0))
    assert traced.out_avals[0].dtype == jnp.float32
    wide, narrow = 0, 0
    for equation in _equations(traced.jaxpr):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            is_narrow = equation.outvars[0].aval.dtype == jnp.bfloat16
            narrow, wide = narrow + is_narrow, wide + (not is_narrow)
    # The router of a mixture scores in float32 on purpose: one product a layer.
    assert wide == (2 if name == "moe-test" else 0)
    assert narrow > 0


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
