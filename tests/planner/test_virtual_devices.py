"""Whale's virtual devices: in sequence, all of them, stages apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax.meshes.errors import Problems
from whalejax.planner.model.graph import Mark, MarkKind, TaskGraph
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.metadata_constraints import (
    check_devices,
    copies,
)


def mark(kind: MarkKind, devices: int | None = None, **more: str) -> Mark:
    """A mark, as capture reads it."""
    given_ = dict(more) if devices is None else {**more, "devices": str(devices)}
    return Mark(kind=kind, attributes=tuple(sorted(given_.items())))


def region(index: int, *marks: Mark, name: str = "", path: int = 0) -> TaskGraph:
    """A TaskGraph with these marks, outermost first."""
    return TaskGraph(
        index=index,
        marks=marks,
        name=name or f"region{index}",
        path=tuple(path for _ in marks),
    )


def stage(i: int, devices: int | None = None, *inside: Mark) -> TaskGraph:
    """Stage ``i`` of one pipeline, and what is marked in it."""
    marks = (mark("pipeline"), mark("stage", devices, i=str(i)), *inside)
    return region(i + 1, *marks, name=f"stage{i}")


def test_the_figure_of_the_paper_has_two_copies() -> None:
    # Two TaskGraphs of one and two devices on six devices.
    assert copies([stage(0, 1), stage(1, 2)], 6) == 2


def around(devices: int, *widths: int | None) -> list[TaskGraph]:
    """Stages of these widths, in a ``replicate`` around their pipeline."""
    outer = (mark("replicate", devices), mark("pipeline"))
    return [
        region(i, *outer, mark("stage", width, i=str(i)), name=f"s{i}")
        for i, width in enumerate(widths)
    ]


def test_a_count_outside_the_pipeline_is_that_of_all_stages() -> None:
    assert accepted(around(4, None, None), 8)
    assert copies(around(4, None, None), 8) == 2


def test_a_count_outside_the_pipeline_that_its_stages_do_not_make() -> None:
    assert refused(around(4, 1, 1), 8) == (
        "the marks do not fit the devices: 1 problem\n"
        "  1. replicate(devices=4) is around 2 stages, but one copy of the model "
        "takes 2 devices (around them: 4, s0: 1, s1: 1). Give it 2, or leave devices= "
        "out in one of the two"
    )


@pytest.mark.parametrize(
    ("graphs", "stages", "least"),
    [
        ([region(1, mark("replicate"))], 1, 1),
        ([stage(0), stage(1)], 2, 1),
        ([stage(0, 1), stage(1, 1)], 2, 4),
        ([region(1, mark("replicate", 4), mark("pipeline"))], 2, 2),
        ([region(1, mark("pipeline"), mark("split", 2))], 2, 2),
        ([region(1, mark("split", 2))], 2, 2),
        ([region(1, mark("replicate", 2)), region(2, mark("split", 2))], 4, 1),
        ([region(1, mark("replicate", 8), mark("pipeline"), mark("split", 2))], 2, 1),
    ],
)
def test_how_many_copies_there_are_at_least(
    graphs: list[TaskGraph], stages: int, least: int
) -> None:
    assert copies(graphs, 8, stages) == least


@pytest.mark.parametrize(
    ("graphs", "stages", "texts"),
    [
        (
            [region(1, mark("replicate", 4), mark("pipeline"))],
            3,
            ("is around 3 stages", "Use devices=3 or a multiple of it"),
        ),
        (
            [region(1, mark("pipeline"), mark("split", 8))],
            2,
            ("ask for 16 devices (region1: 8, in each of 2 stages), but there are 12",),
        ),
        (
            [region(1, mark("replicate", 6), mark("pipeline"), mark("split", 2))],
            2,
            ("region1 asks for 2 devices inside a stage of 3; 2 does not divide 3",),
        ),
    ],
)
def test_devices_of_stages_that_are_not_marked(
    graphs: list[TaskGraph], stages: int, texts: tuple[str, ...]
) -> None:
    problems = Problems("marks", PlanError)
    check_devices(graphs, 12, problems, stages)
    for text in texts:
        assert text in problems.text()


def test_a_split_inside_a_stage_divides_it() -> None:
    assert accepted([stage(0, 4, mark("split", 2)), stage(1, 4)], 8)
    text = "stage0 asks for 3 devices inside a stage of 4; 3 does not divide 4"
    assert text in refused([stage(0, 4, mark("split", 3)), stage(1, 4)], 8)


def accepted(graphs: list[TaskGraph], num_devices: int) -> bool:
    problems = Problems("the marks do not fit the devices", PlanError)
    check_devices(graphs, num_devices, problems)
    return not problems


def refused(graphs: list[TaskGraph], num_devices: int) -> str:
    """Text of the refusal."""
    problems = Problems("the marks do not fit the devices", PlanError)
    check_devices(graphs, num_devices, problems)
    return problems.text()


def test_more_devices_than_there_are() -> None:
    assert refused([region(1, mark("split", 16), name="split")], 8) == (
        "the marks do not fit the devices: 1 problem\n"
        "  1. the marks ask for 16 devices (split: 16), but there are 8. Lower the "
        "counts, or leave devices= out to use all"
    )


def test_a_sum_that_does_not_divide() -> None:
    assert refused([stage(0, 1), stage(1, 2)], 8) == (
        "the marks do not fit the devices: 1 problem\n"
        "  1. one model replica takes 3 devices (stage0: 1, stage1: 2), which does not "
        "divide 8. Counts that do: 1, 2, 4, 8"
    )


def test_every_problem_is_listed() -> None:
    marks = [region(1, mark("split", 6)), region(2, mark("split", 4), name="other")]
    assert refused(marks, 8) == (
        "the marks do not fit the devices: 2 problems\n"
        "  1. one model replica takes 6 devices (region1: 6, other: 4), which does not "
        "divide 8. Counts that do: 1, 2, 4, 8\n"
        "  2. other asks for 4 devices inside a model replica of 6; 4 does not divide "
        "6. Counts that do: 1, 2, 3, 6"
    )


@settings(max_examples=60)
@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    replicas=st.integers(1, 4),
)
def test_devices_over_those_of_all_stages_are_copies(
    widths: list[int], replicas: int
) -> None:
    num_devices = sum(widths) * replicas
    graphs = [stage(i, width) for i, width in enumerate(widths)]
    assert accepted(graphs, num_devices)
    assert copies(graphs, num_devices) == replicas


@settings(max_examples=60)
@given(
    counts=st.lists(st.sampled_from([None, 1, 2, 4, 8]), min_size=1, max_size=4),
    factor=st.sampled_from([8, 16, 24]),
)
def test_regions_on_the_same_devices_take_those_of_the_largest(
    counts: list[int | None], factor: int
) -> None:
    graphs = [region(i, mark("split", n)) for i, n in enumerate(counts)]
    assert accepted(graphs, factor)
    largest = max((n for n in counts if n is not None), default=factor)
    assert copies(graphs, factor) == factor // largest
