"""Checks requested shares, and compares the samples that devices compute at a time.

``num_micro_batches`` divides the global batch. With shares, each replica computes whole
micro-batches. Without shares, all replicas divide each micro-batch. So with one fixed
number, a device may compute more samples at a time on one cluster than on another, and
more efficiently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from whalejax.meshes.units import count_text
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import STAGE


DATA = "data"


def check_shares(
    graph: Graph,
    request: Request,
    asked: Sequence[int],
    *,
    num_devices: int,
    stages: int = 1,
) -> None:
    """Refuses shares that the devices, the batch or other options do not allow.

    Args:
        graph: Captured loss.
        request: Other options of the search.
        asked: Micro-batches of each replica, or of each pipeline.
        num_devices: Number of devices of the full mesh.
        stages: Number of stages of each pipeline; default: 1, for replicas without
            stages.

    Raises:
        PlanError: The shares are not counts, do not divide the devices or the batch, or
            contradict the mesh or the number of micro-batches.
    """
    one = "replica" if stages == 1 else "pipeline"
    data, size = dict(request.mesh or {}).get(DATA), graph.batch_size
    size *= graph.num_micro_batches
    count = request.num_micro_batches
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in asked):
        raise PlanError(
            f"shares is {list(asked)!r:.80}; expected whole numbers of micro-batches, "
            f"0 or more, one for each {one}"
        )
    equal = f"equal {one}s" if stages == 1 else f"{one}s of {stages} equal stages"
    wrong = ""
    if data not in (None, len(asked)):
        wrong = f"mesh asks for data {data}"
    elif num_devices % (len(asked) * stages):
        wrong = f"{num_devices} devices do not divide into {len(asked)} {equal}"
    if wrong:
        raise PlanError(
            f"shares has {count_text(len(asked), 'entry')}; {wrong}. Give one number "
            f"for each {one}, or leave them to the planner (shares=None)"
        )
    total = sum(asked)
    if total == 0 or size % total or count not in (None, total):
        raise PlanError(
            f"shares add up to {count_text(total, 'micro-batch')}; the batch has "
            f"{count_text(size, 'sample')}"
            + ("" if count is None else f", and num_micro_batches is {count}")
            + f". Let them add up to {count or 'a divisor of the batch'}"
        )


@contextlib.contextmanager
def said_of(what: str) -> Iterator[None]:
    """Returns a context that adds a prefix to the errors of its body.

    Args:
        what: Text of the prefix, such as the devices to which the body applies.

    Raises:
        PlanError: The body raised one; the message has the prefix.
    """
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{what}: {error}") from None


P = TypeVar("P", bound=PlanData)


def samples_at_a_time(plan: PlanData) -> float:
    """Returns the work that one device does at a time, in samples of its stage.

    Devices divide the samples of a micro-batch, or the work of each sample. If four
    devices of ``tensor`` compute four samples, each does the work of one.

    Args:
        plan: Plan whose batch leaves have the samples in dimension 0.
    """
    mesh = dict(plan.axis_sizes)
    for one in plan.stage_plans[:1]:
        mesh |= one.axis_sizes
    alone = {STAGE, DATA} if plan.shares else {STAGE}
    ranks = math.prod(size for axis, size in mesh.items() if axis not in alone)
    size = plan.batch[0].shape[0] if plan.batch and plan.batch[0].shape else 0
    return size / (plan.num_micro_batches * ranks)


def unlike_note(asked: int, samples: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the note that one number of micro-batches means several sizes.

    Args:
        asked: Requested number of micro-batches.
        samples: Samples per device at a time, by name of the cluster.

    Returns:
        The note, or nothing if the samples are equal on all clusters.

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
        f"{', '.join(words)}. To compare step times, leave it out, or give each "
        "cluster its own number",
    )


def with_samples_note(before: PlanData, after: P, changes: Mapping[str, Any]) -> P:
    """Returns a plan for another cluster, with ``unlike_note`` where it applies.

    Args:
        before: Original plan.
        after: Plan with the changes.
        changes: Requested changes.
    """
    asked = getattr(before.question, "num_micro_batches", None)
    if asked is None or "cluster" not in changes or "num_micro_batches" in changes:
        return after
    samples = {
        before.cluster.describe(): samples_at_a_time(before),
        after.cluster.describe(): samples_at_a_time(after),
    }
    return dataclasses.replace(after, notes=after.notes + unlike_note(asked, samples))
