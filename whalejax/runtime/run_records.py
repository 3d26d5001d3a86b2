"""Records of a training loop: a table of steps, and the best checkpoint.

A resumed run continues both. It replaces rows of repeated steps, and keeps the best
checkpoint until another one is better.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.report.table_text import whole_seconds
from whalejax.runtime.progress_meter import Meter, make_console, progress_words


BEST_FILE = "best.json"
"""Name of the file that has the name of the best checkpoint."""


class StepTable:
    """A CSV file with a row for each step.

    Args:
        path: Path of the file. Rows of steps after ``first`` are removed.
        first: Number of earlier steps.

    Raises:
        WhaleError: The file cannot be read or written, or is not a table of steps.
    """

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self._columns: list[str] = []
        kept: list[dict[str, str]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                with path.open(newline="", encoding="utf-8") as file:
                    reader = csv.DictReader(file)
                    self._columns = list(reader.fieldnames or ())
                    kept = [row for row in reader if _is_before(row, first)]
            if self._columns and self._columns[0] != "step":
                raise WhaleError(
                    f"{path} is no table of steps: its first column is "
                    f"{self._columns[0]!r}. Give another file"
                )
            self._write(kept)
        except (OSError, ValueError, csv.Error) as error:
            raise _write_error(path, error) from error

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the row of a step.

        The first row defines the columns. If a later row has more columns, the file is
        rewritten with them.

        Args:
            row: Values by column; ``step`` is the first column.

        Raises:
            WhaleError: The file cannot be written.
        """
        try:
            new = [name for name in row if name not in self._columns]
            if new:
                rows = self._rows() if self._columns else []
                self._columns += new
                self._write(rows)
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(dict(row))
        except OSError as error:
            raise _write_error(self.path, error) from error

    def _rows(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, rows: list[dict[str, str]]) -> None:
        if not self._columns:
            return
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)


def _is_before(row: Mapping[str, str | None], first: int) -> bool:
    text = row.get("step") or ""
    return text.isdecimal() and int(text) <= first


def _write_error(path: Path, error: Exception) -> WhaleError:
    reason = getattr(error, "strerror", None) or error
    return WhaleError(
        f"{path}: the table of steps cannot be read or written ({reason}). Give csv= "
        "another file, or free disk space"
    )


def host_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics on the host: scalars as floats, others as NumPy arrays."""
    values = jax.device_get(dict(metrics))
    return {
        name: float(value) if np.ndim(value) == 0 else value
        for name, value in values.items()
    }


class Records:
    """Outputs of a training loop: hooks, a table and a progress bar.

    Args:
        step: Compiled step.
        first: Number of earlier steps.
        steps: Total number of steps.
        csv: File of the table, or None.
        progress: Whether to show a bar.
        hooks: Functions called with the number of a step and its values by name.
        on_step: Function called in every process with the progress of each step.
        opened: Stack that receives the contexts to close at the end.
    """

    def __init__(
        self,
        step: Any,
        *,
        first: int,
        steps: int,
        csv: str | os.PathLike[str] | None,
        progress: bool,
        hooks: Sequence[Callable[[int, Mapping[str, Any]], Any]],
        on_step: Callable[[Any], None] | None,
        opened: ExitStack,
    ) -> None:
        writes = jax.process_index() == 0
        self._plan = getattr(step, "plan", None)
        self._on_step = on_step
        self._hooks = tuple(hooks) if writes else ()
        self._table = StepTable(Path(csv), first) if csv and writes else None
        self._row: dict[str, Any] = {}
        self._meter: Meter | None = None
        if progress and writes:
            meter = Meter(
                make_console(),
                "training",
                first=first,
                steps=steps,
                waiting="compiling",
            )
            self._meter = opened.enter_context(meter)
        opened.callback(self._flush)

    def tell(self, progress: Any) -> None:
        """Reports the result of a step.

        Args:
            progress: Progress of the run (``loop.Progress``).
        """
        if self._on_step is not None:
            self._on_step(progress)
        for hook in self._hooks:
            hook(progress.step, progress.metrics)
        if self._table is not None:
            self._flush()
            scalars = {k: v for k, v in progress.metrics.items() if np.ndim(v) == 0}
            seconds = progress.step_seconds
            own = {"step": progress.step, "step_seconds": seconds}
            rest = {k: v for k, v in scalars.items() if k not in own}
            self._row = {"step": own.pop("step"), **rest, **own}
        if self._meter is not None:
            self._meter.show(progress.step, self._words(progress))

    def tell_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports the result of an evaluation.

        Args:
            step: Number of the step after which the evaluation ran.
            metrics: Means by name.
        """
        named = {f"eval/{name}": value for name, value in metrics.items()}
        for hook in self._hooks:
            hook(step, named)
        self._row.update(named)
        self._flush()

    def _flush(self) -> None:
        if self._row and self._table is not None:
            self._table.add(self._row)
            self._row = {}

    def _words(self, progress: Any) -> str:
        plan = self._plan
        if plan is None or not hasattr(plan, "work"):
            return f"loss {progress.loss:.4f}"
        return progress_words(
            progress.loss,
            unit=plan.work.unit if plan.work else "steps",
            units_per_step=plan.work.units if plan.work else 1,
            predicted_seconds=whole_seconds(plan),
            measured_seconds=progress.step_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """The checkpoint of the best evaluation.

    Attributes:
        step: Number of finished steps when it was written.
        metric: Name of the metric.
        mode: Better direction of its values, ``"min"`` or ``"max"``.
        value: Value of the metric.
        path: Path of the checkpoint.
        waited: Number of later evaluations, none of which was better.
    """

    step: int
    metric: str
    mode: Literal["min", "max"]
    value: float
    path: Path
    waited: int = field(default=0, compare=False)


def check_folder(name: str, save_dir: object) -> None:
    """Refuses an argument that is not a path of a folder.

    Args:
        name: Name of the called function.
        save_dir: Argument for the folder.
    """
    problems = Arguments(name)
    problems.path("save_dir", save_dir, "the path of a folder")
    problems.raise_if_any()


@names_arguments("wh.loop.best")
def best(save_dir: str | os.PathLike[str]) -> BestCheckpoint | None:
    """Returns the checkpoint of the best evaluation in a folder, or None.

    Args:
        save_dir: Folder to which ``train`` saved with ``best=``.
    """
    check_folder("loop.best", save_dir)
    folder = Path(save_dir)
    try:
        data = json.loads((folder / BEST_FILE).read_text(encoding="utf-8"))
        result = BestCheckpoint(
            step=int(data["step"]),
            metric=str(data["metric"]),
            mode="max" if data["mode"] == "max" else "min",
            value=float(data["value"]),
            waited=int(data["waited"]),
            path=folder / str(data.get("folder", _best_names(int(data["step"]))[0])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    known = result.path.name in _best_names(result.step)
    return result if known and result.path.is_dir() else None


def _best_names(step: int) -> tuple[str, str]:
    return f"best_{step:06d}", f"best_{step:06d}_again"


def best_path(save_dir: Path, step: int, before: BestCheckpoint | None) -> Path:
    """Returns the path of a new best checkpoint, other than that of the last one.

    A resumed run may evaluate the step of the last best checkpoint again.

    Args:
        save_dir: Folder of the run's checkpoints.
        step: Number of finished steps.
        before: Best checkpoint so far, or None.
    """
    first, second = (save_dir / name for name in _best_names(step))
    return first if before is None or before.path != first else second


def is_better(
    value: float, than: BestCheckpoint | None, mode: Literal["min", "max"]
) -> bool:
    """Whether a value of a metric is better than the best one so far.

    >>> is_better(0.5, None, "min"), is_better(math.nan, None, "min")
    (True, False)
    """
    if not math.isfinite(value):
        return False
    if than is None:
        return True
    return value < than.value if mode == "min" else value > than.value


def keep_best(
    save_dir: Path,
    found: BestCheckpoint,
    save: Callable[[Path], None],
    *,
    writes: bool,
) -> None:
    """Saves a checkpoint as the best one, and removes the previous one.

    After any interruption, ``best`` returns a complete checkpoint, the previous one if
    the new one is not complete.

    Args:
        save_dir: Folder of the run's checkpoints.
        found: Evaluation to record, with the path of its checkpoint.
        save: Function that writes a checkpoint at a path; all processes call it.
        writes: Whether this process writes the file and removes old checkpoints.
    """
    if writes and found.path.exists():
        shutil.rmtree(found.path)  # left by a run that ended before it wrote the file
    save(found.path)
    if not writes:
        return
    note_best(found)
    for path in save_dir.glob("best_*"):
        if path != found.path and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def note_best(found: BestCheckpoint) -> None:
    """Writes the file that names the best checkpoint.

    Args:
        found: Best checkpoint, in the folder of the file.
    """
    folder = found.path.parent
    names = ("step", "metric", "mode", "value", "waited")
    part = folder / f".{BEST_FILE}.{os.getpid()}.tmp"
    values = {name: getattr(found, name) for name in names}
    text = json.dumps({**values, "folder": found.path.name})
    part.write_text(text, encoding="utf-8")
    os.replace(part, folder / BEST_FILE)
