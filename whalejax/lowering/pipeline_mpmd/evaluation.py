"""Stage programs that evaluate the states of another runner.

A model in evaluation mode may read fewer inputs than in training, for instance no
random keys. Unread inputs stay on the stages of the training runner.
"""

from __future__ import annotations

from typing import Any

from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
    StageProgramsExecutor,
)


class StageProgramsEvaluator(StageProgramsExecutor):
    """Evaluates the states of the ``StageProgramsExecutor`` of the same plan."""

    def __init__(self, home: StageProgramsExecutor, *args: Any) -> None:
        """Traces the loss in evaluation mode, and compiles nothing.

        Args:
            home: Training executor, which owns the states.
            *args: Arguments of every runner, with the loss in evaluation mode.
        """
        self._home = home
        super().__init__(*args)

    def _holder(self, number: int) -> int:
        return self._home.owner(number)

    def _finishing(self) -> tuple[Any, Any]:
        return None, None  # An evaluation has no update.
