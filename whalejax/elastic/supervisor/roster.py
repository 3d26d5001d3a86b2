"""What members say of themselves, and what is written down of it.

The list only: who takes part in a generation is decided in ``membership``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from whalejax.elastic.phases import IN_A_STEP
from whalejax.elastic.supervisor.endings import Ending
from whalejax.elastic.supervisor.member_record import Member, Release, StepCommit
from whalejax.elastic.supervisor.run_ends import RunEnds


_LOSSES_KEPT: Final = 10_000

_BEATS_BEYOND: Final = 2
"""After so many beats from a later step a member has not left its loop."""


class Roster(RunEnds):
    """The members of a run, and what they say."""

    # What happens.

    def started(
        self,
        now: float,
        name: str,
        slot: int,
        pid: int,
        began: str = "",
        *,
        agent: str = "",
        machine: str = "",
    ) -> None:
        """A process was started, and waits until that is written down.

        Args:
            now: the time.
            name: of its member.
            slot: that it fills.
            pid: its number.
            began: when it began, by which a later supervisor knows it.
            agent: that holds it; empty for none.
            machine: of the process.
        """
        self._starting.discard(slot)
        self.members[name] = Member(
            name=name,
            slot=slot,
            pid=pid,
            began=began,
            agent=agent,
            machine=machine,
            since=now,
            heard_at=now,
        )
        where = {"agent": agent, "machine": machine} if agent else {}
        self._record("started", name=name, slot=slot, pid=pid, began=began, **where)
        self._effects.append(Release(name=name))

    def not_started(self, now: float, slot: int, why: str) -> None:
        """A process could not be started; it is tried again.

        Args:
            now: the time.
            slot: that it would have filled.
            why: as the system said.
        """
        self._starting.discard(slot)
        self._record("not_started", slot=slot, why=why)
        self.failures.due[slot] = now + max(
            self.settings.hold_seconds, self.failures.hold(now, slot)
        )

    def unplaced(self, slot: int) -> None:
        """No agent has room for a process: it is started when one has."""
        self._starting.discard(slot)
        self._unplaced.add(slot)

    def started_later(self, at: float, slot: int) -> None:
        """A process is started later, when one that was given up has ended."""
        self._starting.discard(slot)
        self.failures.due[slot] = at

    def room(self, now: float) -> None:
        """An agent has room for further processes."""
        for slot in self._unplaced:
            self.failures.due.setdefault(slot, now)
        self._unplaced.clear()

    def agent_came(self, now: float, agent: str, host: str, room: int) -> None:
        """An agent joined the run, or came back.

        Args:
            now: the time.
            agent: its name.
            host: where its members are reached.
            room: processes that it may hold.
        """
        self._record("agent_joined", agent=agent, host=host, room=room)
        self.awaited.discard(agent)
        self.agents[agent] = room
        self.room(now)

    def agent_left(self, agent: str) -> None:
        """An agent was told to end, and holds no process any more."""
        self._record("agent_left", agent=agent)
        self.agents.pop(agent, None)

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
        known = self._losses.get(step)
        if known is None or generation > known[0]:
            self._losses[step] = generation, loss
            self._effects.append(
                StepCommit(step=step, generation=generation, loss=loss, parts=parts)
            )
        elif generation == known[0]:
            self._compare(now, member, step, loss, known[1])
        while len(self._losses) > _LOSSES_KEPT:
            del self._losses[next(iter(self._losses))]
        if step > self.pace.step:
            self.pace.committed(step, now)
            self.failures.progressed(step)
            self._reconnected_links.clear()

    def _compare(
        self, now: float, member: Member, step: int, loss: float, known: float
    ) -> None:
        """End a run whose members come to other losses from the same sums.

        A step that another generation redoes may be computed elsewhere, and so differ
        in its last bits; members of one generation add up the same numbers.
        """
        if known == loss or (math.isnan(known) and math.isnan(loss)):
            return
        why = (
            f"{member.name} came to the loss {loss!r} in step {step}, where others "
            f"came to {known!r} from the same sums: its processor or memory is "
            f"not to be trusted{self._where()}"
        )
        self._end(now, Ending.FAILED, why, saves=False)

    def _suspect(
        self, now: float, member: Member, generation: int, name: str, why: str
    ) -> None:
        self._record("suspect", name=name, by=member.name, why=why)
        known = self.members.get(name)
        if known is None or known.status in ("left", "failed", "gone"):
            return  # That it cannot be reached is known.
        if generation == self.generation:
            self._broken_links.add(frozenset((name, member.name)))
            if self._suspected_at is None:
                self._suspected_at = now

    def _leaving(self, now: float, member: Member, why: str) -> None:
        if member.leaving or member.status in ("finished", "left"):
            return
        member.leaving = True
        self._record("leaving", name=member.name, why=why)
        if member.status in ("registered", "ready"):
            self._release(now, member)

    def _release(self, now: float, member: Member) -> None:
        """Let a member go that asked to."""
        if member.released_at is None:
            member.released_at = now
        self._say(member.name, "over", why="drained", well=True)

    def _left(self, now: float, member: Member, step: int) -> None:
        """Its loop was left by the script: the same will hold of all, or of it alone.

        Losses are equal in all members, so that a condition on them is.
        """
        member.step = max(member.step, step)
        if member.status == "active":
            member.becomes("left", now)
            self._record("left", name=member.name, step=step)

    def _notice_beyond(self, member: Member, phase: str, step: int) -> None:
        """Count what tells that a member goes on where others have left their loops."""
        left = [m.step for m in self._taking_part() if m.status == "left"]
        left += [self.members[name].step for name in self._well]
        goes_on = left and member.status == "active" and phase in IN_A_STEP
        member.beyond = member.beyond + 1 if goes_on and step >= min(left) else 0

    def _goes_on(self) -> bool:
        """A member is in a step behind the one where others have left their loops."""
        return any(m.beyond >= _BEATS_BEYOND for m in self._taking_part())

    def _finished(self, now: float, member: Member, step: int) -> None:
        member.step = max(member.step, step)
        if member.status != "finished":
            member.becomes("finished", now)
            self._record("finished", name=member.name, step=step)

    def _written(self, now: float, member: Member, step: int) -> None:
        """It asks whether its checkpoint may take its name: not if it was given up."""
        self._say(member.name, "keep", step=step)

    def _saved(self, now: float, member: Member, step: int, path: str) -> None:
        self.checkpoint = path
        self._tell_last(member)
        self._record("saved", name=member.name, step=step, path=path)

    def _recovered(self, now: float, member: Member, step: int, source: str) -> None:
        """It took its state from somewhere: copies in memory, a checkpoint, or none."""
        self._record("recovered", name=member.name, step=step, source=source)
        self.pace.begun(step, now)

    def _note(self, now: float, member: Member, why: str) -> None:
        """Something that a user should know, such as of damaged checkpoints."""
        self._record("note", name=member.name, why=why)

    def _compiled_ahead(
        self, now: float, member: Member, count: int, seconds: float
    ) -> None:
        """The step of so many processes is in the cache, in case they come to be."""
        self._record("compiled_ahead", name=member.name, count=count, seconds=seconds)

    def _not_copied(self, now: float, member: Member, step: int, why: str) -> None:
        self._record("not_copied", name=member.name, step=step, why=why)

    def _tell_last(self, member: Member) -> None:
        """It has said what came of the last checkpoint, where that is what it wrote."""
        if self.over is not None and member.name == self.over.saver:
            self._saver_has_told = True

    def _not_saved(self, now: float, member: Member, step: int, why: str) -> None:
        self._tell_last(member)
        self._record("not_saved", name=member.name, step=step, why=why)

    def _failed(self, now: float, member: Member, why: str) -> None:
        """It ends by an error, and takes no part any more: the others do not wait."""
        self._record("failed", name=member.name, why=why)
        self.failures.said(member.name, why)
        member.becomes("failed", now)
        member.released_at = now
