"""Pictures of plans whose pipelines lie side by side and take unlike shares."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from functools import cache

import whalejax as wh
from tests.whalejax.test_displays import checked, html_of, shape, unrolled
from whalejax.meshes.units import gigabytes


@cache
def beside() -> wh.Plan:
    """Two pipelines of two stages side by side, with three and five micro-batches."""
    return wh.plan(
        unrolled,
        {"layers": [shape(512, 512)] * 4, "head": shape(512, 4096)},
        shape(256, 512),
        cluster="v100-32:2+p100-16:1+v100-32:1",
        mesh={"stage": 2},
        shares=(3, 5),
    )


def test_pipelines_side_by_side_have_lanes_of_their_own() -> None:
    plan = beside()
    line = plan.timeline()
    checked(html_of(line))
    names = ["0: stage 0", "0: stage 1", "1: stage 0", "1: stage 1"]
    assert [*line.lanes] == [*plan.memory_chart().bars] == names
    assert "2 pipelines of 2 stages, 3 and 5 micro-batches: 32 rows" in str(line)
    for lane, numbers in enumerate([range(3), range(3), range(3, 8), range(3, 8)]):
        seen = Counter(s.micro_batch for s in line.slices if s.lane == lane)
        assert seen == dict.fromkeys(numbers, 2)
    time, last = plan.time, plan.pipelines[1].time
    once = time.gradient_seconds - last.gradient_seconds + last.update_seconds
    assert line.end_seconds + once <= time.step_seconds * 1.001
    assert line.end_seconds >= 0.5 * time.step_seconds
    idle = dataclasses.replace(plan, shares=(0, 8)).timeline()
    assert {s.lane for s in idle.slices} == {2, 3} and idle.bubble > 0.5
    assert "0: stage 0: busy 0 ms (0.0%)" in str(idle)


def test_memory_of_pipelines_side_by_side_counts_what_crosses() -> None:
    plan = beside()
    most = max(terms.total_bytes for terms, _ in plan.memory_chart().bars.values())
    assert most == plan.memory.total_bytes
    first = plan.pipelines[0].stage_plans[0].memory
    shown, _ = plan.memory_chart().bars["0: stage 0"]
    assert shown.total_bytes == first.total_bytes + first.gradients_bytes > 0


def test_every_pipeline_holds_a_copy() -> None:
    plan = beside()
    for path, stage in (("layers.0", 0), ("head", 1)):
        found = plan.device_map(path)
        assert [*found.parts.values()] == [[stage, 2 + stage]]
        assert "each on 2 of 4 devices" in str(found)


def test_pipelines_side_by_side_are_named_by_all_their_kinds() -> None:
    text = str(beside())
    assert "pipeline 0 (V100-32) 3 · pipeline 1 (P100-16 and V100-32) 5" in text
    (row,) = [line for line in text.splitlines() if line.startswith("head ")]
    assert row.endswith("all-reduce over data") and "8 all-reduce" not in row


def test_text_shows_every_pipeline() -> None:
    plan = beside()
    assert "lies on stage 1" in plan.why("head") and "pipeline" not in plan.why("head")
    first, second = plan.pipelines
    places = {
        leaf.path: tuple(
            [
                leaf.path in [x.path for x in own.leaves] for own in one.stage_plans
            ].index(True)
            for one in (first, second)
        )
        for leaf in plan.leaves
    }
    for path, (one, other) in places.items():
        words = f"stage {one} of pipeline 0 and stage {other} of pipeline 1"
        assert (words if one != other else f"stage {one}") in plan.why(path)
    text = str(plan)
    for pipeline, one in enumerate(plan.pipelines):
        for stage, own in enumerate(one.stage_plans):
            memory, _ = plan.memory_chart().bars[f"{pipeline}: stage {stage}"]
            (row,) = re.findall(rf"^{pipeline} +{stage} +(.*)$", text, re.MULTILINE)
            assert row.startswith(own.cluster.kinds[0].display_name())
            assert row.endswith(gigabytes(memory.total_bytes))
    assert "its stage is one device" in text and "there is one device" not in text
    spare = plan.room_bytes - plan.memory.total_bytes
    assert f"{gigabytes(spare)} to spare" in plan.explain()
    checked(html_of(plan))


def test_the_fullest_device_is_that_with_least_to_spare() -> None:
    plan = beside()
    smaller = dataclasses.replace(
        plan.pipelines[1].stage_plans[0],
        memory=dataclasses.replace(
            plan.pipelines[1].stage_plans[0].memory, params_bytes=10**9
        ),
    )
    stages = plan.pipelines[1].stages
    assert stages is not None
    stages = dataclasses.replace(stages, plans=(smaller, *stages.plans[1:]))
    first, second = plan.pipelines
    plan = dataclasses.replace(
        plan, pipelines=(first, dataclasses.replace(second, stages=stages))
    )
    chart = plan.memory_chart()
    shares = {name: m.total_bytes / room for name, (m, room) in chart.bars.items()}
    assert f"fullest on {max(shares, key=lambda name: shares[name])}" in str(chart)
