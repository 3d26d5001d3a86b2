"""Refuses ids of 64 bits that JAX would change, as it narrows them by default."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from whalejax.meshes.checks import Arguments


def check_32_bits(batch: Any) -> None:
    """Refuses integers that JAX would change to 32 bits.

    Args:
        batch: Batch with values; leaves on devices are already narrow.

    Raises:
        WhaleError: An integer does not fit in 32 bits, and ``jax_enable_x64`` is off.
    """
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return
    problems = Arguments("batch")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, np.ndarray) or leaf.dtype not in (np.int64, np.uint64):
            continue
        narrow = np.iinfo(np.int32 if leaf.dtype == np.int64 else np.uint32)
        least, most = int(leaf.min(initial=0)), int(leaf.max(initial=0))
        if least < narrow.min or most > narrow.max:
            value = most if most > narrow.max else least
            problems.add(
                f"{jax.tree_util.keystr(path)} has the value {value}, which does not "
                "fit in 32 bits, so JAX would use another value; hash it into the "
                "rows of its table, or set jax_enable_x64"
            )
    problems.raise_if_any()
