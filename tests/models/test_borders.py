"""Bottleneck and maxout: shapes, gradients through what is sent, and eight bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from whalejax.meshes.errors import WhaleError
from whalejax.models.borders import Bottleneck, Maxout, rounded


LAYERS = (Bottleneck, Maxout)
pytestmark = pytest.mark.relaxed_promotion


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (3, 5, 16))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("factor", [2, 4])
def test_less_is_sent_and_the_width_comes_back(
    layer: type[Bottleneck | Maxout], factor: int
) -> None:
    border = layer(16, factor, rngs=nnx.Rngs(0))
    sent = border.compress(inputs())
    assert sent.shape == (3, 5, 16 // factor)
    assert border.expand(sent).shape == (3, 5, 16)
    assert (border(inputs()) == border.expand(sent)).all()


def test_maxout_sends_the_largest_of_each_group() -> None:
    border = Maxout(16, 4, rngs=nnx.Rngs(0))
    normal = np.asarray(border.norm_before(inputs())).reshape(3, 5, 4, 4)
    expected = border.norm_after(jnp.asarray(normal.max(-1)))
    assert np.allclose(border.compress(inputs()), expected, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layer", LAYERS)
def test_all_parameters_are_trained_through_eight_bits(
    layer: type[Bottleneck | Maxout],
) -> None:
    border = layer(16, 2, eight_bit=True, rngs=nnx.Rngs(0))

    def loss(border: Bottleneck | Maxout) -> jax.Array:
        return (border(inputs()) ** 2).mean()

    gradients = jax.tree.leaves(nnx.grad(loss)(border))
    assert gradients and all(np.abs(g).max() > 0 for g in gradients)


def test_eight_bits_are_close_and_their_derivative_is_one() -> None:
    x = inputs()
    assert 0 < np.abs(rounded(x) - x).max() <= np.abs(x).max() / 250
    assert (jax.grad(lambda x: rounded(x).sum())(x) == 1).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_factor_must_divide_the_width(layer: type[Bottleneck | Maxout]) -> None:
    with pytest.raises(WhaleError, match="factor 3 does not divide the width 16; give"):
        layer(16, 3, rngs=nnx.Rngs(0))
