"""Start one program as several processes that know each other, and stop them together.

For plain machines, without Slurm or Kubernetes: processes here are children of this
one, processes on other hosts come by ssh. JAX reads who is who from the environment
that each is given, so that ``wh.init_distributed()`` needs no argument. No JAX here: a
launcher must not take the devices of those that it starts.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from whalejax.distributed.launch_env import KEY_FILE, split_address
from whalejax.distributed.launch_spec import Launch as Launch
from whalejax.distributed.launch_spec import is_here as is_here
from whalejax.distributed.process_group import ProcessGroup
from whalejax.distributed.reserved_port import release_port
from whalejax.distributed.standard_streams import hold_standard_streams
from whalejax.meshes.errors import WhaleError
from whalejax.wire.keys import make_key


def run(launch: Launch) -> int:
    """Start all processes and wait for them; when one fails, all are stopped.

    Rank 0 is shown as it writes, the others write their logs. Where one fails, the
    first that did is named, with the end of its log, if that was not shown. As JSON:
    ``status``, ``failure`` (that text, or null) and ``ranks``, each with its ``rank``,
    ``host``, ``kind`` and ``devices`` (null where it said nothing of them),
    ``cpu_quota_percent`` (null without one) and ``log``.

    Args:
        launch: what and where.

    Returns:
        0 if all ended well; else the status of the first that did not, 128 and its
        number where a signal ended it; 2 if all ended well and what is printed of them
        could not be.

    Raises:
        WhaleError: a log or a process cannot be made, or the port is in use.
    """
    hold_standard_streams()
    given = launch.shared_environment()
    try:
        launch.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WhaleError(
            f"--logs {launch.logs}: {error.strerror}. Name a folder that can be made"
        ) from error
    coordinator = launch.coordinator()
    with _terminated(), contextlib.ExitStack() as stack:
        stack.callback(release_port, split_address(coordinator)[1])
        if launch.is_local() and KEY_FILE not in given:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="whalejax-key-")
            )
            given[KEY_FILE] = str(Path(folder) / "key")
            make_key(Path(given[KEY_FILE]))
        group = ProcessGroup(launch, stack)
        try:
            group.start(coordinator, given)
            return group.wait()
        finally:
            group.stop()


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, if they are not ignored.

    ``nohup`` ignores SIGHUP for what it starts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def words_after(words: Sequence[str]) -> list[str]:
    """The command line with the script and all behind it set apart by ``--``.

    What stands behind the script is the script's own, options too.

    >>> words_after(["--processes", "2", "train.py", "--steps", "3"])
    ['--processes', '2', '--', 'train.py', '--steps', '3']
    """
    for place, word in enumerate(words):
        if word == "--":
            break
        if word.endswith(".py"):
            return [*words[:place], "--", *words[place:]]
    return list(words)
