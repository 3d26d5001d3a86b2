"""A plan and something else than it was made for: found before anything compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_bad_input import batch, hybrid, leaf, net, plain, planned
from whalejax.runtime import plan_compatibility


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """Fails if a program is compiled inside."""
    found: list[str] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text.startswith("Compiling"):
                found.append(text)

    logger = logging.getLogger("jax._src.interpreters.pxla")
    handler, level, propagate = Watch(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    assert not found


def test_the_watch_sees_a_compilation() -> None:
    with pytest.raises(AssertionError), nothing_compiles():
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))


def real_net(**sizes: int) -> Any:
    """Real parameters."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), net(**sizes))


def compile_refused(plan: wh.Plan, *arguments: Any, **options: Any) -> str:
    """The text of the error that ``wh.compile`` ends in, without compiling."""
    with nothing_compiles(), pytest.raises(wh.WhaleError) as caught:
        wh.compile(plan, *arguments, optimizer=optax.sgd(0.1), **options)
    return str(caught.value)


def test_a_plan_for_another_kind_of_device() -> None:
    assert compile_refused(planned(), plain, net()) == (
        "this plan is for 8×H100 (1 node of 8, nvlink); here are 8×cpu. Make one for "
        'this machine: --cluster local, or cluster="local" in wh.plan. From Python, '
        "devices= runs a plan on as many devices of another kind"
    )


def test_devices_run_a_plan_for_others_all_the_same() -> None:
    step = wh.compile(
        planned(), plain, net(), optimizer=optax.sgd(0.1), devices=jax.devices()
    )
    assert step.mesh.size == 8


def test_a_plan_for_another_number_of_devices() -> None:
    plan = planned(cluster="h100:4")
    text = compile_refused(plan, plain, net(), devices=jax.devices())
    assert text == (
        "this plan is for 4 devices (4×H100 (1 node of 4, nvlink)); devices= has 8 "
        "(cpu). Plan again for this machine, or pass devices=jax.devices()[:4]"
    )
    plan = planned(cluster="h100:8")
    text = compile_refused(plan, plain, net(), devices=jax.devices()[:4])
    assert text == (
        "this plan is for 8 devices (8×H100 (1 node of 8, nvlink)); devices= has 4 "
        "(cpu). Plan again for 4, or give 8 of all 8"
    )


def test_a_plan_for_another_model() -> None:
    other = {**net(classes=56), "extra": {"bias": leaf(5)}}
    text = compile_refused(planned(), plain, other, devices=jax.devices())
    assert text == (
        "this plan was made for another model or batch; plan again, or give the "
        "trainable=, axis_names= and batch_axes= that it was made with: 2 problems\n"
        "  1. extra.bias: the plan has no such leaf, the model float32[5]\n"
        "  2. head.kernel: the plan has float32[48, 40], the model float32[48, 56]"
    )


def test_a_plan_for_another_model_on_which_the_loss_fails() -> None:
    other = {**net(), "head": {"kernel": leaf(56, 40)}}
    with pytest.raises(wh.PlanError) as caught:
        wh.compile(planned(), plain, other, devices=jax.devices())
    assert str(caught.value) == (
        "this plan was made for another model or batch; plan again, or give the "
        "trainable=, axis_names= and batch_axes= that it was made with: 1 problem\n"
        "  1. head.kernel: the plan has [48, 40], the model [56, 40]"
    )
    assert isinstance(caught.value.__context__, TypeError)


def test_a_loss_that_fails_on_the_model_of_its_plan() -> None:
    def failing(params: Any, batch: Any) -> jax.Array:
        raise ZeroDivisionError("in the loss")

    with pytest.raises(ZeroDivisionError, match="in the loss"):
        wh.compile(planned(), failing, net(), devices=jax.devices())


def test_a_plan_for_other_marks() -> None:
    text = compile_refused(planned(), hybrid(), net(), devices=jax.devices())
    assert "the loss or its marks changed (the plan has hash " in text


def test_a_plan_for_another_batch() -> None:
    text = compile_refused(
        planned(), plain, net(), batch=batch(32), devices=jax.devices()
    )
    assert text == (
        "batch has ['x'] [32, 24]; the plan is for ['x'] [16, 24]. Give the batch that "
        "it was made for, or plan again"
    )


def test_a_batch_of_another_shape_at_a_step() -> None:
    step = wh.compile(
        planned(), plain, net(), optimizer=optax.sgd(0.1), devices=jax.devices()
    )
    state, small = step.init_from(real_net()), {"x": jnp.ones((8, 24))}
    with nothing_compiles(), pytest.raises(wh.WhaleError) as caught:
        step(state, small)
    assert str(caught.value) == (
        "the batch does not match the plan: 1 problem\n"
        "  1. batch['x'] has shape (8, 24); the plan is for the global shape (16, 24). "
        "Plan again for this batch"
    )


def test_a_plan_that_is_an_estimate() -> None:
    plan = dataclasses.replace(planned(), runnable=False)
    assert "is an estimate (runnable=False)" in compile_refused(plan, plain, net())


def test_devices_are_given_once() -> None:
    with pytest.raises(wh.PlanError) as caught:
        plan_compatibility.devices_of(
            planned(), [jax.devices()[0]] * planned().num_devices
        )
    said = str(caught.value)
    assert "more than once; expected" in said and "different ones" in said


def gpus(*kinds: str) -> list[Any]:
    """One GPU of each process."""
    return [
        SimpleNamespace(platform="gpu", device_kind=kind, process_index=number)
        for number, kind in enumerate(kinds)
    ]


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("cluster", "kinds", "text"),
    [
        (
            "h100:1+a100-80:1",
            (A100, H100),
            "has device 0 as h100; it is NVIDIA A100-SXM4-80GB here, of process 0. "
            "Start the processes in the order of the plan's nodes",
        ),
        ("h100:2", (H100, A100), "has device 1 as h100; it is NVIDIA A100"),
        ("h100:1+a100-80:1", (H100, H100), "here are 2×NVIDIA H100 80GB HBM3"),
        ("h100:1+a100-80:1", (H100, A100), ""),
    ],
)
def test_kinds_of_processes_are_those_of_the_plan(
    cluster: str, kinds: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(
        planned(cluster="h100:2"), cluster=wh.cluster(cluster), axes=(("data", 2),)
    )
    monkeypatch.setattr(jax, "devices", lambda: gpus(*kinds))
    if not text:
        assert len(plan_compatibility.devices_of(plan, None)) == 2
        return
    with pytest.raises(wh.PlanError) as error:
        plan_compatibility.devices_of(plan, None)
    assert text in str(error.value)


# Which hardware counts as the same.


@pytest.mark.parametrize(
    ("text", "platform", "kind", "same"),
    [
        ("h100:8", "gpu", "NVIDIA H100 80GB HBM3", True),
        ("h100:8", "gpu", "NVIDIA A100-SXM4-80GB", False),
        ("h100:8", "gpu", "a card that no catalogue has", False),
        ("v5p:2x2x2", "tpu", "TPU v5p", True),
        ("v5p:2x2x2", "tpu", "TPU v5 lite", False),
        ("h100:8", "cpu", "cpu", False),
    ],
)
def test_hardware_is_told_by_platform_and_kind(
    text: str, platform: str, kind: str, same: bool
) -> None:
    devices = [SimpleNamespace(platform=platform, device_kind=kind)] * 8
    assert plan_compatibility._same_hardware(wh.cluster(text), devices) is same


def test_a_kind_of_the_users_own_may_be_any_of_its_platform() -> None:
    cluster = wh.cluster("h100:8")
    kind = dataclasses.replace(cluster.slowest, name="ours")
    nodes = tuple(dataclasses.replace(node, kind=kind) for node in cluster.nodes)
    mine = dataclasses.replace(cluster, nodes=nodes)
    cards = [SimpleNamespace(platform="gpu", device_kind="a new card")] * 8
    assert plan_compatibility._same_hardware(mine, cards)
    chips = [SimpleNamespace(platform="tpu", device_kind="TPU v5p")] * 8
    assert not plan_compatibility._same_hardware(mine, chips)


def test_a_plan_for_the_devices_here_needs_no_devices() -> None:
    plan = planned(cluster=wh.Cluster.detect(calibrate=False))
    step = wh.compile(plan, plain, net(), optimizer=optax.sgd(0.1))
    assert step.mesh.size == 8


def test_a_plan_that_leaves_devices_idle_takes_the_first() -> None:
    plan = planned(
        cluster=wh.Cluster.detect(calibrate=False),
        batch=batch(7),
        default=wh.replicate(),
        allow_idle=True,
    )
    assert plan.num_devices == 7
    step = wh.compile(plan, plain, net(), optimizer=optax.sgd(0.1))
    assert list(step.mesh.devices.flat) == jax.devices()[:7]
