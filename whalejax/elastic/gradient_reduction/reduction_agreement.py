"""Makes all processes of a run reduce gradients by the same backend.

Each process asks the supervisor before it joins. The supervisor writes the first
process's choice into the journal, and it holds for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, Literal, cast

from whalejax.distributed.launch_env import split_address
from whalejax.elastic.environment import RUN, SUPERVISOR_SECONDS
from whalejax.elastic.gradient_reduction.local_devices import (
    has_fabric,
    network_bytes_per_second,
    own_devices,
)
from whalejax.elastic.gradient_reduction.reduction_cost import (
    NETWORK_BYTES_PER_SECOND,
    ReductionProcesses,
    choose,
)
from whalejax.elastic.supervisor_client import (
    RunStopped,
    first_seconds,
    is_hopeless,
    key_of_run,
    unreachable,
)
from whalejax.journals.reduction_choice import (
    COLLECTIVES,
    MESSAGES,
    GradientReduction,
    Way,
)
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.wire.connection import dial
from whalejax.wire.messages import Messages, WireError
from whalejax.wire.run_messages import (
    ReductionDecision,
    ReductionOffer,
    RegistrationRefused,
)


_AGAIN_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 30.0

_ANSWERS: Final = Messages[ReductionDecision | RegistrationRefused](
    ReductionDecision, RegistrationRefused
)

_CALLER: Final = "the devices of this process were started before wh.train_elastic"
_PRICING: Final = (
    "the devices of this process were started by the job's first batch, which was made "
    "to compute the cost and holds JAX arrays"
)


class Arbiter:
    """Client of the supervisor, which stores the decision."""

    def __init__(self, address: str, key_file: str) -> None:
        """Stores the supervisor's address; connects to nothing yet.

        Args:
            address: Address of the supervisor.
            key_file: Path of the run's key file.
        """
        self._where, self._address = address, split_address(address, "supervisor")
        self._key = key_of_run(key_file, address)

    def ask(self) -> ReductionDecision:
        """Returns the run's decision, if there is one, and its number of processes.

        Raises:
            WhaleError: No supervisor answers.
        """
        return self._read_decision(first_seconds(), by="", why="")

    def decide(self, offer: GradientReduction) -> GradientReduction:
        """Returns the run's earlier decision; without one, ``offer`` becomes it.

        Raises:
            WhaleError: No supervisor answers.
        """
        told = self._read_decision(SUPERVISOR_SECONDS, by=offer.by, why=offer.why)
        return GradientReduction(by=cast(Way, told.by), why=told.why)

    def _read_decision(
        self, seconds: float, *, by: Way | Literal[""], why: str
    ) -> ReductionDecision:
        end = time.monotonic() + seconds
        while True:
            try:
                left = max(end - time.monotonic(), 0.1)
                channel = dial(self._address, self._key, seconds=min(left, 10.0))
                try:
                    run = os.environ.get(RUN, "")
                    channel.send(ReductionOffer(run=run, by=by, why=why))
                    answer = channel.receive(_ANSWERS, seconds=_ANSWER_SECONDS)
                finally:
                    channel.close()
                if isinstance(answer, RegistrationRefused):
                    raise RunStopped(
                        f"the supervisor refused this process: {answer.why}"
                    )
                return answer
            except WireError as error:
                if is_hopeless(error) or time.monotonic() > end:
                    raise unreachable(self._where, error) from None
            time.sleep(_AGAIN_SECONDS)


def agreed(
    arbiter: Arbiter,
    asked: GradientReduction | None,
    replica: Callable[[ReductionProcesses], Plan | None],
    *,
    mtbf: float,
    too_late: Callable[[], bool],
) -> GradientReduction:
    """Returns the reduction of gradients that all processes of this run use.

    Args:
        arbiter: Store of the decision.
        asked: Backend that the user chose; None chooses the cheaper one.
        replica: Function that returns the plan of one process alone; None if the model
            does not fit.
        mtbf: Mean seconds between failures.
        too_late: Function that returns whether this process has started its devices. A
            process that has cannot join the others by collectives. It is called before
            and after computing the cost, which may start the devices.

    Raises:
        WhaleError: No supervisor answers, or the run uses another backend than the user
            chose, or one that this process cannot use.
    """
    started = _CALLER if too_late() else _PRICING
    known = arbiter.ask()
    if known.by:
        result = GradientReduction(by=known.by, why=known.why)
    else:
        offer = asked
        if offer is None:
            processes = _processes(known)
            plan = replica(processes)
            offer = choose(plan, processes, mtbf)
            if offer.by == COLLECTIVES and plan is not None and too_late():
                offer = GradientReduction(
                    by=MESSAGES,
                    why=f"{started}, so that it cannot join others by collectives "
                    f"({offer.why})",
                )
        result = arbiter.decide(offer)
    if asked is not None and asked.by != result.by:
        raise WhaleError(
            f"this run reduces gradients by {result.by} ({result.why}), and this "
            f"process was started with {asked.why}. Give all processes the same mesh"
        )
    if result.by == COLLECTIVES and too_late():
        raise WhaleError(
            f"this run reduces gradients by collectives ({result.why}), and {started}, "
            "so that it cannot join the others. Call wh.train_elastic before anything "
            "asks for devices or arrays, make batches of NumPy's arrays, or give all "
            "mesh='replicas'"
        )
    return result


def _processes(known: ReductionDecision) -> ReductionProcesses:
    return ReductionProcesses(
        count=known.processes,
        hosts=known.hosts,
        each=own_devices(),
        network_bytes_per_second=network_bytes_per_second() or NETWORK_BYTES_PER_SECOND,
        has_fabric=has_fabric(),
    )
