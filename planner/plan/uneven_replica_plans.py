"""Plans with different data-parallel replicas, each with its own micro-batches.

A separate search for each device kind finds the time of a micro-batch on one replica.
Measurements correct this time (``balance.shares``). Shares are the integers that
minimise the time of the slowest replica. All replicas have the layout of the kind with
least memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from whalejax.meshes.cluster import Cluster
from whalejax.planner.balance.shares import (
    corrections,
    even_shares,
    gain_words,
    idle_note,
    makespan,
    shares,
    speed_bound,
    timing_note,
    weights_hash,
)
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost_terms import TimeTerms
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.combined_steps import replicas_step
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import Candidate, Collective
from whalejax.planner.plan_errors import DeviceCountError, NothingFits, PlanError
from whalejax.planner.search.least_paces import StageBounds
from whalejax.planner.search.likely_replicas import (
    LikelyReplicas,
    likely_replicas,
)
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import ProgramCache, check_marks
from whalejax.planner.search.uneven_replicas import (
    Replicas,
    SharesCase,
    check_zero,
    device_kinds,
    devices_of_kind,
    nothing_fits,
    sliceable,
    sliced,
    with_slices,
)
from whalejax.planner.search.user_shares import DATA, check_shares, said_of
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.step_options import options_of


Decide = Callable[..., Plan]
"""Function that searches for the plan of one replica; see ``spmd_plan.decide``."""

MOST_COUNTS = 5
"""Largest number of micro-batch counts to evaluate per replica size."""

MANY_DEVICES, MANY_CASES = 8, 8
"""Numbers of devices and of cases above which only promising cases are evaluated.

A case is a replica size with a number of micro-batches. Estimates choose the promising
ones."""

LEAST_TRIES, MOST_TRIES = 2, 12
"""Minimum and maximum number of promising cases to evaluate."""


def decide_shares(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    asked: Sequence[int] | None,
    even: bool = False,
    decide: Decide,
    **options: Any,
) -> Plan:
    """Chooses replicas on mixed devices for a model, and their shares.

    Args:
        graph: The captured loss.
        cluster: Cluster to plan for.
        request: Options of the request. ``decide`` chooses the mesh axes but ``data``.
        asked: Requested shares in node order, or None.
        even: Whether all replicas get the same share.
        decide: Function that searches for the plan of one replica.
        options: Further arguments of ``decide``.

    Returns:
        Plan whose ``shares`` has the micro-batches of each replica.

    Raises:
        PlanError: The shares are impossible, or no plan fits.
    """
    _check(graph, cluster, request, asked)
    options = {"known": ProgramCache(), **options}
    ranks = {
        size: cluster.num_devices // size
        for size in _served(graph, _sizes(cluster, request, asked))
    }
    every = {
        size: counts(graph, request, asked, least=least, even=even)
        for size, least in ranks.items()
    }

    def weigh(case: SharesCase) -> Replicas:
        shared = even_shares(case.count, ranks[case.size]) if even else asked
        return _weigh(graph, cluster, request, case, shared, decide, options)

    def promising(size: int, several: Sequence[int]) -> list[int]:
        """Returns the numbers that may be faster than the best found, descending."""
        programs: dict[str, Any] = {k: options.get(k) for k in ("again", "known")}
        least = _least_seconds(graph, cluster, request, size, several, **programs)
        return [n for n in several[::-1] if least[n] < tries.best_seconds]

    # Other sizes leave some replicas without a micro-batch.
    busy = [size for size, least in ranks.items() if every[size][-1] >= least]
    tries = _Tries(request, weigh)
    several = {size: every[size][:MOST_COUNTS] for size in busy or every}
    cases = sum(map(len, several.values()))
    if cluster.num_devices > MANY_DEVICES and cases > MANY_CASES:
        programs = {name: options.get(name) for name in ("again", "known")}
        likely = likely_replicas(graph, cluster, request, several, **programs)
        tries.add_likely(likely)
        marks = (r.strategy.kind for r in graph.task_graphs if r.strategy)
        if 1 in several and "split" in (request.default, *marks):
            tries.add(1, several[1][::-1])  # One device has nothing to shard.
    if tries.best_seconds == math.inf:
        tries.add_sizes(several, _within(cluster), promising)
    for size in several if tries.best_seconds == math.inf else ():
        tries.add_fewest(size, every[size][MOST_COUNTS:])
    for size in every if tries.best_seconds == math.inf else ():
        if size not in several:
            tries.add(size, every[size][:MOST_COUNTS])
    if asked is None and not even and tries.leaves_idle():
        fewer = counts(graph, request, asked, least=1)
        few_devices = cluster.num_devices <= MANY_DEVICES
        for size in several if few_devices else (tries.fastest_size(),):
            few = [n for n in fewer if n < ranks[size]]
            tries.add(size, promising(size, few))
    if not tries.found:
        raise _nearest(cluster, tries.problems)
    ranked = sorted(tries.found, key=lambda one: one.step_seconds)
    return _build_plan(cluster, ranked, asked)


def _check(
    graph: Graph, cluster: Cluster, request: Request, asked: Sequence[int] | None
) -> None:
    check_zero(request)
    if request.num_devices < cluster.num_devices:
        raise DeviceCountError(
            "on devices of several kinds, replicas have unequal shares and use all "
            "devices. Drop allow_idle, or plan for fewer devices"
        )
    if asked is not None:
        check_shares(graph, request, asked, num_devices=cluster.num_devices)
        size = cluster.num_devices // len(asked)
        with said_of(f"shares makes {len(asked)} replicas of {size} devices each"):
            check_marks(graph, size)


class _Tries:
    def __init__(
        self,
        request: Request,
        weigh: Callable[[SharesCase], Replicas],
    ) -> None:
        self.request = request
        self.weigh = weigh
        self.found: list[Replicas] = []
        self.problems: list[PlanError] = []

    @property
    def best_seconds(self) -> float:
        return min((o.step_seconds for o in self.found if o.fits), default=math.inf)

    def leaves_idle(self) -> bool:
        """Returns whether some of the fastest replicas that fit take no micro-batch.

        If so, fewer micro-batches, which leave more replicas idle, may be faster.
        """
        best = min(self.found, key=_slow, default=None)
        return best is not None and best.fits and min(best.shares) == 0

    def fastest_size(self) -> int:
        return min(self.found, key=_slow).case.size

    def add(self, size: int, several: Sequence[int]) -> None:
        """Evaluates replicas of one size; ``several`` is descending."""
        request = self.request
        for zero in (0, 1) if request.zero is None else (request.zero,):
            for count in several:
                case = SharesCase(size=size, count=count, zero=zero)
                if request.zero is None and zero and _roomy(self.found, case, request):
                    continue
                if self._lacks(case):
                    break  # Fewer micro-batches need more memory.

    def add_sizes(
        self,
        several: Mapping[int, Sequence[int]],
        within: int,
        promising: Callable[[int, Sequence[int]], Sequence[int]],
    ) -> None:
        """Evaluates replicas of every size, the smallest first.

        Replicas above the size ``within`` span several nodes, and are usually slower.
        If smaller replicas fit, only promising numbers of micro-batches are evaluated
        for them.
        """
        for size, numbers in several.items():
            far = size > within and self.best_seconds < math.inf
            self.add(size, promising(size, numbers) if far else numbers[::-1])

    def add_fewest(self, size: int, several: Sequence[int]) -> None:
        """Finds by bisection the fewest micro-batches with which replicas fit.

        ``several`` has numbers of micro-batches in ascending order.
        """
        if not several:
            return

        def fits(at: int) -> bool:
            before = len(self.found)
            self.add(size, [several[at]])
            return any(one.fits for one in self.found[before:])

        low, high = 0, len(several) - 1
        if not fits(high):
            return
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)

    def add_likely(self, likely: Iterable[LikelyReplicas]) -> None:
        """Evaluates promising replicas, the best first, while they may be the fastest.

        Estimates are multiplied by the smallest ratio so far of evaluated to estimated
        time.
        """
        ratio, tries = 1.0, 0
        for one in likely:
            far = tries >= LEAST_TRIES and one.seconds * ratio >= self.best_seconds
            if far or tries == MOST_TRIES:
                break
            whole = dataclasses.replace(one.case, zero=0)
            known = any(other.fits and other.case == whole for other in self.found)
            if known and one.case.zero:
                continue  # Slices were no faster, or they would have come before.
            tries, before = tries + 1, len(self.found)
            self._lacks(one.case)
            for shared in self.found[before:]:
                ratio = min(ratio, shared.step_seconds / one.seconds)

    def _lacks(self, case: SharesCase) -> bool:
        try:
            self.found.append(self.weigh(case))
        except NothingFits as error:
            self.problems.append(error)
            return True
        except PlanError as error:
            self.problems.append(error)
        return False


def _slow(one: Replicas) -> tuple[bool, float]:
    return not one.fits, one.step_seconds


def _nearest(cluster: Cluster, problems: Sequence[PlanError]) -> PlanError:
    """Returns the error with the fewest missing bytes; it names the smallest kind."""
    if not isinstance(problems[0], NothingFits):
        return problems[0]
    short = [error for error in problems if isinstance(error, NothingFits)]
    error = min(short, key=lambda one: one.lacks_bytes)
    if cluster.is_uniform:
        return error
    kinds = sorted(device_kinds(cluster), key=lambda kind: kind.memory_bytes)
    least = kinds[0].display_name()
    enough = kinds[-1].memory_bytes >= error.of_bytes + error.lacks_bytes
    said = str(error).removeprefix("no plan fits:").strip().rstrip(".")
    return NothingFits(
        f"no plan fits {least}, of these kinds that with the least memory: {said}. "
        + (f"Or plan without {least}" if enough else "All the others lack memory, too"),
        lacks_bytes=error.lacks_bytes,
        of_bytes=error.of_bytes,
        nearest=error.nearest,
        what=error.what,
    )


def _roomy(found: Sequence[Replicas], case: SharesCase, request: Request) -> bool:
    """Returns whether replicas have memory for the full state, or cannot shard it."""
    if request.offload or not sliceable(request):
        return True
    plans = [one for one in found if one.case == dataclasses.replace(case, zero=0)]
    return any(
        plan.fits and not (plan.plan.remat or plan.plan.offload) for plan in plans
    )


def _within(cluster: Cluster) -> int:
    return math.gcd(*(node.count for node in cluster.nodes))


def _sizes(
    cluster: Cluster, request: Request, asked: Sequence[int] | None
) -> list[int]:
    """Returns the possible replica sizes, smallest first.

    A replica has devices of one kind, inside one node or on full nodes.
    """
    mesh = dict(request.mesh or {})
    data = mesh.pop(DATA, None)
    fixed = math.prod(mesh.values())
    kinds = [kind.name for kind in device_kinds(cluster)]
    borders = {0, *itertools.accumulate(node.count for node in cluster.nodes)}

    def lies_well(first: int, end: int) -> bool:
        split = any(first < border < end for border in borders)
        return len({*kinds[first:end]}) == 1 and (not split or {first, end} <= borders)

    sizes = [
        size
        for size in divisors(cluster.num_devices)
        if size % fixed == 0
        and (data is None or cluster.num_devices == data * size)
        and (asked is None or cluster.num_devices == len(asked) * size)
        and all(
            node.count % size == 0 or size % node.count == 0 for node in cluster.nodes
        )
        and all(lies_well(r, r + size) for r in range(0, len(kinds), size))
    ]
    if not sizes:
        raise PlanError(
            "a replica has devices of one kind, inside one node or on full nodes, and "
            "all replicas have the same number of devices: none "
            + (f"has a multiple of {fixed}, as mesh asks" if fixed > 1 else "fits")
            + ("" if data is None else f"; mesh asks for data {data}")
            + ". Change mesh or shares, or plan for one kind"
        )
    return sizes


def _served(graph: Graph, sizes: Sequence[int]) -> list[int]:
    result = []
    problem: PlanError | None = None
    for size in sizes:
        try:
            check_marks(graph, size)
            result.append(size)
        except DeviceCountError as error:
            problem = error
    if problem is not None and not result:
        raise DeviceCountError(
            "a replica has devices of one kind, inside one node or on full nodes, "
            f"here {' or '.join(map(str, sizes))}: {problem}"
        )
    return result


def counts(
    graph: Graph,
    request: Request,
    asked: Sequence[int] | None,
    *,
    least: int,
    even: bool = False,
) -> list[int]:
    """Returns the possible numbers of micro-batches, the fewest first.

    Args:
        graph: The captured loss.
        request, asked: Options of the request, and the requested shares.
        least: Smallest number of micro-batches with which all replicas have one.
        even: Whether all replicas get the same number; default: False.
    """
    fixed = sum(asked) if asked is not None else request.num_micro_batches
    if fixed is not None:
        return [fixed]
    size = graph.batch_size * graph.num_micro_batches
    every = [n for n in divisors(size) if n % graph.num_micro_batches == 0]
    enough = [n for n in every if n >= least]
    if even:
        enough = [n for n in enough if n % least == 0] or enough
    return enough or every[-1:]


def _least_seconds(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    size: int,
    several: Sequence[int],
    **programs: Any,
) -> dict[int, float]:
    """Returns lower bounds on the step seconds of replicas, by micro-batches."""
    if not several:
        return {}
    mesh = {**(request.mesh or {}), DATA: 1}
    alone = dataclasses.replace(request, num_devices=size, mesh=mesh)
    bounds = {
        kind.name: StageBounds(
            graph, devices_of_kind(cluster, kind, size), alone, 1, several, **programs
        )
        for kind in cluster.kinds
    }
    on = tuple(device_kinds(cluster)[::size])
    ratios = corrections(on, weights_hash(graph.params))
    result = {}
    for count in several:
        seconds = [
            bounds[kind.name].seconds(count) / count * ratio
            for kind, ratio in zip(on, ratios, strict=True)
        ]
        fast = all(seconds)  # After 0 seconds the search itself reports the reason.
        result[count] = makespan(shares(count, seconds), seconds) if fast else 0.0
    return result


def _weigh(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    case: SharesCase,
    asked: Sequence[int] | None,
    decide: Decide,
    options: Mapping[str, Any],
) -> Replicas:
    size, count, replicas = case.size, case.count, cluster.num_devices // case.size
    mesh = {**(request.mesh or {}), DATA: 1}
    alone = dataclasses.replace(
        request,
        num_devices=size,
        num_micro_batches=count,
        mesh=mesh,
        zero=None,
        is_part=True,
        # Bytes of one micro-batch. A replica's share multiplies them.
        batch_bytes=tuple(-(-nbytes // count) for nbytes in request.batch_bytes),
    )
    if case.zero:
        alone = with_slices(alone, replicas)
    names = {node.kind.name: node.kind for node in cluster.nodes}
    kinds = sorted(names.values(), key=lambda kind: kind.memory_bytes)
    part = {kind.name: devices_of_kind(cluster, kind, size) for kind in kinds}
    first = decide(graph, part[kinds[0].name], alone, **options)
    same = _pinned(alone, first)
    plans = {
        kind.name: decide(graph, part[kind.name], same, **options) for kind in kinds[1:]
    }
    plans[kinds[0].name] = first
    on = tuple(device_kinds(cluster)[::size])
    ratios = corrections(on, weights_hash(graph.params))
    seconds = tuple(
        _pace(plans[kind.name], count) * ratio
        for kind, ratio in zip(on, ratios, strict=True)
    )
    summed = _exchange(first, cluster, len(on))
    slices = sliced(first, cluster, len(on), request) if case.zero else None
    weigh = Replicas(
        case=case,
        plan=first,
        kinds=on,
        seconds=seconds,
        after=max(plan.time.update_seconds for plan in plans.values()),
        exchange=summed,
        slices=slices,
    )
    if asked is not None:
        return dataclasses.replace(weigh, shares=tuple(asked))
    enough = sum(weigh.most) >= count
    dealt_out = shares(count, seconds, weigh.most if enough else None)
    return dataclasses.replace(weigh, shares=dealt_out)


def _pinned(request: Request, plan: Plan) -> Request:
    return dataclasses.replace(
        request,
        mesh={DATA: 1, **plan.axis_sizes},
        **options_of(plan),
    )


def _pace(plan: Plan, count: int) -> float:
    return (plan.time.step_seconds - plan.time.update_seconds) / count


def _exchange(plan: Plan, cluster: Cluster, replicas: int) -> tuple[Collective, float]:
    summed = Collective(
        kind="all-reduce",
        axes=(DATA,),
        phase="update",
        what="gradient",
        payload_bytes=plan.memory.gradients_bytes,
        count=1,
    )
    parts = axis_parts((DATA,), {DATA: replicas, **plan.axis_sizes}, cluster)
    seconds = collective_seconds(summed.kind, summed.payload_bytes, parts)
    return summed, seconds


def _build_plan(
    cluster: Cluster, found: Sequence[Replicas], asked: Sequence[int] | None
) -> Plan:
    """Returns the plan of the fastest fitting replicas; ``found`` is sorted by time."""
    best = next((one for one in found if one.fits), None)
    if best is None:
        raise nothing_fits(found, asked)
    plan, slices = cast("Plan", best.plan), best.slices
    candidates = [
        Candidate(
            layout=one.layout,
            time=_time(one),
            memory=one.memory,
            fits=one.fits,
            verdict=_verdict(one, best),
        )
        for one in _unlike((best, *found))
    ]
    return dataclasses.replace(
        plan,
        cluster=cluster,
        axes=((DATA, len(best.kinds)), *plan.axes),
        shares=best.shares,
        leaves=tuple(
            dataclasses.replace(leaf, summed=(DATA, *leaf.summed))
            if leaf.trained
            else leaf
            for leaf in (slices or plan).leaves
        ),
        zero=best.case.zero,
        time=_time(best),
        memory=best.memory,
        collectives=(
            *(*plan.collectives, best.exchange[0]),
            *(() if slices is None else (slices.gather[0],)),
        ),
        candidates=tuple(candidates),
        notes=(*plan.notes, *_notes(best)),
    )


def _unlike(found: Iterable[Replicas]) -> list[Replicas]:
    """Returns the first of all replicas that a plan describes in the same words."""
    first: dict[str, Replicas] = {}
    for one in found:
        first.setdefault(one.layout, one)
    return [*first.values()]


def _verdict(one: Replicas, best: Replicas) -> str:
    if one is best:
        return "chosen"
    return "slower" if one.fits else "does not fit"


def _time(one: Replicas) -> TimeTerms:
    return replicas_step(
        one.plan.time,
        one.pace,
        update_seconds=one.after,
        exchange_seconds=one.exchange[1],
        gather_seconds=one.gather_seconds,
    )


def _notes(one: Replicas) -> Iterator[str]:
    total = sum(one.shares)
    if note := timing_note(one.kinds, weights_hash(one.plan.leaves)):
        yield note
    even = even_shares(total, len(one.kinds))
    rest = one.step_seconds - one.pace
    gain = (makespan(even, one.seconds) + rest) / one.step_seconds
    words = gain_words(gain, speed_bound(one.seconds))
    said = f"shares: {one.share_words} of {total} micro-batches"
    yield said if one.shares == even else f"{said}: {words}"
    if one.slices is not None:
        yield one.slices.note(len(one.kinds))
    if idle := idle_note("replicas", one.shares, one.seconds, one.pace):
        yield idle
