"""Entries of a plan: parameters, batches, tables, and evaluated candidates."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex, overload

from whalejax.meshes.checks import Arguments
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.cost_terms import MemoryTerms, TimeTerms
from whalejax.planner.plan_errors import PlanError


Spec = tuple[tuple[str, ...], ...]
"""Mesh axes of each dimension, outermost first; the plain form of a PartitionSpec."""

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]


@functools.cache
def itemsize_bytes(dtype: str) -> int:
    """Bytes of one element, by the name of its type.

    >>> itemsize_bytes("bfloat16"), itemsize_bytes("float8_e4m3fn")
    (2, 1)
    """
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def starred(path: str) -> str:
    """A path with the numbers of repeated layers replaced by ``*``.

    >>> starred("blocks.3.up.kernel"), starred("layer_11.conv2d.kernel")
    ('blocks.*.up.kernel', 'layer_*.conv2d.kernel')
    """
    return re.sub(r"\d+(?=\.|$)", "*", path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
    """One parameter.

    Attributes:
        path: Dotted path in the model.
        shape, dtype: Shape and dtype of the global leaf.
        roles: Name of the logical dimensions of each dimension, major atom first.
        compute_spec: Layout in which the forward pass uses it.
        param_spec: Layout in which it is stored.
        gradient_spec: Layout in which its gradient is accumulated.
        optimizer_spec: Layout of the optimizer's copies of it.
        hosted: Whether it is stored in host memory and comes to the device a layer at a
            time.
        gathers: Number of gathers in a micro-batch, where it is stored in shards that
            no computation has.
        summed: Mesh axes over which its gradient is summed.
        note: Reason why something about it stays whole, or empty.
        trained: Whether it has a gradient and an optimizer. Others are stored and read
            like it; their ``gradient_spec`` and ``optimizer_spec`` have no meaning.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    roles: tuple[tuple[str, ...], ...]
    compute_spec: Spec
    param_spec: Spec
    gradient_spec: Spec
    optimizer_spec: Spec
    hosted: bool = False
    gathers: int = 0
    summed: tuple[str, ...] = ()
    note: str = ""
    trained: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * itemsize_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLeaf:
    """One leaf of the global batch: its path, shape, dtype and layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleInfo:
    """A logical dimension: its name, size, other names, and why it stays whole.

    Where windows slide along it, ``size`` is that of the highest resolution, and
    ``common`` divides the size of every one; else ``common`` is 0.
    """

    name: str
    size: int
    aliases: tuple[str, ...] = ()
    unshardable: str = ""
    common: int = field(default=0, metadata={"unless_default": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTable:
    """Compute table of one TaskGraph: mesh axis to the names of its roles.

    Attributes:
        task_graph: Its name.
        marks: The user's marks on it, as text.
        axes: (axis, roles) pairs; an axis that is absent shards nothing there.
    """

    task_graph: str
    marks: tuple[str, ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def is_whole(self) -> bool:
        """No axis shards anything there."""
        return not any(roles for _, roles in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was evaluated: its layout in words, predicted time and memory.

    Attributes:
        layout: Layout such as ``"data 2 × tensor 4, ZeRO-1"``.
        time, memory: Predictions by term.
        fits: Its memory is within the device's.
        verdict: Reason why it was not chosen.
    """

    layout: str
    time: TimeTerms
    memory: MemoryTerms
    fits: bool
    verdict: str

    def __str__(self) -> str:
        return (
            f"{self.layout}: {milliseconds(self.step_seconds)}, "
            f"{gigabytes(self.memory_bytes)} per device; {self.verdict}"
        )

    @property
    def step_seconds(self) -> float:
        """Predicted step time."""
        return self.time.step_seconds

    @property
    def memory_bytes(self) -> int:
        """Predicted peak of the fullest device."""
        return self.memory.total_bytes


class Candidates(tuple[Candidate, ...]):
    """Plans that were evaluated, best first; shown with a line for each."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no plans"

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice, /) -> Candidates: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> Candidate | Candidates:
        """One of them, or some, shown alike."""
        if isinstance(place, slice):
            return Candidates(super().__getitem__(place))
        return super().__getitem__(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStagePrediction:
    """Prediction for one micro-batch on one part of a pipeline.

    Attributes:
        forward_seconds, backward_seconds: Seconds of the part; where stages run one
            loop, the backward pass computes forward again first.
        weight_seconds: Seconds of the gradient of the parameters, where that is an
            action of its own; else 0, and it is in the backward pass.
        handed_bytes: Bytes that other parts transfer to each of its devices, where
            stages have programs of their own.
        returned_bytes: The same of cotangents, which it hands back to their devices.
        copied_bytes: There, what each of its devices is given once in a step of
            parameters that lie on other stages; their gradients go back.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    handed_bytes: int = 0
    returned_bytes: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedFeatures:
    """Features of a plan that this version does not run.

    Attributes:
        attention: Over ``context``: ``"all-gather"`` of keys and values, or ``"ring"``.
        shares: (device kind, micro-batches) that a replica takes at most, where
            replicas differ.
        covered: Plans that the search chose among.
        gap: Largest fraction of its time by which a plan among these could be better.
    """

    attention: str = ""
    shares: tuple[tuple[str, int], ...] = ()
    covered: int = 0
    gap: float = 0.0

    def words(self) -> list[str]:
        """Each of them in a few words."""
        words = []
        if self.attention:
            words.append(f"{self.attention} attention")
        if self.shares:
            shares = ", ".join(f"{n} on {kind}" for kind, n in self.shares)
            words.append(f"micro-batches at most {shares}")
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective of the step, folded.

    Attributes:
        kind: All-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
        axes: Mesh axes it runs over.
        phase: Forward, backward or update; turn for what is handed from stage to stage.
        what: Gradient, activation, parameter, border, ring for what goes round while
            something is computed, or halo for what windows need of neighbours.
        payload_bytes: Bytes on one device, each time.
        count: Number of executions in one micro-batch (in one step for the update).
        scope: One place of the model.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    phase: str
    what: str
    payload_bytes: int
    count: int
    scope: str = ""

    def times(self, num_micro_batches: int) -> int:
        """Returns the number of executions in one step."""
        return self.count * (1 if self.phase == "update" else num_micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Size of a model, and the work of one step.

    Attributes:
        parameters: Number of elements of all parameters.
        trained: Number of those that are trained.
        active: Number of those that a token meets; fewer than all where there are
            experts, of which a token takes some.
        samples: Samples of a global batch.
        tokens: Tokens of a global batch; 0 where its leaves are no tokens.
        step_flops: FLOPs of the matrix products of a step over the global batch, with
            nothing computed again.
        dtype: Type of the operands of most products, such as ``"bf16"``.
    """

    parameters: int
    trained: int
    active: int
    samples: int
    tokens: int
    step_flops: int
    dtype: str

    def __post_init__(self) -> None:
        problems = Arguments("model work", PlanError)
        for name in ("parameters", "trained", "active", "tokens", "step_flops"):
            problems.whole(name, getattr(self, name))
        problems.whole("samples", self.samples, least=1)
        problems.words("dtype", self.dtype)
        problems.raise_if_any()

    @property
    def unit(self) -> str:
        """Returns the unit of throughput: ``"tokens"``, or ``"samples"`` where there
        are none.
        """
        return "tokens" if self.tokens else "samples"

    @property
    def units(self) -> int:
        """Number of tokens, or samples without such, of a global batch."""
        return self.tokens or self.samples
