"""Stages with programs of their own that evaluate the states of another runner.

A model in evaluation mode reads less than it does in training, such as no random keys;
what it does not read lies where the runner that trains it has it.
"""

from __future__ import annotations

from typing import Any

from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
    StageProgramsExecutor,
)


class StageProgramsEvaluator(StageProgramsExecutor):
    """Evaluates what another runner of the same plan trains; see
    ``StageProgramsExecutor``.
    """

    def __init__(self, home: StageProgramsExecutor, *args: Any) -> None:
        """Traces the loss in evaluation mode for its shapes; compiles nothing.

        Args:
            home: Training executor, which owns the states.
            *args: Arguments of every runner, with the loss in evaluation mode.
        """
        self._home = home
        super().__init__(*args)

    def _holder(self, number: int) -> int:
        return self._home.owner(number)

    def _finishing(self) -> tuple[Any, Any]:
        return None, None  # Nothing is trained.
