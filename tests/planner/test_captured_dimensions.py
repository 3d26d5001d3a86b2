"""Dimension analysis of traced models, and its oracle: what it calls shardable is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.planner.test_dimensions import assert_disequal
from whalejax import hlo, models
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.model.analysis import expert_roles
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.sharding.strategies import choices


pytestmark = pytest.mark.relaxed_promotion


@functools.cache
def captured(name: str, **options: Any) -> tuple[Graph, Dimensions]:
    """The graph of a reference model and its dimensions; nothing is computed."""
    job = models.job(name, **options)
    make = functools.partial(job.make_model, jax.random.key(0))
    flax = nnx.eval_shape if name.startswith(("gpt", "moe", "resnet")) else None
    model = (flax or jax.eval_shape)(make)
    graph = capture(adapt(model, job.loss_fn), job.batch_at(0)).graph
    return graph, analyse(graph)


def sizes_of(dims: Dimensions) -> list[int]:
    """Sizes of the roles, sorted."""
    return sorted(role.size for role in dims.roles)


GPT = sorted([16, 24, 48, 512, 512, 8, 6, 6, 320, 24])
WITH_TARGETS = 25
"""The batch holds one token more than the model reads; it is sliced, and whole."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [2, 12])
def test_gpt_has_the_ten_human_roles(layers: int) -> None:
    graph, dims = captured("gpt-test", layers=layers)
    assert sizes_of(dims) == sorted([*GPT, WITH_TARGETS])
    assert_disequal(graph, dims)
    assert len(dims.cuts) == 2 * layers
    (sliced,) = [r for r in dims.roles if r.unshardable]
    assert (sliced.size, sliced.unshardable) == (25, "slice needs it whole")


@pytest.mark.full
def test_126_layers_have_the_roles_of_two() -> None:
    many, few = captured("bert-test", layers=126), captured("bert-test")
    assert sizes_of(many[1]) == sizes_of(few[1])
    assert len(many[1].roles) == 12


def test_scanned_layers_have_the_same_roles_and_one_more() -> None:
    graph, dims = captured("gpt-test", layers=12, scan_layers=True, remat=True)
    assert sizes_of(dims) == sorted([*GPT, WITH_TARGETS, 12])
    assert_disequal(graph, dims)
    (layers,) = [r for r in dims.roles if r.size == 12]
    assert layers.unshardable.startswith("scan ")
    assert len(dims.cuts) == 2


def test_fused_query_key_value_offers_its_heads_to_the_tensor_axis() -> None:
    graph, dims = captured("gpt-test", layers=2, fused_qkv=True, tied_embedding=True)
    assert_disequal(graph, dims)
    (fused,) = [t for t in graph.params if t.path.endswith("0.attention." + FUSED)]
    three, heads, width = dims.layouts[fused.id][1]
    assert (3, 48) in [t.shape[1:] for t in graph.tensors if t.shape[:1] == (48,)]
    assert [dims.roles[r].size for r in (three, heads, width)] == [3, 8, 6]
    options = choices(graph, dims, build_rows(graph, dims), None)
    assert options.minor == {width}
    offered = {r for c in options.choices.values() for s in c.sets for r in s}
    assert heads in offered
    assert width not in offered
    vocabularies = [r for r in dims.roles if r.size == 512]
    assert len(vocabularies) == 1


FUSED = "query_key_value.kernel"


def test_megatron_tensor_parallelism_is_among_the_best_sets() -> None:
    graph, dims = captured("gpt-test", layers=4, annotated=False)
    options = choices(graph, dims, build_rows(graph, dims), None)
    (choice,) = options.choices.values()
    best = [sorted(dims.roles[r].size for r in s) for s in choice.sets[:2]]
    assert [8, 320, 512, 512] in best


@pytest.mark.full
def test_linen_layers_fold_as_nnx_ones_do() -> None:
    two, twelve = captured("bert-test"), captured("bert-test", layers=6)
    assert sizes_of(two[1]) == sizes_of(twelve[1])
    assert len(two[1].roles) == 12
    for graph, dims in (two, twelve):
        assert_disequal(graph, dims)


@pytest.mark.full
@pytest.mark.parametrize("name", ["bert-test", "gpt-test"])
def test_the_number_of_rows_does_not_grow_with_depth(name: str) -> None:
    few, many = (
        build_rows(*captured(name, layers=layers, **_plain(name))) for layers in (3, 6)
    )
    assert len(few.ops) == len(many.ops)
    assert len(few.flows) == len(many.flows)


def _plain(name: str) -> dict[str, Any]:
    return {"annotated": False} if name.startswith("gpt") else {}


def test_experts_are_found_and_tied_to_the_router() -> None:
    graph, dims = captured("moe-test")
    assert_disequal(graph, dims)
    (experts,) = expert_roles(graph, dims)
    assert dims.roles[experts].name == "experts"


def test_resnet_has_a_channel_role_per_stage_and_whole_taps() -> None:
    graph, dims = captured("resnet-test")
    assert_disequal(graph, dims)
    assert not dims.cuts
    whole = {r.size for r in dims.roles if "conv_general_dilated" in r.unshardable}
    assert {3, 7, 20} <= whole
    assert dims.find("classifier.kernel[1]") is not None


# The oracle.


def attention(p: Any, x: jax.Array) -> jax.Array:
    q = jnp.einsum("bse,ehd->bshd", x, p["q"])
    k = jnp.einsum("bse,ehd->bshd", x, p["k"])
    v = jnp.einsum("bse,ehd->bshd", x, p["v"])
    w = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    y = jnp.einsum("bhst,bthd->bshd", w, v)
    return jnp.einsum("bshd,hde->bse", y, p["o"]) + x


def flat_heads(p: Any, x: jax.Array) -> jax.Array:
    q = (x @ p["q"]).reshape(*x.shape[:2], 8, 16)
    return jnp.tanh(q).reshape(*x.shape[:2], 128) @ p["o"]


def normed(p: Any, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    scaled = (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6)
    return jax.nn.gelu(scaled * p["scale"]) @ p["w"]


def embedded(p: Any, x: jax.Array) -> jax.Array:
    tokens = (jnp.abs(x[..., 0]) * 10).astype(jnp.int32)
    logits = p["table"][tokens] @ p["table"].T
    return jax.nn.log_softmax(logits)


def gated(p: Any, x: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(x @ p["router"])
    hidden = jnp.einsum("bse,xem->bsxm", x, p["up"])
    return jnp.einsum("bsxm,xme,bsx->bse", jax.nn.relu(hidden), p["down"], gates)


def chained(p: Any, x: jax.Array) -> jax.Array:
    for w in p["layers"]:
        x = jnp.tanh(x @ w)
    return x


SHAPES: dict[Callable[[Any, jax.Array], jax.Array], Any] = {
    attention: {"q": (24, 8, 16), "k": (24, 8, 16), "v": (24, 8, 32), "o": (8, 32, 24)},
    flat_heads: {"q": (24, 128), "o": (128, 40)},
    normed: {"scale": (24,), "w": (24, 40)},
    embedded: {"table": (24, 16)},
    gated: {"router": (24, 8), "up": (8, 24, 48), "down": (8, 48, 24)},
    chained: {"layers": [(24, 32), (32, 32), (32, 32), (32, 16)]},
}


def _arrays(shapes: Any) -> Any:
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: generator.normal(size=shape).astype(np.float32) * 0.3,
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _sharded(leaf: Any, atoms: Any, role: int) -> PartitionSpec:
    """Shards the dimension that holds a role as its major atom."""
    spec = [
        "x" if held[:1] == (role,) and size % 8 == 0 else None
        for held, size in zip(atoms, leaf.shape, strict=True)
    ]
    return PartitionSpec(*spec)


WIDTHS = (16, 24, 32, 40)
STEPS = ("dense", "tanh", "residual", "norm", "heads", "swap", "gate")


def random_function(seed: int) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """A chain of eight layers drawn at random, and the shapes of its parameters."""
    generator = np.random.default_rng(seed)
    width, shapes, steps = 24, {}, []
    for i, step in enumerate(generator.choice(STEPS, 8)):
        steps.append((f"{step}{i}", str(step)))
        if step in ("dense", "heads"):
            wider = int(generator.choice(WIDTHS))
            shapes[f"{step}{i}"] = (width, wider)
            width = wider
        elif step in ("residual", "gate"):
            shapes[f"{step}{i}"] = (width, width)

    def run(p: Any, x: jax.Array) -> jax.Array:
        for name, step in steps:
            x = _step(step, p.get(name), x)
        return x

    return run, {**shapes, "last": (width,)}


def _step(step: str, w: Any, x: jax.Array) -> jax.Array:
    if step == "dense":
        return x @ w
    if step == "tanh":
        return jnp.tanh(x)
    if step == "residual":
        return x + jnp.tanh(x @ w)
    if step == "norm":
        return x - x.mean(-1, keepdims=True)
    if step == "heads":
        y = (x @ w).reshape(*x.shape[:2], 8, w.shape[1] // 8)
        return (y * y.sum(-2, keepdims=True)).reshape(*x.shape[:2], w.shape[1])
    if step == "swap":
        return jnp.swapaxes(jnp.swapaxes(x, 0, 1) * 2.0, 0, 1)
    return x * jax.nn.softmax(x @ w)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(5))
def test_roles_of_random_functions_can_be_sharded(seed: int) -> None:
    function, shapes = random_function(seed)
    assert_shardable(lambda p, x: function(p, x) * p["last"], shapes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("function", SHAPES, ids=lambda f: f.__name__)
def test_a_role_called_shardable_can_be_sharded(
    function: Callable[[Any, jax.Array], jax.Array],
) -> None:
    assert_shardable(function, SHAPES[function])


def assert_shardable(
    function: Callable[[Any, jax.Array], jax.Array], shapes: Any
) -> None:
    """Every role without an obstacle is sharded over eight devices, one at a time.

    The loss has to come out the same, and a role that meets itself nowhere needs no
    collective but sums.
    """
    params = _arrays(shapes)
    x = _arrays((16, 32, 24))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(function(p, x) ** 2)

    graph = capture(adapt(params, loss), x).graph
    dims = analyse(graph)
    assert_disequal(graph, dims)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    leaves, tree = jax.tree.flatten((params, x))
    want = float(jax.jit(loss)(params, x))
    cut = _cut_roles(graph, dims)
    tried = 0
    for role in dims.roles:
        if role.unshardable or role.size % 8:
            continue
        specs = [
            _sharded(leaf, dims.layouts[i], role.index) for i, leaf in enumerate(leaves)
        ]
        if not any("x" in spec for spec in specs):
            continue
        places = tree.unflatten([NamedSharding(mesh, spec) for spec in specs])
        placed = jax.device_put((params, x), places)
        compiled = jax.jit(loss, in_shardings=places).lower(*placed).compile()
        assert float(compiled(*placed)) == pytest.approx(want, rel=1e-5)
        found = hlo.collectives(compiled.as_text() or "")
        if role.index not in cut:
            assert set(found.counts) <= {"all-reduce"}, (role, found)
        tried += 1
    assert tried >= 2


def _cut_roles(graph: Graph, dims: Dimensions) -> set[int]:
    found: set[int] = set()
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        tensor = (op.operands + op.results)[cut.slot]
        found.update(dims.layouts[tensor][cut.dim])
    return found
