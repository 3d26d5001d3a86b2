"""Goodput on paper, against random failures that are played through."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest

from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.fault_traces import Event, Policy, read_trace, simulated
from whalejax.planner.plan.goodput import (
    alive_parts,
    daly_seconds,
    elastic_goodput,
    goodput_of,
    restart_goodput,
    speed,
)


def played_restart(
    interval: float, cost: float, away: float, between: float, seed: int
) -> float:
    """Work over time, failure by failure."""
    drawn = random.Random(seed)
    now = useful = 0.0
    fails = drawn.expovariate(1 / between)
    for _ in range(4000):
        while True:
            end = now + interval + cost
            if fails >= end:
                break
            now = fails + away
            # It may fail again on the way.
            while (fails := fails + drawn.expovariate(1 / between)) < now:
                now = fails + away
        now, useful = end, useful + interval
    return useful / now


@pytest.mark.parametrize(
    ("interval", "cost", "away", "between"),
    [(100, 5, 20, 1000), (50, 10, 100, 300), (10, 1, 5, 60)],
)
def test_a_restarted_world_is_as_fast_as_the_formula_says(
    interval: float, cost: float, away: float, between: float
) -> None:
    found = [played_restart(interval, cost, away, between, s) for s in range(6)]
    expected = restart_goodput(interval, cost, away, between)
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("cost", "between"), [(5, 1000), (30, 600), (1, 86_400)])
def test_the_best_interval_is_the_best(cost: float, between: float) -> None:
    best = daly_seconds(cost, between)
    at_best = restart_goodput(best, cost, 60, between)
    scan = [restart_goodput(best * f, cost, 60, between) for f in (0.5, 0.8, 1.25, 2)]
    assert all(at_best >= other for other in scan)
    tried = [restart_goodput(cost * 1.02**n, cost, 60, between) for n in range(900)]
    assert at_best >= max(tried) * 0.9999
    assert best == pytest.approx(math.sqrt(2 * cost * between), rel=0.2)


def played_elastic(
    nodes: int, spares: int, mtbf: float, away: float, seed: int
) -> list[Event]:
    drawn, found = random.Random(seed), []
    for node in range(nodes + spares):
        now = 0.0
        while (now := now + drawn.expovariate(1 / mtbf)) < 300_000:
            found.append(Event(time=now, node=str(node), is_down=True))
            now += away
            found.append(Event(time=now, node=str(node), is_down=False))
    return sorted(found, key=lambda e: e.time)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("recovery", [0.0, 2.0])
def test_a_trace_of_random_failures_gives_what_the_formula_does(
    spares: int, recovery: float
) -> None:
    speeds = tuple(speed(k, 4, 8) for k in range(5))
    policy = Policy(
        nodes=4,
        step_seconds=1.0,
        interval=60.0,
        snapshot=1.0,
        restart=0.0,
        recovery=recovery,
        speeds=speeds,
    )
    events = played_elastic(4, spares, 900.0, 100.0, seed=5)
    found = simulated(policy, events, 300_000.0, how="elastic", spares=spares)
    expected = elastic_goodput(speeds, spares, 900.0, 100.0, recovery)
    assert found == pytest.approx(expected, rel=0.02)


def test_spares_help_and_restarts_cost() -> None:
    found = goodput_of(0.5, nodes=8, mtbf=4000, restart=60, spares=2, snapshot=5)
    assert found.restart < found.elastic < found.spares < 1
    assert found.failure_seconds == 500
    assert found.snapshot_every == round(found.best_snapshot_seconds / 0.5)
    more = goodput_of(0.5, nodes=8, mtbf=4000, restart=60, snapshot_every=2000)
    assert more.restart < found.restart
    text = str(found)
    assert "8 nodes, a failure every 500 s" in text and "elastic, 2 spares" in text


def test_without_failures_nothing_is_lost() -> None:
    found = goodput_of(1.0, nodes=4, mtbf=1e15, restart=60, snapshot=0.0)
    assert found.restart == pytest.approx(1) and found.elastic == pytest.approx(1)
    assert goodput_of(1.0, nodes=4, mtbf=1e-3, restart=60).restart == 0.0


@pytest.mark.parametrize("nodes", [2000, 100_000])
def test_thousands_of_nodes_are_as_they_are_on_average(nodes: int) -> None:
    # Far from both ends the number that is there is close to its mean.
    found = goodput_of(1.0, nodes=nodes, mtbf=900.0, restart=100.0, recovery=0.0)
    assert found.elastic == pytest.approx(0.9, rel=1e-9)
    assert sum(alive_parts(nodes, 900.0, 100.0)) == pytest.approx(1.0, rel=1e-6)


def test_logarithms_give_what_binomials_do() -> None:
    found = [*alive_parts(30, 90.0, 10.0)]
    expected = [math.comb(30, k) * 0.9**k * 0.1 ** (30 - k) for k in range(31)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert [*alive_parts(3, 90.0, 0.0)] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("step", [1e-9, 1.0, 1e15])
@pytest.mark.parametrize("mtbf", [1e-9, 1.0, 1e15])
@pytest.mark.parametrize("nodes", [1, 3000])
def test_every_number_is_finite(step: float, mtbf: float, nodes: int) -> None:
    for seconds in (0.0, 1e-9, 1.0, 1e15):
        found = goodput_of(
            step,
            nodes=nodes,
            mtbf=mtbf,
            restart=seconds,
            spares=nodes,
            snapshot=seconds,
            recovery=seconds,
            repair=seconds,
            micro_batches=8,
        )
        numbers = {k: v for k, v in dataclasses.asdict(found).items() if k != "trace"}
        assert all(map(math.isfinite, numbers.values())), numbers
        for name in ("restart", "elastic", "spares"):
            assert 0 <= numbers[name] <= 1, (name, numbers)
        assert str(found)


def test_numbers_that_are_too_large_are_refused() -> None:
    with pytest.raises(
        WhaleError,
        match=r"(?s)5 problems.*step_seconds is 1e-300; expected a number of seconds, "
        r"1e-09 to 1e\+15.*nodes is 2000000; .*1 to 1000000.*mtbf is 1e\+300.*"
        r"restart is inf.*snapshot_every is 10000000000000000",
    ):
        goodput_of(
            1e-300,
            nodes=2_000_000,
            mtbf=1e300,
            restart=float("inf"),
            snapshot_every=10**16,
        )


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_played_through(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        "time,node,event\n100,a,down\n150,a,up\n1000,b,down\n1100,b,up\n2000,c,down\n",
    )
    found = goodput_of(
        1.0,
        nodes=4,
        mtbf=1000,
        restart=10,
        snapshot_every=10,
        snapshot=0.0,
        recovery=0.0,
        spares=1,
        trace=path,
    ).trace
    assert found is not None and found.failures == 3 and found.seconds == 2000
    # Away: 100 to 160 and 1000 to 1110.
    assert found.restart == pytest.approx((2000 - 60 - 110) / 2000)
    assert found.elastic == pytest.approx((2000 - 0.25 * 170) / 2000)
    assert found.spares == 1.0


def test_a_spare_that_fails_costs_runs_without_spares_nothing(tmp_path: Path) -> None:
    # n10 comes behind n1, n2 and n3, so that it is the spare.
    path = trace(
        tmp_path,
        "time,node,event\n100,n10,down\n200,n10,up\n300,n1,down\n400,n1,up\n"
        "500,n10,down\n600,n10,up\n700,n2,down\n900,n2,up\n1000,n3,down\n",
    )
    found = goodput_of(
        1.0,
        nodes=3,
        mtbf=1000,
        restart=0,
        snapshot_every=10,
        snapshot=0.0,
        recovery=10.0,
        spares=1,
        trace=path,
    ).trace
    assert found is not None and found.failures == 5
    # Without spares: n1 for 100 s, n2 for 200 s; each stalls the others twice.
    assert found.restart == pytest.approx(0.7)
    lost = 300 / 3 + 2 * 10 * 2 / 3 + 2 * 10
    assert found.elastic == pytest.approx((1000 - lost) / 1000)
    # n10 steps in for n1 at 300, and n1, back at 400, for n10 at 500; n10, back at
    # 600, for n2 at 700. Nobody else stalls.
    assert found.spares == pytest.approx((1000 - 3 * 10) / 1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time,event\n1,down\n", "has no column node"),
        ("time,node,event\n", "it holds no event"),
        ("time,node,event\nx,a,down\n", "line 2: time is 'x'; expected seconds"),
        ("time,node,event\n-1,a,down\n", "line 2: time is '-1'"),
        ("time,node,event\n\n\nx,a,down\n", "line 4: time is 'x'"),
        (f"time,node,event\n1,{'a' * 200_000},down\n", "line 2: it is no row of a CSV"),
        ("time,node,event\n1,a,gone\n", "line 2: event is 'gone'; expected down or up"),
        ("time,node,event\n1,,down\n", "line 2: node is empty"),
        ("time,node,event\n1,a,up\n", "line 2: node 'a' is up already"),
        ("time,node,event\n5,a,down\n1,b,down\n", "line 3: time 1 is before the last"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(WhaleError, match=said):
        read_trace(trace(tmp_path, text))
    with pytest.raises(WhaleError, match="trace .*none.csv"):
        read_trace(tmp_path / "none.csv")


def test_too_many_nodes_in_a_trace_are_refused(tmp_path: Path) -> None:
    path = trace(tmp_path, "time,node,event\n1,a,down\n2,b,down\n")
    with pytest.raises(WhaleError, match="names 2 nodes; the run has 1 and 0 spares"):
        goodput_of(1.0, nodes=1, mtbf=10, restart=1, trace=path)


def test_wrong_numbers_are_refused_all_at_once() -> None:
    with pytest.raises(
        WhaleError, match=r"(?s)3 problems.*mtbf is 0;.*restart is -1.*spares is -1"
    ):
        goodput_of(1.0, nodes=4, mtbf=0, restart=-1, spares=-1)


def test_an_estimate_is_drawn_in_notebooks(tmp_path: Path) -> None:
    path = trace(tmp_path, "time,node,event\n100,a,down\n150,a,up\n900,b,down\n")
    found = goodput_of(0.5, nodes=8, mtbf=4000, restart=60, spares=2, trace=path)
    drawn = found.chart()
    assert [*drawn.bars] == [
        "restart the world",
        "elastic",
        "elastic, 2 spares",
        "trace: restart the world",
        "trace: elastic",
        "trace: elastic, 2 spares",
    ]
    assert drawn.bars["elastic"] == found.elastic
    bundle = found._repr_mimebundle_()
    assert bundle["text/plain"] == str(found)
    html = bundle["text/html"]
    for value in drawn.bars.values():
        assert f"{value:.4f}</text>" in html
    assert "trace    2 failures in 900 s" in html
    drawn.save(tmp_path / "goodput.svg")
    assert (tmp_path / "goodput.svg").read_text().startswith("<svg")
    assert len(goodput_of(0.5, nodes=8, mtbf=4000, restart=60).chart().bars) == 3
