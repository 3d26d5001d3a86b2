"""Stages compiled without being run hold and move what they do when they run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.lowering.pipeline_mpmd.compile_only import CompiledStages
from whalejax.lowering.pipeline_mpmd.stage_channels import StageChannel
from whalejax.lowering.pipeline_mpmd.step import SchedulePass


COUNT = 4


def make(key: Any) -> Any:
    keys = jax.random.split(key, 4)
    shapes = {"table": (40, 16), "up": (16, 24), "down": (24, 16), "out": (16, 8)}
    pairs = zip(shapes.items(), keys, strict=True)
    return {n: 0.3 * jax.random.normal(k, shape) for (n, shape), k in pairs}


class Tied:
    """Three stages, the last of which reads what the first stores and hands on."""

    def __init__(self, schedule: str) -> None:
        self.pipeline = wh.pipeline(schedule=schedule)

    def __call__(self, model: Any, batch: Any) -> Any:
        with self.pipeline:
            with wh.stage():
                x = model["table"][batch["tokens"]]
                h = jax.nn.softmax(x @ model["up"])
            with wh.stage():
                y = jnp.tanh(h @ model["down"])
            with wh.stage():
                logits = (y + x) @ model["table"].T
                return jnp.square(logits - batch["wanted"]).mean()


def batch() -> Any:
    return {
        "tokens": np.arange(16, dtype=np.int32) % 40,
        "wanted": np.ones((16, 40), np.float32),
    }


def planned(schedule: str, cluster: str = "h100:6") -> wh.Plan:
    return wh.plan(
        Tied(schedule),
        jax.eval_shape(make, jax.random.key(0)),
        batch(),
        optimizer=optax.sgd(0.1, momentum=0.9),
        cluster=cluster,
        num_micro_batches=COUNT,
    )


def nbytes(arrays: Iterable[Any], device: Any) -> int:
    """Of arrays, on one device."""
    shards = (s for x in arrays for s in x.addressable_shards if s.device == device)
    return sum(s.data.nbytes for s in shards)


class Kept:
    """What every stage keeps for micro-batches in flight, and is handed, as it runs."""

    def __init__(self, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = [row[0] for row in step.mesh.devices]
        self.most = [0] * len(self.devices)
        self.handed: Counter[tuple[int, str]] = Counter()
        do, hand = SchedulePass.do, SchedulePass._hand

        def done(run: SchedulePass, event: Any) -> None:
            do(run, event)
            for stage, device in enumerate(self.devices):
                common = {id(x) for site in run.common for x in site.values()}
                live = {id(x): x for kept in run.live.values() for x in kept.values()}
                own = [x for i, x in live.items() if i not in common]
                found = nbytes(own, device) - self._numbers(run, own, device)
                self.most[stage] = max(self.most[stage], found)

        def handed(run: SchedulePass, handing: Any) -> None:
            hand(run, handing)
            back = handing.action == "backward"
            key = handing.action, handing.target, handing.micro_batch
            arrays = run.coming[key][-1][1]()
            device = self.devices[handing.target % len(self.devices)]
            part = handing.source if back else handing.target
            self.handed[part, handing.action] += nbytes(arrays, device)

        monkeypatch.setattr(SchedulePass, "do", done)
        monkeypatch.setattr(SchedulePass, "_hand", handed)

    def _numbers(self, run: SchedulePass, arrays: Sequence[Any], device: Any) -> int:
        """Numbers of micro-batches, which all of them share."""
        known = {id(x) for several in run.apart.numbers for x in several}
        return nbytes([x for x in arrays if id(x) in known], device)


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.full), "zb-h1"]
)
def test_a_rehearsal_tells_what_a_step_holds_and_moves(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(schedule)
    model = jax.eval_shape(make, jax.random.key(0))
    step = wh.compile(
        plan,
        Tied(schedule),
        model,
        optimizer=optax.sgd(0.1, momentum=0.9),
        devices=jax.devices()[:6],
    )
    found: CompiledStages = step.rehearse()
    state = step.init(make, rng=jax.random.key(1))
    kept, once = Kept(step, monkeypatch), 0
    send = StageChannel.send

    def sent(way: StageChannel, arrays: Any, aside: Any = None) -> Any:
        nonlocal once
        coming = send(way, arrays, aside)
        once += sum(nbytes(coming(), device) for device in kept.devices)
        return coming

    resting = [
        [nbytes(jax.tree.leaves(x), device) for x in (state.params, state.opt_state)]
        for device in kept.devices
    ]
    monkeypatch.setattr(StageChannel, "send", sent)
    step(state, batch())
    for stage, memory in enumerate(found.memory):
        own = plan.stage_plans[stage]
        params, optimizer = resting[stage]
        # The last one reads the table of the first, and has a copy of it.
        assert (memory.params_bytes > params) == (stage == 2)
        assert memory.params_bytes == own.memory.params_bytes
        assert memory.optimizer_bytes == optimizer
        assert memory.gradients_bytes == own.memory.gradients_bytes
        assert memory.kept_bytes >= kept.most[stage] > 0
        # The rest is the stage's part of the batch.
        leaves = batch()
        names = {0: ("tokens",), 1: (), 2: ("wanted",)}[stage]
        rows = sum(leaves[name].nbytes for name in names)
        sizes = own.axis_sizes
        rows //= sizes.get("data", 1) * sizes.get("fsdp", 1)
        assert memory.kept_bytes - kept.most[stage] == rows
        assert memory.temporary_bytes > 0
    moved = {(m.part, m.action): m.times * m.nbytes for m in found.moved}
    assert moved == dict(kept.handed)
    assert once == sum(moved.values()) + sum(found.once_bytes)
    # The batch goes where it is read; of the table a copy goes, and a gradient comes.
    assert found.once_bytes[1] == 0 < min(found.once_bytes[0], found.once_bytes[2])
    names = {one.name for one in found.programs}
    actions = ("forward", "backward", *["weight"] * (schedule == "zb-h1"))
    assert {f"{a} of part {p}" for a in actions for p in range(3)} | {"update"} == names


def test_a_rehearsal_is_of_stages() -> None:
    model = jax.eval_shape(make, jax.random.key(0))

    def loss(model: Any, batch: Any) -> Any:
        return jnp.square(batch["wanted"] @ model["table"]).mean()

    plan = wh.plan(loss, model, batch(), optimizer=optax.sgd(0.1), cluster="cpu:1")
    step = wh.compile(
        plan, loss, model, optimizer=optax.sgd(0.1), devices=jax.devices()[:1]
    )
    with pytest.raises(wh.WhaleError, match=r"Take lower\(\)"):
        step.rehearse()


@pytest.mark.full
def test_stages_are_verified_one_by_one() -> None:
    plan = planned("1f1b")
    found = plan.verify("local")
    assert not found.failure and not found.refused
    memory = {q.name: q for q in found.memory}
    terms = ("parameters", "optimizer state", "gradients", "batch and kept")
    for stage, own in enumerate(plan.stage_plans):
        for term in (*terms, "temporaries", "peak"):
            assert f"stage {stage}: {term}" in memory
        assert memory[f"stage {stage}: parameters"].difference == 0
        assert memory[f"stage {stage}: optimizer state"].difference == 0
        peak = memory[f"stage {stage}: peak"]
        assert peak.predicted == own.memory.total_bytes
        parts = (memory[f"stage {stage}: {t}"] for t in (*terms, "temporaries"))
        assert peak.compiled == math.fsum(q.compiled or 0 for q in parts)
    assert found.peak.predicted == plan.memory.total_bytes
    assert found.peak.compiled == max(
        memory[f"stage {s}: peak"].compiled or 0 for s in range(3)
    )
    moved = {q.name: q for q in found.collectives}
    for name in ("handed to part 1", "handed back by part 2"):
        assert moved[name].difference == 0 and moved[name].compiled_count == COUNT
    assert "received once by stage 2" in moved
    assert found.product_flops is not None and found.product_flops.difference == 0
    assert json.loads(json.dumps(found.document()))["memory"]
    assert "stage 2: batch and kept" in str(found)
