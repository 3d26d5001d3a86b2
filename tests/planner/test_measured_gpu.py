"""Predicted steps against those measured on a GPU, with the device as it was measured.

``scripts/device_check`` wrote the files of ``meshes/measured``. How much longer kernels
take within a step than alone was fitted to the rows of the H200; those of the H100
judge it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import whalejax as wh
from whalejax import jobs, models


MEASURED = Path(__file__).resolve().parents[2] / "meshes" / "measured"
ROWS = [
    (kind, row)
    for kind in ("h100", "h200")
    for row in json.loads((MEASURED / f"{kind}.json").read_text(encoding="utf-8"))[
        "rows"
    ]
]
SMALL = [(kind, row) for kind, row in ROWS if row["model"] == "gpt-small"]


def _plan(kind: str, row: dict[str, Any]) -> wh.Plan:
    job = models.job(row["model"], annotated=False)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, row["batch"]),
        optimizer=job.optimizer,
        cluster=wh.Cluster.load(MEASURED / f"{kind}.toml"),
        precision="bf16",
        num_micro_batches=1,
        remat=row["remat"],
        offload=(),
        attention="gather",
        loss_chunks=1,
    )


def _check(kind: str, row: dict[str, Any]) -> None:
    plan = _plan(kind, row)
    assert plan.time.step_seconds == pytest.approx(row["measured_seconds"], rel=0.2)
    assert plan.memory.total_bytes == pytest.approx(row["measured_bytes"], rel=0.15)


def _id(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value['model']}-{value['batch']}-{value['remat']}"


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(("kind", "row"), SMALL, ids=_id)
def test_steps_of_a_small_gpt_as_measured(kind: str, row: dict[str, Any]) -> None:
    _check(kind, row)


@pytest.mark.relaxed_promotion
def test_what_is_computed_again_takes_longer() -> None:
    """A softmax is one kernel whether its input is kept or computed again."""
    row = {"model": "gpt-small", "batch": 4, "remat": "none"}
    kept = _plan("h100", row).time.step_seconds
    assert kept < _plan("h100", {**row, "remat": "full"}).time.step_seconds


@pytest.mark.full
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("kind", "row"), [one for one in ROWS if one not in SMALL], ids=_id
)
def test_steps_of_large_gpts_as_measured(kind: str, row: dict[str, Any]) -> None:
    _check(kind, row)
