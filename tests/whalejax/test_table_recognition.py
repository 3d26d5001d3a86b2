"""Which parameters are found to be tables, and what a loss is cut into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import whalejax as wh
from whalejax.adapters.base import adapt
from whalejax.models import dlrm
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.recognize import NO_ID, TableProgram, check_divisible


NET = {
    "table": jnp.asarray(np.random.default_rng(0).standard_normal((7, 4)), jnp.float32),
    "w": jnp.ones((4, 3)),
}
BATCH = {
    "ids": np.arange(6, dtype=np.int32),
    "bags": np.arange(12, dtype=np.int32).reshape(6, 2) % 7,
    "mask": np.arange(12).reshape(6, 2) % 3 > 0,
    "weights": np.arange(12, dtype=np.float32).reshape(6, 2),
}


def cut(loss: Callable[..., Any], net: Any = NET, batch: Any = BATCH) -> TableProgram:
    return cut_program(adapt(net, loss).without_values(), batch)


def check_same(loss: Callable[..., Any], net: Any = NET, batch: Any = BATCH) -> Any:
    """The cut program computes the loss, from vectors that NumPy looked up."""
    adapter = adapt(net, loss)
    program = cut_program(adapter.without_values(), batch)
    leaves = [np.asarray(x) for x in jax.tree.leaves(adapter.params)]
    vectors = []
    for one, ids in zip(
        program.lookups, program.ids(jax.tree.leaves(batch)), strict=True
    ):
        ids = np.asarray(ids)
        rows = leaves[one.param][np.maximum(ids, 0)]
        rows = np.where((ids == NO_ID)[..., None], 0, rows)
        found = rows.sum(1) if one.pooled else rows
        vectors.append(jnp.asarray(found.reshape(one.vectors_shape)))
    dense = [x for n, x in enumerate(leaves) if n not in program.tables]
    rest = jax.tree.leaves(adapter.rest)
    outputs = program.loss(dense, [*rest, *jax.tree.leaves(batch)], vectors)
    expected = loss(net, batch)
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-6)
    return program


def take(net: Any, batch: Any) -> jax.Array:
    return (jnp.take(net["table"], batch["ids"], axis=0) @ net["w"]).mean()


def index(net: Any, batch: Any) -> jax.Array:
    return (net["table"][batch["ids"] - 3] @ net["w"]).mean()


def bag(net: Any, batch: Any) -> jax.Array:
    return jnp.tanh(net["table"][batch["bags"]].sum(1) @ net["w"]).mean()


def mean_bag(net: Any, batch: Any) -> jax.Array:
    return jnp.tanh(net["table"][batch["bags"]].mean(1) @ net["w"]).mean()


def masked(net: Any, batch: Any) -> jax.Array:
    rows = jnp.where(batch["mask"][..., None], net["table"][batch["bags"]], 0)
    return jnp.tanh(rows.sum(1) @ net["w"]).mean()


def masked_out(net: Any, batch: Any) -> jax.Array:
    rows = jnp.where(batch["mask"][..., None], 0, net["table"][batch["bags"]])
    return jnp.tanh(rows.sum(1) @ net["w"]).mean()


def multiplied(net: Any, batch: Any) -> jax.Array:
    kept = batch["mask"][..., None].astype(jnp.float32)
    return jnp.tanh((net["table"][batch["bags"]] * kept).sum(1) @ net["w"]).mean()


def multiplied_late(net: Any, batch: Any) -> jax.Array:
    rows = net["table"][batch["bags"]]
    kept = jnp.broadcast_to(batch["mask"][..., None], rows.shape)
    return jnp.tanh((kept.astype(jnp.float32) * rows).sum(1) @ net["w"]).mean()


@pytest.mark.parametrize(
    ("loss", "pooled", "masks"),
    [
        (take, False, 0),
        (index, False, 0),
        (bag, True, 0),
        (mean_bag, True, 0),
        (masked, True, 1),
        (masked_out, True, 1),
        (multiplied, True, 1),
        (multiplied_late, True, 1),
    ],
)
def test_lookups_are_found(loss: Any, pooled: bool, masks: int) -> None:
    program = check_same(loss)
    (lookup,) = program.lookups
    assert (lookup.pooled, len(lookup.masks)) == (pooled, masks)
    assert lookup.param == 0 and not program.refused


def weighted(net: Any, batch: Any) -> jax.Array:
    rows = net["table"][batch["bags"]] * batch["weights"][..., None]
    return jnp.tanh(rows.sum(1) @ net["w"]).mean()


def other_fill(net: Any, batch: Any) -> jax.Array:
    rows = jnp.where(batch["mask"][..., None], net["table"][batch["bags"]], 1)
    return jnp.tanh(rows.sum(1) @ net["w"]).mean()


def by_column(net: Any, batch: Any) -> jax.Array:
    mask = (batch["ids"][:, None, None] + jnp.arange(4)[None, None]) % 2 > 0
    rows = net["table"][batch["bags"]] * mask.astype(jnp.float32)
    return jnp.tanh(rows.sum(1) @ net["w"]).mean()


def over_all(net: Any, batch: Any) -> jax.Array:
    return jnp.tanh(net["table"][batch["bags"]].sum((0, 1)) @ net["w"]).mean()


def read_twice(net: Any, batch: Any) -> jax.Array:
    rows = net["table"][batch["bags"]]
    return (rows.sum(1) * rows.max(1)).mean() + net["w"].sum()


def segments(net: Any, batch: Any) -> jax.Array:
    rows = net["table"][batch["bags"].reshape(-1)]
    sums = jax.ops.segment_sum(rows, batch["bags"][:, 0].repeat(2), num_segments=7)
    return jnp.tanh(sums @ net["w"]).mean()


@pytest.mark.parametrize(
    "loss", [weighted, other_fill, by_column, over_all, read_twice, segments]
)
def test_what_is_no_plain_sum_of_rows_is_not_pooled(loss: Any) -> None:
    (lookup,) = check_same(loss).lookups
    assert not lookup.pooled and not lookup.masks


def tied(net: Any, batch: Any) -> jax.Array:
    return (net["table"][batch["ids"]] @ net["table"].T).mean() + net["w"].sum()


def learnt_ids(net: Any, batch: Any) -> jax.Array:
    scores = net["w"][:, 0] @ batch["weights"].sum(1).reshape(1, 6).repeat(4, 0)
    return net["table"][jnp.argsort(scores)].mean()


def columns(net: Any, batch: Any) -> jax.Array:
    return (net["table"][:, batch["ids"] % 4]).mean() + net["w"].sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (tied, "table is also read by transpose, which needs all of it"),
        (learnt_ids, "table is looked up by ids that do not depend on the batch"),
        (columns, "table is not looked up by full rows along its first dimension"),
    ],
)
def test_what_is_no_table_says_why(loss: Any, reason: str) -> None:
    program = cut(loss)
    assert not program.lookups
    assert program.refused[0].startswith(reason)


def test_a_module_and_its_tables() -> None:
    config = dlrm.SIZES["test"]
    model, batch = dlrm.DLRM(config, rngs=nnx.Rngs(0)), config.data.batch(3, 8)
    program = check_same(dlrm.loss_fn, model, batch)
    assert all(one.pooled for one in program.lookups)
    assert [one.feature for one in program.lookups] == ["c0", "c1", "c2", "c3", "c4"]


def test_wide_ids_stay_out_of_range() -> None:
    with jax.enable_x64(True):
        net = {"table": jnp.ones((7, 4)), "w": jnp.ones((4, 3))}
        program = cut(take, net, {**BATCH, "ids": BATCH["ids"].astype(np.int64)})
        batch = {**BATCH, "ids": np.array([2**40, -(2**40), 1, 2, 3, 4])}
        (ids,) = program.ids(jax.tree.leaves(batch))
    assert ids[0, 0] == 2**31 - 1 and ids[1, 0] < 0 and ids[1, 0] != NO_ID


def test_ids_that_devices_do_not_divide_are_refused() -> None:
    with pytest.raises(wh.WhaleError, match="is not divisible by .*: ids has 6"):
        check_divisible(cut(take).lookups, 4)
