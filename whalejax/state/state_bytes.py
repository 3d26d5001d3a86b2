"""States as bytes, for transfers between processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np


PIECE_BYTES: Final = 1 << 24
"""Maximum bytes of a state in one message."""


def packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the concatenated bytes of arrays."""
    flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]
    return np.concatenate(flat) if flat else np.zeros(0, np.uint8)


def unpacked(avals: Sequence[Any], data: np.ndarray) -> list[np.ndarray] | None:
    """Returns the arrays of ``packed`` bytes; None if the number of bytes differs.

    Args:
        avals: Arrays, real or abstract, with their shapes and dtypes.
        data: Bytes, which are not copied.
    """
    result, place = [], 0
    for aval in avals:
        dtype = np.dtype(aval.dtype)
        end = place + math.prod(aval.shape) * dtype.itemsize
        if end > data.size:
            return None
        result.append(data[place:end].view(dtype).reshape(aval.shape))
        place = end
    return result if place == data.size else None


def piece_count(size: int) -> int:
    """Returns the number of messages for a state of ``size`` bytes."""
    return max(1, -(-size // PIECE_BYTES))


def digest_of(arrays: Sequence[np.ndarray]) -> str:
    """Returns the SHA-256 of arrays, as hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
