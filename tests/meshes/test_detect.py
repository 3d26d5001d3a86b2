"""Clusters from devices that only look like devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import pytest

import whalejax.meshes.detect
from whalejax.meshes import Cluster, WhaleError, cluster
from whalejax.meshes.detect import assemble, detect


@dataclass(frozen=True)
class _Device:
    device_kind: str
    platform: str = "gpu"
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, ...] = ()


H100 = "NVIDIA H100 80GB HBM3"


def _tpus(kind: str, lengths: tuple[int, int, int], slices: int = 1) -> list[_Device]:
    cores = 2 if kind == "TPU7x" else 1
    return [
        _Device(kind, "tpu", slice_index=s, coords=(x, y, z))
        for s in range(slices)
        for z in range(lengths[2])
        for y in range(lengths[1])
        for x in range(lengths[0])
        for _ in range(cores)
    ]


def test_gpus_of_one_host() -> None:
    assert assemble([_Device(H100)] * 8, None) == cluster("h100:8")


def test_gpus_of_several_hosts() -> None:
    devices = [_Device(H100, process_index=i // 8) for i in range(32)]
    assert assemble(devices, None) == cluster("h100:4x8")


def test_processes_of_one_host_are_one_node() -> None:
    devices = [_Device(H100, process_index=i, slice_index=i // 8) for i in range(16)]
    assert assemble(devices, None) == cluster("h100:2x8")


def test_hosts_of_unlike_kinds() -> None:
    devices = [
        *[_Device("Tesla V100-SXM2-32GB", process_index=0)] * 8,
        *[_Device("Tesla P100-SXM2-16GB", process_index=1)] * 8,
    ]
    assert assemble(devices, None) == cluster("v100-32:8+p100-16:8")


def test_measured_kind_and_link_replace_the_catalogue() -> None:
    one = cluster("h100:8")
    kind = dataclasses.replace(one.nodes[0].kind, memory_bytes_per_second=1e12)
    level = dataclasses.replace(one.levels[0], latency_seconds=1e-3)
    node = dataclasses.replace(one.nodes[0], kind=kind)
    measured = dataclasses.replace(one, nodes=(node,), levels=(level,))
    assert assemble([_Device(H100)] * 8, measured) == measured
    both = assemble([_Device(H100, process_index=i // 8) for i in range(16)], measured)
    assert both.kinds == (kind,)
    assert both.levels == (level, cluster("h100:2x8").levels[1])


@pytest.mark.parametrize(
    ("kind", "lengths", "slices", "text"),
    [
        ("TPU v5", (4, 4, 8), 1, "v5p:8x4x4"),
        ("TPU v5 lite", (16, 8, 1), 1, "v5e:8x16"),
        ("TPU v5 lite", (4, 2, 1), 2, "v5e:2x2x4"),
        ("TPU7x", (2, 2, 1), 1, "v7x:1x2x2"),
    ],
)
def test_tpus_by_their_coordinates(
    kind: str, lengths: tuple[int, int, int], slices: int, text: str
) -> None:
    found = assemble(_tpus(kind, lengths, slices), None)
    expected = cluster(text)
    assert found.nodes == expected.nodes
    assert [
        (level.size, level.bandwidth_bytes_per_second, level.latency_seconds)
        for level in found.levels
    ] == [
        (level.size, level.bandwidth_bytes_per_second, level.latency_seconds)
        for level in expected.levels
    ]
    torus = [level.name for level in found.levels if level.torus]
    assert torus == ["ici-x", "ici-y", "ici-z"][: len(torus)]


def test_tpus_that_fill_no_box() -> None:
    devices = [d for d in _tpus("TPU v5", (2, 2, 2)) if d.coords != (0, 0, 0)]
    assert assemble(devices, None).num_devices == 7


def test_unknown_accelerators_are_named_together() -> None:
    devices = [_Device("Abacus"), _Device("Quipu", process_index=1)]
    with pytest.raises(WhaleError) as error:
        assemble(devices, None)
    assert str(error.value) == (
        "devices: 2 problems\n"
        "  1. 'Abacus' is not in the catalogue. Measure it with whalejax calibrate -o "
        "cluster.toml, or describe it in a TOML file\n"
        "  2. 'Quipu' is not in the catalogue. Measure it with whalejax calibrate -o "
        "cluster.toml, or describe it in a TOML file"
    )


def test_an_unknown_accelerator_that_was_measured() -> None:
    measured = cluster("h100:2")
    assert assemble([_Device("Abacus")] * 2, measured) == measured


def test_cpu_without_calibration_takes_the_reference_and_this_memory() -> None:
    found = detect(calibrate=False)
    assert found == Cluster.detect(calibrate=False)
    assert found.describe() == "8×CPU (1 node of 8, host)"
    reference = cluster("cpu:8")
    assert found.levels == reference.levels
    assert found.hash == reference.hash
    assert found.with_memory(1) == dataclasses.replace(
        reference.with_memory(1), nodes=found.with_memory(1).nodes
    )
    assert found.memory_bytes > 2**20


def test_local_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = cluster("cpu:8")
    monkeypatch.setattr(whalejax.meshes.detect, "calibrate_local", lambda: measured)
    assert cluster(" Local") is measured
    assert Cluster.detect() is measured


def test_several_cpu_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(WhaleError) as error:
        detect()
    assert str(error.value) == (
        "2 CPU processes with 8 devices; only the devices of one process can be "
        'measured. On one machine, give cluster="cpu:8", with rough times from the '
        "catalogue. Or describe the cluster in a TOML file, such as whalejax calibrate "
        "-o cluster.toml writes"
    )
