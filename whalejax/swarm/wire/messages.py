"""What the processes of a swarm ask each other, and what a question must hold.

Checked once, where a question arrives; answers are checked by who asked. A question is
safe to send twice: its key is generation, step, stage, micro-batch and attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from whalejax.elastic.wire.framing import Message
from whalejax.elastic.wire.messages import checked as _checked


MOST_PEERS: Final = 4096
_LONGEST: Final = 20_000
_MOST_NUMBERS: Final = 65_536

Fields = Mapping[str, Callable[[Any], bool]]


def _whole(x: Any) -> bool:
    return type(x) is int and -1 <= x < 1 << 62


def _text(x: Any) -> bool:
    return isinstance(x, str) and len(x) <= _LONGEST


def _seconds(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x < 1e9  # So that it is no NaN.


def _flag(x: Any) -> bool:
    return isinstance(x, bool)


def _texts(x: Any) -> bool:
    return isinstance(x, dict) and all(_text(k) and _text(x[k]) for k in x)


def _wholes(x: Any) -> bool:
    return isinstance(x, list) and len(x) <= _MOST_NUMBERS and all(map(_whole, x))


def _address(x: Any) -> bool:
    return (
        isinstance(x, list)
        and len(x) == 2
        and _text(x[0])
        and _whole(x[1])
        and 0 < x[1] < 1 << 16
    )


def _sources(x: Any) -> bool:
    """Stage, name, address and attempt of who holds something."""
    return (
        isinstance(x, list)
        and len(x) <= MOST_PEERS
        and all(
            isinstance(one, list)
            and len(one) == 4
            and _whole(one[0])
            and _text(one[1])
            and _address(one[2])
            and _whole(one[3])
            for one in x
        )
    )


def _holders(x: Any) -> bool:
    """Name and address of peers, and numbers and attempts of what each holds."""
    return (
        isinstance(x, list)
        and len(x) <= MOST_PEERS
        and all(
            isinstance(one, list)
            and len(one) == 4
            and _text(one[0])
            and _address(one[1])
            and _wholes(one[2])
            and _wholes(one[3])
            and len(one[2]) == len(one[3])
            for one in x
        )
    )


_AT: Final[Fields] = {"generation": _whole, "step": _whole}
_CALL: Final[Fields] = {
    **_AT,
    "stage": _whole,
    "number": _whole,
    "attempt": _whole,
    "batch": _address,
    "sources": _sources,
}

TO_PEER: Final[Mapping[str, Fields]] = {
    "ping": {},
    "forward": _CALL,
    "backward": {**_CALL, "cotangents": _sources},
    "fetch": {
        **_AT,
        "phase": _text,
        "number": _whole,
        "attempt": _whole,
        "target": _whole,
    },
    "sum": {**_AT, "stage": _whole, "round": _whole, "peers": _holders},
    "gradients": {
        **_AT,
        "number": _whole,
        "attempt": _whole,
        "part": _whole,
        "parts": _whole,
    },
    "part": {**_AT, "round": _whole},
    "update": {
        **_AT,
        "stage": _whole,
        "round": _whole,
        "level": _whole,
        "heard": _wholes,
        "peers": _holders,
    },
    "sync": {
        **_AT,
        "stage": _whole,
        "keeps": _flag,
        "sources": _holders,
    },
    "state": {"stage": _whole, "step": _whole, "place": _whole},
    "move": {"stage": _whole},
    "stop": {"why": _text},
}
"""Questions to a peer."""

TO_TRAINER: Final[Mapping[str, Fields]] = {
    "ping": {},
    "batch": {"step": _whole, "number": _whole, "places": _wholes},
    "state": {"stage": _whole, "step": _whole, "place": _whole},
    "join": {
        "name": _text,
        "address": _address,
        "stage": _whole,
        "facts": _texts,
        "token": _text,
    },
    "announce": {
        "name": _text,
        "incarnation": _whole,
        "stage": _whole,
        "generation": _whole,
        "step": _whole,
        "queue": _whole,
        "done": _whole,
        "seconds": _seconds,
        "leaving": _flag,
        "ready": _flag,
    },
    "show": {},
    "terms": {},
}
"""Questions to the process with the registry and the trainer."""


def checked(message: Message, allowed: Mapping[str, Fields]) -> Message:
    """The message, if it is a question that may come here.

    Args:
        message: from the wire.
        allowed: one of the tables of this module.

    Raises:
        WireError: it is not, with what is wrong.
    """
    return _checked(message, allowed)
