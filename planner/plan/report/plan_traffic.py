"""Lists what a plan's devices send each other in a step, by sort.

Stages with programs of their own have collectives of their own, and hand on what the
next ones read; a plan's own ``collectives`` are those of one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.plan_data import PlanData
from whalejax.planner.sharding.layout import STAGE


Home = tuple[int | None, int]
"""A stage: its pipeline, where there are several side by side, and its number."""

INSIDE = "inside"
"""The axis that stands for all devices of a stage, in a mesh of stages."""

HANDED = "hand-over"
"""The kind of what stages with programs of their own give each other."""


TIED, TIED_GRADIENT = "tied parameter", "tied gradient"
"""What is handed over once in a step, of parameters that several stages read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One sort of it, on one device.

    Attributes:
        kind: Kind of collective, or ``HANDED``.
        axes: Mesh axes that it runs over.
        what: Contents such as ``"gradient"``, ``"parameter"``, ``"activation"``.
        where: The stages, each with the number of its pipeline; none where all devices
            run one program.
        times: Number of transfers in a step.
        nbytes: Payload of all of these.
        seconds: Seconds on the links; part of them may be hidden behind computing.
        links: Names of the links that it crosses.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    where: tuple[Home, ...] = ()
    times: int
    nbytes: int
    seconds: float
    links: tuple[str, ...]

    @property
    def sort(self) -> tuple[str, tuple[str, ...], str]:
        """Returns the key that is equal on other stages."""
        return self.kind, self.axes, self.what

    @property
    def route_text(self) -> str:
        """Mesh axes and stages in words."""
        where = stage_list_text(self.where)
        if self.kind == HANDED:
            back = self.what in ("gradient", TIED_GRADIENT)
            return f"{'back from' if back else 'to'} {where}"
        axes = "+".join(self.axes)
        return f"{axes} in {where}" if where else axes


def stage_list_text(stages: Sequence[Home]) -> str:
    """Stages in words.

    >>> stage_list_text([(None, 1), (None, 2), (None, 3)])
    'stages 1–3'
    >>> stage_list_text([(None, 0), (None, 2)])
    'stages 0, 2'
    >>> stage_list_text([(0, 1), (1, 1), (2, 1)])
    'stage 1 of pipelines 0–2'
    >>> stage_list_text([(0, 0), (1, 0), (1, 1)])
    'stage 0 of pipeline 0, stages 0, 1 of pipeline 1'
    """
    by_pipeline: dict[int | None, list[int]] = {}
    for pipeline, stage in stages:
        by_pipeline.setdefault(pipeline, []).append(stage)
    alike: dict[str, list[int]] = {}
    for pipeline, numbers in by_pipeline.items():
        words = _numbered("stage", numbers)
        alike.setdefault(words, []).extend([] if pipeline is None else [pipeline])
    return ", ".join(
        f"{words} of {_numbered('pipeline', pipelines)}" if pipelines else words
        for words, pipelines in alike.items()
    )


def _numbered(name: str, numbers: Sequence[int]) -> str:
    """Numbers of something in words."""
    if len(numbers) == 1:
        return f"{name} {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    if last - first > 1 and [*numbers] == [*range(first, last + 1)]:
        return f"{name}s {first}–{last}"
    return f"{name}s {', '.join(map(str, numbers))}"


def traffic(plan: PlanData) -> list[TrafficRow]:
    """All traffic of a plan's step, most bytes first; stages that are alike in one row.

    Args:
        plan: Any plan.
    """
    # Of pipelines side by side, what they exchange with each other is the plan's own.
    rows = [] if plan.stage_plans and not plan.pipelines else [*_collectives(plan, ())]
    for number, one in enumerate(plan.pipelines or (plan,)):
        count = plan.shares[number] if plan.pipelines else plan.num_micro_batches
        for stage, own in enumerate(one.stage_plans):
            counted = dataclasses.replace(own, num_micro_batches=count)
            home = number if plan.pipelines else None, stage
            rows += _collectives(counted, (home,))
            rows += _stage_transfer_rows(one, home, count)
    alike: dict[TrafficRow, list[Home]] = {}
    for row in rows:
        plain = dataclasses.replace(row, where=())
        alike.setdefault(plain, []).extend(row.where)
    found = [
        dataclasses.replace(row, where=tuple(where)) for row, where in alike.items()
    ]
    return sorted(found, key=lambda row: -row.nbytes)


def mesh_of(plan: PlanData) -> dict[str, int]:
    """Sizes of a plan's mesh; where stages have their own, ``INSIDE`` stands for it."""
    sizes = plan.axis_sizes
    if not plan.stage_plans:
        return sizes
    outer = {axis: sizes[axis] for axis in ("data", STAGE)[not plan.pipelines :]}
    return outer | {INSIDE: plan.stage_plans[0].num_devices}


def by_sort(plan: PlanData) -> dict[tuple[str, tuple[str, ...], str], TrafficRow]:
    """Returns each sort of traffic of the stages that send most."""
    found: dict[tuple[str, tuple[str, ...], str], TrafficRow] = {}
    for row in traffic(plan):
        found.setdefault(row.sort, row)
    return found


def _collectives(plan: PlanData, where: tuple[Home, ...]) -> Iterator[TrafficRow]:
    """Yields the collectives of one program, folded."""
    found: dict[tuple[str, tuple[str, ...], str], TrafficRow] = {}
    for c in plan.collectives:
        parts = axis_parts(c.axes, mesh_of(plan), plan.cluster)
        times = plan.times(c)
        row = TrafficRow(
            kind=c.kind,
            axes=c.axes,
            what=c.what,
            where=where,
            times=times,
            nbytes=c.payload_bytes * times,
            seconds=collective_seconds(c.kind, c.payload_bytes, parts) * times,
            links=tuple(dict.fromkeys(part.level.name for part in parts)),
        )
        before = found.get(row.sort)
        if before is not None:
            row = dataclasses.replace(
                row,
                times=row.times + before.times,
                nbytes=row.nbytes + before.nbytes,
                seconds=row.seconds + before.seconds,
            )
        found[row.sort] = row
    yield from found.values()


def _stage_transfer_rows(
    plan: PlanData, home: Home, count: int
) -> Iterator[TrafficRow]:
    """Yields the transfers of one stage from and to others in a step.

    Args:
        plan: Plan of the pipeline.
        home: The stage.
        count: Micro-batches.
    """
    assert plan.stages is not None
    parts = axis_parts((STAGE,), mesh_of(plan), plan.cluster)
    paces = plan.stages.paces[home[1] :: len(plan.stage_plans)]
    for what, sizes, times in (
        ("activation", [pace.handed_bytes for pace in paces], count),
        ("gradient", [pace.returned_bytes for pace in paces], count),
        (TIED, [pace.copied_bytes for pace in paces], 1),
        (TIED_GRADIENT, [pace.copied_bytes for pace in paces], 1),
    ):
        if any(sizes):
            moved = [size for size in sizes if size]
            each = [collective_seconds("collective-permute", n, parts) for n in moved]
            yield TrafficRow(
                kind=HANDED,
                axes=(STAGE,),
                what=what,
                where=(home,),
                times=times * len(moved),
                nbytes=times * sum(moved),
                seconds=times * sum(each),
                links=tuple(dict.fromkeys(part.level.name for part in parts)),
            )
