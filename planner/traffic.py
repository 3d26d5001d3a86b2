"""What a plan's devices send each other in a step, by sort.

Stages with programs of their own have collectives of their own, and hand on what the
next ones read; a plan's own ``collectives`` are those of one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whalejax.planner.collectives import axis_parts, collective_seconds


if TYPE_CHECKING:
    from whalejax.planner.plan import Plan


HANDED = "hand-over"
"""The kind of what stages with programs of their own give each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One sort of it, on one device.

    Attributes:
        kind: of collective, or ``HANDED``.
        axes: mesh axes that it runs over.
        what: such as ``"gradient"``, ``"parameter"``, ``"activation"``.
        where: the stages; none where all devices run one program.
        times: in a step.
        nbytes: payload of all of these.
        seconds: on the links; part of it may be hidden behind computing.
        links: names of the links that it crosses.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    where: tuple[str, ...] = ()
    times: int
    nbytes: int
    seconds: float
    links: tuple[str, ...]

    @property
    def sort(self) -> tuple[str, tuple[str, ...], str]:
        """What makes it the same on other stages."""
        return self.kind, self.axes, self.what

    @property
    def over(self) -> str:
        """Mesh axes and stages in words."""
        where = listed(self.where)
        if self.kind == HANDED:
            return f"{'to' if self.what == 'activation' else 'back from'} {where}"
        axes = "+".join(self.axes)
        return f"{axes} in {where}" if where else axes


def listed(stages: Sequence[str]) -> str:
    """Stages in words.

    >>> listed(["stage 1", "stage 2", "stage 3"]), listed(["stage 0", "stage 2"])
    ('stages 1–3', 'stages 0, 2')
    >>> listed(["pipeline 0 stage 0", "pipeline 1 stage 0"])
    'pipeline 0 stage 0, pipeline 1 stage 0'
    """
    numbers = [name.removeprefix("stage ") for name in stages]
    if len(stages) < 2 or not all(number.isdigit() for number in numbers):
        return ", ".join(stages)
    first, last = int(numbers[0]), int(numbers[-1])
    in_a_row = [int(n) for n in numbers] == [*range(first, last + 1)]
    text = f"{first}–{last}" if in_a_row and last > first + 1 else ", ".join(numbers)
    return f"stages {text}"


def traffic(plan: Plan) -> list[Traffic]:
    """All traffic of a plan's step, most bytes first; stages that are alike in one row.

    Args:
        plan: any plan.
    """
    rows = [] if plan.apart and not plan.pipelines else [*_collectives(plan, plan, "")]
    for number, one in enumerate(plan.pipelines or (plan,)):
        count = plan.shares[number] if plan.pipelines else plan.num_micro_batches
        within = f"pipeline {number} " if plan.pipelines else ""
        for stage, own in enumerate(one.apart):
            counted = dataclasses.replace(own, num_micro_batches=count)
            rows += _collectives(counted, own, f"{within}stage {stage}")
            rows += _handed(one, stage, count, f"{within}stage {stage}")
    alike: dict[Traffic, list[str]] = {}
    for row in rows:
        plain = dataclasses.replace(row, where=())
        alike.setdefault(plain, []).extend(row.where)
    found = [
        dataclasses.replace(row, where=tuple(where)) for row, where in alike.items()
    ]
    return sorted(found, key=lambda row: -row.nbytes)


def by_sort(plan: Plan) -> dict[tuple[str, tuple[str, ...], str], Traffic]:
    """Of each sort of traffic, that of the stages which send most."""
    found: dict[tuple[str, tuple[str, ...], str], Traffic] = {}
    for row in traffic(plan):
        found.setdefault(row.sort, row)
    return found


def _collectives(plan: Plan, home: Plan, where: str) -> Iterator[Traffic]:
    """Of one program, folded."""
    found: dict[tuple[str, tuple[str, ...], str], Traffic] = {}
    for c in plan.collectives:
        parts = axis_parts(c.axes, home.axis_sizes, home.cluster)
        times = plan.times(c)
        row = Traffic(
            kind=c.kind,
            axes=c.axes,
            what=c.what,
            where=(where,) if where else (),
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


def _handed(plan: Plan, stage: int, count: int, where: str) -> Iterator[Traffic]:
    """What one stage is handed by others in a step, and hands back.

    Args:
        plan: of the pipeline.
        stage: its number.
        count: micro-batches.
        where: its name.
    """
    assert plan.stages is not None
    mesh = plan.axis_sizes | {"inside": plan.apart[0].num_devices}
    parts = axis_parts(("stage",), mesh, plan.cluster)
    paces = plan.stages.paces[stage :: len(plan.apart)]
    for what, sizes in (
        ("activation", [pace.handed_bytes for pace in paces]),
        ("gradient", [pace.returned_bytes for pace in paces]),
    ):
        if any(sizes):
            each = [collective_seconds("collective-permute", n, parts) for n in sizes]
            yield Traffic(
                kind=HANDED,
                axes=("stage",),
                what=what,
                where=(where,),
                times=count * sum(size > 0 for size in sizes),
                nbytes=count * sum(sizes),
                seconds=count * sum(each),
                links=tuple(dict.fromkeys(part.level.name for part in parts)),
            )
