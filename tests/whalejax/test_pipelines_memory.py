"""What stages hold of a large vocabulary: as planned, and by the TPU's compiler."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import pytest

import whalejax as wh
from whalejax import models
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.jobs import abstract_model
from whalejax.planner.pipeline.layer_stack import StackedLayers


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

WORDS: Final = 8_192
COUNT: Final = 4


def job(**options: Any) -> wh.Job:
    """A GPT whose logits weigh much beside its layers."""
    return models.job(
        "gpt-test",
        annotated=False,
        scan_layers=True,
        layers=8,
        embed=256,
        heads=2,
        mlp=1024,
        sequence=256,
        vocab=WORDS,
        tied_embedding=True,
        **options,
    )


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_loss_reads_logits_as_their_product_makes_them(precision: str) -> None:
    one = job(dtype=precision)
    graph = capture(adapt(abstract_model(one), one.loss_fn), one.batch_at(0)).graph
    stage = StackedLayers.of(graph).of_stage(graph, 2)
    changed = [
        (stage.tensors[b], stage.tensors[a])
        for before, after in zip(graph.ops, stage.ops, strict=True)
        for b, a in zip(before.operands, after.operands, strict=True)
        if b != a
    ]
    product = next(op for op in reversed(stage.ops) if op.matmul is not None)
    if precision == "float32":
        assert not changed
        return
    ((before, after),) = changed
    assert (before.dtype, after.dtype) == ("float32", "bfloat16")
    assert before.shape == after.shape and after.shape[-1] == WORDS
    assert after.id in product.results


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the extra tpu-compile (libtpu) is not installed",
)
@pytest.mark.full
def test_logits_of_stages_are_in_memory_as_they_are_multiplied() -> None:
    one = job()
    plan = wh.plan(
        one.loss_fn,
        abstract_model(one),
        one.batch_at(0, 32 * COUNT),
        optimizer=one.optimizer,
        cluster="v5p:2x2x1",
        mesh={"stage": 2, "data": 2},
        precision="bf16",
        zero=0,
        remat="none",
        num_micro_batches=COUNT,
        loss_chunks=1,
    )
    peak = plan.verify("v5p:2x2x1").peak
    assert peak.predicted == pytest.approx(peak.compiled, rel=0.15)
