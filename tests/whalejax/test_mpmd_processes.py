"""Stages of several processes compute what one device does; nobody waits for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.flags import QUICK
from tests.processes import ROOT, finish, free_port, start
from whalejax.lowering.pipeline_mpmd.stage_channels import TransferThread


PROGRAM: Final = """
import json, threading
jax.config.update("jax_enable_x64", True)
import numpy as np, optax
import whalejax as wh
from tests.whalejax.test_mpmd import Marked

kept, schedule, where, cluster = sys.argv[5:9]
aside = where != "in order"
job = Marked(schedule, rows=True).job()
model = jax.tree.map(lambda x: x.astype("float64"), job.make_model(jax.random.key(0)))
every = jax.devices()
devices = [every[0], *every[3:5]] if where == "aside" else every
tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))
options = dict(optimizer=tx, precision="f32", num_micro_batches=6, per_micro_batch=True)
plan = wh.plan(job.loss_fn, model, job.batch_at(0), cluster=cluster, **options)
step = wh.compile(plan, job.loss_fn, model, optimizer=tx, devices=devices)
assert (step._runner.moves._aside is not None) == aside
alone = wh.plan(job.loss_fn, model, job.batch_at(0), **options,
                cluster=f"h100:{jax.local_device_count()}")
single = wh.compile(alone, job.loss_fn, model, optimizer=tx,
                    devices=jax.local_devices())
state, expected = (s.init_from(model, rng=jax.random.key(3)) for s in (step, single))
worst = 0.0

def apart(a, b):
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    return float(np.max(np.abs(a - b), initial=0) / max(np.abs(b).max(initial=0), 1e-3))

def compare(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        for shard in a.addressable_shards:
            yield apart(shard.data, np.asarray(b)[shard.index])

losses = []
for index in range(3):
    state, metrics = step(state, job.batch_at(index))
    expected, wanted = single(expected, job.batch_at(index))
    worst = max(worst, *(apart(metrics[k], wanted[k]) for k in wanted))
    losses.append(float(metrics["loss"]))
for part in ("params", "opt_state", "model"):
    worst = max(worst, *compare(getattr(state, part), getattr(expected, part)))
batch = job.batch_at(3)
moves, gate = step._runner.moves, threading.Event()
if aside and step._runner.here == [True, False, False]:
    # In an evaluation it only sends, and last of all the others hand something on:
    # it waits for its own hand-overs, which are made late.
    submit, settle = moves._aside.submit, moves.settle

    def late(hand, arrays):
        return submit(lambda xs: (gate.wait(), hand(xs))[1], arrays)

    def settled():
        gate.set()
        settle()
        assert moves._aside._last.done(), "hand-overs are not made"

    moves._aside.submit, moves.settle = late, settled
found, wanted = step.eval(state, batch), single.eval(expected, batch)
assert found["chosen"].shape == (24,)
worst = max(worst, *(apart(found[k], wanted[k]) for k in wanted))
assert int(state.step) == 3
step.save(kept, state)
again = step.restore(kept)
exact = all(
    np.array_equal(s.data, t.data)
    for a, b in zip(*map(jax.tree.leaves, (again.params, state.params)), strict=True)
    for s, t in zip(a.addressable_shards, b.addressable_shards, strict=True)
)
_, metrics = step(again, batch)
_, wanted = single(expected, batch)
worst = max(worst, apart(metrics["loss"], wanted["loss"]))
found = [plan.stages.executor, worst, exact, losses, plan.stages.blocks]
print(json.dumps(found), flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule, where, count, cluster",
    [
        # The stage in the middle lies in both.
        pytest.param("1f1b", "in order", 2, "h100:6", marks=pytest.mark.full),
        ("zb-h1", "aside", 2, "h100:3"),  # each stage is in one of them
        # The first is in the second process.
        pytest.param("1f1b", "aside", 2, "v100-32:2+p100-16:1", marks=pytest.mark.full),
        pytest.param("1f1b", "one each", 3, "h100:3", marks=pytest.mark.full),
    ],
)
def test_three_stages_of_several_processes(
    schedule: str, where: str, count: int, cluster: str, tmp_path: Path
) -> None:
    """They compute what the stages of one process do, which equal one device."""
    devices = 1 if where == "one each" else 3
    kept = tmp_path / "kept"
    given = kept, schedule, where, cluster
    running = start(PROGRAM, *given, count=count, devices=devices)
    found = [json.loads(output.splitlines()[-1]) for output in finish(running)]
    for executor, worst, exact, losses, blocks in found:
        assert executor == "mpmd" and exact
        assert bool(blocks) == ("+" in cluster)
        assert worst <= 1e-10
        assert losses == found[0][3]


DIFFER: Final = """
import os
import numpy as np, optax
import whalejax as wh

model = {k: np.full((8, 8), 0.1, np.float32) for k in "ab"}
batch = {"x": np.ones((16, 8), np.float32)}

def loss(m, b):
    with wh.pipeline(schedule=["gpipe", "1f1b"][index * (sys.argv[5] == "schedule")]):
        with wh.stage():
            h = jax.numpy.tanh(b["x"] @ m["a"])
        with wh.stage():
            return ((h @ m["b"] - 1) ** 2).mean()

tx = [optax.sgd(0.1), optax.adam(0.1)][index * (sys.argv[5] == "optimizer")]
precision = ["f32", "bf16"][index * (sys.argv[5] == "precision")]
plan = wh.plan(loss, model, batch, optimizer=optax.sgd(0.1), cluster="h100:2",
               num_micro_batches=4, precision=precision)
step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
try:
    step(step.init_from(model), batch)
except wh.WhaleError as error:
    print(error, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("schedule", ("schedule (1f1b, not gpipe)", "plan.save")),
        pytest.param(
            "precision",
            ("precision (bf16, not f32)", "plan.save"),
            marks=pytest.mark.full,
        ),
        ("optimizer", ("processes 1 have another optimizer than process 0",)),
    ],
)
def test_processes_with_other_plans_are_told_so(
    what: str, texts: tuple[str, ...]
) -> None:
    for output in finish(start(DIFFER, what)):
        assert (what == "optimizer") != (
            "processes 1 have another plan than process 0" in output
        )
        for text in texts:
            assert text in output


ENDS: Final = """
import os, signal, time
import numpy as np, optax
import whalejax as wh

model = {k: np.full((8, 8), 0.1, np.float32) for k in "ab"}
batch = {"x": np.ones((16, 8), np.float32)}

def loss(m, b):
    with wh.pipeline():
        with wh.stage():
            h = jax.numpy.tanh(b["x"] @ m["a"])
        with wh.stage():
            return ((h @ m["b"] - 1) ** 2).mean()

tx = optax.sgd(0.1)
plan = wh.plan(loss, model, batch, optimizer=tx, cluster="h100:2", num_micro_batches=4)
step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
step._runner.watch.least_seconds = 2
state = step.init_from(model)
for turn in range(4):
    if turn == 3 and index == 1:
        if sys.argv[5] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    try:
        state, metrics = step(state, batch)
        float(metrics["loss"])
    except wh.WhaleError as error:
        print("whalejax:", error, file=sys.stderr, flush=True)
        os._exit(3)  # JAX would wait for the other one.
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "how, says",
    [
        ("dies", "is gone.*process 1 .* has said nothing"),
        pytest.param(
            "waits", "has waited.*process 1 .* still runs", marks=pytest.mark.full
        ),
    ],
)
def test_a_process_that_stops_ends_the_others(how: str, says: str) -> None:
    running = start(ENDS, how)
    try:
        _, errors = running[0].communicate(timeout=240)
    except subprocess.TimeoutExpired:
        pytest.fail("the first process still waits for the second")
    finally:
        for process in running:
            process.kill()
        running[1].communicate()
    assert running[0].returncode not in (0, -signal.SIGKILL)
    assert re.search(rf"whalejax.*{says}", errors, re.S), errors[-3000:]
    assert "restore" in errors


FAILS: Final = """
import sys
import numpy as np, optax
import whalejax as wh

port, index = sys.argv[1], int(sys.argv[2])
wh.init_distributed(f"127.0.0.1:{port}", 2, index)
import jax

model = {k: np.full((8, 8), 0.1, np.float32) for k in "ab"}
batch = {"x": np.ones((16, 8), np.float32)}

def loss(m, b):
    with wh.pipeline():
        with wh.stage():
            h = jax.numpy.tanh(b["x"] @ m["a"])
        with wh.stage():
            return ((h @ m["b"] - 1) ** 2).mean()

tx = optax.sgd(0.1)
plan = wh.plan(loss, model, batch, optimizer=tx, cluster="h100:2", num_micro_batches=4)
step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
state, _ = step(step.init_from(model), batch)
rows = 5 if index == 0 else 16
step(state, {"x": np.ones((rows, 8), np.float32)})
"""


@pytest.mark.full
def test_an_error_in_one_process_ends_the_others() -> None:
    """It does not wait for the others to end, as they wait for it."""
    port = free_port()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    common = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
    environment = {**kept, **common}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, str(port), str(index)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in running]
    except subprocess.TimeoutExpired:
        pytest.fail("one process still waits for the other")
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode for process in running)
    assert "batch['x'] has shape (5, 8) in process 0; the plan is for" in errors[0]
    assert "of which this process gives all" in errors[0]


def test_a_hand_over_that_fails_is_the_last() -> None:
    """The other process would take the next one for it."""
    done: list[str] = []

    def fails(arrays: Sequence[str]) -> list[str]:
        raise RuntimeError(f"{arrays[0]} is not there")

    def works(arrays: Sequence[str]) -> list[str]:
        done.extend(arrays)
        return [*arrays]

    aside = TransferThread()
    assert aside.settle() == []
    aside.submit(works, ["a"])
    assert aside.settle() == ["a"]
    for hand, name in ((fails, "b"), (works, "c")):
        aside.submit(hand, [name])
    with pytest.raises(RuntimeError, match="b is not there"):
        aside.settle()
    assert done == ["a"]
