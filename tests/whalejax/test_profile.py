"""``step.profile``: a step parted without a rest, beside what the plan predicts."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.planner.plans import example
from whalejax.cli import main
from whalejax.planner.plan_entries import Collective
from whalejax.runtime.planned_traffic import compared_traffic, unplanned_traffic
from whalejax.runtime.profiling.device_events import (
    DeviceEvent,
    TraceData,
    length,
    read_trace,
    union,
    within,
    without,
)
from whalejax.runtime.profiling.step_profile import profile_of


NET = {"a": np.ones((64, 256), np.float32), "b": np.ones((256, 64), np.float32)}
SGD = optax.sgd(0.1)


def loss_with(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss(net: Any, x: Any) -> Any:
        return ((change(jnp.tanh(x @ net["a"])) @ net["b"]) ** 2).mean()

    return loss


def batch() -> Any:
    return np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)


def planned(mesh: dict[str, int]) -> wh.Plan:
    loss = loss_with(lambda h: h)
    return wh.plan(loss, NET, batch(), optimizer=SGD, cluster="cpu:4", mesh=mesh)


def compiled(plan: wh.Plan, change: Callable[[Any], Any]) -> wh.TrainStep:
    return wh.compile(
        plan, loss_with(change), NET, optimizer=SGD, devices=jax.devices()[:4]
    )


def test_spans_are_parted_exactly() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = rng.uniform(0, 100, (2, 12, 2))
        first, second = (union(map(tuple, np.sort(one, axis=1))) for one in drawn)
        both = union([*map(tuple, first), *map(tuple, second)])
        apart = length(without(first, second)) + length(second)
        np.testing.assert_allclose(length(both), apart)
        cut = within(first, 20, 60)
        rest = length(within(first, 0, 20)) + length(within(first, 60, 100))
        np.testing.assert_allclose(length(cut) + rest, length(first))


def test_a_step_by_hand() -> None:
    plan = planned({"data": 4})
    program = (
        "HloModule m, num_partitions=4\n\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n"
        "  %all-reduce.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}\n"
        "  ROOT %fusion.1 = f32[8]{0} add(%all-reduce.1, %x)\n}"
    )
    events = [
        DeviceEvent(0, "fusion.1", "m", 10e6, 40e6),
        DeviceEvent(0, "all-reduce.1", "m", 30e6, 60e6),  # 10 hidden, 20 exposed
        DeviceEvent(0, "fusion.2", "m", 70e6, 80e6),
    ]
    trace = TraceData(((0.0, 100e6),), tuple(events))
    found = {t.name: t for t in profile_of(plan, program, trace).terms}
    measured = {name: round(t.measured_seconds, 9) for name, t in found.items()}
    assert measured == {
        "compute": 0.04,
        "all-reduce over data": 0.02,
        "host before": 0.01,
        "host between": 0.01,
        "host after": 0.02,
    }
    assert round(found["all-reduce over data"].hidden_seconds, 9) == 0.01
    assert found["all-reduce over data"].predicted_seconds


@pytest.mark.parametrize("mesh", [{"data": 4}, {"tensor": 4}, {"data": 2, "tensor": 2}])
def test_nothing_of_a_step_is_left_unexplained(mesh: dict[str, int]) -> None:
    plan = planned(mesh)
    step = compiled(plan, lambda h: h)
    state, found = step.profile(step.init_from(NET), batch(), steps=3)
    assert int(state.step) == 2 + 3
    assert found.steps == 3 and found.unexplained < 1e-9
    names = {term.name for term in found.terms}
    assert {"compute", "host before", "host between", "host after"} <= names
    planned_names = {f"{c.kind} over {'+'.join(c.axes)}" for c in plan.collectives}
    assert planned_names <= names and "over other groups" not in str(names)
    assert not found.unplanned
    text = str(found)
    assert "measured over 3 steps" in text and "than predicted" in text


def test_a_collective_that_is_not_planned_is_traced_to_its_line() -> None:
    def shuffled(h: Any) -> Any:
        order = jnp.argsort(jax.lax.stop_gradient(h[:, 0]))
        return h + jnp.take(h, order, axis=0)

    with pytest.warns(UserWarning, match="not the one that the plan was made for"):
        step = compiled(planned({"data": 4}), shuffled)
    _, found = step.profile(step.init_from(NET), batch(), steps=2)
    first = found.unplanned[0]
    assert first.what.startswith("all-gather over data")
    assert first.nbytes == 128 * 256 * 4
    line = inspect.getsourcelines(shuffled)[1] + 2
    assert first.place.endswith(f"test_profile.py:{line}")
    assert f"test_profile.py:{line}" in str(found)


def test_one_file_has_both(tmp_path: Path) -> None:
    step = compiled(planned({"data": 4}), lambda h: h)
    _, found = step.profile(step.init_from(NET), batch(), steps=2)
    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"steps", "predicted", "devices, measured"}
    devices = {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 2}
    assert devices == {0, 1, 2, 3}
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert [e["name"] for e in steps] == ["step 0", "step 1"]
    with pytest.raises(wh.WhaleError, match="cannot be written there"):
        found.save(tmp_path / "none" / "trace.json")


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    step = compiled(planned({"data": 4}), lambda h: h)
    with pytest.raises(wh.WhaleError, match="steps is 0; expected"):
        step.profile(step.init_from(NET), batch(), steps=0)
    with pytest.raises(wh.WhaleError, match="step.profile: batch is missing"):
        step.profile(step.init_from(NET))  # type: ignore[call-arg]
    with pytest.raises(wh.WhaleError, match="holds no trace"):
        read_trace(tmp_path)


@pytest.mark.relaxed_promotion
def test_the_command_profiles_a_plan_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    count = len(jax.devices())
    words = ["plan", "mlp-test", "--cluster", f"cpu:{count}", "-o", "plan.json"]
    assert main.main(words) == 0
    capsys.readouterr()
    words = ["profile", "plan.json", "--steps", "2", "--json", "-o", "trace.json"]
    assert main.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2 and found["unexplained"] < 1e-9
    assert (tmp_path / "trace.json").is_file()


def test_equal_instructions_beyond_the_plan_are_counted() -> None:
    """Two are planned, four of the same size run, each an entry of its own."""
    axes = ("data",)
    planned = Collective(
        kind="all-reduce",
        axes=axes,
        phase="update",
        what="gradient",
        payload_bytes=1000,
        count=2,
    )
    plan = dataclasses.replace(example(), axes=(("data", 4),), collectives=(planned,))
    one = {"kind": "all-reduce", "axes": axes, "count": 1, "payload_bytes": 1000}
    traffic = [{**one, "name": f"all-reduce.{n}", "places": []} for n in range(4)]
    quantities = compared_traffic(plan, traffic)
    found = unplanned_traffic(plan, quantities, traffic)
    assert [(one.name, one.nbytes) for one in found] == [
        ("all-reduce.2", 1000),
        ("all-reduce.3", 1000),
    ]
