"""Time and traffic of attention computed in blocks of scores.

Forward there are two products for each block, backward five: the recomputed scores, and
the cotangents of weights, values, queries and keys (Dao et al., "FlashAttention", 2022,
algorithm 4). The compiler makes a kernel of each product, so a block's scores pass
through memory between them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from whalejax.meshes.device_kinds import DeviceKind
from whalejax.planner.sharding.operation_rows import Product
from whalejax.planner.sharding.ring_rounds import busiest_share


AHEAD, BEHIND = 2, 5
"""Products of one block, forward and backward."""

_PASSES = 4, 9
"""Number of times that a block's scores are written or read, in float32."""

_KERNELS = 5, 11
"""Kernels for one block."""


_busiest = functools.cache(busiest_share)


def _block_shapes(product: Product, rows: Any, columns: Any) -> tuple[Any, Any, Any]:
    """Returns ``busiest_share`` on devices with ``rows`` rows each, in turn."""
    sizes = np.rint(product.m / np.asarray(rows)).astype(np.int64)
    sizes, across = np.broadcast_arrays(sizes, np.asarray(columns).astype(np.int64))
    block_shapes = [
        _busiest(product.m, int(number), int(size), causal=product.zigzag)
        for size, number in zip(sizes.ravel(), across.ravel(), strict=True)
    ]
    if not sizes.ndim:
        return block_shapes[0]
    height, width, share = np.array(block_shapes).reshape(*sizes.shape, 3).T
    return height.T, width.T, share.T


def block_seconds(
    local: tuple[Any, Any, Any, Any], product: Product, kind: DeviceKind
) -> tuple[Any, Any, Any]:
    """Returns the seconds of attention on one device, both passes, and kernels of both.

    Args:
        local: Rows, depth, columns and count of the product on one device; the columns
            are those of all devices. Arrays give arrays.
        product: Product, for its share and type.
        kind: Kind of device.
    """
    rows, depth, columns, count = local
    height, width, share = _block_shapes(product, rows, columns)
    if not product.zigzag:
        share = product.share
    blocks = rows / height * columns / width * share
    one = kind.matmul_seconds(product.dtype, height, depth, width, count=count) * blocks
    scores = count * height * width * blocks
    ahead, behind = (
        times * one + kind.elementwise_seconds(4 * scores * passes, scores)
        for times, passes in zip((AHEAD, BEHIND), _PASSES, strict=True)
    )
    if not (product.left_gradient or product.right_gradient):
        return ahead, 0.0, _KERNELS[0] * blocks
    return ahead, behind, sum(_KERNELS) * blocks
