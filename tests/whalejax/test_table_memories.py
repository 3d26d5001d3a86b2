"""Tables by rows within a node, in host memory, or cached on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_table_step import (
    SAMPLES,
    OneDevice,
    collectives,
    loss,
    make_batch,
    make_net,
)
from whalejax.hlo.groups import groups_of
from whalejax.planner.tables.placement import placement_data, placement_of
from whalejax.tables.layout import BufferKey


OPTIMIZER: Final = optax.sgd(0.01, momentum=0.9)
NODES: Final = {"user": "node_rows", "word": "node_rows", "item": "columns", "tag": 1}
HOSTED: Final = {"user": "host", "word": "cached:0.3", "item": "rows", "tag": "cached"}


def make_plan(
    cluster: str, kind: str, pins: Any, dtype: Any = np.float32, counts: Any = None
) -> Any:
    return wh.plan_tables(
        loss,
        make_net(dtype),
        make_batch(0, dtype),
        rows=wh.sparse_optimizer(kind, 0.1),  # type: ignore[arg-type]
        optimizer=OPTIMIZER,
        cluster=cluster,
        pins=pins,
        counts=counts,
    )


def make_step(
    cluster: str, kind: str, pins: Any, dtype: Any = np.float32, counts: Any = None
) -> Any:
    plan = make_plan(cluster, kind, pins, dtype, counts)
    ranks, given = plan.placement.ranks.count, (plan, loss, make_net(dtype))
    return wh.compile_tables(*given, optimizer=OPTIMIZER, devices=jax.devices()[:ranks])


def check_equal(step: Any, kind: str, dtype: Any = np.float32) -> Any:
    """Three steps against one device; the state after them."""
    net = make_net(dtype)
    state, one = step.init_from(net), OneDevice(kind, 0.1, net)
    for number in range(3):
        batch = make_batch(number, dtype)
        expected, _ = one.step(batch)
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-6)
    for name, rows in step.table_values(state).items():
        np.testing.assert_allclose(rows, one.net[name], rtol=0, atol=4e-6)
    return state


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        ("h100:2x4", "adagrad"),
        ("h100:2x2", "sgd"),
        pytest.param("h100:4x2", "row_adagrad", marks=pytest.mark.full),
        pytest.param("h100:2x2", "lazy_adam", marks=pytest.mark.full),
    ],
)
def test_rows_of_a_node_are_those_of_one_device(cluster: str, kind: str) -> None:
    pins = NODES if kind != "row_adagrad" else {**NODES, "item": "rows"}
    check_equal(make_step(cluster, kind, pins), kind)


def test_only_sums_of_a_node_cross_to_another() -> None:
    step = make_step("h100:2x4", "adagrad", NODES)
    state = step.init_from(make_net(np.float32))
    text = step.lower(state, make_batch(0, np.float32)).compile().as_text()
    found, layout = collectives(text), step.programs.layout
    sizes = [np.prod(BufferKey(*k)[:1]) for k in layout.widths if k.memory == "node"]
    assert sorted(sizes) == [16, 48]
    # Ids, vectors and gradients of all ranks; vectors and gradients between nodes.
    assert len(found["all-to-all"]) == 5
    nodes = [(rank, rank + 4) for rank in range(4)]
    between = [line for line in found["all-to-all"] if groups(line) == nodes]
    assert len(between) == 2
    elements = SAMPLES // 8 * layout.node_elements
    assert all(f"{elements}]" in flat(line) for line in between)
    # Within a node; CPUs reduce and scatter by an all-reduce.
    inside = found.get("reduce-scatter", []) + found.get("all-reduce", [])
    in_node = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert any(groups(line) == in_node for line in inside)
    (gather,) = found["all-gather"]
    assert groups(gather) == in_node


def groups(line: str) -> list[tuple[int, ...]]:
    """The groups of ranks of a collective, whichever form the compiler writes."""
    return sorted(tuple(map(int, group)) for group in groups_of(line, 8))


def flat(line: str) -> str:
    """A line whose shapes are written as the product of their dimensions."""
    import re

    def product(match: re.Match[str]) -> str:
        return f"{np.prod([int(n) for n in match[1].split(',')])}]"

    return re.sub(r"f32\[([\d,]+)\]", product, line)


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        ("h100:4", "adagrad"),
        pytest.param("h100:1", "sgd", marks=pytest.mark.full),
        pytest.param("h100:2", "row_adagrad", marks=pytest.mark.full),
        pytest.param("h100:8", "lazy_adam", marks=pytest.mark.full),
    ],
)
def test_tables_in_host_memory_are_those_of_one_device(
    cluster: str, kind: str, tmp_path: Path
) -> None:
    step = make_step(cluster, kind, HOSTED)
    state = check_equal(step, kind)
    kinds = {
        key.memory: array.sharding.memory_kind
        for key, array in state.tables.buffers.items()
    }
    assert kinds == {"device": "device", "host": "pinned_host"}
    step.save(tmp_path / "three", state)
    pins = {"user": "rows", "word": "rows", "item": "rows", "tag": 0}
    other = make_step("h100:2", kind, pins)
    moved = other.restore(tmp_path / "three")
    rows = step.table_values(state)
    for name, values in other.table_values(moved).items():
        np.testing.assert_array_equal(values, rows[name])
    back = step.adopt(moved, other)
    for name, states in step.row_states(back).items():
        for each, values in states.items():
            np.testing.assert_array_equal(values, step.row_states(state)[name][each])


def test_the_rows_read_most_are_on_the_device(tmp_path: Path) -> None:
    counts = {"word": np.arange(29) % 7, "user": np.arange(37)[::-1]}
    pins = HOSTED | {"user": "cached:0.2"}
    step = make_step("h100:4", "adagrad", pins, counts=counts)
    hottest = step.plan.placement.hottest
    # Eight rows are counted 5 or 6 times; of those counted 4 times the first.
    assert hottest["word"].tolist() == [4, 5, 6, 12, 13, 19, 20, 26, 27]
    assert "user" not in hottest  # these are its first rows
    assert "with the most read 9 rows on the device" in step.plan.why("word")
    state = check_equal(step, "adagrad")
    buffer = next(a for k, a in state.tables.buffers.items() if k == (48, "device"))
    held = {tuple(row) for row in np.asarray(buffer).round(6).tolist()}
    values = step.table_values(state)["word"].round(6).tolist()
    here = {number for number, row in enumerate(values) if tuple(row) in held}
    assert here == set(hottest["word"].tolist())
    step.save(tmp_path / "hot", state)
    other = make_step("h100:2", "adagrad", {"word": "rows", "user": "rows"})
    for name, rows in other.table_values(other.restore(tmp_path / "hot")).items():
        np.testing.assert_array_equal(rows, step.table_values(state)[name])


def test_a_file_keeps_the_cached_rows() -> None:
    counts = {"word": np.arange(29)[::-1] % 7}
    placement = make_plan("h100:4", "sgd", HOSTED, counts=counts).placement
    data = json.loads(json.dumps(placement_data(placement)))
    found = placement_of(data)
    assert list(found.hottest) == ["word"]
    np.testing.assert_array_equal(found.hottest["word"], placement.hottest["word"])
    data["hottest"][0][0] = "item"
    with pytest.raises(wh.WhaleError, match="9 rows of 'item' on a device"):
        placement_of(data)
    data["hottest"][0] = ["word", "AAAA"]
    with pytest.raises(wh.WhaleError, match="0 rows of 'word' on a device"):
        placement_of(data)


def test_no_table_leaves_host_memory_whole() -> None:
    """With ten times the rows a step needs no more temporary memory."""

    def temporary(rows: int) -> float:
        def small(net: Any, batch: Any) -> Any:
            return (jax.numpy.tanh(net["user"][batch["ids"]] @ net["w"]) ** 2).mean()

        net = {"user": np.ones((rows, 64), np.float32), "w": np.ones(64, np.float32)}
        batch = {"ids": np.zeros((32, 2), np.int32)}
        plan = wh.plan_tables(
            *(small, net, batch),
            rows=wh.sparse_optimizer("adagrad", 0.1),
            optimizer=OPTIMIZER,
            cluster="h100:2",
            pins={"user": "cached:0.1"},
        )
        step = wh.compile_tables(
            plan, small, net, optimizer=OPTIMIZER, devices=jax.devices()[:2]
        )
        found = step.lower(step.init_from(net), batch).compile().memory_analysis()
        assert found.alias_size_in_bytes > 2 * 4 * 64 * rows / 2
        return float(found.temp_size_in_bytes)

    assert temporary(100_000) <= 1.02 * temporary(10_000)


def test_the_planner_keeps_in_host_memory_what_devices_cannot_hold() -> None:
    shapes = {
        "user": jax.ShapeDtypeStruct((100_000_000, 512), np.float32),
        "w": jax.ShapeDtypeStruct((512,), np.float32),
    }
    batch = {"ids": jax.ShapeDtypeStruct((1024,), np.int32)}
    given: Any = (
        lambda net, b: (net["user"][b["ids"]] @ net["w"]).mean(),
        shapes,
        batch,
    )
    options: Any = {"rows": wh.sparse_optimizer("sgd", 0.1), "cluster": "h100:2"}
    with pytest.raises(wh.WhaleError, match="short"):
        wh.plan_tables(*given, **options)
    plan = wh.plan_tables(*given, splits=("rows", "host", "cached"), **options)
    assert {shard.split for shard in plan.placement.shards} <= {"host", "cached"}
    assert plan.placement.host_bytes.max() > 80e9
    assert "in the host memory of" in plan.why("user")


def test_a_cached_part_is_a_fraction() -> None:
    with pytest.raises(wh.WhaleError, match="pins is .* or cached:0.25"):
        make_plan("h100:2", "sgd", {"user": "cached:2"})
