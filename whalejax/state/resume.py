"""Resumes a run from its newest undamaged checkpoint, at the next sample.

A resumed run may have another batch size, and its newest checkpoint may be damaged.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.adapters.base import Adapter
from whalejax.adapters.leaves import is_key
from whalejax.lowering.train_state import TrainState
from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import Problems, WhaleError, warn
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.state.checkpoint import UncheckedCheckpoint, unchecked
from whalejax.state.checkpoint_files import fail_together, told_by_first
from whalejax.state.checkpoint_record import DamagedCheckpoint, Record, read_record
from whalejax.state.folder_lock import FolderLock
from whalejax.user_code.losses import Job


DAMAGED_SUFFIX: Final = ".damaged"
"""Suffix by which a damaged checkpoint is renamed."""


@contextmanager
def hold_folder(folder: Path | None) -> Iterator[None]:
    """Locks a folder for this run; all its processes call this.

    Args:
        folder: Folder of the run's checkpoints; None locks nothing.

    Raises:
        WhaleError: Another run has locked the folder, or it cannot be written.
    """
    if folder is None:
        yield
        return
    with ExitStack() as stack:
        error = ""
        if jax.process_index() == 0:
            try:
                stack.enter_context(FolderLock(folder))
            except WhaleError as found:
                error = str(found)
        fail_together(error, f"{folder.name} held")
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRun:
    """A restored state.

    Attributes:
        state: Restored state.
        checkpoint: Path of its checkpoint.
        notes: Notes for the user on damaged checkpoints, on a checkpoint without
            hashes, and on another number of micro-batches.
    """

    state: TrainState
    checkpoint: Path
    notes: tuple[str, ...]


def depends_on_parts(plan: Plan, adapter: Adapter) -> bool:
    """Returns whether results depend on the number of micro-batches.

    They do if the loss of a micro-batch is not a mean over samples, or is random.
    """
    keys = any(is_key(leaf) for leaf in jax.tree.leaves(adapter.rest))
    return plan.per_micro_batch or adapter.takes_rng or keys


class CheckpointRestorer(Protocol):
    """Object that restores a checkpoint, such as a ``TrainStep``."""

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        ...

    @property
    def parts_matter(self) -> bool:
        """Whether results depend on the number of micro-batches."""
        ...

    def restore(self, path: str | os.PathLike[str]) -> TrainState:
        """Returns the state of a checkpoint."""
        ...


def restore_newest(
    step: CheckpointRestorer, checkpoints: list[Path]
) -> RestoredRun | None:
    """Restores the newest undamaged checkpoint; returns None without checkpoints.

    Newer, damaged checkpoints are renamed, so that the run can save to their paths.

    Args:
        step: Step that restores a checkpoint.
        checkpoints: Checkpoints, the newest first.

    Raises:
        WhaleError: All checkpoints are damaged, or one is of another model.
    """
    damaged: list[tuple[Path, str]] = []
    for path in checkpoints:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UncheckedCheckpoint)
                state = step.restore(path)
        except DamagedCheckpoint as error:
            damaged.append((path, str(error)))
            continue
        notes = _set_aside(damaged, path)
        record = read_record(path)
        if record.file_sha256 is None:
            notes.append(unchecked(path))
        notes += _other_parts(record, step, path)
        return RestoredRun(state=state, checkpoint=path, notes=tuple(notes))
    if damaged:
        problems = Problems("no whole checkpoint to resume from", WhaleError)
        for _, text in damaged:
            problems.add(text)
        raise WhaleError(
            f"{problems.text()}\nBring one of them back from a copy, or start anew "
            "with another directory"
        )
    return None


def restore_or_init(
    step: Any,
    parameter: str,
    folder: str | os.PathLike[str],
    make_model: Callable[..., Any],
    rng: Any,
) -> Any:
    """Returns the state of a folder's newest undamaged checkpoint, or a new state.

    Args:
        step: Step that restores a checkpoint and initialises states.
        parameter: Name of the calling function, for errors.
        folder: Folder of checkpoints, which need not exist.
        make_model, rng: Arguments of ``init``.

    Raises:
        WhaleError: A checkpoint is of another model, or all are damaged.
    """
    problems = Arguments(parameter)
    problems.path("folder", folder, "the path of a folder of checkpoints")
    problems.raise_if_any()
    newest = restore_newest(step, agreed_checkpoints(Path(folder)))
    if newest is None:
        return step.init(make_model, rng=rng)
    for note in newest.notes:
        warn(note)
    return newest.state


def _other_parts(record: Record, step: CheckpointRestorer, path: Path) -> list[str]:
    """Returns a note if another number of micro-batches changes the results."""
    before, now = record.num_micro_batches, step.plan.num_micro_batches
    if before in (None, now) or not step.parts_matter:
        return []
    return [
        f"{path.name} was trained with {count_text(before, 'micro-batch')} per step, "
        f"and this run takes {now}: each micro-batch has its own random numbers and "
        f"statistics, so results differ from those with num_micro_batches={before}"
    ]


def agreed_checkpoints(folder: Path) -> list[Path]:
    """Returns in all processes the checkpoints that the first process finds.

    If each process listed the folder itself, they could resume from different
    checkpoints, because hosts see changes of a shared folder at different times. All
    processes call this.

    Args:
        folder: Folder of the checkpoints.

    Raises:
        WhaleError: The folder cannot be read, or a process does not see the newest
            checkpoint. All processes raise it.
    """
    names = told_by_first(
        lambda: json.dumps([path.name for path in checkpoints(folder)]),
        f"checkpoints of {folder.name}",
    )
    paths = [folder / name for name in json.loads(names)]
    missing, error = [path for path in paths[:1] if not path.is_dir()], ""
    if missing:
        error = (
            f"process {jax.process_index()} does not see {missing[0]}, from which "
            "process 0 goes on. Keep checkpoints in a folder that all hosts share"
        )
    fail_together(error, f"checkpoints of {folder.name} seen")
    return paths


def _set_aside(damaged: list[tuple[Path, str]], whole: Path) -> list[str]:
    notes, error = [], ""
    for path, text in damaged:
        aside = _free(path.with_name(path.name + DAMAGED_SUFFIX))
        notes.append(
            f"{text}\nGoing on from {whole.name}; what is left of {path.name} is "
            f"{aside.name} now"
        )
        if jax.process_index() == 0 and not error:
            try:
                path.rename(aside)
            except OSError as found:
                error = (
                    f"{path} is damaged and cannot be renamed "
                    f"({found.strerror or found}). Move it away, and resume again"
                )
    if damaged:
        fail_together(error, "damaged checkpoints renamed")
    return notes


def _free(path: Path) -> Path:
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}{number}")
    return free


def batches_from(
    job: Job, size: int, *, step: int, samples: int
) -> Callable[[int], Any]:
    """Returns a function from the number of a step to its global batch.

    It starts after the samples of the earlier steps. If these are not a multiple of the
    batch size, a batch has the end of one batch of the job and the beginning of the
    next.

    Args:
        job: Job that makes batches by number.
        size: Number of samples of a global batch.
        step: Number of the first step, counted from 0.
        samples: Number of samples of the earlier steps.

    >>> import numpy as np
    >>> job = Job(len, len, {"x": np.arange(20)}, None)
    >>> batches_from(job, 4, step=3, samples=6)(4)["x"].tolist()
    [10, 11, 12, 13]
    """
    given = batches_by_samples(job, size)
    return lambda index: given(samples + (index - step) * size)


def batches_by_samples(job: Job, size: int) -> Callable[[int], Any]:
    """Returns a function from the number of earlier samples to a global batch."""
    numbered = functools.lru_cache(maxsize=2)(lambda number: job.batch_at(number, size))

    def batch(samples: int) -> Any:
        number, rest = divmod(samples, size)
        if not rest:
            return job.batch_at(number, size)
        return jax.tree.map(
            lambda here, after: _concat_batches(here, after, rest, size),
            numbered(number),
            numbered(number + 1),
        )

    return batch


def _concat_batches(here: Any, after: Any, rest: int, size: int) -> Any:
    if np.shape(here)[:1] != (size,):
        return after  # a leaf without samples, such as a scalar
    numbers: Any = jnp if isinstance(here, jax.Array) else np
    return numbers.concatenate([here[rest:], after[:rest]])


_STEP_DIRECTORY: Final = re.compile(r"step_(\d{6,})")


def steps_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(save_dir: Path) -> list[Path]:
    """Returns the paths of the checkpoints in a directory, the most steps first.

    Args:
        save_dir: Folder of the checkpoints.

    Raises:
        WhaleError: The folder cannot be read.
    """
    try:
        if not save_dir.is_dir():
            return []
        result = [p for p in save_dir.iterdir() if _STEP_DIRECTORY.fullmatch(p.name)]
    except OSError as error:
        raise WhaleError(
            f"{save_dir}: its checkpoints cannot be listed "
            f"({error.strerror or error}). Give another directory, or ask for "
            "permission to read it"
        ) from error
    return sorted(result, key=steps_of, reverse=True)
