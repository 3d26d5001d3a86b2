"""The state of a run as its supervisor knows it, and how it goes on from a journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from whalejax.elastic.phases import DEADLINES, STEP
from whalejax.elastic.supervisor.failures import Failures
from whalejax.elastic.supervisor.history import History, MemberHistory, Over, Phase
from whalejax.elastic.supervisor.member_record import Effect, Member, Send, WriteEvent
from whalejax.elastic.supervisor.pace import StepPace
from whalejax.elastic.supervisor.settings import SupervisorSettings
from whalejax.elastic.supervisor.telling import counted
from whalejax.elastic.wire.framing import Message
from whalejax.membership.lease import Lease


MODE = "mode"
IN_GENERATIONS = "collectives in generations"
"""The fact of members that meet by the platform's collectives: one that is lost ends
the generation for all, and they start again from a checkpoint."""

AT_STEPS = "collectives in generations, stopping at steps"
"""The same of members that stop together behind a step where they are asked to, having
saved their state."""

LONGEST_TURN_SECONDS: Final = 1.0
"""Between two turns of the supervisor: more, and it may have been stopped."""


class RunState:
    """The members of a run, by what they and the journal told.

    Attributes:
        settings: how it decides.
        generation: its number; a new one is formed when members are lost or come.
        phase: ``"gathering"`` members, ``"preparing"`` a generation, ``"running"``,
            ``"draining"`` where it was told to end, ``"ending"``.
        members: all that ever were, by name.
        active: those that take part, by rank.
        pace: the steps that were committed.
        steps: of the whole run; 0 until a member has said.
        micro_batches: of a step.
        checkpoint: the newest that was written.
        adding_up: how gradients are added up, and why; empty before it is decided.
        restarts: a loss ends all members, which start again from a checkpoint.
        stops: such members can be stopped at a step, with their state saved.
        unfit: numbers of members that no plan was found for, and why.
        over: how the run has ended; None before.
        awaited: agents that were started for this run and have not joined yet.
        agents: those that are there, with the processes that each has room for.
        placed: processes are placed on agents.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self.settings = settings
        self.generation = 0
        self.phase: Phase = "gathering"
        self.members: dict[str, Member] = {}
        self.active: list[str] = []
        self.pace = StepPace(settings)
        self.steps = self.micro_batches = 0
        self.failures = Failures(settings)
        self.checkpoint = ""
        self.adding_up = "", ""
        self.restarts = self.stops = False
        self.unfit: dict[int, str] = {}
        self.over: Over | None = None
        self._facts: Mapping[str, str] = {}
        self._formed = self._draining = False
        self._step = -1
        self._target: list[str] = []
        self._after = -1
        self._asked_at = 0.0
        self._short_since: float | None = None
        self._well: set[str] = set()
        self._saver_has_told = False
        self._starting: set[int] = set()
        self._unplaced: set[int] = set()
        self.awaited: set[str] = set()
        self.agents: dict[str, int] = {}
        self.placed = False
        self._expected = 0
        self._suspected_at: float | None = None
        self._broken_links: set[frozenset[str]] = set()
        self._reconnected_links: set[frozenset[str]] = set()
        self._effects: list[Effect] = []
        self._losses: dict[int, tuple[int, float]] = {}
        self._lease: Lease[str] = Lease(settings.lease_seconds, LONGEST_TURN_SECONDS)

    def effects(self) -> list[Effect]:
        """What is to be done, in this order; each is given once."""
        found, self._effects = self._effects, []
        return found

    # What a journal tells.

    def know(self, facts: Mapping[str, str]) -> None:
        """Take what all members must have in common."""
        self._facts = facts
        if facts:
            self.steps = int(facts["steps"])
            self.micro_batches = int(facts["micro-batches"])
        self.stops = facts.get(MODE) == AT_STEPS
        self.restarts = self.stops or facts.get(MODE) == IN_GENERATIONS

    def history(self) -> History:
        """What a journal must tell of this run by now."""
        return History(
            generation=self.generation,
            phase=self.phase,
            members={
                m.name: MemberHistory(
                    slot=m.slot,
                    pid=m.pid,
                    began=m.began,
                    agent=m.agent,
                    machine=m.machine,
                    token=m.token,
                    status=m.status,
                    leaving=m.leaving,
                )
                for m in self.members.values()
            },
            active=self.active,
            target=self._target,
            after=self._after,
            step=self._step,
            facts=dict(self._facts),
            checkpoint=self.checkpoint,
            adding_up=self.adding_up,
            formed=self._formed,
            draining=self._draining,
            well=self._well,
            over=self.over,
        )

    def resume(
        self,
        now: float,
        told: History,
        losses: Mapping[int, tuple[int, float]],
        *,
        wall: float = 0.0,
        committed_at: float = 0.0,
    ) -> None:
        """Go on where a supervisor that was killed has left the run.

        Its members are given time to come back.

        Args:
            now: the time.
            told: what its journal tells.
            losses: generation and loss of the steps that were written down.
            wall: the time by which failures in the journal are told.
            committed_at: when the newest step was, by the same.
        """
        settings = self.settings
        # A lease that ends when the time to come back does.
        heard_at = now + settings.rejoin_seconds - settings.lease_seconds
        for name, one in told.members.items():
            self.members[name] = Member(
                name=name,
                slot=one.slot,
                pid=one.pid,
                began=one.began,
                agent=one.agent,
                machine=one.machine,
                token=one.token,
                status=one.status,
                leaving=one.leaving,
                since=now,
                heard_at=heard_at,
                moved_at=now,
            )
        self.generation = max(self.generation, told.generation)
        self.phase, self.active = told.phase, told.active
        self._target, self._after, self._asked_at = told.target, told.after, now
        self._step, self._formed, self._well = told.step, told.formed, told.well
        self._draining, self.over = told.draining, told.over
        self.checkpoint, self.adding_up = told.checkpoint, told.adding_up
        self.know(told.facts)
        self._losses = dict(losses)
        since = [s for s, (g, _) in losses.items() if g >= told.generation]
        self.pace.begun(max([told.step, *since]), now)
        for name, error in told.errors.items():
            self.failures.said(name, error)
        for failure in told.failed:
            at, began = now - wall + failure.at, now - wall + failure.since
            self.failures.count(replace(failure, at=at, since=began))
            if failure.at < committed_at:
                self.failures.progressed()
        if self.phase not in ("draining", "ending"):
            taken = {m.slot for m in self.members.values() if m.is_there}
            for slot in range(settings.most + settings.spares):
                if slot not in taken:
                    self.failures.due[slot] = now

    # What is known.

    def add_up(self, by: str, why: str) -> tuple[str, str]:
        """How gradients are added up and why: what a process said first holds for all.

        Args:
            by: ``"messages"`` or ``"collectives"``; empty of a process that only asks.
            why: for a user.
        """
        if by and not self.adding_up[0]:
            self.adding_up = by, why
            self._record("adding_up", by=by, why=why)
        return self.adding_up

    def hosts(self) -> int:
        """On how many hosts members will run, as far as is known by now."""
        most = self.settings.most
        if not self.placed:
            return 1
        room = max(self.agents.values(), default=1)
        return min(most, max(len({*self.agents, *self.awaited}), -(-most // room)))

    def _there(self) -> list[Member]:
        return [m for m in self.members.values() if m.is_there]

    def _taking_part(self) -> list[Member]:
        """Members of the generation that are there and have not failed."""
        found = [self.members[name] for name in self.active]
        return [m for m in found if m.status not in ("failed", "gone")]

    def _are_coming(self) -> bool:
        """Processes start that may take part."""
        there = any(m.status in ("starting", "registered") for m in self._there())
        return there or bool(self._starting)

    def _is_finishing(self) -> bool:
        return any(m.status == "finished" for m in self.members.values())

    def _where(self) -> str:
        if self.checkpoint:
            return f". The last checkpoint is {self.checkpoint}"
        return ". No checkpoint was written"

    def _agents_told(self) -> str:
        """Which agents are there and which are missing; nothing in a run without."""
        if not self.placed:
            return ""
        there = [f"{name} ({counted(room)})" for name, room in self.agents.items()]
        missing = sorted(self.awaited)
        said = f"; agents that are there: {', '.join(there) or 'none'}"
        return said + (f"; missing: {', '.join(missing)}" if missing else "")

    def _limit(self, member: Member) -> float | None:
        """How long what a member does may take; None where it waits for others."""
        name = DEADLINES.get(member.phase, STEP)
        if name == STEP:
            return self.pace.limit()
        return None if name is None else float(getattr(self.settings, name))

    # What is to be done.

    def _say(self, name: str, kind: str, **fields: Any) -> None:
        self._effects.append(Send(name=name, message=Message(kind=kind, fields=fields)))

    def _record(self, event: str, **fields: object) -> None:
        self._effects.append(WriteEvent(event=event, fields=fields))
