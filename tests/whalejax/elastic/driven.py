"""A run whose loop is a test: events come by methods, and effects wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whalejax.membership.elastic_run import ElasticRun
from whalejax.membership.events import (
    AgentJoined,
    Effect,
    Event,
    MemberMessageEvent,
    ProcessExitEvent,
    ReductionProposed,
    RegisterEvent,
    Resume,
    Started,
    StartsAllowedEvent,
    Terminate,
    Tick,
    Unrunnable,
)
from whalejax.membership.generations import settle
from whalejax.membership.member_messages import refusal
from whalejax.membership.react import react
from whalejax.membership.settings import SupervisorSettings


class Driven(ElasticRun):
    """A run, with the turns of a loop.

    Attributes:
        batched: what comes is settled with the next tick, as by a loop that is busy;
            else at once.
    """

    def __init__(self, settings: SupervisorSettings, *, batched: bool = False) -> None:
        super().__init__(settings=settings)
        self.batched = batched
        self.waiting: list[Effect] = []

    def take(self, now: float, event: Event) -> None:
        """Let something happen."""
        self.waiting += react(self, now, event)

    def turn(self, now: float, event: Event) -> None:
        """Let something happen that may change who takes part."""
        self.take(now, event)
        if not self.is_settled and not self.batched:
            settle(self, now)
            self.is_settled = True
            self.waiting, self.outbox = self.waiting + self.outbox, []

    def effects(self) -> list[Effect]:
        """What is to be done; each is given once."""
        found, self.waiting = self.waiting, []
        return found

    def begin(self, now: float) -> None:
        self.take(now, StartsAllowedEvent())

    def go_on(
        self,
        now: float,
        told: Sequence[Mapping[str, Any]],
        losses: Mapping[int, tuple[int, float]],
        **times: float,
    ) -> None:
        self.take(now, Resume(events=told, losses=losses, **times))

    def tick(self, now: float) -> None:
        self.take(now, Tick())

    def register(self, now: float, message: Any, name: str, slot: Any) -> str:
        why = refusal(self, name, message)
        if not why:
            self.turn(now, RegisterEvent(name, slot, message))
        return why

    def heard(self, now: float, name: str, message: Any) -> None:
        self.turn(now, MemberMessageEvent(name, message))

    def started(
        self, now: float, name: str, slot: int, pid: int, *, agent: str = ""
    ) -> None:
        self.take(now, Started(name=name, slot=slot, pid=pid, agent=agent))

    def exited(self, now: float, name: str, status: int | None, log: str = "") -> None:
        self.turn(now, ProcessExitEvent(name=name, status=status, log=log))

    def refused(self, now: float, name: str, why: str) -> None:
        self.take(now, Unrunnable(name=name, why=why))

    def agent_came(self, now: float, agent: str, host: str, room: int) -> None:
        self.take(now, AgentJoined(agent=agent, host=host, room=room))

    def add_up(self, by: str, why: str) -> tuple[str, str]:
        self.take(0.0, ReductionProposed(by=by, why=why))
        return self.adding_up

    def terminate(self, now: float) -> None:
        self.take(now, Terminate(at_once=False))

    def end_at_once(self, now: float) -> None:
        self.take(now, Terminate(at_once=True))

    def written(self) -> dict[str, Any]:
        return written(self)


RUN = """assigned generation phase active target after step size devices facts
checkpoint adding_up formed draining well over""".split()
MEMBER = "slot pid began agent machine token status leaving".split()


def written(run: ElasticRun) -> dict[str, Any]:
    """What a journal must tell of a run."""
    members = {
        name: {key: getattr(member, key) for key in MEMBER}
        for name, member in run.members.items()
    }
    return {"members": members, **{key: getattr(run, key) for key in RUN}}
