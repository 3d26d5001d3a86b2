"""``wh.plan``: makes a Plan from a model, a batch and a cluster; uses no device.

Its options are a ``PlanRequest``, whose module does the planning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import optax

from whalejax.api.plan_request import PlanRequest
from whalejax.api.tables_in_plans import (
    TABLE_SETTINGS,
    plan_with_tables,
    refuse_table_settings,
    table_notes,
    table_request,
)
from whalejax.api.tables_request import USUAL_SPLITS
from whalejax.meshes import Cluster
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.planner.plan.plan import Plan
from whalejax.planner.tables.sections import SectionTimes
from whalejax.tables.sparse_optimizers import SparseOptimizer


@names_arguments("wh.plan")
def plan(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    cluster: Cluster | str | None = None,
    default: Any = None,
    precision: str | Mapping[str, str] = "f32",
    num_micro_batches: int | None = None,
    allow_idle: bool = False,
    sync_batch_stats: bool = False,
    group_size: int | None = None,
    per_micro_batch: bool = False,
    axis_names: Mapping[str, str] | None = None,
    trainable: Any = None,
    batch_axes: Any = 0,
    mesh: Mapping[str, int] | None = None,
    zero: int | None = None,
    runnable: bool = True,
    remat: str | Mapping[str, str] | None = None,
    offload: str | Sequence[str] | None = None,
    sequence_parallel: bool | None = None,
    attention: str | Mapping[str, str] | None = None,
    loss_chunks: int | None = None,
    combine: str = "mean",
    shares: str | Sequence[int] | None = None,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
    margin: float | None = None,
    verified: bool = False,
    swarm: bool = False,
    bandwidth: str | float | None = None,
    wire: str | None = None,
    sum_wire: str | None = None,
    tables: SparseOptimizer | None = None,
    splits: Collection[str] = USUAL_SPLITS,
    together: Sequence[Sequence[str]] = (),
    pins: Mapping[str, int | str] | None = None,
    counts: Mapping[str, Any] | None = None,
    staleness: int = 0,
    times: SectionTimes | None = None,
    in_processes: Collection[str] | None = None,
) -> Plan:
    """Chooses how to run a training step on a cluster.

    Args:
        loss_fn: Loss: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: NNX module, Linen variables, or any pytree. Abstract leaves suffice.
        batch: GLOBAL batch, abstract or real.
        optimizer: Optax transformation. Its state counts as memory. None plans a
            step without that state, which can only evaluate once it is compiled.
        cluster: Cluster, or its text such as ``"h100:4x8"``. None uses the devices of
            this process.
        default: Strategy of the model's parts without a mark, ``wh.replicate()`` or
            ``wh.split()``. None lets the planner choose.
        precision: ``"f32"`` keeps the model's own types. ``"bf16"`` and ``"f16"``
            compute in 16 bits with float32 master weights; in float16 the loss is
            scaled, and a step that overflows changes nothing and is counted in
            ``metrics["skipped_steps"]``. Float32 leaves of the batch are cast too, so
            masks and targets that must stay exact should be integers or booleans. A
            mapping gives a precision to each TaskGraph by its name, ``"*"`` for all
            others. Then products and the elementwise operations on their results are in
            16 bits. Sums, exponentials, branches, ``while`` loops, functions with their
            own derivatives, values that other TaskGraphs read, and the batch keep their
            types.
        num_micro_batches: Number M of micro-batches in a step; micro-batch m has the
            samples m, m + M, … None takes the fewest that fit in memory, or 1 if the
            loss is not proven to be a mean of independent samples.
        allow_idle: Whether a plan may leave devices idle if no plan uses all.
        sync_batch_stats: Whether batch statistics are those of the global batch. Not
            allowed with ``per_micro_batch``.
        group_size: Number of consecutive samples that stay together in a micro-batch
            and in a share, such as the answers to one prompt. It must divide the batch.
            None takes 1, or the size of the groups into which the loss reshapes its
            batch. No effect for one micro-batch.
        per_micro_batch: Whether each part of the batch may have its own loss if samples
            are not independent, as with batch normalisation or a contrastive loss. Then
            several micro-batches, unequal shares and Adasum compute the same as one
            device with equal gradient accumulation. Without it such parts are refused.
            An error if samples are proven independent; no effect for one micro-batch.
        axis_names: Mesh axes in the model's own annotations, mapped to ours.
        trainable: Selection of the trained parameters; None trains every parameter. It
            is a glob pattern of dotted paths such as ``"head.*"``, a list of patterns,
            a predicate of one dotted path, or (NNX) a filter such as ``LoRAParam``. The
            other weights take part in the computation without gradients.
        batch_axes: Batch dimension of the batch's leaves: one number for all, or a
            tree like the batch with a number for each leaf and None for leaves
            without samples, as in ``{"nodes": 0, "edges": None}``. At least one leaf
            has samples.
        mesh: Sizes of the mesh axes that you fix, as in ``{"tensor": 4}``. The planner
            chooses the others.
        zero: ZeRO level over ``data``: 0, 1 or 2. Level 3 is the mesh axis ``fsdp``.
            None lets the planner choose.
        runnable: Whether the plan must run with ``wh.compile``. False also allows plans
            that are only estimates, such as gradients in host memory.
        remat: Rematerialisation policy of the layers. ``"none"`` saves everything for
            the backward pass, ``"dots"`` the products with weights, ``"named"`` the
            values that the model names with ``jax.ad_checkpoint`` (``"named:a,b"``
            some of them), ``"full"`` only the inputs of a layer. A mapping gives a
            policy to each TaskGraph by its name, ``"*"`` for all others. Parts that
            the model puts into ``jax.checkpoint`` stay as they are. None lets the
            planner choose.
        offload: State in host memory, one or several of ``"optimizer"`` (its state),
            ``"activations"`` (saved values of recomputed layers, between forward and
            backward pass) and ``"params"`` (parameters that scans over layers slice;
            their gradients stay on the device); ``"none"`` or ``()`` for nothing. None
            lets the planner choose where a layout does not fit without it, or only in
            more micro-batches.
        sequence_parallel: Whether the axis ``tensor`` shards the sequence between the
            products whose heads, width or vocabulary it shards. None lets the planner
            choose.
        attention: ``"ring"`` computes attention in blocks of scores; where the axis
            ``context`` shards the sequence, keys and values go round the devices.
            ``"gather"`` keeps the model's attention, and gathers keys and values. A
            mapping gives one of them to each TaskGraph by its name, ``"*"`` for all
            others. None lets the planner choose.
        loss_chunks: Number of parts in which each device computes the logits of its
            tokens and their loss, so that all logits never exist at once. 1 computes
            them at once. None lets the planner choose, if memory is short.
        combine: Combination of the ranks of the axis ``data``. ``"mean"`` averages
            their gradients. ``"adasum"`` is adaptive summation: by parameter and layer,
            orthogonal gradients add up and parallel ones are averaged.
            ``"adasum_nodes"`` is Adasum across nodes of the means within each node.
            ``"adasum_updates"`` is Adasum of the updates of each rank's optimizer. It
            suits optimizers with steps that are not linear in the gradient, such as
            Adam and LAMB.
        shares: Micro-batches of each data-parallel replica, in node order. A run may
            change the given numbers by its measurements (``TrainStep.shares``).
            ``"even"`` gives all replicas the same number, and on devices of one kind
            divides every micro-batch equally. None lets the planner choose if devices
            are of several kinds.
        compiler_options: XLA options of the step, as ``jax.jit`` takes them. The
            planner knows the effect of those that change collectives.
        margin: Fraction of the predicted memory that the plan leaves free in addition,
            such as 0.1, below 1. None takes the largest measured excess of compiled
            programs of this kind (docs/run/verify.md): nothing on CPU, and more if the
            program has parts that few measured programs had (a note reports this).
        verified: Whether the cluster's compiler must accept the plan. If it refuses one
            for its memory, the best plan that needs so much less is chosen. Needs the
            compiler, as ``Plan.verify`` does, and takes minutes.
        swarm: Whether to plan for peers that may come and go over slow links. Each
            device of the cluster is a peer, and several peers serve each stage. There
            are as few stages as memory and links allow, or ``mesh={"stage": n}``.
            ``plan.swarm`` has the predictions and the requirements on peers.
        bandwidth: Rate of a peer's link in each direction: ``"200Mb/s"``,
            ``"25MB/s"``, or bytes per second. Only with ``swarm``.
        wire: Wire format of activations and their gradients between peers: ``"f32"``,
            ``"bf16"`` or ``"int8"`` (in blocks of 256 values with a scale). None takes
            the most exact one that keeps peers busy. Only with ``swarm``.
        sum_wire: Wire format of gradients while the peers of a stage reduce them:
            ``"f32"`` (also None), ``"f16"`` or ``"int8"``. Only with ``swarm``.
        tables: Update rule of embedding rows, ``wh.sparse_optimizer(...)``. Parameters
            that are only looked up are then placed as tables, and ``optimizer`` updates
            all others. With ``tables``, ``runnable``, ``verified``, ``allow_idle``,
            ``batch_axes``, numbers of ``shares``, and ``swarm`` with its arguments are
            not allowed; without it, the arguments below are not.
        splits: Ways in which a table may be stored: some of ``"whole"``, ``"rows"``,
            ``"columns"``, ``"node_rows"`` (by rows over the devices of a node) and
            ``"replicate"``; and, if the devices' memory is short, ``"host"`` (in host
            memory) and ``"cached"`` (with the rows that are read most on the device);
            both run on CPUs and TPUs.
        together: Groups of tables that must be on one device, by their paths.
        pins: Fixed placements by the path of a table: its device, or one of these
            splits. ``"cached:0.25"`` sets the fraction of its rows on the device.
        counts: Number of lookups of each row, by the path of a table:
            ``wh.count_lookups`` counts them.
        staleness: Number of newest updates that a lookup may lack, so that both
            sections work at once; with 0 every row has all updates. Only on a cluster
            such as ``"cpu:2+h100:1"``, whose first part may hold tables in processes of
            its own.
        times: Measured times of both sections, ``step.report().times``; or None.
        in_processes: Fixed paths of the tables in these processes; the others are then
            on the devices. None lets the planner choose.

    Returns:
        The plan; ``print`` shows it.

    Raises:
        WhaleError: The arguments cannot be planned; the message lists every problem.

    >>> import jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> found = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x,
    ...                 optimizer=optax.sgd(0.1), cluster="h100:8")
    >>> found.num_devices
    8
    """
    settings = dict(locals())
    question = [settings.pop(name) for name in ("loss_fn", "model", "batch")]
    if tables is not None:
        return plan_with_tables(table_request(settings), *question)
    refuse_table_settings(settings)
    for name in TABLE_SETTINGS:
        del settings[name]
    result = PlanRequest(**settings).plan(*question)
    notes = table_notes(result)
    return (
        dataclasses.replace(result, notes=(*result.notes, *notes)) if notes else result
    )
