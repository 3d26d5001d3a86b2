"""Gradient-noise scale of a run, measured from the gradients of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final


_DECAY: Final = 0.95
"""Weight of earlier steps in the running means, whose bias cancels in their ratio."""


class NoiseScale:
    """Running estimate of the gradient-noise scale.

    The noise scale is the batch size at which the noise of the mean gradient is as
    large as the gradient itself. It is the trace of the gradients' covariance divided
    by the squared norm of the true gradient (McCandlish et al., "An Empirical Model of
    Large-Batch Training", 2018, appendix A.1). Far below it, twice the batch halves the
    number of steps. Far above it, a larger batch hardly reduces that number.

    Unbiased estimates of both terms come from the squared norms of the gradients of
    micro-batches and of the full batch. They are averaged over steps.

    Attributes:
        noise: Running mean of the trace of the covariance of a sample's gradient.
        signal: Running mean of the squared norm of the true gradient.
    """

    def __init__(self, batch: int, micro_batches: int) -> None:
        """Starts without measurements.

        Args:
            batch: Samples of the global batch.
            micro_batches: Number of micro-batches in a step, 2 or more.
        """
        assert micro_batches > 1
        self._large = float(batch)
        self._small = batch / micro_batches
        self.noise = self.signal = 0.0

    def update(self, squares: Sequence[float], total: float) -> None:
        """Adds the measurements of a step.

        Args:
            squares: Squared norms of the mean gradients of some micro-batches of the
                step; if empty, the step is skipped.
            total: Squared norm of the mean gradient of the global batch.

        >>> scale = NoiseScale(batch=4, micro_batches=2)
        >>> scale.update([3.0, 5.0], 3.0)
        >>> scale.noise / scale.signal, scale.value
        (2.0, 2.0)
        """
        if not squares:
            return
        small, large = self._small, self._large
        mean = sum(squares) / len(squares)
        noise = (mean - total) / (1 / small - 1 / large)
        signal = (large * total - small * mean) / (large - small)
        self.noise += (1 - _DECAY) * (noise - self.noise)
        self.signal += (1 - _DECAY) * (signal - self.signal)

    @property
    def value(self) -> float | None:
        """Noise scale in samples; None unless both running means are positive."""
        if self.noise <= 0 or self.signal <= 0:
            return None
        return self.noise / self.signal
