"""Named axes that a loss uses and nobody binds, as ``pmean(x, "batch")`` does.

Code that was written for ``jax.pmap`` runs on one device's samples and names the axis
over which all have theirs. Here a loss is traced for all samples of a micro-batch at
once, whoever holds them, so such an axis has one member: a mean over it is the value
itself, which is already the mean over all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from whalejax import _compat


Flat = Callable[..., list[Any]]
"""From flat leaves to flat results."""


def traced_with_axes(
    trace: Callable[[Flat, Sequence[Any]], Any],
    function: Flat,
    arguments: Sequence[Any],
) -> tuple[Any, tuple[str, ...]]:
    """The jaxpr of a function, and the axes that it names and nobody binds.

    Args:
        trace: Makes a jaxpr of a flat function and abstract arguments.
        function: Function of the user's.
        arguments: Arguments of the function.
    """
    names: tuple[str, ...] = ()
    while True:
        try:
            return trace(bound(function, names), arguments), names
        except NameError as error:
            name = _compat.unbound_axis(error)
            if name is None or name in names:
                raise
            names = (*names, name)
        except Exception as error:
            for name in names:
                error.add_note(
                    f'whalejax: the axis "{name}" stands for all samples and has one '
                    "member. pmean, psum, pmax, pmin and all_gather over it are those "
                    "of all samples; what needs several members (ppermute, all_to_all, "
                    "axis_index_groups) has no meaning there: write it on the samples "
                    "themselves"
                )
            raise


def bound(function: Flat, names: Sequence[str]) -> Flat:
    """A function in which each of some axes has one member."""
    for name in names:
        function = _bound(function, name)
    return function


def _bound(function: Flat, name: str) -> Flat:
    def mapped(out: int | None) -> Any:
        return jax.vmap(
            function, in_axes=None, out_axes=out, axis_name=name, axis_size=1
        )

    def run(*leaves: Any) -> list[Any]:
        try:
            return list(mapped(None)(*leaves))
        except ValueError as error:
            if "out_axes is None" not in str(error):
                raise
        # What asks for its place along the axis has a dimension for it.
        return [x[0] for x in mapped(0)(*leaves)]

    return run
