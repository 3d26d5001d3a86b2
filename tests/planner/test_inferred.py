"""What a row leaves open is settled by what fits."""

from __future__ import annotations

from tests.planner.test_published import ROW
from tests.planner.test_published import read as described
from whalejax.estimates.fill_missing import readings
from whalejax.estimates.read_table import RowReading


LARGE = {"layers": "96", "hidden": "12288", "heads": "96", "tp": "8", "pp": "8"}
LARGE |= {"num_devices": "128", "seq": "8192"}


def one(**cells: str) -> RowReading:
    return readings([{**ROW, **cells}])[0]


def test_where_nobody_says_what_is_computed_again_the_least_that_fits_is() -> None:
    small, large = readings([{**ROW, "remat": ""}, {**ROW, "remat": "", **LARGE}])
    assert small.run is not None
    assert small.run.remat == "none"
    assert small.notes[-1] == "remat none (the least that fits)"
    assert large.run is not None
    assert large.run.remat in ("selective", "full")


def test_a_smaller_micro_batch_comes_before_computing_again() -> None:
    cells = {"layers": "32", "hidden": "4096", "heads": "32", "pp": "1", "tp": "1"}
    cells |= {"remat": "", "micro_batch": "", "source": "megatron"}
    cells |= {"num_devices": "16", "global_batch": "128", "device": "A100-40GB"}
    found = one(**cells)
    assert found.run is not None
    assert found.run.remat == "none"
    assert 1 <= found.run.micro_batch < 8
    size = f"micro_batch {found.run.micro_batch} (the largest that fits)"
    assert found.notes[-1] == size


def test_a_policy_by_an_unknown_name_keeps_what_fits() -> None:
    fits = one(remat="save_my_dots")
    assert fits.run is not None
    assert fits.run.remat == "dots"
    assert not any("least that fits" in note for note in fits.notes)
    wide = one(remat="save_my_dots", **LARGE, micro_batch="16", global_batch="512")
    assert wide.run is not None
    assert wide.run.remat == "full"
    assert "remat full (dots does not fit)" in wide.notes
    moved = one(remat="offload_dots", **LARGE, micro_batch="16", global_batch="512")
    assert moved.run is not None
    assert (moved.run.remat, moved.run.offloaded) == ("dots", True)


def test_what_fits_no_other_way_is_sharded() -> None:
    cells = {**LARGE, "tp": "1", "pp": "1", "num_devices": "1024", "remat": ""}
    cells |= {"source": "", "global_batch": "1024", "micro_batch": "1", "seq": "2048"}
    found = one(**cells)
    assert found.run is not None
    assert (found.run.zero, found.run.fsdp, found.run.data) == (3, 1024, 1)
    assert found.notes[-2:] == (
        "zero_stage 3 over 1024 (nothing less fits)",
        "taken to fit (its estimate is 3% too large)",
    )


def test_what_does_not_fit_at_all_is_said() -> None:
    found = one(**LARGE, device="T4", remat="", zero_stage="1")
    assert found.notes[-1] == "remat full (nothing fits; it takes least memory)"


def test_a_rack_behind_one_switch_is_a_node() -> None:
    rack = {"device": "GB200", "num_devices": "64", "devices_per_node": ""}
    assert described(**rack).devices_per_node == 64
    assert described(**{**rack, "device": "B200"}).devices_per_node == 8
