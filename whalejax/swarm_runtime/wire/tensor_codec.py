"""Encodes tensors for the wire: unchanged, or in 16 or 8 bits.

The tensors are activations and their gradients between stages, and gradients of weights
during their reduction over the peers of a stage. The sender stores the encoded form, so
that all readers of a tensor get the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from whalejax.swarm import quantize
from whalejax.wire.service import RefusedRequestError


_SHORT: Final = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}


def coded(arrays: Sequence[np.ndarray], wire: str) -> list[np.ndarray]:
    """Returns arrays in a wire format.

    Args:
        arrays: Finite arrays.
        wire: One of ``WIRES`` or ``SUM_WIRES``. Only floats of over 16 bits are
            encoded.
    """
    return [_coded(np.asarray(x), wire) for x in arrays]


def _coded(array: np.ndarray, wire: str) -> np.ndarray:
    if not _is_wide(array.dtype):
        return array
    if wire in _SHORT:
        with np.errstate(over="ignore"):  # Callers check for overflow.
            return array.astype(_SHORT[wire])
    if wire == "int8":
        return np.frombuffer(quantize.pack(quantize.quantize(array)), np.uint8)
    return array


def decoded(
    arrays: Sequence[np.ndarray], wanted: Sequence[Any], wire: str, whose: str
) -> list[np.ndarray]:
    """Returns decoded arrays, equal to the originals except for the coding error.

    Args:
        arrays: Received arrays.
        wanted: Expected shape and dtype of each.
        wire: One of ``WIRES`` or ``SUM_WIRES``.
        whose: Name of the peer that sent them.

    Raises:
        RefusedRequestError: Shapes or types differ, or values are not finite.
    """
    if len(arrays) != len(wanted):
        raise RefusedRequestError(
            "shape", f"{whose} sent {len(arrays)} arrays; expected {len(wanted)}", whose
        )
    result = [_decoded(x, w, wire, whose) for x, w in zip(arrays, wanted, strict=True)]
    check_finite(result, whose)
    return result


def _decoded(array: np.ndarray, wanted: Any, wire: str, whose: str) -> np.ndarray:
    shape, dtype = tuple(wanted.shape), np.dtype(wanted.dtype)
    sent, kind = shape, dtype
    if _is_wide(dtype) and wire in _SHORT:
        kind = _SHORT[wire]
    elif _is_wide(dtype) and wire == "int8":
        sent = (quantize.packed_bytes(int(np.prod(shape))),)
        kind = np.dtype(np.uint8)
    if array.shape != sent or array.dtype != kind:
        raise RefusedRequestError(
            "shape",
            f"{whose} sent {array.dtype}{list(array.shape)}; expected "
            f"{kind}{list(sent)} for {dtype}{list(shape)} over the wire {wire}",
            whose,
        )
    if kind == dtype:
        return array
    if wire in _SHORT:
        return array.astype(dtype)
    try:
        unpacked = quantize.unpack(array.data, shape)
    except ValueError as error:
        raise RefusedRequestError("not finite", f"{whose}: {error}", whose) from None
    return np.asarray(quantize.dequantize(unpacked)).astype(dtype)


def squared(arrays: Sequence[np.ndarray]) -> float:
    """Returns the sum of the squares of all values, in float64."""
    return sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays)


def check_finite(arrays: Sequence[np.ndarray], whose: str) -> None:
    """Refuses non-finite values.

    Args:
        arrays: Arrays of any dtype.
        whose: Name of the peer that made them.

    Raises:
        RefusedRequestError: An array has non-finite values.
    """
    for array in arrays:
        if array.dtype.kind in "iub":
            continue
        wrong = array.size - int(np.count_nonzero(np.isfinite(array)))
        if wrong:
            raise RefusedRequestError(
                "not finite",
                f"{whose} made {array.dtype}{list(array.shape)}, of which {wrong} of "
                f"{array.size} values are not finite",
                whose,
            )


def _is_wide(dtype: np.dtype[Any]) -> bool:
    """Returns whether a dtype is a float of over 16 bits; only these are encoded."""
    return dtype.kind == "f" and dtype.itemsize > 2
