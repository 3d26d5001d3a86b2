"""What the processes of a swarm ask each other, and what a question must hold.

Both are checked against the tables of this module where they arrive. A question is safe
to send twice: its key is run, generation, step, stage, micro-batch and attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from whalejax.wire.framing import Message
from whalejax.wire.run_messages import checked as _checked


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


def _size(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x < math.inf


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


def _anything(x: Any) -> bool:
    del x
    return True


def _list(x: Any) -> bool:
    return isinstance(x, list) and len(x) <= _MOST_NUMBERS


def _addresses(x: Any) -> bool:
    """Name and address of peers."""
    return (
        isinstance(x, list)
        and len(x) <= MOST_PEERS
        and all(
            isinstance(one, list)
            and len(one) == 2
            and _text(one[0])
            and _address(one[1])
            for one in x
        )
    )


def _members(x: Any) -> bool:
    """Name, address, stage, incarnation, queue and end of the lease of peers."""
    return (
        isinstance(x, list)
        and len(x) <= MOST_PEERS
        and all(
            isinstance(one, list)
            and len(one) == 6
            and _text(one[0])
            and _address(one[1])
            and all(map(_whole, one[2:5]))
            and _seconds(one[5])
            for one in x
        )
    )


def _made(x: Any) -> bool:
    """Phase, stage, name, incarnation, attempt and loss of what peers made."""
    return (
        isinstance(x, list)
        and len(x) <= 2 * MOST_PEERS
        and all(
            isinstance(one, list)
            and len(one) == 6
            and _text(one[0])
            and _whole(one[1])
            and _text(one[2])
            and all(map(_whole, one[3:5]))
            and _size(one[5])
            for one in x
        )
    )


def _leads(x: Any) -> bool:
    """Generation, step, number and times of micro-batches."""
    return _list(x) and all(_wholes(one) and len(one) == 4 for one in x)


def _counts(x: Any) -> bool:
    return isinstance(x, dict) and all(_text(k) and _whole(x[k]) for k in x)


_AT: Final[Fields] = {"run": _text, "generation": _whole, "step": _whole}
_STATE: Final[Fields] = {**_AT, "stage": _whole, "place": _whole}
_CALL: Final[Fields] = {
    **_AT,
    "state": _whole,
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
        "numbers": _wholes,
        "attempts": _wholes,
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
    "state": _STATE,
    "move": {"stage": _whole},
    "reach": {"peers": _addresses},
    "stop": {"why": _text, "failed": _flag},
}
"""Questions to a peer."""

TO_TRAINER: Final[Mapping[str, Fields]] = {
    "ping": {},
    "batch": {**_AT, "number": _whole, "places": _wholes},
    "state": _STATE,
    "join": {
        "name": _text,
        "address": _address,
        "stage": _whole,
        "facts": _texts,
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
    "enlist": {"name": _text, "address": _address, "facts": _texts},
    "take": {"name": _text, "leads": _leads, "counts": _counts, "leaving": _flag},
    "led": {
        **_AT,
        "name": _text,
        "number": _whole,
        "times": _whole,
        "made": _made,
        "why": _text,
    },
    "show": {},
    "terms": {},
}
"""Questions to the process with the registry and the first trainer."""

TO_FURTHER_TRAINER: Final[Mapping[str, Fields]] = {
    key: {**TO_PEER, **TO_TRAINER}[key] for key in ("ping", "batch", "stop")
}
"""Questions to a further trainer."""

_TENSORS: Final[Mapping[str, Fields]] = {"tensors": {}}
_SLICES: Final[Mapping[str, Fields]] = {"slices": {}}
_RECEIPT: Final[Mapping[str, Fields]] = {
    "receipt": {"seconds": _seconds, "lost": _size}
}
_TOLD: Final[Mapping[str, Fields]] = {"told": {"numbers": _wholes, "digest": _text}}

ANSWERS: Final[Mapping[str, Mapping[str, Fields]]] = {
    "ping": {"pong": {"name": _text}},
    "forward": _RECEIPT,
    "backward": _RECEIPT,
    "fetch": _TENSORS,
    "batch": _TENSORS,
    "sum": {
        "summed": {
            "numbers": _wholes,
            "attempts": _wholes,
            "lost": _size,
            "whole": _size,
        }
    },
    "gradients": {"slices": {"numbers": _wholes, "attempts": _wholes, "lost": _size}},
    "part": _SLICES,
    "update": _TOLD,
    "sync": _TOLD,
    "state": {"state": {"count": _whole, "digest": _text}},
    "move": {"moved": {"stage": _whole}},
    "reach": {"reached": {"unreached": _texts}},
    "stop": {"stopped": {}},
    "join": {"welcome": {"stage": _whole, "incarnation": _whole, "run": _text}},
    "announce": {"heard": {"known": _flag, "free": _flag}},
    "enlist": {"enlisted": {"run": _text}},
    "take": {
        "share": {
            **_AT,
            "known": _flag,
            "state": _whole,
            "number": _whole,
            "times": _whole,
            "now": _seconds,
            "peers": _members,
        }
    },
    "led": {"taken": {}},
    "show": {
        "shown": {
            "wire": _text,
            "sum_wire": _text,
            "sum_error": lambda x: x is None or _size(x),
            "wire_error": lambda x: x is None or _size(x),
            "stages": _whole,
            "step": _whole,
            "steps": _whole,
            "generation": _whole,
            "micro_batches": _whole,
            "loss": lambda x: x is None or type(x) in (int, float),
            "left": _whole,
            "counts": _counts,
            "trainers": lambda x: _list(x) and all(isinstance(t, dict) for t in x),
            "peers": lambda x: _list(x) and all(isinstance(p, dict) for p in x),
        }
    },
    "terms": {
        "terms": {
            "wire": _text,
            "sum_wire": _text,
            "stages": _whole,
            "batch": _whole,
            "micro_batches": _whole,
            "precision": _anything,
            "seed": lambda x: type(x) is int,
            "delayed_updates": _flag,
            "pull_seconds": _seconds,
            "call_seconds": _seconds,
        }
    },
}
"""By kind of question, the answer and what it must hold."""


def checked(message: Message, allowed: Mapping[str, Fields]) -> Message:
    """The message, if it is a question that may come here.

    Args:
        message: from the wire.
        allowed: one of the tables of this module, or an entry of ``ANSWERS``.

    Raises:
        WireError: it is not, with what is wrong.
    """
    return _checked(message, allowed)
