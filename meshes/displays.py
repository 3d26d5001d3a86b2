"""Pictures of plans and clusters, which stand in a room above and come when asked for.

Plans and clusters are plain data and know no HTML; notebooks ask the data itself how
to show it. This is the one door between them: nothing is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from whalejax.display.device_map import DeviceMap
    from whalejax.display.memory import MemoryChart
    from whalejax.display.timelines import StepTimeline


def bundle(value: Any) -> dict[str, str]:
    """A plan or a cluster as notebooks take it: MIME type to text."""
    from whalejax.display.bundles import bundle as made

    return made(value)


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
