"""What searches share is what each of them would have found alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.planner.graphs import gpt
from tests.planner.one_layout import layout_shard_counts
from tests.planner.plans import WIDE, search_of
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.evaluator import StepLayout
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.spmd_search import decided_on
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import lay_out
from whalejax.planner.sharding.sequence_parallel import (
    SequenceSplit,
    split_between,
)


LAYERS = 3


@pytest.fixture(scope="module", name="plain")
def _plain() -> Search:
    graph = gpt(LAYERS, WIDE)
    return search_of(graph, analyse(graph), num_micro_batches=1)


@pytest.fixture(scope="module", name="splits")
def _splits(plain: Search) -> list[SequenceSplit]:
    sets = [frozenset(choice) for choice in plain.options.choices[0].sets]
    assert len(sets) > 1
    return [*map(plain.program.splits.of, sets)]


def beside(plain: Search, split: SequenceSplit) -> Search:
    return Search(
        split.graph,
        plain.dims,
        plain.cluster,
        plain.request,
        beside=plain,
        split=split,
    )


def alone(plain: Search, split: SequenceSplit) -> Search:
    return Search(split.graph, plain.dims, plain.cluster, plain.request)


def mesh(**axes: int) -> dict[str, int]:
    names = ("data", "fsdp", "expert", "context", "tensor")
    return {**dict.fromkeys(names, 1), **axes}


def test_each_of_several_splits_is_the_one_that_stands_alone(
    plain: Search, splits: list[SequenceSplit]
) -> None:
    for split in splits:
        assert split == split_between(plain.graph, plain.dims, split.shared)
    homes = {tuple(op.task_graph for op in split.graph.ops) for split in splits}
    assert len(homes) > 1


def test_parameters_are_gathered_once_for_equal_optimizer_state(plain: Search) -> None:
    given = plain.request.optimizer
    equal = dataclasses.replace(given, by_path={**given.by_path})
    more = dataclasses.replace(given, other_bytes=given.other_bytes + 4)
    again, other = (
        Search(
            plain.graph,
            plain.dims,
            plain.cluster,
            dataclasses.replace(plain.request, optimizer=state),
            program=plain.program,
        )
        for state in (equal, more)
    )
    assert again.facts is plain.facts  # Each plan counts the bytes anew.
    assert other.facts.optimizer_other_bytes == more.other_bytes


def test_views_of_a_graph_fold_all_ways_to_part_it(
    plain: Search, splits: list[SequenceSplit]
) -> None:
    for split in splits:
        found = plain.program.rows(split.graph)
        fresh = build_rows(split.graph, plain.dims)
        assert (found.ops, found.flows) == (fresh.ops, fresh.flows)
        assert {row.task_graph for row in found.ops} == {0, 1}


def test_memory_and_parameters_beside_are_those_alone(
    plain: Search, splits: list[SequenceSplit]
) -> None:
    sizes, options = mesh(data=4, tensor=2), plain.options
    found = set()
    for split in splits:
        one, other = beside(plain, split), alone(plain, split)
        assert one.program is plain.program and other.program is not plain.program
        assert one.facts == other.facts
        table = options.tables(0, sizes)[0]
        tables = split.tables({0: table}, options.batch, options.sequence)
        peaks = [_peak(search, tables, sizes) for search in (one, other)]
        assert peaks[0] == peaks[1]
        found.add(peaks[0])
    assert len(found) > 1


def _peak(search: Search, tables: dict[int, Table], sizes: dict[str, int]) -> object:
    layouts = lay_out(search.facts, tables, sizes, 0)
    laid = StepLayout(
        tables=tables,
        cuts=layout_shard_counts(layouts, sizes),
        accumulates=np.array([False]),
    )
    return search.evaluator.layout_memory.of(laid, search.setting(sizes, 1)).at(0)


@pytest.mark.parametrize(("parts", "refused"), [(16, False), (64, True)])
def test_one_sample_at_a_time_leaves_nothing_to_set_apart(
    plain: Search, parts: int, refused: bool
) -> None:
    """As of replicas, which fix micro-batches of a graph that was traced whole."""
    asked = dataclasses.replace(
        plain.request,
        mesh={"tensor": plain.request.num_devices},
        num_micro_batches=parts,
        sequence_parallel=True,
    )
    if not refused:
        found = decided_on(plain.graph, plain.cluster, asked)
        assert found.search.split is not None
        return
    with pytest.raises(PlanError, match="a micro-batch has one sample"):
        decided_on(plain.graph, plain.cluster, asked)
