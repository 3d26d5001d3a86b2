"""Agents as the supervisor sees them, by a clock of the tests' own."""

from __future__ import annotations

import itertools
from typing import Any

from tests.whalejax.elastic.driven import Driven
from tests.whalejax.messages import arrives, received
from whalejax._version import __version__
from whalejax.elastic.agents.agent_fleet import RETURN_SECONDS, AgentFleet
from whalejax.membership.events import StartEffect
from whalejax.membership.settings import SupervisorSettings
from whalejax.wire.messages import Message
from whalejax.wire.run_messages import TO_AGENT


def enlist(name: str, room: int = 1, **changed: Any) -> Any:
    fields = {
        "agent": name,
        "host": f"host-{name}",
        "machine": f"machine-{name}",
        "room": room,
        "version": __version__,
        "token": name,
        "there": [],
        **changed,
    }
    return received("enlist", fields)


class Ran:
    """A fleet whose agents are lists of what they were told."""

    def __init__(self, **settings: Any) -> None:
        given = {"least": 1, "most": 3, **settings}
        self.membership = Driven(SupervisorSettings(**given))
        self.membership.placed = True
        self.closed: list[str] = []
        self.told: dict[str, list[tuple[str, Any]]] = {}
        self.fleet = AgentFleet[str](
            self.membership,
            self.membership.take,
            self._send,
            self.closed.append,
        )
        self.fleet.program = {"command": ["", "train.py"], "environment": {}}
        self.events: list[dict[str, Any]] = []
        self.names = itertools.count(1)
        self.membership.begin(0.0)
        self.do(0.0)

    def _send(self, link: str, message: Message) -> None:
        arrives(message, TO_AGENT)
        more = message.fields.get("name")
        self.told.setdefault(link, []).append((message.kind, more))

    def do(self, now: float) -> None:
        """Do what was decided, as the supervisor does."""
        while effects := self.membership.effects():
            for effect in effects:
                if isinstance(effect, StartEffect):
                    self.fleet.start(now, effect.slot, f"m{next(self.names)}")
                elif type(effect).__name__ == "WriteEvent":
                    self.events.append({"event": effect.event, **effect.fields})  # type: ignore[union-attr]
                elif type(effect).__name__ == "Kill":
                    self.fleet.kill(effect.name)  # type: ignore[union-attr]

    def tick(self, now: float) -> None:
        self.fleet.tick(now)
        self.membership.tick(now)
        self.do(now)

    def asked(self, link: str, kind: str = "start") -> list[str]:
        return [name for what, name in self.told.get(link, []) if what == kind]

    def launch(self, now: float, link: str, *names: str) -> None:
        for pid, name in enumerate(names, 100):
            fields = {"name": name, "pid": pid, "began": "1"}
            self.fleet.on_message(now, link, received("launched", fields))
        self.do(now)

    def said(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


def came(ran: Ran, now: float, name: str, room: int = 1, **more: Any) -> None:
    ran.fleet.enlist(now, name, enlist(name, room, **more))
    ran.tick(now)


def test_processes_are_spread_over_agents_as_they_come() -> None:
    ran = Ran()
    came(ran, 0.1, "a", 2)
    first = ran.asked("a")
    assert len(first) == 2
    ran.launch(0.2, "a", *first)
    came(ran, 0.3, "b", 2)
    assert len(ran.asked("b")) == 1 and ran.asked("a") == first
    ran.launch(0.4, "b", *ran.asked("b"))
    told = {e["name"]: (e["agent"], e["machine"]) for e in ran.said("started")}
    assert [where for _, where in sorted(told.items())] == [
        ("a", "machine-a"),
        ("a", "machine-a"),
        ("b", "machine-b"),
    ]
    assert sorted(ran.fleet.names) == sorted(told)


def test_a_lost_agent_is_the_loss_of_all_its_members_and_one_failure() -> None:
    ran = Ran(lease_seconds=5.0)
    came(ran, 0.0, "a", 2)
    ran.launch(0.0, "a", *ran.asked("a"))
    for at in range(1, 6):
        ran.tick(at * 0.9)
    assert not ran.said("agent_lost")
    for at in range(6, 9):
        ran.tick(at * 0.9)
    assert [e["agent"] for e in ran.said("agent_lost")] == ["a"]
    lost = ran.said("lost")
    assert len(lost) == 2 and ran.membership.failures.total == 1
    assert all("its agent a is lost: it was silent for" in e["why"] for e in lost)
    assert ran.closed == ["a"] and ran.fleet.names == []
    # Thawed, it says what it holds: that is ended before there is room again.
    there = [[e["name"], 1, "1"] for e in lost]
    ran.fleet.enlist(9.0, "again", enlist("a", 2, there=there))
    ran.tick(9.0)
    assert sorted(ran.asked("again", "kill")) == sorted(e["name"] for e in lost)
    assert ran.asked("again") == []
    for name, _, _ in there:
        fields = {"name": name, "status": -9, "said": ""}
        ran.fleet.on_message(9.1, "again", received("exited", fields))
    for at in range(10):
        ran.tick(9.2 + at * 0.5)
    assert len(ran.asked("again")) == 2


def test_an_agent_that_ended_with_its_members_is_lost_at_once() -> None:
    ran = Ran()
    came(ran, 0.0, "a")
    ran.launch(0.0, "a", *ran.asked("a"))
    ran.fleet.on_disconnect(0.1, "a")
    ran.tick(0.5)
    assert not ran.said("agent_lost")
    ran.tick(1.4)
    ran.tick(0.2 + RETURN_SECONDS)
    assert [e["why"] for e in ran.said("agent_lost")] == ["its connection ended"]


def test_an_agent_that_comes_back_keeps_its_members() -> None:
    ran = Ran()
    came(ran, 0.0, "a", 2)
    one, other = ran.asked("a")
    ran.launch(0.0, "a", one)  # The answer for the other is lost.
    ran.fleet.on_disconnect(0.1, "a")
    there = [[one, 100, "1"], [other, 101, "1"]]
    ran.fleet.enlist(0.5, "link", enlist("a", 2, there=there))
    ran.tick(0.6)
    assert sorted(e["name"] for e in ran.said("started")) == [one, other]
    assert sorted(ran.asked("link", "release")) == [one, other]
    assert not ran.said("lost") and len(ran.said("agent_joined")) == 1


def test_what_an_agent_no_longer_holds_has_ended() -> None:
    ran = Ran()
    came(ran, 0.0, "a")
    (name,) = ran.asked("a")
    ran.launch(0.0, "a", name)
    ran.fleet.on_disconnect(0.1, "a")
    ran.fleet.enlist(0.5, "link", enlist("a"))
    ran.tick(0.6)
    assert [e["name"] for e in ran.said("lost")] == [name]


def test_what_is_refused() -> None:
    ran = Ran()
    came(ran, 0.0, "a")
    other = ran.fleet.refusal(enlist("a", token="another"))
    assert "an agent named a runs already, at host-a" in other
    assert not ran.fleet.refusal(enlist("a"))
    old = ran.fleet.refusal(enlist("b", version="0.0"))
    assert "agent b is of whalejax 0.0, and this supervisor of" in old
    ran.fleet.on_disconnect(0.1, "a")
    assert not ran.fleet.refusal(enlist("a", token="another"))
    ran.fleet.enlist(0.2, "new", enlist("a", token="another"))
    assert [e["why"] for e in ran.said("agent_lost")] == []
    ran.do(0.2)
    assert [e["why"] for e in ran.said("agent_lost")] == ["another took its place"]


def test_an_agent_that_leaves_takes_no_further_process() -> None:
    ran = Ran(hold_seconds=0.1)
    came(ran, 0.0, "a")
    (name,) = ran.asked("a")
    ran.launch(0.0, "a", name)
    leaving = received("agent_beat", {"leaving": True})
    ran.fleet.on_message(0.1, "a", leaving)
    fields = {"name": name, "status": 0, "said": ""}
    ran.fleet.on_message(0.2, "a", received("exited", fields))
    for at in range(8):
        ran.tick(0.3 + at * 0.5)
    assert ran.asked("a") == [name]
    ran.fleet.on_disconnect(5.0, "a")
    ran.do(5.0)
    assert [e["agent"] for e in ran.said("agent_left")] == ["a"]
    assert not ran.said("agent_lost")


def test_too_few_members_name_agents_that_are_there_and_missing() -> None:
    ran = Ran(least=2, most=2, wait_seconds=3.0)
    ran.membership.awaited = {"a", "b"}
    for at in range(8):
        if at == 1:
            came(ran, 0.5, "a", 1)
            fields = {"name": ran.asked("a")[0], "why": "no memory"}
            ran.fleet.on_message(0.5, "a", received("not_launched", fields))
            ran.membership.failures.due.clear()
        ran.tick(at * 0.6)
    (end,) = ran.said("ending")
    assert "agents present: a (1 process); missing: b" in end["why"]


def test_each_agent_hears_the_end_of_the_run_also_one_that_was_away() -> None:
    ran = Ran()
    came(ran, 0.0, "a")
    came(ran, 0.1, "b")
    ran.fleet.on_disconnect(0.2, "b")
    ran.fleet.finish("all steps are done")
    assert ran.asked("a", "finish") == [None] and not ran.asked("b", "finish")
    ran.fleet.on_disconnect(0.3, "a")
    assert ran.fleet.hears_the_end
    assert ran.fleet.refusal(enlist("b")) == ""
    ran.fleet.enlist(0.4, "b again", enlist("b"))
    assert ran.asked("b again", "finish") == [None]
    assert not ran.asked("b again", "enlisted") and not ran.fleet.hears_the_end


def test_only_an_agent_of_the_run_comes_back_to_its_end() -> None:
    ran = Ran()
    came(ran, 0.0, "a")
    ran.membership.terminate(0.1)
    ran.do(0.1)
    ran.membership.phase = "ending"
    ran.fleet.on_disconnect(0.2, "a")
    assert ran.fleet.refusal(enlist("a")) == ""
    assert ran.fleet.refusal(enlist("new")) == "the run is over"
