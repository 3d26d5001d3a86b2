"""A run of ``whalejax launch`` over an engine, watched by its journal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.flags import QUICK
from tests.whalejax.elastic.runs import ROOT
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER


SECONDS = 240.0

SCRIPT = """
import sys, time
import whalejax as wh
from tests.whalejax.elastic import job

for state, metrics in wh.train_elastic(
    job.make(), steps=int(sys.argv[1]), save=sys.argv[2], num_micro_batches=8
):
    print(int(state.step), float(metrics["loss"]).hex(), flush=True)
    time.sleep(0.02)
"""


def environment(**more: str) -> dict[str, str]:
    """Of processes of a test."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("XLA_")},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
        **more,
    }


class Launched:
    """The journal of a run in a folder of ``--logs``."""

    def __init__(self, logs: Path, told: Callable[[], str]) -> None:
        self.logs, self.told = logs, told

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        found = journal.read(self.logs / FOLDER / journal.EVENTS)
        return [said for said in found if not kind or said["event"] == kind]

    def commits(self) -> list[dict[str, Any]]:
        return journal.read(self.logs / FOLDER / journal.COMMITS)

    def step(self) -> int:
        return max((said["step"] for said in self.commits()), default=0)

    def further(self, steps: int = 5) -> None:
        """Wait until so many more steps are committed."""
        at = self.step()
        self.until(lambda: self.step() >= at + steps)

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not true():
            if time.monotonic() > end:
                logs = [p.read_text()[-2000:] for p in self.logs.rglob("*.log")]
                raise AssertionError("\n".join([self.told(), *logs]))
            time.sleep(0.05)

    def losses_agree(self) -> None:
        """Whoever computed a step, in whatever run, came to the same bits."""
        known: dict[int, float] = {}
        for said in self.commits():
            assert known.setdefault(said["step"], said["loss"]) == said["loss"]
        assert sorted(known) == list(range(1, len(known) + 1))


def agent_of(address: str, environment: Mapping[str, str]) -> int:
    """The process of the agent that was started with these variables."""
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
            given = (place / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "agent" in words and address in words and "-m" in words:
            if all(f"{k}={v}" in given for k, v in environment.items()):
                return int(place.name)
    raise AssertionError(f"there is no agent of {address} with {environment}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
