"""The two ways in which processes add gradients up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


Way = Literal["messages", "collectives"]

MESSAGES: Final[Way] = "messages"
"""Between whole replicas, over connections of their own."""

COLLECTIVES: Final[Way] = "collectives"
"""Of the platform, in one program over all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReduction:
    """Reduction of gradients.

    Attributes:
        by: ``"messages"`` or ``"collectives"``.
        why: For a user.
    """

    by: Way
    why: str
