"""Seconds that live and simulated swarms wait for peers."""

from __future__ import annotations

from typing import Final


LEASE_SECONDS: Final = 10.0
"""Seconds after which a peer without announcements is removed."""

NEWCOMER_SECONDS: Final = 10.0
"""Seconds that a step may always wait for peers that download its state."""

SPARE_SECONDS: Final = 10.0
"""Seconds after which a stage without peers gets a peer of another stage."""

PAUSE_SECONDS: Final = 1.0
"""Seconds before a failed peer gets the state again, doubled after each failure."""

MOST_PAUSE_SECONDS: Final = 300.0
