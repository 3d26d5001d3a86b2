"""The catalogue: complete, sourced, and found by every name."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

from whalejax.meshes import WhaleError, cluster, device_kind, kind_names, kind_table
from whalejax.meshes.catalogue import (
    catalogue_text,
    entries,
    entry_of_device,
    number_paths,
)
from whalejax.meshes.formats.device_aliases import read_device


KINDS = (
    "p100-16 v100-16 v100-32 t4 a100-40 a100-80 h100 h200 b200 gh200-96 rtx2080 "
    "titanrtx rtx3090 v100-pcie p40 titanv a10 a10g a30 a40 a6000 l4 l20 l40 l40s "
    "rtx6000ada rtx2080ti rtx3080 rtx4090 rtx5090 h100-nvl h20 b100 b300 gb200 "
    "gb200-nvl36 gb300 gb300-nvl36 mi210 mi250x mi300a mi300x mi325x mi355x w6800 "
    "v4 v5e v5p v6e v7x cpu"
).split()


def test_has_every_kind() -> None:
    assert list(kind_names()) == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_every_number_has_a_dated_source(name: str) -> None:
    table = tomllib.loads(catalogue_text())["kinds"][name]
    table.pop("sources")
    sources = {source.field: source for source in entries()[name].sources}
    assert sorted(sources) == sorted(number_paths(table))
    for source in sources.values():
        assert re.match(r"https://|assumption: \S|measured: \S", source.url), source
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", source.date), source
        assert source.title


def test_no_source_and_no_source_path_is_unused() -> None:
    data = tomllib.loads(catalogue_text())
    used: set[str] = set()
    for table in data["kinds"].values():
        given = table.pop("sources")
        used |= set(given.values())
        numbers = number_paths(table)
        for path in given:
            assert any(n == path or n.startswith(f"{path}.") for n in numbers), path
    assert used == set(data["sources"])


def test_dense_rates_rise_as_precision_falls() -> None:
    for name in KINDS:
        rates = dict(device_kind(name).flops_per_second)
        order = [rates[d] for d in ("f32", "tf32", "f16", "f8", "f4") if d in rates]
        assert order == sorted(order), name


def test_only_tori_have_no_node_and_every_accelerator_has_a_network() -> None:
    for name, entry in entries().items():
        assert (entry.torus is None) == (entry.kind.platform != "tpu"), name
        assert (entry.node is None) == (entry.torus is not None), name
        assert (entry.network is None) == (name == "cpu"), name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("A100", "a100-80"),
        ("v100", "v100-32"),
        (" H100-80 ", "h100"),
        ("RTX-3090", "rtx3090"),
        ("Trillium", "v6e"),
        ("tpu7x", "v7x"),
    ],
)
def test_aliases_in_any_case(alias: str, name: str) -> None:
    assert device_kind(alias).name == name


def test_no_name_means_two_kinds() -> None:
    names = [n.lower() for e in entries().values() for n in (e.kind.name, *e.aliases)]
    shown = [n.lower() for e in entries().values() for n in e.jax_names]
    assert len(names) == len(set(names))
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("text", ["v3:2x4", "v2:8", "gaudi3:2x8", "trn1:8"])
def test_devices_known_by_their_datasheet_alone_are_joined_as_another(
    text: str,
) -> None:
    name, numbers = text.split(":")
    device = read_device(name)
    with pytest.warns(UserWarning, match="by its datasheet, as efficient as"):
        found = cluster(text)
    assert found.nodes[0].kind == device.entry.kind
    assert found.num_devices == math.prod(map(int, numbers.split("x")))


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(WhaleError) as error:
        device_kind("h1000")
    assert str(error.value).startswith("unknown device kind 'h1000'. Did you mean h100")
    assert str(error.value).endswith(
        f"Known: {', '.join(KINDS)}. Any other kind can be described in a TOML file"
    )


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
    ],
)
def test_found_by_what_jax_shows(shown: str, name: str) -> None:
    found = entry_of_device(shown)
    assert found is not None
    assert found.kind.name == name


def test_a_device_that_is_not_listed() -> None:
    assert entry_of_device("Abacus") is None


def test_the_documentation_has_the_table_of_kinds() -> None:
    """``python -m whalejax.meshes.kind_table`` prints it anew."""
    page = Path(__file__).resolve().parents[2] / "docs" / "plan" / "kinds.md"
    assert "\n".join(kind_table.table()) in page.read_text(encoding="utf-8")


def test_numbers_keep_their_type_through_a_file() -> None:
    """Hashes of plans are of text: 700 and 700.0 are two."""
    for one in entries().values():
        rates = [rate for _, rate in one.kind.flops_per_second]
        for value in (one.kind.watts, one.kind.memory_bytes_per_second, *rates):
            assert value is None or isinstance(value, float)
