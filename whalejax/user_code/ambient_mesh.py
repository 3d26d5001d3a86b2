"""The mesh that a user has set around our calls with ``jax.set_mesh``.

A plan has its own mesh, and JAX accepts no array of one mesh in an operation that is
traced under another. So our traced code runs without an ambient mesh. A loss that names
axes of the user's mesh is traced under it, and the compiler shards these axes.
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
"""Mesh that the user set around our calls."""


def without_mesh(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Returns a function that runs another without an ambient mesh."""

    @functools.wraps(function)
    def alone(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with no_mesh():
            return function(*args, **kwargs)

    return alone


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Runs a block without a mesh, and stores the mesh that was set."""
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
    """Returns a function that traces user code without a mesh, or with the user's mesh.

    Args:
        function: Function that traces. If it fails without a mesh, it is called again
            with the user's mesh.
    """

    def trace(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with no_mesh():
            mesh = _OUTSIDE.get()
            if mesh is None or mesh.empty:
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except Exception:  # JAX may raise any error for an unknown axis.
                kinds = (AxisType.Auto,) * len(mesh.axis_names)
                automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
                with jax.set_mesh(automatic):
                    return function(*args, **kwargs)

    return trace
