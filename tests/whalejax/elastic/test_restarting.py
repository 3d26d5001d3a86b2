"""Ordinary scripts: one process that is lost ends a generation, and all start again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.flags import QUICK
from tests.whalejax.elastic import job as example
from tests.whalejax.elastic.driven import Driven
from tests.whalejax.elastic.runs import ROOT, Run
from tests.whalejax.messages import received
from whalejax.elastic.script_placement import await_placement
from whalejax.membership.elastic_run import IN_GENERATIONS, MODE
from whalejax.membership.events import End, KillEffect, Send, StartEffect
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.wire.messages import Message


pytestmark = pytest.mark.relaxed_promotion


def register(port: int, mode: str = IN_GENERATIONS) -> Message:
    fields = {
        "run": "",
        "name": "",
        "machine": "here",
        "pid": port,
        "host": "127.0.0.1",
        "port": port,
        "generation": 0,
        "step": -1,
        "micro_batches": 0,
        "steps": 0,
        "save": "",
        "facts": {MODE: mode, "jax": "1"},
        "token": str(port),
    }
    return received("register", fields)


class Scripts:
    """Processes that a membership believes in."""

    def __init__(
        self,
        least: int,
        most: int,
        *,
        mode: str = IN_GENERATIONS,
        gather_seconds: float = 60.0,
    ) -> None:
        self.mode, self.step, self.answers = mode, -1, True
        settings = SupervisorSettings(
            least=least, most=most, gather_seconds=gather_seconds
        )
        self.membership = Driven(settings)
        self.count = 0
        self.kills: list[str] = []
        self.begun: list[list[str]] = []
        self.end: End | None = None
        self.membership.begin(0.0)
        self.do(0.0)

    def do(self, now: float) -> None:
        while effects := self.membership.effects():
            for effect in effects:
                match effect:
                    case StartEffect(slot=slot):
                        self.count += 1
                        name = f"m{self.count}"
                        self.membership.started(now, name, slot, self.count)
                    case KillEffect(name=name):
                        self.kills.append(name)
                    case End():
                        self.end = effect
                    case Send(name=name, message=message):
                        self.answer(now, name, message)

    def answer(self, now: float, name: str, message: Message) -> None:
        if message.kind == "begin" and name == message.members[0][0]:
            self.begun.append([m[0] for m in message.members])
        if message.kind == "prepare" and self.answers:
            generation = message.generation
            told = {"generation": generation, "step": self.step, "held": []}
            self.membership.heard(now, name, received("prepared", told))

    def started(self) -> list[str]:
        """Processes that were started and have not joined."""
        there = self.membership.members.values()
        return [m.name for m in there if m.status == "starting"]

    def join(self, now: float, *names: str) -> None:
        for name in names:
            number = int(name[1:])
            slot = self.membership.members[name].slot
            told = register(number, self.mode)
            assert not self.membership.register(now, told, name, slot)
            self.membership.heard(now, name, received("ready", {}))
            self.do(now)


def test_a_loss_starts_the_world_again() -> None:
    there = Scripts(2, 3)
    there.join(1.0, "m1", "m2", "m3")
    assert there.begun == [["m1", "m2", "m3"]]
    there.membership.exited(2.0, "m2", -9, "")
    there.do(2.0)
    assert sorted(there.kills) == ["m1", "m2", "m3"]
    there.membership.tick(2.1)
    there.do(2.1)
    # The first failure of a slot holds nobody out; all that start are waited for.
    there.join(3.0, "m4", "m5")
    assert len(there.begun) == 1
    there.join(4.0, "m6")
    assert there.begun[1:] == [["m4", "m5", "m6"]]
    for name in ("m4", "m5", "m6"):
        assert there.end is None
        there.membership.exited(9.0, name, 0, "")
        there.do(9.0)
    assert there.end is not None and there.end.status == 0


def test_without_a_supervisor_nobody_is_placed() -> None:
    assert await_placement({}) is None
    with pytest.raises(WhaleError, match="WHALEJAX_KEY_FILE is not set"):
        await_placement({"WHALEJAX_SUPERVISOR": "127.0.0.1:1"})


def test_a_step_restores_or_begins(tmp_path: Path) -> None:
    job, key = example.make(), jax.random.key(0)
    model = jax.eval_shape(job.make_model, key)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster="cpu:1",
        num_micro_batches=1,
    )
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=jax.devices()[:1]
    )
    state = step.restore_or_init(tmp_path / "none", job.make_model, rng=key)
    assert int(state.step) == 0
    state, _ = step(state, job.batch_at(0))
    step.save(tmp_path / "step_000001", state)
    again = step.restore_or_init(str(tmp_path), job.make_model, rng=key)
    assert int(again.step) == 1
    for x, y in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(again.params), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(WhaleError, match="folder is 3; expected the path"):
        step.restore_or_init(3, job.make_model, rng=key)  # type: ignore[arg-type]


@pytest.mark.full
def test_a_script_goes_on_after_a_loss(tmp_path: Path) -> None:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("XLA_")},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
    }
    words = ["launch", "--processes", "1:2", "--logs", str(tmp_path)]
    script = Path(__file__).with_name("ordinary.py")
    front = subprocess.Popen(
        [sys.executable, "-m", "whalejax", *words, str(script), str(tmp_path), "40"],
        env=environment,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    run = Run.__new__(Run)
    run.folder, run.supervisor = tmp_path, front
    try:
        run.until(lambda: (tmp_path / "step_000020").is_dir())
        run.kill(1, signal.SIGKILL)
        run.until(lambda: front.poll() is not None)
        assert front.returncode == 0
        text = "".join(p.read_text() for p in (tmp_path / "elastic").glob("*.log"))
        losses: dict[int, set[str]] = {}
        for step, loss in re.findall(r"step (\d+) of \d+: (\S+)", text):
            losses.setdefault(int(step), set()).add(loss)
        assert sorted(losses) == list(range(1, 41))
        assert all(len(found) == 1 for found in losses.values())
    finally:
        run.end()
