"""Every model on one device: it learns, marks change nothing, types stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
import pytest
from flax import nnx

import whalejax.models as models


# What lets a dozen steps show that the loss falls.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt-test": {"warmup_steps": 1},
    "bert-test": {"learning_rate": 1e-2, "warmup_steps": 1},
    "resnet-test": {},
    "mlp-test": {"learning_rate": 1e-2},
    "moe-test": {"warmup_steps": 1, "learning_rate": 2e-3},
    "gnmt-test": {"warmup_steps": 1, "learning_rate": 1e-2},
    "vgg-test": {},
    "t5-test": {"learning_rate": 5e-2},
    "m6-test": {"learning_rate": 5e-2},
}
# One layer compiles in half the time of two, and two in that of three.
SHALLOW: Final[dict[str, dict[str, Any]]] = {
    **{name: {} for name in FAMILIES},
    **{
        name: {"layers": 1}
        for name in ("gpt-test", "bert-test", "moe-test", "m6-test", "t5-test")
    },
    "gnmt-test": {"layers": 2},
}
STEPS: Final = 12
SLOW: Final = ("m6-test", "t5-test")


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion  # optax promotes its step count
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in SLOW else [])
        for name in FAMILIES
    ],
)
def test_the_loss_falls(name: str, on_one_device: Callable[..., Any]) -> None:
    job = models.job(name, **FAMILIES[name])
    batches = [job.batch_at(i % 2) for i in range(STEPS)]
    losses = on_one_device(name, annotated=False, **SHALLOW[name]).losses(
        batches, job.optimizer
    )
    assert np.isfinite(losses).all()
    assert np.mean(losses[-2:]) < losses[0] - 0.1, losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_marks_change_no_bit(name: str, on_one_device: Callable[..., Any]) -> None:
    batch = models.job(name).batch_at(0)
    plain = on_one_device(name, annotated=False, **SHALLOW[name])
    marked = on_one_device(name, annotated=True, **SHALLOW[name])
    expected_loss, expected = plain.loss_and_gradients(batch)
    loss, gradients = marked.loss_and_gradients(batch)
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
    "gnmt-test": {"wh.replicate[]", "wh.split[]"},
    "vgg-test": {"wh.replicate[]", "wh.split[]"},
    "t5-test": {"wh.replicate[]", "wh.split[]"},
    "m6-test": {"wh.replicate[]", "wh.split[]"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MARKS)
def test_marks_are_where_the_configuration_says(
    name: str, differentiated: Callable[..., Any]
) -> None:
    every = set().union(*MARKS.values())
    for annotated, expected in ((True, MARKS[name]), (False, set())):
        whole, arguments = differentiated(models.job(name, annotated=annotated))
        text = _lowered_text(whole, arguments)
        assert {mark for mark in every if mark in text} == expected


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion  # Flax's norms compare float64 with float32
@pytest.mark.parametrize("name", FAMILIES)
def test_all_in_float64(name: str, differentiated: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        whole, arguments = differentiated(models.job(name, param_dtype="float64"))
        jaxpr, shapes = jax.make_jaxpr(whole, return_shape=True)(*arguments)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {"float64"}
        assert set(_product_dtypes(jaxpr)) == {"float64"}


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion  # Flax promotes bfloat16 to float32 in its norms
@pytest.mark.parametrize("name", FAMILIES)
def test_products_follow_parameters_cast_to_bfloat16(
    name: str, differentiated: Callable[..., Any]
) -> None:
    whole, arguments = differentiated(models.job(name), cast_to="bfloat16")
    jaxpr, (loss, _, _) = jax.make_jaxpr(whole, return_shape=True)(*arguments)
    assert str(loss.dtype) == "float32"
    dtypes = _product_dtypes(jaxpr)
    # The router of a mixture scores in float32 on purpose: one product a layer, and
    # two more in its backward pass. Both choices count in it who came before.
    assert dtypes.count("float32") == (2 * (3 + 2) if name == "moe-test" else 0)
    assert dtypes.count("bfloat16") > 0


def _lowered_text(whole: Callable[..., Any], arguments: tuple[Any, Any]) -> str:
    """The lowered loss, with the names of its scopes."""
    model, batch = arguments
    leaves, tree = jax.tree.flatten(nnx.split(model) if _is_nnx(model) else model)

    def of_leaves(leaves: list[Any], batch: Any) -> Any:
        given = jax.tree.unflatten(tree, leaves)
        made = nnx.merge(*given, copy=True) if _is_nnx(model) else given
        return whole(made, batch)[0]

    return jax.jit(of_leaves).lower(leaves, batch).as_text(debug_info=True)


def _is_nnx(model: Any) -> bool:
    return isinstance(model, nnx.Module)


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
