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
from whalejax.planner.plan.kept_layout import kept_layout


pytestmark = pytest.mark.relaxed_promotion  # Flax's norms rely on it


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
    assert shown.problem.endswith("Search every layout for another")
    shown.controls["search"].value = True
    assert not shown.problem and shown.plan == plan.what_if(batch=4)


def test_sequences_grow_where_the_model_takes_them() -> None:
    pytest.importorskip("ipywidgets")
    job = models.job("llama-test")
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 64),
        optimizer=job.optimizer,
        cluster="h100:8",
    )
    shown = plan.sliders()
    shown.controls["sequence"].value = 50
    assert shown.plan.batch[0].shape == (64, 50)
    assert shown.plan.work is not None and plan.work is not None
    assert shown.plan.work.tokens > 1.9 * plan.work.tokens
    with pytest.raises(
        wh.PlanError, match=r"sequence is 0; expected a number of token"
    ):
        plan.what_if(sequence=0)


def test_tables_of_positions_have_their_length() -> None:
    net = {"words": jnp.zeros((32, 16)), "positions": jnp.zeros((24, 16))}
    tokens = jax.ShapeDtypeStruct((64, 24), jnp.int32)
    plan = wh.plan(
        lambda net, x: jnp.square(net["words"][x] + net["positions"]).mean(),
        net,
        tokens,
        cluster="h100:8",
    )
    assert plan.what_if(sequence=24) == plan
    with pytest.raises(wh.PlanError, match="takes no sequences of 100 .*length of its"):
        plan.what_if(sequence=100)
    with pytest.raises(wh.WhaleError, match="this batch has no whole numbers"):
        plain().what_if(sequence=100)


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
