"""Few and cheap cases that make every combination of choices which any case makes.

The default tests run the cheapest such cases, which ``tests/covers.py`` looks for once;
what ``scripts/test --full`` runs is chosen here, greedily.
It knows nothing of what the choices are: ``tests/cases.py`` and ``tests/features.py``
say which cases there are, what each makes and what it takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np


Case = TypeVar("Case")
PINNED: Final = Path(__file__).with_name("covers.json")


def pinned(
    name: str, cases: Iterable[Case], named: Callable[[Case], str]
) -> tuple[Case, ...]:
    """The subset that ``tests/covers.py`` has found, in the order given.

    Args:
        name: of the subset.
        cases: it is of these.
        named: what each case is called there.

    Raises:
        ValueError: if the file names a case that is not there.
    """
    known = {named(case): case for case in cases}
    wanted: list[str] = json.loads(PINNED.read_text())[name]
    gone = [one for one in wanted if one not in known]
    if gone:
        raise ValueError(
            f"{PINNED.name} names {len(gone)} cases of {name} that there are not, "
            f"{gone[0]!r} first; write it anew: python -m tests.covers"
        )
    return tuple(known[one] for one in wanted)


def cover(
    cases: Sequence[Case],
    makes: Callable[[Case], Iterable[Hashable]],
    *,
    seconds: Callable[[Case], float],
    reference: Callable[[Case], Hashable],
) -> tuple[Case, ...]:
    """Cases that together make all that any case makes, in the order given.

    Greedy: each time the case that makes most of what is still missing for its seconds;
    the first among equals, so that the choice is always the same.

    Args:
        cases: to choose from.
        makes: what is to be covered, of each case.
        seconds: what a case takes.
        reference: what a case is compared with; the first that needs one takes twice
            as long.
    """
    holders: dict[Hashable, list[int]] = {}
    sharing: dict[Hashable, list[int]] = {}
    made = [frozenset(makes(case)) for case in cases]
    for place, case in enumerate(cases):
        for one in made[place]:
            holders.setdefault(one, []).append(place)
        sharing.setdefault(reference(case), []).append(place)
    missing = np.array([len(all_of) for all_of in made])
    cost = 2.0 * np.array([seconds(case) for case in cases])
    chosen: list[int] = []
    while holders:
        best = int(np.argmax(missing / cost))
        chosen.append(best)
        cost[sharing.pop(reference(cases[best]), [])] /= 2.0
        for one in made[best] & holders.keys():
            missing[holders.pop(one)] -= 1
    return tuple(cases[place] for place in sorted(chosen))
