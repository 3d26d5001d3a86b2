"""Result of ``wh.search``: plans on several clusters, best first.

This module is separate from the search and needs no JAX. So results can be printed,
compared and written wherever a plan can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from whalejax.meshes.arguments.near_names import near_hint
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report import export
from whalejax.planner.plan.report.headline import hourly_price, price_notes, speed_words
from whalejax.planner.plan.report.plan_page import page_width
from whalejax.planner.plan.report.text_layout import (
    Line,
    check_lines,
    paragraph,
    plain,
    table,
)
from whalejax.planner.plan.report.why import layout_text
from whalejax.planner.plan_entries import Candidate
from whalejax.planner.plan_errors import NothingFits, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibleCluster:
    """Cluster on which no plan is possible.

    Attributes:
        name: Name of the cluster, as the user gave it.
        cluster: The cluster.
        problem: Error that gives the reason.
    """

    name: str
    cluster: Cluster
    problem: PlanError

    @property
    def lacks_bytes(self) -> int | None:
        """Bytes per device that the nearest plan lacks; None for other reasons."""
        problem = self.problem
        return problem.lacks_bytes if isinstance(problem, NothingFits) else None

    @property
    def reason(self) -> str:
        """Bytes that the nearest plan lacks, or another reason, in one line."""
        problem = self.problem
        if isinstance(problem, NothingFits):
            return (
                f"lacks {gigabytes(problem.lacks_bytes)} of "
                f"{gigabytes(problem.of_bytes)} {problem.what} on each device; "
                f"nearest: {problem.nearest}"
            )
        return " ".join(str(problem).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCandidate:
    """Evaluated plan on one of the clusters, with its predicted cost.

    Attributes:
        name: Name of the cluster, as the user gave it.
        cluster: The cluster.
        candidate: Layout, predicted time and memory by term, and the verdict.
        index: Index of the full plan in ``SearchData.plans``, or None if there is none.
    """

    name: str
    cluster: Cluster
    candidate: Candidate
    index: int | None

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory of one device, of the smallest if devices differ."""
        return self.cluster.memory_bytes

    @property
    def step_price(self) -> float | None:
        """Price of one step, or None if a device kind has no price."""
        return price_of(self.cluster, self.candidate.step_seconds)

    @property
    def step_price_text(self) -> str:
        """Text of the price of one step with its currency, or a dash."""
        return price_text(self.cluster, self.step_price)

    def costs(self, n: int = 3) -> tuple[tuple[str, float], ...]:
        """Returns the largest terms of the step time in seconds, largest first.

        Args:
            n: Largest number of terms to return; default: 3.

        Raises:
            WhaleError: ``n`` is not a whole number of 0 or more.
        """
        problems = Arguments("costs")
        problems.whole("n", n)
        problems.raise_if_any()
        return tuple(self.candidate.time.by_size()[:n])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchData(Sequence[Plan]):
    """Plans of one model on several clusters, best first; result of ``wh.search``.

    It is a sequence: ``found[0]`` is the best plan, and ``found["h100:8"]`` the best
    plan on that cluster. ``print`` shows a table.

    Attributes:
        plans: Plans, best first.
        names: Cluster of each plan, as the user named it.
        refused: Clusters without a plan, fewest missing bytes first.
        weighed: Evaluated candidates on all clusters.
        notes: Reasons why plans cannot be compared.
    """

    plans: tuple[Plan, ...]
    names: tuple[str, ...]
    refused: tuple[InfeasibleCluster, ...] = ()
    weighed: tuple[ClusterCandidate, ...] = ()
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int | str) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | str | slice) -> Plan | tuple[Plan, ...]:
        if isinstance(index, slice):
            return self.plans[index]
        refused = {cluster.name: cluster.reason for cluster in self.refused}
        return self.plans[place_of_cluster(index, self.names, "plan", refused)]

    def __len__(self) -> int:
        return len(self.plans)

    def step_price(self, index: int = 0) -> float | None:
        """Returns the price of a plan's step, or None if a device kind has no price.

        Args:
            index: Index of the plan; default: 0, the best.

        Raises:
            WhaleError: There is no plan with this index.
        """
        if not is_whole(index, -len(self), len(self) - 1):
            raise WhaleError(
                f"index is {short_repr(index)}; expected the number of one of "
                f"{len(self)} "
                "plans, from 0"
            )
        plan = self[index]
        return price_of(plan.cluster, plan.time.step_seconds)

    def export(
        self,
        form: str,
        *,
        name: str = "train",
        image: str | None = None,
        command: str | None = None,
    ) -> str:
        """Returns the plans as a file of another system.

        ``"axlearn"`` writes a mesh rule for each cluster. ``"skypilot"`` tries the
        clusters in turn. Other formats contain only the best plan.

        Args:
            form, name, image, command: Arguments of ``Plan.export``.

        Raises:
            WhaleError: There is no plan, or the format cannot express one of the plans.
        """
        if not self.plans:
            raise WhaleError(f"there is no plan to export: {self}")
        return export.export(self.plans, form, name=name, image=image, command=command)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the rows of the table, as under ``head()``."""
        found = []
        for index, plan in enumerate(self.plans):
            limit = plan.cluster.memory_bytes
            row = [
                str(index),
                self.names[index],
                str(plan.cluster.num_devices),
                layout_text(plan),
                milliseconds(plan.time.step_seconds),
                f"{gigabytes(plan.memory.total_bytes)} of {gigabytes(limit)}",
            ]
            row += _speed_cells(plan)
            if self._has_prices:
                price = plan.throughput().million_price if plan.work else None
                row += [
                    price_text(plan.cluster, self.step_price(index)),
                    price_text(plan.cluster, price),
                ]
            found.append(tuple(row))
        return found

    def head(self) -> tuple[str, ...]:
        """Returns the names of the table's columns."""
        names = ["", "cluster", "devices", "layout", "step", "memory per device"]
        names += ["speed", "MFU"]
        if self._has_prices:
            unit = next((p.work.unit for p in self.plans if p.work), "samples")
            names += ["price a step", f"a million {unit}"]
        return tuple(names)

    @property
    def _has_prices(self) -> bool:
        return any(hourly_price(plan.cluster) is not None for plan in self.plans)

    def document(self) -> dict[str, Any]:
        """Returns plans, candidates and clusters without a plan as plain JSON data."""
        return {
            "whalejax_search": 1,
            "plans": [
                {
                    "cluster": name,
                    "devices": plan.cluster.num_devices,
                    "layout": layout_text(plan),
                    "step_seconds": plan.time.step_seconds,
                    "memory_bytes": plan.memory.total_bytes,
                    "capacity_bytes": plan.cluster.memory_bytes,
                    "step_price": self.step_price(index),
                    "plan": plan.document(),
                }
                for index, (name, plan) in enumerate(
                    zip(self.names, self.plans, strict=True)
                )
            ],
            "weighed": [
                {
                    "cluster": one.name,
                    "plan": one.index,
                    "step_price": one.step_price,
                    "step_seconds": one.candidate.step_seconds,
                    "memory_bytes": one.candidate.memory_bytes,
                    **dataclasses.asdict(one.candidate),
                }
                for one in self.weighed
            ],
            "refused": [
                {
                    "cluster": one.name,
                    "reason": one.reason,
                    "lacks_bytes": one.lacks_bytes,
                }
                for one in self.refused
            ],
            "notes": list(self.notes),
        }

    def lines(self, width: int | None) -> list[Line]:
        """Returns lines of text: the table, then the clusters without a plan.

        Args:
            width: Columns of a line; None for lines of any length.
        """
        check_lines(width, all_rows=False)
        lines = table(self.head(), self.rows(), width)
        if self._has_prices:
            notes = price_notes(plan.cluster for plan in self.plans)
            lines += paragraph("prices", notes, width, " · ") if notes else []
        for one in self.refused:
            lines += paragraph("no plan", [f"on {one.name}: {one.reason}"], width)
        for note in self.notes:
            lines += paragraph("note", [note], width)
        return lines

    def __str__(self) -> str:
        return plain(self.lines(page_width()))

    def __repr__(self) -> str:
        return str(self)


def place_of_cluster(
    index: Any,
    names: Sequence[str],
    noun: str,
    refused: Mapping[str, str] | None = None,
) -> int:
    """Returns the index of a result that is given by its number or its cluster.

    Args:
        index: Number from 0, or name of a cluster.
        names: Cluster of each result.
        noun: Noun for a result in messages.
        refused: Reasons why clusters have no result, by name; default: None.

    Raises:
        WhaleError: No result has this name, or the index is no integer or string.
        IndexError: No result has this number.

    >>> place_of_cluster("h100:8", ["v5e:4x4", "h100:8"], "plan")
    1
    """
    known = list(dict.fromkeys(names))
    if isinstance(index, str):
        if index in known:
            return names.index(index)
        why = (refused or {}).get(index, "")
        hint = "" if why else near_hint(index, known)
        there = f"; there are {noun}s on {', '.join(known)}" if known else ""
        raise WhaleError(
            f"there is no {noun} on {short_repr(index)}{why and f': {why}'}"
            f"{hint or there}"
        )
    if not is_whole(index):
        raise WhaleError(
            f"index is {short_repr(index)}; expected the number of a {noun}, from 0, "
            f"or one of {', '.join(known)}"
        )
    if not -len(names) <= index < len(names):
        raise IndexError(
            f"there is no {noun} {index}: {len(names)} were found, numbered from 0"
        )
    return int(index)


def price_of(cluster: Cluster, seconds: float) -> float | None:
    """Returns the price of a cluster for some seconds; None if a kind has no price."""
    price = hourly_price(cluster)
    return None if price is None else price.amount * seconds / 3600


def price_text(cluster: Cluster, amount: float | None) -> str:
    """Formats an amount with three digits and a cluster's currency, or a dash.

    >>> from whalejax.meshes import cluster
    >>> price_text(cluster("h100:8"), 0.012345), price_text(cluster("cpu:8"), None)
    ('0.0123 USD', '–')
    """
    price = hourly_price(cluster)
    return "–" if price is None or amount is None else price.text(amount)


def _speed_cells(plan: Plan) -> list[str]:
    if plan.work is None:
        return ["–", "–"]
    speed = plan.throughput()
    rate, *rest = speed_words(speed)
    utilization = f"{speed.utilization:.1%}" if rest else "–"
    return [rate, utilization]
