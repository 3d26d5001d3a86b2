"""Choosing among names, and configurations with a few fields changed.

Every model offers sizes by name and takes changes by keyword; the errors for both are
written once, here. Nothing in this module imports JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import numpy as np

from whalejax.meshes.problems import Problems, WhaleError


Choice = TypeVar("Choice")


def pick(name: str, choices: Mapping[str, Choice], what: str) -> Choice:
    """The choice of that name.

    Args:
        name: what was asked for.
        choices: everything there is, by name.
        what: what the names stand for, as one word, for the error.

    Raises:
        WhaleError: there is none; the text gives the nearest names and all of them.

    >>> pick("b", {"a": 1, "b": 2}, "size")
    2
    """
    if name in choices:
        return choices[name]
    raise WhaleError(
        f"no {what} is named {name!r}{_nearest(name, choices)}. "
        f"There are: {', '.join(sorted(choices))}."
    )


COUNTS: Final = frozenset(
    ("layers", "embed", "heads", "kv_heads", "mlp", "vocab", "sequence", "experts")
)
"""Fields of which a model has some."""


def change(
    config: Choice, changes: Mapping[str, Any], *, options: Iterable[str] = ()
) -> Choice:
    """A copy of a configuration with some of its fields changed.

    Args:
        config: an instance of a frozen dataclass.
        changes: new values by field name.
        options: what else the caller takes by keyword, to be named in the error.

    Raises:
        WhaleError: the configuration has no field of that name; every such name is
            listed, with the nearest fields.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Shape:
    ...     width: int = 1
    >>> change(Shape(), {"width": 3})
    Shape(width=3)
    """
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    fields = [field.name for field in dataclasses.fields(config)]
    known = sorted({*fields, *options})
    problems = Problems()
    for name in changes:
        if name not in fields:
            problems.add(
                f"{type(config).__name__} has no option {name!r}"
                f"{_nearest(name, known)}. Options: {', '.join(known)}."
            )
        elif name in COUNTS and not _is_count(changes[name]):
            problems.add(f"{name} is {changes[name]!r}; expected a number, 1 or more.")
    problems.raise_if_any(title="model options")
    return dataclasses.replace(config, **changes)


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and int(value) >= 1


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else ""
