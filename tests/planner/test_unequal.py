"""Layers dealt out to stages: the slowest has the least to do, parts are stored."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.planner.pipeline.uneven_layers import (
    LayerSplit,
    exchanged,
    layers_of,
    stored_apart,
)
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.sharding.layout import shards


WHOLE = ((), (), ())


def leaf(shape: tuple[int, ...] = (6, 8, 12), **specs: object) -> LeafPlan:
    plain = LeafPlan(
        path="layers.up",
        shape=shape,
        dtype="bfloat16",
        roles=(("layer",), ("embed",), ("mlp",)),
        compute_spec=WHOLE,
        param_spec=WHOLE,
        gradient_spec=WHOLE,
        optimizer_spec=WHOLE,
    )
    return replace(plain, **specs)  # type: ignore[arg-type]


@given(
    st.integers(2, 4),
    st.integers(0, 6),
    st.floats(0, 6, allow_nan=False, allow_infinity=False),
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    stages: int, more: int, behind: float
) -> None:
    length = stages + more
    found = layers_of(length, stages, behind)
    assert sum(found) == length and min(found) >= 1
    if length % stages == 0:
        assert len(set(found)) == 1
        return

    def slowest(layers: tuple[int, ...]) -> float:
        return max(*layers[:-1], layers[-1] + behind)

    others = itertools.product(range(1, length + 1), repeat=stages)
    best = min(slowest(x) for x in others if sum(x) == length)
    assert slowest(found) == best


def test_without_more_behind_the_first_stages_get_what_is_left() -> None:
    assert layers_of(6, 4) == (2, 2, 1, 1)
    assert layers_of(5, 2) == (3, 2)


def test_the_slowest_stage_is_spared_what_stands_behind() -> None:
    assert LayerSplit(length=7, stages=2, seconds=(2.0, 5.0)).layers == (5, 2)
    assert LayerSplit(length=7, stages=2, seconds=(2.0, 5.0)).spared_seconds == 5.0
    assert LayerSplit(length=7, stages=2, seconds=(2.0, 1.0)).spared_seconds == 1.0
    assert LayerSplit(length=5, stages=2, seconds=(2.0, 3.0)).layers == (3, 2)
    assert LayerSplit(length=5, stages=2, seconds=(2.0, 3.0)).spared_seconds == 2.0
    assert LayerSplit(length=8, stages=2, seconds=(2.0, 5.0)).spared_seconds == 0.0


@pytest.mark.parametrize(
    ("shape", "spec", "stored"),
    [
        ((6, 8, 12), WHOLE, ((), (), ("stage",))),
        ((6, 8, 12), ((), (), ("tensor",)), ((), ("stage",), ("tensor",))),
        (
            (6, 8, 16),
            ((), ("fsdp",), ("tensor",)),
            ((), ("fsdp",), ("tensor", "stage")),
        ),
        ((6, 8, 10), WHOLE, ((), ("stage",), ())),
        ((6, 7, 5), WHOLE, WHOLE),
        ((6, 8, 12), (("fsdp",), (), ()), ((), (), ("stage",))),
    ],
)
def test_stages_store_parts_of_layers(
    shape: tuple[int, ...],
    spec: tuple[tuple[str, ...], ...],
    stored: tuple[tuple[str, ...], ...],
) -> None:
    mesh = {"stage": 4, "fsdp": 2, "tensor": 2}
    found = stored_apart(leaf(shape, param_spec=spec, gradient_spec=spec), mesh)
    assert found.param_spec == found.gradient_spec == stored
    assert found.compute_spec == (("stage",), (), ())
    for dim, axes in enumerate(stored):
        assert shape[dim] % shards((axes,), mesh) == 0


def test_the_optimizer_shares_the_dimension() -> None:
    mesh = {"stage": 4, "data": 2}
    # Of 12 columns no device could hold a part under data 2 × stage 4.
    found = stored_apart(leaf(optimizer_spec=((), (), ("data",))), mesh)
    assert found.param_spec == ((), ("stage",), ())
    assert found.optimizer_spec == ((), ("stage",), ("data",))


def test_parts_are_exchanged_once_in_a_step() -> None:
    mesh = {"stage": 4, "tensor": 2}
    stored = stored_apart(leaf(param_spec=((), (), ("tensor",))), mesh)
    there, back = exchanged(stored, 2, mesh)
    rows = 4 * 2 * 8 * 12  # room for two layers on each stage
    assert (there.kind, there.payload_bytes) == ("all-to-all", rows * 2 // 8)
    assert (back.kind, back.payload_bytes) == ("all-to-all", rows * 4 // 4)
    (only,) = exchanged(leaf((6, 7, 5)), 2, mesh)
    assert (only.kind, only.what) == ("all-gather", "gradient")
