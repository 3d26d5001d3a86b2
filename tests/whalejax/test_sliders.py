"""``what_if`` by hand: what sliders stand at is what is planned and shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import whalejax as wh
from tests.whalejax.test_displays import checked, plain


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
