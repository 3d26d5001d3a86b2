"""Pictures of plans and clusters, which stand in a room above and come when asked for.

Plans and clusters are plain data and know no HTML; notebooks ask the data itself how
to show it. This is the one door between them: nothing is imported until it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from whalejax.display.device_map import DeviceMap as DeviceMap
    from whalejax.display.memory import MemoryChart as MemoryChart
    from whalejax.display.sliders import Sliders as Sliders
    from whalejax.display.timelines import StepTimeline as StepTimeline


class Shown:
    """What a notebook shows as HTML, and ``print`` as text."""

    __slots__ = ()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        from whalejax.display.bundles import bundle

        return bundle(self)


def timeline(plan: Any) -> StepTimeline:
    """``Plan.timeline``."""
    from whalejax.display.timelines import timeline as made

    return made(plan)


def memory_chart(plan: Any) -> MemoryChart:
    """``Plan.memory_chart``."""
    from whalejax.display.memory import memory_chart as made

    return made(plan)


def device_map(plan: Any, path: str, of: str) -> DeviceMap:
    """``Plan.device_map``."""
    from whalejax.display.device_map import device_map as made

    return made(plan, path, of)


def sliders(
    plan: Any, batches: Sequence[int] | None, clusters: Sequence[str]
) -> Sliders:
    """``Plan.sliders``."""
    from whalejax.display.sliders import sliders as made

    return made(plan, batches, clusters)
