"""Checks that a plan matches the machine and the model.

It compares hashes and shapes before anything compiles, because compiler messages do not
use the user's terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
import optax

from whalejax.adapters.base import Adapter
from whalejax.capture import Captured
from whalejax.capture.batch import check_batch
from whalejax.capture.named_axes import fixed_devices
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.lowering.spmd.evaluate import HOST_MEMORY
from whalejax.meshes.checks import short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems, warn
from whalejax.meshes.jax_mesh import are_devices
from whalejax.meshes.units import count_text, gigabytes
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


_OTHER_MODEL: Final = (
    "this plan was made for another model or batch; plan again, or give the "
    "trainable=, axis_names= and batch_axes= that it was made with"
)


_OTHER_LOSS: Final = (
    "this loss is not the one that the plan was made for: the model is the same, and "
    "the operations are not (the model may be in another mode, such as eval, or "
    "another version of JAX traced them). The step trains "
    "the loss that wh.compile was given; time and memory were predicted for the other. "
    "Plan again with wh.plan(loss_fn, …), or give wh.compile the loss of the plan"
)


def check_fixed_devices(captured: Captured, plan: Plan, devices: Sequence[Any]) -> None:
    """Refuses a loss whose ``jax.shard_map`` runs on other devices than the plan.

    Args:
        captured: The traced loss.
        plan: Plan to run.
        devices: Devices of the plan in node order.

    Raises:
        PlanError: A program of the plan has other devices, or another order of them.
    """
    parts = plan.stages is not None or bool(plan.shares) or plan.combine != "mean"
    for own, line in fixed_devices(captured.jaxpr):
        if own == tuple(devices) and not parts:
            continue
        mine = [device.id for device in devices]
        why = (
            "programs of this plan run on parts of these devices"
            if own == tuple(devices)
            else f"the plan runs on devices {mine}, in this order"
        )
        raise PlanError(
            f"loss_fn calls jax.shard_map on devices {[d.id for d in own]} ({line}), "
            f"and {why}. Remove jax.shard_map, as the plan divides the work itself; or "
            "give it a mesh of the plan's devices in their order, and plan without "
            "stages, shares and combine"
        )


def devices_of(plan: Plan, devices: Any) -> list[Any]:
    """Returns the devices of a plan: the given ones, or all.

    Args:
        plan: Plan to run.
        devices: Devices in node order, or None.

    Raises:
        PlanError: The plan is for other hardware, another order of kinds, or another
            number of devices. Or ``devices`` is empty or has duplicates.
    """
    if isinstance(devices, Iterator):
        devices = list(devices)
    chosen = devices is not None
    if chosen and not are_devices(devices):
        raise PlanError(
            f"devices is {short_repr(devices)}; expected devices in node order, such "
            "as "
            'jax.devices("cpu")[:8], or None for all'
        )
    result = list(devices) if chosen else jax.devices()
    if not chosen and not _same_hardware(plan.cluster, result):
        raise PlanError(
            f"this plan is for {plan.cluster.describe()}; here are {len(result)}×"
            f"{result[0].device_kind}. Make one for this machine: --cluster local, or "
            'cluster="local" in wh.plan. From Python, devices= runs a plan on as many '
            "devices of another kind"
        )
    if not chosen:
        _check_places(plan.cluster, result)
    if not chosen and len(result) == plan.cluster.num_devices:
        result = result[: plan.num_devices]
    numbers = Counter(map(id, result))
    if twice := dict.fromkeys(str(d) for d in result if numbers[id(d)] > 1):
        raise PlanError(
            f"devices has {', '.join(twice)} more than once; expected "
            f"{plan.num_devices} different ones"
        )
    if len(result) != plan.num_devices:
        count = plan.num_devices
        virtual = (
            f"Plan again for this machine. The environment variable "
            f"JAX_NUM_CPU_DEVICES={count}, or "
            f'jax.config.update("jax_num_cpu_devices", {count}) before anything asks '
            "for devices, makes virtual ones"
        )
        remedy = "Plan again for this machine"
        if len(result) > count:
            remedy += f", or pass devices=jax.devices()[:{count}]"
        elif result[0].platform == "cpu":
            remedy = virtual
        there = "devices= has" if chosen else "here are"
        all_here = len(jax.devices()) if chosen else 0
        if chosen and len(result) < count <= all_here:
            remedy = f"Plan again for {len(result)}, or give {count} of all {all_here}"
        raise PlanError(
            f"this plan is for {count_text(count, 'device')} "
            f"({plan.cluster.describe()}); {there} {len(result)} "
            f"({result[0].device_kind}). {remedy}"
        )
    return result


def _same_hardware(cluster: Cluster, devices: Sequence[Any]) -> bool:
    """Returns whether devices match a cluster, if the catalogue knows their kinds."""
    from whalejax.meshes.catalogue import entries, entry_of_device

    present = [entry_of_device(device.device_kind) for device in devices]
    names = {entry.kind.name for entry in present if entry is not None}
    catalogued = {k.name for k in cluster.kinds if k.name in entries()} - {"cpu"}
    return devices[0].platform == cluster.platform and catalogued <= names


def _check_places(cluster: Cluster, devices: Sequence[Any]) -> None:
    """Refuses devices of another kind than the plan has at the same position."""
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
    """Raises if a plan was made for a batch of other leaves or shapes.

    Args:
        plan: Plan to run.
        batch: Global batch, abstract or real.
        batch_axes: Batch dimension of each leaf of the batch.

    Raises:
        WhaleError: The batch is invalid or differs from the plan's.
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
    """Raises if trained parameters have other shapes than a plan's.

    It is called if the loss cannot be traced, because other shapes may be the cause.

    Args:
        plan: Plan to run.
        adapter: Model to run.

    Raises:
        PlanError: Shapes differ.
    """
    problems = Problems()
    leaves = jax.tree.leaves(adapter.params)
    shapes = map(_shape, leaves)
    given = dict(zip(adapter.param_paths, shapes, strict=True))
    planned = {leaf.path: list(leaf.shape) for leaf in plan.trained}
    for path in sorted({*planned, *given}):
        a, b = (x.get(path, "no such leaf") for x in (planned, given))
        if a != b:
            problems.add(f"{path}: the plan has {a}, the model {b}")
    problems.raise_if_any(PlanError, title=_OTHER_MODEL)


def _shape(leaf: Any) -> list[int]:
    return list(leaf.shape)


def check_same_model(
    plan: Plan, captured: Captured, example: Any, *, trains: bool = True
) -> None:
    """Raises if a plan was made for another model or batch.

    For another loss on the same model it only warns, because operations may also differ
    if another version of JAX traced them.

    Args:
        plan: Plan to run.
        captured: Captured loss of the model to run.
        example: Global batch of the model.
        trains: Whether to train the loss. If not, another loss is allowed.

    Raises:
        PlanError: The model or batch differs.
    """
    problems = Problems()
    planned = {x.path: (x.shape, x.dtype, x.trained) for x in plan.leaves}
    given = {t.path: (t.shape, t.dtype, not t.frozen) for t in captured.graph.params}
    planned_model, _, planned_loss = plan.model_hash.partition("-")
    model, _, loss = captured.graph.model_hash.partition("-")
    # A file may have the hash of one model and the parameters of another.
    if model == planned_model and planned == given:
        if planned_loss not in ("", loss) and trains:
            warn(_OTHER_LOSS)
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
            f"the loss or its marks changed (the plan has hash {planned_model}, the "
            f"model {model})"
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
    """Refuses an optimizer whose state differs in size from the plan's.

    If the plan has no optimizer state, it warns that more memory is needed.

    Raises:
        PlanError: The sizes differ.
    """
    planned = plan.optimizer_bytes
    if planned is None or optimizer is None:
        return
    given = optimizer_bytes(adapter, optimizer).followed_bytes
    if given and not planned:
        warn(
            f"the optimizer keeps {gigabytes(given)} beside the parameters, and the "
            "plan was made without one that keeps any: more memory is needed than was "
            "predicted. Give wh.plan the optimizer that wh.compile is given"
        )
    elif given != planned:
        more = "more" if given > planned else "less"
        raise PlanError(
            f"this plan was made for another optimizer: the one given keeps "
            f"{gigabytes(given)} beside the parameters, and the plan counts "
            f"{gigabytes(planned)} (all of it, not one device's part), so that "
            f"{more} memory is needed than was predicted. Plan again with "
            "wh.plan(…, optimizer=…), and give wh.compile the same"
        )


def check_host_memory(plan: Plan, device: Any) -> None:
    """Refuses a plan with offload if the devices cannot access host memory.

    Raises:
        PlanError: The devices cannot access host memory.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if plan.offload and HOST_MEMORY not in kinds:
        saved = plan.memory.host_bytes
        raise PlanError(
            f"the plan keeps {' and '.join(plan.offload)} in host memory "
            f"({gigabytes(saved)} of each device), and a {device.device_kind} reaches "
            f"none here: it has {', '.join(kinds) or 'no memory that JAX knows of'} "
            "(so have GPUs that are compiled for and not there). Plan with offload=()"
        )
