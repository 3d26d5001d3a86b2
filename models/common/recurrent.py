"""Layers of recurrent translation: LSTMs over time, and additive attention."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from whalejax.models.common.layers import Array, widened


_GATES: Final = 4
# Uniform within 0.1 at width 1024, as in MLPerf, with the same variance of outputs at
# other widths.
_INIT_VARIANCE: Final = 1024 * 0.1**2 / 3


def linear_kinds(
    *, dtype: str | None, param_dtype: str, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Returns the arguments of a recurrent model's linear layers.

    Args:
        dtype: Computing type; None follows parameters and inputs.
        param_dtype: Type of the parameters.
        rngs: Random keys of the initial values.
    """
    return {
        "dtype": None if dtype is None else jnp.dtype(dtype),
        "param_dtype": jnp.dtype(param_dtype),
        "kernel_init": nnx.initializers.variance_scaling(
            _INIT_VARIANCE, "fan_in", "uniform"
        ),
        "rngs": rngs,
    }


class LSTM(nnx.Module):
    """A layer of LSTM cells over time.

    Kernels have the shape ``[inputs, 4, hidden]`` for four gates, so that width is a
    separate dimension. Computation that does not depend on the previous token runs for
    all tokens at once, before the loop.

    >>> kinds = {"dtype": None, "param_dtype": "float32", "rngs": nnx.Rngs(0)}
    >>> LSTM((3, 5), 8, **kinds)(jnp.ones((2, 6, 3)), jnp.ones((2, 6, 5))).shape
    (2, 6, 8)
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        hidden: int,
        *,
        dtype: str | None,
        param_dtype: str,
        rngs: nnx.Rngs,
    ) -> None:
        kinds = linear_kinds(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        gates = (_GATES, hidden)
        self.inputs = nnx.List(
            nnx.LinearGeneral(width, gates, use_bias=place == 0, **kinds)
            for place, width in enumerate(inputs)
        )
        self.recurrent = nnx.LinearGeneral(hidden, gates, use_bias=False, **kinds)

    def __call__(self, *inputs: Array, backward_over: Array | None = None) -> Array:
        """Runs the layer over time.

        Args:
            inputs: Arrays ``[batch, time, width]`` with the widths of the constructor.
            backward_over: ``bool[batch, time]``, true for real tokens, to run backward
                from the last real token; None to run forward.

        Returns:
            ``[batch, time, hidden]``.
        """
        products = [layer(x) for layer, x in zip(self.inputs, inputs, strict=True)]
        gates = jnp.swapaxes(functools.reduce(jnp.add, products), 0, 1)
        start = jnp.zeros_like(gates[0, :, 0])
        real = None if backward_over is None else jnp.swapaxes(backward_over, 0, 1)
        _, hidden = jax.lax.scan(
            self._advance, (start, start), (gates, real), reverse=real is not None
        )
        return jnp.swapaxes(hidden, 0, 1)

    def _advance(
        self, carry: tuple[Array, Array], now: tuple[Array, Array | None]
    ) -> tuple[tuple[Array, Array], Array]:
        (cell, hidden), (gates, real) = carry, now
        gates = gates + self.recurrent(hidden)
        taken, kept, offered, shown = (gates[:, gate] for gate in range(_GATES))
        next_cell = jax.nn.sigmoid(kept) * cell
        next_cell = next_cell + jax.nn.sigmoid(taken) * jnp.tanh(offered)
        next_hidden = jax.nn.sigmoid(shown) * jnp.tanh(next_cell)
        if real is not None:
            next_cell = jnp.where(real[:, None], next_cell, cell)
            next_hidden = jnp.where(real[:, None], next_hidden, hidden)
        return (next_cell, next_hidden), next_hidden


class AdditiveAttention(nnx.Module):
    """Attention with the scores ``v · tanh(query + key)``.

    Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and
    Translate" (2014), with a normalised ``v`` of learned length as in Salimans and
    Kingma, "Weight Normalization" (2016).
    """

    def __init__(
        self, width: int, *, dtype: str | None, param_dtype: str, rngs: nnx.Rngs
    ) -> None:
        kinds = linear_kinds(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = nnx.Linear(width, width, **kinds)
        self.key = nnx.Linear(width, width, use_bias=False, **kinds)
        self.scorer = nnx.Param(
            jax.random.normal(rngs.params(), (width,), kinds["param_dtype"])
        )
        self.length = nnx.Param(jnp.full((), width**-0.5, kinds["param_dtype"]))

    def __call__(self, asking: Array, encoded: Array, real: Array) -> Array:
        """Computes each target token's attention over the source.

        Args:
            asking: ``[batch, target, hidden]``.
            encoded: ``[batch, source, hidden]``.
            real: ``bool[batch, source]``, true for real tokens, at least one per
                sequence.

        Returns:
            ``[batch, target, hidden]``.
        """
        query, key = self.query(asking), self.key(encoded)
        energy = jnp.tanh(query[:, :, None] + key[:, None])
        scorer = widened(self.scorer[...])
        scorer = scorer * jax.lax.rsqrt(jnp.sum(scorer**2))
        scorer = (scorer * widened(self.length[...])).astype(energy.dtype)
        scores = widened(jnp.einsum("btsh,h->bts", energy, scorer))
        scores = jnp.where(real[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(encoded.dtype)
        return jnp.einsum("bts,bsh->bth", weights, encoded)
