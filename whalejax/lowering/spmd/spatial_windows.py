"""Convolutions and poolings over sharded space.

Each device receives halos from its neighbours, and computes its own part. Halos are
exchanged one dimension after the other, so that corners arrive too. XLA does not
partition these operations here, because it has these problems (JAX 0.10.2):

- Gradients of convolutions are too large if space and another axis shard the input, and
  a part is not larger than a halo (``docs/plan/spatial.md`` has an example).
- Convolutions are too large if the kernel's channels and the input's space are sharded.
- The backward pass of poolings exchanges far more than the windows read.
- Kernel gradients of transposed and grouped convolutions gather full samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.capture.rules.behaviour import Equation
from whalejax.capture.rules.rule_table import behaviour
from whalejax.lowering.spmd.gather_scatter import OperationParts, on_each
from whalejax.planner.model.graph import CONVOLUTION, LINEAR_WINDOWS
from whalejax.planner.model.windows import Window
from whalejax.planner.sharding.layout import SPATIAL_AXES, Spec


def shared_windows(equation: Any, specs: Sequence[Spec]) -> dict[str, Window]:
    """Returns the window along the dimension that each mesh axis shards.

    Args:
        equation: Operation with windows.
        specs: Specs of its operands; empty ones are unsharded.

    Returns:
        Windows by mesh axis; empty if the compiler partitions the operation.
    """
    if not specs or not specs[0]:
        return {}
    if not any(axis in SPATIAL_AXES for axes in specs[0] for axis in axes):
        return {}
    view = Equation(
        name=equation.primitive.name,
        params=equation.params,
        inputs=tuple(tuple(atom.aval.shape) for atom in equation.invars),
        outputs=tuple(tuple(atom.aval.shape) for atom in equation.outvars),
    )
    return {
        axis: window
        for window in behaviour(view).windows
        for axis in specs[0][window.dim]
        if axis in SPATIAL_AXES
    }


def in_slabs(
    equation: Any,
    values: Sequence[Any],
    specs: Sequence[Spec],
    windows: Mapping[str, Window],
    mesh: Any,
) -> list[Any]:
    """Returns the result of an operation that each device computes for its part.

    Args:
        equation: Pooling or convolution.
        values: Operands of the operation.
        specs: Specs of the operands. For operands after the first, only the axes of a
            kernel's channels are used.
        windows: Result of ``shared_windows``.
        mesh: Mesh of the devices.
    """
    image, result = equation.invars[0].aval, equation.outvars[0].aval
    divisible = _divisible(equation)
    given = [
        axes if dim in divisible and image.shape[dim] % _parts(axes, mesh) == 0 else ()
        for dim, axes in enumerate(specs[0])
    ]
    others: list[Spec] = [((),) * len(v.aval.shape) for v in equation.invars[1:]]
    out = [given[dim] for dim in _sources(equation)]
    summed: tuple[str, ...] = ()
    if _keeps_channels(equation) and len(specs) > 1 and specs[1]:
        summed = _shard_channels(equation, specs, given, others, out)
    local = _without_padding(equation, {w.dim for w in windows.values()})

    def run(x: Any, *others: Any) -> list[Any]:
        padding = _padding_value(equation, x.dtype)
        for axis, window in windows.items():
            sizes = image.shape[window.dim], result.shape[window.out]
            x = _with_halo(x, axis, window, sizes, padding, mesh.shape[axis])
        return list(_compat.bind(local, [x, *others]))

    return on_each(
        OperationParts(
            given=(tuple(given), *others),
            out=(tuple(out),),
            run=run,
            summed=summed,
        ),
        values,
        mesh,
        linear=equation.primitive.name in LINEAR_WINDOWS,
    )


def _keeps_channels(equation: Any) -> bool:
    convolves = equation.primitive.name == CONVOLUTION
    return convolves and bool(equation.params["feature_group_count"] == 1)


def _shard_channels(
    equation: Any,
    specs: Sequence[Spec],
    given: list[tuple[str, ...]],
    others: list[Spec],
    out: list[tuple[str, ...]],
) -> tuple[str, ...]:
    """Adds the axes that shard a kernel's channels to the layouts.

    Returns the axes of contracted channels, over which parts of the result are summed.
    """
    numbers = equation.params["dimension_numbers"]
    made, read = numbers.rhs_spec[:2]
    image, contracted = numbers.lhs_spec[1], specs[1][read]
    if contracted != specs[0][image]:
        contracted = ()
    kernel: list[tuple[str, ...]] = [()] * len(specs[1])
    kernel[made], kernel[read] = specs[1][made], contracted
    others[0] = tuple(kernel)
    given[image] = contracted
    out[numbers.out_spec[1]] = specs[1][made]
    return contracted


def _parts(axes: Sequence[str], mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _divisible(equation: Any) -> set[int]:
    if equation.primitive.name != CONVOLUTION:
        return set(range(len(equation.invars[0].aval.shape)))
    samples, _, *space = equation.params["dimension_numbers"].lhs_spec
    return {samples, *space}


def _sources(equation: Any) -> tuple[int, ...]:
    if equation.primitive.name != CONVOLUTION:
        return tuple(range(len(equation.outvars[0].aval.shape)))
    numbers = equation.params["dimension_numbers"]
    pairs = zip(numbers.out_spec, numbers.lhs_spec, strict=True)
    return tuple(source for _, source in sorted(pairs))


def _padding_value(equation: Any, dtype: Any) -> Any:
    name = equation.primitive.name
    if name in ("reduce_window_max", "reduce_window_min"):
        sign = -1 if name == "reduce_window_max" else 1
        if _compat.is_inexact(dtype):
            return jnp.asarray(sign * jnp.inf, dtype)
        if dtype == jnp.bool_:
            return jnp.asarray(sign > 0)
        limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return jnp.asarray(limits.min if sign < 0 else limits.max, dtype)
    return jnp.zeros((), dtype)


def _without_padding(equation: Any, shared: set[int]) -> Any:
    params = dict(equation.params)
    padding = list(params["padding"])
    if equation.primitive.name == CONVOLUTION:
        space = params["dimension_numbers"].lhs_spec[2:]
        spread = params["lhs_dilation"]
        places = [n for n, d in enumerate(space) if d in shared and spread[n] == 1]
    else:
        places = sorted(shared)
    for place in places:
        padding[place] = (0, 0)
    params["padding"] = tuple(padding)
    return equation.replace(params=params)


def _with_halo(
    x: Any, axis: str, window: Window, sizes: tuple[int, int], padding: Any, parts: int
) -> Any:
    """Extends a device's part of the input by the halos that its windows read.

    If parts of operand and result start at the same windows, all devices read from the
    same offset; otherwise each device has its own offset.
    """
    if window.spread > 1:
        return x
    halo, reach = window.halo(*sizes, parts), window.reach(*sizes, parts)
    sides = [
        _strip(x, axis, window.dim, halo[side], reach[side], padding, parts, up=up)
        for side, up in enumerate((True, False))
    ]
    kept = [strip for strip in (sides[0], x, sides[1]) if strip.shape[window.dim]]
    grown = jnp.concatenate(kept, axis=window.dim) if len(kept) > 1 else x
    start = window.start(*sizes, parts, jax.lax.axis_index(axis))
    length = window.read(*sizes, parts)
    if length == grown.shape[window.dim]:
        return grown
    return jax.lax.dynamic_slice_in_dim(grown, start, length, axis=window.dim)


def _strip(
    x: Any,
    axis: str,
    dim: int,
    halo: int,
    reach: int,
    padding: Any,
    parts: int,
    *,
    up: bool,
) -> Any:
    """Returns ``reach`` elements that a device reads beyond one side of its part.

    A neighbour has the first ``halo`` of them. More are read only at the ends: by the
    first device before its part, or by the last device after it. With ``up``, the
    elements come from the previous device.
    """
    start = x.shape[dim] - halo if up else 0
    strip = jax.lax.slice_in_dim(x, start, start + halo, axis=dim)
    if halo:
        pairs = [(i, i + 1) if up else (i + 1, i) for i in range(parts - 1)]
        place = jax.lax.axis_index(axis)
        inside = place > 0 if up else place < parts - 1
        strip = jnp.where(inside, jax.lax.ppermute(strip, axis, pairs), padding)
    edges = [(0, 0, 0)] * x.ndim
    edges[dim] = (reach - halo, 0, 0) if up else (0, reach - halo, 0)
    return jax.lax.pad(strip, padding, edges)
