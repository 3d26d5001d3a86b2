"""``wh.largest_batch`` and ``whalejax batch``: what fits, and what does no more."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax.api.largest_batch import MOST_SAMPLES
from whalejax.cli import main
from whalejax.planner.plan_errors import NothingFits


def loss(net: Any, x: Any) -> Any:
    for w in net["layers"]:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


NET = {"layers": [jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for _ in range(3)]}
X = jax.ShapeDtypeStruct((8, 2048), jnp.float32)


def test_what_is_found_fits_and_little_more_does_not() -> None:
    found = wh.largest_batch(
        loss, NET, X, clusters=["t4:1", "t4:4"], optimizer=optax.adam(1e-3)
    )
    assert [one.name for one in found] == ["t4:1", "t4:4"]
    for one in found:
        assert one.plan is not None and one.num_plans <= 10
        assert one.plan.batch[0].shape[0] == one.samples
        assert one.plan.num_micro_batches == 1 and not one.plan.offload
        assert one.next_samples is not None
        assert one.samples < one.next_samples <= one.samples * (1 + 1 / 256)
        assert isinstance(one.problem, NothingFits)
        with pytest.raises(NothingFits):
            one.plan.what_if(batch=one.next_samples, offload=())
    assert found[1].samples > 3 * found[0].samples
    assert found[1].micro_batch * 4 == found[1].samples
    text = str(found)
    assert f"{found[0].next_samples:,} on t4:1, {found[1].next_samples:,} on" in text
    assert f"{found[0].samples:,}" in text and "samples/s" in text


def test_small_batches_are_exact() -> None:
    """One sample more of each device does not fit, whatever the layout."""
    net = {"w": jax.ShapeDtypeStruct((2**20, 64), jnp.float32)}
    x = jax.ShapeDtypeStruct((4, 2**10, 64), jnp.float32)

    def wide(net: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x) @ net["w"].T).mean()

    (one,) = wh.largest_batch(
        wide, net, x, clusters=["h200:2"], optimizer=optax.sgd(0.1), remat="none"
    )
    assert 0 < one.samples < 256 and one.next_samples == one.samples + 2
    assert "LargestBatch of" in repr(one) and len(repr(one)) < 120
    with pytest.raises(NothingFits):
        one.plan.what_if(batch=one.next_samples, offload=())


def test_another_index_is_answered() -> None:
    found = wh.largest_batch(loss, NET, X, clusters=["t4:1"], optimizer=optax.sgd(0.1))
    with pytest.raises(IndexError, match="there is no batch 1: 1 were found, numbered"):
        found[1]
    with pytest.raises(wh.WhaleError, match="on 't4:2'. Did you mean 't4:1'"):
        found["t4:2"]
    assert found[0] is found["t4:1"] and [*found] == [found[0]]


def test_all_kinds_of_a_mixed_cluster_take_part() -> None:
    alone, mixed = wh.largest_batch(
        loss, NET, X, clusters=["t4:1", "t4:1+p100-16:1"], optimizer=optax.sgd(0.1)
    )
    assert mixed.samples > 1.9 * alone.samples
    assert not mixed.plan.shares or 0 not in mixed.plan.shares


def test_a_batch_larger_than_any_that_is_tried() -> None:
    net = {"layers": [jax.ShapeDtypeStruct((1, 1), jnp.float32)]}
    x = jax.ShapeDtypeStruct((8, 1), jnp.float32)
    found = wh.largest_batch(
        loss, net, x, clusters=["h100:3"], optimizer=optax.sgd(0.1)
    )
    assert found[0].samples == MOST_SAMPLES // 3 * 3
    assert found[0].next_samples is None and f"≥ {found[0].samples:,}" in str(found)


def test_sizes_between_are_tried_until_the_end() -> None:
    """Ends of the search are no multiples of its step."""
    net = {"w": jax.ShapeDtypeStruct((1187, 1187), jnp.float32)}
    found = wh.largest_batch(
        lambda net, x: (jnp.tanh(x @ net["w"]) ** 2).mean(),
        net,
        jax.ShapeDtypeStruct((8, 1187), jnp.float32),
        clusters=["t4:1"],
        optimizer=optax.sgd(0.1),
    )
    (batch,) = found
    assert batch.next_samples is not None
    assert 0 < batch.samples < batch.next_samples
    assert batch.next_samples - batch.samples <= batch.samples // 256 + 1


def test_options_are_those_of_a_plan() -> None:
    plain, less = (
        wh.largest_batch(
            loss, NET, X, clusters=["t4:1"], optimizer=optax.sgd(0.1), remat=remat
        )[0]
        for remat in ("full", "none")
    )
    assert less.plan.remat == () or "none" in str(less.plan.remat)
    assert less.samples <= plain.samples
    parts = wh.largest_batch(
        loss, NET, X, clusters=["t4:1"], optimizer=optax.sgd(0.1), num_micro_batches=4
    )[0]
    assert parts.plan.num_micro_batches == 4
    assert parts.samples > less.samples


def test_nothing_fits_on_one_of_the_clusters() -> None:
    huge = {"layers": [jax.ShapeDtypeStruct((65536, 65536), jnp.float32)]}
    x = jax.ShapeDtypeStruct((8, 65536), jnp.float32)
    found = wh.largest_batch(
        loss, huge, x, clusters=["t4:1", "h200:8"], optimizer=optax.adam(1e-3)
    )
    first, second = found
    assert first.samples == 0 and first.plan is None
    assert isinstance(first.problem, NothingFits)
    assert second.samples > 0
    assert "none    on t4:1: no plan fits" in str(found)
    assert "fixed" not in str(first.problem)  # The user fixed nothing.
    document = found.document()["batches"]
    assert document[0]["plan"] is None and "lacks" in document[0]["reason"]


def test_what_no_batch_can_have_is_refused() -> None:
    with pytest.raises(wh.PlanError, match="an axis of 3 does not divide 2048"):
        wh.largest_batch(
            loss,
            NET,
            X,
            clusters=["h100:3"],
            optimizer=optax.sgd(0.1),
            mesh={"tensor": 3},
        )


def test_mistakes_are_named() -> None:
    with pytest.raises(wh.WhaleError, match="expected a list such as"):
        wh.largest_batch(loss, NET, X, clusters="t4:1")
    with pytest.raises(wh.WhaleError, match="Did you mean 'num_micro_batches'"):
        wh.largest_batch(loss, NET, X, clusters=["t4:1"], micro_batches=2)
    with pytest.raises(
        wh.WhaleError,
        match="wh.largest_batch: clusters is missing. Write wh.largest_batch.loss_fn",
    ):
        wh.largest_batch(loss, NET, X)  # type: ignore[call-arg]


def test_the_command_prints_a_row_for_each_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["batch", "mlp", "--on", "t4:1", "v5e:2x2", "--json"]
    assert main.main(words) == 0
    rows = json.loads(capsys.readouterr().out)["batches"]
    assert [row["cluster"] for row in rows] == ["t4:1", "v5e:2x2"]
    assert all(row["samples"] > 1000 for row in rows)
    assert main.main(words[:-1]) == 0
    text = capsys.readouterr().out
    assert "largest batch" in text and "samples/s" in text
