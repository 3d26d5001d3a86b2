"""Mesh axes and shares that a user fixes, checked before anything is searched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.errors import Problems
from whalejax.planner.near_names import AXIS_SYNONYMS, near_hint
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES


EVEN: Literal["even"] = "even"
"""Shares that are all alike."""

Uneven = bool | Literal["even"] | tuple[int, ...]
"""Whether replicas take shares of their own: alike, or those that are asked for."""


def check_axes(mesh: Mapping[str, int] | None) -> None:
    """Refuses what is no mapping of mesh axes to sizes.

    Args:
        mesh: Mesh axes that the user fixes, or None.

    Raises:
        PlanError: Every axis and size that there cannot be.
    """
    if mesh is None:
        return
    if not isinstance(mesh, Mapping):
        raise PlanError(
            f"mesh is {short_repr(mesh)}; expected sizes by axis, such as "
            f"{{'tensor': 2}}"
        )
    problems = Problems("wh.plan(mesh=…)")
    for axis, size in mesh.items():
        if axis not in MESH_AXES:
            problems.add(
                f"there is no mesh axis {short_repr(axis)} to fix; expected one of "
                f"{', '.join(MESH_AXES)}{near_hint(axis, MESH_AXES, AXIS_SYNONYMS)}"
            )
        elif not isinstance(size, int) or not is_whole(size, 1):
            problems.add(
                f"{axis} is {short_repr(size)}; expected a whole number, 1 or more"
            )
    problems.raise_if_any(PlanError)


def check_mesh(
    mesh: Mapping[str, int],
    num_devices: int,
    allow_idle: bool,
    axes: Sequence[str],
) -> None:
    """Refuses sizes of mesh axes that no mesh of so many devices has.

    Args:
        mesh: Mesh axes that the user fixes.
        num_devices: There are.
        allow_idle: Some may be left without work.
        axes: Axes that the search gives sizes to where they are left open.

    Raises:
        PlanError: Which axis, the numbers, and what would do.
    """
    used = math.prod(mesh.values())
    shape = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    ways = f"{num_devices} = {_products(num_devices, len(mesh))}"
    if used > num_devices:
        raise PlanError(
            f"{shape} needs {used} devices; there are {num_devices}. {ways}"
        )
    all_fixed = all(axis in mesh for axis in axes)
    idle = num_devices % used or (all_fixed and used != num_devices)
    if idle and not allow_idle:
        raise PlanError(
            f"{shape} uses {used} of {num_devices} devices. {ways}. To leave some idle "
            "on purpose: allow_idle=True (--allow-idle)"
        )


def idle_note(plan: Plan) -> list[str]:
    """Returns the note on devices that a plan leaves without work.

    Args:
        plan: Plan on the first devices of its cluster.
    """
    used, total = plan.num_devices, plan.cluster.num_devices
    if used == total:
        return []
    which = f"device {used}" if used == total - 1 else f"devices {used} to {total - 1}"
    number = total - used
    return [
        f"{number} of {total} devices {'is' if number == 1 else 'are'} left idle: "
        f"{which}, in node order (they count from 0)"
    ]


def split_notes(plan: Plan) -> list[str]:
    """Returns the note on even shards of a split on unlike devices, where anything is
    split.

    Args:
        plan: For devices of one or of several kinds.
    """
    every = [
        plan,
        *(
            own
            for pipeline in plan.pipelines or (plan,)
            for own in pipeline.stage_plans
        ),
    ]
    if plan.cluster.is_uniform or all(
        one.axis_sizes.get("tensor", 1) == 1 for one in every
    ):
        return []
    return [
        "split: shards are even over tensor. Uneven ones are not planned: programs of "
        "unlike devices are compiled apart and cannot share the collectives inside a "
        "layer, and one program stores every shard as large as the largest"
    ]


def uneven_shares(
    shares: Any,
    *,
    mixed: bool,
    runnable: bool,
    allow_idle: bool,
    whole: bool,
) -> Uneven:
    """Whether replicas take shares of their own, and which.

    Args:
        shares: Shares that the user gives; ``plan_settings`` has checked their type.
        mixed: Devices are of several kinds.
        runnable: Whether plans that cannot run are excluded.
        allow_idle: Some devices may be left without work.
        whole: The batch is one micro-batch, because its samples are not independent.

    Raises:
        PlanError: Shares that are none, or that something else rules out.
    """
    # One program runs on one kind; estimates are set beside what runs.
    if shares is None:
        return mixed and not whole
    if isinstance(shares, str):
        return EVEN if mixed else False
    if not runnable or allow_idle:
        other = "allow_idle=True" if allow_idle else "runnable=False"
        raise PlanError(f"shares cannot be given with {other}. Drop one of them")
    asked = tuple(k.item() if isinstance(k, np.integer) else k for k in shares)
    return asked


def _products(number: int, parts: int) -> str:
    """The first ways to write a number as a product, for a message."""
    from whalejax.meshes.jax_mesh import factorizations

    ways = factorizations(number, max(2, parts))[:4]
    return ", ".join("×".join(map(str, way)) for way in ways)
