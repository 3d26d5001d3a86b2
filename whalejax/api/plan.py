"""``wh.plan``: from a model, a batch and a cluster to a Plan; no device is touched.

Its options are a ``PlanRequest``, whose module holds all that follows.
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
from whalejax.api.tables_request import RUNNABLE_SPLITS
from whalejax.meshes import Cluster
from whalejax.planner.near_names import names_arguments
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
    splits: Collection[str] = RUNNABLE_SPLITS,
    together: Sequence[Sequence[str]] = (),
    pins: Mapping[str, int | str] | None = None,
    counts: Mapping[str, Any] | None = None,
    staleness: int = 0,
    times: SectionTimes | None = None,
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
        precision: ``"f32"`` (the model's own types), ``"bf16"`` or ``"f16"`` (compute
            in 16 bits, float32 masters; in float16 the loss is scaled, steps that
            overflow change nothing and are counted in ``metrics["skipped_steps"]``).
            Float32 leaves of the batch are cast too: give masks and targets that must
            stay exact as integers or booleans. Where the model insists on float32, it
            is taken as one for all TaskGraphs. Or one for each TaskGraph by its name,
            ``"*"`` for all others: products there are of 16 bits, and so is what is
            done to each element of their results; sums, exponentials, branches, loops
            that are no scan, functions with derivatives of their own and what other
            TaskGraphs read keep the model's own types, and no batch is cast.
        num_micro_batches: parts M of the global batch, one after the other; part m
            has the samples m, m + M, … None takes the fewest that fit, and one where
            the loss is not proven to be a mean of independent samples.
        allow_idle: accept plans that leave devices idle where none uses all.
        sync_batch_stats: statistics must be those of the global batch: never with
            ``per_micro_batch``.
        group_size: Number of neighbouring samples that stay together in a micro-batch
            and in a share, as answers to one prompt do. None takes 1, or what the loss
            shows to be needed where it reshapes its batch into groups. It has to divide
            the batch, and changes nothing with one micro-batch.
        per_micro_batch: Several micro-batches, unequal shares and ranks that combine by
            Adasum are taken though samples are not independent, as under batch
            normalisation or in a contrastive loss: each part's own loss is meant, as on
            one device with as much accumulation. Without it such parts are refused. An
            error where samples are proven independent; without effect on plans of one
            micro-batch.
        axis_names: mesh axes that the model's own annotations name, mapped to ours.
        trainable: what to train, where that is not every parameter: a glob pattern of
            dotted paths such as ``"head.*"``, several in a list, a predicate that takes
            one dotted path, or (NNX) a filter such as ``LoRAParam``. Weights that are
            left out are stored and computed with like others, without gradients.
        batch_axes: the batch dimension of the batch's leaves: one number for all, or a
            tree like the batch with a number for each leaf, and None for one without
            samples, as in ``{"nodes": 0, "edges": None}``. At least one must have it.
        mesh: sizes of mesh axes that you fix, as in ``{"tensor": 4}``; the planner
            chooses the others.
        zero: ZeRO level over ``data`` that you fix: 0, 1 or 2. (Level 3 is the mesh
            axis ``fsdp``.)
        runnable: take only what ``wh.compile`` can run. False widens the search to
            what can be estimated only, such as gradients in host memory; its plans are
            estimates.
        remat: what the layers keep for the backward pass, which computes the rest
            again: ``"none"`` (keep all), ``"dots"`` (results of products with weights),
            ``"named"`` (what the model names with ``jax.ad_checkpoint``; or some of it,
            ``"named:a,b"``) or ``"full"`` (keep what a layer is given); or such a
            policy for each TaskGraph by its name, ``"*"`` for all others. What the
            model itself puts into ``jax.checkpoint`` stays as it is. None lets the
            planner choose.
        offload: what lies in host memory: ``"optimizer"`` (its state),
            ``"activations"`` (what layers that are computed again keep, from the
            forward to the backward pass), ``"params"`` (what scans over layers slice;
            their gradients stay on the device), several as a list, or nothing,
            ``"none"`` or ``()``. None lets the planner choose, where nothing fits
            without.
        sequence_parallel: whether the axis ``tensor`` shards the sequence between the
            products whose heads, width or vocabulary it shards; None lets the planner
            choose.
        attention: ``"ring"`` computes attention a block of scores at a time, with keys
            and values that go round where the axis ``context`` shards the sequence;
            ``"gather"`` as the model does, with keys and values gathered there; or one
            of them for each TaskGraph by its name, ``"*"`` for all others. None lets
            the planner choose.
        loss_chunks: into how many parts each device cuts its tokens to make logits of
            one part at a time, and the loss of them, so that all logits never exist; 1
            makes them at once. None lets the planner choose, where memory is short.
        combine: how ranks of the axis ``data`` combine what each has of its own
            samples: ``"mean"`` of their gradients; ``"adasum"`` (adaptive summation:
            per parameter and layer orthogonal gradients add up, parallel ones are
            averaged); ``"adasum_nodes"``, Adasum across nodes of what the ranks of a
            node have on average; or ``"adasum_updates"``, Adasum of what the
            optimizer of each rank would add to the parameters, for optimizers whose
            step is not linear in the gradient, as Adam's and LAMB's.
        shares: micro-batches of each data-parallel replica, in node order: ``"even"``
            gives all of them as many, and on devices of one kind cuts every micro-batch
            into equal parts; numbers that you fix, which a run may change as it
            measures (``TrainStep.shares``); None lets the planner choose where devices
            are of several kinds.
        compiler_options: options of XLA that the step is compiled with, as ``jax.jit``
            takes them. Those that are known to change collectives are planned with.
        margin: part of the predicted memory that a plan leaves free on top of it, as
            0.1, below 1; predictions may be too low. None takes what compiled programs
            of this kind took more than was predicted for them (docs/run/verify.md):
            nothing on CPU, and most where the program has parts that few of those had,
            of which a note says so.
        verified: the compiler for the cluster has accepted the plan. Where it refuses
            one for its memory, the next best plan is taken that leaves the room that
            was lacking. Needs the compiler, as ``Plan.verify`` does, and minutes.
        swarm: plan for peers that may come and go over slow links: each device of the
            cluster is one peer, and each stage is served by several. The stages are as
            few as memory and links allow, or as ``mesh={"stage": n}`` says; what is
            predicted and wanted of peers is ``plan.swarm``.
        bandwidth: of a peer's link, either way: ``"200Mb/s"``, ``"25MB/s"``, or bytes
            per second. Only with ``swarm``.
        wire: format of activations and their gradients between peers: ``"f32"``,
            ``"bf16"`` or ``"int8"`` (in blocks of 256 values with a scale); None takes
            the most exact that keeps peers busy. Only with ``swarm``.
        sum_wire: format of gradients while the peers of a stage add them up:
            ``"f32"``, which None stands for, ``"f16"`` or ``"int8"``. Only with
            ``swarm``.
        tables: How rows of embedding tables change, ``wh.sparse_optimizer(...)``:
            parameters that are only looked up are then placed as tables, and
            ``optimizer`` is that of all others. With it only ``optimizer``,
            ``cluster``, ``mesh`` (``data`` and ``fsdp``), ``trainable`` and the
            following can be given; without it none of these.
        splits: ways of storing a table that may be used: some of ``"whole"``,
            ``"rows"``, ``"columns"`` and ``"replicate"``.
        together: groups of tables that must be on one device, by their paths.
        pins: what you fix, by the path of a table: its device, or one of ``splits``.
        counts: how often each row is looked up, by the path of a table:
            ``wh.count_lookups`` counts it.
        staleness: on a cluster such as ``"cpu:2+h100:1"``, whose first part holds the
            tables in processes of its own: number of newest updates that a lookup does
            without, so that both parts work at once; with 0 every row has all of them.
        times: measured times of these two sections, ``step.report().times``; None
            predicts them.

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
    settings = dict(locals())
    question = [settings.pop(name) for name in ("loss_fn", "model", "batch")]
    if tables is not None:
        return plan_with_tables(table_request(settings), *question)
    refuse_table_settings(settings)
    for name in TABLE_SETTINGS:
        del settings[name]
    found = PlanRequest(**settings).plan(*question)
    notes = table_notes(*question, trainable=trainable, axis_names=axis_names)
    return dataclasses.replace(found, notes=(*found.notes, *notes)) if notes else found
