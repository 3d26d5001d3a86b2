"""Do all processes run the same? Asked once, before one waits for another."""

from __future__ import annotations

import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from whalejax.planner.plan import PlanError


class Agreement:
    """Compares what the processes of a mesh are about to do."""

    def __init__(self, mesh: Mesh) -> None:
        processes = {device.process_index for device in mesh.devices.flat}
        # All processes take part in the comparison, so none may be left out.
        self._open = 1 < len(processes) == jax.process_count()

    def check(self, what: object) -> None:
        """Compare, the first time that it is called; all processes call it.

        Args:
            what: its text says all that must be alike.

        Raises:
            PlanError: processes have other plans, or another version of JAX.
        """
        if not self._open:
            return
        self._open = False
        mine = [zlib.crc32(text.encode()) for text in (repr(what), jax.__version__)]
        every = multihost_utils.process_allgather(np.array([mine], np.uint32))
        for column, name in enumerate(("plan", "version of JAX")):
            found = every.reshape(-1, len(mine))[:, column].tolist()
            others = [str(n) for n, value in enumerate(found) if value != found[0]]
            if others:
                raise PlanError(
                    f"processes {', '.join(others)} have another {name} than process "
                    f"0, and would wait for what it does not send. {_REMEDIES[name]}"
                )


_REMEDIES = {
    "plan": (
        "Plan once, save the plan (plan.save), and load it in all processes "
        "(wh.Plan.load)"
    ),
    "version of JAX": f"This process has {jax.__version__}; install one in all",
}
