"""What a terminal shows of a plan and of a run."""

from __future__ import annotations

import dataclasses
import io
import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import whalejax as wh
from tests.whalejax.runs import run_script
from whalejax.cli.progress import Meter, Working, progress_words, remark
from whalejax.cli.show import (
    parameter_rows,
    plan_table,
    print_plan,
    seconds_text,
)
from whalejax.meshes.errors import listening, tell
from whalejax.meshes.fitted_constants import constants
from whalejax.meshes.units import gigabytes
from whalejax.planner.plan.report.plan_page import bar_text


def layered_loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for i in range(4):
        x = jax.nn.relu(x @ params[f"layer_{i}"])
    return jnp.mean(x @ params["head"])


@cache
def layered_plan() -> wh.Plan:
    """Four equal layers and a wide head on 32 devices at two levels."""
    params = {
        f"layer_{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(4)
    }
    params["head"] = jax.ShapeDtypeStruct((512, 65_536), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((256, 512), jnp.float32)

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return layered_loss({**params, "head": params["head"].astype(x.dtype)}, x)

    return wh.plan(loss, params, x, cluster="h100:4x8")


def shown(plan: wh.Plan, width: int = 110, all_rows: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    print_plan(plan, console, all_rows=all_rows)
    return file.getvalue()


def test_the_table_says_what_was_decided() -> None:
    plan = layered_plan()
    text = shown(plan)
    assert "32×H100 (4 nodes of 8, nvlink + infiniband)" in text
    for axis, size in plan.axes:
        assert f"{axis} {size}" in text
    for name in ("step", "memory", "mesh", "axes", "parameter", "traffic", "next"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert f"{seconds_text(plan.time.step_seconds)} predicted" in text
    assert gigabytes(plan.memory.total_bytes) in text
    assert "█" in text
    for note in plan.notes:
        assert note.split()[0] in text


def test_the_precision_of_the_whole_model_is_shown() -> None:
    assert "f16" not in shown(layered_plan(), width=1000).splitlines()[0]
    plan = dataclasses.replace(layered_plan(), precision="f16")
    assert shown(plan, width=1000).splitlines()[0].rstrip().endswith(" · f16")


def test_every_term_is_shown_with_its_size() -> None:
    plan = layered_plan()
    text = shown(plan, width=1000)
    for field in dataclasses.fields(plan.time):
        seconds = getattr(plan.time, field.name)
        word = f"{field.name.removesuffix('_seconds')} {seconds_text(seconds)}"
        assert (word in text) == (seconds > 0)
    for field in dataclasses.fields(plan.memory):
        nbytes = getattr(plan.memory, field.name)
        word = f"{field.name.removesuffix('_bytes')} {gigabytes(nbytes)}"
        assert (word in text) == (nbytes > 0)


def test_links_are_those_that_an_axis_crosses() -> None:
    plan = dataclasses.replace(layered_plan(), axes=(("data", 4), ("tensor", 8)))
    shares = constants().platforms["gpu"]
    nvlink = f"nvlink at {450 * constants().node_of('h100', 'gpu'):.3g} GB/s"
    infiniband = f"infiniband at {50 * shares.network:.3g} GB/s"
    text = shown(plan, width=200)
    assert f"data 4 crosses {infiniband} · tensor 8 crosses {nvlink}" in text
    plan = dataclasses.replace(plan, axes=(("data", 16), ("tensor", 2)))
    both = f"data 16 crosses {nvlink} and {infiniband} · tensor 2 crosses {nvlink}"
    assert both in shown(plan, width=200)


def test_repeated_layers_are_folded() -> None:
    plan = layered_plan()
    rows = parameter_rows(plan)
    assert [(row.label, row.count) for row in rows] == [("head", 1), ("layer_* ×4", 4)]
    assert "layer_* ×4" in shown(plan)
    sizes = plan.axis_sizes
    expected = 0
    for leaf in plan.leaves:
        parts = math.prod(sizes[a] for axes in leaf.param_spec for a in axes)
        itemsize = 2 if leaf.dtype == "bfloat16" else 4
        expected += math.prod(leaf.shape) * itemsize // parts
    assert sum(row.device_bytes for row in rows) == expected


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["blocks.0.up", "blocks.1.up"], ["blocks.*.up ×2"]),
        (["layer_0.w", "layer_1.w"], ["layer_*.w ×2"]),
        (["0.w", "1.w"], ["*.w ×2"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.*.b.* ×3"]),
        (["blocks.0.up"], ["blocks.0.up"]),
        (["conv1x1", "conv3x3"], ["conv1x1", "conv3x3"]),
    ],
)
def test_names_of_folded_layers(paths: list[str], labels: list[str]) -> None:
    plan = layered_plan()
    leaf = plan.leaf("layer_0")
    leaves = tuple(dataclasses.replace(leaf, path=path) for path in paths)
    rows = parameter_rows(dataclasses.replace(plan, leaves=leaves))
    assert [row.label for row in rows] == labels


def test_small_parameters_are_folded_unless_all_are_asked_for() -> None:
    plan = layered_plan()
    leaf = plan.leaf("layer_0")
    leaves = tuple(
        dataclasses.replace(leaf, path=f"name{'x' * n}", shape=(8 * n, 512))
        for n in range(1, 31)
    )
    many = dataclasses.replace(plan, leaves=leaves)
    few = shown(many)
    assert "… 18 smaller rows folded" in few
    assert f"name{'x' * 30} " in few and "namex " not in few
    full = shown(many, all_rows=True)
    assert "folded" not in full and "namex " in full


def test_brackets_are_not_taken_for_styles() -> None:
    note = "head.kernel[bold] stays; see [/red] and layer_[4]"
    text = shown(dataclasses.replace(layered_plan(), notes=(note,)))
    assert note in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_keep_to_the_width(width: int) -> None:
    text = shown(layered_plan(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    if width < 100:  # terms are not broken in two
        assert not any(line.rstrip().endswith("█") for line in text.splitlines())


def test_a_plan_for_one_device_can_be_shown() -> None:
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    net = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    plan = wh.plan(lambda net, x: jnp.mean(x @ net["w"]), net, x, cluster="h100:1")
    text = shown(plan)
    assert "one device" in text
    assert "traffic none" in " ".join(text.split())


def test_the_table_is_a_renderable() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    console.print(plan_table(layered_plan()))
    assert "\x1b[" in console.file.getvalue()  # type: ignore[attr-defined]


SHOWS_WITHOUT_JAX = """
import sys
import whalejax as wh
from rich.console import Console
from whalejax.cli.show import print_plan
print_plan(wh.Plan.load(sys.argv[1]), Console())
assert "jax" not in sys.modules, "showing a plan imported jax"
"""


def test_showing_a_plan_file_needs_no_jax(tmp_path: Path) -> None:
    layered_plan().save(tmp_path / "plan.json")
    done = run_script(SHOWS_WITHOUT_JAX, tmp_path / "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "32×H100" in done.stdout


# Pieces.


@pytest.mark.parametrize(
    ("share", "expected"),
    [(1.0, "████"), (0.5, "██"), (0.28125, "█▏"), (0.001, "▏"), (0.97, "███▉")],
)
def test_bars(share: float, expected: str) -> None:
    assert bar_text(share, 4) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.000_2, "0.2 ms"),
        (0.4123, "412 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (3.207, "3.21 s"),
        (4321.0, "4,321 s"),
    ],
)
def test_times(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


def test_words_before_anything_is_measured() -> None:
    words = progress_words(
        2.5,
        unit="samples",
        units_per_step=32,
        predicted_seconds=0.4,
        measured_seconds=None,
    )
    assert words == "loss 2.5000 · step not measured yet, predicted 400 ms"


def test_a_file_gets_a_line_every_few_seconds() -> None:
    console = Console(file=io.StringIO(), width=80)
    now = [0.0]
    with Meter(console, "training", first=0, steps=100, clock=lambda: now[0]) as meter:
        for step in range(1, 101):
            meter.show(step, f"loss {step} [x]")
            now[0] += 0.5
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == [
        *(f"{step}/100" for step in range(1, 100, 10)),
        "100/100",
    ]
    assert lines[0] == "training 1/100  loss 1 [x]"


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Meter(console, "training", first=40, steps=100) as meter:
        meter.show(60, "loss 1.5")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "60/100" in text and "loss 1.5" in text and "━" in text


def test_a_quiet_console_gets_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, quiet=True)
    with Meter(console, "training", first=0, steps=2) as meter:
        meter.show(2, "loss 1.5")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


# Progress.


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def worked(seconds: float, *, terminal: bool = True, quiet: bool = False) -> str:
    """What a terminal holds after work of two parts that took so long."""
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Working("planning", quiet=quiet, console=console, clock=clock):
        tell("tracing the model")
        clock.now += seconds / 4
        tell("searching layouts [bold]")
        clock.now += seconds / 4
        tell("tracing the model")
        clock.now += seconds / 2
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_work_leaves_a_line_with_the_time_of_each_part() -> None:
    text = worked(4.0)
    assert "planning 4 s: tracing the model 3 s, searching layouts [bold] 1 s" in text
    assert "planning 0" not in worked(0.4) and "ms" not in worked(0.4)


def test_work_is_shown_on_terminals_to_those_who_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert worked(4.0, quiet=True) == worked(4.0, terminal=False) == ""
    monkeypatch.setenv("CI", "true")
    assert worked(4.0) == ""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Meter(console, "training", first=0, steps=2, waiting="compiling") as meter:
        meter.show(2, "loss 1.5")
    remark(console, "compiling; the first step takes longer")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_nobody_listens_outside_the_block() -> None:
    heard: list[str] = []
    with pytest.raises(ValueError), listening(heard.append):
        tell("first")
        raise ValueError
    tell("second")
    assert heard == ["first"]


def test_planning_tells_what_it_does() -> None:
    heard: list[str] = []
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    net = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with listening(heard.append):
        wh.plan(lambda net, x: jnp.mean(x @ net["w"]), net, x, cluster="h100:1")
    assert heard == ["tracing the model", "searching layouts of 1 device"]


def test_the_first_step_says_how_long_it_took() -> None:
    console, clock = Console(file=io.StringIO(), width=80), Clock()
    with Meter(
        console, "training", first=0, steps=2, waiting="compiling", clock=clock
    ) as meter:
        clock.now = 12.0
        meter.show(1, "loss 2")
        clock.now = 20.0
        meter.show(2, "loss 1")
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "the first step was done after 12 s, compiling included",
        "training 1/2  loss 2",
        "training 2/2  loss 1",
    ]
