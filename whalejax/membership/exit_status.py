"""Kinds of ends of a run, or of a member's part in it."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from typing import Final


class Ending(enum.StrEnum):
    """Outcome of a run or a member.

    Attributes:
        COMPLETE: All steps are done, or all members left their loops at one step.
        DRAINED: Ended on request after a step; its state is saved or at other members.
        INTERRUPTED: Ended on request before it had a state that could be saved.
        FAILED: An error of its own ended it.
        REFUSED: Ended because its command or plan cannot be run at all.
        LOST: Outcome of a member that was killed, frozen or unreachable, or of a run
            with too few members.
    """

    COMPLETE = "complete"
    DRAINED = "drained"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    REFUSED = "refused"
    LOST = "lost"


TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status, as shells report it, of a process that SIGTERM ended."""


def shell_status(status: int) -> int:
    """Returns an exit status as shells report it: 128 plus the number of a signal.

    Args:
        status: Status as ``subprocess`` reports it: minus the signal's number for a
            signal.

    >>> shell_status(3), shell_status(-9)
    (3, 137)
    """
    return status if status >= 0 else 128 - status


def exit_text(status: int | None) -> str:
    """Returns the exit status of a process as text.

    Args:
        status: Status as ``subprocess`` reports it; None if it is not known.

    >>> exit_text(1), exit_text(-9), exit_text(None)
    ('with status 1', 'by SIGKILL', 'with a status that is not known')
    """
    if status is None:
        return "with a status that is not known"
    if status >= 0:
        return f"with status {status}"
    return f"by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, also of those without a name in Python.

    >>> signal_name(9), signal_name(signal.SIGRTMIN + 3)
    ('SIGKILL', 'SIGRTMIN+3')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", number)
        return f"SIGRTMIN+{number - first}" if number > first else f"number {number}"


STATUS: Final[Mapping[Ending, int]] = {
    Ending.COMPLETE: 0,
    Ending.DRAINED: TERMINATED,
    Ending.INTERRUPTED: TERMINATED,
    Ending.FAILED: 1,
    Ending.REFUSED: 2,
    Ending.LOST: 1,
}
"""Exit status of the process that started the run, by the run's outcome."""
