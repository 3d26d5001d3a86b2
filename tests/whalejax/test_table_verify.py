"""Plans with tables against the compiler of their hardware."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_table_memories import HOSTED, make_plan
from whalejax.cli.main import main
from whalejax.models import dlrm
from whalejax.runtime import compile_tables
from whalejax.tables.table_plan_record import tables_plan
from whalejax.verification import gpu
from whalejax.verification.comparison import Verification


NEEDS_GPU_COMPILER: Final = pytest.mark.skipif(
    not (gpu.folder() / "ready").exists(),
    reason="the GPU compiler is not set up: whalejax verify --setup-gpu",
)


def hosted_plan(cluster: str, rows: int) -> wh.Plan:
    """Returns a plan with one table in host memory, and a part of another."""

    def loss(net: Any, batch: Any) -> Any:
        user, item = net["user"][batch["user"]], net["item"][batch["item"]].sum(1)
        return (jnp.tanh((user * item) @ net["w"]) ** 2).mean()

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, np.float32)

    net = {"user": shape(rows, 128), "item": shape(rows, 128), "w": shape(128)}
    ids = {"user": (512,), "item": (512, 3)}
    return wh.plan(
        loss,
        net,
        {name: jax.ShapeDtypeStruct(s, np.int32) for name, s in ids.items()},
        tables=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=optax.sgd(0.1),
        cluster=cluster,
        pins={"user": "host", "item": "cached:0.25"},
    )


def exchanges(found: Verification) -> list[tuple[float | None, ...]]:
    """Returns planned and compiled bytes and counts of the all-to-alls."""
    return [
        (q.predicted, q.compiled, q.predicted_count, q.compiled_count)
        for q in found.collectives
        if q.name.startswith("all-to-all")
    ]


def test_the_compiler_moves_the_planned_bytes() -> None:
    config = dlrm.SIZES["test"]
    job = dlrm.job("test", batch_size=64)
    plan = wh.plan(
        job.loss_fn,
        jax.eval_shape(job.make_model, jax.random.key(0)),
        job.batch_at(0),
        tables=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=job.optimizer,
        cluster="cpu:4",
        pins={f"tables.c{n}.embedding": "rows" for n in range(len(config.rows))},
    )
    found = plan.verify(timeout_seconds=300)
    ((predicted, compiled, planned_count, count),) = exchanges(found)
    assert predicted == compiled and planned_count == count == 3
    assert found.fits and not found.unplanned
    arguments = next(q for q in found.memory if q.name == "arguments")
    assert arguments.difference == pytest.approx(0, abs=0.1)


def test_the_plan_counts_tables_and_its_dense_part_does_not() -> None:
    plan = hosted_plan("v5p:2x2x1", 100_000)
    own = tables_plan(plan)
    assert plan.memory.tables_bytes == own.use.stored_bytes > 0
    assert plan.memory.host_bytes == own.use.host_bytes > 0
    assert {c.what for c in plan.collectives} >= {"ids", "rows", "row gradients"}
    dense = own.dense
    assert dense.memory.tables_bytes == dense.memory.host_bytes == 0
    assert own.use.added_to(dense).memory == plan.memory
    assert not {c.what for c in dense.collectives} & {"ids", "rows", "row gradients"}


def test_tables_whose_exchange_has_no_room_are_refused() -> None:
    """The tables alone would fit; their vectors do not."""
    shapes = {
        "user": jax.ShapeDtypeStruct((30_000_000, 512), np.float32),
        "w": jax.ShapeDtypeStruct((512,), np.float32),
    }
    batch = {"ids": jax.ShapeDtypeStruct((4_000_000, 2), np.int32)}
    with pytest.raises(wh.WhaleError, match=r"short|too few"):
        wh.plan(
            lambda net, b: (net["user"][b["ids"]].sum(1) @ net["w"]).mean(),
            *(shapes, batch),
            tables=wh.sparse_optimizer("sgd", 0.1),
            optimizer=optax.sgd(0.1),
            cluster="h100:1",
        )


def test_host_memory_is_refused_where_compilers_copy_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan("h100:2", "sgd", HOSTED)
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    step: Any = SimpleNamespace(mesh=SimpleNamespace(devices=np.array([device])))
    monkeypatch.setattr(compile_tables, "copied_bytes", lambda _: (8_001, 8_000))
    with pytest.raises(wh.WhaleError, match=r"user \(host\).*8,001 bytes for 8 rows"):
        compile_tables._check_host_memory(plan, step)
    monkeypatch.setattr(compile_tables, "copied_bytes", lambda _: (90, 8_000))
    compile_tables._check_host_memory(plan, step)


def test_exchanges_of_a_node_are_planned_where_axes_are_its_devices() -> None:
    """Each of them in bytes, on two nodes of two devices."""

    def loss(net: Any, batch: Any) -> Any:
        return (jnp.tanh(net["user"][batch["ids"]].sum(1) @ net["w"]) ** 2).mean()

    net = {"user": np.zeros((4000, 32), np.float32), "w": np.zeros(32, np.float32)}
    plan = wh.plan(
        *(loss, net, {"ids": np.zeros((64, 3), np.int32)}),
        tables=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=optax.sgd(0.1),
        cluster="h100:2x2",
        pins={"user": "node_rows"},
        mesh={"data": 2, "fsdp": 2},
        num_micro_batches=2,
    )
    moved = {(c.kind, c.axes, c.what): c for c in plan.collectives}
    vectors = 64 * 32 * 4
    for kind, axes, what, nbytes in (
        ("reduce-scatter", "fsdp", "rows", vectors),
        ("all-to-all", "data", "rows", vectors // 2),
        ("all-to-all", "data", "row gradients", vectors // 2),
        ("all-gather", "fsdp", "row gradients", vectors),
    ):
        found = moved[kind, (axes,), what]
        assert found.payload_bytes == nbytes and plan.times(found) == 1


@pytest.mark.full
def test_a_tpu_leaves_tables_in_host_memory() -> None:
    found = [hosted_plan("v5p:2x2x1", n).verify() for n in (100_000, 1_000_000)]
    sizes = [{q.name: q for q in each.memory} for each in found]
    temporary = [each["temporaries"].compiled or 0 for each in sizes]
    assert temporary[1] <= 1.02 * temporary[0]
    for each, one in zip(sizes, found, strict=True):
        assert each["host"].compiled == pytest.approx(each["host"].predicted, rel=0.01)
        ((predicted, compiled, planned_count, count),) = exchanges(one)
        assert predicted == compiled and planned_count == count == 3


@pytest.mark.full
@NEEDS_GPU_COMPILER
def test_a_gpu_copies_tables_in_host_memory_and_is_refused() -> None:
    with pytest.raises(wh.WhaleError, match="copies a whole table to change"):
        hosted_plan("h100:1x2", 100_000).verify()


@pytest.mark.full
@pytest.mark.parametrize(
    ("cluster", "batch", "parts"),
    [
        pytest.param("h100:2x8", 128, 1, marks=NEEDS_GPU_COMPILER),
        pytest.param("h100:2x8", 2048, 4, marks=NEEDS_GPU_COMPILER),
        ("v5p:4x4x4", 256, 1),
    ],
)
def test_all_rows_and_layers_of_dlrm_v4_compile(
    cluster: str,
    batch: int,
    parts: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "plan.json")
    sizes = ["--cluster", cluster, "--batch", str(batch), "-o", path, "--quiet"]
    given = ["hstu-dlrm-v4", *sizes, "--tables", "row_adagrad:0.05"]
    given += ["--precision", "bf16"] if parts > 1 else []
    assert main(["plan", *given]) == 0
    plan = wh.Plan.load(path)
    assert plan.num_micro_batches == parts
    assert plan.memory.total_bytes * 1.1 < plan.room_bytes  # A margin is free.
    tables = tables_plan(plan).placement.tables
    assert sum(table.rows for table in tables) == 297_050_000
    assert sum(table.rows * table.width * 4 for table in tables) > 608e9
    capsys.readouterr()
    assert main(["verify", path, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    memory = {entry["name"]: entry for entry in found["memory"]}
    peak = memory["peak"]
    assert peak["predicted"] == pytest.approx(peak["compiled"], rel=0.02)
    (moved,) = [
        entry
        for entry in found["collectives"]
        if entry["name"].startswith("all-to-all")
    ]
    assert moved["predicted"] == moved["compiled"]
    assert moved["predicted_count"] == moved["compiled_count"] == 3
