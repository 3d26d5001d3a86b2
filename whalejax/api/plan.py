"""``wh.plan``: from a model, a batch and a cluster to a Plan; no device is touched."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from whalejax.adapters.base import adapt
from whalejax.api.ambient_mesh import without_mesh
from whalejax.api.argument_checks import refuse_bad_optimizer
from whalejax.api.executor_choice import decider
from whalejax.api.fixed_axes import Uneven, check_mesh, idle_note, synced, uneven_shares
from whalejax.api.garbage_collection import collections_paused
from whalejax.api.loss_notes import loss_notes, remat_note
from whalejax.api.plan_options import NO_OPTIMIZER, check_options, checked_offload
from whalejax.api.plan_request import PlanRequest, changeable
from whalejax.capture.batch import aval_of, check_batch, resized
from whalejax.capture.patterns.calls import most_tokens
from whalejax.capture.programs import Programs, attention_note, check_reports
from whalejax.lowering.pipeline_mpmd.update_split import check_update
from whalejax.lowering.spmd.executor import hosted
from whalejax.lowering.uneven.zero1_update import elementwise
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.checks import Arguments, is_whole, shown
from whalejax.meshes.delivered import efficiency_notes
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.progress_events import tell
from whalejax.planner.errors import PlanError, Unobeyed
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.search.batched.share_notes import split_notes
from whalejax.planner.search.enumerate import PLANNED_AXES
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.attention_blocks import check_rings, checked_attention
from whalejax.planner.sharding.device_order import ordered
from whalejax.planner.sharding.layout import MESH_AXES
from whalejax.planner.sharding.metadata_constraints import unplanned_pins
from whalejax.planner.sharding.remat import POLICIES, checked_policies
from whalejax.planner.terms import (
    ALL,
    Chosen,
    Remat,
)
from whalejax.runtime.batch_record import batch_leaves, batch_tree, tree_bytes
from whalejax.runtime.compiler_options import (
    checked_options,
    compiled_with,
    option_note,
)
from whalejax.runtime.mixed_precision import (
    CAST_BYTES,
    bf16_note,
    taken_precision,
    widest_work,
)
from whalejax.runtime.optimizer_state import optimizer_bytes


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
    shares: str | Sequence[int] | None = None,
    compiler_options: Mapping[str, bool | int | float | str] | None = None,
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
            has the samples m, m + M, … None takes the fewest that fit.
        allow_idle: accept plans that leave devices idle where none uses all.
        sync_batch_stats: statistics must be those of the global batch: only plans with
            one micro-batch are taken for models that have any.
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
            their gradients stay on the device), several as a list, or nothing, ``()``.
            None lets the planner choose, where nothing fits without.
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
        shares: micro-batches of each data-parallel replica, in node order: ``"even"``
            gives all of them as many, and on devices of one kind cuts every micro-batch
            into equal parts; numbers that you fix, which a run may change as it
            measures (``TrainStep.shares``); None lets the planner choose where devices
            are of several kinds.
        compiler_options: options of XLA that the step is compiled with, as ``jax.jit``
            takes them. Those that are known to change collectives are planned with.

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
    given = dict(locals())
    return ask(**given).plan()


@without_mesh
def ask(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    cluster: Cluster | str | None,
    trainable: Any = None,
    axis_names: Mapping[str, str] | None = None,
    **options: Any,
) -> Asked:
    """What ``plan`` is asked, with the same arguments, before it is answered."""
    refuse_bad_optimizer(optimizer)
    check_batch(batch, options.get("batch_axes", 0))
    # The plan remembers the question, and must not keep anybody's arrays alive.
    adapter = adapt(model, loss_fn, trainable=trainable, axis_names=axis_names)
    return Asked(
        adapter=adapter.without_values(),
        batch=jax.tree.map(aval_of, batch),
        optimizer=NO_OPTIMIZER if optimizer is None else optimizer,
        cluster=parsed_cluster(cluster),
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class Asked(PlanRequest):
    """A request with what answers it, so that it can be asked again with changes."""

    @collections_paused()
    @without_mesh
    def plan(self) -> Plan:
        """The plan."""
        check_options(self)
        asked, notes = self, list[str]()
        if isinstance(self.precision, str):
            taken, notes = taken_precision(
                self.precision,
                lambda p: dataclasses.replace(self, precision=p)._programs().traced,
            )
            asked = dataclasses.replace(self, precision=taken)
        found = asked._planned()
        return dataclasses.replace(found, notes=(*found.notes, *notes))

    def _planned(self) -> Plan:
        """The plan, its precision as it is."""
        kind = check_options(self)
        options = checked_options(self.compiler_options)
        devices, idle = self.cluster.num_devices, self.allow_idle
        axes = PLANNED_AXES if self.runnable else MESH_AXES
        check_mesh({} if self.mesh is None else self.mesh, devices, idle, axes)
        programs = self._programs()
        adapter, graph, traced = programs.adapter, programs.graph, programs.traced
        remat = checked_policies(self.remat, graph, traced.names)
        count = self._count(traced, graph)
        hosts = functools.cache(lambda: hosted(adapter, self.optimizer))
        request = Request(
            optimizer=optimizer_bytes(adapter, self.optimizer, self.cluster.platform),
            state_bytes=tree_bytes(adapter.rest) - graph.frozen_bytes,
            batch_bytes=tuple(tree_bytes(x) for x in jax.tree.leaves(self.batch)),
            num_micro_batches=count,
            default=kind,
            cast_bytes=CAST_BYTES[self._whole],
            narrowed=self._whole != self.precision,
            num_devices=devices,
            mesh=self.mesh,
            zero=self.zero,
            reductions=traced.reductions,
            remat=None if self.remat is None else remat,
            policies=tuple(p for p in POLICIES if traced.names or p != "named"),
            offload=checked_offload(self, hosts),
            hosted=hosts,
            sliced=functools.cache(lambda: elementwise(adapter, self.optimizer)),
            sequence_parallel=self.sequence_parallel,
            attention=self._attention(programs),
            loss_chunks=self._chunks(programs),
        )
        uneven = self._uneven(count)
        search, request = decider(
            programs, request, runnable=self.runnable, uneven=uneven, allow_idle=idle
        )
        decided = functools.partial(
            search,
            graph,
            self.cluster.under(options),
            precision=self._whole,
            batch=batch_leaves(self.batch),
            again=programs.again,
        )
        found = (_with_fewest_idle if idle else _at_once)(decided, request)
        return self._finished(found, programs, request, remat)

    def _finished(
        self, found: Plan, programs: Programs, request: Request, remat: Remat
    ) -> Plan:
        """What a search found, checked against the optimizer and with its notes."""
        captured = programs.traced.captured
        check_update(found, programs.adapter, self.optimizer, captured.steady)
        check_reports(programs, found)
        xla = checked_options(self.compiler_options)
        found = compiled_with(found, xla, captured.precisions)
        found = dataclasses.replace(
            found,
            cluster=self.cluster,
            batch_tree=batch_tree(self.batch),
            optimizer_bytes=request.optimizer.followed_bytes,
            notes=(
                *(*found.notes, *captured.notes, *remat_note(remat, found)),
                *(*_notes(found, programs), *option_note(xla)),
                *bf16_note(found, programs.graph),
                *efficiency_notes(self.cluster.kinds, widest_work(programs.graph)),
                *loss_notes(captured, found),
            ),
            question=self,
        )
        return ordered(found)

    def _uneven(self, count: int | None) -> Uneven:
        return uneven_shares(
            self.shares,
            mixed=len({node.kind.name for node in self.cluster.nodes}) > 1,
            runnable=self.runnable,
            allow_idle=self.allow_idle,
            synced=count is not None and self.num_micro_batches is None,
        )

    @property
    def _whole(self) -> str:
        """The precision of the whole model; its own types where TaskGraphs differ."""
        return self.precision if isinstance(self.precision, str) else "f32"

    def _count(self, traced: Programs, graph: Graph) -> int | None:
        """Micro-batches, if the user says how many, or what else is asked for does."""
        marks = {m for g in graph.task_graphs for m in g.marks}
        several = [*filter(None, (m.get("num_micro_batches") for m in marks))]
        if self.sync_batch_stats and traced.reductions:
            return synced(self.num_micro_batches, traced.reductions, *several)
        if self.num_micro_batches is None and traced.captured.numbering:
            return None if several else 1
        return None if self.num_micro_batches is None else int(self.num_micro_batches)

    def _attention(self, programs: Programs) -> Chosen | None:
        """How attention is to run, if the user says so and it can."""
        asked = checked_attention(self.attention, programs.graph)
        if asked:
            check_rings(
                programs.again((), asked, 1),
                asked,
                programs.traced.blocks(asked).whole,
                lambda: programs.again((), ((ALL, "ring"),), 1),
            )
        return asked

    def _chunks(self, programs: Programs) -> int | None:
        """Parts in which logits are made, if the user says so and they can be."""
        count = self.loss_chunks
        if count is None or count == 1:
            return count
        cut = programs.cut((), count)
        if cut is programs.captured:
            raise PlanError(
                f"loss_chunks is {count}, and the model makes no logits that can be "
                "made in parts: a product after which each token is treated alone, "
                "until no vocabulary is left. Reduce over tokens last, or drop it"
            )
        most = most_tokens(cut.jaxpr)
        if count > most:
            raise PlanError(
                f"loss_chunks is {count}, and a micro-batch has {most} tokens of which "
                f"logits are made (num_micro_batches is {self.num_micro_batches or 1})"
                f"; expected at most {most}, divided by the devices that share them"
            )
        return count

    def _programs(self) -> Programs:
        """The model as traced, at most once for equal shapes."""
        return self.traced.of(
            self.adapter,
            self.batch,
            batch_axes=self.batch_axes,
            num_micro_batches=self.num_micro_batches or 1,
            precision=self.precision,
        )

    def verify(
        self, plan: Plan, topology: str | None, *, timeout_seconds: float
    ) -> Any:
        """``Plan.verify``."""
        from whalejax.verification.checking import check

        return check(
            plan,
            self.adapter,
            self.batch,
            optimizer=self.optimizer,
            batch_axes=self.batch_axes,
            topology=topology,
            timeout_seconds=timeout_seconds,
            again=self.again,
        )

    def again(self, **changes: Any) -> Plan:
        """``Plan.what_if``."""
        known = changeable()
        problems = Arguments("what_if", PlanError)
        for name in changes:
            if name not in known:
                problems.add(
                    f"there is no {name!r} to change; expected some of "
                    f"{', '.join(known)}"
                )
        size = changes.get("batch")
        if "batch" in changes and not is_whole(size, 1):
            problems.refuse("batch", size, "a number of samples, 1 or more")
        problems.raise_if_any()
        if "batch" in changes:
            changes["batch"] = resized(
                self.batch, self.batch_axes, int(changes["batch"])
            )
        if "cluster" in changes:
            if changes["cluster"] is None:
                raise PlanError(
                    "cluster is None; expected a Cluster or text such as 'h100:8', or "
                    "'local' for the devices of this process"
                )
            changes["cluster"] = parsed_cluster(changes["cluster"])
        return dataclasses.replace(self, **changes).plan()


def _notes(found: Plan, programs: Programs) -> list[str]:
    """What is seen of a plan once it is whole."""
    return [
        *attention_note(found, programs),
        *idle_note(found),
        *unplanned_pins(programs.graph, found.axis_sizes, stages=True),
        *split_notes(found),
    ]


def _at_once(decided: Callable[[Request], Plan], request: Request) -> Plan:
    count = request.num_devices
    tell(f"searching layouts of {count} device{'s' if count > 1 else ''}")
    return decided(request)


def _with_fewest_idle(decided: Callable[[Request], Plan], request: Request) -> Plan:
    """The plan that uses most devices; where none can, why most of them could not."""
    problems: list[PlanError] = []
    fixed = math.prod((request.mesh or {}).values())
    for count in range(request.num_devices // fixed * fixed, 0, -fixed):
        try:
            return _at_once(decided, dataclasses.replace(request, num_devices=count))
        except PlanError as error:
            problems.append(error)
    raise next((e for e in problems if not isinstance(e, Unobeyed)), problems[0])


def parsed_cluster(cluster: Cluster | str | None) -> Cluster:
    """A cluster, from its text or of the devices of this process, too."""
    if cluster is None:
        return Cluster.detect()
    found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(found, Cluster):
        raise WhaleError(
            f"cluster is {shown(cluster)}; expected a Cluster or text such as "
            "'h100:8', 'v5p:4x4x4', a .toml file or 'local'"
        )
    return found
