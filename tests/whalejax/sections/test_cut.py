"""Tables in both sections: late in processes, never beside the dense part."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.sections.test_sections import (
    BUSY,
    OPTIMIZER,
    TABLES,
    check_same_rows,
    make_plan,
    make_step,
    on_one_device,
    trained,
)
from tests.whalejax.test_table_step import (
    OneDevice,
    collectives,
    loss,
    make_batch,
    make_net,
)


INSIDE: Final = ("user", "tag")
WAYS: Final = {"user": "rows", "item": "columns", "word": "rows"}


def wide_step(devices: int, staleness: int, inside: tuple[str, ...] = INSIDE) -> Any:
    """Tables of both sections, the dense one on several devices."""
    net = make_net(np.float32)
    plan: Any = wh.plan(
        loss,
        net,
        make_batch(0, np.float32),
        tables=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=OPTIMIZER,
        cluster=f"cpu:2+cpu:{devices}",
        pins=WAYS,
        staleness=staleness,
        times=BUSY,
        in_processes=inside,
    )
    given: Any = {"optimizer": OPTIMIZER, "devices": jax.devices()[:devices]}
    return wh.compile(plan, loss, net, **given)


def test_without_staleness_the_numbers_are_those_of_one_device() -> None:
    one = on_one_device()
    expected, other = trained(one, 8)
    with make_step(0, inside=INSIDE, pins=WAYS) as step:
        losses, state = trained(step, 8)
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        wanted = one.table_values(other)
        for name, rows in step.table_values(state).items():
            np.testing.assert_allclose(rows, wanted[name], rtol=0, atol=1e-6)
        assert set(step.report().times.tables or ()) == set(INSIDE)


@pytest.mark.parametrize(
    ("devices", "staleness"),
    [(2, 0), (4, 2), pytest.param(8, 1, marks=pytest.mark.full)],
)
def test_only_tables_in_processes_are_late(devices: int, staleness: int) -> None:
    one = OneDevice("adagrad", 0.1, make_net(np.float32))
    history, expected = [], []
    for number in range(8):
        history.append({name: one.net[name] for name in TABLES})
        old = history[max(0, number - staleness)]
        read = history[-1] | {name: old[name] for name in INSIDE}
        expected.append(one.step(make_batch(number, np.float32), read)[0])
    with wide_step(devices, staleness) as step:
        losses, state = trained(step, 8)
        np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
        for name, rows in step.table_values(state).items():
            np.testing.assert_allclose(rows, one.net[name], rtol=0, atol=1e-5)
        assert max(step.report().lags) == staleness
        text = step.lower(state, make_batch(0, np.float32)).compile().as_text()
        # Vectors, gradients, and ids where some rows are not sent whole.
        exchanges = 2 + bool(step.beside.layout.id_columns)
        assert len(collectives(text)["all-to-all"]) == exchanges


def test_checkpoints_have_the_tables_of_both_sections(tmp_path: Path) -> None:
    one = on_one_device()
    with make_step(1, inside=INSIDE, pins=WAYS) as step:
        _, state = trained(step, 3)
        step.save(tmp_path / "three", state)
        other = one.restore(tmp_path / "three")
        check_same_rows(step, state, one, other)
        with make_step(1, inside=("word",), pins=WAYS) as cut:
            check_same_rows(cut, cut.restore(tmp_path / "three"), one, other)
            check_same_rows(cut, cut.adopt(other, one), one, other)
        bad = make_batch(3, np.float32)
        bad["items"] = np.full_like(bad["items"], 11)
        bad["present"][:] = True
        with pytest.raises(wh.WhaleError, match="items has the id 11, and item has 11"):
            step(state, bad)


def test_the_planner_leaves_tables_on_devices_where_that_is_faster() -> None:
    plan = wh.plan_tables(
        loss,
        make_net(np.float32),
        make_batch(0, np.float32),
        rows=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=OPTIMIZER,
        cluster="cpu:2+cpu:1",
        staleness=2,
    )
    assert plan.sections is None and set(plan.tables) == set(TABLES)
    assert "in processes of CPUs: none" in str(plan)
    with wh.compile_tables(
        plan, loss, make_net(np.float32), optimizer=OPTIMIZER, devices=jax.devices()[:1]
    ) as step:
        assert np.isfinite(trained(step, 1)[0][0])
        with pytest.raises(wh.WhaleError, match="no processes beside its devices"):
            step.report()
    # Whatever is pinned to a process is in one.
    fixed = make_plan(0, pins={"user": 1}, inside=None)
    assert [t.name for t in fixed.placement.tables] == ["user"]
