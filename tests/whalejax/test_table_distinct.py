"""Rows that are exchanged once for all lookups of a device that read them."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_table_step import check_exchanges
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.table import Ranks, Table


SAMPLES, LENGTH = 32, 24
SIZES: Final = {"item": (600, 32), "shop": (500, 32), "user": (300, 32)}
OPTIMIZER: Final = optax.sgd(0.01)


def make_net() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {**SIZES, "w": (32, 4)}
    return {
        name: jnp.asarray(random.standard_normal(shape) * 0.1, jnp.float32)
        for name, shape in shapes.items()
    }


def make_batch(number: int, rows: int = 25) -> dict[str, np.ndarray]:
    """Ids among the first rows of each table."""
    random = np.random.default_rng(number)
    shapes = {
        "history": (SAMPLES, LENGTH),
        "shops": (SAMPLES, LENGTH),
        "bag": (SAMPLES, 3),
        "user": (SAMPLES,),
    }
    ids = {k: random.integers(0, rows, s).astype(np.int32) for k, s in shapes.items()}
    ids["bag"][3] = -1  # An empty bag.
    return ids


def loss(net: Any, batch: Any) -> jax.Array:
    """The loss with a bag whose negative ids stand for none."""
    bag, rows = batch["bag"], net["item"]
    own = jnp.where((bag >= 0)[..., None], rows[bag], 0).sum(1)
    events = net["item"][batch["history"]] + net["shop"][batch["shops"]]
    x = jnp.tanh(events).sum(1) * own
    return jnp.mean(((x @ net["w"]).sum(1) + net["user"][batch["user"]].sum(1)) ** 2)


def make_step(ranks: int, kind: str, pins: Any, together: Any = ()) -> Any:
    batches = [make_batch(number) for number in range(4)]
    net = make_net()
    counts = wh.count_lookups(loss, net, batches)
    plan = wh.plan_tables(
        *(loss, net, batches[0]),
        rows=wh.sparse_optimizer(kind, 0.1),  # type: ignore[arg-type]
        optimizer=OPTIMIZER,
        cluster=f"cpu:{ranks}",
        counts=counts,
        pins=pins,
        together=together,
    )
    devices = jax.devices()[:ranks]
    given = plan, loss, net
    return wh.compile_tables(*given, optimizer=OPTIMIZER, devices=devices)


def trained(step: Any, batches: list[Any]) -> tuple[list[float], Any]:
    state, losses = step.init_from(make_net()), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, step.table_values(state)


WAYS: Final = {
    2: {"item": "rows", "shop": "whole"},
    4: {"item": "rows", "shop": 1, "user": "columns"},
    8: {"item": "whole", "shop": "rows"},
}


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "adagrad"),
        (4, "sgd"),
        (8, "adagrad"),
        pytest.param(4, "row_adagrad", marks=pytest.mark.full),
        pytest.param(8, "lazy_adam", marks=pytest.mark.full),
    ],
)
def test_numbers_are_those_of_one_device(ranks: int, kind: str) -> None:
    pins = dict(WAYS[ranks])
    if kind == "row_adagrad":
        pins.pop("user")
    batches = [make_batch(number) for number in range(3)]
    expected, tables = trained(make_step(1, kind, {}), batches)
    step = make_step(ranks, kind, pins)
    layout = step.programs.layout
    assert {"item", "shop"} <= set(layout.distinct)
    by_sample = step.programs.by_sample
    assert layout.exchanged_bytes(SAMPLES, 4) < by_sample.exchanged_bytes(SAMPLES, 4)
    losses, found = trained(step, batches)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for name, rows in found.items():
        limit = 1e-4 if kind == "lazy_adam" else 2e-6
        np.testing.assert_allclose(rows, tables[name], rtol=0, atol=limit)
    assert step.crowded_steps == 0
    check_exchanges(step, step.init_from(make_net()), batches[0], SAMPLES)


@pytest.mark.parametrize(
    ("pins", "together"),
    [
        ({"item": "columns", "shop": "columns"}, ()),
        ({}, [("item", "shop")]),
        pytest.param({"item": 1}, [("item", "shop")], marks=pytest.mark.full),
    ],
)
def test_columns_and_tables_together_are_requested_once(
    pins: Any, together: Any
) -> None:
    batches = [make_batch(number) for number in range(3)]
    batches.insert(1, make_batch(1, 300))
    expected, tables = trained(make_step(1, "adagrad", {}), batches)
    step = make_step(4, "adagrad", pins, together)
    layout, by_sample = step.programs.layout, step.programs.by_sample
    parts = {name: len(each) for name, each in layout.distinct.items()}
    count = 2 if pins.get("item") == "columns" else 1
    assert parts == {"item": count, "shop": count}
    moved = layout.exchanged_bytes(SAMPLES, 4) + layout.id_bytes(SAMPLES)
    others = by_sample.exchanged_bytes(SAMPLES, 4) + by_sample.id_bytes(SAMPLES)
    assert moved < 0.8 * others
    losses, found = trained(step, batches)
    assert step.crowded_steps == 1
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for name, rows in found.items():
        np.testing.assert_allclose(rows, tables[name], rtol=0, atol=2e-6)
    check_exchanges(step, step.init_from(make_net()), batches[0], SAMPLES)
    assert "a rank requests each distinct row" in step.plan.why("shop")


def test_a_batch_with_more_distinct_rows_is_exchanged_by_sample() -> None:
    batches = [make_batch(0), make_batch(1, 300), make_batch(2)]
    expected, tables = trained(make_step(1, "adagrad", {}), batches)
    step = make_step(4, "adagrad", WAYS[4])
    losses, found = trained(step, batches)
    assert step.crowded_steps == 1
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for name, rows in found.items():
        np.testing.assert_allclose(rows, tables[name], rtol=0, atol=2e-6)


def test_the_plan_says_what_moves() -> None:
    plan = make_step(4, "sgd", WAYS[4]).plan
    assert "a rank requests each distinct row of a shard once, at most" in str(plan)
    assert "by sample" in plan.why("item") and "a rank exchanges at most" in str(plan)
    way = plan.placement.way_of("item")
    assert way.exchange_bytes < 0.8 * way.sample_bytes


def test_only_what_moves_less_is_asked_for() -> None:
    ranks = Ranks(count=4, per_node=4, memory_bytes=1e12)

    def way_of(**changes: Any) -> Any:
        given: dict[str, Any] = {"name": "t", "rows": 10_000, "width": 32}
        table = Table(**{**given, **changes})
        found = place_tables([table], ranks, batch_size=4096, pins={"t": "whole"})
        return found.way_of("t")

    once = way_of()  # One row of 10,000 a sample: nearly all distinct.
    assert once.distinct_rows == 0 and once.exchange_bytes == once.sample_bytes
    counts = np.zeros(10_000)
    counts[:100] = 1
    some = way_of(lookups_per_sample=50.0, pooled=False, counts=counts)
    assert 100 <= some.distinct_rows < 200
    rows = 4 * some.distinct_rows
    assert some.exchange_bytes == pytest.approx(rows * (4 + 2 * 32 * 4))
    # So many that the table is sent whole, without ids.
    many = way_of(lookups_per_sample=50.0, pooled=False)
    assert many.distinct_rows == 0
    assert many.exchange_bytes == pytest.approx(4 * 10_000 * (2 * 32 * 4 + 4))
