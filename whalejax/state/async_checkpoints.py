"""Writes the checkpoints of an elastic run or a swarm while the steps run."""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import WhaleError, warn
from whalejax.state.resume import checkpoints
from whalejax.wire.run_messages import NotSaved, Report, Saved


SAVE_SECONDS: Final = 600.0
"""Longest time in seconds for which a step waits for an earlier checkpoint."""

_LOOK_SECONDS: Final = 0.05
_REMOVED: Final = re.compile(r"step_\d{6,}\.deleted")

Tell = Callable[[Report], None]


class StateWriter(Protocol):
    """Copies and writes states."""

    def copy_state(self, state: TrainState) -> TrainState:
        """Returns a copy of the state, which no later step donates."""
        ...

    def save(
        self, path: Path, state: TrainState, before_it_appears: Callable[[], None]
    ) -> None:
        """Writes a checkpoint."""
        ...


class Saver:
    """Writes checkpoints in its own thread; a failed write does not end the run."""

    def __init__(
        self,
        programs: StateWriter,
        folder: Path | None,
        every: int,
        keep: int,
        tell: Tell,
        *,
        may_keep: Callable[[int], bool] | None = None,
    ) -> None:
        """Creates a saver that writes nothing yet.

        Args:
            programs: Programs whose states are saved.
            folder: Folder of the checkpoints; None saves none.
            every: Steps between checkpoints.
            keep: Number of newest checkpoints to keep.
            tell: Function that receives ``Saved`` or ``NotSaved``.
            may_keep: Function that returns whether a written checkpoint may get its
                name. A member that was given up must not replace another checkpoint.
        """
        self._programs, self._folder = programs, folder
        self._every, self._keep, self._tell = every, keep, tell
        self._may_keep = may_keep
        self._thread: threading.Thread | None = None
        self._writes = -1

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether the state after a step should be saved, and is not yet."""
        if self._folder is None or not step:
            return False
        due = step % self._every == 0 or step == last
        return due and self._writes != step and not _path(self._folder, step).exists()

    def save_left(self, state: TrainState, step: int) -> None:
        """Writes the state at which a loop was left, if it is not written yet.

        An error in the body of a loop leaves it too, and the body must run again for
        this step. So the checkpoint is removed if an error ends this process.

        Args:
            state: State to copy.
            step: Number of steps that led to it.
        """
        if not self.is_due(step, step) or sys.is_finalizing():
            return
        assert self._folder is not None
        atexit.register(remove_after_error, _path(self._folder, step))
        self.save(state, step, removes=False)

    def save(
        self,
        state: TrainState,
        step: int,
        look: Callable[[], None] = lambda: None,
        *,
        removes: bool = True,
    ) -> None:
        """Copies a state and begins to write the copy.

        Args:
            state: State to copy; it is not donated.
            step: Number of steps that led to it.
            look: Function called while an earlier checkpoint is written; may raise.
            removes: Whether to remove old checkpoints afterwards.
        """
        assert self._folder is not None
        if not self.wait(look):
            why = (
                f"the checkpoint of step {self._writes} is still being written after "
                f"{SAVE_SECONDS:.0f} s. Save less often, or to a faster disk"
            )
            self._tell(NotSaved(step=step, why=why))
            return
        copy = self._programs.copy_state(state)
        self._writes = step
        self._thread = threading.Thread(
            target=self._write, args=(self._folder, copy, step, removes), daemon=True
        )
        self._thread.start()

    def wait(self, look: Callable[[], None] = lambda: None) -> bool:
        """Waits for the current write; returns whether it has ended.

        Args:
            look: Function called during the wait. It may raise; the write goes on.
        """
        end = time.monotonic() + SAVE_SECONDS
        while self._thread is not None:
            self._thread.join(_LOOK_SECONDS)
            if not self._thread.is_alive():
                self._thread, self._writes = None, -1
                break
            look()
            if time.monotonic() > end:
                return False
        return True

    def _write(self, folder: Path, state: Any, step: int, removes: bool = True) -> None:
        path = _path(folder, step)
        try:
            if not path.exists():
                approve = functools.partial(self._approve, step)
                self._programs.save(path, state, approve)
        except Exception as error:  # The run goes on with the previous checkpoint.
            self._tell(NotSaved(step=step, why=str(error)[:2000]))
            return
        try:
            if removes:
                remove_old_checkpoints(folder, self._keep)
        except OSError as error:
            warn(f"old checkpoints stay in {folder}: {error}")
        self._tell(Saved(step=step, path=str(path)))

    def _approve(self, step: int) -> None:
        if self._may_keep is not None and not self._may_keep(step):
            raise WhaleError(
                "this member was given up, or its supervisor is gone, so that another "
                "may write this checkpoint"
            )


def remove_after_error(path: Path) -> None:
    """Removes a checkpoint if an error ends this process; for its exit.

    Args:
        path: Folder of the checkpoint, which may be absent.
    """
    if getattr(sys, "last_value", None) is not None and path.is_dir():
        _remove(path)


def _remove(path: Path) -> None:
    # Rename it first: a partly removed folder must not have a checkpoint's name.
    removed = path.with_name(f"{path.name}.deleted")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Removes all checkpoints except the newest ones.

    Args:
        folder: Folder of the checkpoints.
        keep: Number of newest checkpoints that stay.

    Raises:
        OSError: A checkpoint cannot be removed; older ones stay too.
    """
    for path in folder.iterdir():
        if _REMOVED.fullmatch(path.name):  # from a process that was killed here
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints(folder)[keep:]:
        _remove(path)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"
