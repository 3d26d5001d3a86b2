"""Makes the JAX mesh of a plan. Calls start JAX.

Unlike ``jax.make_mesh``, ``build_mesh`` refuses to leave devices idle, and its axes are
Auto. Unmodified Flax models fail with Explicit axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from whalejax.meshes.checks import Arguments, is_printable, is_whole, short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text


# Type checkers take ``jax.Device`` for a variable.
Device: TypeAlias = Any

_SHOWN_FACTORIZATIONS = 6


def build_mesh(
    axes: tuple[tuple[str, int], ...],
    devices: Sequence[Device] | None = None,
    *,
    allow_idle: bool = False,
    order: Sequence[int] = (),
) -> Mesh:
    """Returns a mesh with Auto axes over the devices, in the given order.

    Args:
        axes: (name, size) pairs, outermost first. Neighbouring devices differ in the
            last axis.
        devices: Devices in the cluster's order, node by node; default:
            ``jax.devices()``.
        allow_idle: Whether to use the first devices and leave the rest idle.
        order: Index in ``devices`` for each position of the mesh; default: in order.

    Raises:
        WhaleError: The product of the sizes is not the number of devices, an axis is
            given twice, a size is below 1, or ``order`` is invalid; lists all problems.

    Example:
        >>> import jax
        >>> build_mesh((("data", len(jax.devices())),)).axis_names
        ('data',)
    """
    if isinstance(devices, Iterator):
        devices = list(devices)
    problems = Arguments("mesh")
    _check(axes, devices, allow_idle, order, problems)
    problems.raise_if_any()
    given = list(jax.devices() if devices is None else devices)
    names = [name for name, _ in axes]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            problems.add(f"axis {name!r} is named {names.count(name)} times")
    for name, size in axes:
        if size < 1:
            problems.add(f"axis {name!r} has size {size}, expected at least 1")
    used = math.prod(size for _, size in axes)
    if not problems and (used > len(given) or (used < len(given) and not allow_idle)):
        problems.add(_wrong_product(axes, used, len(given)))
    if not problems and order and len(order) < used:
        problems.add(
            f"order has {count_text(len(order), 'number')} of devices, but the mesh "
            f"has {used} positions; give a number for each"
        )
    problems.raise_if_any()
    if order:
        given = [given[number] for number in order]
    grid = np.array(given[:used], dtype=object).reshape([size for _, size in axes])
    return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * len(axes))


def cluster_order(devices: Sequence[Device]) -> list[Device]:
    """Orders devices as in clusters: slice by slice, with the last axis fastest.

    JAX orders the chips of a torus with the first coordinate fastest. Devices without
    coordinates keep their order.

    Args:
        devices: Real devices, or those of a described topology.
    """
    if any(getattr(device, "coords", None) is None for device in devices):
        return list(devices)

    def place(device: Device) -> tuple[Any, ...]:
        core = getattr(device, "core_on_chip", 0)
        return getattr(device, "slice_index", None) or 0, *device.coords, core

    return sorted(devices, key=place)


def partition_spec(spec: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns a layout as a PartitionSpec in normal form, so that equal ones compare.

    Args:
        spec: Mesh axes of each dimension, outermost first.

    Raises:
        WhaleError: The argument is no such layout.

    Example:
        >>> tuple(partition_spec(((), ("data", "fsdp"), ())))
        (None, ('data', 'fsdp'))
    """
    if not _is_spec(spec):
        raise WhaleError(
            f"spec is {short_repr(spec)}; expected a tuple of mesh axes for each "
            "dimension, such as ((), ('data', 'fsdp'))"
        )
    entries: list[tuple[str, ...] | str | None] = [
        axes if len(axes) > 1 else (axes[0] if axes else None) for axes in spec
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def automatic_axes(mesh: Any) -> frozenset[str]:
    """Returns the axes of a mesh that are not manual, as those of ``shard_map`` are.

    Args:
        mesh: Mesh of devices, or the abstract mesh inside ``shard_map``.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(axis for axis, kind in kinds if kind != AxisType.Manual)


def has_manual_axes(mesh: Any) -> bool:
    """Whether a mesh has manual axes, as inside ``shard_map``."""
    return AxisType.Manual in mesh.axis_types


def on_automatic_axes(
    function: Callable[..., Any], mesh: Any, inputs: Any, outputs: Any
) -> Callable[..., Any]:
    """Maps a function of the shards of a device over the automatic axes of a mesh.

    Args:
        function: Function from the shards of a device to its shards of the results.
        mesh: Mesh of devices, or the abstract mesh inside ``shard_map``.
        inputs, outputs: PartitionSpecs over the automatic axes.
    """
    axes = automatic_axes(mesh)
    if not axes:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=inputs,
        out_specs=outputs,
        axis_names=axes,
        check_vma=False,  # Results may differ between devices.
    )


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, list | tuple) and all(
        isinstance(axes, list | tuple) and all(map(is_printable, axes)) for axes in spec
    )


def _check(
    axes: Any, devices: Any, allow_idle: Any, order: Any, problems: Arguments
) -> None:
    if not isinstance(axes, list | tuple) or not all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and is_printable(pair[0])
        and is_whole(pair[1])
        for pair in axes
    ):
        problems.refuse("axes", axes, "(name, size) of each axis, outermost first")
    if devices is not None and not are_devices(devices):
        problems.refuse("devices", devices, "devices in node order, or None for all")
    problems.switch("allow_idle", allow_idle)
    numbers = list(order) if isinstance(order, list | tuple) else [None]
    count = len(jax.devices() if devices is None else devices) if not problems else 0
    distinct = len({n for n in numbers if is_whole(n, 0, count - 1)}) == len(numbers)
    if not problems and not distinct:
        problems.refuse(
            "order", order, f"numbers of devices, each once, of 0 to {count - 1}"
        )


def are_devices(devices: Any) -> bool:
    """Whether an argument is a sequence of one or more devices."""
    if isinstance(devices, str | bytes | type) or not isinstance(devices, Iterable):
        return False
    if getattr(devices, "ndim", 1) == 0:  # no sequence, though of an array class
        return False
    result = list(np.ravel(devices) if isinstance(devices, np.ndarray) else devices)
    # Arrays have ``platform`` too, as a method.
    return bool(result) and all(
        isinstance(getattr(one, "platform", None), str) for one in result
    )


def _wrong_product(axes: tuple[tuple[str, int], ...], used: int, available: int) -> str:
    product = " × ".join(f"{name} {size}" for name, size in axes) or "no axes"
    options = factorizations(available, len(axes))
    shown = ", ".join(
        "×".join(map(str, sizes)) for sizes in options[:_SHOWN_FACTORIZATIONS]
    )
    more = ", …" if len(options) > _SHOWN_FACTORIZATIONS else ""
    fits = f" {available} = {shown}{more}." if len(axes) > 1 else ""
    if used > available:
        return (
            f"{product} needs {count_text(used, 'device')}; there are "
            f"{available}.{fits} Give {used} devices, or plan a mesh of {available}"
        )
    return (
        f"{product} uses {used} of {count_text(available, 'device')}.{fits} To leave "
        f"{available - used} idle on purpose: allow_idle=True"
    )


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """Returns all ordered factorizations of a number, largest first factor first.

    Example:
        >>> factorizations(4, 2)
        [(4, 1), (2, 2), (1, 4)]
    """
    if parts == 0:
        return [()] if number == 1 else []
    if parts == 1:
        return [(number,)]
    divisors = [d for d in range(number, 0, -1) if number % d == 0]
    return [
        (first, *rest)
        for first in divisors
        for rest in factorizations(number // first, parts - 1)
    ]
