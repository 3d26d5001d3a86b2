"""Whole numbers of NumPy's, wherever Python's are taken: they end as Python's own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

import whalejax as wh
from tests import misuse_world
from whalejax import meshes


BATCH = {"x": np.ones((16, 8), np.float32)}


@pytest.fixture(scope="module")
def question() -> tuple[Any, ...]:
    """What plans the small model."""
    model = misuse_world.make_model(jax.random.key(0))
    return misuse_world.loss, model, BATCH


def test_options_of_a_plan(question: tuple[Any, ...]) -> None:
    given = {"num_micro_batches": 2, "zero": 1, "mesh": {"data": 8}, "batch_axes": 0}
    numpys = {
        "num_micro_batches": np.int64(2),
        "zero": np.int32(1),
        "mesh": {"data": np.int64(8)},
        "batch_axes": np.int64(0),
    }
    fixed = {"optimizer": misuse_world.OPTIMIZER, "cluster": "h100:8"}
    known = wh.plan(*question, **fixed, **given)
    assert wh.plan(*question, **fixed, **numpys).document() == known.document()
    asked = {name: numpys[name] for name in ("num_micro_batches", "zero", "mesh")}
    again = wh.plan(*question, **fixed).what_if(**asked, batch=np.int64(16))
    assert again.document() == known.document()
    del fixed["cluster"]
    one: Any = np.int64(1)
    found = wh.search(*question, clusters=["h100:8"], each=one, **fixed, **asked)
    assert found[0].document() == known.document()


@pytest.mark.parametrize("shares", [[np.int64(3), np.int64(1)], np.array([3, 1])])
def test_shares(question: tuple[Any, ...], shares: Any) -> None:
    fixed = {"optimizer": misuse_world.OPTIMIZER, "cluster": "h100:2"}
    found = wh.plan(*question, **fixed, shares=shares)
    assert found.shares == (3, 1)
    json.dumps(found.document())


def test_hardware_can_be_written() -> None:
    kind = meshes.cluster("h100:8").kinds[0]
    other = dataclasses.replace(
        kind,
        memory_bytes=np.int64(2**30),
        flops_per_second=(("f32", np.float64(1e12)),),
    )
    assert type(other.memory_bytes) is int
    assert type(other.flops_per_second[0][1]) is float


def test_feeds_and_jobs() -> None:
    one: Any
    two: Any
    four: Any
    one, two, four = (np.int64(n) for n in (1, 2, 4))
    feed = wh.Feed([*range(8)], two, first_sample=four, seed=one)
    next(iter(feed))
    json.dumps(feed.get_state())
    job = wh.Job(len, len, np.arange(3), None, batch_size=two)
    assert type(job.batch_size) is int


# Places of feeds.


@pytest.mark.parametrize("name", ["place", "shift", "epoch", "read", "step"])
@pytest.mark.parametrize("value", [None, [2], "x", float("nan"), float("inf"), -1])
def test_a_place_that_is_none(name: str, value: Any) -> None:
    state = {"step": 0, "epoch": 0, "place": 0, name: value}
    with pytest.raises(wh.WhaleError, match=rf"state\['{name}'\]"):
        wh.Feed([1, 2], 1).set_state(state)


@pytest.mark.parametrize("state", [{"step": 0, "place": 0}, {"step": 0, "source": 1}])
def test_a_place_without_an_epoch(state: dict[str, Any]) -> None:
    with pytest.raises(wh.WhaleError, match=r"state\['epoch'\] is None"):
        wh.Feed([1, 2], 1).set_state(state)


def test_a_sum_that_no_float_holds() -> None:
    with pytest.raises(wh.WhaleError, match="total is a whole number of 1329 bits"):
        wh.WeightedLoss(10**400, 1.0)
