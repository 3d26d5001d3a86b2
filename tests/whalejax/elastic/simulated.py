"""Members of a simulation, with a clock of its own and random delays."""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

from tests.whalejax.elastic.driven import Driven, written
from tests.whalejax.messages import arrives, received
from whalejax.journals import journal
from whalejax.membership.assignment import check_tiles
from whalejax.membership.events import (
    End,
    KillEffect,
    ReleaseEffect,
    Send,
    StartEffect,
    StepCommit,
    WriteEvent,
)
from whalejax.membership.history import replay_events
from whalejax.membership.phases import (
    BETWEEN,
    COMPILING,
    COMPUTING,
    FINISHED,
    RESTORING,
    SAVING,
    STOPPED,
    WAITING,
)
from whalejax.membership.settings import SupervisorSettings
from whalejax.wire.messages import Message
from whalejax.wire.run_messages import TO_MEMBER


COUNT = 8


class Simulated:
    """A member: what it does follows ``whalejax.elastic.member``."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name, self.number = world, name, number
        self.step, self.generation, self.running = -1, 0, -1
        self.phase, self.done, self.alive, self.frozen = COMPILING, 0, True, False
        self.asked: Message | None = None
        self.begin: Message | None = None
        self.entered = -1
        self.finished, self.sent_at, self.heard_at = False, 0.0, 0.0
        self.late: list[Message] = []
        self.released = self.beats = self.is_ready = False
        self.epoch, self.reports = -1, list[Message]()
        self.counts = itertools.count(1)
        self.body: Callable[[int], float] = lambda step: 0.0

    def say(self, kind: str, **fields: Any) -> None:
        """Tell the supervisor; a report is kept until it is acknowledged."""
        if not self.alive or self.frozen:
            return
        if kind != "beat":
            fields = {"number": next(self.counts), **fields}
        message = received(kind, fields)
        if kind != "beat":
            self.reports.append(message)
        self.send(message)

    def send(self, message: Message) -> None:
        epoch = self.epoch
        # Over one connection nothing overtakes anything.
        self.sent_at = max(self.sent_at, self.world.now + self.world.delay())
        self.world.later(
            self.sent_at - self.world.now,
            lambda: self.world.tell(self.name, message, epoch),
        )

    def acknowledged(self, number: int) -> None:
        self.reports = [r for r in self.reports if r.number > number]

    def connected(self) -> None:
        """A supervisor has taken it, again perhaps: it repeats what is not known."""
        self.epoch = self.world.epoch
        for message in self.reports:
            self.send(message)

    def beat(self) -> None:
        if not self.alive or self.world.end:
            return
        self.say("beat", phase=self.phase, step=self.step, done=self.done)
        self.world.later(self.world.settings.beat_seconds, self.beat)

    def hear(self, said: Message) -> None:
        if not self.alive:
            return
        if self.frozen or self.phase == COMPILING:
            self.late.append(said)
            return
        fields = said.fields
        match said.kind:
            case "prepare":
                self.asked = said
                listens = self.phase not in (BETWEEN, SAVING, RESTORING)
                now = fields["after"] < 0 or self.running < 0 or self.finished
                if now and listens:
                    self.stop()
            case "begin" if fields["generation"] == self.generation:
                self.begin, self.running = said, self.generation
                self.phase = "connecting"
                self.world.later(self.world.delay(), self.join)
            case "over" | "stop" | "done":
                well = said.kind == "done" or fields["well"]
                self.world.later(0.01, lambda: self.world.exit(self, 0 if well else 1))

    def stop(self) -> None:
        assert self.asked is not None
        self.generation = self.asked.generation
        self.asked, self.running, self.phase = None, -1, STOPPED
        held = []
        if self.entered == self.step and self.begin is not None:
            held = self.share()[: self.world.drawn.randrange(3)]
        self.say("prepared", generation=self.generation, step=self.step, held=held)

    def share(self) -> Any:
        assert self.begin is not None
        first = self.begin.step == self.step
        which = "first" if first else "later"
        return self.begin.fields[which].get(self.name, [])

    def join(self) -> None:
        """Come to the newest state, from who has it."""
        if not self.alive or self.running != self.generation or self.begin is None:
            return
        source = self.begin.sources.get(self.name)
        if self.frozen:
            self.world.later(1.0, self.join)
            return
        if source is not None:
            other = self.world.members[source]
            if not other.alive or other.step < max(self.begin.step, 0):
                self.world.later(0.1, self.join)  # Not there yet, or never.
                return
            self.step = max(self.begin.step, other.world.saved)
        elif self.step < 0:
            self.step = self.world.saved
        self.enter()

    def enter(self) -> None:
        """Begin a step, or stop where that was asked."""
        if not self.alive or self.running < 0:
            return
        if self.asked is not None and self.step >= self.asked.after:
            self.stop()
            return
        if self.step >= self.world.steps:
            self.finished, self.phase = True, FINISHED
            self.say("finished", step=self.step)
            return
        self.phase = COMPUTING
        self.done += 1
        self.world.later(self.world.drawn.uniform(0.05, 0.2), self.computed)

    def computed(self) -> None:
        if not self.alive or self.running < 0:
            return
        if self.frozen:
            self.world.later(1.0, self.computed)
            return
        self.phase, self.entered = WAITING, self.step
        self.world.exchange(self.running, self.step)

    def commit(self, step: int, parts: Any) -> None:
        """The sum of a step has come."""
        if not self.alive or self.running < 0 or self.step != step:
            return
        if self.frozen:
            again = functools.partial(self.commit, step, parts)
            self.world.later(1.0, again)
            return
        self.step += 1
        if self.step % 10 == 0:
            self.world.saved = max(self.world.saved, self.step)
        self.say(
            "committed",
            generation=self.running,
            step=self.step,
            loss=1.0 / self.step,
            seconds=0.1,
            parts=parts,
        )
        self.phase = BETWEEN
        if self.step >= self.world.breaks_at:
            self.say("left", step=self.step)
            self.phase, self.running, self.finished = FINISHED, -1, True
            seconds, status = self.world.after_break
            self.world.later(seconds, lambda: self.world.exit(self, status))
            return
        seconds = self.body(self.step)
        if seconds:
            self.world.later(seconds, self.enter)
        else:
            self.enter()


class World:
    """A supervisor's decisions, processes and time."""

    def __init__(self, seed: int, steps: int = 60, **settings: Any) -> None:
        self.drawn = random.Random(seed)
        self.settings = SupervisorSettings(**{"least": 1, "most": 3, **settings})
        self.membership = Driven(self.settings)
        self.steps, self.saved, self.now = steps, 0, 0.0
        self.members: dict[str, Simulated] = {}
        self.commits: list[StepCommit] = []
        self.events: list[WriteEvent] = []
        self.times: list[float] = []  # Of these.
        self.committed_at = 0.0
        self.end: End | None = None
        self._numbers = itertools.count(1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.broken_start, self.save = False, ""
        self.breaks_at = 1 << 30
        # Seconds from leaving a loop to the end of the process, and its status.
        self.after_break: tuple[float, int] = (20.0, 0)
        # The supervisor: how often it was started, and when it is killed.
        self.epoch, self.down, self.dies_in = 0, False, -1
        self.deaths = self.compared = 0

    def told(self) -> list[dict[str, Any]]:
        """What is in the journal."""
        lines = [
            {"time": at, "event": e.event, **e.fields}
            for at, e in zip(self.times, self.events, strict=True)
        ]
        found: list[dict[str, Any]] = json.loads(json.dumps(lines))
        return found

    def die(self) -> None:
        """The supervisor is killed, and later started again."""
        self.down, self.dies_in = True, -1
        self.deaths += 1
        for member in self.members.values():
            if not member.released:
                member.alive = False  # Its pipe was closed before it ran.
        self.later(2.0, self.restart)

    def restart(self) -> None:
        self.membership = Driven(self.settings)
        self.epoch, self.down = self.epoch + 1, False
        lines = [
            {"step": c.step, "generation": c.generation, "loss": c.loss}
            for c in self.commits
        ]
        self.membership.go_on(
            self.now,
            self.told(),
            journal.losses(lines),
            wall=self.now,
            committed_at=self.committed_at,
        )
        for name, member in [*self.membership.members.items()]:
            if member.is_there and not self.members[name].alive:
                self.membership.exited(self.now, name, None, "its log")
        self.do()
        for one in [*self.members.values()]:
            if one.alive and one.beats:
                self.later(self.delay(), functools.partial(self.register, one))
        self.tick()

    def delay(self) -> float:
        return self.drawn.uniform(0.001, 0.05)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), work))

    def begin(self) -> None:
        self.membership.begin(self.now)
        self.do()
        self.tick()

    def tick(self) -> None:
        if self.end is None and not self.down:
            self.membership.tick(self.now)
            self.do()
            self.later(0.1, self.tick)

    def run(self, until: float, *, on: bool = False) -> None:
        """Let things happen, up to a time or, unless ``on``, the end of the run."""
        while self._queue and self._queue[0][0] <= until and (on or self.end is None):
            self.now, _, work = heapq.heappop(self._queue)
            work()
        if on or self.end is None:
            self.now = max(self.now, until)

    def tell(self, name: str, message: Message, epoch: int) -> None:
        if self.down or epoch != self.epoch:
            return
        self.membership.heard(self.now, name, message)
        self.do()
        known = self.membership.members.get(name)
        if known is not None and not self.down:  # All that follows is written.
            one, number = self.members[name], known.reported
            self.later(self.delay(), lambda: one.acknowledged(number))

    def exit(self, member: Simulated, status: int) -> None:
        if member.alive:
            member.alive = False
            if not self.down:
                self.membership.exited(self.now, member.name, status, "its log")
                self.do()

    def exchange(self, generation: int, step: int) -> None:
        """Give all the sum, once all are there."""
        names = self.asked(generation)
        there = [self.members[n] for n in names]
        if not all(
            m.alive and m.running == generation and m.entered == step and m.step == step
            for m in there
        ):
            return
        parts = {m.name: m.share() for m in there}
        check_tiles([tuple(n) for nodes in parts.values() for n in nodes], COUNT)
        for member in there:
            self.later(self.delay(), functools.partial(member.commit, step, parts))

    def asked(self, generation: int) -> list[str]:
        """The members of a generation."""
        begun = [e.fields for e in self.events if e.event == "begun"]
        found = [e["members"] for e in begun if e["generation"] == generation]
        return list(found[-1])  # type: ignore[call-overload]

    def do(self) -> None:
        while not self.down and (effects := self.membership.effects()):
            for effect in effects:
                if self.dies_in == 0:
                    self.die()
                    return
                self.dies_in -= self.dies_in > 0
                self.do_one(effect)
                if self.down:
                    return
        if not self.down and len(self.events) > self.compared:
            # Killed now, a supervisor that is started again knows what this one does.
            self.compared = len(self.events)
            told = replay_events(self.settings, self.told())
            assert written(told) == self.membership.written()

    def do_one(self, effect: Any) -> None:
        match effect:
            case StartEffect(slot=slot):
                self.start(slot)
            case KillEffect(name=name):
                member = self.members[name]
                self.later(0.01, lambda m=member: self.exit(m, -9))
            case Send(name=name, message=message) if name in self.members:
                arrives(message, TO_MEMBER)
                member = self.members[name]
                member.heard_at = max(member.heard_at, self.now + self.delay())
                self.later(
                    member.heard_at - self.now,
                    lambda m=member, x=message: m.hear(x),
                )
            case ReleaseEffect(name=name):
                self.release(self.members[name])
            case StepCommit():
                self.commits.append(effect)
                self.committed_at = self.now
            case WriteEvent():
                self.events.append(effect)
                self.times.append(self.now)
            case End():
                self.end = self.end or effect

    def start(self, slot: int) -> None:
        number = next(self._numbers)
        name = f"m{number}"
        self.members[name] = Simulated(self, name, number)
        self.membership.started(self.now, name, slot, number)

    def release(self, member: Simulated) -> None:
        member.released = True
        if self.broken_start:
            self.later(0.47, lambda: self.exit(member, 1))  # Between two ticks.
            return
        self.later(self.drawn.uniform(1, 3), lambda: self.register(member))

    def register(self, member: Simulated) -> None:
        if not member.alive or member.epoch == self.epoch:
            return
        if self.down or member.frozen:
            self.later(0.2, lambda: self.register(member))
            return
        fields = {
            "run": "",
            "name": member.name,
            "machine": "here",
            "pid": member.number,
            "host": "h",
            "port": 1,
            "generation": member.generation,
            "step": member.step,
            "micro_batches": COUNT,
            "steps": self.steps,
            "save": self.save,
            "facts": {"jax": "1"},
            "token": member.name,
        }
        message = received("register", fields)
        slot = self.membership.members[member.name].slot
        why = self.membership.register(self.now, message, member.name, slot)
        self.do()
        if self.down:
            self.later(0.2, lambda: self.register(member))
            return
        if why:
            self.exit(member, 1)
            return
        member.connected()
        if not member.beats:
            member.beats = True
            member.beat()
            self.later(self.drawn.uniform(1, 3), lambda: self.ready(member))

    def ready(self, member: Simulated) -> None:
        member.phase, member.is_ready = STOPPED, True
        member.say("ready")
        late, member.late = member.late, []
        for said in late:
            member.hear(said)

    def names(self, event: str) -> list[Any]:
        return [e.fields.get("name") for e in self.events if e.event == event]
