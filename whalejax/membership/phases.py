"""Phases of a member, which its heartbeats report, and their deadlines.

A member without progress until the deadline of its phase is given up. A phase that
waits for other members has no deadline, because the others have theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


COMPILING: Final = "compiling"
STOPPED: Final = "stopped"
"""The member has stopped for a new generation, and waits until it begins."""

CONNECTING: Final = "connecting"
RESTORING: Final = "restoring"
FETCHING: Final = "fetching"
HANDING_OVER: Final = "handing over"
COMPUTING: Final = "computing"
WAITING: Final = "waiting"
"""The member waits for the others within a step."""

BETWEEN: Final = "between steps"
"""The body of the user's loop runs, such as an evaluation."""

SAVING: Final = "saving"
FINISHED: Final = "finished"
"""The member has done its steps or left its loop; its process still runs."""

STEP: Final = "step"
"""Key of the deadline of a step, which follows from measured step times."""

DEADLINES: Final[Mapping[str, str | None]] = {
    COMPILING: "compile_seconds",
    STOPPED: None,
    CONNECTING: STEP,
    RESTORING: "restore_seconds",
    FETCHING: None,
    HANDING_OVER: STEP,
    COMPUTING: STEP,
    WAITING: None,
    BETWEEN: "body_seconds",
    SAVING: "save_seconds",
    FINISHED: None,
}
"""Field of ``SupervisorSettings`` that limits each phase; None without a deadline."""

IN_A_STEP: Final = frozenset({COMPUTING, WAITING})
