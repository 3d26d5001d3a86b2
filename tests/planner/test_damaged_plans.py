"""Plan files that were changed, whose numbers cannot be, or that hold what is none.

A document's hash covers all of it; and where somebody hashed it anew, the numbers are
checked as such. Files that are no documents at all end in the same error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.fuzzing import fuzzed
from tests.mutants import deep
from tests.planner.graphs import gpt
from tests.planner.plans import WIDE, example, plan_of
from whalejax import jobs, models
from whalejax.meshes import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.json_codec import decode
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.plan_file import document_hash
from whalejax.planner.plan.report.plan_page import bar_text
from whalejax.planner.plan_errors import PlanError


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A plan's document, as JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(example().document()))
    return found


def changed(
    document: dict[str, Any], path: str, value: Any, *, hashed: bool = True
) -> dict[str, Any]:
    """A copy with one entry changed, and hashed anew."""
    data = copy.deepcopy(document)
    *way, last = path.split(".")
    inner: Any = data
    for key in way:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    inner[int(last) if isinstance(inner, list) else last] = value
    if hashed:
        ours = ("whalejax_plan", "hash", "document_hash")
        try:
            rest = {k: v for k, v in data.items() if k not in ours}
            data["hash"] = decode(Plan, rest).hash
        except (ValueError, TypeError):
            pass  # it is no plan at all
        data["document_hash"] = document_hash(data)
    return data


def refused(data: Any) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.from_document(data, "it")
    return str(caught.value)


def test_a_document_that_is_hashed_anew_is_read(document: dict[str, Any]) -> None:
    assert Plan.from_document(changed(document, "notes", ["other"])).notes == ("other",)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("time.compute_seconds", 5.0),
        ("memory.working_bytes", 1),
        ("notes", ["other"]),
        ("source", ["mlp"]),
        ("candidates.0.verdict", "best"),
        ("product_flops", 1),
        ("cluster.kinds.h100.memory_bytes", 79 * 2**30),
        ("cluster.levels.0.bandwidth_bytes_per_second", 1e12),
        ("document_hash", "0"),
        ("hash", "0"),
    ],
)
def test_whatever_is_changed_is_seen(
    document: dict[str, Any], path: str, value: Any
) -> None:
    data = changed(document, path, value, hashed=False)
    assert "it was changed by hand or damaged: its content has hash" in refused(data)


IMPOSSIBLE: list[tuple[str, Any, str]] = [
    ("time.compute_seconds", -5.0, "time.compute_seconds is -5.0; expected seconds"),
    ("time.launch_seconds", 1e308 * 10, ".time.launch_seconds is inf; expected a fin"),
    ("time.update_seconds", float("nan"), ".time.update_seconds is nan; expected"),
    ("candidates.0.time.compute_seconds", -1.0, "candidates[0].time.compute_seconds"),
    ("memory.params_bytes", 10**15, "memory adds up to 1000000"),
    ("memory.params_bytes", 0, "memory.params_bytes is 0; the shards of all leaves"),
    ("memory.working_bytes", -1, "memory.working_bytes is -1; expected at least 0"),
    ("memory.host_bytes", 2**60, "memory.host_bytes is 1152921504606846976; expected"),
    ("optimizer_bytes", -1, "optimizer_bytes is -1; expected 0 or more"),
    ("product_flops", -1, "product_flops is -1; expected 0 or more"),
    ("leaves.0.shape.0", 7, "leaves[0].shape[0] is 7; tokens.embedding[0] is 4096"),
    ("batch.0.shape.0", 63, "batch[0].spec: data × fsdp is 4, which does not divid"),
    ("leaves.0.shape", [4096], "leaves[0].compute_spec has 2 entries; the shape has 1"),
    ("leaves.0.dtype", "../x", "leaves[0].dtype is '../x'; expected as numpy says"),
    ("leaves.0.gathers", -2, "leaves[0].gathers is -2; expected at least 0"),
    ("leaves.0.param_spec.0", ["moon"], "leaves[0].param_spec names ['moon'"),
    ("batch.0.spec.0", ["data", "data"], "batch[0].spec names ['data', 'data'"),
    ("axes.0.1", 4, "axes take 16 devices; the cluster has 8"),
    ("axes.0.1", -2, "axes: 'data' is -2; expected 2 or more"),
    ("axes.0.0", "moon", "axes has 'moon'; expected each of stage, data, fsdp"),
    ("device_order", [0, 0], "device_order does not name devices 0 to 7 once"),
    ("shares", [2, 2], "shares add up to 4; num_micro_batches is 1"),
    ("num_micro_batches", 0, "num_micro_batches is 0; expected a whole number, 1"),
    ("zero", 7, "zero is 7; expected a whole number, 0 to 2"),
    ("precision", "f3", "precision is 'f3'; expected f32, bf16 or f16"),
    ("remat", [["*", "all"]], "remat.* is 'all'; expected one of none, dots"),
    ("remat", [["*", "named:"]], "remat.* is 'named:'; expected one of none, dots"),
    ("remat", [["*", "full:a"]], "remat.* is 'full:a'; expected one of none, dots"),
    ("offload", ["everything"], "offload is 'everything'; expected one of optimizer"),
    ("collectives.0.count", -1, "collectives[0].count is -1; expected at least 0"),
    ("collectives.0.phase", "never", "collectives is 'never'; expected one of forw"),
    ("version", 3, "version is 3; expected"),
    ("roles.0.size", 10**40, ".roles[0].size is 1000000"),
    (
        "compiler_options",
        [["xla_dump_to", "/tmp/x"]],
        "compiler_options: 'xla_dump_to' is not among the",
    ),
    (
        "compiler_options",
        [["xla_gpu_autotune_level", "/tmp/x"]],
        "xla_gpu_autotune_level is '/tmp/x'; expected a number, true or false",
    ),
    ("leaves.0.dtype", "f32", "leaves[0].dtype is 'f32'; expected as numpy says"),
    ("leaves.0.trained", False, "leaves[1].trained is true after a leaf that is not"),
    ("leaves.0.path", "blocks.0.query.kernel", "which another leaf has too"),
    (
        "batch.0.dtype",
        "f32",
        "batch[0].dtype is 'f32'; expected the name of a JAX dtype",
    ),
    ("batch_tree", "x", "batch_tree is 'x'; expected the containers of a batch"),
    ("batch_tree", "5", "batch_tree is '5'; expected the containers of a batch"),
    ("batch_tree", '{"dict": [["x"]]}', "expected the containers of a batch"),
    ("batch_tree", '{"list": ["leaf"]}', "batch_tree has the leaves ['[0]"),
    ("collectives.0.what", "x", "collectives.what is 'x'; expected one of gradient"),
]


@pytest.mark.parametrize(("path", "value", "text"), IMPOSSIBLE)
def test_numbers_that_no_plan_has(
    document: dict[str, Any], path: str, value: Any, text: str
) -> None:
    found = refused(changed(document, path, value))
    assert found.startswith("it is a damaged plan: ")
    assert text in found


def test_a_batch_that_stands_twice(document: dict[str, Any]) -> None:
    data = changed(document, "batch", document["batch"] * 2)
    assert "which another leaf has too; expected each once" in refused(data)


def test_every_kind_of_device_is_checked(document: dict[str, Any]) -> None:
    plan = plan_of(gpt(2, WIDE), cluster("h100:4+a100:4"), mesh={"data": 8})
    data = json.loads(json.dumps(plan.document()))
    for kind in data["cluster"]["kinds"]:
        less = changed(data, f"cluster.kinds.{kind}.memory_bytes", 1)
        assert f"a device of '{kind}' has 1" in refused(less)


def test_bars_are_no_longer_than_their_room() -> None:
    assert bar_text(1e30, 3) == "███"


def reference_plan(name: str, **options: Any) -> Plan:
    """A plan of a reference model on four devices."""
    job = models.job(name, **options)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 8),
        optimizer=job.optimizer,
        cluster="v5e:2x2",
    )


def test_a_dimension_of_parameters_may_have_a_lower_resolution() -> None:
    """The first dense layer behind poolings: its kernel has what is left of extents."""
    plan = reference_plan("cosmoflow-test", extent=32)
    data = json.loads(json.dumps(plan.document()))
    assert Plan.from_document(data) == plan
    place, leaf = next(
        (i, x) for i, x in enumerate(data["leaves"]) if x["path"] == "first.kernel"
    )
    (role,) = leaf["roles"][0]
    size = next(x["size"] for x in data["roles"] if x["name"] == role)
    assert size == 32 > leaf["shape"][0]
    less = "or less in steps of 8"
    for wrong in (64, 12, 0):
        damaged = changed(data, f"leaves.{place}.shape.0", wrong)
        text = f"leaves[{place}].shape[0] is {wrong}; {role} is 32, {less}"
        assert text in refused(damaged)


class Patches(nnx.Module):
    """Images cut into patches, with one position for each in a single dimension."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.cut = nnx.Conv(3, 64, (4, 4), strides=4, padding="VALID", rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((1, 64, 64)))
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=64, decode=False, rngs=rngs
        )
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.cut(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        return self.head((x + self.attention(x)).mean(1))


def test_positions_of_patches_are_extents_of_a_lower_resolution() -> None:
    def loss(model: Patches, batch: dict[str, Any]) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    plan = wh.plan(
        loss,
        nnx.eval_shape(lambda: Patches(nnx.Rngs(0))),
        {
            "x": jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32),
            "y": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        },
        optimizer=optax.sgd(0.1),
        cluster="v5e:2x2",
    )
    data = json.loads(json.dumps(plan.document()))
    assert Plan.from_document(data) == plan
    place = [x["path"] for x in data["leaves"]].index("positions")
    assert data["leaves"][place]["roles"][1] == ["positions[1.0]", "positions[1.1]"]
    for wrong in (63, 0, 2048):
        damaged = changed(data, f"leaves.{place}.shape.1", wrong)
        at, product = f"leaves[{place}].shape[1]", "positions[1.0] × positions[1.1]"
        text = f"{at} is {wrong}; {product} is 1024, or less in steps of 64"
        assert text in refused(damaged)


def test_resolutions_are_no_part_of_the_program() -> None:
    plan = reference_plan("cosmoflow-test", extent=32)
    assert any(role.common for role in plan.roles)
    same = tuple(replace(role, common=0) for role in plan.roles)
    assert replace(plan, roles=same).hash == plan.hash


@pytest.mark.parametrize("size", [0, 1])
def test_other_dimensions_that_stay_whole_are_as_long_as_said(size: int) -> None:
    data = json.loads(json.dumps(reference_plan("llama-test").document()))
    place, leaf = next((i, x) for i, x in enumerate(data["leaves"]) if x["shape"])
    short = changed(data, f"leaves.{place}.shape.0", size)
    assert f"leaves[{place}].shape[0] is {size}; " in refused(short)


def test_all_of_them_are_said_at_once(document: dict[str, Any]) -> None:
    data = changed(document, "time.compute_seconds", -5.0)
    data = changed(data, "collectives.0.count", -1)
    assert "numbers that no plan has: 2 problems\n" in refused(data)


@pytest.mark.parametrize(
    "path", ["leaves.0.path", "axes.0.0", "roles.0.name", "notes", "default", "source"]
)
@pytest.mark.parametrize("hidden", ["a\x1b[31mb", "a\nb", "a\u202eb", "a\u200bb"])
def test_text_that_cannot_be_shown(
    document: dict[str, Any], path: str, hidden: str
) -> None:
    value = [hidden] if path in ("notes", "source") else hidden
    text = refused(changed(document, path, value))
    assert "expected text without control and bidirectional characters" in text
    assert ascii(hidden)[2:-1] in text and hidden not in text


def test_names_of_a_plans_cluster_are_checked(document: dict[str, Any]) -> None:
    data = changed(document, "cluster.levels.0.name", "nv\x1b]0;x\x07link")
    assert "levels.0.name: got" in refused(data)
    kinds = document["cluster"]["kinds"]
    renamed = {"h\x1b[2J": kinds["h100"]}
    data = changed(document, "cluster.kinds", renamed)
    text = refused(changed(data, "cluster.nodes.0.kind", "h\x1b[2J"))
    assert "\x1b" not in text and "control characters" in text


CONTENTS: dict[str, bytes] = {
    "deep lists": b"[" * 100_000,
    "deep and whole": json.dumps({"whalejax_plan": 15, "a": deep(500)}).encode(),
    "4,300 digits": b'{"whalejax_plan": ' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"a": "\xff"}',
    "half a character": b'{"whalejax_plan": 15, "zero": "\\ud800"}',
    "Infinity": b'{"a": Infinity}',
    "NaN": b'{"a": NaN}',
    "beyond floats": b'{"a": 1e999}',
    "a key twice": b'{"whalejax_plan": 14, "whalejax_plan": 15}',
    "20 kB of a version": json.dumps({"whalejax_plan": "v" * 20_000}).encode(),
    "20 kB of a key": json.dumps({"whalejax_plan": 15, "k" * 20_000: 1}).encode(),
    "20 kB of a number": b'{"whalejax_plan": 15, "zero": ' + b"9" * 4000 + b"}",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_files_that_are_no_plans(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(CONTENTS[name])
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert len(str(caught.value)) < 1500


def test_a_value_of_20_kilobytes_is_not_repeated(document: dict[str, Any]) -> None:
    big = "x" * 20_000
    places: dict[str, Callable[[str], Any]] = {
        "zero": str,
        "remat": lambda text: [["*", text]],
        "compiler_options": lambda text: [[text, 1]],
    }
    for path, made in places.items():
        assert len(refused(changed(document, path, made(big)))) < 1500


def test_endless_files_and_odd_paths() -> None:
    with pytest.raises(WhaleError, match="no regular file, but a pipe or a device"):
        Plan.load("/dev/zero")
    with pytest.raises(WhaleError, match="without control characters"):
        Plan.load("a\x00b")


@pytest.mark.parametrize(
    ("first", "count"), [(0, 50), pytest.param(50, 950, marks=pytest.mark.full)]
)
def test_damaged_plans_are_refused_or_the_same(first: int, count: int) -> None:
    found = fuzzed("plans", first, count)
    assert not found["failures"]
    assert found["refused"] + found["valid"] == count
