"""Damaged copies of a document, the same for a seed every time.

Half of the mutants are damaged in their bytes, as disks and transfers do it; the others
in their data, as hands and attackers do: values of other kinds and sizes, entries that
are gone, doubled, renamed or exchanged, control characters and deep nesting.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Final


DIGITS: Final = int("9" * 4000)
NASTY: Final[tuple[Any, ...]] = (
    *(None, True, False, "", "x", [], {}, [[]], [None], {"": 0}),
    *(0, 1, -1, 2, 3, 64, 2**31, 2**63, 10**15, -(10**15), 10**26, DIGITS),
    *(0.0, -0.0, 0.5, -5.0, 1e-300, 1e26, 1e308, -1e308, 5e-324),
    *("a\x1b[31mb", "a\nb", "a\u202eb", "a\x00b", "\ud800", "a" * 20_000, "²", "NaN"),
    *("1e400", "9" * 5000, "-1", "../../etc/passwd", "/tmp/evil.py:make"),
)


def deep(levels: int = 5000) -> Any:
    """A list in a list in a list."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


def places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every entry of a document."""
    found = []
    pending = [data]
    while pending:
        item = pending.pop()
        pairs: list[tuple[Any, Any]] = []
        if isinstance(item, dict):
            pairs = list(item.items())
        elif isinstance(item, list):
            pairs = list(enumerate(item))
        found += [(item, key) for key, _ in pairs]
        pending += [value for _, value in pairs]
    return found


def changed(data: Any, chance: random.Random) -> Any:
    """A copy of a document with one to three entries changed."""
    data = copy.deepcopy(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        there = places(data)
        if there:
            _change(*chance.choice(there), there, chance)
    return data


def _change(box: Any, key: Any, there: list[tuple[Any, Any]], chance: Any) -> None:
    value = box[key]
    kind = chance.randrange(8)
    if kind == 0:
        del box[key]
    elif kind == 1 and isinstance(box, list):
        box.insert(key, copy.deepcopy(value))
    elif kind == 2 and isinstance(box, dict):
        box[chance.choice(("extra", f"{key}x", "a\x1b]0;b", "k" * 20_000))] = value
    elif kind == 3:
        other, name = chance.choice(there)
        box[key] = copy.deepcopy(other[name])
    elif kind in (4, 5) and type(value) in (int, float):
        box[key] = chance.choice(
            (-value, value + 1, value * 2, value * 10**9, value / 3, value - 1, 0)
        )
    elif kind == 6 and isinstance(value, str) and value:
        at = chance.randrange(len(value))
        box[key] = value[:at] + chance.choice("\x07\x1b\u2066\r~Z9") + value[at + 1 :]
    else:
        box[key] = copy.deepcopy(chance.choice(NASTY))


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A copy of a file with some of its bytes changed."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(max(1, len(content)))
        upto = at + chance.choice((1, 1, 4, 200))
        kind = chance.randrange(7)
        if kind == 0:
            content = content[:at]
        elif kind in (1, 2) and content:
            bit = 1 << chance.randrange(8)
            content = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
        elif kind == 3:
            content = content[:at] + content[upto:]
        elif kind == 4:
            content = content[:upto] + content[at:]
        elif kind == 5:
            content = content[:at] + chance.randbytes(upto - at) + content[at:]
        else:
            inserted = chance.choice(
                (b"[" * 100_000, b"9" * 5000, b"1e999", b"Infinity", b"NaN", b"\x00")
            )
            content = content[:at] + inserted + content[at:]
    return content


def as_text(data: Any) -> str:
    """JSON of a damaged document, though it may be none."""
    try:
        return json.dumps(data)
    except (ValueError, RecursionError):
        return str(data)
