"""The supervisor's records of a run's agents and of their processes.

This module opens no socket and reads no clock. It receives messages with their times,
and sends messages through a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from whalejax._version import __version__
from whalejax.membership import events as ev
from whalejax.membership.elastic_run import LONGEST_TURN_SECONDS, ElasticRun
from whalejax.membership.lease import Lease
from whalejax.wire import run_messages as wire
from whalejax.wire.messages import Message


RETURN_SECONDS: Final = 2.0
"""Seconds after which an agent is lost if neither it nor its members are connected."""

_SOON_SECONDS: Final = 0.2

Link = TypeVar("Link")
"""Type of a connection, which this module only passes on."""


@dataclass(slots=True, kw_only=True)
class AgentRecord(Generic[Link]):
    """An agent, from its latest messages.

    Attributes:
        name: Unique name of the agent.
        host: Address at which its members are reached.
        machine: Name of its machine, from ``processes.machine``.
        room: Largest number of processes of the agent.
        token: Random token that identifies the agent's process when it reconnects.
        link: Connection of the agent; None if it ended.
        leaving: Whether it was asked to end and accepts no more processes.
        asked: Slots of requested processes that have not started, by name.
        there: Names of its processes.
    """

    name: str
    host: str = ""
    machine: str = ""
    room: int = 0
    token: str = ""
    link: Link | None = None
    leaving: bool = False
    asked: dict[str, int] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)

    @property
    def free(self) -> int:
        """Number of further processes that it can run."""
        if self.link is None or self.leaving:
            return 0
        return self.room - len(self.there) - len(self.asked)


class AgentFleet(Generic[Link]):
    """All agents of a run.

    Attributes:
        program: Program that agents start: its ``command`` and ``environment``.
    """

    def __init__(
        self,
        run: ElasticRun,
        take: Callable[[float, ev.Event], None],
        send: Callable[[Link, Message], None],
        close: Callable[[Link], None],
    ) -> None:
        """Starts without agents.

        Args:
            run: Run that the agents serve.
            take: Function that receives the agents' events with their times.
            send: Function that sends a message over a connection.
            close: Function that ends a connection, to which the agent reconnects.
        """
        self._run, self._take = run, take
        self.program: Mapping[str, Any] = {}
        self._send, self._close = send, close
        self._agents: dict[str, AgentRecord[Link]] = {}
        self._linked: dict[Link, AgentRecord[Link]] = {}
        self._lease: Lease[str] = Lease(run.lease.seconds, LONGEST_TURN_SECONDS)
        self._away: Lease[str] = Lease(RETURN_SECONDS, LONGEST_TURN_SECONDS)
        self._ended_for: str | None = None

    # Messages of agents.

    def refusal(self, message: wire.Enlist) -> str:
        """Returns the reason why an agent is not accepted, or an empty text."""
        name, known = message.agent, self._agents.get(message.agent)
        if message.version != __version__:
            return (
                f"agent {name} is of whalejax {message.version}, and this supervisor "
                f"of {__version__}. Install the same on all machines"
            )
        if known is not None and known.link is not None:
            if known.token != message.token:
                return (
                    f"an agent named {name} runs already, at {known.host}. "
                    "Give this one another --name, or end that one"
                )
        # While the run ends, only known agents may reconnect.
        if known is None and self._run.phase == "ending":
            return "the run is over"
        return ""

    def enlist(self, now: float, link: Link, message: wire.Enlist) -> None:
        """Accepts an agent that joins or reconnects.

        Args:
            now: Current time.
            link: Connection of the agent.
            message: Accepted message of the agent.
        """
        name, told = message.agent, {one[0]: one for one in message.there}
        if self._ended_for is not None:
            self._send(link, wire.Finish(why=self._ended_for))
            self._drop(name)
            return
        known = self._agents.get(name)
        if known is not None and known.token not in ("", message.token):
            self._lose(now, known, "another took its place")
            known = None
        old = None if known is None else self._unlink(known)
        is_new = known is None or not known.token
        record = known or AgentRecord[Link](name=name)
        record.host, record.machine = message.host, message.machine
        record.room, record.token = message.room, message.token
        record.link, record.leaving = link, False
        self._linked[link] = record
        self._lease.renew(name, now)
        self._away.forget(name)
        asked, record.asked = record.asked, {}
        before, record.there = record.there, set(told)
        self._agents[name] = record
        beats = self._run.settings.beat_seconds
        self._tell(record, wire.Enlisted(**self.program, beat_seconds=beats))
        if is_new:
            self._take(now, ev.AgentJoined(name, record.host, record.room))
        for one, slot in asked.items():
            if one in told:
                self._started(now, record, one, slot, told[one][1], told[one][2])
            else:
                self._take(now, ev.NotStarted(slot, "the agent was away"))
        for one in before - set(told):
            self._take(now, ev.ProcessExitEvent(one, None))
        if not is_new:
            self._take(now, ev.RoomFreed(record.free))
        for one in told:
            member = self._run.members.get(one)
            if member is None or not member.is_there or member.agent != name:
                self._tell(record, wire.Kill(name=one))
            else:
                self._tell(record, wire.Release(name=one))
        if old is not None:
            self._close(old)

    def on_message(self, now: float, link: Link, message: Message) -> None:
        """Handles any message of an agent other than ``Enlist``."""
        record = self._linked.get(link)
        if record is None:
            return
        self._lease.renew(record.name, now)
        match message:
            case wire.AgentBeat(leaving=leaving):
                record.leaving = leaving
            case wire.Launched(name=name, pid=pid, began=began):
                slot = record.asked.pop(name, None)
                if slot is not None:
                    record.there.add(name)
                    self._started(now, record, name, slot, pid, began)
            case wire.NotLaunched(name=name, why=why):
                slot = record.asked.pop(name, None)
                if slot is not None:
                    why = f"agent {record.name}: {why}"
                    self._take(now, ev.NotStarted(slot, why))
            case wire.Exited(name=name, status=status, said=log):
                record.there.discard(name)
                self._take(now, ev.ProcessExitEvent(name, status, log))
                self._take(now, ev.RoomFreed(1))

    def on_disconnect(self, now: float, link: Link) -> None:
        """Handles the end of an agent's connection; the agent may reconnect."""
        record = self._linked.get(link)
        if record is None:
            return
        self._unlink(record)
        self._away.renew(record.name, now)
        if self._ended_for is not None:
            self._drop(record.name)
        elif record.leaving and not record.there:
            self._drop(record.name)
            self._give_back(now, record)
            self._take(now, ev.AgentLeft(record.name))

    def tick(self, now: float) -> None:
        """Removes silent agents, with their members."""
        self._lease.turn(now)
        self._away.turn(now)
        for name, silent in self._lease.overdue(now).items():
            self._lose(now, self._agents[name], f"it was silent for {silent:.1f} s")
        for name in self._away.overdue(now):
            members = self._run.members
            held = [members[n] for n in self._agents[name].there if n in members]
            if not any(m.is_there and m.connected for m in held):
                self._lose(now, self._agents[name], "its connection ended")

    def _lose(self, now: float, record: AgentRecord[Link], why: str) -> None:
        self._drop(record.name)
        self._give_back(now, record)
        self._take(now, ev.AgentLost(record.name, why))
        link = self._unlink(record)
        if link is not None:
            self._close(link)  # When it reconnects, it learns which processes to end.

    def _unlink(self, record: AgentRecord[Link]) -> Link | None:
        link, record.link = record.link, None
        if link is not None:
            self._linked.pop(link, None)
        return link

    def _drop(self, name: str) -> None:
        self._agents.pop(name, None)
        self._lease.forget(name)
        self._away.forget(name)

    def _give_back(self, now: float, record: AgentRecord[Link]) -> None:
        """Gives the agent's requested processes back, for other agents to start."""
        for slot in record.asked.values():
            self._take(now, ev.NotStarted(slot, f"agent {record.name} is gone"))

    def expect(self, now: float) -> None:
        """Starts the wait for agents of this run's earlier supervisor to reconnect."""
        back_at = now + self._run.settings.rejoin_seconds
        for member in self._run.members.values():
            if member.is_there and member.agent:
                new = AgentRecord[Link](name=member.agent)
                record = self._agents.setdefault(member.agent, new)
                record.there.add(member.name)
                self._lease.expect(member.agent, back_at)
                self._away.expect(member.agent, back_at)

    # Messages to agents.

    def start(self, now: float, slot: int, name: str) -> bool:
        """Requests a process from an agent; returns whether one could take it.

        It asks the agent of the slot's device. A slot without a known device goes to
        the agent with the fewest processes.
        """
        members = self._run.members
        host, device = self._device(slot)
        if host and self._is_filled(slot):
            # The slot's earlier process keeps the device until it ends.
            self._take(now, ev.Deferred(slot, until=now + _SOON_SECONDS))
            return False
        there = self._agents.values()
        matches = [r for r in there if r.free > 0 and host in ("", r.name)]
        if not matches:
            ends = {n for r in self._agents.values() for n in r.there}
            ending = any(n not in members or not members[n].is_there for n in ends)
            until = now + _SOON_SECONDS if ending else None
            self._take(now, ev.Deferred(slot, until=until))
            return False
        # Fewest processes first; among equals, the agent with the most room.
        record = min(matches, key=lambda r: (len(r.there) + len(r.asked), -r.free))
        record.asked[name] = slot
        self._tell(record, wire.Start(name=name, device=device))
        return True

    def _device(self, slot: int) -> tuple[str, str]:
        """Returns agent and name of a slot's device; empty texts if unknown."""
        devices = self._run.devices or ()
        name = devices[slot] if slot < len(devices) else ""
        host, _, device = name.partition("/")
        return host, device

    def _is_filled(self, slot: int) -> bool:
        members = self._run.members
        names = (name for r in self._agents.values() for name in r.there)
        return any(n in members and members[n].slot == slot for n in names)

    def release(self, name: str) -> None:
        """Lets a started process run."""
        self._tell_holder(name, wire.Release(name=name))

    def kill(self, name: str) -> None:
        """Kills a process at once."""
        self._tell_holder(name, wire.Kill(name=name))

    def finish(self, why: str) -> None:
        """Tells all agents that the run is over, disconnected ones on their return."""
        self._ended_for = why
        for record in self._agents.values():
            self._tell(record, wire.Finish(why=why))

    @property
    def hears_the_end(self) -> bool:
        """Whether some agent does not know yet that the run is over."""
        return bool(self._agents)

    @property
    def names(self) -> list[str]:
        """Names of the agents' processes whose end was not reported."""
        return [name for r in self._agents.values() for name in sorted(r.there)]

    def _tell_holder(self, name: str, message: wire.ToAgent) -> None:
        member = self._run.members.get(name)
        known = None if member is None else self._agents.get(member.agent)
        for record in self._agents.values() if known is None else (known,):
            if name in record.there:
                self._tell(record, message)

    def _tell(self, record: AgentRecord[Link], message: wire.ToAgent) -> None:
        if record.link is not None:
            self._send(record.link, message)

    def _started(
        self,
        now: float,
        record: AgentRecord[Link],
        name: str,
        slot: int,
        pid: int,
        began: str,
    ) -> None:
        record.there.add(name)
        where = record.name, record.machine
        self._take(now, ev.Started(name, slot, pid, began, *where))


def program(
    command: Sequence[str], environment: Mapping[str, str], python: str
) -> dict[str, Any]:
    """Returns the program for agents, which use their own Python if it is ``python``.

    >>> program(["/usr/bin/python", "a.py"], {}, "/usr/bin/python")["command"]
    ['', 'a.py']
    """
    first, *rest = command
    words = ["" if first == python else first, *rest]
    return {"command": words, "environment": dict(environment)}
