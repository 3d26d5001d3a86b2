"""``what_if`` by hand: what sliders stand at is what is planned and shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import whalejax as wh
from tests.whalejax.test_displays import checked, plain
from whalejax import jobs, models
from whalejax.capture import Captured
from whalejax.planner.plan.kept_layout import kept_layout


pytestmark = pytest.mark.relaxed_promotion  # Flax's norms rely on it


def llama_plan() -> wh.Plan:
    job = models.job("llama-test")
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 64),
        optimizer=job.optimizer,
        cluster="h100:8",
    )


def test_sliders_plan_again() -> None:
    pytest.importorskip("ipywidgets")
    shown = plain().sliders(clusters=["h100:2x8", "h100:1x4", "h100:3"])
    control = shown.controls["batch"]
    assert [label for label, _ in control.options] == [
        "64",
        "128",
        "256 (as planned)",
        "512",
        "1024",
    ]
    assert shown.plan == plain() and not shown.problem
    shown.controls["search"].value = True
    control.value = 512
    assert shown.plan == plain().what_if(batch=512)
    before = shown.plan
    shown.controls["cluster"].value = "h100:3"
    assert "no layout of 3 devices" in shown.problem and shown.plan is before
    assert "No plan" in shown.widget.children[-1].value
    shown.controls["cluster"].value = "h100:1x4"
    assert not shown.problem and shown.plan.num_devices == 4
    shown.controls["cluster"].value = "as planned"
    assert shown.plan is before  # and was not searched for again


def test_sliders_keep_the_layout() -> None:
    pytest.importorskip("ipywidgets")
    first = plain().what_if(mesh={"data": 4, "fsdp": 4}, remat="full")
    shown = first.sliders()
    shown.controls["batch"].value = 512
    assert shown.plan.axis_sizes == first.axis_sizes and shown.plan.remat == first.remat
    assert shown.plan == first.what_if(batch=512, **kept_layout(first, {"batch": 512}))
    devices = dict(shown.controls["devices"].options)
    assert [*devices] == ["4", "8", "16 (as planned)", "32", "64"]
    shown.controls["devices"].value = devices["32"]
    assert shown.plan.axis_sizes == {"data": 8, "fsdp": 4}
    shown.controls["devices"].value = devices["4"]
    assert shown.plan.axis_sizes == {"fsdp": 4} and not shown.problem
    shown.controls["batch"].value = 64
    shown.controls["remat"].value = "none"
    assert shown.plan.axis_sizes == {"fsdp": 4} and not shown.plan.remat


def test_layouts_that_cannot_be_kept_are_named() -> None:
    pytest.importorskip("ipywidgets")
    net = {"w": jnp.zeros((256, 256))}
    many = jax.ShapeDtypeStruct((2**18, 256), jnp.float32)
    plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, many, cluster="h100:8")
    assert plan.axis_sizes == {"data": 8}
    shown = plan.sliders(batches=[4])
    shown.controls["batch"].value = 4  # too few for eight
    assert shown.plan is plan
    assert shown.problem.endswith("Search all layouts instead")
    shown.controls["search"].value = True
    assert not shown.problem and shown.plan == plan.what_if(batch=4)


def test_sequences_grow_where_the_model_takes_them() -> None:
    pytest.importorskip("ipywidgets")
    plan = llama_plan()
    shown = plan.sliders()
    shown.controls["sequence"].value = 48
    assert shown.plan.batch[0].shape == (64, 49)  # the last one is only a target
    assert shown.plan.work is not None and plan.work is not None
    assert shown.plan.work.tokens == 64 * 48 == 2 * plan.work.tokens
    assert plan.what_if(sequence=24) == plan
    with pytest.raises(
        wh.PlanError, match=r"sequence is 0; expected a number of token"
    ):
        plan.what_if(sequence=0)


def test_tables_of_positions_have_their_length() -> None:
    net = {name: jnp.zeros((24, 24)) for name in ("words", "positions", "out")}
    tokens = jax.ShapeDtypeStruct((64, 24), jnp.int32)
    plan = wh.plan(
        lambda net, x: ((net["words"][x] + net["positions"]) @ net["out"]).mean(),
        net,
        tokens,
        cluster="h100:8",
    )
    assert plan.what_if(sequence=24) == plan
    with pytest.raises(
        wh.PlanError, match="takes no sequences of 100 .*limits the length"
    ):
        plan.what_if(sequence=100)
    with pytest.raises(wh.WhaleError, match="this loss reads no sequences of tokens"):
        plain().what_if(sequence=100)


def test_masks_have_the_length_of_their_tokens() -> None:
    net = {name: jnp.zeros((24, 24)) for name in ("words", "out")}
    batch = {
        "ids": jax.ShapeDtypeStruct((64, 24), jnp.int32),
        "weights": jax.ShapeDtypeStruct((64, 24), jnp.float32),
        "dense": jax.ShapeDtypeStruct((64, 7), jnp.float32),
    }

    def loss(net: Any, batch: Any) -> Any:
        hidden = net["words"][batch["ids"]] @ net["out"]
        return (hidden.sum(-1) * batch["weights"]).mean() + batch["dense"].mean()

    longer = wh.plan(loss, net, batch, cluster="h100:8").what_if(sequence=40)
    shapes = {leaf.path: leaf.shape for leaf in longer.batch}
    assert sorted(shapes.values()) == [(64, 7), (64, 40), (64, 40)]
    assert longer.work is not None and longer.work.tokens == 64 * 40


@pytest.mark.parametrize("features", [24, 23])
def test_features_as_long_as_the_tokens_keep_their_length(features: int) -> None:
    net = {
        "words": jnp.zeros((24, 24)),
        "out": jnp.zeros((24, 24)),
        "dense": jnp.zeros((features, 24)),
    }
    batch = {
        "ids": jax.ShapeDtypeStruct((64, 24), jnp.int32),
        "dense": jax.ShapeDtypeStruct((64, features), jnp.float32),
    }

    def loss(net: Any, batch: Any) -> Any:
        dense = batch["dense"] @ net["dense"]
        return ((net["words"][batch["ids"]] + dense[:, None]) @ net["out"]).mean()

    longer = wh.plan(loss, net, batch, cluster="h100:8").what_if(sequence=40)
    shapes = {leaf.path: leaf.shape for leaf in longer.batch}
    assert shapes == {"['ids']": (64, 40), "['dense']": (64, features)}
    assert longer.work is not None and longer.work.tokens == 64 * 40


def test_sequences_of_two_lengths_are_not_changed() -> None:
    job = models.job("t5-test")
    plan = wh.plan(
        job.loss_fn, jobs.abstract_model(job), job.batch_at(0, 8), cluster="h100:8"
    )
    with pytest.raises(wh.WhaleError, match="has sequences of 24, 25 and 72 elements"):
        plan.what_if(sequence=100)


def test_sliders_show_the_plan_where_widgets_are_not_drawn() -> None:
    pytest.importorskip("ipywidgets")
    shown = plain().sliders(batches=[32])
    bundle = shown._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    checked(bundle["text/html"])
    assert bundle["text/plain"] == str(plain())
    shown.controls["batch"].value = 32
    assert "What changes" in (html := shown._repr_mimebundle_()["text/html"])
    checked(html)


def test_sliders_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain().save(tmp_path / "plan.json")
    with pytest.raises(wh.PlanError, match="read from a file"):
        wh.Plan.load(tmp_path / "plan.json").sliders()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(wh.WhaleError, match="need ipywidgets") as caught:
        plain().sliders()
    assert 'pip install "whalejax[notebook]"' in str(caught.value)


@pytest.mark.parametrize("size", [0, -4, 2.5, "many"])
def test_batches_of_sliders_are_numbers_of_samples(size: Any) -> None:
    pytest.importorskip("ipywidgets")
    with pytest.raises(wh.WhaleError, match=f"batches has {size!r}; expected numbers"):
        plain().sliders(batches=[8, size])


def test_a_shorter_sequence_traces_no_other_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ipywidgets")
    plan = llama_plan()
    assert not plan.attention
    traced: list[Any] = []
    with_attention = Captured.with_attention

    def counted(captured: Captured, chosen: Any) -> Captured:
        traced.append("ring" in dict(chosen).values())
        return with_attention(captured, chosen)

    monkeypatch.setattr(Captured, "with_attention", counted)
    shown = plan.sliders()
    shown.controls["sequence"].value = 12
    assert shown.plan.work is not None and shown.plan.work.tokens == 64 * 12
    assert not any(traced) and not shown.plan.attention
    shown.controls["sequence"].value = 48  # Blocks may be what a longer one needs.
    assert any(traced)


def test_sizes_that_surely_lack_memory_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ipywidgets")
    job = models.job("llama-test", sequence=256)
    cluster = wh.cluster("h100:8").with_memory(100 * 10**6)
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 64),
        optimizer=job.optimizer,
        cluster=cluster,
        remat="none",
    )
    growth = 4 * plan.memory.activations_bytes + plan.memory.params_bytes
    assert growth > plan.room_bytes
    asked: list[int] = []
    what_if = type(plan).what_if

    def counted(plan: Any, **changes: Any) -> Any:
        asked.append(changes["num_micro_batches"])
        return what_if(plan, **changes)

    monkeypatch.setattr(type(plan), "what_if", counted)
    shown = plan.sliders(batches=[256])
    shown.controls["batch"].value = 256
    assert asked == [4 * plan.num_micro_batches] and not shown.problem
