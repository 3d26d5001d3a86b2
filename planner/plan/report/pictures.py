"""Methods of plans and estimates that draw them; planning itself draws nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from whalejax.planner.pipeline.square_cube import StageOverLink
from whalejax.planner.plan_data import PlanData


if TYPE_CHECKING:
    from whalejax.display.device_map import DeviceMap
    from whalejax.display.goodput import GoodputChart
    from whalejax.display.memory import MemoryChart
    from whalejax.display.sliders import Sliders
    from whalejax.display.swarms import SquareCubeChart
    from whalejax.display.timelines import StepTimeline
    from whalejax.display.topology import TopologyMap


class PlanDisplay(PlanData):
    """Notebook displays and saved pages of a plan."""

    __slots__ = ()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        from whalejax.display.plan_pages import bundle

        return bundle(self)

    def timeline(self) -> StepTimeline:
        """Returns the timeline of a step, with a lane for each stage.

        Returns:
            Timeline that a notebook draws and ``print`` sums up. ``save`` writes it as
            ``trace.json`` for https://ui.perfetto.dev, or as ``.html`` or ``.svg``. A
            plan without stages has one lane, with the time terms.
        """
        from whalejax.display import timelines

        return timelines.timeline(self)

    def memory_chart(self) -> MemoryChart:
        """Returns the memory per device by term, for every stage if stages differ.

        Returns:
            Chart that a notebook draws, ``print`` describes and ``save`` writes to a
            file.
        """
        from whalejax.display import memory

        return memory.memory_chart(self)

    def device_map(self, path: str, of: str = "params") -> DeviceMap:
        """Returns the map of a parameter's shards to devices.

        Args:
            path: Path of the parameter, as the method ``leaf`` takes it.
            of: Layout to show: ``"params"`` (stored; default), ``"compute"`` (in
                computation), ``"gradients"`` or ``"optimizer"`` (its optimizer state).

        Returns:
            Map that a notebook draws and ``print`` lists; its ``parts`` are the data.

        Raises:
            PlanError: No parameter has that path; lists the nearest paths.
            WhaleError: ``of`` is not a known layout.
        """
        from whalejax.display import device_map

        return device_map.device_map(self, path, of)

    def topology(self) -> TopologyMap:
        """Returns the nodes, the links with their bandwidths, and the axes on each.

        Returns:
            Map that a notebook draws, ``print`` describes and ``save`` writes to a
            file.
        """
        from whalejax.display import topology

        return topology.topology(self)

    def sliders(
        self, *, batches: Sequence[int] | None = None, clusters: Sequence[str] = ()
    ) -> Sliders:
        """Returns sliders that replan with ``what_if``: batch, remat and cluster.

        They need a notebook with a running kernel and the extra ``whalejax[notebook]``.

        Args:
            batches: Numbers of samples to choose from; default: from a quarter of the
                planned batch to four times it.
            clusters: Clusters to choose from in addition to the plan's, as text.

        Returns:
            Sliders that a notebook draws; their ``plan`` is the latest plan.

        Raises:
            PlanError: The plan was read from a file, which lacks the model.
            WhaleError: Ipywidgets is missing, or a batch is not a number of samples.
        """
        from whalejax.display import sliders

        return sliders.sliders(self, batches, clusters)


class GoodputDisplay(ABC):
    """Notebook displays and saved pages of predicted goodput."""

    __slots__ = ()

    @abstractmethod
    def ways(self) -> list[tuple[str, float]]:
        """Returns (recovery policy, goodput) pairs."""

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return self.chart()._repr_mimebundle_()

    def chart(self) -> GoodputChart:
        """Returns a chart with a bar for each recovery policy.

        Returns:
            Chart that a notebook draws, ``print`` describes and ``save`` writes to a
            file.
        """
        from whalejax.display import goodput

        return goodput.GoodputChart(str(self), dict(self.ways()))


class SquareCubeDisplay(ABC):
    """Notebook displays and saved pages of a plan's square-cube law."""

    __slots__ = ()
    rows: tuple[StageOverLink, ...]
    head: ClassVar[tuple[str, ...]]

    @abstractmethod
    def cells(self) -> list[tuple[str, ...]]:
        """Returns the rows of the table, as under ``head``."""

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return self.chart()._repr_mimebundle_()

    def chart(self) -> SquareCubeChart:
        """Returns a chart of the slowest stage's utilisation by bandwidth and width.

        Returns:
            Chart that a notebook draws, ``print`` describes and ``save`` writes to a
            file.
        """
        from whalejax.display import swarms

        first = self.rows[0].bytes_per_second
        stages = [row for row in self.rows if row.bytes_per_second == first]
        return swarms.SquareCubeChart(str(self), stages, self.head, self.cells())
