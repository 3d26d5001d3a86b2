"""Earlier name of ``whalejax.swarm.stage_assignment``."""

from typing import Any

from whalejax.meshes.errors import warn
from whalejax.swarm import stage_assignment


def __getattr__(name: str) -> Any:
    value = getattr(stage_assignment, name)
    warn(f"{__name__} is called {stage_assignment.__name__} now", DeprecationWarning)
    return value
