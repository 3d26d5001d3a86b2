"""The fitted constants: within what is possible, and the shapes they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from whalejax.meshes.catalogue import entries
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
        for dtype in ("bf16", "f32", "f8"):
            assert 0 < known.of(one.kind.family, dtype) <= 1
    assert known.of("p100", "bf16") == known.of("v100", "f16")
    assert known.of("unheard-of", "bf16") == ASSUMED


def test_constants_survive_their_file(tmp_path: Path) -> None:
    import tomllib

    path = tmp_path / "fitted.toml"
    write(constants(), path, "one, two")
    text = path.read_text()
    assert "#     one, two" in text
    again = read(tomllib.loads(text))
    for key, share in constants().efficiency.items():
        assert again.efficiency[key] == pytest.approx(share, rel=1e-3)
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
