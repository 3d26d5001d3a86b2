"""Predicted steps against those measured on a GPU, with the device as it was measured.

``scripts/device_check`` wrote both files of ``meshes/measured``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import whalejax as wh
from whalejax import jobs, models


MEASURED = Path(__file__).resolve().parents[2] / "meshes" / "measured"
ROWS = json.loads((MEASURED / "h200.json").read_text(encoding="utf-8"))["rows"]
SMALL = [row for row in ROWS if row["model"] == "gpt-small"]


def _check(row: dict[str, Any]) -> None:
    job = models.job(row["model"], annotated=False)
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, row["batch"]),
        optimizer=job.optimizer,
        cluster=wh.Cluster.load(MEASURED / "h200.toml"),
        precision="bf16",
        num_micro_batches=1,
        remat=row["remat"],
        offload=(),
        attention="gather",
        loss_chunks=1,
    )
    assert plan.time.step_seconds == pytest.approx(row["measured_seconds"], rel=0.2)
    assert plan.memory.total_bytes == pytest.approx(row["measured_bytes"], rel=0.1)


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("row", SMALL, ids=lambda row: f"{row['batch']}-{row['remat']}")
def test_steps_of_a_small_gpt_as_measured(row: dict[str, Any]) -> None:
    _check(row)


@pytest.mark.full
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row not in SMALL],
    ids=lambda row: f"{row['model']}-{row['batch']}-{row['remat']}",
)
def test_steps_of_large_gpts_as_measured(row: dict[str, Any]) -> None:
    _check(row)
