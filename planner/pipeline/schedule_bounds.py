"""Lower bounds on the step time of a pipeline, whatever its schedule.

The search for pipelines evaluates a stage only if these bounds allow a fast enough
step. A stage starts after the stages before it have computed the forward pass of a
micro-batch. After a stage's last micro-batch, earlier stages still
compute the backward pass of that micro-batch. Meanwhile the stage can only compute
gradients of parameters that it postponed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np


_SHARES: Final = {False: (1 / 3, 1 / 3), True: (1 / 4, 3 / 8)}
"""(Smallest fraction of a micro-batch's time in the forward pass, largest fraction that
a schedule can postpone), by whether the backward pass recomputes the forward pass. In
stages of eight models without recomputation, the forward pass took at least 0.337.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Lower bounds on the seconds that a stage is busy in a step.

    The fields are numbers, or arrays of equal shape.

    Attributes:
        ahead: Seconds of the forward passes.
        prompt: Seconds until the stage has sent its last cotangent: all passes without
            the gradients of parameters that a schedule can postpone, and half the
            gradient reduction.
        busy: Seconds of all passes and of the gradient reduction.
    """

    ahead: Any = 0.0
    prompt: Any = 0.0
    busy: Any = 0.0

    @classmethod
    def of(cls, passes: Any, reduction: Any, *, recomputes: bool) -> StageSeconds:
        """Returns the lower bounds of one layout.

        Args:
            passes: Seconds of both passes of all micro-batches.
            reduction: Seconds of the gradient reduction.
            recomputes: Whether the backward pass recomputes the forward pass.
        """
        ahead, late = _SHARES[recomputes]
        return cls(
            ahead=ahead * passes,
            prompt=(1 - late) * passes + reduction / 2,
            busy=passes + reduction,
        )

    @classmethod
    def least(cls, several: Iterable[StageSeconds]) -> StageSeconds:
        """Returns the smallest of each bound, all numbers, over layouts of a stage."""
        parts = [(one.ahead, one.prompt, one.busy) for one in several]
        ahead, prompt, busy = (min(part) for part in zip(*parts, strict=True))
        return cls(ahead=ahead, prompt=prompt, busy=busy)

    @classmethod
    def total(cls, stages: Iterable[StageSeconds]) -> StageSeconds:
        """Returns the sum of each bound over stages."""
        parts = [(one.ahead, one.prompt, one.busy) for one in stages]
        ahead, prompt, busy = (sum(part) for part in zip(*parts, strict=True))
        return cls(ahead=ahead, prompt=prompt, busy=busy)


def least_step_seconds(
    stages: Sequence[StageSeconds], count: int, chunks: int = 1
) -> float:
    """Returns a lower bound on the seconds of a step.

    Args:
        stages: Lower bounds of each stage.
        count: Number of micro-batches.
        chunks: Number of parts of the model on each stage; default: 1. With more, a
            stage waits only for the first parts of other stages, whose smallest time is
            unknown.

    >>> one = StageSeconds.of(3.0, 0.0, recomputes=False)
    >>> round(least_step_seconds([one, one], 1), 6)
    4.0
    """
    least = ahead = prompt = 0.0
    for stage in stages:
        least = max(least, stage.busy + ahead, stage.prompt + prompt)
        ahead += stage.ahead / count if chunks == 1 else 0.0
        prompt += stage.prompt / count if chunks == 1 else 0.0
    return least


def least_divided_seconds(total: StageSeconds, stages: Any, count: Any) -> Any:
    """Returns the least ``least_step_seconds`` over divisions into like stages.

    All stages are assumed to have the same ratios of the three bounds. Stages with
    unlike ratios may have a smaller bound. All arguments and the result may be arrays
    of equal shape.

    Args:
        total: Sum of the lower bounds of all stages.
        stages: Number of stages.
        count: Number of micro-batches.

    >>> one = StageSeconds.of(6.0, 0.0, recomputes=False)
    >>> round(float(least_divided_seconds(one, 2, 1)), 6)
    4.0
    """
    # The bound is smallest if it is equal for all stages. Then each stage has 1 - part
    # of the time of the stage before it; for ``prompt``, the part is 1 / count.
    prompt = total.prompt / count / (1 - (1 - 1 / count) ** stages)
    part = total.ahead / total.busy / count
    busy = total.busy * part / (1 - (1 - part) ** stages)
    return np.maximum(busy, prompt)


class PricedStages:
    """Lower bounds of the stages that were evaluated, by cut.

    With fewer, larger micro-batches, a layout is still possible and not slower. So
    bounds for a number of micro-batches also hold for its multiples.
    """

    def __init__(self, stages: int) -> None:
        """Creates a record without stages.

        Args:
            stages: Number of stages.
        """
        self._stages = stages
        self._priced: dict[tuple[object, int], list[StageSeconds]] = defaultdict(
            lambda: [StageSeconds()] * stages
        )

    def record(self, cut: object, count: int, stage: int, least: StageSeconds) -> None:
        """Records the lower bounds of one stage, over all its layouts.

        Args:
            cut: Key of the cut.
            count: Number of micro-batches.
            stage: Number of the stage.
            least: Lower bounds of the stage.
        """
        self._priced[cut, count][stage] = least

    def least_of(self, cut: object, count: int, chunks: int) -> float:
        """Returns a lower bound on the step seconds of a cut.

        Args:
            cut: Key of the cut.
            count: Number of micro-batches.
            chunks: Number of parts of the model on each stage.
        """
        return max(
            (
                least_step_seconds(stages, count, chunks)
                for (priced, fewer), stages in self._priced.items()
                if priced == cut and count % fewer == 0
            ),
            default=0.0,
        )

    def least_of_any(self, count: int) -> float:
        """Returns an approximate bound on the step seconds of any cut for equal
        devices.

        It assumes that the total work is the same for all cuts. It assumes no virtual
        stages.

        Args:
            count: Number of micro-batches.
        """
        return max(
            (
                float(least_divided_seconds(total, self._stages, count))
                for (_, fewer), stages in self._priced.items()
                if count % fewer == 0 and (total := StageSeconds.total(stages)).busy
            ),
            default=0.0,
        )
