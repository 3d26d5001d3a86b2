"""Reads the growing journal of an elastic run for the scheduler.

The journal gives the target number of members, their live processes, the newest step,
the speed by number of members, and the costs of changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership.exit_status import Ending
from whalejax.processes.local_processes import runs
from whalejax.scheduler.job_table import Place


_MOST_STEPS: Final = 400
"""Number of steps after which the weight of earlier steps in a speed is halved."""

_FEWEST_STEPS: Final = 5
"""Minimum number of steps from which a speed is computed."""

_FEWEST_NOISE_LINES: Final = 20
_AWAY_SECONDS: Final = 60.0
"""Seconds without an agent after which the devices of a host are not used."""

_RECENT_STEPS: Final = 50

METRICS: Final = "metrics"
"""Folder with one file per process, which has a line for each step."""


@dataclass(slots=True)
class _Pace:
    steps: float = 0.0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = self.steps + steps, self.seconds + seconds
        if self.steps > _MOST_STEPS:
            self.steps, self.seconds = self.steps / 2, self.seconds / 2


@dataclass(slots=True, kw_only=True)
class ChangeCosts:
    """Measured costs of changes of devices, in seconds.

    Attributes:
        starts: Seconds from a decision to the first step, minus the time of a step.
        joins: Seconds from a decision until the added members take part.
        stills: Seconds without a step when the number of members changed.
    """

    starts: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    stills: list[float] = field(default_factory=list)

    def means(self) -> dict[str, float]:
        """Returns the mean costs, by the field of ``ScheduledJob`` for each."""
        means = {
            "start_seconds": self.starts,
            "join_seconds": self.joins,
            "resize_seconds": self.stills,
        }
        return {name: statistics.fmean(x) for name, x in means.items() if x}

    def add(self, other: ChangeCosts) -> None:
        """Adds the measurements of another job."""
        self.starts += other.starts
        self.joins += other.joins
        self.stills += other.stills


@dataclass(slots=True)
class _Process:
    """A member's process; ``agent`` is its agent and host, empty on this machine."""

    slot: int
    pid: int
    began: str
    agent: str = ""


@dataclass(slots=True, kw_only=True)
class _RecordedDecision:
    at: float
    before: int
    after: int


class NoiseReader:
    """Reads the gradient-noise scale from the metrics of a run's processes.

    Each process writes its own running mean. The result is the median over the
    processes at the newest steps.
    """

    def __init__(self, folder: Path) -> None:
        """Stores the folder; reads nothing yet.

        Args:
            folder: Folder with one file of JSON lines per process.
        """
        self._folder = folder
        self._files: dict[Path, journal.LineReader] = {}
        self._newest: dict[Path, tuple[int, float]] = {}
        self._count = 0

    def poll(self) -> None:
        """Reads the lines since the last call."""
        for path in self._folder.glob("*.jsonl"):
            file = self._files.setdefault(path, journal.LineReader(path))
            for said in file.new_objects():
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self._newest[path] = int(said["step"]), float(said["noise_scale"])
                    self._count += 1

    @property
    def value(self) -> float | None:
        """Noise scale in samples; None until there are enough measurements."""
        if self._count < _FEWEST_NOISE_LINES:
            return None
        last = max(step for step, _ in self._newest.values())
        recent = [x for step, x in self._newest.values() if step > last - _RECENT_STEPS]
        return statistics.median(recent)


class RunReader:
    """Reader of the newest run in the folder of a job.

    Attributes:
        starts: Number of starts and restarts of supervisors in the folder.
        size: Target number of members; 0 before it is reported.
        members: Number of members of the newest generation.
        step: Newest finished step of all runs.
        loss: Loss of that step.
        ending: Outcome of the newest run, and its reason; None while it goes on.
        drains: Whether the newest run was asked to end.
        costs: Measured costs of changes.
        first_step_at: Unix time of the first step of all runs.
        failures: For each slot, number of processes in a row that were lost before they
            were ready for steps. Processes that the run has refused do not count.
        refusal: Reason why the run refused a process, such as a changed script; empty
            once a later process is ready.
        agents: Names of the present agents of the newest run.
        away_since: Unix time at which each host lost its agent; the key ``""`` has the
            start of the run, for hosts that never had an agent.
    """

    def __init__(self, home: Path, *, reads_noise: bool = True) -> None:
        """Stores the folder; reads nothing yet.

        Args:
            home: Folder of the run.
            reads_noise: Whether to read the noise scale from the metrics.
        """
        self._events = journal.LineReader(home / FOLDER / journal.EVENTS)
        self._commits = journal.LineReader(home / FOLDER / journal.COMMITS)
        self.starts = self.size = self.members = self.step = 0
        self.loss: float | None = None
        self.ending: tuple[Ending, str] | None = None
        self.drains = False
        self.costs = ChangeCosts()
        self.first_step_at: float | None = None
        self.failures: dict[int, int] = {}
        self.refusal = ""
        self.agents: set[str] = set()
        self.away_since: dict[str, float] = {}
        self._not_ready: dict[str, int] = {}
        self._processes: dict[str, _Process] = {}
        self._begun: dict[int, tuple[int, float]] = {}
        self._paces: dict[tuple[int, str, int], _Pace] = {}
        self._launches: list[tuple[float, int, str]] = []
        self._noise = NoiseReader(home / METRICS) if reads_noise else None
        self._asked: list[_RecordedDecision] = []
        self._last: tuple[int, int, float] = (-1, 0, 0.0)

    def record_decision(self, at: float, before: int, after: int) -> None:
        """Records a decision of the scheduler about this job's devices.

        Args:
            at: Unix time of the decision.
            before, after: Numbers of devices.
        """
        self._asked.append(_RecordedDecision(at=at, before=before, after=after))

    def poll(self) -> None:
        """Reads the events, commits and metrics since the last call."""
        for said in filter(journal.is_whole, self._events.new_objects()):
            self._event(said)
        for said in filter(journal.is_whole, self._commits.new_objects()):
            if said["event"] == journal.COMMITTED:
                self._committed(said)
        for name, process in [*self._processes.items()]:
            if not process.agent and not runs(process.pid, process.began):
                del self._processes[name]
        if self._noise is not None:
            self._noise.poll()

    def summary(self) -> dict[str, Any]:
        """Returns the facts about an ended run, as fields for a journal."""
        costs = dataclasses.asdict(self.costs)
        return {"step": self.step, "loss": self.loss, "costs": costs}

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Restores the facts from a summary, without reading the run again.

        Args:
            summary: Fields from ``summary``.
        """
        self.step, self.loss = summary["step"], summary["loss"]
        self.costs = ChangeCosts(**summary["costs"])

    @property
    def noise_scale(self) -> float | None:
        """Measured noise scale of the gradient in samples, or None."""
        return None if self._noise is None else self._noise.value

    def record_launch(self, at: float, batch: int, kind: str = "") -> None:
        """Records that the scheduler started the run.

        Speeds are kept separately for each batch and device kind.

        Args:
            at: Unix time of the launch.
            batch: Samples of the global batch.
            kind: Kind of its devices; empty if there is only one.
        """
        self._launches.append((at, batch, kind))

    def _pace(self, at: float, count: int) -> _Pace:
        launches = ((b, k) for then, b, k in reversed(self._launches) if then <= at)
        batch, kind = next(launches, (0, ""))
        return self._paces.setdefault((batch, kind, count), _Pace())

    @property
    def held_slots(self) -> set[int]:
        """Slots with live processes, including those that were given up."""
        return {process.slot for process in self._processes.values()}

    def away_hosts(self, hosts: Mapping[str, float], at: float) -> list[str]:
        """Returns the hosts of the run that have had no agent for a while.

        Args:
            hosts: Hosts that need an agent, with the Unix time since which they do.
            at: Current Unix time.
        """
        if not self.away_since:
            return []
        first = self.away_since[""]
        return [
            host
            for host, since in hosts.items()
            if host not in self.agents
            and at - max(since, self.away_since.get(host, first)) > _AWAY_SECONDS
        ]

    def steps_per_second(self, batch: int = 0) -> dict[Place, float]:
        """Returns the measured speed by device kind and number of members.

        Args:
            batch: Samples of the global batch; 0 for launches without a given batch.
        """
        return {
            (kind, count): pace.steps / pace.seconds
            for (size, kind, count), pace in self._paces.items()
            if size in (0, batch) and pace.steps >= _FEWEST_STEPS and pace.seconds > 0
        }

    def _event(self, said: Mapping[str, Any]) -> None:
        match said["event"]:
            case "opened":
                self.starts += 1
                self.size, self.members = 0, 0
                self.failures, self._not_ready, self.refusal = {}, {}, ""
                self.ending, self.drains = None, False
                self.agents, self.away_since = set(), {"": said["time"]}
                for name in [n for n, p in self._processes.items() if p.agent]:
                    del self._processes[name]  # The process ended with its supervisor.
            case "restarted":
                self.starts += 1
                # Agents that still run join again.
                self.away_since |= {agent: said["time"] for agent in self.agents}
                self.agents = set()
            case "resized":
                self.size = said["size"]
            case "started":
                agent = said.get("agent", "")
                process = _Process(said["slot"], said["pid"], said["began"], agent)
                self._processes[said["name"]] = process
                self._not_ready[said["name"]] = said["slot"]
            case "ready":
                self.failures.pop(self._not_ready.pop(said["name"], -1), None)
                self.refusal = ""
            case "refused":
                self._not_ready.pop(said.get("name", ""), None)
                self.refusal = str(said.get("why", ""))
            case "lost":
                slot = self._not_ready.pop(said["name"], None)
                if slot is not None:
                    self.failures[slot] = self.failures.get(slot, 0) + 1
            case "process_ended":
                self._processes.pop(said["name"], None)
            case "agent_joined" | "agent_left" | "agent_lost":
                self._agent_event(said)
            case "begun":
                self.members = len(said["members"])
                self._begun[said["generation"]] = self.members, said["time"]
            case "draining":
                self.drains = True
            case "ending":
                how = str(said.get("how"))
                ending = Ending(how) if how in [*Ending] else Ending.FAILED
                self.ending = ending, str(said.get("why", ""))

    def _agent_event(self, said: Mapping[str, Any]) -> None:
        agent = said["agent"]
        if said["event"] == "agent_joined":
            self.agents.add(agent)
            self.away_since.pop(agent, None)
            return
        # The agent's processes end with it, or when it reconnects.
        self.agents.discard(agent)
        self.away_since[agent] = said["time"]
        for name in [n for n, p in self._processes.items() if p.agent == agent]:
            del self._processes[name]

    def _committed(self, said: Mapping[str, Any]) -> None:
        generation, step, at = said["generation"], said["step"], said["time"]
        before, last_step, last_at = self._last
        if self.first_step_at is None:
            self.first_step_at = at
        if generation == before and step > last_step:
            pace = self._pace(at, self._begun[generation][0])
            pace.add(step - last_step, at - last_at)
        elif generation != before and generation in self._begun:
            self._measure(generation, at, last_at)
        if generation in self._begun:
            self._last = generation, step, at
        if step >= self.step:
            self.step, self.loss = step, said["loss"]

    def _measure(self, generation: int, at: float, last_at: float) -> None:
        count, begun_at = self._begun[generation]
        asked = next((a for a in reversed(self._asked) if a.at <= begun_at), None)
        if asked is None or asked.after != count:
            return
        self._asked.remove(asked)
        pace = self._pace(at, count)
        step = pace.seconds / pace.steps if pace.steps else 0.0
        if not asked.before:
            self.costs.starts.append(max(0.0, at - asked.at - step))
            return
        self.costs.stills.append(max(0.0, at - last_at - step))
        if asked.after > asked.before:
            self.costs.joins.append(max(0.0, begun_at - asked.at))
