"""Fitting a link to made-up times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.meshes.calibration.link_fit import CollectiveTime, fit_link


RINGS = ("all-reduce", "all-gather", "reduce-scatter")


def _time(
    collective: str, size: int, payload: int, latency: float, bandwidth: float
) -> CollectiveTime:
    rounds = 2 if collective == "all-reduce" else 1
    wire = rounds * payload * (size - 1) / size
    return CollectiveTime(
        collective=collective,
        group_size=size,
        payload_bytes=payload,
        seconds=rounds * latency + wire / bandwidth,
    )


def _times(latency: float, bandwidth: float) -> list[CollectiveTime]:
    return [
        _time(c, g, p, latency, bandwidth)
        for c in RINGS
        for g in (2, 4, 8)
        for p in (2**12, 2**18, 2**24)
    ]


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12))
def test_finds_both_numbers_where_both_can_be_seen(
    latency: float, bandwidth: float
) -> None:
    payloads = [int(latency * bandwidth * f) + 8 for f in (0.1, 1, 10)]
    times = [_time("all-gather", 4, p, latency, bandwidth) for p in payloads]
    fit = fit_link(times)
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-2)
    assert fit.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-2)
    assert dict(fit.slowdown)["all-gather"] == pytest.approx(1, rel=1e-2)


def test_threads_wait_for_each_other_and_move_everything() -> None:
    times = [
        CollectiveTime(
            collective=name,
            group_size=size,
            payload_bytes=payload,
            seconds=rounds * (1e-5 * size + payload / 1e9),
            shared=True,
        )
        for name, rounds in (("all-reduce", 2), ("all-gather", 1))
        for size in (2, 4, 8)
        for payload in (2**14, 2**21, 2**23)
    ]
    fit = fit_link(times)
    assert fit.latency_seconds == pytest.approx(1e-5, rel=1e-2)
    assert fit.bandwidth_bytes_per_second == pytest.approx(1e9, rel=1e-2)


def test_one_disturbed_time_does_not_decide() -> None:
    times = _times(1e-5, 1e9)
    slow = CollectiveTime(
        collective="all-reduce", group_size=8, payload_bytes=2**18, seconds=1.0
    )
    fit = fit_link([*times, slow])
    assert fit.latency_seconds == pytest.approx(1e-5, rel=0.2)
    assert fit.bandwidth_bytes_per_second == pytest.approx(1e9, rel=0.2)


def test_noise_is_averaged() -> None:
    noise = np.random.default_rng(0).lognormal(sigma=0.2, size=len(_times(1, 1)))
    times = [
        CollectiveTime(
            collective=t.collective,
            group_size=t.group_size,
            payload_bytes=t.payload_bytes,
            seconds=t.seconds * n,
        )
        for t, n in zip(_times(2e-5, 5e9), noise, strict=True)
    ]
    fit = fit_link(times)
    assert fit.latency_seconds == pytest.approx(2e-5, rel=0.3)
    assert fit.bandwidth_bytes_per_second == pytest.approx(5e9, rel=0.3)


def test_all_to_all_gets_a_factor_and_does_not_bend_the_fit() -> None:
    slow = [_time("all-to-all", 4, p, 4e-5, 0.25e9) for p in (2**12, 2**20, 2**24)]
    fit = fit_link([*_times(1e-5, 1e9), *slow])
    assert fit.bandwidth_bytes_per_second == pytest.approx(1e9, rel=1e-2)
    assert dict(fit.slowdown)["all-to-all"] == pytest.approx(4, rel=1e-2)
    alone = fit_link(slow)
    assert alone.bandwidth_bytes_per_second == pytest.approx(0.25e9, rel=1e-2)


def test_a_latency_below_the_noise_is_clipped_with_its_reason() -> None:
    times = [_time("all-gather", 2, p, 0.0, 1e9) for p in (2**20, 2**24)]
    fit = fit_link(times)
    assert fit.latency_seconds == 0.0
    assert fit.notes == ("latency clipped to 0: below the noise of 5.2e-04 s",)
    assert fit.bandwidth_bytes_per_second == pytest.approx(1e9, rel=1e-2)


def test_a_bandwidth_that_time_does_not_show_is_a_lower_bound() -> None:
    times = [
        CollectiveTime(
            collective="all-gather", group_size=2, payload_bytes=p, seconds=1e-3
        )
        for p in (2**10, 2**20)
    ]
    fit = fit_link(times)
    assert fit.bandwidth_bytes_per_second == pytest.approx(2**19 / 1e-3)
    assert fit.notes == (
        "bandwidth is a lower bound from the largest payload, because times did not "
        "grow with size",
    )


def test_a_single_time_suffices() -> None:
    fit = fit_link([_time("all-reduce", 8, 2**20, 1e-5, 1e9)])
    predicted = 2 * fit.latency_seconds + 2 * 2**20 * 7 / 8 / (
        fit.bandwidth_bytes_per_second
    )
    assert predicted == pytest.approx(2e-5 + 2 * 2**20 * 7 / 8 / 1e9, rel=1e-2)
