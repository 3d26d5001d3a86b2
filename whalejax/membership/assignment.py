"""Assigns micro-batches to members, and fixes the order in which gradients are summed.

Sums of floating-point numbers depend on their order. A binary tree over the indices of
the micro-batches fixes the order. A member sums complete subtrees, and the sums of
several members are added at the upper nodes. So a step's sum is bitwise equal for any
division of the micro-batches among members.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from whalejax.meshes.errors import WhaleError


T = TypeVar("T")
Node = tuple[int, int]
"""A subtree: the indices of its first micro-batch and of the one after its last."""


def halves(node: Node) -> tuple[Node, Node]:
    """Returns the two subtrees of a node that has more than one micro-batch.

    >>> halves((0, 6)), halves((4, 6))
    (((0, 4), (4, 6)), ((4, 5), (5, 6)))
    """
    first, end = node
    middle = first + (1 << ((end - first - 1).bit_length() - 1))
    return (first, middle), (middle, end)


def is_node(node: Node, count: int) -> bool:
    """Whether ``node`` is a subtree of the tree over ``count`` micro-batches.

    >>> is_node((2, 4), 8), is_node((1, 3), 8)
    (True, False)
    """
    at = (0, count)
    if not 0 <= node[0] < node[1] <= count:
        return False
    while at != node:
        if at[1] - at[0] == 1:
            return False
        left, right = halves(at)
        at = left if node[1] <= left[1] else right
        if not (at[0] <= node[0] and node[1] <= at[1]):
            return False
    return True


def cover(numbers: Collection[int], count: int) -> list[Node]:
    """Returns the fewest subtrees that together hold exactly these micro-batches.

    >>> cover({3, 4, 5}, 8), cover(range(6), 6)
    ([(3, 4), (4, 6)], [(0, 6)])
    """
    wanted = frozenset(numbers)

    def covered_nodes(node: Node) -> list[Node]:
        several = range(*node)
        if wanted.issuperset(several):
            return [node]
        if wanted.isdisjoint(several):
            return []
        left, right = halves(node)
        return covered_nodes(left) + covered_nodes(right)

    return covered_nodes((0, count)) if count else []


def check_tiles(nodes: Collection[Node], count: int) -> None:
    """Refuses parts of a sum that do not hold each micro-batch exactly once.

    Raises:
        WhaleError: Micro-batches are missing or duplicate, or parts are not subtrees.
    """
    strange = [node for node in nodes if not is_node(node, count)]
    seen = sorted(n for node in nodes if node not in strange for n in range(*node))
    missing = sorted(set(range(count)) - set(seen))
    doubled = sorted({a for a, b in zip(seen, seen[1:], strict=False) if a == b})
    problems = [
        text
        for is_wrong, text in (
            (missing, f"lack {missing}"),
            (doubled, f"hold {doubled} twice"),
            (strange, f"are no subtrees in {strange}"),
        )
        if is_wrong
    ]
    if problems:
        raise WhaleError(
            f"the parts of a sum of {count} micro-batches {' and '.join(problems)}"
        )


def total(
    parts: Mapping[Node, T],
    count: int,
    add: Callable[[T, T], T],
    node: Node | None = None,
) -> T:
    """Returns the sum of the parts in the order of the tree.

    Args:
        parts: Sums of subtrees that together hold every micro-batch of ``node`` once.
        count: Micro-batches of a step.
        add: Function that adds two parts; the first has the lower indices.
        node: Root of the sum; default: all micro-batches.

    Raises:
        WhaleError: No part holds a micro-batch.

    >>> total({(0, 1): "a", (1, 2): "b", (2, 4): "c"}, 4, lambda x, y: f"({x}{y})")
    '((ab)c)'
    """
    here = (0, count) if node is None else node
    if here in parts:
        return parts[here]
    if here[1] - here[0] == 1:
        raise WhaleError(f"the sum of a step lacks micro-batch {here[0]} of {count}")
    left, right = halves(here)
    return add(total(parts, count, add, left), total(parts, count, add, right))


def shares(seconds: Sequence[float], count: int) -> list[int]:
    """Returns the micro-batches per member that minimise the time of the slowest.

    Args:
        seconds: Seconds per micro-batch of each member. A 0 is unknown and counts as
            the mean. Values within a quarter of each other count as equal.
        count: Micro-batches of a step.

    >>> shares([1.0, 1.1, 0.0], 8), shares([1.0, 3.0], 8)
    ([3, 3, 2], [6, 2])
    """
    known = [s for s in seconds if s > 0]
    mean = sum(known) / len(known) if known else 1.0
    pace = [s if s > 0 else mean for s in seconds]
    if max(pace) < 1.25 * min(pace):
        pace = [1.0] * len(pace)
    result = [0] * len(pace)
    done_at = [(each, place) for place, each in enumerate(pace)]
    heapq.heapify(done_at)
    for _ in range(count):
        # Giving each micro-batch to the member that finishes it first is optimal.
        place = done_at[0][1]
        result[place] += 1
        heapq.heapreplace(done_at, ((result[place] + 1) * pace[place], place))
    return result


def assign_micro_batches(
    names: Sequence[str], seconds: Mapping[str, float], count: int
) -> dict[str, list[Node]]:
    """Returns the subtrees of micro-batches of each member in a new step.

    Args:
        names: Names of the members, in the order of ranks.
        seconds: Seconds per micro-batch of each member.
        count: Micro-batches of a step.

    >>> assign_micro_batches(["a", "b"], {}, 4)
    {'a': [(0, 2)], 'b': [(2, 4)]}
    """
    micro_batches, first = {}, 0
    amounts = shares([seconds.get(name, 0.0) for name in names], count)
    for name, amount in zip(names, amounts, strict=True):
        micro_batches[name] = cover(range(first, first + amount), count)
        first += amount
    return micro_batches


def repaired(
    names: Sequence[str],
    seconds: Mapping[str, float],
    held: Mapping[str, Sequence[Node]],
    count: int,
) -> dict[str, list[Node]]:
    """Returns the subtrees of micro-batches of each member in an interrupted step.

    Members keep the subtrees that they have summed; the rest is assigned anew.

    Args:
        names, seconds, count: Arguments of ``assign_micro_batches``.
        held: Subtrees that members have summed in this step.

    >>> repaired(["a", "b"], {}, {"a": [(0, 2)], "b": [(4, 5)]}, 6)
    {'a': [(0, 4)], 'b': [(4, 6)]}
    """
    own: dict[str, set[int]] = {name: set() for name in names}
    taken: set[int] = set()
    offers = [(n, name) for name in names for n in held.get(name, ())]
    for node, name in sorted(offers, key=lambda x: (x[0][0] - x[0][1], x)):
        several = set(range(*node))
        if is_node(node, count) and not several & taken:
            own[name] |= several
            taken |= several
    left = [n for n in range(count) if n not in taken]
    amounts = shares([seconds.get(name, 0.0) for name in names], len(left))
    for name, amount in zip(names, amounts, strict=True):
        own[name].update(left[:amount])
        left = left[amount:]
    return {name: cover(own[name], count) for name in names}


def ranks(before: Sequence[str], present: Sequence[str]) -> list[str]:
    """Returns members by rank; earlier members keep their ranks if possible.

    Args:
        before: Names of the earlier members, in the order of their ranks.
        present: Names of the members that take part now.

    >>> ranks(["a", "b", "c"], ["b", "c", "d"]), ranks(["a", "b", "c"], ["c", "b"])
    (['d', 'b', 'c'], ['c', 'b'])
    """
    there, was_there = set(present), set(before)
    places: list[str | None] = [
        name if name in there else None for name in before[: len(present)]
    ]
    places += [None] * (len(present) - len(places))
    kept = set(places)
    others = [name for name in before if name in there and name not in kept]
    others += [name for name in present if name not in was_there]
    fill = iter(others)
    return [next(fill) if name is None else name for name in places]
