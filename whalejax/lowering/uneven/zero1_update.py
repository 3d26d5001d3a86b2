"""ZeRO-1 over replicas: each stores and updates a slice of the optimizer's state.

After the gradient reduction, each replica has all gradients, and computes values of all
of them, such as their norm. The elementwise part of the update runs on the slices of
the replica. Then the replicas gather the parameters. So every number comes from one
replica, and copies on different devices cannot diverge.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from whalejax.adapters.base import Adapter
from whalejax.adapters.leaves import is_key
from whalejax.lowering.optimizer_state import owners_of
from whalejax.lowering.runner import finished
from whalejax.lowering.spmd.evaluate import named_sharding
from whalejax.lowering.spmd.optimizer_offload import (
    Follower,
    FollowerPart,
    UpdateParts,
    UpdateRun,
    evaluated,
    flattened,
)
from whalejax.lowering.spmd.spmd_executor import Program, followers, stepping
from whalejax.lowering.step_runner import Metrics
from whalejax.lowering.train_state import TrainState
from whalejax.lowering.uneven.flat_all_reduce import DATA, by_dtype, on_shards
from whalejax.lowering.uneven.replica import Replica
from whalejax.meshes.jax_mesh import partition_spec
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


def cut_along(plan: Plan) -> dict[int, int]:
    """Returns the sliced dimension of each parameter's optimizer state, by number.

    Args:
        plan: Plan with several replicas.
    """
    return {
        number: dim
        for number, leaf in enumerate(plan.trained)
        for dim, axes in enumerate(leaf.optimizer_spec)
        if DATA in axes
    }


def elementwise(
    adapter: Adapter, optimizer: optax.GradientTransformation
) -> frozenset[str]:
    """Returns the paths of parameters with optimizer state and elementwise updates.

    Args:
        adapter: Adapter of the model, with abstract parameters.
        optimizer: Optax transformation.
    """
    extended = optax.with_extra_args_support(optimizer)
    result = followers(extended, adapter, state=True, params=(), small=True)
    return frozenset(adapter.param_paths[one.fresh] for one in result if one.state)


class ReplicaSlices:
    """The slices of one replica, and the update of them.

    Attributes:
        dims: Dimension in which each parameter's state is sliced, by number.
        owners: Number of the parameter that each leaf of the optimizer's state follows.
    """

    def __init__(
        self, program: Program, state: TrainState, replica: int, replicas: int
    ) -> None:
        """Prepares the update of the slices; compiles nothing.

        Args:
            program: Loss, optimizer and plan on the replica's mesh.
            state: Abstract full state.
            replica: Number of the replica.
            replicas: Number of replicas.
        """
        self.program, self.dims = program, cut_along(program.plan)
        self._state = jax.tree.leaves(state.opt_state)
        leaves = program.plan.trained
        self._replica, self._replicas = replica, replicas
        self.owners = owners_of(
            state.opt_state, [(leaf.path, leaf.shape) for leaf in leaves]
        )
        self._followers = [self._follower(number) for number in self.dims]

    def _follower(self, number: int) -> Follower:
        leaves = self.program.plan.trained
        count = len(leaves)
        places = [i for i, owner in enumerate(self.owners) if owner == number]
        return Follower(
            inputs=(number, count + number),
            state=tuple((2 * count + i, count + i) for i in places),
            fresh=number,
            hosted=frozenset(2 * count + i for i in places),
            spec=leaves[number].param_spec,
        )

    def replica_slice(self, shard: Any, number: int) -> Any:
        """Returns the replica's slice of a device's shard of a parameter."""
        dim = self.dims[number]
        size = shard.shape[dim] // self._replicas
        first = self._replica * size
        return lax.slice_in_dim(shard, first, first + size, axis=dim)

    def slice_optimizer_state(self, state: Any) -> Any:
        """Slices the optimizer's full state for this replica."""
        leaves = jax.tree.leaves(state)
        structure: Any = jax.tree.structure(state)
        for place, owner in enumerate(self.owners):
            if owner in self.dims:
                spec = partition_spec(self.program.plan.trained[owner].param_spec)
                leaves[place] = jax.shard_map(
                    functools.partial(self.replica_slice, number=owner),
                    mesh=self.program.mesh,
                    in_specs=spec,
                    out_specs=spec,
                )(leaves[place])
        return structure.unflatten(leaves)

    def update(
        self,
        program: Program,
        params: Sequence[Any],
        state: Any,
        gradients: Sequence[Any],
        loss: Any,
        applies: Any = None,
    ) -> tuple[list[Any], Any]:
        """Runs the optimizer's step on the slices of this replica.

        Returns:
            Parameters and state after the step. They are slices, except for parameters
            that are not sliced.

        Raises:
            PlanError: The optimizer reads more of the state than the replica's slices.
        """
        structure: Any = jax.tree.structure(program.adapter.params)
        tree: Any = jax.tree.structure(state)
        step = stepping(program.optimizer, structure, tree, skips=applies is not None)
        others = loss, jnp.asarray(True) if applies is None else applies
        values = [*params, *gradients, *self._state, *others]
        parts = UpdateParts(flattened(step, values), self._followers)
        whole = self.dims.keys() - {part.follower.fresh for part in parts.parts}
        if whole:
            raise PlanError(
                f"the plan cuts the optimizer's state of {len(whole)} parameters into "
                f"slices, such as {program.plan.trained[min(whole)].path}, but this "
                "optimizer reads each of them in full at once. Compile with the "
                "optimizer of the plan, or plan with this one"
            )
        values = [*params, *gradients, *jax.tree.leaves(state), *others]
        results = _SlicedUpdateRun(self, parts, values).outputs()
        count = len(params)
        return results[:count], tree.unflatten(results[count:])


class _SlicedUpdateRun(UpdateRun):
    """Runs the equations of an update outside the loops, then this replica's slices."""

    def __init__(
        self, slices: ReplicaSlices, parts: UpdateParts, values: Sequence[Any]
    ) -> None:
        super().__init__(parts, values, slices.program.mesh)
        self._slices = slices

    def part(self, part: FollowerPart) -> dict[int, Any]:
        follower, spec = part.follower, partition_spec(part.follower.spec)
        target = self.body.invars[follower.inputs[0]]
        states = [self.body.invars[i] for i, _ in follower.state]
        whole = [target, *part.whole]
        outs = [self.body.outvars[place] for place in part.places]

        def local(
            cut: Sequence[Any], held: Sequence[Any], single: Sequence[Any]
        ) -> list[Any]:
            own = [self._slices.replica_slice(x, follower.fresh) for x in cut]
            env = dict(
                zip(
                    (*whole, *states, *part.single), (*own, *held, *single), strict=True
                )
            )
            return evaluated(part.equations, outs, target, env)

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(spec, spec, PartitionSpec()),
            out_specs=[spec] * len(outs),
            check_vma=False,  # Equations run as they were traced.
        )
        results = mapped(
            *(
                [self.env[v] for v in several]
                for several in (whole, states, part.single)
            )
        )
        return dict(zip(part.places, results, strict=True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPiece:
    """Slice of an array that each replica sends when all gather the array.

    Attributes:
        shard: Shape of a device's part of the full array.
        spec: Spec of the array on a replica.
        dim: Dimension of the replicas' slices. None if all replicas have the full
            array, of which each sends an equal chunk.
    """

    shard: tuple[int, ...]
    spec: PartitionSpec
    dim: int | None

    def size(self, replicas: int) -> int:
        """Returns the number of elements that one device sends."""
        return -(-math.prod(self.shard) // replicas)

    def send_buffer(self, shard: Any, replica: int, replicas: int) -> Any:
        """Returns the buffer that a device sends."""
        flat = shard.reshape(-1)
        if self.dim is not None:
            return flat
        size = self.size(replicas)
        flat = jnp.pad(flat, (0, size * replicas - flat.size))
        return lax.slice_in_dim(flat, replica * size, (replica + 1) * size)

    def assemble(self, rows: Any) -> Any:
        """Returns the device's part of the full array from the replicas' buffers."""
        if self.dim is None:
            return rows.reshape(-1)[: math.prod(self.shard)].reshape(self.shard)
        slices, dim = len(rows), self.dim
        shape = list(self.shard)
        shape[dim] //= slices
        return jnp.moveaxis(rows.reshape(slices, *shape), 0, dim).reshape(self.shard)


class GatherBuffers:
    """Packs a replica's slices for a gather into one buffer for each dtype, and back.

    Attributes:
        avals: Shape and dtype of each buffer over all devices of the replica.
    """

    def __init__(
        self,
        mesh: Mesh,
        pieces: Sequence[GatheredPiece],
        dtypes: Sequence[Any],
        replica: int,
        replicas: int,
    ) -> None:
        """Lays out the gathered slices in one buffer for each dtype.

        Args:
            mesh: Mesh of the replica.
            pieces: Slice to send of each array.
            dtypes: Dtypes of the arrays.
            replica: Number of the replica.
            replicas: Number of replicas.
        """
        self._mesh, self._pieces = mesh, list(pieces)
        self._replica, self._replicas = replica, replicas
        self._groups = by_dtype(dtypes)
        self.avals = [
            jax.ShapeDtypeStruct(
                (mesh.size * sum(pieces[i].size(replicas) for i in group),),
                dtypes[group[0]],
            )
            for group in self._groups
        ]

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the buffers that this replica sends."""

        def local(shards: Sequence[Any]) -> list[Any]:
            return [
                jnp.concatenate(
                    [
                        self._pieces[i].send_buffer(
                            shards[i], self._replica, self._replicas
                        )
                        for i in group
                    ]
                )
                for group in self._groups
            ]

        return on_shards(self._mesh, local, self._specs, self._flat)(list(arrays))

    def unpack(self, buffers: Sequence[Any]) -> list[Any]:
        """Returns the full arrays from the concatenated buffers of all replicas."""

        def local(flat: Sequence[Any]) -> list[Any]:
            local: list[Any] = [None] * len(self._pieces)
            for buffer, group in zip(flat, self._groups, strict=True):
                rows, start = buffer.reshape(self._replicas, -1), 0
                for i in group:
                    end = start + self._pieces[i].size(self._replicas)
                    local[i] = self._pieces[i].assemble(rows[:, start:end])
                    start = end
            return local

        return on_shards(self._mesh, local, self._flat, self._specs)(list(buffers))

    @property
    def _specs(self) -> list[PartitionSpec]:
        return [piece.spec for piece in self._pieces]

    @property
    def _flat(self) -> list[PartitionSpec]:
        return [PartitionSpec(self._mesh.axis_names)] * len(self._groups)


class OwningReplica(Replica):
    """A replica that updates its slices, and gathers the slices of all.

    Attributes:
        slices: Slices of the optimizer's state that this replica stores.
        gathered: Arrays that all replicas gather.
        collect: Function from gathered buffers to the arrays for ``with_gathered``, and
            a scalar that is ready when all arrays are.
    """

    def __init__(
        self,
        program: Program,
        state: TrainState,
        batch: Sequence[Any],
        *,
        replica: int,
        replicas: int,
        slopes: Mapping[int, Any],
        options: Any,
    ) -> None:
        """Traces the replica for its shapes, and compiles nothing."""
        super().__init__(
            program, state, batch, replicas=replicas, slopes=slopes, options=options
        )
        self.slices = ReplicaSlices(program, state, replica, replicas)
        mesh, leaves = program.mesh, program.plan.trained
        self._kept = [
            place
            for place, leaf in enumerate(jax.tree.leaves(state.opt_state))
            if self.slices.owners[place] not in self.slices.dims and _drifts(leaf)
        ]
        frozen = program.captured.frozen
        self._moving = [
            i
            for i, x in enumerate(jax.tree.leaves(state.rest))
            if _drifts(x) and i not in frozen
        ]
        followed = [self.slices.owners[place] for place in self._kept]
        specs = [
            *(leaf.param_spec for leaf in leaves),
            *(() if i is None else leaves[i].optimizer_spec for i in followed),
            *[()] * len(self._moving),
        ]
        places = [named_sharding(spec, mesh) for spec in specs]
        avals = self._told_of(state)
        pieces = [
            GatheredPiece(
                shard=place.shard_shape(tuple(aval.shape)),
                spec=place.spec,
                dim=self.slices.dims.get(i) if i < len(leaves) else None,
            )
            for i, (aval, place) in enumerate(zip(avals, places, strict=True))
        ]
        dtypes = [jnp.dtype(aval.dtype) for aval in avals]
        self.gathered = GatherBuffers(mesh, pieces, dtypes, replica, replicas)
        self._finished = self._jit(self._finish_own, donate_argnums=0)
        self.collect: Callable[..., tuple[list[Any], Any]] = self._jit(
            self._collect, out_shardings=(places, None)
        )

    def _told_of(self, state: TrainState) -> list[Any]:
        kept, rest = jax.tree.leaves(state.opt_state), jax.tree.leaves(state.rest)
        return [
            *jax.tree.leaves(state.params),
            *(kept[place] for place in self._kept),
            *(rest[i] for i in self._moving),
        ]

    def finish_own(
        self, state: TrainState, buffers: Sequence[Any]
    ) -> tuple[TrainState, Metrics, Any, list[Any]]:
        """Updates this replica's slices.

        Args:
            state: State after the previous step; its buffers are donated.
            buffers: Buffers that the exchange returned.

        Returns:
            State without parameters, metrics, the paces of all replicas, and buffers to
            gather.
        """
        rest = dataclasses.replace(state, params=())
        result: tuple[TrainState, Metrics, Any, list[Any]] = self._finished(
            rest, state.params, buffers
        )
        for leaf in jax.tree.leaves(state.params):
            leaf.delete()
        return result

    def _finish_own(
        self, state: TrainState, params: Any, buffers: Sequence[Any]
    ) -> tuple[TrainState, Metrics, Any, list[Any]]:
        state = dataclasses.replace(state, params=params)
        sums, told, paces = self._sent.unflatten(self._buffers.unpack(buffers))
        rest = self._after(state.rest, told)
        new, metrics = finished(self.program, state, sums, rest, end=self.slices.update)
        packed = self.gathered.pack(self._told_of(new))
        return dataclasses.replace(new, params=()), metrics, paces, packed

    def _collect(self, buffers: Sequence[Any]) -> tuple[list[Any], Any]:
        return self.gathered.unpack(buffers), buffers[0][0]

    def with_gathered(self, state: TrainState, told: Sequence[Any]) -> TrainState:
        """Returns the state with the gathered arrays.

        Args:
            state: State without parameters.
            told: Gathered arrays that ``collect`` returned.
        """
        tree: Any = jax.tree.structure(self.program.adapter.params)
        count = tree.num_leaves
        kept, rest = jax.tree.leaves(state.opt_state), jax.tree.leaves(state.rest)
        for several, places, first in (
            (kept, self._kept, count),
            (rest, self._moving, count + len(self._kept)),
        ):
            for offset, place in enumerate(places):
                several[place] = told[first + offset]
        kept_tree: Any = jax.tree.structure(state.opt_state)
        rest_tree: Any = jax.tree.structure(state.rest)
        return dataclasses.replace(
            state,
            params=tree.unflatten(list(told[:count])),
            opt_state=kept_tree.unflatten(kept),
            rest=rest_tree.unflatten(rest),
        )


def _drifts(leaf: Any) -> bool:
    return not is_key(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
