"""``wh.PlanRequest``: makes a Plan from settings, a loss, a model and a batch.

``wh.plan``, ``wh.search``, ``Plan.what_if`` and the commands all use these steps, in
the order of this module:

    request     ``PlanRequest``: settings, checked as they are given
    question    ``PlanQuestion``: a request about one model and batch
    capture     ``Programs``: the loss, traced at most once for equal shapes, and its
                variants in attention, logits and remat
    strategies  ``decider``: the executors that may run it, and the search of each
    search      layouts of the variants with their costs, and the best one
    plan        that layout, checked against the optimizer, with notes

The module is long because every argument of ``wh.plan`` is checked and stored here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import optax

from whalejax.adapters.base import Adapter, adapt
from whalejax.api.executor_choice import decider, space_problems
from whalejax.api.fixed_axes import (
    SplitRules,
    Uneven,
    check_mesh,
    idle_note,
    split_notes,
    uneven_shares,
    zero_note,
)
from whalejax.api.loss_notes import (
    check_has_gradient,
    loss_notes,
    optimizer_note,
    remat_note,
    with_unread_noted,
)
from whalejax.api.memory_margin import (
    COMPILE_SECONDS,
    accepted,
    band_note,
    with_devices,
    with_fixed_settings,
    with_margin_said,
    without_margin,
)
from whalejax.api.plan_settings import PlanSettings, changeable, parsed_cluster
from whalejax.capture import Captured, capture
from whalejax.capture.batch import (
    aval_of,
    check_batch,
    has_one_batch_size,
    resize_batch,
    sequence_length,
    with_length,
)
from whalejax.capture.batch import batch_leaves as micro_leaves
from whalejax.capture.loss_options import fixed_options
from whalejax.capture.loss_programs import (
    Programs,
    Traces,
    attention_note,
    check_reports,
)
from whalejax.capture.precision import (
    CAST_BYTES,
    bf16_note,
    taken_precision,
    widest_work,
)
from whalejax.capture.split_checks import check_split, split_note
from whalejax.capture.table_reads import BEYOND
from whalejax.lowering.batch_record import batch_leaves, batch_tree, tree_bytes
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.lowering.pipeline_mpmd.update_partition import check_update
from whalejax.lowering.spmd.spmd_executor import offloadable_state
from whalejax.lowering.uneven.zero1_update import elementwise
from whalejax.meshes import Cluster
from whalejax.meshes.arguments.near_names import ARGUMENT_SYNONYMS, near_hint
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.catalogue import efficiency_notes
from whalejax.meshes.checks import Arguments, is_whole
from whalejax.meshes.errors import WhaleError, tell
from whalejax.planner.cost.model_work import model_work
from whalejax.planner.memory.prediction_band import MemoryBand, memory_band
from whalejax.planner.model.analysis import expert_roles
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.plan.kinds_alone import notes_on_kinds
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.square_cube_of_plan import bytes_per_second
from whalejax.planner.plan_entries import slow_link
from whalejax.planner.plan_errors import DeviceCountError, NothingFits, PlanError
from whalejax.planner.search.adasum_limits import check_combine, combine_notes
from whalejax.planner.search.layout_search import PLANNED_AXES
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import ProgramAnalyses
from whalejax.planner.sharding.device_order import ordered
from whalejax.planner.sharding.layout import MESH_AXES
from whalejax.planner.sharding.metadata_constraints import unplanned_pins
from whalejax.planner.step_options import REMAT_POLICIES, options_of
from whalejax.runtime.compiler_options import (
    checked_options,
    compiled_with,
    option_note,
)
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.argument_checks import check_order


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Disables cyclic garbage collection in a block; reference counts still free.

    A collector that was disabled before the block stays disabled after it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


NO_OPTIMIZER: Final = optax.identity()
"""Optimizer if none was given."""


# Request.


@names_arguments("wh.PlanRequest", instance="request")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(PlanSettings):
    """All arguments of ``wh.plan`` except the loss, the model and the batch.

    A request is frozen, and checked when it is made; ``dataclasses.replace`` makes
    variants. One request can plan any number of models. ``wh.plan`` documents each
    setting; defaults are the same.

    Args:
        optimizer, cluster: Optimizer and cluster of the plan; None means no optimizer,
            and the devices of this process.
        mesh, num_micro_batches, zero, shares, precision, default: Fixed choices; None
            lets the planner choose. The same holds for the options of the step, such as
            rematerialisation: the fields of ``UserOptions``.
        allow_idle, runnable: Limits on the plans that are accepted.
        group_size, per_micro_batch, sync_batch_stats: Rules on the division of the
            batch.
        axis_names, trainable, batch_axes: Facts about the model and its batch.
        compiler_options: XLA options of the step.
        margin: Free memory that plans leave, as a fraction of the predicted memory,
            below 1.
        verified: Whether the compiler must accept the plan.
        swarm, bandwidth, wire, sum_wire: Whether to plan a swarm, the rate of its
            links, and its wire formats.

    Raises:
        PlanError: Settings are invalid for every model. The message lists all.
        WhaleError: The cluster cannot be read, and nothing else is wrong.

    >>> import dataclasses, jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> request = wh.PlanRequest(cluster="h100:8", optimizer=optax.sgd(0.1))
    >>> plan = request.plan(lambda net, x: (x @ net["w"]).mean(), net, x)
    >>> sharded = dataclasses.replace(request, mesh={"fsdp": 8})
    >>> sharded.plan(lambda net, x: (x @ net["w"]).mean(), net, x).axis_sizes
    {'fsdp': 8}
    """

    def plan(self, loss_fn: Callable[..., Any], model: Any, batch: Any) -> Plan:
        """Returns the plan for a model.

        Args:
            loss_fn: Loss: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
            model: NNX module, Linen variables, or any pytree. Abstract leaves suffice.
            batch: GLOBAL batch, abstract or real.

        Raises:
            WhaleError: The arguments cannot be planned; the message lists all problems.
        """
        return question_about(self, loss_fn, model, batch).plan()


# Question.

_PLANNED_AGAIN: Final = ("loss_fn", "model", "optimizer", "trainable", "batch_axes")
"""Arguments of ``wh.plan`` that ``what_if`` cannot change."""


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """A request about one model and batch, with the methods that answer it.

    Attributes:
        adapter: Model, without its values.
        batch: Global batch, abstract.
        cluster: Cluster of the request, parsed or detected.
        request: Settings.
        traced: Traced losses of the model, by the settings that they depend on.
        beside_swarm: Whether a plan over slow links gets a note on the time of a swarm.
        least_margin: Least free memory of plans, as a fraction of the predicted memory.
        unasked: Names of the settings that the user did not give.
    """

    adapter: Adapter
    batch: Any
    cluster: Cluster
    request: PlanRequest
    traced: Traces = field(default_factory=Traces)
    beside_swarm: bool = True
    least_margin: float = 0.0
    unasked: frozenset[str] = frozenset()

    @collections_paused()
    @without_mesh
    def plan(self) -> Plan:
        """Makes the plan, by the steps in the docstring of the module."""
        if self.request.swarm:
            from whalejax.swarm.planning import swarm_plan

            result = swarm_plan(
                self._alone.replan,
                cluster=self.cluster,
                mesh=self.request.mesh,
                num_micro_batches=self.request.num_micro_batches,
                bandwidth=bytes_per_second(self.request.bandwidth),
                wire=self.request.wire,
                sum_wire=self.request.sum_wire or "f32",
            )
            return dataclasses.replace(result, question=self)
        question, notes = self._with_precision()
        programs = question.programs()
        if self.request.optimizer is not None:
            check_has_gradient(programs.traced.captured)
        rules = question.split_rules(programs)
        rules.check()
        wanted = question.search_request(programs)
        result = rules.allowed(
            lambda count: question.searched(
                programs,
                wanted
                if count is None
                else dataclasses.replace(wanted, num_micro_batches=count),
            )
        )
        check_split(rules.loss(), result, rules.whole)
        result = question.finished(result, programs, wanted)
        notes = [*notes, *split_note(rules.loss(), result, rules.whole)]
        notes += question._kinds_note(result, programs, wanted)
        rate = slow_link(self.cluster) if self.beside_swarm else None
        if rate is not None:
            from whalejax.swarm.planning import swarm_note

            notes = [*notes, *swarm_note(self._alone.replan, result, rate)]
        result = dataclasses.replace(result, notes=(*result.notes, *notes))
        return self._accepted(result) if self.request.verified else result

    def _kinds_note(self, plan: Plan, programs: Programs, wanted: Request) -> list[str]:
        request = self.request
        fixed = request.mesh is not None or request.shares is not None
        if self.cluster.is_uniform or fixed or not plan.runnable:
            return []
        return notes_on_kinds(
            plan,
            programs.graph,
            wanted,
            known=programs.known,
            again=programs.again,
            replan=lambda part: self._alone.replan(cluster=part),
        )

    @property
    def _alone(self) -> PlanQuestion:
        request = dataclasses.replace(self.request, verified=False)
        return dataclasses.replace(self, beside_swarm=False, request=request)

    def _accepted(self, plan: Plan) -> Plan:
        def verify(plan: Plan) -> Any:
            return self.verify(
                plan, None, timeout_seconds=COMPILE_SECONDS, better=False
            )

        def plan_again(margin: float) -> Plan:
            return dataclasses.replace(self, least_margin=margin).replan(verified=False)

        # Later questions use the margin of the request, and not the one found here.
        return dataclasses.replace(accepted(plan, verify, plan_again), question=self)

    def replan(self, **changes: Any) -> Plan:
        """Returns the plan with other settings, for ``Plan.what_if``.

        Raises:
            PlanError: A setting cannot be changed.
        """
        known = changeable()
        problems = Arguments("what_if", PlanError)
        for name in changes:
            if name not in known:
                hint = near_hint(name, known, ARGUMENT_SYNONYMS)
                if name in _PLANNED_AGAIN:
                    hint = ". Plan again with wh.plan, which takes it"
                problems.add(
                    f"there is no {name!r} to change"
                    f"{hint or '; expected some of ' + ', '.join(known)}"
                )
        for name, what in (("batch", "samples"), ("sequence", "tokens")):
            if name in changes and not is_whole(changes[name], 1):
                problems.refuse(name, changes[name], f"a number of {what}, 1 or more")
        problems.raise_if_any()
        batch, cluster, axes = self.batch, self.cluster, self.request.batch_axes
        length = changes.pop("sequence", None)
        if "batch" in changes:
            batch = resize_batch(batch, axes, int(changes.pop("batch")))
        if "cluster" in changes:
            if changes["cluster"] is None:
                raise PlanError(
                    "cluster is None; expected a Cluster or text such as 'h100:8', or "
                    "'local' for the devices of this process"
                )
            cluster = changes["cluster"] = parsed_cluster(changes["cluster"])
        if changes.get("runnable") is False:
            changes.setdefault("verified", False)  # An estimate is not compiled.
        request = dataclasses.replace(self.request, **changes)
        asked = dataclasses.replace(self, batch=batch, cluster=cluster, request=request)
        if length is None:
            return asked.plan()
        return asked._plan_for_length(int(length), self._sample_tokens)

    def _plan_for_length(self, length: int, tokens: int) -> Plan:
        """Returns the plan for sequences of another length.

        The model reads ``tokens`` tokens of the sequences in this question's batch.
        """
        failed: Exception | None = None
        for batch in with_length(self.batch, self.request.batch_axes, length, tokens):
            try:
                plan = dataclasses.replace(self, batch=batch).plan()
                break
            except (TypeError, ValueError) as error:
                if isinstance(error, WhaleError):
                    raise
                failed = failed or error
        else:
            first = str(failed).strip().partition("\n")[0]
            raise PlanError(
                f"the loss takes no sequences of {length} ({first}). If a table of "
                "positions limits the length, make the model for the longer one"
            ) from failed
        beyond = [note for note in plan.notes if note.startswith(BEYOND)]
        if beyond:
            raise PlanError(
                f"the loss takes no sequences of {length}. It {'. It '.join(beyond)}"
            )
        return plan

    @property
    def sequence_length(self) -> int | None:
        """The length of the sequences that the model reads, or None."""
        return sequence_length(self.batch, self.request.batch_axes, self._sample_tokens)

    @property
    def _sample_tokens(self) -> int:
        question, _ = self._with_precision()
        return model_work(question.programs().graph, self._samples).sample_tokens

    def verify(
        self,
        plan: Plan,
        topology: str | None,
        *,
        timeout_seconds: float,
        better: bool = True,
    ) -> Any:
        """Compiles a plan with the real compiler, for ``Plan.verify``.

        Args:
            plan: Plan of this model.
            topology: Topology to compile for; None uses the plan's cluster.
            timeout_seconds: Seconds after which compilation is abandoned.
            better: Whether to search for a plan that fits if this one does not; default
                True.
        """
        from whalejax.verification.checking import check

        return check(
            plan,
            self.adapter,
            self.batch,
            optimizer=self.optimizer,
            batch_axes=self.request.batch_axes,
            topology=topology,
            timeout_seconds=timeout_seconds,
            again=functools.partial(self.replan, verified=False) if better else None,
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the request, or an optimizer that does nothing."""
        given = self.request.optimizer
        return NO_OPTIMIZER if given is None else given

    @property
    def num_micro_batches(self) -> int | None:
        """The number of micro-batches that the request fixes, or None."""
        return self.request.num_micro_batches

    @property
    def margin(self) -> float:
        """Free memory that plans leave, as a fraction of the predicted memory."""
        given, least = self.request.margin, self.least_margin
        return self._margin(self.programs()) if given is None else max(given, least)

    @property
    def precision(self) -> str:
        """Precision of the whole model; ``"f32"`` if TaskGraphs have their own."""
        given = self.request.precision
        return given if isinstance(given, str) else "f32"

    # Capture.

    def programs(self) -> Programs:
        """Returns the traced model, whose variants are made at their first use."""
        return self.traced.of(
            self.adapter,
            self.batch,
            batch_axes=self.request.batch_axes,
            num_micro_batches=self.request.num_micro_batches or 1,
            precision=self.request.precision,
        )

    def _with_precision(self) -> tuple[PlanQuestion, list[str]]:
        given = self.request.precision
        if not isinstance(given, str):
            return self, []
        self._check_mesh()
        taken, notes = taken_precision(
            given, lambda one: self._at_precision(one).programs().traced
        )
        return self._at_precision(taken), notes

    def _at_precision(self, precision: Any) -> PlanQuestion:
        request = dataclasses.replace(self.request, precision=precision)
        return dataclasses.replace(self, request=request)

    # Strategies and search.

    def _check_mesh(self) -> None:
        request = self.request
        axes = PLANNED_AXES if request.runnable else MESH_AXES
        mesh = {} if request.mesh is None else request.mesh
        check_mesh(mesh, self.cluster.num_devices, request.allow_idle, axes)

    def search_request(self, programs: Programs) -> Request:
        """Returns the request of the search, checked against the model.

        Args:
            programs: Programs of the loss.

        Raises:
            PlanError: A setting does not suit this model.
        """
        self._check_mesh()
        request, adapter = self.request, programs.adapter
        graph, traced = programs.graph, programs.traced
        hosts = functools.partial(
            programs.of_optimizer, offloadable_state, self.optimizer
        )
        state = optimizer_bytes(adapter, self.optimizer, self.cluster.platform)
        options = fixed_options(
            request,
            programs,
            runnable=request.runnable,
            has_optimizer=request.optimizer is not None,
            hosts=hosts,
        )
        result = Request(
            **options_of(options),
            optimizer=state,
            state_bytes=tree_bytes(adapter.rest) - graph.frozen_bytes,
            batch_bytes=tuple(tree_bytes(x) for x in jax.tree.leaves(self.batch)),
            num_micro_batches=self._count,
            default=request.default_kind,
            cast_bytes=CAST_BYTES[self.precision],
            narrowed=self.precision != request.precision,
            num_devices=self.cluster.num_devices,
            mesh=request.mesh,
            zero=request.zero,
            policies=tuple(p for p in REMAT_POLICIES if traced.names or p != "named"),
            hosted=hosts,
            one_part=not self.beside_swarm,  # A peer of a swarm has one part.
            sliced=functools.partial(
                programs.of_optimizer, elementwise, self.optimizer
            ),
        )
        check_combine(
            result,
            graph,
            self.cluster,
            shares=request.shares,
            others=space_problems(
                request.mesh or {},
                stages=(request.mesh or {}).get(STAGE, 1) > 1,
                uneven=request.shares is not None,
            ),
        )
        return result

    def split_rules(self, programs: Programs) -> SplitRules:
        """Returns the rules for the division of the batch.

        Args:
            programs: Programs of the loss.
        """
        request = self.request
        marks = {m for g in programs.graph.task_graphs for m in g.marks}
        texts = [*filter(None, (m.get("num_micro_batches") for m in marks))]
        asked = [(int(text), f"num_micro_batches={text} of a mark") for text in texts]
        if request.num_micro_batches is not None:
            count = int(request.num_micro_batches)
            asked.insert(0, (count, f"num_micro_batches={count}"))
        if request.shares is not None and not isinstance(request.shares, str):
            shares = [int(k) for k in request.shares]
            asked.append((max(1, sum(shares)), f"shares={shares!r:.60}"))
        return SplitRules(
            loss=functools.cache(lambda: self._judged(programs)),
            whole=self._samples,
            group_size=request.group_size,
            per_micro_batch=request.per_micro_batch,
            asked=asked,
            may_couple=self._may_couple(programs),
        )

    def _may_couple(self, programs: Programs) -> bool:
        weights = sum(tensor.nbytes for tensor in programs.graph.params)
        if weights > self.cluster.num_devices * self.cluster.memory_bytes:
            return False  # No plan fits anyway, and a search is to report it.
        program = ProgramAnalyses(
            graph=programs.graph,
            cluster=self.cluster,
            again=programs.again,
            known=programs.known,
        ).of((), (), 1)
        assert program is not None
        analysed, _ = program
        return bool(expert_roles(analysed.graph, analysed.dims))

    @property
    def _samples(self) -> int:
        leaves, _ = micro_leaves(self.batch, self.request.batch_axes, 1)
        return next(x.shape[x.axis] for x in leaves if x.axis is not None)

    def _judged(self, programs: Programs) -> Captured:
        """Returns the traced loss; in evaluation mode if there is no optimizer."""
        evaluating = programs.adapter.evaluating()
        if self.request.optimizer is not None or evaluating is None:
            return programs.traced.captured
        return capture(evaluating, self.batch, batch_axes=self.request.batch_axes)

    @property
    def _count(self) -> int | None:
        count = self.request.num_micro_batches
        return None if count is None else int(count)

    def searched(self, programs: Programs, wanted: Request) -> Plan:
        """Returns the best plan of the executors that may run the loss.

        Args:
            programs: Programs of the loss and its variants.
            wanted: Request of the search.

        Raises:
            PlanError: No plan exists. If memory is short, the message has the bytes.
        """
        request, idle = self.request, self.request.allow_idle
        margin = self._margin(programs)
        xla = checked_options(request.compiler_options)
        uneven: Uneven = uneven_shares(
            request.shares,
            mixed=len({node.kind.name for node in self.cluster.nodes}) > 1,
            runnable=request.runnable,
            allow_idle=idle,
            whole=wanted.num_micro_batches == 1,
        )
        search, wanted = decider(
            programs, wanted, runnable=request.runnable, uneven=uneven, allow_idle=idle
        )
        decided = functools.partial(
            search,
            programs.graph,
            without_margin(self.cluster, margin).under(xla),
            precision=self.precision,
            batch=batch_leaves(self.batch),
            again=programs.again,
        )
        try:
            result = (_with_fewest_idle if idle else _at_once)(decided, wanted)
        except NothingFits as error:
            said = with_margin_said(error, self.cluster, margin)
            graphs = programs.graph.task_graphs
            marks = [mark for graph in graphs for mark in graph.marks]
            fixed = with_fixed_settings(said, self.request, marks, self.unasked)
            raise fixed from error
        return with_devices(result, self.cluster) if margin else result

    def _margin(self, programs: Programs) -> float:
        given = self.request.margin
        own = self._band(programs).high - 1 if given is None else given
        return max(own, self.least_margin)

    def _band(self, programs: Programs) -> MemoryBand:
        return memory_band(self.cluster.platform, programs.graph)

    # Plan.

    def finished(self, found: Plan, programs: Programs, wanted: Request) -> Plan:
        """Checks the result of a search against the optimizer and adds its notes.

        Args:
            found: Plan that the search found.
            programs: Programs of the loss.
            wanted: Request of the search.
        """
        captured, graph = programs.traced.captured, programs.graph
        check_update(found, programs.adapter, self.optimizer, captured.steady)
        check_reports(programs, found)
        xla = checked_options(self.request.compiler_options)
        found = compiled_with(found, xla, captured.precisions)
        notes = (
            *found.notes,
            *captured.notes,
            *remat_note(wanted.remat or (), found),
            *attention_note(found, programs),
            *idle_note(found),
            *zero_note(found, self.request.zero),
            *unplanned_pins(graph, found.axis_sizes, stages=True),
            *split_notes(found),
            *option_note(xla),
            *bf16_note(found, graph),
            *efficiency_notes(self.cluster.kinds, widest_work(graph)),
            *loss_notes(captured, found),
            *optimizer_note(self.request.optimizer),
            *combine_notes(found),
        )
        found = dataclasses.replace(
            found,
            cluster=self.cluster,
            leaves=with_unread_noted(found.leaves, graph),
            batch_tree=batch_tree(self.batch),
            optimizer_bytes=wanted.optimizer.followed_bytes,
            work=model_work(graph, self._samples),
            notes=notes,
            question=self,
        )
        band = band_note(found, self._band(programs), self._margin(programs))
        found = dataclasses.replace(found, notes=(*found.notes, *band))
        # Means within a node need consecutive ranks in a node.
        return found if found.combine == "adasum_nodes" else ordered(found)


@without_mesh
def question_about(
    request: PlanRequest, loss_fn: Callable[..., Any], model: Any, batch: Any
) -> PlanQuestion:
    """Returns a question about a model, to be answered once or with changes.

    Args:
        request: Settings.
        loss_fn: Loss: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: NNX module, Linen variables, or any pytree; its arrays are not kept.
        batch: GLOBAL batch, abstract or real; its arrays are not kept.

    Raises:
        WhaleError: An argument is invalid, such as a batch in place of the model.
    """
    check_order("(loss_fn, model, batch)", loss_fn, model, batch)
    try:
        check_batch(batch, request.batch_axes)
    except WhaleError as error:
        if not has_one_batch_size(model):
            raise
        raise WhaleError(
            f"{error}\nmodel looks like a batch. The order is (loss_fn, model, batch)"
        ) from None
    trainable, names = request.trainable, request.axis_names
    adapter = adapt(model, loss_fn, trainable=trainable, axis_names=names)
    return PlanQuestion(
        adapter=adapter.without_values(),
        batch=jax.tree.map(aval_of, batch),
        cluster=parsed_cluster(request.cluster),
        request=request,
    )


def _at_once(decided: Callable[[Request], Plan], request: Request) -> Plan:
    count = request.num_devices
    tell(f"searching layouts of {count} device{'s' if count > 1 else ''}")
    return decided(request)


def _with_fewest_idle(decided: Callable[[Request], Plan], request: Request) -> Plan:
    problems: list[PlanError] = []
    fixed = math.prod((request.mesh or {}).values())
    for count in range(request.num_devices // fixed * fixed, 0, -fixed):
        try:
            return _at_once(decided, dataclasses.replace(request, num_devices=count))
        except PlanError as error:
            problems.append(error)
    raise next(
        (e for e in problems if not isinstance(e, DeviceCountError)), problems[0]
    )
