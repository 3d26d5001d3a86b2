"""``whalejax estimate``: adds predictions to a table of runs.

A published run fitted its devices, even if its row omits the micro-batch, remat or
sharding. The possible values are tried for all rows at once, the likeliest first.

If the stages of a pipeline are on mixed devices, the full run is estimated on every
device kind. A stage then takes as long as its slowest replica, and the simulated
schedule gives the waits.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from whalejax.estimates.decoder import Remat
from whalejax.estimates.published_run import PublishedRun, ReplicaDevices
from whalejax.estimates.read_table import CsvTable, RowReading, read_row, read_table
from whalejax.estimates.step_model import Array, Runs, pipeline_seconds
from whalejax.estimates.workload import EMBED, HEAD, LAYER
from whalejax.meshes.errors import WhaleError, visible
from whalejax.meshes.fitted_constants import Constants, constants


SLACK = 0.15
"""Fraction of a device's memory by which a row's estimate may exceed the memory.

The row was run, so the excess is an error of the estimate.
"""


def readings(rows: Sequence[Mapping[str, str]]) -> tuple[RowReading, ...]:
    """Returns the reading of every row, with omitted values chosen to fit.

    Args:
        rows: Cell by name of the column, from ``csv_table.read_table``.
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
        note = f"remat {one.run.remat} (nothing fits; it needs least memory)"
        result[index] = replace(one, notes=(*result[index].notes, note))
    return tuple(result)


def _offers(one: RowReading) -> list[RowReading]:
    """Returns possible readings of a row, the likeliest first; empty if none is open.

    A smaller micro-batch comes first, as it costs less time than recomputation.
    Sharding that is unusual for the framework comes last.
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
        else:  # Pipelines of launched programs would gather parameters per micro-batch.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousEstimate:
    """Prediction of a run on mixed devices; see ``Prediction`` for the fields."""

    step_seconds: float
    peak_bytes: float
    fits: bool


def price_unlike(run: PublishedRun, constants: Constants) -> HeterogeneousEstimate:
    """Returns the prediction of a run with ``unlike`` stages."""
    replicas = list(dict.fromkeys(r for stage in run.unlike for r in stage.replicas))
    runs = Runs([_alone(run, replica) for replica in replicas])
    ahead, behind = runs.places(constants)
    at = {replica: index for index, replica in enumerate(replicas)}
    forward: list[float] = []
    backward: list[float] = []
    for number, stage in enumerate(run.unlike):
        places = [(LAYER, stage.layers)]
        places += [(EMBED, 1)] if number == 0 else []
        places += [(HEAD, 1)] if number == len(run.unlike) - 1 else []
        for result, seconds in ((forward, ahead), (backward, behind)):
            result.append(max(_sum(places, seconds, at[r]) for r in stage.replicas))
    sent = run.itemsize_bytes * run.micro_batch * run.sizes.seq * run.sizes.hidden
    network = float((runs.network * runs.shares(constants, "point")).min())
    step = pipeline_seconds(run, forward, backward, sent / network)
    exposed, update = _after(run, runs, at, constants)
    peaks = _peaks(run, runs, at, constants)
    fits = all(
        need <= runs.entries[index].kind.memory_bytes for index, need in peaks.items()
    )
    fixed = float(runs.shares(constants, "step_seconds").max())
    between = float(runs.shares(constants, "micro_seconds").max())
    fixed += run.num_micro_batches * between * (not run.framework.compiled)
    return HeterogeneousEstimate(
        step_seconds=step + exposed + update + fixed,
        peak_bytes=max(peaks.values()),
        fits=fits,
    )


def _alone(run: PublishedRun, replica: ReplicaDevices) -> PublishedRun:
    return dataclasses.replace(
        run, device=replica.device, tensor=replica.tensor, unlike=()
    )


def _sum(places: list[tuple[int, int]], seconds: Array, index: int) -> float:
    return float(sum(count * seconds[place, index] for place, count in places))


def _after(
    run: PublishedRun,
    runs: Runs,
    at: Mapping[ReplicaDevices, int],
    constants: Constants,
) -> tuple[float, float]:
    s = run.sizes
    network = runs.network * runs.shares(constants, "network")
    moved = runs.shares(constants, "update_bytes")
    reduction, update = 0.0, 0.0
    for number, stage in enumerate(run.unlike):
        params = stage.layers * s.layer_params
        params += s.embedding_params if number in (0, len(run.unlike) - 1) else 0
        ranks = len(stage.replicas)
        for replica in stage.replicas:
            index, own = at[replica], params / replica.tensor
            sent = 2.0 * own * run.framework.gradient_bytes * (ranks - 1) / ranks
            reduction = max(reduction, sent / float(network[index]))
            seconds = own * float(moved[index]) / float(runs.memory[index])
            update = max(update, seconds)
    return reduction, update


def _peaks(
    run: PublishedRun,
    runs: Runs,
    at: Mapping[ReplicaDevices, int],
    constants: Constants,
) -> dict[int, float]:
    whole = runs.peak_bytes(constants)
    reserve = runs.shares(constants, "reserve_bytes")
    peaks: dict[int, float] = {}
    most = run.layers_per_stage
    for stage in run.unlike:
        for replica in stage.replicas:
            index = at[replica]
            part = (float(whole[index]) - float(reserve[index])) * stage.layers / most
            peaks[index] = max(peaks.get(index, 0.0), part + float(reserve[index]))
    return {index: float(np.ceil(need)) for index, need in peaks.items()}


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
    """Returns the predicted cells of every row, by name of the column.

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
    """Prediction of one row.

    Attributes:
        step_seconds: Step time in seconds.
        peak_bytes: Memory of the fullest device in bytes.
        fits: Whether this is at most the device's memory, or the row counts as fitting
            (``RowReading.taken``).
    """

    step_seconds: float
    peak_bytes: float
    fits: bool


def _with_bounds(read: Sequence[RowReading], known: Constants) -> list[RowReading]:
    """Notes time and memory without and with full remat, if it is unknown."""
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
    """Numbers of rows of a table.

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
    """Reads a table, and writes it with predictions, atomically.

    Args:
        source: Path of a CSV file with the header of ``csv_table.COLUMNS``.
        target: Path of the table to write.
        strict: Whether to refuse a table with an unreadable row; default: False.

    Raises:
        WhaleError: The table is malformed, or the target cannot be written.
    """
    table = read_table(source, strict=strict)
    taken = [name for name in ADDED if name in table.header]
    if taken:
        raise WhaleError(
            f"{source} already has the columns {', '.join(taken)}. Remove them, or "
            "give the table from which it was made"
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
