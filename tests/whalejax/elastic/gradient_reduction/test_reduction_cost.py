"""Which way of adding gradients up is cheaper, on clusters that are not there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.elastic.gradient_reduction.reduction_cost import (
    AGREED_SECONDS,
    ReductionProcesses,
    all_reduce_seconds,
    choose,
    gradient_bytes,
    message_seconds,
    price,
)
from whalejax.elastic.replica_programs import planned_replica
from whalejax.journals.reduction_choice import COLLECTIVES, MESSAGES
from whalejax.meshes import Cluster, cluster
from whalejax.meshes.catalogue import kind_names
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import NothingFits


pytestmark = pytest.mark.relaxed_promotion

HOUR = 3600.0
GBIT = 1.25e8


def job(width: int, batch_size: int) -> wh.Job:
    """Four square layers."""

    def make_model(key: Any) -> dict[str, Any]:
        return {f"w{n}": jax.random.normal(key, (width, width)) for n in range(4)}

    def loss_fn(model: Any, batch: Any) -> Any:
        hidden = batch["x"]
        for n in range(4):
            hidden = jnp.tanh(hidden @ model[f"w{n}"])
        return jnp.mean(hidden**2)

    def batch(step: int, size: int) -> dict[str, np.ndarray]:
        return {"x": np.zeros((size, width), np.float32)}

    return wh.Job(loss_fn, make_model, batch, optax.adam(1e-3), batch_size=batch_size)


@functools.cache
def replica(each: str, width: int = 1024, samples: int = 64, parts: int = 16) -> Plan:
    return planned_replica(
        job(width, samples),
        cluster(each),
        batch=None,
        micro_batches=parts,
        precision="f32",
    ).plan


def processes(each: str, count: int, hosts: int = 1, **more: Any) -> ReductionProcesses:
    return ReductionProcesses(count=count, hosts=hosts, each=cluster(each), **more)


CPU = processes("cpu:1", 4)
ONE_HOST = processes("h100:1", 8)
ETHERNET = processes("h100:8", 4, 4, network_bytes_per_second=25 * GBIT)
INFINIBAND = dataclasses.replace(ETHERNET, has_fabric=True)
SLOW = processes("a10g:1", 2, 2, network_bytes_per_second=0.1 * GBIT)
TPU = processes("v5e:4", 4, 4)


def plan_of(there: ReductionProcesses, **more: Any) -> Plan:
    each = {CPU: "cpu:1", ONE_HOST: "h100:1", SLOW: "a10g:1", TPU: "v5e:4"}
    return replica(each.get(there, "h100:8"), **more)


@pytest.mark.parametrize("there", [ONE_HOST, ETHERNET, INFINIBAND, TPU])
def test_accelerators_with_short_steps_add_up_by_collectives(
    there: ReductionProcesses,
) -> None:
    found = choose(plan_of(there), there, HOUR)
    assert found.by == COLLECTIVES
    assert "16.8 MB of gradients: a step takes" in found.why
    assert "if one fails every 3,600 s" in found.why


@pytest.mark.parametrize("width", [64, 1024])
def test_cpus_add_up_by_messages(width: int) -> None:
    found = choose(plan_of(CPU, width=width), CPU, HOUR)
    assert found.by == MESSAGES
    assert found.why.startswith("the default on CPUs")


def test_a_model_without_room_in_one_process_is_spread() -> None:
    with pytest.raises(NothingFits):
        replica("h100:1", width=65536)
    for there in (CPU, ONE_HOST, SLOW):
        found = choose(None, there, HOUR)
        assert found.by == COLLECTIVES and "does not fit" in found.why
    assert "(1 H100)" in choose(None, ONE_HOST, HOUR).why


def test_a_process_alone_adds_nothing_up() -> None:
    found = choose(replica("h100:1"), processes("h100:1", 1), HOUR)
    assert found.by == MESSAGES and "one process" in found.why


def test_failures_and_slow_links_speak_for_messages() -> None:
    plan = plan_of(SLOW, samples=65536)
    assert choose(plan, SLOW, 300.0).by == MESSAGES
    # A fast link is worth beginning anew as often.
    fast = dataclasses.replace(SLOW, network_bytes_per_second=25 * GBIT)
    assert choose(plan, fast, 300.0).by == COLLECTIVES
    often, seldom = (price(plan, SLOW, mtbf) for mtbf in (300.0, 1e7))
    # Without failures the platform's all-reduce is faster, and with few of them.
    assert seldom.with_failures[1] < seldom.with_failures[0]
    assert often.messages == seldom.messages < often.with_failures[0]
    assert often.collectives == seldom.collectives < often.with_failures[1]


def test_long_steps_speak_for_messages() -> None:
    """What an exchange takes more is a small part of them; what a failure costs not."""
    plan = replica("h100:1")
    steps = dataclasses.replace(plan.time, compute_seconds=600.0)
    long = dataclasses.replace(plan, time=steps)
    assert choose(plan, ONE_HOST, HOUR).by == COLLECTIVES
    assert choose(long, ONE_HOST, HOUR).by == MESSAGES


def test_seconds_follow_the_bytes_and_the_links() -> None:
    small, large = (plan_of(ETHERNET, width=w) for w in (1024, 2048))
    assert gradient_bytes(large) == 4 * gradient_bytes(small) == 4 * 4 * 2**22
    for seconds in (message_seconds, all_reduce_seconds):
        assert 3 < seconds(large, ETHERNET) / seconds(small, ETHERNET) < 4
    # Eight devices share the card, and each has an eighth of the sum to send: an
    # all-reduce of what one host has over four.
    crossing = 2 * gradient_bytes(large) * 3 / 4 / (25 * GBIT)
    assert all_reduce_seconds(large, ETHERNET) == pytest.approx(crossing, rel=0.05)
    assert all_reduce_seconds(large, INFINIBAND) < crossing / 10
    slower = dataclasses.replace(ETHERNET, network_bytes_per_second=0.1 * GBIT)
    sent = 2 * gradient_bytes(large) * 3 / 4 / (0.1 * GBIT)
    more = message_seconds(large, slower) - message_seconds(large, ETHERNET)
    assert 0.9 < more / sent < 1


def test_one_host_has_no_card_to_cross() -> None:
    slow = dataclasses.replace(ONE_HOST, network_bytes_per_second=1.0)
    plan = replica("h100:1")
    assert message_seconds(plan, slow) == message_seconds(plan, ONE_HOST)
    assert all_reduce_seconds(plan, slow) == all_reduce_seconds(plan, ONE_HOST)


def test_devices_of_all_processes() -> None:
    def levels(there: ReductionProcesses) -> list[tuple[str, int]]:
        return [(x.name, x.size) for x in there.devices().levels]

    assert levels(CPU) == [("host", 4)]
    assert levels(ONE_HOST) == [("nvlink", 8)]
    assert levels(ETHERNET) == [("nvlink", 8), ("infiniband", 4)]
    assert TPU.devices().num_devices == 16
    kind = dataclasses.replace(cluster("h100:1").kinds[0], name="mine")
    node = dataclasses.replace(cluster("h100:1").nodes[0], kind=kind)
    mine = Cluster.of(dataclasses.replace(cluster("h100:1"), nodes=(node,)))
    unknown = ReductionProcesses(count=4, hosts=2, each=mine)
    assert levels(unknown) == [("host", 2), ("network", 2)]
    assert choose(replica("h100:1"), unknown, HOUR).by == COLLECTIVES


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", kind_names())
def test_every_kind_has_a_price(name: str, hosts: int) -> None:
    """Also where the catalogue knows no network, or no such number of devices."""
    plan = replica("h100:1")
    for count in (2, 3, 40):
        there = ReductionProcesses(count=count, hosts=hosts, each=cluster(f"{name}:1"))
        for mtbf in (1e-12, HOUR, 1e9):
            found = choose(plan, there, mtbf)
            assert "by messages and" in found.why


def test_agreeing_is_a_part_of_the_price() -> None:
    plan = replica("h100:1", width=64)
    found = price(plan, ONE_HOST, HOUR)
    assert found.collectives > AGREED_SECONDS
