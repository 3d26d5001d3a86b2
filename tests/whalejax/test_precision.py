"""Precision by TaskGraph: what becomes narrow, what stays, and that it runs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import whalejax as wh
from tests.compilations import count_compilations
from tests.equality import (
    build,
    compiled,
    free_links,
    keep_gradient,
    worst_leaf,
)
from whalejax import _compat, hlo, models
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture
from whalejax.cli.replay import one_device_step
from whalejax.jobs import abstract_model
from whalejax.lowering.loss_scale import FIRST_SCALE
from whalejax.planner.model.graph import ATTENTION


pytestmark = pytest.mark.relaxed_promotion  # Flax's norms rely on it

LAYERS, EMBED, HEADS, MLP, VOCAB, LENGTH, BATCH = 2, 16, 2, 64, 64, 16, 8


def norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def layer(one: Any, x: Any) -> Any:
    query, key, value = (
        jnp.einsum("bse,ehd->bshd", norm(x), one[name]) for name in "qkv"
    )
    x = x + jnp.einsum("bshd,hde->bse", wh.attention(query, key, value), one["o"])
    hidden = jax.nn.gelu(norm(x) @ one["up"] + one["bias"])
    return x + hidden @ one["down"]


def loss_fn(params: Any, batch: Any) -> Any:
    """Layers that are marked, in a list or stacked; the loss is not."""
    layers = params["layers"]
    with wh.replicate():
        x = batch["x"]
        if isinstance(layers, list):
            for one in layers:
                x = layer(one, x)
        else:
            x, _ = jax.lax.scan(lambda x, one: (layer(one, x), None), x, layers)
    logits = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def net(*, stacked: bool = False, layers: int = LAYERS) -> Any:
    draw = np.random.default_rng(0)

    def leaf(*shape: int) -> Any:
        return jnp.asarray(draw.standard_normal(shape) / 4, jnp.float32)

    depth = EMBED // HEADS
    several = [
        {
            **{name: leaf(EMBED, HEADS, depth) for name in "qkv"},
            "o": leaf(HEADS, depth, EMBED),
            "up": leaf(EMBED, MLP),
            "bias": leaf(MLP),
            "down": leaf(MLP, EMBED),
        }
        for _ in range(layers)
    ]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *several)
    return {"layers": stack if stacked else several, "head": leaf(EMBED, VOCAB)}


def data(scale: float = 1.0) -> Any:
    draw = np.random.default_rng(1)
    x = draw.standard_normal((BATCH, LENGTH, EMBED)).astype(np.float32)
    return {"x": x * scale, "y": draw.integers(0, VOCAB, (BATCH, LENGTH))}


def job() -> wh.Job:
    return wh.Job(loss_fn, net, data(), optax.sgd(0.1), BATCH)


def small() -> Any:
    return net(layers=1)


def step_of(devices: int, **options: Any) -> wh.TrainStep:
    options = {"zero": 0, "remat": "none", **options}
    return compiled(job(), small(), devices=devices, **options)


def gradients(step: wh.TrainStep, model: Any, batch: Any) -> list[np.ndarray]:
    state = step.init_from(model)
    with count_compilations() as compiles:
        state, _ = step(state, batch)
        leaves = [np.asarray(g) for g in jax.tree.leaves(state.opt_state["gradient"])]
        step(state, batch)
    assert compiles.count == 1
    assert {str(g.dtype) for g in leaves} == {"float32"}
    return leaves


def captured(loss: Any, model: Any, batch: Any) -> Captured:
    return capture(adapt(model, loss), batch)


def narrowed(precision: Mapping[str, str], *, stacked: bool = False) -> Captured:
    found = captured(loss_fn, net(stacked=stacked), data())
    return found.with_precisions(tuple(precision.items()))


def equations(jaxpr: Any, scope: str = "") -> Iterator[tuple[Any, str]]:
    """All equations with the scopes around them."""
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        here = f"{scope}/{_compat.scope_text(equation)}"
        yield equation, here
        for inner in _compat.inner_jaxprs(equation):
            yield from equations(inner, here)


def products(found: Captured) -> Counter[tuple[bool, str]]:
    """Whether they are in the marked TaskGraph, and the type of operands and result."""
    counted: Counter[tuple[bool, str]] = Counter()
    for equation, scope in equations(found.jaxpr):
        if equation.primitive.name == "dot_general":
            atoms = (*equation.invars, *equation.outvars)
            (dtype,) = {str(atom.aval.dtype) for atom in atoms}
            counted["replicate" in scope, dtype] += 1
    return counted


# The program.


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.parametrize("stacked", [False, True])
def test_products_of_named_task_graphs_alone_are_narrow(stacked: bool) -> None:
    inside = 8 * (1 if stacked else LAYERS)
    before = captured(loss_fn, net(stacked=stacked), data())
    assert products(before) == {(True, "float32"): inside, (False, "float32"): 1}
    for precision, marked, other in (
        ({"replicate": "bf16"}, "bfloat16", "float32"),
        ({"default": "f16"}, "float32", "float16"),
        ({"*": "bf16"}, "bfloat16", "bfloat16"),
        ({"*": "f16", "default": "f32"}, "float16", "float32"),
    ):
        after = narrowed(precision, stacked=stacked)
        assert products(after) == {(True, marked): inside, (False, other): 1}
        assert after.graph.task_graphs == before.graph.task_graphs
        assert after.graph.model_hash == before.graph.model_hash
        outputs = _compat.open_jaxpr(after.jaxpr)[0].outvars
        assert all(v.aval.dtype != jnp.bfloat16 for v in outputs)


def test_what_adds_up_or_bends_stays_wide() -> None:
    steep = "exp log rsqrt reduce_sum reduce_max square erf cumsum".split()
    seen = set()
    for stacked in (False, True):
        for equation, _ in equations(narrowed({"*": "f16"}, stacked=stacked).jaxpr):
            atoms = (*equation.invars, *equation.outvars)
            kinds = {str(atom.aval.dtype) for atom in atoms}
            if equation.primitive.name in steep:
                seen.add(equation.primitive.name)
                assert "float16" not in kinds, equation
            if equation.primitive.name == "scan":
                carried = _compat.scan_parts(equation).num_carries
                assert {v.aval.dtype for v in equation.outvars[:carried]} == {
                    jnp.dtype("float32")
                }
    assert {"exp", "log", "rsqrt", "reduce_sum"} <= seen


def test_it_computes_what_one_would_write_by_hand() -> None:
    def loss(params: Any, x: Any) -> Any:
        h = jnp.where(x[:, :1] > 0, jnp.tanh(x @ params["up"] + params["bias"]), 0.0)
        return (jax.nn.relu(h @ params["down"]) * 2).sum() / x.size

    def by_hand(params: Any, x: Any) -> Any:
        def product(a: Any, b: Any) -> Any:
            return a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)

        h = product(x, params["up"]).astype(jnp.float32) + params["bias"]
        zero = jnp.zeros((), jnp.bfloat16)
        h = jnp.where(x[:, :1] > 0, jnp.tanh(h.astype(jnp.bfloat16)), zero)
        found = jax.nn.relu(product(h, params["down"])) * 2
        return found.astype(jnp.float32).sum() / x.size

    layers = net()["layers"][0]
    x = data()["x"].reshape(-1, EMBED)
    program = captured(loss, layers, x).with_precisions((("*", "bf16"),)).jaxpr
    run = jax.jit(jaxpr_as_fun(program))
    leaves = jax.tree.leaves(layers)
    found = jax.value_and_grad(lambda xs: run(*xs, x)[0])(leaves)
    wanted = jax.value_and_grad(jax.jit(by_hand))(layers, x)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want)


@jax.custom_vjp
def own_product(a: Any, b: Any) -> Any:
    return a @ b


own_product.defvjp(
    lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
)


def in_a_branch(x: Any, w: Any) -> Any:
    def deep(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x @ w, None), x @ w, None, length=3)[0]

    return jax.lax.cond(x.sum() > 0, deep, lambda x: x, x)


def in_a_loop(x: Any, w: Any) -> Any:
    def turn(carry: Any) -> Any:
        return carry[0] + 1, carry[1] @ w

    return jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))[1]


def with_an_algorithm(x: Any, w: Any) -> Any:
    return jax.lax.dot(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)


BRANCH = "2 products inside lax.cond stay"
LOOP = "1 product inside lax.while_loop stays"
OWN = "1 product inside functions with derivatives of their own stays"
ALGORITHM = "1 product of a chosen algorithm stays"


@pytest.mark.parametrize(
    ("functions", "plain", "said"),
    [
        ([in_a_branch], False, [BRANCH]),
        ([in_a_loop], False, [LOOP]),
        ([own_product], True, [OWN]),
        ([with_an_algorithm], False, [ALGORITHM]),
        ([in_a_branch, in_a_loop, own_product], True, [BRANCH, LOOP, OWN]),
        ([], True, []),
    ],
)
def test_products_that_stay_in_float32_are_counted(
    functions: list[Any], plain: bool, said: list[str]
) -> None:
    def loss(params: Any, x: Any) -> Any:
        with wh.replicate():
            for function in functions:
                x = function(x, params["w"])
        if plain:
            x = x @ params["head"]
        return x.sum() / x.size

    model = {"w": jnp.ones((4, 4)), "head": jnp.ones((4, 6))}
    found = captured(loss, model, jnp.ones((8, 4)))
    after = found.with_precisions((("*", "bf16"),))
    told = [note for note in after.notes if note not in found.notes]
    assert told == [f"bf16 in all: {words} in float32" for words in said]
    if plain:
        assert (False, "bfloat16") in products(after)
    # What is said is said of the TaskGraphs that are named.
    after = found.with_precisions((("default", "bf16"),))
    told = [note for note in after.notes if note not in found.notes]
    no_effect = "bf16 in default has no effect: no product of float32 was found there"
    assert told == ([] if plain else [no_effect])


def test_numbers_that_do_not_fit_are_met_in_float32() -> None:
    def loss(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        return jnp.where(y > 0, y, -1e9).max() + jnp.where(y > 0, y, -1e3).max()

    program = captured(loss, {"w": jnp.ones((4, 4))}, jnp.ones((2, 4)))
    after = program.with_precisions((("*", "f16"),)).jaxpr
    kinds = [
        str(equation.outvars[0].aval.dtype)
        for equation, _ in equations(after)
        if equation.primitive.name == "select_n"
    ]
    assert kinds == ["float32", "float16"]


def test_stacked_parameters_are_cast_before_their_loop() -> None:
    program = narrowed({"replicate": "bf16"}, stacked=True).jaxpr
    (scan,) = [e for e, _ in equations(program) if e.primitive.name == "scan"]
    kinds = Counter(str(a.aval.dtype) for a in scan.invars if len(a.aval.shape) > 2)
    # A bias is added in float32, and so is its gradient.
    assert kinds == {"bfloat16": 6, "float32": 1}
    bias = [a for a in scan.invars if a.aval.shape == (LAYERS, MLP)]
    assert [str(a.aval.dtype) for a in bias] == ["float32"]


@pytest.mark.full
def test_weights_that_are_not_trained_are_read_alike() -> None:
    def kinds(trainable: Any) -> Counter[str]:
        adapter = adapt(net(stacked=True), loss_fn, trainable=trainable)
        found = capture(adapter, data()).with_precisions((("*", "bf16"),))
        return Counter(
            f"{e.primitive.name} {e.outvars[0].aval.dtype}"
            for e, _ in equations(found.jaxpr)
            if e.primitive.name in ("tanh", "convert_element_type", "dot_general")
        )

    assert kinds("head") == kinds(None)
    assert kinds(None)["tanh bfloat16"] == 1


@pytest.mark.full
def test_attention_and_logits_are_found_in_it() -> None:
    for stacked in (False, True):
        found = narrowed({"*": "bf16"}, stacked=stacked)
        ring = found.with_attention((("*", "ring"),))
        calls = sum(op.kind == ATTENTION for op in ring.graph.ops)
        assert calls == (1 if stacked else LAYERS)
        cut = ring.with_chunks(2)
        assert any(op.chunks == 2 for op in cut.graph.ops)
        assert products(cut.with_remat((("*", "dots"),))) == products(found)


def test_experts_that_no_mark_covers_have_a_name() -> None:
    task = models.job("moe-test", annotated=False)
    before = captured(task.loss_fn, abstract_model(task), task.batch_at(0))
    after = before.with_precisions((("experts", "bf16"),))
    kinds = Counter(
        str(e.outvars[0].aval.dtype)
        for e, _ in equations(after.jaxpr)
        if e.primitive.name == "dot_general"
    )
    assert 0 < kinds["bfloat16"] < kinds["float32"]


# Steps.


@functools.cache
def exact() -> list[np.ndarray]:
    return gradients(step_of(1, mesh={}), small(), data())


@functools.cache
def alone(where: str, precision: str) -> float:
    """The error of one device's gradient."""
    found = gradients(
        step_of(1, mesh={}, precision={where: precision}), small(), data()
    )
    return worst_leaf(found, exact(), [""] * len(found))[0]


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("replicate", "bf16", {"mesh": {"data": 2}, "remat": {"replicate": "full"}}),
]
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("*", "f16", {"mesh": {"context": 4}, "attention": "ring", "loss_chunks": 2}),
    ("*", "bf16", {"mesh": {"fsdp": 8}, "num_micro_batches": 1}),
    ("*", "f16", {"mesh": {"fsdp": 4}, "remat": "dots"}),
    ("replicate", "bf16", {"mesh": {"data": 2, "context": 4}, "attention": "ring"}),
    ("replicate", "f16", {"mesh": {"fsdp": 4, "context": 2}, "attention": "gather"}),
    ("default", "bf16", {"mesh": {"fsdp": 4, "tensor": 2}, "loss_chunks": 2}),
    ("*", "f16", {"mesh": {"data": 2}, "zero": 2, "num_micro_batches": 4}),
]


def held(where: str, precision: str, options: dict[str, Any]) -> None:
    own = alone(where, precision)
    assert 1e-5 < own < 3e-2
    devices = int(np.prod(list(options["mesh"].values())))
    step = step_of(devices, precision={where: precision}, **options)
    assert step.plan.precisions == ((where, precision),)
    found = gradients(step, small(), data())
    error = worst_leaf(found, exact(), [leaf.path for leaf in step.plan.leaves])
    assert 1e-5 < error[0] <= 1.5 * own, error


@pytest.mark.full
@pytest.mark.parametrize(("where", "precision", "options"), CASES)
def test_it_is_as_near_to_float32_as_one_device(
    where: str, precision: str, options: dict[str, Any]
) -> None:
    held(where, precision, options)


@pytest.mark.full
@pytest.mark.parametrize(("where", "precision", "options"), MORE)
def test_so_it_is_on_other_meshes(
    where: str, precision: str, options: dict[str, Any]
) -> None:
    held(where, precision, options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes", "precision", "options"),
    [
        (
            "gpt-test",
            {},
            {"replicate": "bf16"},
            {"mesh": {"context": 4, "tensor": 2}, "attention": "ring"},
        ),
        (
            "gpt-test",
            {},
            {"split": "f16"},
            {"mesh": {"fsdp": 4, "tensor": 2}, "loss_chunks": 4},
        ),
        (
            "gpt-test",
            {"annotated": False, "scan_layers": True},
            {"*": "bf16"},
            {"mesh": {"fsdp": 4}, "remat": {"default": "dots"}},
        ),
        (
            "llama-test",
            {},
            {"default": "bf16"},
            {"mesh": {"data": 2, "tensor": 2}, "sequence_parallel": True},
        ),
        (
            "llama-test",
            {},
            {"default": "f16"},
            {"mesh": {"context": 4}, "attention": "ring", "loss_chunks": 2},
        ),
        ("moe-test", {}, {"split": "f16"}, {"mesh": {"data": 2, "expert": 4}}),
    ],
)
def test_reference_models_are_as_near_as_one_device(
    name: str,
    sizes: dict[str, Any],
    precision: dict[str, str],
    options: dict[str, Any],
) -> None:
    task = models.job(name, **sizes)
    model, batch = build(task), task.batch_at(0)
    devices = int(np.prod(list(options["mesh"].values())))
    wanted, one, several = (
        gradients(compiled(task, model, **given), model, batch)
        for given in (
            {"devices": 1, "mesh": {}},
            {"devices": 1, "mesh": {}, "precision": precision},
            {"devices": devices, "precision": precision, **options},
        )
    )
    paths = [""] * len(wanted)
    own = worst_leaf(one, wanted, paths)[0]
    assert 1e-5 < own
    assert worst_leaf(several, wanted, paths)[0] <= 1.5 * own


@pytest.mark.full
def test_an_overflow_is_skipped_and_counted() -> None:
    step = step_of(2, mesh={"fsdp": 2}, precision={"replicate": "f16"})
    # The norms make any input small, so a weight is large.
    wild = small()
    wild["layers"][0]["down"] *= 1e6
    before = step.init_from(wild)
    kept = [np.asarray(x) for x in jax.tree.leaves(before.params)]
    after, metrics = step(before, data())
    assert int(metrics["skipped_steps"]) == 1
    assert float(metrics["loss_scale"]) == FIRST_SCALE / 2
    for one, other in zip(kept, jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(one, other)
    _, metrics = step(step.init_from(small()), data())
    assert int(metrics["skipped_steps"]) == 0


# Plans.


def asked(*, stacked: bool = False, **options: Any) -> wh.Plan:
    return wh.plan(
        loss_fn,
        net(stacked=stacked),
        data(),
        **{
            "optimizer": keep_gradient(),
            "cluster": free_links(8),
            "mesh": {"fsdp": 8},
            "zero": 0,
            "remat": "none",
            "num_micro_batches": 1,
            **options,
        },
    )


@pytest.mark.full
@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.full), True])
def test_parameters_are_gathered_in_the_type_that_they_are_read_in(
    stacked: bool,
) -> None:
    """In float16, because this compiler sends bfloat16 as float32."""
    plan = asked(precision={"replicate": "f16"}, stacked=stacked)
    wide = asked(stacked=stacked)
    planned, before = (
        sum(c.payload_bytes * c.count for c in p.collectives if c.kind == "all-gather")
        for p in (plan, wide)
    )
    step = wh.compile(
        plan,
        loss_fn,
        net(stacked=stacked),
        optimizer=keep_gradient(),
        devices=jax.devices(),
    )
    found = hlo.collectives(hlo.read(step.lower().compile().as_text()))
    gathers = found.of("all-gather")
    assert sum(i.nbytes * i.count for i in gathers) == planned < 0.7 * before


@pytest.mark.full
def test_narrow_values_take_less_memory_and_time() -> None:
    task = models.job("llama-test", embed=512, heads=8, mlp=2048, sequence=256)
    full, part, half = (
        wh.plan(
            task.loss_fn,
            abstract_model(task),
            jax.eval_shape(lambda: task.batch_at(0, 64)),
            cluster="h100:8",
            mesh={"fsdp": 8},
            remat="none",
            precision=precision,
        )
        for precision in ("f32", {"*": "bf16"}, "bf16")
    )
    assert part.memory.params_bytes == full.memory.params_bytes
    assert part.memory.temporary_bytes < 0.8 * full.memory.temporary_bytes
    assert half.time.compute_seconds < part.time.compute_seconds
    # float32 is multiplied as TensorFloat-32, at half of the rate.
    assert part.time.compute_seconds < 0.9 * full.time.compute_seconds
    moved = [
        sum(c.payload_bytes * c.count for c in p.collectives if c.what == "parameter")
        for p in (full, part)
    ]
    assert moved[1] < 0.6 * moved[0]


@pytest.mark.full
def test_a_plan_remembers_it(tmp_path: Path) -> None:
    plan = asked(precision={"replicate": "bf16", "default": "f32"})
    assert (plan.precision, plan.precisions) == ("f32", (("replicate", "bf16"),))
    assert "bf16 in replicate" in str(plan) and not plan.scales_loss
    plan.save(tmp_path / "plan.json")
    loaded = wh.Plan.load(tmp_path / "plan.json")
    # A replay on one device computes in the same types.
    replayed = one_device_step(job(), net(), data(), loaded)
    assert replayed.plan.precisions == plan.precisions
    assert loaded == plan and loaded.asked_precision == {"replicate": "bf16"}
    other = plan.what_if(precision={"*": "f16", "default": "f32"})
    assert other.scales_loss and other.hash != plan.hash
    assert other.precisions == (("default", "f32"), ("*", "f16"))
    assert "f32 in default, f16 in all others" in str(other)
    whole = plan.what_if(precision="f16")
    assert whole.scales_loss and whole.asked_precision == "f16"
    # The same mesh, and yet another plan.
    first = str(whole).splitlines()[0]
    assert first.endswith(" · f16") and " · f16: " in whole.explain().splitlines()[0]
    assert "f32" not in str(plan.what_if(precision="f32")).splitlines()[0]
    assert asked(precision={}).hash == asked().hash


@pytest.mark.full
def test_estimates_count_it() -> None:
    options = {"cluster": "h100:8", "mesh": None, "runnable": False, "remat": None}
    full, part = (asked(precision=p, **options) for p in ("f32", {"*": "bf16"}))
    assert part.precisions == (("*", "bf16"),)
    assert part.time.compute_seconds < full.time.compute_seconds


def test_where_it_has_no_effect_is_said() -> None:
    plan = asked(precision={"*": "bf16", "replicate": "f32", "default": "f32"})
    assert any("has no effect: no product" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("half", "precision is 'half'; expected one of f32, bf16, f16"),
        ({"head": "bf16"}, "TaskGraph 'head'; expected some of default, replicate"),
        ({"*": "fp8"}, "'fp8' is not a precision; expected one of f32, bf16, f16"),
        ({"default": ["f16"]}, r"precision is {'default': \['f16'\]}; expected one"),
        ({"experts": "f16"}, "there is no TaskGraph 'experts'"),
        (16, "precision is 16; expected one of f32, bf16, f16, or one for each"),
        (jnp.bfloat16, r"precision is <class .*bfloat16.*>; expected one of f32, bf16"),
        (np.dtype(np.float16), r"precision is dtype\(.*\); expected one of f32, bf16"),
    ],
)
def test_bad_precisions_are_named(precision: Any, message: str) -> None:
    with pytest.raises(wh.WhaleError, match=message):
        asked(precision=precision)
