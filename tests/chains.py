"""Models drawn at random: chains of steps that use most of JAX's primitives.

Every step maps ``[batch, sequence, width]`` to the same with perhaps another width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


Array = jax.Array
Step = tuple[str, int]
"""Name of a step, and the width that it gives where it has one of its own."""

BATCH, SEQ, WIDTH = 16, 8, 24
WIDTHS: Final = (16, 24, 32, 40)


def job_of(chain: Sequence[Step]) -> wh.Job:
    """A model of these steps, its loss and its batch."""
    shapes = _shapes(chain)
    draw = np.random.default_rng(0)
    params = {k: draw.normal(size=s).astype("float32") / 4 for k, s in shapes.items()}
    x = draw.normal(size=(BATCH, SEQ, WIDTH)).astype("float32")

    def loss(p: Any, batch: Any) -> Array:
        y = batch["x"]
        for i, (step, _) in enumerate(chain):
            # Norms keep what follows from growing without bounds.
            y = STEPS[step](p.get(f"{step}{i}"), y / (1 + jnp.abs(y).mean()))
        return jnp.mean((y @ p["last"]) ** 2)

    return wh.Job(
        loss,
        lambda key: jax.tree.map(jnp.asarray, params),
        lambda step, size: {"x": x},
        optax.sgd(1.0),
        batch_size=BATCH,
    )


def _shapes(chain: Sequence[Step]) -> dict[str, tuple[int, ...]]:
    width, shapes = WIDTH, {}
    for i, (step, wider) in enumerate(chain):
        if step in ("dense", "heads", "merged"):
            shapes[f"{step}{i}"] = (width, wider)
            width = wider
        elif step in ("residual", "gate", "scan", "ruled"):
            shapes[f"{step}{i}"] = (width, width)
        elif step == "convolve":
            shapes[f"{step}{i}"] = (3, width, width)
        elif step == "grouped":
            shapes[f"{step}{i}"] = (3, width // 8, width)
    return {**shapes, "last": (width, 8)}


def _heads(w: Any, x: Array) -> Array:
    y = (x @ w).reshape(*x.shape[:2], 8, w.shape[1] // 8)
    return (y * jnp.tanh(y.sum(-2, keepdims=True))).reshape(*x.shape[:2], w.shape[1])


def _merged(w: Any, x: Array) -> Array:
    rows = jnp.swapaxes(x, 0, 1).reshape(-1, x.shape[2]) @ w
    return jnp.swapaxes(jax.nn.relu(rows).reshape(x.shape[1], x.shape[0], -1), 0, 1)


def _attend(w: Any, x: Array) -> Array:
    weights = jax.nn.softmax(jnp.einsum("bse,bte->bst", x, x) / x.shape[2] ** 0.5)
    return x + jnp.einsum("bst,bte->bse", weights, x)


def _scan(w: Any, x: Array) -> Array:
    def turn(carry: Array, scale: Array) -> tuple[Array, Array]:
        return jnp.tanh(carry @ w) * scale, carry.sum(-1)

    last, sums = jax.lax.scan(jax.checkpoint(turn), x, jnp.array([0.5, 1.5]))
    return last + sums.sum(0)[..., None]


def _recurrent(w: Any, x: Array) -> Array:
    def turn(carry: Array, one: Array) -> tuple[Array, Array]:
        carry = jnp.tanh(carry / 2 + one)
        return carry, carry

    _, found = jax.lax.scan(turn, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(found, 0, 1)


def _factor(w: Any, x: Array) -> Array:
    square = jnp.einsum("bsi,bti->bst", x[:, :4], x[:, :4]) / x.shape[2]
    lower = jnp.linalg.cholesky(square + 2 * jnp.eye(4))
    solved = jax.scipy.linalg.solve_triangular(lower, x[:, :4], lower=True)
    return x + solved.sum(1, keepdims=True)


def _segments(w: Any, x: Array) -> Array:
    found = jax.ops.segment_sum(x, jnp.arange(x.shape[0]) // 4, num_segments=4)
    return x - jnp.repeat(found, 4, axis=0) / 4


def _convolve(groups: int) -> Callable[[Any, Array], Array]:
    def step(w: Any, x: Array) -> Array:
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return step


@jax.custom_vjp
def _double(x: Array) -> Array:
    return 2 * x


_double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


STEPS: Final[dict[str, Callable[[Any, Array], Array]]] = {
    "dense": lambda w, x: x @ w,
    "tanh": lambda w, x: jnp.tanh(x),
    "residual": lambda w, x: x + jnp.tanh(x @ w),
    "norm": lambda w, x: x - x.mean(-1, keepdims=True),
    "over_batch": lambda w, x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1),
    "heads": _heads,
    "merged": _merged,
    "attend": _attend,
    "swap": lambda w, x: jnp.swapaxes(jnp.swapaxes(x, 0, 1) * 2.0, 0, 1),
    "gate": lambda w, x: x * jax.nn.softmax(x @ w),
    "ruled": lambda w, x: _double(jax.nn.relu(x @ w)) + jax.nn.log_softmax(x) / 9,
    "cumsum": lambda w, x: x + jnp.cumsum(x, 1) / 9 + jax.lax.cummax(x, axis=2) / 9,
    "sort": lambda w, x: jnp.sort(x, axis=2) + jnp.sort(x, axis=1)[:, ::-1],
    "top_k": lambda w, x: x - jax.lax.top_k(x, 3)[0].sum(-1, keepdims=True) / 3,
    "turn": lambda w, x: jnp.flip(x, 1) + jnp.roll(x, 2, axis=2),
    "pad": lambda w, x: jnp.pad(x, ((0, 0), (1, 0), (0, 2)))[:, :-1, 2:],
    "join": lambda w, x: jnp.concatenate([x[..., 4:], 2 * x[..., :4]], axis=-1),
    "update": lambda w, x: jax.lax.dynamic_update_slice(x, 2 * x[:, :4], (0, 3, 0)),
    "window": lambda w, x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME"
    ),
    "convolve": _convolve(1),
    "grouped": _convolve(8),
    "look_up": lambda w, x: (
        x + jnp.take_along_axis(x, jnp.argmax(x, 2)[..., None] % 8, axis=2)
    ),
    "write": lambda w, x: x.at[:, jnp.array([1, 3, 3])].add(x[:, :3] / 2),
    "segments": _segments,
    "scan": _scan,
    "recurrent": _recurrent,
    "while": lambda w, x: jax.lax.fori_loop(0, 2, lambda i, y: jnp.tanh(y) * 2, x),
    "cond": lambda w, x: jax.lax.cond(
        x.sum() > 0, lambda y: y * 2, lambda y: jnp.tanh(y), x
    ),
    "fft": lambda w, x: jnp.fft.fft(x, axis=1).real / 4,
    "factor": _factor,
    "noise": lambda w, x: x + jax.random.normal(jax.random.key(3), x.shape[2:]) / 8,
    "prod": lambda w, x: x + jnp.prod(jnp.tanh(x), axis=2, keepdims=True),
}
