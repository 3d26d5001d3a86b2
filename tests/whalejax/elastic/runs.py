"""Elastic runs of real processes, watched and disturbed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.flags import QUICK
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.processes.local_processes import began_at


ROOT = Path(__file__).resolve().parents[3]
SECONDS = 400.0

START = """
import json, sys
from pathlib import Path
from whalejax.membership.settings import SupervisorSettings
from whalejax.elastic.supervisor.supervisor import Supervised, Supervisor
given = json.loads(sys.argv[1])
run = Supervised(
    command=tuple(given["command"]),
    folder=Path(given["folder"]),
    settings=SupervisorSettings(**given["settings"]),
    **{"exit_seconds": 60.0, **given.get("more", {})},
)
sys.exit(Supervisor(run).run())
"""


def runs(pid: int, began: str) -> bool:
    """Whether a process is there still; one that nobody waited for is not."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state = said.rpartition(")")[2].split()[0]
    return began_at(pid) == began and state not in ("Z", "X")


class Run:
    """A supervisor and its members."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        settings: dict[str, Any],
        more: dict[str, Any] | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        options = {"out": str(self.out), **options}
        self.given = {
            "command": command
            or [
                sys.executable,
                "-m",
                "tests.whalejax.elastic.script",
                json.dumps(options),
            ],
            "folder": str(folder),
            "settings": {"lease_seconds": 20.0, **settings},
            "more": more or {},
        }
        self.start()

    def start(self) -> None:
        """Start the supervisor, the first time or again."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("XLA_")},
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK,
        }
        with (self.folder / "supervisor.log").open("a") as log:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(self.given)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=ROOT,
            )

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What the journal holds."""
        found = journal.read(self.folder / FOLDER / journal.EVENTS)
        return [said for said in found if not kind or said["event"] == kind]

    def commits(self) -> list[dict[str, Any]]:
        """Committed steps, as the supervisor wrote them down."""
        return journal.read(self.folder / FOLDER / journal.COMMITS)

    def step(self) -> int:
        """The newest committed step."""
        return max((said["step"] for said in self.commits()), default=0)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something; the log stands in the error where it does not come."""
        end = time.monotonic() + SECONDS
        while not true():
            ended = self.supervisor.poll() is not None
            if time.monotonic() > end or (ended and not true()):
                raise AssertionError(self.told())
            time.sleep(0.02)

    def until_files(self, true: Callable[[], bool]) -> None:
        """Wait for something that comes without a supervisor."""
        end = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < end, self.told()
            time.sleep(0.05)

    def members(self) -> dict[str, int]:
        """Names and processes of members that are there, active ones by rank first."""
        pids = {e["name"]: e["pid"] for e in self.events("started")}
        gone = {e["name"] for e in self.events() if e["event"] in ("lost", "ended")}
        begun = self.events("begun")
        active = begun[-1]["members"] if begun else []
        order = [*active, *(name for name in pids if name not in active)]
        return {n: pids[n] for n in order if n in pids and n not in gone}

    def kill(self, place: int, number: int = signal.SIGKILL) -> str:
        """Signal an active member, by rank; its name."""
        name, pid = list(self.members().items())[place]
        os.kill(pid, number)
        return name

    def wait(self) -> int:
        """Wait for the end; the status of the supervisor."""
        self.until(lambda: self.supervisor.poll() is not None)
        return self.supervisor.returncode

    def samples(self) -> list[dict[str, Any]]:
        """What members saw of each step: its samples and its loss."""
        found = []
        for path in self.out.glob("steps.*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # A kill may cut a line short.
                    found.append(json.loads(line))
        return found

    def losses(self) -> dict[int, set[str]]:
        """The losses of each step, as members saw them."""
        found: dict[int, set[str]] = {}
        for said in self.samples():
            found.setdefault(said["step"], set()).add(said["loss"])
        return found

    def told(self) -> str:
        """All that was written, for an error."""
        logs = [*(self.folder / FOLDER).glob("*.log"), self.folder / "supervisor.log"]
        texts = [f"--- {p.name}\n{p.read_text()[-3000:]}" for p in logs if p.exists()]
        events = "\n".join(map(json.dumps, self.events()[-60:]))
        return "\n".join([*texts, events])

    def end(self) -> None:
        """End whatever is left."""
        for pid in self.members().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.supervisor.kill()
        self.supervisor.wait()


@contextlib.contextmanager
def running(folder: Path, options: dict[str, Any], **settings: Any) -> Iterator[Run]:
    """A run, of which nothing is left in the end."""
    run = Run(folder, options, settings)
    try:
        yield run
    finally:
        run.end()
