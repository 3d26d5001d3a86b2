"""Who computes which block of scores: every visible one once, and no others."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.planner.cost.blocked_attention import (
    BLOCK,
    busiest_share,
    is_zigzag,
    ring,
)
from whalejax.planner.model.score_mask import ScoreMask


def _later(rows: int, columns: int) -> np.ndarray:
    return ~np.tri(rows, columns, dtype=bool)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_visible_block_is_computed_once(size: int, each: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    density = draw.random()

    def hidden(rows: int, columns: int) -> np.ndarray:
        return np.random.default_rng(seed).random((rows, columns)) < density

    found = ring(size * each, size * each, size, hidden)
    shape = found.rows.size, found.columns.size
    computed: Counter[tuple[int, int]] = Counter()
    for device in range(size):
        for step in range(size):
            sender = (device - step) % size
            for a, b, row, column in found.pairs[device, step][
                : found.counts[device, step]
            ]:
                assert found.rows[device, a] == row
                assert found.columns[sender, b] == column
                computed[int(row), int(column)] += 1
    visible = zip(*np.nonzero(~hidden(*shape)), strict=True)
    assert computed == Counter((int(a), int(b)) for a, b in visible)
    assert sorted(found.rows.flat) == list(range(shape[0]))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_causal_mask_is_dealt_out_evenly(size: int) -> None:
    found = ring(64 * size, 64 * size, size, _later)
    assert found.zigzag
    assert (found.counts == found.counts[:1]).all(), "devices differ"
    assert (found.counts[:, 1:] == 2).all(), "rounds differ"
    # In its own order the last device would compute everything.
    plain = ring(64 * size + size, 64 * size + size, size, _later)
    assert not plain.zigzag and plain.counts[-1].sum() == size
    assert found.share == (2 * size + 1) / (4 * size) < plain.share == 1.0


def test_blocks_divide_and_are_no_longer_than_allowed() -> None:
    found = ring(12 * 1000, 12 * 1000, 3, lambda a, b: np.zeros((a, b), bool))
    assert found.row_size == 500 <= BLOCK and 4000 % found.row_size == 0
    assert found.counts.tolist() == [[64] * 3] * 3 and found.share == 1.0


def test_rows_and_columns_may_differ_in_number() -> None:
    found = ring(8, 24, 2, lambda a, b: np.zeros((a, b), bool))
    assert (found.row_size, found.column_size) == (4, 12) and not found.zigzag


@given(
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 64, 96, 512, 520]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_the_busiest_share_is_that_of_the_tables(
    size: int, each: int, wider: int, causal: bool
) -> None:
    rows, columns = size * each, size * each * (1 if causal else wider)

    def hidden(above: int, across: int) -> np.ndarray:
        return _later(above, across) & causal

    mask = ScoreMask.of(_later(2, 2), square=True) if causal else None
    assert mask is None or mask.triangular
    found = ring(rows, columns, size, hidden)
    assert is_zigzag(rows, size, mask) == found.zigzag
    height, width, share = busiest_share(rows, columns, size, mask)
    assert (height, width) == (found.row_size, found.column_size)
    assert share == pytest.approx(found.share, rel=1e-12)


@given(
    st.sampled_from([4, 8, 12, 16]),
    st.integers(0, 8),
    st.booleans(),
    st.integers(1, 24),
    st.integers(1, 24),
)
def test_blocks_without_a_visible_part_are_hidden(
    count: int, width: int, past: bool, rows: int, columns: int
) -> None:
    row, column = np.indices((count, count))
    seen = (row - column <= width) & (column - row <= (0 if past else width))
    mask = ScoreMask.of(~seen, square=True)
    assert mask.causal == bool(not seen[column > row].any())
    # Cells that parts and blocks both consist of.
    cells = np.kron(seen, np.ones((rows, columns), bool))
    blocks = cells.reshape(rows, count, columns, count).any(axis=(1, 3))
    hidden = mask.hidden_blocks(rows, columns)
    assert not (hidden & blocks).any()
    if count % rows == 0 and count % columns == 0:
        assert (hidden == ~blocks).all()


def test_a_window_has_fewer_blocks_than_its_triangle() -> None:
    row, column = np.indices((16, 16))
    near = (row >= column) & (row - column <= 2)
    mask = ScoreMask.of(~near, square=True)
    assert mask.causal and not mask.triangular
    # Of 4 x 4 blocks of 512, the diagonal and the blocks beside it.
    assert busiest_share(2048, 2048, 1, mask) == (512, 512, 7 / 16)
    triangle = ScoreMask.of(_later(16, 16), square=True)
    assert busiest_share(2048, 2048, 1, triangle) == (512, 512, 10 / 16)
