"""What the compiled step communicates: every collective expected, none besides.

Shapes are compared with their dimensions sorted and without those of size one, because
the compiler transposes and reshapes at will. Sizes are such that no parameter has the
shape of an activation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
from tests.cases import MODELS
from tests.equality import build, compiled, free_links
from whalejax import hlo, models
from whalejax.runtime.train_step import TrainStep


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

Shape = tuple[int, ...]
BATCH: Final = 32
GPT_STREAM: Final = (24, BATCH, 48)  # sequence, batch, embed
SCALAR: Final = ()
HERE: Final = wh.Cluster.detect(calibrate=False)


@functools.cache
def step_of(name: str, annotated: bool = False, **options: Any) -> TrainStep:
    """The compiled step of a model of the matrix in float32 on eight devices."""
    model = next(m for m in MODELS if m.name == name)
    job = model.job("float32", annotated=annotated)
    options["mesh"] = dict(options["mesh"])
    if options.pop("split", False):
        options["default"] = wh.split()
    options = {"zero": 0, "sequence_parallel": False, **options}
    return compiled(job, abstract(name, annotated), **options)


@functools.cache
def abstract(name: str, annotated: bool) -> Any:
    """A model, built once."""
    model = next(m for m in MODELS if m.name == name)
    return build(model.job("float32", annotated=annotated))


@functools.cache
def collectives_of(step: TrainStep) -> hlo.Collectives:
    """What the step's program communicates."""
    return hlo.collectives(step.lower().compile().as_text())


def plain(shape: Shape) -> Shape:
    """A shape without the order of its dimensions, and without those of size one."""
    return tuple(sorted(size for size in shape if size != 1))


def shapes_of(
    instructions: Iterable[hlo.Instruction], *, group_size: int | None = None
) -> Counter[Shape]:
    """How often each plain shape is communicated in a step."""
    found: Counter[Shape] = Counter()
    for i in instructions:
        if group_size in (None, i.group_size):
            for _, shape in i.shapes:
                found[plain(shape)] += i.count
    return found


def parameters(
    step: TrainStep, where: Callable[[Any], bool] | None = None
) -> Counter[Shape]:
    """How often each plain shape occurs among the parameters."""
    leaves = [x for x in step.plan.leaves if where is None or where(x)]
    return Counter(plain(leaf.shape) for leaf in leaves)


def sharded(spec: Any) -> bool:
    """Whether a layout shards any dimension."""
    return any(spec)


DATA: Final = (("data", 8),)
FSDP: Final = (("fsdp", 8),)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_data_parallel_reduces_every_gradient_once(name: str) -> None:
    step = step_of(name, mesh=DATA)
    found = collectives_of(step)
    # One instruction: the compiler combines them. The scalar is the loss.
    assert found.counts == {"all-reduce": 1}
    assert shapes_of(found.instructions) == parameters(step) + Counter([SCALAR])


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_gathers_every_parameter_once_after_the_update(zero: int) -> None:
    step = step_of("mlp", mesh=DATA, zero=zero)
    found = collectives_of(step)
    # The CPU compiler makes no reduce-scatter: each device takes its part of the sum.
    assert set(found.counts) == {"all-reduce", "all-gather"}
    assert shapes_of(found.of("all-reduce")) == parameters(step) + Counter([SCALAR])
    owned = parameters(step, lambda leaf: sharded(leaf.optimizer_spec))
    assert owned.total() == 6
    assert shapes_of(found.of("all-gather")) == owned


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_fsdp_gathers_parameters_and_no_activation(name: str) -> None:
    step = step_of(name, mesh=FSDP)
    found = collectives_of(step)
    assert set(found.counts) == {"all-reduce", "all-gather"}
    stored = parameters(step, lambda leaf: sharded(leaf.param_spec))
    assert stored.total() >= 6
    gathered = shapes_of(found.of("all-gather"))
    assert not any(BATCH in shape for shape in gathered)
    # Each once in the forward pass, and some again in the backward pass.
    assert set(gathered) == set(stored)
    assert all(n <= gathered[shape] <= 2 * n for shape, n in stored.items())
    reduced = shapes_of(found.of("all-reduce"))
    assert reduced == parameters(step) + Counter([SCALAR])


def test_fsdp_keeps_no_gathered_parameter_for_the_backward_pass() -> None:
    step = step_of("mlp", mesh=FSDP)
    gathered = shapes_of(collectives_of(step).of("all-gather"))
    # The first layer's kernel and the biases are not needed there.
    again = Counter({(48, 320): 1, (40, 48): 1})
    assert gathered == parameters(step) + again


def test_fsdp_gathers_one_layer_of_a_loop_at_a_time() -> None:
    step = step_of("gpt-scan", mesh=FSDP)
    gathers = collectives_of(step).of("all-gather")
    in_loops = shapes_of(i for i in gathers if i.count > 1)
    layers = parameters(step, lambda leaf: leaf.path.startswith("blocks."))
    assert len(layers) > 4 and all(2 in shape for shape in layers)
    gathered = {shape for shape in shapes_of(gathers) if 2 in shape}
    assert not gathered, "a stack of all layers is gathered"
    # Four products of attention and two of the feed-forward network: once in each of
    # two layers forward, and again backward.
    assert in_loops[6, 8, 48] == 4 * 2 * 2
    assert in_loops[48, 320] == 2 * 2 * 2


def test_hybrid_gathers_over_each_axis_what_that_axis_shards() -> None:
    step = step_of("mlp", mesh=(("data", 2), ("fsdp", 4)), zero=1)
    found = collectives_of(step)
    gathers = found.of("all-gather")
    # For computing, over fsdp: whole parameters, some for the backward pass again.
    for shape, times in parameters(step).items():
        assert times <= shapes_of(gathers, group_size=4)[shape] <= 2 * times
    # After the update, over data: the quarter of each that a device stores.
    quarters = Counter(
        plain(_divided(leaf.shape, leaf.param_spec, 4)) for leaf in step.plan.leaves
    )
    assert shapes_of(gathers, group_size=2) == quarters
    assert {i.group_size for i in gathers} == {2, 4}


def _divided(shape: Shape, spec: Any, parts: int) -> Shape:
    return tuple(n // parts if axes else n for n, axes in zip(shape, spec, strict=True))


def test_tensor_parallel_reduces_activations_only() -> None:
    # Smaller products are as fast, so that sharding pays for every one.
    cluster = free_links(8)
    kind = dataclasses.replace(cluster.slowest, curve="")
    (node,) = cluster.nodes
    cluster = dataclasses.replace(
        cluster, nodes=(dataclasses.replace(node, kind=kind),)
    )
    step = step_of("gpt", mesh=(("tensor", 8),), split=True, cluster=cluster)
    found = collectives_of(step)
    assert set(found.counts) == {"all-reduce"}
    expected = Counter(
        {
            # Forward: the lookup in a table sharded by vocabulary, the outputs of
            # attention and of the feed-forward network. Backward: the inputs of query,
            # key and value (this compiler does not add the three up first), of the
            # feed-forward network and of the head.
            GPT_STREAM: 3 + 3 + 1 + 1,
            # The cross-entropy's maximum and sum over the vocabulary, and the logit of
            # the target, which one device holds.
            (24, BATCH): 3,
        }
    )
    assert shapes_of(found.instructions) == expected
    assert not set(expected) & set(parameters(step))


def test_split_head_stays_where_it_is() -> None:
    # Links that cost something decide which dimension it is.
    step = step_of("mlp", annotated=True, mesh=(("tensor", 8),), cluster="v100-16:8")
    found = collectives_of(step)
    (head,) = [x for x in step.plan.leaves if sharded(x.param_spec)]
    # It has fewer classes than features: sharding the features exchanges these once
    # in each direction, instead of gathering all of them everywhere.
    assert head.param_spec == (("tensor",), ())
    assert found.counts == {"all-to-all": 2, "all-reduce": 2}
    parts = Counter({(BATCH // 8, 48 // 8): 2 * 8})
    assert shapes_of(found.of("all-to-all")) == parts
    # What is replicated computes on a part of the samples each. The logits are sums
    # over the features; with them every device holds the loss of all samples.
    expected = Counter([(24, 320), (320,), (48, 320), (48,), (BATCH, 40)])
    assert shapes_of(found.of("all-reduce")) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "head"), [("mlp", "head.w"), ("resnet", "classifier")]
)
@pytest.mark.parametrize("mesh", [(("tensor", 8),), (("data", 2), ("tensor", 4))])
def test_kernel_of_a_split_head_is_never_gathered(
    name: str, head: str, mesh: Any
) -> None:
    step = step_of(name, annotated=True, mesh=mesh)
    (leaf,) = [
        x for x in step.plan.leaves if x.path.startswith(head) and len(x.shape) == 2
    ]
    assert sharded(leaf.param_spec)
    found = collectives_of(step)
    assert plain(leaf.shape) not in shapes_of(found.of("all-gather"))
    # Its gradient is reduced over data alone, by the shard.
    over_tensor = shapes_of(found.of("all-reduce"), group_size=dict(mesh)["tensor"])
    shard = plain(_divided(leaf.shape, leaf.param_spec, dict(mesh)["tensor"]))
    # The logits that are added up over tensor may happen to have its shape.
    logits = plain((BATCH // dict(mesh).get("data", 1), leaf.shape[1]))
    assert over_tensor[shard] == (shard == logits)
    assert plain(leaf.shape) not in shapes_of(found.of("all-reduce"))


Mark = Callable[[], AbstractContextManager[Any]]


def _three_layers(*marks: Mark) -> wh.Job:
    """Three layers, each under a mark of its own."""

    def make(key: Any) -> dict[str, jax.Array]:
        del key
        return {
            "a": jnp.ones((24, 320)),
            "b": jnp.ones((320, 40)),
            "c": jnp.ones((40, 56)),
        }

    def loss_fn(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        x = batch["x"]
        for name, mark in zip("ab", marks[:2], strict=True):
            with mark():
                x = x @ params[name]
        with marks[2]():
            return jnp.mean((x @ params["c"]) ** 2)

    batch = {"x": np.ones((BATCH, 24), np.float32)}
    return wh.Job(loss_fn, make, batch, None, BATCH)


def _three_layer_step(*marks: Mark, **mesh: int) -> TrainStep:
    job = _three_layers(*marks)
    return compiled(job, job.make_model(None), mesh=mesh, zero=0)


def test_no_bridge_between_replicated_parts() -> None:
    step = _three_layer_step(wh.replicate, wh.replicate, wh.replicate, data=8)
    found = collectives_of(step)
    assert found.counts == {"all-reduce": 1}
    assert shapes_of(found.instructions) == parameters(step) + Counter([SCALAR])


def test_no_bridge_between_split_parts_that_agree() -> None:
    step = _three_layer_step(wh.replicate, wh.split, wh.split, tensor=8)
    found = collectives_of(step)
    # One border: samples are exchanged for columns of b, there and back.
    assert found.counts["all-to-all"] == 2
    assert "all-gather" not in found.counts
    # Behind it, b's outputs are summed over its sharded rows, c takes them as they
    # are, and backwards c's inputs; then a's gradient and the loss.
    expected = Counter({(BATCH, 40): 2, (24, 320): 1, SCALAR: 1})
    assert shapes_of(found.of("all-reduce")) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("again", [jax.checkpoint, lambda f: f], ids=["again", ""])
@pytest.mark.parametrize("taken", [True, False])
def test_borders_in_a_branch_are_crossed_there(taken: bool, again: Any) -> None:
    """The plan's gathers and no others; what is kept may be exchanged once more."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layers(x: jax.Array) -> jax.Array:
            with wh.replicate():
                x = jnp.tanh(x @ params["a"])
            with wh.split():
                return jnp.tanh(x @ params["b"]) @ params["c"]

        def cut(x: jax.Array) -> jax.Array:
            return x[:, :16]

        @again
        def chosen(x: jax.Array) -> jax.Array:
            return jax.lax.cond((x[0, 0] > 0) == taken, layers, cut, x)

        return jnp.mean(chosen(x) ** 2)

    params = {
        "a": jnp.full((24, 320), 0.01),
        "b": jnp.full((320, 40), 0.01),
        "c": jnp.full((40, 16), 0.01),
    }
    x = jnp.linspace(0.5, 1.0, BATCH * 24).reshape(BATCH, 24)
    job = wh.Job(loss, lambda key: params, x, None, BATCH)
    step = compiled(job, params, mesh={"tensor": 8}, zero=0, cluster=HERE)
    found = collectives_of(step)
    planned: Counter[str] = Counter()
    for c in step.plan.collectives:
        planned[c.kind] += c.payload_bytes * c.count
    assert found.nbytes["all-gather"] == planned["all-gather"]
    assert planned["all-to-all"] <= found.nbytes["all-to-all"]
    assert found.nbytes["all-to-all"] <= 2 * planned["all-to-all"]
    state, metrics = step(step.init_from(params), x)
    value, expected = jax.jit(jax.value_and_grad(loss))(params, x)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, gradient in state.opt_state["gradient"].items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-9)
        assert np.any(expected[name]) == taken


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("moe-top-2", (("expert", 8),)),
        ("moe-top-2", (("data", 2), ("expert", 4))),
        ("moe-switch", (("expert", 8),)),
    ],
)
def test_experts_exchange_tokens_twice_each_way(name: str, mesh: Any) -> None:
    step = step_of(name, mesh=mesh)
    found = collectives_of(step)
    exchanges = found.of("all-to-all")
    # One layer: out to the experts and back, forward and backward.
    assert sum(i.count for i in exchanges) == 4
    assert {i.group_size for i in exchanges} == {dict(mesh)["expert"]}
    assert set(found.counts) == {"all-to-all", "all-reduce"}
    experts = {leaf.shape for leaf in step.plan.leaves if "experts" in leaf.path}
    for instruction in found.of("all-reduce"):
        whole = {shape for _, shape in instruction.shapes} & experts
        assert not whole


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mesh",
    [{"expert": 4, "tensor": 2}, {"data": 2, "expert": 2, "tensor": 2}],
    ids=str,
)
def test_tokens_reach_experts_that_tensor_shards_too(mesh: dict[str, int]) -> None:
    """Outside, both axes hold the batch; inside, experts and their width.

    One goes to another dimension and the other is gathered: asked for both at once,
    the compiler replicates all tokens.
    """
    job = models.job("moe-test", batch_size=BATCH, annotated=False, mlp=1024)
    step = compiled(job, build(job), mesh=mesh, cluster=HERE)
    assert {r.task_graph for r in step.plan.compute} >= {"experts"}
    found = collectives_of(step)
    predicted: Counter[str] = Counter()
    for c in step.plan.collectives:
        predicted[c.kind] += c.payload_bytes * c.times(step.plan.num_micro_batches)
    exchanged = ("all-to-all", "all-gather")
    assert [found.nbytes[k] for k in exchanged] == [predicted[k] for k in exchanged]
    assert predicted["all-to-all"] > 0


@pytest.mark.full
def test_gathering_parameters_again_repeats_no_exchange_of_tokens() -> None:
    step = step_of("moe-top-2", mesh=(("fsdp", 2), ("expert", 4)))
    found = collectives_of(step)
    assert found.counts["all-to-all"] == 4
    gathered = shapes_of(found.of("all-gather"))
    assert set(gathered) <= set(parameters(step)) | {(4, 48, 320)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_context_gathers_keys_and_values_and_nothing_else(name: str) -> None:
    mesh = (("data", 2), ("context", 4))
    step = step_of(name, mesh=mesh, cluster=HERE, attention="gather")
    found = collectives_of(step)
    # One layer; shapes are those of one device, whole along the sequence.
    whole = (6, 8, BATCH // 2, 24)
    assert set(found.counts) == {"all-gather", "all-reduce"}
    assert shapes_of(found.of("all-gather")) == {plain(whole): 2}
    reduced = shapes_of(found.of("all-reduce"), group_size=4)
    # Their cotangents, and every gradient but of what has the sequence itself.
    assert reduced[plain(whole)] == 2
    predicted = sum(c.payload_bytes * c.count for c in step.plan.collectives)
    assert predicted == sum(found.nbytes.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_accumulation_leaves_the_batch_where_it_is(name: str) -> None:
    step = step_of(name, mesh=DATA, num_micro_batches=2)
    found = collectives_of(step)
    assert set(found.counts) == {"all-reduce"}
    # Gradients are reduced once a micro-batch.
    per_micro_batch = parameters(step) + Counter([SCALAR])
    twice = Counter({shape: 2 * n for shape, n in per_micro_batch.items()})
    assert shapes_of(found.instructions) == twice


# What the model itself computes again, and weights that it reads several times.


def compiled_step(
    loss: Callable[[Any, Any], jax.Array], params: Any, x: Any, mesh: dict[str, int]
) -> TrainStep:
    """The step of a loss on this machine's eight devices, without an optimizer."""
    here = wh.Cluster.detect(calibrate=False)
    plan = wh.plan(loss, params, x, cluster=here, mesh=mesh, num_micro_batches=1)
    return wh.compile(plan, loss, params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_what_the_model_computes_again_is_not_kept(axis: str) -> None:
    def loss(checkpointed: bool, params: Any, x: Any) -> jax.Array:
        def block(x: Any, w: Any) -> tuple[Any, None]:
            return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None

        body = jax.checkpoint(block, prevent_cse=False) if checkpointed else block
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    shapes = {"up": (8, 32, 256), "down": (8, 256, 32)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((2048, 32), jnp.float32)
    kept, again = (
        compiled_step(functools.partial(loss, flag), params, x, {axis: 8})
        .lower()
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for flag in (False, True)
    )
    assert again < 0.6 * kept


def test_a_weight_of_several_products_is_gathered_for_each() -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params) @ params @ params) ** 2)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    step = compiled_step(loss, w, x, {"fsdp": 8})
    found = collectives_of(step)
    # Three times forward; backward not for the first, whose other operand is data.
    assert found.counts["all-gather"] == 5
    predicted = sum(c.payload_bytes * c.times(1) for c in step.plan.collectives)
    assert predicted == sum(found.nbytes.values())
