"""What a supervisor knows of its members, and what they say of themselves.

The list only: who takes part in a generation is decided in ``membership``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal

from whalejax.elastic.supervisor.failures import Failures
from whalejax.elastic.supervisor.member_record import (
    Commit,
    Effect,
    End,
    Kill,
    Member,
    Record,
    Send,
)
from whalejax.elastic.supervisor.pace import Pace
from whalejax.elastic.supervisor.settings import Settings
from whalejax.elastic.wire.framing import Message


Phase = Literal["gathering", "preparing", "running", "draining", "ending"]

_LOSSES_KEPT: Final = 10_000


class Roster:
    """The members of a run, by what they and the journal told.

    Attributes:
        settings: how it decides.
        generation: its number; a new one is formed when members are lost or come.
        phase: ``"gathering"`` members, ``"preparing"`` a generation, ``"running"``.
        members: all that ever were, by name.
        active: those that take part, by rank.
        pace: the steps that were committed.
        steps: of the whole run; 0 until a member has said.
        micro_batches: of a step.
        checkpoint: the newest that was written.
        restarts: a loss ends all members, which start again from a checkpoint.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.generation = 0
        self.phase: Phase = "gathering"
        self.members: dict[str, Member] = {}
        self.active: list[str] = []
        self.pace = Pace(settings)
        self.steps = self.micro_batches = 0
        self.failures = Failures(settings)
        self._facts: Mapping[str, str] = {}
        self.checkpoint = ""
        self.restarts = False
        self._suspected_at: float | None = None
        self._suspects: Counter[str] = Counter()
        self._reconnected = 0
        self._effects: list[Effect] = []
        self._losses: dict[int, float] = {}

    def effects(self) -> list[Effect]:
        """What is to be done, in this order; each is given once."""
        found, self._effects = self._effects, []
        return found

    # What a journal tells.

    def know(self, facts: Mapping[str, str]) -> None:
        """Take what all members must have in common."""
        self._facts = facts
        self.steps = int(facts["steps"])
        self.micro_batches = int(facts["micro-batches"])

    def begun(self, names: list[str], step: int) -> None:
        """A generation had begun with these members, by rank, at this step."""
        self.active, self.phase = list(names), "running"
        self.pace.step = step
        for name in names:
            if self.members[name].status != "finished":
                self.members[name].status = "active"

    def recovered(self, now: float, losses: Mapping[int, float]) -> None:
        """All was told: go on from here.

        Args:
            now: the time.
            losses: of steps that were committed and written down.
        """
        self._losses = dict(losses)
        self.pace.begun(self.pace.step, now)
        taken = {m.slot for m in self.members.values() if m.is_there}
        for slot in range(self.settings.most + self.settings.spares):
            if slot not in taken:
                self.failures.due[slot] = now

    # What happens.

    def started(
        self, now: float, name: str, slot: int, pid: int, began: str = ""
    ) -> None:
        """A process was started.

        Args:
            now: the time.
            name: of its member.
            slot: that it fills.
            pid: its number.
            began: when it began, by which a later supervisor knows it.
        """
        self.members[name] = Member(name=name, slot=slot, pid=pid, since=now)
        self.members[name].heard_at = now
        self._record("started", name=name, slot=slot, pid=pid, began=began)

    def disconnected(self, now: float, name: str) -> None:
        """A connection ended; its member may come back while its lease lasts."""
        member = self.members.get(name)
        if member is not None and member.is_there:
            member.connected = False

    # What members say.

    def _ready(self, now: float, member: Member) -> None:
        if member.status == "registered":
            member.becomes("ready", now)
            self._record("ready", name=member.name)

    def _prepared(
        self, now: float, member: Member, generation: int, step: int, held: Any
    ) -> None:
        if generation != self.generation:
            return
        member.prepared, member.step = generation, step
        member.held = [(first, end) for first, end in held]

    def _committed(
        self,
        now: float,
        member: Member,
        generation: int,
        step: int,
        loss: float,
        seconds: float,
        parts: Mapping[str, Any],
    ) -> None:
        member.step = max(member.step, step)
        member.seconds = seconds
        member.moved_at = now
        if step not in self._losses:
            self._effects.append(
                Commit(step=step, generation=generation, loss=loss, parts=parts)
            )
        self._compare(member, step, loss)
        if step > self.pace.step:
            self.pace.committed(step, now)
            self.failures.progressed()
            self._suspects.clear()
            self._reconnected = 0

    def _compare(self, member: Member, step: int, loss: float) -> None:
        """End a run whose members come to other losses from the same sums."""
        known = self._losses.setdefault(step, loss)
        if known != loss and not (math.isnan(known) and math.isnan(loss)):
            why = (
                f"{member.name} came to the loss {loss!r} in step {step}, where others "
                f"came to {known!r} from the same sums: its processor or memory is "
                f"not to be trusted{self._where()}"
            )
            self._stop_all(why, saves=False)
            self._end(1, why)
        while len(self._losses) > _LOSSES_KEPT:
            del self._losses[next(iter(self._losses))]

    def _suspect(
        self, now: float, member: Member, generation: int, name: str, why: str
    ) -> None:
        self._record("suspect", name=name, by=member.name, why=why)
        if generation == self.generation:
            self._suspects.update((name, member.name))
            if self._suspected_at is None:
                self._suspected_at = now

    def _leaving(self, now: float, member: Member, why: str) -> None:
        if not member.leaving:
            member.leaving = True
            self._record("leaving", name=member.name, why=why)
            if member.status in ("registered", "ready"):
                self._say(member.name, "over", why="drained", well=True)

    def _finished(self, now: float, member: Member, step: int) -> None:
        member.step = max(member.step, step)
        if member.status != "finished":
            member.becomes("finished", now)
            self._record("finished", name=member.name, step=step)

    def _saved(self, now: float, member: Member, step: int, path: str) -> None:
        self.checkpoint = path
        self._record("saved", name=member.name, step=step, path=path)

    def _not_saved(self, now: float, member: Member, step: int, why: str) -> None:
        self._record("not_saved", name=member.name, step=step, why=why)

    def _failed(self, now: float, member: Member, why: str) -> None:
        self._record("failed", name=member.name, why=why)
        self.failures.said(member.name, why)

    # What is known.

    def _there(self) -> list[Member]:
        return [m for m in self.members.values() if m.is_there]

    def _is_finishing(self) -> bool:
        return any(m.status == "finished" for m in self.members.values())

    def _where(self) -> str:
        if self.checkpoint:
            return f". The last checkpoint is {self.checkpoint}"
        return ". No checkpoint was written"

    # What is to be done.

    def _stop_all(self, why: str, *, saves: bool) -> None:
        there = self._there()
        newest = max((m.step for m in there), default=-1)
        saver = next((m for m in there if m.step == newest and newest >= 0), None)
        for member in there:
            mine = saves and member is saver
            self._say(member.name, "stop", why=why, saves=mine, well=False)

    def _end(self, status: int, text: str) -> None:
        if self.phase != "ending":
            self.phase = "ending"
            self._record("ending", status=status, why=text)
            for member in self._there():
                if member.status == "starting":  # It would ask in vain.
                    member.leaving = True
                    self._effects.append(Kill(name=member.name, pid=member.pid))
            self._effects.append(End(status=status, text=text))

    def _say(self, name: str, kind: str, **fields: Any) -> None:
        self._effects.append(Send(name=name, message=Message(kind=kind, fields=fields)))

    def _record(self, event: str, **fields: object) -> None:
        self._effects.append(Record(event=event, fields=fields))
