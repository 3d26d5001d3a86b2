"""A model's own micro-batch, measured, says who takes how much."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import whalejax as wh
from whalejax.cli import main
from whalejax.cli.measure_model import timing_words
from whalejax.meshes import TimedModel
from whalejax.planner.balance.shares import corrections, weights_hash


WIDE = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
ROWS = {"x": jax.ShapeDtypeStruct((960, 2048), jnp.float32)}
MIXED = "v100-32:1+p100-16:1"


def simple(m: Any, b: Any) -> Any:
    return ((b["x"] @ m["w"]) ** 2).mean()


def planned(cluster: wh.Cluster) -> wh.Plan:
    return wh.plan(simple, WIDE, ROWS, cluster=cluster, num_micro_batches=60)


def timed(cluster: wh.Cluster, weights: str, **ratios: float) -> wh.Cluster:
    """The cluster with timings, as many times what was predicted."""

    def of(node: Any) -> Any:
        name = node.kind.name.partition("-")[0]
        if name not in ratios:
            return node
        one = TimedModel(
            weights=weights,
            samples=4,
            seconds=0.1 * ratios[name],
            predicted_seconds=0.1,
        )
        kind = dataclasses.replace(node.kind, timed_models=(one,))
        return dataclasses.replace(node, kind=kind)

    return dataclasses.replace(cluster, nodes=tuple(map(of, cluster.nodes)))


def test_shares_follow_what_was_timed(tmp_path: Path) -> None:
    cluster = wh.cluster(MIXED)
    sheet = planned(cluster)
    weights = weights_hash(sheet.leaves)
    twice = timed(cluster, weights, v100=1.0, p100=2.0)
    assert corrections([n.kind for n in twice.nodes], weights) == (1.0, 2.0)
    fast, slow = sheet.shares
    plan = planned(twice)
    # Speeds fast : slow become fast : slow / 2, within one of sixty micro-batches.
    assert plan.shares[1] == pytest.approx(60 * slow / (2 * fast + slow), abs=1)
    assert any(
        "by measured times of this model's own samples" in note for note in plan.notes
    )
    plan.cluster.save(tmp_path / "both.toml")
    assert planned(wh.cluster(str(tmp_path / "both.toml"))).shares == plan.shares


def test_a_timing_of_one_kind_only_counts_for_nothing() -> None:
    cluster = wh.cluster(MIXED)
    sheet = planned(cluster)
    plan = planned(timed(cluster, weights_hash(sheet.leaves), p100=2.0))
    assert plan.shares == sheet.shares
    assert any("not timed on V100" in note for note in plan.notes)
    other = planned(timed(cluster, "another", v100=1.0, p100=2.0))
    assert (other.shares, other.notes) == (sheet.shares, sheet.notes)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, ""), (0.027, ""), (0.054, "2.7 times the"), (0.008, "0.4 times the")],
)
def test_a_timing_far_from_its_prediction_says_what_is_used(
    seconds: float, words: str
) -> None:
    predicted = 0.02 if words else seconds / 1.4
    one = TimedModel(
        weights="", samples=4, seconds=seconds, predicted_seconds=predicted, title="m"
    )
    said = timing_words(one)
    assert said.startswith("m: ") and "\n" not in said
    assert words in said and ("divided between kinds of" in said) == bool(words)


@pytest.mark.relaxed_promotion  # optax counts in integers
def test_calibrate_times_a_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[wh.Cluster] = []

    def measured(budget_seconds: float, **_: object) -> wh.Cluster:
        written.append(wh.cluster("cpu:2"))
        return written[-1]

    monkeypatch.setattr("whalejax.meshes.calibration.calibrate.measured", measured)
    path = tmp_path / "c.toml"
    words = ["calibrate", "-o", str(path), "--model", "mlp", "--samples", "32"]
    assert main.main(words) == 0
    assert "ms for a micro-batch of 32" in capsys.readouterr().out
    (kind,) = wh.cluster(str(path)).kinds
    (one,) = kind.timed_models
    assert (one.title, one.samples) == ("mlp", 32)
    assert one.seconds > 0 < one.predicted_seconds
    assert main.main(words[:3] + ["--samples", "3"]) == 2
    assert "--model" not in capsys.readouterr().out
    assert len(written) == 1
