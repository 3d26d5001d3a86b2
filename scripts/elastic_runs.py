"""Runs and disturbs elastic runs of real processes, and launches."""

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
"""More steps than any run does."""

START: Final = """
import json, sys
from pathlib import Path
from whalejax.elastic.launching import supervise
from whalejax.membership.settings import Supervised, SupervisorSettings
words, folder, settings, places = json.loads(sys.argv[1])
settings = SupervisorSettings(**settings)
run = Supervised(
    command=tuple(words), folder=Path(folder), settings=settings, exit_seconds=60.0,
    **places
)
sys.exit(supervise(run))
"""


def environment(**more: str) -> dict[str, str]:
    """Returns variables of the processes: CPU only, and this checkout."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return {**base, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


class Run:
    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        options: Mapping[str, Any],
        spaces: Sequence[Space] = (),
        **variables: str,
    ) -> None:
        """Starts the run.

        Args:
            folder: Folder of the run.
            settings: Settings of its supervisor.
            options: Fields of ``elastic_training.Options``.
            spaces: Network namespaces with an agent and a process each; without any,
                the supervisor starts the processes itself.
            variables: Variables of the environment.
        """
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir(exist_ok=True)
        self.options = Options(
            out=str(self.out), save=str(folder / "save"), steps=STEPS, **options
        )
        path = folder / "options.json"
        path.write_text(json.dumps(dataclasses.asdict(self.options)))
        command = [sys.executable, str(TRAINING), str(path)]
        self._environment = environment(**variables)
        places: dict[str, Any] = {}
        if spaces:
            port = reserve_port(BRIDGE_ADDRESS)
            release_port(port)
            places = {"host": BRIDGE_ADDRESS, "port": port, "places": True}
        arguments = json.dumps([command, str(folder), settings, places])
        with (folder / "front.log").open("w") as log:
            self.front = subprocess.Popen(
                [sys.executable, "-c", START, arguments],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.agents = Agents(self, spaces, places.get("port", 0)) if spaces else None

    def start_agent(self, space: Space, port: int) -> subprocess.Popen[bytes]:
        key = self.folder / FOLDER / KEY
        address = f"{BRIDGE_ADDRESS}:{port}"
        argv = [sys.executable, "-m", "whalejax", "agent", address, "--key", str(key)]
        argv += ["--name", space.name, "--host", space.address]
        argv += ["--logs", str(self.folder / space.name)]
        with (self.folder / f"{space.name}.log").open("a") as log:
            return subprocess.Popen(
                [*space.inside, *argv],
                env=self._environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def events(self) -> list[dict[str, Any]]:
        """Returns the events of the journal."""
        return journal.read(self.folder / FOLDER / journal.EVENTS)

    def commits(self) -> list[dict[str, Any]]:
        return journal.read(self.folder / FOLDER / journal.COMMITS)

    def step(self) -> int:
        return newest(self.commits())

    def members(self) -> dict[str, tuple[str, int]]:
        """Returns the state and the process of each present member."""
        pids, states = {}, {}
        for event in self.events():
            name = str(event.get("name", ""))
            match event["event"]:
                case "started":
                    if began_at(event["pid"]) == event["began"]:
                        pids[name], states[name] = event["pid"], "starting"
                case "registered" if states.get(name) == "starting":
                    states[name] = "compiling"
                case "ready":
                    states[name] = "standing by"
                case "begun":
                    states.update({n: "taking part" for n in event["members"]})
                case "lost" | "ended":
                    pids.pop(name, None)
        return {name: (states[name], pid) for name, pid in pids.items()}

    def processes(self) -> list[tuple[str, int, str]]:
        """Returns the role or state of each process, its id, and its name."""
        processes = [(what, pid, n) for n, (what, pid) in self.members().items()]
        if supervisor := self.supervisor():
            processes.append(("supervisor", supervisor, ""))
        if self.agents is not None:
            there = self.agents.there().items()
            processes += [("agent", pid, name) for name, pid in there]
        return processes

    def members_of_agent(self, agent: str) -> list[str]:
        """Returns the present members of an agent: those that it started, and those
        that registered from its address.

        Args:
            agent: Name of the agent.
        """
        spaces = [] if self.agents is None else self.agents.spaces
        hosts = {space.address for space in spaces if space.name == agent}
        names: set[str] = set()
        for event in self.events():
            match event["event"]:
                case "started" if event.get("agent") == agent:
                    names.add(event["name"])
                case "registered" if event["host"] in hosts:
                    names.add(event["name"])
                case "lost" | "ended":
                    names.discard(event["name"])
        return sorted(names)

    def supervisor(self) -> int | None:
        children = Path(f"/proc/{self.front.pid}/task/{self.front.pid}/children")
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(children.read_text().split()[0])
        return None

    def moves_on(self, step: int, seconds: float) -> float | None:
        """Returns the seconds until a later step is committed; None if none is."""
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            if self.step() > step:
                return time.monotonic() - start
            if self.front.poll() is not None:
                return None
            time.sleep(0.02)
        return None

    def stop(self) -> None:
        """Ends the run after a step, and waits until it has ended."""
        self.front.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.front.wait(END_SECONDS)
        if self.agents is not None:
            self.agents.wait()

    def end(self) -> None:
        """Ends all processes, whatever happened."""
        processes = self.processes()
        # Processes that would restart others end first.
        self.front.kill()
        self.front.wait()
        processes += self.processes()
        if self.agents is not None:
            self.agents.close()
        for role, pid, _ in sorted(processes, key=lambda one: one[0] != "supervisor"):
            with contextlib.suppress(ProcessLookupError):
                (os.kill if role == "supervisor" else os.killpg)(pid, signal.SIGKILL)


class Agents:
    """Agents in namespaces; those that ended or were frozen are started again."""

    _FROZEN_SECONDS: Final = 30.0
    _TICK_SECONDS: Final = 0.5

    def __init__(self, run: Run, spaces: Sequence[Space], port: int) -> None:
        self.spaces = list(spaces)
        self._run, self._port = run, port
        self._agents = {s.name: run.start_agent(s, port) for s in spaces}
        self._frozen: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def there(self) -> dict[str, int]:
        """Returns their process ids, by name."""
        return {n: p.pid for n, p in self._agents.items() if p.poll() is None}

    def freezes(self, pid: int) -> None:
        """Notes a frozen agent, which its machine starts again after a while."""
        self._frozen[pid] = time.monotonic() + self._FROZEN_SECONDS

    def _watch(self) -> None:
        while not self._over.wait(self._TICK_SECONDS):
            for space in self.spaces:
                process = self._agents[space.name]
                if time.monotonic() > self._frozen.get(process.pid, float("inf")):
                    del self._frozen[process.pid]
                    process.kill()
                    process.wait()
                status = process.poll()
                if status and not self._over.is_set():
                    self._agents[space.name] = self._run.start_agent(space, self._port)

    def _stop_watching(self) -> None:
        self._over.set()
        self._thread.join()

    def wait(self) -> None:
        """Waits until they have ended by themselves after the run."""
        self._stop_watching()
        for process in self._agents.values():
            if process.pid in self._frozen:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)

    def close(self) -> None:
        self._stop_watching()
        for process in self._agents.values():
            process.kill()
            process.wait()


def newest(commits: Sequence[Mapping[str, Any]]) -> int:
    """Returns the newest committed step."""
    return max((commit["step"] for commit in commits), default=0)


class Launch:
    """A launch of a fixed number of processes, which is ended and started again."""

    def __init__(self, folder: Path, members: int, options: Mapping[str, Any]) -> None:
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
        self._number += 1
        command = ["launch", *self._words]
        command += ["--logs", str(self._folder / f"logs{self._number}")]
        variables = {
            **variables,
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with (self._folder / "launch.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "whalejax", *command, str(TRAINING)]
                + [str(self._options)],
                env=environment(**variables),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Returns the processes of all ranks."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                arguments = path.read_text().split("\0")
                if str(self._options) in arguments and str(TRAINING) in arguments[:3]:
                    pids.append(int(path.parent.name))
        return sorted(pids)

    def end(self) -> None:
        """Ends all of it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        end = time.monotonic() + END_SECONDS
        while pids := self.ranks():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise SystemExit(f"processes {pids} do not end")
            time.sleep(0.05)

    def steps(self) -> dict[int, float]:
        """Returns the time at which each step was first done."""
        first: dict[int, float] = {}
        for path in self.out.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # A kill may cut a line short.
                    line_data = json.loads(line)
                    at = first.get(line_data["step"], float("inf"))
                    first[line_data["step"]] = min(at, line_data["time"])
        return first

    def until(self, step: int) -> None:
        """Waits for a step."""
        end = time.monotonic() + HANGS_SECONDS
        while max(self.steps(), default=0) < step:
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > end:
                log = (self._folder / "launch.log").read_text()[-2000:]
                raise SystemExit(f"step {step} of the launch does not come\n{log}")
            time.sleep(0.1)


# Results of a run.


def audited(run: Run) -> dict[str, Any]:
    """Ends a run, and compares it with an undisturbed one."""
    run.stop()
    commits, lines = run.commits(), _all_lines(run)
    steps, x64 = newest(commits), run.options.x64
    losses = {c["step"]: c["loss"] for c in commits}
    expected = undisturbed(run, steps)
    numbers: dict[int, Counter[int]] = {}
    for line in lines:
        if line["step"] <= steps:
            numbers[line["step"]] = Counter(line["samples"])
    size = run.options.size
    due = {step: range((step - 1) * size, step * size) for step in losses}
    lost = [s for s in range(1, steps + 1) if s not in losses]
    lost += [s for s in due if s in numbers and not set(due[s]) <= set(numbers[s])]
    doubled = [s for s, n in numbers.items() if max(n.values(), default=0) > 1]
    differences = [
        abs(losses[e["step"]] - e["loss"]) / max(abs(e["loss"]), 1e-30)
        for e in expected[: None if x64 else FEW_STEPS]
        if e["step"] in losses
    ]
    unequal = [
        o["step"] for o in lines if losses.get(o["step"], o["loss"]) != o["loss"]
    ]
    programs = recompiled(run)
    return {
        "status": run.front.poll(),
        "steps": steps,
        "samples_lost": size * len(lost),
        "samples_doubled": size * len(doubled),
        "unlike_losses": len(unequal),
        "max_rel_loss_diff": max(differences, default=0.0),
        "leftovers": leftovers(run),
        "recompiled_models": len(programs),
        "recompiled": programs,
        "goodput": goodput_of(commits),
        "generations": sum(e["event"] == "begun" for e in run.events()),
    }


def _all_lines(run: Run) -> list[dict[str, Any]]:
    return [line for path in run.out.glob("*.jsonl") for line in _lines(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # A kill may cut a line short.
            lines.append(json.loads(line))
    return lines


def recompiled(run: Run) -> list[str]:
    """Returns the programs that members compiled after their first step."""
    lines = [_lines(path) for path in run.out.glob("*.jsonl")]
    return [name for rows in lines if rows for name in rows[-1]["compiled"]]


def undisturbed(run: Run, steps: int) -> list[dict[str, Any]]:
    """Runs the same steps in one undisturbed process."""
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
    (path_of_lines,) = out.glob("*.jsonl")
    return _lines(path_of_lines)


def leftovers(run: Run) -> list[str]:
    """Returns the remaining processes, ports and files."""
    remains = []
    for event in run.events():
        if event["event"] == "started" and _runs(event["pid"], event["began"]):
            remains.append(f"process {event['name']}")
        if event["event"] == "opened":
            with socket.socket() as probe:
                if probe.connect_ex((event["host"], event["port"])) == 0:
                    remains.append("port")
    if run.agents is not None:
        remains += ["agent"] * len(run.agents.there())
    save = run.folder / "save"
    known = ("step_", "whalejax.lock", "elastic.json")
    if save.is_dir():
        for path in save.iterdir():
            if not path.name.startswith(known) or path.suffix:
                remains += [path.name] * (path.name != "elastic.json")
    return remains


def _runs(pid: int, began: str) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return began_at(pid) == began and text.rpartition(")")[2].split()[0] not in "ZX"
