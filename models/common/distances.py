"""Distances between two positions of a sequence, in buckets.

Each short distance has its own bucket, and long distances share buckets.
"""

from __future__ import annotations

import jax.numpy as jnp

from whalejax.meshes import WhaleError
from whalejax.models.common.layers import Array


def bucket_starts(buckets: int, longest_distance: int) -> tuple[int, ...]:
    """Returns the smallest distance of every bucket after the first, for one direction.

    The first half of the buckets have one distance each; the others grow geometrically
    up to the longest distance (Raffel et al., 2020, section 2.1).

    Args:
        buckets: Number of buckets for one direction.
        longest_distance: Distance up to which buckets grow. The last bucket also has
            all larger distances. It must exceed half the number of buckets.

    Raises:
        WhaleError: The longest distance is too short for the number of buckets.

    >>> bucket_starts(8, 64)
    (1, 2, 3, 4, 8, 16, 32)
    """
    exact = buckets // 2
    if longest_distance <= exact:
        raise WhaleError(
            f"longest_distance is {longest_distance}; expected more than {exact}, "
            f"which is half of the {buckets} buckets of one direction. Give a longer "
            "distance or fewer buckets."
        )
    wide = buckets - exact
    # Integer powers are exact; a rounded logarithm could move an edge.
    starts = (
        next(
            distance
            for distance in range(exact, longest_distance + 1)
            if distance**wide >= longest_distance**step * exact ** (wide - step)
        )
        for step in range(1, wide)
    )
    return (*range(1, exact + 1), *starts)


def relative_buckets(
    queries: int,
    keys: int,
    *,
    buckets: int,
    longest_distance: int,
    bidirectional: bool,
) -> Array:
    """Returns the bucket of each pair of positions.

    Args:
        queries: Number of query positions.
        keys: Number of key positions.
        buckets: Number of buckets.
        longest_distance: See ``bucket_starts``.
        bidirectional: Whether keys after the query have the upper half of the buckets.
            Otherwise they have the bucket of distance 0.

    Returns:
        ``int32[queries, keys]``, from 0 to ``buckets - 1``.

    >>> options = {"buckets": 8, "longest_distance": 16}
    >>> relative_buckets(1, 4, bidirectional=True, **options).tolist()
    [[0, 5, 6, 6]]
    >>> relative_buckets(4, 1, bidirectional=False, **options)[:, 0].tolist()
    [0, 1, 2, 3]
    """
    looking = jnp.arange(queries, dtype=jnp.int32)[:, None]
    ahead = jnp.arange(keys, dtype=jnp.int32)[None, :] - looking
    one_way = buckets // 2 if bidirectional else buckets
    starts = jnp.asarray(bucket_starts(one_way, longest_distance), jnp.int32)
    distance = jnp.abs(ahead) if bidirectional else jnp.maximum(-ahead, 0)
    passed = distance[:, :, None] >= starts[None, None]
    result = jnp.sum(passed.astype(jnp.int32), axis=-1, dtype=jnp.int32)
    return jnp.where(ahead > 0, result + one_way, result) if bidirectional else result
