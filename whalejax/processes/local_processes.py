"""Starts, monitors and ends processes of this machine, for any kind of run.

A supervisor's processes outlive it. A restarted supervisor finds them by id and start
time, because an id alone may belong to another process later. Processes of a launcher
or an agent end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whalejax.meshes.errors import WhaleError


GRACE_SECONDS: Final = 10.0
"""Seconds from the request to end processes until they are killed."""

_MOST_OF_A_LOG: Final = 8000
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG, linux/prctl.h

_WAITING: Final = (
    "/bin/sh",
    "-c",
    'read -r _ || exit 1; exec "$@" </dev/null',
    "whalejax",
)
"""Shell command that waits for a line, and is then replaced by the program."""


@dataclass(slots=True, kw_only=True)
class _Process:
    pid: int
    began: str
    watched: int
    child: subprocess.Popen[bytes] | None


class Processes:
    """Local processes, by the names of their members."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        logs: Path,
        selector: selectors.BaseSelector,
        *,
        end_with_this: bool = False,
    ) -> None:
        """Prepares the start; no process runs yet.

        Args:
            command: Words of the program.
            environment: Environment variables that are added to those of this process.
            logs: Folder of one log for each process.
            selector: Selector that reports the end of a process, with its name as data.
            end_with_this: Whether Linux kills the processes together with this one. If
                so, start them in the main thread, while there are no other threads.
        """
        self.command, self.environment = list(command), environment
        self._ends_with_this = end_with_this
        self._logs, self._selector = logs, selector
        self._there: dict[str, _Process] = {}
        self._held: dict[str, int] = {}

    def start(
        self,
        name: str,
        own: Mapping[str, str] = {},
        *,
        command: Sequence[str] = (),
        output: int | None = None,
        errors: int | None = None,
        passed: Sequence[int] = (),
    ) -> tuple[int, str]:
        """Starts a process, which waits for ``release``; returns its id and start time.

        Args:
            name: Name of the future member.
            own: Additional environment variables of the process.
            command: Words of the program; default: those of the constructor.
            output: Descriptor of its standard output; None for its log.
            errors: Descriptor of its standard error; None for that of its output.
            passed: Additional descriptors that it inherits.

        Raises:
            WhaleError: The program does not exist.
            OSError: The system cannot start the process now.
        """
        command = command or self.command
        if shutil.which(command[0]) is None:
            raise WhaleError(
                f"{command[0]} cannot be started: there is no such program. "
                "Correct the command"
            )
        read, write = os.pipe()
        try:
            with contextlib.ExitStack() as stack:
                if output is None:
                    log = stack.enter_context(self.log(name).open("ab"))
                    output = log.fileno()
                child = start_child(
                    [*_WAITING, *command],
                    environment={**self.environment, **own},
                    given=read,
                    output=output,
                    errors=errors,
                    passed=passed,
                    ends_with_this=self._ends_with_this,
                )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        began = began_at(child.pid)
        try:
            self._watch(name, child.pid, began, child)
        except OSError:
            os.close(write)
            child.kill()
            child.wait()
            raise
        self._held[name] = write
        return child.pid, began

    def release(self, name: str) -> None:
        """Lets a started process run.

        A process that was not released ends if this process is killed.
        """
        held = self._held.pop(name, None)
        if held is not None:
            with contextlib.suppress(OSError):
                os.write(held, b"\n")
            os.close(held)

    def adopt(self, name: str, pid: int, began: str) -> bool:
        """Takes over a process of an earlier supervisor; returns whether it runs."""
        if not pid or not began or began_at(pid) != began:
            return False
        try:
            self._watch(name, pid, began, None)
        except ProcessLookupError:
            return False
        return True

    def _watch(
        self, name: str, pid: int, began: str, child: subprocess.Popen[bytes] | None
    ) -> None:
        watched = os.pidfd_open(pid) if child is None else _end_of(child)
        try:
            self._selector.register(watched, selectors.EVENT_READ, name)
        except OSError:
            os.close(watched)
            raise
        self._there[name] = _Process(pid=pid, began=began, watched=watched, child=child)

    def take_exit_status(self, name: str) -> int | None:
        """Kills a process and its group; returns its exit status, None if unknown."""
        exit_status = self._there.pop(name)
        self._selector.unregister(exit_status.watched)
        self._end_group(exit_status)
        os.close(exit_status.watched)
        if name in self._held:
            os.close(self._held.pop(name))
        return None if exit_status.child is None else exit_status.child.wait()

    def kill(self, name: str) -> None:
        """Kills a process and its group; its end is reported like any other."""
        entry = self._there.get(name)
        if entry is not None:
            self._end_group(entry)

    def terminate(
        self, name: str, number: int = signal.SIGTERM, *, group: bool = False
    ) -> None:
        """Asks a process to end.

        Args:
            name: Name of its member.
            number: Signal to send.
            group: Whether to signal the children too, and resume stopped ones.
        """
        entry = self._there.get(name)
        if entry is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if not group:
                    os.kill(entry.pid, number)
                    return
                os.killpg(entry.pid, number)
                os.killpg(entry.pid, signal.SIGCONT)

    def state(self, name: str) -> str:
        """Returns Linux's letter for a process's state; empty if it is unknown."""
        entry = self._there.get(name)
        with contextlib.suppress(OSError, IndexError):
            if entry is not None:
                stat = Path(f"/proc/{entry.pid}/stat").read_text()
                return stat.rpartition(")")[2].split()[0]
        return ""

    def _end_group(self, found: _Process) -> None:
        # The descriptor refers to its process even if the id is used again. A process
        # leads its own group, and its id is not used again while the group exists.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(found.watched, signal.SIGKILL)
        if began_at(found.pid) in ("", found.began):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(found.pid, signal.SIGKILL)

    @property
    def names(self) -> list[str]:
        """Names of processes, from their start until ``take_exit_status``."""
        return [*self._there]

    def identities(self) -> dict[str, tuple[int, str]]:
        """Returns the id and start time of each process, for ``adopt``."""
        return {name: (there.pid, there.began) for name, there in self._there.items()}

    def log(self, name: str) -> Path:
        """Returns the path of a process's log."""
        return self._logs / f"{name}.log"

    def log_tail(self, name: str) -> str:
        """Returns the end of a process's log."""
        return end_of_log(self.log(name))


def end_of_log(path: Path) -> str:
    """Returns the end of a log; empty if it cannot be read.

    Args:
        path: Path of the log.
    """
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(log.tell() - _MOST_OF_A_LOG, 0))
            return log.read(_MOST_OF_A_LOG).decode(errors="replace")
    except OSError:
        return ""


def log_folder(path: Path) -> Path:
    """Creates a folder of logs, and returns it.

    Args:
        path: Path of the folder.

    Raises:
        WhaleError: The folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhaleError(
            f"--logs {path}: {error.strerror}. Name a folder that can be made"
        ) from error
    return path


def start_child(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] = {},
    folder: Path | str | None = None,
    given: int = subprocess.DEVNULL,
    output: int | None = None,
    errors: int | None = None,
    passed: Sequence[int] = (),
    ends_with_this: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own, so that Ctrl-C does not reach it.

    Args:
        words: Program and its arguments.
        environment: Environment variables that are added to those of this process.
        folder: Working directory; None for that of this process.
        given: Descriptor of its standard input; default: no input.
        output: Descriptor of its standard output; None for that of this process.
        errors: Descriptor of its standard error; None for ``output`` if given, or that
            of this process.
        passed: Descriptors that it inherits.
        ends_with_this: Whether it is killed when the thread that starts it ends.

    Raises:
        OSError: The system cannot start the program.
    """
    return subprocess.Popen(
        words,
        env={**os.environ, **environment},
        cwd=folder,
        stdin=given,
        stdout=output,
        stderr=errors if errors is not None or output is None else subprocess.STDOUT,
        pass_fds=passed,
        start_new_session=True,
        preexec_fn=die_with_parent if ends_with_this else None,  # noqa: PLW1509
    )


def _end_of(child: subprocess.Popen[bytes]) -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(child.pid)
    # On systems other than Linux.
    read, write = os.pipe()

    def wait() -> None:
        child.wait()
        os.close(write)

    threading.Thread(target=wait, daemon=True).start()
    return read


def die_with_parent() -> None:
    """Makes this process end with the thread that started it, if this is Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


@contextlib.contextmanager
def handled_signals(
    handler: Callable[[int, object], None], *more: signal.Signals
) -> Iterator[None]:
    """Handles SIGTERM, SIGHUP and ``more`` by a function in the context.

    Signals that are ignored stay ignored, such as SIGHUP under ``nohup``. Only the main
    thread can handle signals; in other threads the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, handler)
        for number in (signal.SIGTERM, signal.SIGHUP, *more)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def began_at(pid: int) -> str:
    """Returns the start time of a process, in ticks since boot.

    The text is empty if there is no such process. It is always empty on systems other
    than Linux.
    """
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return said.rpartition(")")[2].split()[19]


def runs(pid: int, began: str) -> bool:
    """Returns whether a process with this id and start time still runs.

    Args:
        pid: Id of the process.
        began: Start time, as ``began_at`` returns it.
    """
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return said[19] == began and said[0] not in "ZX"


@functools.cache
def machine() -> str:
    """Returns an id of this machine that changes at every boot.

    Containers count as machines, because they have their own process ids. On systems
    other than Linux the id is the host name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
