"""Plans at reduced sizes, held against one device.

Most tests run what the other process runs in this one, which has eight devices too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import whalejax as wh
from tests.adasum import tree as adasum_oracle
from whalejax import models
from whalejax.adapters.base import adapt
from whalejax.cli import plan_check
from whalejax.cli.main import main
from whalejax.equality import check_plan, reduced_model, run_checks
from whalejax.equality.check_errors import CheckError
from whalejax.equality.check_run import CheckResult, CheckRun, LeafError
from whalejax.equality.index_bounds import index_bounds
from whalejax.equality.mesh_reduction import reduced_mesh
from whalejax.equality.one_device import leaf_errors
from whalejax.equality.random_data import batch as batch_values
from whalejax.equality.random_data import sample, weights
from whalejax.equality.reduced_model import PlannedModel
from whalejax.equality.role_sizes import reduced_sizes
from whalejax.equality.true_step import adasum
from whalejax.jobs import abstract_model
from whalejax.lowering import runner


pytestmark = pytest.mark.relaxed_promotion  # optimizers of optax promote
WIDTH, HEADS, VOCAB = 32, 4, 50


def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention_loss(net: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """A decoder whose code holds its number of heads and their width."""
    x = net["embedding"][tokens[:, :-1]]

    def layer(x: jax.Array, one: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = ((x @ one[name]).reshape(split) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        mask = np.tril(np.ones((16, 16), bool))  # an array of the program
        mixed = jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v
        )
        return x + jnp.tanh(mixed.reshape(x.shape) @ one["o"]), None

    x, _ = jax.lax.scan(layer, x, net["layers"])
    logits = x @ net["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


ATTENTION: Mapping[str, Any] = {
    "embedding": shape(VOCAB, WIDTH),
    "layers": {name: shape(6, WIDTH, WIDTH) for name in "qkvo"},
    "head": shape(WIDTH, VOCAB),
}
TOKENS = shape(16, 17, dtype=jnp.int32)


def convolution_loss(net: dict[str, Any], x: jax.Array) -> jax.Array:
    for name in ("first", "second"):
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, net[name], (1, 1), "SAME", dimension_numbers=names
        )
        x = jnp.tanh(x)
    return jnp.square(x).mean()


def dense_loss(net: dict[str, Any], x: jax.Array) -> jax.Array:
    return jnp.square(jnp.tanh(x @ net["up"]) @ net["down"] - 1.0).mean()


DENSE = {"up": shape(24, 40), "down": shape(40, 24)}


def plan_of(
    loss_fn: Callable[..., Any], net: Any, batch: Any, mesh: dict[str, int], **how: Any
) -> wh.Plan:
    devices = int(np.prod([*mesh.values()]))
    nodes = f"{devices // 8}x8" if devices > 8 else str(devices)
    how = {"optimizer": optax.adam(0.01), "cluster": f"h100:{nodes}", **how}
    return wh.plan(loss_fn, net, batch, mesh=mesh, **how)


def run(
    plan: wh.Plan,
    loss_fn: Callable[..., Any],
    net: Any,
    batch: Any,
    *,
    multiples: tuple[int, ...] = (2,),
    optimizer: Any = None,
) -> tuple[list[CheckRun], list[str]]:
    """What the process that checks does, in this one."""
    request = check_plan.check_request(
        plan,
        adapt(net, loss_fn),
        batch,
        optimizer=optax.adam(0.01) if optimizer is None else optimizer,
        batch_axes=0,
        multiples=multiples,
        seed=0,
        limit_bytes=10**10,
    )
    return run_checks.run_checks(request)


def sizes_of(found: CheckRun) -> dict[str, tuple[int, int]]:
    return {d.name: (d.size, d.reduced) for d in found.dimensions}


# What equals one device.


def test_code_that_holds_sizes_runs_as_its_traced_program() -> None:
    plan = plan_of(
        attention_loss, ATTENTION, TOKENS, {"fsdp": 2, "context": 2, "tensor": 2}
    )
    (found,), failures = run(plan, attention_loss, ATTENTION, TOKENS)
    assert not failures
    assert found.is_right, found
    assert found.way == "program", found.refused
    assert dict(found.axes) == plan.axis_sizes
    sizes = sizes_of(found)
    assert sizes["layers.k[0]"] == (6, 2)  # layers
    assert sizes["batch[1]"] == (17, 9)  # four tokens of each device, and one more
    assert {leaf.path for leaf in found.gradients} == {x.path for x in plan.trained}


def test_code_that_reads_its_sizes_runs_as_it_is() -> None:
    plan = plan_of(dense_loss, DENSE, shape(48, 24), {"data": 2, "tensor": 2}, zero=1)
    (even, odd), failures = run(
        plan, dense_loss, DENSE, shape(48, 24), multiples=(2, 3)
    )
    assert not failures
    assert (even.way, odd.way) == ("code", "code")
    assert (even.extents, odd.extents) == ("even", "odd")
    assert even.is_right and odd.is_right
    # Two and three samples on each device of data.
    assert sizes_of(even)["batch"] == (48, 4)
    assert sizes_of(odd)["batch"] == (48, 6)


@pytest.mark.parametrize(
    "mesh, options",
    [
        ({"data": 2, "fsdp": 2}, {"precision": "bf16", "num_micro_batches": 2}),
        ({"data": 2, "tensor": 2}, {"shares": [3, 1]}),
        ({"data": 4}, {"combine": "adasum"}),
        ({"data": 2, "fsdp": 2}, {"offload": "optimizer", "remat": "full"}),
    ],
    ids=str,
)
def test_options_of_a_plan_run_as_they_are(
    mesh: dict[str, int], options: dict[str, Any]
) -> None:
    batch = shape(48, 24)
    plan = plan_of(dense_loss, DENSE, batch, mesh, **options)
    found, failures = run(plan, dense_loss, DENSE, batch)
    assert not failures
    assert all(one.is_right for one in found), found
    assert [one.precision for one in found] == list(
        dict.fromkeys(["f32", plan.precision])
    )


@pytest.mark.full
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_stages_keep_unlike_numbers_of_layers(precision: str) -> None:
    plan = plan_of(
        attention_loss,
        ATTENTION,
        TOKENS,
        {"stage": 4, "data": 2},
        num_micro_batches=4,
        precision=precision,
    )
    assert plan.stages is not None
    runs, failures = run(plan, attention_loss, ATTENTION, TOKENS)
    assert not failures
    for found in runs:
        assert found.is_right, found
        # Four stages with one and two layers each, as many in all as run.
        assert sizes_of(found).get("layers.k[0]", (6, 6))[1] == sum(
            reduced_mesh(plan, 2).stage_layers
        )


class Classifier(nn.Module):
    """All sizes of a Linen module are fixed by its code."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def classifier_loss(variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = Classifier().apply(variables, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


def test_linen_modules_run_at_other_sizes_than_their_code_has() -> None:
    init = functools.partial(Classifier().init, x=jnp.zeros((1, 16, 16, 3)))
    net = jax.eval_shape(init, jax.random.key(0))
    batch = {"x": shape(32, 16, 16, 3), "y": shape(32, dtype=jnp.int32)}
    plan = plan_of(classifier_loss, net, batch, {"data": 2, "tensor": 2})
    (found,), failures = run(plan, classifier_loss, net, batch)
    assert not failures
    assert found.is_right, found
    assert found.way == "program"


# What does not.


@pytest.mark.parametrize("part", ["gradient", "update"])
def test_a_wrong_executor_is_found_and_its_leaf_named(part: str) -> None:
    batch = shape(48, 24)
    plan = plan_of(dense_loss, DENSE, batch, {"data": 2, "tensor": 2})
    right: Any = runner.gradients_of if part == "gradient" else runner.update

    def wrong_gradients(*given: Any, **more: Any) -> Any:
        sums, rest = right(*given, **more)
        down, up = sums.gradients
        return dataclasses.replace(sums, gradients=(down, 2 * up)), rest

    def wrong_update(*given: Any, **more: Any) -> Any:
        (down, up), state = right(*given, **more)
        return [down, up * (1 + 1e-3)], state

    found: CheckRun
    if part == "gradient":
        with mock.patch.object(runner, "gradients_of", wrong_gradients):
            (found,), _ = run(plan, dense_loss, DENSE, batch)
        wrong = found.gradients
    else:
        with mock.patch.object(runner, "update", wrong_update):
            (found,), _ = run(plan, dense_loss, DENSE, batch)
        wrong = found.parameters
    assert not found.is_right
    assert found.worst.path == "up"
    assert max(wrong, key=lambda leaf: leaf.error).path == "up"
    assert "WRONG" in str(CheckResult(plan_hash="a", runs=(found,)))
    if part == "gradient":
        assert found.worst.error == pytest.approx(1.0, rel=1e-3)


def test_a_part_of_the_batch_left_out_is_found() -> None:
    """As it would be if a device computed with the samples of another."""
    batch = shape(48, 24)
    plan = plan_of(dense_loss, DENSE, batch, {"data": 4})
    right = runner.gradients_of

    def wrong(program: Any, params: Any, rest: Any, batch: Any, *more: Any) -> Any:
        first = batch[0].shape[0] // 4
        moved = [jnp.concatenate([x[:first], x[:-first]]) for x in batch]
        return right(program, params, rest, moved, *more)

    with mock.patch.object(runner, "gradients_of", wrong):
        (found,), _ = run(plan, dense_loss, DENSE, batch)
    assert not found.is_right
    assert found.loss_error > 1e-3


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_16_bits_hide_no_wrong_layout(precision: str) -> None:
    """An error that rounding to 16 bits would hide is seen in float32."""
    batch = shape(48, 24)
    plan = plan_of(
        dense_loss, DENSE, batch, {"data": 2, "tensor": 2}, precision=precision
    )
    right = runner.gradients_of

    def wrong(*given: Any, **more: Any) -> Any:
        sums, rest = right(*given, **more)
        scaled = tuple(g * 1.0005 for g in sums.gradients)
        return dataclasses.replace(sums, gradients=scaled), rest

    with mock.patch.object(runner, "gradients_of", wrong):
        (exact, narrow), _ = run(plan, dense_loss, DENSE, batch)
    assert (exact.precision, narrow.precision) == ("f32", precision)
    assert not exact.is_right
    assert narrow.is_right


# Sizes.


def planned_model(plan: wh.Plan, loss_fn: Any, net: Any, batch: Any) -> PlannedModel:
    adapter = adapt(net, loss_fn).without_values()
    return PlannedModel.of(adapter, batch, 0, plan.num_micro_batches, plan.precision)


def reduced(plan: wh.Plan, loss_fn: Any, net: Any, batch: Any) -> dict[str, int]:
    model = planned_model(plan, loss_fn, net, batch)
    dims = model.analysed.dims
    found = reduced_sizes(plan, model.analysed, reduced_mesh(plan, 2), 2)
    sizes = {role.name: role.size for role in dims.roles}
    return {**sizes, **{dims.roles[i].name: size for i, size in found.items()}}


def test_what_an_axis_does_not_divide_stays_so() -> None:
    net = {"up": shape(24, 40), "down": shape(40, 25)}

    def loss_fn(net: dict[str, Any], x: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(x @ net["up"]) @ net["down"]).mean()

    plan = plan_of(loss_fn, net, shape(64, 24), {"fsdp": 2, "tensor": 2})
    sizes = reduced(plan, loss_fn, net, shape(64, 24))
    assert sizes["down[1]"] % 2 == 1
    assert sizes["up[0]"] % 4 == 0


def test_targets_are_one_shorter_than_tokens_at_any_size() -> None:
    plan = plan_of(attention_loss, ATTENTION, TOKENS, {"context": 2, "tensor": 2})
    sizes = reduced(plan, attention_loss, ATTENTION, TOKENS)
    assert sizes["batch[1]"] == 9
    assert {size for name, size in sizes.items() if name.startswith("dim16")} == {8}


def test_a_large_mesh_keeps_two_devices_along_each_axis() -> None:
    mesh = {"data": 16, "fsdp": 4, "tensor": 8}
    batch = shape(4096, 2400)
    net = {"up": shape(2400, 4096), "down": shape(4096, 2400)}
    plan = plan_of(dense_loss, net, batch, mesh, num_micro_batches=8)
    found = reduced_mesh(plan, 2)
    assert dict(found.axes(plan.axes)) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found.num_devices == 8
    assert found.num_micro_batches == 2
    assert reduced_mesh(plan, 3).num_micro_batches == 3
    sizes = reduced(plan, dense_loss, net, batch)
    assert max(sizes.values()) <= 16


def test_ranks_with_unlike_shares_stay_unlike() -> None:
    batch = shape(320, 24)
    shares = [9, 1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]
    plan = plan_of(dense_loss, DENSE, shape(80 * 4, 24), {"data": 16}, shares=shares)
    assert plan.batch[0].shape == batch.shape
    found = reduced_mesh(plan, 2)
    assert found.shares == (2, 1) or len(set(found.shares)) == 2
    assert found.num_micro_batches == sum(found.shares)


def test_too_many_stages_are_refused_in_words() -> None:
    plan = plan_of(dense_loss, DENSE, shape(64, 24), {"data": 64})
    many = dataclasses.replace(
        plan,
        axes=tuple((axis, 2) for axis in ("data", "fsdp", "expert", "context"))
        + (("height", 2), ("width", 2)),
    )
    with pytest.raises(CheckError, match="the plan needs 64 virtual devices"):
        reduced_mesh(many, 2)


def test_an_equation_that_insists_on_a_size_keeps_it() -> None:
    def loss_fn(net: dict[str, Any], x: jax.Array) -> jax.Array:
        # Elements 5 to 16 of 37 have no counterpart among four.
        x = jnp.tanh(x @ net["up"])[:, 5:16].reshape(-1, 11)
        return jnp.square(x @ net["down"]).mean()

    net = {"up": shape(24, 37), "down": shape(11, 24)}
    plan = plan_of(loss_fn, net, shape(64, 24), {"data": 2})
    model = planned_model(plan, loss_fn, net, shape(64, 24))
    sizes = reduced_sizes(plan, model.analysed, reduced_mesh(plan, 2), 2)
    *_, found = reduced_model.reduced_models(model, sizes, 1, skips=True)
    assert found.way == "program"
    names = {model.analysed.dims.roles[role].name for role, _ in found.kept}
    assert names
    assert any(text for _, text in found.kept)
    (checked,), failures = run(plan, loss_fn, net, shape(64, 24))
    assert not failures and checked.is_right


def deep_loss(net: list[dict[str, Any]], x: jax.Array) -> jax.Array:
    """Layers of a Python loop, which end in values that are added up behind them."""
    sizes = []
    for layer in net:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        sizes.append(jnp.square(x).mean())
    return jnp.square(x - 1.0).mean() + sum(sizes) / 10


def test_three_layers_of_a_python_loop_run() -> None:
    net = [{"up": shape(24, 40), "down": shape(40, 24)} for _ in range(9)]
    plan = plan_of(deep_loss, net, shape(64, 24), {"data": 2, "tensor": 2})
    (found,), failures = run(plan, deep_loss, net, shape(64, 24))
    assert not failures
    assert found.is_right, found
    assert sizes_of(found)["layers"] == (9, 3)
    run_layers = {leaf.path.split(".")[0] for leaf in found.gradients if leaf.norm}
    assert run_layers == {"0", "1", "8"}


# Data.


def test_numbers_stay_below_what_is_looked_up() -> None:
    def loss_fn(table: Any, ids: Any, classes: Any, flags: Any) -> Any:
        one_hot = jax.nn.one_hot(classes, 7)
        rows = table[ids + 0]
        return (rows.sum(-1)[:, None] * one_hot * flags[:, None]).sum()

    ints = shape(5, dtype=jnp.int32)
    program = jax.make_jaxpr(loss_fn)(shape(11, 3), ints, ints, ints)
    assert index_bounds(program) == {1: 11, 2: 7}


def test_drawn_numbers_have_the_kinds_of_the_users_own() -> None:
    chance = np.random.default_rng(0)
    mask = np.array([[0.0, 1.0, 1.0]], np.float32)
    (drawn,) = batch_values([shape(50, 4)], [sample(mask)], {}, chance)
    assert set(np.unique(drawn)) == {0.0, 1.0}
    labels = np.array([3, 5, -100], np.int32)
    ints = shape(50, dtype=jnp.int32)
    (drawn,) = batch_values([ints], [sample(labels)], {0: 6}, chance)
    assert drawn.min() >= 0 and drawn.max() < 6
    (variance,) = weights([shape(50)], [None], chance, trained=False)
    assert variance.min() > 0
    assert sample(shape(3)) is None
    assert sample(np.zeros((64, 10**4))).size <= 2 * 10**4  # type: ignore[union-attr]


def test_errors_are_relative_to_the_true_norm_with_a_floor() -> None:
    big, none = np.array([1000.0]), np.array([0.0])
    (first, _), (second, _) = leaf_errors([big * 1.5, none + 1e-3], [big, none])
    assert first == pytest.approx(0.5)
    assert second == pytest.approx(1e-3 / (1e-3 * 1000 / np.sqrt(2)))
    ((broken, _),) = leaf_errors([np.array([np.nan])], [big])
    assert broken == float("inf")


def test_adasum_is_that_of_its_definition() -> None:
    chance = np.random.default_rng(0)
    for count in (2, 3, 4, 5):
        tensors = [chance.normal(size=(3, 4)) for _ in range(count)]
        np.testing.assert_allclose(adasum(tensors), adasum_oracle(tensors), rtol=1e-12)


# The other process, and what users call.


def test_a_plan_is_checked_in_another_process(tmp_path: Path) -> None:
    batch = shape(64, 24)
    plan = plan_of(dense_loss, DENSE, batch, {"data": 2, "tensor": 2})
    plan.save(tmp_path / "plan.json")
    loaded = wh.Plan.load(tmp_path / "plan.json")
    found = wh.check(
        loaded, dense_loss, DENSE, batch, optimizer=optax.adam(0.01), odd=False
    )
    assert found.is_right
    (one,) = found.runs
    assert one.num_devices == 4
    assert "equals one device" in str(found)
    assert "up[1] 40 → " in str(found) or "down[0] 40 → " in str(found)
    document = json.loads(json.dumps(found.document()))
    assert document["is_right"] and document["worst_error"] <= one.limit
    assert (
        CheckRun.from_data(
            {
                k: v
                for k, v in document["runs"][0].items()
                if k not in ("is_right", "worst_error", "worst_path")
            }
        )
        == one
    )


def test_what_cannot_be_compared_is_an_error() -> None:
    def loss_fn(net: dict[str, Any], x: jax.Array) -> jax.Array:
        return jnp.log(-jnp.abs(x @ net["up"])).mean()

    net = {"up": shape(24, 40)}
    plan = plan_of(loss_fn, net, shape(64, 24), {"data": 2})
    runs, failures = run(plan, loss_fn, net, shape(64, 24))
    assert not runs
    assert "the loss is nan on one device too" in failures[0]
    answer = mock.Mock(data={"runs": [], "failures": failures})
    with (
        mock.patch.object(check_plan, "run", return_value=answer),
        pytest.raises(
            CheckError, match="the plan was not checked: even extents in f32: .*nan"
        ),
    ):
        wh.check(plan, loss_fn, net, shape(64, 24))


def test_memory_is_looked_at_before_it_is_taken() -> None:
    plan = plan_of(dense_loss, DENSE, shape(64, 24), {"data": 2})
    request = check_plan.check_request(
        plan,
        adapt(DENSE, dense_loss),
        shape(64, 24),
        optimizer=None,
        batch_axes=0,
        multiples=(2,),
        seed=0,
        limit_bytes=1000,
    )
    runs, failures = run_checks.run_checks(request)
    assert not runs
    assert "GB on 2 virtual devices; the limit is" in failures[0]
    assert "memory_bytes=" in failures[0]


def slow_loss(net: dict[str, Any], x: jax.Array) -> jax.Array:
    time.sleep(600)
    return dense_loss(net, x)


def test_a_check_that_takes_too_long_is_ended() -> None:
    plan = plan_of(dense_loss, DENSE, shape(64, 24), {"data": 2})
    message = r"reduced sizes did not end in 8 s.*timeout_seconds= \(--timeout\) gives"
    with pytest.raises(wh.WhaleError, match=message):
        wh.check(plan, slow_loss, DENSE, shape(64, 24), timeout_seconds=8)


def test_rounding_is_told_from_errors_in_float64() -> None:
    """What float32 finds beyond its limit is run again; what float64 finds counts."""
    plan = plan_of(dense_loss, DENSE, shape(64, 24), {"data": 2})
    right = CheckRun(
        extents="even",
        precision="f32",
        loss=1.0,
        true_loss=1.0,
        loss_error=0.0,
        gradients=(LeafError(path="up", error=0.0, norm=1.0),),
        parameters=(LeafError(path="up", error=0.0, norm=1.0),),
        limit=1e-6,
        parameter_limit=1e-6,
        noise=0.0,
    )
    off = dataclasses.replace(
        right, gradients=(LeafError(path="up", error=1e-3, norm=1.0),)
    )
    asked: list[bool] = []

    def answers(again: CheckRun) -> CheckResult:
        def answer(request: Any, **options: Any) -> Any:
            asked.append(request.wide)
            found = again if request.wide else off
            return mock.Mock(data={"runs": [dataclasses.asdict(found)], "failures": []})

        with mock.patch.object(check_plan, "run", answer):
            return wh.check(plan, dense_loss, DENSE, shape(64, 24), odd=False)

    assert answers(right).is_right
    assert not answers(off).is_right
    assert asked == [False, True, False, True]


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"plan": 3}, "plan is 3; expected the result of wh.plan"),
        ({"batch": shape(32, 24)}, "the plan is for one array"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0; expected a number of seconds"),
        ({"odd": 1}, "odd is 1; expected True or False"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"model": {"up": shape(24, 41), "down": shape(41, 24)}}, "up: the plan has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_said(changes: dict[str, Any], text: str) -> None:
    given = {
        "plan": plan_of(dense_loss, DENSE, shape(64, 24), {"data": 2}),
        "loss_fn": dense_loss,
        "model": DENSE,
        "batch": shape(64, 24),
        **changes,
    }
    with pytest.raises(wh.WhaleError, match=text):
        wh.check(**given)


def test_a_plan_for_another_loss_is_refused() -> None:
    plan = plan_of(dense_loss, DENSE, shape(24, 24), {"data": 2})

    def other(net: dict[str, Any], x: jax.Array) -> jax.Array:
        return dense_loss(net, x) + jnp.square(x @ net["up"]).mean()

    with pytest.raises(wh.PlanError, match="made for another model or batch"):
        run(plan, other, DENSE, shape(24, 24))


def test_estimates_have_no_program() -> None:
    plan = plan_of(dense_loss, DENSE, shape(64, 24), {"data": 2})
    with pytest.raises(wh.PlanError, match="this plan is an estimate"):
        wh.check(
            dataclasses.replace(plan, runnable=False), dense_loss, DENSE, shape(64, 24)
        )


# The command line.


def result(*, error: float) -> CheckResult:
    leaf = LeafError(path="layer_0.w", error=error, norm=1.0)
    one = CheckRun(
        extents="even",
        way="code",
        axes=(("data", 2),),
        num_devices=2,
        loss=1.0,
        true_loss=1.0,
        loss_error=0.0,
        gradients=(leaf,),
        parameters=(leaf,),
        limit=1e-5,
        parameter_limit=1e-5,
        noise=1e-7,
    )
    return CheckResult(plan_hash="abc", runs=(one,), unchecked=("odd extents: none",))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    words = ["plan", "mlp-test", "--cluster", "cpu:4", "--mesh", "data=4", "--quiet"]
    assert main([*words, "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("error, status", [(1e-7, 0), (0.5, 1)])
def test_check_command(
    plan_file: Path, capsys: pytest.CaptureFixture[str], error: float, status: int
) -> None:
    capsys.readouterr()
    found = result(error=error)
    with mock.patch.object(plan_check, "check_plan", return_value=found) as called:
        assert main(["check", str(plan_file), "--even", "--quiet"]) == status
        assert called.call_args.kwargs["odd"] is False
        text = capsys.readouterr().out
        assert ("DIFFERS FROM ONE DEVICE" in text) == bool(status)
        assert "gradient layer_0.w" in text
        assert "not checked: odd extents: none" in text
        assert main(["check", str(plan_file), "--json", "--quiet"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["is_right"] == (not status)
    assert document["worst_path"] == "layer_0.w"


@pytest.mark.full
def test_check_command_of_a_reference_model(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["check", str(plan_file), "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["is_right"] and len(document["runs"]) == 2


def test_a_plan_file_does_not_choose_the_code_that_is_checked(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = wh.Plan.load(plan_file)
    dataclasses.replace(plan, source=("/tmp/other.py:job",)).save(tmp_path / "b.json")
    assert main(["check", str(tmp_path / "b.json"), "--quiet"]) == 2
    assert "does not run only because a plan file" in capsys.readouterr().err


@pytest.mark.parametrize("error", [1e-7, 0.5])
def test_training_checks_first_and_ends_where_something_differs(
    capsys: pytest.CaptureFixture[str], error: float
) -> None:
    words = ["train", "mlp-test", "--steps", "1", "--cluster", "cpu:8", "--json"]
    with mock.patch.object(
        plan_check, "check_adapted", return_value=result(error=error)
    ):
        status = main([*words, "--check"])
    captured = capsys.readouterr()
    if error > 1e-5:
        assert status == 2
        assert "Nothing was trained" in captured.err
    else:
        assert status == 0
        assert json.loads(captured.out.splitlines()[-1])["checked_error"] == error


def test_training_goes_on_where_there_is_no_time_to_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "mlp-test", "--steps", "1", "--cluster", "cpu:8", "--json"]
    late = wh.WhaleError("checking the plan did not end in 60 s")
    with mock.patch.object(plan_check, "check_adapted", side_effect=late):
        assert main([*words, "--check", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert "--check: checking the plan did not end in 60 s" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["checked_error"] is None


def test_elastic_runs_are_not_checked_by_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--processes", "2", "--save", str(tmp_path / "a"), "--check"]
    assert main(["train", "mlp-test", *words]) == 2
    assert "--check was given with --processes" in capsys.readouterr().err


# Reference models.

SPATIAL = ("unet3d-test", "cosmoflow-test")
REFERENCE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mlp-test", {"data": 2, "tensor": 2}, {}),
    ("gpt-test", {"fsdp": 2, "tensor": 2}, {}),
    ("llama-test", {"context": 2, "fsdp": 2}, {"attention": "ring"}),
    ("moe-test", {"data": 2, "expert": 2}, {}),
    ("unet3d-test", {"depth": 2, "height": 2}, {}),
    ("t5-test", {"data": 2, "tensor": 2}, {}),
    ("bert-test", {"fsdp": 2, "tensor": 2}, {}),
    ("gnmt-test", {"data": 2, "tensor": 2}, {}),
    ("vgg-test", {"data": 2, "fsdp": 2}, {}),
    ("resnet-test", {"data": 2, "fsdp": 2}, {}),
    ("cosmoflow-test", {"data": 2, "width": 2}, {}),
    ("m6-test", {"data": 2, "tensor": 2}, {}),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "name, mesh, options", REFERENCE, ids=[r[0] for r in REFERENCE]
)
def test_reference_models(
    name: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    marks = {} if name in ("llama-test", *SPATIAL) else {"annotated": False}
    job = models.job(name, **marks)
    model, batch = abstract_model(job), job.batch_at(0)
    plan = plan_of(job.loss_fn, model, batch, mesh, optimizer=job.optimizer, **options)
    (found,), failures = run(plan, job.loss_fn, model, batch, optimizer=job.optimizer)
    assert not failures
    assert found.is_right, found


def test_layers_of_adasum_are_found_however_a_loss_takes_them() -> None:
    def loss(p: Any, x: Any) -> Any:
        for place in range(3):
            x = jnp.tanh(x @ p["layers"][..., place])
        return (x**2).mean()

    params = {"layers": jax.random.normal(jax.random.key(0), (8, 8, 3)) / 3}
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    options: dict[str, Any] = {"mesh": {"data": 4}, "combine": "adasum"}
    tx = optax.sgd(0.1)
    plan = wh.plan(loss, params, x, optimizer=tx, cluster="cpu:4", **options)
    assert wh.check(plan, loss, params, x, optimizer=tx, odd=False).is_right
