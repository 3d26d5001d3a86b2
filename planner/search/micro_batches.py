"""Samples that a device takes at a time, and a note where plans differ in them.

``num_micro_batches`` cuts the global batch. What a device then takes at a time depends
on the plan: where replicas have shares each takes whole micro-batches, elsewhere all of
them share every one. Plans that were asked for with one fixed number on several
clusters may so differ in what a device does at once, and in how fast it can do it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from whalejax.planner.plan_data import PlanData
from whalejax.planner.search.user_shares import DATA
from whalejax.planner.sharding.layout import STAGE


P = TypeVar("P", bound=PlanData)


def samples_at_a_time(plan: PlanData) -> float:
    """The work that one device does at once, in samples of its stage.

    Devices share the samples of a micro-batch, or each sample's work: a device of four
    under ``tensor`` that see four samples does the work of one.

    Args:
        plan: The batch is dimension 0 of its leaves.
    """
    mesh = dict(plan.axis_sizes)
    for one in plan.stage_plans[:1]:
        mesh |= one.axis_sizes
    alone = {STAGE, DATA} if plan.shares else {STAGE}
    ranks = math.prod(size for axis, size in mesh.items() if axis not in alone)
    size = plan.batch[0].shape[0] if plan.batch and plan.batch[0].shape else 0
    return size / (plan.num_micro_batches * ranks)


def unlike_note(asked: int, samples: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the note on a number of micro-batches that means several sizes.

    Args:
        asked: The number.
        samples: Samples per micro-batch and device, by the name of the cluster.

    Returns:
        One note, or none where all are alike.

    >>> unlike_note(8, {"a": 4.0, "b": 4.0})
    ()
    >>> (note,) = unlike_note(8, {"a": 4.0, "b": 16.0, "c": 4.0})
    >>> print(note.partition(" of ")[0])
    num_micro_batches=8 is not the same everywhere: a device does the work
    """
    if len(set(samples.values())) < 2:
        return ()
    words: list[str] = []
    for size in sorted(set(samples.values())):
        names = [name for name, its in samples.items() if its == size]
        what = f"{size:g}" if words else f"the work of {size:g} samples at a time"
        words.append(f"{what} on {' and '.join(names)}")
    return (
        f"num_micro_batches={asked} is not the same everywhere: a device does "
        f"{', '.join(words)}. Leave it out, or give each cluster a number of its own, "
        "to compare step times",
    )


def with_samples_note(before: PlanData, after: P, changes: Mapping[str, Any]) -> P:
    """A plan on another cluster, with what is to be said of its micro-batches.

    Args:
        before: The plan that was asked what would be.
        after: The answer.
        changes: Changes that were asked for.
    """
    asked = getattr(before.question, "num_micro_batches", None)
    if asked is None or "cluster" not in changes or "num_micro_batches" in changes:
        return after
    samples = {
        before.cluster.describe(): samples_at_a_time(before),
        after.cluster.describe(): samples_at_a_time(after),
    }
    return dataclasses.replace(after, notes=after.notes + unlike_note(asked, samples))
