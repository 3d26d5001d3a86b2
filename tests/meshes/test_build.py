"""Meshes: order, Auto axes, and products that do not fit."""

from __future__ import annotations

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from whalejax.meshes import WhaleError
from whalejax.meshes.jax_mesh import build_mesh, factorizations


def test_devices_in_order_with_auto_axes() -> None:
    mesh = build_mesh((("data", 4), ("tensor", 2)))
    assert mesh.axis_names == ("data", "tensor")
    assert mesh.devices.flatten().tolist() == jax.devices()
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.shape == {"data": 4, "tensor": 2}


def test_given_devices_keep_their_order() -> None:
    devices = jax.devices()[3::-1]
    mesh = build_mesh((("data", 2), ("tensor", 2)), devices)
    assert mesh.devices.flatten().tolist() == devices


def _error(
    axes: tuple[tuple[str, int], ...], count: int = 8, order: tuple[int, ...] = ()
) -> str:
    with pytest.raises(WhaleError) as error:
        build_mesh(axes, jax.devices()[:count], order=order)
    return str(error.value)


def test_an_order_has_a_device_for_each_position() -> None:
    devices = jax.devices()
    mesh = build_mesh((("data", 2),), devices, order=(3, 1, 0), allow_idle=True)
    assert mesh.devices.tolist() == [devices[3], devices[1]]
    assert _error((("data", 4),), 4, (1, 0)) == (
        "mesh: 1 problem\n  1. order has 2 numbers of devices, but the mesh has "
        "4 positions; give a number for each"
    )


def test_too_few_are_an_error_unless_allowed() -> None:
    assert _error((("data", 3), ("tensor", 2))) == (
        "mesh: 1 problem\n"
        "  1. data 3 × tensor 2 uses 6 of 8 devices. 8 = 8×1, 4×2, 2×4, 1×8. To leave "
        "2 idle on purpose: allow_idle=True"
    )
    mesh = build_mesh((("data", 3), ("tensor", 2)), allow_idle=True)
    assert mesh.devices.flatten().tolist() == jax.devices()[:6]


def test_too_many_are_an_error() -> None:
    assert _error((("data", 4), ("fsdp", 2), ("tensor", 2)), 4) == (
        "mesh: 1 problem\n"
        "  1. data 4 × fsdp 2 × tensor 2 needs 16 devices; there are 4. 4 = 4×1×1, "
        "2×2×1, 2×1×2, 1×4×1, 1×2×2, 1×1×4. Give 16 devices, or plan a mesh of 4"
    )
    assert _error((("data", 9),)) == (
        "mesh: 1 problem\n  1. data 9 needs 9 devices; there are 8. Give 9 "
        "devices, or plan a mesh of 8"
    )


def test_long_lists_of_factorizations_are_cut() -> None:
    text = _error((("a", 1), ("b", 1), ("c", 1)))
    assert "8 = 8×1×1, 4×2×1, 4×1×2, 2×4×1, 2×2×2, 2×1×4, …. To leave 7 idle" in text


def test_names_and_sizes_at_once() -> None:
    assert _error((("data", 0), ("data", 8), ("tensor", -1))) == (
        "mesh: 3 problems\n"
        "  1. axis 'data' is named 2 times\n"
        "  2. axis 'data' has size 0, expected at least 1\n"
        "  3. axis 'tensor' has size -1, expected at least 1"
    )


def test_no_axes_at_all() -> None:
    assert "1. no axes uses 1 of 8 devices. To leave 7 idle" in _error(())
    assert build_mesh((), jax.devices()[:1]).axis_names == ()


@given(st.integers(1, 200), st.integers(1, 3))
def test_factorizations_are_all_there_are(number: int, parts: int) -> None:
    found = factorizations(number, parts)
    assert len(set(found)) == len(found)
    assert {math.prod(sizes) for sizes in found} == {number}
    if parts == 2:
        divisors = [d for d in range(1, number + 1) if number % d == 0]
        assert [first for first, _ in found] == divisors[::-1]
