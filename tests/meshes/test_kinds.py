"""Seconds from datasheets and from measured points."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.meshes import (
    BandwidthPoint,
    Cluster,
    DeviceKind,
    MatmulPoint,
    WhaleError,
    device_kind,
)
from whalejax.meshes.device_kinds import effective_size
from whalejax.meshes.dtypes import dtype_name


def _kind(**changes: Any) -> DeviceKind:
    values: dict[str, Any] = {
        "name": "k",
        "platform": "gpu",
        "memory_bytes": 2**30,
        "memory_bytes_per_second": 1e9,
        "flops_per_second": (("f32", 1e12),),
    }
    return DeviceKind(**(values | changes))


def _points(*sides_and_rates: tuple[int, float]) -> tuple[MatmulPoint, ...]:
    return tuple(
        MatmulPoint(dtype="f32", m=s, k=s, n=s, flops_per_second=r)
        for s, r in sides_and_rates
    )


@pytest.mark.parametrize(
    ("dtype", "tflops"), [("bf16", 125), ("float16", 125), ("f8", 125), ("tf32", 15.7)]
)
def test_a_type_without_a_peak_takes_the_documented_stand_in(
    dtype: str, tflops: float
) -> None:
    assert device_kind("v100-32").peak_flops(dtype) == tflops * 1e12


def test_bf16_falls_back_to_f32_last() -> None:
    assert _kind().peak_flops("bf16") == 1e12


def test_f64_has_no_stand_in() -> None:
    with pytest.raises(WhaleError) as error:
        _kind().peak_flops("float64")
    assert str(error.value) == (
        "k has no FLOP/s for f64; it has f32. Add kinds.k.flops_per_second.f64 to the "
        "cluster's TOML file, or compute in one of those types"
    )


def test_unknown_element_type() -> None:
    with pytest.raises(WhaleError) as error:
        dtype_name("string")
    assert str(error.value) == (
        "element type 'string' has no FLOP/s; expected one of f64, f32, tf32, bf16, "
        "f16, f8, f4 or numpy's name of a floating or integer type"
    )


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("bfloat16", "bf16"),
        ("int32", "f32"),
        ("float8_e5m2", "f8"),
        ("float4_e2m1fn", "f4"),
        ("bool", "f32"),
    ],
)
def test_numpy_names(name: str, short: str) -> None:
    assert dtype_name(name) == short


def test_without_points_peak_times_efficiency() -> None:
    kind = _kind(efficiency=0.5)
    assert kind.matmul_seconds("f32", 100, 100, 100, count=3) == pytest.approx(
        3 * 2e6 / 0.5e12
    )


def test_half_size_penalizes_small_shapes() -> None:
    kind = _kind(matmul_half_size=256.0)
    assert kind.matmul_flops_per_second("f32", 256, 256, 256) == pytest.approx(0.5e12)
    assert kind.matmul_flops_per_second("f32", 64, 4096, 4096) < 0.5e12


def test_points_are_met_and_interpolated_in_logarithms() -> None:
    kind = _kind(platform="cpu", matmul_points=_points((64, 1e9), (1024, 16e9)))
    rate = kind.matmul_flops_per_second
    assert rate("f32", 64, 64, 64) == pytest.approx(1e9)
    assert rate("f32", 256, 256, 256) == pytest.approx(4e9)
    assert rate("f32", 8, 8, 8) == pytest.approx(1e9)
    assert rate("f32", 9999, 9999, 9999) == pytest.approx(16e9)


def test_points_of_equal_size_are_averaged() -> None:
    kind = _kind(platform="cpu", matmul_points=_points((64, 1e9), (64, 4e9)))
    assert kind.matmul_flops_per_second("f32", 64, 64, 64) == pytest.approx(2e9)


def test_a_type_with_a_peak_does_not_borrow_the_points_of_another() -> None:
    points = _points((64, 1e9))
    both = _kind(flops_per_second=(("f32", 1e12), ("bf16", 9e12)), matmul_points=points)
    assert both.matmul_flops_per_second("bf16", 64, 64, 64) == 9e12
    alone = _kind(matmul_points=points)
    assert alone.matmul_flops_per_second("bf16", 64, 64, 64) == pytest.approx(1e9)


def test_products_in_a_batch_have_points_of_their_own() -> None:
    alone = MatmulPoint(dtype="f32", m=64, k=64, n=64, flops_per_second=4e9)
    many = dataclasses.replace(alone, batch=8, flops_per_second=1e9)
    both = _kind(platform="cpu", matmul_points=(alone, many))
    assert both.matmul_seconds("f32", 64, 64, 64) == pytest.approx(2 * 64**3 / 4e9)
    assert both.matmul_seconds("f32", 64, 64, 64, count=10) == pytest.approx(
        10 * 2 * 64**3 / 1e9
    )
    for points in ((alone,), (many,)):
        only = _kind(platform="cpu", matmul_points=points)
        rate = points[0].flops_per_second
        for count in (1, 10):
            seconds = only.matmul_seconds("f32", 64, 64, 64, count=count)
            assert seconds == pytest.approx(count * 2 * 64**3 / rate)


def test_fresh_memory_costs_where_it_was_measured() -> None:
    assert _kind().fresh_seconds(1e9) == 0.0
    assert _kind(fresh_bytes_per_second=5e8).fresh_seconds(1e9) == 2.0


@given(
    st.lists(
        st.tuples(st.sampled_from([16, 64, 256, 1024]), st.floats(1e6, 1e15)),
        min_size=1,
        max_size=6,
    ),
    st.floats(1, 1e5),
)
def test_interpolation_stays_between_the_points(
    points: list[tuple[int, float]], side: float
) -> None:
    kind = _kind(platform="cpu", matmul_points=_points(*points))
    rate = kind.matmul_flops_per_second("f32", side, side, side)
    rates = [r for _, r in points]
    assert min(rates) * (1 - 1e-9) <= rate <= max(rates) * (1 + 1e-9)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1, 1e6))
def test_effective_size_lies_between_the_smallest_side_and_three_times_it(
    m: float, k: float, n: float
) -> None:
    size = effective_size(m, k, n)
    assert min(m, k, n) * (1 - 1e-9) <= size <= 3 * min(m, k, n) * (1 + 1e-9)


def test_elementwise_takes_measured_bandwidth_by_size() -> None:
    points = (
        BandwidthPoint(moved_bytes=10**6, bytes_per_second=4e9),
        BandwidthPoint(moved_bytes=10**8, bytes_per_second=1e9),
    )
    kind = _kind(memory_points=points)
    assert kind.elementwise_seconds(0) == 0
    assert kind.elementwise_seconds(1e6) == pytest.approx(1e6 / 4e9)
    assert kind.elementwise_seconds(1e7) == pytest.approx(1e7 / 2e9)
    assert kind.elementwise_seconds(1e9) == pytest.approx(1.0)


def test_transcendentals_add_to_the_memory() -> None:
    kind = _kind(transcendentals_per_second=1e6)
    assert kind.elementwise_seconds(1e9, transcendentals=5e5) == pytest.approx(1.5)
    assert _kind().elementwise_seconds(1e9, transcendentals=5e5) == pytest.approx(1.0)


def test_all_unfit_numbers_are_named_at_once() -> None:
    with pytest.raises(WhaleError) as error:
        _kind(
            platform="npu",
            memory_bytes=0,
            memory_bytes_per_second=math.inf,
            flops_per_second=(("f32", -1.0), ("int4", 1.0)),
            efficiency=1.5,
            op_overhead_seconds=-1e-6,
            matmul_points=(
                MatmulPoint(dtype="f31", m=0, k=1, n=1, flops_per_second=1.0),
            ),
        )
    assert str(error.value) == (
        "device kind 'k': 9 problems\n"
        "  1. platform: got 'npu', expected one of cpu, gpu, tpu\n"
        "  2. memory_bytes: got 0, expected a number above zero\n"
        "  3. memory_bytes_per_second: got inf, expected a number above zero\n"
        "  4. flops_per_second.f32: got -1.0, expected a number above zero\n"
        "  5. matmul_points.0: got 0, expected a number above zero\n"
        "  6. flops_per_second: got 'int4', expected one of f64, f32, tf32, bf16, f16, "
        "f8, f4\n"
        "  7. matmul_points: got 'f31', expected one of f64, f32, tf32, bf16, f16, "
        "f8, f4\n"
        "  8. efficiency: got 1.5, expected a fraction above 0, at most 1\n"
        "  9. op_overhead_seconds: got -1e-06, expected a number of at least zero"
    )


def test_a_kind_without_any_rate() -> None:
    with pytest.raises(WhaleError, match=r"flops_per_second: got none, expected at"):
        _kind(flops_per_second=())


def test_kinds_compare_and_replace_by_their_fields() -> None:
    kind = _kind(matmul_points=_points((64, 1e9)))
    assert kind == _kind(matmul_points=_points((64, 1e9)))
    assert hash(kind) == hash(dataclasses.replace(kind))
    assert dataclasses.replace(kind, memory_bytes=5).memory_bytes == 5


@pytest.mark.parametrize("name", ["h100", "a100-80", "p100-16", "v5e", "cpu"])
def test_a_narrow_product_takes_no_longer_than_a_wide_one(name: str) -> None:
    kind = device_kind(name)
    seconds = [float(kind.matmul_seconds("f32", 1024, 1024, n)) for n in (1, 8, 32, 64)]
    assert seconds == sorted(seconds)
    several = kind.matmul_seconds("f32", 1024, 1024, np.array([1.0, 8.0, 32.0, 64.0]))
    assert np.asarray(several).tolist() == pytest.approx(seconds)


def test_float32_is_multiplied_as_tensorfloat_where_there_is_any() -> None:
    """As JAX's default precision has it; datasheets give both rates."""
    ampere, volta = device_kind("a100-80"), device_kind("v100-32")
    for kind, peak in ((ampere, 156e12), (volta, 15.7e12)):
        rate = kind.matmul_flops_per_second("f32", 8192, 8192, 8192)
        assert 0.3 * peak < rate < peak


@pytest.mark.parametrize("name", ["h100", "a100-80", "v5p", "cpu"])
def test_a_larger_product_never_takes_less_time(name: str) -> None:
    """Rows that a kernel has no work for are none that it saves."""
    kind = device_kind(name)
    taken = [kind.matmul_seconds("bf16", 2**n, 1024, 1024) for n in range(14)]
    assert all(a <= 1.001 * b for a, b in zip(taken, taken[1:], strict=False))


MEASURED = Path(__file__).resolve().parents[2] / "meshes" / "measured"
PRODUCTS = {
    kind: json.loads((MEASURED / f"{kind}_products.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    for kind in ("h100", "h200")
}


def _off(kind: DeviceKind, row: dict[str, Any]) -> float:
    """Predicted over measured seconds of one product that runs alone."""
    dtype, m, k, n = (row[name] for name in ("dtype", "m", "k", "n"))
    moved = {"f32": 4, "bf16": 2}[dtype] * (m * k + k * n + m * n)
    multiplied = 2.0 * m * k * n / kind.matmul_flops_per_second(dtype, m, k, n)
    passed = moved / kind.memory_bytes_per_second
    seconds = max(multiplied, passed) + kind.launch_seconds
    return float(seconds) / float(row["seconds"])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["h100", "h200"])
def test_products_of_a_calibrated_gpu_are_as_measured(name: str, dtype: str) -> None:
    """They cost what any product takes, and their bytes or their FLOPs."""
    kind = Cluster.load(MEASURED / f"{name}.toml").slowest
    rows = [r for r in PRODUCTS[name] if r["dtype"] == dtype]
    narrow = [_off(kind, r) for r in rows if min(r["k"], r["n"]) <= 128]
    wide = [_off(kind, r) for r in rows if min(r["k"], r["n"]) > 128]
    assert len(narrow) >= 18
    assert len(wide) >= 11
    for off in (narrow, wide):
        assert statistics.median(abs(x - 1) for x in off) < 0.25
        assert 0.4 < min(off) <= max(off) < 2.0


def test_what_any_product_takes_is_the_shortest_one() -> None:
    def point(m: int, seconds: float, dtype: str = "f32") -> MatmulPoint:
        rate = 2.0 * m**3 / seconds
        return MatmulPoint(dtype=dtype, m=m, k=m, n=m, flops_per_second=rate)

    points = (point(64, 4e-6), point(2048, 104e-6))
    fast = _kind(
        matmul_points=points, op_overhead_seconds=3e-6, memory_bytes_per_second=1e13
    )

    def alone(m: int, k: int, n: int) -> float:
        return float(2.0 * m * k * n / fast.matmul_flops_per_second("f32", m, k, n))

    assert alone(64, 64, 64) == pytest.approx(
        1e-6 + 4 * 3 * 64**2 / fast.memory_bytes_per_second
    )
    # It says no rate: one between the two that were measured is multiplied as fast as
    # the large one.
    rate = 2.0 * 2048**3 / 103e-6
    assert alone(512, 512, 512) == pytest.approx(1e-6 + 2.0 * 512**3 / rate)
    # Within a step, it takes longer.
    assert fast.matmul_seconds("f32", 512, 512, 512) > 1.1 * alone(512, 512, 512)
    # A long and narrow one passes through memory once.
    moved = 4 * (10**6 * 64 * 2 + 64 * 64)
    assert alone(10**6, 64, 64) == pytest.approx(
        1e-6 + moved / fast.memory_bytes_per_second
    )
    sides, depths = np.array([10**6, 2048]), np.array([64, 2048])
    several = fast.matmul_flops_per_second("f32", sides, depths, sides)
    assert float(several[1]) == pytest.approx(2.0 * 2048**3 / 104e-6)
    # Nothing is known of it on CPUs, or where all products are as long.
    assert _kind(platform="cpu", matmul_points=points)._product_seconds == 0
    alike = (point(64, 4e-6), point(128, 5e-6))
    assert _kind(matmul_points=alike)._product_seconds == 0
    assert fast._product_seconds == pytest.approx(1e-6)
