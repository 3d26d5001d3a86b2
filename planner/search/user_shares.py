"""Checks of the shares that a user requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from whalejax.planner.model.graph import Graph
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.request import Request


DATA = "data"


def check_shares(
    graph: Graph,
    request: Request,
    asked: Sequence[int],
    *,
    num_devices: int,
    stages: int = 1,
) -> None:
    """Checks requested shares.

    Args:
        graph: Captured loss.
        request: Other options of the search.
        asked: Micro-batches of each replica, or of each pipeline.
        num_devices: Number of devices of the full mesh.
        stages: Number of stages of each pipeline; 1 for replicas without stages.

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
        wrong = f"{num_devices} devices make no {len(asked)} {equal}"
    if wrong:
        raise PlanError(
            f"shares has {len(asked)} entries; {wrong}. Give one number for each "
            f"{one}, or leave them to the planner (shares=None)"
        )
    total = sum(asked)
    if total == 0 or size % total or count not in (None, total):
        raise PlanError(
            f"shares add up to {total} micro-batches; the batch has {size} samples"
            + ("" if count is None else f", and num_micro_batches is {count}")
            + f". Let them add up to {count or 'a divisor of the batch'}"
        )


@contextlib.contextmanager
def said_of(what: str) -> Iterator[None]:
    """Adds a prefix to plan errors that concern only a part of the devices.

    Args:
        what: Text that names the part.

    Raises:
        PlanError: The body raised it; the message gets the prefix.
    """
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{what}: {error}") from None
