"""Runs and disturbs live jobs under a scheduler, and audits them.

They train ``make``: layers whose metrics have sample numbers, so that every sample of
every step can be accounted for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax.journals import journal  # noqa: E402
from whalejax.journals.journal import FOLDER  # noqa: E402
from whalejax.membership.assignment import check_tiles  # noqa: E402
from whalejax.meshes.errors import WhaleError  # noqa: E402
from whalejax.processes.local_processes import began_at, runs  # noqa: E402
from whalejax.state.folder_lock import LOCK  # noqa: E402


HANGS_SECONDS: Final = 300.0
SIZE: Final = 240
MICRO_BATCHES: Final = 12
_WIDTH: Final = 128
_LAYERS: Final = 6


def make(seconds: float = 0.0, device_seconds: float = 0.0) -> wh.Job:
    """Returns a job.

    Args:
        seconds: Seconds of its input in each step.
        device_seconds: Seconds of a micro-batch besides computation, as on a device of
            its own: other work on this machine slows it little.
    """

    def wait(x: Any) -> Any:
        time.sleep(device_seconds)
        return np.zeros((), np.float32)

    @jax.custom_jvp
    def on_device(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return x + jax.pure_callback(wait, shape, x[0, 0])

    @on_device.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return on_device(primals[0]), tangents[0]

    def make_model(key: Any) -> dict[str, Any]:
        first, second = jax.random.split(key)
        return {
            "w": jax.random.normal(first, (_WIDTH, _WIDTH)) / _WIDTH**0.5,
            "v": jax.random.normal(second, (_WIDTH, 2)) / _WIDTH**0.5,
        }

    def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
        hidden = on_device(batch["x"]) if device_seconds else batch["x"]
        for _ in range(_LAYERS):
            hidden = jnp.tanh(hidden @ model["w"])
        hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
        loss = jnp.mean((hidden @ model["v"] - batch["y"]) ** 2)
        return loss, wh.Aux(samples={"number": batch["number"]})

    def batch(step: int, size: int) -> dict[str, np.ndarray]:
        time.sleep(seconds)
        rng = np.random.default_rng(step)
        return {
            "x": rng.standard_normal((size, _WIDTH), np.float32),
            "y": rng.standard_normal((size, 2), np.float32),
            "number": np.arange(step * size, (step + 1) * size, dtype=np.int32),
        }

    return wh.Job(
        loss_fn,
        make_model,
        batch,
        optax.adam(1e-3),
        batch_size=SIZE,
        per_micro_batch=bool(device_seconds),
    )


def environment() -> dict[str, str]:
    """Returns variables of the scheduler and its jobs: CPU only, this checkout."""
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))
    }
    return {**variables, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


class Serving:
    """A scheduler of four processes, which is killed and started again."""

    def __init__(
        self, folder: Path, *words: str, start: bool = True, cluster: str = "cpu:4"
    ) -> None:
        """Starts the scheduler.

        Args:
            folder: Folder in which it runs.
            words: Further options of ``jobs serve``.
            start: Whether to start it here.
            cluster: Devices that the jobs divide.
        """
        self.folder, self.save = folder, folder / "jobs"
        self._words = ["serve", "--cluster", cluster, *words]
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Starts it, the first time or again, and waits until it listens."""
        with (self.folder / "serve.log").open("a") as log:
            self.process = subprocess.Popen(
                [*self._command(), *self._words, "--save", str(self.save)],
                cwd=self.folder,
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.until(lambda: bool(self.shown()), 120.0)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "whalejax", "jobs"]

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of ``whalejax jobs``."""
        return subprocess.run(
            [*self._command(), *words, "--save", str(self.save)],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    def add(self, name: str, *words: str, steps: int, devices: str = "1:4") -> None:
        """Adds a job of ``make``, and waits until it is planned."""
        model = f"{Path(__file__).resolve()}:make"
        options = ["--name", name, "--steps", str(steps), "--devices", devices]
        options += ["--micro-batches", str(MICRO_BATCHES), "--save-every", "50"]
        process = self.ask("add", model, *options, *words)
        assert process.returncode == 0, process.stderr

    def shown(self) -> dict[str, Any]:
        """Returns each job as ``jobs show`` does; ``""`` is the scheduler itself."""
        from whalejax.scheduler.job_table import JobError
        from whalejax.scheduler.live.local_socket import ask
        from whalejax.scheduler.live.requests import Jobs, ShowJobs

        try:
            answer = ask(self.save, ShowJobs())
        except JobError:
            return {}
        assert isinstance(answer, Jobs)
        return {"": answer, **{one.name: one for one in answer.jobs}}

    def until(self, true: Callable[[], bool], seconds: float = HANGS_SECONDS) -> bool:
        """Waits for a condition; returns whether it became true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if true():
                return True
            time.sleep(0.1)
        return false_with_log(self.folder)

    # Facts of a job, whichever processes run.

    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns the events of a job's run."""
        return journal.read(self.save / name / FOLDER / journal.EVENTS)

    def commits(self, name: str) -> list[dict[str, Any]]:
        """Returns the committed steps of a job."""
        return journal.read(self.save / name / FOLDER / journal.COMMITS)

    def book(self) -> list[dict[str, Any]]:
        """Returns the scheduler's journal."""
        return journal.read(self.save / "jobs.jsonl")

    def trades(self) -> int:
        """Returns how often a running job got another number of devices."""
        size: dict[str, int] = {}
        count = 0
        for event in self.book():
            if event["event"] == "placed":
                old_size = size.get(event["name"], 0)
                count += bool(old_size and event["size"] != old_size)
                size[event["name"]] = event["size"]
        return count

    def members(self, name: str) -> list[int]:
        """Returns the living processes of a job's members."""
        starts = [e for e in self.events(name) if e["event"] == "started"]
        return [e["pid"] for e in starts if runs(e["pid"], e["began"])]

    def supervisor(self, name: str) -> int | None:
        return _holder(self.save / name / FOLDER)

    def front(self, name: str) -> int | None:
        """Returns the process that restarts a job's supervisor."""
        return _holder(self.save / name / "front")

    # Disturbances.

    def kill_scheduler(self) -> None:
        """Kills the scheduler outright, and starts it again."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.start()

    def kill_member(self, name: str, place: int = 0) -> bool:
        """Kills a member of a job; returns whether there was one."""
        pids = self.members(name)
        return bool(pids) and _kill(pids[place % len(pids)])

    def kill_supervisor(self, name: str) -> bool:
        """Kills the supervisor of a job; returns whether there was one."""
        pid = self.supervisor(name)
        return pid is not None and _kill(pid)

    def kill_all_above(self, name: str) -> bool:
        """Kills a job's supervisor and its restarter; not its members."""
        pid = self.front(name)
        return pid is not None and _kill(pid) and self.kill_supervisor(name)

    def end(self, names: Sequence[str]) -> None:
        """Ends all processes, whatever happened."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        elif (pid := _holder(self.save)) is not None:
            _kill(pid)
        for find_pid in (self.front, self.supervisor):
            for name in names:
                pid = find_pid(name)
                if pid is not None:
                    _kill(pid)
        for name in names:
            for pid in self.members(name):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def leftovers(self, names: Sequence[str]) -> list[int]:
        """Returns processes of ended jobs that still run."""
        pids = [pid for name in names for pid in self.members(name)]
        holders = [find(n) for n in names for find in (self.front, self.supervisor)]
        return pids + [pid for pid in holders if pid is not None]


def false_with_log(folder: Path) -> bool:
    """Prints the scheduler's log after a timeout; returns False."""
    print((folder / "serve.log").read_text()[-3000:], file=sys.stderr, flush=True)
    return False


def _holder(folder: Path) -> int | None:
    """Returns the process that holds a folder."""
    try:
        holder = json.loads((folder / LOCK).read_text())
    except (OSError, ValueError):
        return None
    pid = holder.get("pid")
    is_alive = isinstance(pid, int) and began_at(pid) == holder.get("started")
    return pid if is_alive else None


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


# Audits.


def undisturbed(folder: Path, steps: int, **values: Any) -> list[float]:
    """Returns the losses of the same job in one undisturbed process, by step."""
    folder.mkdir(exist_ok=True)
    options = {
        "model": f"{Path(__file__).resolve()}:make",
        "set": [f"{name}={value}" for name, value in values.items()],
        "batch": None,
        "steps": steps,
        "save": None,
        "save_every": 10**9,
        "micro_batches": MICRO_BATCHES,
        "precision": [],
        "seed": 0,
        "mesh": [],
        "metrics": str(folder),
    }
    subprocess.run(
        [sys.executable, "-m", "whalejax.elastic.elastic_worker", json.dumps(options)],
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (path,) = folder.glob("*.jsonl")
    return [line["loss"] for line in lines_of(path)]


def audit_faults(
    serving: Serving, folder: Path, steps: Mapping[str, int], **values: Any
) -> list[dict[str, Any]]:
    """Returns the audits of jobs that differ from undisturbed ones.

    Args:
        serving: Scheduler of the jobs.
        folder: Folder of the undisturbed run.
        steps: Number of steps of each job, by its name.
        values: Arguments of ``make`` for that run.
    """
    expected = undisturbed(folder, max(steps.values()), **values)
    faults = []
    for name, count in steps.items():
        audit = audited(serving, name, count, expected[:count])
        is_whole = audit["steps"] == audit["compared_losses"] == count
        is_once = not audit["samples_lost"] and not audit["samples_doubled"]
        if not (is_whole and is_once and audit["max_rel_loss_diff"] < 1e-5):
            faults.append({"name": name, **audit})
    return faults


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the complete JSON lines of a file."""
    lines = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # A kill may cut a line short.
            lines.append(json.loads(line))
    return lines


def audited(
    serving: Serving, name: str, steps: int, expected: Sequence[float]
) -> dict[str, Any]:
    """Returns the missing and repeated samples of a job, and its loss differences.

    Args:
        serving: Scheduler of the job.
        name: Name of the job.
        steps: Number of its steps.
        expected: Losses of an undisturbed run, by step.
    """
    commits, seen = serving.commits(name), {}
    losses = {c["step"]: c["loss"] for c in commits}
    for path in (serving.save / name / "metrics").glob("*.jsonl"):
        for line in lines_of(path):
            seen[line["step"]] = Counter(line["number"])
            losses.setdefault(line["step"], line["loss"])
    lost = [s for s in range(1, steps + 1) if s not in losses]
    doubled = [s for s, n in seen.items() if max(n.values()) > 1]
    for step, numbers in seen.items():
        if {*range((step - 1) * SIZE, step * SIZE)} - {*numbers}:
            lost.append(step)
    for commit in commits:
        nodes = [(a, b) for n in commit["parts"].values() for a, b in n]
        try:
            check_tiles(nodes, MICRO_BATCHES)
        except WhaleError:
            doubled.append(commit["step"])
    differences = [
        abs(losses[n] - loss) / max(abs(loss), 1e-30)
        for n, loss in enumerate(expected, start=1)
        if n in losses
    ]
    return {
        "steps": max(losses, default=0),
        "samples_lost": SIZE * len(lost),
        "samples_doubled": SIZE * len(doubled),
        "max_rel_loss_diff": max(differences, default=0.0),
        "compared_losses": len(differences),
    }


def summary(audits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the totals of the audits of several jobs."""
    return {
        "live_lost": sum(audit["samples_lost"] for audit in audits),
        "live_doubled": sum(audit["samples_doubled"] for audit in audits),
        "live_max_rel_loss_diff": max(audit["max_rel_loss_diff"] for audit in audits),
    }
