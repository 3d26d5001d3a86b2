"""The mesh that a user has set around our calls with ``jax.set_mesh``.

A plan has a mesh of its own, and JAX takes no array of one mesh into an operation that
it traces under another. So what we trace and run knows of no mesh around it. Only a
loss that needs one, for the axes that it names, is traced under it, with its axes left
to the compiler.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_OUTSIDE: ContextVar[Mesh | None] = ContextVar("outside", default=None)
"""The mesh that was set around our calls."""


def without_mesh(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """The same function, which sees no mesh around it."""

    @functools.wraps(function)
    def alone(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with no_mesh():
            return function(*args, **kwargs)

    return alone


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """A context in which no mesh is set; what was set is remembered."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    token = _OUTSIDE.set(jax.sharding.get_mesh())
    try:
        with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
            yield
    finally:
        _OUTSIDE.reset(token)


def tracing(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that traces what a user wrote, with no mesh, or else with the user's.

    Args:
        function: Function to trace; it is called once more, with the mesh set, where it
            fails without.
    """

    def trace(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with no_mesh():
            mesh = _OUTSIDE.get()
            if mesh is None or mesh.empty:
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except Exception:  # whatever JAX says of an axis that it does not know
                kinds = (AxisType.Auto,) * len(mesh.axis_names)
                automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
                with jax.set_mesh(automatic):
                    return function(*args, **kwargs)

    return trace
