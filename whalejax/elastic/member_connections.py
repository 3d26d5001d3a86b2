"""Connections between the members of one generation, and their messages.

Each generation has its own connections, so messages of an earlier generation cannot be
mistaken for those of the current one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from whalejax.wire import run_messages as wire
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.connection import Channel, ConnectionClosedError, dial, listen
from whalejax.wire.keys import Key
from whalejax.wire.messages import DATA_BYTES, M, Message, WireError


CONNECT_SECONDS: Final = 30.0
"""Seconds in which all members of a generation must connect."""

_TICK_SECONDS: Final = 0.05
_DIALS: Final = 3
_AGAIN_SECONDS: Final = 0.2
_CLOSED: Final = 1 << 60
"""Number of a generation that never begins."""

_SILENT_SECONDS: Final = 86_400.0

Look = Callable[[], None]
"""Function called during a wait; raises if the wait has become useless."""


class Peers:
    """The other members of a generation.

    Attributes:
        host, port: Address at which other members reach this one.
        generation: Number of the current generation; -1 before ``connect``.
    """

    def __init__(self, key: Key, host: str = "127.0.0.1") -> None:
        """Listens for connections; makes none yet."""
        self._key, self.host = key, host
        listening = listen(host)
        self.port: int = listening.getsockname()[1]
        self.generation, self._least, self._name = -1, -1, ""
        self._changed = threading.Condition()
        self._channels: dict[tuple[int, str], Channel] = {}
        self._inbox: dict[tuple[int, str, type[Message], int], list[Message]] = {}
        self._broken: dict[str, str] = {}
        self._who: dict[Channel, tuple[int, str]] = {}
        self._acceptor = Acceptor(
            listening,
            key,
            self._notice,
            most_bytes=DATA_BYTES,
            idle_seconds=_SILENT_SECONDS,
        )

    def connect(
        self,
        generation: int,
        name: str,
        members: Sequence[tuple[str, str, int]],
        look: Look,
    ) -> None:
        """Connects to the members of a generation, and leaves the previous one.

        Args:
            generation: Number of the generation.
            name: Name of this member.
            members: Names, hosts and ports, by rank.
            look: Called during waits for others.

        Raises:
            WireError: A member cannot be reached, or does not connect in time. The
                member is then in ``broken``.
        """
        self._leave(generation)
        self.generation, self._name = generation, name
        rank = [m[0] for m in members].index(name)
        end = time.monotonic() + CONNECT_SECONDS
        for other, host, port in members[:rank]:
            look()
            try:
                channel = self._dial((host, port), look)
                self._take(generation, other, channel)
                channel.send(wire.PeerHello(generation=generation, name=name))
            except WireError as error:
                self._breaks(generation, other, str(error))
                raise
        for other, _, _ in members[rank + 1 :]:
            self._await(generation, other, end, look)

    def _dial(self, address: tuple[str, int], look: Look) -> Channel:
        """Connects to a member; retries if the connection is closed, as under load."""
        left = _DIALS
        while True:
            try:
                return dial(
                    address,
                    self._key,
                    seconds=CONNECT_SECONDS / 3,
                    most_bytes=DATA_BYTES,
                    notify=self._notice,
                )
            except ConnectionClosedError:
                left -= 1
                if not left:
                    raise
            look()
            time.sleep(_AGAIN_SECONDS)

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
        """Members of this generation that became unreachable, and the reasons."""
        with self._changed:
            return dict(self._broken)

    def send(self, other: str, message: Message, look: Look) -> None:
        """Sends a message to a member of this generation.

        Raises:
            WireError: The member is not connected, or does not read the message.
        """

        def gives_up() -> bool:
            look()
            return False

        channel = self._channels.get((self.generation, other))
        if channel is None:
            raise ConnectionClosedError(f"{other} is not connected")
        try:
            channel.send(message, seconds=CONNECT_SECONDS * 10, gives_up=gives_up)
        except WireError as error:
            self._breaks(self.generation, other, str(error))
            raise

    def take(self, other: str, kind: type[M], step: int, look: Look) -> M:
        """Returns a member's next message of a kind and step; waits for it.

        If the member becomes unreachable, only ``look`` ends the wait, by raising.
        """
        key = (self.generation, other, kind, step)
        while True:
            with self._changed:
                entry = self._inbox.get(key)
                if entry:
                    message = entry.pop(0)
                    if not entry:
                        del self._inbox[key]
                    return cast(M, message)
                self._changed.wait(_TICK_SECONDS)
            look()

    def close(self) -> None:
        """Ends all connections."""
        self._leave(_CLOSED)
        self._acceptor.close()

    # Threads.

    def _leave(self, generation: int) -> None:
        with self._changed:
            self._least = generation
            old = [key for key in self._channels if key[0] < generation]
            channels = [self._channels.pop(key) for key in old]
            for key in [key for key in self._inbox if key[0] < generation]:
                del self._inbox[key]
            self._broken.clear()
        for channel in channels:
            channel.close()

    def _take(self, generation: int, other: str, channel: Channel) -> None:
        with self._changed:
            if generation < self._least:
                channel.close()
                return
            old = self._channels.get((generation, other))
            self._channels[generation, other] = channel
            self._who[channel] = generation, other
            self._changed.notify_all()
        if old is not None:
            old.close()

    def _notice(self, channel: Channel) -> None:
        try:
            while True:
                who = self._who.get(channel)
                if who is None:
                    hello = channel.next(wire.HELLO)
                    if hello is None:
                        return
                    self._take(hello.generation, hello.name, channel)
                    continue
                said = channel.next(wire.TO_PEER)
                if said is None:
                    return
                self._put(*who, said)
        except WireError as error:
            channel.close()
            who = self._who.pop(channel, None)
            if who is not None:
                self._on_disconnect(*who, channel, str(error))

    def _put(
        self,
        generation: int,
        other: str,
        said: wire.GradientPart | wire.Total | wire.State,
    ) -> None:
        if getattr(said, "generation", generation) != generation:
            return
        with self._changed:
            key = (generation, other, type(said), getattr(said, "step", -1))
            self._inbox.setdefault(key, []).append(said)
            self._changed.notify_all()

    def _on_disconnect(
        self, generation: int, other: str, channel: Channel, why: str
    ) -> None:
        """Handles the end of a connection, unless another has replaced it."""
        with self._changed:
            if self._channels.get((generation, other)) is not channel:
                return
            if generation != self.generation:  # A later ``connect`` waits for another.
                del self._channels[generation, other]
        self._breaks(generation, other, why)

    def _breaks(self, generation: int, other: str, why: str) -> None:
        with self._changed:
            if generation == self.generation:
                self._broken[other] = why
            self._changed.notify_all()
