"""The pictures of a plan, as its methods; drawing them is no part of planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whalejax.meshes import displays


if TYPE_CHECKING:
    from whalejax.meshes.displays import DeviceMap, MemoryChart, StepTimeline


class Pictured(displays.Shown):
    """What notebooks and files can show of a plan."""

    __slots__ = ()

    def timeline(self) -> StepTimeline:
        """The step in time: the schedule's rows, a lane for each stage.

        Returns:
            What a notebook draws, and ``print`` sums up. Its ``save`` writes
            ``trace.json`` for https://ui.perfetto.dev, or a page or drawing
            (``.html``, ``.svg``). A plan without stages has one lane, of its terms.
        """
        return displays.timeline(self)

    def memory_chart(self) -> MemoryChart:
        """Memory per device by term, of every stage where they have their own.

        Returns:
            What a notebook draws and ``print`` says; ``save`` writes it to a file.
        """
        return displays.memory_chart(self)

    def device_map(self, path: str, of: str = "params") -> DeviceMap:
        """Which device holds which part of a parameter.

        Args:
            path: of the parameter, as ``leaf`` takes it.
            of: ``"params"`` as stored, ``"compute"`` as computed with, or its
                ``"gradients"`` or ``"optimizer"`` state.

        Returns:
            What a notebook shows and ``print`` lists; ``parts`` has it as data.

        Raises:
            PlanError: no parameter has that path; the nearest are named.
            WhaleError: there is no such layout.
        """
        return displays.device_map(self, path, of)
