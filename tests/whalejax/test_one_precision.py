"""One precision for a whole model, where the model insists on float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import whalejax as wh


pytestmark = pytest.mark.relaxed_promotion  # what insists on float32 meets bfloat16

EMBED, MLP = 16, 64


class Insisting(nnx.Module):
    """Layers with a dtype of their own, which no cast of their parameters changes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        kinds = {"dtype": jnp.float32, "rngs": rngs}
        self.up = nnx.Linear(EMBED, MLP, **kinds)
        self.down = nnx.Linear(MLP, EMBED, **kinds)

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


def insisting(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


def carried(params: Any, batch: Any) -> Any:
    """A scan whose carry is of the batch's type, and what it becomes is float32."""
    shift = jnp.ones(batch.shape[-1], jnp.float32)

    def body(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w + shift), None

    return (jax.lax.scan(body, batch, params["layers"])[0] ** 2).mean()


def stiff(params: Any, batch: Any) -> Any:
    """A scan whose carry is float32 whatever parameters and batch are."""

    def body(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    start = batch.astype(jnp.float32)
    return (jax.lax.scan(body, start, params["layers"])[0] ** 2).mean()


INSISTING = [
    (insisting, lambda: nnx.eval_shape(lambda: Insisting(nnx.Rngs(0)))),
    *(
        (f, lambda: {"layers": jax.ShapeDtypeStruct((4, EMBED, EMBED), jnp.float32)})
        for f in (carried, stiff)
    ),
]


@pytest.mark.parametrize(("of", "model"), INSISTING)
def test_one_precision_has_one_meaning(of: Any, model: Any) -> None:
    batch = jax.ShapeDtypeStruct((64, EMBED), jnp.float32)

    def planned(precision: Any) -> wh.Plan:
        return wh.plan(of, model(), batch, cluster="h100:8", precision=precision)

    half, each = planned("bf16"), planned({"*": "bf16"})
    assert half.time == each.time and half.asked_precision == each.asked_precision
    assert half.hash == each.hash
    (said,) = (x for x in half.notes if x.startswith("precision='bf16' is taken as"))
    assert "product by product" in said
    assert ("the largest at test_one_precision.py:" in said) == (of is not carried)
    assert "bf16" in str(half).splitlines()[0]


def test_what_cannot_be_traced_at_all_says_so_itself() -> None:
    def wrong(params: Any, batch: Any) -> Any:
        return (batch @ params["w"].T.T.T).mean()

    model = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        wh.plan(wrong, model, batch, cluster="h100:8", precision="bf16")


def routed(model: Any, batch: Any) -> Any:
    """A small product of float32 between large ones that follow the cast."""
    hidden = batch @ model["up"]
    scores = batch.astype(jnp.float32) @ model["router"].astype(jnp.float32)
    gate = jax.nn.softmax(scores)[:, :1].astype(hidden.dtype)
    return ((jnp.tanh(hidden) * gate @ model["down"]) ** 2).mean().astype(jnp.float32)


def test_a_router_of_float32_leaves_the_rest_to_the_cast() -> None:
    sizes = {"up": (EMBED, MLP), "router": (EMBED, 2), "down": (MLP, EMBED)}
    model = {n: jax.ShapeDtypeStruct(x, jnp.float32) for n, x in sizes.items()}
    batch = jax.ShapeDtypeStruct((64, EMBED), jnp.float32)
    half, whole = (
        wh.plan(routed, model, batch, cluster="h100:8", precision=p, mesh={"data": 8})
        for p in ("bf16", "f32")
    )
    (said,) = (x for x in half.notes if x.startswith("bf16: 1 product"))
    assert "stays in float32" in said and "1.54%" in said
    assert not any("product by product" in x for x in half.notes)
    assert 2 * half.memory.working_bytes == whole.memory.working_bytes
    assert half.memory.activations_bytes < 0.7 * whole.memory.activations_bytes
