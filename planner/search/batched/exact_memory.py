"""Memory of cases by what is there in every span of a step, as for a single plan.

It holds of programs that compute again what they are written to and nothing else. What
policies of remat change of another program is summed up by ``peak``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from whalejax.planner.cost.operation_cost import Setting
from whalejax.planner.memory.peak import WHOLE_PROGRAM, StageShare
from whalejax.planner.memory.saved_tensors import kept_bytes
from whalejax.planner.model.layer_chain import FIRST
from whalejax.planner.search.analysis_cache import AnalysedProgram
from whalejax.planner.search.batched.cases import Cases, Group
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.peak import share_of
from whalejax.planner.search.batched.space import Space
from whalejax.planner.search.host_offload import Hosting
from whalejax.planner.search.layout_memory import LayoutMemory, StepLayout
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import GRID_AXES
from whalejax.planner.sharding.leaf_shard_counts import leaf_shard_counts
from whalejax.planner.terms import OFFLOADS


BLOCK = 1024
"""Cases that are priced together: their bytes stay in a processor's cache."""

INSIDE = tuple(axis for axis in GRID_AXES if axis != "stage")
"""Axes inside a stage."""


class ExactMemory:
    """Memory of the cases of one space.

    Args:
        space: what is priced.
        request: what is asked.
        copies: how many times the batch of the space is that of a step.
    """

    def __init__(self, space: Space, request: Request, copies: int) -> None:
        chain, reading = space.links.chain, space.reading
        self.space, self.chain, self.copies = space, chain, copies
        self.facts = space.links.facts
        self.batch = frozenset(r.index for r in reading.dims.batch)
        self.program = AnalysedProgram(
            reading.graph, reading.dims, space.cluster.compiler, reading.views
        )
        self.memory = LayoutMemory(
            graph=chain.graph,
            program=self.program,
            facts=self.facts,
            hosting=Hosting(self.program, space.cluster, request, self.facts),
            dims=reading.dims,
        )

    @functools.cached_property
    def knows(self) -> bool:
        """Liveness can be told: every layer is there, or all are one loop.

        Where layers that are written out stand for each other, spans are not those of
        the program. On CPUs it depends on what collectives gather.
        """
        once = all(n == 1 for n in self.chain.leaf_times.values())
        return once and not self.space.cluster.compiler.reduces_at_end

    def covers(self, cases: Cases) -> bool:
        """Whether the memory of all given cases is known exactly."""
        bits = int(np.bitwise_or.reduce(cases.frames.offload, initial=0))
        away = {name for i, name in enumerate(OFFLOADS) if bits >> i & 1}
        waits = "activations" not in away or bool(self.program.waiting)
        remats = np.unique(cases.frames.remat).tolist()
        plain = {name for i in remats for name in cases.model.policies[i].values()}
        alike = self.knows and cases.by != "replicas"
        return alike and plain <= {"none"} and waits and "gradients" not in away

    def terms(self, cases: Cases, group: Group) -> tuple[dict[str, Array], Array]:
        """Memory terms on the fullest stage of a group, and bytes in host memory.

        Args:
            cases: Cases that ``cut_layers`` has cut and ``covers`` accepts.
            group: Group of stages on one kind of device.
        """
        found: dict[str, Array] = {}
        host = np.zeros(cases.number)
        for variant, bits, rows in self._blocks(cases):
            offload = tuple(n for i, n in enumerate(OFFLOADS) if bits >> i & 1)
            laid, s = self._step_layout(cases, group, variant, offload, rows)
            here = self.memory.of(laid, s)
            host[rows] = here.host
            for name, values in here.terms.items():
                found.setdefault(name, np.zeros(cases.number))[rows] = values
        return found, host

    def lacks(self, cases: Cases) -> tuple[float, float]:
        """Bytes that a single case lacks on its fullest device and on its host.

        Args:
            cases: One case, cut by ``cut_layers``.
        """
        found = []
        for group in cases.groups:
            terms, host = self.terms(cases, group)
            device_bytes, host_bytes = cases.capacity(group.kind)
            over = float(sum(v[0] for v in terms.values())) - device_bytes
            lacks = max(0.0, over), max(0.0, float(host[0]) - host_bytes)
            if group.count[0] > 0:
                found.append((sum(lacks), over, lacks))
        return max(found)[-1]

    def offloaded_activations(self, cases: Cases) -> Array:
        """Bytes of one micro-batch's activations in host memory, by case.

        Args:
            cases: Cases of one stage that ``covers`` accepts.
        """
        found = np.zeros(cases.number)
        apart = self.memory.moments(apart=True, regathers=False)
        some = np.flatnonzero(apart.waiting)
        kinds = [apart.kinds[place] for place in some]
        for variant, bits, rows in self._blocks(cases):
            if bits >> OFFLOADS.index("activations") & 1:
                tables = self.space.served[variant].spots
                nbytes = kept_bytes(kinds, tables, self._setting(cases, rows))
                for place, each in zip(some, nbytes, strict=True):
                    found[rows] += apart.waiting[place] * each
        return found

    def _setting(self, cases: Cases, rows: Array) -> Setting:
        mesh = {axis: cases.mesh[axis][rows] for axis in INSIDE}
        count = cases.frames.micro_batches[rows] * self.copies
        space = self.space
        return Setting(mesh, count, space.cluster, space.reading.dims, self.batch)

    def block_numbers(self, cases: Cases) -> Array:
        """Number of each case's variant and host-memory options."""
        variant = cases.cell(Column("variant")).astype(np.int64)
        found: Array = (variant << len(OFFLOADS)) + cases.frames.offload
        return found

    def _blocks(self, cases: Cases) -> Iterator[tuple[int, int, Array]]:
        """Blocks of cases with one variant and the same host-memory options."""
        key = self.block_numbers(cases)
        for one in np.unique(key).tolist():
            rows = np.flatnonzero(key == one)
            for start in range(0, len(rows), BLOCK):
                number, bits = divmod(one, 1 << len(OFFLOADS))
                yield number, bits, rows[start : start + BLOCK]

    def _step_layout(
        self,
        cases: Cases,
        group: Group,
        variant: int,
        offload: tuple[str, ...],
        rows: Array,
    ) -> tuple[StepLayout, Setting]:
        frames = cases.frames
        tables = self.space.served[variant].spots
        s = self._setting(cases, rows)
        several = bool((frames.stage[rows] > 1).any())
        held = cases.in_flight(group, frames.micro_batches)[rows] if several else 1.0
        laid = StepLayout(
            tables=tables,
            cuts=leaf_shard_counts(self.facts, tables, s.mesh, frames.zero[rows]),
            accumulates=frames.micro_batches[rows] > 1,
            offload=offload,
            in_flight=held,
            stage=self._stage_share(cases, group, rows) if several else WHOLE_PROGRAM,
        )
        return laid, s

    def _stage_share(self, cases: Cases, group: Group, rows: Array) -> StageShare:
        """Share of the program on the fullest stage of a group."""
        spots = {home: spot.place for home, spot in enumerate(self.chain.spots)}
        shares = {
            place: share_of(cases, group, place)[rows]
            for place in {*spots.values(), *self._group_places}
        }
        return StageShare(
            task_graph_shares={home: shares[place] for home, place in spots.items()},
            group_shares=np.array([shares[place] for place in self._group_places]),
        )

    @functools.cached_property
    def _group_places(self) -> list[int]:
        places = self.chain.leaf_places()
        found = [FIRST] * len(self.facts.groups)
        pairs = zip(self.facts.tensors, self.facts.group_of, strict=True)
        for tensor, group in pairs:
            found[group] = places[tensor.id]
        return found
