"""Tables that are placed anew while a run goes on, and states between placements."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_table_step import loss, make_net
from tests.whalejax.test_table_step import make_batch as small_batch
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.replace import place_again
from whalejax.planner.tables.table import Table


OPTIMIZER: Final = optax.sgd(0.01, momentum=0.9)
ROWS: Final = wh.sparse_optimizer("adagrad", 0.1)


def make_batch(number: int) -> dict[str, np.ndarray]:
    """A batch of 48 samples, which 6 and 8 devices divide."""
    parts = [small_batch(2 * number + n, np.float32) for n in range(2)]
    return {name: np.concatenate([p[name] for p in parts])[:48] for name in parts[0]}


def make_step(ranks: int, **options: Any) -> Any:
    pins = options.pop("pins", None)
    net, batch = make_net(np.float32), make_batch(0)
    plan = wh.plan_tables(
        *(loss, net, batch),
        rows=ROWS,
        optimizer=OPTIMIZER,
        cluster=f"cpu:{ranks}",
        pins=pins,
    )
    return wh.compile_tables(
        *(plan, loss, net),
        optimizer=OPTIMIZER,
        devices=jax.devices()[:ranks],
        **options,
    )


def check_same(step: Any, state: Any, other: Any, others_state: Any) -> None:
    found, wanted = step.model(state), other.model(others_state)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
    rows, states = step.row_states(state), other.row_states(others_state)
    for name, held in states.items():
        for kind, value in held.items():
            np.testing.assert_array_equal(rows[name][kind], value)


def test_ranks_go_from_eight_to_six_and_back_by_no_file() -> None:
    eight, six = make_step(8), make_step(6, pins={"user": "rows"})
    state, alone = eight.init_from(make_net(np.float32)), make_step(8)
    other = alone.init_from(make_net(np.float32))
    losses: list[tuple[float, float]] = []

    def advance(step: Any, number: int) -> None:
        nonlocal state, other
        state, metrics = step(state, make_batch(number))
        other, expected = alone(other, make_batch(number))
        losses.append((float(metrics["loss"]), float(expected["loss"])))

    for number in range(6):
        if number == 2:
            moved = six.adopt(state, eight)
            check_same(six, moved, eight, state)
            state = moved
        if number == 4:
            moved = eight.adopt(state, six)
            check_same(eight, moved, six, state)
            state = moved
        advance(six if number in (2, 3) else eight, number)
    assert int(state.step) == 6
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
    with pytest.raises(wh.WhaleError, match="of another model or of other optimizers"):
        net = make_net(np.float32)
        plan = wh.plan_tables(
            *(loss, net, make_batch(0)),
            rows=wh.sparse_optimizer("sgd", 0.1),
            optimizer=OPTIMIZER,
            cluster="cpu:8",
        )
        wh.compile_tables(plan, loss, net, optimizer=OPTIMIZER).adopt(state, eight)


def test_popularity_that_moved_is_priced() -> None:
    """Row ranges by counts of which all later reads hit one."""
    counts = np.ones(4000, int)
    table = Table(name="a", rows=4000, width=64, lookups_per_sample=4.0, counts=counts)
    placement = place_tables([table], "cpu:4", batch_size=512, pins={"a": "rows"})
    assert not placement.shards[0].hashed
    same = place_again(placement, {"a": counts}, samples=1000)
    assert same.gain < 0.02
    moved = np.zeros(4000, int)
    moved[:500] = 8
    found = place_again(placement, {"a": moved}, samples=1000)
    assert found.gain > 0.3 and found.placement.shards[0].hashed
    assert "placing tables again makes it" in str(found)


def test_cached_rows_follow_popularity(capsys: pytest.CaptureFixture[str]) -> None:
    """A quarter of a table is on a device: first some rows, then those read later."""
    rows, samples = 4000, 64
    random = np.random.default_rng(0)
    net = {
        "a": jnp.asarray(random.standard_normal((rows, 64)), "f4"),
        "w": jnp.ones((64,), jnp.float32),
    }

    def lookup(net: Any, batch: Any) -> Any:
        return jnp.mean((net["a"][batch["ids"]].sum(1) @ net["w"]) ** 2) * 1e-3

    def batch(number: int) -> dict[str, np.ndarray]:
        ids = (
            rows - 1 - 3 * np.random.default_rng(number).integers(0, 300, (samples, 8))
        )
        return {"ids": ids.astype(np.int32)}

    before = np.zeros(rows, int)
    before[1::4] = 9
    given: Any = {"optimizer": OPTIMIZER}
    plan = wh.plan_tables(
        *(lookup, net, batch(0)),
        rows=ROWS,
        cluster="h100:4",
        pins={"a": "cached:0.25"},
        counts={"a": before},
        **given,
    )
    assert plan.placement.hottest["a"].tolist() == list(range(1, rows, 4))
    given["devices"] = jax.devices()[:4]
    step = wh.compile_tables(plan, lookup, net, replace_every=4, **given)
    alone = wh.compile_tables(plan, lookup, net, **given)
    state, other = step.init_from(net), alone.init_from(net)
    for number in range(6):
        state, metrics = step(state, batch(number))
        other, expected = alone(other, batch(number))
        np.testing.assert_allclose(
            float(metrics["loss"]), float(expected["loss"]), rtol=1e-6
        )
    counted = np.unique([batch(number)["ids"] for number in range(4)])
    hottest = step.plan.placement.hottest["a"]
    assert len(hottest) == 1000 and set(counted.tolist()) <= set(hottest.tolist())
    assert "placing tables again makes it" in capsys.readouterr().err
    np.testing.assert_allclose(
        step.table_values(state)["a"], alone.table_values(other)["a"], atol=1e-6
    )


def test_a_run_places_its_tables_anew(capsys: pytest.CaptureFixture[str]) -> None:
    rows, samples = 4000, 64
    net = {
        "a": jnp.asarray(np.random.default_rng(0).standard_normal((rows, 64)), "f4"),
        "w": jnp.ones((64,), jnp.float32),
    }

    def lookup(net: Any, batch: Any) -> Any:
        return jnp.mean((net["a"][batch["ids"]].sum(1) @ net["w"]) ** 2) * 1e-3

    def batch(number: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(number).integers(0, 500, (samples, 8))
        return {"ids": ids.astype(np.int32)}

    given: Any = {"optimizer": OPTIMIZER}
    plan = wh.plan_tables(
        *(lookup, net, batch(0)),
        rows=ROWS,
        cluster="cpu:4",
        pins={"a": "rows"},
        counts={"a": np.ones(rows, int)},
        **given,
    )
    given["devices"] = jax.devices()[:4]
    step = wh.compile_tables(plan, lookup, net, replace_every=4, **given)
    alone = wh.compile_tables(plan, lookup, net, **given)
    state, other = step.init_from(net), alone.init_from(net)
    for number in range(6):
        state, metrics = step(state, batch(number))
        other, expected = alone(other, batch(number))
        np.testing.assert_allclose(
            float(metrics["loss"]), float(expected["loss"]), rtol=1e-6
        )
    assert step.plan.placement.shards[0].hashed and int(state.step) == 6
    assert not alone.plan.placement.shards[0].hashed
    assert "placing tables again makes it" in capsys.readouterr().err
    np.testing.assert_allclose(
        step.table_values(state)["a"], alone.table_values(other)["a"], atol=1e-6
    )
    with pytest.raises(wh.WhaleError, match="no lookups were counted"):
        alone.replacement()
    # Memory and traffic of the plan are those of the new placement.
    given.pop("devices")
    whole = wh.plan_tables(
        *(lookup, net, batch(0)), rows=ROWS, cluster="cpu:4", pins={"a": 0}, **given
    )
    other = alone.place(other, whole.placement)
    assert alone.plan.use == whole.use != plan.use
    with pytest.raises(wh.WhaleError, match="of 1 table on 8 ranks"):
        eight = place_tables(plan.placement.tables, "cpu:8", batch_size=samples)
        alone.place(other, eight)
