"""Rows of one process: which updates they have, and what a snapshot brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from whalejax.sections.snapshots import read_snapshot, write_snapshot
from whalejax.sections.sparse_rows import (
    MissingIdsError,
    SparseRows,
    WrongVersionError,
)
from whalejax.tables.layout import WidthLayout
from whalejax.tables.sparse_optimizers import sparse_optimizer


ROWS, WIDTH = 5, 16
IDS: Final = (np.array([[0], [3], [3]], np.int32),)


def make_rows(staleness: int) -> SparseRows:
    """One table, looked up by one id a sample; a gradient of 1 takes 1 from a row."""

    def column(value: int) -> np.ndarray:
        return np.full((1, 1), value, np.int32)

    layout = WidthLayout(
        width=WIDTH,
        rows=ROWS,
        slots=1,
        source=column(0),
        modulus=column(1),
        residue=column(0),
        low=column(0),
        high=column(ROWS),
        base=column(0),
        slot=column(0),
        offset=0,
        first_id=0,
    )
    optimizer = sparse_optimizer("sgd", 1.0)
    rows = SparseRows({WIDTH: layout}, optimizer, np.float32, staleness)
    rows.begin(0, 0)
    return rows


def ones() -> tuple[np.ndarray]:
    return (np.ones((3, WIDTH), np.float32),)


def counts(rows: SparseRows) -> list[float]:
    return [-float(x) for x in rows.read(WIDTH, "", 0, ROWS)[:, 0]]


def test_an_update_that_comes_twice_is_applied_once() -> None:
    rows = make_rows(0)
    rows.look_up(0, IDS)
    for _ in range(2):
        rows.update(0, ones(), None, received=1)
    assert rows.version == 1 and counts(rows) == [1, 0, 0, 2, 0]


def test_updates_wait_for_lookups_that_may_not_see_them() -> None:
    rows = make_rows(1)
    rows.look_up(0, IDS)
    rows.update(0, ones(), None, received=1)
    assert rows.version == 0  # Step 1 reads the rows of step 0.
    assert rows.look_up(1, IDS).version == 0
    rows.update(1, ones(), None, received=2)
    assert rows.version == 1
    assert rows.look_up(2, IDS).version == 1
    assert rows.look_up(2, IDS).version == 1  # Asked again, the same.


def test_updates_are_applied_in_order_whatever_comes_first() -> None:
    rows = make_rows(0)
    rows.update(1, ones(), IDS, received=2)
    assert rows.version == 0
    rows.update(0, ones(), IDS, received=2)
    assert rows.version == 2 and counts(rows) == [2, 0, 0, 4, 0]


def test_what_is_missing_is_said() -> None:
    rows = make_rows(0)
    with pytest.raises(MissingIdsError, match="step 0 was not looked up here"):
        rows.update(0, ones(), None, received=1)
    with pytest.raises(WrongVersionError, match="reads rows of version 2, and these"):
        rows.look_up(2, IDS)
    rows.update(0, ones(), IDS, received=1)
    with pytest.raises(WrongVersionError, match="reads rows of version 0, and these"):
        rows.look_up(0, IDS)
    with pytest.raises(WrongVersionError, match="version 3 are wanted"):
        rows.commit(3, is_fresh=False)


def test_the_newest_whole_snapshot_is_read(tmp_path: Path) -> None:
    rows = make_rows(0)
    write_snapshot(tmp_path, rows.copy())
    first = next(tmp_path.iterdir())
    kept = first.read_bytes()
    rows.update(0, ones(), IDS, received=1)
    write_snapshot(tmp_path, rows.copy())
    (second,) = tmp_path.iterdir()  # The older one is removed.
    other = make_rows(0)
    found: Any = read_snapshot(tmp_path)
    other.load(found)
    assert other.version == 1 and counts(other) == [1, 0, 0, 2, 0]
    first.write_bytes(kept)
    second.write_bytes(second.read_bytes()[:-50])  # As a full disk leaves it.
    found = read_snapshot(tmp_path)
    assert int(found["version"]) == 0
    second.unlink()
    first.unlink()
    assert read_snapshot(tmp_path) is None
