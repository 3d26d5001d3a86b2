"""The two backends by which processes sum gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


Way = Literal["messages", "collectives"]

MESSAGES: Final[Way] = "messages"
"""Backend of full replicas, which send gradients over connections of WhaleJAX."""

COLLECTIVES: Final[Way] = "collectives"
"""Backend of the platform: one program over all processes with collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReduction:
    """Reduction of gradients.

    Attributes:
        by: ``"messages"`` or ``"collectives"``.
        why: Reason for the choice, as text for the user.
    """

    by: Way
    why: str
