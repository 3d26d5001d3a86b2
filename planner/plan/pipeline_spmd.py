"""Plans with equal pipeline stages, which one program runs in lockstep.

Each stage stores some layers of a scan, on its own devices. The stage with most layers
is searched like a model with that many layers, on the devices of one stage. The
schedule then gives the number of turns. All stages compute the operations before and
after the layers, although only the first and last stage need them.

The module is long because one class holds all results of one number of micro-batches:
its turns, its time and memory, and the plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import count_text, gigabytes
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    as_run,
    row_ahead,
    row_hits,
)
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.cost_terms import ALL, MemoryTerms, Remat, TimeTerms
from whalejax.planner.memory.saved_tensors import fold_kept, kept_bytes
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.combined_steps import MicroBatchCost, lockstep_step
from whalejax.planner.pipeline.layer_stack import STAGE, StackedLayers, devices_of_stage
from whalejax.planner.pipeline.schedules import Schedule, schedule
from whalejax.planner.pipeline.uneven_layers import (
    LayerSplit,
    exchanged,
    parts,
    seconds_of,
    stored_apart,
    stored_bytes,
    unequal_notes,
)
from whalejax.planner.plan.build import build_plan
from whalejax.planner.plan.plan import Plan, Stages
from whalejax.planner.plan.stage_notes import candidates, check_stages
from whalejax.planner.plan_entries import (
    BatchLeaf,
    Collective,
    LeafPlan,
    VirtualStagePrediction,
)
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.least_paces import MOST_ROUNDS, least_paces, not_faster
from whalejax.planner.search.request import LayoutCandidate, Request
from whalejax.planner.search.spmd_search import (
    Again,
    SpmdDecision,
    by_marks,
    decided_on,
)
from whalejax.planner.search.stage_time import (
    handed_bytes,
    turn_of,
)
from whalejax.planner.search.user_choices import PipelineConstraints
from whalejax.planner.sharding.layout import Spec, divisors, shards
from whalejax.planner.sharding.operation_rows import Row
from whalejax.planner.step_options import STAGE_ESTIMATES, options_off


LOCKSTEP = {"1f1b": "1f1b-lockstep", "gpipe": "gpipe-lockstep"}
"""Lockstep schedules by the name that users give."""


def decide_stages(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    piped: PipelineConstraints,
    precision: str = "f32",
    batch: Sequence[BatchLeaf] = (),
    again: Again | None = None,
    known_seconds: float = math.inf,
) -> Plan:
    """Chooses how to run a model in the requested number of stages.

    Args:
        graph, cluster, request, precision, batch, again: Arguments of
            ``spmd_plan.decide``. The mesh that the request fixes is the mesh of one
            stage.
        piped: Requested pipeline settings.
        known_seconds: Step time of a known plan; slower plans are not tried.

    Raises:
        PlanError: The pipeline is impossible, nothing fits, or no plan is faster.
    """
    shared = StackedLayers.of(graph, every=request.estimate)
    stages = piped.mesh[STAGE]
    request = by_marks(graph, request, stages)
    _check(shared, stages, request)
    own = functools.cache(lambda layers: shared.of_stage(graph, layers))
    result: list[_LockstepCandidate] = []
    problems: list[PlanError] = []
    counts = [*_counts(graph, request, stages)]
    least = _least_steps(graph, shared, cluster, request, stages, counts)
    for count in sorted(counts, key=lambda count: least[count]):
        fits = (one.time.step_seconds for one in result if one.fits)
        if least[count] >= min([*fits, known_seconds]):
            break
        asked = _of_one_stage(graph, shared, stages, request, count)
        dealt = LayerSplit(length=shared.length, stages=stages)
        if shared.length % stages and asked.num_devices == 1:
            dealt = replace(dealt, seconds=seconds_of(graph, shared, cluster, count))
        part = devices_of_stage(cluster, asked.num_devices, stages)
        most = max(dealt.layers)
        program = None
        if again is not None:
            program = functools.partial(_search_stage, again, most, request.estimate)
        for stash, remat in _stashes(request, able=again is not None):
            one = replace(asked, remat=remat)
            try:
                decided = decided_on(own(most), part, one, program)
            except PlanError as error:
                problems.append(error)
                continue
            result.append(_LockstepCandidate(decided, cluster, piped, dealt, stash))
            if result[-1].fits:
                break  # The remaining stashes recompute more.
    if not (result or problems):
        raise not_faster(stages, known_seconds)
    if not result:
        raise _nothing(problems, stages)
    fitting = [one for one in result if one.fits]
    if not fitting:
        raise _too_large(min(result, key=lambda one: one.memory.total_bytes))
    best = min(fitting, key=lambda one: one.time.step_seconds)
    return best.plan(request, precision, batch, graph.model_hash, result)


def _least_steps(
    graph: Graph,
    shared: StackedLayers,
    cluster: Cluster,
    request: Request,
    stages: int,
    counts: Sequence[int],
) -> dict[int, float]:
    if len(counts) < 2 or shared.length % stages:
        return dict.fromkeys(counts, 0.0)
    analysed = analyse_graph(shared.of_stage(graph, shared.length // stages))
    asked = _of_one_stage(graph, shared, stages, request, counts[0])
    search = Search(
        analysed.graph,
        analysed.dims,
        devices_of_stage(cluster, asked.num_devices, stages),
        replace(asked, num_micro_batches=None, remat=(), offload=()),
    )
    paces = least_paces(search, counts)
    # Each micro-batch passes through all stages in turn.
    return {n: pace * (n + stages - 1) for n, (pace, _) in paces.items()}


def _stashes(request: Request, *, able: bool) -> Iterator[tuple[str, Remat | None]]:
    """Yields what may be saved of a micro-batch in flight, each with its remat policy.

    The fastest comes first. Saved residuals must be written to memory, so it pays to
    save only the products and to recompute the operations between them. Else the
    stages' inputs are saved. ``able`` says whether remat policies apply to the layers.
    """
    if request.remat is None and able:
        for policy in request.policies:
            if policy not in ("none", "full"):
                yield "residuals", ((ALL, policy),)
    elif ALL in dict(request.remat or ()):
        yield "residuals", request.remat
    yield "inputs", request.remat


def _of_one_stage(
    graph: Graph, shared: StackedLayers, stages: int, request: Request, count: int
) -> Request:
    equal, optimizer = shared.length % stages == 0, request.optimizer
    cut = {
        t.path
        for t in graph.params
        if t.path in shared.every_path and (equal or parts(t.shape, stages))
    }

    def of_stage(path: str, nbytes: int) -> int:
        return nbytes // stages if path in cut else nbytes

    hosted = request.hosted
    return replace(
        request,
        num_devices=request.num_devices // stages,
        num_micro_batches=count,
        is_part=True,
        hosted=None if hosted is None else lambda: hosted().with_state(of_stage),
        **options_off(
            "remat", "sequence_parallel", *(STAGE_ESTIMATES if request.estimate else ())
        ),
        optimizer=replace(
            optimizer,
            by_path={path: of_stage(path, n) for path, n in optimizer.by_path.items()},
        ),
    )


def _search_stage(
    again: Again, layers: int, every: bool, remat: Remat, *kinds: Any
) -> Graph:
    result = again(remat, *kinds)
    return StackedLayers.of(result, every=every).of_stage(result, layers)


def _check(shared: StackedLayers, stages: int, request: Request) -> None:
    layers = shared.length
    if stages > layers:
        raise PlanError(
            f"stage is {stages}, but the model has {count_text(layers, 'layer')}, and "
            f"each stage needs at least one; expected at most {layers}"
        )
    check_stages(request, stages, most=layers, estimated=STAGE_ESTIMATES)


def _counts(graph: Graph, request: Request, stages: int) -> Iterator[int]:
    if request.num_micro_batches is not None:
        yield request.num_micro_batches
        return
    size = graph.batch_size * graph.num_micro_batches
    yield from [n for n in divisors(size) if 1 < n <= MOST_ROUNDS * stages] or [1]


class _LockstepCandidate:
    """Candidate with one number of micro-batches: one stage's plan and the joint cost.

    ``stash`` says what is saved of a micro-batch in flight; see ``Stages``.
    """

    def __init__(
        self,
        decided: SpmdDecision,
        cluster: Cluster,
        piped: PipelineConstraints,
        dealt: LayerSplit,
        stash: str,
    ) -> None:
        self.stash = stash
        self.decided = decided
        self.cluster = cluster
        self.dealt = dealt
        every = decided.search.request.estimate
        self.shared = StackedLayers.of(decided.analysed.graph, every=every)
        self.best: LayoutCandidate = decided.weighed[0]
        self.table: Schedule = schedule(
            LOCKSTEP[piped.schedule or "1f1b"],
            piped.mesh[STAGE],
            self.best.num_micro_batches,
        )
        self.handed_bytes = self._handed_bytes()
        self.leaves = tuple(self._leaf(leaf) for leaf in self.best.leaves)
        self.collectives = (*self.best.collectives, *self._between())
        self.turn = self._turn()
        self.stages = self._stages()
        self.time = self._time()
        depth = max(self.table.in_flight)
        held = depth + 4  # Two micro-batches are being sent, and two were received.
        memory = self.best.memory
        stored, copied = self._stack_bytes()
        activations = memory.activations_bytes
        if stash == "residuals":  # Includes the residuals of the current micro-batch.
            kept = self._kept_bytes()
            activations = max(activations, kept) + (depth - 1) * kept
        self.memory: MemoryTerms = replace(
            memory,
            activations_bytes=activations + held * self.handed_bytes,
            params_bytes=memory.params_bytes + stored - copied,
            working_bytes=memory.working_bytes + copied,
        )
        self.fits = self.memory.total_bytes <= cluster.memory_bytes

    def _stages(self) -> Stages:
        table, turn = self.table, self.turn
        pace = VirtualStagePrediction(
            forward_seconds=turn.ahead.step_seconds,
            backward_seconds=self.behind.step_seconds,
        )
        return Stages(
            schedule=table.name,
            layers=self.dealt.layers,
            turns=len({table.turn(row) for row in table.rows}),
            ahead=self._turns("forward"),
            back=self._turns("backward"),
            stash=self.stash,
            paces=(pace,) * table.num_stages,
            handed_seconds=self._between_seconds("border"),
        )

    def _turns(self, action: str) -> int:
        rows = (row for row in self.table.rows if row.action == action)
        return len({self.table.turn(row) for row in rows})

    @property
    def search(self) -> Search:
        return self.decided.search

    @property
    def mesh(self) -> dict[str, int]:
        return {STAGE: self.table.num_stages, **self.best.mesh}

    @property
    def alone(self) -> bool:
        return math.prod(self.best.mesh.values()) == 1

    @property
    def behind(self) -> TimeTerms:
        """Time terms of a stage's backward pass of one micro-batch."""
        turn = self.turn
        return turn.both if self.stash == "inputs" else turn.both - turn.ahead

    def _setting(self) -> CostSetting:
        return self.search.setting(self.best.mesh, self.best.num_micro_batches)

    def _handed_bytes(self) -> int:
        parts = int(self._setting().num_micro_batches)
        carried = [*self.shared.carried]
        return int(handed_bytes(self.decided.analysed, self.best, carried, parts))

    def _between(self) -> list[Collective]:
        count = len(self.shared.carried)
        handed = Collective(
            kind="collective-permute",
            axes=(STAGE,),
            phase="turn",
            what="border",
            payload_bytes=self.handed_bytes // max(1, count),
            count=2 * count,
            scope="what stages hand on",
        )
        between = [handed]
        for leaf in self.leaves:
            if leaf.path not in self.shared.every_path:
                if not leaf.trained:
                    continue
                nbytes = self._gradient_bytes(leaf)
                between.append(
                    Collective(
                        kind="all-reduce",
                        axes=(STAGE,),
                        phase="update",
                        what="gradient",
                        payload_bytes=nbytes,
                        count=1,
                        scope=leaf.path,
                    )
                )
            elif not self.dealt.equal:
                between += exchanged(leaf, max(self.dealt.layers), self.mesh)
        return between

    def _stack_bytes(self) -> tuple[int, int]:
        """Returns bytes of stored layers and temporaries; zeros for equal stages."""
        if self.dealt.equal:
            return 0, 0

        def total(leaves: Sequence[LeafPlan]) -> int:
            stack = (leaf for leaf in leaves if leaf.path in self.shared.every_path)
            return sum(stored_bytes(leaf, self.mesh) for leaf in stack)

        return total(self.leaves), total(self.best.leaves)

    def _gradient_bytes(self, leaf: LeafPlan) -> int:
        itemsize = 8 if leaf.dtype == "float64" else 4  # summed in at least 32 bits
        parts = int(shards(leaf.gradient_spec, self.best.mesh))
        return math.prod(leaf.shape) * itemsize // parts

    def _turn(self) -> MicroBatchCost:
        turn = turn_of(self.search, self.best, self._ahead_rows())
        return turn.spared(self.dealt.spared_seconds)

    def _between_seconds(self, what: str) -> float:
        s = self._setting()
        whole = CostSetting(self.mesh, 1, self.cluster, s.dims, s.batch_roles)
        between = [c for c in self.collectives if STAGE in c.axes and c.what == what]
        return sum(as_run(c, whole)[1] for c in between)

    def _time(self) -> TimeTerms:
        """Returns the time of all turns; turns without a micro-batch are the bubble."""
        stages = self.stages
        return lockstep_step(
            self.turn,
            self.behind,
            count=self.best.num_micro_batches,
            turns=(stages.ahead, stages.back, stages.turns),
            handed_seconds=stages.handed_seconds,
            once_seconds={
                "parameter_seconds": self._between_seconds("parameter"),
                "gradient_seconds": self._between_seconds("gradient"),
            },
        )

    @property
    def layout(self) -> str:
        return f"stage {self.table.num_stages} × {self.best.layout}"

    def plan(
        self,
        request: Request,
        precision: str,
        batch: Sequence[BatchLeaf],
        model_hash: str,
        weighed: Sequence[_LockstepCandidate],
    ) -> Plan:
        decided = self.decided
        plan = build_plan(
            decided.analysed,
            decided.search,
            decided.weighed,
            self.cluster,
            request,
            precision,
            batch,
        )
        leaves = zip(plan.leaves, self.leaves, strict=True)
        roles = tuple(
            replace(role, size=self.dealt.length)
            if role.name in self._layer_roles()
            else role
            for role in plan.roles
        )
        return replace(
            plan,
            model_hash=model_hash,
            axes=((STAGE, self.table.num_stages), *plan.axes),
            leaves=tuple(replace(x, note=noted.note) for noted, x in leaves),
            roles=roles,
            collectives=tuple(c for c in self.collectives if c.count),
            stages=self.stages,
            time=self.time,
            memory=self.memory,
            candidates=candidates(weighed, self),
            notes=(*plan.notes, *unequal_notes(self.dealt, alone=self.alone)),
            product_flops=self._product_flops(),
        )

    @property
    def kept_words(self) -> str:
        given = self.stash == "inputs"
        return "what they were given" if given else "what their derivative reads"

    def _layer_roles(self) -> set[str]:
        leaves = (x for x in self.best.leaves if x.path in self.shared.every_path)
        return {name for leaf in leaves for name in leaf.roles[0]}

    def _leaf(self, leaf: LeafPlan) -> LeafPlan:
        if leaf.path not in self.shared.every_path:
            return leaf
        if not self.dealt.equal:
            leaf = replace(leaf, shape=(self.dealt.length, *leaf.shape[1:]))
            return stored_apart(leaf, self.mesh)
        length = leaf.shape[0] * self.table.num_stages
        leaf = replace(leaf, shape=(length, *leaf.shape[1:]))

        def staged(spec: Spec) -> Spec:
            return (STAGE, *spec[0]), *spec[1:]

        return replace(
            leaf,
            compute_spec=staged(leaf.compute_spec),
            param_spec=staged(leaf.param_spec),
            gradient_spec=staged(leaf.gradient_spec),
            optimizer_spec=staged(leaf.optimizer_spec),
        )

    def _product_flops(self) -> int:
        """Returns the FLOPs of the busiest device for all micro-batches."""
        s = self._setting()
        ahead = sum(
            row_ahead(row, row_hits(row, self.best.tables[row.task_graph], s), s)[2]
            for row in self._ahead_rows()
        )
        behind = self.search.product_flops(self.best) / self.best.num_micro_batches
        if self.stash == "residuals":
            behind -= ahead
        return int(self.stages.ahead * ahead + self.stages.back * behind)

    def _ahead_rows(self) -> tuple[Row, ...]:
        """Returns the rows of a stage's forward pass, up to the end of its layers.

        If only the stage's input is saved, the backward pass recomputes these rows.
        """
        graph, (_, end) = self.decided.analysed.graph, self._span()
        part = replace(graph, ops=graph.ops[:end])
        return build_rows(part, self.decided.analysed.dims).ops

    def _span(self) -> tuple[int, int]:
        graph = self.decided.analysed.graph
        inside = [self.shared.holds(op.position) for op in graph.ops]
        return inside.index(True), len(inside) - inside[::-1].index(True)

    def _kept_bytes(self) -> int:
        analysed = self.decided.analysed
        graph = analysed.graph
        home = {
            t: op.task_graph
            for op in graph.ops
            if self.shared.holds(op.position)
            for t in (*op.operands, *op.results)
        }
        result = [
            replace(entry, nbytes=one.nbytes)
            for one in graph.stacked
            if one.tensor in home
            for entry in fold_kept(
                graph, analysed.dims, {one.tensor: (one.trip, home[one.tensor])}
            )
        ]
        return int(sum(kept_bytes(result, self.best.tables, self._setting())))


def _nothing(problems: Sequence[PlanError], stages: int) -> PlanError:
    """Returns the error with fewest missing bytes, if all lack memory."""
    lacking = [error for error in problems if isinstance(error, NothingFits)]
    if len(lacking) < len(problems):
        return next(error for error in problems if error not in lacking)
    nearest = min(lacking, key=lambda error: error.lacks_bytes)
    layout = f"stage {stages} × {nearest.nearest}"
    need = nearest.of_bytes + nearest.lacks_bytes
    return NothingFits(
        f"{layout} needs {gigabytes(need)} on a device and there are "
        f"{gigabytes(nearest.of_bytes)}, {gigabytes(nearest.lacks_bytes)} short, "
        "before activations of micro-batches in flight. Use more stages or "
        "micro-batches, or shard more inside a stage (fsdp, tensor)",
        lacks_bytes=nearest.lacks_bytes,
        of_bytes=nearest.of_bytes,
        nearest=layout,
        what=nearest.what,
    )


def _too_large(one: _LockstepCandidate) -> NothingFits:
    need, room = one.memory.total_bytes, one.cluster.memory_bytes
    return NothingFits(
        f"{one.layout} needs {gigabytes(need)} on a device and there are "
        f"{gigabytes(room)}, {gigabytes(need - room)} short: "
        f"{gigabytes(one.memory.activations_bytes)} are activations, of which "
        f"stages keep {one.kept_words} of every micro-batch in flight. Use more "
        "micro-batches or stages, or shard more inside a stage (fsdp, tensor)",
        lacks_bytes=need - room,
        of_bytes=room,
        nearest=one.layout,
    )
