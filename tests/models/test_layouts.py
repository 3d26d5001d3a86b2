"""GNMT and VGG under plans: each is planned, and computes what one device does."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import pytest
from flax import nnx

import whalejax as wh
import whalejax.models as models
from tests.equality import FLOAT64_TOLERANCE, OneDevice, check, on_one_device
from whalejax.cli import main


pytestmark = pytest.mark.relaxed_promotion  # optax promotes its step count

NAMES: Final = ("gnmt-test", "vgg-test")
SPLIT: Final = {
    "gnmt-test": ["classifier.kernel", "tokens.embedding"],
    "vgg-test": ["first.kernel", "last.kernel"],
}
"""Some parameters that every plan with a tensor axis and no marks should shard."""


@functools.cache
def _one(name: str) -> OneDevice:
    """A model in float64, with dropout, on one device."""
    with jax.enable_x64(True):
        return on_one_device(_job(name))


def _job(name: str) -> wh.Job:
    changes: dict[str, Any] = {"dtype": "float64", "param_dtype": "float64"}
    if name.startswith("gnmt"):
        changes["layers"] = 2  # as many loops as are needed to meet all kinds of them
    return models.job(name, batch_size=8, annotated=False, **changes)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(NAMES[0], marks=pytest.mark.full), *NAMES[1:]]
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mesh": {"data": 2}}, marks=pytest.mark.full, id="data"),
        pytest.param({"mesh": {"tensor": 2}, "default": wh.split()}, id="tensor"),
    ],
)
def test_gradients_equal_those_of_one_device(
    name: str, options: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        found = check(_one(name), devices=2, **options)
    assert found.error < FLOAT64_TOLERANCE, found
    assert found.compilations == 1
    specs = {leaf.path: leaf.param_spec for leaf in found.plan.leaves}
    axes = {axis for path in SPLIT[name] for dim in specs[path] for axis in dim}
    assert axes == ({"tensor"} if "tensor" in options["mesh"] else set())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("annotated", [False, True])
def test_it_is_planned_for_eight_devices(name: str, annotated: bool) -> None:
    job = models.job(name, annotated=annotated)
    plan = wh.plan(
        job.loss_fn,
        nnx.eval_shape(lambda: job.make_model(jax.random.key(0))),
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster="h100:8",
    )
    marks = {mark for region in plan.compute for mark in region.marks}
    assert marks == ({"replicate()", "split()"} if annotated else set())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_plans_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", name, "--cluster", "h100:8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Plan    8×H100 ")
    assert "obeyed: replicate" in text
