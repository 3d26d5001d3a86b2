"""The two backends with which processes sum gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


Way = Literal["messages", "collectives"]

MESSAGES: Final[Way] = "messages"
"""Backend between complete replicas, over their own connections."""

COLLECTIVES: Final[Way] = "collectives"
"""Backend of the platform, in one program over all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReduction:
    """Reduction of gradients.

    Attributes:
        by: ``"messages"`` or ``"collectives"``.
        why: Reason, for a user.
    """

    by: Way
    why: str
