"""Reserves a memory margin, and chooses plans that a compiler accepts.

Predicted memory may be too low. So a plan fits if its predicted memory plus a margin
fits. The margin is a fraction of the prediction, so the search takes ``memory / (1 +
margin)`` for a device's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Final

from whalejax.api.plan_settings import PlanSettings
from whalejax.meshes import Cluster, DeviceKind
from whalejax.meshes.errors import tell
from whalejax.meshes.units import gigabytes
from whalejax.planner.memory.prediction_band import MemoryBand
from whalejax.planner.model.graph import Mark
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.step_options import UserOptions
from whalejax.verification.targets import NoCompiler, VerifyError


MOST_MARGIN: Final = 10.0
"""Largest margin with which a refused plan is replaced by another."""

MOST_COMPILED: Final = 6
"""Largest number of plans that are compiled before planning gives up."""

NEARLY_FULL: Final = 0.8
"""Fraction of a device's memory above which a note gives the prediction error."""

_CHOICES: Final = (
    *"mesh num_micro_batches zero shares".split(),
    *(f.name for f in dataclasses.fields(UserOptions) if f.default is None),
)
"""Settings that restrict the search."""

COMPILE_SECONDS: Final = 3600.0
"""Seconds that a compiler has for one plan."""


def without_margin(cluster: Cluster, margin: float) -> Cluster:
    """Returns the cluster with the memory that predictions may fill.

    Args:
        cluster: Cluster with the full memory of its devices.
        margin: Free memory, as a fraction of the predicted memory.
    """
    if not margin:
        return cluster
    return cluster.with_memory_of(
        {k.name: _usable_bytes(k, margin) for k in cluster.kinds}
    )


def _usable_bytes(kind: DeviceKind, margin: float) -> int:
    return max(1, int(kind.memory_bytes / (1 + margin)))


def with_margin_said(
    error: NothingFits, cluster: Cluster, margin: float
) -> NothingFits:
    """Returns an error in terms of devices' full memory, which also states the margin.

    Args:
        error: Error of a search in the memory without the margin.
        cluster: Cluster with the full memory of its devices.
        margin: Free memory, as a fraction of the predicted memory.
    """
    if not margin or error.what != "device memory":
        return error
    whole = {_usable_bytes(kind, margin): kind.memory_bytes for kind in cluster.kinds}
    room = whole.get(error.of_bytes, error.of_bytes)
    needed = int((error.of_bytes + error.lacks_bytes) * (1 + margin))
    return error.with_sentence(
        f"margin={margin:.2g} keeps {gigabytes(room - error.of_bytes)} of each device "
        "free; a smaller one leaves more to the plan",
        lacks_bytes=needed - room,
        of_bytes=room,
    )


def with_fixed_settings(
    error: NothingFits,
    settings: PlanSettings,
    marks: Iterable[Mark],
    unasked: Container[str] = (),
) -> NothingFits:
    """Returns an error that names the choices that the user fixed.

    Args:
        error: Error of a search that obeyed the settings and marks.
        settings: Settings from the user.
        marks: Marks of the model.
        unasked: Names of settings that the user did not give.
    """
    fixed = [
        f"{name}={given!r:.80}"
        for name in _CHOICES
        if (given := getattr(settings, name)) is not None and name not in unasked
    ]
    fixed += [f"the mark {mark}" for mark in dict.fromkeys(map(str, marks))]
    if not fixed:
        return error
    one = "it" if len(fixed) == 1 else "one of them"
    return error.with_sentence(
        f"{' and '.join(fixed)} {'is' if len(fixed) == 1 else 'are'} fixed; without "
        f"{one} there is more to choose from"
    )


def band_note(plan: Plan, band: MemoryBand, margin: float) -> tuple[str, ...]:
    """Returns the note on the error of predicted memory.

    There is a note if the plan nearly fills the memory, or if few programs of its kind
    were measured.

    Args:
        plan: Plan on its devices with their full memory.
        band: Range in which compiled memory lies, relative to the prediction.
        margin: Free memory, as a fraction of the predicted memory.
    """
    predicted, room = plan.memory.total_bytes, plan.room_bytes
    low, high = int(band.low * predicted), int(band.high * predicted)
    if band.unmeasured:
        patterns = " and ".join(band.unmeasured)
        return (
            f"memory: few or no programs with {patterns} were compiled to check "
            f"predictions. {gigabytes(predicted)} is predicted, and a need of "
            f"{gigabytes(low)} to {gigabytes(high)} is allowed for: margin={margin:g} "
            "was kept free. "
            "whalejax verify compiles the plan",
        )
    if band.low == band.high or predicted < NEARLY_FULL * room:
        return ()
    return (
        f"memory: {gigabytes(predicted)} of {gigabytes(room)} is predicted; compiled "
        f"programs of this kind took {band.low:.0%} to {band.high:.0%} of their "
        f"prediction, which is {gigabytes(low)} to {gigabytes(high)} here. margin="
        f"{margin:g} was kept free",
    )


def with_devices(plan: Plan, cluster: Cluster) -> Plan:
    """Returns a plan, with its inner plans, for devices with their full memory.

    Args:
        plan: Plan that was made with a margin.
        cluster: Cluster with the full memory of its devices.
    """
    return _with_memory(plan, {k.name: k.memory_bytes for k in cluster.kinds})


def _with_memory(plan: Plan, memory: Mapping[str, int]) -> Plan:
    stages: Any = plan.stages
    if stages is not None:
        parts = tuple(_with_memory(one, memory) for one in plan.stage_plans)
        stages = dataclasses.replace(stages, plans=parts)
    pipelines: Any = tuple(
        _with_memory(pipeline, memory) for pipeline in _pipelines(plan)
    )
    return dataclasses.replace(
        plan,
        cluster=plan.cluster.with_memory_of(memory),
        stages=stages,
        pipelines=pipelines,
    )


def _pipelines(plan: Plan) -> tuple[Plan, ...]:
    pipelines: Any = plan.pipelines  # Plans of the same class as this one.
    return tuple(pipelines)


def accepted(
    plan: Plan, verify: Callable[[Plan], Any], again: Callable[[float], Plan]
) -> Plan:
    """Returns the best plan that the compiler accepts.

    Without a compiler, the plan gets the note that it is not verified. If the compiler
    refuses a plan for its memory, the next one is made with a larger margin, at least
    the error of the refused plan's prediction.

    Args:
        plan: First choice.
        verify: Function that compiles a plan and returns a ``Verification``.
        again: Function from a margin to a plan.

    Raises:
        PlanError: A plan cannot be compiled, none fits with the larger margin, or the
            compiler refused all plans.
    """
    refused: list[str] = []
    margin = 0.0
    for _ in range(MOST_COMPILED):
        if plan.shares or plan.pipelines:
            whose = "pipeline" if plan.pipelines else "rank of data"
            raise PlanError(
                "verified=True compiles what devices of one kind run together, and "
                f"every {whose} of the plan for this cluster ({_words(plan)}) has "
                "programs of its own. Leave verified out, or give a cluster of one "
                "kind and the shares that it has by itself"
            )
        try:
            verification = verify(plan)
        except NoCompiler as error:
            text = f"not verified, as there is no compiler: {error}"
            return dataclasses.replace(plan, notes=(*plan.notes, text))
        except VerifyError as error:
            raise PlanError(
                f"verified=True: {_words(plan)} was planned, and its compiler gave no "
                f"answer: {error}. Without verified=True you get this plan; "
                "plan.verify(timeout_seconds=…) asks the compiler again"
            ) from error
        needed = verification.peak.compiled
        if verification.fits:
            text = f"verified: {verification.target.words} accepts it"
            if needed:
                text += f" with {gigabytes(needed)} per device"
            said = f", after {'; '.join(refused)}" if refused else ""
            return dataclasses.replace(plan, notes=(*plan.notes, text + said))
        if not needed:
            raise PlanError(
                f"verified=True: the compiler of {verification.target.words} refused "
                f"{_words(plan)}: "
                f"{verification.failure or verification.refused or 'no reason given'}"
            )
        predicted = plan.memory.total_bytes
        refused.append(
            f"{_words(plan)} was refused ({gigabytes(needed)} compiled, "
            f"{gigabytes(predicted)} predicted)"
        )
        tell("planning with a larger margin")
        lacked = 1.02 * needed / max(1, predicted) - 1
        margin = min(max(lacked, 1.5 * margin, 0.02), MOST_MARGIN)
        try:
            plan = again(margin)
        except NothingFits as error:
            raise PlanError(
                f"verified=True: {'; '.join(refused)}, and no plan leaves more room. "
                f"{error}"
            ) from error
    raise PlanError(
        f"verified=True: the compiler refused {len(refused)} plans: "
        f"{'; '.join(refused)}. Give the model more devices, or a smaller batch"
    )


def _words(plan: Plan) -> str:
    sizes = " × ".join(f"{axis} {size}" for axis, size in plan.axes) or "one device"
    count = plan.num_micro_batches
    return f"{sizes}, {count} micro-batch{'es' if count > 1 else ''}"
