"""Searches for the best layout of one program, from a captured loss and a cluster.

The module checks that a plan can obey the marks, and searches. ``spmd_plan`` then makes
the plan.

The module is long because ``ProgramSearches`` tries the programs of a loss in an order
in which each search bounds the next ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems
from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost_terms import ALL, Chosen, Remat
from whalejax.planner.memory.live_sets import AnalysedProgram
from whalejax.planner.model.analysis import GraphAnalysis, analyse_graph
from whalejax.planner.model.graph import ATTENTION, Graph
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_errors import DeviceCountError, PlanError
from whalejax.planner.search.infeasible import refusal
from whalejax.planner.search.layout_search import (
    KnownLayouts,
    Search,
    fixed_space,
    meshes,
    ranked,
)
from whalejax.planner.search.ranking import SURE, TIE
from whalejax.planner.search.request import LayoutCandidate, Request
from whalejax.planner.sharding.layout import SPATIAL_AXES, STAGE, replicas
from whalejax.planner.sharding.metadata_constraints import check_devices, copies
from whalejax.planner.sharding.sequence_parallel import (
    SUFFIX,
    split_between,
)
from whalejax.planner.step_options import LOSS_CHUNKS


def analysed_for(plan: PlanData, graph: Graph) -> GraphAnalysis:
    """Analyses a graph with the TaskGraphs of a plan.

    Args:
        plan: Plan of the same model.
        graph: Graph of the model.
    """
    analysed = analyse_graph(graph)
    if not plan.sequence_parallel:
        return analysed
    names = {
        name
        for region in plan.compute
        if not region.task_graph.endswith(SUFFIX)
        for axis, roles in region.axes
        for name in roles
        if axis == "tensor"
    }
    roles = [analysed.dims.find(name) for name in names]
    batch = {r.index for r in analysed.dims.batch}
    shared = frozenset({r.index for r in roles if r is not None} - batch)
    split = split_between(analysed.graph, analysed.dims, shared)
    return GraphAnalysis(graph=split.graph, dims=analysed.dims)


Again = Callable[[Remat, Chosen, int], Graph]
"""Function that returns the captured loss with other options: remat of some TaskGraphs,
blocked attention in some, and logits in a number of chunks.
"""


MOST_GRIDS = 32
"""Largest number of layout grids to keep for later searches."""


class ProgramCache(
    dict[
        tuple[Remat, Chosen, int, CompilerProfile],
        "tuple[GraphAnalysis, AnalysedProgram] | None",
    ]
):
    """Programs of one loss by remat, attention, chunks and compiler.

    The value is None if the loss has no such program.

    Attributes:
        grids: Layouts of the most recent searches.
    """

    def __init__(self) -> None:
        """Creates a cache without programs."""
        super().__init__()
        self.grids: deque[KnownLayouts] = deque(maxlen=MOST_GRIDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpmdDecision:
    """Result of a search for one program.

    Attributes:
        analysed: Analysed graph of the chosen plan.
        search: Search that found the plan.
        weighed: Evaluated plans, the chosen one first.
        gap: Fraction of the step time by which another plan of one program may be
            faster; None for a stage or a replica.
        on_paper: Clearly faster plan of one program that no executor runs, or None.
    """

    analysed: GraphAnalysis
    search: Search
    weighed: list[LayoutCandidate]
    gap: float | None
    on_paper: LayoutCandidate | None = None


def decided_on(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    again: Again | None = None,
    known: ProgramCache | None = None,
) -> SpmdDecision:
    """Searches as ``spmd_plan.decide`` does, but neither checks marks nor makes a plan.

    Args:
        graph, cluster, request, again, known: Arguments of ``spmd_plan.decide``.

    Raises:
        PlanError: No plan fits.
    """
    every = searches(graph, cluster, request, again, known)
    searched = every.found
    fits = [s for _, one in searched for s in one.scored if s.fits]
    fitting = ranked(fits if request.is_part else _without_needless(fits))
    if not fitting:
        raise search_refusal([s for _, s in searched], open_remat=request.remat is None)
    analysed, search = next(
        pair for pair in searched if any(s is fitting[0] for s in pair[1].scored)
    )
    refused = ranked([s for _, one in searched for s in one.scored if not s.fits])
    decided = SpmdDecision(
        analysed=analysed, search=search, weighed=[*fitting, *refused], gap=None
    )
    if request.is_part:
        return decided
    least = min(every.best_seconds(), every.least_left_out())
    seconds = fitting[0].time.step_seconds
    return dataclasses.replace(
        decided,
        gap=max(0.0, 1 - least / seconds),
        on_paper=every.on_paper(seconds / (1 + SURE)),
    )


def _without_needless(fits: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Returns plans, without those that offload more than an equally fast plan."""
    alike: dict[object, list[LayoutCandidate]] = {}
    for one in fits:
        # All other options are those of the search that computes the details.
        layout = tuple(one.mesh.items()), id(one.tables), one.zero
        key = id(one.details), layout, one.num_micro_batches
        alike.setdefault(key, []).append(one)
    needless = []
    for several in alike.values():
        kept: list[LayoutCandidate] = []
        for one in sorted(several, key=lambda one: len(one.offload)):
            if not any(
                {*other.offload} < {*one.offload}
                and other.time.step_seconds <= one.time.step_seconds * (1 + TIE)
                for other in kept
            ):
                kept.append(one)
        needless += kept
    return needless


def searches(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    again: Again | None,
    known: ProgramCache | None = None,
) -> ProgramSearches:
    """Returns the finished searches of the programs that may have the best plan.

    For each kind of attention and number of chunks, the least remat comes first. Remat
    costs time and saves memory. So more remat cannot help in two cases: every layout
    fits with the fewest micro-batches, or a layout that fits is faster than all layouts
    that do not fit.
    """
    known = ProgramCache() if known is None else known
    result = ProgramSearches(graph, cluster, request, again, known)
    result.all()
    return result


def _normalised_mesh(mesh: Mapping[str, int] | None) -> dict[str, int]:
    every = (mesh or {}).items()
    return {a: n for a, n in every if n > 1 or a not in SPATIAL_AXES}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnalyses:
    """Programs of one loss, analysed for the devices of a cluster.

    Attributes:
        graph: Captured loss.
        cluster: Devices with their links and compiler.
        again: Function that traces other programs of the loss; None if it has none.
        known: Programs that were analysed before.
    """

    graph: Graph
    cluster: Cluster
    again: Again | None
    known: ProgramCache

    def of(
        self, remat: Remat, attention: Chosen, chunks: int
    ) -> tuple[GraphAnalysis, AnalysedProgram] | None:
        """Returns one program, or None if the loss has no such program."""
        key = remat, attention, chunks, self.cluster.compiler
        if key not in self.known:
            graph = self._graph(remat, attention, chunks)
            self.known[key] = None if graph is None else self._analyse(graph)
        return self.known[key]

    def _analyse(self, graph: Graph) -> tuple[GraphAnalysis, AnalysedProgram]:
        result = analyse_graph(graph)
        return result, AnalysedProgram(result.graph, result.dims, self.cluster.compiler)

    def _graph(self, remat: Remat, attention: Chosen, chunks: int) -> Graph | None:
        if self.again is None or not (remat or attention or chunks > 1):
            return self.graph
        graph = self.graph
        # If the loss has no blocks or chunks, one trace without remat shows it.
        for policy in dict.fromkeys(((), remat)):
            graph = self.again(policy, attention, chunks)
            rings = any(op.kind == ATTENTION for op in graph.ops)
            cut = any(op.chunks > 1 for op in graph.ops)
            if (attention and not rings) or (chunks > 1 and not cut):
                return None
        return None if graph is self.graph else graph


class ProgramSearches:
    """Searches of the programs of one loss; the best plan so far bounds each search.

    Attributes:
        found: Analysed programs with their searches.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        request: Request,
        again: Again | None,
        known: ProgramCache,
    ) -> None:
        self.known = known
        self.program = ProgramAnalyses(
            graph=graph, cluster=cluster, again=again, known=known
        ).of
        self.cluster = cluster
        self.request = request
        self.again = again
        self.found: list[tuple[GraphAnalysis, Search]] = []
        self.tried: dict[int, dict[frozenset[int], set[tuple[int, ...]]]] = {}
        self.searched: dict[
            tuple[Remat, Chosen, int], tuple[GraphAnalysis, Search]
        ] = {}
        self.hopeless = False

    def best_seconds(self) -> float:
        """Returns the step time of the fastest plan that fits so far, or infinity."""
        steps = (
            s.time.step_seconds for _, one in self.found for s in one.scored if s.fits
        )
        return min(steps, default=math.inf)

    def all(self) -> None:
        """Searches every program that may have the best plan."""
        request = self.request
        asked = request.loss_chunks or 1
        self.policies(request.attention or (), asked)
        if self.hopeless:
            return
        if request.attention is None and self.again is not None:
            # Blocked attention moves fewer bytes even if no axis shards the sequence.
            self.policies(((ALL, "ring"),), asked)
        if request.loss_chunks is None and self.again is not None:
            if any(self.gains(search) for _, search in self.found):
                self.policies(self.best_attention(), LOSS_CHUNKS)
        self.use_host_memory([*self.found])
        for analysed, search in self.searched.values() if not request.is_part else ():
            for apart in self.set_apart(analysed, search, every=True):
                apart.use_host_memory(self.best_seconds())

    def use_host_memory(self, pairs: Sequence[tuple[GraphAnalysis, Search]]) -> None:
        """Tries more offload for layouts that lack memory and may be the best.

        Args:
            pairs: Programs with their finished searches.
        """
        plain = [pair for pair in pairs if pair[1].split is None]
        others = [pair for pair in pairs if pair[1].split is not None]
        for _, search in others:
            search.use_host_memory(self.best_seconds())
        for analysed, search in plain:
            before = len(search.scored)
            search.use_host_memory(self.best_seconds())
            if len(search.scored) > before:
                for apart in self.set_apart(analysed, search):
                    apart.use_host_memory(self.best_seconds())

    def best_attention(self) -> Chosen:
        """Returns the attention of the fastest plan that fits, or the last tried."""
        plans = [s for _, one in self.found for s in one.scored if s.fits]
        best = min(plans, key=lambda s: s.time.step_seconds, default=None)
        last = self.found[-1][1].request.attention or ()
        return last if best is None else best.attention

    def gains(self, search: Search) -> bool:
        """Returns whether another program may have a better plan than this search.

        Other programs save memory and cost time. So they can be better only if a fast
        layout of this program lacks memory, or if this program has no values that the
        user asked to offload.
        """
        best = self.best_seconds() * (1 + TIE)
        lacks = search.least_lacking < math.inf and search.least_lacking <= best
        return bool(search.hosting.nothing) or lacks

    def policies(self, attention: Chosen, chunks: int) -> None:
        """Searches all remat policies for one choice of attention and chunks."""
        # Replicas and stages are searched in many sizes, of which some fit.
        first_of_all = not (self.found or self.request.is_part)
        lightest, *others = self.remats()
        if not self.search(lightest, attention, chunks):
            if lightest:
                self.search((), attention, chunks)
            return
        analysed, first = self.searched[lightest, attention, chunks]
        if first_of_all and first.far_from_fitting() and self.leanest_lacks():
            self.hopeless = True
            return
        for policy in others if self.gains(first) else ():
            self.search(policy, attention, chunks)
        first.resume(self.best_seconds())
        self.set_apart(analysed, first)

    def remats(self) -> list[Remat]:
        """Returns the remat policies to try, the least recomputation first."""
        if self.request.remat is not None:
            return [self.request.remat]
        policies = self.request.policies if self.again is not None else ("none",)
        return [((ALL, p),) if p != "none" else () for p in policies]

    def leanest_lacks(self) -> bool:
        """Returns whether every layout of the leanest program lacks much memory.

        This program has full remat, blocked attention, logits in chunks and all
        possible offload, and other programs hardly need less memory. So if it lacks
        more than ``HOPELESS`` of a device's memory, no other program is traced.
        """
        request = self.request
        blocks = ((ALL, "ring"),) if request.attention is None else request.attention
        chunks = LOSS_CHUNKS if request.loss_chunks is None else request.loss_chunks
        remat = self.remats()[-1]
        before = len(self.found)
        for attention, parts in itertools.product(
            dict.fromkeys((blocks, request.attention or ())),
            dict.fromkeys((chunks, request.loss_chunks or 1)),
        ):
            if self.search(remat, attention, parts):
                break
        pairs = self.found[before:]
        lean = [search for _, search in pairs]
        if not any(
            s.program.sliced or s.fits_without_state(1 + HOPELESS) for s in lean
        ):
            for search in lean:
                if search.split is not None or not request.sequence_parallel:
                    search.keep_nearest(request.offload or ())
            return any(search.scored for search in lean)
        self.use_host_memory(pairs)
        scored = [(s, one) for _, s in self.found[before:] for one in s.scored]
        lacking = (sum(s.lacks(one.memory)) for s, one in scored)
        return min(lacking, default=0) > HOPELESS * self.cluster.memory_bytes

    def search(
        self,
        remat: Remat,
        attention: Chosen,
        chunks: int,
    ) -> bool:
        """Searches one program, and its best plans with sequence parallelism too.

        Args:
            remat, attention, chunks: Options of the program.

        Returns:
            Whether the loss has such a program.
        """
        if (remat, attention, chunks) in self.searched:
            return True
        program = self.program(remat, attention, chunks)
        if program is None:
            return False
        analysed, shared = program
        asked = dataclasses.replace(
            self.request,
            remat=remat,
            attention=attention,
            loss_chunks=chunks,
        )
        one = Search(
            analysed.graph,
            analysed.dims,
            self.cluster,
            asked,
            best=self.best_seconds(),
            slack=1 + TIE,
            program=shared,
            grids=self.known.grids,
        )
        one.search_layouts()
        self.found.append((analysed, one))
        self.searched[remat, attention, chunks] = analysed, one
        self.set_apart(analysed, one)
        return True

    def set_apart(
        self, analysed: GraphAnalysis, plain: Search, *, every: bool = False
    ) -> list[Search]:
        """Returns finished searches of the best plans with sequence parallelism.

        Args:
            analysed, plain: Program, and its search without sequence parallelism.
            every: Whether to search all possible plans, not only the likeliest;
                default: False.
        """
        options, asked = plain.options, self.request.sequence_parallel
        if asked is False or not options.sequence or plain.has_one_sample:
            plain.scored = [] if asked else plain.scored
            return []
        tried = self.tried.setdefault(id(plain), {})
        best = self.best_seconds() * (1 if every else 1 + TIE)
        best = math.inf if asked else best
        near = {
            roles: set[tuple[int, ...]]().union(*(one.sizes(best) for one in several))
            for roles, several in plain.near_sequence_parallel(best).items()
            if roles not in tried
        }
        near = {roles: sizes for roles, sizes in near.items() if sizes}
        if not (every or asked):
            most = MOST_PART_SPLITS if self.request.is_part else FIRST_SPLITS
            left = max(0, most - len(tried))
            near = dict(itertools.islice(near.items(), left))
        tried.update(near)
        if asked:
            plain.scored = []  # Plans that were not asked for must not set the bound.
        result = []
        for split in map(plain.program.splits.of, near):
            if not split.parents:
                continue  # The program has no operations between products.
            apart = Search(
                split.graph,
                analysed.dims,
                self.cluster,
                plain.request,
                beside=plain,
                split=split,
                best=self.best_seconds(),
                slack=1 + TIE,
                grids=self.known.grids,
                sizes=near[split.shared],
            )
            apart.search_layouts()
            self.found.append(
                (GraphAnalysis(graph=split.graph, dims=analysed.dims), apart)
            )
            result.append(apart)
        return result

    def on_paper(self, best: float) -> LayoutCandidate | None:
        """Returns the fastest plan that offloads more than executors support, or None.

        Args:
            best: Largest seconds of a step.
        """
        if self.request.estimate or self.request.offload is not None:
            return None
        paper = [one for _, search in self.found for one in search.on_paper(best)]
        return min(paper, key=lambda one: one.time.step_seconds, default=None)

    def least_left_out(self) -> float:
        """Returns the least step seconds of layouts that were not evaluated."""
        best = self.best_seconds()
        least_left_out = [search.least_skipped for _, search in self.found]
        if self.request.sequence_parallel is False:
            return min(least_left_out)
        for _, plain in self.searched.values():
            tried = self.tried.get(id(plain), {})
            if plain.options.sequence:
                least_left_out += [
                    one.least_of_others(tried.get(roles, ()))
                    for roles, several in plain.near_sequence_parallel(best).items()
                    for one in several
                ]
        return min(least_left_out)


HOPELESS = 0.1
"""Fraction of a device's memory that the leanest program may lack while others are
still tried. Others may need less, as remat, blocks and chunks use some memory
themselves.
"""

FIRST_SPLITS, MOST_PART_SPLITS = 1, 3
"""Largest number of sets of sharded dimensions to try with sequence parallelism. The
first number is for full models, whose last round tries all sets. The second is for
stages and replicas.
"""


def search_refusal(looked: Sequence[Search], *, open_remat: bool) -> PlanError:
    """Returns the error of finished searches that found no layout that fits.

    Args:
        looked: Searches of the programs of one loss.
        open_remat: Whether the planner chooses remat.
    """
    if looked[0].request.sequence_parallel and not any(s.scored for s in looked):
        return PlanError(_no_sequence(looked[0]))
    return refusal(looked, open_remat=open_remat)


def _no_sequence(search: Search) -> str:
    options, mesh = search.options, search.request.mesh or {}
    sizes = ", ".join(str(options.sizes[r]) for r in options.sequence)
    used = math.prod(mesh.values()) == search.request.num_devices
    if search.has_one_sample:
        why = (
            "a micro-batch has one sample, and only a dimension of samples tells "
            "which values are between products. Use fewer micro-batches, or fix "
            "context in mesh= to shard the sequence everywhere"
        )
    elif not sizes:
        why = (
            "the model has no sequence: no dimension that can be sharded occurs twice "
            "in a product, as in attention"
        )
    elif mesh.get("tensor", 1 if used else 2) == 1:
        why = "mesh= sets tensor to 1, but the sequence is sharded over tensor"
    else:
        why = (
            f"the sequence ({sizes}) does not divide by any size of tensor (times "
            "context) that the marks and mesh= allow, or no weights divide by it. Pad "
            "the sequence, or fix another mesh="
        )
    return f"sequence_parallel=True: {why}. Leave it to the planner, or drop it"


def check_marks(graph: Graph, num_devices: int, stages: int = 1) -> None:
    """Refuses marks that no plan can obey.

    Args:
        graph: Captured loss.
        num_devices: Number of devices to use.
        stages: Number of stages of a pipeline without ``stage`` marks; default: 1.

    Raises:
        PlanError: No plan can obey the marks; lists every problem.
    """
    problems = Problems("the marks cannot be obeyed", DeviceCountError)
    for text in graph.undeclared_marks:
        problems.add(
            f"the mark {text} covers no operation of the loss: tracing reached nothing "
            "inside it. Remove it or move it around what it should cover"
        )
    marked = [g for g in graph.task_graphs if g.marks]
    if marked:
        check_devices(marked, num_devices, problems, stages)
    problems.raise_if_any()


def by_marks(graph: Graph, request: Request, stages: int = 1) -> Request:
    """Returns the request with the number of model copies that the marks imply.

    Args:
        graph: Captured loss.
        request: Other options of the search.
        stages: Number of stages of a pipeline without ``stage`` marks; default: 1.

    Raises:
        PlanError: No plan can obey the marks; lists every problem.
    """
    count = request.num_devices
    check_marks(graph, count, stages)
    marks = copies([g for g in graph.task_graphs if g.marks], count, stages)
    mesh = {a: n for a, n in _normalised_mesh(request.mesh).items() if a != STAGE}
    if marks > 1 and not any(
        mesh.items() <= one.items() and replicas(one) % marks == 0
        for one in meshes(count // stages, mesh.get("context", 1), fixed_space(mesh))
    ):
        given = {"stage": stages, **mesh} if stages > 1 else mesh
        fixed = " × ".join(f"{axis} {n}" for axis, n in given.items())
        raise DeviceCountError(
            f"the marks' devices= put one copy of the model on {count // marks} of "
            f"{count} devices, so data × fsdp × context must be a multiple of {marks}, "
            f"but with {fixed} it is not. Change the marks or mesh="
        )
    return dataclasses.replace(request, copies=marks)
