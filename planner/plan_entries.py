"""Entries of a plan: parameters, batches, tables, swarms and evaluated candidates."""

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


BLOCK: Final = 256  # Number of values with a common scale in int8.
WIRES: Final = ("f32", "bf16", "int8")
SUM_WIRES: Final = ("f32", "f16", "int8")
"""Wire formats of gradients in their reduction over a stage's peers."""

_SLOW_BYTES_PER_SECOND: Final = 125e6

_VALUE_BYTES: Final = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1}


def slow_link(cluster: Cluster) -> float | None:
    """Returns the bandwidth of a cluster's slowest link, if it is slow as in swarms.

    Args:
        cluster: Cluster of the plan.

    Returns:
        Bytes per second; None if every link has at least 1 Gb/s.
    """
    levels = [level for level in cluster.levels if level.size > 1]
    rate = min((x.bandwidth_bytes_per_second for x in levels), default=math.inf)
    return rate if rate < _SLOW_BYTES_PER_SECOND else None


LATENCIES: Final = 4
"""Number of one-way latencies in a call: the request, the peer's own request for its
input, and both replies.
"""


def wire_bytes(values: int, wire: str) -> int:
    """Returns the bytes of some values in a wire format, including scales.

    Args:
        values: Number of values.
        wire: Wire format, in ``WIRES`` or ``SUM_WIRES``.

    >>> wire_bytes(1024, "f32"), wire_bytes(1024, "bf16"), wire_bytes(1024, "int8")
    (4096, 2048, 1040)
    """
    scales = 4 * -(-values // BLOCK) if wire == "int8" else 0
    return values * _VALUE_BYTES[wire] + scales


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStage:
    """Stage of a swarm, with predictions for one micro-batch on one peer.

    Attributes:
        peers: Number of peers of the stage.
        forward_seconds: Seconds of a forward pass; 0 for the last stage, where one call
            does both passes.
        backward_seconds: Seconds of a backward pass and the recomputed forward pass.
        forward_bytes: Bytes received and sent in a forward pass.
        backward_bytes: Bytes received and sent in a backward pass.
        state_bytes: Bytes of parameters and optimizer state that a joining peer
            downloads.
        gradient_bytes: Bytes of gradients that the stage's peers reduce in each step.
        memory_bytes: Predicted bytes on a peer's device: two states during an update,
            gradients, and the temporaries of a call.
        apart: Whether gradients of each micro-batch are stored separately until the
            step is committed, as all peers of this version do.
        deadline_seconds: Seconds after which a call is abandoned.
        host_bytes: Predicted bytes in a peer's host memory: inputs, results and
            gradients of its micro-batches in a step, sums, and a copy of the state.
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
        """Seconds of both passes of a micro-batch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Bytes received and sent for a micro-batch."""
        received, sent = zip(self.forward_bytes, self.backward_bytes, strict=True)
        return sum(received), sum(sent)

    def wire_seconds(self, bytes_per_second: float) -> float:
        """Returns the seconds of a micro-batch's transfers over a full-duplex link."""
        return max(self.wire_bytes) / bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Plan of training by a swarm.

    Attributes:
        wire: Wire format of activations and their gradients between stages.
        bytes_per_second: Bandwidth of each peer's link in each direction.
        latency_seconds: One-way latency.
        peers: Total number of peers.
        stages: Stages of the pipeline, in order.
        step_seconds: Predicted step time with all peers.
        samples_per_second: Predicted throughput.
        utilization: Fraction of the time in which peers compute.
        reasons: (Choice, reason) pairs for ``plan.why``.
        sum_wire: Wire format of gradients in their reduction over a stage's peers.
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
        """Values that all peers must have in common, without predictions."""
        result: dict[str, object] = {"wire": self.wire, "stages": len(self.stages)}
        if self.sum_wire != "f32":
            result["sum_wire"] = self.sum_wire
        return result


def sum_bytes(gradient_bytes: int, peers: int, wire: str = "f32") -> int:
    """Returns the bytes that a peer sends, and receives, in a gradient reduction.

    The reduction is a reduce-scatter and an all-gather. Each peer sums the gradients of
    its own micro-batches, and sends every other peer that peer's part. It then adds the
    parts that it receives, and sends their sum to all others.

    Args:
        gradient_bytes: Bytes of a stage's float32 gradients.
        peers: Number of peers of the stage.
        wire: Wire format in ``SUM_WIRES``; default: ``"f32"``. In int8, each part of an
            array has scales of its own; those of incomplete blocks are not counted.

    >>> sum_bytes(1024, peers=4), sum_bytes(1024, peers=1)
    (1536, 0)
    >>> sum_bytes(4096, peers=4, wire="int8")
    1560
    """
    sent = wire_bytes(gradient_bytes // 4, wire) if wire != "f32" else gradient_bytes
    return math.ceil(2 * (peers - 1) / peers * sent) if peers > 1 else 0


def sum_seconds(stage: SwarmStage, swarm: Swarm) -> float:
    """Returns the seconds in which the peers of a stage reduce its gradients.

    Args:
        stage: Stage of the swarm.
        swarm: Swarm with its links and wire formats.
    """
    if stage.peers < 2:
        return 0.0
    sent = sum_bytes(stage.gradient_bytes, stage.peers, swarm.sum_wire)
    return sent / swarm.bytes_per_second + 2 * swarm.latency_seconds


def closed_form_seconds(swarm: Swarm, micro_batches: int, in_flight: int) -> float:
    """Returns the predicted step time if no peers join or leave.

    It adds the filling of the pipeline, the work of the slowest stage and the slowest
    gradient reduction.

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
    pace = max(pace, fill / in_flight)  # Latency, if too few are in flight.
    late = max(sum_seconds(stage, swarm) for stage in swarm.stages)
    return fill + micro_batches * pace + late


@dataclass(frozen=True, slots=True)
class TablesData:
    """Placement of embedding tables and data derived from it, as a JSON object.

    Attributes:
        document: Placements, and the entries of
            ``whalejax.tables.table_plan_record.TablesRecord``.
    """

    document: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object."""
        return self.document

    @classmethod
    def from_json(cls, data: Any) -> TablesData:
        """Returns the data of a file, whose contents their readers check.

        Raises:
            DataError: The data are not an object with a placement.
        """
        if not isinstance(data, dict) or "placement" not in data:
            raise DataError("tables is not an object with a placement")
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
"""Mesh axes of each dimension, outermost first, as in a PartitionSpec."""

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]


@functools.cache
def itemsize_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a dtype, given by name.

    >>> itemsize_bytes("bfloat16"), itemsize_bytes("float8_e4m3fn")
    (2, 1)
    """
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def starred(path: str) -> str:
    """Returns a path with ``*`` instead of the numbers of repeated layers.

    >>> starred("blocks.3.up.kernel"), starred("layer_11.conv2d.kernel")
    ('blocks.*.up.kernel', 'layer_*.conv2d.kernel')
    """
    return re.sub(r"\d+(?=\.|$)", "*", path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
    """Layouts of one parameter.

    Attributes:
        path: Dotted path in the model.
        shape, dtype: Shape and dtype of the global leaf.
        roles: Names of the logical dimensions in each dimension, major first.
        compute_spec: Layout in which the forward pass reads the parameter.
        param_spec: Layout in which the parameter is stored.
        gradient_spec: Layout in which the gradient is accumulated.
        optimizer_spec: Layout of the parameter's optimizer state.
        hosted: Whether the parameter is in host memory, from which it is copied layer
            by layer.
        gathers: Number of gathers in a micro-batch; 0 if the parameter is used as
            stored.
        summed: Mesh axes over which the gradient is reduced.
        note: Reason why dimensions of the parameter are not sharded, or empty.
        trained: Whether the parameter has a gradient and optimizer state. If not,
            ``gradient_spec`` and ``optimizer_spec`` have no meaning.
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
    """Leaf of the global batch: its path, shape, dtype and layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleInfo:
    """Logical dimension: its name, size, other names, and why it stays unsharded.

    If windows slide along it, ``size`` is the largest of its sizes, and ``common``
    divides all of them. If not, ``common`` is 0.
    """

    name: str
    size: int
    aliases: tuple[str, ...] = ()
    unshardable: str = ""
    common: int = field(default=0, metadata={"unless_default": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTable:
    """Logical dimensions that each mesh axis shards in one TaskGraph.

    Attributes:
        task_graph: Name of the TaskGraph.
        marks: Texts of the user's marks on the TaskGraph.
        axes: (Mesh axis, logical dimensions) pairs; a missing axis shards nothing.
    """

    task_graph: str
    marks: tuple[str, ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def is_whole(self) -> bool:
        """Whether no mesh axis shards anything."""
        return not any(roles for _, roles in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Evaluated layout, with predicted time and memory.

    Attributes:
        layout: Text of the layout, such as ``"data 2 × tensor 4, ZeRO-1"``.
        time, memory: Predicted seconds and bytes by term.
        fits: Whether the layout fits in memory.
        verdict: ``"chosen"``, or the reason why the layout was not chosen.
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
        """Predicted peak bytes of the fullest device."""
        return self.memory.total_bytes


class Candidates(tuple[Candidate, ...]):
    """Evaluated layouts, best first; each is shown as one line."""

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
        forward_seconds, backward_seconds: Seconds of each pass. The backward pass of
            lockstep stages includes the recomputed forward pass.
        weight_seconds: Seconds of the parameters' gradient if that is a separate
            action, else 0.
        handed_bytes: Bytes of activations that each device receives from other virtual
            stages, for stage programs.
        returned_bytes: Bytes of the cotangents of these that each device sends back.
        copied_bytes: Bytes of other stages' parameters that each device receives once
            per step, and whose gradients it sends back.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    handed_bytes: int = 0
    returned_bytes: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedFeatures:
    """Unsupported features, which only older plan files record.

    Attributes:
        attention: Attention over ``context``: ``"all-gather"`` or ``"ring"``.
        shares: (Device kind, most micro-batches) pairs if replicas differ.
        covered: Number of plans from which the search chose.
        gap: Upper bound on the gain of another plan, as a fraction of its time.
    """

    attention: str = ""
    shares: tuple[tuple[str, int], ...] = ()
    covered: int = 0
    gap: float = 0.0

    def words(self) -> list[str]:
        """Returns a short text on each feature."""
        words = []
        if self.attention:
            words.append(f"{self.attention} attention")
        if self.shares:
            shares = ", ".join(f"{n} on {kind}" for kind, n in self.shares)
            words.append(f"micro-batches at most {shares}")
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal collectives of a step, with their number.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
            ``collective-permute``.
        axes: Mesh axes of the collective.
        phase: ``forward``, ``backward``, ``update``, or ``turn`` for transfers between
            lockstep stages.
        what: Contents: ``gradient``, ``activation``, ``parameter``, ``border`` (a
            reshard), ``ring`` (transfers during computation), ``halo``, or ``moments``
            (averaged optimizer state). For embedding tables ids, rows and row
            gradients.
        payload_bytes: Payload bytes on one device per execution.
        count: Number of executions in one micro-batch, or once per step for ``update``.
        scope: Name stack of one of the collectives, for reports.
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
"""Largest accepted FLOPs of a step, which may exceed a 64-bit integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Size of a model, and the work of one step.

    Attributes:
        parameters: Number of elements of all parameters.
        trained: Number of elements of trained parameters.
        active: Number of elements that compute a token; fewer than all if only some
            experts compute it.
        chosen: Number of active elements whose results a token uses. It is smaller than
            ``active`` if all experts compute every token and results of some are
            dropped.
        samples: Number of samples of a global batch.
        tokens: Number of tokens of a global batch; 0 if no leaf has tokens.
        step_flops: FLOPs of a step's matrix products for the global batch, without
            recomputation.
        dtype: Dtype of the operands of most products, such as ``"bf16"``.
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
        """Number of tokens of a sample; 0 if a batch has none."""
        return self.tokens // self.samples

    @property
    def unit(self) -> str:
        """Unit of throughput: ``"tokens"``, or ``"samples"`` without tokens."""
        return "tokens" if self.tokens else "samples"

    @property
    def units(self) -> int:
        """Number of tokens of a global batch, or of samples without tokens."""
        return self.tokens or self.samples
