"""Layers that narrow the activations between two pipeline stages.

They reduce the values sent per token from ``width`` to ``width / factor``, which saves
time on slow links (SWARM, section 3.3). Their parameters are trained with the model.
Users add such a layer where a stage ends: ``compress`` belongs to this stage, and
``expand`` to the next stage.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.quantize import BLOCK, dequantize, quantize


class Bottleneck(nnx.Module):
    """LayerNorm, projection to ``width / factor``, LayerNorm, and projection back.

    The next stage computes the second projection.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> border = Bottleneck(64, 4, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 64))
    >>> border.compress(x).shape, border(x).shape
    ((2, 5, 16), (2, 5, 64))
    """

    def __init__(
        self, width: int, factor: int, *, eight_bit: bool = False, rngs: nnx.Rngs
    ) -> None:
        """Initialises the parameters.

        Args:
            width: Width of the model: number of values per token.
            factor: Factor by which the sent tensor is narrower; divides ``width``.
            eight_bit: Whether training rounds the sent tensor to blockwise int8. The
                derivative of the rounding is that of the identity.
            rngs: Random keys of the parameters.

        Raises:
            WhaleError: ``factor`` does not divide ``width``.
        """
        narrow = _narrow("Bottleneck", width, factor)
        self.eight_bit = eight_bit
        self.norm_before = nnx.LayerNorm(width, rngs=rngs)
        self.narrow = nnx.Linear(width, narrow, rngs=rngs)
        self.norm_after = nnx.LayerNorm(narrow, rngs=rngs)
        self.widen = nnx.Linear(narrow, width, rngs=rngs)

    def compress(self, x: jax.Array) -> jax.Array:
        """Compresses a tensor for sending: (…, width) to (…, width / factor)."""
        sent: jax.Array = self.norm_after(self.narrow(self.norm_before(x)))
        return sent

    def expand(self, sent: jax.Array) -> jax.Array:
        """Restores the width of a sent tensor: (…, width / factor) to (…, width)."""
        wide: jax.Array = self.widen(rounded(sent) if self.eight_bit else sent)
        return wide

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies ``compress`` and ``expand``."""
        return self.expand(self.compress(x))


class Maxout(nnx.Module):
    """LayerNorm, maximum over each ``factor`` values, LayerNorm, and a projection.

    The next stage computes the projection, so ``compress`` costs almost nothing.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> border = Maxout(64, 2, rngs=nnx.Rngs(0))
    >>> border.compress(jnp.ones((2, 5, 64))).shape
    (2, 5, 32)
    """

    def __init__(
        self, width: int, factor: int, *, eight_bit: bool = False, rngs: nnx.Rngs
    ) -> None:
        """Initialises the parameters.

        Args:
            width: Width of the model: number of values per token.
            factor: Number of values whose maximum is sent; divides ``width``.
            eight_bit: Whether the sent tensor is rounded to int8, as in ``Bottleneck``.
            rngs: Random keys of the parameters.

        Raises:
            WhaleError: ``factor`` does not divide ``width``.
        """
        narrow = _narrow("Maxout", width, factor)
        self.eight_bit, self.factor = eight_bit, factor
        self.norm_before = nnx.LayerNorm(width, rngs=rngs)
        self.norm_after = nnx.LayerNorm(narrow, rngs=rngs)
        self.widen = nnx.Linear(narrow, width, rngs=rngs)

    def compress(self, x: jax.Array) -> jax.Array:
        """Compresses a tensor for sending: (…, width) to (…, width / factor)."""
        groups = self.norm_before(x).reshape(*x.shape[:-1], -1, self.factor)
        sent: jax.Array = self.norm_after(groups.max(axis=-1))
        return sent

    def expand(self, sent: jax.Array) -> jax.Array:
        """Restores the width of a sent tensor: (…, width / factor) to (…, width)."""
        wide: jax.Array = self.widen(rounded(sent) if self.eight_bit else sent)
        return wide

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies ``compress`` and ``expand``."""
        return self.expand(self.compress(x))


def rounded(x: jax.Array, block: int = BLOCK) -> jax.Array:
    """Rounds a tensor to blockwise int8, with the derivative of the identity.

    Args:
        x: Floating-point array of any shape.
        block: Number of values that share a scale.
    """
    sent: Any = dequantize(quantize(x, block)).astype(x.dtype)
    same: jax.Array = x + jax.lax.stop_gradient(sent - x)
    return same


def _narrow(layer: str, width: int, factor: int) -> int:
    if factor < 1 or width < 1 or width % factor:
        raise WhaleError(
            f"{layer}: factor {factor} does not divide the width {width}; give one "
            "that does, such as 2 or 4"
        )
    return width // factor
