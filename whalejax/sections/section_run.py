"""Hosts of processes with tables, and the state that outlives the dense part's process.

The process with the dense part may be killed. Its replacement starts from a folder.
Every few steps, the dense part's state and the rows of every process after the same
step are written to the folder. Once all are written, a record names the step. These
files stay until the next record is written.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from whalejax.distributed.launch_env import is_loopback
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError
from whalejax.processes.launch_spec import REMOTE_SHELL, check_hosts, is_here


_RECORD: Final = "kept.json"
_DENSE: Final = "dense-{:012d}"


@names_arguments("wh.SectionRun")
@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRun:
    """Hosts of the processes of two sections, and the folder of their kept state.

    Attributes:
        folder: Folder of keys, logs and snapshots, at the same path on all hosts. None
            creates a temporary folder on this machine.
        keep_every: Steps between writes of the state, from which a replacement of this
            process starts; None writes no state.
        hosts: Hosts to which the processes with tables are assigned in turn.
        host: Address at which these hosts reach this machine.
        remote_shell: Words before the name of a host and a command for it.
    """

    folder: str | os.PathLike[str] | None = None
    keep_every: int | None = None
    hosts: tuple[str, ...] = ("localhost",)
    host: str = "127.0.0.1"
    remote_shell: tuple[str, ...] = REMOTE_SHELL

    def __post_init__(self) -> None:
        problems = Arguments("wh.SectionRun")
        problems.whole("keep_every", self.keep_every, least=1, none=True)
        if self.folder is not None:
            problems.path("folder", self.folder, "the path of a folder, or None")
        for name in ("hosts", "remote_shell"):
            value: Any = getattr(self, name)
            listed = isinstance(value, list | tuple) and bool(value)
            if not listed or not all(isinstance(word, str) and word for word in value):
                problems.refuse(name, value, "some words, in a list")
        problems.words("host", self.host)
        problems.raise_if_any()
        away = [name for name in self.hosts if not is_here(name)]
        check_hosts(problems, self.hosts, len(self.hosts), self.remote_shell)
        if self.folder is None and (away or self.keep_every is not None):
            problems.add(
                "folder is None; name one that all hosts see under the same path, for "
                "the key of the run and for what is kept"
            )
        if is_loopback(self.host) and not all(map(is_loopback, away)):
            problems.add(
                f"host is {self.host}, which {', '.join(away)} of hosts cannot "
                "reach. Give the name of this machine, or another address of it"
            )
        problems.raise_if_any()


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int


class KeptState:
    """A folder with the state after some steps, for a replacement of this process.

    Attributes:
        folder: Path of the folder, which is created if it does not exist.
        step: Number of steps of the state; -1 without a state.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Reads the record of the kept state.

        Args:
            folder: Path of the folder.

        Raises:
            WhaleError: The folder cannot be created, or its record is damaged.
        """
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WhaleError(
                f"folder {self.folder} cannot be made ({error.strerror}). Name another"
            ) from error
        path = self.folder / _RECORD
        self.step = -1
        if not path.exists():
            return
        try:
            self.step = msgspec.json.decode(path.read_bytes(), type=_Record).step
        except msgspec.DecodeError as error:
            raise WhaleError(
                f"{path} is damaged ({error}). Remove it to begin anew"
            ) from None

    def dense_path(self, step: int) -> Path:
        """Returns the path of the dense part's state after some steps.

        Args:
            step: Number of steps.
        """
        return self.folder / _DENSE.format(step)

    def begin(self, step: int) -> Path:
        """Removes incomplete files, and returns the path for the dense part's state.

        Args:
            step: Number of steps.
        """
        path = self.dense_path(step)
        if step != self.step:
            shutil.rmtree(path, ignore_errors=True)
        return path

    def commit(self, step: int) -> None:
        """Records that the state after some steps is complete.

        Args:
            step: Number of steps.
        """
        draft = self.folder / f".{_RECORD}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(_Record(step=step)))
        draft.replace(self.folder / _RECORD)
        self.step = step
        for other in self.folder.glob("dense-*"):
            if other != self.dense_path(step):
                shutil.rmtree(other, ignore_errors=True)

    def forget(self) -> None:
        """Removes the record, when another run begins."""
        (self.folder / _RECORD).unlink(missing_ok=True)
        self.step = -1
