"""What a plan for unlike devices says of its shares: who takes how much, and the gain.

Every figure is one that the search chose by. Shares are set against even ones, and
against the most that any shares could gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whalejax.planner.balance.shares import (
    Balance,
    Device,
    even_shares,
    gain_words,
    shares,
)
from whalejax.planner.plan_data import PlanData
from whalejax.planner.search.batched.cases import Cases, Model, Placement
from whalejax.planner.search.batched.mesh_grid import Frames
from whalejax.planner.search.batched.partition import (
    ends,
    pace_of,
    stage_layers,
    stage_pace,
)
from whalejax.planner.search.batched.replicas import ReplicaCases


def share_notes(model: Model, frames: Frames, placement: Placement) -> Iterator[str]:
    """Lines on the shares of one case.

    Args:
        model: of the search.
        frames: one row.
        placement: kinds of devices.
    """
    kinds = model.cluster.kinds
    if len(kinds) == 1:
        return
    if placement.by == "replicas":
        found = _replicas(model, frames, placement)
        yield f"replicas take unequal numbers of micro-batches: {found.words()}"
    elif placement.by == "stages":
        yield _stages(model, frames, placement)
    else:
        slowest = model.cluster.slowest.display_name()
        yield (
            f"all devices have equal shares, and {slowest} sets the pace: unequal ones "
            "were weighed and are slower, do not fit, or do not divide the batch, the "
            "layers or the devices"
        )


def split_notes(plan: PlanData) -> list[str]:
    """Why shards of a split are even on unlike devices, where anything is split.

    Args:
        plan: for devices of one or of several kinds.
    """
    every = [plan, *(own for one in plan.pipelines or (plan,) for own in one.apart)]
    if plan.cluster.is_uniform or all(
        one.axis_sizes.get("tensor", 1) == 1 for one in every
    ):
        return []
    return [
        "split: shards are even over tensor. Uneven ones are not planned: programs of "
        "unlike devices are compiled apart and cannot share the collectives inside a "
        "layer, and one program stores every shard as large as the largest"
    ]


def _replicas(model: Model, frames: Frames, placement: Placement) -> Balance:
    """Micro-batches of every replica, by the paces that the search found."""
    found = ReplicaCases(model, frames, placement)
    devices = []
    for kind, cases, number in zip(
        placement.kinds, found.kinds, found.numbers, strict=True
    ):
        name = model.cluster.kinds[kind].name
        one = Device(name=name, seconds=float(pace_of(cases)[0]))
        devices += [one] * int(number[0])
    total = int(frames.micro_batches[0])
    return Balance(
        devices=tuple(devices),
        pieces=shares(total, [d.seconds for d in devices]),
        even=even_shares(total, len(devices)),
    )


def _stages(model: Model, frames: Frames, placement: Placement) -> str:
    """Layers of the stages on each kind, and what equal layers would take."""
    cases = Cases(model, frames, placement, None)
    pace = float(pace_of(cases)[0])
    layers = stage_layers(cases, np.zeros(1, dtype=np.int64))[:, 0]
    held = stage_kinds(cases)
    each = []
    for kind in dict.fromkeys(held):
        counts = [int(n) for n, k in zip(layers, held, strict=True) if k == kind]
        low, high = min(counts), max(counts)
        span = f"{low}–{high}" if low < high else f"{high}"
        each.append(f"{span} on {model.cluster.kinds[kind].name}")
    even = max(even_shares(model.layers, len(held)))
    for g in cases.groups:
        g.layers = np.where(g.count > 0, float(even), 0.0)
    equal = float(stage_pace(cases)[0][0])
    words = gain_words(equal / pace, equal / _ideal_pace(cases))
    words = words.replace("even shares", "equal layers")
    return f"stages have {', '.join(each)} of {model.layers} layers: {words}"


def _ideal_pace(cases: Cases) -> float:
    """Seconds at which all stages would be done together, were layers divisible."""
    speed, work = 0.0, float(cases.model.layers)
    for group in cases.groups:
        if group.count[0]:
            layer, alone = (float(x[0]) for x in ends(cases, group))
            speed += float(group.count[0]) / layer
            work += float(group.count[0]) * alone / layer
    return work / speed


def stage_kinds(cases: Cases) -> Sequence[int]:
    """The kind of device of every stage of the first case."""
    held = []
    for stage in range(int(cases.frames.stage[0])):
        for group in cases.groups:
            if group.index[0] <= stage < group.index[0] + group.count[0]:
                held.append(group.kind)
    return held
