"""Common parts of networks over volumes: layer types, and checks of extents."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

import whalejax as wh


def layer_options(
    dtype: str | None, param_dtype: str, rngs: nnx.Rngs
) -> dict[str, Any]:
    """Returns the arguments that every layer of Flax NNX takes.

    Args:
        dtype: Compute dtype; None for the dtype of the parameters.
        param_dtype: Dtype of the parameters.
        rngs: Random keys of the parameters.
    """
    return {
        "dtype": None if dtype is None else jnp.dtype(dtype),
        "param_dtype": jnp.dtype(param_dtype),
        "rngs": rngs,
    }


def check_extent(extent: int, halvings: int, why: str) -> None:
    """Refuses a volume that cannot be halved often enough.

    Args:
        extent: Extent of the volume, in voxels.
        halvings: Number of halvings.
        why: Text for the error that says what halves the volume.

    Raises:
        WhaleError: The extent is not divisible by 2 to the power of ``halvings``.

    >>> check_extent(16, 2, "two poolings halve it")
    """
    parts = 2**halvings
    if extent < 1 or extent % parts:
        raise wh.WhaleError(
            f"extent is {extent!r}; expected a multiple of {parts}: {why}"
        )
