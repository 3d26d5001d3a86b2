"""Who takes part in a run: members, leases, generations. Decisions only.

No socket, process or clock is touched here: what happened comes in with the time of it,
and what is to be done comes out as effects, so that every order of events can be tried
in a test with a clock of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from whalejax.elastic.assignment import dealt, ranks, repaired
from whalejax.elastic.facts import difference, told_facts
from whalejax.elastic.phases import (
    BETWEEN,
    COMPUTING,
    FETCHING,
    RESTORING,
    SAVING,
    STOPPED,
)
from whalejax.elastic.supervisor.endings import Ending
from whalejax.elastic.supervisor.history import History, Phase
from whalejax.elastic.supervisor.member_record import Kill, Member, Start
from whalejax.elastic.supervisor.roster import Roster
from whalejax.elastic.supervisor.run_state import COLLECTIVES as COLLECTIVES
from whalejax.elastic.supervisor.run_state import MODE as MODE
from whalejax.elastic.wire.framing import Message


_LASTING_SECONDS: Final = 60.0
"""A generation by collectives that lasted so long did something."""

_SUSPECT_SECONDS: Final = 1.0
"""How long the end of a member may lag behind that of its connections."""

_PAUSE_SECONDS: Final = 1.0
"""Between two ticks: more, and it was this process that stood still."""

_LONG: Final = frozenset({BETWEEN, RESTORING, SAVING})
"""Phases that stop at nothing until they are over."""

_PREPARE_STEPS: Final = 3


class Membership(Roster):
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
        how = self._how_ended(member, status)
        if how is None:
            self._lose(now, member, f"its process ended with status {status}", said)
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

    def tick(self, now: float) -> None:
        """Time has passed."""
        before, self._ticked_at = self._ticked_at, now
        if before is not None and now - before > _PAUSE_SECONDS:
            self._stood_still(now, now - before)
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

    def terminate(self, now: float) -> None:
        """The run is to end: members stop at a step, and one saves its state."""
        if self._draining or self.phase == "ending":
            return
        self._draining = True
        self._record("draining", step=self.pace.step)
        self._begin_draining(now)

    def _begin_draining(self, now: float) -> None:
        there = [m for m in self._taking_part() if m.status == "active"]
        # What members that have not come back yet hold is not known.
        newest = max([self.pace.step, *(m.step for m in there)])
        if self.restarts or not there or newest < 0:
            text = f"the run was told to end before its first step{self._where()}"
            if self.restarts and self._formed:
                text = "the run was told to end"
            self._end(now, Ending.INTERRUPTED, text)
            return
        self._ask(now, [m.name for m in there], self._boundary(), phase="draining")

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
            self.failures.count(now, "all members", "waited for each other", "")
            self._check_budget(now)
            self._change(now, -1)

    def _connect_anew(self, now: float) -> None:
        """Members cannot reach each other, though all reach the supervisor.

        The first time they try again; then who is named most often is given up.
        """
        self._reconnected += 1
        self._suspected_at = None
        there = [m.name for m in self._taking_part()]
        if self._reconnected > 1 and len(there) > 1:
            times = self._suspects
            worst = max(there, key=lambda name: (times[name], there.index(name)))
            self._suspects.clear()
            self._lose(now, self.members[worst], "other members cannot reach it")
        self._change(now, -1)

    def _lose(self, now: float, member: Member, why: str, said: str = "") -> None:
        """Give a member up, and end it before its work is given to others."""
        if not member.is_there:
            return
        over = self.phase in ("draining", "ending")
        counts = not member.leaving and not over
        member.becomes("gone", now)
        self._record(
            "lost", name=member.name, why=why, step=self.pace.step, counts=counts
        )
        if member.pid:
            self._effects.append(Kill(name=member.name, pid=member.pid))
        self._say(member.name, "over", why=f"it was given up: {why}", well=False)
        if over:
            return
        if counts:
            self.failures.count(now, member.name, why, said)
            self._check_budget(now)
        if member.slot is not None:
            self.failures.due[member.slot] = now + self.failures.hold(now, member.slot)
        if self.restarts and self.phase == "running" and member.name in self.active:
            self._restart_world(now)

    def _restart_world(self, now: float) -> None:
        """End those that are left of a generation by collectives, to start anew."""
        if now - self.pace.at > _LASTING_SECONDS:
            self.failures.progressed()
        self.phase, self._short_since = "gathering", now
        self._record("restarting", members=list(self.active))
        for name in self.active:
            member = self.members[name]
            if member.is_there:
                member.becomes("gone", now)
                why = "the world starts again"
                self._record("ended", name=name, why=why, how=Ending.DRAINED)
                self._effects.append(Kill(name=name, pid=member.pid))
            if member.slot is not None:
                self.failures.due.setdefault(member.slot, now)

    def _check_budget(self, now: float) -> None:
        why = self.failures.exceeded(now)
        if why:
            self._end(now, Ending.FAILED, f"{why}{self._where()}")

    def _start_due(self, now: float) -> None:
        if self.phase in ("draining", "ending") or self._is_finishing():
            return
        left = self._well or any(m.status == "left" for m in self._taking_part())
        if left and not self.restarts:
            return
        for slot, due in [*self.failures.due.items()]:
            if due <= now:
                del self.failures.due[slot]
                self._effects.append(Start(slot=slot))

    # Generations.

    def _consider(self, now: float) -> None:
        """Form a generation, or end, where it is time for that."""
        if self._all_leave():
            self.terminate(now)
        if self._left_alike(now):
            return
        match self.phase:
            case "gathering":
                self._gather(now)
            case "preparing" | "draining":
                self._await_prepared(now)
            case "running":
                self._watch(now)

    def _all_leave(self) -> bool:
        """Everybody who has the state was told to leave, and nobody can take it."""
        there = [m for m in self._taking_part() if m.status == "active"]
        if self.restarts or not there or self._candidates():
            return False
        return all(m.leaving for m in there)

    def _candidates(self) -> list[str]:
        """Who could take part now: those that do, then those that are ready."""
        there = [m for m in self._there() if not m.leaving]
        took = [m.name for m in there if m.status in ("active", "finished")]
        if self._is_finishing():
            return took
        fresh = [m.name for m in there if m.status == "ready"]
        return (took + fresh)[: self.settings.most]

    def _gather(self, now: float) -> None:
        settings, found = self.settings, self._candidates()
        if self._short_since is None:
            self._short_since = now
        waited = now - self._short_since
        self._release_stopped(now)
        coming = any(m.status in ("starting", "registered") for m in self._there())
        if len(found) >= settings.least or (found and self._is_finishing()):
            if (
                len(found) == settings.most
                or self._is_finishing()
                or (self._formed and not self.restarts)
                or not (coming or self.failures.due)
                or waited > settings.gather_seconds
            ):
                self._change(now, -1)
            return
        # Who starts or compiles has deadlines of its own.
        if waited > settings.wait_seconds and not coming:
            gone = [m for m in self.members.values() if not m.is_there]
            names = ", ".join(m.name for m in gone) or "nobody"
            why = (
                f"{len(found)} of at least {settings.least} members are there, and no "
                f"other came in {waited:.0f} s; gone are {names}{self._where()}"
            )
            self._end(now, Ending.LOST, why)

    def _release_stopped(self, now: float) -> None:
        """Let those go that asked to and have stopped, unless they are needed."""
        there = self._taking_part()
        newest = max((m.step for m in there if not m.leaving), default=-1)
        for member in there:
            stopped = member.leaving and member.prepared == self.generation
            if stopped and member.released_at is None and member.step <= newest:
                self._release(now, member)

    def _watch(self, now: float) -> None:
        if self.restarts:
            return
        there = {m.name: m for m in self._taking_part()}
        if any(name not in there for name in self.active):
            self._change(now, -1)
            return
        if all(there[name].status == "finished" for name in self.active):
            self._complete(now)
            return
        # With the short run's end in sight nobody joins any more.
        boundary = self._boundary()
        if self.steps and boundary >= self.steps:
            return
        found = self._candidates()
        leaves = any(there[name].leaving for name in self.active)
        if set(found) != set(self.active):
            if leaves or len(found) >= self.settings.least:
                self._change(now, boundary)

    def _left_alike(self, now: float) -> bool:
        """Members whose loops were left; whether nothing else is to be done.

        Where all were left at one step, the run is complete as soon as a process has
        ended well: an error in the loop's body leaves it too. One that was left alone
        has failed.
        """
        left = [m for m in self._taking_part() if m.status == "left"]
        if self.restarts or self.phase in ("draining", "ending"):
            return False
        if not left and not self._well:
            return False
        others = [m for m in self._taking_part() if m.status == "active"]
        if not others:
            waited = min((now - m.since for m in left), default=0.0)
            if waited > self.settings.finish_seconds or (self._well and not left):
                self._complete(now)
            return bool(left) or self.phase == "ending"
        if self._goes_on():
            for name in [m.name for m in left] + sorted(self._well):
                member = self.members[name]
                why = f"its loop was left at step {member.step}, where others go on"
                if member.is_there:
                    self._lose(now, member, why)
                else:
                    self.failures.count(now, name, why, "")
                    self._check_budget(now)
            self._change(now, -1)
            return False
        asked = [self.members[name].status for name in self._target]
        steps = [self.members[n].step for n in {*self._well, *(m.name for m in left)}]
        gone = len(others) + len(left) + len(self._well) < len(self.active)
        behind = any(m.step < min(steps) for m in others)
        if "left" in asked or (self.phase == "running" and gone and behind):
            # Who is left may wait for the part of one that is gone.
            self._change(now, -1)
        return self.phase == "running"

    def _boundary(self) -> int:
        return self.pace.boundary(max((m.step for m in self._there()), default=0))

    def _change(self, now: float, after: int) -> None:
        """Ask for a new generation of those who are there.

        Args:
            now: the time.
            after: the step behind which members stop; -1 stops them at once.
        """
        if self.phase == "ending":
            return
        found = self._candidates()
        leaving = [m.name for m in self._taking_part() if m.status == "active"]
        leaving = [n for n in leaving if n not in found and self.members[n].leaving]
        target = ranks(self.active, found) + leaving
        enough = len(found) >= self.settings.least or self._is_finishing()
        self._ask(now, target, after, phase="preparing" if enough else "gathering")
        if not enough:
            self._short_since = now
            self._record("short", members=found, least=self.settings.least)

    def _ask(self, now: float, target: list[str], after: int, *, phase: Phase) -> None:
        self.generation += 1
        self.phase, self._after, self._asked_at = phase, after, now
        self._suspected_at = None
        self._target, self._well = list(target), set()
        self._record(
            "preparing",
            generation=self.generation,
            members=list(target),
            after=after,
            phase=phase,
        )
        for name in target:
            self._say_prepare(name)

    def _say_prepare(self, name: str) -> None:
        self._say(name, "prepare", generation=self.generation, after=self._after)

    def _await_prepared(self, now: float) -> None:
        there = {m.name: m for m in self._there()}
        asked = [name for name in self._target if name in there]
        if len(asked) < len(self._target) and self.phase != "draining":
            self._change(now, -1)
            return
        late = [n for n in asked if there[n].prepared != self.generation]
        waited = now - self._asked_at
        if not late:
            self._drain(now) if self.phase == "draining" else self._form(now)
            return
        stuck = [n for n in late if self._is_late(now, there[n])]
        for name in stuck:
            why = f"it did not stop for generation {self.generation} in"
            self._lose(now, there[name], f"{why} {waited:.0f} s")
        if not stuck and self._after >= 0 and waited > self.pace.patience(self._after):
            # Some stopped before others could hear of it, and these wait for them.
            self._ask(now, asked, -1, phase=self.phase)

    def _is_late(self, now: float, member: Member) -> bool:
        """It had time enough to stop, whatever it did when it was asked."""
        settings, since = self.settings, self._asked_at
        limit = max(settings.prepare_seconds, _PREPARE_STEPS * self.pace.median)
        if member.phase in _LONG:
            limit = max(limit, self._limit(member) or 0.0)
            since = max(since, member.moved_at)
        elif member.phase == FETCHING:
            since = max(since, member.moved_at)
        return now - since > limit

    def _form(self, now: float) -> None:
        """All have stopped: begin the generation."""
        asked = [self.members[name] for name in self._target]
        step = max(m.step for m in asked)
        holds = any(m.step == step and not m.leaving for m in asked)
        if step < 0 or holds:
            for member in asked:
                if member.leaving:
                    self._release(now, member)
            asked = [m for m in asked if not m.leaving]
        # Else who leaves stays for a step, to hand the state over.
        self._begin(now, asked, step)

    def _begin(self, now: float, members: list[Member], step: int) -> None:
        holders = [m.name for m in members if m.step == step and step >= 0]
        holders = holders or [members[0].name]
        behind = [m.name for m in members if m.name not in holders]
        sources = {n: holders[i % len(holders)] for i, n in enumerate(behind)}
        seconds = {m.name: m.seconds for m in members}
        held = {m.name: m.held for m in members if m.step == step}
        count, names = self.micro_batches, [m.name for m in members]
        self.active, self.phase, self._target, self._after = names, "running", [], -1
        self._step, self._formed, self._well = step, True, set()
        self._short_since = None
        self.pace.begun(step, now)
        self._record(
            "begun",
            generation=self.generation,
            members=names,
            step=step,
            **_sizes(held),
        )
        fields = {
            "generation": self.generation,
            "members": [[m.name, m.host, m.port] for m in members],
            "step": step,
            "sources": sources,
            "first": repaired(names, seconds, held, count),
            "later": dealt(names, seconds, count),
        }
        for member in members:
            member.held, member.beyond = (), 0
            member.moved_at = now
            if member.status != "finished":
                member.becomes("active", now)
            self._say(member.name, "begin", **fields)

    # The end.

    def _drain(self, now: float) -> None:
        there = [self.members[n] for n in self._target if self.members[n].is_there]
        newest = max((m.step for m in there), default=-1)
        if newest >= 0:
            why = f"the run was told to end, after step {newest}"
            self._end(now, Ending.DRAINED, why)
        else:
            why = "the run was told to end, and its members were lost before they"
            self._end(now, Ending.INTERRUPTED, f"{why} stopped{self._where()}")

    def _complete(self, now: float) -> None:
        self._end(now, Ending.COMPLETE, "")


def _sizes(held: Mapping[str, Iterable[tuple[int, int]]]) -> dict[str, object]:
    """How many micro-batches of the step that begins are done already."""
    done = sum(end - first for nodes in held.values() for first, end in nodes)
    return {"kept_micro_batches": done}
