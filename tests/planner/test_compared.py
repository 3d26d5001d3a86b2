"""In which parts plans differ, told by a few short texts."""

from __future__ import annotations

import dataclasses
import json

from tests.planner.pages import spmd
from whalejax.planner.fingerprint import part_digests, told_apart
from whalejax.planner.plan.plan import Plan


def apart(one: Plan, other: Plan) -> str:
    both = [part_digests(one, {}), part_digests(other, {})]
    assert len(json.dumps(both[0])) < 2000  # It is sent to all.
    return told_apart(both, [1])


def test_each_part_of_a_plan_that_differs_is_named() -> None:
    plan = spmd()
    changed = {
        "precision": ("f16", f"precision (f16, not {plan.precision})"),
        "zero": (2, f"ZeRO level (2, not {plan.zero})"),
        "num_micro_batches": (7, f"micro-batches (7, not {plan.num_micro_batches})"),
        "model_hash": (
            "other",
            f"model, loss, batch or marks (other, not {plan.model_hash})",
        ),
        "leaves": (plan.leaves[1:], "shapes or layouts of parameters"),
        "compiler_options": ((("a", 1),), 'compiler options ([["a", 1]], not [])'),
    }
    for name, (value, words) in changed.items():
        other = dataclasses.replace(plan, **{name: value})
        assert apart(plan, other) == words and plan.hash != other.hash
    assert apart(plan, dataclasses.replace(plan, notes=("other",))) == ""


def test_what_follows_from_a_setting_is_not_named_beside_it() -> None:
    plan = spmd()
    other = dataclasses.replace(plan, axes=(("data", 2),), leaves=plan.leaves[1:])
    words = apart(plan, other)
    assert words.startswith('mesh axes ({"data": 2}, not ') and "layouts" not in words


def test_several_processes_are_told_together() -> None:
    told = [{"zero": "0"}, {"zero": "1"}, {"zero": "0"}, {"zero": "2"}]
    assert told_apart(told, [1, 3]) == "zero (1, 2, not 0)"
