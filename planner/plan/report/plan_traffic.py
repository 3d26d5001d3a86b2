"""Lists what a plan's devices send each other in a step, by kind of traffic.

With stage programs, each stage has collectives of its own and also transfers values to
the stages that read them. The plan's own ``collectives`` are those of one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.plan_data import PlanData
from whalejax.planner.sharding.layout import STAGE


Home = tuple[int | None, int]
"""Stage, as (number of its pipeline, number of the stage). The first is None without
parallel pipelines.
"""

Sort = tuple[str, tuple[str, ...], str]
"""Kind of collective, mesh axes and contents."""

INSIDE = "inside"
"""Name of the axis that stands for all devices of a stage, in a mesh of stages."""

HANDED = "hand-over"
"""Kind of the transfers between stage programs."""


TIED, TIED_GRADIENT = "tied parameter", "tied gradient"
"""Contents of transfers once per step: parameters that several stages read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Traffic of one kind, on one device.

    Attributes:
        kind: Kind of collective, or ``HANDED``.
        axes: Mesh axes of the collective.
        what: Contents such as ``"gradient"``, ``"parameter"``, ``"activation"``.
        where: Stages with this traffic; empty for one program.
        times: Number of transfers in a step.
        nbytes: Payload bytes of all transfers.
        seconds: Seconds on the links; computation may hide part of them.
        links: Names of the links that the traffic crosses.
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
    def sort(self) -> Sort:
        """Key of the same kind of traffic on other stages."""
        return self.kind, self.axes, self.what

    @property
    def route_text(self) -> str:
        """Text of the mesh axes and stages."""
        where = stage_list_text(self.where)
        if self.kind == HANDED:
            back = self.what in ("gradient", TIED_GRADIENT)
            return f"{'back from' if back else 'to'} {where}"
        axes = "+".join(self.axes)
        return f"{axes} in {where}" if where else axes


def stage_list_text(stages: Sequence[Home]) -> str:
    """Returns the text that lists some stages.

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
    if len(numbers) == 1:
        return f"{name} {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    if last - first > 1 and [*numbers] == [*range(first, last + 1)]:
        return f"{name}s {first}–{last}"
    return f"{name}s {', '.join(map(str, numbers))}"


def traffic(plan: PlanData) -> list[TrafficRow]:
    """Returns the traffic of a plan's step, most bytes first; equal stages share a row.

    Args:
        plan: The plan, of any kind.
    """
    # The collectives of parallel pipelines are the exchange between pipelines.
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
    """Returns a plan's mesh sizes, with ``INSIDE`` for the axes inside stages."""
    sizes = plan.axis_sizes
    if not plan.stage_plans:
        return sizes
    outer = {axis: sizes[axis] for axis in ("data", STAGE)[not plan.pipelines :]}
    return outer | {INSIDE: plan.stage_plans[0].num_devices}


def by_sort(plan: PlanData) -> dict[Sort, TrafficRow]:
    """Returns each kind of traffic, from the stages that send most of it."""
    found: dict[Sort, TrafficRow] = {}
    for row in traffic(plan):
        found.setdefault(row.sort, row)
    return found


def _collectives(plan: PlanData, where: tuple[Home, ...]) -> Iterator[TrafficRow]:
    found: dict[Sort, TrafficRow] = {}
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
