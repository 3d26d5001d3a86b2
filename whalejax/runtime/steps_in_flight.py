"""Steps in flight, and the measured time of a step.

A step returns before its work is done, and is in flight until then. Losses are read
some steps later. Time is measured between two moments without a step in flight.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import jax

from whalejax.lowering.multihost.watchdog import lost_process_error
from whalejax.membership.launch_heartbeat import tells_of_loss
from whalejax.runtime.run_records import host_values


STEPS_IN_FLIGHT: Final = 2
"""Number of steps after which the loop waits for a loss."""

_WARM_UP_STEPS: Final = 2
_WINDOW_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run when the loss of a step arrives.

    Attributes:
        step: Number of finished steps, including this one.
        loss: Loss of this step.
        step_seconds: Seconds of a step in the latest measured window, or None.
        metrics: All metrics of the step by name, including ``loss``; scalars as floats,
            others as NumPy arrays.
    """

    step: int
    loss: float
    step_seconds: float | None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class NotFiniteError(Exception):
    """A loss or a parameter is not finite after a step."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, what)
        self.step = step
        self.what = what


def is_divergent(loss: float, metrics: Mapping[str, Any]) -> bool:
    """Returns whether the loss of a step is not finite, so that training must stop.

    With a loss scale above 1 it returns False: such a step only lowers the scale.

    Args:
        loss: Loss of the step.
        metrics: Metrics of the step.
    """
    scale = metrics.get("loss_scale")
    return not math.isfinite(loss) and (scale is None or float(scale) <= 1.0)


class LossesInFlight:
    """Losses of steps in flight, in order."""

    def __init__(self, tell: Callable[[Progress], None], most_in_flight: int) -> None:
        self._most_in_flight = most_in_flight
        self.values: list[float] = []
        self.step_seconds: float | None = None
        self._in_flight: deque[tuple[int, dict[str, Any]]] = deque()
        self._tell = tell

    def expect(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a started step; waits if too many steps are in flight.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.

        Raises:
            NotFiniteError: The loss of an earlier step is not finite.
        """
        self._in_flight.append((step, dict(metrics)))
        while len(self._in_flight) > self._most_in_flight:
            self._take()

    def wait(self) -> None:
        """Waits for all steps in flight."""
        for step, metrics in self._in_flight:
            _arrived(step, metrics["loss"])

    def take_all(self) -> None:
        """Receives, checks and reports the losses of all steps in flight."""
        while self._in_flight:
            self._take()

    def _take(self) -> None:
        step, metrics = self._in_flight.popleft()
        value = _arrived(step, metrics["loss"])
        if is_divergent(value, metrics):
            raise NotFiniteError(step, f"the loss is {value}")
        self.values.append(value)
        self._tell(
            Progress(
                step=step,
                loss=value,
                step_seconds=self.step_seconds,
                metrics=host_values(metrics),
            )
        )


def _arrived(step: int, loss: Any) -> float:
    """Waits for the loss of a step; reports a process that is lost meanwhile."""
    try:
        return float(loss)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if jax.process_count() > 1 and tells_of_loss(error):
            raise lost_process_error(error, f"the loss of step {step}") from error
        raise


class StepTimer:
    """Measures step times over windows that start and end with no step in flight.

    The first steps are excluded, because they compile and fill caches.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._opened: tuple[int, float] | None = None
        self._seconds: list[float] = []

    def is_due(self, done: int) -> bool:
        """Returns whether to wait for the steps in flight and then call ``close``."""
        if self._opened is None:
            return done >= _WARM_UP_STEPS
        return self._clock() - self._opened[1] >= _WINDOW_SECONDS

    def open(self, done: int) -> None:
        """Starts a window, or restarts it after work that is not a step."""
        if done >= _WARM_UP_STEPS:
            self._opened = (done, self._clock())

    def close(self, done: int) -> float | None:
        """Ends the window, starts the next, and returns the latest seconds of a step.

        It returns None if no step was measured yet.
        """
        if self._opened is not None and done > self._opened[0]:
            count = done - self._opened[0]
            each = (self._clock() - self._opened[1]) / count
            self._seconds.extend([each] * count)
        self.open(done)
        return self._seconds[-1] if self._seconds else None

    def median_seconds(self) -> float | None:
        """Returns the median seconds of measured steps, or None without any.

        The time of a step is the mean of its window.
        """
        return statistics.median(self._seconds) if self._seconds else None
