"""The compiled step's own promises: what it refuses, counts and averages."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.adapters.loss_inputs import add_inputs_note


X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
MODEL = {"w": jnp.ones((8, 4)) * 0.1, "b": jnp.zeros((4,))}


def squares(net: Any, batch: Any) -> Any:
    return ((batch["x"] @ net["w"] + net["b"][None, :] - batch["y"]) ** 2).mean()


def step_for(loss: Any, model: Any, batch: Any, **options: Any) -> Any:
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    planned = {k: v for k, v in options.items() if k != "batch"}
    plan = wh.plan(loss, model, batch, optimizer=optimizer, cluster="h100:8", **planned)
    return wh.compile(
        plan, loss, model, optimizer=optimizer, devices=jax.devices(), batch=batch
    )


BATCH = {"x": X, "y": Y}


def test_without_an_optimizer_a_step_only_evaluates() -> None:
    step = step_for(squares, MODEL, BATCH, optimizer=None)
    state = step.init_from(MODEL)
    want = float(squares(MODEL, BATCH))
    assert float(step.eval(state, BATCH)["loss"]) == pytest.approx(want, rel=1e-6)
    with pytest.raises(wh.WhaleError, match="without an optimizer.*optimizer="):
        step(state, BATCH)


def test_compiler_options_travel_with_the_plan() -> None:
    options = {"xla_cpu_enable_fast_math": "false", "xla_backend_optimization_level": 2}
    step = step_for(squares, MODEL, BATCH, compiler_options=options)
    kept = {"xla_cpu_enable_fast_math": False, "xla_backend_optimization_level": 2}
    assert dict(step.plan.compiler_options) == kept
    assert "xla_backend_optimization_level=2" in str(step.plan)
    assert wh.Plan.from_document(step.plan.document()) == step.plan
    plain = step_for(squares, MODEL, BATCH)
    assert plain.plan.hash != step.plan.hash
    assert plain.plan.cluster == step.plan.cluster
    _, metrics = step(step.init_from(MODEL), BATCH)
    _, expected = plain(plain.init_from(MODEL), BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)


def test_the_step_is_compiled_with_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An option with an effect that can be seen, and that no plan may carry therefore.
    monkeypatch.setattr(
        "whalejax.runtime.compiler_options.check_options", lambda *_: None
    )
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    step = step_for(squares, MODEL, BATCH, compiler_options=options)
    state = step.init_from(MODEL)
    step.eval(state, BATCH)
    step(state, BATCH)
    written = {path.name.split(".")[1] for path in tmp_path.glob("module_*.txt")}
    assert {"jit__advance", "jit_traced_evaluation"} <= written


def test_a_plan_takes_the_options_of_another() -> None:
    options = {"xla_gpu_autotune_level": 1}
    first = wh.plan(squares, MODEL, BATCH, cluster="h100:8", compiler_options=options)
    pairs: Any = first.compiler_options
    again = wh.plan(squares, MODEL, BATCH, cluster="h100:8", compiler_options=pairs)
    assert again == first
    assert first.what_if(compiler_options=None).compiler_options == ()


def test_loss_falls_and_the_users_arrays_survive() -> None:
    model = {name: jnp.array(value) for name, value in MODEL.items()}
    step = step_for(squares, model, BATCH)
    state = step.init_from(model)
    losses = []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model["w"], MODEL["w"])


@pytest.mark.full
def test_metrics_of_a_weighted_loss_are_weighed_over_micro_batches() -> None:
    weights = np.arange(1, 17, dtype=np.float32)

    def loss(net: Any, batch: Any) -> Any:
        errors = ((batch["x"] @ net["w"] - batch["y"]) ** 2).mean(1)
        total, weight = (errors * batch["k"]).sum(), batch["k"].sum()
        return wh.WeightedLoss(total, weight), {"again": total / weight}

    batch = {**BATCH, "k": weights}
    model = {"w": MODEL["w"]}
    found = []
    for count in (1, 2, 4):
        step = step_for(loss, model, batch, num_micro_batches=count)
        _, metrics = step(step.init_from(model), batch)
        assert float(metrics["again"]) == pytest.approx(
            float(metrics["loss"]), rel=1e-6
        )
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


@pytest.mark.relaxed_promotion
def test_an_optimizer_may_look_at_the_loss() -> None:
    from optax import contrib

    optimizer = optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=2))
    step = step_for(squares, MODEL, BATCH, optimizer=optimizer)
    state, first = step(step.init_from(MODEL), BATCH)
    _, second = step(state, BATCH)
    assert float(second["loss"]) < float(first["loss"])


def test_a_raw_key_is_taken_and_anything_else_is_named() -> None:
    def loss(net: Any, batch: Any, rng: Any) -> Any:
        noise = jax.random.normal(rng, batch["y"].shape)
        return ((batch["x"] @ net["w"] - batch["y"] - noise) ** 2).mean()

    model = {"w": MODEL["w"]}
    step = step_for(loss, model, BATCH)
    raw = step.init(lambda: model, rng=jax.random.PRNGKey(3))
    typed = step.init(lambda: model, rng=jax.random.key(3))
    losses = [float(step(state, BATCH)[1]["loss"]) for state in (raw, typed)]
    assert losses[0] == losses[1]
    with pytest.raises(wh.WhaleError, match=r"float32.*jax\.random\.key"):
        step.init(lambda: model, rng=jnp.zeros((2,)))


def test_make_model_gets_a_key_only_where_it_wants_one() -> None:
    def scaled(scale: float = 2.0) -> Any:
        return {name: value * scale for name, value in MODEL.items()}

    step = step_for(squares, MODEL, BATCH)
    state = step.init(scaled, rng=jax.random.key(0))
    np.testing.assert_allclose(state.params["w"], MODEL["w"] * 2.0, rtol=1e-6)


def test_a_batch_of_another_kind_of_number_is_refused() -> None:
    batch = {"x": X, "y": Y.astype(np.int8)}

    def loss(net: Any, batch: Any) -> Any:
        return ((batch["x"] @ net["w"] - batch["y"].astype(jnp.float32)) ** 2).mean()

    model = {"w": MODEL["w"]}
    step = step_for(loss, model, batch)
    state = step.init_from(model)
    with pytest.raises(wh.WhaleError, match=r"'y'.*int64.*int8"):
        step(state, {"x": X, "y": np.full((16, 4), 300, np.int64)})


def test_numbers_in_a_model_and_in_a_batch_are_leaves() -> None:
    model = {"w": MODEL["w"], "step": 0}

    def loss(net: Any, batch: Any) -> Any:
        return ((batch["x"] @ net["w"] * batch["t"]) ** 2).mean()

    batch = {"x": X, "t": np.float32(0.5)}
    plan = wh.plan(
        loss,
        model,
        batch,
        optimizer=optax.sgd(0.1),
        cluster="h100:8",
        batch_axes={"x": 0, "t": None},
    )
    step = wh.compile(
        plan,
        loss,
        model,
        optimizer=optax.sgd(0.1),
        devices=jax.devices(),
        batch_axes={"x": 0, "t": None},
    )
    _, metrics = step(step.init_from(model), batch)
    want = ((X @ np.asarray(model["w"]) * 0.5) ** 2).mean()
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.relaxed_promotion
def test_collections_returned_as_metrics_are_refused() -> None:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x)).mean()

    net = Net()
    variables = net.init(jax.random.key(0), X)

    def loss(variables: Any, batch: Any) -> Any:
        return net.apply(variables, batch, mutable=["batch_stats"])

    with pytest.raises(wh.WhaleError, match=r"batch_stats.*wh\.Aux\(variables="):
        wh.plan(loss, variables, X, optimizer=optax.sgd(0.1), cluster="h100:8")


def test_axis_names_must_map_to_our_axes() -> None:
    with pytest.raises(wh.WhaleError, match="'tensr'.*tensor"):
        wh.plan(squares, MODEL, BATCH, cluster="h100:8", axis_names={"model": "tensr"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        ([X, Y], lambda net, b: jnp.mean((b[0] @ net["w"] - b[1]) ** 2)),
        ({"z": X, "a": (Y, None)}, lambda net, b: jnp.mean(b["z"] @ net["w"])),
        ({1: X, 0: [Y]}, lambda net, b: jnp.mean((b[1] @ net["w"] - b[0][0]) ** 2)),
        (X, lambda net, b: jnp.mean(b @ net["w"])),
    ],
)
def test_a_plan_knows_the_containers_of_its_batch(
    batch: Any, loss: Any, tmp_path: Any
) -> None:
    def strict(net: Any, given: Any) -> Any:
        assert jax.tree.structure(given) == jax.tree.structure(batch)
        return loss(net, given)

    optimizer = optax.sgd(0.1)
    wh.plan(strict, MODEL, batch, optimizer=optimizer, cluster="h100:8").save(
        tmp_path / "plan.json"
    )
    plan = wh.Plan.load(tmp_path / "plan.json")
    step = wh.compile(plan, strict, MODEL, optimizer=optimizer, devices=jax.devices())
    _, metrics = step(step.init_from(MODEL), batch)
    want = loss(MODEL, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


def test_a_container_that_a_plan_cannot_rebuild_is_asked_for() -> None:
    batch = collections.OrderedDict(y=Y, x=X)
    plan = wh.plan(squares, MODEL, batch, cluster="h100:8")
    with pytest.raises(wh.WhaleError, match=r"\(OrderedDict\).*Pass batch="):
        wh.compile(plan, squares, MODEL, devices=jax.devices())
    step = wh.compile(plan, squares, MODEL, batch=batch, devices=jax.devices())
    loss = step.eval(step.init_from(MODEL), batch)["loss"]
    np.testing.assert_allclose(loss, squares(MODEL, batch), rtol=1e-5)
    # Keys that JSON would change are those of another dictionary, too.
    plan = wh.plan(
        lambda net, b: squares(net, {"x": b[0.5], "y": b[1.5]}),
        MODEL,
        {0.5: X, 1.5: Y},
        cluster="h100:8",
    )
    with pytest.raises(wh.WhaleError, match=r"\(another dict\).*Pass batch="):
        wh.compile(plan, squares, MODEL, devices=jax.devices())


def test_an_optimizers_mask_of_another_tree_is_refused() -> None:
    masked = optax.masked(optax.sgd(0.1), {"w": True, "other": False})
    with pytest.raises(wh.WhaleError, match=r"optimizer\.init fails.*give a function"):
        wh.plan(squares, MODEL, BATCH, optimizer=masked, cluster="h100:8")


def test_counts_are_added_up_and_other_metrics_averaged() -> None:
    def loss(net: Any, batch: Any) -> Any:
        metrics = {"seen": batch["x"].shape[0] + 0 * batch["ids"].sum()}
        return squares(net, batch), wh.Aux(
            metrics={**metrics, "size": jnp.mean(batch["x"] ** 2)}
        )

    batch = {**BATCH, "ids": np.arange(16)}
    step = step_for(loss, MODEL, batch, num_micro_batches=2)
    _, metrics = step(step.init_from(MODEL), batch)
    assert int(metrics["seen"]) == 16
    np.testing.assert_allclose(metrics["size"], np.mean(X**2), rtol=1e-5)


# What is refused before it runs.


def test_keys_that_are_none_and_models_without_values() -> None:
    step = step_for(squares, MODEL, BATCH)
    with pytest.raises(wh.WhaleError, match=r"rng is 0; expected a random key"):
        step.init(lambda: MODEL, rng=0)
    shapes = jax.eval_shape(lambda: MODEL)
    with pytest.raises(wh.WhaleError, match="abstract model.*Use init"):
        step.init_from(shapes)


def test_a_key_of_another_algorithm_than_traced() -> None:
    def noisy(net: Any, batch: Any, rng: Any) -> Any:
        return squares(net, batch) * jax.random.uniform(rng)

    step = step_for(noisy, MODEL, BATCH)
    with pytest.raises(wh.WhaleError, match=r"key<rbg>.*traced with a key<fry>"):
        step.init(lambda: MODEL, rng=jax.random.key(0, impl="rbg"))


def test_a_batch_may_hold_keys() -> None:
    def loss(net: Any, batch: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(batch["keys"])
        return jnp.mean((batch["x"] + noise) @ net["w"])

    batch = {"x": X, "keys": jax.random.split(jax.random.key(1), 16)}
    plan = wh.plan(loss, MODEL, batch, cluster="h100:8")
    step = wh.compile(plan, loss, MODEL, devices=jax.devices())
    found = step.eval(step.init_from(MODEL), batch)["loss"]
    np.testing.assert_allclose(found, loss(MODEL, batch), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": optax.adamw}, "optimizer is <function adamw.*optax transf"),
        ({"trainable": {"w": True}}, r"trainable=\{'w': True\}: expected glob pat"),
        ({"trainable": lambda path, value: True}, "takes one dotted path"),
        ({"batch_axes": {"x": 0}}, "batch_axes has the structure"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        wh.plan(squares, MODEL, BATCH, cluster="h100:8", **options)


def test_a_class_is_no_model() -> None:
    class Net: ...

    with pytest.raises(wh.WhaleError, match="model is the class Net; expected an inst"):
        wh.plan(squares, Net, BATCH, cluster="h100:8")


def test_batch_axes_may_say_something_for_a_gap() -> None:
    def loss(net: Any, batch: Any) -> Any:
        return squares(net, {"x": batch["x"].T, "y": batch["y"]})

    batch = {"x": X.T, "y": Y, "mask": None}
    for gap in (None, 0):
        axes = {"x": 1, "y": 0, "mask": gap}
        plan = wh.plan(loss, MODEL, batch, cluster="h100:8", batch_axes=axes)
        step = wh.compile(plan, loss, MODEL, devices=jax.devices(), batch_axes=axes)
        found = step.eval(step.init_from(MODEL), batch)["loss"]
        np.testing.assert_allclose(found, squares(MODEL, BATCH), rtol=1e-5)


def test_what_the_loss_raises_says_where() -> None:
    def loss(net: Any, batch: Any) -> Any:
        return squares(net, batch) + batch["weights"]

    with pytest.raises(KeyError) as caught:
        wh.plan(loss, MODEL, BATCH, cluster="h100:8")
    given, where = [n for n in caught.value.__notes__ if n.startswith("whalejax")]
    assert where == "whalejax: raised in loss_fn, traced without values"
    assert given == (
        "whalejax: loss_fn was given a dict with 'b', 'w' as model, and as batch: "
        "batch['x'] float32[16, 8], batch['y'] float32[16, 4]"
    )


@pytest.mark.parametrize(
    ("model", "leaves", "expected"),
    [
        ({}, 9, "was given an empty dict as model"),
        (
            collections.OrderedDict(w=1.0),
            9,
            "was given an OrderedDict with 'w' as model",
        ),
        (MODEL, 9, " and 1 more leaf"),
        (MODEL, 10, " and 2 more leaves"),
    ],
)
def test_the_notes_on_a_loss_are_sentences(
    model: Any, leaves: int, expected: str
) -> None:
    error = ValueError("wrong")
    add_inputs_note(error, squares, model, [np.ones(2)] * leaves)
    assert expected in error.__notes__[0]


def test_a_loss_that_takes_its_batch_first_is_told_so() -> None:
    def loss(batch: Any, model: Any) -> Any:
        return squares(model, batch)

    with pytest.raises(KeyError) as caught:
        wh.plan(loss, MODEL, BATCH, cluster="h100:8")
    (note,) = [n for n in caught.value.__notes__ if "was given" in n]
    assert note.endswith(
        ". loss_fn takes (batch, model), and the model is given first: write "
        "loss_fn(model, batch)"
    )


def test_a_checkpoint_goes_to_a_file_system(tmp_path: Any) -> None:
    step = step_for(squares, MODEL, BATCH)
    with pytest.raises(wh.WhaleError, match="gs://bucket/run: checkpoints are written"):
        step.save("gs://bucket/run", step.init_from(MODEL))


def test_an_evaluation_reports_numbers_of_the_types_that_a_step_does() -> None:
    def counting(model: Any, batch: Any) -> Any:
        metrics = {"count": jnp.int32(3), "any": (batch["x"] > 0).any()}
        return ((batch["x"] @ model["w"]) ** 2).mean(), wh.Aux(metrics=metrics)

    with jax.enable_x64(True):
        model, batch = {"w": np.ones((8, 4))}, {"x": np.ones((16, 8))}
        tx = optax.sgd(0.1)
        plan = wh.plan(
            counting,
            model,
            batch,
            optimizer=tx,
            cluster="h100:2",
            mesh={"data": 2},
            num_micro_batches=4,
        )
        devices = jax.devices()[:2]
        step = wh.compile(plan, counting, model, optimizer=tx, devices=devices)
        state = step.init_from(model)
        evaluated = step.eval(state, batch)
        _, stepped = step(state, batch)
    for name in ("count", "any"):
        assert evaluated[name].dtype == stepped[name].dtype
        assert evaluated[name] == stepped[name]
    assert (int(stepped["count"]), int(stepped["any"])) == (3, 1)


def test_an_optimizer_that_keeps_more_than_was_planned_for_is_said() -> None:
    plan = wh.plan(squares, MODEL, BATCH, optimizer=optax.sgd(0.1), cluster="h100:8")
    options: Any = {"devices": jax.devices(), "batch": BATCH}
    assert plan.optimizer_bytes == 0
    with pytest.warns(UserWarning, match=r"keeps 288 B .* plan was made without one"):
        wh.compile(plan, squares, MODEL, optimizer=optax.adam(0.1), **options)
    plan = wh.plan(squares, MODEL, BATCH, optimizer=optax.adam(0.1), cluster="h100:8")
    assert plan.optimizer_bytes == 2 * 4 * (8 * 4 + 4)
    assert wh.Plan.from_document(plan.document()).optimizer_bytes == 288
    scheduled = optax.adam(optax.cosine_decay_schedule(0.1, 10))
    for keeps_as_much in (scheduled, None):
        wh.compile(plan, squares, MODEL, optimizer=keeps_as_much, **options)
    with pytest.raises(wh.PlanError, match=r"one given keeps 0 B .* counts 288 B"):
        wh.compile(plan, squares, MODEL, optimizer=optax.sgd(0.1), **options)
