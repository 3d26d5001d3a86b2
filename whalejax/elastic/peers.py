"""Connections between the members of one generation, and what came over them.

Each generation has connections of its own: what was under way in an earlier one is lost
with them, and cannot be taken for a part of this one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from whalejax.elastic.wire.connection import Channel, Closed, accept, dial, listen
from whalejax.elastic.wire.framing import Message, WireError
from whalejax.elastic.wire.messages import TO_PEER, checked


CONNECT_SECONDS: Final = 30.0
"""For members of a generation to find each other; then the supervisor is told."""

_TICK_SECONDS: Final = 0.05
_MOST_GREETED: Final = 256
_SILENT_SECONDS: Final = 86_400.0

Look = Callable[[], None]
"""Called while something is waited for; raises where waiting has no point any more."""


class Peers:
    """The other members of a generation.

    Attributes:
        host, port: where this member is reached.
        generation: the one that it is in.
    """

    def __init__(self, key: bytes, host: str = "127.0.0.1") -> None:
        """Listen, and connect to nobody yet.

        Args:
            key: of the run.
            host: address that the other members reach.
        """
        self._key, self.host = key, host
        self._listening = listen(host)
        self.port: int = self._listening.getsockname()[1]
        self.generation, self._name = -1, ""
        self._open = threading.Semaphore(_MOST_GREETED)
        self._changed = threading.Condition()
        self._channels: dict[tuple[int, str], Channel] = {}
        self._inbox: dict[tuple[int, str, str, int], list[Message]] = {}
        self._broken: dict[str, str] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(
        self,
        generation: int,
        name: str,
        members: Sequence[tuple[str, str, int]],
        look: Look,
    ) -> None:
        """Connect to the members of a generation, and leave the one before.

        Args:
            generation: its number.
            name: of this member.
            members: names, hosts and ports, by rank.
            look: called while others are waited for.

        Raises:
            WireError: one does not answer in time; ``broken`` tells which.
        """
        self._leave(generation)
        self.generation, self._name = generation, name
        rank = [m[0] for m in members].index(name)
        end = time.monotonic() + CONNECT_SECONDS
        for other, host, port in members[:rank]:
            look()
            try:
                channel = dial((host, port), self._key, seconds=CONNECT_SECONDS / 3)
                fields = {"generation": generation, "name": name}
                channel.send(Message(kind="hello", fields=fields))
            except WireError as error:
                self._breaks(generation, other, str(error))
                raise
            self._take(generation, other, channel)
        for other, _, _ in members[rank + 1 :]:
            self._await(generation, other, end, look)

    def _await(self, generation: int, other: str, end: float, look: Look) -> None:
        while True:
            with self._changed:
                if (generation, other) in self._channels:
                    return
                self._changed.wait(_TICK_SECONDS)
            look()
            if time.monotonic() > end:
                why = f"did not connect in {CONNECT_SECONDS:.0f} s"
                self._breaks(generation, other, why)
                raise WireError(f"{other} {why}")

    @property
    def broken(self) -> dict[str, str]:
        """Members of this generation that cannot be reached any more, and why."""
        with self._changed:
            return dict(self._broken)

    def send(self, other: str, message: Message, look: Look) -> None:
        """Send a member of this generation a message.

        Args:
            other: its name.
            message: what to send.
            look: called while it takes nothing.
        """

        def gives_up() -> bool:
            look()
            return False

        channel = self._channels.get((self.generation, other))
        if channel is None:
            raise Closed(f"{other} is not connected")
        try:
            channel.send(message, seconds=CONNECT_SECONDS * 10, gives_up=gives_up)
        except WireError as error:
            self._breaks(self.generation, other, str(error))
            raise

    def take(self, other: str, kind: str, step: int, look: Look) -> Message:
        """The next message of a kind and step from a member of this generation.

        Args:
            other: its name.
            kind: of the message.
            step: that it is about.
            look: called while it is waited for.
        """
        key = (self.generation, other, kind, step)
        while True:
            with self._changed:
                found = self._inbox.get(key)
                if found:
                    message = found.pop(0)
                    if not found:
                        del self._inbox[key]
                    return message
                self._changed.wait(_TICK_SECONDS)
            look()

    def wake(self) -> None:
        """Let whoever waits look at once."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections."""
        self._listening.close()
        self._leave(1 << 60)

    # Threads.

    def _leave(self, generation: int) -> None:
        """End the connections of generations before this one."""
        with self._changed:
            old = [key for key in self._channels if key[0] < generation]
            channels = [self._channels.pop(key) for key in old]
            for key in [key for key in self._inbox if key[0] < generation]:
                del self._inbox[key]
            self._broken.clear()
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:
                return  # Closed.
            if self._open.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(link,), daemon=True).start()
            else:
                link.close()

    def _greet(self, link: socket.socket) -> None:
        try:
            channel = accept(link, self._key)
            said = checked(channel.receive(seconds=CONNECT_SECONDS), TO_PEER)
        except WireError:
            return
        finally:
            self._open.release()
        generation, other = said.fields.get("generation", -1), said.fields.get("name")
        if said.kind != "hello" or generation < self.generation or not other:
            channel.close()  # Of a generation that is over.
            return
        self._take(generation, other, channel)

    def _take(self, generation: int, other: str, channel: Channel) -> None:
        with self._changed:
            self._channels[generation, other] = channel
            self._changed.notify_all()
        threading.Thread(
            target=self._read, args=(generation, other, channel), daemon=True
        ).start()

    def _read(self, generation: int, other: str, channel: Channel) -> None:
        while True:
            try:
                said = checked(channel.receive(seconds=_SILENT_SECONDS), TO_PEER)
            except WireError as error:
                channel.close()
                self._breaks(generation, other, str(error))
                return
            if said.fields.get("generation", generation) != generation:
                continue  # Of another generation: it counts for nothing here.
            with self._changed:
                key = (generation, other, said.kind, said.fields.get("step", -1))
                self._inbox.setdefault(key, []).append(said)
                self._changed.notify_all()

    def _breaks(self, generation: int, other: str, why: str) -> None:
        with self._changed:
            if generation == self.generation:
                self._broken[other] = why
            self._changed.notify_all()
