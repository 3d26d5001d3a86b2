"""``wh.plan``: from a model, a batch and a cluster to a Plan; no device is touched."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from whalejax.adapters import adapt
from whalejax.batches import batch_leaves, batch_tree
from whalejax.capture import Captured, capture
from whalejax.capture.batch import aval_of
from whalejax.capture.reductions import batch_reductions
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.problems import Problems, WhaleError
from whalejax.optimizers import optimizer_bytes
from whalejax.planner.decide import decide
from whalejax.planner.graph import BatchReduction
from whalejax.planner.plan import Plan, PlanError
from whalejax.planner.search import PLANNED_AXES, Request
from whalejax.precision import CAST_BYTES, PRECISIONS, at_precision


def plan(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    cluster: Cluster | str | None = None,
    default: Any = None,
    precision: str = "f32",
    num_micro_batches: int | None = None,
    allow_idle: bool = False,
    sync_batch_stats: bool = False,
    axis_names: Mapping[str, str] | None = None,
    trainable: Any = None,
    batch_axes: Any = 0,
    mesh: Mapping[str, int] | None = None,
    zero: int | None = None,
    runnable: bool = True,
) -> Plan:
    """Choose how to run a training step on a cluster.

    Args:
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: an NNX module, a Linen module's variables or any pytree; abstract leaves
            will do.
        batch: the GLOBAL batch, abstract or real.
        optimizer: an optax transformation; its state is part of the memory.
        cluster: a cluster, its text such as ``"h100:4x8"``, or None for the devices of
            this process.
        default: strategy of what no mark covers: ``wh.replicate()`` or ``wh.split()``;
            None leaves it to the planner.
        precision: ``"f32"`` (the model's own types) or ``"bf16"`` (bfloat16 compute,
            float32 masters). Float32 leaves of the batch are cast too: give masks and
            targets that must stay exact as integers or booleans.
        num_micro_batches: parts of the global batch, one after the other; None takes
            the fewest that fit.
        allow_idle: accept plans that leave devices idle where none uses all.
        sync_batch_stats: statistics must be those of the global batch: only plans with
            one micro-batch are taken for models that have any.
        axis_names: mesh axes that the model's own annotations name, mapped to ours.
        trainable: what to train, where that is not every parameter: a glob pattern of
            dotted paths such as ``"head.*"``, several in a list, a predicate that takes
            one dotted path, or (NNX) a filter such as ``LoRAParam``. What is left out
            stays whole on every device.
        batch_axes: the batch dimension of the batch's leaves.
        mesh: sizes of mesh axes that you fix, as in ``{"tensor": 4}``; the planner
            chooses the others.
        zero: ZeRO level over ``data`` that you fix: 0, 1 or 2. (Level 3 is the mesh
            axis ``fsdp``.)
        runnable: take only what ``wh.compile`` can run; all of this version's are.

    Returns:
        The plan; ``print`` shows it.

    Raises:
        WhaleError: what was given cannot be planned; every problem is listed.

    >>> import jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> found = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x,
    ...                 optimizer=optax.sgd(0.1), cluster="h100:8")
    >>> found.num_devices
    8
    """
    kind = _check_options(default, precision, num_micro_batches, zero)
    machine = _cluster(cluster)
    _check_mesh(mesh or {}, machine.num_devices, allow_idle)
    adapter = at_precision(
        adapt(model, loss_fn, trainable=trainable, axis_names=axis_names), precision
    )
    captured = capture(
        adapter, batch, num_micro_batches=num_micro_batches or 1, batch_axes=batch_axes
    )
    reductions = batch_reductions(captured)
    if sync_batch_stats and reductions:
        num_micro_batches = _synced(num_micro_batches, reductions)
    request = Request(
        optimizer=optimizer_bytes(adapter, optimizer or optax.identity()),
        state_bytes=_tree_bytes(adapter.rest),
        num_micro_batches=num_micro_batches,
        default=kind,
        cast_bytes=CAST_BYTES[precision],
        num_devices=machine.num_devices,
        mesh=mesh,
        zero=zero,
        reductions=reductions,
    )
    found = _decide(captured, machine, request, precision, batch, allow_idle)
    return dataclasses.replace(
        found, batch_tree=batch_tree(batch), notes=(*found.notes, *adapter.notes)
    )


def _decide(
    captured: Captured,
    machine: Cluster,
    request: Request,
    precision: str,
    batch: Any,
    allow_idle: bool,
) -> Plan:
    decided = functools.partial(
        decide, captured.graph, machine, precision=precision, batch=batch_leaves(batch)
    )
    return _with_fewest_idle(decided, request) if allow_idle else decided(request)


def _with_fewest_idle(decided: Callable[[Request], Plan], request: Request) -> Plan:
    """The plan that uses most devices; where none can, why all of them could not."""
    problem: PlanError | None = None
    for count in range(request.num_devices, 0, -1):
        try:
            return decided(dataclasses.replace(request, num_devices=count))
        except PlanError as error:
            problem = problem or error
    assert problem is not None  # a cluster has at least one device
    raise problem


def _check_options(
    default: Any, precision: str, num_micro_batches: int | None, zero: int | None
) -> str | None:
    problems = Problems("wh.plan")
    if precision not in PRECISIONS:
        problems.add(
            f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}"
        )
    if num_micro_batches is not None and num_micro_batches < 1:
        problems.add(
            f"num_micro_batches is {num_micro_batches}; expected 1 or more, or None"
        )
    if zero not in (None, 0, 1, 2):
        problems.add(
            f"zero is {zero}; expected 0, 1 or 2 (over the axis data). ZeRO-3 is the "
            'mesh axis fsdp: mesh={"fsdp": n}'
        )
    mark = getattr(default, "mark", None)
    if default is not None and (mark is None or mark.kind in ("stage", "pipeline")):
        problems.add(
            f"default is {default!r}; expected wh.replicate(), wh.split() or None"
        )
    elif mark is not None and mark.attributes:
        problems.add(
            f"default is {default!r}; a default takes no arguments. Give "
            f"wh.{mark.kind}(), and mark the regions that need more"
        )
    problems.raise_if_any()
    return None if mark is None else str(mark.kind)


def _synced(num_micro_batches: int | None, reductions: Sequence[BatchReduction]) -> int:
    if num_micro_batches in (None, 1):
        return 1
    places = ", ".join(dict.fromkeys(r.scope or "the loss" for r in reductions))
    raise PlanError(
        f"sync_batch_stats=True asks for statistics of the global batch, and "
        f"num_micro_batches={num_micro_batches} computes them in parts ({places}). "
        "Drop one of the two"
    )


def _check_mesh(mesh: Mapping[str, int], num_devices: int, allow_idle: bool) -> None:
    problems = Problems("wh.plan(mesh=…)")
    for axis, size in mesh.items():
        if axis not in PLANNED_AXES:
            problems.add(
                f"there is no mesh axis {axis!r} to fix; expected one of "
                f"{', '.join(PLANNED_AXES)}"
            )
        elif size < 1:
            problems.add(f"{axis} is {size}; expected 1 or more")
    problems.raise_if_any(PlanError)
    used = math.prod(mesh.values())
    shape = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    ways = f"{num_devices} = {_products(num_devices, len(mesh))}"
    if used > num_devices:
        raise PlanError(
            f"{shape} needs {used} devices; there are {num_devices}. {ways}"
        )
    all_fixed = all(axis in mesh for axis in PLANNED_AXES)
    idle = num_devices % used or (all_fixed and used != num_devices)
    if idle and not allow_idle:
        raise PlanError(
            f"{shape} uses {used} of {num_devices} devices. {ways}. To leave some idle "
            "on purpose: allow_idle=True"
        )


def _products(number: int, parts: int) -> str:
    """The first ways to write a number as a product, for a message."""
    from whalejax.meshes.build import factorizations

    ways = factorizations(number, max(2, parts))[:4]
    return ", ".join("×".join(map(str, way)) for way in ways)


def _cluster(cluster: Cluster | str | None) -> Cluster:
    if cluster is None:
        return Cluster.detect()
    found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(found, Cluster):
        raise WhaleError(
            f"cluster is {type(cluster).__name__}; expected a Cluster or text such as "
            "'h100:8', 'v5p:4x4x4', a .toml file or 'local'"
        )
    return found


def _tree_bytes(tree: Any) -> int:
    total = 0
    for leaf in map(aval_of, jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += 8 * math.prod(leaf.shape)
        else:
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total
