"""Mesh axes and shares that a user fixes, checked before anything is searched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from whalejax.meshes.arguments.near_names import AXIS_SYNONYMS, near_hint
from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.errors import Problems
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES


EVEN: Literal["even"] = "even"
"""Requests equal shares."""

Uneven = bool | Literal["even"] | tuple[int, ...]
"""Whether replicas have their own shares: equal ones, or the requested ones."""


def check_axes(mesh: Mapping[str, int] | None) -> None:
    """Checks a mapping of mesh axes to sizes.

    Args:
        mesh: Mesh axes that the user fixes, or None.

    Raises:
        PlanError: Axes or sizes are invalid; lists all.
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
    """Refuses sizes of mesh axes that do not fit the number of devices.

    Args:
        mesh: Mesh axes that the user fixes.
        num_devices: Number of devices.
        allow_idle: Whether some devices may be idle.
        axes: Axes whose sizes the search chooses if they are not fixed.

    Raises:
        PlanError: The sizes do not fit; the message lists possible products.
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
    """Returns the note on devices that a plan leaves idle.

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


def zero_note(plan: Plan, zero: int | None) -> list[str]:
    """Returns the note on a ZeRO level that has no axis to act on.

    Args:
        plan: Plan that was found.
        zero: Argument ``zero`` of ``wh.plan``, unchanged.
    """
    parts = [plan, *(plan.pipelines or ()), *plan.stage_plans]
    if not zero or any(one.axis_sizes.get("data", 1) > 1 for one in parts):
        return []
    fsdp = plan.axis_sizes.get("fsdp", 1)
    instead = (
        f". fsdp {fsdp} shards parameters, gradients and the optimizer's state (ZeRO-3)"
        if fsdp > 1
        else ""
    )
    return [
        f"zero={zero} has no effect: it is over the mesh axis data, and this plan has "
        f"none{instead}"
    ]


def split_notes(plan: Plan) -> list[str]:
    """Returns the note on even shards on mixed devices, if ``tensor`` is larger than 1.

    Args:
        plan: Plan for devices of one or several kinds.
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
    """Returns whether replicas have uneven shares, ``EVEN``, or the requested shares.

    Args:
        shares: Shares from the user; ``plan_settings`` has checked their type.
        mixed: Whether devices are of several kinds.
        runnable: Whether plans that cannot run are excluded.
        allow_idle: Whether some devices may be idle.
        whole: Whether the batch is one micro-batch, as its samples are not independent.

    Raises:
        PlanError: Shares contradict another option.
    """
    # One program runs on one kind of device.
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
    from whalejax.meshes.jax_mesh import factorizations

    ways = factorizations(number, max(2, parts))[:4]
    return ", ".join("×".join(map(str, way)) for way in ways)
