"""Requests to processes: each distinct row once, where that moves less."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.planner.tables.sections import process_seconds
from whalejax.planner.tables.table import Table
from whalejax.sections.process_requests import ProcessRequest, ProcessRequests
from whalejax.sections.remote_store import rank_ids
from whalejax.sections.row_service import width_arrays, width_layout
from whalejax.sections.sparse_rows import SparseRows


SAMPLES, LENGTH = 32, 12


def lookup_loss(net: Any, batch: Any) -> Any:
    """Histories of single rows, and a bag whose rows are summed."""
    events = net["item"][batch["history"]].sum((1, 2))
    bag = net["word"][batch["bag"]].sum(1).sum(1)
    return ((events + bag) ** 2 * net["w"]).mean()


def make_net() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"item": (500, 16), "word": (90, 32), "w": (1,)}
    return {
        name: (random.standard_normal(shape) * 0.1).astype(np.float32)
        for name, shape in shapes.items()
    }


def make_batch(number: int, rows: int = 20) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {
        "history": random.integers(0, rows, (SAMPLES, LENGTH)).astype(np.int32),
        "bag": random.integers(0, 90, (SAMPLES, 3)).astype(np.int32),
    }


def make_step(cluster: str, **options: Any) -> Any:
    plan = wh.plan(
        *(lookup_loss, make_net(), make_batch(0)),
        tables=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=optax.sgd(0.1),
        cluster=cluster,
        **options,
    )
    given: Any = {"optimizer": optax.sgd(0.1), "devices": jax.devices()[:1]}
    return wh.compile(plan, lookup_loss, make_net(), **given)


def trained(step: Any, batches: list[Any]) -> tuple[list[float], Any]:
    state, losses = step.init_from(make_net()), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, step.table_values(state)


@pytest.mark.parametrize(
    "pins",
    [
        {"item": 0, "word": 1},
        pytest.param({"item": "rows", "word": 1}, marks=pytest.mark.full),
    ],
)
def test_rows_that_are_named_once_change_no_bit(pins: Any) -> None:
    """The third batch has too many distinct rows, and is asked for by sample."""
    batches = [make_batch(0), make_batch(1), make_batch(2, 500), make_batch(3)]
    expected, tables = trained(make_step("cpu:1"), batches)
    sent: list[ProcessRequest] = []
    inside = {"in_processes": ["item", "word"], "pins": pins}
    with make_step("cpu:2+cpu:1", **inside) as step:
        submit = step.pipeline.submit

        def watched(work: Any) -> None:
            sent.extend(work.requests)
            submit(work)

        step.pipeline.submit = watched
        losses, found = trained(step, batches)
        evaluated = step.eval(step.init_from(make_net()), batches[0])
    assert float(evaluated["loss"]) == expected[0]
    assert losses == expected
    for name, rows in tables.items():
        np.testing.assert_array_equal(found[name], rows)
    named = [array.ndim == 1 for request in sent for array in request.arrays]
    assert any(named) and not all(named)
    of_item = [r.arrays[0] for r in sent if r.arrays and r.arrays[0].ndim == 1]
    assert min(map(len, of_item)) < SAMPLES * LENGTH / 8


def test_rows_and_sums_are_those_of_the_process() -> None:
    inside = {"in_processes": ["item", "word"], "pins": {"item": 0, "word": 1}}
    with make_step("cpu:2+cpu:1", **inside) as step:
        layout = step.programs.layout
        ids = step._host_ids(jax.tree.leaves(make_batch(0)))[0]
    requests, optimizer = ProcessRequests(layout), wh.sparse_optimizer("sgd", 1.0)
    own = rank_ids(layout, ids)
    for rank, request in enumerate(requests.requests(own)):
        widths = {
            each.width: width_layout(
                (each.width, each.rows, each.slots, each.offset, each.first_id),
                width_arrays(each, rank),
            )
            for each in layout.widths.values()
        }
        rows = SparseRows(widths, optimizer, np.float32, 0)
        for each in layout.widths.values():
            values = np.random.default_rng(rank).random((each.rows, each.width))
            rows.write(each.width, "", 0, values.astype(np.float32))
        rows.begin(0, 0)
        plain = ProcessRequest(
            arrays=tuple(
                own[rank][:, each.first_id : each.first_id + each.num_ids]
                for each in layout.widths.values()
            ),
            places=(None,) * len(widths),
        )
        read = [rows.look_up(0, one.arrays).vectors for one in (request, plain)]
        vectors = [
            requests.vectors(one, found)
            for one, found in zip((request, plain), read, strict=True)
        ]
        np.testing.assert_array_equal(*vectors)


def test_the_planner_counts_distinct_rows_on_the_wire() -> None:
    few = Table(name="t", rows=16, width=32, lookups_per_sample=1)
    many = Table(name="t", rows=10**6, width=32, lookups_per_sample=1)
    bag = Table(name="t", rows=16, width=32, lookups_per_sample=4)
    seconds = [process_seconds(table, 4096, 1e-12)[1] for table in (few, many, bag)]
    assert seconds[0] < seconds[1] / 100 and seconds[2] > seconds[1]
