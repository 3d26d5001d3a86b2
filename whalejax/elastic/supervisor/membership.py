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
from whalejax.elastic.supervisor.member_record import (
    Kill,
    Member,
    Start,
)
from whalejax.elastic.supervisor.roster import Phase, Roster
from whalejax.elastic.supervisor.settings import Settings
from whalejax.elastic.wire.framing import Message


MODE: Final = "mode"
COLLECTIVES: Final = "collectives in generations"
"""The fact of members that meet by the platform's collectives: one that is lost ends
the generation for all, and they start again from a checkpoint."""

_LASTING_SECONDS: Final = 60.0
"""A generation by collectives that lasted so long did something."""

_SUSPECT_SECONDS: Final = 1.0
"""How long the end of a member may lag behind that of its connections."""


STOPPED: Final = "stopped"
"""What a member does that has stopped for a generation and waits for it to begin."""

WAITING: Final = "waiting"
"""What one does that waits for the others in a step."""


class Membership(Roster):
    """The members of a run and the generation they are in.

    What happens comes in by its methods; ``effects`` gives what is to be done.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._target: list[str] = []
        self._after = -1
        self._asked_at = 0.0
        self._short_since: float | None = None
        self._well: set[str] = set()

    # What happens.

    def begin(self, now: float) -> None:
        """Start the processes of this machine."""
        for slot in range(self.settings.most + self.settings.spares):
            self.failures.due[slot] = now
        self.tick(now)

    def heard(self, now: float, name: str, message: Message) -> None:
        """A member said something; ``name`` is the one it was registered under."""
        member = self.members.get(name)
        if member is None or not member.is_there:
            self._say(name, "over", why="this member was given up", well=False)
            return
        member.heard_at = now
        getattr(self, f"_{message.kind}")(now, member, **message.fields)
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
        if self.restarts and status == 0 and member.status == "active":
            self._ended_well(now, member)
            return
        well = member.status == "finished" or member.leaving
        if well and (status in (0, None) or self.phase == "ending"):
            self._record("ended", name=name, status=status)
            member.becomes("gone", now)
            if member.slot is not None and self.phase not in ("draining", "ending"):
                self.failures.due[member.slot] = now + self.settings.hold_seconds
        else:
            self._lose(now, member, f"its process ended with status {status}", said)
        self._consider(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for member in [*self.members.values()]:
            why = self._overdue(now, member)
            if why:
                self._lose(now, member, why)
        self._check_step(now)
        self._start_due(now)
        self._consider(now)

    def terminate(self, now: float) -> None:
        """The run is to end: members stop at a step, and one saves its state."""
        if self.phase in ("draining", "ending"):
            return
        self._record("draining", step=self.pace.step)
        there = [m for m in self._there() if m.status == "active"]
        if not there:
            self._end(143, "ended before the first step")
            return
        self._ask(now, [m.name for m in there], self._boundary(), phase="draining")

    # What members say.

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
        known = self.members.get(name)
        if self.phase == "ending":
            return "the run is over"
        if known is not None and not known.is_there:
            return "this member was given up, and its generation is over"
        facts = told_facts(told)
        if not self._facts:
            self.know(facts)
            self._record("facts", **facts)
        why = difference(facts, self._facts)
        if why:
            self._record("refused", name=name, why=why)
            return why
        if known is None:
            known = self.members[name] = Member(name=name, slot=slot, since=now)
        known.pid = known.pid or (told["pid"] if slot is not None else 0)
        known.host, known.port = told["host"], told["port"]
        known.step, known.connected, known.heard_at = told["step"], True, now
        if known.status == "starting":
            known.becomes("registered", now)
        self.restarts = self._facts.get(MODE) == COLLECTIVES
        if known.status == "active" and told["generation"] > self.generation:
            self.generation = told["generation"]
        self._record("registered", name=name, host=known.host, step=known.step)
        self._ask_again(now, known)
        self._consider(now)
        return ""

    def _ask_again(self, now: float, member: Member) -> None:
        """What a member may have missed while it was not connected."""
        asked = self.phase in ("gathering", "preparing", "draining")
        if asked and member.name in self._target:
            self._say_prepare(member.name)

    def _beat(
        self, now: float, member: Member, phase: str, step: int, done: int
    ) -> None:
        if (phase, done) != (member.phase, member.done):
            member.phase, member.done, member.moved_at = phase, done, now
        member.step = max(member.step, step)
        waited = now - self.pace.at > 2 + 2 * self.settings.beat_seconds
        if phase == STOPPED and self.phase == "running" and waited:
            if member.name in self.active:  # It never heard that this one began.
                self._change(now, -1)

    # Losing members.

    def _overdue(self, now: float, member: Member) -> str:
        """Why a member is given up now, or nothing."""
        settings, waited = self.settings, now - member.since
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
        return ""

    def _check_step(self, now: float) -> None:
        """Give up who holds a step up; connect anew where nobody can be named."""
        at = self._suspected_at
        if self.restarts:
            return  # Steps are between the processes, which watch over them.
        if at is not None and self.phase == "running" and now - at > _SUSPECT_SECONDS:
            self._connect_anew(now)
        limit = self.pace.limit()
        if self.phase != "running" or now - self.pace.at < limit:
            return
        busy = [
            m
            for m in self._there()
            if m.name in self.active and m.phase != WAITING and m.status != "finished"
        ]
        stuck = [m for m in busy if now - m.moved_at > limit]
        for member in stuck:
            self._lose(now, member, f"it did not move on in a step for {limit:.0f} s")
        if not busy:
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
        there = [name for name in self.active if self.members[name].is_there]
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
        was_leaving = member.leaving
        member.becomes("gone", now)
        self._record("lost", name=member.name, why=why, step=self.pace.step)
        if member.pid:
            self._effects.append(Kill(name=member.name, pid=member.pid))
        self._say(member.name, "over", why=f"it was given up: {why}", well=False)
        if self.phase in ("draining", "ending"):
            return
        if not was_leaving:
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
        for name in self.active:
            member = self.members[name]
            if member.is_there:
                member.becomes("gone", now)
                self._record("ended", name=name, why="the world starts again")
                self._effects.append(Kill(name=name, pid=member.pid))
            if member.slot is not None:
                self.failures.due.setdefault(member.slot, now)

    def _ended_well(self, now: float, member: Member) -> None:
        """One of a generation by collectives has done its work."""
        self._record("ended", name=member.name, status=0)
        member.becomes("gone", now)
        self._well.add(member.name)
        if self._well.issuperset(self.active):
            self._complete()

    def _check_budget(self, now: float) -> None:
        why = self.failures.exceeded(now)
        if why:
            self._stop_all(f"{why}{self._where()}", saves=True)
            self._end(1, f"{why}{self._where()}")

    def _start_due(self, now: float) -> None:
        if self.phase in ("draining", "ending") or self._is_finishing():
            return
        for slot, due in [*self.failures.due.items()]:
            if due <= now:
                del self.failures.due[slot]
                self._effects.append(Start(slot=slot))

    # Generations.

    def _consider(self, now: float) -> None:
        """Form a generation, or end, where it is time for that."""
        match self.phase:
            case "gathering":
                self._gather(now)
            case "preparing" | "draining":
                self._await_prepared(now)
            case "running":
                self._watch(now)

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
        if len(found) >= settings.least or (found and self._is_finishing()):
            starting = any(
                m.status in ("starting", "registered") for m in self._there()
            )
            if (
                len(found) == settings.most
                or self._is_finishing()
                or (self.generation and not self.restarts)
                or not (starting or self.failures.due)
                or waited > settings.gather_seconds
            ):
                self._change(now, -1)
            return
        coming = any(m.status in ("starting", "registered") for m in self._there())
        if waited > settings.wait_seconds and not (coming and not self.generation):
            gone = [m for m in self.members.values() if not m.is_there]
            names = ", ".join(m.name for m in gone) or "nobody"
            why = (
                f"{len(found)} of at least {settings.least} members are there, and no "
                f"other came in {waited:.0f} s; gone are {names}{self._where()}"
            )
            self._stop_all(why, saves=True)
            self._end(1, why)

    def _release_leaving(self) -> None:
        """Let those go that asked to and have stopped."""
        for member in self._there():
            if member.leaving and member.prepared == self.generation:
                self._say(member.name, "over", why="drained", well=True)

    def _watch(self, now: float) -> None:
        if self.restarts:
            return
        there = {m.name: m for m in self._there()}
        if any(name not in there for name in self.active):
            self._change(now, -1)
            return
        if all(there[name].status == "finished" for name in self.active):
            self._complete()
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

    def _boundary(self) -> int:
        return self.pace.boundary(max((m.step for m in self._there()), default=0))

    def _change(self, now: float, after: int) -> None:
        """Ask for a new generation of those who are there.

        Args:
            now: the time.
            after: the step behind which members stop; -1 stops them at once.
        """
        found = self._candidates()
        leaving = [m.name for m in self._there() if m.leaving and m.status == "active"]
        target = ranks(self.active, found) + (leaving if after >= 0 else [])
        enough = len(found) >= self.settings.least or self._is_finishing()
        self._ask(now, target, after, phase="preparing" if enough else "gathering")
        if not enough:
            self._short_since = now
            self._record("short", members=found, least=self.settings.least)

    def _ask(self, now: float, target: list[str], after: int, *, phase: Phase) -> None:
        self.generation += 1
        self.phase, self._after, self._asked_at = phase, after, now
        self._suspected_at = None
        self._target = target
        self._record(
            "preparing", generation=self.generation, members=target, after=after
        )
        for name in target:
            self._say_prepare(name)

    def _say_prepare(self, name: str) -> None:
        self._say(name, "prepare", generation=self.generation, after=self._after)

    def _await_prepared(self, now: float) -> None:
        there = {m.name: m for m in self._there()}
        if any(name not in there for name in self._target):
            if self.phase == "draining":
                self._target = [name for name in self._target if name in there]
            else:
                self._change(now, -1)
                return
        late = [n for n in self._target if there[n].prepared != self.generation]
        waited = now - self._asked_at
        if not late:
            self._drain() if self.phase == "draining" else self._form(now)
        elif waited > self.settings.prepare_seconds:
            for name in late:
                why = f"it did not stop for generation {self.generation} in"
                self._lose(now, there[name], f"{why} {waited:.0f} s")
        elif self._after >= 0 and waited > self.pace.patience(self._after):
            # Some stopped before others could hear of it, and these wait for them.
            self._ask(now, self._target, -1, phase=self.phase)

    def _form(self, now: float) -> None:
        """All have stopped: begin the generation."""
        for name in [n for n in self._target if self.members[n].leaving]:
            self._target.remove(name)
            self._say(name, "over", why="drained", well=True)
        members = [self.members[name] for name in self._target]
        step = max(m.step for m in members)
        holders = [m.name for m in members if m.step == step and step >= 0]
        holders = holders or [members[0].name]
        behind = [m.name for m in members if m.name not in holders]
        sources = {n: holders[i % len(holders)] for i, n in enumerate(behind)}
        seconds = {m.name: m.seconds for m in members}
        held = {m.name: m.held for m in members if m.step == step}
        count, names = self.micro_batches, [m.name for m in members]
        self.active, self.phase = names, "running"
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
            member.held = ()
            member.moved_at = now
            if member.status != "finished":
                member.becomes("active", now)
            self._say(member.name, "begin", **fields)

    # The end.

    def _drain(self) -> None:
        there = [self.members[n] for n in self._target if self.members[n].is_there]
        newest = max((m.step for m in there), default=-1)
        saver = next((m for m in there if m.step == newest), None)
        for member in there:
            why = "the run was told to end"
            saves = member is saver
            self._say(member.name, "stop", why=why, saves=saves, well=True)
        self._end(143, f"the run was told to end, after step {newest}")

    def _complete(self) -> None:
        for name in self.active:
            self._say(name, "done")
        for member in self._there():
            if member.name not in self.active:
                self._say(member.name, "over", why="the run is complete", well=True)
        self._end(0, "")


def _sizes(held: Mapping[str, Iterable[tuple[int, int]]]) -> dict[str, object]:
    """How many micro-batches of the step that begins are done already."""
    done = sum(end - first for nodes in held.values() for first, end in nodes)
    return {"kept_micro_batches": done}
