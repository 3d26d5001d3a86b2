"""Compares plans and versions of all processes once, before the first step.

Processes exchange texts through JAX's coordination service. A collective would not do,
as processes with different programs would wait in it for each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
from jax.sharding import Mesh

from whalejax import _compat_processes
from whalejax.agreement.facts import versions
from whalejax.lowering.multihost.fingerprints import fingerprint
from whalejax.membership import launch_heartbeat
from whalejax.planner.fingerprint import part_digests, told_apart
from whalejax.planner.plan_errors import PlanError


if TYPE_CHECKING:
    from whalejax.lowering.spmd.spmd_executor import Program
    from whalejax.planner.plan.plan import Plan


WAIT_SECONDS: Final = 300.0
"""Seconds for all processes to arrive, as a late process may still be planning."""

LOOK_SECONDS: Final = 2.0
"""Seconds between two checks whether a late process is still alive."""

_rounds = itertools.count()
"""Number of the next comparison, equal in processes that compare in the same order."""


class Agreement:
    """Compares the plans, optimizers and versions of a mesh's processes.

    Attributes:
        wait_seconds: Seconds that the comparison waits for all processes.
    """

    def __init__(self, mesh: Mesh, *, one_kind: bool = False) -> None:
        """Finds the processes that take part.

        Args:
            mesh: Mesh of all processes. With one process nothing is compared.
            one_kind: Whether devices must be of one kind, as one program runs on them;
                default False.
        """
        devices: Any = mesh.devices
        processes = {device.process_index for device in devices.flat}
        # All processes take part in the comparison, so none may be left out.
        self._open = 1 < len(processes) == jax.process_count()
        self._kinds = sorted({d.device_kind for d in devices.flat if _is_local(d)})
        self._one_kind = one_kind
        self.wait_seconds = WAIT_SECONDS

    def check(
        self,
        program: Program,
        also: Callable[[], Mapping[str, object]] = dict,
        plan: Plan | None = None,
    ) -> None:
        """Compares at the first call, and does nothing at later ones.

        All processes call it.

        Args:
            program: Loss, optimizer and plan; plan and optimizer must be equal in all
                processes.
            also: Function that returns further values that must be equal, by name. It
                is called for the comparison alone, as hashing a plan can take longer
                than a step. Default: no values.
            plan: Plan of all processes; default: the plan of ``program``.

        Raises:
            PlanError: Processes have other plans, optimizers, versions or kinds of
                device, or did not arrive in time. The message has their numbers.
        """
        if not self._open:
            return
        self._open = False
        plan, more = plan or program.plan, also()
        mine = self._facts((plan.hash, more), fingerprint(program))
        mine[_PARTS] = json.dumps(part_digests(plan, more))
        problems = differences(_exchanged(mine, self.wait_seconds))
        if problems:
            raise PlanError(
                f"{'; '.join(problems)}. They would wait for data that the others do "
                "not send"
            )

    def _facts(self, what: object, optimizer: str) -> dict[str, str]:
        facts = {
            "plan": hashlib.sha256(repr(what).encode()).hexdigest()[:12],
            "optimizer": optimizer,
            **versions(),
        }
        if self._one_kind:
            facts["device kind"] = ", ".join(self._kinds)
        return facts


def differences(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the differences of processes from process 0, with remedies.

    Args:
        found: Values of each process by name, in the order of the processes.

    >>> for line in differences([{"jax": "0.10.0"}, {"jax": "0.10.2"}]): print(line)
    processes 1 have another jax than process 0 (0.10.2, not 0.10.0): install one in all
    """
    problems = []
    parts = [json.loads(facts.get(_PARTS, "{}")) for facts in found]
    for name, first in found[0].items():
        others = [n for n, facts in enumerate(found) if facts.get(name) != first]
        if others and name != _PARTS:
            theirs = sorted({found[n].get(name, "none") for n in others})
            apart = told_apart(parts, others) if name == "plan" else ""
            problems.append(
                f"processes {', '.join(map(str, others))} have another {name} than "
                f"process 0 ({', '.join(theirs)}, not {first})"
                f"{f', which differs in {apart}' if apart else ''}: "
                f"{_REMEDIES.get(name, 'install one in all')}"
            )
    return problems


_PARTS: Final = "parts of the plan"

_REMEDIES = {
    "optimizer": ("make it of the same transformations, with the same options, in all"),
    "plan": (
        "plan once, save the plan (plan.save), and load it in all processes "
        "(wh.Plan.load)"
    ),
    "device kind": "plan for the kinds that are there (wh.Cluster.detect())",
}


def _exchanged(mine: Mapping[str, str], wait_seconds: float) -> list[dict[str, str]]:
    folder = f"whalejax/agreement/{next(_rounds)}"
    _compat_processes.tell_processes(
        f"{folder}/{jax.process_index()}", json.dumps(mine)
    )
    end = time.monotonic() + wait_seconds
    result: dict[int, dict[str, str]] = {}
    left = [*range(jax.process_count())]
    while left:
        ended = (
            launch_heartbeat.start_heartbeat().ended_ranks()
        )  # Ended processes are read first; texts that they sent are still read below.
        wait = max(0.1, min(end - time.monotonic(), LOOK_SECONDS / len(left)))
        for number in left:
            said = _compat_processes.told_by(f"{folder}/{number}", wait)
            if said is not None:
                result[number] = json.loads(said)
        left = [number for number in left if number not in result]
        gone = [str(number) for number in left if number in ended]
        if gone or (left and time.monotonic() >= end):
            late = ", ".join(map(str, left))
            what = (
                f"processes {', '.join(gone)} ended before the first step"
                if gone
                else f"processes {late} did not come to the first step in "
                f"{wait_seconds:.0f} s after process {jax.process_index()}"
            )
            raise PlanError(
                f"{what}. Look for the first error of these processes; all must "
                "compile the same steps in the same order"
            )
    return [result[number] for number in sorted(result)]


def _is_local(device: Any) -> bool:
    return bool(device.process_index == jax.process_index())
