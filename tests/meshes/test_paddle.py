"""PaddlePaddle's descriptions of clusters mean what they say, or are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import whalejax as wh
from whalejax.meshes.formats.paddle_json import from_data


def machine(number: int, machines: int = 2, gpus: int = 4) -> dict[str, Any]:
    """Four GPUs, opposite ones joined twice as fast, a processor and a network card."""
    first = 10 * number
    devices: list[dict[str, Any]] = [
        {
            "global_id": first + place,
            "local_id": place,
            "type": "GPU",
            "model": " Tesla V100-SXM2-32GB",
            "memory": "32",
            "sp_gflops": "15700",
            "dp_gflops": 7800,
        }
        for place in range(gpus)
    ]
    devices.append(
        {
            "global_id": first + 8,
            "local_id": 0,
            "type": "CPU",
            "arch": "x86_64",
            "vendor": "GenuineIntel",
            "model": "Xeon",
            "memory": "502",
            "sp_gflops": "150",
        }
    )
    devices.append(
        {"global_id": first + 9, "local_id": 0, "type": "NIC", "width": 12.5}
    )
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    links = [
        link(first + a, first + b, "NVL", 44 if (a - b) % 2 == 0 else 22)
        for a, b in pairs
    ]
    links += [link(first + a, first + 9, "PHB", 10) for a in range(gpus)]
    others = [n for n in range(machines) if n != number]
    links += [link(first + 9, 10 * other + 9, "NET", 12) for other in others]
    place = {"hostname": f"m{number}", "addr": "10.0.0.1", "port": "60009"}
    return {**place, "devices": devices, "links": links}


def link(source: int, target: int, kind: str, bandwidth: float) -> dict[str, Any]:
    ends = {"source_global_id": source, "target_global_id": target}
    return {**ends, "type": kind, "bandwidth": bandwidth}


ALPHA = {
    "inter": {"ring": "NET", "tree": "NET"},
    "intra": {"ring": "NVL", "tree": "PHB"},
    "base": {"ring": 8.4, "tree": 0},
    "switch": 10.0,
}
TWO = {"alpha_latency": ALPHA, "machines": [machine(0), machine(1)]}


def gathered(number: int) -> dict[str, Any]:
    """A machine as PaddlePaddle's launcher describes it: GPUs and what joins them."""
    found = machine(number)
    found["devices"] = found["devices"][:4]
    ids = {device["global_id"] for device in found["devices"]}
    found["links"] = [
        {**one, "latency": 0.0}
        for one in found["links"]
        if {one["source_global_id"], one["target_global_id"]} <= ids
    ]
    del found["port"]
    of_all = {"memory": 300.0, "sp_gflops": 3072, "dp_gflops": 1536, "latency": 0.0}
    kinds = {"device_type": "GPU", "device_type_full": "GPU-Tesla V100-SXM2-32GB"}
    return {**found, **of_all, **kinds, "bandwidth": 16.0}


# Every machine numbers its devices from 0, as it does where each writes its own file.
TOPO = {"topo": {"GPU-Tesla V100-SXM2-32GB": [gathered(0), gathered(0)]}}


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps(TWO))
    found = wh.Cluster.from_paddle(path)
    assert wh.cluster(str(path)) == found
    assert str(found) == "8×V100-32 (2 nodes of 4, nvlink + infiniband)"
    assert found.kinds == wh.cluster("v100-32:4").kinds
    # Paths over the cards are as wide as their narrowest link, for all four together.
    assert found.links[0] == (0, 22e9, 44e9, 22e9, *[10e9 / 4] * 4)
    assert [level.bandwidth_bytes_per_second for level in found.levels] == [22e9, 2.5e9]
    for kept in (wh.Cluster.from_json(json.loads(json.dumps(found.to_json()))),):
        assert kept == found
    found.save(tmp_path / "two.toml")
    assert wh.Cluster.load(tmp_path / "two.toml") == found
    assert found.part(4).links == tuple(row[:4] for row in found.links[:4])


def test_latencies_that_are_given_count() -> None:
    data = copy.deepcopy(TWO)
    for one in data["machines"]:  # type: ignore[index]
        for entry in one["links"]:
            entry["latency"] = "0.004"
    levels = from_data(data, "it").levels
    assert [level.latency_seconds for level in levels] == pytest.approx([12e-6, 4e-6])


def test_processors_compute_where_nothing_else_does() -> None:
    data = {
        "machines": [
            {
                "devices": [
                    {"global_id": n, "type": "CPU", "memory": 8, "sp_gflops": 100 + n}
                    for n in range(2)
                ],
                "links": [link(0, 1, "SYS", 5)],
            }
        ]
    }
    data["machines"][0]["devices"][1]["sp_gflops"] = 100  # type: ignore[index]
    found = from_data(data, "it")
    assert found.platform == "cpu" and found.num_devices == 2
    assert dict(found.slowest.flops_per_second)["f32"] == 100e9
    assert found.memory_bytes == 8 * 2**30
    assert found.links == ((0, 5e9), (5e9, 0))


def test_what_paddles_own_reader_accepts_is_read() -> None:
    """Cards whose number in their machine is their type, hops, links of no rate."""
    data = copy.deepcopy(TWO)
    machines: Any = data["machines"]
    for one in machines:
        one["devices"][-1]["local_id"] = "NIC"
        for entry in one["links"]:
            entry["hop"] = 1
    assert from_data(data, "it") == from_data(TWO, "it")
    data["alpha_latency"]["base"]["inter"] = "NET"  # type: ignore[index]
    data["alpha_latency"]["switch"] = "10.0"  # type: ignore[index]
    assert from_data(data, "it") == from_data(TWO, "it")
    del machines[0]["links"][0]["bandwidth"]
    assert from_data(data, "it").links[0][1] == 24e9


def test_a_topology_that_paddles_launcher_gathered() -> None:
    found = from_data(TOPO, "it")
    assert str(found) == "8×V100-32 (2 nodes of 4, nvlink + infiniband)"
    # PaddlePaddle takes 12 GB/s between machines; four devices share them.
    assert found.links[0] == (0, 22e9, 44e9, 22e9, *[12e9 / 4] * 4)
    by_number = {"topo": {"GPU": {"0": gathered(0), "1": gathered(1)}}}
    assert from_data(by_number, "it") == found
    alone = from_data(gathered(0), "it")
    assert str(alone) == "4×V100-32 (1 node of 4, nvlink)"
    assert alone.links == tuple(row[:4] for row in found.links[:4])


@pytest.mark.parametrize(
    ("topo", "text"),
    [
        (5, "topo: got 5, expected a table"),
        ({"GPU": 5}, "topo.GPU: got 5, expected a list of machines"),
        ({"GPU": [5]}, "topo.GPU.0: got 5, expected a table"),
        ({"GPU": [{"devices": [5]}]}, "topo.GPU.0.devices.0: got 5, expected a table"),
        ({}, "machines: missing, expected a list of at least one machine"),
    ],
)
def test_mistakes_in_a_topology(topo: Any, text: str) -> None:
    with pytest.raises(wh.WhaleError) as error:
        from_data({"topo": topo}, "it")
    assert text in str(error.value)


@pytest.mark.parametrize("memory", [float("inf"), float("nan"), 1e308, 10**400, "1e9"])
def test_memory_that_no_device_has(memory: Any) -> None:
    data = broken("machines.0.devices.0.memory", memory)
    with pytest.raises(wh.WhaleError, match="memory: got .*, expected a number"):
        from_data(data, "it")


def test_infinity_in_a_file(tmp_path: Path) -> None:
    data = broken("machines.0.devices.0.memory", float("inf"))
    (tmp_path / "it.json").write_text(json.dumps(data))
    with pytest.raises(wh.WhaleError, match="Infinity is no number of JSON"):
        wh.Cluster.from_paddle(tmp_path / "it.json")


def broken(path: str, value: Any) -> dict[str, Any]:
    """The two machines with one entry changed; ``None`` takes it away."""
    data: Any = copy.deepcopy(TWO)
    *way, last = path.split(".")
    inner = data
    for key in way:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    if value is None:
        del inner[last]
    elif isinstance(inner, list):
        inner[int(last)] = value
    else:
        inner[last] = value
    return dict(data)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("machine", [], "machine: unknown key. Did you mean machines?"),
        ("machines", [], "machines: missing, expected a list of at least one"),
        ("machines", 3, "machines: got 3, expected a list of tables"),
        ("machines.0.port", "x", 'machines.0.port: got "x", expected a number of a'),
        ("machines.0.devices.0.gpu", 1, "machines.0.devices.0.gpu: unknown key"),
        (
            "machines.0.devices.0.global_id",
            None,
            "global_id: missing, expected a whole",
        ),
        ("machines.0.devices.1.global_id", 0, "got 0, expected a number that no other"),
        ("machines.0.devices.0.type", "TPU", 'type: got "TPU", expected one of GPU'),
        ("machines.0.devices.0.model", "Abacus", "'Abacus' names no family of the"),
        (
            "machines.0.devices.0.memory",
            "-1",
            "memory: got -1.0, expected a number abo",
        ),
        ("machines.0.devices.0.sp_gflops", 0, "sp_gflops: got 0.0, expected a number"),
        ("machines.0.devices.0.sp_gflops", "fast", 'got "fast", expected a number'),
        (
            "machines.0.links.0.bandwidth",
            0,
            "links.0.bandwidth: got 0.0, expected GB/s",
        ),
        ("machines.0.links.0.latency", -1, "latency: got -1.0, expected ms, at least"),
        ("machines.0.links.0.type", "TCP", 'got "TCP", expected one of LOC, SYS, PHB'),
        (
            "machines.0.links.0.target_global_id",
            77,
            "links.0.target_global_id: got 77, expected a device's global_id: 0, 1, 2",
        ),
        ("machines.0.links.1", link(0, 1, "NVL", 5), "expected at most one link 0 → 1"),
        ("machines.0.links.0.hop", -1, "hop: got -1, expected a whole number of at"),
        ("machines.0.devices.0.local_id", "NIC", 'local_id: got "NIC", expected a wh'),
        ("alpha_latency.base.inter", [], "base.inter: got [], expected µs, or one"),
        ("alpha_latency.base.ring", "FAST", 'got "FAST", expected µs, or one of LOC'),
        ("machines.0.links", [], "no path joins device 0 and 1, 2, 3, 10, 11, 12, 13"),
    ],
)
def test_mistakes_are_said_with_their_place(path: str, value: Any, text: str) -> None:
    with pytest.raises(wh.WhaleError) as error:
        from_data(broken(path, value), "it")
    assert text in str(error.value)


def test_all_mistakes_are_said_at_once() -> None:
    data = broken("machines.0.links.0.bandwidth", 0)
    data["machines"][1]["devices"][2]["type"] = "QPU"
    with pytest.raises(
        wh.WhaleError, match=r"it: 2 problems[\s\S]*QPU[\s\S]*bandwidth"
    ):
        from_data(data, "it")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(wh.WhaleError, match="does not exist"):
        wh.Cluster.from_paddle(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("machines: 3")
    with pytest.raises(wh.WhaleError, match="cannot be read as JSON"):
        wh.cluster(str(tmp_path / "text.json"))
    with pytest.raises(wh.WhaleError, match="expected a table"):
        from_data([], "it")


@pytest.mark.parametrize(
    ("data", "what"),
    [({"whalejax_plan": 5}, "a plan"), ({"x": 1}, "no description of a cluster")],
)
def test_a_file_of_something_else_is_told(
    tmp_path: Path, data: dict[str, Any], what: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(data))
    with pytest.raises(wh.WhaleError, match=f"is {what}: it has no list of machines"):
        wh.cluster(str(path))
