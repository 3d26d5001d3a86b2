"""``whalejax estimate``: adds predictions to a table of runs."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whalejax.estimates.fill_missing import readings
from whalejax.estimates.heterogeneous import price_unlike
from whalejax.estimates.read_table import CsvTable, RowReading, read_table
from whalejax.estimates.rematerialization import Remat
from whalejax.estimates.step_model import Runs
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.fitted_constants import Constants, constants
from whalejax.meshes.texts import visible


ADDED: tuple[str, ...] = (
    "predicted_step_time_s",
    "predicted_tflops_per_device",
    "predicted_tokens_per_s_per_device",
    "predicted_peak_mem_gib",
    "fits",
    "note",
)
"""Added columns."""

GIB = 2**30


def estimate_table(table: CsvTable) -> list[dict[str, str]]:
    """Returns the added cells of every row.

    Rows without a prediction have only a ``note``.

    Args:
        table: Table from ``read_table``.
    """
    read = [
        RowReading(run=None, notes=(f"not read: {why}",)) if why else one
        for one, why in zip(
            readings([{} if w else r for r, w in _with_reasons(table)]),
            table.unread,
            strict=True,
        )
    ]
    alike = [
        (i, r.run) for i, r in enumerate(read) if r.run is not None and not r.run.unlike
    ]
    result: dict[int, Prediction] = {}
    known = constants()
    if alike:
        runs = Runs([run for _, run in alike])
        prices = runs.price(known)
        for place, (index, run) in enumerate(alike):
            peak = float(prices.peak_bytes[place])
            fits = read[index].taken or peak <= run.device.kind.memory_bytes
            result[index] = Prediction(
                step_seconds=float(prices.step_seconds[place]),
                peak_bytes=peak,
                fits=fits,
            )
    for index, one in enumerate(read):
        if one.run is not None and one.run.unlike:
            price = price_unlike(one.run, known)
            result[index] = Prediction(
                step_seconds=price.step_seconds,
                peak_bytes=price.peak_bytes,
                fits=price.fits,
            )
    read = _with_bounds(read, known)
    return [_cells(one, result.get(index)) for index, one in enumerate(read)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of a row.

    Attributes:
        step_seconds: Time of the step.
        peak_bytes: Memory of the fullest device.
        fits: Whether the memory does not exceed that of the device, or the row counts
            as fitting (``RowReading.taken``).
    """

    step_seconds: float
    peak_bytes: float
    fits: bool


def _with_bounds(read: Sequence[RowReading], known: Constants) -> list[RowReading]:
    """For unknown policies, notes time and memory without and with full remat."""
    result = list(read)
    bounds: tuple[Remat, Remat] = ("none", "full")
    for index, one in enumerate(read):
        if one.run is None or one.run.unlike or not one.unknown_policy:
            continue
        prices = Runs([replace(one.run, remat=remat) for remat in bounds]).price(known)
        (fast, slow), (most, least) = prices.step_seconds, prices.peak_bytes / GIB
        note = (
            f"from remat none to full: {fast:.4g} to {slow:.4g} s and {most:.4g} to "
            f"{least:.4g} GiB"
        )
        result[index] = replace(one, notes=(*one.notes, note))
    return result


def _cells(one: RowReading, found: Prediction | None) -> dict[str, str]:
    cells: dict[str, str] = dict.fromkeys(ADDED, "")
    cells["note"] = visible("; ".join(one.notes))
    if one.run is None or found is None:
        return cells
    rate = 1.0 / (found.step_seconds * one.run.num_devices)
    cells["predicted_step_time_s"] = f"{found.step_seconds:.6g}"
    cells["predicted_tflops_per_device"] = f"{one.run.model_flops() * rate / 1e12:.4g}"
    cells["predicted_tokens_per_s_per_device"] = f"{one.run.tokens * rate:.5g}"
    cells["predicted_peak_mem_gib"] = f"{found.peak_bytes / GIB:.4g}"
    likely = "yes" if one.confirmed else "unknown"
    cells["fits"] = likely if found.fits else "no"
    return cells


def _with_reasons(table: CsvTable) -> list[tuple[Mapping[str, str], str]]:
    return list(zip(table.rows, table.unread, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSummary:
    """Summary of a table's rows.

    Attributes:
        predicted: Number of rows with a prediction.
        runs: Number of rows with a run.
        unread: Number of unreadable rows; their note has the reason.
    """

    predicted: int
    runs: int
    unread: int


def write_estimates(
    source: str | Path, target: str | Path, *, strict: bool = False
) -> TableSummary:
    """Reads a table and writes it with predictions, atomically.

    Args:
        source: CSV file with the header of ``csv_table.COLUMNS``.
        target: Path of the new table.
        strict: Whether to refuse the table for an unreadable row.

    Raises:
        WhaleError: The table is malformed, or the target cannot be written.
    """
    table = read_table(source, strict=strict)
    taken = [name for name in ADDED if name in table.header]
    if taken:
        raise WhaleError(
            f"{source} has the columns {', '.join(taken)} already. Remove them, or "
            "give the table that it was made from"
        )
    path = Path(target)
    if path.is_dir():
        raise WhaleError(f"{target} is a folder. Give -o the name of a file")
    if path.exists() and path.samefile(source):
        raise WhaleError(f"{target} is the table itself. Give -o another name")
    added = estimate_table(table)
    text = _csv(table, added)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise WhaleError(
            f"{target}: the table cannot be written there ({error.strerror})"
        ) from error
    return TableSummary(
        predicted=sum(bool(cells["predicted_step_time_s"]) for cells in added),
        runs=len(added),
        unread=sum(map(bool, table.unread)),
    )


def _csv(table: CsvTable, added: Sequence[Mapping[str, str]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, fieldnames=[*table.header, *ADDED], lineterminator="\n"
    )
    writer.writeheader()
    for row, cells in zip(table.rows, added, strict=True):
        writer.writerow({**row, **cells})
    return buffer.getvalue()
