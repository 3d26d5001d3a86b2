"""Messages by their names on the wire, as a process takes them off it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from whalejax.wire import swarm_messages
from whalejax.wire.messages import Message, Messages, encode
from whalejax.wire.run_messages import TO_SUPERVISOR


_IN_SWARMS: Final = [
    one
    for _, one in inspect.getmembers(swarm_messages, inspect.isclass)
    if issubclass(one, Message) and one.__module__ == swarm_messages.__name__
]
SWARM: Final = Messages(*_IN_SWARMS)
"""All questions and answers of swarms."""


def received(
    kind: str,
    fields: Mapping[str, Any] | None = None,
    allowed: Messages[Any] = TO_SUPERVISOR,
    arrays: tuple[np.ndarray, ...] = (),
) -> Any:
    """What a process makes of a message.

    Raises:
        WireError: it is none that may come.
    """
    return allowed.decode(*loose(kind, fields, arrays))


def arrives(message: Message, allowed: Messages[Any]) -> Any:
    """What a process makes of a message that another one sends.

    Raises:
        WireError: it is none that may come.
    """
    text, views = encode(message)
    return allowed.decode(text, b"".join(views))


def loose(
    kind: str,
    fields: Mapping[str, Any] | None = None,
    arrays: tuple[np.ndarray, ...] = (),
) -> tuple[bytes, bytes]:
    """Values and arrays of a message that nobody has checked."""
    more = {"arrays": arrays} if arrays else {}
    text, views = encode(Loose({"kind": kind, **(fields or {}), **more}))  # type: ignore[arg-type]
    return text, b"".join(views)


class Loose(dict[str, Any]):
    """A message of any kind and fields, to be sent without a check."""

    kind: Final = "loose"


def values(message: Message) -> Any:
    """The values of a message, tuples as lists."""
    return msgspec.to_builtins(message)
