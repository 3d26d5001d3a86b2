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

import whalejax as wh


LENGTH, EMBED, VOCAB = 1024, 32, 64  # longer than a block of scores


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
        y = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(
            y, y, y, mask=mask
        ), None


class Remade(nn.Module):
    """A layer in a checkpointed region, handed a mask that is made of the mask."""

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
        logits = model.apply({"params": params}, batch["tokens"], batch["segments"])
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
