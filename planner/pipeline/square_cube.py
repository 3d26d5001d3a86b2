"""The square-cube law of pipelines: compute time grows faster than transfers.

A stage of width d computes d² work per token, and transfers d values. So over the same
link, wider stages wait less (SWARM, section 3.1). More layers per stage also compute
more for the same transfer. The law predicts only other widths. The work of the given
stages is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Work and transfers of one micro-batch on one stage.

    Attributes:
        flops: FLOPs of products on one device in both passes, with recomputation. The
            last stage recomputes nothing.
        compute_seconds: Seconds of both passes, with the same recomputation.
        received_bytes, sent_bytes: Bytes that the stage's link carries in each
            direction.
    """

    flops: float
    compute_seconds: float
    received_bytes: int
    sent_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes in both directions."""
        return self.received_bytes + self.sent_bytes

    def wire_seconds(self, bytes_per_second: float) -> float:
        """Returns the seconds of the transfers over a full-duplex link."""
        return max(self.received_bytes, self.sent_bytes) / bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOverLink:
    """Stage over a link of some bandwidth.

    Attributes:
        stage: Number of the stage.
        bytes_per_second: Bandwidth of the link.
        compute_seconds, wire_seconds: Compute and transfer time of one micro-batch.
    """

    stage: int
    bytes_per_second: float
    compute_seconds: float
    wire_seconds: float

    @property
    def utilization(self) -> float:
        """Fraction of the time that a device computes, if it waits for its link."""
        return self.compute_seconds / (self.compute_seconds + self.wire_seconds)

    @property
    def overlapped(self) -> float:
        """Fraction of the time that a device computes, if transfers overlap."""
        longest = max(self.compute_seconds, self.wire_seconds)
        return self.compute_seconds / longest

    @property
    def busy_width(self) -> float:
        """Smallest width that keeps the device busy if transfers overlap.

        It is relative to the stage's width.
        """
        return self.wire_seconds / self.compute_seconds

    def with_link_speed(self, bytes_per_second: float) -> StageOverLink:
        """Returns the stage over another link.

        Args:
            bytes_per_second: Bandwidth of the other link.
        """
        faster = bytes_per_second / self.bytes_per_second
        seconds = self.wire_seconds / faster
        return replace(self, bytes_per_second=bytes_per_second, wire_seconds=seconds)

    def at(self, width: float, layers: float = 1.0) -> StageOverLink:
        """Returns the stage at another width and depth, by the square-cube law.

        Args:
            width: Width relative to the stage's width.
            layers: Number of layers relative to the stage's number; default: 1.
        """
        return replace(
            self,
            compute_seconds=self.compute_seconds * width**2 * layers,
            wire_seconds=self.wire_seconds * width,
        )
