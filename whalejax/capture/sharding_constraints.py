"""Layouts that the model itself constrains, and meshes that it needs.

Layouts of ``with_sharding_constraint`` name axes of the user's mesh. The plan's mesh
may lack these axes, and it divides the work in another way. A plan's program omits such
layouts, and a note says so. Explicit axes, along which JAX itself determines the layout
of every value, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from whalejax import _compat
from whalejax.meshes.errors import WhaleError


CONSTRAINT: Final = "sharding_constraint"
"""Name of the primitive."""


def constraint_notes(jaxpr: Any) -> list[str]:
    """Returns notes on layouts that the program itself constrains.

    Args:
        jaxpr: Traced loss.
    """
    result = [*_constraints(jaxpr)]
    if not result:
        return []
    spec, line = result[0].params["sharding"], _compat.line_text(result[0])
    spec = getattr(spec, "spec", spec)
    count = len(result)
    layouts = "1 layout" if count == 1 else f"{count} layouts"
    are = "is" if count == 1 else "are"
    return [
        f"{layouts} of values that the model fixes by with_sharding_constraint (the "
        f"first: {spec} in {line}) {are} left out: this plan lays values out itself. "
        "What an axis is to shard is said by the metadata of parameters, or by "
        "wh.split(axis=...)"
    ]


_DIVIDES: Final = "the plan divides the work itself"
_EXPLICIT: Final = (
    "loss_fn asks for layouts along explicit mesh axes (out_sharding=, reshard), and "
    "programs with explicit axes are not planned yet: {what}. Leave these layouts out, "
    f"as {_DIVIDES}; what an axis is to shard is said by the metadata of parameters, "
    "or by wh.split(axis=...)"
)
_OTHER_KIND: Final = (
    "loss_fn names a mesh with explicit axes in {what}, and is traced without a layout "
    "along them. Make that mesh with axis_types=(jax.sharding.AxisType.Auto,) * its "
    "number of axes, or leave the call out: " + _DIVIDES
)
_OF_MESHES: Final = {
    "context mesh cannot be empty": "loss_fn calls jax.shard_map without a mesh, and "
    "the plan's own is chosen after the loss is traced. Give the call mesh=, plan and "
    "compile under jax.set_mesh(mesh), or leave jax.shard_map out: " + _DIVIDES,
    "with_sharding_constraint requires a non-empty mesh": "loss_fn calls "
    "with_sharding_constraint with a PartitionSpec, and no mesh says what its axes "
    f"are. Leave the call out: {_DIVIDES}, and takes no such layout; or plan and "
    "compile under jax.set_mesh(mesh), whose axes may be any",
    "can only refer to Auto axes of the mesh": _OTHER_KIND.format(
        what="with_sharding_constraint"
    ),
    "in_specs passed to shard_map": _OTHER_KIND.format(what="jax.shard_map"),
    "should match the mesh passed to shard_map": _OTHER_KIND.format(
        what="jax.shard_map"
    ),
}
"""Texts of JAX's errors for missing or unsuitable meshes, with the message for each."""

_OF_EXPLICIT: Final = (
    "when you are not under a mesh context is not allowed",
    "cannot contain axis names that are of type Auto or Manual",
)
"""JAX's error texts for layouts along axes that are not explicit, or do not exist."""


def mesh_error_text(error: Exception) -> str:
    """Returns the message for an error about a loss's mesh; empty for others.

    Args:
        error: Error that was raised while the loss was traced.
    """
    given = str(error)
    if any(text in given for text in _OF_EXPLICIT):
        return _EXPLICIT.format(what=given.splitlines()[0].removesuffix("."))
    return next((to for text, to in _OF_MESHES.items() if text in given), "")


def refuse_explicit_axes(jaxpr: Any) -> None:
    """Refuses a program in which values are sharded along explicit axes.

    Args:
        jaxpr: Jaxpr of the loss as the user wrote it.

    Raises:
        WhaleError: A value is so sharded; names the first, and the line that makes it.
    """
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        for variable in equation.outvars:
            if _compat.has_explicit_axes(variable.aval):
                what = f"{variable.aval} in {_compat.line_text(equation)}"
                raise WhaleError(_EXPLICIT.format(what=what))
        for inner in _compat.inner_jaxprs(equation):
            refuse_explicit_axes(inner)


def _constraints(jaxpr: Any) -> Iterator[Any]:
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        if equation.primitive.name == CONSTRAINT:
            yield equation
        if _compat.recursion(equation) != "opaque":
            for inner in _compat.inner_jaxprs(equation):
                yield from _constraints(inner)
