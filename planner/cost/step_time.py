"""The time of a step of one program: its terms, and the collectives as they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from whalejax.meshes.fitted_constants import WHOLE, constants
from whalejax.planner.cost.adasum import within_ranks
from whalejax.planner.cost.operation_cost import RowCost, Setting, as_run
from whalejax.planner.cost.optimizer_step import (
    combined_gradients,
    storage_collectives,
    turning_seconds,
    update_seconds,
    whole_shares,
)
from whalejax.planner.entries import Collective
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafLayout
from whalejax.planner.terms import TimeTerms


def step_time(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    costs: Sequence[RowCost],
    s: Setting,
    *,
    zero: int,
    count: int,
    cast_bytes: float,
    apart: Sequence[Collective] | None = None,
) -> tuple[TimeTerms, tuple[Collective, ...]]:
    """Predict a step.

    Args:
        facts: the parameters.
        layouts: of each of their groups.
        costs: of the rows, in one micro-batch.
        s: mesh and cluster.
        zero: ZeRO level over ``data``.
        count: micro-batches of a step.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
        apart: by which ranks of ``data`` combine in the update; their gradients,
            losses and statistics then are reduced over other axes alone. None where
            all are reduced at once.

    Returns:
        The terms, and every collective as the compiler runs it.
    """
    storage = storage_collectives(facts, layouts, s, cast_bytes)
    found = [c for cost in costs for c in cost.collectives]
    if apart is not None:
        found = within_ranks(found)
    gradients = [c for c in found if c.what == "gradient"]
    whole = whole_shares(facts, layouts, s, cast_bytes)
    asked = [
        *(c for c in found if c.what != "gradient"),
        *storage.in_micro_batch,
        *combined_gradients(gradients, zero, s.mesh, s.cluster, *whole),
        *(apart or ()),
        *storage.in_update,
    ]
    run = []
    seconds: dict[str, float] = defaultdict(float)
    for collective in asked:
        c, once = as_run(collective, s)
        run.append(c)
        # What meets in the update has no computation to hide behind.
        late = c.phase == "update" and c.what in ("gradient", "moments")
        name = "combined" if late else c.what
        seconds[name] += once * c.times(count) / c.count
    seconds["parameter"] += turning_seconds(facts, layouts, s, cast_bytes, count)
    # On the CPU all devices share the cores, and nothing hides.
    hidden = constants().platforms.get(s.cluster.platform, WHOLE)
    launches = sum(cost.launches for cost in costs) * count
    terms = TimeTerms(
        compute_seconds=sum(cost.compute_seconds for cost in costs) * count,
        launch_seconds=launches * s.cluster.slowest.launch_seconds,
        gradient_seconds=seconds["gradient"] * (1 - hidden.overlap_gradients)
        + seconds["combined"],
        parameter_seconds=seconds["parameter"] * (1 - hidden.overlap_parameters),
        activation_seconds=seconds["activation"]
        + _exposed(seconds["ring"], costs, s, count),
        border_seconds=seconds["border"] + seconds["halo"],
        update_seconds=update_seconds(facts, layouts, s.cluster, s),
    )
    return terms, tuple(run)


def _exposed(
    ring_seconds: float, costs: Sequence[RowCost], s: Setting, count: int
) -> float:
    """What of a ring's rounds takes longer than what is computed meanwhile."""
    if s.cluster.platform == "cpu":
        return ring_seconds
    covered = sum(cost.covers_seconds for cost in costs) * count
    return max(0.0, ring_seconds - covered)
