"""Checks that a plan matches the machine, the model and each batch.

Checked by hash and by shape before anything compiles, because the alternative is a
compiler's message that names none of the user's words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from whalejax import _compat
from whalejax.adapters.base import Adapter
from whalejax.adapters.leaves import is_key, is_leaf
from whalejax.capture import Captured
from whalejax.capture.batch import check_batch
from whalejax.lowering.batch_record import dtype_of
from whalejax.lowering.global_arrays import absent, is_here
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.lowering.spmd.evaluate import HOST_MEMORY
from whalejax.meshes.checks import shown
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems, warn
from whalejax.meshes.jax_mesh import are_devices
from whalejax.meshes.units import gigabytes
from whalejax.planner.entries import BatchLeaf
from whalejax.planner.errors import PlanError
from whalejax.planner.plan.plan import Plan


_OTHER_MODEL: Final = (
    "this plan was made for another model or batch; plan again, or give the "
    "trainable=, axis_names= and batch_axes= that it was made with"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """How global batches are checked and laid out over the devices.

    Attributes:
        structure: tree of the batch that was traced.
        leaves: what the plan knows of each leaf.
        shardings: where each goes.
    """

    structure: Any
    leaves: tuple[BatchLeaf, ...]
    shardings: tuple[NamedSharding, ...]

    def abstract(self) -> list[Any]:
        """Flat shapes, dtypes and layouts of a global batch."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype), sharding=sharding)
            for leaf, sharding in zip(self.leaves, self.shardings, strict=True)
        ]

    def place(self, batch: Any) -> list[Any]:
        """Flat leaves of a batch on their devices.

        Args:
            batch: the global batch; with several processes this process's part of it,
                or global arrays.

        Raises:
            PlanError: another structure, shape or kind of number; all are listed.
        """
        problems = Problems()
        placed = []
        for leaf, planned, sharding in zip(
            self.flat(batch), self.leaves, self.shardings, strict=True
        ):
            shapes = [planned.shape]
            if _is_part(leaf, sharding):
                # What lies on devices of other processes alone is not looked at.
                here = is_here(sharding)
                shapes.append(
                    part_shape(sharding, planned.shape) if here else np.shape(leaf)
                )
            problem = self.problem(leaf, planned, shapes)
            if problem:
                problems.add(problem)
            else:
                placed.append(_as_planned(leaf, planned, sharding))
        problems.raise_if_any(PlanError, title="the batch does not match the plan")
        return placed

    def flat(self, batch: Any) -> list[Any]:
        """The leaves of a batch.

        Raises:
            PlanError: they are others than planned. A list may stand for a tuple.
        """
        leaves, structure = jax.tree.flatten(batch)
        self._check_arrays(batch, leaves)
        if structure == self.structure:
            return leaves
        flat = jax.tree_util.tree_flatten_with_path(batch)[0]
        given = [jax.tree_util.keystr(path) for path, _ in flat]
        planned = [leaf.path for leaf in self.leaves]
        if given != planned:
            raise PlanError(
                f"the batch has the leaves {given}; the plan is for {planned}. Give "
                "the same structure, or plan again"
            )
        return leaves

    @staticmethod
    def _check_arrays(batch: Any, leaves: Sequence[Any]) -> None:
        if all(map(is_leaf, leaves)):
            return
        problems = Problems("batch", PlanError)
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if not is_leaf(leaf):
                name = f"batch{jax.tree_util.keystr(path)}"
                problems.add(f"{name} is {shown(leaf)}; expected an array")
        problems.raise_if_any()

    def problem(
        self, leaf: Any, planned: BatchLeaf, shapes: Collection[tuple[int, ...]]
    ) -> str:
        """What is wrong with a leaf, if anything.

        Args:
            leaf: as given.
            planned: what the plan knows of it.
            shapes: that it may have.
        """
        name = f"batch{planned.path}"
        if isinstance(leaf, jax.Array) and not _compat.is_concrete(leaf):
            return (
                f"{name} is being traced; the step is compiled: call it outside jax.jit"
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return f"{name} is a shape without values; give arrays"
        shape = np.shape(leaf)
        dtype = str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
        if shape not in shapes:
            others = [str(other) for other in shapes if other != planned.shape]
            if jax.process_count() == 1 and not others:
                return (
                    f"{name} has shape {shape}; the plan is for the global shape "
                    f"{planned.shape}. Plan again for this batch"
                )
            return (
                f"{name} has shape {shape} in process {jax.process_index()}; the plan "
                f"is for the global shape {planned.shape}, of which this process gives "
                f"{others[0] if others else 'all'}. Give the samples that "
                "step.batch_rows() names (as wh.Feed(..., step) does), or plan again "
                "for another batch"
            )
        if dtype != planned.dtype and not _harmless(dtype, planned.dtype):
            return (
                f"{name} has dtype {dtype}; the plan is for {planned.dtype}. Convert "
                "it, or plan again"
            )
        return ""


def _is_part(leaf: Any, sharding: NamedSharding) -> bool:
    """The leaf may be this process's part of what several processes hold."""
    shared = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return not (shared or sharding.is_fully_addressable or is_key(leaf))


def part_shape(sharding: NamedSharding, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what the devices of this process hold of a global array.

    Args:
        sharding: its layout.
        shape: of all of it.
    """
    spans: list[set[tuple[int, int]]] = [set() for _ in shape]
    for index in sharding.addressable_devices_indices_map(tuple(shape)).values():
        for found, cut, size in zip(spans, index or (), shape, strict=True):
            found.add(cut.indices(size)[:2])
    return tuple(sum(stop - start for start, stop in found) for found in spans)


def _harmless(given: str, planned: str) -> bool:
    """The conversion widens, or is JAX's own from 64 bits to 32 of the same kind."""
    if "key" in given or "key" in planned:
        return False
    a, b = jnp.dtype(given), jnp.dtype(planned)
    narrowed = a.kind == b.kind and (a.itemsize, b.itemsize) == (8, 4)
    return narrowed or np.can_cast(a, b, "safe")


def _as_planned(leaf: Any, planned: BatchLeaf, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array) and not _is_part(leaf, sharding):
        if str(leaf.dtype) != planned.dtype:
            leaf = leaf.astype(planned.dtype)
        same = leaf.sharding == sharding
        return leaf if same else jax.device_put(leaf, sharding)
    array = np.asarray(leaf, jnp.dtype(planned.dtype))
    if not is_here(sharding):
        return absent(jax.ShapeDtypeStruct(planned.shape, array.dtype), sharding)
    if _is_part(leaf, sharding):
        return jax.make_array_from_process_local_data(sharding, array, planned.shape)
    # A loader may fill its buffer again while the step still runs.
    return jax.device_put(array, sharding, may_alias=False)


def devices_of(plan: Plan, devices: Any) -> list[Any]:
    """The devices of a plan: those given, or all of this process's machine.

    Args:
        plan: the plan.
        devices: devices in node order, or None.

    Raises:
        PlanError: the plan is for other hardware, has its kinds in another order, or is
            for another number of devices.
    """
    if isinstance(devices, Iterator):
        devices = list(devices)
    chosen = devices is not None
    if chosen and not are_devices(devices):
        raise PlanError(
            f"devices is {shown(devices)}; expected devices in node order, such as "
            'jax.devices("cpu")[:8], or None for all'
        )
    found = list(devices) if chosen else jax.devices()
    if not chosen and not _same_hardware(plan.cluster, found):
        raise PlanError(
            f"this plan is for {plan.cluster.describe()}; here are {len(found)}×"
            f"{found[0].device_kind}. Make one for this machine: --cluster local, or "
            'cluster="local" in wh.plan. From Python, devices= runs a plan on as many '
            "devices of another kind"
        )
    if not chosen:
        _check_places(plan.cluster, found)
    if not chosen and len(found) == plan.cluster.num_devices:
        found = found[: plan.num_devices]  # the plan may leave devices idle
    numbers = Counter(map(id, found))  # devices are objects of their own
    if twice := dict.fromkeys(str(d) for d in found if numbers[id(d)] > 1):
        raise PlanError(
            f"devices has {', '.join(twice)} more than once; expected "
            f"{plan.num_devices} different ones"
        )
    if len(found) != plan.num_devices:
        virtual = (
            f'. jax.config.update("jax_num_cpu_devices", {plan.num_devices}), before '
            "anything asks for devices, makes virtual ones"
            if found[0].platform == "cpu"
            else ""
        )
        raise PlanError(
            f"this plan is for {plan.num_devices} devices "
            f"({plan.cluster.describe()}); here are {len(found)} "
            f"({found[0].device_kind}). Plan again for this machine, or pass "
            f"devices= with {plan.num_devices} of them{virtual}"
        )
    return found


def _same_hardware(cluster: Cluster, devices: Sequence[Any]) -> bool:
    """The devices are what a cluster describes; kinds of the user's own may be any."""
    from whalejax.meshes.catalogue import entries, entry_of_device

    present = [entry_of_device(device.device_kind) for device in devices]
    names = {entry.kind.name for entry in present if entry is not None}
    catalogued = {k.name for k in cluster.kinds if k.name in entries()} - {"cpu"}
    return devices[0].platform == cluster.platform and catalogued <= names


def _check_places(cluster: Cluster, devices: Sequence[Any]) -> None:
    """Refuse devices of which some are of another kind than the plan has there."""
    from whalejax.meshes.catalogue import entries, entry_of_device

    kinds = [node.kind.name for node in cluster.nodes for _ in range(node.count)]
    for number, (kind, device) in enumerate(zip(kinds, devices, strict=False)):
        present = entry_of_device(device.device_kind)
        if present is None or kind not in entries() or cluster.platform == "cpu":
            continue
        if present.kind.name != kind:
            raise PlanError(
                f"this plan is for {cluster.describe()}, and has device {number} as "
                f"{kind}; it is {device.device_kind} here, of process "
                f"{device.process_index}. Start the processes in the order of the "
                "plan's nodes, or plan for these (wh.Cluster.detect())"
            )


def check_planned(plan: Plan, batch: Any, batch_axes: Any) -> None:
    """Raise if a plan was made for a batch of other leaves or shapes.

    Args:
        plan: the plan.
        batch: the global batch, abstract or real.
        batch_axes: the batch dimension of its leaves.

    Raises:
        WhaleError: it is no batch, or another one.
    """
    check_batch(batch, batch_axes)
    flat = jax.tree_util.tree_flatten_with_path(batch)[0]
    here = [(jax.tree_util.keystr(path), tuple(np.shape(x))) for path, x in flat]
    planned = [(leaf.path, leaf.shape) for leaf in plan.batch]
    if here != planned:
        raise PlanError(
            f"batch has {_leaves_text(here)}; the plan is for {_leaves_text(planned)}. "
            "Give the batch that it was made for, or plan again"
        )


def _leaves_text(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{path or 'one array'} {list(shape)}" for path, shape in leaves)


def check_same_shapes(plan: Plan, adapter: Adapter) -> None:
    """Raise if trained parameters have other shapes than a plan's.

    For where the loss cannot be traced: it may have failed on them, in its own words.

    Args:
        plan: the plan.
        adapter: the model that is to run.

    Raises:
        PlanError: every leaf that both have, in different shapes.
    """
    problems = Problems()
    planned = {leaf.path: leaf.shape for leaf in plan.leaves}
    leaves = jax.tree.leaves(adapter.params)
    for path, leaf in zip(adapter.param_paths, leaves, strict=True):
        shape = tuple(leaf.shape)
        if planned.get(path, shape) != shape:
            problems.add(
                f"{path}: the plan has {list(planned[path])}, the model {list(shape)}"
            )
    problems.raise_if_any(PlanError, title=_OTHER_MODEL)


def check_same_model(plan: Plan, captured: Captured, example: Any) -> None:
    """Raise if a plan was made for another model or batch, listing what differs.

    Args:
        plan: the plan.
        captured: the model that is to run.
        example: its global batch.

    Raises:
        PlanError: every leaf that differs.
    """
    problems = Problems()
    planned = {x.path: (x.shape, x.dtype, x.trained) for x in plan.leaves}
    given = {t.path: (t.shape, t.dtype, not t.frozen) for t in captured.graph.params}
    # A file may state the hash of one model and the parameters of another.
    if captured.graph.model_hash == plan.model_hash and planned == given:
        return
    for path in sorted(set(planned) | set(given)):
        a, b = planned.get(path), given.get(path)
        if a != b:
            problems.add(
                f"{path}: the plan has {_shape_text(a)}, the model {_shape_text(b)}"
            )
    shapes = [leaf.shape for leaf in plan.batch]
    here = [tuple(x.shape) for x in jax.tree.leaves(example)]
    if shapes != here:
        problems.add(f"the batch: the plan is for {shapes}, given is {here}")
    if not problems:
        problems.add(
            f"the loss or its marks changed (the plan has hash {plan.model_hash}, the "
            f"model {captured.graph.model_hash})"
        )
    problems.raise_if_any(
        PlanError,
        title=_OTHER_MODEL,
    )


def _shape_text(entry: tuple[tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return "no such leaf"
    shape, dtype, trained = entry
    return f"{dtype}{list(shape)}{'' if trained else ', not trained'}"


def check_planned_state(
    plan: Plan, adapter: Adapter, optimizer: optax.GradientTransformation | None
) -> None:
    """Warn where an optimizer keeps more than the plan's memory was counted with."""
    planned = plan.optimizer_bytes
    if planned is None or optimizer is None:
        return
    given = optimizer_bytes(adapter, optimizer).followed_bytes
    if given > planned:
        warn(
            f"the optimizer keeps {gigabytes(given)} beside the parameters, and the "
            f"plan counts {gigabytes(planned)} (all of it, not one device's part): "
            "more memory is needed than was predicted. Give wh.plan the optimizer "
            "that wh.compile is given"
        )


def check_host_memory(plan: Plan, device: Any) -> None:
    """Refuse a plan that keeps something where these devices reach nothing."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if plan.offload and HOST_MEMORY not in kinds:
        saved = plan.memory.host_bytes
        raise PlanError(
            f"the plan keeps {' and '.join(plan.offload)} in host memory "
            f"({gigabytes(saved)} of each device), and a {device.device_kind} reaches "
            f"none here: it has {', '.join(kinds) or 'no memory that JAX knows of'} "
            "(so have GPUs that are compiled for and not there). Plan with offload=()"
        )
