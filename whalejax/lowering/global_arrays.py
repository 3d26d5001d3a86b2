"""Arrays that lie on the devices of one stage, or of all, in one process or several.

What lies on devices of other processes alone is None here, or an array without shards.
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
    """All devices of a plan in stages, each of which has a mesh of its own.

    Args:
        plan: One whose stages have programs of their own.
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
    """Whether this process holds some of the devices."""
    return bool(sharding.addressable_devices)


def put_global(value: Any, sharding: NamedSharding) -> Any:
    """A value of this process on devices, some of which may be other processes'.

    Args:
        value: The whole of it, alike in all processes.
        sharding: Its layout.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding, may_alias=False)
    value = np.asarray(value)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def aval_with_sharding(aval: Any, sharding: NamedSharding) -> Any:
    """Shape and dtype of an array, with a layout."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def results_of(lowered: Any, compiled: Any) -> Any:
    """Shapes, dtypes and layouts of what a compiled program gives.

    Args:
        lowered: The program.
        compiled: The same, compiled, which has chosen the layouts.
    """
    return jax.tree.map(aval_with_sharding, lowered.out_info, compiled.output_shardings)


def absent(aval: Any, sharding: NamedSharding) -> Any:
    """An array of which this process holds nothing."""
    if is_key(aval):
        words = jax.eval_shape(jax.random.key_data, aval)
        return wrapped(absent(words, sharding), impl_of(aval))
    return jax.make_array_from_single_device_arrays(
        aval.shape, sharding, [], dtype=aval.dtype
    )


class StageBroadcast:
    """From the devices of each stage to all devices.

    Attributes:
        mesh: All devices, by stage.
        whole: Shardings of the results over all devices.
    """

    def __init__(
        self, wholes: Sequence[NamedSharding], stages: Sequence[int], avals: Any
    ) -> None:
        """Prepares the broadcast of arrays from their stages.

        Args:
            wholes: For each stage, the layout of what all its devices hold.
            stages: Stage that holds each array.
            avals: Its shape and dtype.
        """
        rows = [np.asarray(whole.mesh.devices).reshape(-1) for whole in wholes]
        self.mesh = Mesh(np.stack(rows), (STAGE, "device"))
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self._wholes = wholes
        self._stages = list(stages)
        self._avals = list(avals)
        self._program: Callable[..., list[Any]] | None = None

    def tell(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays on all devices.

        Args:
            arrays: Arrays of this process, or None for those that it does not hold.
        """
        if not arrays or self.whole.is_fully_addressable:
            copied: list[Any] = jax.device_put(list(arrays), [self.whole] * len(arrays))
            return copied
        if self._program is None:
            self._program = self._build()
        told: list[Any] = run_alone(self._program, arrays, self.mesh)
        return told

    def _build(self) -> Callable[..., list[Any]]:
        """A program that gathers a row of each stage, and takes that of one."""
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
            check_vma=False,  # What was gathered is alike on all stages.
        )
        impls = [impl_of(a) for a in avals]

        def tell(xs: Sequence[Any]) -> list[Any]:
            return [wrapped(x, i) for x, i in zip(told(xs), impls, strict=True)]

        return jax.jit(tell, out_shardings=self.whole)


class StageMetrics:
    """Metrics of one stage, which all processes can read."""

    def __init__(
        self, avals: Any, whole: Sequence[NamedSharding], stage: int = -1
    ) -> None:
        """Prepares the broadcast of a stage's metrics.

        Args:
            avals: Its shapes and dtypes.
            whole: For each stage, the layout of what all its devices hold.
            stage: Stage that holds the values; default: the last one.
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
    """Runs a program of several processes, on CPUs when what it takes is there.

    Where a thread of the processor waits for other processes in a program, none may be
    needed by another, or both wait for ever: there its results are waited for as well.

    Args:
        program: From arrays to arrays.
        arrays: Arguments of the program; anything may stand for those of other
            processes.
        mesh: Its devices.
    """
    waits = mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"
    if waits:
        jax.block_until_ready(arrays)
    result = program(arrays)
    if waits:
        jax.block_until_ready(result)
    return result


def settle() -> None:
    """Waits for what this process has begun, where processes share CPUs' threads.

    A program of all processes that begins while another runs can take the threads that
    the other needs; ``run_alone`` says why both then wait for ever.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(jax.live_arrays())


def seen_on(
    array: Any, whole: NamedSharding, shape: tuple[int, ...] | None = None
) -> Any:
    """Returns an array of all devices as the devices of one stage hold it, or None if
    no such device is here.

    Args:
        array: Array on all devices.
        whole: Sharding over all devices of the stage.
        shape: Shape that the devices hold together, where that is a slice of the array.
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
    """One array that all devices hold, of what those of each stage hold.

    Args:
        copies: Alike, of the stages that have devices here.
        whole: Sharding over all devices.
        shape: Shape of the global array, where the copies are slices.
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
    """An array's shards on some of its devices.

    Args:
        array: The array.
        sharding: Sharding over these devices.
    """
    devices = sharding.addressable_devices
    return [s.data for s in array.addressable_shards if s.device in devices]


def _as_row(x: Any) -> Any:
    return unwrapped(x)[None]


def unwrapped(x: Any) -> Any:
    """An array; of random keys, their words."""
    return jax.random.key_data(x) if is_key(x) else jnp.asarray(x)


def wrapped(x: Any, impl: Any) -> Any:
    """Random keys of their words, or another array as it is.

    Args:
        x: The words, or the array.
        impl: Key implementation that ``impl_of`` returned.
    """
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


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
    """The layout of an array with a first dimension, of one that may have none."""
    return spec if len(spec) else PartitionSpec(None)


def behind(spec: Any) -> PartitionSpec:
    """The layout of such arrays of all stages, one behind the other.

    Args:
        spec: Sharding of each array on its stage; it names the first dimension.
    """
    first, *others = spec
    inner = () if first is None else first if isinstance(first, tuple) else (first,)
    return PartitionSpec((STAGE, *inner), *others)


def zeros_on(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> list[Any]:
    """Zeros, on each device here.

    Args:
        shape, dtype: Shape and dtype of the global array.
        sharding: Its layout.
    """
    local = sharding.shard_shape(tuple(shape))
    zeros = np.zeros(local, dtype)
    return [jax.device_put(zeros, d) for d in sharding.addressable_devices]
