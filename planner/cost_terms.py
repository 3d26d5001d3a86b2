"""Predicted time and memory of a step, by term."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field


Remat = tuple[tuple[str, str], ...]
"""(TaskGraph, policy) pairs of TaskGraphs that the backward pass recomputes."""

Chosen = tuple[tuple[str, str], ...]
"""(TaskGraph, kind) pairs of TaskGraphs with a chosen attention: ``ring`` or
``gather``.
"""

ALL = "*"
"""Stands for every TaskGraph without a policy of its own."""


OFFLOADS = ("optimizer", "activations", "params", "gradients")
"""State that may be in host memory; gradients only with params, and in estimates."""

UNCOUNTED_MOVES = (
    "moving to host memory and back is not counted: the cluster does not say how fast "
    "that is (host_link_bytes_per_second) or how much there is"
)
"""Note of a plan with requested host memory whose speed or size is unknown."""

NO_EFFECT = "has no effect"
"""Text of the note on a hint without effect."""

OBEYED = ("marked TaskGraph obeyed", "marked TaskGraphs obeyed")
"""End of the note on the other hints: of one, and of several."""

FETCHED = 2
"""Layers on the device at a time, if host memory has their parameters or activations:
one computes, the next is in transfer.
"""


def moves_to_host(shape: tuple[int, ...]) -> bool:
    """Whether state of a parameter with this shape is offloaded.

    Vectors stay: they are small in total, and each would be a separate transfer.
    """
    return len(shape) > 1 and math.prod(shape) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """Predicted seconds of one step, by term.

    Attributes:
        compute_seconds: Products and memory traffic, forward and backward.
        launch_seconds: Fixed costs of starting kernels.
        gradient_seconds: Exposed part of the gradient reduction.
        parameter_seconds: Exposed part of gathering parameters.
        activation_seconds: Collectives on activations inside TaskGraphs.
        border_seconds: Changes of layout between TaskGraphs and at cuts.
        update_seconds: The optimizer's update.
        allocation_seconds: First touch of newly allocated host memory in a step, on
            devices that keep none of their own.
        bubble_seconds: Waits of pipeline stages for each other.
        offload_seconds: Exposed part of moving to host memory and back.
    """

    compute_seconds: float = 0.0
    launch_seconds: float = 0.0
    gradient_seconds: float = 0.0
    parameter_seconds: float = 0.0
    activation_seconds: float = 0.0
    border_seconds: float = 0.0
    update_seconds: float = 0.0
    allocation_seconds: float = 0.0
    bubble_seconds: float = 0.0
    offload_seconds: float = 0.0

    def __add__(self, other: TimeTerms) -> TimeTerms:
        return TimeTerms(
            **{
                f.name: getattr(self, f.name) + getattr(other, f.name)
                for f in dataclasses.fields(self)
            }
        )

    def __sub__(self, other: TimeTerms) -> TimeTerms:
        return self + other * -1

    def __mul__(self, number: float) -> TimeTerms:
        names = [f.name for f in dataclasses.fields(self)]
        return TimeTerms(**{name: getattr(self, name) * number for name in names})

    def plus(self, **seconds: float) -> TimeTerms:
        """Returns a copy with seconds added to the named terms."""
        sums = {name: getattr(self, name) + more for name, more in seconds.items()}
        return dataclasses.replace(self, **sums)

    def by_size(self) -> list[tuple[str, float]]:
        """Returns the terms above zero, largest first, such as ``[("compute", 0.3),
        …]``.

        Values within the rounding error of the others are omitted.
        """
        least = 1e-12 * self.step_seconds
        names = [f.name for f in dataclasses.fields(self)]
        pairs = [(n.removesuffix("_seconds"), float(getattr(self, n))) for n in names]
        return sorted((p for p in pairs if p[1] > least), key=lambda p: -p[1])

    @property
    def step_seconds(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, f.name) for f in dataclasses.fields(self)))

    @property
    def once(self) -> TimeTerms:
        """Terms of work that is not divided into micro-batches: the update,
        allocations and moves to host memory.
        """
        return TimeTerms(
            update_seconds=self.update_seconds,
            allocation_seconds=self.allocation_seconds,
            offload_seconds=self.offload_seconds,
        )

    @property
    def pass_seconds(self) -> float:
        """Seconds of the passes of all micro-batches, without reduced gradients."""
        return self.step_seconds - self.once.step_seconds - self.gradient_seconds

    @property
    def communication_seconds(self) -> float:
        """Seconds of all exposed collectives."""
        return (
            self.gradient_seconds
            + self.parameter_seconds
            + self.activation_seconds
            + self.border_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Predicted bytes on the fullest device; all terms but ``host_bytes`` make up its
    peak.

    Attributes:
        params_bytes: Stored parameters (the master copy).
        gradients_bytes: Accumulated gradients.
        optimizer_bytes: Optimizer state.
        state_bytes: State neither trained nor computed (batch statistics, keys).
        batch_bytes: The device's part of the global batch.
        activations_bytes: Values that are saved for the backward pass.
        working_bytes: Gathered parameters, casts and the largest temporaries.
        host_bytes: Bytes in host memory for each device.
        tables_bytes: Rows of embedding tables, with their optimizer state.
        lookups_bytes: Vectors and gradients of rows in exchange, beyond the temporaries
            of the dense part.
    """

    params_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    state_bytes: int = 0
    batch_bytes: int = 0
    activations_bytes: int = 0
    working_bytes: int = 0
    host_bytes: int = 0
    tables_bytes: int = field(default=0, metadata={"unless_default": True})
    lookups_bytes: int = field(default=0, metadata={"unless_default": True})

    def by_name(self) -> dict[str, int]:
        """Returns the terms that make up the peak, such as ``{"params": …}``."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "host_bytes"]
        return {n.removesuffix("_bytes"): getattr(self, n) for n in names}

    @property
    def total_bytes(self) -> int:
        """Peak bytes of the step."""
        return int(sum(self.by_name().values()))

    @property
    def temporary_bytes(self) -> int:
        """Bytes that exist only during a step."""
        dense = self.gradients_bytes + self.activations_bytes + self.working_bytes
        return dense + self.lookups_bytes

    @property
    def with_exchange_buffer(self) -> MemoryTerms:
        """Terms with the buffer that exchanges gradients with other pipelines."""
        return dataclasses.replace(
            self, working_bytes=self.working_bytes + self.gradients_bytes
        )


def precision_words(precisions: Chosen, whole: str = "f32") -> list[str]:
    """Describes the parts that compute in 16 bits; empty if there are none.

    Args:
        precisions: (TaskGraph, precision) pairs.
        whole: Precision of the full model, if TaskGraphs do not differ.

    >>> precision_words((), "f16")
    ['f16']
    >>> precision_words((("split", "bf16"),))
    ['bf16 in split']
    >>> precision_words((("split", "f32"), ("*", "bf16")))
    ['f32 in split, bf16 in all others']
    """
    rest = "all others" if len(precisions) > 1 else "all"
    where = [f"{kind} in {rest if name == ALL else name}" for name, kind in precisions]
    if where:
        return [", ".join(where)]
    return [whole] if whole != "f32" else []
