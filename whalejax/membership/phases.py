"""Phases of a member, as its heartbeats tell them, and their deadlines.

One table holds all deadlines: a member that does the same for longer is given up. What
waits for other members has none of its own, because the others have theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


COMPILING: Final = "compiling"
STOPPED: Final = "stopped"
"""It has stopped for a generation, and waits for that to begin."""

CONNECTING: Final = "connecting"
RESTORING: Final = "restoring"
FETCHING: Final = "fetching"
HANDING_OVER: Final = "handing over"
COMPUTING: Final = "computing"
WAITING: Final = "waiting"
"""It waits for the others in a step."""

BETWEEN: Final = "between steps"
"""The body of the user's loop runs, such as an evaluation."""

SAVING: Final = "saving"
FINISHED: Final = "finished"
"""It has done its steps, or its loop was left; its process goes on to its own end."""

STEP: Final = "step"
"""As long as a step may take, which is measured."""

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
"""The number of ``SupervisorSettings`` that limits each; None where others are waited
for."""

IN_A_STEP: Final = frozenset({COMPUTING, WAITING})
