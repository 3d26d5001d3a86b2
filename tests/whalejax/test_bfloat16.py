"""Products in bfloat16 on GPUs that have no units for it."""

from __future__ import annotations

import pytest

import whalejax as wh
from whalejax import models
from whalejax.jobs import abstract_model


pytestmark = pytest.mark.relaxed_promotion  # Flax's norms rely on it


def test_bfloat16_on_devices_without_units_for_it() -> None:
    job = models.job("gpt-test", annotated=False)

    def planned(cluster: str, precision: str) -> wh.Plan:
        return wh.plan(
            job.loss_fn,
            abstract_model(job),
            job.batch_at(0),
            optimizer=job.optimizer,
            cluster=cluster,
            precision=precision,
        )

    slow, fast = planned("v100-32:2", "bf16"), planned("v100-32:2", "f16")
    assert slow.time.compute_seconds > fast.time.compute_seconds
    assert any(
        "15.7 instead of 125 TFLOP/s. precision='f16'" in note for note in slow.notes
    )
    for other in (fast, planned("a100-80:2", "bf16"), planned("v100-32:2", "f32")):
        assert not any("bfloat16" in note for note in other.notes)
