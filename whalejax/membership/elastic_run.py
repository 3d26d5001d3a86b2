"""State of an elastic run and of its members, as its supervisor knows them.

It has data and queries. The modules that ``react`` calls change the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from whalejax.membership.assignment import Node
from whalejax.membership.commit_times import CommitTimes
from whalejax.membership.events import Effect, Send
from whalejax.membership.exit_status import Ending
from whalejax.membership.lease import Lease
from whalejax.membership.phases import DEADLINES, STEP
from whalejax.membership.restart_policy import Failures
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.units import count_text
from whalejax.wire import run_messages as wire


MODE = "mode"
IN_GENERATIONS = "collectives in generations"
"""Value of the fact ``MODE`` for members that communicate by the platform's
collectives. After the loss of one member, all restart from a checkpoint."""

AT_STEPS = "collectives in generations, stopping at steps"
"""Value of ``MODE`` for members with collectives that can also stop on request: all
save their state after the same step."""

LONGEST_TURN_SECONDS: Final = 1.0
"""Longest time between two iterations of a supervisor that was not paused."""


Parts = Mapping[str, Sequence[Node]]
Phase = Literal["gathering", "preparing", "running", "draining", "ending"]
Status = Literal[
    "starting", "registered", "ready", "active", "finished", "left", "failed", "gone"
]


class RunOutcome(NamedTuple):
    """End of a run; ``saver`` is the member that writes a last checkpoint, or empty."""

    how: Ending
    text: str
    saver: str


@dataclass(slots=True, kw_only=True)
class MemberRecord:
    """A member, from its latest messages to the supervisor.

    Attributes:
        name: Name, unique among all processes of the run, also earlier ones.
        slot: Number of its slot; None if the supervisor did not start the process.
        pid: Process id of a local process; 0 if it is not known.
        began: Start time of that process.
        agent: Agent that runs the process; empty if it runs on the supervisor's
            machine.
        machine: Machine of the process, as ``processes.machine`` names it.
        token: Random token that identifies the process before it has its name.
        status: ``"starting"`` until its first message, ``"registered"`` while it
            compiles, ``"ready"`` if it could take part, ``"active"`` if it takes part,
            ``"finished"`` after the last step, ``"left"`` if the user's loop ended
            early, ``"failed"`` if it reported its error and has not ended yet,
            ``"gone"`` if it has ended or was given up.
        leaving: Whether it asked to leave.
        reached: Status before it failed or was given up.
        since: Time at which it got the status ``reached``.
        connected: Whether it is connected to the supervisor.
        released_at: Time at which its part in the run ended; None before.
        ends_by_kill: Whether it is ended by SIGKILL, because it has nothing to save.
        reported: Number of the newest report received from it.
        host, port: Address at which other members reach it.
        step: Step of the state that it holds; -1 without a state.
        seconds: Seconds per micro-batch.
        phase, done, moved_at: Current phase, a progress count within the phase, and the
            time at which either last changed.
        beyond: Number of successive heartbeats from a later step than the one at which
            others left their loops.
        prepared: Generation for which it has stopped.
        held: Subtrees of micro-batches (see ``assignment``) that it has summed in the
            step after ``step``.
    """

    name: str
    slot: int | None
    pid: int = 0
    began: str = ""
    agent: str = ""
    machine: str = ""
    token: str = ""
    status: Status = "starting"
    leaving: bool = False
    reached: Status = "starting"
    since: float = 0.0
    connected: bool = False
    released_at: float | None = None
    ends_by_kill: bool = False
    reported: int = 0
    host: str = ""
    port: int = 0
    step: int = -1
    seconds: float = 0.0
    phase: str = ""
    done: int = 0
    moved_at: float = 0.0
    beyond: int = 0
    prepared: int = -1
    held: Sequence[Node] = ()

    @property
    def is_there(self) -> bool:
        """Whether it has not ended or been given up."""
        return self.status != "gone"

    def becomes(self, status: Status, now: float) -> None:
        """Sets the status."""
        self.status = status
        if status not in ("failed", "gone"):
            self.reached, self.since = status, now


@dataclass(slots=True, kw_only=True)
class ElasticRun:
    """State of a run. The journal restores ``assigned``, and all fields up to ``over``.

    Attributes:
        settings: Settings of the supervisor.
        members: All members, also failed ones, by name.
        generation: Number of the newest generation that members were asked to form.
        phase: ``"gathering"`` members, ``"preparing"`` a generation, ``"running"``,
            ``"draining"`` if the run was asked to end, ``"ending"``.
        active: Members of the newest generation that began, by rank.
        target, after: Members that were asked to form the newest generation, and the
            step after which they stop for it; -1 to stop immediately.
        step: Step at which the newest generation began.
        size: Requested number of members.
        devices: Names of the devices of each slot; None if they were never reported.
        facts: Facts that all members share.
        checkpoint: Path of the newest checkpoint; empty without one.
        adding_up: Gradient reduction and its reason; empty before it is decided.
        formed: Whether a generation has begun.
        draining: Whether the run was asked to end.
        well: Members of the generation that ended without an error.
        over: Outcome of the run; None before its end.
        pace: Times of the commits.
        failures: Failures of members, and the times at which slots are filled again.
        lease: Leases of the members that have sent a message.
        losses: Generation and loss of committed steps.
        assigned: Number of a generation, with the micro-batches of each member in the
            generation's first step and in later steps.
        asked_at: Time at which members were asked to form the newest generation.
        short_since: Time since which there are too few members; None if there are
            enough.
        expected: Number of members to wait for after a restart of all, so that the run
            does not shrink.
        unfit: Numbers of members for which no plan was found, and the reasons.
        starting, unplaced: Slots whose processes are being started, and slots for which
            no agent has room.
        saver_reported: Whether the writer of the last checkpoint has reported its end.
        awaited: Agents that were started for this run and have not joined yet.
        agents: Agents, with the number of processes that each has room for.
        placed: Whether processes are placed on agents.
        suspected_at: Time at which a link between members was first reported broken.
        broken_links, reconnected_links: Links that broke, and links that were
            connected again.
        is_settled: Whether ``generations.settle`` has run since the last event that may
            change which members take part.
        outbox: Effects that the next ``react`` returns.
    """

    settings: SupervisorSettings
    members: dict[str, MemberRecord] = field(default_factory=dict)
    generation: int = 0
    phase: Phase = "gathering"
    active: list[str] = field(default_factory=list)
    target: list[str] = field(default_factory=list)
    after: int = -1
    step: int = -1
    size: int = field(init=False)
    devices: tuple[str, ...] | None = None
    facts: dict[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    adding_up: tuple[str, str] = ("", "")
    formed: bool = False
    draining: bool = False
    well: set[str] = field(default_factory=set)
    over: RunOutcome | None = None
    pace: CommitTimes = field(init=False)
    failures: Failures = field(init=False)
    lease: Lease[str] = field(init=False)
    losses: dict[int, tuple[int, float]] = field(default_factory=dict)
    assigned: tuple[int, Parts, Parts] = field(default=(-1, {}, {}))
    asked_at: float = 0.0
    short_since: float | None = None
    expected: int = 0
    unfit: dict[int, str] = field(default_factory=dict)
    starting: set[int] = field(default_factory=set)
    unplaced: set[int] = field(default_factory=set)
    saver_reported: bool = False
    awaited: set[str] = field(default_factory=set)
    agents: dict[str, int] = field(default_factory=dict)
    placed: bool = False
    suspected_at: float | None = None
    broken_links: set[frozenset[str]] = field(default_factory=set)
    reconnected_links: set[frozenset[str]] = field(default_factory=set)
    is_settled: bool = True
    outbox: list[Effect] = field(default_factory=list)
    _first_left: int | None = None
    _knows_left: bool = False

    def __post_init__(self) -> None:
        first = self.settings.first
        self.size = self.settings.most if first is None else first
        self.pace = CommitTimes(self.settings)
        self.failures = Failures(self.settings)
        self.lease = Lease(self.settings.lease_seconds, LONGEST_TURN_SECONDS)

    # What members have in common.

    @property
    def steps(self) -> int:
        """Number of steps of the run; 0 until a member has reported it."""
        return int(self.facts.get("steps", 0))

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a step; 0 until a member has reported it."""
        return int(self.facts.get("micro-batches", 0))

    @property
    def stops(self) -> bool:
        """Whether members use collectives and can save and stop at a step."""
        return self.facts.get(MODE) == AT_STEPS

    @property
    def restarts(self) -> bool:
        """Whether the failure of one member restarts all from a checkpoint."""
        return self.facts.get(MODE) in (AT_STEPS, IN_GENERATIONS)

    # Present members.

    @property
    def has_no_member(self) -> bool:
        """Whether no process has joined the run so far."""
        joined = any(member.token for member in self.members.values())
        return not (joined or self.formed) and self.phase == "gathering"

    def present_members(self) -> list[MemberRecord]:
        """Returns the members that have not ended or been given up."""
        return [m for m in self.members.values() if m.status != "gone"]

    def taking_part(self) -> list[MemberRecord]:
        """Returns the present members of the generation that have not failed."""
        members = [self.members[name] for name in self.active]
        return [m for m in members if m.status not in ("failed", "gone")]

    @property
    def slots(self) -> range:
        """Slots for processes, on this machine or on agents."""
        return range(self.size + self.settings.spares)

    def refill(self, now: float, slot: int | None) -> None:
        """Schedules a process for a slot at time ``now``, if the run has the slot."""
        if slot is not None and slot in self.slots:
            self.failures.due.setdefault(slot, now)

    @property
    def are_coming(self) -> bool:
        """Whether processes are starting that may take part."""
        return bool(self.starting) or any(
            m.status in ("starting", "registered") for m in self.members.values()
        )

    @property
    def is_finishing(self) -> bool:
        """Whether a member has done all steps."""
        return any(m.status == "finished" for m in self.members.values())

    def candidates(self) -> list[str]:
        """Returns the members that could take part: active ones, then ready ones."""
        # Members that have done all steps count even if they asked to leave.
        there = [
            m for m in self.present_members() if not m.leaving or m.status == "finished"
        ]
        took = [m.name for m in there if m.status in ("active", "finished")]
        if self.is_finishing:
            return took
        ready = [m.name for m in there if m.status == "ready"]
        return (took + ready)[: self.size]

    def fitting(self) -> list[str]:
        """Returns the first candidates, as many as a plan may exist for.

        If they are fewer than the minimum, the run waits for others.
        """
        candidates = self.candidates()
        count = len(candidates)
        while count in self.unfit:
            count -= 1
        return candidates[:count]

    def first_left(self) -> int | None:
        """Returns this generation's first step at which a loop was left, or None."""
        if not self._knows_left:
            left = [m.step for m in self.taking_part() if m.status == "left"]
            left += [self.members[name].step for name in self.well]
            self._first_left, self._knows_left = min(left, default=None), True
        return self._first_left

    def forget_left(self) -> None:
        """Clears the cached ``first_left``, which an event may have changed."""
        self._knows_left = False

    def hosts(self) -> int:
        """Returns the expected number of hosts on which members will run."""
        most = self.settings.most
        if not self.placed:
            return 1
        room = max(self.agents.values(), default=1)
        return min(most, max(len({*self.agents, *self.awaited}), -(-most // room)))

    # Times and texts.

    def limit(
        self, member: MemberRecord, step_seconds: float | None = None
    ) -> float | None:
        """Returns the seconds that a member's phase may take; None without a limit."""
        name = DEADLINES.get(member.phase, STEP)
        if name == STEP:
            return self.pace.limit() if step_seconds is None else step_seconds
        return None if name is None else float(getattr(self.settings, name))

    def boundary(self) -> int:
        """Returns a step that no member reaches before all have learnt of it."""
        return self.pace.boundary(
            max((m.step for m in self.present_members()), default=0)
        )

    def checkpoint_text(self) -> str:
        """Returns text that names the newest checkpoint, to append to a sentence."""
        if self.checkpoint:
            return f". The last checkpoint is {self.checkpoint}"
        return ". No checkpoint was written"

    def agents_text(self) -> str:
        """Returns text that lists present and missing agents; empty without agents."""
        if not self.placed:
            return ""
        there = [
            f"{name} ({count_text(room, 'process')})"
            for name, room in self.agents.items()
        ]
        missing = sorted(self.awaited)
        text = f"; agents present: {', '.join(there) or 'none'}"
        return text + (f"; missing: {', '.join(missing)}" if missing else "")

    # Effects.

    def send(self, name: str, message: wire.ToMember) -> None:
        """Queues a message to a member."""
        self.outbox.append(Send(name, message))
