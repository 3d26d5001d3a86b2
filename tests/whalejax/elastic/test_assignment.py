"""Every micro-batch is taken once, and sums do not depend on who took it."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.membership.assignment import (
    Node,
    assign_micro_batches,
    check_tiles,
    cover,
    halves,
    is_node,
    ranks,
    repaired,
    shares,
    total,
)
from whalejax.meshes.errors import WhaleError


NAMES = ["a", "b", "c", "d", "e"]


def every_node(node: Node) -> set[Node]:
    if node[1] - node[0] == 1:
        return {node}
    return {node}.union(*map(every_node, halves(node)))


def order(node: Node) -> str:
    if node[1] - node[0] == 1:
        return str(node[0])
    left, right = halves(node)
    return f"({order(left)} {order(right)})"


@given(st.integers(1, 40), st.data())
def test_a_cover_holds_what_is_wanted_once(count: int, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, count - 1)))
    nodes = cover(wanted, count)
    assert sorted(n for node in nodes for n in range(*node)) == sorted(wanted)
    assert all(is_node(node, count) for node in nodes)


@given(st.integers(1, 24))
def test_a_node_is_what_halving_comes_to(count: int) -> None:
    nodes = every_node((0, count))
    for first in range(-1, count + 2):
        for end in range(-1, count + 2):
            assert is_node((first, end), count) == ((first, end) in nodes)


@given(
    st.integers(1, 40),
    st.lists(st.sampled_from([0.0, 1.0, 1.1, 3.0]), min_size=1, max_size=5),
)
def test_sums_are_of_one_order_whoever_takes_part(
    count: int, seconds: list[float]
) -> None:
    names = NAMES[: len(seconds)]
    found = assign_micro_batches(names, dict(zip(names, seconds, strict=True)), count)
    parts = {node: order(node) for nodes in found.values() for node in nodes}
    check_tiles([n for nodes in found.values() for n in nodes], count)
    assert total(parts, count, lambda x, y: f"({x} {y})") == order((0, count))


@given(st.integers(1, 24), st.integers(1, 4), st.data())
def test_a_repaired_step_takes_every_micro_batch_once(
    count: int, size: int, data: st.DataObject
) -> None:
    nodes = sorted(every_node((0, count)))
    names = NAMES[:size]
    # Also what overlaps, or is held by who is gone.
    held = {
        name: data.draw(st.lists(st.sampled_from(nodes), max_size=4))
        for name in NAMES[: size + 1]
    }
    found = repaired(names, {}, held, count)
    check_tiles([n for nodes in found.values() for n in nodes], count)
    assert found.keys() == set(names)


def test_what_was_done_is_not_done_again() -> None:
    held = {"a": [(0, 2)], "b": [(2, 4)], "c": [(4, 5)]}
    found = repaired(["a", "b"], {}, held, 8)
    own = {name: {n for node in found[name] for n in range(*node)} for name in found}
    assert own["a"] >= {0, 1} and own["b"] >= {2, 3}
    assert len(own["a"]) == len(own["b"]) == 4


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 10))
def test_shares_are_the_best_there_are(seconds: list[float], count: int) -> None:
    found = shares(seconds, count)
    assert sum(found) == count
    if max(seconds) < 1.25 * min(seconds):
        assert max(found) - min(found) <= 1
        return

    @functools.cache
    def best(left: int, number: int) -> float:
        if number == len(seconds) - 1:
            return left * seconds[number]
        return min(
            max(k * seconds[number], best(left - k, number + 1))
            for k in range(left + 1)
        )

    slowest = max(k * s for k, s in zip(found, seconds, strict=True))
    assert slowest == pytest.approx(best(count, 0))


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(WhaleError, match=r"lack \[3\] and hold \[0\] twice"):
        check_tiles([(0, 1), (0, 2), (2, 3)], 4)
    with pytest.raises(WhaleError, match=r"are no subtrees in \[\(1, 3\)\]"):
        check_tiles([(0, 1), (1, 3), (3, 4)], 4)
    with pytest.raises(WhaleError, match="lacks micro-batch 1 of 2"):
        total({(0, 1): 1}, 2, lambda x, y: x + y)


@given(st.permutations(NAMES), st.sets(st.sampled_from([*NAMES, "x", "y"]), min_size=1))
def test_who_stays_keeps_its_rank(before: list[str], present: set[str]) -> None:
    found = ranks(before[:3], sorted(present))
    assert sorted(found) == sorted(present)
    for rank, name in enumerate(before[:3]):
        if name in present and rank < len(present):
            assert found[rank] == name
