"""Checkpoints of an elastic run, written beside its steps by one of its members."""

from __future__ import annotations

import functools
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import WhaleError
from whalejax.runtime.resume import checkpoints
from whalejax.wire.run_messages import NotSaved, Report, Saved


SAVE_SECONDS: Final = 600.0
"""A step does not wait for an earlier checkpoint for longer."""

_LOOK_SECONDS: Final = 0.05
_REMOVED: Final = re.compile(r"step_\d{6,}\.deleted")

Tell = Callable[[Report], None]


class StateWriter(Protocol):
    """Copies and writes states."""

    def copy_state(self, state: TrainState) -> TrainState:
        """A state of its own, which no later step takes."""
        ...

    def save(
        self, path: Path, state: TrainState, before_it_appears: Callable[[], None]
    ) -> None:
        """Writes a checkpoint."""
        ...


class Saver:
    """Writes checkpoints in a thread of its own; a failed one ends nothing."""

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
        """Starts without a checkpoint under way.

        Args:
            programs: Programs whose states are saved.
            folder: Folder of the checkpoints; None saves none.
            every: Steps between checkpoints.
            keep: Number of newest checkpoints that stay.
            tell: Function that receives ``Saved`` or ``NotSaved``.
            may_keep: Asked before a checkpoint that is written takes its name, so that
                a member that was given up puts none in another's place.
        """
        self._programs, self._folder = programs, folder
        self._every, self._keep, self._tell = every, keep, tell
        self._may_keep = may_keep
        self._thread: threading.Thread | None = None
        self._writes = -1

    def is_due(self, step: int, last: int) -> bool:
        """Whether the state after a step is to be saved, and is not yet."""
        if self._folder is None or not step:
            return False
        due = step % self._every == 0 or step == last
        return due and self._writes != step and not _path(self._folder, step).exists()

    def save(
        self, state: TrainState, step: int, look: Callable[[], None] = lambda: None
    ) -> None:
        """Begins to write a state, of which a copy is made.

        Args:
            state: State to copy; it is not donated.
            step: Steps that it has behind it.
            look: Called while an earlier one is waited for; may raise.
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
            target=self._write, args=(self._folder, copy, step), daemon=True
        )
        self._thread.start()

    def wait(self, look: Callable[[], None] = lambda: None) -> bool:
        """Waits until what was begun is written; whether it is.

        Args:
            look: Called meanwhile; may raise, and what was begun goes on.
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

    def _write(self, folder: Path, state: Any, step: int) -> None:
        path = _path(folder, step)
        try:
            if not path.exists():
                approve = functools.partial(self._approve, step)
                self._programs.save(path, state, approve)
            self._remove_old(folder)
        except Exception as error:  # The run goes on, and the last one stays.
            self._tell(NotSaved(step=step, why=str(error)[:2000]))
        else:
            self._tell(Saved(step=step, path=str(path)))

    def _approve(self, step: int) -> None:
        if self._may_keep is not None and not self._may_keep(step):
            raise WhaleError(
                "this member was given up, or its supervisor is gone, so that another "
                "may write this checkpoint"
            )

    def _remove_old(self, folder: Path) -> None:
        for path in checkpoints(folder)[self._keep :]:
            # Renamed first: half a checkpoint must never bear a checkpoint's name.
            path.rename(path.with_name(f"{path.name}.deleted"))
        for path in folder.iterdir():
            if _REMOVED.fullmatch(path.name):  # Also by one that was killed meanwhile.
                shutil.rmtree(path, ignore_errors=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"
