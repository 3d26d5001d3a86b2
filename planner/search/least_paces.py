"""A lower bound on the seconds of a micro-batch, by the number of micro-batches.

Pipelines are searched for each number of micro-batches; numbers with which none can be
fast enough are left out.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from whalejax.meshes.units import milliseconds
from whalejax.planner.errors import NotFaster
from whalejax.planner.search.enumerate import Search
from whalejax.planner.search.spmd import SLACK


def least_paces(search: Search, counts: Collection[int]) -> dict[int, float]:
    """Least seconds of a micro-batch in any layout, whether memory holds it or not.

    Plans that shard the sequence beside ``tensor`` are bounded by those that do not.

    Args:
        search: Search of the program that computes nothing again.
        counts: Numbers of micro-batches.

    Returns:
        Seconds by number of micro-batches; 0 where no layout has that number, which
        the search for it says why.
    """
    found = dict.fromkeys(counts, 0.0)
    cases = search.at_every_count({search.request.num_devices: counts})
    if not len(cases):
        return found
    times = search.evaluator.times(cases)
    pace = (times.step - times.terms["update"]) / cases.count
    pace = np.where(cases.mesh["tensor"] > 1, pace / SLACK, pace)
    for count in found:
        some = pace[cases.count == count]
        found[count] = float(some.min()) if len(some) else 0.0
    return found


def not_faster(stages: int, known_seconds: float) -> NotFaster:
    """That no plan of so many stages is faster than one that is known.

    Args:
        stages: Number of stages.
        known_seconds: Seconds of a step in the known plan.
    """
    known = milliseconds(known_seconds)
    return NotFaster(f"stage {stages}: no plan takes less than {known} a step")
