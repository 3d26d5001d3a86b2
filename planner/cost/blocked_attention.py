"""Attention in blocks of scores: rounds in a ring of devices, and their time.

Queries stay on their device. Keys and values move to the next device in each round.
Each round computes the pairs of row and column blocks that no mask hides.

With a causal mask, a sequence of ``2n`` equal parts is dealt to ``n`` devices in
zig-zag order: device ``d`` has parts ``d`` and ``2n - 1 - d``. Without other masks, all
devices then compute equally many pairs in every round. Llama 3's context parallelism
uses this order (Llama Team, "The Llama 3 Herd of Models", 2024). The lowering runs
these tables. The cost model takes its counts from them, or from their closed form.

A block has two products in the forward pass and five in the backward pass (Dao et al.,
"FlashAttention", 2022, algorithm 4). The five are the recomputed scores, and the
cotangents of weights, values, queries and keys. The compiler makes a kernel of each
product, so a block's scores pass through memory between products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.device_kinds import DeviceKind
from whalejax.planner.model.score_mask import ScoreMask
from whalejax.planner.sharding.operation_rows import Product


BLOCK = 512
"""Largest number of rows and of columns of a block, if a useful size up to it divides
them. All scores of a block are in memory.
"""

Hidden = Callable[[int, int], np.ndarray]
"""Function from the numbers of row and column blocks to the blocks that a mask hides
entirely, as ``bool[rows, columns]``.
"""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Rounds of ring attention over some devices.

    Attributes:
        size: Number of devices.
        row_size, column_size: Number of rows, and of columns, of one block.
        rows, columns: Sequence indices of each device's blocks, in local order.
        zigzag: Whether blocks are in zig-zag order instead of the order of the
            sequence.
        seen: Whether each pair of blocks is computed, ``bool[rows, columns]``.
        counts: Number of pairs that each device computes, ``[device, round]``.
    """

    size: int
    row_size: int
    column_size: int
    rows: np.ndarray
    columns: np.ndarray
    zigzag: bool
    seen: np.ndarray
    counts: np.ndarray

    @functools.cached_property
    def pairs(self) -> np.ndarray:
        """Pairs of blocks that are computed, ``[device, round, pair, 4]``.

        The last dimension has the local indices of the row block and the column block,
        followed by their indices in the sequence. Rounds with fewer pairs are padded
        with 0.
        """
        most = max(1, self.counts.max())
        pairs = np.zeros((self.size, self.size, most, 4), dtype=np.int32)
        for device, step in np.ndindex(self.size, self.size):
            ours, theirs = self.rows[device], self.columns[(device - step) % self.size]
            a, b = np.nonzero(self.seen[np.ix_(ours, theirs)])
            pairs[device, step, : len(a)] = np.stack([a, b, ours[a], theirs[b]], axis=1)
        return pairs

    @property
    def share(self) -> float:
        """Sum over rounds of the most pairs of a device, over all pairs of its rows."""
        blocks = self.rows.shape[1] * self.columns.shape[1] * self.size
        return float(self.counts.max(axis=0).sum() / blocks)


def ring(num_rows: int, num_columns: int, size: int, hidden: Hidden) -> Ring:
    """Assigns pairs of an attention's blocks to devices and rounds.

    Args:
        num_rows, num_columns: Lengths of queries and of keys, divisible by ``size``.
        size: Number of devices.
        hidden: Function that returns the blocks that a mask hides.

    >>> causal = ring(16, 16, 2, lambda a, b: ~np.tri(a, b, dtype=bool))
    >>> causal.zigzag, causal.rows.tolist(), causal.counts.tolist()
    (True, [[0, 3], [1, 2]], [[3, 2], [3, 2]])
    """
    halves = 2 * size
    zigzag = size > 1 and num_rows == num_columns and num_rows % halves == 0
    zigzag = zigzag and bool(
        np.triu(hidden(halves, halves), 1).sum() * 2 == _off(halves)
    )
    parts = halves if zigzag else size
    row_size, column_size = _block(num_rows // parts), _block(num_columns // parts)
    rows = _blocks_by_device(num_rows // row_size, size, zigzag)
    columns = _blocks_by_device(num_columns // column_size, size, zigzag)
    seen = ~hidden(rows.size, columns.size)
    dealt = seen[np.ix_(rows.ravel(), columns.ravel())]
    shared = dealt.reshape(*rows.shape, *columns.shape).sum(axis=(1, 3))
    device, step = np.ix_(range(size), range(size))
    return Ring(
        size=size,
        row_size=row_size,
        column_size=column_size,
        rows=rows,
        columns=columns,
        zigzag=zigzag,
        seen=seen,
        counts=shared[device, (device - step) % size],
    )


def busiest_share(
    num_rows: int, num_columns: int, size: int, mask: ScoreMask | None
) -> tuple[int, int, float]:
    """Returns the two block sizes, and ``Ring.share``.

    Tables of a ring are made only for masks that hide more or less than later columns.

    Args:
        num_rows, num_columns, size: Arguments of ``ring``.
        mask: Hidden parts of the scores; None if every block is computed.

    >>> mask = ScoreMask.of(~np.tri(16, dtype=bool), square=True)
    >>> busiest_share(16, 16, 2, mask)
    (4, 4, 0.625)
    """
    if mask is not None and not mask.triangular:
        result = ring(num_rows, num_columns, size, mask.hidden_blocks)
        return result.row_size, result.column_size, result.share
    zigzag = is_zigzag(num_rows, size, mask)
    parts = 2 * size if zigzag else size
    height, width = _block(num_rows // parts), _block(num_columns // parts)
    if mask is None:
        return height, width, 1.0
    # In zig-zag order a device computes half of all scores, and the hidden half of each
    # block on the diagonal. In sequence order, the last device computes all columns up
    # to its own rows.
    above = 0.5 if zigzag else 1 - 0.5 / size
    return height, width, above + height / (2 * num_rows)


def is_zigzag(num_rows: int, size: Any, mask: ScoreMask | None) -> Any:
    """Returns whether a ring has its blocks in zig-zag order.

    Args:
        num_rows: Length of queries.
        size: Number of devices, or an array of numbers.
        mask: Hidden parts of the scores; None if every block is computed.

    >>> mask = ScoreMask.of(~np.tri(2, dtype=bool), square=True)
    >>> is_zigzag(8, 2, mask), is_zigzag(6, 2, mask), is_zigzag(8, 2, None)
    (True, False, False)
    """
    if mask is None or not mask.causal:
        return False
    return (size > 1) & (num_rows % (2 * size) == 0)


def _off(count: int) -> int:
    return count * (count - 1)


_SHORT, _LONGEST = 64, 8192
"""Smallest useful block size, and the longest part that can be a single block."""


def _block(length: int) -> int:
    """Returns the size of the largest block that divides a length.

    A length of at most ``_LONGEST`` without a useful block size is one block.

    >>> [_block(n) for n in (4096, 12, 577)]
    [512, 12, 577]
    """
    block = next(n for n in range(min(length, BLOCK), 0, -1) if length % n == 0)
    return length if block < _SHORT and length <= _LONGEST else block


def _blocks_by_device(count: int, size: int, zigzag: bool) -> np.ndarray:
    if not zigzag:
        return np.arange(count).reshape(size, -1)
    parts = np.arange(count).reshape(2 * size, -1)
    return np.stack(
        [np.concatenate([parts[d], parts[2 * size - 1 - d]]) for d in range(size)]
    )


_AHEAD, _BEHIND = (1, 1), (3, 2)
"""Products of one block in each pass: those that are as deep as keys (scores, and the
cotangents of queries and keys) or as wide as values (results, and the cotangents of
weights and values).
"""

_PASSES = 4, 9
"""Number of times that the float32 scores of a block are written or read."""

_KERNELS = 5, 11
"""Number of kernels for one block."""


_busiest = functools.cache(busiest_share)


def _block_shapes(product: Product, rows: Any, columns: Any) -> tuple[Any, Any, Any]:
    """Returns ``busiest_share`` for each number of rows on a device, and of columns."""
    sizes = np.rint(product.m / np.asarray(rows)).astype(np.int64)
    sizes, across = np.broadcast_arrays(sizes, np.asarray(columns).astype(np.int64))
    block_shapes = [
        _busiest(product.m, int(number), int(size), product.mask)
        for size, number in zip(sizes.ravel(), across.ravel(), strict=True)
    ]
    if not sizes.ndim:
        return block_shapes[0]
    height, width, share = np.array(block_shapes).reshape(*sizes.shape, 3).T
    return height.T, width.T, share.T


def block_products(
    local: tuple[Any, Any, Any, Any], product: Product
) -> tuple[Any, Any]:
    """Returns the number of products of the size ``local`` in each pass.

    Hidden blocks are left out of products, and values may be narrower than keys. So the
    numbers may be fractions.

    Args:
        local: Rows, depth, columns and count of the product on one device, as numbers
            or arrays. The columns are those of all devices.
        product: Product, with its mask.
    """
    rows, _, columns, _ = local
    _, _, share = _block_shapes(product, rows, columns)
    trained = product.left_gradient or product.right_gradient
    ahead, behind = (
        share * (deep + wide * product.width / product.k)
        for deep, wide in (_AHEAD, _BEHIND)
    )
    return ahead, behind * trained


def block_seconds(
    local: tuple[Any, Any, Any, Any], product: Product, kind: DeviceKind
) -> tuple[Any, Any, Any]:
    """Returns the seconds of attention in each pass, and the kernels of both passes.

    Args:
        local: Rows, depth, columns and count of the product on one device, as numbers
            or arrays. The columns are those of all devices.
        product: Product, with its mask and dtype.
        kind: Device kind.
    """
    rows, depth, columns, count = local
    height, width, share = _block_shapes(product, rows, columns)
    blocks = rows / height * columns / width * share
    deep, wide = (
        kind.matmul_seconds(product.dtype, height, inside, width, count=count) * blocks
        for inside in (depth, product.width)
    )
    scores = count * height * width * blocks
    ahead, behind = (
        numbers[0] * deep
        + numbers[1] * wide
        + kind.elementwise_seconds(4 * scores * passes, scores)
        for numbers, passes in zip((_AHEAD, _BEHIND), _PASSES, strict=True)
    )
    if not (product.left_gradient or product.right_gradient):
        return ahead, 0.0, _KERNELS[0] * blocks
    return ahead, behind, sum(_KERNELS) * blocks
