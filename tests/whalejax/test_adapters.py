"""NNX, Linen and pytrees behind one shape: parts, losses, keys, choice, metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

import whalejax as wh
from tests.whalejax.capture_zoo import LinenNet, linen_loss, linen_variables
from whalejax.adapters.base import adapt, dotted
from whalejax.capture.precision import at_precision


pytestmark = pytest.mark.relaxed_promotion


class Net(nnx.Module):
    """Tied kernels, statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.first
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drop(self.norm(self.first(x)))
        return self.layers[0](self.tied(x))


def net_loss(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def sample(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(8, 4)), jnp.float32)


def same(a: Any, b: Any) -> None:
    """Equal structure and numbers; keys by their data."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


# NNX.


def test_an_nnx_module_in_two_parts() -> None:
    adapter = adapt(Net(nnx.Rngs(0)), net_loss)
    assert adapter.kind == "nnx" and not adapter.takes_rng
    assert adapter.param_paths == (
        "first.bias",
        "first.kernel",
        "layers.0.kernel",
        "norm.bias",
        "norm.scale",
    )
    assert adapter.rest_paths == (
        "drop.rngs.count",
        "drop.rngs.key",
        "norm.mean",
        "norm.var",
    )


def test_an_nnx_loss_gives_the_users_numbers_and_leaves_the_module_alone() -> None:
    model = Net(nnx.Rngs(0))
    adapter = adapt(model, net_loss)
    before = jax.tree.map(lambda leaf: leaf, adapter.rest)
    result = jax.jit(
        lambda p, r, x: (lambda out: (out.total, out.weight, out.rest))(
            adapter.loss(p, r, x)
        )
    )(adapter.params, adapter.rest, sample())
    same(adapt(model, net_loss).rest, before)
    expected = net_loss(model, sample())  # now the module itself has moved on
    np.testing.assert_allclose(result[0], expected, rtol=1e-6)
    assert float(result[1]) == 1.0
    moved = adapt(model, net_loss).rest
    np.testing.assert_allclose(
        result[2]["norm"]["mean"], moved["norm"]["mean"], rtol=1e-5
    )
    assert int(result[2]["drop"]["rngs"]["count"]) == 1


def test_an_nnx_gradient_is_the_users() -> None:
    adapter = adapt(Net(nnx.Rngs(0)), net_loss)
    ours = jax.grad(lambda p: adapter.loss(p, adapter.rest, sample()).total)(
        adapter.params
    )
    theirs = nnx.grad(net_loss)(Net(nnx.Rngs(0)), sample())
    for path, variable in nnx.to_flat_state(theirs):
        leaf = ours
        for part in path:
            leaf = leaf[part]
        np.testing.assert_allclose(leaf, variable.get_value(), rtol=1e-5, atol=1e-7)


def test_rebuilding_gives_the_users_module() -> None:
    model = Net(nnx.Rngs(0))
    adapter = adapt(model, net_loss)
    built = adapter.rebuild(
        jax.tree.map(lambda leaf: leaf * 2, adapter.params), adapter.rest
    )
    assert type(built) is Net and built.tied is built.first
    np.testing.assert_array_equal(
        built.first.kernel[...], 2 * np.asarray(model.first.kernel[...])
    )


def test_an_abstract_module_serves_as_well() -> None:
    real = adapt(Net(nnx.Rngs(0)), net_loss)
    abstract = adapt(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), net_loss)
    assert abstract.param_paths == real.param_paths
    assert jax.tree.structure(abstract.rest) == jax.tree.structure(real.rest)
    params, rest = abstract.take_apart(Net(nnx.Rngs(0)))
    same((params, rest), (real.params, real.rest))
    np.testing.assert_allclose(
        abstract.loss(params, rest, sample()).total,
        real.loss(real.params, real.rest, sample()).total,
    )


def test_an_nnx_model_is_made_inside_jit() -> None:
    adapter = adapt(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), net_loss)
    made = jax.jit(lambda key: adapter.take_apart(Net(nnx.Rngs(key))))(
        jax.random.key(0)
    )
    assert jax.tree.structure(made[0]) == jax.tree.structure(adapter.params)


def test_a_container_of_modules_is_nnx() -> None:
    pair = {"a": nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "b": Net(nnx.Rngs(1))}
    adapter = adapt(pair, lambda m, x: jnp.mean(m["b"](m["a"](x))))
    assert adapter.kind == "nnx" and "a.kernel" in adapter.param_paths
    assert isinstance(adapter.rebuild(adapter.params, adapter.rest)["b"], Net)


def test_variables_that_a_call_adds_are_not_kept() -> None:
    class Adding(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.linear(x)
            self.seen = nnx.Intermediate(x)
            return x

    adapter = adapt(Adding(nnx.Rngs(0)), net_loss)
    result = adapter.loss(adapter.params, adapter.rest, sample())
    assert jax.tree.leaves(result.rest) == []


def test_state_that_changes_its_form_is_refused() -> None:
    def loss(model: Net, x: jax.Array) -> jax.Array:
        loss_value = net_loss(model, x)
        model.norm.mean.set_value(jnp.zeros((4,), jnp.bfloat16))
        model.norm.var.set_value(jnp.zeros((2, 2)))
        return loss_value

    adapter = adapt(Net(nnx.Rngs(0)), loss)
    with pytest.raises(wh.WhaleError) as caught:
        adapter.loss(adapter.params, adapter.rest, sample())
    text = str(caught.value)
    assert "1. state norm.mean changed from float32[4] to bfloat16[4]; a model" in text
    assert "2. state norm.var changed from float32[4] to float32[2, 2]; a model" in text


def test_taking_apart_another_model_is_refused() -> None:
    adapter = adapt(Net(nnx.Rngs(0)), net_loss)
    other = Net(nnx.Rngs(0))
    other.first = other.tied = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    with pytest.raises(wh.WhaleError) as caught:
        adapter.take_apart(other)
    text = str(caught.value)
    assert "the plan's: first.bias changed from float32[4] to float32[6]" in text
    assert "(2 leaves differ). Build the model that the plan was made for" in text
    other = Net(nnx.Rngs(0))
    other.layers = nnx.List([*other.layers, nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
    with pytest.raises(wh.WhaleError, match=r"plan's: layers\.1\.bias is new"):
        adapter.take_apart(other)


# Linen.


def real_linen() -> Any:
    """Initialised variables with their metadata boxes."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return LinenNet().init(keys, jnp.zeros((2, 10, 5)))


def linen_sample() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    return {
        "x": jnp.asarray(draw.normal(size=(4, 10, 5)), jnp.float32),
        "y": jnp.asarray(draw.normal(size=(4, 10, 50)), jnp.float32),
    }


def test_linen_variables_in_two_parts() -> None:
    adapter = adapt(real_linen(), linen_loss)
    assert adapter.kind == "linen" and adapter.takes_rng
    assert "Dense_0.kernel" in adapter.param_paths
    assert adapter.rest_paths == (
        "batch_stats.BatchNorm_0.mean",
        "batch_stats.BatchNorm_0.var",
    )


def test_a_linen_loss_gives_the_users_numbers_and_statistics() -> None:
    variables, key = real_linen(), jax.random.key(7)
    adapter = adapt(variables, linen_loss)
    result = adapter.loss(adapter.params, adapter.rest, linen_sample(), key)
    expected, aux = linen_loss(variables, linen_sample(), key)
    np.testing.assert_allclose(result.total, expected, rtol=1e-6)
    np.testing.assert_allclose(
        result.rest["batch_stats"]["BatchNorm_0"]["mean"],
        aux.variables["batch_stats"]["BatchNorm_0"]["mean"],
        rtol=1e-6,
    )
    assert set(result.metrics) == {"largest"}


def test_boxes_are_off_for_the_loss_and_back_on_for_the_user() -> None:
    seen: list[Any] = []

    def loss(variables: Any, batch: Any) -> Any:
        seen.append(variables["params"]["Dense_0"]["kernel"])
        return jnp.mean(variables["params"]["Dense_0"]["kernel"])

    adapter = adapt(real_linen(), loss)
    adapter.loss(adapter.params, adapter.rest, None)
    assert isinstance(seen[0], jax.Array)
    built = adapter.rebuild(adapter.params, adapter.rest)
    assert isinstance(built["params"]["Dense_0"]["kernel"], nn.Partitioned)
    same(built, real_linen())
    same(adapter.take_apart(built), (adapter.params, adapter.rest))


def test_frozen_dictionaries_stay_frozen() -> None:
    frozen = FrozenDict(nn.unbox(real_linen()))
    adapter = adapt(frozen, linen_loss)
    key = jax.random.key(0)
    result = adapter.loss(adapter.params, adapter.rest, linen_sample(), key)
    assert jax.tree.structure(result.rest) == jax.tree.structure(adapter.rest)
    assert isinstance(adapter.rebuild(adapter.params, adapter.rest), FrozenDict)


def test_collections_that_the_model_does_not_hold_are_refused() -> None:
    def loss(variables: Any, batch: Any) -> Any:
        loss = jnp.mean(variables["params"]["Dense_0"]["kernel"])
        return loss, wh.Aux(variables={"batch_stat": {}, "intermediates": {}})

    adapter = adapt(real_linen(), loss)
    with pytest.raises(wh.WhaleError) as caught:
        adapter.loss(adapter.params, adapter.rest, None)
    assert str(caught.value) == (
        "loss_fn returned Aux(variables=...) with the collections ['batch_stat']; the "
        "model has ['batch_stats']. Return only those that the model holds."
    )


def test_the_linen_module_itself_is_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        adapt(LinenNet(), linen_loss)
    assert "model is the Linen module LinenNet itself; expected its" in str(
        caught.value
    )


# Pytrees.


def test_all_floating_point_leaves_of_a_pytree_are_trained() -> None:
    tree = {
        "w": [jnp.ones((2, 3)), jnp.ones(3)],
        "key": jax.random.key(0),
        "ids": jnp.arange(3),
        "steps": 4,
    }
    adapter = adapt(tree, lambda t, x: jnp.mean(x @ t["w"][0] + t["w"][1]))
    assert adapter.kind == "pytree"
    assert adapter.param_paths == ("w.0", "w.1")
    assert adapter.rest_paths == ("ids", "key", "steps")
    built = adapter.rebuild(adapter.params, adapter.rest)
    assert built["w"][0] is tree["w"][0] and built["steps"] == 4
    assert jax.tree.structure(built) == jax.tree.structure(tree)


def test_the_trained_part_of_a_pytree_keeps_the_users_structure() -> None:
    tree = {"a": jnp.ones(2), "b": (jnp.ones(3), jnp.ones(4))}
    adapter = adapt(tree, lambda t, x: jnp.mean(t["a"]))
    assert jax.tree.structure(adapter.params) == jax.tree.structure(tree)


def test_a_single_array_is_a_model() -> None:
    adapter = adapt(jnp.ones(3), lambda w, x: jnp.mean(w * x))
    assert adapter.param_paths == ("value",)


def test_taking_apart_another_tree_is_refused() -> None:
    adapter = adapt({"a": jnp.ones(2), "b": [jnp.ones(3)]}, two)
    with pytest.raises(wh.WhaleError) as caught:
        adapter.take_apart({"a": jnp.ones(2), "c": jnp.ones(3)})
    assert str(caught.value) == (
        "the model that was built differs from the plan's: b.0 is gone (2 leaves "
        "differ). Build the model that the plan was made for, or plan again for this "
        "one."
    )
    with pytest.raises(wh.WhaleError, match="containers of other types"):
        adapter.take_apart({"a": jnp.ones(2), "b": (jnp.ones(3),)})


def test_updated_variables_of_a_pytree_are_refused() -> None:
    adapter = adapt(
        {"w": jnp.ones(3)},
        lambda t, x: (jnp.mean(t["w"]), wh.Aux(variables={"stats": 1})),
    )
    with pytest.raises(wh.WhaleError, match="is a plain pytree without collections"):
        adapter.loss(adapter.params, adapter.rest, None)


def test_leaves_that_are_no_arrays_are_listed() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        adapt({"w": jnp.ones(3), "name": "net", "act": jnp.tanh}, lambda m, b: 1.0)
    text = str(caught.value)
    assert text.startswith("model: 2 problems\n  1. act is a ")
    assert "2. name is a str; expected an array, a number or a jax.Shape" in text


def test_functions_in_equinox_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "equinox", object())
    with pytest.raises(wh.WhaleError) as caught:
        adapt({"w": jnp.ones(3), "act": len}, lambda m, b: 1.0)
    assert str(caught.value) == (
        "model: 1 problem\n  1. act is a builtin_function_or_method; expected an "
        "array, a number or a jax.ShapeDtypeStruct. Keep what is no array out of the "
        "model: params, static = eqx.partition(model, eqx.is_array); plan params, and "
        "call eqx.combine(params, static) in the loss."
    )


# The loss function's signature.


def three(model: Any, batch: Any, noise: Any) -> Any: ...
def two(model: Any, batch: Any) -> Any: ...
def named(model: Any, batch: Any, rng: Any = None) -> Any: ...
def optional(model: Any, batch: Any, scale: float = 1.0) -> Any: ...
def open_ended(*args: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "takes_rng"),
    [
        (three, True),
        (two, False),
        (named, True),
        (optional, False),
        (open_ended, False),
    ],
)
def test_a_third_argument_is_the_key(function: Any, takes_rng: bool) -> None:
    assert adapt({"w": jnp.ones(3)}, function).takes_rng is takes_rng


def one(model: Any) -> Any: ...
def four(model: Any, batch: Any, rng: Any, extra: Any) -> Any: ...
def keyword(model: Any, batch: Any, *, scale: Any) -> Any: ...


@pytest.mark.parametrize("function", [one, four, keyword])
def test_other_signatures_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        adapt({"w": jnp.ones(3)}, function)
    text = str(caught.value)
    assert "1. loss_fn takes (model" in text
    assert "expected loss_fn(model, batch) or loss_fn(model, batch, rng)" in text


# Keys.


def test_folding_gives_every_micro_batch_other_masks() -> None:
    adapter = adapt(Net(nnx.Rngs(0)), net_loss)

    def loss(number: int) -> float:
        rest = adapter.fold_rest(adapter.rest, number)
        return float(adapter.loss(adapter.params, rest, sample()).total)

    assert loss(0) != loss(1) != loss(2)
    assert loss(1) == loss(1)


def test_folding_reaches_stacked_keys_and_leaves_the_rest_alone() -> None:
    tree = {
        "w": jnp.ones(2),
        "one": jax.random.key(0),
        "many": jax.random.split(jax.random.key(1), (2, 3)),
        "n": 3,
    }
    adapter = adapt(tree, lambda t, x: jnp.mean(t["w"]))
    folded = adapter.fold_rest(adapter.rest, jnp.int32(5))
    expected = jax.random.fold_in(tree["many"][1, 2], 5)
    np.testing.assert_array_equal(
        jax.random.key_data(folded["many"][1, 2]), jax.random.key_data(expected)
    )
    assert folded["n"] == 3
    restored = adapter.restore_keys(folded, adapter.rest)
    same(restored["many"], tree["many"])
    same(restored["one"], tree["one"])


# What is trained.


@pytest.mark.parametrize(
    ("trainable", "paths"),
    [
        ("first.*", ("first.bias", "first.kernel")),
        (["*.kernel"], ("first.kernel", "layers.0.kernel")),
        (lambda path: path.endswith("scale"), ("norm.scale",)),
        (nnx.BatchStat, ("norm.mean", "norm.var")),
        (nnx.All(nnx.Param, nnx.PathContains("norm")), ("norm.bias", "norm.scale")),
        ((nnx.PathContains("layers"),), ("layers.0.kernel",)),
    ],
)
def test_what_an_nnx_module_trains(trainable: Any, paths: tuple[str, ...]) -> None:
    adapter = adapt(Net(nnx.Rngs(0)), net_loss, trainable=trainable)
    assert adapter.param_paths == paths
    assert len(adapter.param_paths + adapter.rest_paths) == 9
    total = adapter.loss(adapter.params, adapter.rest, sample()).total
    np.testing.assert_allclose(total, net_loss(Net(nnx.Rngs(0)), sample()), rtol=1e-6)


def test_what_linen_and_pytrees_train() -> None:
    linen = adapt(real_linen(), linen_loss, trainable="Dense_*")
    assert linen.param_paths == (
        "Dense_0.bias",
        "Dense_0.kernel",
        "Dense_1.bias",
        "Dense_1.kernel",
    )
    assert "params.BatchNorm_0.scale" in linen.rest_paths
    same(linen.rebuild(linen.params, linen.rest), real_linen())
    key = jax.random.key(0)
    result = linen.loss(linen.params, linen.rest, linen_sample(), key)
    whole, _ = linen_loss(real_linen(), linen_sample(), key)
    np.testing.assert_allclose(result.total, whole, rtol=1e-6)
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    assert adapt(tree, two, trainable=["b"]).param_paths == ("b",)


def test_bfloat16_computes_with_narrow_frozen_weights_and_keeps_them() -> None:
    tree = {"a": jnp.full((4, 4), 1.001), "b": jnp.ones((4, 4))}
    seen = []

    def loss(net: Any, x: Any) -> Any:
        seen.append((net["a"].dtype, net["b"].dtype))
        return jnp.mean(x @ net["a"] @ net["b"])

    adapter = at_precision(adapt(tree, loss, trainable="b"), "bf16")
    result = adapter.loss(adapter.params, adapter.rest, sample())
    assert seen == [(jnp.bfloat16, jnp.bfloat16)]
    same(result.rest, adapter.rest)

    net = at_precision(adapt(Net(nnx.Rngs(0)), net_loss, trainable="layers.*"), "bf16")
    after = net.loss(net.params, net.rest, sample()).rest
    same(after["first"], net.rest["first"])
    assert after["norm"]["mean"].dtype == jnp.float32
    assert not np.array_equal(after["norm"]["mean"], net.rest["norm"]["mean"])


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        (
            ["first.*", "head.*"],
            "the pattern 'head.*' matches none of the 5 parameters (first.bias, "
            "first.kernel, layers.0.kernel, norm.bias, norm.scale). Patterns match "
            "whole dotted paths; '*' also matches dots.",
        ),
        (lambda path: False, "the predicate chose none of the 5 parameters (first."),
        (nnx.LoRAParam, "selects no floating-point variable of the 9 in the model"),
        (3, "trainable=3: expected glob patterns of dotted paths such as 'head.*'"),
    ],
)
def test_a_choice_of_nothing_is_refused(trainable: Any, text: str) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        adapt(Net(nnx.Rngs(0)), net_loss, trainable=trainable)
    assert text in str(caught.value)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(wh.WhaleError, match="no leaf is trained"):
        adapt({"ids": jnp.arange(3)}, two)


# Names.


def test_abstract_linen_variables_serve_as_well() -> None:
    assert (
        adapt(linen_variables(), linen_loss).names
        == adapt(real_linen(), linen_loss).names
    )


def test_paths_are_dotted() -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path({"a": [1, {"b": 2}]})
    assert [dotted(path) for path, _ in leaves] == ["a.0", "a.1.b"]
