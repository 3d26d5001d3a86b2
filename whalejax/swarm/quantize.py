"""Blockwise int8: a tensor as codes of -127 to 127 and one float32 scale a block.

A block is ``block`` consecutive values of the flattened tensor, and its scale is its
largest absolute value over 127, so a value is off by at most 1/254 of the largest of
its block. It takes 1 + 4/block bytes a value. The same functions take NumPy's arrays
and JAX's, traced ones included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.meshes.errors import WhaleError


BLOCK: Final = 256
LEVELS: Final = 127
# Below it, a scale has fewer digits than the bound needs; accelerators make it zero.
SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)
# Of a scale and of a product, in float32, beside the half level.
ROUNDING: Final = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A tensor in 8 bits.

    Attributes:
        codes: int8, of shape (blocks, block); what pads the last block is 0.
        scales: float32, of shape (blocks,).
        shape: Shape of the tensor.
    """

    codes: Any
    scales: Any
    shape: tuple[int, ...]


def quantize(values: Any, block: int = BLOCK) -> Quantized:
    """A tensor in blockwise int8.

    Args:
        values: Floats of any shape.
        block: Values a scale is for.

    Raises:
        WhaleError: A value of a NumPy array is not finite. A traced array cannot be
            looked at: there, what is not finite makes its whole block NaN.

    Example:
        >>> import numpy as np
        >>> dequantize(quantize(np.float32([127.0, -63.6, 0.0]))).tolist()
        [127.0, -64.0, 0.0]
    """
    if block < 1:
        raise WhaleError(f"quantize: block is {block}; give at least 1 value a block")
    space = values.__array_namespace__()
    shape = tuple(values.shape)
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        flat = values.astype(space.float32).reshape(-1)
    if isinstance(flat, np.ndarray) and not np.isfinite(flat).all():
        wrong = int(flat.size - np.isfinite(flat).sum())
        raise WhaleError(
            f"quantize: {wrong} of {flat.size} values of a tensor of shape {shape} are "
            "not finite; int8 has no code for them. The sender's loss or gradients "
            "have overflowed: lower its learning rate or loss scale"
        )
    blocks = block_count(flat.size, block)
    padded = space.pad(flat, (0, blocks * block - flat.size)).reshape(blocks, block)
    largest = space.max(space.abs(padded), axis=1, initial=0.0)
    scales = space.maximum(
        largest / space.float32(LEVELS), space.float32(SMALLEST_SCALE)
    )
    codes = space.clip(space.round(padded / scales[:, None]), -LEVELS, LEVELS)
    return Quantized(codes=codes.astype(space.int8), scales=scales, shape=shape)


def dequantize(quantized: Quantized) -> Any:
    """The float32 tensor that codes and scales stand for.

    Args:
        quantized: Codes and scales, in arrays of the library that the tensor is wanted
            in.
    """
    space = quantized.codes.__array_namespace__()
    values = quantized.codes.astype(space.float32) * quantized.scales[:, None]
    return values.reshape(-1)[: math.prod(quantized.shape)].reshape(quantized.shape)


def error_bound(quantized: Quantized) -> Any:
    """The most that any value of a block may be off, of shape (blocks,)."""
    return quantized.scales * (0.5 + LEVELS * ROUNDING)


def block_count(size: int, block: int = BLOCK) -> int:
    """Blocks of a tensor of so many values."""
    return -(-size // block)


def packed_bytes(size: int, block: int = BLOCK) -> int:
    """Bytes of a tensor of so many values, as ``pack`` makes them."""
    return size + 4 * block_count(size, block)


def pack(quantized: Quantized) -> bytes:
    """One buffer for the wire: scales as little-endian float32, then the codes.

    Codes that only pad the last block are left out.

    Args:
        quantized: Codes and scales, in NumPy's arrays.
    """
    codes = np.ascontiguousarray(quantized.codes).reshape(-1)
    size = math.prod(quantized.shape)
    scales = np.asarray(quantized.scales, "<f4")
    return scales.tobytes() + codes[:size].tobytes()


def unpack(
    buffer: bytes | bytearray | memoryview, shape: tuple[int, ...], block: int = BLOCK
) -> Quantized:
    """Reads a packed tensor from a sender that is not trusted.

    Args:
        buffer: Buffer of the wire.
        shape: Shape that the tensor must have.
        block: Values a scale is for.

    Raises:
        WhaleError: Another length, a scale that is not finite or not positive, or a
            code of -128, which no sender makes.
    """
    size = math.prod(shape)
    blocks, expected = block_count(size, block), packed_bytes(size, block)
    given = memoryview(buffer).nbytes
    if given != expected:
        raise WhaleError(
            f"an int8 tensor of shape {shape} in blocks of {block} has {expected} "
            f"bytes; {given} were given. Both ends need the same plan"
        )
    scales = np.frombuffer(buffer, "<f4", blocks).astype(np.float32)
    codes = np.zeros(blocks * block, np.int8)
    codes[:size] = np.frombuffer(buffer, np.int8, size, offset=4 * blocks)
    if not (np.isfinite(scales) & (scales > 0)).all() or (codes == -128).any():
        raise WhaleError(
            f"an int8 tensor of shape {shape} has scales that are not finite and "
            "positive, or codes below -127: it was damaged, or not made by this codec"
        )
    return Quantized(codes=codes.reshape(blocks, block), scales=scales, shape=shape)
