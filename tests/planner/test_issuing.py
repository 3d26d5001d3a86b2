"""One list of rows and hand-overs, through which any number of processes can go."""

from __future__ import annotations

import itertools

import pytest

from whalejax.planner.pipeline.schedules import Action, Schedule, ScheduleRow, schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.pipeline.transfer_order import ScheduledTransfer, issue_order


SIZES = [
    ("gpipe", 2, 3, 1),
    ("1f1b", 2, 8, 1),
    ("1f1b", 4, 6, 1),
    ("1f1b-ahead", 3, 5, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 4, 8, 3),
    ("zb-h1", 4, 8, 1),
]


def pairs(table: Schedule, *, skips: bool = False) -> list[tuple[int, int]]:
    """Neighbours; with skips, the first part and the last as well."""
    last = table.num_places - 1
    found = [*itertools.pairwise(range(table.num_places))]
    return [*found, (0, last)] if skips and (0, last) not in found else found


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_everything_stands_once_and_behind_what_it_needs(
    size: tuple[str, int, int, int], skips: bool
) -> None:
    table = schedule(*size)
    ahead = pairs(table, skips=skips)
    back = [(b, a) for a, b in ahead]
    places = table.num_places
    seconds: dict[Action, list[float]] = {
        action: [1.0 + p % 3 for p in range(places)] for action in table.actions
    }
    order = issue_order(table, ahead, back, seconds)
    rows = [event for event in order if isinstance(event, ScheduleRow)]
    handings = [event for event in order if isinstance(event, ScheduledTransfer)]
    assert sorted(map(table.key, rows)) == sorted(map(table.key, table.rows))
    for stage in range(table.num_stages):
        assert tuple(r for r in rows if r.stage == stage) == table.of_stage(stage)
    assert len(set(handings)) == len(handings)
    assert len(handings) == 2 * len(ahead) * table.num_micro_batches
    at = {
        e if isinstance(e, ScheduledTransfer) else table.key(e): n
        for n, e in enumerate(order)
    }
    for handing in handings:
        source, target = (
            at[place, handing.micro_batch, handing.action]
            for place in (handing.source, handing.target)
        )
        assert source < at[handing] < target


def test_hand_overs_stand_where_both_sides_have_time() -> None:
    """The second forward is handed on before the long row that begins with it."""
    table = schedule("1f1b", 2, 3)
    seconds: dict[Action, list[float]] = {"forward": [1.0, 1.0], "backward": [2.0, 2.0]}
    order = issue_order(table, [(0, 1)], [(1, 0)], seconds)
    second = ScheduledTransfer(micro_batch=1, source=0, target=1, action="forward")
    rows = [
        (r.stage, r.micro_batch, r.action) for r in order if isinstance(r, ScheduleRow)
    ]
    before = [e for e in order[: order.index(second)] if isinstance(e, ScheduleRow)]
    assert len(before) == rows.index((1, 0, "backward"))
    assert simulate(table, seconds["forward"], seconds["backward"]).step_seconds == 12.0


def test_hand_overs_in_a_circle_are_seen() -> None:
    table = schedule("gpipe", 2, 1)
    seconds: dict[Action, list[float]] = {"forward": [1.0, 1.0], "backward": [1.0, 1.0]}
    with pytest.raises(ValueError, match="cycle"):
        issue_order(table, [(0, 1), (1, 0)], [], seconds)
