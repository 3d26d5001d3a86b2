"""Tables as a part of ``wh.plan``: one plan, its file, and the step that it becomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.test_table_step import loss, make_batch, make_net
from whalejax.cli.main import main
from whalejax.planner.plan_entries import LeafPlan, RegionTable, RoleInfo, TablesData
from whalejax.runtime.table_step import TableStep
from whalejax.tables.table_plan_record import tables_plan


OPTIMIZER: Final = optax.sgd(0.01, momentum=0.9)
PINS: Final = {"user": "rows", "item": "columns", "tag": 0, "word": 1}
ROWS: Final = wh.sparse_optimizer("adagrad", 0.1)


def make_plan(cluster: str = "cpu:4", **options: Any) -> wh.Plan:
    net, batch = make_net(np.float32), make_batch(0, np.float32)
    given: Any = {"optimizer": OPTIMIZER, "cluster": cluster, "tables": ROWS, **options}
    return wh.plan(loss, net, batch, **given)


def test_a_plan_with_tables_is_planned_and_compiled_like_any_other(
    tmp_path: Path,
) -> None:
    plan = make_plan(pins=PINS)
    net = make_net(np.float32)
    step: Any = wh.compile(
        plan, loss, net, optimizer=OPTIMIZER, devices=jax.devices()[:4]
    )
    assert isinstance(step, TableStep)
    state, metrics = step(step.init_from(net), make_batch(0, np.float32))
    step.save(tmp_path / "one", state)
    again = step.restore(tmp_path / "one")
    assert int(again.step) == 1 and np.isfinite(float(metrics["loss"]))
    own = wh.plan_tables(
        *(loss, net, make_batch(0, np.float32)),
        rows=ROWS,
        optimizer=OPTIMIZER,
        cluster="cpu:4",
        pins=PINS,
    )
    assert own.placement.shards == step.plan.placement.shards
    assert "row ranges" in plan.why("user") or "hashed rows" in plan.why("user")
    assert plan.why("w").startswith("w")
    assert str(own.placement) in str(plan)


def test_its_file_is_the_same_plan(tmp_path: Path) -> None:
    inside = {"in_processes": ["user", "tag", "word"]}
    plan = make_plan("cpu:2+cpu:1", staleness=3, **inside)
    plan.save(tmp_path / "plan.json")
    found = wh.Plan.load(tmp_path / "plan.json")
    assert found == plan and found.hash == plan.hash
    assert str(found) == str(plan) and "the newest 3 updates" in str(plan)
    assert found.hash != make_plan("cpu:2+cpu:1", staleness=2, **inside).hash
    other = inside | {"in_processes": ["user", "tag", "item"]}
    assert found.hash != make_plan("cpu:2+cpu:1", staleness=3, **other).hash
    assert "in processes of CPUs, as you fixed it" in found.why("user")
    assert "beside the dense part, as you fixed it" in found.why("item")
    net = make_net(np.float32)
    step: Any = wh.compile(
        found, loss, net, optimizer=OPTIMIZER, devices=jax.devices()[:1]
    )
    with step:
        _, metrics = step(step.init_from(net), make_batch(0, np.float32))
        assert np.isfinite(float(metrics["loss"]))
        assert step.sections.staleness == 3


def test_of_two_sections_the_dense_part_is_compiled() -> None:
    plan = make_plan("cpu:2+cpu:1", staleness=1, in_processes=["user", "word"])
    found = plan.verify()
    assert found.fits and found.plan_hash == plan.hash
    assert found.product_flops.compiled == found.product_flops.predicted
    assert "not compiled: the tables item, tag, user, word, some" in str(found)
    assert "the dense part is compared" in found.document()["left_out"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["placement"]["shards"][0].update(rank=9), "on rank 9"),
        (lambda d: d["placement"]["shards"].pop(), "elements of"),
        (lambda d: d["placement"].pop("loads"), "cannot be read"),
        (lambda d: d.pop("rows"), "cannot be read"),
    ],
)
def test_a_changed_file_is_refused(change: Any, words: str) -> None:
    plan, net = make_plan(), make_net(np.float32)
    document = json.loads(json.dumps(plan.document()))
    change(document["tables"])
    with pytest.raises(wh.WhaleError, match="changed by hand or damaged"):
        wh.Plan.from_document(document)
    forged = dataclasses.replace(plan, tables=TablesData(document["tables"]))
    with pytest.raises(wh.WhaleError, match=words):
        wh.compile(forged, loss, net, devices=jax.devices()[:4])


def test_what_if_and_what_it_cannot_change() -> None:
    plan = make_plan()
    assert plan.what_if(cluster="cpu:2").num_devices == 2
    assert "user: " in plan.what_if(pins={"user": 1}).why("user")
    changed = plan.what_if(zero=1, num_micro_batches=2, margin=0.1)
    assert (changed.zero, changed.num_micro_batches) == (1, 2)
    assert changed.what_if(remat="full").num_micro_batches == 2
    with pytest.raises(wh.WhaleError, match="'batch' cannot be changed of a plan with"):
        plan.what_if(batch=1)


def test_a_check_at_reduced_sizes_is_refused() -> None:
    plan, net = make_plan(), make_net(np.float32)
    with pytest.raises(wh.WhaleError, match="has embedding tables, which wh.check"):
        wh.check(plan, loss, net, make_batch(0, np.float32), optimizer=OPTIMIZER)


def test_another_loss_of_the_same_tables_is_refused() -> None:
    plan, net = make_plan(), make_net(np.float32)

    def doubled(net: Any, batch: Any) -> Any:
        return 2 * loss(net, batch)

    def shifted(net: Any, batch: Any) -> Any:
        return loss(net, {**batch, "user": batch["user"] // 2})

    def powered(net: Any, batch: Any, power: int) -> Any:
        return jax.lax.integer_pow(loss(net, batch), power)

    square = wh.plan(
        lambda net, batch: powered(net, batch, 2),
        net,
        make_batch(0, np.float32),
        optimizer=OPTIMIZER,
        cluster="cpu:4",
        tables=ROWS,
    )
    with pytest.raises(wh.WhaleError, match="is for another loss"):
        wh.compile(
            square,
            lambda net, batch: powered(net, batch, 3),
            net,
            optimizer=OPTIMIZER,
            devices=jax.devices()[:4],
        )
    for other in (doubled, shifted):
        with pytest.raises(wh.WhaleError, match="is for another loss"):
            wh.compile(plan, other, net, optimizer=OPTIMIZER, devices=jax.devices()[:4])
    # Evaluation of another loss is no training of it.
    wh.compile(plan, doubled, net, devices=jax.devices()[:4])


def test_what_tables_do_not_have_is_refused() -> None:
    words = r"swarm was given with tables[\s\S]*bandwidth was given with tables"
    with pytest.raises(wh.WhaleError, match=words):
        make_plan(swarm=True, bandwidth="1Gb/s")
    with pytest.raises(wh.WhaleError, match="precision is 'f8'; expected .*f32.*bf16"):
        make_plan(precision="f8")
    with pytest.raises(wh.WhaleError, match="staleness was given without tables"):
        make_plan(tables=None, staleness=2)
    with pytest.raises(wh.WhaleError, match="out_of_range is of plans with tables"):
        net, batch = {"w": jnp.ones((4, 4))}, jnp.ones((8, 4))
        plain = wh.plan(lambda n, x: (x @ n["w"]).mean(), net, batch, cluster="cpu:1")
        wh.compile(plain, lambda n, x: (x @ n["w"]).mean(), net, out_of_range="clip")


def test_a_rule_of_rows_by_name_alone_is_refused_under_its_name() -> None:
    message = r"(?s)wh\.plan: 1 problem.*tables is 'adagrad'; expected wh\.sparse_opt"
    with pytest.raises(wh.WhaleError, match=message):
        make_plan(tables="adagrad")


def test_a_plan_of_mostly_tables_says_what_placing_them_saves() -> None:
    shapes = {
        "table": jax.ShapeDtypeStruct((10_000, 32), jnp.float32),
        "w": jax.ShapeDtypeStruct((32,), jnp.float32),
    }
    batch = {"ids": jax.ShapeDtypeStruct((8,), jnp.int32)}

    def lookup(net: Any, batch: Any) -> Any:
        return (net["table"][batch["ids"]] @ net["w"]).mean()

    (note,) = [
        note
        for note in wh.plan(lookup, shapes, batch, cluster="cpu:1").notes
        if "looked up" in note
    ]
    assert "1 table of 1.28 MB is only looked up" in note and "at most 0.08%" in note
    placed = wh.plan(lookup, shapes, batch, cluster="cpu:1", tables=ROWS)
    assert not any("looked up" in note for note in placed.notes)


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["cpu:8", "cpu:1+cpu:8"])
def test_the_command_line_trains_with_tables(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train dlrm-test --tables adagrad:0.02 --steps 4 --quiet --json".split()
    where = ["--cluster", cluster, "--save", str(tmp_path / "saved")]
    assert main([*words, *where]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 4
    assert main([*words, *where, "--resume", "--steps", "6"]) == 0


def test_words_of_the_command_line_that_say_no_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "dlrm-test", "--tables", "adam:0.1", "--zero", "1"]) != 0
    assert main(["train", "dlrm-test", "--staleness", "1"]) != 0
    assert "--staleness is 1 without --tables" in capsys.readouterr().err
    words = "plan dlrm-test --cluster cpu:2 --tables adagrad:0.1 --allow-idle"
    assert main(words.split()) == 2
    assert "--allow-idle cannot be combined with --tables" in capsys.readouterr().err
    assert main(["train", "dlrm-test", "--replace-every", "9"]) == 2
    assert "--replace-every was given without --tables" in capsys.readouterr().err
    words = "train dlrm-test --tables adagrad:0.1 --processes 1:2 --save here"
    assert main([*words.split(), "--staleness", "1"]) == 2
    assert "--staleness is 1 with --processes. In an elastic" in capsys.readouterr().err


SHAPES: Final = {
    "user": jax.ShapeDtypeStruct((1000, 16), jnp.float32),
    "w": jax.ShapeDtypeStruct((16,), jnp.float32),
}


def small_loss(net: Any, batch: Any) -> Any:
    return (net["user"][batch["ids"]] @ net["w"]).mean()


def bag_loss(net: Any, batch: Any) -> Any:
    rows = jax.ops.segment_sum(net["user"][batch["ids"]], batch["bag"], num_segments=64)
    return ((rows @ net["w"]) * batch["x"]).mean()


def ids_of(kind: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, kind)


@pytest.mark.parametrize(
    ("batch", "change", "words"),
    [
        (ids_of(np.float32, 64), {}, "not integers; of the batch ids is of another"),
        (np.array([[1, 2], [3]], object), {}, "type object.*Pad bags of unequal"),
        ([[1, 2], [3]], {}, "Pad bags of unequal lengths"),
        (ids_of(np.int32, 64), {"counts": {"user": np.ones(999)}}, r"shape \(999,\)"),
        (ids_of(np.int32, 64), {"counts": {"item": np.ones(9)}}, "'item', which is no"),
        (ids_of(np.int32, 64), {"tables": optax.adam(0.1)}, "sgd, adagrad, row_adagra"),
        (ids_of(np.int32, 64), {"staleness": -1}, "staleness is -1; expected a whole"),
        (ids_of(np.int32, 64), {"staleness": 1}, "no CPUs beside the devices"),
        (ids_of(np.int32, 64), {"in_processes": ["user"]}, "no CPUs beside the devi"),
    ],
)
def test_bad_input_is_refused_in_words(batch: Any, change: Any, words: str) -> None:
    options: Any = {"tables": ROWS, "cluster": "h100:4", **change}
    with pytest.raises(wh.WhaleError, match=f"(?s){words}"):
        wh.plan(small_loss, SHAPES, {"ids": batch}, **options)


def test_ragged_bags_are_refused_with_what_to_give() -> None:
    batch = {
        "ids": ids_of(np.int32, 500),
        "bag": ids_of(np.int32, 500),
        "x": ids_of(np.float32, 64),
    }
    with pytest.raises(wh.WhaleError, match=r"lengths: ids of one shape, \(samples"):
        wh.plan(bag_loss, SHAPES, batch, tables=ROWS, cluster="h100:4")


@pytest.mark.parametrize(
    ("rows", "cluster", "words"),
    [
        (2_000_000_000, "h100:4", "'user' takes 8.19 TB .* 949 GB short"),
        (2_000_000_000, "cpu:2+h100:4", "1 table of 8.19 TB .* 7.89 TB short"),
        (3_000_000_000, "h100:4", "852,516,353 too many. Hash ids"),
    ],
)
def test_a_table_too_large_for_all_says_by_how_much(
    rows: int, cluster: str, words: str
) -> None:
    shapes = {
        "user": jax.ShapeDtypeStruct((rows, 512), jnp.float32),
        "w": jax.ShapeDtypeStruct((512,), jnp.float32),
    }
    with pytest.raises(wh.WhaleError, match=words):
        wh.plan(
            *(small_loss, shapes, {"ids": ids_of(np.int32, 64)}),
            tables=ROWS,
            cluster=cluster,
        )


def test_a_feature_that_no_table_takes_is_named() -> None:
    batch = {"ids": ids_of(np.int32, 64), "shop": ids_of(np.int32, 64)}
    plan = wh.plan(small_loss, SHAPES, batch, tables=ROWS, cluster="h100:4")
    assert "neither a table nor anything else reads shop of the batch" in str(plan)


def test_optimizers_without_a_sparse_form_are_refused() -> None:
    with pytest.raises(wh.WhaleError, match="'adam'; expected one of sgd, adagrad"):
        wh.sparse_optimizer("adam", 0.1)  # type: ignore[arg-type]


def test_what_is_predicted_is_of_the_whole_step() -> None:
    plan, own = make_plan("h100:4"), make_plan("h100:4", pins={"user": "rows"})
    sizes = sum(int(np.prod(leaf.shape)) for leaf in make_net(np.float32).values())
    assert plan.work is not None and plan.work.parameters == sizes
    seconds = plan.throughput().step_seconds
    assert seconds > plan.time.step_seconds and own.throughput().step_seconds > 0
    assert "a step takes " in str(plan) and "of the dense part, " in str(plan)
    assert "whole: a step takes " in plan.explain()
    late = make_plan("cpu:2+cpu:1", staleness=2, in_processes=["user", "word"])
    assert "sparse " in late.explain() and "takes longest" in late.explain()
    found = TablesData.from_json(late.tables.to_json()).document  # type: ignore[union-attr]
    assert found["sections"]["staleness"] == 2
    assert "SparseCore is not used" in str(make_plan("v5p:2x2x1"))
    assert "SparseCore" not in str(plan)


def test_a_profile_of_tables_is_refused_in_words() -> None:
    plan, net = make_plan("cpu:1"), make_net(np.float32)
    given: Any = {"optimizer": OPTIMIZER, "devices": jax.devices()[:1]}
    step: Any = wh.compile(plan, loss, net, **given)
    with pytest.raises(wh.WhaleError, match=r"Trace steps with jax.profiler.trace"):
        step.profile(step.init_from(net), make_batch(0, np.float32))


def test_paths_of_older_plans_had_prefixes() -> None:
    plan = make_plan()
    own = tables_plan(plan)

    def prefixed(value: Any) -> Any:
        if isinstance(value, str):
            return f"dense.{value}" if value.partition("[")[0] in own_paths else value
        if isinstance(value, tuple):
            return tuple(map(prefixed, value))
        if isinstance(value, LeafPlan | RoleInfo | RegionTable):
            fields = {f.name for f in dataclasses.fields(value)}
            named = fields & {"path", "roles", "name", "aliases", "axes"}
            changed = {name: prefixed(getattr(value, name)) for name in named}
            return dataclasses.replace(value, **changed)
        return value

    own_paths = [leaf.path for leaf in plan.leaves]
    names = ("leaves", "roles", "compute", "storage")
    changed = {name: prefixed(getattr(plan, name)) for name in names}
    older = dataclasses.replace(plan, **changed)
    assert {leaf.path for leaf in older.leaves} == {"dense.mix", "dense.w"}
    found = tables_plan(older).dense
    assert found.leaves == own.dense.leaves and found.roles == own.dense.roles
    assert found.compute == own.dense.compute
    net = make_net(np.float32)
    given: Any = {"optimizer": OPTIMIZER, "devices": jax.devices()[:4]}
    step: Any = wh.compile(older, loss, net, **given)
    _, metrics = step(step.init_from(net), make_batch(0, np.float32))
    assert np.isfinite(float(metrics["loss"]))


def test_scaled_losses_beside_processes_are_refused() -> None:
    """A step that overflows is skipped, and processes would apply its gradients."""
    inside = {"in_processes": ["user"], "staleness": 1}
    with pytest.raises(
        wh.WhaleError, match="processes with tables apply the gradients"
    ):
        make_plan("cpu:2+cpu:1", precision="f16", **inside)
    found = make_plan("cpu:2+cpu:1", precision="bf16", **inside)
    assert "bf16" in str(found.asked_precision)


def test_what_a_compiled_step_would_refuse() -> None:
    """Batches that devices do not divide, and optimizers with another state."""
    net = make_net(np.float32)
    batch = jax.tree.map(lambda leaf: leaf[:-2], make_batch(0, np.float32))
    with pytest.raises(wh.WhaleError, match="which is not divisible by"):
        wh.plan(
            *(loss, net, batch),
            tables=ROWS,
            optimizer=OPTIMIZER,
            cluster="cpu:4",
            mesh={"tensor": 4},
        )
    plan = make_plan("cpu:2")
    with pytest.raises(wh.WhaleError, match="made for another optimizer"):
        wh.compile(
            *(plan, loss, net),
            optimizer=optax.adam(0.1),
            devices=jax.devices()[:2],
        )
    assert "chosen for a token" not in str(plan)
