"""Rules on micro-batches, shares and ranks that a plan may split its batch into.

The planner splits a batch by itself only if the loss is proven to be a mean of
independent samples. A split that the user requests is otherwise refused, unless
``per_micro_batch=True`` allows each part to have its own loss.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from whalejax.meshes.errors import Problems
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import divisors


Search = Callable[[int | None], Plan]
"""Function from a number of micro-batches, or None for any, to the best plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """Rules on the parts of a batch.

    Attributes:
        loss: Function that returns the captured loss, for a check of its samples.
        whole: Number of samples of the global batch.
        group_size: Number of consecutive samples that the user keeps together, or None.
        per_micro_batch: Whether each part may have its own loss.
        asked: Fixed numbers of micro-batches, and the options that fix them.
    """

    loss: Callable[[], Captured]
    whole: int
    group_size: int | None
    per_micro_batch: bool
    asked: Sequence[tuple[int, str]] = ()

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
                "of independent samples, whose parts compute what the whole does. "
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
            search: Searches for the best plan. Only the warnings of the chosen plan are
                shown.

        Raises:
            DependentSamplesError: The loss allows no parts, and they were requested or
                no other plan is possible.
        """
        told: dict[int, list[warnings.WarningMessage]] = {}
        kept: list[Plan] = []  # Keeps the plans alive: their ids are keys.

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
        """Returns the chosen plan, and the same plan as the search returned it."""
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
        """Returns the plan with micro-batches of whole groups, or None."""
        unit, seen = self.group_size or 1, 0
        while unit != seen:
            seen = unit
            part = largest_part(self.whole, unit)
            if part == self.whole:
                return None
            result = self.loss().independence(part, self.whole, self.group_size)
            if result.proven:
                return self._nearest(plan, unit_of(result), search)
            reason = _reason(result)
            wanted = max(1, reason.group) * max(1, reason.runs)
            unit = math.lcm(unit, wanted)
        return None

    def _nearest(
        self, plan: Plan, unit: int, search: Search
    ) -> tuple[Plan, Plan] | None:
        """Returns the faster ``_first`` of the next lower and higher count, or None."""
        counts = divisors(self.whole // unit)
        fewer = [n for n in counts if n <= plan.num_micro_batches][::-1]
        more = [n for n in counts if n > plan.num_micro_batches]
        pairs = [self._first(several, search) for several in (fewer, more)]
        nearest = [pair for pair in pairs if pair is not None]
        return min(nearest, key=lambda p: p[0].time.step_seconds, default=None)

    def _first(self, counts: Sequence[int], search: Search) -> tuple[Plan, Plan] | None:
        """Returns the first proven plan, with its group size and without; or None."""
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
