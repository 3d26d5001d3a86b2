"""Finds the combination of each reported value from two traces of a loss.

It uses ``sample_dims`` for the position of rows and ``batch_combination`` for the form
of a value, and decides which of the two applies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from whalejax import _compat
from whalejax.capture.reported_values.batch_combination import (
    HOWS,
    MADE_OTHERWISE,
    ValueForms,
)
from whalejax.capture.reported_values.paired_traces import (
    Pairing,
    Trace,
    avals,
    power_of,
)
from whalejax.capture.reported_values.sample_dims import (
    SampleRows,
    UnknownCombination,
    reported_rows,
    rows_of,
)
from whalejax.capture.sample_following import statistics
from whalejax.capture.walk_records import Value


Said = SampleRows | UnknownCombination | str | None
"""Position of rows, the reason why the combination is unknown, or another one by name
(``HOWS``)."""


def judged(
    small: Trace,
    large: Trace,
    wanted: Sequence[int],
    changing: Collection[int],
    state: Sequence[int],
) -> dict[int, Said]:
    """Returns the combination of each wanted result.

    Args:
        small, large: Traces of the loss with fewer and with more samples.
        wanted: Indices of the results.
        changing: Inputs that every micro-batch changes, and random keys.
        state: Indices of the results that are the model's new state.
    """
    times = large.graph.batch_size // small.graph.batch_size
    pairing = Pairing(small=small, large=large, times=times)
    pairing.run([*range(2), *wanted])  # Reported means may use the loss's weight.
    loss, after = (_tensors(small, numbers) for numbers in (range(2), state))
    parts = ValueForms(
        pairing=pairing,
        rows=frozenset(rows_of(small.graph)),
        changing=changing,
        statistics=statistics(small.graph, [*loss.values()], [*after.values()]),
    )
    parts.run()
    tensors = _tensors(small, wanted)
    shaped = [n for n, t in tensors.items() if small.graph.tensors[t].shape]
    rows = reported_rows(small.graph, [tensors[n] for n in shaped])
    where: Mapping[int, Any] = dict(zip(shaped, rows, strict=True))
    result: dict[int, Said] = {}
    for n in wanted:
        if n not in tensors:
            result[n] = _scalar(pairing, n)
            continue
        aval = avals(small)[n]
        inexact = _compat.is_inexact(aval.dtype)
        said: SampleRows | str = MADE_OTHERWISE
        if n not in pairing.lost:
            said = _with_row_axis(
                parts.combination_rule(tensors[n], inexact=inexact), where.get(n)
            )
        if isinstance(said, str) and said not in HOWS:
            result[n] = UnknownCombination(shape=aval.shape, why=said)
        else:
            result[n] = said
    return result


def _with_row_axis(
    said: str, stands: SampleRows | UnknownCombination | None
) -> SampleRows | str:
    """Returns the combination of a value, with the position of its rows if any."""
    if said == "rows" and isinstance(stands, SampleRows):
        return stands
    if said == "rows":
        unknown = "has rows of which it is not known where they stand"
        return stands.why if isinstance(stands, UnknownCombination) else unknown
    if said not in HOWS and isinstance(stands, UnknownCombination):
        return stands.why
    return said


def _tensors(trace: Trace, numbers: Sequence[int]) -> dict[int, int]:
    tensors: dict[int, Value] = {n: trace.results[n] for n in numbers}
    return {n: t for n, t in tensors.items() if t is not None}


def _scalar(pairing: Pairing, number: int) -> Said:
    """Returns the combination of a number that is a constant of the program."""
    a, b = (values[number] for values in pairing.literals)
    unclear = UnknownCombination(shape=(), why="depends on the number of samples")
    try:
        power = power_of(a, b, pairing.times)
    except (ValueError, TypeError):
        return unclear
    hows = {0: "same", None: "same", 1: "sum"}
    return hows.get(power, unclear)
