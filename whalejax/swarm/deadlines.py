"""Seconds that live and simulated swarms wait for peers."""

from __future__ import annotations

from typing import Final


LEASE_SECONDS: Final = 10.0
"""A peer that does not announce itself for so long is gone."""

NEWCOMER_SECONDS: Final = 10.0
"""That a step may always wait for those that take its state."""

SPARE_SECONDS: Final = 10.0
"""After which a stage without peers is given one of another stage."""

PAUSE_SECONDS: Final = 1.0
"""Before a peer that failed is given the state again; twice as long each time."""

MOST_PAUSE_SECONDS: Final = 300.0
