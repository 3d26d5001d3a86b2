"""Sums of gradients by messages: in one order, of the arrays that were agreed on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.whalejax.keys import KEY
from whalejax.elastic.gradient_reduction.message_all_reduce import (
    SMALL_BYTES,
    check_arrays,
    exchanged,
)
from whalejax.elastic.member_connections import Peers
from whalejax.meshes.errors import WhaleError
from whalejax.wire.run_messages import GradientPart


def look() -> None:
    """What a member does while it waits."""


F32, F64 = np.dtype("f4"), np.dtype("f8")


@pytest.mark.parametrize("size", [3, SMALL_BYTES // 4])
def test_all_members_come_to_the_same_sums(size: int) -> None:
    """Small buffers in one round, larger ones in two; each to the last bit."""
    drawn = np.random.default_rng(0)
    shapes: list[tuple[int, Any]] = [(size, F32), (2, F64)]
    one, other = Peers(KEY), Peers(KEY)
    members = [("a", one.host, one.port), ("b", other.host, other.port)]
    buffers = {
        node: [drawn.normal(size=n).astype(dtype) for n, dtype in shapes]
        for node in [(0, 2), (2, 3), (3, 4)]
    }
    parts = {
        "a": {(0, 2): buffers[0, 2], (3, 4): buffers[3, 4]},
        "b": {(2, 3): buffers[2, 3]},
    }
    found: dict[str, Any] = {}

    def run(peers: Peers, name: str) -> None:
        peers.connect(1, name, members, look)
        found[name] = exchanged(
            peers, ["a", "b"], name, 7, parts[name], shapes, 4, look
        )

    thread = threading.Thread(target=run, args=(one, "a"))
    thread.start()
    run(other, "b")
    thread.join()
    expected = [
        x + (y + z)
        for x, y, z in zip(buffers[0, 2], buffers[2, 3], buffers[3, 4], strict=True)
    ]
    for name in ("a", "b"):
        sums, came = found[name]
        assert came == {"a": [(0, 2), (3, 4)], "b": [(2, 3)]}
        for there, wanted in zip(sums, expected, strict=True):
            assert there.dtype == wanted.dtype
            np.testing.assert_array_equal(there, wanted)
    one.close()
    other.close()


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (np.zeros(4, "f4"),),
        (np.zeros(6, "f8"),),
        (np.zeros((2, 3), "f4"),),
        (np.zeros(6, "f4"), np.zeros(0, "f4")),
    ],
    ids=str,
)
def test_other_arrays_than_agreed_on_are_refused(arrays: Any) -> None:
    said = GradientPart(generation=0, step=0, nodes=[], arrays=arrays)
    with pytest.raises(
        WhaleError, match=r"b sent . arrays for part \(.*\); expected 1 \(float32\[6\]"
    ):
        check_arrays(said, [(6, F32)], "b")
    good = GradientPart(generation=0, step=0, nodes=[], arrays=(np.ones(6, "f4"),))
    check_arrays(good, [(6, F32)], "b")
