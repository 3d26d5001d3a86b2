"""What capture refuses, to the letter, and what it passes on unchanged."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.capture_zoo import captured, mlp_batch, mlp_loss, mlp_params


def refused(*arguments: Any, **options: Any) -> str:
    """The text of the error that a capture ends in."""
    with pytest.raises(wh.WhaleError) as caught:
        captured(*arguments, **options)
    return str(caught.value)


def test_a_loss_that_is_no_scalar() -> None:
    text = refused(mlp_params(), lambda p, b: b["x"] @ p["up"]["w"], mlp_batch())
    assert text == (
        "loss_fn: the loss has shape (6, 40); expected a scalar of shape (). Take the "
        "mean over samples, as in `losses.mean()`."
    )


def test_a_constant_loss() -> None:
    text = refused(mlp_params(), lambda p, b: 1.0, mlp_batch())
    assert text.startswith("the loss is a constant. It has to depend on the model's")


def test_a_loss_that_no_parameter_reaches() -> None:
    for loss in (
        lambda p, b: jnp.mean(b["x"]),
        lambda p, b: jnp.mean(jax.lax.stop_gradient(b["x"] @ p["up"]["w"])),
    ):
        text = refused(mlp_params(), loss, mlp_batch())
        assert text == (
            "the loss depends on none of the 3 trained parameters (down.w, up.b, up.w)."
            " Check that loss_fn uses the model that it is given, and that no "
            "stop_gradient cuts it off."
        )


def test_the_line_that_reads_a_value_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text(f"def loss(p, b): return float(b['x'].sum())  # {'x' * 999}")
    text = refused(mlp_params(), runpy.run_path(str(path))["loss"], mlp_batch())
    assert f"{path}:1: def loss(p, b): return float(b['x'].sum())  # xxx" in text
    assert "xxx…. It is traced with shapes alone" in text and len(text) < 500


def test_leaves_that_differ_in_samples_are_all_listed() -> None:
    batch = {"x": np.ones((6, 24), np.float32), "y": np.ones((5, 50), np.float32)}
    assert refused(mlp_params(), mlp_loss, batch) == (
        "batch: 1 problem\n"
        "  1. the leaves differ in their number of samples: batch.x has 6, batch.y has "
        "5. Give all of them the same batch dimension, or name it by "
        "batch_axes=."
    )


@pytest.mark.parametrize(
    ("samples", "parts", "advice"),
    [(6, 4, "4 or 8"), (3, 4, "4"), (10, 3, "9 or 12")],
)
def test_a_batch_that_does_not_divide(samples: int, parts: int, advice: str) -> None:
    text = refused(mlp_params(), mlp_loss, mlp_batch(samples), num_micro_batches=parts)
    assert text == (
        "batch: 1 problem\n"
        f"  1. {samples} samples do not divide into {parts} micro-batches. Use a batch "
        f"of {advice}, or another num_micro_batches."
    )


def test_a_batch_without_samples_is_refused() -> None:
    text = refused(mlp_params(), mlp_loss, mlp_batch(0), num_micro_batches=2)
    assert text.startswith("batch: 1 problem\n  1. the batch has 0 samples; expected 1")


def test_leaves_without_a_batch_dimension_are_listed() -> None:
    batch = {"x": np.float32(1), "y": np.ones((6, 2), np.float32), "z": np.float32(2)}
    text = refused(mlp_params(), mlp_loss, batch)
    assert text.startswith("batch: 2 problems\n  1. batch.x: shape () has no dimension")
    assert "\n  2. batch.z: shape () has no dimension 0." in text
    assert "batch_axes= (None for a leaf without samples)" in text


@pytest.mark.parametrize("parts", [0, -1, 1.5, True])
def test_a_number_of_micro_batches_that_is_none(parts: Any) -> None:
    text = refused(mlp_params(), mlp_loss, mlp_batch(), num_micro_batches=parts)
    assert text == f"num_micro_batches={parts!r}: expected a positive integer."


def test_batch_axes_of_another_structure() -> None:
    text = refused(mlp_params(), mlp_loss, mlp_batch(), batch_axes={"x": 0})
    assert text.startswith(
        "batch_axes has the structure PyTreeDef({'x': *}), the batch"
    )


def test_an_empty_batch() -> None:
    text = refused(mlp_params(), lambda p, b: jnp.mean(p["up"]["w"]), {})
    assert text == (
        "batch: 1 problem\n  1. no leaf has a batch dimension. Give at least one array."
    )


def test_no_leaf_with_samples() -> None:
    for axes in (None, {"x": None, "y": None}):
        batch = {"x": np.ones((8, 16), "f"), "y": np.ones((8, 16), "f")}
        text = refused(mlp_params(), mlp_loss, batch, batch_axes=axes)
        assert text == (
            "batch: 1 problem\n  1. none of the 2 arrays has a batch dimension by "
            "batch_axes=, and a step divides the samples among devices and "
            "micro-batches. Choose the dimension over which the loss is a mean, such "
            "as the nodes of a graph, and give None for leaves without it: "
            "batch_axes= takes a tree like "
            'the batch, as in {"nodes": 0, "edges": None}'
        )


def test_what_the_loss_itself_raises_is_passed_on() -> None:
    class Mine(Exception):
        pass

    def loss(params: Any, batch: Any) -> Any:
        raise Mine("deep inside")

    with pytest.raises(Mine, match="deep inside"):
        captured(mlp_params(), loss, mlp_batch())


def test_a_model_too_wide_for_its_batch_fails_as_jax_says_it() -> None:
    batch = {"x": np.ones((6, 7), np.float32), "y": np.ones((6, 50), np.float32)}
    with pytest.raises(TypeError, match="contracting dimensions"):
        captured(mlp_params(), mlp_loss, batch)
