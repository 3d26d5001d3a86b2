"""The fitted constants: within what is possible, and the shapes they mean."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from whalejax.meshes import device_kind
from whalejax.meshes.catalogue import efficiency_notes, entries
from whalejax.meshes.fitted_constants import (
    ASSUMED,
    CORE,
    Achieved,
    constants,
    pace_of,
    read,
    shape_share,
    tile_share,
    write,
)
from whalejax.meshes.ratings import POWER


SHARES = (
    "tile_medium tile_small tile_smallest tile_idle attention attention_before "
    "unaligned memory node "
    "network point overlap_gradients overlap_parameters"
).split()


def test_shares_are_shares_and_times_are_times() -> None:
    for achieved in constants().platforms.values():
        for field in dataclasses.fields(Achieved):
            value = getattr(achieved, field.name)
            assert value >= 0, field.name
            if field.name in SHARES:
                assert value <= 1, field.name
    assert all(0 < share < 1 for share in constants().efficiency.values())


def test_every_kind_of_the_catalogue_has_an_efficiency() -> None:
    known = constants()
    for one in entries().values():
        for dtype in ("bf16", "f32", "tf32", "f8", "f4"):
            assert 0 < known.efficiency_of(one.kind, dtype).share <= 1
        assert 0 < known.memory_of(one.kind) <= 1
    unheard = dataclasses.replace(device_kind("h100"), name="other", generation="")
    assert known.efficiency_of(unheard, "bf16").share == ASSUMED


TABLE = "p100 p40 v100-16 v100-pcie t4 a100-40 a100-80 a10g a6000 l4 h100-nvl w6800"


@pytest.mark.parametrize("name", TABLE.split())
def test_kinds_of_the_published_layers_were_measured(name: str) -> None:
    kind = device_kind(name)
    found = kind.efficiency_in(kind.multiplies_in("f16"))
    assert found.measured
    assert efficiency_notes([kind], "f16") == ()


def test_what_was_not_measured_is_its_generation_by_its_power() -> None:
    known, l4, l40s = constants(), device_kind("l4"), device_kind("l40s")
    found = known.efficiency_of(l40s, "bf16")
    assert (found.measured, found.of) == (False, ("l4",))
    watts = (350 / 362) / (72 / 121)
    assert found.share == pytest.approx(known.blocks["l4", "bf16"] * watts**POWER)
    # A kind without a board power is as its generation is.
    bare = dataclasses.replace(l40s, watts=None)
    own = known.efficiency_of(l4, "bf16").share
    assert known.efficiency_of(bare, "bf16").share == own
    assert [known.efficiency_of(device_kind("h200"), "bf16").of] == [("h100",)]
    # Nothing of AMD's generation is known: Hopper stands in.
    other = known.efficiency_of(device_kind("mi300x"), "bf16")
    assert other.of == ("h100",)
    # What a watt buys differs between generations.
    assert other.share == known.efficiency["h100", "bf16"]


def test_notes_of_kinds_say_whose_numbers_they_are_and_how_far_off() -> None:
    (note,) = efficiency_notes([device_kind("mi300x")] * 2, "bfloat16")
    rates = re.findall(r"[\d.]+ of|\([\d.]+ to [\d.]+\)", note)
    assert note.startswith("MI300X was not measured in bf16: ")
    assert note.endswith(", as measured on h100")
    assert len(rates) == 2
    other = dataclasses.replace(device_kind("h100"), name="other", generation="")
    assert efficiency_notes([other], "bf16")[0].endswith(")")
    assert efficiency_notes([device_kind("l4")], "f32")[0].endswith("another type")
    assert efficiency_notes([device_kind("v5e"), device_kind("cpu")], "bf16") == ()
    assert len(efficiency_notes([device_kind("l4"), device_kind("l40s")], "bf16")) == 1


def test_plan_estimate_and_array_read_one_efficiency() -> None:
    """A change of one number changes the price of one product and of many alike."""
    kind = device_kind("a10g")
    one = float(kind.matmul_seconds("bf16", 4096, 4096, 4096))
    many = kind.matmul_seconds("bf16", np.array([4096.0]), 4096, 4096)
    peak, share = kind.peak_flops("bf16"), constants().efficiency_of(kind, "bf16").share
    curve = constants().platforms["gpu"]
    sizes = (4096.0, 4096.0, 4096.0, 1.0, kind.cores)
    part = float(shape_share(*sizes, curve, pace_of(peak, kind.cores)))
    assert one == pytest.approx(2 * 4096**3 / (peak * share * part))
    assert one == pytest.approx(float(many[0]))


def test_constants_survive_their_file(tmp_path: Path) -> None:
    import tomllib

    path = tmp_path / "fitted.toml"
    write(constants(), path, "one, two")
    text = path.read_text()
    again = read(tomllib.loads(text))
    assert again.sources == "one, two"
    for name in ("efficiency", "blocks", "memory"):
        before, after = getattr(constants(), name), getattr(again, name)
        assert after == pytest.approx(before, rel=1e-3), name
    assert again.node == pytest.approx(constants().node, rel=1e-3)


def test_links_of_a_family_are_its_own_or_those_of_one_like_it() -> None:
    known = constants()
    assert known.node_of("gh200", "gpu") == known.node["h100"]
    assert known.node_of("p100", "gpu") == known.node["v100"]
    assert known.node_of("unheard-of", "gpu") == known.platforms["gpu"].node
    assert known.node_of("cpu", "cpu") == 1.0


def test_a_product_that_fills_its_tiles_keeps_every_core_busy() -> None:
    shares = {"small": 0.9, "smaller": 0.7, "smallest": 0.4}
    whole = tile_share(256 * 108, 128.0, 1.0, 108.0, **shares)
    assert whole == pytest.approx(1.0)
    # One tile too many takes a second round, which smaller tiles shorten.
    more = tile_share(256 * 109, 128.0, 1.0, 108.0, **shares)
    assert 0.5 < more < 0.95
    # Where other work fills the last round, it costs in proportion.
    filled = tile_share(256 * 109, 128.0, 1.0, 108.0, **shares, idle=0.0)
    assert filled == pytest.approx(1.0)


def test_a_narrow_product_leaves_cores_idle() -> None:
    shares = {"small": 0.9, "smaller": 0.7, "smallest": 0.4}
    widths = np.array([16.0, 64.0, 256.0, 4096.0])
    found = tile_share(256.0, widths, np.ones(4), np.full(4, 108.0), **shares)
    assert (np.diff(found) > 0).all()


def test_a_faster_core_needs_longer_products() -> None:
    curve = constants().platforms["gpu"]
    slow, same, fast = (pace_of(CORE * 108 * times, 108) for times in (0.5, 1, 2))
    assert (slow, same, fast) == (0.5, 1.0, 2.0)
    assert pace_of(1e15, 0) == 1.0
    sizes = (4096.0, 1024.0, 4096.0, 1.0, 108.0)
    shares = [float(shape_share(*sizes, curve, p)) for p in (slow, same, fast)]
    assert shares == sorted(shares, reverse=True)
    longer = (4096.0, 2048.0, 4096.0, 1.0, 108.0)
    assert shape_share(*longer, curve, fast) > shares[2]
