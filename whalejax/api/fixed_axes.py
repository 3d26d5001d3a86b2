"""Mesh axes, shares and splits of a batch that a user fixes, checked before a search.

The planner itself splits a batch only if the loss is proven to be a mean of independent
samples. Without a proof, a split that the user requests is refused, unless
``per_micro_batch=True`` allows each part to have its own loss.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from whalejax.capture.separability.proof import Separability
from whalejax.capture.separability.values import Reason
from whalejax.capture.split_checks import (
    SplitBatch,
    largest_part,
    reason_text,
    refusal,
    split_of,
    unit_of,
)
from whalejax.capture.trace import Captured
from whalejax.meshes.arguments.near_names import AXIS_SYNONYMS, near_hint
from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.errors import Problems
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES, divisors


EVEN: Literal["even"] = "even"
"""Requests equal shares."""

Uneven = bool | Literal["even"] | tuple[int, ...]
"""Whether replicas have unequal shares: equal ones, or the requested shares."""


def check_axes(mesh: Mapping[str, int] | None) -> None:
    """Checks a mapping of mesh axes to sizes.

    Args:
        mesh: Sizes by mesh axis that the user fixes, or None.

    Raises:
        PlanError: Axes or sizes are invalid. The message lists all.
    """
    if mesh is None:
        return
    if not isinstance(mesh, Mapping):
        raise PlanError(
            f"mesh is {short_repr(mesh)}; expected sizes by axis, such as "
            f"{{'tensor': 2}}"
        )
    problems = Problems("wh.plan(mesh=…)")
    for axis, size in mesh.items():
        if axis not in MESH_AXES:
            problems.add(
                f"there is no mesh axis {short_repr(axis)} to fix; expected one of "
                f"{', '.join(MESH_AXES)}{near_hint(axis, MESH_AXES, AXIS_SYNONYMS)}"
            )
        elif not isinstance(size, int) or not is_whole(size, 1):
            problems.add(
                f"{axis} is {short_repr(size)}; expected a whole number, 1 or more"
            )
    problems.raise_if_any(PlanError)


def check_mesh(
    mesh: Mapping[str, int],
    num_devices: int,
    allow_idle: bool,
    axes: Sequence[str],
) -> None:
    """Refuses sizes of mesh axes that do not fit the number of devices.

    Args:
        mesh: Sizes by mesh axis that the user fixes.
        num_devices: Number of devices.
        allow_idle: Whether some devices may be idle.
        axes: Axes whose sizes the search chooses if they are not fixed.

    Raises:
        PlanError: The sizes do not fit. The message lists possible products of sizes.
    """
    used = math.prod(mesh.values())
    shape = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    ways = f"{num_devices} = {_products(num_devices, len(mesh))}"
    if used > num_devices:
        raise PlanError(
            f"{shape} needs {used} devices; there are {num_devices}. {ways}"
        )
    all_fixed = all(axis in mesh for axis in axes)
    idle = num_devices % used or (all_fixed and used != num_devices)
    if idle and not allow_idle:
        raise PlanError(
            f"{shape} uses {used} of {num_devices} devices. {ways}. To leave some idle "
            "on purpose: allow_idle=True (--allow-idle)"
        )


def idle_note(plan: Plan) -> list[str]:
    """Returns the note on devices that a plan leaves idle.

    Args:
        plan: Plan on the first devices of its cluster.
    """
    used, total = plan.num_devices, plan.cluster.num_devices
    if used == total:
        return []
    which = f"device {used}" if used == total - 1 else f"devices {used} to {total - 1}"
    number = total - used
    return [
        f"{number} of {total} devices {'is' if number == 1 else 'are'} left idle: "
        f"{which}, in node order (they count from 0)"
    ]


def zero_note(plan: Plan, zero: int | None) -> list[str]:
    """Returns the note on a ZeRO level that has no axis to act on.

    Args:
        plan: Plan that was found.
        zero: Requested ZeRO level, or None.
    """
    parts = [plan, *(plan.pipelines or ()), *plan.stage_plans]
    if not zero or any(one.axis_sizes.get("data", 1) > 1 for one in parts):
        return []
    fsdp = plan.axis_sizes.get("fsdp", 1)
    instead = (
        f". fsdp {fsdp} shards parameters, gradients and the optimizer's state (ZeRO-3)"
        if fsdp > 1
        else ""
    )
    return [
        f"zero={zero} has no effect: it acts along the mesh axis data, and this plan "
        f"has none{instead}"
    ]


def split_notes(plan: Plan) -> list[str]:
    """Returns the note on equal shards on mixed devices, if ``tensor`` is above 1.

    Args:
        plan: Plan for devices of one or several kinds.
    """
    every = [
        plan,
        *(
            own
            for pipeline in plan.pipelines or (plan,)
            for own in pipeline.stage_plans
        ),
    ]
    if plan.cluster.is_uniform or all(
        one.axis_sizes.get("tensor", 1) == 1 for one in every
    ):
        return []
    return [
        "split: shards are equal along tensor. Unequal ones are not supported: "
        "programs of unlike devices are compiled separately and cannot share the "
        "collectives in a layer, and in one program every shard is stored as large as "
        "the largest"
    ]


def uneven_shares(
    shares: Any,
    *,
    mixed: bool,
    runnable: bool,
    allow_idle: bool,
    whole: bool,
) -> Uneven:
    """Returns whether replicas have unequal shares, ``EVEN``, or the requested shares.

    Args:
        shares: Shares from the user; ``plan_settings`` has checked their type.
        mixed: Whether devices are of several kinds.
        runnable: Whether plans that cannot run are excluded.
        allow_idle: Whether some devices may be idle.
        whole: Whether the batch is a single micro-batch, which several replicas cannot
            share.

    Raises:
        PlanError: Shares contradict another option.
    """
    # One program runs on one kind of device.
    if shares is None:
        return mixed
    if isinstance(shares, str):
        return EVEN if mixed and not whole else False
    if not runnable or allow_idle:
        other = "allow_idle=True" if allow_idle else "runnable=False"
        raise PlanError(f"shares cannot be given with {other}. Drop one of them")
    asked = tuple(k.item() if isinstance(k, np.integer) else k for k in shares)
    return asked


def _products(number: int, parts: int) -> str:
    from whalejax.meshes.jax_mesh import factorizations

    ways = factorizations(number, max(2, parts))[:4]
    return ", ".join("×".join(map(str, way)) for way in ways)


Search = Callable[[int | None], Plan]
"""Function from a number of micro-batches, or None for any number, to the best plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """Rules about the parts of a batch.

    Attributes:
        loss: Function that returns the traced loss, to check its samples.
        whole: Number of samples of the global batch.
        group_size: Number of consecutive samples that the user keeps together, or None.
        per_micro_batch: Whether each part may have its own loss.
        asked: Fixed numbers of micro-batches, and the options that fix them.
        may_couple: Whether the loss probably couples samples, as experts of limited
            capacity do. If no part can be proven independent, the whole batch is
            searched alone, unless no plan of it fits.
    """

    loss: Callable[[], Captured]
    whole: int
    group_size: int | None
    per_micro_batch: bool
    asked: Sequence[tuple[int, str]] = ()
    may_couple: bool = False

    def check(self) -> None:
        """Checks the options before the search.

        Raises:
            PlanError: An option has no effect or cannot be satisfied.
            DependentSamplesError: The loss does not allow the requested parts.
        """
        problems = Problems("the batch", PlanError)
        for text in self._problems():
            problems.add(text)
        problems.raise_if_any()
        for count, text in self.asked:
            if count > 1 and self.whole % count == 0 and not self.per_micro_batch:
                part = self.whole // count
                self._proven(SplitBatch(whole=self.whole, part=part, asked=text))

    def _problems(self) -> Iterator[str]:
        group, weighted = self.group_size, self.loss().graph.weighted
        if group and self.whole % group:
            yield (
                f"group_size is {group}, and the batch has {self.whole} samples: "
                "expected a divisor of it"
            )
        for count, text in self.asked if group else ():
            part = self.whole // count
            if self.whole % count == 0 and group and part % group:
                yield (
                    f"group_size is {group}, and {text} makes micro-batches of {part} "
                    f"samples: expected a multiple of {group}. Give another number of "
                    "micro-batches"
                )
        if group and self.per_micro_batch and weighted:
            yield (
                "group_size and per_micro_batch=True are both given with a "
                "wh.WeightedLoss, whose parts are put together by their weights. Drop "
                "one of the two"
            )
        if self.per_micro_batch and self.whole > 1 and self._needs_no_consent():
            yield (
                "per_micro_batch=True has no effect: the loss is proven to be a mean "
                "of independent samples, so parts compute the same as the whole. "
                "Leave it out"
            )

    def _needs_no_consent(self) -> bool:
        counts = [n for n, _ in self.asked if n > 1 and self.whole % n == 0]
        part = self.whole // counts[0] if counts else largest_part(self.whole)
        return self.loss().independence(part, self.whole, self.group_size).proven

    def _proven(self, split: SplitBatch) -> int:
        """Returns the number of samples that stay together in a proven split."""
        proven = self.loss().independence(split.part, self.whole, self.group_size)
        if not proven.proven:
            raise refusal(proven, split, weighted=self.loss().graph.weighted)
        return proven.group

    def allowed(self, search: Search) -> Plan:
        """Returns the best plan whose parts compute the same as the full batch.

        Args:
            search: Function that searches for the best plan. Warnings are shown for the
                chosen plan alone.

        Raises:
            DependentSamplesError: The loss allows no parts, and parts were requested or
                no other plan is possible.
        """
        told: dict[int, list[warnings.WarningMessage]] = {}
        kept: list[Plan] = []  # Living plans keep their ids, which are keys.

        def quiet(count: int | None) -> Plan:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plan = search(count)
            told[id(plan)] = caught
            kept.append(plan)
            return plan

        result, searched = self._allowed(quiet)
        for one in told[id(searched)]:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return result

    def _allowed(self, search: Search) -> tuple[Plan, Plan]:
        """Returns the chosen plan, and that plan as the search returned it."""
        if self.may_couple and not (self.asked or self.per_micro_batch):
            whole = self._undivided(search)
            if whole is not None:
                return whole
        plan = search(None)
        split = split_of(plan, self.whole)
        if split.part == self.whole:
            return plan, plan
        if self.per_micro_batch:
            result = dataclasses.replace(plan, per_micro_batch=True)
            return with_group(result, self.group_size or 1), plan
        verdict = self.loss().independence(split.part, self.whole, self.group_size)
        if verdict.proven:
            return with_group(plan, verdict.group), plan
        fixed = [text for count, text in self.asked if count == plan.num_micro_batches]
        if plan.combine != "mean":
            fixed = [f"combine={plan.combine!r}"]
        split = dataclasses.replace(split, asked=fixed[0] if fixed else "")
        tried = ""
        if not fixed:
            grouped = self._in_groups(plan, search)
            if grouped is not None:
                return grouped
            try:
                plan = search(1)
                return _with_note(plan, reason_text(_reason(verdict))), plan
            except PlanError as error:
                tried = str(error)
        weighted = self.loss().graph.weighted
        raise refusal(verdict, split, weighted=weighted, tried=tried)

    def _in_groups(self, plan: Plan, search: Search) -> tuple[Plan, Plan] | None:
        unit = self._proven_unit()
        return None if unit is None else self._nearest(plan, unit, search)

    def _undivided(self, search: Search) -> tuple[Plan, Plan] | None:
        """Returns the plan of the whole batch if no part is proven, or None."""
        part = largest_part(self.whole, self.group_size or 1)
        if part == self.whole or self._proven_unit() is not None:
            return None
        try:
            plan = search(1)
        except PlanError:
            return None
        if split_of(plan, self.whole).part != self.whole:
            return None
        verdict = self.loss().independence(part, self.whole, self.group_size)
        return _with_note(plan, reason_text(_reason(verdict))), plan

    def _proven_unit(self) -> int | None:
        """Returns the number of which the size of proven parts is a multiple.

        Returns None if no part of the batch is proven.
        """
        unit, seen = self.group_size or 1, 0
        while unit != seen:
            seen = unit
            part = largest_part(self.whole, unit)
            if part == self.whole:
                return None
            result = self.loss().independence(part, self.whole, self.group_size)
            if result.proven:
                return unit_of(result)
            reason = _reason(result)
            wanted = max(1, reason.group) * max(1, reason.runs)
            unit = math.lcm(unit, wanted)
        return None

    def _nearest(
        self, plan: Plan, unit: int, search: Search
    ) -> tuple[Plan, Plan] | None:
        """Returns the faster plan of the nearest smaller and larger count, or None."""
        counts = divisors(self.whole // unit)
        fewer = [n for n in counts if n <= plan.num_micro_batches][::-1]
        more = [n for n in counts if n > plan.num_micro_batches]
        pairs = [self._first(several, search) for several in (fewer, more)]
        nearest = [pair for pair in pairs if pair is not None]
        return min(nearest, key=lambda p: p[0].time.step_seconds, default=None)

    def _first(self, counts: Sequence[int], search: Search) -> tuple[Plan, Plan] | None:
        """Returns the first proven plan, with its group size and without, or None."""
        for count in counts:
            try:
                plan = search(count)
            except PlanError:
                continue
            part = split_of(plan, self.whole).part
            result = self.loss().independence(part, self.whole, self.group_size)
            if result.proven:
                return with_group(plan, result.group), plan
        return None


def _reason(verdict: Separability) -> Reason:
    assert verdict.reason is not None
    return verdict.reason


def with_group(plan: Plan, group: int) -> Plan:
    """Returns the plan, and its inner plans, with micro-batches of whole groups.

    Args:
        plan: Any plan.
        group: Number of consecutive samples that stay together.
    """
    if group == plan.group_size:
        return plan
    stages = plan.stages
    if stages is not None and stages.plans:
        inner: Any = tuple(with_group(p, group) for p in plan.stage_plans)
        stages = dataclasses.replace(stages, plans=inner)
    pipelines = tuple(with_group(p, group) for p in plan.pipelines)
    return dataclasses.replace(
        plan, group_size=group, stages=stages, pipelines=pipelines
    )


def _with_note(plan: Plan, reason: str) -> Plan:
    note = (
        f"one micro-batch is taken: {reason}; per_micro_batch=True allows several, "
        "each with a loss of its own"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))
