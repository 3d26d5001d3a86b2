"""Members that are given up: what follows, and what is started in their place."""

from __future__ import annotations

from typing import Final

from whalejax.distributed.launch_env import LOSS_SIGNS
from whalejax.elastic.supervisor.endings import Ending
from whalejax.elastic.supervisor.failures import Failure
from whalejax.elastic.supervisor.member_record import Kill, Member, Start, Status
from whalejax.elastic.supervisor.roster import Roster


_LASTING_SECONDS: Final = 60.0
"""A generation by collectives that lasted so long did something."""

_FURTHER: Final[tuple[Status, ...]] = (
    "starting",
    "registered",
    "ready",
    "active",
    "finished",
    "left",
)
"""What members come to, in this order."""


class Losing(Roster):
    """Members that can be lost."""

    def agent_lost(self, now: float, agent: str, why: str) -> None:
        """An agent is lost with all members that it holds, which is one failure.

        Args:
            now: the time.
            agent: its name.
            why: it is given up.
        """
        self._record("agent_lost", agent=agent, why=why)
        self.agents.pop(agent, None)
        alone = True
        for member in [m for m in self._there() if m.agent == agent]:
            what = f"its agent {agent} is lost: {why}"
            self._lose(now, member, what, counts=alone)
            alone = False

    def _lose(
        self,
        now: float,
        member: Member,
        why: str,
        said: str = "",
        *,
        counts: bool = True,
        how: Ending = Ending.LOST,
    ) -> None:
        """Give a member up, and end it before its work is given to others."""
        if not member.is_there:
            return
        over = self.phase in ("draining", "ending")
        counts = counts and not member.leaving and not over
        member.becomes("gone", now)
        failed = how is Ending.FAILED
        error = self.failures.error_of(member.name, said) if failed else ""
        self._record(
            "lost",
            name=member.name,
            why=why,
            step=self.pace.step,
            counts=counts,
            how=how,
            said=error,
            seconds=round(now - member.since, 3),
        )
        if member.pid:
            self._effects.append(Kill(name=member.name, pid=member.pid))
        self._say(member.name, "over", why=f"it was given up: {why}", well=False)
        if over:
            return
        if counts:
            if self._may_follow(error):
                error = ""
            failure = Failure(
                at=now,
                since=member.since,
                name=member.name,
                why=why,
                error=error,
                step=self.pace.step,
            )
            self.failures.count(failure, said)
            self._check_budget(now, member.reached)
        if member.slot is not None:
            self.failures.due[member.slot] = now + self.failures.hold(now, member.slot)
        together = ("running", "preparing") if self.stops else ("running",)
        if self.restarts and self.phase in together and member.name in self.active:
            self._restart_world(now)

    def _well_there(self) -> list[Member]:
        return [m for m in self._there() if m.status != "failed"]

    def _restart_world(self, now: float) -> None:
        """End those that are left of a generation by collectives, to start anew."""
        if not self.stops and now - self.pace.at > _LASTING_SECONDS:
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

    def _may_follow(self, error: str) -> bool:
        """Whether an error may come of the loss of another, by collectives."""
        several = self.restarts and len(self.active) > 1
        return several and any(sign in error.lower() for sign in LOSS_SIGNS)

    def _check_budget(self, now: float, reached: Status = "active") -> None:
        """End the run where it fails for good.

        Args:
            now: the time.
            reached: how far the member has come that failed.
        """
        far = _FURTHER.index(reached)
        passed = any(_FURTHER.index(m.reached) > far for m in self._well_there())
        why = self.failures.exceeded(now, self._where(), passed=passed)
        if why:
            self._end(now, Ending.FAILED, why)

    def _start_due(self, now: float) -> None:
        if self.phase in ("draining", "ending") or self._is_finishing():
            return
        left = self._well or any(m.status == "left" for m in self._taking_part())
        if left and not self.restarts:
            return
        for slot, due in [*self.failures.due.items()]:
            if due <= now:
                del self.failures.due[slot]
                self._starting.add(slot)
                self._effects.append(Start(slot=slot))
