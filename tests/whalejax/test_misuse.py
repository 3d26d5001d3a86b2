"""Every public callable is called wrongly, one argument at a time.

A ``WhaleError`` that names the argument, or success where ``misuse_table`` says why it
is right: nothing else. What would plan or compile is refused before, or stopped where
that begins; the whole matrix goes through with what is taken.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests import misuse, misuse_table, misuse_world
from whalejax.cli.plan_source import check_source
from whalejax.meshes.arguments.wrong_arguments import WrongArguments


pytestmark = pytest.mark.relaxed_promotion


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> misuse_world.World:
    """One small model, planned and compiled."""
    return misuse_world.world(tmp_path_factory.mktemp("world"))


def test_every_public_callable_has_an_entry() -> None:
    assert set(misuse_table.ENTRIES) == set(misuse.public())


def test_every_parameter_is_given(world: misuse_world.World) -> None:
    missing = [
        f"{name}({parameter})"
        for name, entry in misuse_table.ENTRIES.items()
        for parameter in misuse.parameters(name, misuse.public()[name])
        if parameter not in entry.given(world)
    ]
    assert not missing


def test_values_that_are_right_have_a_reason() -> None:
    wrong = [
        (name, parameter, labels, reason)
        for name, entry in misuse_table.ENTRIES.items()
        for parameter, (labels, reason) in entry.legal.items()
        if not reason
        or not {label.rstrip("?") for label in labels.split()} <= set(misuse.VALUES)
    ]
    assert not wrong


@pytest.mark.parametrize("name", misuse_table.ENTRIES)
def test_wrong_calls(name: str, world: misuse_world.World) -> None:
    found = misuse.faults(name, misuse_table.ENTRIES[name], world)
    assert not found, "\n".join(found)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name, e in misuse_table.ENTRIES.items() if e.stops]
)
def test_wrong_calls_that_go_through(name: str, world: misuse_world.World) -> None:
    found = misuse.faults(name, misuse_table.ENTRIES[name], world, whole=True)
    assert not found, "\n".join(found)


def test_what_is_called_rightly_is_taken(world: misuse_world.World) -> None:
    """The values of the table themselves; else all would be refused for another one."""
    refused = []
    for name, entry in misuse_table.ENTRIES.items():
        if name in misuse_table.NOT_WHOLE:
            continue
        fault = misuse.called(name, entry, world)
        if fault:
            refused.append(f"{name}: {fault}")
    assert not refused, "\n".join(refused)


OURS = [
    name
    for name in misuse.public()
    if name.partition(".")[0] in (*wh.__all__, "SearchResult")
    and not name.endswith("=")
]
"""Callables of ``import whalejax``, and the methods of their classes."""

LOOP = {f"loop.{name}": getattr(wh.loop, name) for name in ("train", "latest", "best")}


@pytest.mark.parametrize("name", [*OURS, *LOOP])
def test_wrong_arguments_are_named(name: str) -> None:
    call: Any = {**misuse.public(), **LOOP}[name]
    known = inspect.signature(call).parameters.values()
    own = ["instance" for one in known if one.name == "self"]
    kinds = [one.kind for one in known]
    title = name.rpartition(".")[2]
    title = "step: " if name == "TrainStep.__call__" else title
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        with pytest.raises(WrongArguments, match="no argument 'surplus'") as caught:
            call(*own, surplus=1)
        assert title in str(caught.value)
    with pytest.raises(WrongArguments, match="100 arguments are given without a name"):
        call(*own, *range(100))
    needed = [p for p in known if p.default is p.empty and p.kind < p.VAR_KEYWORD]
    needed = [p for p in needed if p.name != "self" and p.kind != p.VAR_POSITIONAL]
    if needed:
        with pytest.raises(
            WrongArguments, match=rf"{needed[-1].name} (is|are) missing"
        ):
            call(*own)


def test_what_is_raised_inside_a_call_stays() -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise TypeError("of mine")

    with pytest.raises(TypeError, match="of mine") as caught:
        wh.plan(loss, {"w": jnp.ones(3)}, {"x": jnp.ones((8, 3))}, cluster="cpu:8")
    assert not isinstance(caught.value, wh.WhaleError)


def test_callables_keep_their_signatures_and_can_be_pickled() -> None:
    assert list(inspect.signature(wh.Aux).parameters)[:2] == ["metrics", "means"]
    assert list(inspect.signature(wh.loop.latest).parameters) == ["save_dir"]
    assert pickle.loads(pickle.dumps(wh.loop.train)) is wh.loop.train
    aux = wh.Aux(metrics={"a": 1})
    assert pickle.loads(pickle.dumps(aux)) == aux
    assert "Trains until" in (wh.loop.train.__doc__ or "")


LEAVES = [
    *("empty", "bytes", "decimal", "function", "generator", "huge", "key", "module"),
    *("none", "object", "text", "texts", "endless"),
]
"""Values that are no arrays of a model or a batch, or others than were planned."""


@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize("label", LEAVES)
def test_wrong_leaves(label: str, world: misuse_world.World) -> None:
    value = misuse.VALUES[label]
    for call in (
        lambda: world.step.init_from({"w": value}),
        lambda: world.step.init(lambda: {"w": value}, rng=jax.random.key(0)),
        lambda: wh.plan(misuse_world.loss, {"w": value}, world.batch),
    ):
        assert "w" in told(call)
    for call in (
        lambda: wh.plan(misuse_world.loss, world.model, {"x": value}),
        lambda: wh.compile(
            world.plan, misuse_world.loss, world.model, batch={"x": value}
        ),
        lambda: world.step.eval(world.state, {"x": value}),
        lambda: world.step(world.state, {"x": value}),
    ):
        assert "batch" in told(call)


def _told_of(world: misuse_world.World, **changes: Any) -> str:
    """What is said of a plan with other parameters than the model whose hash it has."""
    leaf = dataclasses.replace(world.plan.leaves[0], **changes)
    plan = dataclasses.replace(world.plan, leaves=(leaf,))
    return told(wh.compile, plan, misuse_world.loss, world.model)


def test_a_plan_with_another_models_parameters(world: misuse_world.World) -> None:
    text = _told_of(world, path="zz")
    assert "w: the plan has no such leaf, the model float32[8, 16]" in text
    assert "zz: the plan has float32[8, 16], the model no such leaf" in text
    text = _told_of(world, trained=False)
    assert "w: the plan has float32[8, 16], not trained, the model float32" in text


@pytest.mark.parametrize("word", ["layers=100000000", "vocab=1e9", "heads=-4096"])
def test_options_that_a_plans_model_cannot_have(
    word: str, world: misuse_world.World
) -> None:
    plan = dataclasses.replace(world.plan, source=("gpt", "seed=123456789", word))
    name = word.partition("=")[0]
    assert f"1. {name}=" in told(check_source, plan, "plan.json")
    check_source(dataclasses.replace(plan, source=("gpt", "layers=1000")), "it")


# The texts.


def told(call: Any, *arguments: Any, **named: Any) -> str:
    """What is said of a wrong call."""
    with pytest.raises(wh.WhaleError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def test_all_problems_of_a_feed_at_once() -> None:
    text = told(wh.Feed, 5, -1, "step", seed=0.5, first=None, epochs=float("nan"))
    assert text == (
        "Feed: 6 problems\n"
        "  1. source is 5; expected samples by number or an iterable of them\n"
        "  2. batch_size is -1; expected a whole number, 1 or more\n"
        "  3. first is None; expected the number of a step, 0 or more\n"
        "  4. seed is 0.5; expected a whole number, 0 or more, or None\n"
        "  5. epochs is nan; expected a whole number, 0 or more, or None\n"
        "  6. step is 'step'; expected what wh.compile gives, or None"
    )


def test_all_problems_of_a_job_at_once() -> None:
    assert told(wh.Job, 5, None, "rows", 5, -1, "a\x1b[2J") == (
        "wh.Job: 6 problems\n"
        "  1. loss_fn is 5; expected a function of model and batch\n"
        "  2. make_model is None; expected a function of a random key, or of nothing\n"
        "  3. batch is 'rows'; expected a function batch(step, size), or arrays with "
        "samples along dimension 0\n"
        "  4. optimizer is 5; expected an optax transformation such as "
        "optax.adam(1e-3), or None\n"
        "  5. batch_size is -1; expected a whole number, 1 or more, or None\n"
        "  6. name is 'a\\x1b[2J'; expected a text, without control characters"
    )


def test_what_is_no_loss_and_no_devices(world: misuse_world.World) -> None:
    assert "loss_fn is None; expected a function loss_fn(model, batch)" in told(
        wh.compile, world.plan, None, world.model
    )
    assert told(wh.compile, world.plan, misuse_world.loss, world.model, devices=[]) == (
        "devices is []; expected devices in node order, such as "
        'jax.devices("cpu")[:8], or None for all'
    )


def test_what_are_no_axis_names_and_prices(world: misuse_world.World) -> None:
    arguments = (misuse_world.loss, world.model, world.batch)
    assert "axis_names is 5; expected your names of mesh axes mapped to ours" in told(
        wh.plan, *arguments, cluster=world.cluster, axis_names=5
    )
    assert "prices is -1; expected the hourly price of one device by the name" in (
        told(wh.search, *arguments, clusters=["h100:8"], prices=-1)
    )


def test_what_is_no_array() -> None:
    x = jnp.ones((2, 4, 2, 4))
    assert told(wh.attention, None, x, "x") == (
        "wh.attention: 2 problems\n"
        "  1. query is None; expected an array of floating-point numbers\n"
        "  2. value is 'x'; expected an array of floating-point numbers"
    )


def test_a_kind_with_fields_of_other_types(world: misuse_world.World) -> None:
    fields = misuse_world.fields_of(world.kind)
    text = told(type(world.kind), **{**fields, "cores": "8", "label": 5})
    assert text == (
        "device kind 'cpu': 2 problems\n"
        "  1. label is 5; expected a text without control characters\n"
        "  2. cores is '8'; expected a whole number"
    )


def test_states_of_losses_go_through_trees_unchecked() -> None:
    """JAX puts shapes, objects and None where numbers were."""
    loss = wh.WeightedLoss(1.0, 2.0)
    assert jax.tree.map(lambda _: "x", loss).total == "x"
    assert jax.tree.map(lambda _: None, wh.Aux(metrics={"a": 1})).metrics == {"a": None}


def test_an_optimizer_of_ones_own_is_taken() -> None:
    class Mine:
        def init(self, params: Any) -> Any:
            return params

        def update(self, updates: Any, state: Any, params: Any = None) -> Any:
            return updates, state

    assert wh.Job(misuse_world.loss, dict, {"x": np.ones(3)}, Mine()).batch_size is None
    chained = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    assert wh.Job(misuse_world.loss, dict, {"x": np.ones(3)}, chained).name == "job"
