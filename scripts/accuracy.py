"""Measures the error of estimates; no source is judged by its own rows.

A source of the tables is predicted with constants that were fitted to all the others.
A sweep of hundreds of layouts on one machine is predicted half by half, each with
constants fitted to the other half and the other sources.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import kendalltau

from scripts.fit_constants import fit, source_weights
from whalejax.estimates.estimate_table import readings
from whalejax.estimates.published_run import PublishedRun
from whalejax.estimates.read_table import measured_seconds, read_table
from whalejax.estimates.step_model import Array, Runs
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.fitted_constants import Constants, constants


SWEEP = 300
"""Number of rows from which a source is a sweep, judged in halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rows of tables that state both a layout and a time.

    Attributes:
        rows: Rows of the tables.
        runs: Runs that they describe.
        seconds: Seconds of each step.
        layers: Whether ``seconds`` is that of one layer, forward and backward.
    """

    rows: tuple[Mapping[str, str], ...]
    runs: tuple[PublishedRun, ...]
    seconds: Array
    layers: Array

    @property
    def sources(self) -> tuple[str, ...]:
        """Source of each row."""
        return tuple(row.get("source", "") for row in self.rows)

    @property
    def halves(self) -> Array:
        """0 or 1 for each row, by its content alone."""
        return np.array(
            [zlib.crc32(repr(sorted(row.items())).encode()) % 2 for row in self.rows]
        )


def load(directory: str | Path, *, scaled: bool = False) -> Measured:
    """Reads every CSV file of a directory.

    Rows without a time, or without a layout (no parallel degree at all), are left out.

    Args:
        directory: Folder of the tables.
        scaled: Whether models of MaxText that rows name by their scale alone have its
            sizes; otherwise these rows are left out.

    Raises:
        WhaleError: No table, a malformed one, or no row with a time.
    """
    paths = sorted(Path(directory).glob("*.csv"))
    if not paths:
        raise WhaleError(f"{directory}: no CSV file there")
    rows, runs, seconds, layers = [], [], [], []
    for path in paths:
        table = read_table(path)
        table_rows = [{**row, **_profile_cells(row)} for row in table.rows]
        if scaled:
            table_rows = [{**row, **_scaled_cells(row)} for row in table_rows]
        for row, reading in zip(table_rows, readings(table_rows), strict=True):
            if reading.run is None or not _has_layout(row, reading.run):
                continue
            if reading.run.framework.kernels_only:
                continue  # No training step: ``layer_profiles`` has these.
            block = _PROFILE.search(row.get("notes") or "")
            measured = (
                float(block[1]) / 1e3 if block else measured_seconds(row, reading.run)
            )
            if measured is not None:
                rows.append(row)
                runs.append(reading.run)
                seconds.append(measured)
                layers.append(block is not None)
    if not rows:
        raise WhaleError(f"{directory}: no row has a layout and a measured time")
    return Measured(
        rows=tuple(rows),
        runs=tuple(runs),
        seconds=np.array(seconds),
        layers=np.array(layers),
    )


_PROFILE = re.compile(r"PROFILE ms per microbatch .*?block ([\d.]+)")
"""Profiles of single layers in ``notes``, in milliseconds."""


def _profile_cells(row: Mapping[str, str]) -> dict[str, str]:
    """Returns the cells that a profile leaves out.

    A profile has samples of the model's largest length: Llama 3 takes 8,192 tokens, OPT
    and GPT-Neo take 2,048.
    """
    if not _PROFILE.search(row.get("notes") or ""):
        return {}
    longest = "8192" if "llama-3" in (row.get("model") or "").lower() else "2048"
    cells = {"seq": row.get("seq") or longest}
    cells["global_batch"] = row.get("global_batch") or row.get("micro_batch") or "1"
    return cells


_SCALED = re.compile(r"maxtext-gps(\d+)$")
"""MaxText's models with names of their parameter scale, a power of two."""


def _scaled_cells(row: Mapping[str, str]) -> dict[str, str]:
    """Returns the sizes of a scale in MaxText's configuration.

    Heads and feed-forward, width, and layers double in turn, from 16 heads of 128,
    7,168, 2,048 and 16.
    """
    match = _SCALED.fullmatch((row.get("model") or "").lower())
    if match is None or row.get("layers"):
        return {}
    thirds, rest = divmod(int(match[1]).bit_length() - 1, 3)
    wide = 2 ** (thirds + (rest > 0))
    sizes = {
        "layers": 16 * 2**thirds,
        "hidden": 2048 * 2 ** (thirds + (rest > 1)),
        "heads": 16 * wide,
        "kv_heads": 16 * wide,
        "head_dim": 128,
        "ffn": 7168 * wide,
        "vocab": 32000,
    }
    return {name: str(size) for name, size in sizes.items()}


def _has_layout(row: Mapping[str, str], run: PublishedRun) -> bool:
    degrees = [row.get(name) for name in ("dp", "fsdp", "tp", "pp")]
    return run.num_devices == 1 or any(degrees)


def leave_one_source_out(
    measured: Measured,
    *,
    workers: int | None = None,
    only: Collection[str] | None = None,
) -> tuple[Array, Array]:
    """Predicts every row with constants that were not fitted to its source.

    Args:
        measured: Rows of the tables.
        workers: Number of processes; all cores if left out.
        only: Sources to predict; all if left out. Rows of the others get 0 s.

    Returns:
        Seconds of each row, and whether another source has its kind of device; if none
            has, its efficiency is an assumption, and the row is not judged.
    """
    sources = np.array(measured.sources)
    counts = Counter(measured.sources)
    jobs: list[tuple[Measured, Array]] = []
    for source, count in counts.items():
        if only is not None and source not in only:
            continue
        mask = sources == source
        if count < SWEEP:
            jobs.append((measured, mask))
        else:
            jobs += [(measured, mask & (measured.halves == half)) for half in (0, 1)]
    predicted = np.zeros(len(sources))
    for (_, mask), seconds in zip(jobs, _map(jobs, workers), strict=True):
        predicted[mask] = seconds[mask]
    return predicted, _judged(measured)


def _map(
    jobs: Sequence[tuple[Measured, Array]], workers: int | None
) -> Iterator[Array]:
    if workers == 1:
        yield from map(_hold_out, jobs)
        return
    # Not forked, because the parent may have threads, for instance of JAX.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), context) as pool:
        yield from pool.map(_hold_out, jobs)


def _hold_out(job: tuple[Measured, Array]) -> Array:
    measured, mask = job
    runs = Runs(measured.runs)
    weights = source_weights(measured.sources)
    fitted = fit(
        runs,
        measured.seconds,
        weights,
        constants(),
        kept=~mask,
        layers=measured.layers,
    )
    prices = runs.price(fitted)
    return np.where(measured.layers, prices.layer_seconds, prices.step_seconds)


def _judged(measured: Measured) -> Array:
    """Returns whether another source, or half, has each row's family and type."""
    sources_by_key: dict[tuple[str, str], set[str]] = defaultdict(set)
    keys = [(run.device.kind.family, run.dtype) for run in measured.runs]
    counts = Counter(measured.sources)
    for key, source in zip(keys, measured.sources, strict=True):
        sources_by_key[key].add(source)
    return np.array(
        [
            len(sources_by_key[key]) > 1 or counts[source] >= SWEEP
            for key, source in zip(keys, measured.sources, strict=True)
        ]
    )


def fit_all(measured: Measured) -> Constants:
    """Returns constants fitted to every row."""
    runs = Runs(measured.runs)
    weights = source_weights(measured.sources)
    return fit(runs, measured.seconds, weights, constants(), layers=measured.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of the predictions for some rows.

    Attributes:
        source: Source of the rows.
        count: Number of rows.
        judged: Whether their kinds of device occur in other sources too.
        mean, median, worst: Absolute error, as a part of the measured time.
        bias: Mean error with its sign; positive is too slow.
        tau: Kendall's tau inside groups of equal model and device count, averaged over
            the groups by their pairs; None if no group has two rows.
        regret: Regret of the fastest predicted plan in groups of equal model, device
            count and batch, over the fastest measured; None if no group has two plans.
    """

    source: str
    count: int
    judged: bool
    mean: float
    median: float
    worst: float
    bias: float
    tau: float | None
    regret: float | None


def scores(measured: Measured, predicted: Array, judged: Array) -> tuple[Score, ...]:
    """Returns a score for each source, separately for kinds of no other source."""
    groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, source in enumerate(measured.sources):
        groups[source, bool(judged[index])].append(index)
    return tuple(
        _score(measured, predicted, np.array(at), source, fair)
        for (source, fair), at in groups.items()
    )


def _score(
    measured: Measured, predicted: Array, at: Array, source: str, judged: bool
) -> Score:
    error = predicted[at] / measured.seconds[at] - 1.0
    absolute = np.abs(error)
    return Score(
        source=source,
        count=len(at),
        judged=judged,
        mean=float(absolute.mean()),
        median=float(np.median(absolute)),
        worst=float(absolute.max()),
        bias=float(error.mean()),
        tau=_tau(measured, predicted, at),
        regret=_regret(measured, predicted, at),
    )


def _grouped(measured: Measured, at: Sequence[int], batch: bool) -> list[list[int]]:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in at:
        run = measured.runs[index]
        sizes = run.sizes
        key: tuple[object, ...] = (sizes.layers, sizes.hidden, sizes.ffn, sizes.experts)
        key += (sizes.seq, run.num_devices, run.device.kind.name, run.dtype)
        groups[key + ((run.global_batch,) if batch else ())].append(int(index))
    return [group for group in groups.values() if len(group) > 1]


def _tau(measured: Measured, predicted: Array, at: Array) -> float | None:
    total = pairs = 0.0
    for group in _grouped(measured, at.tolist(), batch=False):
        result = kendalltau(measured.seconds[group], predicted[group])
        value = float(np.asarray(result)[0])
        if not np.isnan(value):
            count = len(group) * (len(group) - 1) / 2
            total, pairs = total + value * count, pairs + count
    return total / pairs if pairs else None


def _regret(measured: Measured, predicted: Array, at: Array) -> float | None:
    """Returns the mean regret; rows of one layout are one plan with their mean time."""
    regrets = []
    for group in _grouped(measured, at.tolist(), batch=True):
        plans: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index in group:
            plans[_layout(measured.runs[index])].append(index)
        if len(plans) < 2:
            continue
        chosen = min(plans.values(), key=lambda rows: predicted[rows].mean())
        best = min(float(measured.seconds[rows].mean()) for rows in plans.values())
        regrets.append(float(measured.seconds[chosen].mean()) / best - 1.0)
    return float(np.mean(regrets)) if regrets else None


def _layout(run: PublishedRun) -> tuple[object, ...]:
    mesh = (run.data, run.fsdp, run.tensor, run.stages, run.context, run.expert)
    options = (run.zero, run.remat, run.sequence_parallel)
    return (*mesh, run.chunks, run.micro_batch, *options)
