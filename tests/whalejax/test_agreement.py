"""Processes that are not alike hear of it at once; none waits for another."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from tests.processes import finish, start
from whalejax.distributed.launch_env import ENDS_FOR_ANOTHER
from whalejax.lowering.multihost.fingerprints import fingerprint


PROGRAM: Final = """
import time
import numpy as np, optax
import whalejax as wh
from whalejax.membership import launch_heartbeat as heartbeat
import jaxlib.version
from whalejax.agreement import facts
from whalejax.lowering.multihost import plan_agreement as agreement

case = sys.argv[5]
odd = index == count - 1
if odd and case == "versions":
    facts.__version__ = "0.0.9"
    jaxlib.version.__version__ = "0.0.8"
x, y = np.ones((16, 8), np.float32), np.ones((16, 4), np.float32)
model = {"w": np.full((8, 4), 0.1, np.float32)}
tx = optax.sgd(0.1)
if case == "ended":
    jax.devices()  # A process that ends before holds up the start of JAX on the others.
    heartbeat.start_heartbeat()
    if odd:
        sys.exit()
if odd and case == "optimizer":
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
if odd and case == "rate":
    tx = optax.sgd(0.2)
loss = lambda m, b: ((b["x"] @ m["w"] - b["y"]) ** 2).mean()
mesh = {"fsdp": count} if odd and case == "plan" else {"data": count}
plan = wh.plan(loss, model, {"x": x, "y": y}, optimizer=tx, cluster=f"h100:{count}",
               mesh=mesh)
step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
state = step.init_from(model)
step._runner._agreement.wait_seconds = 60 if case == "ended" else 2
part = slice(index * 16 // count, (index + 1) * 16 // count)
if case != "absent" or not odd:
    try:
        step(state, {"x": x[part], "y": y[part]})
    except wh.PlanError as error:
        print("refused:", error, flush=True)
    else:
        print("went through", flush=True)
else:
    time.sleep(4)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "texts"),
    [
        (
            "plan",
            (
                "processes 1 have another plan than process 0",
                'which differs in mesh axes ({"fsdp": 2}, not {"data": 2}): plan once',
                "wh.Plan.load",
            ),
        ),
        ("optimizer", ("processes 1 have another optimizer than process 0 (",)),
        pytest.param(
            "rate",
            ("processes 1 have another optimizer than process 0 (",),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "versions",
            (
                "processes 1 have another whalejax than process 0 (0.0.9, not",
                "processes 1 have another jaxlib than process 0 (0.0.8, not",
            ),
            marks=pytest.mark.full,
        ),
        ("absent", ("processes 1 did not come to the first step in 2 s",)),
        pytest.param(
            "ended",
            ("processes 1 ended before the first step. Look for",),
            marks=pytest.mark.full,
        ),
        ("none", ("went through",)),
    ],
)
def test_processes_that_differ_are_named(case: str, texts: tuple[str, ...]) -> None:
    outputs = finish(start(PROGRAM, case))
    for output in outputs[:1] if case in ("absent", "ended") else outputs:
        for text in texts:
            assert text in output


def test_optimizers_are_known_by_what_they_keep_and_do() -> None:
    model = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    batch = jnp.ones((16, 8))

    def known(tx: optax.GradientTransformation) -> str:
        plan = wh.plan(_loss, model, batch, cluster="cpu:2", optimizer=tx)
        step = wh.compile(plan, _loss, model, optimizer=tx, devices=jax.devices()[:2])
        return fingerprint(step._runner.program)

    def clipped(rate: Any = 1e-3) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    makers: list[Callable[[], optax.GradientTransformation]] = [
        lambda: optax.sgd(0.1),
        lambda: optax.sgd(0.2),
        lambda: optax.sgd(0.1, momentum=0.9),
        lambda: optax.sgd(optax.linear_schedule(0.1, 0.2, 10)),
        lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.2),
        lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0))),
        lambda: optax.adam(1e-3),
        lambda: optax.adam(1e-3, b1=0.999, b2=0.9),
        lambda: optax.adam(1e-3, mu_dtype="bfloat16"),
        lambda: clipped(),
        lambda: clipped(optax.cosine_decay_schedule(1e-3, 100)),
    ]
    each = [known(make()) for make in makers]
    assert len(set(each)) == len(each)
    assert [known(make()) for make in makers] == each


STOPS: Final = """
import os, signal
import numpy as np, optax
import whalejax as wh

x, y = np.ones((16, 8), np.float32), np.ones((16, 4), np.float32)
model = {"w": np.full((8, 4), 0.1, np.float32)}
tx = optax.sgd(0.1)
loss = lambda m, b: ((b["x"] @ m["w"] - b["y"]) ** 2).mean()
plan = wh.plan(loss, model, {"x": x, "y": y}, optimizer=tx, cluster="h100:2",
               mesh={"data": 2})
step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
step._runner.watch.least_seconds = 2
state = step.init_from(model)
half = slice(index * 8, index * 8 + 8)
for turn in range(4):
    if turn == 3 and index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    state, metrics = step(state, {"x": x[half], "y": y[half]})
    float(metrics["loss"])
"""


@pytest.mark.full
def test_a_program_that_waits_for_a_frozen_process_ends() -> None:
    running = start(STOPS)
    try:
        _, errors = running[0].communicate(timeout=60)
        assert running[0].returncode == ENDS_FOR_ANOTHER, errors[-2000:]
        assert "whalejax: a step has waited for" in errors
        assert "process 1 (pid " in errors
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def test_what_one_process_runs_is_not_described_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {"w": jnp.ones((8, 4))}
    batch = jnp.ones((16, 8))
    plan = wh.plan(_loss, model, batch, cluster="cpu:2", optimizer=optax.sgd(0.1))
    step = wh.compile(
        plan, _loss, model, optimizer=optax.sgd(0.1), devices=jax.devices()[:2]
    )
    state = step.init_from(model)
    asked: list[wh.Plan] = []
    monkeypatch.setattr(wh.Plan, "hash", property(asked.append))
    for _ in range(2):
        state, _ = step(state, batch)
    step.eval(state, batch)
    assert not asked


def _loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ model["w"]) ** 2)
