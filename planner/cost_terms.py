"""Predicted time and memory of a step, by term."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field


Remat = tuple[tuple[str, str], ...]
"""(TaskGraph, policy) pairs of TaskGraphs that the backward pass recomputes."""

Chosen = tuple[tuple[str, str], ...]
"""(TaskGraph, kind) pairs of TaskGraphs whose kind of attention is chosen: ``ring`` or
``gather``.
"""

ALL = "*"
"""Name that stands for every TaskGraph without an entry of its own."""


OFFLOADS = ("optimizer", "activations", "params", "gradients")
"""State that may be in host memory; gradients only in estimates, and with params."""

UNCOUNTED_MOVES = (
    "transfers to and from host memory are not counted, as the cluster lacks their "
    "rate (host_link_bytes_per_second) or the size of host memory"
)
"""Note of a plan with offload on a cluster whose host memory is unknown."""

NO_EFFECT = "has no effect"
"""Text on a hint without an effect, for notes."""

OBEYED = ("marked TaskGraph obeyed", "marked TaskGraphs obeyed")
"""End of the note on obeyed hints: for one hint, and for several."""

FETCHED = 2
"""Number of layers on the device at a time, if host memory has their parameters or
activations: one layer computes while the next is in transfer.
"""


def moves_to_host(shape: tuple[int, ...]) -> bool:
    """Returns whether the state of a parameter with this shape can be offloaded.

    Vectors stay on the device: they are small in total, and each needs a transfer.
    """
    return len(shape) > 1 and math.prod(shape) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """Predicted seconds of one step, by term.

    Attributes:
        compute_seconds: Seconds of products and memory traffic in both passes.
        launch_seconds: Seconds of kernel launches.
        gradient_seconds: Seconds of gradient reductions that do not overlap.
        parameter_seconds: Seconds of gathers of parameters that do not overlap.
        activation_seconds: Seconds of collectives on activations inside TaskGraphs.
        border_seconds: Seconds of reshards between TaskGraphs and at cuts.
        update_seconds: Seconds of the optimizer's update.
        allocation_seconds: Seconds of the first touch of allocated host memory, on
            devices without memory of their own.
        bubble_seconds: Seconds in which pipeline stages wait for each other.
        offload_seconds: Seconds of transfers to and from host memory that do not
            overlap.
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
        """Returns the terms above 0, largest first, as ``[("compute", 0.3), …]``.

        Values within the rounding error of the others are omitted.
        """
        least = 1e-12 * self.step_seconds
        names = [f.name for f in dataclasses.fields(self)]
        pairs = [(n.removesuffix("_seconds"), float(getattr(self, n))) for n in names]
        return sorted((p for p in pairs if p[1] > least), key=lambda p: -p[1])

    @property
    def step_seconds(self) -> float:
        """Seconds of one step, the sum of all terms."""
        return float(sum(getattr(self, f.name) for f in dataclasses.fields(self)))

    @property
    def once(self) -> TimeTerms:
        """Terms of work once per step: update, allocations and offload transfers."""
        return TimeTerms(
            update_seconds=self.update_seconds,
            allocation_seconds=self.allocation_seconds,
            offload_seconds=self.offload_seconds,
        )

    @property
    def pass_seconds(self) -> float:
        """Seconds of the passes of all micro-batches, without gradient reductions."""
        return self.step_seconds - self.once.step_seconds - self.gradient_seconds

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives that do not overlap."""
        return (
            self.gradient_seconds
            + self.parameter_seconds
            + self.activation_seconds
            + self.border_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Predicted bytes on the fullest device, by term.

    The sum of all terms but ``host_bytes`` is the peak.

    Attributes:
        params_bytes: Bytes of stored parameters.
        gradients_bytes: Bytes of accumulated gradients.
        optimizer_bytes: Bytes of optimizer state.
        state_bytes: Bytes of state that is neither trained nor recomputed, such as
            batch statistics and random keys.
        batch_bytes: Bytes of the device's part of the global batch.
        activations_bytes: Bytes of values that are saved for the backward pass.
        working_bytes: Bytes of gathered parameters, casts and the largest temporaries.
        host_bytes: Bytes in host memory for each device.
        tables_bytes: Bytes of rows of embedding tables, with their optimizer state.
        lookups_bytes: Bytes of vectors and row gradients in exchange that exceed the
            temporaries of the dense part.
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
        """Returns the terms whose sum is the peak, such as ``{"params": …}``."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "host_bytes"]
        return {n.removesuffix("_bytes"): getattr(self, n) for n in names}

    @property
    def total_bytes(self) -> int:
        """Peak bytes of the step."""
        return int(sum(self.by_name().values()))

    @property
    def temporary_bytes(self) -> int:
        """Bytes that are in memory only during a step."""
        dense = self.gradients_bytes + self.activations_bytes + self.working_bytes
        return dense + self.lookups_bytes

    @property
    def with_exchange_buffer(self) -> MemoryTerms:
        """Terms with the buffer for gradient exchange between parallel pipelines."""
        return dataclasses.replace(
            self, working_bytes=self.working_bytes + self.gradients_bytes
        )


def precision_words(precisions: Chosen, whole: str = "f32") -> list[str]:
    """Returns texts on the TaskGraphs that compute in 16 bits; empty without any.

    Args:
        precisions: (TaskGraph, precision) pairs.
        whole: Precision of the model if TaskGraphs do not differ; default: ``"f32"``.

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
