"""Moves arrays of one stage to the devices of all stages, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.adapters.leaves import is_key
from whalejax.lowering.global_arrays import (
    absent,
    behind,
    is_here,
    rows_of,
    run_alone,
    seen_on,
    shards_on,
    zeros_on,
)
from whalejax.lowering.uneven.flat_all_reduce import DATA
from whalejax.planner.pipeline.layer_stack import STAGE


def spread(array: Any, mesh: Mesh) -> Any:
    """Moves an array to all devices, sharded if a dimension divides by their number.

    With several processes, all of them call this in the same order.

    Args:
        array: Array on the devices of a stage, or on all.
        mesh: Mesh of all devices, by stage.
    """
    target = spread_sharding(array.shape, mesh)
    if is_key(array):
        words = _spread(jax.random.key_data(array), target)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return _spread(array, target)


def _spread(array: Any, target: NamedSharding) -> Any:
    mesh: Any = target.mesh
    rows = [{*row} for row in mesh.devices]
    source: Any = array.sharding
    if mesh.is_multi_process and _is_copied(source, mesh):
        # Every pipeline has a copy; the first one's is used.
        first = Mesh(source.mesh.devices[0], source.mesh.axis_names[1:])
        source = NamedSharding(first, source.spec)
        there = seen_on(array, source)
        array = absent(array, source) if there is None else there
    if not mesh.is_multi_process or array.sharding.device_set not in rows:
        return jax.device_put(array, target)
    stage = rows.index(array.sharding.device_set)
    return _spreading(array.shape, array.dtype, array.sharding, stage, target)(array)


def _is_copied(source: Any, mesh: Mesh) -> bool:
    """Whether several pipelines, but not all devices, have the array."""
    stage = mesh.devices.shape[1]
    return bool(
        source.mesh.axis_names[:1] == (DATA,) and stage < source.mesh.size < mesh.size
    )


def spread_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Returns a sharding over all devices, else over stages, else replicated.

    The first of these by which a dimension divides is used.

    Args:
        shape: Shape of the global array.
        mesh: Mesh of all devices, by stage.
    """
    stages = mesh.devices.shape[0]
    for count, axes in ((mesh.size, mesh.axis_names), (stages, (STAGE,))):
        for dim, size in enumerate(shape):
            if size and size % count == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))
    return NamedSharding(mesh, PartitionSpec())


def collected(array: Any, target: NamedSharding, mesh: Mesh) -> Any:
    """Moves an array from all devices to the devices of a stage.

    All processes call this in the same order.

    Args:
        array: Array on all devices.
        target: Sharding on the devices of the stage, or on all.
        mesh: Mesh of all devices, by stage.
    """
    if is_key(array):
        words = collected(jax.random.key_data(array), target, mesh)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    if target.device_set == array.sharding.device_set:
        return jax.device_put(array, target)
    together = NamedSharding(_stage_mesh(mesh, target.mesh), target.spec)
    every = run_alone(jax.jit(lambda x: x, out_shardings=together), array, mesh)
    if not is_here(target):
        return absent(array, target)
    return jax.make_array_from_single_device_arrays(
        array.shape, target, shards_on(every, target)
    )


def _stage_mesh(mesh: Mesh, inner: Any) -> Mesh:
    devices = mesh.devices.reshape(-1, *inner.devices.shape)
    return Mesh(devices, (STAGE, *inner.axis_names))


@functools.lru_cache(maxsize=256)
def _spreading(
    shape: tuple[int, ...],
    dtype: Any,
    source: NamedSharding,
    stage: int,
    target: NamedSharding,
) -> Callable[[Any], Any]:
    mesh: Any = target.mesh
    together = _stage_mesh(mesh, source.mesh)
    names = source.mesh.axis_names
    spec = rows_of(source.spec)
    stacked = NamedSharding(together, behind(spec))
    shape = shape or (1,)
    nothing = [
        zeros
        for other, devices in enumerate(together.devices)
        if other != stage
        for zeros in zeros_on(shape, dtype, NamedSharding(Mesh(devices, names), spec))
    ]

    def gather(x: Any) -> Any:
        return jax.lax.all_gather(x, STAGE)[stage]

    program = jax.jit(
        jax.shard_map(
            gather,
            mesh=together,
            in_specs=stacked.spec,
            out_specs=spec,
            check_vma=False,  # Gathered values are equal on all stages.
        ),
        out_shardings=target,
    )

    def run(array: Any) -> Any:
        shards = list(nothing)
        if is_here(source):
            rows = array if array.shape else array.reshape(1)
            shards += [shard.data for shard in rows.addressable_shards]
        size = (len(mesh.devices) * shape[0], *shape[1:])
        whole = jax.make_array_from_single_device_arrays(size, stacked, shards)
        result = run_alone(program, whole, mesh)
        return result if array.shape else result.reshape(())

    return run
