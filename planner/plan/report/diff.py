"""Compares two plans: lists their changes in words, bytes and seconds.

A single setting has no cost of its own, as settings act together. The terms of time and
memory have their joint cost. The row of a parameter has the parameter's cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.meshes.checks import short_repr
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost_terms import precision_words
from whalejax.planner.plan.report.parameter_table import (
    collective_words,
    collectives_of,
    homes,
)
from whalejax.planner.plan.report.plan_page import SHOWN_ROWS, page_width
from whalejax.planner.plan.report.plan_traffic import Sort, TrafficRow, by_sort
from whalejax.planner.plan.report.text_layout import (
    Line,
    check_lines,
    paragraph,
    plain,
    table,
)
from whalejax.planner.plan.report.why import mesh_words, spec_text
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Collective, LeafPlan, starred
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import shards
from whalejax.planner.step_options import option_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting that differs, with its text before and after."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityChange:
    """One quantity before and after.

    Attributes:
        what: Term of time or memory, or kind of traffic.
        before, after: Seconds, or bytes on the fullest device.
    """

    what: str
    before: float
    after: float

    @property
    def more(self) -> float:
        """Increase from before to after."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficShift:
    """Collectives of one kind, axes and contents in one step, before and after.

    Attributes:
        what: Kind of traffic, such as ``"all-gather over fsdp of parameter"``.
        bytes_before, bytes_after: Payload bytes on one device of the busiest stage.
        seconds_before, seconds_after: Seconds on the links; part of them may be
            overlapped with computation.
    """

    what: str
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafShift:
    """Equal parameters whose layout or collectives differ between two plans.

    Attributes:
        label: Path of the parameters; ``×4`` follows if four layers are merged.
        before, after: Text of the layouts; empty if a plan lacks the parameters.
        collectives_before, collectives_after: Text of each parameter's collectives in
            one step.
        bytes_before, bytes_after: Bytes of these parameters on one device that stores
            some.
        seconds_before, seconds_after: Seconds of their collectives in one step, on the
            links; part of them may be overlapped with computation. The compiler
            combines collectives, so parameters have parts of their seconds, by bytes.
    """

    label: str
    before: str
    after: str
    collectives_before: str
    collectives_after: str
    bytes_before: int
    bytes_after: int
    seconds_before: float
    seconds_after: float

    @property
    def more_bytes(self) -> int:
        """Increase in bytes that a device stores."""
        return self.bytes_after - self.bytes_before

    @property
    def more_seconds(self) -> float:
        """Increase in seconds of collectives."""
        return self.seconds_after - self.seconds_before


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanDiff:
    """Differences between two plans; ``print`` shows them.

    Attributes:
        changes: Settings that differ.
        step, memory: Step time, and peak memory of the fullest device.
        time_terms, memory_terms: Terms that differ, largest change first.
        leaves: Parameters whose layout or collectives differ.
        traffic: Changes of a step's traffic, by kind of collective, axes and contents.
    """

    changes: tuple[SettingChange, ...]
    step: QuantityChange
    memory: QuantityChange
    time_terms: tuple[QuantityChange, ...]
    memory_terms: tuple[QuantityChange, ...]
    leaves: tuple[LeafShift, ...]
    traffic: tuple[TrafficShift, ...]

    def __bool__(self) -> bool:
        terms = self.time_terms or self.memory_terms
        return bool(self.changes or self.leaves or self.traffic or terms)

    def document(self) -> dict[str, Any]:
        """Returns the differences as plain JSON data, in seconds and bytes."""
        return {"whalejax_diff": 1, **dataclasses.asdict(self)}

    def lines(self, width: int | None, *, all_rows: bool = False) -> list[Line]:
        """Returns the lines of text that ``print`` shows.

        Args:
            width: Columns of a line; None for lines of any length.
            all_rows: Whether to show every parameter, not only the largest changes.
        """
        check_lines(width, all_rows)
        if not self:
            return [(("the plans are the same", ""),)]
        lines: list[Line] = []
        for change in self.changes:
            words = f"{change.before or 'none'} → {change.after or 'none'}"
            lines += paragraph(change.what, [words], width)
        lines += _total("step", self.step, self.time_terms, milliseconds, width)
        lines += _total("memory", self.memory, self.memory_terms, gigabytes, width)
        if self.leaves:
            rows = self._rows(all_rows)
            head = ["parameter", "before", "after", "per device", "on links a step"]
            lines += [(), *table(head, rows, width, right=[3, 4])]
        if self.traffic:
            rows = [*map(_traffic_cells, self.traffic)]
            head = ["traffic", "before", "after", "more a step", "on links"]
            lines += [(), *table(head, rows, width, right=[1, 2, 3, 4])]
        return lines

    def _rows(self, all_rows: bool) -> list[list[str]]:
        """Returns the cells of each parameter's row; small changes share the last."""
        by_change = sorted(
            self.leaves,
            key=lambda leaf: (-abs(leaf.more_seconds), -abs(leaf.more_bytes)),
        )
        kept = by_change if all_rows else by_change[:SHOWN_ROWS]
        rest = by_change[len(kept) :]
        rows = [_cells(leaf) for leaf in self.leaves if leaf in kept]
        if rest:
            size = signed(sum(r.more_bytes for r in rest), gigabytes)
            time = signed(sum(r.more_seconds for r in rest), milliseconds)
            rows.append([f"… {len(rest)} rows that change less", "", "", size, time])
        return rows

    def __str__(self) -> str:
        return plain(self.lines(page_width()))

    def __repr__(self) -> str:
        return str(self)


def signed(more: float, form: Callable[[float], str]) -> str:
    """Formats an increase or decrease with its sign.

    >>> signed(-1e6, gigabytes)
    '−1 MB'
    """
    return ("+" if more > 0 else "−" if more < 0 else "±") + form(abs(more))


def _total(
    name: str,
    whole: QuantityChange,
    terms: Sequence[QuantityChange],
    form: Callable[[float], str],
    width: int | None,
) -> list[Line]:
    if not terms:
        return []
    head = f"{form(whole.before)} → {form(whole.after)} ({signed(whole.more, form)})"
    words = [f"{term.what} {signed(term.more, form)}" for term in terms]
    return paragraph(name, [head, *words], width)


def _cells(leaf: LeafShift) -> list[str]:
    words = leaf.before, leaf.after
    if leaf.before == leaf.after:
        words = leaf.collectives_before, leaf.collectives_after
    return [
        leaf.label,
        *(word or "absent" for word in words),
        signed(leaf.more_bytes, gigabytes),
        signed(leaf.more_seconds, milliseconds),
    ]


def _traffic_cells(moved: TrafficShift) -> list[str]:
    return [
        moved.what,
        gigabytes(moved.bytes_before),
        gigabytes(moved.bytes_after),
        signed(moved.bytes_after - moved.bytes_before, gigabytes),
        signed(moved.seconds_after - moved.seconds_before, milliseconds),
    ]


def diff(before: PlanData, after: PlanData) -> PlanDiff:
    """Returns the changes from one plan to another.

    Args:
        before, after: Plans of one model or of two, on any clusters.

    Raises:
        PlanError: ``after`` is not a plan.
    """
    if not isinstance(after, PlanData):
        raise PlanError(
            f"other is {short_repr(after)}; expected a plan to compare with"
        )
    return PlanDiff(
        changes=_changes(before, after),
        step=QuantityChange(
            what="step", before=before.time.step_seconds, after=after.time.step_seconds
        ),
        memory=QuantityChange(
            what="memory",
            before=before.memory.total_bytes,
            after=after.memory.total_bytes,
        ),
        time_terms=_shifts(dict(before.time.by_size()), dict(after.time.by_size())),
        memory_terms=_shifts(_memory_by_term(before), _memory_by_term(after)),
        leaves=_leaves(before, after),
        traffic=_traffic(before, after),
    )


def _memory_by_term(plan: PlanData) -> dict[str, float]:
    return {**plan.memory.by_name(), "host": plan.memory.host_bytes}


def _shifts(
    before: dict[str, float], after: dict[str, float]
) -> tuple[QuantityChange, ...]:
    found = [
        QuantityChange(what=name, before=before.get(name, 0), after=after.get(name, 0))
        for name in dict.fromkeys([*before, *after])
    ]
    changed = (
        shift
        for shift in found
        if not math.isclose(shift.before, shift.after, rel_tol=1e-9)  # no rounding
    )
    return tuple(sorted(changed, key=lambda shift: -abs(shift.more)))


def _changes(before: PlanData, after: PlanData) -> tuple[SettingChange, ...]:
    pairs = zip(_settings(before), _settings(after), strict=True)
    # The model's hash covers its batch, which has a line of its own.
    same = _parameters(before) == _parameters(after)
    resized = same and [x.shape for x in before.batch] != [x.shape for x in after.batch]
    found = [
        SettingChange(what=what, before=old, after=new)
        for (what, old), (_, new) in pairs
        if old != new and not (what == "model" and resized)
    ]
    old, new = _regions(before), _regions(after)
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            words = (f"{name}: {t[name]}" if name in t else "" for t in (old, new))
            found.append(
                SettingChange(what="axes", before=next(words), after=next(words))
            )
    return tuple(found)


def _parameters(plan: PlanData) -> list[tuple[object, ...]]:
    return [(leaf.path, leaf.shape, leaf.dtype, leaf.trained) for leaf in plan.leaves]


def _settings(plan: PlanData) -> list[tuple[str, str]]:
    stages, options = plan.stages, plan.compiler_options
    batch = plan.batch[0].shape if plan.batch else ()
    sub = dict.fromkeys(mesh_words(own.axis_sizes) for own in plan.stage_plans)
    count = plan.num_micro_batches
    inside = f" ({' | '.join(sub)})" if sub else ""
    model, _, loss = plan.model_hash.partition("-")
    return [
        ("model", model[:12]),
        ("loss", loss),
        ("cluster", plan.cluster.describe()),
        ("batch", str(batch[0]) if batch else ""),
        ("mesh", mesh_words(plan.axis_sizes) + inside),
        ("parts", f"{count} micro-batch{'es' if count > 1 else ''}"),
        ("ZeRO", f"{plan.zero} over data" if plan.zero else ""),
        ("dtype", ", ".join(precision_words(plan.precisions, plan.precision)) or "f32"),
        *option_rows(plan, plan.axis_sizes),
        ("stages", f"{stages.words()} ({stages.executor})" if stages else ""),
        ("layers", "+".join(map(str, stages.layers)) if stages else ""),
        ("shares", " ".join(map(str, plan.shares))),
        ("XLA", ", ".join(f"{name}={value}" for name, value in options)),
        ("runs", "" if plan.runnable else "as an estimate only"),
    ]


def _regions(plan: PlanData) -> dict[str, str]:
    return {
        region.task_graph: "; ".join(
            f"{axis} shards {', '.join(roles)}" for axis, roles in region.axes if roles
        )
        or "whole"
        for region in plan.compute
    }


# Parameters and traffic.


@dataclass(frozen=True, slots=True)
class _Facts:
    words: str
    collectives: str
    nbytes: int
    seconds: float


def _facts(plan: PlanData) -> dict[str, _Facts]:
    own = homes(plan)
    known: dict[object, _Facts] = {}
    traffic: dict[int, dict[Sort, TrafficRow]] = {}
    found = {}
    for leaf in plan.leaves:
        home = own.get(leaf.path, plan)
        if id(home) not in traffic:
            traffic[id(home)] = by_sort(home)
        key = (dataclasses.replace(leaf, path="", roles=(), note=""), id(home))
        if key not in known:
            moved = traffic[id(home)]
            known[key] = _facts_of(home, leaf, moved, unlike=bool(plan.shares))
        found[leaf.path] = known[key]
    return found


def _facts_of(
    home: PlanData, leaf: LeafPlan, moved: Mapping[Sort, TrafficRow], *, unlike: bool
) -> _Facts:
    collectives = collectives_of(home, leaf, unlike=unlike)
    where = ", in host memory" if leaf.hosted else ""
    return _Facts(
        words=f"{spec_text(leaf.param_spec)}{where}",
        collectives=collective_words(collectives, home),
        nbytes=leaf.nbytes // shards(leaf.param_spec, home.axis_sizes),
        seconds=sum(_seconds(home, c, moved) for c in collectives),
    )


def _seconds(plan: PlanData, c: Collective, moved: Mapping[Sort, TrafficRow]) -> float:
    """Returns a parameter's part of the seconds of its plan's collectives."""
    every = moved.get((c.kind, c.axes, c.what))
    if every is not None and every.nbytes:
        return every.seconds * c.payload_bytes * plan.times(c) / every.nbytes
    parts = axis_parts(c.axes, plan.axis_sizes, plan.cluster)
    return collective_seconds(c.kind, c.payload_bytes, parts) * plan.times(c)


def _leaves(before: PlanData, after: PlanData) -> tuple[LeafShift, ...]:
    old, new = _facts(before), _facts(after)
    groups: dict[tuple[object, ...], list[str]] = {}
    for path in dict.fromkeys([*old, *new]):
        pair = old.get(path), new.get(path)
        if pair[0] != pair[1]:
            groups.setdefault((starred(path), *pair), []).append(path)
    none = _Facts("", "", 0, 0.0)
    found = []
    for paths in groups.values():
        count, path = len(paths), paths[0]
        a, b = old.get(path, none), new.get(path, none)
        found.append(
            LeafShift(
                label=path if count == 1 else f"{starred(path)} ×{count}",
                before=a.words,
                after=b.words,
                collectives_before=a.collectives,
                collectives_after=b.collectives,
                bytes_before=a.nbytes * count,
                bytes_after=b.nbytes * count,
                seconds_before=a.seconds * count,
                seconds_after=b.seconds * count,
            )
        )
    return tuple(found)


def _traffic(before: PlanData, after: PlanData) -> tuple[TrafficShift, ...]:
    old, new = by_sort(before), by_sort(after)
    found = []
    for sort in dict.fromkeys([*old, *new]):
        kind, axes, what = sort
        a, b = old.get(sort), new.get(sort)
        one = TrafficShift(
            what=f"{kind} over {'+'.join(axes)} of {what}",
            bytes_before=a.nbytes if a else 0,
            bytes_after=b.nbytes if b else 0,
            seconds_before=a.seconds if a else 0.0,
            seconds_after=b.seconds if b else 0.0,
        )
        before_and_after = one.bytes_before, one.seconds_before
        if before_and_after != (one.bytes_after, one.seconds_after):
            found.append(one)
    found.sort(key=lambda one: -abs(one.bytes_after - one.bytes_before))
    return tuple(found)
