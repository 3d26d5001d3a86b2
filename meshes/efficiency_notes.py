"""Describes the source of device kinds' speeds, for plans and estimates.

A measured kind needs no note. For other kinds, the note names the generation whose
measurements are used, and their possible error.
"""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.ratings import rating_of


SAME = 0.2
"""Possible error of an efficiency that a kind takes from its generation.

It is twice the error of the median kind that ``scripts/bench_kinds.py`` leaves out.
"""

OTHER = 0.4
"""Possible error if another generation, or another maker's, is used."""


def efficiency_notes(kinds: Sequence[DeviceKind], dtype: str) -> tuple[str, ...]:
    """Returns one note for each kind whose products in a type were not measured.

    Args:
        kinds: Kinds of devices.
        dtype: Type in which the model computes.

    >>> from whalejax.meshes import device_kind
    >>> efficiency_notes([device_kind("a100-80")], "bf16")
    ()
    >>> print(*efficiency_notes([device_kind("a30")], "bf16"))  # doctest: +ELLIPSIS
    A30 was not measured in bf16: the plan assumes 109 of 165 TFLOP/s (87.1 to 131), ...
    """
    notes = []
    for kind in dict.fromkeys(kinds):
        runs_in = kind.multiplies_in(dtype)
        if kind.curve != "gpu" or kind.was_measured(runs_in):
            continue
        known = kind.efficiency_in(runs_in)
        if known.measured:
            continue
        peak = kind.peak_flops(runs_in) / 1e12
        named = [rating_of(name) for name in known.of]
        same = bool(named) and all(r and r.generation == kind.generation for r in named)
        off = SAME if same else OTHER
        rate = peak * known.share
        whose = f", as measured on {' and '.join(known.of)}" if known.of else ""
        if {kind.name, kind.family} & {*known.of}:
            whose = ", as measured in another type"
        elif same and kind.watts and all(r and r.watts for r in named):
            whose += ", by its power"
        low, high = rate * (1 - off), min(peak, rate * (1 + off))
        notes.append(
            f"{kind.display_name()} was not measured in {runs_in}: the plan assumes "
            f"{_teraflops_text(rate)} of {_teraflops_text(peak)} TFLOP/s "
            f"({_teraflops_text(low)} to {_teraflops_text(high)}){whose}"
        )
    return tuple(notes)


def _teraflops_text(tera: float) -> str:
    return f"{tera:.0f}" if tera >= 100 else f"{tera:.3g}"
