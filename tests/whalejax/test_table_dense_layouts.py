"""The dense part of steps with tables in layouts of ordinary plans, one program."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.equality import build
from tests.whalejax import recommender_net as deep
from tests.whalejax.test_table_dense_part import (
    OPTIMIZER,
    ROWS,
    check_equal,
    check_exchanges,
    loss,
    make_batch,
    make_net,
    make_step,
)
from tests.whalejax.test_table_step import collectives
from whalejax import models
from whalejax.state.resume import restore_newest


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "mesh", "kept"),
    [
        (2, {"stage": 2}, "residuals"),
        (4, {"stage": 4}, "inputs"),
        (4, {"stage": 2, "data": 2}, "residuals"),
        (8, {"stage": 2, "data": 2, "tensor": 2}, "residuals"),
        (8, {"stage": 4, "fsdp": 2}, "inputs"),
    ],
)
def test_stages_in_lockstep(ranks: int, mesh: dict[str, int], kept: str) -> None:
    """Vectors enter at the first stage, those of users after the last one's layers."""
    plan, _ = deep.make_step(f"cpu:{ranks}", mesh=mesh, num_micro_batches=4)
    stages: Any = plan.stages
    assert stages.schedule == "1f1b-lockstep"
    plan = dataclasses.replace(plan, stages=dataclasses.replace(stages, stash=kept))
    given: dict[str, Any] = {"optimizer": deep.OPTIMIZER}
    given["devices"] = jax.devices()[:ranks]
    step: Any = wh.compile(plan, deep.loss, deep.make_net(), **given)
    deep.check_equal(step, 3e-6)
    state = step.init_from(deep.make_net())
    text = step.lower(state, deep.make_batch(0)).compile().as_text()
    assert len(collectives(text)["all-to-all"]) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, {"stage": 2}),
        (4, {"stage": 2, "data": 2}),
        (4, {"stage": 4}),
        (8, {"stage": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_stages_with_programs_of_their_own(
    ranks: int, mesh: dict[str, int], tmp_path: Path
) -> None:
    """Every stage reads a part of the histories, and returns its gradient."""
    plan, step = make_step(f"cpu:{ranks}", mesh=mesh, num_micro_batches=4)
    assert len(plan.stage_plans) == mesh["stage"] and plan.runnable
    check_equal(step, 3e-6)
    state, _ = step(step.init_from(make_net()), make_batch(0))
    step.save(tmp_path / "saved", state)
    again = step.restore(tmp_path / "saved")
    _, whole = make_step("cpu:2", num_micro_batches=2)
    other = whole.adopt(state, step)
    losses = [
        float(each(held, make_batch(1))[1]["loss"])
        for each, held in ((step, state), (step, again), (whole, other))
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=3e-6)
    with pytest.raises(wh.WhaleError, match="there is no one program to lower"):
        step.lower_shapes()


def test_vectors_that_no_stage_reads() -> None:
    """Their gradients are zeros, and their table stays as it was."""
    net: dict[str, Any] = {**make_net(), "idle": jnp.ones((37, 16))}

    def with_idle(net: Any, batch: Any) -> jax.Array:
        net["idle"][batch["user"]].sum()
        return loss(net, batch)

    given: dict[str, Any] = {"optimizer": OPTIMIZER}
    plan = wh.plan(
        *(with_idle, net, make_batch(0)),
        tables=SGD,
        cluster="cpu:2",
        mesh={"stage": 2},
        num_micro_batches=4,
        **given,
    )
    assert plan.stage_plans
    given["devices"] = jax.devices()[:2]
    step: Any = wh.compile(plan, with_idle, net, **given)
    state, metrics = step(step.init_from(net), make_batch(0))
    expected = float(loss(make_net(), make_batch(0)))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=3e-6)
    np.testing.assert_array_equal(step.table_values(state)["idle"], net["idle"])


def test_marked_stages() -> None:
    def marked(net: Any, batch: Any) -> jax.Array:
        events = net["item"][batch["items"]]
        x = net["user"][batch["user"]]
        with wh.pipeline(num_micro_batches=4):
            for first in (0, 3):
                with wh.stage():
                    for n in range(first, first + 3):
                        hidden = jnp.tanh((x + events[:, n % 3]) @ net[f"up{n}"])
                        x = x + hidden @ net[f"down{n}"]
        return jnp.mean((x @ net["out"] - batch["label"]) ** 2)

    given: dict[str, Any] = {"optimizer": OPTIMIZER}
    plan = wh.plan(
        *(marked, make_net(), make_batch(0)),
        tables=wh.sparse_optimizer("adagrad", 0.05),
        cluster="cpu:4",
        **given,
    )
    assert plan.axis_sizes["stage"] == 2 and plan.num_micro_batches == 4
    given["devices"] = jax.devices()[:4]
    check_equal(wh.compile(plan, marked, make_net(), **given), 3e-6)


SGD: Final = wh.sparse_optimizer("sgd", 0.1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches(ranks: int, parts: int) -> None:
    """Rows are looked up once for all of them."""
    plan, step = make_step(f"cpu:{ranks}", num_micro_batches=parts)
    assert plan.num_micro_batches == parts
    check_equal(step, 2e-6)
    if ranks > 1:
        check_exchanges(step)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"zero": 1}),
        (4, {"zero": 2, "num_micro_batches": 2}),
        (8, {"zero": 2, "mesh": {"data": 4, "fsdp": 2}, "num_micro_batches": 2}),
        (4, {"mesh": {"fsdp": 4}, "num_micro_batches": 4, "remat": "dots"}),
        (8, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "num_micro_batches": 2}),
        (2, {"offload": "optimizer"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_states_and_axes(ranks: int, options: dict[str, Any]) -> None:
    plan, step = make_step(f"cpu:{ranks}", **options)
    assert plan.zero == options.get("zero", plan.zero)
    check_equal(step, 2e-6)
    check_exchanges(step)


def test_float16_with_a_scaled_loss() -> None:
    """Steps that overflow change neither the dense part nor rows."""
    for ranks in (1, 4):
        _, step = make_step(f"cpu:{ranks}", precision="f16", num_micro_batches=2)
        precision = {"*": "f16"}
        check_equal(step, 2e-2, precision=precision, num_micro_batches=2)
    state = step.init_from(make_net())
    batch = make_batch(0)
    batch["label"] = np.full_like(batch["label"], 1e30)
    before = jax.tree.map(np.asarray, (step.table_values(state), state.params))
    squares = step.row_states(state)
    state, metrics = step(state, batch)
    assert int(metrics["skipped_steps"]) == 1
    after = jax.tree.map(np.asarray, (step.table_values(state), state.params))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    jax.tree.map(np.testing.assert_array_equal, squares, step.row_states(state))
    for _ in range(4):  # The scale halves until nothing overflows.
        state, metrics = step(state, make_batch(0))
    assert int(metrics["skipped_steps"]) < 5
    assert not np.array_equal(step.table_values(state)["user"], before[0]["user"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"num_micro_batches": 2}),
        (2, {"num_micro_batches": 4, "zero": 1}),
        (4, {"offload": ("optimizer", "params"), "num_micro_batches": 2}),
        (2, {"offload": "activations", "remat": "full"}),
        (4, {"mesh": {"data": 2, "tensor": 2}, "sequence_parallel": True}),
        (8, {"mesh": {"data": 2, "context": 4}, "num_micro_batches": 2}),
        (4, {"mesh": {"context": 4}, "attention": "ring"}),
        (8, {"mesh": {"fsdp": 2, "context": 2, "tensor": 2}}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_layers_with_attention(ranks: int, options: dict[str, Any]) -> None:
    _, step = deep.make_step(f"cpu:{ranks}", **options)
    deep.check_equal(step, 3e-6)


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion  # Flax promotes in its norms
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "expert": 2}, {"context": 2, "expert": 2}]
)
def test_layers_of_experts(mesh: dict[str, int]) -> None:
    job = models.job("moe-test", annotated=False, batch_size=16, layers=1)
    model, optimizer = build(job), optax.sgd(0.1)
    given: dict[str, Any] = {"optimizer": optimizer, "tables": SGD, "mesh": mesh}
    plan = wh.plan(job.loss_fn, model, job.batch_at(0), cluster="cpu:4", **given)
    del given["tables"], given["mesh"]
    one = wh.plan(job.loss_fn, model, job.batch_at(0), cluster="cpu:1", **given)
    losses = []
    for each in (plan, one):
        devices = jax.devices()[: each.num_devices]
        step: Any = wh.compile(each, job.loss_fn, model, **given, devices=devices)
        state, values = step.init_from(model), []
        for number in range(3):
            state, metrics = step(state, job.batch_at(number))
            values.append(float(metrics["loss"]))
        losses.append(values)
    np.testing.assert_allclose(*losses, rtol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("combine", ["adasum", "adasum_updates"])
def test_gradients_combined_by_adasum(combine: str) -> None:
    """The dense part as without tables; rows by the gradient of the mean loss."""
    mesh = {"data": 4}
    _, step = make_step("cpu:4", combine=combine, mesh=mesh)
    net, batch = make_net(), make_batch(0)
    plan = wh.plan(
        *(loss, net, batch),
        optimizer=OPTIMIZER,
        cluster="cpu:4",
        combine=combine,
        mesh=mesh,
    )
    given: dict[str, Any] = {"optimizer": OPTIMIZER, "devices": jax.devices()[:4]}
    other = wh.compile(plan, loss, net, **given)
    whole, _ = other(other.init_from(net), batch)
    state, _ = step(step.init_from(net), batch)
    for name, value in state.params.items():
        np.testing.assert_allclose(value, whole.model[name], rtol=0, atol=2e-6)
    gradients = jax.grad(loss)({k: jnp.asarray(x) for k, x in net.items()}, batch)
    for name, rows in step.table_values(state).items():
        moved = 0.05 * gradients[name] / jnp.sqrt(gradients[name] ** 2 + 0.1 + 1e-7)
        np.testing.assert_allclose(rows, net[name] - moved, rtol=0, atol=2e-6)


def test_a_run_with_other_micro_batches_tells_of_other_random_numbers(
    tmp_path: Path,
) -> None:
    def with_dropout(net: Any, batch: Any, key: Any) -> jax.Array:
        kept = jax.random.bernoulli(key, 0.5, (len(batch["user"]), 1))
        return loss({**net, "out": net["out"] / 2}, batch) + jnp.mean(
            jnp.where(kept, net["user"][batch["user"]], 0) ** 2
        )

    def made(loss_fn: Any, count: int) -> Any:
        net, given = make_net(), {"optimizer": OPTIMIZER}
        options: dict[str, Any] = {"tables": SGD, "num_micro_batches": count, **given}
        plan = wh.plan(loss_fn, net, make_batch(0), cluster="cpu:1", **options)
        return wh.compile(plan, loss_fn, net, devices=jax.devices()[:1], **given)

    for name, loss_fn in (("plain", loss), ("drawn", with_dropout)):
        path, step = tmp_path / name, made(loss_fn, 1)
        step.save(path, step.init_from(make_net()))
        found: list[Any] = [restore_newest(made(loss_fn, n), [path]) for n in (1, 2)]
        assert found[0].notes == ()
        told = ["trained with 1 micro-batch" in note for note in found[1].notes]
        assert told == ([True] if name == "drawn" else [])


def test_a_step_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    _, step = make_step("cpu:4", num_micro_batches=2, zero=1)
    state, _ = step(step.init_from(make_net()), make_batch(0))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for number in range(3):
            state, _ = step(state, make_batch(number))
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_gradients_of_vectors_are_planned() -> None:
    """Products backward to vectors, and their gradients over micro-batches."""
    one, _ = make_step("cpu:4", num_micro_batches=1)
    several, _ = make_step("cpu:4", num_micro_batches=2)
    vectors = 32 // 4 * 16 * 4 * (1 + 3)
    dense = sum(leaf.nbytes for leaf in several.trained)
    # On CPUs the gradients of a micro-batch are beside their sum.
    assert several.memory.gradients_bytes == 2 * dense + vectors
    assert one.memory.gradients_bytes <= dense
    # Two products of a layer forward, each twice backward: also the first by vectors.
    product = 2 * 8 * 16 * 64
    assert one.product_flops == pytest.approx(3 * 6 * 2 * product, rel=0.02)


def test_optimizers_of_the_dense_part_see_its_paths() -> None:
    """A mask by name; the planned state is that of the step."""

    def is_out(tree: Any) -> Any:
        return {name: name == "out" for name in tree}

    dense = optax.chain(optax.masked(optax.trace(0.9), is_out), optax.scale(-0.01))
    plan, step = make_step("cpu:2", dense, zero=1, num_micro_batches=2)
    assert plan.optimizer_bytes == 16 * 4
    state, _ = step(step.init_from(make_net()), make_batch(0))
    traces = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert [x.shape for x in traces] == [(16,)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_micro_batches": 5}, r"num_micro_batches"),
        ({"shares": [1, 1]}, "every device looks up for as many samples"),
        ({"swarm": True, "bandwidth": "1Gb/s"}, "swarm was given with tables: peers"),
        ({"runnable": False}, "runnable was given with tables"),
        ({"batch_axes": 1}, "samples along dimension 0"),
        ({"zero": 3}, "zero"),
        ({"mesh": {"tensr": 2}}, "Did you mean 'tensor'"),
        ({"margin": 2}, "margin"),
        ({"mesh": {"data": 3}}, "uses 3 of 4 devices"),
        (
            {"mesh": {"stage": 2}, "num_micro_batches": 2, "precision": "f16"},
            "skip no rows of tables",
        ),
    ],
)
def test_what_cannot_run_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(wh.WhaleError, match=words):
        make_step("cpu:4", **options)


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(wh.WhaleError, match=r"zeroo.*Did you mean 'zero'"):
        wh.plan_tables(
            *(lambda net, batch: 0.0, make_net(), make_batch(0)),
            rows=wh.sparse_optimizer("sgd", 0.1),
            zeroo=1,
        )


def test_ids_that_mix_samples_are_refused_where_ranks_combine() -> None:
    """The dense part, which gets vectors, does not show how their ids are made."""

    def mixed(net: Any, batch: Any) -> Any:
        return loss(net, {**batch, "user": batch["user"] - batch["user"].min()})

    given: Any = {"tables": ROWS, "optimizer": OPTIMIZER, "cluster": "cpu:4"}
    assert wh.plan(mixed, make_net(), make_batch(0), **given).combine == "mean"
    with pytest.raises(wh.WhaleError, match="not proven to be a mean of independent"):
        wh.plan(mixed, make_net(), make_batch(0), combine="adasum", **given)
