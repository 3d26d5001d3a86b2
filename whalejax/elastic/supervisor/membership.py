"""Who takes part in a run: members, leases, generations. Decisions only.

No socket, process or clock is touched here: what happened comes in with the time of it,
and what is to be done comes out as effects, so that every order of events can be tried
in a test with a clock of its own.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from typing import Final

from whalejax.distributed.launch_env import ENDS_FOR_ANOTHER
from whalejax.elastic.facts import difference, told_facts
from whalejax.elastic.phases import COMPUTING, STOPPED
from whalejax.elastic.supervisor.endings import Ending, exit_text
from whalejax.elastic.supervisor.failures import Failure
from whalejax.elastic.supervisor.generations import Generations
from whalejax.elastic.supervisor.history import History
from whalejax.elastic.supervisor.member_record import Member
from whalejax.elastic.supervisor.run_state import AT_STEPS as AT_STEPS
from whalejax.elastic.supervisor.run_state import IN_GENERATIONS as IN_GENERATIONS
from whalejax.elastic.supervisor.run_state import MODE as MODE
from whalejax.elastic.wire.framing import Message


_SUSPECT_SECONDS: Final = 1.0
"""How long the end of a member may lag behind that of its connections."""

_ERROR_SIGNALS: Final = (
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGSEGV,
)
"""Of which a process dies by a fault of its own; others are sent to it."""


class Membership(Generations):
    """The members of a run and the generation they are in.

    What happens comes in by its methods; ``effects`` gives what is to be done.
    """

    # What happens.

    def begin(self, now: float) -> None:
        """Start the processes of this machine."""
        for slot in range(self.settings.most + self.settings.spares):
            self.failures.due[slot] = now
        self.tick(now)

    def go_on(
        self,
        now: float,
        told: History,
        losses: Mapping[int, tuple[int, float]],
        *,
        wall: float = 0.0,
        committed_at: float = 0.0,
    ) -> None:
        """Go on from a journal, with what was under way; see ``resume``."""
        self.resume(now, told, losses, wall=wall, committed_at=committed_at)
        if self.over is not None:
            self._end_again()
        elif self._draining and self.phase != "draining":
            self._begin_draining(now)

    def heard(self, now: float, name: str, message: Message) -> None:
        """A member said something; ``name`` is the one it was registered under.

        What it repeats, because it did not know that it was heard, is left out.
        """
        member = self.members.get(name)
        if member is None or not member.is_there:
            self._say(name, "over", why="this member was given up", well=False)
            return
        member.heard_at = now
        fields = dict(message.fields)
        number = fields.pop("number", 0)
        if number and number <= member.reported:
            return
        member.reported = max(member.reported, number)
        getattr(self, f"_{message.kind}")(now, member, **fields)
        self._consider(now)

    def exited(self, now: float, name: str, status: int | None, said: str = "") -> None:
        """A process of this machine has ended.

        Args:
            now: the time.
            name: of the member.
            status: of the process; None where nobody can know.
            said: the end of its log.
        """
        member = self.members.get(name)
        if member is None or not member.is_there:
            return
        self._miss_checkpoint(member, status)
        how = self._how_ended(member, status)
        if how is None:
            why = f"its process ended {exit_text(status)}"
            fails = status is not None and (status > 0 or -status in _ERROR_SIGNALS)
            fails = fails and status != ENDS_FOR_ANOTHER
            fails = fails or member.status == "failed"
            if fails and self.restarts and len(self.active) > 1:
                why += ", which may follow from the loss of another"
            how = Ending.FAILED if fails else Ending.LOST
            self._lose(now, member, why, said, how=how)
        else:
            well = name in self.active and how is Ending.COMPLETE
            self._record("ended", name=name, status=status, how=how, well=well)
            member.becomes("gone", now)
            if well:
                self._well.add(name)
            if self.restarts and well:
                pass  # It has done its work.
            elif member.slot is not None and self.phase not in ("draining", "ending"):
                again = now + self.settings.hold_seconds
                self.failures.due.setdefault(member.slot, again)
        if self.restarts and self.active and self._well.issuperset(self.active):
            self._complete(now)
        self._consider(now)

    def refused(self, now: float, name: str, why: str) -> None:
        """A process that has not joined cannot be run with what it was given.

        All are given the same. Where another has joined, it is this one that differs,
        and it fails like any other.

        Args:
            now: the time.
            name: of the member.
            why: for a user.
        """
        member = self.members[name]
        self._failed(now, member, why)
        joined = any(m.token for m in self.members.values())
        if joined or self._formed or self.phase != "gathering":
            return
        member.becomes("gone", now)
        self._record("ended", name=name, status=None, how=Ending.FAILED, well=False)
        self._end(now, Ending.REFUSED, why)

    def tick(self, now: float) -> None:
        """Time has passed."""
        stood = self._lease.turn(now)
        if stood:
            self._stood_still(now, stood)
        for member in [*self.members.values()]:
            why = self._overdue(now, member)
            if why:
                self._lose(now, member, why)
        self._check_step(now)
        self._start_due(now)
        self._consider(now)

    def _stood_still(self, now: float, seconds: float) -> None:
        """The supervisor was frozen, and could not have heard of anybody meanwhile."""
        for member in self._there():
            for name in ("heard_at", "moved_at", "since"):
                at = getattr(member, name)
                setattr(member, name, min(at + seconds, max(at, now)))
        self.pace.at = min(self.pace.at + seconds, now)
        self._asked_at = min(self._asked_at + seconds, now)
        if self._short_since is not None:
            self._short_since = min(self._short_since + seconds, now)
        if self._suspected_at is not None:
            self._suspected_at = min(self._suspected_at + seconds, now)

    # What members say.

    def refusal(self, name: str, message: Message) -> str:
        """Why a process cannot take part, or nothing.

        Args:
            name: that it would go by.
            message: a checked ``"register"``.
        """
        known = self.members.get(name)
        if known is not None and not known.is_there:
            return "this member was given up, and its generation is over"
        if self.phase == "ending" and known is None:
            return "the run is over"
        return (
            difference(told_facts(message.fields), self._facts) if self._facts else ""
        )

    def register(
        self, now: float, message: Message, name: str, slot: int | None
    ) -> str:
        """A member introduces itself, first or again; why it is refused, or nothing.

        Args:
            now: the time.
            message: a checked ``"register"``.
            name: that it goes by.
            slot: of a process that was started here.
        """
        told = message.fields
        why = self.refusal(name, message)
        if why:
            self._record("refused", name=name, why=why)
            return why
        if not self._facts:
            facts = told_facts(told)
            self.know(facts)
            self._record("facts", **facts)
        known = self.members.get(name)
        if known is None:
            known = self.members[name] = Member(name=name, slot=slot, since=now)
        known.pid = known.pid or (told["pid"] if slot is not None else 0)
        known.host, known.port, known.token = told["host"], told["port"], told["token"]
        known.step, known.connected, known.heard_at = told["step"], True, now
        if known.status == "starting":
            known.becomes("registered", now)
        ahead = told["generation"] > self.generation
        self.generation = max(self.generation, told["generation"])
        self._record(
            "registered",
            name=name,
            host=known.host,
            step=known.step,
            token=known.token,
            generation=told["generation"],
        )
        self._ask_again(now, known, ahead=ahead)
        self._consider(now)
        return ""

    def _ask_again(self, now: float, member: Member, *, ahead: bool) -> None:
        """What a member may have missed while it was not connected."""
        if self.phase == "ending":
            self._dismiss(now, member)
        elif member.released_at is not None:
            self._release(now, member)
        elif ahead and self.phase == "draining":
            self._ask(now, self._target, -1, phase="draining")
        elif ahead and self.phase in ("preparing", "running"):
            self._change(now, -1)  # The journal lacks its generation.
        elif self.phase in ("gathering", "preparing", "draining"):
            if member.name in self._target:
                self._say_prepare(member.name)

    def _beat(
        self, now: float, member: Member, phase: str, step: int, done: int
    ) -> None:
        if (phase, done) != (member.phase, member.done):
            member.phase, member.done, member.moved_at = phase, done, now
        member.step = max(member.step, step)
        self._notice_beyond(member, phase, step)
        waited = now - self.pace.at > 2 + 2 * self.settings.beat_seconds
        if phase == STOPPED and self.phase == "running" and waited:
            if member.name in self.active:  # It never heard that this one began.
                self._change(now, -1)

    # Losing members.

    def _overdue(self, now: float, member: Member) -> str:
        """Why a member is given up now, or nothing."""
        settings, waited = self.settings, now - member.since
        if self.phase == "ending":
            return ""  # The loop ends what has not ended in time.
        match member.status:
            case "starting":
                if member.slot is not None and waited > settings.start_seconds:
                    return f"it said nothing in {waited:.0f} s after its start"
                return ""
            case "registered" if waited > settings.compile_seconds:
                return f"it was not ready for steps after {waited:.0f} s"
            case "gone":
                return ""
        silent = now - member.heard_at
        if silent > settings.lease_seconds:
            return f"it was silent for {silent:.1f} s"
        released = member.released_at
        if released is not None and now - released > settings.finish_seconds:
            return f"it did not end in {now - released:.0f} s after it was let go"
        return ""

    def _check_step(self, now: float) -> None:
        """Give up who holds a step up; connect anew where nobody can be named."""
        at = self._suspected_at
        if self.restarts:
            return  # Steps are between the processes, which watch over them.
        if at is not None and self.phase == "running" and now - at > _SUSPECT_SECONDS:
            self._connect_anew(now)
        if self.phase != "running":
            return
        there = [m for m in self._taking_part() if m.status == "active"]
        limits = {m.name: self._limit(m) for m in there}
        for member in there:
            limit = limits[member.name]
            if limit is not None and now - member.moved_at > limit:
                step = member.phase in (COMPUTING, "")
                what = "in a step" if step else f"({member.phase})"
                why = f"it did not move on {what} for {limit:.0f} s"
                self._lose(now, member, why)
        moved_at = max([self.pace.at, *(m.moved_at for m in there)])
        limit = self.pace.limit()
        waits = all(limits[m.name] is None for m in there)
        if there and waits and now - moved_at > limit:
            self._record("stuck", seconds=limit, members=list(self.active))
            self.failures.count(
                Failure(
                    at=now,
                    since=self.pace.at,
                    name="all members",
                    why="waited for each other",
                )
            )
            self._check_budget(now)
            self._change(now, -1)

    def _connect_anew(self, now: float) -> None:
        """Members cannot reach each other, though all reach the supervisor.

        The first time they try again. Of those whose link breaks again, one is given
        up: who has most such links, and of two alike not the one with the newer state.
        """
        there = {m.name: m for m in self._taking_part()}
        links = {link for link in self._broken_links if link <= there.keys()}
        if any(not there[name].connected for link in links for name in link):
            self._suspected_at = now  # It is coming back, or its lease will tell.
            return
        self._suspected_at = None
        again = links & self._reconnected_links
        self._reconnected_links |= links
        if again:
            ends = Counter(name for link in again for name in link)
            order = [*there]
            worst = max(ends, key=lambda n: (ends[n], -there[n].step, order.index(n)))
            self._lose(now, there[worst], "other members cannot reach it")
        self._change(now, -1)
