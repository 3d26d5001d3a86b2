"""Elastic runs of real processes, and launches, that are disturbed from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from elastic_training import Options
from network_namespaces import BRIDGE_ADDRESS, Space

from whalejax.distributed.reserved_port import release_port, reserve_port
from whalejax.elastic.supervisor.supervisor import KEY
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.journals.status import goodput_of
from whalejax.processes.local_processes import began_at


ROOT: Final = Path(__file__).resolve().parents[1]
TRAINING: Final = Path(__file__).with_name("elastic_training.py")
HANGS_SECONDS: Final = 300.0
END_SECONDS: Final = 120.0
FEW_STEPS: Final = 30
STEPS: Final = 10**6
"""More than any run comes to."""

START: Final = """
import json, sys
from pathlib import Path
from whalejax.elastic.launching import supervise
from whalejax.membership.settings import SupervisorSettings
words, folder, settings, more = json.loads(sys.argv[1])
settings = SupervisorSettings(**settings)
sys.exit(supervise(words, Path(folder), settings, seconds=60.0, **more))
"""


def environment(**more: str) -> dict[str, str]:
    """Of the processes: CPU only, and this checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


class Run:
    """An elastic run that is disturbed from outside."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        options: Mapping[str, Any],
        spaces: Sequence[Space] = (),
        **variables: str,
    ) -> None:
        """Start it.

        Args:
            folder: of the run.
            settings: of its supervisor.
            options: of what it trains, as ``elastic_training.Options`` has them.
            spaces: network namespaces with an agent in each, which hold one process
                each; without any, the supervisor starts the processes itself.
            variables: of the environment.
        """
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir(exist_ok=True)
        self.options = Options(
            out=str(self.out), save=str(folder / "save"), steps=STEPS, **options
        )
        path = folder / "options.json"
        path.write_text(json.dumps(dataclasses.asdict(self.options)))
        words = [sys.executable, str(TRAINING), str(path)]
        self._environment = environment(**variables)
        more: dict[str, Any] = {}
        if spaces:
            port = reserve_port(BRIDGE_ADDRESS)
            release_port(port)
            more = {"host": BRIDGE_ADDRESS, "port": port}
        given = json.dumps([words, str(folder), settings, more])
        with (folder / "front.log").open("w") as log:
            self.front = subprocess.Popen(
                [sys.executable, "-c", START, given],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.agents = Agents(self, spaces, more.get("port", 0)) if spaces else None

    def start_agent(self, space: Space, port: int) -> subprocess.Popen[bytes]:
        """Start an agent in a namespace."""
        key = self.folder / FOLDER / KEY
        where = f"{BRIDGE_ADDRESS}:{port}"
        words = [sys.executable, "-m", "whalejax", "agent", where, "--key", str(key)]
        words += ["--name", space.name, "--host", space.address]
        words += ["--logs", str(self.folder / space.name)]
        with (self.folder / f"{space.name}.log").open("a") as log:
            return subprocess.Popen(
                [*space.inside, *words],
                env=self._environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def events(self) -> list[dict[str, Any]]:
        """What the journal holds."""
        return journal.read(self.folder / FOLDER / journal.EVENTS)

    def commits(self) -> list[dict[str, Any]]:
        """What was committed."""
        return journal.read(self.folder / FOLDER / journal.COMMITS)

    def step(self) -> int:
        """The newest committed step."""
        return newest(self.commits())

    def members(self) -> dict[str, tuple[str, int]]:
        """What each member that is there does, and its process."""
        pids, what = {}, {}
        for said in self.events():
            name = said.get("name")
            match said["event"]:
                case "started":
                    if began_at(said["pid"]) == said["began"]:
                        pids[name], what[name] = said["pid"], "starting"
                case "registered" if what.get(name) == "starting":
                    what[name] = "compiling"
                case "ready":
                    what[name] = "standing by"
                case "begun":
                    what.update({n: "taking part" for n in said["members"]})
                case "lost" | "ended":
                    pids.pop(name, None)
        return {name: (what[name], pid) for name, pid in pids.items()}

    def processes(self) -> list[tuple[str, int]]:
        """What each process does, and its number."""
        found = [*self.members().values()]
        if supervisor := self.supervisor():
            found.append(("supervisor", supervisor))
        if self.agents is not None:
            found += [("agent", pid) for pid in self.agents.there()]
        return found

    def supervisor(self) -> int | None:
        """Its process."""
        found = Path(f"/proc/{self.front.pid}/task/{self.front.pid}/children")
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(found.read_text().split()[0])
        return None

    def moves_on(self, step: int, seconds: float) -> float | None:
        """How long it takes until a step behind this one is committed."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            if self.step() > step:
                return time.monotonic() - began
            if self.front.poll() is not None:
                return None
            time.sleep(0.02)
        return None

    def stop(self) -> None:
        """Tell the run to end after a step, and wait until it has."""
        self.front.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.front.wait(END_SECONDS)
        if self.agents is not None:
            self.agents.wait()

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        there = self.processes()
        # What would start others again goes first.
        self.front.kill()
        self.front.wait()
        there += self.processes()
        if self.agents is not None:
            self.agents.close()
        for what, pid in sorted(there, key=lambda one: one[0] != "supervisor"):
            with contextlib.suppress(ProcessLookupError):
                (os.kill if what == "supervisor" else os.killpg)(pid, signal.SIGKILL)


class Agents:
    """Agents in namespaces; one that ended or was frozen is started again."""

    _FROZEN_SECONDS: Final = 30.0
    _TICK_SECONDS: Final = 0.5

    def __init__(self, run: Run, spaces: Sequence[Space], port: int) -> None:
        self.spaces = list(spaces)
        self._run, self._port = run, port
        self._there = {s.name: run.start_agent(s, port) for s in spaces}
        self._frozen: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def there(self) -> list[int]:
        """Their processes."""
        return [p.pid for p in self._there.values() if p.poll() is None]

    def freezes(self, pid: int) -> None:
        """One was frozen for good: its machine starts it again, after a while."""
        self._frozen[pid] = time.monotonic() + self._FROZEN_SECONDS

    def _watch(self) -> None:
        while not self._over.wait(self._TICK_SECONDS):
            for space in self.spaces:
                process = self._there[space.name]
                if time.monotonic() > self._frozen.get(process.pid, float("inf")):
                    del self._frozen[process.pid]
                    process.kill()
                    process.wait()
                status = process.poll()
                if status and not self._over.is_set():
                    self._there[space.name] = self._run.start_agent(space, self._port)

    def _rest(self) -> None:
        self._over.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until they have ended by themselves, as the run is over."""
        self._rest()
        for process in self._there.values():
            if process.pid in self._frozen:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

    def close(self) -> None:
        """End them."""
        self._rest()
        for process in self._there.values():
            process.kill()
            process.wait()


def newest(commits: Sequence[Mapping[str, Any]]) -> int:
    """The newest committed step."""
    return max((said["step"] for said in commits), default=0)


class Launch:
    """A launch of a fixed number of processes, which is ended and started again."""

    def __init__(self, folder: Path, members: int, options: Mapping[str, Any]) -> None:
        """Start nothing yet.

        Args:
            folder: of the run.
            members: how many processes.
            options: of what it trains, as ``elastic_training.Options`` has them.
        """
        self._folder, self.out = folder, folder / "out"
        self.out.mkdir(exist_ok=True)
        self._words = ["--processes", str(members)]
        self._given = Options(
            out=str(self.out),
            save=str(folder / "save"),
            steps=STEPS,
            ordinary=True,
            **options,
        )
        self._options = folder / "options.json"
        self._options.write_text(json.dumps(dataclasses.asdict(self._given)))
        self._number = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **variables: str) -> None:
        """Start it, the first time or again.

        Args:
            variables: of the environment.
        """
        self._number += 1
        words = ["launch", *self._words]
        words += ["--logs", str(self._folder / f"logs{self._number}")]
        variables = {
            **variables,
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with (self._folder / "launch.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "whalejax", *words, str(TRAINING)]
                + [str(self._options)],
                env=environment(**variables),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Their processes."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_text().split("\0")
                if str(self._options) in words and str(TRAINING) in words[:3]:
                    found.append(int(path.parent.name))
        return sorted(found)

    def end(self) -> None:
        """End all of it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        end = time.monotonic() + END_SECONDS
        while there := self.ranks():
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise SystemExit(f"processes {there} do not end")
            time.sleep(0.05)

    def steps(self) -> dict[int, float]:
        """When each step was first done."""
        first: dict[int, float] = {}
        for path in self.out.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # A kill may cut a line short.
                    said = json.loads(line)
                    at = first.get(said["step"], float("inf"))
                    first[said["step"]] = min(at, said["time"])
        return first

    def until(self, step: int) -> None:
        """Wait for a step."""
        end = time.monotonic() + HANGS_SECONDS
        while max(self.steps(), default=0) < step:
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > end:
                log = (self._folder / "launch.log").read_text()[-2000:]
                raise SystemExit(f"step {step} of the launch does not come\n{log}")
            time.sleep(0.1)


# What a run did.


def audited(run: Run) -> dict[str, Any]:
    """Tell a run to end, and compare it with one that nothing disturbs."""
    run.stop()
    commits, said = run.commits(), _said(run)
    steps, x64 = newest(commits), run.options.x64
    losses = {c["step"]: c["loss"] for c in commits}
    expected = undisturbed(run, steps)
    seen: dict[int, Counter[int]] = {}
    for one in said:
        if one["step"] <= steps:
            seen[one["step"]] = Counter(one["samples"])
    size = run.options.size
    wanted = {step: range((step - 1) * size, step * size) for step in losses}
    lost = [s for s in range(1, steps + 1) if s not in losses]
    lost += [s for s in wanted if s in seen and not set(wanted[s]) <= set(seen[s])]
    doubled = [s for s, n in seen.items() if max(n.values(), default=0) > 1]
    differences = [
        abs(losses[e["step"]] - e["loss"]) / max(abs(e["loss"]), 1e-30)
        for e in expected[: None if x64 else FEW_STEPS]
        if e["step"] in losses
    ]
    unlike = [o["step"] for o in said if losses.get(o["step"], o["loss"]) != o["loss"]]
    again = recompiled(run)
    return {
        "status": run.front.poll(),
        "steps": steps,
        "samples_lost": size * len(lost),
        "samples_doubled": size * len(doubled),
        "unlike_losses": len(unlike),
        "max_rel_loss_diff": max(differences, default=0.0),
        "leftovers": leftovers(run),
        "recompiled_models": len(again),
        "recompiled": again,
        "goodput": goodput_of(commits),
        "generations": sum(e["event"] == "begun" for e in run.events()),
    }


def _said(run: Run) -> list[dict[str, Any]]:
    return [one for path in run.out.glob("*.jsonl") for one in _lines(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # A kill may cut a line short.
            found.append(json.loads(line))
    return found


def recompiled(run: Run) -> list[str]:
    """Programs that members compiled after their first step."""
    lines = [_lines(path) for path in run.out.glob("*.jsonl")]
    return [name for several in lines if several for name in several[-1]["compiled"]]


def undisturbed(run: Run, steps: int) -> list[dict[str, Any]]:
    """The same steps in one process that nothing disturbs."""
    if not steps:
        return []
    out = run.folder / "alone"
    out.mkdir()
    count = steps if run.options.x64 else min(steps, FEW_STEPS)
    options = dataclasses.replace(
        run.options, out=str(out), save=None, steps=count, pause=0.0
    )
    path = run.folder / "alone.json"
    path.write_text(json.dumps(dataclasses.asdict(options)))
    subprocess.run(
        [sys.executable, str(TRAINING), str(path)],
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (found,) = out.glob("*.jsonl")
    return _lines(found)


def leftovers(run: Run) -> list[str]:
    """What stayed behind."""
    found = []
    for said in run.events():
        if said["event"] == "started" and _runs(said["pid"], said["began"]):
            found.append(f"process {said['name']}")
        if said["event"] == "opened":
            with socket.socket() as probe:
                if probe.connect_ex((said["host"], said["port"])) == 0:
                    found.append("port")
    if run.agents is not None:
        found += ["agent"] * len(run.agents.there())
    save = run.folder / "save"
    known = ("step_", "whalejax.lock", "elastic.json")
    if save.is_dir():
        for path in save.iterdir():
            if not path.name.startswith(known) or path.suffix:
                found += [path.name] * (path.name != "elastic.json")
    return found


def _runs(pid: int, began: str) -> bool:
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return began_at(pid) == began and said.rpartition(")")[2].split()[0] not in "ZX"
