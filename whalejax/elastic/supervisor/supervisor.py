"""The process outside the workers that manages a run.

``Supervisor`` is a policy of ``LocalRun``. It passes messages on to ``react``, which
returns effects. It writes events to the journal before it carries out their effects. If
the supervisor is killed, its members continue, and a supervisor that is restarted in
the same folder takes them over.

The module is long because one class handles every possible event: separate handlers
would share all of its state.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from whalejax.distributed.launch_env import KEY_FILE, is_loopback, reached_host
from whalejax.elastic.agents.agent_fleet import AgentFleet, program
from whalejax.elastic.environment import AT_ONCE, RUN
from whalejax.elastic.environment import SUPERVISOR as SUPERVISOR
from whalejax.elastic.supervisor.event_messages import event_message, tell_user
from whalejax.elastic.supervisor.memory_folder import remove_copies
from whalejax.elastic.supervisor.run_folder import (
    COMPILED,
    compilation_cache,
    processes_of,
    remove_unfinished,
    write_pointer,
)
from whalejax.elastic.supervisor.run_folder import KEY as KEY
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership import events as ev
from whalejax.membership.elastic_run import (
    LONGEST_TURN_SECONDS,
    ElasticRun,
    MemberRecord,
)
from whalejax.membership.history import replay_events
from whalejax.membership.member_messages import refusal
from whalejax.membership.react import react
from whalejax.membership.resizing import resize_refusal
from whalejax.membership.run_ends import saves_last
from whalejax.membership.settings import Supervised as Supervised
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.processes.heartbeat_pipe import BEAT_SECONDS, beat
from whalejax.processes.local_gpus import HELD_SECONDS, SlotGpus
from whalejax.processes.local_processes import began_at, machine
from whalejax.processes.local_run import TICK_SECONDS, LocalRun
from whalejax.state.folder_lock import FolderLock
from whalejax.wire import run_messages as wire
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import Channel, ConnectionClosedError, listen
from whalejax.wire.connection_loop import Waker
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import Message, WireError


ADDRESS: Final = "supervisor.json"

_LONGEST_WHY: Final = 5000
_MOST_EVENTS: Final = 4096
"""Largest number of messages in the loop's queue; further senders wait."""
_FULL_SECONDS: Final = 1.0
_FAREWELL_SECONDS: Final = 5.0
"""Seconds for which the supervisor waits for agents to learn that the run is over."""


class Supervisor:
    """Supervisor of a run: starts, monitors and replaces its members."""

    def __init__(self, run: Supervised) -> None:
        """Prepares the run; starts no process yet."""
        self._run = run
        self._folder = run.folder / FOLDER
        self._state = ElasticRun(settings=run.settings)
        self._effects: list[ev.Effect] = []
        self._unacknowledged: dict[Channel, str] = {}
        self._acknowledged: dict[Channel, tuple[int, float]] = {}
        self._answers: list[tuple[Channel, Message]] = []
        self._ticked_at = float("-inf")
        self._held = contextlib.ExitStack()
        self._loop = LocalRun(
            self,
            self._folder,
            say=tell_user,
            asks=(),
            signals=(AT_ONCE,),
            turn=self._write_turn,
            further=self._do,
        )
        self._processes = self._loop.processes
        self._processes.command = list(run.command)
        self._events: queue.Queue[
            tuple[Channel, wire.OfMember | wire.OfAgent | wire.Resize | None]
        ]
        self._events = queue.Queue(_MOST_EVENTS)
        self._waker: Waker | None = None
        self._channels: dict[str, Channel] = {}
        self._names: dict[Channel, str] = {}
        self._is_closed = False
        self._fleet = AgentFleet[Channel](
            self._state, self._take, self._send, Channel.close
        )
        places = run.settings.most + run.settings.spares
        self._gpus = SlotGpus({**os.environ, **(run.environment or {})}, places)
        self._save: Path | None = None
        self._is_full = False
        self._terminated = self._at_once = False
        self._decided: ev.End | None = None
        self._end: ev.End | None = None
        self._ends_at, self._farewell_until = float("inf"), 0.0
        self._says_farewell = False
        self._beat_at = 0.0
        self._turn_at = time.monotonic()

    def run(self) -> int:
        """Supervises until the end.

        Returns:
            0 if all steps were done; 143 if the run was asked to end; 2 if its settings
            or job are invalid; else 1.

        Raises:
            WhaleError: Another supervisor, or processes of a lost run, use the folder.
                Or the folder cannot be written, or the address is not available.
        """
        with self._held:
            try:
                return self._loop.run().status
            except BaseException:
                self._fleet.finish("its supervisor failed")
                raise

    # Start.

    def _open_folder(self) -> None:
        self._held.enter_context(FolderLock(self._folder))
        make_key(self._folder / KEY)
        self._key = load_key(self._folder / KEY)
        events = journal.read_events(self._folder / journal.EVENTS)
        # A number is never reused in a folder, not even by a later run.
        numbers = [e["generation"] for e in events if e["event"] == "preparing"]
        self._state.generation = max(numbers, default=0)
        self._count = sum(said["event"] == "started" for said in events)
        opened = [n for n, said in enumerate(events) if said["event"] == "opened"]
        run = events[opened[-1] :] if opened else []
        if not run and (there := processes_of(self._folder / KEY)):
            raise WhaleError(
                f"processes {', '.join(map(str, there))} are of a run in "
                f"{self._folder} whose list of processes, {journal.EVENTS}, is gone or "
                "empty: others would be started beside them. End them, and start again"
            )
        before = run[0] if run and self._goes_on(run) else None
        self._name = secrets.token_hex(8) if before is None else before.get("run", "")
        if before is not None:
            self._gpus.go_on(before)
        self._journal = journal.JournalLines(
            self._folder / journal.EVENTS, durable=True
        )
        self._held.callback(self._journal.close)
        self._commits = journal.JournalLines(
            self._folder / journal.COMMITS, durable=False
        )
        self._held.callback(self._commits.close)
        self._listen(before)
        self._environment = {**(self._run.environment or {}), RUN: self._name}
        environment = {
            **compilation_cache(self._folder / COMPILED),
            **self._environment,
            SUPERVISOR: joined_address(*self._address),
            KEY_FILE: str((self._folder / KEY).absolute()),
        }
        self._processes.environment = environment
        if self._run.places:
            self._open_fleet()
        elif self._run.command and not self._run.quiet:
            tell_user(self._gpus.division_text())
        if before is not None:
            self._take_back(run)
        else:
            host, port = self._address
            told: dict[str, Any] = {"host": host, "port": port, "machine": machine()}
            remove_copies(self._folder / KEY)  # copies of a killed run
            told = {**told, "run": self._name, **self._gpus.journal_fields()}
            self._journal.write("opened", told)
            if self._run.command:
                if self._run.settings.first is not None:
                    first = self._run.settings.first
                    resized = ev.ResizeEvent(first, self._run.devices)
                    self._take(time.monotonic(), resized)
                self._take(time.monotonic(), ev.StartsAllowedEvent())

    def _goes_on(self, run: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether the run of these events continues.

        A run without a live process, as after a reboot, is over even if its journal has
        no end. Later events in the folder then belong to another run.
        """
        if self._run.again:
            return True
        if journal.is_over(run):
            return False
        there = replay_events(self._run.settings, run).present_members()
        here = run[0].get("machine", machine()) == machine()
        if any(m.slot is None for m in there):
            return here and not self._run.command
        if any(m.agent for m in there):
            asked = self._run.host, self._run.port
            return here and asked == (run[0].get("host"), run[0].get("port"))
        return here and any(began_at(m.pid) == m.began for m in there if m.pid)

    def _listen(self, before: Mapping[str, Any] | None) -> None:
        host, port = self._run.host, self._run.port
        if before is not None:  # The members reconnect to the earlier address.
            host, port = before.get("host", host), before.get("port", port)
        where = joined_address(host, port)
        try:
            self._listening = listen(host, port)
        except OSError as error:
            raise WhaleError(
                f"the supervisor cannot listen at {where} "
                f"({error.strerror or error}). Stop what holds the port; members of "
                "this run look for their supervisor there"
                if before is not None
                else f"the supervisor cannot listen at {where} "
                f"({error.strerror or error}). Give another --port, or leave it out"
            ) from error
        self._waker = Waker()
        self._held.callback(self._waker.close)
        self._loop.watch(self._waker, tuple)
        self._acceptor = Acceptor(self._listening, self._key, self._serve)
        self._held.callback(self._close_channels)
        name = self._listening.getsockname()
        self._address = (name[0], name[1])
        address = {"address": joined_address(*self._address)}
        write_pointer(self._folder / ADDRESS, address)

    def _take_back(self, events: Sequence[Mapping[str, Any]]) -> None:
        now = time.monotonic()
        self._journal.write("restarted", {})
        commits = journal.read_commits(self._folder / journal.COMMITS)
        since = [said for said in commits if said["time"] >= events[0]["time"]]
        resumed = ev.Resume(
            events=events,
            losses=journal.losses(since),
            wall=time.time(),
            committed_at=since[-1]["time"] if since else 0.0,
        )
        self._take(now, resumed)
        if self._state.over is None:
            self._lock_save(self._state.facts.get("save", ""))
        self._fleet.expect(now)
        for name, member in [*self._state.members.items()]:
            if member.is_there and member.slot is not None and not member.agent:
                if not self._processes.adopt(name, member.pid, member.began):
                    log = self._processes.log_tail(name)
                    self._take(now, ev.ProcessExitEvent(name, None, log))

    # Events.

    def react(self, now: float, event: ev.Event) -> Sequence[ev.Effect]:
        """Applies an event, and returns its effects; see ``RunPolicy``."""
        match event:
            case ev.StartsAllowedEvent():
                self._open_folder()
            case ev.ProcessExitEvent():
                self._take_events()  # messages that the process sent before its end
                self._take(now, event)
            case ev.NotStarted():
                self._take(now, event)
            case ev.Terminate(number=number):
                self._terminated = True
                self._at_once = self._at_once or number == AT_ONCE
            case ev.Tick():
                self._tick()
        effects, self._effects = self._effects, []
        return effects

    def _tick(self) -> None:
        if self._end is not None and self._is_over():
            self._effects.append(self._end)
            return
        now = self._take_all()
        if self._says_farewell:
            return
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            # An event for each rejected connection could fill the disk.
            if (refused := self._acceptor.take_refused(now)) is not None:
                told = {"count": refused.count, "why": refused.why}
                self._journal.write("stranger", told)
            self._beat(now)
            self._write_kept()
            if self._at_once:
                self._take(now, ev.Terminate(at_once=True))
                self._ends_at = 0.0
            elif self._terminated:
                self._take(now, ev.Terminate(at_once=False))
            self._fleet.tick(now)
            self._take(now, ev.Tick())
        elif not self._state.is_settled:
            self._take(now, ev.Tick())

    def _take(self, now: float, event: ev.Event) -> None:
        """Applies an event, and collects its effects for the end of the turn."""
        for effect in react(self._state, now, event):
            if not isinstance(effect, ev.End):
                self._effects.append(effect)
                continue
            self._decided = self._decided or effect  # Processes may still save.
            self._ends_at = min(self._ends_at, now + self._run.exit_seconds)

    def _take_all(self) -> float:
        """Handles all pending events, and returns the time.

        After a long iteration, this process may have been paused. Then it first waits
        for the threads that read messages, so that no process counts as silent wrongly.
        """
        before, self._turn_at = self._turn_at, time.monotonic()
        if self._turn_at - before > LONGEST_TURN_SECONDS:
            time.sleep(TICK_SECONDS)
        self._take_events()
        return time.monotonic()

    def _beat(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            beat()

    def _write_kept(self) -> None:
        """Writes events that a full disk has delayed; tells the user of a full disk."""
        was_full, self._is_full = self._is_full, not self._is_written()
        problem = self._journal.problem or self._commits.problem
        if self._is_full and not was_full:
            tell_user(
                f"events of this run cannot be written ({problem}); the run goes on, "
                "and no process is started until there is space. A supervisor that is "
                "killed now may not take all its members back"
            )
        elif was_full and not self._is_full:
            tell_user("events of this run can be written again")

    def _is_written(self) -> bool:
        written = self._journal.flush()
        return self._commits.flush() and written

    def _is_over(self) -> bool:
        # Processes of lost agents are no longer listed.
        there, now = [*self._processes.names, *self._fleet.names], time.monotonic()
        if now > self._ends_at:
            for name in there:
                if self._at_once or not saves_last(self._state, now, name):
                    self._processes.kill(name)
                    self._fleet.kill(name)
        if not (there or self._says_farewell):
            assert self._end is not None
            self._says_farewell = True
            self._farewell_until = now + _FAREWELL_SECONDS
            if self._save is not None:
                remove_unfinished(self._save)
            remove_copies(self._folder / KEY)
            self._fleet.finish(self._end.text[:_LONGEST_WHY])
        is_told = not self._fleet.hears_the_end or now > self._farewell_until
        return self._says_farewell and is_told

    def _close_channels(self) -> None:
        self._is_closed = True
        self._acceptor.close()
        (self._folder / ADDRESS).unlink(missing_ok=True)

    # Connections.

    def _serve(self, channel: Channel) -> None:
        try:
            while (said := channel.next(wire.TO_SUPERVISOR)) is not None:
                if isinstance(said, wire.Report) and not said.number:
                    raise WireError("a report has no number")
                self._tell(channel, said)
        except ConnectionClosedError:
            self._tell(channel, None)
        except WireError:
            channel.close()

    def _tell(
        self,
        channel: Channel,
        message: wire.OfMember | wire.OfAgent | wire.Resize | None,
    ) -> None:
        """Queues a message for the loop; None is the end of the connection."""
        while not self._is_closed:
            try:
                self._events.put((channel, message), timeout=1.0)
                break
            except queue.Full:
                continue
        # Heartbeats are frequent, so they wait for the loop's next turn.
        if self._waker is not None and not isinstance(
            message, wire.Beat | wire.AgentBeat
        ):
            self._waker.wake()

    def _take_events(self) -> None:
        now = time.monotonic()
        for _ in range(self._events.qsize()):  # leaves events that come meanwhile
            channel, message = self._events.get_nowait()
            if message is None:
                self._fleet.on_disconnect(now, channel)
                self._acknowledged.pop(channel, None)
                name = self._names.pop(channel, None)
                if name is not None and self._channels.get(name) is channel:
                    del self._channels[name]
                    self._take(now, ev.Disconnected(name))
            elif isinstance(message, wire.Register):
                self._register(now, channel, message)
            elif isinstance(message, wire.ReductionOffer):
                self._say_adding_up(now, channel, message)
            elif isinstance(message, wire.Refusal):
                self._on_refusal(now, channel, message)
            elif isinstance(message, wire.Enlist):
                self._enlist(now, channel, message)
            elif isinstance(message, wire.Resize):
                self._resize(now, channel, message)
            elif isinstance(message, wire.OfAgent):
                self._heard_agent(now, channel, message)
            elif channel in self._names:
                name = self._names[channel]
                self._take(now, ev.MemberMessageEvent(name, message))
                if not isinstance(message, wire.Committed):  # These are frequent.
                    self._unacknowledged[channel] = name

    def _acknowledge(self) -> None:
        """Acknowledges written reports, and answers requests that waited for them."""
        is_written = self._journal.is_written and self._commits.is_written
        heard, self._unacknowledged = self._unacknowledged, {}
        now = time.monotonic()
        goodput = self._state.pace.goodput(now) if heard else 0.0
        for channel, name in heard.items():
            member = self._state.members.get(name)
            number = member.reported if member is not None and is_written else 0
            before, at = self._acknowledged.get(channel, (0, float("-inf")))
            # A member without new reports gets two answers within a lease.
            if number > before or now - at > self._state.lease.seconds / 2:
                self._acknowledged[channel] = number, now
                self._send(channel, wire.ReportReceived(goodput=goodput, number=number))
        answers, self._answers = self._answers, []
        for channel, answer in answers:
            if is_written or not isinstance(answer, wire.EventNoted | wire.ResizeDone):
                self._send(channel, answer)

    def _register(self, now: float, channel: Channel, message: wire.Register) -> None:
        name, slot = self._assign_name(message)
        # Lock a folder of checkpoints only for a member that may join.
        why = self._other_run(message.run)
        why = why or refusal(self._state, name, message)
        why = why or self._lock_save(message.save)
        if why:
            self._record("refused", name=name, why=why)
            self._answers.append((channel, wire.RegistrationRefused(why=why)))
            return
        self._take(now, ev.RegisterEvent(name, slot, message))
        old = self._channels.get(name)
        if old is not None and old is not channel:
            self._names.pop(old, None)
            old.close()
        self._channels[name], self._names[channel] = channel, name
        beats = self._run.settings.beat_seconds
        self._send(
            channel, wire.MemberWelcome(run=self._name, name=name, beat_seconds=beats)
        )

    def _other_run(self, run: str) -> str:
        if run in ("", self._name):  # unknown to processes that were started by hand
            return ""
        return "this member is of an earlier run in the same folder, which is over"

    def _on_refusal(self, now: float, channel: Channel, message: wire.Refusal) -> None:
        member = self._starting_member(message.machine, message.pid)
        if member is not None:
            self._take(now, ev.Unrunnable(member.name, message.why))
        self._send(channel, wire.RunEnded(why="it cannot be run", well=False))

    def _starting_member(self, where: str, pid: int) -> MemberRecord | None:
        for member in self._state.members.values():
            is_there = where == (member.machine or machine()) and pid == member.pid
            if member.status == "starting" and is_there:
                return member
        return None

    def _assign_name(self, message: wire.Register) -> tuple[str, int | None]:
        """Returns a member's name and its slot, which is None for a foreign process."""
        members = self._state.members
        if message.name:
            known = members.get(message.name)
            return message.name, None if known is None else known.slot
        for member in members.values():
            # The member may have lost its connection before it got its name.
            if member.token and member.token == message.token and member.is_there:
                return member.name, member.slot
        started = self._starting_member(message.machine, message.pid)
        if started is not None:
            return started.name, started.slot
        self._count += 1
        return f"x{self._count}", None

    def _lock_save(self, save: str) -> str:
        if not save or self._save is not None:
            return ""
        try:
            self._held.enter_context(FolderLock(Path(save)))
            folder = {"folder": str(self._folder.absolute())}
            write_pointer(Path(save) / f"{FOLDER}.json", folder)
        except WhaleError as error:
            return str(error)
        except OSError as error:
            return f"{save} cannot be written ({error.strerror or error})"
        self._save = Path(save)
        return ""

    def _resize(self, now: float, channel: Channel, message: wire.Resize) -> None:
        devices = None if message.devices is None else tuple(message.devices)
        why = resize_refusal(self._state, message.size)
        if devices is not None and len(devices) < message.size:
            why = (
                f"{count_text(len(devices), 'device')} for "
                f"{count_text(message.size, 'member')}; expected as many"
            )
        if why:
            self._answers.append((channel, wire.RegistrationRefused(why=why)))
            return
        self._take(now, ev.ResizeEvent(message.size, devices))
        self._answers.append((channel, wire.ResizeDone(size=message.size)))

    def _send(self, channel: Channel, message: Message) -> None:
        with contextlib.suppress(WireError):
            channel.post(message)

    # Agents.

    def _open_fleet(self) -> None:
        command = self._run.command
        self._fleet.program = program(command, self._environment, sys.executable)
        self._state.placed = True
        self._state.awaited = set(self._run.awaited)
        host, port = self._address
        where = joined_address(reached_host(host), port)
        key = (self._folder / KEY).absolute()
        alone = ", on this machine alone" if is_loopback(host) else ""
        text = f"to add a machine{alone}: whalejax agent {where} --key {key}"
        tell_user(text)

    def _say_adding_up(
        self, now: float, channel: Channel, message: wire.ReductionOffer
    ) -> None:
        """Answers a process that asks for the run's gradient reduction."""
        if other := self._other_run(message.run):
            self._send(channel, wire.RegistrationRefused(why=other))
            return
        self._take(now, ev.ReductionProposed(message.by, message.why))
        by, why = self._state.adding_up
        decision = wire.ReductionDecision(
            by=cast(wire.Way, by),
            why=why,
            processes=self._run.settings.most,
            hosts=self._state.hosts(),
        )
        self._answers.append((channel, decision))

    def _enlist(self, now: float, channel: Channel, message: wire.Enlist) -> None:
        why = self._fleet.refusal(message)
        if not self._run.places:
            why = (
                "the processes of this run are started on its own machine. Give "
                "whalejax launch --host"
            )
        if why:
            self._record("agent_refused", agent=message.agent, why=why)
            self._answers.append((channel, wire.RegistrationRefused(why=why)))
            return
        self._fleet.enlist(now, channel, message)

    def _heard_agent(self, now: float, channel: Channel, message: wire.OfAgent) -> None:
        self._fleet.on_message(now, channel, message)
        if isinstance(message, wire.Exited):
            if self._state.devices is not None:  # A scheduler waits for the devices.
                self._record("process_ended", name=message.name)
            self._answers.append((channel, wire.EventNoted(name=message.name)))

    # Effects.

    @contextlib.contextmanager
    def _write_turn(self, effects: Sequence[ev.Effect]) -> Iterator[None]:
        """Writes a turn's events before the block carries out their effects."""
        for effect in effects:
            self._write(effect)
        self._is_written()
        self._end = self._decided
        yield
        self._acknowledge()

    def _record(self, event: str, **fields: object) -> None:
        self._effects.append(ev.WriteEvent(event, fields))

    def _write(self, effect: ev.Effect) -> None:
        match effect:
            case ev.WriteEvent(event=event, fields=fields):
                self._journal.add(event, fields)
                tell_user(event_message(event, fields, quiet=self._run.quiet))
            case ev.StepCommit():
                self._commits.add(journal.COMMITTED, effect._asdict())

    def _do(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(name=name, message=message):
                channel = self._channels.get(name)
                if channel is not None:
                    self._send(channel, message)
            case ev.KillEffect(name=name):
                self._fleet.kill(name)
            case ev.ReleaseEffect(name=name):
                self._fleet.release(name)

    def start(self, slot: int) -> Sequence[ev.Effect]:
        """Starts the process of a slot, here or by an agent; see ``RunPolicy``."""
        if self._run.command:
            self._start(slot)
        effects, self._effects = self._effects, []
        return effects

    def _start(self, slot: int) -> None:
        now = time.monotonic()
        if not self._is_written():
            self._take(now, ev.Deferred(slot, until=now + _FULL_SECONDS))
            return
        name = f"m{self._count + 1}"
        if self._run.places:
            self._count += self._fleet.start(now, slot, name)
            return
        if (self._gpus.gpus or self._state.devices) and self._is_taken(now, slot):
            # An earlier process has the slot's GPUs until it has ended.
            self._take(now, ev.Deferred(slot, until=now + TICK_SECONDS))
            return
        try:
            own = self._gpus.of(slot, self._state.devices)
        except WhaleError as error:  # too few GPUs here; a retry cannot help
            self._record("not_started", slot=slot, why=str(error))
            self._take(now, ev.Deferred(slot))
            return
        self._count += 1
        pid, began = self._processes.start(name, own)
        self._take(now, ev.Started(name, slot, pid, began))

    def _is_taken(self, now: float, slot: int) -> bool:
        members = self._state.members
        there = [members[n] for n in self._processes.names if n in members]
        holder = next((member for member in there if member.slot == slot), None)
        if self._gpus.is_late(now, slot, 0 if holder is None else holder.pid):
            assert holder is not None
            why = f"it has not ended {HELD_SECONDS:g} s after it was given up"
            told = {"name": holder.name, "pid": holder.pid, "slot": slot}
            self._record("slot_held", **told, why=why)
        return holder is not None
