"""Estimates replicas on mixed devices, to choose those to evaluate first.

Layouts of replicas of all sizes, with all numbers of micro-batches, are evaluated as
arrays. All replicas have the fastest layout that fits the device kind with least
memory. Estimates ignore sequence parallelism and transfers to host memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.planner.balance.shares import makespan, shares
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost.layout_cases import LayoutCases
from whalejax.planner.cost_terms import ALL, Remat
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan_entries import CollectiveKind
from whalejax.planner.search.evaluator import Evaluator
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import Again, ProgramAnalyses, ProgramCache
from whalejax.planner.search.uneven_replicas import (
    SharesCase,
    device_kinds,
    devices_of_kind,
    sliceable,
)
from whalejax.planner.search.user_shares import DATA
from whalejax.planner.step_options import ProgramOptions


SLACK: Final = 0.1
"""Slowdown against the fastest estimate, as a fraction, up to which replicas count."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LikelyReplicas:
    """Replicas that may be among the fastest.

    Attributes:
        case: Size of a replica, number of micro-batches and ZeRO stage.
        seconds: Estimated seconds of a step.
    """

    case: SharesCase
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Fastest layout of one case that fits the device kind with least memory.

    ``place`` is the index of the layout in its program. ``gradients`` has bytes per
    device.
    """

    program: ProgramOptions
    place: int
    gradients: int


def likely_replicas(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    allowed: Mapping[int, Collection[int]],
    *,
    again: Again | None = None,
    known: ProgramCache | None = None,
) -> list[LikelyReplicas]:
    """Returns replicas that may be the fastest, by estimated times.

    Args:
        graph: Captured loss.
        cluster: Devices of several kinds.
        request: Options of the search for all replicas.
        allowed: Possible numbers of micro-batches, by number of devices of a replica.
        again: Function that traces other programs of the loss.
        known: Programs that were analysed before.

    Returns:
        Replicas within ``SLACK`` of the fastest, the fastest first.
    """
    analyses = ProgramAnalyses(
        graph=graph,
        cluster=cluster,
        again=again,
        known=ProgramCache() if known is None else known,
    )
    estimates = _Estimates(analyses, cluster, request, allowed)
    result = [
        LikelyReplicas(case=case, seconds=seconds)
        for case, seconds in estimates.step_seconds().items()
    ]
    limit = min((one.seconds for one in result), default=math.inf) * (1 + SLACK)
    kept = [one for one in result if one.seconds <= limit]
    return sorted(kept, key=lambda one: (one.seconds, *dataclasses.astuple(one.case)))


class _Estimates:
    """Layouts of replicas of all sizes, evaluated on each kind of device."""

    def __init__(
        self,
        analyses: ProgramAnalyses,
        cluster: Cluster,
        request: Request,
        allowed: Mapping[int, Collection[int]],
    ) -> None:
        self.analyses, self.cluster = analyses, cluster
        self.request, self.allowed = request, allowed
        self.devices = device_kinds(cluster)
        kinds = dict.fromkeys(self.devices)
        self.kinds = sorted(kinds, key=lambda kind: kind.memory_bytes)
        self._evaluated: dict[ProgramOptions, tuple[Evaluator, LayoutCases]] = {}

    def step_seconds(self) -> dict[SharesCase, float]:
        layouts = self._layouts()
        paces: dict[tuple[SharesCase, DeviceKind], tuple[float, float]] = {}
        for program, (evaluator, cases) in self._evaluated.items():
            some = [case for case, one in layouts.items() if one.program == program]
            rows = np.array([layouts[case].place for case in some], dtype=np.int64)
            for kind in self.kinds if some else ():
                part = self._replica_devices(kind)
                on_kind = dataclasses.replace(evaluator, cluster=part)
                times = on_kind.times(cases.take(rows))
                update = times.terms["update"]
                pace = (times.step - update) / cases.count[rows]
                for place, case in enumerate(some):
                    paces[case, kind] = float(pace[place]), float(update[place])
        result = {}
        for case, layout in layouts.items():
            each = [paces[case, kind] for kind in self.devices[:: case.size]]
            seconds, updates = zip(*each, strict=True)
            exchanged = self._exchange_seconds(case, layout.gradients)
            computed = makespan(shares(case.count, seconds), seconds)
            result[case] = computed + exchanged + max(updates)
        return result

    def _exchange_seconds(self, case: SharesCase, nbytes: int) -> float:
        mesh = {DATA: len(self.devices) // case.size, "replica": case.size}
        parts = axis_parts((DATA,), mesh, self.cluster)
        kinds: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather")
        several = kinds if case.zero else kinds[:1]
        return sum(float(collective_seconds(one, nbytes, parts)) for one in several)

    def _layouts(self) -> dict[SharesCase, _Layout]:
        request, ring = self.request, ((ALL, "ring"),)
        remats: Sequence[Remat] = [
            ((ALL, policy),) if policy != "none" else () for policy in request.policies
        ]
        if request.remat is not None:
            remats = [request.remat]
        ways = [(), ring] if request.attention is None else [request.attention]
        if self.analyses.again is None:
            remats, ways = remats[:1], ways[:1]
        levels = [0, 1] if request.zero is None else [request.zero]
        if request.offload or not sliceable(request):
            levels = [zero for zero in levels if not zero] or levels
        wanted = {
            SharesCase(size=size, count=count, zero=zero)
            for size, counts in self.allowed.items()
            for count, zero in itertools.product(counts, levels)
        }
        layouts: dict[SharesCase, _Layout] = {}
        for remat in remats:
            here: dict[SharesCase, tuple[float, _Layout]] = {}
            for attention in ways if len(layouts) < len(wanted) else ():
                program = ProgramOptions.of(request, remat, attention)
                for case, pair in self._fastest(program, levels).items():
                    if case not in here or pair[0] < here[case][0]:
                        here[case] = pair
            layouts = {case: layout for case, (_, layout) in here.items()} | layouts
        return {case: layout for case, layout in layouts.items() if case in wanted}

    def _replica_devices(self, kind: DeviceKind) -> Cluster:
        return devices_of_kind(self.cluster, kind, max(self.allowed))

    def _search(self, program: ProgramOptions) -> Search | None:
        analysed = self.analyses.of(*program)
        if analysed is None:
            return None
        asked = dataclasses.replace(
            self.request,
            num_devices=max(self.allowed),
            num_micro_batches=None,
            mesh={**(self.request.mesh or {}), DATA: 1},
            zero=None,
            batch_bytes=(),
            is_part=True,
        )
        part = self._replica_devices(self.kinds[0])
        graph, dims = analysed[0].graph, analysed[0].dims
        grids = self.analyses.known.grids
        return Search(graph, dims, part, asked, program=analysed[1], grids=grids)

    def _fastest(
        self, program: ProgramOptions, levels: Sequence[int]
    ) -> dict[SharesCase, tuple[float, _Layout]]:
        search = self._search(program)
        cases = None if search is None else search.at_every_count(self.allowed)
        if search is None or cases is None or not len(cases):
            return {}
        self._evaluated[program] = search.evaluator, cases
        times = search.evaluator.times(cases)
        offload = self.request.offload or ()
        memory = search.evaluator.memory(cases, offload, times=times)
        pace = (times.step - times.terms["update"]) / cases.count
        # The gradient reduction needs a buffer of the size of the gradients.
        gradients = memory.terms["gradients"]
        needs = memory.total + gradients
        sliced = memory.terms["optimizer"] * (1 - cases.devices / len(self.devices))
        fastest: dict[SharesCase, tuple[float, _Layout]] = {}
        for zero in levels:
            held = needs - zero * sliced <= self.kinds[0].memory_bytes
            fits = np.flatnonzero(held)
            for place in fits[np.argsort(pace[fits], kind="stable")].tolist():
                case = SharesCase(
                    size=int(cases.devices[place]),
                    count=int(cases.count[place]),
                    zero=zero,
                )
                if case not in fastest:
                    nbytes = int(gradients[place])
                    layout = _Layout(program=program, place=place, gradients=nbytes)
                    fastest[case] = float(pace[place]), layout
        return fastest
