"""``Request``, the options of a search, and the candidates that it evaluates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

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
    """State that an optimizer updates in chunks, so that it may be in host memory.

    Attributes:
        state: Bytes of optimizer state, by the path of its parameter.
        params: Paths of parameters that may be in host memory themselves.
    """

    state: Mapping[str, int] = field(default_factory=dict)
    params: frozenset[str] = frozenset()

    def with_state(self, nbytes: Callable[[str, int], int]) -> OffloadableState:
        """Returns a copy for a part of a model, which has less of the state.

        Args:
            nbytes: Function from a path and its full state's bytes to those in the
                part.
        """
        state = {path: nbytes(path, whole) for path, whole in self.state.items()}
        return replace(self, state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(FixedOptions):
    """Options of a search, apart from graph and cluster; extends ``FixedOptions``.

    Attributes:
        optimizer: Bytes of the optimizer state.
        state_bytes: Bytes of state that is neither trained nor computed.
        batch_bytes: Bytes of each leaf of the global batch.
        num_micro_batches: Fixed by the user, or None for the search to choose.
        default: Strategy kind of unmarked operations (``"replicate"`` or ``"split"``),
            or None to leave them to the search.
        cast_bytes: Bytes of a parameter in its compute type, over its stored bytes.
        narrowed: Whether only some TaskGraphs compute in 16 bits; the graph marks the
            tensors that they read.
        num_devices: Devices to use.
        mesh: Axis sizes that the user fixed; others are searched.
        zero: ZeRO level over ``data`` that the user fixed, or None.
        policies: Remat policies to choose from, the one that saves most first.
        hosted: Function that returns the state that may be in host memory, as the
            optimizer can update it in chunks; called only if needed.
        sliced: Function that returns the paths of parameters with elementwise updates;
            each replica can keep a slice of their state. Called only if needed.
        in_flight: Micro-batches whose activations are saved at once, as in a stage.
        copies: Least number of copies of the model, by the marks: ``data`` × ``fsdp`` ×
            ``context`` is a multiple of it.
        estimate: Whether the plan may use features that no executor runs.
        one_part: Whether a stage has only one part of the model, without interleaving.
        is_part: Whether the devices are those of one stage or replica; they then store
            more than this search knows.
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
        """Returns the layout of each parameter group."""
        ...

    def collectives_of(self, scored: LayoutCandidate) -> tuple[Collective, ...]:
        """Returns the collectives of one step, as the compiler runs them."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayoutCandidate(StepOptions):
    """One evaluated plan: its ``StepOptions``, layout and predictions.

    Attributes:
        mesh: Axis sizes, outermost first, all axes present.
        zero: ZeRO level over ``data``.
        num_micro_batches: Number of micro-batches in a step.
        tables: Compute table of each TaskGraph.
        facts: Parameters of the model, in groups of equal ones.
        details: Computes ``layouts`` and ``collectives``.
        time, memory: Predicted time and memory of a step.
        wire_bytes: Payload of all collectives in a step, for breaking ties.
        fits: Whether the plan fits in memory.
        roomy: Whether it fits with the smallest possible number of micro-batches.
        sequence_parallel_seconds: Likely and least seconds of a step of this layout
            with the sequence sharded over ``tensor`` between products.
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
        """Layout of each parameter group."""
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
            words += f", {self.num_micro_batches} micro-batches"
        return ", ".join([words, *option_words(self, axes)])
