"""Chooses sizes by name and changes fields of configurations, without JAX."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import Problems, WhaleError


Choice = TypeVar("Choice")


def pick(name: str, choices: Mapping[str, Choice], what: str) -> Choice:
    """Returns the choice with a name.

    Args:
        name: Name from the user.
        choices: All choices, by name.
        what: Noun for the choices, for the error.

    Raises:
        WhaleError: No choice has the name; lists the nearest names and all of them.

    >>> pick("b", {"a": 1, "b": 2}, "size")
    2
    """
    if isinstance(name, str) and name in choices:
        return choices[name]
    near = _nearest(name, choices) if isinstance(name, str) else ""
    raise WhaleError(
        f"no {what} is named {short_repr(name)}{near}. "
        f"There are: {', '.join(sorted(choices))}."
    )


DTYPES: Final = ("float32", "bfloat16", "float16", "float64")

_OF_JOBS: Final[Mapping[str, Any]] = {
    "batch_size": 1,
    "learning_rate": 1.0,
    "warmup_steps": 1,
    "constant_steps": 0,
    "seed": 0,
    "padded": False,
    "deterministic": False,
}
"""Options of jobs, with an example value."""

_DIVIDES: Final = (("heads", "embed"), ("kv_heads", "heads"))
"""Pairs of fields: the first divides the second."""


def change(
    config: Choice, changes: Mapping[str, Any], *, options: Iterable[str] = ()
) -> Choice:
    """Returns a copy of a configuration with some of its fields changed.

    Args:
        config: An instance of a frozen dataclass.
        changes: New values by field name.
        options: Other keywords that the caller accepts, for the error.

    Raises:
        WhaleError: Fields are unknown or values invalid; lists all of them, with the
            nearest names.

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
        else:
            _check(name, changes[name], getattr(config, name), problems)
    problems.raise_if_any(title="model options")
    changed = dataclasses.replace(config, **changes)
    for part, whole in _DIVIDES:
        few, many = (getattr(changed, name, 0) for name in (part, whole))
        free = part == "heads" and hasattr(changed, "head_dim")
        if not free and few and {part, whole} & changes.keys() and many % few:
            problems.add(f"{part} is {few} and {whole} {many}; {part} must divide it.")
    problems.raise_if_any(title="model options")
    return changed


def check_options(options: Mapping[str, Any]) -> None:
    """Checks options of jobs that are no fields of a configuration.

    Args:
        options: Options by name. Unknown options are not checked.

    Raises:
        WhaleError: Values are invalid; lists all of them.
    """
    problems = Problems()
    for name, value in options.items():
        if value is not None:
            _check(name, value, _OF_JOBS.get(name), problems)
    problems.raise_if_any(title="model options")


def _check(name: str, value: Any, like: Any, problems: Problems) -> None:
    number = _is_number(value)
    whole = number and isinstance(value, int | np.integer)
    if isinstance(like, bool):
        right, expected = isinstance(value, bool | np.bool_), "true or false"
    elif isinstance(like, int):
        least = min(1, like)
        right, expected = whole and value >= least, f"a number, {least} or more"
    elif isinstance(like, float) and name.endswith(("_rate", "_smoothing")):
        most = math.inf if name == "learning_rate" else 1.0
        right = number and 0 <= value < most
        expected = "a number, 0 or more" + " and below 1" * (most == 1)
    elif isinstance(like, float):
        right, expected = number or isinstance(value, float), "a number"
    elif isinstance(like, tuple) and like and isinstance(like[0], int):
        right = isinstance(value, Sequence) and all(
            isinstance(n, int | np.integer) and n >= 1 for n in value
        )
        expected = "whole numbers of at least 1, such as 64,32"
    else:
        right = "dtype" not in name or _is_dtype(value)
        expected = f"one of {', '.join(DTYPES)}"
    if not right:
        problems.add(f"{name} is {short_repr(value)}; expected {expected}.")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | np.bool_ | str):
        return False
    if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_dtype(value: Any) -> bool:
    if value is None or isinstance(value, type):
        return True
    name = value if isinstance(value, str) else getattr(value, "dtype", value)
    return str(name) in DTYPES


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else ""
