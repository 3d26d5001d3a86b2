"""Sums gradients of parallel pipelines, stage by stage.

Each pipeline is divided for its devices, so the stage of a parameter may differ between
pipelines. Parameters with the same stages in all pipelines form a group, and are
exchanged together. All processes run the groups in the same order. A process takes part
if it has devices of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.lowering.global_arrays import is_here, run_alone, seen_on
from whalejax.lowering.uneven.broadcast_init import as_first
from whalejax.lowering.uneven.flat_all_reduce import DATA, Buffers, Exchange


def together(*each: NamedSharding) -> NamedSharding:
    """Returns the sharding of an array with a copy on every pipeline.

    Args:
        each: Shardings of the copies, equal except for the devices.
    """
    return NamedSharding(_stack_meshes([s.mesh for s in each]), each[0].spec)


def row_of(mesh: Any) -> Mesh:
    """Returns the mesh of a stage, with an axis ``data`` of size 1."""
    return Mesh(mesh.devices[None], (DATA, *mesh.axis_names))


def _stack_meshes(meshes: Sequence[Any]) -> Mesh:
    devices = np.stack([mesh.devices for mesh in meshes])
    return Mesh(devices, (DATA, *meshes[0].axis_names))


class StageGroup:
    """Stages with the same arrays, one of each pipeline.

    Attributes:
        stages: Number of the stage in each pipeline.
        here: Numbers of the pipelines whose stage has devices of this process.
        rows: Mesh of each stage, with the axis ``data``.
    """

    def __init__(self, stages: Sequence[int], meshes: Sequence[Mesh]) -> None:
        """Prepares the group; compiles nothing.

        Args:
            stages: Number of the stage in each pipeline.
            meshes: Mesh of each of these stages.
        """
        self.stages = tuple(stages)
        self.rows = [row_of(mesh) for mesh in meshes]
        self._meshes = list(meshes)
        self._mesh = _stack_meshes(meshes)
        wholes = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
        self.here = [r for r, whole in enumerate(wholes) if is_here(whole)]
        self._added: dict[Any, _Added] = {}

    def add(
        self, arrays: Mapping[int, list[Any]], specs: Sequence[PartitionSpec]
    ) -> dict[int, list[Any]]:
        """Returns the sums of arrays over all pipelines, on each stage that is here.

        Args:
            arrays: Arrays of each pipeline with devices in this process, on the devices
                of the stage. The lists are emptied, so packed arrays are not stored
                twice.
            specs: Specs of the arrays.
        """
        if not arrays:
            return {}
        avals = [(x.shape, x.dtype) for x in next(iter(arrays.values()))]
        key = tuple(map(str, avals)), tuple(specs)
        if key not in self._added:
            shapes = [jax.ShapeDtypeStruct(*aval) for aval in avals]
            self._added[key] = _Added(self._mesh, self.rows, self.here, shapes, specs)
        seen = self._row_arrays(arrays, specs)
        for several in arrays.values():
            several.clear()
        result = self._added[key].run(seen)
        return {
            r: [
                seen_on(x, NamedSharding(self._meshes[r], spec))
                for x, spec in zip(several, specs, strict=True)
            ]
            for r, several in result.items()
        }

    def as_first(
        self, arrays: Mapping[int, Sequence[Any]], specs: Sequence[PartitionSpec]
    ) -> dict[int, list[Any]]:
        """Returns arrays with the values of the first pipeline.

        Args:
            arrays: Arrays of each pipeline with devices in this process, on the devices
                of the stage.
            specs: Specs of the arrays.
        """
        if not arrays:
            return {}
        places: Any = {
            r: [NamedSharding(self.rows[r], s) for s in specs] for r in arrays
        }
        seen: Any = self._row_arrays(arrays, specs)
        first: Any = as_first(seen, places, self._mesh, self.rows)
        return {
            r: [
                seen_on(x, NamedSharding(self._meshes[r], spec))
                for x, spec in zip(several, specs, strict=True)
            ]
            for r, several in jax.block_until_ready(first).items()
        }

    def _row_arrays(
        self, arrays: Mapping[int, Sequence[Any]], specs: Sequence[PartitionSpec]
    ) -> dict[int, list[Any]]:
        return {
            r: [
                seen_on(x, NamedSharding(self.rows[r], spec))
                for x, spec in zip(several, specs, strict=True)
            ]
            for r, several in arrays.items()
        }


class _Added:
    def __init__(
        self,
        mesh: Mesh,
        rows: Sequence[Mesh],
        here: Sequence[int],
        avals: Sequence[Any],
        specs: Sequence[PartitionSpec],
    ) -> None:
        self._mesh = mesh
        buffers = {
            r: Buffers(rows[r], avals, [NamedSharding(rows[r], s) for s in specs])
            for r in here
        }
        self._pack = {r: jax.jit(one.pack) for r, one in buffers.items()}
        self._unpack = {
            r: jax.jit(
                one.unpack, out_shardings=[NamedSharding(rows[r], s) for s in specs]
            )
            for r, one in buffers.items()
        }
        self._exchange = Exchange(mesh, rows, buffers[here[0]].avals)

    def run(self, arrays: Mapping[int, list[Any]]) -> dict[int, list[Any]]:
        packed = {}
        for r, several in arrays.items():
            packed[r] = self._pack[r](several)
            several.clear()
        told = run_alone(self._exchange.add, packed, self._mesh)
        return {r: self._unpack[r](several) for r, several in told.items()}


def groups_of(
    owners: Sequence[tuple[int, ...]], meshes: Sequence[Sequence[Mesh]]
) -> dict[tuple[int, ...], StageGroup]:
    """Returns the groups by the stages of each pipeline, in exchange order.

    Args:
        owners: Stage of each array in each pipeline.
        meshes: Meshes of the stages of each pipeline.
    """
    return {
        stages: StageGroup(
            stages, [own[s] for own, s in zip(meshes, stages, strict=True)]
        )
        for stages in sorted(set(owners))
    }
