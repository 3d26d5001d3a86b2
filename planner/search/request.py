"""The options of a search (``Request``), and the candidates that it evaluates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import MemoryTerms, TimeTerms
from whalejax.planner.plan_entries import Collective, LeafPlan
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafLayout,
    OptimizerBytes,
)
from whalejax.planner.step_options import FixedOptions, StepOptions, option_words


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadableState:
    """State that an optimizer can update in chunks, and that may be in host memory.

    Attributes:
        state: Bytes of optimizer state by the path of its parameter.
        params: Paths of parameters that may be in host memory themselves.
    """

    state: Mapping[str, int] = field(default_factory=dict)
    params: frozenset[str] = frozenset()

    def with_state(self, nbytes: Callable[[str, int], int]) -> OffloadableState:
        """Returns a copy for a part of a model, with the part's bytes of state.

        Args:
            nbytes: Function that returns the part's bytes from a parameter's path and
                full bytes of state.
        """
        state = {path: nbytes(path, whole) for path, whole in self.state.items()}
        return replace(self, state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(FixedOptions):
    """Options of a search other than graph and cluster.

    Attributes:
        optimizer: Bytes of the optimizer state.
        state_bytes: Bytes of state that is neither trained nor recomputed.
        batch_bytes: Bytes of each leaf of the global batch.
        num_micro_batches: Number of micro-batches that the user fixed, or None.
        default: Strategy of operations without a mark (``"replicate"`` or ``"split"``),
            or None to let the search choose.
        cast_bytes: Ratio of a parameter's compute-dtype bytes to its stored bytes.
        narrowed: Whether only some TaskGraphs compute in 16 bits. The graph marks the
            tensors that they read.
        num_devices: Number of devices to use.
        mesh: Axis sizes that the user fixed; others are searched.
        zero: ZeRO stage over ``data`` that the user fixed, or None.
        policies: Remat policies to choose from; the one with least recomputation first.
        hosted: Function that returns the state that may be in host memory. Called only
            if needed.
        sliced: Function that returns the paths of parameters with elementwise updates,
            of whose state each replica can store a slice. Called only if needed.
        in_flight: Number of micro-batches whose activations are saved at a time, as in
            a pipeline stage.
        copies: Number of copies of the model that the marks require. The product of
            ``data``, ``fsdp`` and ``context`` is a multiple of it.
        estimate: Whether the plan may use features that no executor runs.
        one_part: Whether each stage has one part of the model, which excludes
            interleaved schedules.
        is_part: Whether the devices are those of one stage or replica. Such devices
            also store values that this search does not count.
    """

    optimizer: OptimizerBytes
    state_bytes: int = 0
    batch_bytes: tuple[int, ...] = ()
    num_micro_batches: int | None = None
    default: str | None = None
    cast_bytes: float = 1.0
    narrowed: bool = False
    num_devices: int
    mesh: Mapping[str, int] | None = None
    zero: int | None = None
    policies: tuple[str, ...] = ("none",)
    hosted: Callable[[], OffloadableState] | None = None
    sliced: Callable[[], frozenset[str]] | None = None
    in_flight: float = 1.0
    copies: int = 1
    estimate: bool = False
    one_part: bool = False
    is_part: bool = False


class PlanDetails(Protocol):
    """Details of a plan that are computed on demand."""

    def layouts_of(self, scored: LayoutCandidate) -> tuple[LeafLayout, ...]:
        """Returns the layout of each group of parameters."""
        ...

    def collectives_of(self, scored: LayoutCandidate) -> tuple[Collective, ...]:
        """Returns the collectives of one step, as the compiler runs them."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayoutCandidate(StepOptions):
    """Evaluated plan: its ``StepOptions``, layout and predictions.

    Attributes:
        mesh: Sizes of all axes, outermost first.
        zero: ZeRO stage over ``data``.
        num_micro_batches: Number of micro-batches in a step.
        tables: Compute table of each TaskGraph.
        facts: Parameters of the model, in groups of equal ones.
        details: Object that computes ``layouts`` and ``collectives``.
        time, memory: Predicted time and memory of a step.
        wire_bytes: Payload bytes of all collectives in a step, which break ties.
        fits: Whether the plan fits in memory.
        roomy: Whether it fits with the fewest micro-batches and no added offload.
        sequence_parallel_seconds: Likely and least step seconds of this layout if
            ``tensor`` also shards the sequence between matrix products.
    """

    mesh: Mapping[str, int]
    zero: int
    num_micro_batches: int
    tables: Mapping[int, Table]
    facts: LeafFacts
    details: PlanDetails = field(compare=False, repr=False)
    time: TimeTerms
    memory: MemoryTerms
    wire_bytes: int
    fits: bool
    roomy: bool
    sequence_parallel_seconds: tuple[float, float] = (0.0, 0.0)

    @functools.cached_property
    def layouts(self) -> tuple[LeafLayout, ...]:
        """Layout of each group of parameters."""
        return self.details.layouts_of(self)

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of one step, as the compiler runs them."""
        return self.details.collectives_of(self)

    @property
    def leaves(self) -> tuple[LeafPlan, ...]:
        """Plan of every parameter."""
        return self.facts.leaves(self.layouts, self.tables, self.mesh)

    @property
    def layout(self) -> str:
        """Text that describes the layout."""
        axes = {axis: size for axis, size in self.mesh.items() if size > 1}
        words = " × ".join(f"{a} {n}" for a, n in axes.items()) or "one device"
        if self.zero:
            words += f", ZeRO-{self.zero}"
        if self.num_micro_batches > 1:
            words += f", {count_text(self.num_micro_batches, 'micro-batch')}"
        return ", ".join([words, *option_words(self, axes)])
