"""The all-reduce of replicas: one flat buffer for each dtype, in a fixed order.

Replicas compile separate programs, perhaps for different devices, and the order of
collectives may differ between them. So they communicate in one program alone, which
contains an all-reduce (or all-gather) of each buffer and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.lowering.global_arrays import shards_on


DATA = "data"
"""The mesh axis of replicas."""


def by_dtype(dtypes: Sequence[Any]) -> list[list[int]]:
    """Returns the numbers of the arrays of each dtype, in a deterministic order."""
    return [
        [i for i, other in enumerate(dtypes) if other == dtype]
        for dtype in sorted(set(dtypes), key=str)
    ]


def on_shards(
    mesh: Mesh, local: Callable[..., Any], given: Any, found: Any
) -> Callable[..., list[Any]]:
    """Returns a function that runs on each device's own shards.

    Args:
        mesh: Mesh of the devices.
        local: Function from a sequence of shards to another.
        given: Shardings of the inputs.
        found: Shardings of the outputs.
    """
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(given,),
        out_specs=found,
        check_vma=False,  # Every device packs replicated arrays too.
    )


class Buffers:
    """Packs a replica's arrays into one buffer for each dtype, and back.

    Every device packs its own shards. Callers trace ``pack`` and ``unpack``.

    Attributes:
        avals: Shape and dtype of each buffer over all devices of the replica.
    """

    def __init__(
        self, mesh: Mesh, avals: Sequence[Any], places: Sequence[NamedSharding]
    ) -> None:
        """Lays out the arrays in one buffer for each dtype.

        Args:
            mesh: Mesh of the replica.
            avals: Shapes and dtypes of the arrays.
            places: Shardings of the arrays on the mesh.
        """
        self._mesh = mesh
        self._specs = [place.spec for place in places]
        self._shapes = [
            place.shard_shape(tuple(aval.shape))
            for aval, place in zip(avals, places, strict=True)
        ]
        dtypes = [jnp.dtype(aval.dtype) for aval in avals]
        self._groups = by_dtype(dtypes)
        sizes = [math.prod(shape) for shape in self._shapes]
        self.avals = [
            jax.ShapeDtypeStruct(
                (mesh.size * sum(sizes[i] for i in group),), dtypes[group[0]]
            )
            for group in self._groups
        ]

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """Packs arrays into buffers."""

        def local(shards: Sequence[Any]) -> list[Any]:
            return [
                jnp.concatenate([shards[i].reshape(-1) for i in group])
                for group in self._groups
            ]

        return on_shards(self._mesh, local, self._specs, self._flat)(list(arrays))

    def unpack(self, buffers: Sequence[Any]) -> list[Any]:
        """Unpacks buffers into arrays."""

        def local(flat: Sequence[Any]) -> list[Any]:
            local: list[Any] = [None] * len(self._shapes)
            for buffer, group in zip(flat, self._groups, strict=True):
                start = 0
                for i in group:
                    end = start + math.prod(self._shapes[i])
                    local[i] = buffer[start:end].reshape(self._shapes[i])
                    start = end
            return local

        return on_shards(self._mesh, local, self._flat, self._specs)(list(buffers))

    @property
    def _flat(self) -> list[PartitionSpec]:
        return [PartitionSpec(self._mesh.axis_names)] * len(self._groups)


class Exchange:
    """Sums or gathers the buffers of all replicas, with equal results on each.

    Attributes:
        program: Compiled program over all devices. It is None if a process has devices
            of several kinds, which cannot share a program.
    """

    def __init__(
        self,
        mesh: Mesh,
        replicas: Sequence[Mesh],
        avals: Sequence[Any],
        *,
        gathers: bool = False,
    ) -> None:
        """Prepares the exchange; compiles nothing yet.

        Args:
            mesh: Mesh of all devices, replicas along its first axis, ``data``.
            replicas: Mesh of each replica, whose first axis has size 1.
            avals: Shapes and dtypes of a replica's buffers.
            gathers: Whether to concatenate the buffers of all replicas in order,
                instead of summing them; default False.
        """
        self._gathers = gathers
        self._mesh = mesh
        self._replicas = list(replicas)
        self._avals = list(avals)
        inner = mesh.axis_names[1:]
        self._every = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._sums = PartitionSpec(inner) if inner else PartitionSpec()
        self.program: Callable[..., list[Any]] | None = None
        if not _has_several_kinds(mesh):
            meet = _all_gather if gathers else _added
            self.program = jax.jit(
                jax.shard_map(
                    lambda xs: [meet(x) for x in xs],
                    mesh=mesh,
                    in_specs=(self._every.spec,),
                    out_specs=self._sums,
                    check_vma=not gathers,  # Gathered values are equal on all.
                ),
                donate_argnums=() if gathers else 0,
            )

    def abstract(self) -> list[Any]:
        """Returns the abstract buffers of all replicas, with shardings."""
        return [
            jax.ShapeDtypeStruct(
                (len(self._replicas) * aval.shape[0],), aval.dtype, sharding=self._every
            )
            for aval in self._avals
        ]

    def add(self, buffers: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
        """Returns the combined buffers on each replica with devices in this process.

        Args:
            buffers: Buffers of each such replica; they are donated.
        """
        if self.program is None:
            return self._copy_buffers(buffers)
        stacked = [
            jax.make_array_from_single_device_arrays(
                aval.shape,
                aval.sharding,
                [s.data for several in one for s in several.addressable_shards],
            )
            for aval, one in zip(
                self.abstract(), zip(*buffers.values(), strict=True), strict=True
            )
        ]
        sums = self.program(stacked)
        return {
            replica: [
                jax.make_array_from_single_device_arrays(
                    x.shape, sharding, shards_on(x, sharding)
                )
                for x in sums
            ]
            for replica in buffers
            for sharding in [NamedSharding(self._replicas[replica], self._sums)]
        }

    def _copy_buffers(
        self, buffers: Mapping[int, Sequence[Any]]
    ) -> dict[int, list[Any]]:
        places = {
            replica: NamedSharding(self._replicas[replica], self._every.spec)
            for replica in buffers
        }
        first, *others = buffers
        met = list(buffers[first])
        there = [places[first]] * len(met)
        several = [jax.device_put(list(buffers[r]), there) for r in others]
        if self._gathers:
            rows = zip(met, *several, strict=True)
            met = [_one_behind_the_other(x, self._replicas[first].size) for x in rows]
        else:
            for added in several:
                met = [x + y for x, y in zip(met, added, strict=True)]
        result: dict[int, list[Any]] = {
            replica: jax.device_put(met, [place] * len(met))
            for replica, place in places.items()
        }
        return result


def _added(buffer: Any) -> Any:
    return jax.lax.psum(buffer, DATA)


def _all_gather(buffer: Any) -> Any:
    return jax.lax.all_gather(buffer, DATA, tiled=True)


def _one_behind_the_other(rows: Sequence[Any], devices: int) -> Any:
    return jnp.stack([x.reshape(devices, -1) for x in rows], axis=1).reshape(-1)


def _has_several_kinds(mesh: Mesh) -> bool:
    return len({device.device_kind for device in mesh.local_devices}) > 1
