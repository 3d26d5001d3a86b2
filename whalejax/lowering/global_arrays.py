"""Arrays on the devices of one stage, or of all stages, with one or more processes.

An array on devices of other processes alone is None in this process, or an array
without shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.adapters.leaves import is_key
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.plan.plan import Plan


def stages_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh (stage, device) of all devices of a plan with stage programs.

    Args:
        plan: Plan with stage programs.
        devices: Devices of the plan, in node order.
    """
    assert plan.stages is not None
    if plan.pipelines:
        each = len(devices) // len(plan.pipelines)
        several = [
            stages_mesh(own, devices[r * each : (r + 1) * each]).devices
            for r, own in enumerate(plan.pipelines)
        ]
        return Mesh(np.concatenate(several), ("stage", "device"))
    rows = np.array(devices).reshape(len(plan.stage_plans), -1)
    return Mesh(rows[list(plan.stages.blocks or range(len(rows)))], ("stage", "device"))


def is_here(sharding: NamedSharding) -> bool:
    """Returns whether some devices of a sharding belong to this process."""
    return bool(sharding.addressable_devices)


def put_global(value: Any, sharding: NamedSharding) -> Any:
    """Puts a value on devices, some of which may belong to other processes.

    Args:
        value: Full value, equal in all processes.
        sharding: Sharding of the result.
    """
    if not isinstance(value, jax.Array):
        # Devices may share memory with a NumPy array, even with may_alias=False.
        value = np.array(value, copy=True)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding, may_alias=False)
    value = np.asarray(value)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def aval_with_sharding(aval: Any, sharding: NamedSharding) -> Any:
    """Returns an abstract array with a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def results_of(lowered: Any, compiled: Any) -> Any:
    """Returns the abstract results of a compiled program, with their shardings.

    Args:
        lowered: Lowered program, with the shapes of the results.
        compiled: Compiled program, with their shardings.
    """
    return jax.tree.map(aval_with_sharding, lowered.out_info, compiled.output_shardings)


def absent(aval: Any, sharding: NamedSharding) -> Any:
    """Returns an array without shards in this process."""
    if is_key(aval):
        words = jax.eval_shape(jax.random.key_data, aval)
        return wrapped(absent(words, sharding), impl_of(aval))
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, [], dtype=aval.dtype
    )


class StageBroadcast:
    """Copies arrays from the devices of their stages to all devices.

    Attributes:
        mesh: Mesh of all devices, by stage.
        whole: Sharding of the results: replicated over all devices.
    """

    def __init__(
        self, wholes: Sequence[NamedSharding], stages: Sequence[int], avals: Any
    ) -> None:
        """Prepares the broadcast of arrays from their stages.

        Args:
            wholes: For each stage, the sharding that replicates over all its devices.
            stages: Stage of each array.
            avals: Abstract arrays.
        """
        rows = [np.asarray(whole.mesh.devices).reshape(-1) for whole in wholes]
        self.mesh = Mesh(np.stack(rows), (STAGE, "device"))
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self._wholes = wholes
        self._stages = list(stages)
        self._avals = list(avals)
        self._program: Callable[..., list[Any]] | None = None

    def tell(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays on all devices.

        Args:
            arrays: Arrays that are in this process, None for others.
        """
        if not arrays or self.whole.is_fully_addressable:
            copied: list[Any] = jax.device_put(list(arrays), [self.whole] * len(arrays))
            return copied
        if self._program is None:
            self._program = self._build()
        told: list[Any] = run_alone(self._program, arrays, self.mesh)
        return told

    def _build(self) -> Callable[..., list[Any]]:
        stages, avals = self._stages, self._avals
        raw = [jax.eval_shape(unwrapped, a) for a in avals]
        by_stage = NamedSharding(self.mesh, PartitionSpec(STAGE))
        me = jax.process_index()
        nothing: list[list[Any]] = []
        for stage, r in zip(stages, raw, strict=True):
            zeros = np.zeros((1, *r.shape), r.dtype)
            others = np.delete(self.mesh.devices, stage, axis=0).flat
            mine = [d for d in others if d.process_index == me]
            nothing.append([jax.device_put(zeros, d) for d in mine])
        rows = {
            stage: jax.jit(_as_row, out_shardings=self._wholes[stage])
            for stage in set(stages)
        }
        tell = self._teller()

        def run(arrays: Sequence[Any]) -> list[Any]:
            stacked = []
            for x, stage, r, zeros in zip(arrays, stages, raw, nothing, strict=True):
                shards = list(zeros)
                if is_here(self._wholes[stage]):
                    shards += [s.data for s in rows[stage](x).addressable_shards]
                shape = (self.mesh.devices.shape[0], *r.shape)
                stacked.append(
                    jax.make_array_from_single_device_arrays(shape, by_stage, shards)
                )
            return tell(stacked)

        return run

    def _teller(self) -> Callable[..., list[Any]]:
        stages, avals = self._stages, self._avals

        def gather(xs: Sequence[Any]) -> list[Any]:
            every = [jax.lax.all_gather(x, STAGE, tiled=True) for x in xs]
            return [x[stage] for x, stage in zip(every, stages, strict=True)]

        told = jax.shard_map(
            gather,
            mesh=self.mesh,
            in_specs=PartitionSpec(STAGE),
            out_specs=PartitionSpec(),
            check_vma=False,  # Gathered arrays are equal on all stages.
        )
        impls = [impl_of(a) for a in avals]

        def tell(xs: Sequence[Any]) -> list[Any]:
            return [wrapped(x, i) for x, i in zip(told(xs), impls, strict=True)]

        return jax.jit(tell, out_shardings=self.whole)


class StageMetrics:
    """Metrics of one stage, copied to all devices for all processes to read."""

    def __init__(
        self, avals: Any, whole: Sequence[NamedSharding], stage: int = -1
    ) -> None:
        """Prepares the broadcast of a stage's metrics.

        Args:
            avals: Abstract metrics.
            whole: For each stage, the sharding that replicates over all its devices.
            stage: Stage of the metrics; default: the last one.
        """
        leaves, self._tree = jax.tree.flatten(avals)
        self._alone = all(sharding.is_fully_addressable for sharding in whole)
        told = [stage % len(whole)] * len(leaves)
        self._everywhere = StageBroadcast(whole, told, leaves)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if not self._alone:
            leaves = self._everywhere.tell(leaves)
        call: Any = jax.tree.unflatten(self._tree, leaves)
        return call


def run_alone(program: Callable[[Any], Any], arrays: Any, mesh: Any) -> Any:
    """Runs a program, and waits for it if its mesh spans several processes on CPUs.

    On CPUs, a program blocks threads while it waits for other processes. A second
    program could need these threads, and both would wait for ever. So the arguments are
    awaited before such a program starts, and then its results.

    Args:
        program: Function from arrays to arrays.
        arrays: Arguments of the program; those of other processes may have any value.
        mesh: Mesh of the program.
    """
    waits = mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"
    if waits:
        jax.block_until_ready(arrays)
    result = program(arrays)
    if waits:
        jax.block_until_ready(result)
    return result


def settle() -> None:
    """Waits for all work of this process, if several processes run on CPUs.

    Unfinished work and the next program could wait for each other; see ``run_alone``.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(jax.live_arrays())


def seen_on(
    array: Any, whole: NamedSharding, shape: tuple[int, ...] | None = None
) -> Any:
    """Returns the part of a global array that is on one stage.

    Args:
        array: Array on all devices.
        whole: Sharding over all devices of the stage.
        shape: Shape of the result if it is a slice of the global array; default: that
            of the global array.

    Returns:
        The array of the stage; None if this process has no devices of the stage.
    """
    if not is_here(whole):
        return None
    if is_key(array):
        words = seen_on(jax.random.key_data(array), whole)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    return jax.make_array_from_single_device_arrays(
        array.shape if shape is None else shape, whole, shards_on(array, whole)
    )


def assemble_global(
    copies: Sequence[Any], whole: NamedSharding, shape: tuple[int, ...] | None = None
) -> Any:
    """Returns one array on all devices, from arrays of the stages.

    Args:
        copies: Arrays of the stages with devices in this process.
        whole: Sharding over all devices.
        shape: Shape of the global array if the copies are slices of it; default: the
            shape of the copies.
    """
    first = copies[0]
    if is_key(first):
        words = assemble_global([jax.random.key_data(x) for x in copies], whole)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(first))
    shards = [shard.data for x in copies for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        first.shape if shape is None else shape, whole, shards
    )


def shards_on(array: Any, sharding: NamedSharding) -> list[Any]:
    """Returns an array's shards on the devices of a sharding.

    Args:
        array: Array with shards.
        sharding: Sharding over these devices.
    """
    devices = sharding.addressable_devices
    return [s.data for s in array.addressable_shards if s.device in devices]


def _as_row(x: Any) -> Any:
    return unwrapped(x)[None]


def unwrapped(x: Any) -> Any:
    """Returns the array; for random keys, their data."""
    return jax.random.key_data(x) if is_key(x) else jnp.asarray(x)


def wrapped(x: Any, impl: Any) -> Any:
    """Returns random keys from their data; other arrays are unchanged.

    Args:
        x: Data of keys, or another array.
        impl: Key implementation that ``impl_of`` returned.
    """
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def raw_array(x: Any) -> Any:
    """Returns the data of random keys; other arrays, real or abstract, are unchanged.

    Args:
        x: Keys, or another array.
    """
    if not is_key(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, x)
    return jax.random.key_data(x)


def impl_of(aval: Any) -> Any:
    """Returns the implementation of random keys, or None for other arrays."""
    if not is_key(aval):
        return None
    impl: list[Any] = []

    def look(key: Any) -> Any:
        impl.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look, aval)
    return impl[0]


def rows_of(spec: Any) -> Any:
    """Returns a spec with at least one dimension, for a scalar reshaped to one."""
    return spec if len(spec) else PartitionSpec(None)


def behind(spec: Any) -> PartitionSpec:
    """Returns the spec of arrays of all stages, concatenated along dimension 0.

    Args:
        spec: Spec of each array on its stage; it names the first dimension.
    """
    first, *others = spec
    inner = () if first is None else first if isinstance(first, tuple) else (first,)
    return PartitionSpec((STAGE, *inner), *others)


def zeros_on(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> list[Any]:
    """Returns the shards of an array of zeros on the devices of this process.

    Args:
        shape: Shape of the global array.
        dtype: Dtype of the array.
        sharding: Sharding of the global array.
    """
    local = sharding.shard_shape(tuple(shape))
    zeros = np.zeros(local, dtype)
    return [jax.device_put(zeros, d) for d in sharding.addressable_devices]
