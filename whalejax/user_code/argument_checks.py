"""Checks of what several public functions are given: optimizers and functions.

Those that belong to one function alone stand beside it. Models import what imports
this, so that importing it starts no JAX.
"""

from __future__ import annotations

import inspect
from typing import Any

from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError


def check_optimizer(problems: Arguments, optimizer: Any) -> None:
    """Record an optimizer that is none of optax's kind.

    Args:
        problems: where to record it.
        optimizer: anything with the functions ``init`` and ``update``, or None.
    """
    parts = (getattr(optimizer, name, None) for name in ("init", "update"))
    if optimizer is None or (all(map(callable, parts)) and not _is_class(optimizer)):
        return
    problems.refuse(
        "optimizer",
        optimizer,
        "an optax transformation such as optax.adam(1e-3), or None",
    )


def refuse_bad_optimizer(optimizer: Any) -> None:
    """Raise for an optimizer that is none of optax's kind.

    Raises:
        WhaleError: it is none.
    """
    problems = Arguments("optimizer")
    check_optimizer(problems, optimizer)
    if problems:
        raise WhaleError(problems.messages[0])


def is_function(value: Any) -> bool:
    """Whether it can be called and is no class."""
    return callable(value) and not _is_class(value)


def _is_class(value: Any) -> bool:
    return inspect.isclass(value)
