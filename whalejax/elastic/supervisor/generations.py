"""When a generation is formed, of whom, and when a run is complete or drained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from whalejax.elastic.assignment import dealt, ranks, repaired
from whalejax.elastic.phases import BETWEEN, FETCHING, RESTORING, SAVING
from whalejax.elastic.supervisor.endings import Ending
from whalejax.elastic.supervisor.failures import Failure
from whalejax.elastic.supervisor.history import Phase
from whalejax.elastic.supervisor.losing import Losing
from whalejax.elastic.supervisor.member_record import Member


_LONG: Final = frozenset({BETWEEN, RESTORING, SAVING})
"""Phases that stop at nothing until they are over."""

_PREPARE_STEPS: Final = 3


class Generations(Losing):
    """Members that form generations."""

    def _consider(self, now: float) -> None:
        """Form a generation, or end, where it is time for that."""
        if self._all_leave(now):
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

    def _all_leave(self, now: float) -> bool:
        """Everybody who has the state was told to leave, and nobody comes to take it.

        Who is held out for failing again and again is not waited for.
        """
        there = [m for m in self._taking_part() if m.status == "active"]
        alone = self.restarts and not self.stops
        if alone or not there or self._candidates() or self._are_coming():
            return False
        if any(due <= now for due in self.failures.due.values()):
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

    def _fitting(self, found: list[str]) -> list[str]:
        """As many of those that could take part as there is a plan for.

        Fewer than the least number where there is none: the run waits for others.
        """
        count = len(found)
        while count in self.unfit:
            count -= 1
        return found[:count]

    def _gather(self, now: float) -> None:
        settings, found = self.settings, self._fitting(self._candidates())
        if self._short_since is None:
            self._short_since = now
        waited = now - self._short_since
        self._release_stopped(now)
        coming = self._are_coming()
        if len(found) >= settings.least or (found and self._is_finishing()):
            if (
                len(found) == settings.most
                or self._is_finishing()
                or (self._formed and not self.restarts)
                or not (coming or self.failures.due or self.awaited)
                or (waited > settings.gather_seconds and len(found) >= self._expected)
            ):
                self._change(now, -1)
            return
        # Who starts or compiles has deadlines of its own.
        if waited > settings.wait_seconds and not coming:
            gone = [m for m in self.members.values() if not m.is_there]
            names = ", ".join(m.name for m in gone) or "nobody"
            why = (
                f"{len(found)} of at least {settings.least} members are there, and no "
                f"other came in {waited:.0f} s; gone are {names}"
                f"{self._agents_told()}{self._where()}"
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

    def _watch_world(self, now: float) -> None:
        """Stop a world at a step where members are to leave it or could enlarge it."""
        there = self._taking_part()
        if len(there) < len(self.active) or self._is_finishing():
            return
        if not self.pace.moves:
            return  # It has done nothing yet.
        fresh = [m for m in self._there() if m.status == "ready" and not m.leaving]
        found = self._fitting(self._candidates())
        enough = len(found) > len(there)
        if enough and len(found) < self.settings.most:
            # Those that start may come along: one stop does for all of them.
            coming = self._are_coming() or bool(self.failures.due)
            waited = now - min(m.since for m in fresh)
            enough = not coming or waited > self.settings.gather_seconds
        if enough or any(m.leaving for m in there):
            self._ask(now, [m.name for m in there], -1, phase="preparing")

    def _unfit(self, now: float, member: Member, count: int, why: str) -> None:
        """No plan was found for a number of members; one over MAX is of no interest."""
        if count > self.settings.most:
            return
        if count not in self.unfit:
            self.unfit[count] = why
            self._record("unfit", count=count, why=why)
        if self.phase in ("draining", "ending"):
            return
        sizes = range(self.settings.least, self.settings.most + 1)
        if all(size in self.unfit for size in sizes):
            every = "; ".join(dict.fromkeys(self.unfit[size] for size in sizes))
            text = f"there is no plan for {sizes[0]} to {sizes[-1]} processes: {every}"
            if self.pace.has_committed:
                self._end(now, Ending.FAILED, f"{text}{self._where()}")
            else:
                self._end(now, Ending.REFUSED, text)
        elif self.phase == "running" and len(self.active) == count:
            self._restart_world(now)

    def _watch(self, now: float) -> None:
        if self.restarts:
            if self.stops:
                self._watch_world(now)
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
        if found and set(found) != set(self.active):
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
                    since = member.since
                    failure = Failure(at=now, since=since, name=name, why=why)
                    self.failures.count(failure)
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
        found = self._fitting(self._candidates())
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
        self._broken_links.clear()
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
        if self.stops and (self._is_finishing() or self._well):
            return  # They came to their last step before they heard of it.
        there = {m.name: m for m in self._there()}
        asked = [name for name in self._target if name in there]
        asked = [n for n in asked if there[n].status not in ("left", "failed")]
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
        if self.stops and any(m.status == "active" for m in asked):
            # They cannot change the world they are in. As many are waited for as there
            # are now, or it could be smaller afterwards.
            self._expected = len(self._fitting(self._candidates()))
            self._restart_world(now)
            return
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
        self._short_since, self._expected = None, 0
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

    def terminate(self, now: float) -> None:
        """The run is to end: members stop at a step, and one saves its state."""
        if self._draining or self.phase == "ending":
            return
        self._draining = True
        self._record("draining", step=self.pace.step)
        self._begin_draining(now)

    def end_at_once(self, now: float) -> None:
        """The run is to end without waiting for anything; no state is saved."""
        for member in self._there():
            member.ends_by_kill = True
        text = f"the run was ended at once, as it was asked to{self._where()}"
        self._end(now, Ending.INTERRUPTED, text, saves=False)

    def _begin_draining(self, now: float) -> None:
        there = [m for m in self._taking_part() if m.status == "active"]
        # What members that have not come back yet hold is not known.
        newest = max([self.pace.step, *(m.step for m in there)])
        alone = self.restarts and not (self.stops and self.phase != "gathering")
        if alone or not there or newest < 0:
            text = f"the run was told to end before its first step{self._where()}"
            if self.restarts and self._formed:
                text = "the run was told to end"
            self._end(now, Ending.INTERRUPTED, text)
            return
        self._ask(now, [m.name for m in there], self._boundary(), phase="draining")

    def _drain(self, now: float) -> None:
        there = [m for m in self._there() if m.name in self._target]
        there = [m for m in there if m.status != "failed"]
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
