"""Which messages there are, and what each must hold; anything else is refused.

Checked once, where a message arrives: what reads it then needs no further care.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from whalejax.meshes.texts import visible
from whalejax.wire.framing import Message, WireError


_LONGEST_TEXT: Final = 20_000
_MOST_MEMBERS: Final = 4096


def _is_int(x: Any) -> bool:
    return type(x) is int and -1 <= x < 1 << 53


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _is_seconds(x: Any) -> bool:
    return _is_number(x) and 0 <= x < 1e9  # So that it is no NaN.


def _is_port(x: Any) -> bool:
    return _is_int(x) and 0 <= x < 1 << 16


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and len(x) <= _LONGEST_TEXT


def _is_way(x: Any) -> bool:
    return isinstance(x, str) and x in ("", "messages", "collectives")


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _is_nodes(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(
        isinstance(n, list | tuple) and len(n) == 2 and all(map(_is_int, n)) for n in x
    )


def _is_texts(x: Any) -> bool:
    return isinstance(x, dict) and all(_is_text(k) and _is_text(x[k]) for k in x)


def _is_shares(x: Any) -> bool:
    return isinstance(x, dict) and all(_is_text(k) and _is_nodes(x[k]) for k in x)


def _is_words(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(map(_is_text, x))


def _is_name(x: Any) -> bool:
    """Of a member, as a supervisor makes them: also the name of a log."""
    return isinstance(x, str) and x.isascii() and x.isalnum() and len(x) < 32


def _is_agent(x: Any) -> bool:
    return isinstance(x, str) and x.isprintable() and 0 < len(x) < 100


def _is_count(x: Any) -> bool:
    return _is_int(x) and 0 < x <= 1 << 20


def _is_status(x: Any) -> bool:
    return x is None or (type(x) is int and -256 < x < 256)


def _are_processes(x: Any) -> bool:
    return isinstance(x, list) and all(
        isinstance(one, list)
        and len(one) == 3
        and _is_name(one[0])
        and _is_int(one[1])
        and _is_text(one[2])
        for one in x
    )


def _is_members(x: Any) -> bool:
    return (
        isinstance(x, list)
        and len(x) <= _MOST_MEMBERS
        and all(
            isinstance(m, list)
            and len(m) == 3
            and _is_text(m[0])
            and _is_text(m[1])
            and _is_port(m[2])
            for m in x
        )
    )


Fields = Mapping[str, Callable[[Any], bool]]

_REPORT: Final[Fields] = {"number": _is_int}
"""Counted by each member: it repeats what was not acknowledged by its number."""

TO_SUPERVISOR: Final[Mapping[str, Fields]] = {
    "register": {
        "run": _is_text,
        "name": _is_text,
        "machine": _is_text,
        "pid": _is_int,
        "host": _is_text,
        "port": _is_port,
        "generation": _is_int,
        "step": _is_int,
        "micro_batches": _is_int,
        "steps": _is_int,
        "save": _is_text,
        "facts": _is_texts,
        "token": _is_text,
    },
    "adding_up": {"run": _is_text, "by": _is_way, "why": _is_text},
    "refusal": {"machine": _is_text, "pid": _is_int, "why": _is_text},
    "beat": {"phase": _is_text, "step": _is_int, "done": _is_int},
    "ready": _REPORT,
    "prepared": {
        **_REPORT,
        "generation": _is_int,
        "step": _is_int,
        "held": _is_nodes,
    },
    "committed": {
        **_REPORT,
        "generation": _is_int,
        "step": _is_int,
        "loss": _is_number,
        "seconds": _is_seconds,
        "parts": _is_shares,
    },
    "suspect": {**_REPORT, "generation": _is_int, "name": _is_text, "why": _is_text},
    "leaving": {**_REPORT, "why": _is_text},
    "left": {**_REPORT, "step": _is_int},
    "written": {**_REPORT, "step": _is_int},
    "finished": {**_REPORT, "step": _is_int},
    "saved": {**_REPORT, "step": _is_int, "path": _is_text},
    "not_saved": {**_REPORT, "step": _is_int, "why": _is_text},
    "failed": {**_REPORT, "why": _is_text},
    "unfit": {**_REPORT, "count": _is_int, "why": _is_text},
    "compiled_ahead": {**_REPORT, "count": _is_int, "seconds": _is_seconds},
    "not_copied": {**_REPORT, "step": _is_int, "why": _is_text},
    "note": {**_REPORT, "why": _is_text},
    "recovered": {**_REPORT, "step": _is_int, "source": _is_text},
}
"""What members say, with a check of each field."""

TO_MEMBER: Final[Mapping[str, Fields]] = {
    "added_up": {
        "by": _is_way,
        "why": _is_text,
        "processes": _is_count,
        "hosts": _is_count,
    },
    "welcome": {"run": _is_text, "name": _is_text, "beat_seconds": _is_seconds},
    "refused": {"why": _is_text},
    "heard": {"goodput": _is_seconds, "number": _is_int},
    "prepare": {"generation": _is_int, "after": _is_int},
    "begin": {
        "generation": _is_int,
        "members": _is_members,
        "step": _is_int,
        "sources": _is_texts,
        "first": _is_shares,
        "later": _is_shares,
    },
    "stop": {"why": _is_text, "saves": _is_flag, "well": _is_flag},
    "over": {"why": _is_text, "well": _is_flag},
    "keep": {"step": _is_int},
    "done": {},
}
"""What the supervisor says."""

TO_SUPERVISOR_OF_AGENT: Final[Mapping[str, Fields]] = {
    "enlist": {
        "agent": _is_agent,
        "host": _is_text,
        "machine": _is_text,
        "room": _is_count,
        "version": _is_text,
        "token": _is_text,
        "there": _are_processes,
    },
    "agent_beat": {"leaving": _is_flag},
    "launched": {"name": _is_text, "pid": _is_int, "began": _is_text},
    "not_launched": {"name": _is_text, "why": _is_text},
    "exited": {"name": _is_text, "status": _is_status, "said": _is_text},
}
"""What agents say to the supervisor."""

TO_AGENT: Final[Mapping[str, Fields]] = {
    "enlisted": {
        "command": _is_words,
        "environment": _is_texts,
        "beat_seconds": _is_seconds,
    },
    "refused": {"why": _is_text},
    "start": {"name": _is_name},
    "release": {"name": _is_name},
    "kill": {"name": _is_name},
    "noted": {"name": _is_name},
    "finish": {"why": _is_text},
}
"""What the supervisor says to agents."""

TO_PEER: Final[Mapping[str, Fields]] = {
    "hello": {"generation": _is_int, "name": _is_text},
    "part": {"generation": _is_int, "step": _is_int, "nodes": _is_nodes},
    "total": {"generation": _is_int, "step": _is_int},
    "state": {"place": _is_int, "count": _is_int, "text": _is_text},
}
"""What members say to each other."""


def checked(message: Message, allowed: Mapping[str, Fields]) -> Message:
    """The message, if it is one of those that may come here.

    Args:
        message: from the wire.
        allowed: one of the tables of this module.

    Raises:
        WireError: it is not, with what is wrong.
    """
    fields = allowed.get(message.kind)
    if fields is None:
        raise WireError(f"a message of kind {visible(message.kind)[:40]!r} came")
    if message.fields.keys() != fields.keys():
        raise WireError(
            f"a message {message.kind!r} has the fields "
            f"{sorted(map(visible, message.fields))!s:.200}; expected "
            f"{sorted(fields)}"
        )
    for name, is_good in fields.items():
        if not is_good(message.fields[name]):
            raise WireError(
                f"a message {message.kind!r} has {name} "
                f"{visible(repr(message.fields[name])[:80])}"
            )
    return message
