"""Moves peers between stages during a run, at most one at a time.

``stage_assignment`` decides, from the trainer's measurements. A moving peer leaves its
stage, and other peers recompute its results of the step. It compiles the programs of
its target stage while steps continue. Then it downloads that stage's state like any
joining peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from whalejax.swarm.peer_choice import BACKWARD_TASK, FORWARD_TASK
from whalejax.swarm.stage_assignment import MoveCost, PeerLoad, Rebalancer
from whalejax.swarm_runtime.registry import PeerRecord


if TYPE_CHECKING:
    from whalejax.swarm_runtime.trainer import Trainer


PERIOD_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 1.0
"""Seconds until the next check if some peers have not been measured."""


class StageMover:
    """Checks the peers periodically, and moves a peer if that shortens steps."""

    def __init__(
        self,
        stages: int,
        *,
        period: float = PERIOD_SECONDS,
    ) -> None:
        """Starts without moves.

        Args:
            stages: Number of stages of the model.
            period: Seconds between checks.
        """
        self._rebalancer = Rebalancer(stages=stages, period=period)
        self._going, self._next = "", 0.0

    def __call__(self, trainer: Trainer) -> None:
        """Makes at most one move.

        Args:
            trainer: Trainer of the run, which may be computing a step.
        """
        fleet = trainer.fleet
        if self._going and self._going not in trainer.moving:
            # The moving peer has arrived, has failed to move, or has left.
            there = {m.name for m in fleet.members()}
            self._rebalancer.arrived(self._going, is_gone=self._going not in there)
            self._going = ""
        if fleet.now() < self._next or not self._rebalancer.is_due(fleet.now()):
            return
        # Failed peers do not count, even if their leases are valid.
        usable = [m for m in fleet.usable() if not m.leaving]
        loads = loads_of(trainer, usable)
        if loads is None:
            self._next = fleet.now() + RETRY_SECONDS
            return
        costs = [
            MoveCost(
                state_bytes=trainer.cut.state_bytes(stage),
                bytes_per_second=trainer.pace.bytes_per_second,
                compile_seconds=trainer.pace.compile_seconds,
            )
            for stage in range(trainer.cut.stages)
        ]
        # A peer that downloads the state again must not count as joined or left.
        present = {m.name for m in fleet.members() if not m.leaving}
        move = self._rebalancer.decide(loads, fleet.now(), costs, present)
        if move is not None:
            self._going = move.peer
            trainer.move({m.name: m for m in usable}[move.peer], move.target)


def loads_of(trainer: Trainer, members: Sequence[PeerRecord]) -> list[PeerLoad] | None:
    """Returns the loads of peers; None if one is unmeasured, or a stage has no peer.

    A peer's time at another stage is its own time, scaled by the stages' mean times.
    """
    stages = trainer.cut.stages
    seconds = {m.name: trainer.fleet.seconds_per_task(m) for m in members}
    known = {name: x for name, x in seconds.items() if x}
    if len(known) < len(members) or {m.stage for m in members} != {*range(stages)}:
        return None
    means = [0.0] * stages
    for stage in range(stages):
        own = [known[m.name] for m in members if m.stage == stage]
        means[stage] = sum(own) / len(own)
    # The last stage computes its forward pass within its backward call.
    tasks = [
        BACKWARD_TASK + (0 if stage == stages - 1 else FORWARD_TASK)
        for stage in range(stages)
    ]
    held = trainer.gradients_at()
    return [
        PeerLoad(
            peer=m.name,
            stage=m.stage,
            queue_length=m.queue,
            speeds=tuple(
                means[m.stage] / (known[m.name] * means[s] * tasks[s])
                for s in range(stages)
            ),
            held=held.get(m.name, 0),
        )
        for m in members
    ]
