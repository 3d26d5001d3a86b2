"""Measuring: the programs, the budget, and a real run in a process of its own."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from whalejax.meshes import Cluster, WhaleError, cluster
from whalejax.meshes.calibration import calibrate, probes
from whalejax.meshes.calibration.probes import (
    EXP_BYTES,
    ChainProbe,
    CollectiveProbe,
    Convolution,
    Elementwise,
    FirstTouchProbe,
    Probe,
    ProductProbe,
)
from whalejax.meshes.jax_mesh import build_mesh


DEVICES = jax.devices()


def _result(run: probes.Run, iterations: int) -> np.ndarray:
    return np.asarray(run(iterations), np.float64)


@pytest.mark.parametrize("shape", [(16, 32, 64), (16, 64, 32)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_products_neither_grow_nor_vanish(
    dtype: str, shape: tuple[int, int, int]
) -> None:
    run = probes.matmul_run(DEVICES, dtype, *shape)
    once, often = _result(run, 1), _result(run, 500)
    assert once.shape == (8, *shape[:2])
    assert np.abs(often).mean() == pytest.approx(np.abs(once).mean(), rel=0.2)


def test_products_of_a_batch_are_those_of_its_matrices() -> None:
    one = _result(probes.matmul_run(DEVICES, "f32", 16, 32, 64), 3)
    many = _result(probes.matmul_run(DEVICES, "f32", 16, 32, 64, batch=4), 3)
    assert many.shape == (8, 4, 16, 32)
    np.testing.assert_allclose(many, np.repeat(one[:, None], 4, axis=1), rtol=1e-6)


@pytest.mark.parametrize("group_size", [2, 8])
@pytest.mark.parametrize("collective", list(probes.COLLECTIVES))
def test_collectives_of_ones_stay_ones(collective: str, group_size: int) -> None:
    run = probes.collective_run(DEVICES, collective, group_size, 256)
    local = 64 // group_size if collective == "all-gather" else 64
    np.testing.assert_array_equal(_result(run, 3), np.ones((8, local)))


@pytest.mark.parametrize("collective", list(probes.COLLECTIVES))
def test_each_collective_is_in_its_compiled_program(collective: str) -> None:
    operation = probes.COLLECTIVES[collective]
    mesh = build_mesh((("in", 8),), DEVICES)
    spec = jax.P("in")
    program = jax.shard_map(
        lambda x: operation(x, 8),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    text = jax.jit(program).lower(np.ones(512, np.float32)).compile().as_text()
    assert text is not None
    found = {name for name in probes.COLLECTIVES if f" {name}(" in text}
    assert found == {collective}


def test_elementwise_programs() -> None:
    np.testing.assert_allclose(
        _result(probes.add_run(DEVICES, 64), 10), np.full((8, 16), 1 + 1e-5), rtol=1e-6
    )
    fixed_point = _result(probes.exp_run(DEVICES, 64), 100)
    np.testing.assert_allclose(fixed_point, np.exp(-fixed_point), rtol=1e-5)
    assert np.isfinite(_result(probes.chain_run(DEVICES), 50)).all()


def test_what_every_run_costs_is_taken_off() -> None:
    now = 0.0

    def run(iterations: int) -> int:
        nonlocal now
        now += 0.5 + 1e-3 * iterations
        return 0

    watch = probes.TimingPlan(clock=lambda: now)
    assert watch.seconds_each(run) == pytest.approx(1e-3)


class _Machine:
    """A clock that programs move: each iteration of a probe costs what is said."""

    def __init__(self, costs: Callable[[Probe], float]) -> None:
        self.now = 0.0
        self.costs = costs
        self.done: list[Probe] = []

    def clock(self) -> float:
        return self.now

    def run_of(self, probe: Probe, devices: object) -> probes.Run:
        self.done.append(probe)

        def run(iterations: int) -> int:
            self.now += self.costs(probe) * iterations
            return 0

        return run


def _measured(
    monkeypatch: pytest.MonkeyPatch, budget: float, costs: Callable[[Probe], float]
) -> tuple[_Machine, probes.Seconds]:
    machine = _Machine(costs)
    monkeypatch.setattr(probes, "_run_of", machine.run_of)
    return machine, probes.measure_devices(DEVICES, budget, machine.clock)


def test_small_and_narrow_products_come_early_on_accelerators() -> None:
    """What any product takes is measured in any case, narrow ones before batches."""
    gpu: Any = SimpleNamespace(platform="gpu")
    found, essential = probes._probes([gpu])
    products = [p for p in found if isinstance(p, ProductProbe)]
    first = [p for p in found[:essential] if isinstance(p, ProductProbe)]
    assert {(p.dtype, p.m) for p in first} >= {("bf16", 256), ("f32", 256)}
    narrow = [i for i, p in enumerate(products) if min(p.k, p.n) == 64 and p.batch == 1]
    batched = [i for i, p in enumerate(products) if p.batch > 1]
    assert len([i for i in narrow if i < batched[0]]) == 4


def test_the_essential_part_is_measured_on_any_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, found = _measured(monkeypatch, 1e-3, lambda _: 0.01)
    assert len(found) == 9
    assert {p.dtype for p in found if isinstance(p, ProductProbe)} == {
        "f32",
        "bf16",
        "f64",
    }
    kinds = {type(p) for p in found}
    assert kinds == {
        ProductProbe,
        Elementwise,
        FirstTouchProbe,
        ChainProbe,
        CollectiveProbe,
    }
    assert machine.done == list(found)


def test_a_budget_is_kept_and_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, found = _measured(monkeypatch, 20.0, lambda _: 0.1)
    assert 9 < len(found) < 50
    assert 15 < machine.now <= 20.0


def test_time_left_over_is_spent_on_a_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[Probe, int] = {}

    def faster_each_time(probe: Probe) -> float:
        calls[probe] = calls.get(probe, 0) + 1
        return 1e-3 / calls[probe]

    machine, found = _measured(monkeypatch, 1000.0, faster_each_time)
    assert len(machine.done) == len(found)
    assert all(found[p] < 1e-3 / 3 / probes._operations_in(p, True) for p in found)
    shapes = {(p.m, p.k, p.n) for p in found if isinstance(p, ProductProbe)}
    assert min(min(s) for s in shapes) == 32
    assert max(s[0] for s in shapes) == 4096
    groups = {p.group_size for p in found if isinstance(p, CollectiveProbe)}
    assert groups == {2, 4, 8}


def test_times_become_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def costs(probe: Probe) -> float:
        match probe:
            case ProductProbe(_, m, k, n, batch):
                return 2 * 2 * m * k * n * batch / (1e9 if batch == 1 else 5e8)
            case FirstTouchProbe(array_bytes):
                return array_bytes / 1e10 + array_bytes / 2e9
            case Elementwise("add", array_bytes):
                return 3 * array_bytes / 1e10
            case Elementwise(_, array_bytes):
                return 2 * array_bytes / 1e10 + array_bytes / 4 / 1e8
            case Convolution():
                m, k, n = probe.product
                return 3 * 2 * m * k * n / 4e8 + probe.turned_bytes / 5e8
            case ChainProbe():
                return probes.OPS_IN_CHAIN * 1e-6
            case CollectiveProbe(collective, size, payload):
                rounds = 2 if collective == "all-reduce" else 1
                # Threads over one memory: a wait for each, and the whole payload.
                return rounds * (1e-5 * size + payload / 1e9)

    machine = _Machine(costs)
    monkeypatch.setattr(probes, "_run_of", machine.run_of)
    monkeypatch.setenv("WHALEJAX_CACHE", str(tmp_path))
    day = datetime.date(2026, 11, 20)
    one = calibrate.calibrate(100.0, clock=machine.clock, today=day)
    kind, level = one.nodes[0].kind, one.levels[0]
    assert one.describe() == "8×CPU (1 node of 8, host)"
    assert kind.matmul_seconds("f32", 64, 64, 64) == pytest.approx(2 * 64**3 / 1e9)
    assert kind.peak_flops("f64") == pytest.approx(1e9)
    assert kind.elementwise_seconds(1e6) == pytest.approx(1e-4)
    assert kind.elementwise_seconds(
        2 * EXP_BYTES[True], transcendentals=EXP_BYTES[True] / 4
    ) == pytest.approx(costs(Elementwise("exp", EXP_BYTES[True])))
    assert kind.op_overhead_seconds == pytest.approx(1e-6)
    assert kind.matmul_seconds("f32", 128, 32, 128, count=9) == pytest.approx(
        9 * 2 * 128 * 32 * 128 / 5e8
    )
    assert kind.fresh_bytes_per_second == pytest.approx(2e9)
    assert kind.convolution_share == pytest.approx(4e8 / 1e9)
    assert kind.turned_bytes_per_second == pytest.approx(5e8)
    assert level.latency_seconds == pytest.approx(1e-5, rel=1e-2)
    assert level.bandwidth_bytes_per_second == pytest.approx(1e9, rel=1e-2)
    assert level.slowdown_of("all-to-all") == pytest.approx(1, rel=1e-2)
    source = kind.sources[-1]
    assert (source.url, source.date) == ("measured: whalejax calibrate", "2026-11-20")
    assert source.title.startswith("cpu on ")
    before = len(machine.done)
    again = calibrate.calibrate(50.0, clock=machine.clock)
    assert again == one
    assert len(machine.done) == before
    calibrate.calibrate(50.0, clock=machine.clock, use_cache=False)
    assert len(machine.done) > before


def test_a_budget_of_nothing() -> None:
    with pytest.raises(WhaleError) as error:
        calibrate.calibrate(0)
    assert str(error.value) == "budget_seconds: got 0, expected a number above zero"


@dataclasses.dataclass
class _Silent:
    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "gpu"

    def memory_stats(self) -> None:
        return None


def test_memory_of_a_device_that_does_not_tell() -> None:
    assert calibrate.device_memory_bytes([_Silent()]) == 80 * 2**30
    with pytest.raises(WhaleError, match="JAX does not tell the memory of Abacus"):
        calibrate.device_memory_bytes([_Silent("Abacus")])


SCRIPT = """
import json, sys
from whalejax.meshes import Cluster
from whalejax.meshes.calibration import calibrate
one = Cluster.of(calibrate.measured(0.5))
one.save(sys.argv[1])
print(json.dumps([one.to_json(), Cluster.of(calibrate.calibrate(0.5)) == one]))
"""


@pytest.mark.full
def test_a_real_run_in_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    environment = {**os.environ, "WHALEJAX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data, cached_is_the_same = json.loads(done.stdout.splitlines()[-1])
    one = Cluster.from_json(data)
    assert cached_is_the_same
    assert Cluster.load(path) == one
    assert (one.num_devices, one.platform) == (8, "cpu")
    kind, level = one.nodes[0].kind, one.levels[0]
    assert {p.dtype for p in kind.matmul_points} == {"f32", "bf16", "f64"}
    assert kind.op_overhead_seconds > 0
    assert kind.fresh_bytes_per_second is None or kind.fresh_bytes_per_second > 0
    assert 2**20 < kind.memory_bytes < 2**50
    assert level.bandwidth_bytes_per_second > 0
    assert kind.matmul_seconds("bfloat16", 1, 2, 3) > 0
    assert kind.sources[-1].url == "measured: whalejax calibrate"


def _found(*more: Probe) -> probes.Seconds:
    every = [
        ProductProbe("f32", 64, 64, 64),
        ProductProbe("bf16", 64, 64, 64),
        Elementwise("add", 2**20),
        Elementwise("exp", EXP_BYTES[False]),
        ChainProbe(),
        *more,
    ]
    return dict.fromkeys(every, 1e-3)


def test_a_known_accelerator_keeps_its_datasheet() -> None:
    devices = [_Silent()] * 2
    found = _found(CollectiveProbe("all-gather", 2, 2**20))
    made = calibrate._cluster(devices, found, calibrate._machine(devices), "2026-11-20")
    one = Cluster.of(made)
    kind, known = one.nodes[0].kind, cluster("h100:2").nodes[0].kind
    assert one.describe() == "2×H100 (1 node of 2, nvlink)"
    assert one.hash == cluster("h100:2").hash
    assert kind.flops_per_second == known.flops_per_second
    alone = 2.0 * 64**3 / kind.matmul_flops_per_second("bf16", 64, 64, 64)
    assert alone == pytest.approx(1e-3)
    assert kind.memory_bytes_per_second == pytest.approx(3 * 2**20 / 1e-3)
    assert {source.field.partition(".")[0] for source in kind.sources} == {
        "flops_per_second",
        "host_memory_bytes",
        "host_link_bytes_per_second",
        "*",
    }
    assert Cluster.from_json(one.to_json()) == one


def test_one_device_alone_has_a_level_without_latency() -> None:
    devices = [_Silent("Abacus v2")]
    with pytest.raises(WhaleError, match="JAX does not tell the memory"):
        calibrate._cluster(devices, _found(), {}, "2026-11-20")
    devices = [_Silent()]
    machine = calibrate._machine(devices)
    found = _found() | {Elementwise("exp", EXP_BYTES[False]): 1e-6}
    one = calibrate._cluster(devices, found, machine, "2026-11-20")
    assert one.levels[0].latency_seconds == 0.0
    assert one.num_devices == 1
    assert ", 1 device, " in one.nodes[0].kind.sources[-1].title
    # exp took no longer than its memory: nothing to charge for it.
    assert one.nodes[0].kind.transcendentals_per_second is None


def test_an_accelerator_does_more_in_a_turn_of_a_loop() -> None:
    small = ProductProbe("f32", 64, 64, 64)
    for probe in (small, Elementwise("add", 2**20), ChainProbe()):
        on_cpu = probes._operations_in(probe, True)
        assert probes._operations_in(probe, False) == probes.REPEATED * on_cpu
    assert probes._repeated([_Silent()]) == probes.REPEATED
    assert probes._repeated(jax.local_devices()) == 1


def test_what_a_loop_repeats_is_done_each_time() -> None:
    mesh = probes._all_device_mesh(jax.local_devices()[:1])
    run = probes._looped(lambda x, y: x + y, mesh, [np.zeros(2), np.ones(2)], 8)
    np.testing.assert_array_equal(np.asarray(run(3))[0], [24.0, 24.0])
