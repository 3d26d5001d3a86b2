"""Fills in open values of a table's rows so that the run fits a device's memory.

A published run fitted its devices, even if its row omits the micro-batch,
rematerialization or sharding. The possible values are tried from the likeliest on, for
all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whalejax.estimates.read_table import RowReading, read_row
from whalejax.estimates.step_model import Runs
from whalejax.meshes.fitted_constants import constants


SLACK = 0.15
"""Part of a device's memory by which a row's estimate may exceed it.

The row was run, so the excess is an error of the activations' estimate.
"""


def readings(rows: Sequence[Mapping[str, str]]) -> tuple[RowReading, ...]:
    """Returns every row's reading, with open values chosen to fit.

    Args:
        rows: Column to cell, from ``read_table``.
    """
    result = [read_row(row) for row in rows]
    offers = {i: several for i, one in enumerate(result) if (several := _offers(one))}
    for place in range(max(map(len, offers.values()), default=0)):
        tried = {i: one[place] for i, one in offers.items() if place < len(one)}
        runs = [one.run for one in tried.values() if one.run is not None]
        if not runs:
            break
        peaks = Runs(runs).peak_bytes(constants())
        for (index, one), run, peak in zip(tried.items(), runs, peaks, strict=True):
            over = peak / run.device.kind.memory_bytes - 1.0
            if over <= SLACK:
                said = f"taken to fit (its estimate is {over:.0%} too large)"
                notes = (*one.notes, said) if over > 0 else one.notes
                result[index] = replace(one, notes=notes, taken=over > 0)
                del offers[index]
    for index, several in offers.items():
        one = several[-1]
        assert one.run is not None
        note = f"remat {one.run.remat} (nothing fits; it takes least memory)"
        result[index] = replace(one, notes=(*result[index].notes, note))
    return tuple(result)


def _offers(one: RowReading) -> list[RowReading]:
    """Returns the possible readings of a row, the likeliest first; empty if nothing is
    open.

    A smaller micro-batch comes first, because it costs less time than recomputation.
    Unusual sharding for the framework comes last.
    """
    run = one.run
    if run is None or run.unlike:
        return []
    sizes = [run.micro_batch]
    while one.open_micro_batch and sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    layouts = [run]
    if one.open_zero and run.ranks > 1:
        if run.stages == 1 or run.framework.compiled:
            full = replace(run, zero=3, fsdp=run.ranks, data=1)
            layouts += [full] if run.zero < 3 else []
        else:  # Launched pipelines would gather parameters for every micro-batch.
            layouts += [replace(run, zero=1)] if run.zero < 1 else []
    if len(one.policies) * len(sizes) * len(layouts) == 1:
        return []
    offers = []
    for layout in layouts:
        for remat in one.policies:
            for size in sizes:
                notes = list(one.notes)
                if one.policies[0] == "none":
                    notes.append(f"remat {remat} (the least that fits)")
                elif remat != one.policies[0]:
                    notes.append(f"remat {remat} ({one.policies[0]} does not fit)")
                if size < sizes[0]:
                    notes.append(f"micro_batch {size} (the largest that fits)")
                if layout is not run:
                    level = f"zero_stage {layout.zero} over {run.ranks}"
                    notes.append(f"{level} (nothing less fits)")
                meant = replace(layout, remat=remat, micro_batch=size)
                offers.append(replace(one, run=meant, notes=tuple(notes)))
    return offers
