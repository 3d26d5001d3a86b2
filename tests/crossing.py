"""Two lists of choices crossed: a diagonal by default, all pairs in the whole suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def crossed(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Every pair of two choices, for ``pytest.mark.parametrize``.

    Pairs in which each choice of the longer list meets one of the other run by default,
    the others are marked ``full``.

    Args:
        first, second: the choices.
    """
    longer = max(len(first), len(second))
    kept = {(n % len(first), n % len(second)) for n in range(longer)}
    return [
        pytest.param(one, other, marks=() if (i, j) in kept else pytest.mark.full)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
