"""Plans as files: what comes back, what the hash covers, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.planner.graphs import gpt
from tests.planner.plans import WIDE, example, plan_of
from whalejax.planner.plan.plan import PLAN_VERSION, Plan
from whalejax.planner.plan.plan_file import document_hash
from whalejax.planner.plan_entries import ModelWork
from whalejax.planner.plan_errors import PlanError


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with shards of every sort."""
    return example()


@pytest.fixture
def saved(plan: Plan, tmp_path: Path) -> Path:
    """The plan's file."""
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def refused(path: Path) -> str:
    """Text of the refusal."""
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    return str(caught.value)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file by hand."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


# There and back.


def test_a_plan_comes_back_equal(plan: Plan, saved: Path) -> None:
    loaded = Plan.load(saved)
    assert loaded == plan
    assert loaded.hash == plan.hash
    assert str(loaded) == str(plan)


def test_the_file_is_json_with_version_and_hash(plan: Plan, saved: Path) -> None:
    data = json.loads(saved.read_text())
    assert data["whalejax_plan"] == PLAN_VERSION
    assert data["hash"] == plan.hash
    assert list(saved.parent.iterdir()) == [saved]


def test_others_may_read_the_file(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "any").write_text("")
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE(
        (tmp_path / "any").stat().st_mode
    )


def test_a_plan_that_cannot_be_written_leaves_nothing(
    plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="cannot be written there"):
        plan.save(tmp_path / "no such folder" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="Give a file name in an existing folder"):
        plan.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


# The hash.


def test_the_hash_is_the_same_in_every_process(plan: Plan, saved: Path) -> None:
    code = (
        "import sys; from whalejax.planner.plan.plan import Plan\n"
        "print(Plan.load(sys.argv[1]).hash)\n"
        "from tests.planner.plans import example; print(example().hash)"
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code, str(saved)],
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.split() == [plan.hash, plan.hash]


DECISIONS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "model": lambda p: {"model_hash": "other"},
    "axes": lambda p: {"axes": (("data", 8),)},
    "micro-batches": lambda p: {"num_micro_batches": 2},
    "zero": lambda p: {"zero": 0},
    "precision": lambda p: {"precision": "bf16"},
    "default": lambda p: {"default": "replicate"},
    "storage": lambda p: {"storage": ()},
    "compute": lambda p: {
        "compute": (dataclasses.replace(p.compute[0], axes=p.compute[0].axes[:1]),)
    },
    "a role": lambda p: {
        "roles": (dataclasses.replace(p.roles[0], size=1), *p.roles[1:])
    },
    "a leaf": lambda p: {
        "leaves": (dataclasses.replace(p.leaves[0], param_spec=((), ())), *p.leaves[1:])
    },
    "a batch leaf": lambda p: {
        "batch": (dataclasses.replace(p.batch[0], spec=((), ())), *p.batch[1:])
    },
    "runnable": lambda p: {"runnable": False},
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_every_decision_changes_the_hash(plan: Plan, decision: str) -> None:
    changes = DECISIONS[decision](plan)
    changed = dataclasses.replace(plan, **changes)
    assert changed != plan
    assert changed.hash != plan.hash


def test_other_hardware_changes_the_hash(plan: Plan) -> None:
    from whalejax.meshes import cluster

    for text in ("a100-80:8", "h100:2x4"):
        assert dataclasses.replace(plan, cluster=cluster(text)).hash != plan.hash


def test_predictions_do_not_change_the_hash(plan: Plan) -> None:
    changed = dataclasses.replace(
        plan,
        time=dataclasses.replace(plan.time, compute_seconds=1.0),
        memory=dataclasses.replace(plan.memory, params_bytes=1),
        candidates=(),
        notes=("another",),
        collectives=(),
    )
    assert changed.hash == plan.hash


# What is refused.

AGAIN = (
    "whalejax plan MODEL --cluster CLUSTER -o FILE, or plan.save(FILE) where wh.plan "
    "made it"
)


def test_an_edited_file(saved: Path) -> None:
    edit(saved, lambda data: data.update(num_micro_batches=2))
    text = refused(saved)
    assert text.startswith(f"{saved} was changed by hand or damaged: its content has")
    assert text.endswith("Make it again with whalejax plan")


@pytest.mark.parametrize("version", [15, 16])
def test_a_plan_of_a_format_before_is_read(
    plan: Plan, saved: Path, version: int
) -> None:
    work = ModelWork(
        parameters=8,
        trained=8,
        active=8,
        chosen=8,
        samples=4,
        tokens=8,
        step_flops=64,
        dtype="float32",
    )
    plan = dataclasses.replace(plan, work=work)
    plan.save(saved)

    def older(data: dict[str, Any]) -> None:
        hashed = "of fields that there were"
        data.update(whalejax_plan=version, version=version, hash=hashed)
        del data["work"]["chosen"]
        data["cluster"]["compiler"]["keeps_halos"] = True
        data["document_hash"] = document_hash(data)

    edit(saved, older)
    assert dataclasses.replace(Plan.load(saved), question=plan.question) == plan
    edit(saved, lambda data: data.update(num_micro_batches=3))
    assert "was changed by hand" in refused(saved)


def test_a_step_of_more_flops_than_64_bits_hold(plan: Plan, tmp_path: Path) -> None:
    work = ModelWork(
        parameters=405_853_388_800,
        trained=405_853_388_800,
        active=405_853_388_800,
        chosen=405_853_388_800,
        samples=2048,
        tokens=16_777_216,
        step_flops=44_047_315_418_008_780_800,
        dtype="bf16",
    )
    path = tmp_path / "plan.json"
    dataclasses.replace(plan, work=work).save(path)
    assert Plan.load(path).work == work


def test_a_newer_version(saved: Path) -> None:
    edit(saved, lambda data: data.update(whalejax_plan=PLAN_VERSION + 1))
    assert refused(saved) == (
        f"{saved} has plan format {PLAN_VERSION + 1}; this WhaleJAX reads "
        f"{PLAN_VERSION}. Upgrade whalejax, or make the plan again: {AGAIN}"
    )


@pytest.mark.parametrize("version", [0, 14, "1", True, None])
def test_a_version_that_is_none(saved: Path, version: Any) -> None:
    edit(saved, lambda data: data.update(whalejax_plan=version))
    assert refused(saved) == (
        f"{saved} has plan format {version!r}; this WhaleJAX reads {PLAN_VERSION}. "
        f"Make the plan again: {AGAIN}"
    )


def test_a_file_that_is_cut_short(saved: Path) -> None:
    saved.write_text(saved.read_text()[:-100])
    text = refused(saved)
    assert text.startswith(f"{saved} is not a plan: it is not JSON (")
    assert text.endswith("Make it again with whalejax plan")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1, 2]", b"{}", b"null"])
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert refused(path).startswith(f"{path} is not a plan: it ")


def test_no_file_at_all(tmp_path: Path) -> None:
    text = refused(tmp_path / "plan.json")
    assert text == (
        f"{tmp_path / 'plan.json'}: there is no such plan file. Make one with whalejax "
        "plan, or plan.save"
    )
    assert "cannot be read as a plan" in refused(tmp_path)


def test_a_missing_and_an_unknown_entry(saved: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        del data["zero"]
        data["colour"] = "red"

    edit(saved, change)
    assert refused(saved) == (
        f"{saved} is a damaged plan: the top level has unknown entries ['colour'] and "
        "lacks ['zero']. Make it again with whalejax plan"
    )


def test_a_missing_entry_alone(saved: Path) -> None:
    edit(saved, lambda data: data.pop("leaves") and None)
    assert refused(saved) == (
        f"{saved} is a damaged plan: the top level lacks ['leaves']. Make it again "
        "with whalejax plan"
    )


@pytest.mark.parametrize("text", ["[]", "null", "3"])
def test_json_that_is_no_plan(saved: Path, text: str) -> None:
    saved.write_text(text)
    assert refused(saved) == (
        f"{saved} is not a plan: it has no entry 'whalejax_plan'. Give a file that "
        "whalejax plan or plan.save wrote"
    )


def test_a_hash_is_shown_as_the_file_has_it(saved: Path) -> None:
    stated = json.loads(saved.read_text())["document_hash"]
    edit(saved, lambda data: data.update(model_hash="0" * 64))
    assert f", the file says {stated[:16]}. Make it" in refused(saved)


def test_a_negative_axis_is_one_problem(saved: Path) -> None:
    edit(saved, lambda data: data.update(axes=[["data", -8]]))
    text = refused(saved)
    assert "axes: 'data' is -8; expected 2 or more" in text
    assert "at least 0" not in text


def test_an_entry_of_the_wrong_kind_is_named(saved: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["leaves"][3]["param_spec"] = "tensor"

    edit(saved, change)
    assert ".leaves[3].param_spec is 'tensor'; expected a list" in refused(saved)


def entries(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all entries, the first of each list."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from entries(value, (*path, key))
    elif isinstance(data, list) and data:
        yield (*path, 0)
        yield from entries(data[0], (*path, 0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", [None, "x", -1, 1.5, True, [], {}, [[]]])
def test_no_damage_goes_through(plan: Plan, tmp_path: Path, wrong: Any) -> None:
    """Whatever stands in whatever place: a PlanError, or the very same decisions."""
    text = json.dumps(plan.document())
    path = tmp_path / "plan.json"
    for place in entries(json.loads(text)):
        data = json.loads(text)
        node = data
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = wrong
        path.write_text(json.dumps(data))
        try:
            loaded = Plan.load(path)
        except PlanError as error:
            assert str(path) in str(error)
        else:
            assert loaded.hash == plan.hash


# What print(plan) and why say.


def test_the_table_names_the_plan_and_its_numbers(plan: Plan) -> None:
    text = str(plan)
    assert "Plan    8×H100 (1 node of 8, nvlink) · data 2 × fsdp 2 × tensor 2" in text
    assert "ZeRO-1 over data" in text
    assert "predicted" in text
    # The fullest moment is before the first gradient is made.
    assert plan.memory.gradients_bytes == 0
    for term in ("params", "optimizer", "activations", "working"):
        assert term in text
    (row,) = [line for line in text.splitlines() if line.startswith("blocks.*.up")]
    assert row.split() == ["blocks.*.up.kernel", "×2", "512×2048", *row.split()[3:]]


def test_rows_of_one_parameter_bear_its_own_path() -> None:
    text = str(plan_of(gpt(1, WIDE), mesh={"data": 8}))
    assert "blocks.0.up.kernel" in text
    assert "blocks.*" not in text


def test_why_a_parameter_is_sharded() -> None:
    # Without TensorFloat-32 it is worth while to share the products of a layer.
    plan = example(machine="v100-32:8")
    leaf = plan.leaf("blocks.1.up.kernel")
    text = plan.why("blocks.1.up.kernel")
    assert text.startswith("blocks.1.up.kernel  512×2048 float32, 4.19 MB, 1.05 MB")
    (axis,) = [axes for axes in leaf.compute_spec if axes]
    assert axis == ("tensor",)
    assert "computed in shards over tensor in default" in text
    assert "stored in shards over fsdp, gathered for use" in text
    assert "plans that were evaluated:" in text
    assert "chosen" in text


def test_why_a_parameter_is_whole() -> None:
    small = plan_of(gpt(1, WIDE), mesh={"data": 8}, zero=0)
    text = small.why("head.kernel")
    assert text.count("whole: no axis of this mesh shards parameters (only data)") == 2


def test_why_an_axis_does_not_divide() -> None:
    odd = dataclasses.replace(WIDE, embed=500, mlp=1001, vocab=3003)
    found = plan_of(gpt(1, odd), mesh={"data": 1, "fsdp": 8})
    assert "fsdp 8 does not divide 1001" in found.why("blocks.0.up.kernel")
    assert "whole because" in found.why("blocks.0.up.kernel")
    assert any(note.startswith("fsdp leaves ") for note in found.notes)


def test_an_unknown_path_names_the_nearest(plan: Plan) -> None:
    with pytest.raises(PlanError) as caught:
        plan.why("blocks.1.upp.kernel")
    assert str(caught.value) == (
        "no parameter has the path 'blocks.1.upp.kernel' (the model has 14). Nearest: "
        "blocks.1.up.kernel, blocks.0.up.kernel, blocks.1.output.kernel"
    )


def test_one_device_is_a_plan_too() -> None:
    found = plan_of(gpt(1, WIDE), "h100:1")
    assert found.axes == ()
    assert found.num_devices == 1
    assert "one device · 1 micro-batch" in str(found)
    assert "whole: no axis" in found.why("head.kernel")


def test_a_leaf_is_found_as_plans_print_it(plan: Plan) -> None:
    first = next(leaf for leaf in plan.leaves if leaf.path.startswith("blocks.0."))
    printed = first.path.replace("blocks.0.", "blocks.*.")
    assert printed in str(plan)
    assert plan.leaf(printed) == first
    assert plan.why(printed) == plan.why(first.path)
