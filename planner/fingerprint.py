"""Compares the plans of processes, and names the parts in which they differ.

A hash shows only that plans differ. So processes also exchange a short text for each
part of a plan, once: its value, or a hash of it if the value is long. ``plan.diff``
shows more if both plans are available.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from whalejax.planner.json_codec import encode
from whalejax.planner.step_options import OPTION_NAMES


_NOT_THE_PROGRAM = (
    "time",
    "memory",
    "candidates",
    "notes",
    "gap",
    "collectives",
    "product_flops",
    "optimizer_bytes",
    "work",
    "source",
    "paces",
    "handed_seconds",
    "swarm",
    "per_micro_batch",
)
"""Fields of a plan that do not change its program. Nor does ``common`` of roles."""

_NAMES: Final = {
    "model_hash": "model, loss, batch or marks",
    "cluster": "cluster",
    "axes": "mesh axes",
    "device_order": "device order",
    "num_micro_batches": "micro-batches",
    "group_size": "samples that stay together",
    "zero": "ZeRO level",
    **OPTION_NAMES,
    "precision": "precision",
    "precisions": "precision of TaskGraphs",
    "default": "default strategy",
    "stages": "stages",
    "schedule": "schedule",
    "pipelines": "pipelines",
    "compiler_options": "compiler options",
    "swarm": "swarm",
    "roles": "logical dimensions",
    "compute": "layouts inside the model",
    "storage": "layouts of storage",
    "leaves": "shapes or layouts of parameters",
    "batch": "shapes or layouts of the batch",
    "batch_tree": "containers of the batch",
}
_FOLLOWING: Final = frozenset(
    _NAMES[x] for x in ("roles", "compute", "storage", "leaves", "batch")
)
"""Parts that follow from others. They are named only if no other part differs."""

_LONGEST = 48


def program_data(plan: Any) -> dict[str, Any]:
    """Returns all parts of a plan that change its program, as plain data."""
    data = encode(plan)
    assert isinstance(data, dict)
    for whole in (data, *data["pipelines"]):
        stages = whole["stages"] or {}
        for one in (whole, stages, *stages.get("plans", ())):
            for prediction in _NOT_THE_PROGRAM:
                one.pop(prediction, None)
            for role in one.get("roles", ()):
                role.pop("common", None)
    data["cluster"] = plan.cluster.hash
    if plan.tables is not None:
        data["tables"] = plan.tables.program
    if plan.swarm is not None:
        data["swarm"] = plan.swarm.agreed
    return data


def part_digests(plan: Any, also: Mapping[str, object]) -> dict[str, str]:
    """Returns a short text for each part of a plan, by the part's name.

    Args:
        plan: The plan.
        also: Further values that must be equal in all processes, by name.
    """
    data = program_data(plan)
    stages = data["stages"] or {}
    data["schedule"] = stages.pop("schedule", "none")
    data["axes"] = plan.axis_sizes
    digests = {_NAMES.get(name, name): _short(value) for name, value in data.items()}
    return digests | {name: _short(value) for name, value in also.items()}


def told_apart(told: Sequence[Mapping[str, str]], others: Sequence[int]) -> str:
    """Returns the parts in which some plans differ from the first; empty if none do.

    Args:
        told: Reports of the processes, from ``part_digests``.
        others: Numbers of the processes whose plans differ.

    Example:
        >>> told_apart([{"zero": "0"}, {"zero": "1"}], others=[1])
        'zero (1, not 0)'
    """
    parts = {}
    for name in dict.fromkeys(name for n in (0, *others) for name in told[n]):
        first = told[0].get(name, "none")
        theirs = sorted({told[n].get(name, "none") for n in others} - {first})
        if theirs:
            short = not any(text.startswith("#") for text in (first, *theirs))
            parts[name] = f" ({', '.join(theirs)}, not {first})" if short else ""
    causes = {name: words for name, words in parts.items() if name not in _FOLLOWING}
    return ", ".join(f"{name}{words}" for name, words in (causes or parts).items())


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(encode(value), default=repr)
    if len(text) <= _LONGEST and not text.startswith("#"):
        return text
    return f"#{hashlib.sha256(text.encode()).hexdigest()[:8]}"
