"""Why a plan was chosen, in words and numbers: ``plan.explain()``.

Apart from the tables of ``why`` because it compares plans, where those show one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.entries import Candidate, starred
from whalejax.planner.plan.report.why import layout_text, whole_dimensions
from whalejax.planner.plan_data import PlanData


def explain(plan: PlanData) -> str:
    """What decided for a plan, what would change the choice, and what stays whole."""
    spare = plan.room_bytes - plan.memory.total_bytes
    lines = [
        f"chosen: {layout_text(plan)}: {milliseconds(plan.time.step_seconds)} a step, "
        f"{gigabytes(plan.memory.total_bytes)} per device, {gigabytes(spare)} to spare"
    ]
    other = plan.runner_up
    if other is None:
        several = len(plan.candidates) > 1
        lines.append(
            "no other layout that was weighed fits"
            if several
            else "no other layout is listed beside it"
            if plan.apart or plan.pipelines
            else "no other layout was weighed: all that was asked for leaves this one"
        )
    else:
        lines += _against(plan, other)
    refused = [c for c in plan.candidates if not c.fits]
    for c in refused[:3]:
        lines.append(f"too large: {c.layout}: {c.verdict}")
    lines += _whole(plan)
    lines += [f"note: {text}" for text in plan.notes]
    return "\n".join(lines)


def _against(plan: PlanData, other: Candidate) -> list[str]:
    """The runner-up, the terms that differ, and what would turn the choice."""
    slower = other.step_seconds - plan.time.step_seconds
    lines = [f"runner-up: {other}"]
    differences = {
        f.name.removesuffix("_seconds"): getattr(other.time, f.name)
        - getattr(plan.time, f.name)
        for f in dataclasses.fields(plan.time)
    }
    largest = sorted(differences.items(), key=lambda item: -abs(item[1]))
    words = [
        f"{name} {'+' if seconds > 0 else '−'}{milliseconds(abs(seconds))}"
        for name, seconds in largest
        if abs(seconds) > 0.02 * max(abs(s) for s in differences.values())
    ]
    if words:
        lines.append(f"  its terms beside the chosen plan's: {', '.join(words)}")
    name, loss = max(differences.items(), key=lambda item: item[1])
    if slower > 0 and loss > 0:
        spent = getattr(other.time, f"{name}_seconds")
        lines.append(
            f"  it would be as fast if its {name} took {milliseconds(spent - slower)} "
            f"instead of {milliseconds(spent)}"
            if spent > slower
            else f"  its {name} alone cannot make up for {milliseconds(slower)}"
        )
    return lines


def _whole(plan: PlanData) -> list[str]:
    """Dimensions that no axis shards, and why, as far as the plan knows."""
    held: Counter[str] = Counter()
    for leaf in plan.leaves:
        if leaf.note:
            held[f"{starred(leaf.path)}: {leaf.note}"] += 1
    return [f"whole: {text}" for text in (*held, *whole_dimensions(plan))]
