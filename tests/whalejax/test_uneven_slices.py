"""ZeRO-1 between replicas of unlike shares: each updates a slice, all compute alike."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_uneven import (
    MODELS,
    TIGHT,
    WIDE,
    apart,
    both,
    dropping,
    simple,
    worst_of,
)
from whalejax.lowering.global_arrays import unwrapped
from whalejax.lowering.uneven import replica_executor
from whalejax.meshes import Cluster
from whalejax.user_code.losses import Job


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms


@pytest.mark.parametrize(
    ("name", "shares", "inner"),
    [
        pytest.param("gpt", (3, 1), {"fsdp": 2}, marks=pytest.mark.full),
        pytest.param("gpt-scan", (5, 2, 1, 0), {"tensor": 2}, marks=pytest.mark.full),
        pytest.param("resnet", (0, 4), {}, marks=pytest.mark.full),
        pytest.param("linen", (3, 1), {"fsdp": 2}, marks=pytest.mark.full),
    ],
)
def test_slices_equal_one_device(
    name: str, shares: tuple[int, ...], inner: dict[str, int]
) -> None:
    job = MODELS[name].job("float64", annotated=False)
    job = dataclasses.replace(job, optimizer=optax.sgd(0.1, momentum=0.9))
    with jax.enable_x64(True):
        one, step = both(job, shares, inner, zero=1)
        assert step.plan.zero == 1
        assert worst_of(one, step, job) <= TIGHT


def bytes_on_devices(tree: Any) -> list[int]:
    """What each device holds of a tree."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return list(held.values())


@pytest.mark.full
@pytest.mark.parametrize(
    "shares, inner",
    [
        pytest.param((3, 1), {}, marks=pytest.mark.full),
        ((5, 2, 1, 0), {}),
        pytest.param((3, 1), {"fsdp": 2}, marks=pytest.mark.full),
    ],
)
def test_each_device_keeps_its_part_of_the_state(
    shares: tuple[int, ...], inner: dict[str, int]
) -> None:
    job = dropping()
    with jax.enable_x64(True):
        one, step = both(job, shares, inner, zero=1)
        state = step.init(job.make_model, rng=jax.random.key(0))
        whole = one.init(job.make_model, rng=jax.random.key(0))
        assert apart(state.opt_state, whole.opt_state) == 0
        moments = [x for x in jax.tree.leaves(whole.opt_state) if x.ndim]
        counts = [x for x in jax.tree.leaves(whole.opt_state) if not x.ndim]
        all_of_it, others = (sum(x.nbytes for x in xs) for xs in (moments, counts))
        parts = len(shares) * inner.get("fsdp", 1)
        assert all_of_it > 1000
        for state_bytes in (
            bytes_on_devices(state.opt_state),
            bytes_on_devices(step(state, job.batch_at(0))[0].opt_state),
        ):
            assert state_bytes == [all_of_it // parts + others] * parts
        said = step.plan.memory.optimizer_bytes
        assert said == all_of_it // parts + others


@pytest.mark.full
def test_other_shares_and_levels_of_zero_change_nothing(tmp_path: Path) -> None:
    """One compilation; what was saved in slices is restored whole, and back."""
    job = dropping()
    with jax.enable_x64(True):
        one, step = both(job, (4, 4), zero=1)
        _, keeps = both(job, (6, 2), zero=0)
        _, fourths = both(job, (4, 2, 1, 1), zero=1)
        step.rebalances = False
        state, expected = (
            s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
        )
        for index, shares in enumerate([(4, 4), (7, 1), (0, 8), (5, 3)]):
            step.shares = shares
            state, metrics = step(state, job.batch_at(index))
            expected, wanted = one(expected, job.batch_at(index))
            assert apart(metrics, wanted) <= TIGHT
            assert apart(state.opt_state, expected.opt_state) <= TIGHT
            assert apart(state.params, expected.params) <= TIGHT
        for replica in step._runner._replicas.values():
            programs = replica.add, replica.pack, replica._finished, replica.collect
            assert [p._cache_size() for p in programs] == [1, 1, 1, 1]
        step.save(tmp_path / "sliced", state)
        kept = jax.tree.leaves((state.params, state.opt_state, state.rest))
        expected, _ = one(expected, job.batch_at(9))
        for number, other in enumerate((step, keeps, fourths, one)):
            again = other.restore(tmp_path / "sliced")
            found = jax.tree.leaves((again.params, again.opt_state, again.rest))
            assert apart(found, kept) == 0
            again, _ = other(again, job.batch_at(9))
            assert apart(again.params, expected.params) <= TIGHT
            other.save(tmp_path / f"back-{number}", again)
            back = step.restore(tmp_path / f"back-{number}")
            assert apart(back.opt_state, again.opt_state) == 0
            again, _ = other(again, job.batch_at(10))
            assert apart(step(back, job.batch_at(10))[0].params, again.params) <= TIGHT


@pytest.mark.smoke
def test_replicas_gather_once_for_each_dtype() -> None:
    job = dropping()
    with jax.enable_x64(True):
        _, step = both(job, (3, 1), {"fsdp": 2}, zero=1)
        runner = step._runner
        for exchange, kind in (
            (runner.exchange, "all-reduce"),
            (runner.gathering, "all-gather"),
        ):
            text = exchange.program.lower(exchange.abstract()).compile().as_text()
            every = r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\("
            assert re.findall(every, text) == [kind] * len(exchange.abstract())
        assert [x.dtype for x in runner.gathering.abstract()] == [jnp.float64]


@pytest.mark.full
def test_devices_of_unlike_kinds_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no one program can run on both goes by copies."""
    monkeypatch.setattr(replica_executor, "several_kinds", lambda mesh: True)
    job = dropping()
    with jax.enable_x64(True):
        for inner in ({}, {"fsdp": 2}):
            one, step = both(job, (3, 1), inner, zero=1)
            runner = step._runner
            for exchange in (runner.exchange, runner.gathering, runner._telling):
                exchange.program = None
            state, expected = (
                s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
            )
            for index in range(2):
                state, metrics = step(state, job.batch_at(index))
                expected, wanted = one(expected, job.batch_at(index))
                assert apart(metrics, wanted) <= TIGHT
            for part in ("params", "opt_state"):
                assert apart(getattr(state, part), getattr(expected, part)) <= TIGHT


@functools.cache
def sliced() -> tuple[Job, Any, Any]:
    """A job, its step on one device and on two replicas; in float64."""
    job = dropping()
    return job, *both(job, (3, 1), zero=1)


def test_parameters_equal_one_device_and_are_the_same_bits_on_every_replica() -> None:
    with jax.enable_x64(True):
        job, one, step = sliced()
        state, expected = (
            s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
        )
        for index in range(2):
            state, metrics = step(state, job.batch_at(index))
            expected, wanted = one(expected, job.batch_at(index))
            assert apart(metrics, wanted) <= TIGHT
        for part in ("params", "opt_state"):
            assert apart(getattr(state, part), getattr(expected, part)) <= TIGHT
    for leaf in jax.tree.leaves((state.params, state.rest)):
        shards = unwrapped(leaf).addressable_shards
        first, *others = (np.asarray(s.data) for s in shards)
        assert others and all(np.array_equal(first, other) for other in others)


def planned(cluster: Cluster, **options: Any) -> wh.Plan:
    rows = {"x": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}
    given: dict[str, Any] = {"optimizer": optax.adam(1e-3), "num_micro_batches": 32}
    given["margin"] = 0
    return wh.plan(simple, WIDE, rows, cluster=cluster, **{**given, **options})


def test_a_state_too_large_for_each_is_cut() -> None:
    """Chosen where memory is short; the plan says what it saves and what it costs."""
    mesh = {"data": 4}
    roomy = wh.cluster("v100-32:2+p100-16:2")
    plain = planned(roomy, mesh=mesh)
    asked = planned(roomy, mesh=mesh, zero=1)
    assert (plain.zero, asked.zero) == (0, 1)
    saved = plain.memory.optimizer_bytes - asked.memory.optimizer_bytes
    assert saved == 3 * 2 * 1024 * 4096 * 2 * 4 // 4
    tight = roomy.with_memory(plain.memory.total_bytes - saved // 2)
    chosen = planned(tight, mesh=mesh, remat="none", offload=())
    assert chosen.zero == 1 and chosen.shares == asked.shares
    assert chosen.memory == asked.memory
    assert "each of 4 replicas stores and updates a slice" in str(chosen)
    gathered = [c for c in chosen.collectives if c.kind == "all-gather"]
    assert [c.payload_bytes for c in gathered] == [2 * 1024 * 4096 * 4]
    with pytest.raises(wh.WhaleError, match="without any micro-batch, with"):
        planned(tight, mesh=mesh, remat="none", offload=(), zero=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero": 2}, r"zero is 2, but replicas.*Give zero=1"),
        ({"optimizer": optax.sgd(0.1)}, "no state that it updates element by element"),
        (
            {"optimizer": optax.lamb(1e-3)},
            "no state that it updates element by element",
        ),
        ({"offload": "optimizer"}, "zero is 1 and offload is optimizer"),
    ],
)
def test_levels_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        planned(wh.cluster("v100-32:2+p100-16:2"), **{"zero": 1, **options})


def test_parameters_that_nothing_divides_are_refused() -> None:
    problem = pytest.raises(wh.WhaleError, match="a dimension that is divisible by 3")
    with jax.enable_x64(True), problem:
        both(dropping(), (4, 2, 2), zero=1)


def test_another_optimizer_than_the_planned_is_refused() -> None:
    with jax.enable_x64(True):
        job, _, step = sliced()
        model = jax.eval_shape(job.make_model, jax.random.key(0))
        lamb = wh.compile(
            step.plan,
            job.loss_fn,
            model,
            optimizer=optax.lamb(1e-3),
            devices=jax.devices()[:2],
        )
        with pytest.raises(wh.WhaleError, match="optimizer"):
            state = lamb.init(job.make_model, rng=jax.random.key(0))
            lamb(state, job.batch_at(0))
