"""One model over two machines, of which one is lost with its memory.

A machine is a namespace of process numbers with its own agent, and its copies lie in a
folder of their own, because their name follows from the path of the key.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flags import QUICK
from tests.whalejax.elastic.runs import ROOT, Run
from tests.whalejax.elastic.test_spread import BATCH, reference
from whalejax.distributed.reserved_port import release_port, reserve_port
from whalejax.elastic.supervisor.memory_folder import memory_folders, remove_copies
from whalejax.elastic.supervisor.supervisor import KEY
from whalejax.journals.journal import FOLDER


pytestmark = pytest.mark.relaxed_promotion

STEPS = 400
NEW_MACHINE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NEW_MACHINE, "true"], capture_output=True).returncode == 0


class MachinesRun(Run):
    """A spread run whose processes are held by agents of two machines."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir()
        (self.out / "seats").write_text("2")
        self.port = reserve_port("127.0.0.1")
        release_port(self.port)
        options = {
            "out": str(self.out),
            "save": str(folder / "save"),
            "steps": STEPS,
            "pause": 0.05,
            "mesh": "fsdp",
            "micro_batches": None,
            "save_every": 10_000,
            "copy_every": 1,
        }
        module = "tests.whalejax.elastic.spread_script"
        self.given = {
            "command": [sys.executable, "-m", module, json.dumps(options)],
            "folder": str(folder),
            "settings": {
                "least": 1,
                "most": 2,
                "lease_seconds": 10.0,
                "gather_seconds": 12.0,
            },
            "more": {"host": "127.0.0.1", "port": self.port, "places": True},
        }
        self.machines: dict[str, subprocess.Popen[bytes]] = {}
        self.start()

    def key_of(self, name: str) -> Path:
        return self.folder / name / "key"

    def add(self, name: str) -> None:
        """Start a machine and its agent."""
        key = self.folder / FOLDER / KEY
        self.until(key.exists)
        self.key_of(name).parent.mkdir(exist_ok=True)
        shutil.copy(key, self.key_of(name))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("XLA_")},
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK,
        }
        where = f"127.0.0.1:{self.port}"
        agent = [sys.executable, "-m", "whalejax", "agent", where, "--name", name]
        agent += ["--key", str(self.key_of(name)), "--logs", str(self.folder / name)]
        with (self.folder / f"agent-{name}.log").open("a") as log:
            self.machines[name] = subprocess.Popen(
                [*NEW_MACHINE, *agent],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def lose(self, name: str) -> None:
        """Take a machine away, and what its memory held."""
        self.machines[name].kill()
        self.machines.pop(name).wait()
        (folder,) = memory_folders(self.key_of(name))
        assert any(folder.iterdir())
        remove_copies(self.key_of(name))

    def end(self) -> None:
        """Process numbers of members are those of their machines, which end with it."""
        for name, machine in self.machines.items():
            machine.kill()
            machine.wait()
            remove_copies(self.key_of(name))
        self.supervisor.kill()
        self.supervisor.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MachinesRun]:
    found = MachinesRun(tmp_path)
    yield found
    found.end()


@pytest.mark.full
@pytest.mark.skipif(not may_unshare(), reason="needs root and unshare")
def test_a_machine_is_lost_with_its_memory(run: MachinesRun) -> None:
    run.add("a")
    run.add("b")
    run.until(lambda: [e for e in run.events("begun") if len(e["members"]) == 2] != [])
    run.until(lambda: run.step() >= 5)
    at, before = run.step(), len(run.events("recovered"))
    run.lose("b")
    run.until(lambda: len(run.events("recovered")) > before and run.step() > at + 5)
    recovered = run.events("recovered")[before]
    assert recovered["source"].startswith("copies in memory, of step"), recovered
    assert recovered["step"] >= at - 2  # No more than what was under way.
    run.add("c")
    run.until(lambda: len(run.events("recovered")) > before + 1)
    assert run.wait() == 0, run.told()
    assert not run.events("not_copied"), run.events("not_copied")
    found: dict[int, set[float]] = {}
    for line in run.samples():
        found.setdefault(line["step"], set()).add(line["loss"])
    known = reference(STEPS, batch=BATCH)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, losses in found.items():
        assert all(x == pytest.approx(known[step - 1], rel=1e-6) for x in losses)
    # Agents remove what lies in their memory when the run is over.
    for name, machine in run.machines.items():
        assert machine.wait(60) == 0
        assert not memory_folders(run.key_of(name))
