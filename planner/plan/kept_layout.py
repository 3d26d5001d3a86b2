"""Settings that keep the layout of a plan while another setting changes.

Planning with a given layout takes a fraction of a second. So notebooks can replan as a
slider moves, and sizes can be found by bisection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalejax.meshes.cluster import cluster
from whalejax.planner.plan_data import PlanData
from whalejax.planner.step_options import options_of


_NOTHING = "none"
_AS_WRITTEN = {"*": "gather"}
"""Setting for a plan without blocked attention; without it, blocks would be tried."""


def kept_layout(plan: PlanData, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of ``what_if`` that keep a plan's layout after changes.

    Args:
        plan: Plan whose layout is kept.
        asked: Other changes by setting; its ``cluster`` may have more or fewer devices.

    Returns:
        The settings, without ``num_micro_batches`` and the settings in ``asked``. Empty
        if the mesh does not fit the number of devices, or if stages or replicas have
        layouts of their own.
    """
    if plan.stage_plans or plan.pipelines or plan.shares:
        return {}
    sizes = dict(plan.axes)
    count = cluster(asked["cluster"]).num_devices if "cluster" in asked else None
    if count is not None and count != plan.num_devices:
        for axis in ("data", "fsdp"):
            rest = plan.num_devices // sizes.get(axis, 1)
            if axis in sizes and count % rest == 0:
                sizes[axis] = count // rest
                break
        else:
            return {}
    options: dict[str, Any] = options_of(plan)
    options["remat"] = dict(plan.remat) or _NOTHING
    options["offload"] = plan.offload or _NOTHING
    options["attention"] = dict(plan.attention) or _AS_WRITTEN
    options.pop("num_micro_batches", None)
    kept = {**options, "mesh": sizes, "zero": plan.zero}
    return {name: value for name, value in kept.items() if name not in asked}
