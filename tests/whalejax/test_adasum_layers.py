"""Adasum of each layer, however a loss takes the layers off their stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import whalejax as wh
from tests.adasum import difference, reference
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.planner.model.repeated_layers import LayerAxes, layer_axes


LAYERS: Final = 4
WIDTH: Final = 8
NEAR: Final = 2e-6
Net = Callable[[jax.Array, jax.Array], jax.Array]


def layer(h: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tanh(h @ kernel)


def scanned(h: jax.Array, kernels: jax.Array) -> jax.Array:
    return lax.scan(lambda h, kernel: (layer(h, kernel), None), h, kernels)[0]


def counted(
    pick: Callable[[jax.Array, jax.Array], jax.Array], turns: int = LAYERS
) -> Net:
    """A scan over numbers of layers."""

    def net(w: jax.Array, h: jax.Array) -> jax.Array:
        def turn(h: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            for kernel in pick(w, i).reshape(-1, WIDTH, WIDTH):
                h = layer(h, kernel)
            return h, None

        return lax.scan(turn, h, jnp.arange(turns))[0]

    return net


def nested(w: jax.Array, h: jax.Array) -> jax.Array:
    kernels = w.reshape(2, 2, WIDTH, WIDTH)
    return lax.scan(lambda h, two: (scanned(h, two), None), h, kernels)[0]


def in_turn(take: Callable[[jax.Array], Any]) -> Net:
    """A Python loop."""

    def net(w: jax.Array, h: jax.Array) -> jax.Array:
        for kernel in take(w):
            h = layer(h, kernel.reshape(WIDTH, WIDTH))
        return h

    return net


def in_fori_loops(w: jax.Array, h: jax.Array) -> jax.Array:
    def two(j: Any, h: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda i, h: layer(h, w[2 * j + i]), h)

    return lax.fori_loop(0, 2, two, h)


def scaled(w: jax.Array, h: jax.Array) -> jax.Array:
    """With a norm of each layer, and a penalty of all."""
    norms = jnp.sqrt(jnp.sum(w**2, axis=(1, 2), keepdims=True))
    return scanned(h, w / norms) + 0.01 * jnp.sum(w**2)


NETS: Final[dict[str, Net]] = {
    "one scan": lambda w, h: scanned(h, w),
    "nested scans": nested,
    "scans over parts": lambda w, h: scanned(scanned(h, w[:2]), w[2:]),
    "every other": lambda w, h: scanned(scanned(h, w[::2]), w[1::2]),
    "first and rest": lambda w, h: scanned(layer(h, w[0]), w[1:]),
    "from the last": lambda w, h: scanned(h, w[::-1]),
    "another order": lambda w, h: scanned(h, w[jnp.array([2, 0, 3, 1])]),
    "joined": lambda w, h: scanned(h, jnp.concatenate([w[2:], w[:2]])),
    "by number": counted(lambda w, i: w[i]),
    "by take": counted(lambda w, i: jnp.take(w, i, axis=0)),
    "two by number": counted(lambda w, i: lax.dynamic_slice_in_dim(w, 2 * i, 2), 2),
    "fori loops": in_fori_loops,
    "Python loop": in_turn(lambda w: [w[i] for i in range(LAYERS)]),
    "unstacked": in_turn(jnp.unstack),
    "split": in_turn(lambda w: jnp.split(w, LAYERS)),
    "checkpointed": lambda w, h: jax.checkpoint(nested)(w, h),
    "scaled": scaled,
}


def loss_of(net: Net) -> Callable[[Any, Any], jax.Array]:
    def loss(model: Any, batch: Any) -> jax.Array:
        out = net(model["w"], batch["x"]) @ model["out"]
        return jnp.mean((out - batch["y"]) ** 2)

    return loss


def model_of(shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    draw = {"w": rng.normal(size=shape) / 3, "out": rng.normal(size=(WIDTH, 2))}
    return {name: jnp.asarray(x, jnp.float32) for name, x in draw.items()}


def batch_of(samples: int = 16) -> Any:
    rng = np.random.default_rng(1)
    shapes = {"x": (samples, WIDTH), "y": (samples, 2)}
    draw = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in draw.items()}


def axes_of(net: Net, shape: tuple[int, ...]) -> LayerAxes | None:
    """What is found of a parameter; "one tensor" where it stacks nothing."""
    graph = capture(adapt(model_of(shape), loss_of(net)), batch_of()).graph
    (param,) = (t.id for t in graph.params if t.path == "w")
    return layer_axes(graph).get(param, LayerAxes(sizes=(), sources=(), layers=()))


ONE: Final = LayerAxes(sizes=(), sources=(), layers=())
EACH: Final = LayerAxes(sizes=(4, 8, 8), sources=(0, 1, 2), layers=(0,))


@pytest.mark.parametrize("name", NETS)
def test_layers_are_found(name: str) -> None:
    assert axes_of(NETS[name], (LAYERS, WIDTH, WIDTH)) == EACH


def blocks(w: jax.Array, h: jax.Array) -> jax.Array:
    """Two layers at a time, which are multiplied as one."""

    def turn(h: jax.Array, two: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.einsum("bi,eij->bj", h, two)), None

    return lax.scan(turn, h, w.reshape(-1, 2, WIDTH, WIDTH))[0]


def by_row(w: jax.Array, h: jax.Array) -> jax.Array:
    """Numbers that samples tell."""
    rows = jnp.argmax(h, axis=1) % LAYERS
    return jnp.einsum("bi,bij->bj", h, w[rows])


def decoded(w: jax.Array, h: jax.Array) -> jax.Array:
    """A loop whose numbers are made of what it has computed."""

    def turn(carry: Any, _: None) -> Any:
        h, number = carry
        h = layer(h, w[number])
        return (h, jnp.argmax(h[0]) % LAYERS), None

    return lax.scan(turn, (h, jnp.argmax(h[0]) * 0), None, LAYERS)[0][0]


@pytest.mark.parametrize(
    "net",
    [
        lambda w, h: jnp.tanh(jnp.einsum("bi,eij->bj", h, w)),
        lambda w, h: jnp.mean(jax.vmap(layer, (None, 0))(h, w), 0),
        lambda w, h: layer(h, w[0]) + jnp.einsum("bi,eij->bj", h, w),
        lambda w, h: layer(h, w.reshape(-1, WIDTH)[:WIDTH]),
        by_row,
        decoded,
    ],
    ids=["whole", "vmap", "first and whole", "rows of all", "by sample", "decoded"],
)
def test_what_is_read_as_a_whole_is_one_tensor(net: Net) -> None:
    assert axes_of(net, (LAYERS, WIDTH, WIDTH)) == ONE


def test_layers_along_other_dimensions() -> None:
    def moved(w: jax.Array, h: jax.Array) -> jax.Array:
        return scanned(h, jnp.moveaxis(w, 1, 0))

    found = axes_of(moved, (WIDTH, LAYERS, WIDTH))
    assert found == LayerAxes(sizes=(8, 4, 8), sources=(0, 1, 2), layers=(1,))
    found = axes_of(blocks, (LAYERS, WIDTH, WIDTH))
    assert found == LayerAxes(sizes=(2, 2, 8, 8), sources=(0, 0, 1, 2), layers=(0,))
    assert found is not None and found.stacked_shape == (2, 2, 8, 8)


def test_layouts_of_layers() -> None:
    """What shards layers in an order of its own is gathered before they combine."""
    axes = LayerAxes(sizes=(8, 4, 6), sources=(0, 1, 2), layers=(1, 0))
    spec = (("tensor",), ("fsdp",), ())
    mesh = {"tensor": 2, "fsdp": 2}
    assert axes.stacked_shape == (32, 6)
    assert axes.stacked_spec(spec, mesh) == (("fsdp",), ())
    blocks = LayerAxes(sizes=(2, 4, 6), sources=(0, 0, 1), layers=(0,))
    assert blocks.stacked_spec((("fsdp",), ("tensor",)), mesh) == (
        *(("fsdp",), ()),
        ("tensor",),
    )
    odd = LayerAxes(sizes=(3, 4, 6), sources=(0, 0, 1), layers=(0,))
    assert odd.stacked_spec((("fsdp",), ("tensor",)), mesh) == ((), (), ("tensor",))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("name", [*NETS, "moved", "blocks"])
def test_each_layer_is_combined_by_itself(name: str, mesh: dict[str, int]) -> None:
    net = NETS.get(name, blocks)
    shape: tuple[int, ...] = (LAYERS, WIDTH, WIDTH)
    place, count = 0, LAYERS if name != "blocks" else LAYERS // 2
    if name == "moved":
        shape, place = (WIDTH, LAYERS, WIDTH), 1
        net = lambda w, h: scanned(h, jnp.moveaxis(w, 1, 0))  # noqa: E731
    loss, model, batch = loss_of(net), model_of(shape), batch_of()
    keeps = optax.chain(optax.trace(decay=0.0), optax.scale(-0.125))
    asked: dict[str, Any] = {"mesh": mesh, "combine": "adasum", "optimizer": keeps}
    plan = wh.plan(loss, model, batch, cluster="cpu:8", **asked)
    step = wh.compile(plan, loss, model, optimizer=keeps)
    state, _ = step(step.init_from(model), batch)
    cut = jax.tree.map(lambda x: x.reshape(mesh["data"], -1, *x.shape[1:]), batch)
    ranks = range(mesh["data"])
    each = [
        np.moveaxis(np.asarray(jax.grad(loss)(model, part)["w"]), place, 0)
        for part in (jax.tree.map(lambda x, r=r: x[r], cut) for r in ranks)
    ]
    by_layer = [x.reshape(count, -1) for x in each]
    found = np.moveaxis(np.asarray(state.opt_state[0].trace["w"]), place, 0)
    expected = reference(np.stack(by_layer), count)
    assert difference(found, expected, count) <= NEAR


def test_blocks_that_do_not_divide_the_layers_are_refused() -> None:
    def net(w: jax.Array, h: jax.Array) -> jax.Array:
        return blocks(w[:4], h)

    assert axes_of(net, (6, WIDTH, WIDTH)) is None
    model = model_of((6, WIDTH, WIDTH))
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(loss_of(net), model, batch_of(), cluster="cpu:8", combine="adasum")
    assert (
        "1 of 2 trained parameters are read in blocks that are not single layers: "
        "w [6, 8, 8]. Adasum combines each layer by itself. Read single "
        "layers, or equal blocks that together are all layers; or leave combine out"
    ) in str(caught.value)
