"""Masks that a model makes once and hands to its layers are made in blocks too."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import whalejax as wh
from whalejax import _compat
from whalejax.capture.patterns.named_calls import calls_attention, with_calls


LENGTH, EMBED, VOCAB = 1024, 32, 64  # longer than a block of scores


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
        y = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(
            y, y, y, mask=mask
        ), None


class Remade(nn.Module):
    """A layer in a checkpointed region, which reads a mask made of the given one."""

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
        return nn.remat(Layer)()(x, jnp.logical_and(mask, True))


class Model(nn.Module):
    """Two layers that read one mask.

    Attributes:
        form: how the layers are called.
        masks: of which kinds the mask is made.
    """

    form: str
    masks: str

    @nn.compact
    def __call__(self, tokens: Any, segments: Any) -> Any:
        x = nn.Embed(VOCAB, EMBED)(tokens)
        made = {
            "causal": nn.make_causal_mask(tokens),
            "padding": nn.make_attention_mask(segments > 0, segments > 0),
            "segment": nn.make_attention_mask(segments, segments, jnp.equal),
        }
        mask = nn.combine_masks(*(made[name] for name in self.masks.split()))
        if self.form.endswith("scanned"):
            layer = Remade if "remat" in self.form else Layer
            scanned = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=2,
            )
            x, _ = scanned()(x, mask)
        else:
            layer = nn.remat(Layer) if self.form == "remat" else Layer
            for _ in range(2):
                x, _ = layer()(x, mask)
        return nn.Dense(VOCAB)(x)


def _asked(form: str, masks: str) -> tuple[Any, Any, Any]:
    """A loss, parameters and a batch of two segments and padding."""
    model = Model(form, masks)
    draw = np.random.default_rng(0)
    segments = np.repeat([1, 2, 0], [400, 600, 24])
    if masks == "segment":  # what is padding is a segment of its own
        segments = np.repeat([1, 2, 3], [400, 600, 24])
    batch = {
        "tokens": draw.integers(0, VOCAB, (2, LENGTH)).astype(np.int32),
        "segments": np.stack([segments, segments]).astype(np.int32),
    }
    values = model.init(jax.random.key(0), batch["tokens"], batch["segments"])

    def loss(params: Any, batch: Any) -> Any:
        logits: Any = model.apply(
            {"params": params}, batch["tokens"], batch["segments"]
        )
        found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return found.mean()

    return loss, values["params"], batch


@pytest.mark.relaxed_promotion  # Flax's masks rely on it
@pytest.mark.sampled(2)
@pytest.mark.parametrize("masks", ["causal", "causal padding", "segment"])
@pytest.mark.parametrize("form", ["plain", "remat", "scanned", "remat scanned"])
@pytest.mark.parametrize("mesh", [{"context": 4}, {"data": 2}])
def test_no_layer_is_handed_a_whole_mask(
    form: str, masks: str, mesh: dict[str, int]
) -> None:
    loss, params, batch = _asked(form, masks)
    (size,) = mesh.values()
    plan = wh.plan(
        loss,
        params,
        batch,
        cluster=f"cpu:{size}",
        optimizer=optax.sgd(1.0),
        mesh=mesh,
        attention="ring",
        remat="none",
        zero=0,
        num_micro_batches=1,
    )
    assert plan.attention == (("*", "ring"),)
    step = wh.compile(
        plan, loss, params, optimizer=optax.sgd(1.0), devices=jax.devices()[:size]
    )
    shapes = re.findall(r"tensor<([0-9x]+)x[a-z]+[0-9]+>", step.lower().as_text())
    sizes = [[int(n) for n in shape.split("x")] for shape in shapes]
    assert not [
        s for s in sizes if s.count(LENGTH) > 1 or {LENGTH, LENGTH // 4} <= {*s}
    ]

    expected = jax.tree.map(lambda x, g: x - g, params, jax.grad(loss)(params, batch))
    state, _ = step(step.init_from(params), batch)
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


# Programs without a plan.

SAMPLES, ROWS, HEADS, DEPTH = 2, 64, 2, 4


def _attended(x: Any, w: Any, mask: Any = None, bias: Any = None) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[n]) for n in range(3))
    found = nn.dot_product_attention(q, k, v, bias=bias, mask=mask)
    return x + found.reshape(x.shape)


def _scanned(layer: Any, x: Any, weights: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def _same(x: Any, segments: Any) -> Any:
    del x
    places = jnp.arange(ROWS)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same & (places[:, None] >= places)


def _widened(x: Any, w: Any, segments: Any) -> Any:
    mask = _same(x, segments)

    def layer(x: Any, w: Any) -> Any:
        heads = jnp.broadcast_to(mask, (SAMPLES, HEADS, ROWS, ROWS))
        return jax.checkpoint(_attended)(x, w, heads)

    return _scanned(layer, x, w)


def _used_twice(x: Any, w: Any, segments: Any) -> Any:
    mask = _same(x, segments)

    def layer(x: Any, w: Any) -> Any:
        return _attended(x, w, mask) + mask.sum(axis=(1, 3))[..., None]

    return _scanned(layer, x, w)


def _of_values(x: Any, w: Any, segments: Any) -> Any:
    real = abs(x).sum(axis=-1) > 2.0
    mask = _same(x, segments) & (real[:, None, :, None] == real[:, None, None, :])
    return _scanned(lambda x, w: _attended(x, w, mask), x, w)


def _stopped(x: Any, w: Any, segments: Any) -> Any:
    slopes = jax.lax.stop_gradient(w[0, 0, 0, :, 0])[:, None, None]
    places = jnp.arange(ROWS, dtype=jnp.float32)
    bias = jnp.where(_same(x, segments), slopes * (places - places[:, None]), -1e10)
    return _scanned(lambda x, w: _attended(x, w, bias=bias), x, w)


def _handed_twice(x: Any, w: Any, segments: Any) -> Any:
    def layer(x: Any, w: Any, one: Any, other: Any) -> Any:
        return _attended(_attended(x, w, one), w, other & one)

    mask = _same(x, segments)
    return jax.checkpoint(layer)(x, w[0], mask, mask)


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    "model", [_widened, _used_twice, _of_values, _stopped, _handed_twice]
)
def test_masks_of_other_forms_are_made_inside(model: Any) -> None:
    draw = np.random.default_rng(0).normal
    x = jnp.asarray(draw(size=(SAMPLES, ROWS, HEADS * DEPTH)), jnp.float32)
    w = jnp.asarray(draw(size=(2, 3, HEADS * DEPTH, HEADS, DEPTH)) / 3, jnp.float32)
    segments = jnp.repeat(jnp.array([[0, 1], [2, 2]]), ROWS // 2, axis=1)

    def loss(x: Any, w: Any, segments: Any) -> Any:
        return jnp.sin(model(x, w, segments)).mean()

    program = jax.make_jaxpr(loss)(x, w, segments)
    called, reasons = with_calls(program, [True, True, False])
    assert calls_attention(called) and not reasons
    assert not _whole(called)
    run = jax.grad(lambda *xs: jaxpr_as_fun(called)(*xs)[0], (0, 1))
    for one, other in zip(
        run(x, w, segments), jax.grad(loss, (0, 1))(x, w, segments), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def _whole(jaxpr: Any) -> list[Any]:
    """Masks that scans and checkpointed regions are handed."""
    found = []
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        inner = _compat.inner_jaxprs(equation)
        if _compat.recursion(equation) in ("scan", "remat"):
            shapes = [atom.aval.shape for atom in equation.invars]
            found += [shape for shape in shapes if shape.count(ROWS) > 1]
        found += [shape for one in inner for shape in _whole(one)]
    return found
