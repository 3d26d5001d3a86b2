"""Checkpoints of an elastic run, written beside its steps by one of its members."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from whalejax.cli import train_loop
from whalejax.elastic.programs import Programs
from whalejax.runtime.state import TrainState


SAVE_SECONDS: Final = 600.0
"""A checkpoint that is not written by then never will be."""

Tell = Callable[..., None]


class Saver:
    """Writes checkpoints in a thread of its own; a failed one ends nothing."""

    def __init__(
        self, programs: Programs, folder: Path | None, every: int, keep: int, tell: Tell
    ) -> None:
        """Write nothing yet.

        Args:
            programs: whose states are saved.
            folder: of the checkpoints; None saves none.
            every: steps between checkpoints.
            keep: how many stay, the newest ones.
            tell: is told ``"saved"`` or ``"not_saved"``, with the step.
        """
        self._programs, self._folder = programs, folder
        self._every, self._keep, self._tell = every, keep, tell
        self._thread: threading.Thread | None = None

    def is_due(self, step: int, last: int) -> bool:
        """Whether the state after a step is to be saved, and is not yet.

        Args:
            step: steps done.
            last: of the run.
        """
        if self._folder is None or not step:
            return False
        due = step % self._every == 0 or step == last
        return due and not _path(self._folder, step).exists()

    def save(self, state: TrainState, step: int) -> None:
        """Begin to write a state, of which a copy is made."""
        assert self._folder is not None
        self.wait()
        copy = self._programs.copied(state)
        self._thread = threading.Thread(
            target=self._write, args=(self._folder, copy, step), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was begun is written."""
        if self._thread is not None:
            self._thread.join(SAVE_SECONDS)
            self._thread = None

    def _write(self, folder: Path, state: Any, step: int) -> None:
        path = _path(folder, step)
        try:
            if not path.exists():
                self._programs.step.save(path, state)
            self._remove_old(folder)
        except Exception as error:  # The run goes on, and the last one stays.
            self._tell("not_saved", step=step, why=str(error)[:2000])
        else:
            self._tell("saved", step=step, path=str(path))

    def _remove_old(self, folder: Path) -> None:
        for path in train_loop.checkpoints(folder)[self._keep :]:
            # Renamed first: half a checkpoint must never bear a checkpoint's name.
            gone = path.rename(path.with_name(f"{path.name}.deleted"))
            shutil.rmtree(gone, ignore_errors=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"
