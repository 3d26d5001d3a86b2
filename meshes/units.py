"""Sizes and times as people read them."""

from __future__ import annotations


def gigabytes(nbytes: float) -> str:
    """Bytes with three digits and a decimal unit: ``"12.6 MB"``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def milliseconds(seconds: float) -> str:
    """A time with three digits: in milliseconds below a second.

    >>> milliseconds(0.4123), milliseconds(3.207), milliseconds(4321)
    ('412 ms', '3.21 s', '4,321 s')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def count_text(count: int, noun: str) -> str:
    """A number of things.

    >>> count_text(1, "sample"), count_text(3, "sample")
    ('1 sample', '3 samples')
    """
    return f"{count} {noun}" + "s" * (count != 1)
