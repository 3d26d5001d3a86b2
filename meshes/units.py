"""Formats sizes and times for readers."""

from __future__ import annotations


def gigabytes(nbytes: float) -> str:
    """Formats bytes with three digits and a decimal unit: ``"12.6 MB"``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def milliseconds(seconds: float) -> str:
    """Formats a time with three digits, in milliseconds below a second.

    >>> milliseconds(0.4123), milliseconds(3.207), milliseconds(4321)
    ('412 ms', '3.21 s', '4,321 s')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def count_text(count: int, noun: str) -> str:
    """Formats a number of things.

    >>> count_text(1, "sample"), count_text(3, "micro-batch"), count_text(0, "copy")
    ('1 sample', '3 micro-batches', '0 copies')
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}" + ("es" if noun.endswith(("ch", "ss")) else "s")


def count_digits(count: float) -> str:
    """Formats a large number with three digits: thousands, millions, billions.

    >>> count_digits(1_210), count_digits(124_475_904), count_digits(8.03e9)
    ('1,210', '124M', '8.03B')
    """
    if count < 10_000:
        return f"{count:,.0f}"
    size = float(count)
    for unit in ("", "k", "M", "B", "T"):
        if size < 999.5 or unit == "T":
            break
        size /= 1000
    return f"{size:.3g}{unit}"


def duration_text(seconds: float) -> str:
    """Formats any duration: as ``milliseconds`` below a minute, then in larger units.

    >>> duration_text(0.25), duration_text(272), duration_text(5_400)
    ('250 ms', '4.5 min', '1.5 h')
    >>> duration_text(864_000)
    '10 days'
    """
    if seconds < 60:
        return milliseconds(seconds)
    for limit, size, unit in ((3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / 86_400:,.3g} days"
