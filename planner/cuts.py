"""Where a model is cut into parts, and the models that its stages then are."""

from __future__ import annotations

from dataclasses import dataclass, field

from whalejax.meshes.cluster import Cluster
from whalejax.planner.decide import Analysed, searches
from whalejax.planner.graph import Graph
from whalejax.planner.parts import Division, Units, divided, divided_by_marks
from whalejax.planner.plan import PlanError
from whalejax.planner.refusals import refusal
from whalejax.planner.schedules import Schedule
from whalejax.planner.scored import Request, Scored
from whalejax.planner.search import Search
from whalejax.planner.segments import Segments
from whalejax.planner.shared import STAGE, devices_of_stage
from whalejax.planner.stage_models import places_of, stage_graph
from whalejax.planner.stages import Stage, cut
from whalejax.planner.turns import handed_seconds


ROOM = 1000
"""How often the memory of a device stages are searched with: whether they fit is said
of all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A model, or a stage's part of it, in one layout.

    Attributes:
        analysed: the model.
        search: which found the layout.
        scored: the layout.
    """

    analysed: Analysed
    search: Search
    scored: Scored


def laid_out(graph: Graph, cluster: Cluster, request: Request) -> list[Laid]:
    """Every layout of a model, however much memory it takes.

    Args:
        graph, cluster, request: as for ``decide``.

    Raises:
        PlanError: there is none.
    """
    roomy = cluster.with_memory(ROOM * cluster.memory_bytes)
    pairs = searches(graph, roomy, request, None)
    found = [
        Laid(analysed=analysed, search=search, scored=scored)
        for analysed, search in pairs
        for scored in search.scored
    ]
    if not found:
        raise refusal(pairs[-1][1], open_remat=False)
    return found


class TooFewParts(PlanError):
    """The model cannot be cut into so many parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model in parts.

    Attributes:
        division: what each part runs.
        paces: about how long each takes for a micro-batch.
        graphs: the model of each stage.
    """

    division: Division
    paces: tuple[float, ...]
    graphs: tuple[Graph, ...]


@dataclass(slots=True, kw_only=True)
class Cuts:
    """Cuts of one program, found once for each number of parts.

    Attributes:
        graph, units: the program.
        cluster: all devices.
        marked: ``stage`` marks say where to cut.
    """

    graph: Graph
    units: Units
    cluster: Cluster
    marked: bool
    _found: dict[tuple[int, int], Cut] = field(default_factory=dict)

    def of(self, table: Schedule, request: Request) -> Cut:
        """The model in the parts of a schedule.

        Args:
            table: the schedule.
            request: what is asked of the whole model on the devices of one stage.

        Raises:
            TooFewParts: it has fewer parts.
        """
        key = table.num_stages, table.num_chunks
        if key not in self._found:
            self._found[key] = self._cut(table, request)
        return self._found[key]

    def _cut(self, table: Schedule, request: Request) -> Cut:
        stages = table.num_stages
        part = devices_of_stage(self.cluster, request.num_devices, stages)
        laid = laid_out(self.graph, part, request)
        best = min(laid, key=lambda one: one.scored.time.step_seconds)
        mesh = {STAGE: table.num_stages, **best.scored.mesh}
        segments = Segments(
            self.units,
            best.analysed,
            best.search,
            best.scored,
            lambda nbytes: handed_seconds(nbytes, mesh, self.cluster),
        )
        division, paces = self._division(segments, table, part)
        chunks = table.num_chunks
        return Cut(
            division=division,
            paces=paces,
            graphs=tuple(
                stage_graph(
                    self.graph,
                    best.analysed.dims,
                    division,
                    places_of(stage, stages, chunks),
                )
                for stage in range(stages)
            ),
        )

    def _division(
        self, segments: Segments, table: Schedule, part: Cluster
    ) -> tuple[Division, tuple[float, ...]]:
        """The model in parts, and about how long each takes."""
        if self.marked:
            division = divided_by_marks(self.units, self.units.labels(self.graph))
            return division, segments.seconds_of(division)
        held = 1 if table.num_chunks > 1 else None
        places = [
            Stage(
                memory_bytes=float("inf") if held else part.memory_bytes,
                in_flight=held or table.in_flight[place],
            )
            for place in range(table.num_places)
        ]
        layers = segments.layers
        if len(layers) < len(places):
            raise TooFewParts(
                f"stage is {table.num_stages}"
                + (f" with {table.num_chunks} parts each" if held else "")
                + f", and the model can be cut into at most {len(layers)} parts that "
                "read parameters of their own (loops and checkpointed regions are not "
                f"cut). Use at most {max(1, len(layers) // table.num_chunks)}"
            )
        try:
            found = cut(layers, places)
        except PlanError:
            # What fits is said by the search of each stage, which knows more.
            found = cut(layers, [Stage()] * len(places))
        return divided(self.units, segments.starts(found.counts)), found.seconds
