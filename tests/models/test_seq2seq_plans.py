"""T5 and M6 are planned, and what is planned computes what one device does."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Final

import jax
import pytest

import whalejax as wh
import whalejax.models as models
from tests.equality import FLOAT64_TOLERANCE, OneDevice, check, on_one_device
from whalejax.cli import main


NAMES: Final = ("t5-test", "m6-test")
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "data": {"mesh": {"data": 2}},
    "context": {"mesh": {"context": 2}},
    "tensor": {"mesh": {"tensor": 2}, "default": wh.split()},
}


@functools.cache
def reference(name: str) -> OneDevice:
    """Two layers of each stack with dropout, in float64; M6's are scanned."""
    kinds = {"dtype": "float64", "param_dtype": "float64"}
    return on_one_device(models.job(name, scan_layers=name == "m6-test", **kinds))


@pytest.mark.relaxed_promotion  # Flax's norms compare float64 with float32
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data", marks=pytest.mark.full),
        pytest.param("context", marks=pytest.mark.full),
        pytest.param("tensor", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_one_device(name: str, layout: str) -> None:
    with jax.enable_x64(True):
        found = check(reference(name), devices=2, **LAYOUTS[layout])
    assert found.error < FLOAT64_TOLERANCE, found.worst_path
    assert sharded(found.plan) == ({"tensor"} if layout == "tensor" else set())


def sharded(plan: wh.Plan) -> set[str]:
    """The mesh axes that shard parameters."""
    return {axis for leaf in plan.leaves for dim in leaf.param_spec for axis in dim}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [*NAMES, pytest.param("m6-10b", marks=pytest.mark.full)]
)
def test_is_planned(name: str) -> None:
    job, cluster = models.job(name), wh.cluster("h100:8")
    plan = wh.plan(
        job.loss_fn,
        jax.eval_shape(job.make_model, jax.random.key(0)),
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster=cluster,
    )
    assert plan.runnable
    assert math.prod(size for _, size in plan.axes) == 8
    assert plan.memory.total_bytes <= cluster.memory_bytes
    # Gradients and parameters of ten billion fill a device of 80 GB.
    assert name != "m6-10b" or plan.zero == 2 or sharded(plan)


@pytest.mark.full
def test_is_planned_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    words = ("plan", "t5-test", "--cluster", "h100:8", "-o", str(path))
    assert main.main(words) == 0, capsys.readouterr().err
    assert wh.Plan.load(path).leaves
