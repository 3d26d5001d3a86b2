"""What a process of an elastic run is told: one address, beside the key file."""

from __future__ import annotations

from typing import Final


SUPERVISOR: Final = "WHALEJAX_SUPERVISOR"
"""Where a member finds the supervisor, which tells it everything else."""
