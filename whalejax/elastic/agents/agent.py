"""The process that runs members of an elastic run on its machine: ``whalejax agent``.

The agent starts and kills processes on the supervisor's request, and reports their
ends. The processes end when the agent ends, or when the supervisor is unreachable for
too long. The agent has one thread, because the system kills the processes when the
thread that started them ends.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whalejax._version import __version__
from whalejax.distributed.launch_env import KEY_FILE, split_address
from whalejax.elastic.environment import (
    HELD_BY,
    MEMBER_HOST,
    RUN,
    SUPERVISOR,
    local_host,
)
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.elastic.supervisor.memory_folder import remove_copies
from whalejax.elastic.supervisor.run_folder import COMPILED, compilation_cache
from whalejax.journals.journal import FOLDER
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import count_text
from whalejax.processes.local_gpus import VISIBLE, own_gpus, refusal, visible_gpus
from whalejax.processes.local_processes import log_folder, machine
from whalejax.processes.local_run import LocalRun
from whalejax.wire import run_messages as wire
from whalejax.wire.connection import (
    Channel,
    OtherProtocol,
    WrongKey,
    dial,
    listen,
)
from whalejax.wire.connection_loop import Waker
from whalejax.wire.keys import load_key
from whalejax.wire.messages import WireError


_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_AGAIN_SECONDS: Final = 0.5
_FIRST_BEAT_SECONDS: Final = 1.0
_SEND_SECONDS: Final = 5.0
_DIAL_SECONDS: Final = 5.0
_MOST_SAID: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of an agent.

    Attributes:
        supervisor: Host and port of the supervisor.
        key: Key file of the run.
        processes: Largest number of processes of this agent at a time.
        name: Unique name among the run's agents; None uses the machine's name.
        host: Address at which other members reach the members of this machine; None
            uses the local address of the connection to the supervisor.
        logs: Folder of logs.
        patience: Seconds to wait for an unreachable supervisor before giving up.
    """

    supervisor: str
    key: Path
    processes: int = 1
    name: str | None = None
    host: str | None = None
    logs: Path = Path("logs")
    patience: float = 120.0


def _check(name: str, host: str | None) -> str | None:
    """Checks name and address; returns the numeric address, or None."""
    with Problems("whalejax agent") as problems:
        if not _NAME.fullmatch(name):
            problems.add(
                f"--name is {name[:80]!r}; expected at most 64 letters, digits, dots, "
                "dashes and underscores"
            )
        try:
            if host is not None:
                with listen(host) as result:
                    host = str(result.getsockname()[0])
        except OSError as error:
            problems.add(
                f"--host is {host}; nothing can listen at that address of this machine "
                f"({error.strerror or error}). Give one of its own addresses"
            )
    return host


class Agent:
    """Agent of a run: its processes, and its connection to the supervisor."""

    def __init__(self, options: AgentOptions) -> None:
        """Prepares the agent; connects to nothing yet.

        Raises:
            WhaleError: The address is invalid, or the folder of logs cannot be made.
        """
        self._options, self._address = (
            options,
            split_address(options.supervisor, "HOST:PORT"),
        )
        node = os.environ.get("SLURMD_NODENAME")
        self.name = options.name or node or socket.gethostname()
        self._host = _check(self.name, options.host)
        self._logs = log_folder((options.logs / FOLDER).absolute())
        self._token = secrets.token_hex(16)
        self._loop = LocalRun(
            self, self._logs, say=tell_user, end_with_this=True, asks=()
        )
        self._processes = self._loop.processes
        self._waker = Waker()
        self._loop.watch(self._waker, self._listen)
        self._started: dict[str, tuple[int, str]] = {}
        self._gpus = visible_gpus()
        if why := refusal(self._gpus, options.processes):
            raise WhaleError(f"--processes of this agent: {why}")
        self._places: dict[str, int] = {}
        self._unnoted: dict[str, wire.Exited] = {}
        self._channel: Channel | None = None
        self._away_since = time.monotonic()
        self._beat_seconds, self._beat_at = _FIRST_BEAT_SECONDS, 0.0
        self._again_at = 0.0
        self._requests: list[wire.Start] = []
        self._leaving = self._joined = self._waits = self._over = False

    def run(self) -> int:
        """Runs processes until the run is over, or until the agent is asked to end.

        Returns:
            143 if a second signal ended the members immediately, else 0.

        Raises:
            WhaleError: The supervisor refuses the agent, has another key, or is
                unreachable.
        """
        try:
            return self._loop.run().status
        finally:
            if self._over:
                remove_copies(self._options.key)
            if self._channel is not None:
                self._channel.close()
            self._waker.close()

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        """Applies an event, and yields its effects; see ``RunPolicy``."""
        match event:
            case ev.StartsAllowedEvent():
                self._connect(now)
            case ev.ProcessExitEvent(name=name, status=status, log=log):
                self._on_process_end(name, status, log)
            case ev.Terminate(at_once=True):
                text = "asked to end twice: the members of this machine end immediately"
                yield ev.End(Ending.INTERRUPTED, text)
            case ev.Terminate():
                self._leaving, self._beat_at = True, 0.0
                names = self._processes.names
                what = f"asked to end: {len(names)} processes leave after their step"
                yield ev.SayEffect(f"{what}; ask once more to end them at once")
                yield from map(ev.TerminateEffect, names)
            case ev.Tick():
                if self._channel is None and now >= self._again_at:
                    self._connect(now)
                if self._leaving and not self._processes.names and not self._unnoted:
                    # The last heartbeat has reported the request to the supervisor.
                    self._say(wire.AgentBeat(leaving=True))
                    yield ev.End(Ending.COMPLETE, "")
                elif self._channel is not None and now >= self._beat_at:
                    self._beat_at = now + self._beat_seconds
                    self._say(wire.AgentBeat(leaving=self._leaving))

    def _connect(self, now: float) -> None:
        """Tries once to connect to the supervisor.

        Raises:
            WhaleError: It refuses this agent, or was unreachable for too long.
        """
        patience = self._options.patience
        where = self._options.supervisor
        try:
            if not self._joined and not self._options.key.exists():
                raise WireError(f"{self._options.key} is not there yet")
            key = load_key(self._options.key)
            channel = dial(
                self._address,
                key,
                seconds=min(patience, _DIAL_SECONDS),
                notify=lambda _: self._waker.wake(),
            )
        except WireError as error:
            if isinstance(error, WrongKey | OtherProtocol):
                raise WhaleError(
                    f"{error}. Give --key the key file of the supervisor at {where}, "
                    "or a copy of it, and the same whalejax"
                ) from None
            away = time.monotonic() - self._away_since
            self._again_at = now + _AGAIN_SECONDS
            if away > patience and not self._options.key.exists():
                raise WhaleError(
                    f"--key: there was no file {self._options.key} within {away:.0f} "
                    "s. Copy the key file of the run, elastic/key in its folder, to "
                    "this machine, or give more --patience"
                ) from None
            if self._processes.names and away <= 2 * patience:
                return  # The members give up too, but save before they end.
            if away > patience:
                what = "is gone, and" if self._joined else "does not answer; it"
                raise WhaleError(
                    f"the supervisor at {where} {what} was away for {away:.0f} s "
                    f"({error}); the members of this machine are ended. See that "
                    "whalejax launch --host runs there and that this machine reaches "
                    "it, or give more --patience"
                ) from None
            if not self._waits:
                self._waits = True
                tell_user(f"waiting for the supervisor ({error})")
            return
        self._waits = False
        self._channel = channel
        there = [(name, *known) for name, known in self._started.items()]
        there += [(name, 0, "") for name in self._unnoted]
        enlist = wire.Enlist(
            agent=self.name,
            host=self._host or local_host(where),
            machine=machine(),
            room=self._options.processes,
            version=__version__,
            token=self._token,
            there=there,
        )
        self._say(enlist)

    def _listen(self) -> Iterator[ev.Effect]:
        while self._channel is not None:
            try:
                said = self._channel.next(wire.TO_AGENT)
            except WireError:
                self._channel.close()
                self._channel, self._away_since = None, time.monotonic()
                return
            if said is None:
                return
            yield from self._hear(said)

    def _say(self, message: wire.OfAgent) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message, seconds=_SEND_SECONDS)
        except WireError:
            self._channel.shut_down()  # Its remaining messages are still handled.

    # Messages of the supervisor.

    def _hear(self, said: wire.ToAgent) -> Iterator[ev.Effect]:
        match said:
            case wire.Enlisted():
                self._enlisted(said)
            case wire.RegistrationRefused(why=why):
                raise WhaleError(
                    f"the supervisor at {self._options.supervisor} refused this agent: "
                    f"{why}"
                )
            case wire.Start(name=name) if name in self._started or self._leaving:
                why = "it was asked to end" if self._leaving else f"{name} runs already"
                self._say(wire.NotLaunched(name=name, why=why))
            case wire.Start():
                self._requests.append(said)
                yield ev.StartEffect(len(self._requests) - 1)
            case wire.Release(name=name):
                yield ev.ReleaseEffect(name)
            case wire.Kill(name=name) if name in self._processes.names:
                yield ev.KillEffect(name, 0)
            case wire.Kill(name=name):
                if name not in self._unnoted:
                    self._say(wire.Exited(name=name, status=None, said=""))
            case wire.EventNoted(name=name):
                self._unnoted.pop(name, None)
            case wire.Finish(why=why):
                tell_user(f"the run is over: {why or 'all steps are done'}")
                self._over = True
                yield ev.End(Ending.COMPLETE, "")

    def _enlisted(self, said: wire.Enlisted) -> None:
        first, *rest = said.command
        self._processes.command = [first or sys.executable, *rest]
        compiled = self._logs / f"{COMPILED}-{self.name}"
        self._processes.environment = {
            **compilation_cache(compiled),
            **said.environment,
            SUPERVISOR: self._options.supervisor,
            KEY_FILE: str(self._options.key.absolute()),
            HELD_BY: self.name,
            **({MEMBER_HOST: self._host} if self._host else {}),
        }
        remove_copies(self._options.key, but=said.environment.get(RUN, ""))
        self._beat_seconds = said.beat_seconds
        for exited in self._unnoted.values():
            self._say(exited)
        if not self._joined:
            self._joined = True
            tell_user(
                f"agent {self.name} joined the run at {self._options.supervisor}; it "
                f"holds at most {count_text(self._options.processes, 'process')}, with "
                f"logs in {self._logs}"
            )

    def start(self, slot: int) -> None:
        """Starts a requested process, which waits until the supervisor releases it."""
        name, device = self._requests[slot].name, self._requests[slot].device
        try:
            own = self._own_gpus(name) if not device else {VISIBLE: self._gpu(device)}
            pid, began = self._processes.start(name, own)
        except (OSError, WhaleError) as error:
            self._places.pop(name, None)
            why = getattr(error, "strerror", None) or str(error)
            self._say(wire.NotLaunched(name=name, why=why))
            return
        self._started[name] = pid, began
        self._say(wire.Launched(name=name, pid=pid, began=began))

    def _gpu(self, device: str) -> str:
        """Returns the GPU with an index among the GPUs visible to this agent."""
        if not device.isdigit() or not self._gpus:
            return device
        if int(device) >= len(self._gpus):
            raise WhaleError(
                f"device {device} is not one of the {len(self._gpus)} GPUs here "
                f"({', '.join(self._gpus)})"
            )
        return self._gpus[int(device)]

    def _own_gpus(self, name: str) -> dict[str, str]:
        """Returns the environment that gives a process GPUs of its own."""
        if not self._gpus:
            return {}
        count = self._options.processes
        taken = self._places.values()
        free = [place for place in range(count) if place not in taken]
        if not free:
            raise WhaleError(
                f"it holds {len(self._places)} of {count_text(count, 'process')}"
            )
        self._places[name] = free[0]
        return own_gpus(self._gpus, count, free[0])

    def _on_process_end(self, name: str, status: int | None, log: str) -> None:
        self._started.pop(name, None)
        self._places.pop(name, None)
        exited = wire.Exited(name=name, status=status, said=log[-_MOST_SAID:])
        self._unnoted[name] = exited
        self._say(exited)
