"""Plans explained, and in the words of other systems."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.planner.graphs import Sizes, gpt
from tests.planner.test_search import plan_of
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


SIZES = Sizes(batch=64, seq=64, embed=512, key=64, value=64, mlp=2048)


def planned(machine: str = "h100:2x4", **fixed: Any) -> Plan:
    """A plan for a small model."""
    return plan_of(gpt(2, SIZES), machine, **fixed)


def test_the_runner_up_is_the_best_other_plan_that_fits() -> None:
    plan = planned()
    other = plan.runner_up
    assert other is not None
    assert other.verdict != "chosen"
    several = plan.alternatives(4)
    assert several[0] == other
    assert len(several) == 4
    assert all(c.fits for c in several)
    assert plan.alternatives(1000)[:4] == several


def test_a_candidate_is_one_line_and_their_number_no_less_than_none() -> None:
    plan = planned()
    assert str(plan.alternatives(1)[0]) in plan.explain()
    assert plan.alternatives(0) == ()
    some = plan.alternatives(3)
    assert repr(some).splitlines() == [str(one) for one in some]
    assert str(plan.alternatives(0)) == "no plans"
    assert str(some[:1]) == str(some[0])
    with pytest.raises(PlanError, match="n is -1; expected 0 or more"):
        plan.alternatives(-1)


def test_candidates_carry_their_terms() -> None:
    plan = planned()
    chosen = next(c for c in plan.candidates if c.verdict == "chosen")
    assert chosen.time == plan.time
    assert chosen.memory == plan.memory
    assert chosen.step_seconds == plan.time.step_seconds


def test_explain_says_what_decided_and_by_how_much() -> None:
    plan = planned(mesh={"data": 2, "tensor": 4})
    text = plan.explain()
    other = plan.runner_up
    assert other is not None
    assert text.startswith("chosen: data 2 × tensor 4")
    assert f"runner-up: {other.layout}" in text
    assert "its terms beside the chosen plan's: " in text


def test_explain_names_a_small_difference_by_itself() -> None:
    plan = planned(mesh={"data": 2, "tensor": 4})
    time = dataclasses.replace(plan.time, update_seconds=1.0)
    slower = dataclasses.replace(time, update_seconds=1.0 + 2e-6)
    chosen, other = (
        dataclasses.replace(plan.candidates[0], time=t, verdict=v)
        for t, v in ((time, "chosen"), (slower, "0.00 ms slower"))
    )
    plan = dataclasses.replace(plan, time=time, candidates=(chosen, other))
    text = "it would be as fast if its update, 1 s, took 0.002 ms less"
    assert text in plan.explain()


def test_explain_names_what_does_not_fit() -> None:
    huge = dataclasses.replace(SIZES, embed=8192, mlp=32768, value=1024, key=1024)
    plan = plan_of(gpt(20, huge), "h100:8")
    assert "too large: data 8" in plan.explain()
    assert "lacks" in plan.explain()


def test_a_plan_of_one_layout_has_no_runner_up() -> None:
    plan = planned("h100:1")
    assert plan.runner_up is None
    assert "no other layout was evaluated" in plan.explain()


def test_rules_say_what_the_tables_say() -> None:
    fixed: dict[str, Any] = {"mesh": {"data": 2, "tensor": 4}, "zero": 0}
    rules = dict(planned(**fixed, sequence_parallel=False).flax_rules())
    assert rules["batch"] == ("data",)
    sharded = {name for name, axes in rules.items() if axes == ("tensor",)}
    assert "mlp" in sharded
    assert rules["head_dim"] is None


def test_what_rules_cannot_say_is_refused() -> None:
    plan = planned(mesh={"fsdp": 8})
    rules = dict(plan.flax_rules())
    assert rules["batch"] == ("fsdp",)
    twice = dataclasses.replace(
        plan.compute[0], task_graph="other", axes=(("tensor", ("batch",)),)
    )
    torn = dataclasses.replace(plan, compute=(*plan.compute, twice))
    with pytest.raises(PlanError, match="a table of rules cannot say this plan") as e:
        torn.flax_rules()
    assert "batch is sharded over fsdp in default; tensor in other" in str(e.value)


@pytest.mark.parametrize(
    ("machine", "mesh", "flags"),
    [
        (
            "h100:2x4",
            {"data": 2, "tensor": 4},
            {"dcn_data_parallelism": 2, "ici_tensor_parallelism": 4},
        ),
        ("h100:8", {"fsdp": 8}, {"ici_fsdp_parallelism": 8}),
        (
            "h100:2x4",
            {"data": 8},
            {"ici_data_parallelism": 4, "dcn_data_parallelism": 2},
        ),
        ("v5e:2x4", {"fsdp": 8}, {"ici_fsdp_parallelism": 8}),
        (
            "v5e:2x2x4",
            {"fsdp": 16},
            {"ici_fsdp_parallelism": 8, "dcn_fsdp_parallelism": 2},
        ),
    ],
)
def test_flags_tell_slices_from_links(
    machine: str, mesh: dict[str, int], flags: dict[str, int]
) -> None:
    assert planned(machine, mesh=mesh).maxtext_flags() == flags


def test_what_no_flag_says_is_refused() -> None:
    plan = planned("h100:8", mesh={"data": 2, "tensor": 4})
    assert plan.maxtext_flags() == {
        "ici_data_parallelism": 2,
        "ici_tensor_parallelism": 4,
    }
    (leaf, *others) = plan.batch
    along = dataclasses.replace(leaf, spec=(("data", "tensor"), *leaf.spec[1:]))
    with pytest.raises(PlanError, match="tensor shards the batch in a part"):
        dataclasses.replace(plan, batch=(along, *others)).maxtext_flags()
    with pytest.raises(PlanError, match="unequal shares of the batch"):
        dataclasses.replace(plan, shares=(5, 3)).maxtext_flags()
