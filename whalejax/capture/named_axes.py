"""Named axes that a loss uses but that nothing binds, as in ``pmean(x, "batch")``.

Code written for ``jax.pmap`` runs on one device's samples and names the axis over all
devices. Here a loss is traced for all samples of a micro-batch at once, whichever
device holds them. So such an axis has size 1. A mean over it is the value itself, which
is already the mean over all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from whalejax import _compat


Flat = Callable[..., list[Any]]
"""Function from flat leaves to flat results."""


def traced_with_axes(
    trace: Callable[[Flat, Sequence[Any]], Any],
    function: Flat,
    arguments: Sequence[Any],
) -> tuple[Any, tuple[str, ...]]:
    """Returns the jaxpr of a function, and the unbound axes that it names.

    Args:
        trace: Returns the jaxpr of a flat function for abstract arguments.
        function: The user's function.
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
    """Returns a function in which each of the named axes has size 1."""
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
        # A result that depends on the index along the axis has a dimension for it.
        return [x[0] for x in mapped(0)(*leaves)]

    return run
