"""The mesh that a user requests, for any number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from whalejax.meshes.checks import is_whole
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES


AUTO: Final = "auto"
"""The planner chooses the mesh."""

REPLICAS: Final = "replicas"
"""One full replica per process; gradients are reduced by messages."""

REST: Final = -1
"""Marks the axis that takes all devices left by the other axes."""

Asked = Mapping[str, int] | Callable[[int], Mapping[str, int]] | str


def refusal(asked: Any) -> str:
    """Returns the expected form of the argument ``mesh``; empty if it is valid.

    >>> refusal({"fsdp": -1}), refusal("auto"), refusal({"fsdp": 0})[:40]
    ('', '', 'sizes of at least 1, or -1 for the one a')
    """
    if callable(asked) or (isinstance(asked, str) and asked in (AUTO, REPLICAS)):
        return ""
    if not isinstance(asked, Mapping) or not all(isinstance(k, str) for k in asked):
        return (
            "'replicas', 'auto', sizes of mesh axes such as {'fsdp': -1}, a function "
            "that gives them for a number of devices, or None"
        )
    if unknown := [name for name in asked if name not in MESH_AXES]:
        return f"axes among {', '.join(MESH_AXES)}, not {', '.join(unknown):.60}"
    sizes = list(asked.values())
    if not all(is_whole(x, 1) or x == REST for x in sizes):
        return "sizes of at least 1, or -1 for the one axis that takes all that is left"
    if sizes.count(REST) > 1:
        return "at most one axis of size -1, which takes all that is left"
    return ""


def mesh_of(asked: Asked, devices: int) -> dict[str, int] | None:
    """Returns sizes of mesh axes for ``wh.plan``; None if the planner chooses them.

    Raises:
        PlanError: The mesh does not fit this number of devices, or the user's function
            gave no valid sizes.

    >>> mesh_of({"fsdp": -1, "tensor": 2}, 8), mesh_of("auto", 8)
    ({'fsdp': 4, 'tensor': 2}, None)
    """
    if isinstance(asked, str):
        return None
    sizes: Any = asked(devices) if callable(asked) else asked
    expected = refusal(sizes)
    if expected or not isinstance(sizes, Mapping):
        raise PlanError(
            f"mesh gave {sizes!r:.100} for {devices} devices; expected "
            f"{expected or 'sizes of mesh axes'}"
        )
    known = math.prod(x for x in sizes.values() if x != REST)
    whole = REST not in sizes.values()
    if (whole and known != devices) or devices % known:
        raise PlanError(
            f"mesh is {dict(sizes)}, whose sizes make {known}, and there "
            f"{'is 1 device' if devices == 1 else f'are {devices} devices'}, "
            f"{'not as many' if whole else 'no multiple of that'}. Another "
            "number of processes is taken where one fits; give -1 as the size of an "
            "axis that may grow and shrink, or a function of the number of devices"
        )
    return {k: devices // known if x == REST else x for k, x in sizes.items()}
