"""``wh.plan``: makes a Plan from a model, a batch and a cluster; uses no device.

Its options are a ``PlanRequest``, whose module does the planning. With ``tables=`` the
plan includes the embedding tables. Without it, the plan of a model that is mostly
tables has a note on the possible savings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import optax

from whalejax.adapters.base import adapt
from whalejax.api.plan_request import PlanRequest
from whalejax.api.plan_settings import changeable
from whalejax.api.tables_request import USUAL_SPLITS, TablesRequest, is_given
from whalejax.capture.batch import aval_of
from whalejax.meshes import Cluster
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.units import gigabytes
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.parameter_layout import are_most, looked_up_tables
from whalejax.planner.tables.sections import SectionTimes
from whalejax.tables.dense import dense_adapter, dense_batch
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.sparse_optimizers import SPARSE_FORMS, SparseOptimizer
from whalejax.tables.table_plan_record import tables_plan, whole_plan
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.losses import Job


TABLE_SETTINGS: Final = (
    *("tables", "splits", "together", "pins", "counts", "staleness", "times"),
    "in_processes",
)
"""Arguments of ``wh.plan`` that apply to tables alone."""

_SHARED: Final = ("optimizer", "cluster", "mesh", "precision", "trainable")
_FIXED: Final = frozenset(("rows", "optimizer", "trainable", "dense"))
"""Fields of a request that ``what_if`` cannot change."""

_SIZES: Final = ("batch", "sequence")
_FEWEST_PARAMS: Final = 100_000


@dataclass(frozen=True, slots=True)
class TablesQuestion:
    """A request about a model with tables; ``Plan.what_if`` and ``verify`` ask it.

    Attributes:
        request: Settings.
        given: Loss, model and batch, abstract.
        dense: Question of the dense part's plan.
    """

    request: TablesRequest
    given: tuple[Any, Any, Any]
    dense: Any

    @property
    def sequence_length(self) -> int | None:
        """None, as ``replan`` cannot change the batch."""
        return None

    def replan(self, **changes: Any) -> Plan:
        """Returns the plan with other settings.

        Args:
            changes: Settings of tables, and settings of ``wh.plan`` that plans with
                tables take.

        Raises:
            PlanError: A setting cannot be changed.
        """
        own = {f.name for f in dataclasses.fields(self.request)} - _FIXED
        dense = [name for name in changeable() if name not in _SIZES]
        known = [*TABLE_SETTINGS, *(name for name in dense if name not in own)]
        known += ["cluster", "mesh", "precision"]
        problems = Arguments("what_if", PlanError)
        for name in changes:
            if name not in known:
                problems.add(
                    f"{name!r} cannot be changed of a plan with tables; expected some "
                    f"of {', '.join(known)}"
                )
        problems.raise_if_any()
        values = {"rows" if n == "tables" else n: x for n, x in changes.items()}
        changed = {name: values.pop(name) for name in changes if name in {*dense} - own}
        settings = {**self.request.dense, **changed}
        request = dataclasses.replace(self.request, **values, dense=settings)
        return plan_with_tables(request, *self.given)

    def verify(
        self, plan: Plan, topology: str | None, *, timeout_seconds: float
    ) -> Any:
        """Compiles a step with the real compiler.

        With two sections or stage programs, it compiles the dense part alone.

        Args:
            plan: Plan to verify.
            topology: Topology to compile for, or None for the devices of the plan.
            timeout_seconds: Seconds after which compilation is abandoned.
        """
        from whalejax.verification.checking import check

        loss_fn, model, batch = self.given
        request = self.request
        adapter = adapt(model, loss_fn, trainable=request.trainable).without_values()
        own = tables_plan(plan, batch)
        if own.sections is not None or plan.stage_plans:
            program = cut_program(adapter, batch)
            found = check(
                own.dense,
                dense_adapter(adapter, program, batch),
                dense_batch(program, batch),
                optimizer=request.optimizer,
                batch_axes=0,
                topology=topology,
                timeout_seconds=timeout_seconds,
                again=None,
            )
            names = [table.name for table in own.all_tables]
            text = _left_out(names, in_processes=own.sections is not None)
            return dataclasses.replace(found, plan_hash=plan.hash, left_out=text)

        return check(
            plan,
            adapter,
            batch,
            optimizer=request.optimizer,
            batch_axes=0,
            topology=topology,
            timeout_seconds=timeout_seconds,
            again=self.replan,
        )


def _left_out(names: list[str], *, in_processes: bool) -> str:
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    why = "whose lookups and updates are programs beside those of the stages"
    if in_processes:
        why = "some of which are in processes beside the devices"
    return f"the tables {', '.join(names[:4])}{more}, {why}; the dense part is compared"


def tables_question(plan: Plan, job: Job, model: Any, batch: Any) -> TablesQuestion:
    """Returns the question that a plan with tables answers.

    Args:
        plan: Plan with tables, for instance from a file.
        job: Job of the plan.
        model: Abstract model of the job.
        batch: Global batch of the plan.
    """
    own = tables_plan(plan, batch)
    request = TablesRequest(
        rows=own.rows,
        optimizer=job.optimizer,
        cluster=plan.cluster,
        precision=plan.asked_precision,
    )
    given = job.loss_fn, model, jax.tree.map(aval_of, batch)
    return TablesQuestion(request, given, request.dense_question(*given))


def plan_with_tables(
    request: TablesRequest, loss_fn: Callable[..., Any], model: Any, batch: Any
) -> Plan:
    """Returns the plan of a model with its tables.

    Args:
        request: Settings of the plan.
        loss_fn: Loss of the model.
        model: Abstract model.
        batch: Global batch.
    """
    found = request.plan(loss_fn, model, batch)
    given = loss_fn, model, jax.tree.map(aval_of, batch)
    question = TablesQuestion(request, given, found.dense.question)
    return dataclasses.replace(whole_plan(found), question=question)


def table_request(settings: Mapping[str, Any]) -> TablesRequest:
    """Returns the request for tables from the arguments of ``wh.plan``.

    Args:
        settings: All arguments except loss, model and batch.

    Raises:
        WhaleError: An argument is invalid or not supported with tables.
    """
    rows = settings["tables"]
    if not isinstance(rows, SparseOptimizer):
        problems = Arguments("wh.plan", PlanError)
        expected = f'wh.sparse_optimizer("adagrad", 0.01) or {SPARSE_FORMS}; or None'
        problems.refuse("tables", rows, expected)
        problems.raise_if_any()
    defaults = {f.name: f.default for f in dataclasses.fields(PlanRequest)}
    own = {name: settings[name] for name in TABLE_SETTINGS if name != "tables"}
    shared = {name: settings[name] for name in _SHARED}
    dense = {
        name: settings[name]
        for name, default in defaults.items()
        if name not in _SHARED and is_given(settings[name], default)
    }
    return TablesRequest(rows=rows, **shared, **own, dense=dense)


def refuse_table_settings(settings: Mapping[str, Any]) -> None:
    """Refuses arguments for tables if there are no tables.

    Args:
        settings: Arguments of ``wh.plan``.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(TablesRequest)}
    problems = Arguments("wh.plan", PlanError)
    for name in TABLE_SETTINGS[1:]:
        if is_given(settings[name], defaults[name]):
            problems.add(
                f"{name} was given without tables. Give "
                'tables=wh.sparse_optimizer("adagrad", 0.01), or leave it out'
            )
    problems.raise_if_any()


@without_mesh
def table_notes(plan: Plan) -> tuple[str, ...]:
    """Returns the note on savings if tables are placed.

    There is no note if tables are less than half of the parameters, or if the loss
    cannot be cut at their lookups.

    Args:
        plan: Plan without placed tables.
    """
    question: Any = plan.question
    adapter, graph = question.adapter, question.programs().graph
    leaves = jax.tree.leaves(adapter.params)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    looked_up = looked_up_tables(graph)
    if sum(sizes) < _FEWEST_PARAMS or not are_most(looked_up, graph.params):
        return ()
    try:
        program = cut_program(adapter, question.batch)
    except Exception:  # The loss was planned before, so the error is not the user's.
        return ()
    stored = sum(sizes[n] for n in program.tables)
    if 2 * stored < sum(sizes):
        return ()
    read = sum(one.shape[0] * one.num_ids * one.width for one in program.lookups)
    size = sum(sizes[n] * leaves[n].dtype.itemsize for n in program.tables)
    count = len(program.tables)
    return (
        f"{count} {'tables' if count > 1 else 'table'} of {gigabytes(size)} "
        f"{'are' if count > 1 else 'is'} only looked up, and a batch reads at most "
        f"{min(1.0, read / stored):.2%} of that; a step as planned goes through all of "
        'it. tables=wh.sparse_optimizer("adagrad", …) in place of optimizer= for them '
        "updates the rows that were read, and places each table where it costs least",
    )


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
