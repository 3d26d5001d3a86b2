"""Entries of a plan: parameters, batches, tables, swarms, and evaluated candidates."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal, SupportsIndex, overload

from whalejax.meshes import Cluster
from whalejax.meshes.checks import Arguments
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.cost_terms import MemoryTerms, TimeTerms
from whalejax.planner.json_codec import DataError
from whalejax.planner.plan_errors import PlanError


BLOCK: Final = 256  # values that share a scale in int8
WIRES: Final = ("f32", "bf16", "int8")
SUM_WIRES: Final = ("f32", "f16", "int8")
"""Formats of gradients during their reduction over a stage's peers."""

_SLOW_BYTES_PER_SECOND: Final = 125e6

_VALUE_BYTES: Final = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1}


def slow_link(cluster: Cluster) -> float | None:
    """Returns the bandwidth of a cluster's slowest link if it suits a swarm.

    Args:
        cluster: Cluster of the plan.

    Returns:
        Bytes per second; None if every link has at least 1 Gb/s.
    """
    levels = [level for level in cluster.levels if level.size > 1]
    rate = min((x.bandwidth_bytes_per_second for x in levels), default=math.inf)
    return rate if rate < _SLOW_BYTES_PER_SECOND else None


LATENCIES: Final = 4
"""One-way latencies of a call: the request, the peer's own request to another peer for
the input, and both replies.
"""


def wire_bytes(values: int, wire: str) -> int:
    """Returns the bytes of some values on the wire, including scales.

    Args:
        values: Number of values.
        wire: One of ``WIRES`` or ``SUM_WIRES``.

    >>> wire_bytes(1024, "f32"), wire_bytes(1024, "bf16"), wire_bytes(1024, "int8")
    (4096, 2048, 1040)
    """
    scales = 4 * -(-values // BLOCK) if wire == "int8" else 0
    return values * _VALUE_BYTES[wire] + scales


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStage:
    """Stage of a swarm, for one micro-batch on one peer.

    Attributes:
        peers: Number of peers of the stage.
        forward_seconds: Seconds of a forward pass; 0 in the last stage, where one call
            does both passes.
        backward_seconds: Seconds of a backward pass, with the recomputed forward pass.
        forward_bytes: Received and sent bytes of a forward pass.
        backward_bytes: Received and sent bytes of a backward pass.
        state_bytes: Bytes of parameters and optimizer state that a new peer downloads.
        gradient_bytes: Bytes of gradients that the stage's peers reduce in each step.
        memory_bytes: Predicted memory of a peer's device: two states during an update,
            gradients and the temporaries of a call.
        apart: Whether gradients of micro-batches are stored separately until a step is
            committed, as all peers do.
        deadline_seconds: Seconds after which a call is abandoned.
        host_bytes: Predicted memory of a peer's host: inputs, results and gradients of
            its micro-batches in a step, sums, and a copy of the state.
    """

    peers: int
    forward_seconds: float
    backward_seconds: float
    forward_bytes: tuple[int, int]
    backward_bytes: tuple[int, int]
    state_bytes: int
    gradient_bytes: int
    memory_bytes: int
    apart: bool = True
    deadline_seconds: float
    host_bytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """Seconds of a micro-batch, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Received and sent bytes of a micro-batch."""
        received, sent = zip(self.forward_bytes, self.backward_bytes, strict=True)
        return sum(received), sum(sent)

    def wire_seconds(self, bytes_per_second: float) -> float:
        """Returns the seconds of a micro-batch over a full-duplex link."""
        return max(self.wire_bytes) / bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Plan of training by a swarm.

    Attributes:
        wire: Format of activations and their gradients between stages.
        bytes_per_second: Rate of each peer's link in each direction.
        latency_seconds: One-way latency.
        peers: Total number of peers.
        stages: Stages in order.
        step_seconds: Predicted step time with all peers.
        samples_per_second: Predicted throughput.
        utilization: Fraction of the time that peers compute.
        reasons: Pairs of (choice, reason), for ``plan.why``.
        sum_wire: Format of gradients during their reduction over the peers of a stage.
    """

    wire: str
    bytes_per_second: float
    latency_seconds: float
    peers: int
    stages: tuple[SwarmStage, ...]
    step_seconds: float
    samples_per_second: float
    utilization: float
    reasons: tuple[tuple[str, str], ...] = ()
    sum_wire: str = "f32"

    @property
    def agreed(self) -> dict[str, object]:
        """Values on which all peers must agree; without predictions."""
        result: dict[str, object] = {"wire": self.wire, "stages": len(self.stages)}
        if self.sum_wire != "f32":
            result["sum_wire"] = self.sum_wire
        return result


def sum_bytes(gradient_bytes: int, peers: int, wire: str = "f32") -> int:
    """Returns the bytes that a peer sends in a gradient reduction; it receives as many.

    The reduction is a reduce-scatter and an all-gather. Each peer sums the gradients of
    its own micro-batches, and sends each other peer that peer's part. Then it adds what
    it received for its own part, and sends the result to the others.

    Args:
        gradient_bytes: Bytes of a stage's gradients of one micro-batch, in float32.
        peers: Number of peers of the stage.
        wire: One of ``SUM_WIRES``. In int8, each peer's part of an array has its own
            scales; those of incomplete blocks are not counted.

    >>> sum_bytes(1024, peers=4), sum_bytes(1024, peers=1)
    (1536, 0)
    >>> sum_bytes(4096, peers=4, wire="int8")
    1560
    """
    sent = wire_bytes(gradient_bytes // 4, wire) if wire != "f32" else gradient_bytes
    return math.ceil(2 * (peers - 1) / peers * sent) if peers > 1 else 0


def sum_seconds(stage: SwarmStage, swarm: Swarm) -> float:
    """Returns the seconds of reducing a stage's gradients over its peers.

    Args:
        stage: Stage of the swarm.
        swarm: Swarm with its links and formats.
    """
    if stage.peers < 2:
        return 0.0
    sent = sum_bytes(stage.gradient_bytes, stage.peers, swarm.sum_wire)
    return sent / swarm.bytes_per_second + 2 * swarm.latency_seconds


def closed_form_seconds(swarm: Swarm, micro_batches: int, in_flight: int) -> float:
    """Predicts a step without churn: fill, slowest stage's work, slowest reduction.

    Args:
        swarm: Plan of the swarm; its ``step_seconds`` is not read.
        micro_batches: Number of micro-batches in the step.
        in_flight: Number of micro-batches in flight.
    """
    speed, link = swarm.bytes_per_second, swarm.latency_seconds
    fill = math.fsum(
        stage.compute_seconds
        + stage.wire_bytes[0] / speed
        + LATENCIES * link * (2 if stage.forward_seconds else 1)
        for stage in swarm.stages
    )
    pace = max(
        max(stage.compute_seconds, stage.wire_seconds(speed)) / stage.peers
        for stage in swarm.stages
    )
    pace = max(pace, fill / in_flight)  # latency, if too few are in flight
    late = max(sum_seconds(stage, swarm) for stage in swarm.stages)
    return fill + micro_batches * pace + late


@dataclass(frozen=True, slots=True)
class TablesData:
    """Placement of tables and what is derived from it, as a JSON object.

    Attributes:
        document: Entries of ``whalejax.tables.table_plan_record.TablesRecord``, and the
            placements.
    """

    document: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object."""
        return self.document

    @classmethod
    def from_json(cls, data: Any) -> TablesData:
        """Returns the data of a file; its readers check the contents.

        Raises:
            DataError: The data are no such object.
        """
        if not isinstance(data, dict) or "placement" not in data:
            raise DataError("tables is no object with a placement")
        return cls(data)

    @property
    def program(self) -> dict[str, Any]:
        """Parts of the document that change the program."""
        sections = self.document.get("sections") or {}
        kept = ("staleness", "processes", "queue_depth")
        return {
            "shards": self.document["placement"].get("shards"),
            "hottest": self.document["placement"].get("hottest"),
            "beside": (self.document.get("beside") or {}).get("shards"),
            "rows": self.document.get("rows"),
            "loss": self.document.get("program_hash"),
            "sections": {name: sections.get(name) for name in kept},
        }


Spec = tuple[tuple[str, ...], ...]
"""Mesh axes of each dimension, outermost first; the plain form of a PartitionSpec."""

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]


@functools.cache
def itemsize_bytes(dtype: str) -> int:
    """Returns the bytes of one element, by the name of its type.

    >>> itemsize_bytes("bfloat16"), itemsize_bytes("float8_e4m3fn")
    (2, 1)
    """
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def starred(path: str) -> str:
    """Replaces the numbers of repeated layers in a path by ``*``.

    >>> starred("blocks.3.up.kernel"), starred("layer_11.conv2d.kernel")
    ('blocks.*.up.kernel', 'layer_*.conv2d.kernel')
    """
    return re.sub(r"\d+(?=\.|$)", "*", path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
    """Plan of one parameter.

    Attributes:
        path: Dotted path in the model.
        shape, dtype: Shape and dtype of the global leaf.
        roles: Names of the logical dimensions in each dimension, major atom first.
        compute_spec: Layout in which the forward pass reads it.
        param_spec: Layout in which it is stored.
        gradient_spec: Layout in which its gradient is accumulated.
        optimizer_spec: Layout of the optimizer's copies of it.
        hosted: Whether it is in host memory and copied to the device layer by layer.
        gathers: Number of gathers in a micro-batch; 0 if it is computed with as it is
            stored.
        summed: Mesh axes over which its gradient is summed.
        note: Reason why it stays unsharded in part, or empty.
        trained: Whether it has a gradient and an optimizer. Others are stored and read
            in the same way; their ``gradient_spec`` and ``optimizer_spec`` have no
            meaning.
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
        """Bytes of the unsharded parameter."""
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
    """A logical dimension: name, size, other names, and why it stays unsharded.

    If windows slide along it, it has several resolutions: ``size`` is its largest size,
    and ``common`` divides all of its sizes. Otherwise ``common`` is 0.
    """

    name: str
    size: int
    aliases: tuple[str, ...] = ()
    unshardable: str = ""
    common: int = field(default=0, metadata={"unless_default": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTable:
    """Roles that each mesh axis shards in the computation of one TaskGraph.

    Attributes:
        task_graph: Name of the TaskGraph.
        marks: The user's marks on it, as text.
        axes: (axis, roles) pairs; a missing axis shards nothing there.
    """

    task_graph: str
    marks: tuple[str, ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def is_whole(self) -> bool:
        """Whether no axis shards anything there."""
        return not any(roles for _, roles in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An evaluated plan: its layout as text, predicted time and memory.

    Attributes:
        layout: Layout such as ``"data 2 × tensor 4, ZeRO-1"``.
        time, memory: Predictions by term.
        fits: Whether its memory fits the device.
        verdict: ``"chosen"``, or the reason why it was not chosen.
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
        """Predicted peak memory of the device that needs most."""
        return self.memory.total_bytes


class Candidates(tuple[Candidate, ...]):
    """Evaluated plans, best first; shown as one line each."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no plans"

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice, /) -> Candidates: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> Candidate | Candidates:
        """Returns one candidate, or several as ``Candidates``."""
        if isinstance(place, slice):
            return Candidates(super().__getitem__(place))
        return super().__getitem__(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStagePrediction:
    """Prediction for one micro-batch on one virtual stage of a pipeline.

    Attributes:
        forward_seconds, backward_seconds: Seconds of each pass. If stages run in
            lockstep, the backward pass includes the recomputed forward pass.
        weight_seconds: Seconds of the parameters' gradient, if that is a separate
            action; 0 if it is part of the backward pass.
        handed_bytes: Bytes of activations that each of its devices receives from other
            virtual stages, for stage programs.
        returned_bytes: Bytes of their cotangents that each of its devices sends back.
        copied_bytes: Bytes of parameters on other stages that each of its devices
            receives once per step; their gradients go back.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    handed_bytes: int = 0
    returned_bytes: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedFeatures:
    """Features that only older plan files record; plans of this version have none.

    Attributes:
        attention: Attention over ``context``: ``"all-gather"`` or ``"ring"``.
        shares: (device kind, most micro-batches) pairs, if replicas differ.
        covered: Number of plans that the search chose among.
        gap: Upper bound on another plan's gain, as a fraction of its time.
    """

    attention: str = ""
    shares: tuple[tuple[str, int], ...] = ()
    covered: int = 0
    gap: float = 0.0

    def words(self) -> list[str]:
        """Describes each feature briefly."""
        words = []
        if self.attention:
            words.append(f"{self.attention} attention")
        if self.shares:
            shares = ", ".join(f"{n} on {kind}" for kind, n in self.shares)
            words.append(f"micro-batches at most {shares}")
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal collectives of the step, merged.

    Attributes:
        kind: All-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
        axes: Mesh axes of the collective.
        phase: Forward, backward or update; turn for transfers between stages.
        what: Gradient, activation, parameter, border, ring (transfers during
            computation), halo (elements of neighbours for windows), moments (optimizer
            state that is averaged), or, of embedding tables, ids, rows and row
            gradients.
        payload_bytes: Bytes on one device per execution.
        count: Number of executions in one micro-batch (in one step for the update).
        scope: One of its places in the model.
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


_MOST_FLOPS = 10**36
"""Largest accepted FLOPs of a step. Steps of today's largest models take more than a
64-bit integer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Size of a model, and the work of one step.

    Attributes:
        parameters: Number of elements of all parameters.
        trained: Number of trained elements.
        active: Number of elements that compute a token; fewer than all if only some
            experts compute it.
        chosen: Number of active elements whose results a token uses; fewer than
            ``active`` if all experts compute every token and only some are chosen.
        samples: Number of samples of a global batch.
        tokens: Number of tokens of a global batch; 0 if its leaves have no tokens.
        step_flops: FLOPs of the matrix products of a step over the global batch,
            without recomputation.
        dtype: Type of the operands of most products, such as ``"bf16"``.
    """

    parameters: int
    trained: int
    active: int
    chosen: int
    samples: int
    tokens: int
    step_flops: int
    dtype: str

    def __post_init__(self) -> None:
        problems = Arguments("model work", PlanError)
        for name in (
            "parameters",
            "trained",
            "active",
            "chosen",
            "tokens",
        ):
            problems.whole(name, getattr(self, name))
        problems.whole("step_flops", self.step_flops, most=_MOST_FLOPS)
        problems.whole("samples", self.samples, least=1)
        problems.words("dtype", self.dtype)
        problems.raise_if_any()

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample; 0 if a batch has none."""
        return self.tokens // self.samples

    @property
    def unit(self) -> str:
        """Unit of throughput: ``"tokens"``, or ``"samples"`` without tokens."""
        return "tokens" if self.tokens else "samples"

    @property
    def units(self) -> int:
        """Number of tokens of a global batch, or of samples without tokens."""
        return self.tokens or self.samples
