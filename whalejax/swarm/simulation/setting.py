"""Settings of a simulation: stages and their costs, micro-batches, rebalancing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.meshes.errors import Problems
from whalejax.swarm.churn import ChurnEvent, PeerEventKind, PeerLink
from whalejax.swarm.deadlines import LEASE_SECONDS
from whalejax.swarm.stage_assignment import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Costs of a micro-batch and of a step in a stage, on a peer of speed 1.

    Attributes:
        forward_seconds: Duration of a forward pass; 0 in the last stage, where one call
            does both passes.
        backward_seconds: Duration of a backward pass with its recomputation.
        forward_bytes: Bytes received and sent in a forward pass.
        backward_bytes: Bytes received and sent in a backward pass.
        state_bytes: Bytes of parameters and optimizer state that a new peer downloads.
        gradient_bytes: Bytes of gradients that the stage's peers reduce in a step, in
            the wire format.
        update_seconds: Duration of the optimizer's update.
    """

    forward_seconds: float
    backward_seconds: float
    forward_bytes: tuple[int, int] = (0, 0)
    backward_bytes: tuple[int, int] = (0, 0)
    state_bytes: int = 0
    gradient_bytes: int = 0
    update_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a simulation, without the trace.

    Attributes:
        stages: Costs of the stages, in order.
        micro_batches: Micro-batches of a step, over all trainers.
        in_flight: Micro-batches in flight over all trainers; 0 means two per serving
            peer.
        trainers: Number of trainers; each has its own wirings.
        rule: Rule of moves; with ``Rule.NONE`` no peer changes its stage, not even to
            an empty one.
        period: Seconds between checks of the peers.
        oracle: Whether peers are placed optimally after each change without any cost,
            and joining peers need no download. It is the reference for other rules.
        compile_seconds: Compile time of a joining or moving peer, before its download.
        notice_seconds: Seconds until trainers notice a death that breaks connections.
        forget_seconds: Seconds after which the announcement of a dead peer expires.
        threshold: Minimum relative gain in speed of a move.
        snapshot_every: Steps between snapshots, to which all roll back if a stage has
            lost its last peer.
        delayed_updates: Whether gradients of a step are summed and applied while the
            next step is computed. Step n then waits for the update of step n - 2. A
            death during an update costs the same as a death between steps.
        seed: Seed of the wirings.
    """

    stages: tuple[StageCost, ...]
    micro_batches: int
    in_flight: int = 0
    trainers: int = 1
    rule: Rule = Rule.OPTIMUM
    period: float = 60.0
    oracle: bool = False
    compile_seconds: float = 0.0
    notice_seconds: float = 0.01
    forget_seconds: float = LEASE_SECONDS
    threshold: float = 0.02
    snapshot_every: int = 100
    delayed_updates: bool = False
    seed: int = 0


def peer_speed(cost: StageCost, speed: float, link: PeerLink) -> float:
    """Returns the micro-batches per second of a peer, limited by processor or links.

    Args:
        cost: Costs of the stage.
        speed: Speed of the peer, relative to that of ``cost``.
        link: Link of the peer.
    """
    received = cost.forward_bytes[0] + cost.backward_bytes[0]
    sent = cost.forward_bytes[1] + cost.backward_bytes[1]
    return 1 / max(
        (cost.forward_seconds + cost.backward_seconds) / speed,
        received / link.down_bytes_per_second,
        sent / link.up_bytes_per_second,
    )


def check(setting: Setting, trace: Sequence[ChurnEvent]) -> None:
    """Refuses invalid settings or traces.

    Args:
        setting: Settings to check.
        trace: Trace of the peers.

    Raises:
        WhaleError: A setting or the trace is invalid.
    """
    with Problems("simulated swarm") as problems:
        if not setting.stages:
            problems.add("stages: there are none; give at least one")
        for number, cost in enumerate(setting.stages):
            if not cost.backward_seconds > 0:
                problems.add(
                    f"stages[{number}].backward_seconds is {cost.backward_seconds}; "
                    "expected more than 0"
                )
        for name in ("micro_batches", "trainers"):
            if getattr(setting, name) < 1:
                problems.add(f"{name} is {getattr(setting, name)}; expected at least 1")
        if not setting.period > 0:
            problems.add(f"period is {setting.period} s; expected more than 0")
        if not any(event.event is PeerEventKind.JOIN for event in trace):
            problems.add("trace: nobody joins; expected a join at time 0")
