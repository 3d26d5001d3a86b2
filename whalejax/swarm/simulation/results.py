"""Results of a simulated swarm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whalejax.meshes.units import count_text


if TYPE_CHECKING:
    from whalejax.display.swarms import SimulatedChart


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSimulation:
    """Results of a simulation.

    Attributes:
        seconds: Simulated seconds.
        micro_batches: Number of finished micro-batches, without those of steps that
            were rolled back.
        step_seconds: Seconds of each committed step with its waits for joining peers.
        busy_seconds: Seconds for which each peer computed.
        present_seconds: Seconds of each peer from joining to its end.
        max_flow: Micro-batches that the best placement of the present peers could have
            computed, without reductions, pipeline fills or shared links.
        changes: Joins, leaves and deaths after the start.
        moves: Number of moves between stages.
        emptied_by_moves: Number of moves that emptied a stage; always 0.
        empty_seconds: Seconds in which some stage had no serving peer.
        went_back: Number of rollbacks to a snapshot.
        recomputed: Number of gradients recomputed because their peer was lost.
        late: Number of answers that came after their attempt had been abandoned.
        timeline: (seconds, micro-batches so far) of each commit.
        serving: Seconds of every change, and the number of serving peers of each stage
            after it.
    """

    seconds: float
    micro_batches: int
    step_seconds: tuple[float, ...]
    busy_seconds: dict[str, float]
    present_seconds: dict[str, float]
    max_flow: float
    changes: int
    moves: int
    emptied_by_moves: int
    empty_seconds: float
    went_back: int
    recomputed: int
    late: int
    timeline: tuple[tuple[float, int], ...]
    serving: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def micro_batches_per_second(self) -> float:
        """Micro-batches per second."""
        return self.micro_batches / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """Fraction of the time that peers computed."""
        present = math.fsum(self.present_seconds.values())
        return math.fsum(self.busy_seconds.values()) / present if present else 0.0

    @property
    def of_max_flow(self) -> float:
        """Throughput as a fraction of the throughput of the best placement."""
        return self.micro_batches / self.max_flow if self.max_flow else 0.0

    def __str__(self) -> str:
        steps = len(self.step_seconds)
        mean = math.fsum(self.step_seconds) / steps if steps else math.nan
        return "\n".join(
            [
                f"{self.seconds:,.0f} s simulated: {self.micro_batches:,} "
                f"micro-batches, {self.micro_batches_per_second:.3g} a second",
                f"{steps} steps of {mean:.3g} s on average",
                f"peers compute {self.utilization:.0%} of the time; throughput is "
                f"{self.of_max_flow:.0%} of what the best placement allows",
                f"{count_text(self.changes, 'peer')} came or went, {self.moves} moved "
                f"to another stage; for {self.empty_seconds:,.0f} s some stage had no "
                "peer",
                f"{self.recomputed} gradients were computed again, {self.late} answers "
                "came late",
            ]
        )

    def chart(self) -> SimulatedChart:
        """Returns a chart of serving peers by stage, and throughput, over time.

        Returns:
            Chart that a notebook draws, ``print`` describes and ``save`` writes to a
            file.
        """
        from whalejax.display.swarms import SimulatedChart

        return SimulatedChart(
            str(self), self.seconds, self.timeline, self.serving, self.empty_seconds
        )

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return self.chart()._repr_mimebundle_()
