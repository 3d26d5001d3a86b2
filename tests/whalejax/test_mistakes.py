"""Mistakes that people make, each answered by the argument, the value and a remedy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from whalejax import models
from whalejax.cli import main


ADAM = optax.adam(1e-3)
BATCH = {"x": np.zeros((16, 16), "float32"), "y": np.zeros((16, 4), "float32")}


LISTS = {name: value.tolist() for name, value in BATCH.items()}


class Net(nnx.Module):
    def __init__(self, width: int = 32, *, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(16, width, rngs=rngs)
        self.b = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(nnx.relu(self.a(x)))


class Wide(Net):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(width, rngs=rngs)


def loss(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


WEIGHTS = {"a": {"w": np.zeros((16, 4), "float32")}}


def linear(weights: Any, batch: Any) -> Any:
    return ((batch["x"] @ weights["a"]["w"] - batch["y"]) ** 2).mean()


@functools.cache
def net(width: int = 32) -> Net:
    return Net(width, rngs=nnx.Rngs(0))


def planned(*args: Any, **options: Any) -> Any:
    args = args or (loss, net(), BATCH)
    return wh.plan(*args, **{"optimizer": ADAM, "cluster": "cpu:8", **options})


@functools.cache
def plan() -> wh.Plan:
    return planned()


@functools.cache
def step() -> wh.TrainStep:
    return wh.compile(plan(), loss, net(), optimizer=ADAM)


def state() -> wh.TrainState:
    return step().init_from(net())


def compiled(*args: Any, **options: Any) -> Any:
    function: Any = wh.compile
    return function(*args, **options)


def called(function: Any, *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def no_module(name: str, function: Callable[[], Any]) -> None:
    """Calls a function while a module is not installed; errors have no chain."""
    with mock.patch.dict(sys.modules, {name: None}):
        try:
            function()
        except wh.WhaleError as error:
            assert error.__cause__ is None and error.__suppress_context__
            raise


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # Arguments in each other's places.
    "model before loss": (
        lambda: planned(net(), loss, BATCH),
        r"model is the function loss; loss_fn is a Net. The order is \(loss_fn, model",
    ),
    "batch before model": (
        lambda: planned(loss, BATCH, net()),
        r"batch is a Net. The order is \(loss_fn, model, batch\)",
    ),
    "trees in each other's places": (
        lambda: planned(linear, BATCH, {**WEIGHTS, "b": np.zeros((4, 4))}),
        r"the leaves differ in .*\nmodel looks like a batch. The order is \(loss_fn",
    ),
    "class for model": (lambda: planned(loss, Net, BATCH), "model is the class Net"),
    "batch forgotten": (
        lambda: called(wh.plan, loss, net()),
        "wh.plan: batch is missing",
    ),
    "plan second": (
        lambda: compiled(loss, plan(), net(), optimizer=ADAM),
        r"The order is wh.compile\(plan, loss_fn, model\)",
    ),
    "path for plan": (
        lambda: compiled("plan.json", loss, net()),
        "plan is 'plan.json'; expected the result of wh.plan or wh.Plan.load",
    ),
    "batch before state": (lambda: step()(BATCH, state()), "the state is dict"),
    "state forgotten": (
        lambda: called(step(), BATCH),
        r"takes the state and the global batch: state, metrics = step\(state, batch\)",
    ),
    "model for state": (lambda: step()(net(), BATCH), "the state is Net; expected"),
    "no batch for a step": (
        lambda: step()(state(), None),
        "the step was called without a batch; it takes the state and the global batch",
    ),
    # Names of other libraries.
    "dp": (lambda: planned(mesh={"dp": 2}), "'dp' .* Did you mean 'data'"),
    "tp": (lambda: planned(mesh={"tp": 2}), "'tp' .* Did you mean 'tensor'"),
    "pp": (lambda: planned(mesh={"pp": 2}), "'pp' .* Did you mean 'stage'"),
    "model axis": (lambda: planned(mesh={"model": 2}), "Did you mean 'tensor'"),
    "axis of the metadata": (
        lambda: planned(axis_names={"model": "tp"}),
        "axis_names maps 'model' to 'tp'; expected one of .* Did you mean 'tensor'?",
    ),
    "misspelt axis": (lambda: planned(mesh={"tensr": 2}), "Did you mean 'tensor'"),
    "bfloat16": (lambda: planned(precision="bfloat16"), "Did you mean 'bf16'"),
    "fp16": (lambda: planned(precision="fp16"), "Did you mean 'f16'"),
    "a type for a name": (
        lambda: planned(precision=jnp.bfloat16),
        "Did you mean 'bf16'",
    ),
    "micro_batches": (
        lambda: planned(micro_batches=2),
        "no argument 'micro_batches'. Did you mean 'num_micro_batches'",
    ),
    "gradient accumulation": (
        lambda: planned(gradient_accumulation_steps=2),
        "Did you mean 'num_micro_batches'",
    ),
    "tx": (
        lambda: called(wh.plan, loss, net(), BATCH, tx=ADAM),
        "Did you mean 'optimizer'",
    ),
    "micro batches of a mark": (
        lambda: called(wh.pipeline, micro_batches=4),
        "wh.pipeline: .* Did you mean 'num_micro_batches'",
    ),
    "devices of a mark": (
        lambda: called(wh.stage, device=2),
        "wh.stage: .* Did you mean 'devices'",
    ),
    # Batches that are no arrays of numbers.
    "texts in a batch": (
        lambda: planned(loss, net(), {**BATCH, "name": np.array(["a"] * 16)}),
        "batch.name has dtype <U1; expected numbers or booleans",
    ),
    "objects in a batch": (
        lambda: planned(loss, net(), {**BATCH, "name": np.array([None] * 16)}),
        "batch.name has dtype object; expected numbers or booleans",
    ),
    "lists in a batch": (
        lambda: planned(loss, net(), LISTS),
        r"^batch: 2 problems\n  1. batch.x is a list of numbers; give "
        r"numpy.asarray\(…\) of it\n  2. batch.y is .* of it$",
    ),
    "a list with texts": (
        lambda: planned(loss, net(), {**BATCH, "name": ["a"] * 16}),
        "batch: 1 problem\n  1. batch.name is a list with texts; give an array of",
    ),
    "lists for a step": (
        lambda: step()(state(), LISTS),
        r"^batch: 2 problems\n  1. batch.x is a list of numbers; give",
    ),
    "another batch for a step": (
        lambda: step()(state(), {"x": BATCH["x"], "z": BATCH["y"]}),
        r"the batch lacks batch\['y'\], and has besides batch\['z'\]; the plan is for "
        "2 leaves. Give the same structure",
    ),
    "a changed setting": (
        lambda: plan().what_if(zer=1),
        "there is no 'zer' to change. Did you mean 'zero'",
    ),
    # Words of plans.
    "form of an export": (
        lambda: plan().export("Maxtext"),
        "form is 'Maxtext'; expected one of .*. Did you mean 'maxtext'?",
    ),
    "mesh of fewer devices": (
        lambda: plan().mesh(jax.devices()[:4]),
        "needs 8 devices; there are 4.* Give 8 devices, or plan a mesh of 4",
    ),
    "chart without altair": (
        lambda: no_module("altair", lambda: found().chart()),
        r"^charts need altair, which is not installed. Install it with pip install "
        r'"whalejax\[notebook\]", or from a checkout pip install "\.\[notebook\]"',
    ),
    # Gradients for a loss.
    "value_and_grad": (
        lambda: planned(nnx.value_and_grad(loss), net(), BATCH),
        "loss_fn returned a value and a tree with the paths and shapes of the model's "
        r"parameters, as jax.value_and_grad\(loss\) does. Give the loss itself",
    ),
    "value_and_grad of a pair": (
        lambda: planned(
            jax.value_and_grad(lambda w, b: (linear(w, b), {}), has_aux=True),
            WEIGHTS,
            BATCH,
        ),
        "loss_fn returned a value and a tree with the paths and shapes",
    ),
    "value_and_grad of params": (
        lambda: planned(
            lambda v, b: jax.value_and_grad(linear)(v["params"], b),
            {"params": WEIGHTS, "stats": {"n": np.zeros(())}},
            BATCH,
        ),
        "loss_fn returned a value and a tree with the paths and shapes",
    ),
    "gradient": (
        lambda: planned(jax.grad(linear), WEIGHTS, BATCH),
        r"loss_fn returned a tree .* as jax.grad\(loss\) does. Give the loss itself",
    ),
    # The loop, and jobs.
    "loop begun with the state": (
        lambda: called(wh.loop.train, state(), step(), lambda i: BATCH, steps=1),
        r"step is a TrainState, and state a TrainStep. The order is wh.loop.train",
    ),
    "model for the loop's state": (
        lambda: called(wh.loop.train, step(), net(), lambda i: BATCH, steps=1),
        r"state is Net.*; expected the state that step.init\(make_model, rng=key\) or",
    ),
    "batches of nothing": (
        lambda: called(wh.loop.train, step(), state(), lambda: BATCH, steps=1),
        r"batches takes no argument; it is called as batches\(step\). Write lambda",
    ),
    "batches that return none": (
        lambda: called(wh.loop.train, step(), state(), lambda i: None, steps=1),
        r"batches\(0\) returned None; expected the global batch of that step",
    ),
    "hooks of a step alone": (
        lambda: called(
            wh.loop.train,
            step(),
            state(),
            lambda i: BATCH,
            steps=1,
            hooks=[lambda step: None],
        ),
        r"hook takes \(step\); it is called as hook\(step, values\)",
    ),
    "eval_batches of a step": (
        lambda: wh.Job(loss, Net, BATCH, ADAM, 16, eval_batches=lambda i: [BATCH]),
        r"eval_batches takes \(i\); it is called as eval_batches\(\). Write lambda: …",
    ),
    "a model in a job": (
        lambda: wh.Job(loss, called(net), BATCH, ADAM, 16),
        "make_model is a Net; expected a function of a random key, or of nothing, that "
        r"makes one: .* Write make_model=lambda key: Net\(…\)",
    ),
    "a batch of a step alone": (
        lambda: wh.Job(loss, Net, lambda step: BATCH, ADAM, 16),
        r"batch takes \(step\); it is called as batch\(step, size\). Write lambda step",
    ),
    # Arguments that lack, that are too many, that there are not.
    "steps of the loop": (
        lambda: called(wh.loop.train, step(), state(), lambda i: BATCH),
        r"wh.loop.train: steps is missing. Write wh.loop.train\(step, state, batches, "
        r"steps=…, …\), where … may be save_dir, save_every, keep,",
    ),
    "epochs": (
        lambda: called(wh.loop.train, step(), state(), lambda i: BATCH, epochs=1),
        "no argument 'epochs'. Did you mean 'steps'",
    ),
    "checkpoint_dir": (
        lambda: called(wh.loop.train, step(), state(), steps=1, checkpoint_dir="c"),
        "no argument 'checkpoint_dir'. Did you mean 'save_dir'",
    ),
    "max_to_keep": (
        lambda: called(wh.loop.train, step(), state(), steps=1, max_to_keep=3),
        "no argument 'max_to_keep'. Did you mean 'keep'",
    ),
    "early stopping": (
        lambda: called(wh.loop.train, step(), state(), steps=1, early_stopping=3),
        "no argument 'early_stopping'. Did you mean 'patience'",
    ),
    "keep_best": (
        lambda: called(wh.loop.train, step(), state(), steps=1, keep_best=1),
        "no argument 'keep_best'. Did you mean 'keep' or 'best'",
    ),
    "key to a step": (
        lambda: called(step(), state(), BATCH, jax.random.key(0)),
        r"step: 3 arguments are given without a name; at most 2 can be \(state, batch\)"
        r". Write state, metrics = step\(state, batch\). A random key is in the state",
    ),
    "rng of a restart": (
        lambda: called(step().restore_or_init, "d", Net),
        "step.restore_or_init: rng is missing. Write step.restore_or_init",
    ),
    "a field of a request": (
        lambda: called(wh.PlanRequest, zer=1),
        "wh.PlanRequest: there is no argument 'zer'. Did you mean 'zero'",
    ),
    "a text for a cluster": (
        lambda: called(wh.Cluster, "h100:8"),
        r'From text: wh.cluster\("h100:8"\)',
    ),
    "a model for a state": (
        lambda: called(wh.TrainState, net()),
        r"Of a model: step.init_from\(model\)",
    ),
    "an option of several clusters": (
        lambda: called(
            wh.largest_batch, loss, net(), BATCH, clusters=["h100:8"], foo=1
        ),
        "there is no option 'foo'; expected some of remat",
    ),
    "too many": (
        lambda: called(wh.plan, loss, net(), BATCH, ADAM),
        r"4 arguments are given without a name; at most 3 can be \(loss_fn, model, "
        r"batch\). Write wh.plan\(loss_fn, model, batch, …\), where … may be optimizer",
    ),
    "twice": (
        lambda: called(wh.plan, loss, net(), BATCH, model=net()),
        "wh.plan: model is given twice",
    ),
    "what_if": (
        lambda: plan().what_if(num_microbatches=2),
        "no 'num_microbatches' to change",
    ),
    "devices of a changed plan": (
        lambda: plan().what_if(devices=16),
        "there is no 'devices' to change. Did you mean 'cluster'",
    ),
    "length of a changed plan": (
        lambda: plan().what_if(seq_len=16),
        "there is no 'seq_len' to change. Did you mean 'sequence'",
    ),
    "optimizer of a changed plan": (
        lambda: plan().what_if(optimizer=ADAM),
        "there is no 'optimizer' to change. Plan again with wh.plan, which takes it",
    ),
    "sequence of a loss without": (
        lambda: plan().what_if(sequence=16),
        "sequence is the number of tokens .* this loss reads no sequences of tokens",
    ),
    # Clusters.
    "dash": (lambda: planned(cluster="h100-8"), "'h100-8' has no colon. Write h100:8"),
    "count first": (lambda: planned(cluster="8xh100"), "has no colon. Write h100:8"),
    "x": (lambda: planned(cluster="H100x8"), "has no colon. Write h100:8"),
    "blank": (lambda: planned(cluster="h100 8"), "has no colon. Write h100:8"),
    "Google's name": (lambda: planned(cluster="v5litepod-8"), "Write v5e:8"),
    "Google's cores": (lambda: planned(cluster="tpu-v5p-8"), "Write v5p:4"),
    "number": (lambda: planned(cluster=8), "cluster is 8; expected a Cluster or text"),
    "unknown kind": (lambda: planned(cluster="gpu:8"), "unknown device kind 'gpu'"),
    "one text of several": (
        lambda: wh.search(loss, net(), BATCH, clusters="h100:8"),
        r"expected a list such as \['h100:8'\]",
    ),
    # Values.
    "remat": (lambda: planned(remat="everything"), "expected one of none, dots, named"),
    "remat switch": (lambda: planned(remat=True), "remat is True; expected a word"),
    "zero": (lambda: planned(zero=3), "ZeRO-3 is the mesh axis fsdp"),
    "offload": (lambda: planned(offload="optimiser"), "'optimiser' is none of"),
    "attention": (lambda: planned(attention="flash"), "expected one of ring, gather"),
    "optimizer's name": (lambda: planned(optimizer="adam"), r"such as optax.adam\(1e"),
    "optimizer's maker": (
        lambda: planned(optimizer=optax.adam),
        "expected an optax transformation",
    ),
    "another library's optimizer": (
        lambda: planned(optimizer=nnx.Optimizer(net(), ADAM, wrt=nnx.Param)),
        "expected its transformation, optimizer.tx",
    ),
    "mesh list": (lambda: planned(mesh=[2, 4]), "expected sizes by axis"),
    "mesh too large": (
        lambda: planned(mesh={"data": 16}),
        "data 16 needs 16 devices; there are 8",
    ),
    "batch text": (lambda: plan().what_if(batch="64"), "batch is '64'; expected"),
    "batch of words": (
        lambda: planned(loss, net(), {"x": ["a"], "y": BATCH["y"]}),
        "batch.x is a list with texts; give an array of integers",
    ),
    "texts beside a loss": (
        lambda: planned(lambda m, b: (loss(m, b), {"mode": "train"}), net(), BATCH),
        "loss_fn reports 'mode' with 'train'; expected arrays or numbers. Remove it",
    ),
    "number for a folder": (
        lambda: called(
            wh.loop.train, step(), state(), lambda i: BATCH, steps=1, save_dir=3
        ),
        "save_dir is 3; expected the path of a folder",
    ),
    "number for a run": (lambda: called(wh.loop.latest, 3), "save_dir is 3; expected"),
    "number for the best": (lambda: called(wh.loop.best, 3), "save_dir is 3; expected"),
    "loop of unknown length": (
        lambda: planned(
            lambda w, b: jax.lax.while_loop(
                lambda c: c[0] < 3,
                lambda c: (c[0] + 1, jnp.tanh(c[1] * w["a"]["w"].sum())),
                (0, b["x"]),
            )[1].mean(),
            WEIGHTS,
            BATCH,
        ),
        r"the loss has no gradient \(while\): Reverse-mode differentiation does not",
    ),
    "callback without a derivative": (
        lambda: planned(
            lambda w, b: (
                linear(w, b)
                + jax.pure_callback(
                    lambda x: np.float32(1),
                    jax.ShapeDtypeStruct((), jnp.float32),
                    w["a"]["w"].sum(),
                )
            ),
            WEIGHTS,
            BATCH,
        ),
        r"the loss has no gradient \(pure_callback\): Pure callbacks do not support",
    ),
    "loss of vectors": (
        lambda: planned(lambda m, b: (m(b["x"]) - b["y"]) ** 2, net(), BATCH),
        r"the loss has shape \(16, 4\); expected a scalar",
    ),
    "value in a loss": (
        lambda: planned(lambda m, b: float(loss(m, b)), net(), BATCH),
        r"loss_fn reads the value of an array at .*test_mistakes.py:\d+",
    ),
    # Another model, optimizer or batch than was planned for.
    "another model": (
        lambda: compiled(plan(), loss, net(48), optimizer=ADAM),
        r"a.bias: the plan has float32\[32\], the model float32\[48\]",
    ),
    "another model on which the loss fails": (
        lambda: compiled(
            wh.plan(linear, WEIGHTS, BATCH, optimizer=ADAM, cluster="cpu:8"),
            linear,
            {"other": np.zeros((4, 4), "f4")},
            optimizer=ADAM,
        ),
        r"made for another model .*\n  1. a.w: .* no such leaf\n  2. other: the plan",
    ),
    "another optimizer": (
        lambda: compiled(plan(), loss, net(), optimizer=optax.sgd(0.1)),
        "made for another optimizer: the one given keeps 0 B",
    ),
    "class to compile": (
        lambda: compiled(plan(), loss, Net, optimizer=ADAM),
        "model is the class Net",
    ),
    "maker that needs more": (
        lambda: step().init(lambda key, width: net(width), rng=jax.random.key(0)),
        "needs width besides a random key. Bind it: functools.partial",
    ),
    "class that needs more": (
        lambda: step().init(Wide, rng=jax.random.key(0)),
        r"make_model, Wide, needs width besides a random key",
    ),
    "class to begin from": (
        lambda: step().init_from(Net),
        "init_from was given the class Net",
    ),
    "model to begin": (
        lambda: step().init(net(), rng=jax.random.key(0)),
        r"Of a model that is there: init_from\(model\)",
    ),
    "key forgotten": (lambda: called(step().init, Net), "step.init: rng is missing"),
    "another model to begin from": (
        lambda: step().init_from(net(48)),
        r"a.bias changed from float32\[32\] to float32\[48\]",
    ),
    "another batch size": (
        lambda: step()(state(), {k: v[:8] for k, v in BATCH.items()}),
        r"has shape \(8, 16\); the plan is for the global shape \(16, 16\)",
    ),
    "leaf forgotten": (lambda: step()(state(), {"x": BATCH["x"]}), "the batch lacks"),
    "another type": (
        lambda: step()(state(), {**BATCH, "x": BATCH["x"].astype("int32")}),
        "has dtype int32; the plan is for float32",
    ),
    # Files and paths.
    "no plan there": (lambda: wh.Plan.load("no.json"), "there is no such plan file"),
    "no checkpoint there": (
        lambda: step().restore("/nowhere/at/all"),
        "there is no checkpoint at this path",
    ),
    "number for a path": (lambda: step().save(3, state()), "path is 3; expected"),
    "parameter": (lambda: plan().why("a.kernl"), "Nearest: a.kernel"),
    "leaf": (lambda: plan().leaf("c.kernel"), "Nearest: b.kernel"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(wh.WhaleError, match=words):
        call()


def test_another_loss_on_the_same_model_is_said(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    for one in (plan(), wh.Plan.load(tmp_path / "plan.json")):
        with pytest.warns(UserWarning, match="is not the one that the plan was made"):
            wh.compile(one, lambda m, b: 2 * loss(m, b), net(), optimizer=ADAM)
        # An evaluation may measure something else.
        wh.compile(one, lambda m, b: jnp.sqrt(loss(m, b)), net())


def test_a_class_of_nnx_is_given_its_random_numbers() -> None:
    """``step.init(Net)`` is what people write first."""
    key = jax.random.key(3)
    found = step().init(Net, rng=key)
    want = step().init(lambda key: Net(rngs=nnx.Rngs(key)), rng=key)
    for one, other in zip(
        jax.tree.leaves(found.params), jax.tree.leaves(want.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_zero_level_without_an_axis_is_noted() -> None:
    note = (
        "zero=2 has no effect: it acts along the mesh axis data, and this plan has "
        "none. fsdp 8 shards parameters, gradients and the optimizer's state (ZeRO-3)"
    )
    assert note in planned(mesh={"fsdp": 8}, zero=2).notes
    assert not any("zero=" in n for n in planned(mesh={"data": 8}, zero=2).notes)


def test_a_name_without_its_memory_is_the_variant_with_most() -> None:
    for name, kind in {"a100": "a100-80", "v100": "v100-32", "p100": "p100-16"}.items():
        assert wh.cluster(f"{name}:8").kinds[0].name == kind


def test_modules_list_what_is_public() -> None:
    names = ["Hook", "LoopResult", "Progress", "best", "latest", "train"]
    assert dir(wh.loop) == names
    assert dir(models) == ["available", "job", "widened"]
    for module in (wh.loop, models):
        assert all(hasattr(module, name) for name in dir(module))


def test_makers_are_given_what_they_take() -> None:
    key = jax.random.key(3)
    want = jax.tree.leaves(step().init(Net, rng=key).params)
    makers: list[Callable[..., Any]] = [
        functools.partial(Net, 32),
        lambda *, key: Net(rngs=nnx.Rngs(key)),
        lambda rng: Net(rngs=nnx.Rngs(rng)),
        lambda: Net(rngs=nnx.Rngs(0)),
    ]
    for maker in makers[:3]:
        found = jax.tree.leaves(step().init(maker, rng=key).params)
        for one, other in zip(found, want, strict=True):
            np.testing.assert_array_equal(one, other)
    assert int(step().init(makers[3], rng=key).step) == 0


def test_a_batch_may_be_a_module_of_equinox() -> None:
    eqx = pytest.importorskip("equinox")

    class Batch(eqx.Module):  # type: ignore[misc, name-defined]
        x: Any
        y: Any

    batch = Batch(BATCH["x"], BATCH["y"])
    found = planned(lambda m, b: loss(m, {"x": b.x, "y": b.y}), net(), batch)
    assert found.num_devices == 8


def test_metrics_may_be_called_as_parameters_are() -> None:
    def loss(weights: Any, batch: Any) -> Any:
        norm = jnp.linalg.norm(weights["a"]["w"])
        return linear(weights, batch), {"a": {"w": norm}}

    assert planned(loss, WEIGHTS, BATCH).num_devices == 8


@functools.cache
def found() -> Any:
    return wh.search(loss, net(), BATCH, clusters=["h100:8", "cpu:8"], optimizer=ADAM)


ATTRIBUTES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "plan": (plan, "memmory", "Plan has no 'memmory'. Did you mean 'memory'"),
    "state": (state, "parms", "TrainState has no 'parms'. Did you mean 'params'?"),
    "step": (step, "initt", "TrainStep has no 'initt'. Did you mean 'init'?"),
    "train": (
        step,
        "train",
        r"'train'. Write state, metrics = step\(state, batch\), or",
    ),
    "best": (found, "best", r"has no 'best'. found\[0\] is the best plan"),
    "none near": (wh.Aux, "zzz", "has no 'zzz'; it has means, metrics, samples, sums"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_there_is_not_is_named(name: str) -> None:
    make, attribute, words = ATTRIBUTES[name]
    instance = make()
    with pytest.raises(AttributeError, match=words):
        getattr(instance, attribute)
    assert not hasattr(instance, "__jax_array__")


def test_plans_of_a_search_have_names() -> None:
    assert found()["cpu:8"].cluster.kinds[0].name == "cpu"
    assert found()["h100:8"] is found()[found().names.index("h100:8")]
    for name, words in {
        "h100:4": "there is no plan on 'h100:4'. Did you mean 'h100:8'",
        "tpu": "there is no plan on 'tpu'; there are plans on ",
        1.5: "index is 1.5; expected the number of a plan, from 0, or one of ",
    }.items():
        with pytest.raises(wh.WhaleError, match=words):
            found()[name]


def test_attributes_have_nearest_names() -> None:
    with pytest.raises(AttributeError, match="the nearest names are compile"):
        called(getattr, wh, "complie")


@pytest.mark.relaxed_promotion
def test_what_is_printed_by_accident_is_short() -> None:
    for value in (plan(), step(), state()):
        assert len(repr(value)) < 250 and "\n" not in repr(value)
    assert repr(state()) == "<TrainState of step 0: 676 parameters, 4 arrays>"
    for value in (plan().cluster, wh.cluster("h100:4x8")):
        assert repr(value) == f"<Cluster {value.describe()}>"
    job = wh.Job(loss, lambda key: net(), BATCH, ADAM, batch_size=16, name="mine")
    assert repr(job) == "<Job 'mine': loss, batches of 16>"
    (kind,) = wh.cluster("v5e:4x4").kinds
    assert repr(kind) == "<DeviceKind v5e: TPU v5e, 16.9 GB>"
    done = wh.loop.train(step(), state(), lambda i: BATCH, steps=3)
    assert repr(done).startswith("<LoopResult of 3 steps after 0, loss 0")
    assert len(repr(done)) < 80
    assert "work" in dir(plan()) and "model_hash" not in dir(plan())


WORDS = {
    "plan mlp --batch abc": "--batch is 'abc'; expected a whole number",
    "plan mlp --batch 0": "--batch is 0; expected 1 or more",
    "plan mlp --loss-chunks x": "--loss-chunks is 'x'; expected a whole number",
    "plan mlp --cluster h100:8 --mesh dp=2": "Did you mean 'data'?",
    "plan mlp --cluster h100:8 --mesh tensor:2": "'tensor:2' is no NAME=VALUE",
    "plan mlp --cluster h100:8 --precision bfloat16": "Did you mean 'bf16'?",
    "plan mpl --cluster h100:8": "nearest: mlp",
    "plan no.py:make --cluster h100:8": "there is no such file",
    "plan mlp --set clases=3 --cluster h100:8": "nearest: classes",
    "pln mlp": "there is no command 'pln'. Did you mean 'plan'?",
    "compare a.json b.json": "there is no command 'compare'. Did you mean 'diff'?",
    "explain a.json x": "there is no command 'explain'. Did you mean 'why'?",
    "show a.json --tokens abc": "--tokens is 'abc'; expected a number",
    "plan mlp --margin much": "--margin is 'much'; expected a number",
    "show no.json": "there is no such plan file",
    "search mlp": "--on is missing; expected --on h100:8",
    "search mlp --on h100-8": "Write h100:8",
    "batch mlp": "--on is missing; expected --on h100:8",
    "search mlp --on h100:8 --price h100": "'h100' is no KIND=PRICE",
    "train mlp --steps ten": "--steps is 'ten'; expected a whole number",
    "train mlp --steps -1": "--steps is -1; expected 1 or more",
    "verify no.json --timeout soon": "--timeout is 'soon'; expected a number",
}


@pytest.mark.parametrize("words", WORDS)
def test_a_mistake_on_the_command_line_is_named(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(words.split()) == 2
    assert WORDS[words] in capsys.readouterr().err
