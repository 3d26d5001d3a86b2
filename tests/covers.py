"""The smallest subsets of the matrix, of the features and of the pipelines.

Which cases they are is an integer program, solved to its end once and kept in
``tests/covers.json``; tests hold that file to making all that it has to make.

``python -m tests.covers`` writes it anew, after a change of what there is to choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tests import cases, features, stages
from tests.cases import Case
from tests.covering import PINNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Cases of which a subset is to make all that they make.

    Attributes:
        whole: all of them.
        makes: what there is to make, of each.
        subset: the one that is kept.
        seconds: about what each takes.
    """

    whole: Callable[[], tuple[Case, ...]]
    makes: Callable[[Case], Iterable[Hashable]]
    subset: Callable[[], tuple[Case, ...]]
    seconds: Callable[[Case], float] = lambda case: case.seconds


def by_parts(case: Case) -> float:
    """About what a case takes, more closely: what each part of its step adds to it.

    Rings and dropless experts take twice as long to trace, and narrow numbers have a
    reference of their own beside that in float32.
    """
    found = case.seconds
    found *= 2.0 if case.strategy.attention == "ring" else 1.0
    found *= 2.0 if case.model.name == "moe-dropless" else 1.0
    found *= 1.0 if case.precision == "f32" else 1.5
    return found * (1.0 if case.remat == "none" else 1.3)


FAMILIES: Final[Mapping[str, Family]] = {
    "cases": Family(whole=cases.full_matrix, makes=cases.pairs, subset=cases.pairwise),
    "default": Family(
        whole=cases.pairwise,
        makes=cases.choices,
        subset=cases.default,
        seconds=by_parts,
    ),
    "features": Family(
        whole=features.covering, makes=features.meetings, subset=features.pairwise
    ),
    "default features": Family(
        whole=features.plain,
        makes=features.switched_on,
        subset=features.default,
        seconds=by_parts,
    ),
    "stages": Family(whole=stages.whole, makes=stages.meetings, subset=stages.subset),
    "default stages": Family(
        whole=stages.subset, makes=stages.kinds, subset=stages.default
    ),
}


def seconds(chosen: Iterable[Case], takes: Callable[[Case], float]) -> float:
    """About what cases take, their references with them."""
    chosen = tuple(chosen)
    references = {case.reference: case.seconds for case in chosen}
    return sum(map(takes, chosen)) + sum(references.values())


def smallest(
    whole: Sequence[Case],
    makes: Callable[[Case], Iterable[Hashable]],
    takes: Callable[[Case], float],
) -> tuple[Case, ...]:
    """The cases that take least and together make all that any makes.

    Args:
        whole: to choose from.
        makes: what is to be covered, of each case.
        takes: seconds of a case, without its reference.

    Raises:
        RuntimeError: if the program is not solved to its end.
    """
    made: dict[Any, list[int]] = {}
    for place, case in enumerate(whole):
        for one in makes(case):
            made.setdefault(one, []).append(place)
    references: dict[Any, float] = {c.reference: c.seconds for c in whole}
    names = list(references)
    number, places = len(whole), np.arange(len(whole))
    total = number + len(names)
    # Each thing is made at least once; a case brings its reference with it.
    rows = np.repeat(np.arange(len(made)), [len(some) for some in made.values()])
    columns = np.concatenate(list(made.values()))
    covered = csr_array((np.ones(len(rows)), (rows, columns)), (len(made), total))
    beside = number + np.array([names.index(case.reference) for case in whole])
    signs = np.repeat([1.0, -1.0], number)
    pairs = (np.concatenate([places, places]), np.concatenate([places, beside]))
    brought = csr_array((signs, pairs), (number, total))
    solved = milp(
        np.array([*map(takes, whole), *references.values()]),
        constraints=[
            LinearConstraint(covered, 1.0, np.inf),
            LinearConstraint(brought, -np.inf, 0.0),
        ],
        bounds=Bounds(0.0, 1.0),
        integrality=np.ones(total),
    )
    if solved.status != 0:
        raise RuntimeError(f"no smallest subset of {number} cases: {solved.message}")
    taken = solved.x[:number] > 0.5
    return tuple(case for case, took in zip(whole, taken, strict=True) if took)


def main() -> None:
    """Writes the subsets, and prints what they take."""
    found = json.loads(PINNED.read_text())
    for name, family in FAMILIES.items():
        chosen = smallest(family.whole(), family.makes, family.seconds)
        found[name] = [case.id for case in chosen]
        took = seconds(chosen, family.seconds)
        print(f"{name}: {len(chosen)} cases, about {took:.0f} s")
        # Later ones are chosen of earlier ones.
        PINNED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
