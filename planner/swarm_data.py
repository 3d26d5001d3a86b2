"""Data of a swarm's plan: peers, links, the wire format, and predictions.

A swarm's stages are served by pools of peers over slow links; each peer is one device.
The other fields of the plan describe one peer in each stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from whalejax.meshes import Cluster


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
"""Latencies of a call: the question, the peer's request to another peer, and both
answers.
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
        forward_bytes: Bytes on the wire that the peer moves for a forward pass.
        backward_bytes: Bytes for a backward pass.
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
    """Returns the bytes that a peer receives and sends in a gradient reduction.

    Each peer sums its own micro-batches' gradients and sends every other peer that
    peer's part. It then sums all of its own part and sends that to the others: a
    reduce-scatter and an all-gather.

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
    """Predicts a step without churn: the fill, the slowest stage's work, its reduction.

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
