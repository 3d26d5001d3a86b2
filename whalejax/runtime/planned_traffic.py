"""Compares a plan's predicted traffic with the compiled program's.

Verification and profiling use this module.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalejax.planner.plan_data import PlanData


CLOSE = 0.05
"""Maximum relative difference at which traffic counts as planned."""

Axes = tuple[str, ...]

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = ("site-packages", "dist-packages", _OURS, "/lib/python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity with its predicted value, and its value in the compiled program.

    Attributes:
        name: Name of the quantity.
        predicted, compiled: Both values; None if unknown.
        unit: ``"bytes"``, ``"flops"`` or ``"seconds"``.
        predicted_count, compiled_count: Number of executions of a collective in a step,
            predicted and compiled.
    """

    name: str
    predicted: float | None
    compiled: float | None
    unit: str = "bytes"
    predicted_count: int | None = None
    compiled_count: int | None = None

    @property
    def difference(self) -> float | None:
        """Ratio of predicted to compiled value, minus one.

        It is 0 if both values are 0. It is None if only one value is 0 or is missing.
        """
        if not self.predicted or not self.compiled:
            return 0.0 if self.predicted == self.compiled == 0 else None
        return self.predicted / self.compiled - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A property of the compiled program that the plan lacks, such as a collective.

    Attributes:
        what: Description of the property.
        nbytes: Bytes moved or stored in one step on one device; 0 if unknown.
        name: Name stack of the operation.
        place: Line of the user's code, as ``file:line``, or empty.
    """

    what: str
    nbytes: int = 0
    name: str = ""
    place: str = ""


def planned_bytes(plan: PlanData) -> Counter[str]:
    """Returns the planned payload bytes of a step, by collective and mesh axes."""
    result: Counter[str] = Counter()
    for c in plan.collectives:
        name = traffic_name(c.kind, _ordered(c.axes, plan))
        result[name] += c.payload_bytes * plan.times(c)
    return result


def compared_traffic(
    plan: PlanData, traffic: Sequence[Mapping[str, Any]]
) -> tuple[Quantity, ...]:
    """Returns predicted and compiled traffic, by kind of collective and mesh axes.

    Args:
        plan: Plan that was compiled.
        traffic: Collectives of the program, with their ``kind``, ``axes``, ``count``
            and ``payload_bytes``.
    """
    predicted = planned_bytes(plan)
    predicted_count: Counter[str] = Counter()
    for c in plan.collectives:
        name = traffic_name(c.kind, _ordered(c.axes, plan))
        predicted_count[name] += plan.times(c)
    compiled: Counter[str] = Counter()
    compiled_count: Counter[str] = Counter()
    for entry in traffic:
        name = traffic_name(entry["kind"], _axes(entry))
        compiled[name] += entry["payload_bytes"] * entry["count"]
        compiled_count[name] += entry["count"]
    names = {*predicted, *compiled}
    return tuple(
        Quantity(
            name=name,
            predicted=predicted[name],
            compiled=compiled[name],
            predicted_count=predicted_count[name],
            compiled_count=compiled_count[name],
        )
        for name in sorted(names, key=lambda n: -max(predicted[n], compiled[n]))
    )


def _ordered(axes: Iterable[str], plan: PlanData) -> Axes:
    return tuple(a for a in plan.axis_sizes if a in set(axes))


def _axes(found: Mapping[str, Any]) -> Axes:
    return ("other groups",) if found["axes"] is None else tuple(found["axes"])


def unplanned_traffic(
    plan: PlanData,
    quantities: Sequence[Quantity],
    traffic: Sequence[Mapping[str, Any]],
    *,
    least: float = CLOSE,
) -> tuple[Finding, ...]:
    """Returns at most five collectives over axes with more traffic than planned.

    The total traffic over the axes is exact. Which collectives exceed the plan is only
    a hint: they are matched by size, and the compiler merges and splits collectives.
    Kinds that the plan lacks over the axes come first, and then the largest ones.

    Args:
        plan: Plan that was compiled.
        quantities: Comparison of its traffic by ``compared_traffic``.
        traffic: Argument of ``compared_traffic``; each entry also has ``name`` and
            ``places``.
        least: Minimum fraction of all traffic of a listed collective.
    """
    sums: dict[str, list[float]] = {}
    for q in quantities:
        pair = sums.setdefault(q.name.partition(" over ")[2], [0.0, 0.0])
        pair[0] += q.predicted or 0
        pair[1] += q.compiled or 0
    more = {
        axes: compiled - predicted
        for axes, (predicted, compiled) in sums.items()
        if compiled > (1 + CLOSE) * predicted
    }
    total = sum(q.compiled or 0 for q in quantities)
    planned: Counter[tuple[str, int]] = Counter()
    for c in plan.collectives:
        name = traffic_name(c.kind, _ordered(c.axes, plan))
        planned[name, c.payload_bytes] += plan.times(c)
    findings = []
    known = {name for name, _ in planned}

    def likeliest(found: Mapping[str, Any]) -> tuple[bool, float]:
        name = traffic_name(found["kind"], _axes(found))
        return name in known, -found["payload_bytes"] * found["count"]

    for found in sorted(traffic, key=likeliest):
        name = traffic_name(found["kind"], _axes(found))
        expected = min(found["count"], planned[name, found["payload_bytes"]])
        planned[name, found["payload_bytes"]] -= expected
        times = found["count"] - expected
        axes = name.partition(" over ")[2]
        nbytes = min(more.get(axes, 0), times * found["payload_bytes"])
        if nbytes <= least * total:
            continue
        more[axes] -= nbytes
        findings.append(
            Finding(
                what=f"{name}, {times} times",
                nbytes=int(nbytes),
                name=found["name"],
                place=own_place(found["places"]),
            )
        )
    return tuple(findings[:5])


def traffic_name(kind: str, axes: Axes) -> str:
    return f"{kind} over {' × '.join(axes)}"


def own_place(places: Sequence[str]) -> str:
    """Returns the innermost line of user code, or one of ``models`` or a library.

    The text is empty if there is no line.
    """
    plain = [p for p in places if not p.startswith("<")]
    own = [p for p in plain if not any(part in p for part in _LIBRARIES)]
    models = [p for p in plain if "/models/" in p and "site-packages" not in p]
    return next(iter([*own, *models, *plain]), "")
