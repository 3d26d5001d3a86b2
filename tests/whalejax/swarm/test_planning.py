"""Plans for swarms and the square-cube law: formats, stages, bytes, files, errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import swarm
from whalejax import jobs as job_plans
from whalejax.display.swarms import least
from whalejax.meshes import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.topology import Node
from whalejax.planner.plan.square_cube_of_plan import (
    border_bytes,
    bytes_per_second,
    rate_words,
    stage_works,
)
from whalejax.planner.plan_entries import closed_form_seconds, wire_bytes
from whalejax.swarm.churn import ChurnEvent, PeerEventKind
from whalejax.swarm.planning import LATENCY_SECONDS, setting_of
from whalejax.swarm.quantize import packed_bytes
from whalejax.swarm.simulator import simulate


LAYERS: Final = "abcdef"
ROWS: Final = 512


def loss(net: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in LAYERS:
        x = jnp.tanh(x @ net[name])
    return (x * x).mean()


def planned(width: int = 256, rows: int = ROWS, **settings: Any) -> wh.Plan:
    """Six square layers; 512 samples."""
    net = {n: jax.ShapeDtypeStruct((width, width), jnp.float32) for n in LAYERS}
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    given: dict[str, Any] = {
        "cluster": "t4:6x1",
        "mesh": {"stage": 3},
        "num_micro_batches": 16,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        **settings,
    }
    return wh.plan(loss, net, batch, **given)


def swarm_plan(bandwidth: str = "200Mb/s", **settings: Any) -> wh.Plan:
    return planned(swarm=True, bandwidth=bandwidth, **settings)


@pytest.fixture(scope="module")
def plan() -> wh.Plan:
    return swarm_plan()


def test_a_swarm_is_planned_with_peers_calls_and_deadlines(plan: wh.Plan) -> None:
    swarm = plan.swarm
    assert swarm is not None
    assert (swarm.peers, len(swarm.stages)) == (6, 3)
    assert sum(stage.peers for stage in swarm.stages) == 6
    assert swarm.bytes_per_second == 25e6
    border = packed_bytes(ROWS // 16 * 256)
    assert swarm.wire == "int8"
    assert swarm.stages[1].forward_bytes == (border, border)
    assert swarm.stages[1].backward_bytes == (2 * border, border)
    assert swarm.stages[0].forward_bytes == (0, border)
    assert swarm.stages[2].forward_bytes == (0, 0)
    for stage in swarm.stages:
        assert stage.state_bytes >= 2 * stage.gradient_bytes > 0
        assert stage.deadline_seconds >= 10 * stage.compute_seconds
        assert stage.memory_bytes < 16e9


@pytest.mark.parametrize(("bandwidth", "wire"), [("20Mb/s", "int8"), ("10Tb/s", "f32")])
def test_the_wire_is_the_most_exact_format_that_is_fast(
    bandwidth: str, wire: str
) -> None:
    found = swarm_plan(bandwidth)
    assert found.swarm is not None and found.swarm.wire == wire
    why = found.why("wire")
    assert why.startswith(f"wire {wire}") and "f32" in why and "int8" in why
    helps = [note for note in found.notes if "whalejax.models.borders" in note]
    assert bool(helps) == (wire == "int8")


def test_reasons_are_told_and_parameters_still_asked_for(plan: wh.Plan) -> None:
    assert plan.why("stages") == "3 stages, as asked"
    assert plan.why("micro-batches").startswith("16 micro-batches, as asked; reducing")
    assert "in stage 0 3.77 MB of the device and" in plan.why("gradients")
    assert any(note.startswith("a swarm of 6 peers (") for note in plan.notes)
    assert plan.why("a").startswith("a  256×256 float32")
    with pytest.raises(WhaleError, match="no parameter has the path 'wire'"):
        planned(cluster="t4:3x1").why("wire")


def test_a_swarm_is_set_beside_the_plan_without_one() -> None:
    """Both ways: over slow links a plan without a swarm names the swarm."""
    fast = wh.cluster("t4:4x1")
    levels = tuple(
        dataclasses.replace(
            level, bandwidth_bytes_per_second=25e6, latency_seconds=LATENCY_SECONDS
        )
        for level in fast.levels
    )
    slow = dataclasses.replace(fast, levels=levels)
    plain = planned(cluster=slow, mesh=None, num_micro_batches=None)
    plan = plain.what_if(swarm=True, bandwidth="200Mb/s")
    assert plan.swarm is not None
    ratio = plain.time.step_seconds / plan.swarm.step_seconds
    assert f"{ratio:.2g} times as long" in plan.why("synchronous")
    (note,) = (n for n in plain.notes if n.startswith("a swarm of the same devices"))
    faster = (
        f"{ratio:.2g} times faster" if ratio > 1 else f"{1 / ratio:.2g} times slower"
    )
    assert faster in note
    found = planned(cluster=fast, mesh=None, num_micro_batches=None)
    assert not any("swarm" in note for note in found.notes)
    # A swarm's micro-batches do not divide 4 samples, and the plan names none.
    found = planned(rows=4, cluster=slow, mesh=None, num_micro_batches=None)
    assert not any("swarm" in note for note in found.notes)


def test_a_wire_that_is_asked_for_is_taken() -> None:
    found = swarm_plan("10Tb/s", wire="bf16")
    assert found.swarm is not None and found.swarm.wire == "bf16"
    assert "as asked" in found.why("wire")


def test_sums_are_counted_in_the_format_that_is_asked_for(plan: wh.Plan) -> None:
    """By the plan, its hash, its words and the simulator."""
    narrow = swarm_plan(sum_wire="int8")
    assert narrow.swarm is not None and plan.swarm is not None
    assert (plan.swarm.sum_wire, narrow.swarm.sum_wire) == ("f32", "int8")
    assert narrow.hash != plan.hash
    assert "gradients in int8 takes" in narrow.why("micro-batches")
    whole, less = (setting_of(p)[0].stages[0].gradient_bytes for p in (plan, narrow))
    assert less == packed_bytes(whole // 4)
    assert narrow.swarm.step_seconds < plan.swarm.step_seconds


@pytest.mark.relaxed_promotion  # Optax promotes its counts
def test_memory_is_that_of_what_a_peer_keeps() -> None:
    """Of the middle stage, which reads no micro-batch of data; sums are not kept."""
    job = jobs.make()
    plan = job_plans.make_plan(
        job,
        job_plans.abstract_model(job),
        job_plans.first_batch(job, None),
        cluster("cpu:3"),
        mesh={"stage": jobs.STAGES},
        num_micro_batches=jobs.COUNT,
        swarm=True,
        bandwidth="10Gb/s",
        wire="f32",
    )
    with swarm(steps=1) as found:
        for number in range(jobs.STAGES):
            found.join(number)
        found.run()
        worker = found.peers[1].worker
        held = (worker._tensors, worker._inputs, worker._gradients, worker._parts)
        kept = sum(x.nbytes for each in held for part in each.values() for x in part)
        states = sum(x.nbytes for s in worker._states.values() for x in s.leaves[:7])
    assert plan.swarm is not None
    stage = plan.swarm.stages[1]
    assert stage.host_bytes == kept + stage.state_bytes + stage.gradient_bytes
    assert 2 * stage.state_bytes == states
    assert stage.memory_bytes > 2 * stage.state_bytes + stage.gradient_bytes


def test_peers_without_the_memory_for_what_runs_are_refused() -> None:
    """Not the device's, which a synchronous plan needs alike, but the host's."""
    small = dataclasses.replace(
        cluster("t4:6x1").nodes[0].kind, host_memory_bytes=10**6
    )
    nodes = tuple(Node(kind=small, count=1) for _ in range(6))
    peers = dataclasses.replace(cluster("t4:6x1"), nodes=nodes)
    with pytest.raises(wh.PlanError, match="of 3 stages has.*10.6 MB of a peer's host"):
        swarm_plan(cluster=peers)


def test_the_fewest_stages_are_taken() -> None:
    found = swarm_plan(mesh=None)
    assert found.swarm is not None and len(found.swarm.stages) == 2
    assert found.why("stages").startswith("2 stages, the fewest that fit")


def test_plan_files_hold_the_swarm(plan: wh.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    read = wh.Plan.load(tmp_path / "plan.json")
    assert read.swarm == plan.swarm and read.hash == plan.hash


def test_the_hash_is_of_what_peers_must_agree_on(plan: wh.Plan) -> None:
    assert plan.swarm is not None
    faster = dataclasses.replace(plan.swarm, step_seconds=1.0)
    other = dataclasses.replace(plan.swarm, wire="f32")
    assert dataclasses.replace(plan, swarm=faster).hash == plan.hash
    assert dataclasses.replace(plan, swarm=other).hash != plan.hash
    assert dataclasses.replace(plan, swarm=None).hash != plan.hash


def test_another_question_keeps_the_swarm(plan: wh.Plan) -> None:
    found = plan.what_if(bandwidth="10Tb/s")
    assert found.swarm is not None and found.swarm.wire == "f32"


def test_charts_of_the_law_and_of_a_simulated_run(
    plan: wh.Plan, tmp_path: Path
) -> None:
    table = wh.square_cube(planned(cluster="t4:3x1"), bandwidths=["200Mb/s", "10Gb/s"])
    chart = table.chart()
    for points in (*chart.lines.values(), chart.apart):
        values = [value for _, value in points]
        assert values == sorted(values) and 0 < values[0] and values[-1] <= 1
    rows = [row for row in table.rows if row.bytes_per_second == 25e6]
    assert least(rows, 1.25e9, 1, overlap=True) == table.utilization(1.25e9)
    assert table.utilization(1.25e9, overlap=False) == pytest.approx(
        least(rows, 1.25e9, 1, overlap=False)
    )
    by_width = [points[20][1] for points in chart.lines.values()]
    assert by_width == sorted(by_width)
    setting, link = setting_of(plan)
    trace = [
        ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{n}", link=link)
        for n in range(6)
    ]
    found = simulate(setting, trace, 20.0)
    assert found.chart().points == found.timeline != ()
    assert found.serving[0] == (0.0, (2, 3, 1)) and sum(found.serving[-1][1]) == 6
    window = found.seconds / len(found.chart().rates())
    committed = sum(rate * window for _, rate in found.chart().rates())
    assert committed == pytest.approx(found.timeline[-1][1])
    assert f"{found.micro_batches:,} micro-batches" in str(found)
    for picture in (chart, found.chart()):
        picture.save(tmp_path / "picture.svg")
        drawn = (tmp_path / "picture.svg").read_text()
        assert "one way (Mb/s)" in drawn or "simulated time (min)" in drawn
        assert "<svg" in picture._repr_mimebundle_()["text/html"]


def test_latency_makes_nobody_time_out(plan: wh.Plan) -> None:
    """A call of a millisecond takes 40 ms on its way."""
    setting, link = setting_of(plan, micro_batches=24)
    trace = [
        ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{n}", link=link)
        for n in range(6)
    ]
    assert simulate(setting, trace, 10.0).late == 0


def test_the_closed_form_is_close_to_the_simulator(plan: wh.Plan) -> None:
    swarm = plan.swarm
    assert swarm is not None
    setting, link = setting_of(plan, micro_batches=400)
    trace = [
        ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{n}", link=link)
        for n in range(6)
    ]
    closed = closed_form_seconds(swarm, 400, 12)
    found = simulate(setting, trace, 10 * closed).step_seconds[1]
    assert found == pytest.approx(closed, rel=0.25)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"swarm": True}, "give the bandwidth of each peer's link"),
        ({"sum_wire": "f16"}, "sum_wire is given without swarm=True"),
        (
            {"swarm": True, "bandwidth": "1Gb/s", "sum_wire": "bf16"},
            "sum_wire.*bf16.*one of f32, f16, int8",
        ),
        ({"wire": "int8"}, "wire is given without swarm=True"),
        ({"swarm": True, "bandwidth": "fast"}, "expected a bandwidth such as"),
        ({"swarm": True, "bandwidth": "1Gb/s", "wire": "f8"}, "one of f32, bf16, int8"),
        (
            {"swarm": True, "bandwidth": "1Gb/s", "mesh": {"tensor": 2}},
            "only the axis stage can be fixed",
        ),
        (
            {"swarm": True, "bandwidth": "1Gb/s", "cluster": "t4:2x1"},
            "2 peers for 3 stages",
        ),
        (
            {"swarm": True, "bandwidth": "1Gb/s", "cluster": "t4:3x1+v100:3x1"},
            "has t4, v100",
        ),
    ],
)
def test_what_cannot_be_a_swarm_is_said(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(WhaleError, match=match):
        planned(**settings)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200Mb/s", 25e6), ("25MB/s", 25e6), ("1 Gb/s", 1.25e8), (5, 5.0)],
)
def test_bandwidths_are_read(text: object, rate: float) -> None:
    assert bytes_per_second(text) == rate


@pytest.mark.parametrize("wrong", ["", "200", "Mb/s", "-1Mb/s", "nanMb/s", 0, True])
def test_what_is_no_bandwidth_is_refused(wrong: object) -> None:
    with pytest.raises(
        WhaleError, match="'200Mb/s' \\(bits\\) or '25MB/s' \\(bytes\\)"
    ):
        bytes_per_second(wrong)


def test_rates_are_shown_in_bits() -> None:
    assert [rate_words(r) for r in (25e6, 1e4, 1.25e12)] == [
        "200 Mb/s",
        "80 kb/s",
        "10 Tb/s",
    ]


@pytest.mark.parametrize("values", [0, 1, 255, 256, 257, 8192])
def test_bytes_are_those_of_the_codec(values: int) -> None:
    assert wire_bytes(values, "int8") == packed_bytes(values)


# The square-cube law.


def test_the_table_follows_from_bytes_and_times() -> None:
    found = planned(cluster="t4:3x1")
    table = wh.square_cube(found, bandwidths=["200Mb/s", 1e15])
    assert len(table.rows) == 6
    row = table.rows[1]
    work = table.stages[1]
    assert row.wire_seconds == work.received_bytes / 25e6
    assert row.utilization == pytest.approx(
        work.compute_seconds / (work.compute_seconds + row.wire_seconds)
    )
    assert row.at(row.busy_width).overlapped == pytest.approx(1.0)
    assert row.at(2.0).wire_seconds / row.at(2.0).compute_seconds == pytest.approx(
        row.wire_seconds / row.compute_seconds / 2
    )
    assert table.utilization(1e15) == 1.0
    assert table.utilization(25e6, overlap=False) < table.utilization(25e6) < 1
    text = str(table)
    assert "200 Mb/s" in text and "busy from width" in text
    known = "has 25000000.0, 1000000000000000.0$"
    with pytest.raises(WhaleError, match=f"no link of 7 bytes per second .* {known}"):
        table.utilization(7)


def test_a_plan_without_stages_has_no_borders() -> None:
    with pytest.raises(WhaleError, match='has no stages; expected .*"stage": 3'):
        wh.square_cube(planned(mesh={"stage": 1}, cluster="t4:2"))
    with pytest.raises(WhaleError, match="wire is 'f8'; expected one of f32"):
        wh.square_cube(planned(cluster="t4:3x1"), wire="f8")


def slope(widths: list[int], ratios: list[float]) -> float:
    """Of a straight line through points in log-log."""
    return float(np.polyfit(np.log(widths), np.log(ratios), 1)[0])


def test_wire_over_compute_falls_as_one_over_the_width() -> None:
    widths, ratios = [64, 256, 1024], []
    for width in widths:
        work = stage_works(planned(width, cluster="t4:3x1"), "f32")[1]
        ratios.append(work.wire_bytes / work.flops)
    assert slope(widths, ratios) == pytest.approx(-1, abs=0.1)


def transformer(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Three blocks of one attention head, one a stage."""
    with wh.pipeline():
        for p in params:
            with wh.stage():
                scores = (x @ p["query"]) @ (x @ p["key"]).swapaxes(1, 2)
                x = x + jax.nn.softmax(scores) @ (x @ p["value"])
                x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return (x * x).mean()


def test_the_law_holds_for_transformers() -> None:
    widths, ratios = [64, 256, 1024], []
    for width in widths:
        square = jax.ShapeDtypeStruct((width, width), jnp.float32)
        up = jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
        down = jax.ShapeDtypeStruct((4 * width, width), jnp.float32)
        block = dict.fromkeys(("query", "key", "value"), square)
        found = wh.plan(
            transformer,
            [{**block, "up": up, "down": down}] * 3,
            jax.ShapeDtypeStruct((8, 16, width), jnp.float32),
            optimizer=optax.sgd(0.1),
            cluster="t4:3x1",
            mesh={"stage": 3},
            num_micro_batches=2,
        )
        work = stage_works(found, "f32")[1]
        received, sent = zip(*border_bytes(found, 1, "f32"), strict=True)
        assert sum(received) + sum(sent) == 5 * 4 * 16 * width * 4
        ratios.append(work.wire_bytes / work.flops)
    assert slope(widths, ratios) == pytest.approx(-1, abs=0.1)


@pytest.mark.relaxed_promotion  # optax promotes its step count
def test_no_schedule_gives_a_peer_several_parts() -> None:
    """Interleaved stages would be faster here, were they of one program."""

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x)

    machine = wh.cluster("cpu:4")
    (level,) = machine.levels
    slow = dataclasses.replace(level, bandwidth_bytes_per_second=1e7)
    layers = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
    batch = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plan = wh.plan(
        loss,
        layers,
        batch,
        optimizer=optax.adam(1e-3),
        cluster=dataclasses.replace(machine, levels=(slow,)),
        precision="bf16",
    )
    assert any("swarm" in note for note in plan.notes)
