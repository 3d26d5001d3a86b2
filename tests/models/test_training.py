"""Every model on one device: it learns, marks change nothing, types stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
import pytest

import whalejax.models as models


# What lets a dozen steps show that the loss falls.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt-test": {"warmup_steps": 1},
    "bert-test": {"learning_rate": 1e-2, "warmup_steps": 1},
    "resnet-test": {},
    "mlp-test": {"learning_rate": 1e-2},
    "moe-test": {"warmup_steps": 1, "learning_rate": 2e-3},
}
STEPS: Final = 12


@pytest.mark.relaxed_promotion  # optax promotes its step count
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
def test_all_in_float64(name: str, traced: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        jaxpr, shapes = traced(models.job(name, param_dtype="float64"))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {"float64"}
        assert set(_product_dtypes(jaxpr)) == {"float64"}


@pytest.mark.relaxed_promotion  # Flax promotes bfloat16 to float32 in its norms
@pytest.mark.parametrize("name", FAMILIES)
def test_products_follow_parameters_cast_to_bfloat16(
    name: str, traced: Callable[..., Any]
) -> None:
    jaxpr, (loss, _, _) = traced(models.job(name), cast_to="bfloat16")
    assert str(loss.dtype) == "float32"
    dtypes = _product_dtypes(jaxpr)
    # The router of a mixture scores in float32 on purpose: one product a layer, and
    # two more in its backward pass.
    assert dtypes.count("float32") == (2 * 3 if name == "moe-test" else 0)
    assert dtypes.count("bfloat16") > 0


def _product_dtypes(jaxpr: Any) -> list[str]:
    return [
        str(equation.outvars[0].aval.dtype)
        for equation in _equations(jaxpr.jaxpr)
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
