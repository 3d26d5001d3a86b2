"""Blockwise int8: codes of -127 to 127, and one float32 scale per block.

A block is ``block`` consecutive values of the flattened tensor. Its scale is its
largest absolute value divided by 127, so the error of a value is at most 1/254 of that
largest value. A value takes 1 + 4/block bytes. The functions accept NumPy and JAX
arrays, including tracers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.meshes.errors import WhaleError


BLOCK: Final = 256
LEVELS: Final = 127
# A smaller scale has too few digits for this bound, and accelerators flush it to zero.
SMALLEST_SCALE: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A tensor in 8 bits.

    Attributes:
        codes: int8, of shape (blocks, block); padding of the last block is 0.
        scales: float32, of shape (blocks,).
        shape: Shape of the tensor.
    """

    codes: Any
    scales: Any
    shape: tuple[int, ...]


def quantize(values: Any, block: int = BLOCK) -> Quantized:
    """Returns a tensor in blockwise int8.

    Args:
        values: Floating-point array of any shape.
        block: Number of values per scale.

    Raises:
        WhaleError: ``block`` is below 1, or a value of a NumPy array is not finite.
            Tracers cannot be checked: a non-finite value makes its block NaN.

    Example:
        >>> import numpy as np
        >>> dequantize(quantize(np.float32([127.0, -63.6, 0.0]))).tolist()
        [127.0, -64.0, 0.0]
    """
    if block < 1:
        raise WhaleError(f"quantize: block is {block}; give at least 1 value a block")
    space = values.__array_namespace__()
    shape = tuple(values.shape)
    with np.errstate(over="ignore"):  # Values beyond float32 are refused below.
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
    """Returns the float32 tensor of codes and scales.

    Args:
        quantized: Codes and scales, in arrays of the result's library.
    """
    space = quantized.codes.__array_namespace__()
    values = quantized.codes.astype(space.float32) * quantized.scales[:, None]
    return values.reshape(-1)[: math.prod(quantized.shape)].reshape(quantized.shape)


def block_count(size: int, block: int = BLOCK) -> int:
    """Returns the number of blocks of a tensor."""
    return -(-size // block)


def packed_bytes(size: int, block: int = BLOCK) -> int:
    """Returns the number of bytes that ``pack`` returns for a tensor of some size."""
    return size + 4 * block_count(size, block)


def pack(quantized: Quantized) -> bytes:
    """Returns one buffer for the wire: scales as little-endian float32, then the codes.

    Codes that only pad the last block are omitted.

    Args:
        quantized: Codes and scales, as NumPy arrays.
    """
    codes = np.ascontiguousarray(quantized.codes).reshape(-1)
    size = math.prod(quantized.shape)
    scales = np.asarray(quantized.scales, "<f4")
    return scales.tobytes() + codes[:size].tobytes()


def unpack(
    buffer: bytes | bytearray | memoryview, shape: tuple[int, ...], block: int = BLOCK
) -> Quantized:
    """Reads a packed tensor from an untrusted sender.

    Args:
        buffer: Received bytes.
        shape: Expected shape of the tensor.
        block: Number of values per scale.

    Raises:
        WhaleError: The buffer has a wrong length, a scale that is not finite and
            positive, or a code of -128.
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
