"""Makes values for the leaves of a reduced model and batch.

Values come from the user's arrays, with small changes so that none are zero or equal.
If the user gave only shapes, values are random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.adapters.leaves import is_key


MOST_VALUES: Final = 4096
"""Largest number of values of an array that the checking process gets."""


def sample(leaf: Any) -> np.ndarray | None:
    """Returns some of an array's values; None for keys and leaves without values.

    Args:
        leaf: Real or abstract leaf.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct) or is_key(leaf):
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return None
    size, shape = 1, np.shape(leaf)
    corner: list[slice] = []
    for extent in reversed(shape):
        taken = min(extent, max(1, MOST_VALUES // size))
        corner.append(slice(0, taken))
        size *= taken
    return np.asarray(leaf[tuple(reversed(corner))] if shape else leaf)


def weights(
    avals: Sequence[Any],
    samples: Sequence[np.ndarray | None],
    chance: np.random.Generator,
    *,
    trained: bool,
) -> list[Any]:
    """Returns values for a model's leaves.

    Args:
        avals: Shapes and dtypes of the leaves.
        samples: Some values of each of the user's leaves; None for an abstract leaf.
        chance: Random number generator.
        trained: Whether the leaves are parameters. The values of other leaves, such as
            variances, keep their signs.
    """
    pairs = zip(avals, samples, strict=True)
    return [_weight(aval, some, chance, trained) for aval, some in pairs]


def _weight(
    aval: Any, some: np.ndarray | None, chance: np.random.Generator, trained: bool
) -> Any:
    if is_key(aval):
        seeds = jnp.asarray(chance.integers(0, 2**31, max(1, aval.size)), jnp.uint32)
        impl = jax.random.key_impl(jax.random.key(0))
        keys = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(seeds)
        return keys.reshape(aval.shape)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        if some is None:
            return np.zeros(aval.shape, aval.dtype)
        return np.resize(some, aval.shape).astype(aval.dtype)
    noise = chance.standard_normal(aval.shape)
    if some is not None and some.size:
        values = np.resize(some.astype(np.float64), aval.shape) * (1 + 0.1 * noise)
        values = values + 0.02 * chance.standard_normal(aval.shape) * trained
    elif not trained:
        values = 0.5 + chance.random(aval.shape)
    elif len(aval.shape) < 2:
        values = 0.5 + 0.2 * noise
    else:
        values = noise / np.sqrt(np.prod(aval.shape[:-1]))
    return values.astype(aval.dtype)


def batch(
    avals: Sequence[Any],
    samples: Sequence[np.ndarray | None],
    bounds: Mapping[int, int],
    chance: np.random.Generator,
) -> list[Any]:
    """Returns values for a batch's leaves.

    Args:
        avals, samples, chance: Arguments of ``weights``, unchanged.
        bounds: Exclusive upper bound of integer leaves, by leaf number.
    """
    pairs = zip(avals, samples, strict=True)
    return [
        _batch_leaf(aval, some, bounds.get(number), chance)
        for number, (aval, some) in enumerate(pairs)
    ]


def _batch_leaf(
    aval: Any,
    some: np.ndarray | None,
    bound: int | None,
    chance: np.random.Generator,
) -> Any:
    if is_key(aval):
        return _weight(aval, None, chance, False)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        if some is not None and some.size:
            return _redrawn(some, aval, chance)
        return (0.1 + chance.random(aval.shape)).astype(aval.dtype)
    if some is not None:
        known: Any = some.ravel()
        known = known if bound is None else known[(known < bound) & (known >= 0)]
        few = bound is not None and len(np.unique(known)) < min(bound, 3)
        if known.size and not few:
            return np.asarray(chance.choice(known, aval.shape), aval.dtype)
    return chance.integers(0, bound or 2, aval.shape).astype(aval.dtype)


def _redrawn(some: np.ndarray, aval: Any, chance: np.random.Generator) -> np.ndarray:
    """Draws from the user's values; perturbs them unless there are only two."""
    drawn = np.asarray(chance.choice(some.ravel(), aval.shape), np.float64)
    if len(np.unique(some)) > 2:
        drawn = drawn * (1 + 0.1 * chance.standard_normal(aval.shape))
    return np.asarray(drawn, aval.dtype)
