"""Losses that couple the samples of a batch, and losses that only look as if they did.

What ``bench_coupling.py`` and tests ask about. A loss takes ``(params, batch)`` or
``(params, batch, rng)``; whether its samples are independent is not written here but
measured, by the gradients of micro-batches on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import whalejax as wh


BATCH: Final = 16
WIDTH: Final = 8
CLASSES: Final = 4
LENGTH: Final = 6
VOCABULARY: Final = 12


def _real() -> Any:
    """Floating point as JAX has it by default."""
    return jnp.zeros(()).dtype


LOSSES: dict[str, Callable[..., Any]] = {}
"""Every loss by its name."""


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a loss under its function's name."""
    LOSSES[function.__name__] = function
    return function


def parameters(seed: int = 0) -> dict[str, Any]:
    """Parameters that all losses take."""
    keys = jax.random.split(jax.random.key(seed), 8)
    return {
        "w": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 3,
        "v": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 3,
        "head": jax.random.normal(keys[2], (WIDTH, CLASSES)) / 3,
        "embed": jax.random.normal(keys[3], (VOCABULARY, WIDTH)) / 3,
        "scale": jnp.ones(WIDTH),
        "layers": jax.random.normal(keys[4], (3, WIDTH, WIDTH)) / 3,
        "experts": jax.random.normal(keys[5], (4, WIDTH, WIDTH)) / 3,
        "kernel": jax.random.normal(keys[6], (3, WIDTH, WIDTH)) / 4,
        "bias": jnp.zeros(()),
    }


def batch(seed: int = 0, size: int = BATCH) -> dict[str, Any]:
    """A batch that all losses take, of arrays with the samples first."""
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(size, WIDTH)).astype(_real()),
        "z": draw.normal(size=(size, WIDTH)).astype(_real()),
        "y": draw.integers(0, CLASSES, size).astype(np.int32),
        "t": draw.integers(0, VOCABULARY, (size, LENGTH)).astype(np.int32),
        "s": draw.normal(size=(size, LENGTH, WIDTH)).astype(_real()),
        "r": draw.normal(size=(size,)).astype(_real()),
        "m": draw.integers(0, 2, (size, LENGTH)).astype(_real()),
        "n": draw.integers(1, LENGTH, size).astype(np.int32),
    }


def hidden(p: Any, b: Any) -> jax.Array:
    """A value of each sample."""
    return jnp.tanh(b["x"] @ p["w"])


def unit(x: jax.Array) -> jax.Array:
    """Rows of length one."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def views(p: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """Two embeddings of each sample."""
    return unit(b["x"] @ p["w"]), unit(b["z"] @ p["v"])


def score(p: Any, b: Any) -> jax.Array:
    """A number for each sample."""
    return (hidden(p, b) @ p["head"]).sum(-1)


def log_probabilities(p: Any, b: Any) -> jax.Array:
    """Of each sample, that of its class."""
    logits = jax.nn.log_softmax(hidden(p, b) @ p["head"])
    return jnp.take_along_axis(logits, b["y"][:, None], -1)[:, 0]


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalisation."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


# Contrastive: every pair of samples counts.


@loss
def siglip(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    return optax.sigmoid_binary_cross_entropy(u @ v.T, jnp.eye(len(u))).mean()


@loss
def siglip_summed_rows(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    signs = 2 * jnp.eye(len(u)) - 1
    return -jax.nn.log_sigmoid(signs * (u @ v.T)).sum(-1).mean()


@loss
def clip(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    labels = jnp.arange(len(u))
    logits = 10 * u @ v.T
    both = [
        optax.softmax_cross_entropy_with_integer_labels(x, labels)
        for x in (logits, logits.T)
    ]
    return (both[0] + both[1]).mean() / 2


@loss
def info_nce(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    logits = 5 * u @ v.T
    return -jnp.diag(jax.nn.log_softmax(logits)).mean()


@loss
def simclr(p: Any, b: Any) -> Any:
    both = jnp.concatenate(views(p, b))
    logits = both @ both.T - 1e9 * jnp.eye(len(both))
    labels = jnp.roll(jnp.arange(len(both)), len(both) // 2)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@loss
def triplet_hardest(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    far = jnp.sum((u[:, None] - v[None]) ** 2, -1)
    near = jnp.sum((u - v) ** 2, -1)
    hardest = jnp.min(far + 1e9 * jnp.eye(len(u)), -1)
    return jax.nn.relu(near - hardest + 1).mean()


@loss
def triplet_rolled(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    other = jnp.roll(v, 1, axis=0)
    near, far = jnp.sum((u - v) ** 2, -1), jnp.sum((u - other) ** 2, -1)
    return jax.nn.relu(near - far + 1).mean()


@loss
def permuted_negatives(p: Any, b: Any, rng: Any) -> Any:
    u, v = views(p, b)
    other = v[jax.random.permutation(rng, len(v))]
    return jax.nn.softplus(jnp.sum(u * other, -1) - jnp.sum(u * v, -1)).mean()


@loss
def supervised_contrastive(p: Any, b: Any) -> Any:
    u, _ = views(p, b)
    same = b["y"][:, None] == b["y"][None]
    logits = jax.nn.log_softmax(u @ u.T)
    return -(jnp.where(same, logits, 0).sum(-1) / same.sum(-1)).mean()


@loss
def uniformity(p: Any, b: Any) -> Any:
    u, _ = views(p, b)
    return jnp.log(jnp.exp(-2 * jnp.sum((u[:, None] - u) ** 2, -1)).mean())


@loss
def pairs_by_einsum(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    return jnp.einsum("id,jd->ij", u, v).mean()


@loss
def squares_of_pairs(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    return jnp.square(u @ v.T).mean()


@loss
def pairs_by_vmap(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    each = jax.vmap(lambda one: jax.nn.logsumexp(v @ one))(u)
    return each.mean()


@loss
def in_batch_softmax(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    return (jax.nn.logsumexp(u @ v.T, axis=1) - jnp.sum(u * v, -1)).mean()


@loss
def memory_bank(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    logits = jnp.concatenate([jnp.sum(u * v, -1, keepdims=True), u @ p["embed"].T], 1)
    return -jax.nn.log_softmax(logits)[:, 0].mean()


@loss
def sinkhorn(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    plan = jnp.exp(5 * u @ v.T)
    for _ in range(3):
        plan = plan / plan.sum(0)
        plan = plan / plan.sum(1, keepdims=True)
    return (plan * jnp.sum((u[:, None] - v) ** 2, -1)).sum() / len(u)


@loss
def swav_codes(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    codes = jnp.exp(4 * u @ p["head"])
    for _ in range(3):
        codes = codes / codes.sum(0, keepdims=True)
        codes = codes / codes.sum(1, keepdims=True)
    wanted = lax.stop_gradient(codes)
    return -(wanted * jax.nn.log_softmax(v @ p["head"])).sum(-1).mean()


# Statistics of the batch.


@loss
def barlow_twins(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    u, v = ((x - x.mean(0)) / (x.std(0) + 1e-3) for x in (u, v))
    off = u.T @ v / len(u) - jnp.eye(WIDTH)
    return jnp.square(off).sum()


@loss
def vicreg_variance(p: Any, b: Any) -> Any:
    u, _ = views(p, b)
    return jax.nn.relu(1 - jnp.sqrt(u.var(0) + 1e-4)).mean()


@loss
def vicreg_covariance(p: Any, b: Any) -> Any:
    u, _ = views(p, b)
    u = u - u.mean(0)
    return jnp.square(u.T @ u / (len(u) - 1)).sum()


@loss
def batch_norm(p: Any, b: Any) -> Any:
    h = b["x"] @ p["w"]
    h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5) * p["scale"]
    return jnp.square(h @ p["head"]).mean()


@loss
def centred_by_the_mean(p: Any, b: Any) -> Any:
    s = score(p, b)
    return jnp.square(s - s.mean()).mean()


@loss
def mmd(p: Any, b: Any) -> Any:
    u, v = views(p, b)
    return jnp.square(u.mean(0) - v.mean(0)).sum()


@loss
def log_of_mean(p: Any, b: Any) -> Any:
    return jnp.log(jnp.exp(score(p, b)).mean())


@loss
def root_mean_square(p: Any, b: Any) -> Any:
    return jnp.sqrt(jnp.square(score(p, b)).mean())


@loss
def norm_of_all(p: Any, b: Any) -> Any:
    return jnp.linalg.norm(score(p, b))


@loss
def variance_unbiased(p: Any, b: Any) -> Any:
    return score(p, b).var(ddof=1)


@loss
def correlation(p: Any, b: Any) -> Any:
    s, r = score(p, b), b["r"]
    s, r = s - s.mean(), r - r.mean()
    return -(s * r).mean() / jnp.sqrt((s * s).mean() * (r * r).mean())


@loss
def entropy_of_mean(p: Any, b: Any) -> Any:
    shares = jax.nn.softmax(hidden(p, b) @ p["head"]).mean(0)
    return (shares * jnp.log(shares)).sum()


@loss
def quantile(p: Any, b: Any) -> Any:
    return jnp.quantile(score(p, b), 0.9)


@loss
def hardest_samples(p: Any, b: Any) -> Any:
    return lax.top_k(-log_probabilities(p, b), 4)[0].mean()


@loss
def worst_sample(p: Any, b: Any) -> Any:
    return jnp.max(-log_probabilities(p, b))


@loss
def soft_worst_sample(p: Any, b: Any) -> Any:
    return jax.nn.logsumexp(-log_probabilities(p, b))


@loss
def sorted_scores(p: Any, b: Any) -> Any:
    return jnp.square(jnp.sort(score(p, b)) - jnp.sort(b["r"])).mean()


@loss
def ranks(p: Any, b: Any) -> Any:
    place = jnp.argsort(jnp.argsort(b["r"]))
    return (score(p, b) * place).mean()


@loss
def median_absolute(p: Any, b: Any) -> Any:
    s = score(p, b)
    return jnp.abs(s - jnp.median(s)).mean()


@loss
def focal_by_class_counts(p: Any, b: Any) -> Any:
    counts = jnp.bincount(b["y"], length=CLASSES)
    return -(log_probabilities(p, b) / counts[b["y"]]).sum()


@loss
def class_means(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    each = jax.ops.segment_sum(h, b["y"], CLASSES)
    return jnp.square(each).mean()


@loss
def cox(p: Any, b: Any) -> Any:
    s = score(p, b)
    later = b["r"][None] >= b["r"][:, None]
    return -(s - jnp.log((later * jnp.exp(s)[None]).sum(1))).mean()


@loss
def auc_surrogate(p: Any, b: Any) -> Any:
    s, y = score(p, b), b["y"] > 1
    return jax.nn.softplus(s[:, None] - s[None])[0].mean() + y.mean()


@loss
def list_net(p: Any, b: Any) -> Any:
    return -(jax.nn.softmax(b["r"]) * jax.nn.log_softmax(score(p, b))).sum()


@loss
def load_balance(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(hidden(p, b) @ p["head"])
    share = jax.nn.one_hot(gates.argmax(-1), CLASSES).mean(0)
    task = -log_probabilities(p, b).mean()
    return task + CLASSES * (gates.mean(0) * share).sum()


@loss
def capacity(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(hidden(p, b) @ p["head"])
    chosen = jax.nn.one_hot(gates.argmax(-1), CLASSES)
    place = jnp.cumsum(chosen, 0) * chosen
    return ((place < 3) * gates).sum() / len(gates)


@loss
def mutual_information(p: Any, b: Any) -> Any:
    shares = jax.nn.softmax(hidden(p, b) @ p["head"])
    joint = shares.T @ jax.nn.softmax(b["z"] @ p["head"]) / len(shares)
    return (joint * jnp.log(joint)).sum()


@loss
def dice_of_all(p: Any, b: Any) -> Any:
    q = jax.nn.sigmoid(score(p, b))
    y = (b["y"] > 1) * 1.0
    return 1 - 2 * (q * y).sum() / (q.sum() + y.sum())


@loss
def gram(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    return jnp.linalg.slogdet(h.T @ h + jnp.eye(WIDTH))[1]


@loss
def whitening(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    root = jnp.linalg.cholesky(h.T @ h / len(h) + jnp.eye(WIDTH))
    return jnp.square(jax.scipy.linalg.solve_triangular(root, h.T)).mean()


# Groups and places.


@loss
def grpo(p: Any, b: Any) -> Any:
    rewards = b["r"].reshape(-1, 4)
    each = log_probabilities(p, b).reshape(-1, 4)
    mean, std = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True)
    return -((rewards - mean) / (std + 1e-4) * each).mean()


@loss
def pairs(p: Any, b: Any) -> Any:
    s = score(p, b).reshape(-1, 2)
    return -jax.nn.log_sigmoid(s[:, 0] - s[:, 1]).mean()


@loss
def pairs_by_strides(p: Any, b: Any) -> Any:
    s = score(p, b)
    return -jax.nn.log_sigmoid(s[::2] - s[1::2]).mean()


@loss
def halves(p: Any, b: Any) -> Any:
    s = score(p, b)
    half = len(s) // 2
    return -jax.nn.log_sigmoid(s[:half] - s[half:]).mean()


@loss
def halves_by_split(p: Any, b: Any) -> Any:
    chosen, rejected = jnp.split(score(p, b), 2)
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


@loss
def neighbours(p: Any, b: Any) -> Any:
    s = score(p, b)
    return jnp.square(s[1:] - s[:-1]).mean()


@loss
def first_sample(p: Any, b: Any) -> Any:
    return jnp.square(score(p, b) - score(p, b)[0]).mean()


@loss
def positions(p: Any, b: Any) -> Any:
    s = score(p, b)
    return (s * jnp.arange(len(s))).mean()


@loss
def weights_by_place(p: Any, b: Any) -> Any:
    s = score(p, b)
    return (s * jnp.linspace(0, 1, len(s))).mean()


@loss
def running_sum(p: Any, b: Any) -> Any:
    return jnp.tanh(jnp.cumsum(score(p, b))).mean()


@loss
def gae(p: Any, b: Any) -> Any:
    values = score(p, b)

    def back(carry: Any, step: Any) -> Any:
        carry = step[0] - step[1] + 0.9 * carry
        return carry, carry

    _, gains = lax.scan(back, jnp.zeros(()), (b["r"], values), reverse=True)
    return jnp.square(gains).mean()


@loss
def recurrent_over_the_batch(p: Any, b: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + h @ p["v"])
        return h, h.sum()

    return lax.scan(step, jnp.zeros(WIDTH), b["x"])[1].mean()


@loss
def moving_average(p: Any, b: Any) -> Any:
    smooth = jnp.convolve(score(p, b), jnp.ones(3) / 3, mode="same")
    return jnp.square(smooth).mean()


@loss
def mixup_with_reversed(p: Any, b: Any) -> Any:
    x = 0.7 * b["x"] + 0.3 * b["x"][::-1]
    return jnp.square(jnp.tanh(x @ p["w"])).mean()


@loss
def attention_across_samples(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    return jnp.square(jax.nn.softmax(h @ h.T) @ h).mean()


@loss
def fourier_along_the_batch(p: Any, b: Any) -> Any:
    return jnp.abs(jnp.fft.fft(score(p, b))).mean()


# Derivatives inside.


@loss
def penalty_of_the_mean(p: Any, b: Any) -> Any:
    gradient = jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum(-1).mean())(b["x"])
    return jnp.square(jnp.linalg.norm(gradient, axis=-1) - 1).mean()


@loss
def penalty_of_the_sum(p: Any, b: Any) -> Any:
    gradient = jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum())(b["x"])
    return jnp.square(jnp.linalg.norm(gradient, axis=-1) - 1).mean()


@loss
def penalty_by_vmap(p: Any, b: Any) -> Any:
    gradient = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum()))(b["x"])
    return jnp.square(jnp.linalg.norm(gradient, axis=-1) - 1).mean()


@loss
def inner_step(p: Any, b: Any) -> Any:
    def inner(w: Any) -> Any:
        return jnp.square(jnp.tanh(b["x"] @ w)).mean()

    w = p["w"] - 0.5 * jax.grad(inner)(p["w"])
    return jnp.square(jnp.tanh(b["z"] @ w)).mean()


@jax.custom_vjp
def _normalised_gradient(x: jax.Array) -> jax.Array:
    return x


_normalised_gradient.defvjp(
    lambda x: (x, None), lambda _, g: (g / (1e-6 + jnp.linalg.norm(g)),)
)


@loss
def gradient_normalised_over_the_batch(p: Any, b: Any) -> Any:
    return jnp.square(_normalised_gradient(hidden(p, b)) @ p["head"]).mean()


@jax.custom_vjp
def _rowwise_gradient(x: jax.Array) -> jax.Array:
    return x


_rowwise_gradient.defvjp(
    lambda x: (x, None),
    lambda _, g: (g / (1e-6 + jnp.linalg.norm(g, axis=-1, keepdims=True)),),
)


@loss
def gradient_normalised_by_row(p: Any, b: Any) -> Any:
    return jnp.square(_rowwise_gradient(hidden(p, b)) @ p["head"]).mean()


@jax.custom_vjp
def _clipped_gradient(x: jax.Array) -> jax.Array:
    return x


_clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@loss
def gradient_clipped(p: Any, b: Any) -> Any:
    return jnp.square(_clipped_gradient(hidden(p, b)) @ p["head"]).mean()


@jax.custom_vjp
def _straight_through(x: jax.Array) -> jax.Array:
    return jnp.sign(x)


_straight_through.defvjp(lambda x: (jnp.sign(x), x), lambda x, g: (g * (abs(x) < 1),))


@loss
def straight_through(p: Any, b: Any) -> Any:
    return jnp.square(_straight_through(hidden(p, b)) @ p["head"]).mean()


@jax.custom_jvp
def _own_tangent(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@_own_tangent.defjvp
def _own_tangent_rule(primals: Any, tangents: Any) -> Any:
    y = jnp.tanh(primals[0])
    return y, (1 - y * y) * tangents[0]


@loss
def own_tangent(p: Any, b: Any) -> Any:
    return jnp.square(_own_tangent(b["x"] @ p["w"])).mean()


# Sums, and coefficients.


@loss
def summed(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum()


@loss
def summed_after_a_layer_norm(p: Any, b: Any) -> Any:
    h = normalised(hidden(p, b), p["scale"])
    logits = h @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["y"]).sum()


@loss
def over_the_batch_as_a_number(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / BATCH


@loss
def over_half_the_batch(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / (BATCH // 2)


@loss
def over_batch_times_length(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / (BATCH * LENGTH)


@loss
def times_one_over_the_batch(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() * (1 / BATCH)


@loss
def over_a_hundred(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / 100


@loss
def over_the_shape(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / b["x"].shape[0]


@loss
def times_one_over_the_shape(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() * (1 / len(b["x"]))


@loss
def over_one_less(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / (len(b["x"]) - 1)


@loss
def over_a_count_of_ones(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / jnp.ones(len(b["x"])).sum()


@loss
def over_the_root(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / np.sqrt(len(b["x"]))


@loss
def over_a_root_squared(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / jnp.square(jnp.sqrt(len(b["x"]) * 1.0))


@loss
def mean_and_sum(p: Any, b: Any) -> Any:
    each = -log_probabilities(p, b)
    return each.mean() + 0.01 * each.sum()


@loss
def scaled_inside(p: Any, b: Any) -> Any:
    return jnp.tanh(score(p, b) / len(b["x"])).mean()


@loss
def sign_changes(p: Any, b: Any) -> Any:
    return score(p, b).mean() * (len(b["x"]) - 10)


@loss
def over_a_counted_mask(p: Any, b: Any) -> Any:
    each = score(p, b) * b["m"][:, 0]
    return each.sum() / jnp.maximum(b["m"][:, 0].sum(), 1)


@loss
def over_valid_tokens(p: Any, b: Any) -> Any:
    each = (b["s"] @ p["w"]).sum(-1) * b["m"]
    return each.sum() / b["m"].sum()


@loss
def weighted_by_tokens(p: Any, b: Any) -> Any:
    each = jnp.tanh(b["s"] @ p["w"]).sum(-1) * b["m"]
    return wh.WeightedLoss(each.sum(), b["m"].sum())


@loss
def weighted_by_means(p: Any, b: Any) -> Any:
    each = jnp.tanh(b["s"] @ p["w"]).sum(-1) * b["m"]
    return wh.WeightedLoss(each.mean(), b["m"].mean())


@loss
def weighted_by_the_batch(p: Any, b: Any) -> Any:
    return wh.WeightedLoss(score(p, b).sum(), len(b["x"]))


@loss
def weighted_mean_over_a_sum(p: Any, b: Any) -> Any:
    return wh.WeightedLoss(score(p, b).mean(), b["m"].sum())


@loss
def average_with_weights(p: Any, b: Any) -> Any:
    return jnp.average(score(p, b), weights=jnp.exp(b["r"]))


@loss
def regularised(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).mean() + 1e-2 * sum(
        jnp.square(x).sum() for x in p.values()
    )


@loss
def regularised_sum(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).sum() / len(b["x"]) + jnp.square(p["w"]).sum()


@loss
def regularised_by_the_number(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).mean() + jnp.square(p["w"]).sum() / len(b["x"])


# Nothing is coupled.


@loss
def mean_of_classes(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).mean()


@loss
def labels_by_position(p: Any, b: Any) -> Any:
    logits = jax.nn.log_softmax(hidden(p, b) @ p["head"])
    return -logits[jnp.arange(len(logits)), b["y"]].mean()


@loss
def one_hot_by_write(p: Any, b: Any) -> Any:
    logits = jax.nn.log_softmax(hidden(p, b) @ p["head"])
    hot = jnp.zeros_like(logits).at[jnp.arange(len(logits)), b["y"]].set(1)
    return -(hot * logits).sum(-1).mean()


@loss
def labels_by_vmap(p: Any, b: Any) -> Any:
    logits = jax.nn.log_softmax(hidden(p, b) @ p["head"])
    return -jax.vmap(lambda row, y: row[y])(logits, b["y"]).mean()


@loss
def language_model(p: Any, b: Any) -> Any:
    h = p["embed"][b["t"]]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.einsum("bqd,bkd->bqk", h @ p["w"], h @ p["v"])
    h = h + jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ h
    logits = normalised(h, p["scale"]) @ p["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], b["t"][:, 1:]
    )
    return losses.mean()


@loss
def flattened_tokens(p: Any, b: Any) -> Any:
    h = p["embed"][b["t"].reshape(-1)]
    logits = jnp.tanh(h @ p["w"]) @ p["embed"].T
    labels = b["t"].reshape(-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@loss
def merged_and_parted(p: Any, b: Any) -> Any:
    flat = jnp.tanh(b["s"].reshape(-1, WIDTH) @ p["w"])
    return jnp.square(flat.reshape(len(b["s"]), LENGTH, WIDTH).max(1)).mean()


@loss
def heads(p: Any, b: Any) -> Any:
    h = (b["s"] @ p["w"]).reshape(*b["s"].shape[:2], 2, WIDTH // 2)
    h = h.transpose(0, 2, 1, 3).reshape(-1, LENGTH, WIDTH // 2)
    scores = jax.nn.softmax(h @ h.transpose(0, 2, 1))
    return jnp.square(scores @ h).mean()


@loss
def layers_by_scan(p: Any, b: Any) -> Any:
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["x"], p["layers"])
    return jnp.square(h @ p["head"]).mean()


@loss
def layers_under_remat(p: Any, b: Any) -> Any:
    step = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
    h, _ = lax.scan(step, b["x"], p["layers"])
    return jnp.square(h @ p["head"]).mean()


@loss
def recurrent_over_time(p: Any, b: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + h @ p["v"])
        return h, h

    start = jnp.zeros((len(b["s"]), WIDTH))
    _, out = lax.scan(step, start, b["s"].transpose(1, 0, 2))
    return jnp.square(out @ p["head"]).mean()


@loss
def losses_added_in_a_scan(p: Any, b: Any) -> Any:
    def step(total: Any, x: Any) -> Any:
        return total + jnp.square(x @ p["w"]).mean(), None

    return lax.scan(step, jnp.zeros(()), b["s"].transpose(1, 0, 2))[0] / LENGTH


@loss
def mapped_samples(p: Any, b: Any) -> Any:
    return lax.map(lambda x: jnp.square(jnp.tanh(x @ p["w"])).sum(), b["x"]).mean()


@loss
def mapped_by_vmap(p: Any, b: Any) -> Any:
    return jax.vmap(lambda x, y: jnp.square(x @ p["w"])[y])(b["x"], b["y"]).mean()


@loss
def both_views_at_once(p: Any, b: Any) -> Any:
    both = jnp.tanh(jnp.concatenate([b["x"], b["z"]]) @ p["w"])
    u, v = jnp.split(both, 2)
    return -jnp.sum(u * v, -1).mean()


@loss
def preferences(p: Any, b: Any) -> Any:
    both = jnp.tanh(jnp.stack([b["x"], b["z"]]) @ p["w"]).sum(-1)
    return -jax.nn.log_sigmoid(both[0] - both[1]).mean()


@loss
def dropout(p: Any, b: Any, rng: Any) -> Any:
    h = hidden(p, b)
    keep = jax.random.bernoulli(rng, 0.8, h.shape)
    return jnp.square(jnp.where(keep, h / 0.8, 0) @ p["head"]).mean()


@loss
def keys_by_sample(p: Any, b: Any, rng: Any) -> Any:
    keys = jax.random.split(rng, len(b["x"]))
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return jnp.square((b["x"] + noise) @ p["w"]).mean()


@loss
def latents(p: Any, b: Any, rng: Any) -> Any:
    z = jax.random.normal(rng, b["x"].shape)
    return jax.nn.softplus(jnp.tanh(z @ p["w"]).sum(-1)).mean() + score(p, b).mean()


@loss
def fixed_key(p: Any, b: Any) -> Any:
    noise = jax.random.normal(jax.random.key(3), b["x"].shape)
    return jnp.square((b["x"] + noise) @ p["w"]).mean()


@loss
def diffusion(p: Any, b: Any, rng: Any) -> Any:
    one, two = jax.random.split(rng)
    times = jax.random.uniform(one, (len(b["x"]), 1))
    noise = jax.random.normal(two, b["x"].shape)
    seen = jnp.sqrt(1 - times) * b["x"] + jnp.sqrt(times) * noise
    return jnp.square(jnp.tanh(seen @ p["w"]) - noise).mean()


@loss
def mean_of_own_sequence(p: Any, b: Any) -> Any:
    h = b["s"] @ p["w"]
    return jnp.square(h - h.mean(1, keepdims=True)).mean()


@loss
def masked_mean_of_each(p: Any, b: Any) -> Any:
    each = (jnp.tanh(b["s"] @ p["w"]).sum(-1) * b["m"]).sum(-1)
    return (each / jnp.maximum(b["m"].sum(-1), 1)).mean()


@loss
def lengths_of_each(p: Any, b: Any) -> Any:
    valid = jnp.arange(LENGTH)[None] < b["n"][:, None]
    each = jnp.where(valid, jnp.tanh(b["s"] @ p["w"]).sum(-1), 0).sum(-1)
    return (each / b["n"]).mean()


@loss
def last_token(p: Any, b: Any) -> Any:
    rows = jnp.arange(len(b["s"]))
    return jnp.square(b["s"][rows, b["n"]] @ p["w"]).mean()


@loss
def sorted_within(p: Any, b: Any) -> Any:
    return (jnp.sort(hidden(p, b), -1) * p["scale"] ** 2 * jnp.arange(WIDTH)).mean()


@loss
def top_scores_of_each(p: Any, b: Any) -> Any:
    return lax.top_k(hidden(p, b), 3)[0].mean()


@loss
def convolved(p: Any, b: Any) -> Any:
    out = lax.conv_general_dilated(
        b["s"], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.square(jax.nn.relu(out)).mean()


@loss
def pooled(p: Any, b: Any) -> Any:
    h = jnp.tanh(b["s"] @ p["w"])
    out = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")
    return jnp.square(out).mean()


@loss
def group_norm(p: Any, b: Any) -> Any:
    h = (b["s"] @ p["w"]).reshape(len(b["s"]), LENGTH, 2, WIDTH // 2)
    h = (h - h.mean((1, 3), keepdims=True)) / (h.std((1, 3), keepdims=True) + 1e-3)
    return jnp.square(h.reshape(b["s"].shape) @ p["head"]).mean()


@loss
def mixture_of_all_experts(p: Any, b: Any) -> Any:
    gates = jax.nn.softmax(b["x"] @ p["head"])
    out = jnp.einsum("bd,edf->bef", b["x"], p["experts"])
    return jnp.square((gates[..., None] * jnp.tanh(out)).sum(1)).mean()


@loss
def chosen_expert(p: Any, b: Any) -> Any:
    own = p["experts"][(b["x"] @ p["head"]).argmax(-1)]
    return jnp.square(jnp.einsum("bd,bdf->bf", b["x"], own)).mean()


@loss
def sorted_by_expert(p: Any, b: Any) -> Any:
    chosen = (b["x"] @ p["head"]).argmax(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=4)
    out = lax.ragged_dot(b["x"][order], p["experts"], sizes)
    return jnp.square(jnp.tanh(out)[jnp.argsort(order)] - b["z"]).mean()


@loss
def sorted_by_expert_top_2(p: Any, b: Any) -> Any:
    tokens = b["s"].reshape(-1, WIDTH)
    weights, chosen = lax.top_k(jax.nn.softmax(tokens @ p["head"]), 2)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = (flat[:, None] == jnp.arange(4)).sum(0)
    out = lax.ragged_dot(tokens[order // 2], p["experts"], sizes)
    out = jnp.tanh(out) * weights.reshape(-1)[order][:, None]
    back = jnp.zeros_like(tokens).at[order // 2].add(out)
    return jnp.square(back.reshape(b["s"].shape) - b["s"]).mean()


@loss
def sorted_but_not_back(p: Any, b: Any) -> Any:
    chosen = (b["x"] @ p["head"]).argmax(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=4)
    out = lax.ragged_dot(b["x"][order], p["experts"], sizes)
    return jnp.square(jnp.tanh(out) - b["z"]).mean()


@loss
def grouped_by_another_count(p: Any, b: Any) -> Any:
    chosen = (b["x"] @ p["head"]).argmax(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(b["y"], length=4)
    out = lax.ragged_dot(b["x"][order], p["experts"], sizes)
    return jnp.square(jnp.tanh(out)[jnp.argsort(order)]).mean()


@loss
def vector_quantised(p: Any, b: Any) -> Any:
    h = b["s"] @ p["w"]
    far = jnp.square(h[..., None, :] - p["embed"]).sum(-1)
    nearest = p["embed"][far.argmin(-1)]
    through = h + lax.stop_gradient(nearest - h)
    commitment = jnp.square(h - lax.stop_gradient(nearest)).mean()
    return jnp.square(through - b["s"]).mean() + 0.25 * commitment


@loss
def variational(p: Any, b: Any, rng: Any) -> Any:
    mean, spread = hidden(p, b), jnp.exp(0.1 * (b["x"] @ p["v"]))
    z = mean + spread * jax.random.normal(rng, mean.shape)
    kl = 0.5 * (jnp.square(mean) + jnp.square(spread) - 1).sum(-1)
    return (jnp.square(z - b["x"]).sum(-1) + 1e-2 * kl).mean()


@loss
def connectionist(p: Any, b: Any) -> Any:
    logits = b["s"] @ p["w"]
    labels = b["t"][:, :2] % (WIDTH - 1) + 1
    nothing = jnp.zeros(logits.shape[:2])
    return optax.ctc_loss(logits, nothing, labels, jnp.zeros(labels.shape)).mean()


@loss
def huber_and_clip(p: Any, b: Any) -> Any:
    ratio = jnp.exp(log_probabilities(p, b) - b["r"] / 4)
    gain = jnp.minimum(ratio * b["r"], jnp.clip(ratio, 0.8, 1.2) * b["r"])
    return -gain.mean() + optax.huber_loss(score(p, b), b["r"]).mean()


@loss
def branches(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    h = lax.cond(p["bias"] > 0, lambda x: x * 2, lambda x: x + 1, h)
    return jnp.square(h).mean()


@loss
def fixed_loop(p: Any, b: Any) -> Any:
    h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["layers"][i]), b["x"])
    return jnp.square(h).mean()


@loss
def own_solutions(p: Any, b: Any) -> Any:
    matrices = jnp.einsum("bi,bj->bij", b["x"], b["x"]) + 5 * jnp.eye(WIDTH)
    return (
        jnp.square(jnp.linalg.solve(matrices, b["z"][..., None])).mean()
        + jnp.square(hidden(p, b)).mean()
    )


@loss
def teacher(p: Any, b: Any) -> Any:
    wanted = lax.stop_gradient(jax.nn.softmax(b["z"] @ p["head"] / 0.1))
    return -(wanted * jax.nn.log_softmax(b["x"] @ p["w"] @ p["head"])).sum(-1).mean()


@loss
def hinge(p: Any, b: Any) -> Any:
    return jnp.maximum(0, 1 - jnp.sign(b["r"]) * score(p, b)).mean()


@loss
def nothing_but_weights(p: Any, b: Any) -> Any:
    return jnp.square(p["w"]).sum() + 0 * b["x"].sum() + jnp.sum(0.0)


@loss
def segments_within_a_sample(p: Any, b: Any) -> Any:
    h = jnp.tanh(b["s"] @ p["w"])
    each = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, 3))(h, b["t"] % 3)
    return jnp.square(each).mean()


@loss
def tokens_counted_over_the_batch(p: Any, b: Any) -> Any:
    seen = jnp.zeros(VOCABULARY).at[b["t"].reshape(-1)].add(1)
    return (jnp.square(p["embed"]).sum(-1) * jnp.log1p(seen)).mean()


@loss
def tokens_added_up(p: Any, b: Any) -> Any:
    seen = jnp.zeros(VOCABULARY).at[b["t"].reshape(-1)].add(1.0)
    return (jnp.square(p["embed"]).sum(-1) * seen).sum() / len(b["t"])


@loss
def depth_of_each(p: Any, b: Any) -> Any:
    def one(x: Any, n: Any) -> Any:
        return lax.fori_loop(0, LENGTH, lambda i, h: jnp.where(i < n, h @ p["w"], h), x)

    return jnp.square(jax.vmap(one)(b["x"], b["n"])).mean()


# Rules of a derivative that are given more than the samples, or give back other things.


@jax.custom_vjp
def _scaled_gradient(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x


_scaled_gradient.defvjp(
    lambda x, scale: (x, scale), lambda scale, g: (g * scale, jnp.zeros_like(scale))
)


@loss
def gradient_scaled_by_a_statistic(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    scale = lax.stop_gradient(jnp.sqrt(h.var() + 1))
    return jnp.square(_scaled_gradient(h, scale) @ p["head"]).mean()


@loss
def gradient_scaled_by_each(p: Any, b: Any) -> Any:
    h = hidden(p, b)
    scale = lax.stop_gradient(jnp.abs(h) + 1)
    return jnp.square(_scaled_gradient(h, scale) @ p["head"]).mean()


@loss
def weight_gradient_clipped(p: Any, b: Any) -> Any:
    return jnp.square(jnp.tanh(b["x"] @ _clipped_gradient(p["w"]))).mean()


@loss
def weight_gradient_normalised(p: Any, b: Any) -> Any:
    return jnp.square(jnp.tanh(b["x"] @ _normalised_gradient(p["w"]))).mean()


@loss
def binary_weights(p: Any, b: Any) -> Any:
    return jnp.square(jnp.tanh(b["x"] @ _straight_through(p["w"]))).mean()


@jax.custom_gradient
def _normalised_by_closure(x: jax.Array) -> Any:
    return x, lambda g: (g / (1e-6 + jnp.linalg.norm(g)),)


@loss
def gradient_normalised_by_a_closure(p: Any, b: Any) -> Any:
    return jnp.square(_normalised_by_closure(hidden(p, b)) @ p["head"]).mean()


_own_tanh = jax.custom_vjp(jnp.tanh)
_own_tanh.defvjp(
    lambda x: (jnp.tanh(x), None), lambda _, g: (g / (1e-6 + jnp.linalg.norm(g)),)
)


@loss
def own_rule_for_a_function_of_jax(p: Any, b: Any) -> Any:
    return jnp.square(_own_tanh(b["x"] @ p["w"])).mean()


@jax.custom_vjp
def _nothing_but_a_gradient(x: jax.Array) -> jax.Array:
    return 0 * x


_nothing_but_a_gradient.defvjp(lambda x: (0 * x, None), lambda _, g: (g,))


@loss
def zero_with_a_gradient(p: Any, b: Any) -> Any:
    return -log_probabilities(p, b).mean() + _nothing_but_a_gradient(score(p, b)).sum()


@jax.custom_vjp
def _fused_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


_fused_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
)


@loss
def fused_product(p: Any, b: Any) -> Any:
    return jnp.square(jnp.tanh(_fused_product(b["x"], p["w"]))).mean()


@loss
def fused_product_of_each(p: Any, b: Any) -> Any:
    each = lax.map(lambda x: jnp.square(_fused_product(x, p["w"])).sum(), b["s"])
    return each.mean()


@jax.custom_vjp
def _decayed(w: jax.Array) -> jax.Array:
    return w


_decayed.defvjp(lambda w: (w, w), lambda w, g: (g + 0.1 * w,))


@loss
def decay_by_a_rule(p: Any, b: Any) -> Any:
    return jnp.square(jnp.tanh(b["x"] @ _decayed(p["w"]))).mean()


@loss
def decay_by_a_rule_for_each(p: Any, b: Any) -> Any:
    return lax.map(lambda x: jnp.square(x @ _decayed(p["w"])).sum(), b["x"]).mean()


@loss
def decay_by_a_rule_and_weighted(p: Any, b: Any) -> Any:
    each = jnp.square(b["x"] @ _decayed(p["w"])).sum(-1) * b["m"].sum(-1)
    return wh.WeightedLoss(each.sum(), b["m"].sum())


def _slope(kept: Any, g: jax.Array) -> jax.Array:
    return g * (jax.nn.softmax(kept[0]) - jax.nn.one_hot(kept[1], CLASSES))


def _entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


_fused_entropy = jax.custom_vjp(_entropy)
_fused_entropy.defvjp(
    lambda logits, y: (_entropy(logits, y), (logits, y)),
    lambda kept, g: (_slope(kept, g) / len(kept[1]), None),
)

_fused_entropy_times_n = jax.custom_vjp(_entropy)
_fused_entropy_times_n.defvjp(
    lambda logits, y: (_entropy(logits, y), (logits, y)),
    lambda kept, g: (_slope(kept, g) * len(kept[1]) / 100, None),
)


@loss
def fused_entropy(p: Any, b: Any) -> Any:
    return _fused_entropy(hidden(p, b) @ p["head"], b["y"])


@loss
def fused_entropy_times_the_number(p: Any, b: Any) -> Any:
    return _fused_entropy_times_n(hidden(p, b) @ p["head"], b["y"])


# Places, and pieces as long as the batch, in what has no dimension of samples.


@loss
def places_as_truth(p: Any, b: Any) -> Any:
    places = jnp.arange(len(b["x"])).astype(bool).astype(jnp.int32)
    return jnp.square(hidden(p, b)[places]).mean()


@loss
def places_squeezed(p: Any, b: Any) -> Any:
    places = lax.squeeze(jnp.arange(len(b["x"]))[None], (0,))
    return jnp.square(hidden(p, b)[places, b["y"]]).mean()


@loss
def places_behind_a_barrier(p: Any, b: Any) -> Any:
    places, h = lax.optimization_barrier((jnp.arange(len(b["x"])), hidden(p, b)))
    return jnp.square(h[places, b["y"]]).mean()


@loss
def added_at_their_places(p: Any, b: Any) -> Any:
    all_scores = jnp.zeros(32).at[jnp.arange(len(b["x"]))].add(score(p, b))
    return jnp.dot(all_scores, jnp.arange(32.0)) / len(b["x"])


@loss
def first_one_by_filling(p: Any, b: Any) -> Any:
    places = jnp.arange(len(b["x"]))
    first = jnp.ones((1,)).at[places].get(mode="fill", fill_value=0.0)
    return (first * score(p, b)).mean()


@loss
def filled_with_one(p: Any, b: Any) -> Any:
    rows = (p["embed"] / len(b["x"])).at[b["y"] * 5]
    return rows.get(mode="fill", fill_value=1.0).sum()


@loss
def mask_by_joining(p: Any, b: Any) -> Any:
    count = len(b["x"]) // 4
    mask = jnp.concatenate([jnp.ones(count), jnp.zeros(WIDTH - count)])
    return jnp.square(hidden(p, b) * mask).mean()


@loss
def mask_by_setting(p: Any, b: Any) -> Any:
    mask = jnp.zeros(WIDTH).at[: len(b["x"]) // 4].set(1.0)
    return jnp.square(hidden(p, b) * mask).mean()


@loss
def mask_by_an_update(p: Any, b: Any) -> Any:
    ones = jnp.ones(len(b["x"]) // 4)
    mask = lax.dynamic_update_slice(jnp.zeros(WIDTH), ones, (0,))
    return jnp.square(hidden(p, b) * mask).mean()


@loss
def counted_by_a_reduction(p: Any, b: Any) -> Any:
    def both(x: Any, y: Any) -> Any:
        return jnp.sqrt(x * x + y * y)

    root = lax.reduce(jnp.ones(len(b["x"])), _real().type(0), both, (0,))
    return root * jnp.square(hidden(p, b)).mean()


@loss
def side_by_the_number(p: Any, b: Any) -> Any:
    return jnp.square(lax.cumsum(hidden(p, b), 1, reverse=len(b["x"]) > 8)).mean()


@loss
def largest_of_another_sign(p: Any, b: Any) -> Any:
    sign = 10.0 - len(b["x"])
    return (lax.top_k(hidden(p, b) * sign, 3)[0] / sign).mean()


@loss
def largest_in_windows_of_another_sign(p: Any, b: Any) -> Any:
    sign = 10.0 - len(b["x"])
    h = hidden(p, b) * sign
    out = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")
    return (out / sign).mean()


@loss
def logarithms_of_counts_of_zeros(p: Any, b: Any) -> Any:
    logarithms = lax.cumlogsumexp(jnp.zeros(WIDTH)) * p["scale"]
    return -log_probabilities(p, b).mean() + logarithms.sum() * len(b["x"])


@loss
def keys_split_from_a_fixed_one(p: Any, b: Any) -> Any:
    keys = jax.random.split(jax.random.key(3), len(b["x"]))
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return jnp.square((b["x"] + noise) @ p["w"]).mean()


@loss
def keys_folded_with_labels(p: Any, b: Any) -> Any:
    keys = jax.vmap(lambda y: jax.random.fold_in(jax.random.key(3), y))(b["y"])
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
    return jnp.square((b["x"] + noise) @ p["w"]).mean()


# Loops of each sample.


def _halved(p: Any, b: Any, start: jax.Array) -> Any:
    def one(sample: Any) -> Any:
        y, x = sample
        _, left = lax.while_loop(
            lambda c: c[0] < y, lambda c: (c[0] + 1, c[1] * 0.5), (0, start)
        )
        return left * jnp.square(x @ p["w"]).sum()

    return lax.map(one, (b["y"], b["x"])).mean()


@loss
def loops_of_each_on_a_mean(p: Any, b: Any) -> Any:
    return _halved(p, b, b["r"].mean())


@loss
def loops_of_each_on_a_squared_mean(p: Any, b: Any) -> Any:
    return _halved(p, b, jnp.square(b["r"].mean()))


@loss
def loops_of_each_on_a_number(p: Any, b: Any) -> Any:
    return _halved(p, b, jnp.ones(()))


@loss
def mapped_in_chunks(p: Any, b: Any) -> Any:
    def one(x: Any) -> Any:
        return jnp.square(jnp.tanh(x @ p["w"])).sum()

    return lax.map(one, b["x"], batch_size=4).mean()


# Sorted by expert, and counted in another way than they are sorted.


def _by_expert(p: Any, b: Any, sizes: Callable[[jax.Array], jax.Array]) -> Any:
    chosen = (b["x"] @ p["head"]).argmax(-1)
    order = jnp.argsort(chosen)
    out = lax.ragged_dot(b["x"][order], p["experts"], sizes(chosen))
    return jnp.square(jnp.tanh(out)[jnp.argsort(order)] - b["z"]).mean()


@loss
def experts_counted_from_the_last(p: Any, b: Any) -> Any:
    last = jnp.array([3, 2, 1, 0])
    return _by_expert(p, b, lambda chosen: (chosen[:, None] == last).sum(0))


@loss
def experts_counted_twice(p: Any, b: Any) -> Any:
    def sizes(chosen: jax.Array) -> jax.Array:
        return jnp.zeros(4, chosen.dtype).at[chosen].add(2)

    return _by_expert(p, b, sizes)


@loss
def experts_counted_by_one_hot(p: Any, b: Any) -> Any:
    def sizes(chosen: jax.Array) -> jax.Array:
        return jax.nn.one_hot(chosen, 4, dtype=jnp.int32).sum(0)

    return _by_expert(p, b, sizes)


@loss
def experts_counted_by_their_rank(p: Any, b: Any) -> Any:
    _, chosen = lax.top_k(b["x"] @ p["head"], 4)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = (chosen == jnp.arange(4)).sum(0)
    out = lax.ragged_dot(b["x"][order // 4], p["experts"], sizes)
    back = jnp.zeros_like(b["x"]).at[order // 4].add(jnp.tanh(out))
    return jnp.square(back - b["z"]).mean()


@loss
def experts_of_rows_that_are_repeated(p: Any, b: Any) -> Any:
    chosen = (b["x"] @ p["head"]).argmax(-1)
    order = jnp.argsort(jnp.repeat(chosen, 3))
    rows = jnp.repeat(b["x"], 3, axis=0)[order]
    out = lax.ragged_dot(rows, p["experts"], jnp.bincount(chosen, length=4))
    return jnp.square(jnp.tanh(out)[jnp.argsort(order)]).mean()


@loss
def tokens_repeated_for_their_experts(p: Any, b: Any) -> Any:
    weights, chosen = lax.top_k(jax.nn.softmax(b["x"] @ p["head"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=4)
    rows = jnp.repeat(b["x"], 2, axis=0)[order]
    out = lax.ragged_dot(rows, p["experts"], sizes)[jnp.argsort(order)]
    return jnp.square((out.reshape(-1, 2, WIDTH) * weights[..., None]).sum(1)).mean()


@loss
def gradient_normalised_over_sorted_rows(p: Any, b: Any) -> Any:
    order = jnp.argsort(b["r"])
    out = _normalised_gradient(jnp.tanh(b["x"][order] @ p["w"]))
    return jnp.square(out[jnp.argsort(order)] - b["z"]).mean()


@loss
def weights_by_place_in_a_sort(p: Any, b: Any) -> Any:
    ordered = jnp.sort((b["s"] @ p["w"]).sum(-1).reshape(-1))
    weights = jnp.broadcast_to(jnp.arange(LENGTH), (len(b["s"]), LENGTH))
    return (ordered * weights.reshape(-1)).mean()


# Systems, filters and labels of each.


@loss
def columns_of_a_triangular_system(p: Any, b: Any) -> Any:
    root = jnp.linalg.cholesky(p["w"] @ p["w"].T + jnp.eye(WIDTH))
    solved = jax.scipy.linalg.solve_triangular(root, b["x"].T, lower=True)
    return jnp.square(solved).sum(0).mean()


@loss
def normal_log_density(p: Any, b: Any) -> Any:
    cover = p["w"] @ p["w"].T + jnp.eye(WIDTH)
    density = jax.scipy.stats.multivariate_normal.logpdf(b["x"], p["scale"], cover)
    return -density.mean()


@loss
def filters_of_each(p: Any, b: Any) -> Any:
    def one(s: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            s.T[..., None],
            kernel,
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )

    kernels = (b["x"] @ p["w"])[:, :3, None, None]
    return jnp.square(jax.vmap(one)(b["s"], kernels)).mean()


@loss
def labels_of_two_joined_batches(p: Any, b: Any) -> Any:
    both = jnp.concatenate([b["x"], jnp.tanh(b["z"] @ p["v"])])
    logits = (jnp.tanh(both @ p["w"]) @ p["head"])[:, 0]
    labels = jnp.concatenate([jnp.ones(len(b["x"])), jnp.zeros(len(b["z"]))])
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


@loss
def weights_tiled_over_repeated_samples(p: Any, b: Any) -> Any:
    rows = jnp.tanh(jnp.repeat(b["x"], 3, axis=0) @ p["w"])
    weights = jnp.tile(jnp.arange(3.0), len(b["x"]))
    return jnp.square(rows * weights[:, None]).mean()


# Places that meet, keys of the loss's own, and rules whose results are others.


@loss
def largest_at_a_place(p: Any, b: Any) -> Any:
    return hidden(p, b).mean(0).at[1].max(0.05).sum()


@loss
def multiplied_at_a_place(p: Any, b: Any) -> Any:
    mean = hidden(p, b).mean(0)
    return mean.at[0].multiply(mean[1]).sum()


@loss
def keys_of_a_fixed_one_mapped(p: Any, b: Any) -> Any:
    def one(pair: Any) -> Any:
        noise = jax.random.normal(pair[1], (WIDTH,))
        return jnp.square((pair[0] + noise) @ p["w"]).mean()

    keys = jax.random.split(jax.random.key(3), len(b["x"]))
    return lax.map(one, (b["x"], keys)).mean()


@loss
def words_of_keys(p: Any, b: Any) -> Any:
    keys = jax.random.split(jax.random.key(3), len(b["x"]))
    words = jax.random.key_data(keys)[:, 0] / 2.0**32
    return (hidden(p, b).sum(-1) * words).mean()


@jax.custom_vjp
def _centred_forward(x: Any) -> Any:
    return x


_centred_forward.defvjp(lambda x: (x - x.mean(0), None), lambda _, g: (g,))


@loss
def forward_of_a_rule(p: Any, b: Any) -> Any:
    return jnp.square(_centred_forward(hidden(p, b))).mean()


@loss
def groups_of_sums(p: Any, b: Any) -> Any:
    rows = hidden(p, b)
    squares = (rows.T @ rows / len(rows))[None]
    mean = rows.mean(0, keepdims=True)
    return lax.ragged_dot(mean, squares, jnp.array([1])).sum()


@loss
def windows_of_a_mean(p: Any, b: Any) -> Any:
    def largest(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID").sum()

    mean = hidden(p, b).mean(0)
    return (jax.grad(largest)(mean) * p["scale"]).sum()


@jax.custom_jvp
def _shrunk(x: Any) -> Any:
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.1, 0)


@_shrunk.defjvp
def _shrunk_rule(primals: Any, tangents: Any) -> Any:
    shrunk = _shrunk(*primals)
    return shrunk, jnp.where(shrunk == 0, 0, tangents[0])


@loss
def rule_that_calls_its_function(p: Any, b: Any) -> Any:
    return jnp.square(_shrunk(hidden(p, b))).mean()


@loss
def conjugate_gradients(p: Any, b: Any) -> Any:
    rows = hidden(p, b)
    cover = rows.T @ rows / len(rows) + jnp.eye(WIDTH)
    solve = jax.scipy.sparse.linalg.cg
    return solve(lambda v: cover @ v, p["scale"])[0].sum()


# Sums that a loop carries from sample to sample.


def _squares(p: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ p["w"])).mean()


def _scanned(body: Callable[..., Any], start: Any, xs: Any, **how: Any) -> Any:
    return lax.scan(lambda c, x: (body(c, x), None), start, xs, **how)[0]


@loss
def added_sample_by_sample(p: Any, b: Any) -> Any:
    total = _scanned(lambda c, x: c + _squares(p, x), 0.0, b["x"], reverse=True)
    return total / len(b["x"])


@loss
def added_by_index(p: Any, b: Any) -> Any:
    x, y = jnp.asarray(b["x"]), jnp.asarray(b["y"])

    def body(i: Any, c: Any) -> Any:
        own = lax.dynamic_index_in_dim(x, i, keepdims=False)
        return c + _squares(p, own) * y[i] + _squares(p, jnp.take(x, i, axis=0))

    return lax.fori_loop(0, len(x), body, 0.0) / len(x)


@loss
def weighted_sums_of_a_loop(p: Any, b: Any) -> Any:
    def body(c: Any, one: Any) -> Any:
        x, m = one
        total, weight, seen = c
        weight = jnp.where(m[0] > 0, weight + m.sum(), weight)
        return total + _squares(p, x) * m[0] * m.sum(), weight, seen + 1

    given = jnp.asarray(b["x"]), jnp.asarray(b["m"])
    total, weight, _ = _scanned(body, (0.0, 0.0, 0), given)
    return wh.WeightedLoss(total, weight)


@loss
def added_in_chunks(p: Any, b: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        return c + jax.vmap(lambda one: _squares(p, one))(x).sum()

    return _scanned(body, 0.0, b["x"].reshape(-1, 4, WIDTH)) / len(b["x"])


@loss
def added_in_chunks_by_index(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])

    def body(i: Any, c: Any) -> Any:
        rows = lax.dynamic_slice_in_dim(x, i * 4, 4)
        return c + jnp.square(jnp.tanh(rows @ p["w"])).sum()

    return lax.fori_loop(0, len(x) // 4, body, 0.0) / len(x)


@loss
def added_by_class(p: Any, b: Any) -> Any:
    def body(c: Any, one: Any) -> Any:
        x, y = one
        return c.at[y].add(_squares(p, x))

    given = jnp.asarray(b["x"]), jnp.asarray(b["y"])
    return _scanned(body, jnp.zeros(CLASSES), given) @ p["head"].sum(0) / len(b["x"])


@loss
def added_over_the_places(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])
    places = jnp.arange(len(x))
    return _scanned(lambda c, i: c - _squares(p, x[i]), 0.0, places) / len(x)


@loss
def keys_split_in_a_loop(p: Any, b: Any, rng: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        key, total = c
        key, own = jax.random.split(key)
        return key, total + _squares(p, x + jax.random.normal(own, x.shape))

    return _scanned(body, (rng, 0.0), b["x"])[1] / len(b["x"])


@loss
def keys_folded_with_the_iteration(p: Any, b: Any, rng: Any) -> Any:
    x = jnp.asarray(b["x"])

    def body(i: Any, c: Any) -> Any:
        noise = jax.random.normal(jax.random.fold_in(rng, i), x.shape[1:])
        return c + _squares(p, x[i] + noise)

    return lax.fori_loop(0, len(x), body, 0.0) / len(x)


@loss
def decayed_sum(p: Any, b: Any) -> Any:
    return _scanned(lambda c, x: 0.9 * c + _squares(p, x), 0.0, b["x"]) / len(b["x"])


@loss
def largest_so_far(p: Any, b: Any) -> Any:
    return _scanned(lambda c, x: jnp.maximum(c, _squares(p, x)), 0.0, b["x"])


@loss
def sum_that_the_next_reads(p: Any, b: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        return c + _squares(p, x) * jnp.exp(-c)

    return _scanned(body, 0.0, b["x"]) / len(b["x"])


@loss
def running_sums(p: Any, b: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        c = c + _squares(p, x)
        return c, c

    return lax.scan(body, 0.0, b["x"])[1].mean() / len(b["x"])


@loss
def sums_that_change_places(p: Any, b: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        return c[1] + _squares(p, x), c[2], c[0]

    return _scanned(body, (0.0, 0.0, 0.0), b["x"])[0] / len(b["x"])


@loss
def differences_of_neighbours(p: Any, b: Any) -> Any:
    def body(c: Any, x: Any) -> Any:
        return x, c[1] + _squares(p, x - c[0])

    return _scanned(body, (jnp.zeros(WIDTH), 0.0), jnp.asarray(b["x"]))[1] / len(b["x"])


@loss
def weights_of_the_iteration(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])
    return lax.fori_loop(0, len(x), lambda i, c: c + _squares(p, x[i]) * i, 0.0)


@loss
def sample_and_its_mirror(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])

    def body(c: Any, one: Any) -> Any:
        return c[0] + 1, c[1] + _squares(p, x[c[0]] * one)

    return _scanned(body, (0, 0.0), x, reverse=True)[1] / len(x)


@loss
def sample_and_the_next(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])

    def body(i: Any, c: Any) -> Any:
        return c + _squares(p, x[i] * x[(i + 1) % len(x)])

    return lax.fori_loop(0, len(x), body, 0.0) / len(x)


@loss
def pairs_by_two_loops(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])

    def row(i: Any, c: Any) -> Any:
        def pair(j: Any, d: Any) -> Any:
            return d + _squares(p, x[i] * x[j])

        return lax.fori_loop(0, len(x), pair, c)

    return lax.fori_loop(0, len(x), row, 0.0) / len(x) ** 2


@loss
def sum_with_a_start(p: Any, b: Any) -> Any:
    return _scanned(lambda c, x: c + _squares(p, x), 1.0, b["x"]) / len(b["x"])


@loss
def more_than_half_by_index(p: Any, b: Any) -> Any:
    x = jnp.asarray(b["x"])
    count = len(x) // 2 + 1
    return lax.fori_loop(0, count, lambda i, c: c + _squares(p, x[i]), 0.0) / count


@loss
def truth_that_is_carried(p: Any, b: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        return (c > 0).astype(jnp.int32) + y

    return _scanned(body, 0, jnp.asarray(b["y"])) * _squares(p, b["x"][0]) / len(b["y"])


@loss
def truth_of_a_sum(p: Any, b: Any) -> Any:
    def body(c: Any, y: Any) -> Any:
        return c.astype(bool).astype(jnp.int32) + y

    return _scanned(body, 0, jnp.asarray(b["y"])) * p["scale"].sum() / len(b["y"])


@loss
def one_key_for_all_in_a_loop(p: Any, b: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), len(b["x"]))

    def each(one: Any) -> Any:
        x, key = one
        return _squares(p, x + jax.random.normal(key, x.shape))

    return lax.map(each, (jnp.asarray(b["x"]), keys)).mean()


@loss
def drawn_for_samples_and_iterations(p: Any, b: Any, rng: Any) -> Any:
    x = jnp.asarray(b["x"])
    noise = jax.random.normal(rng, (len(x),))

    def body(i: Any, c: Any) -> Any:
        return c + _squares(p, x[i] * noise.mean()) + _squares(p, x[i]) * noise[i]

    return lax.fori_loop(0, len(x), body, 0.0) / len(x)


@loss
def last_to_first(p: Any, b: Any) -> Any:
    rows = hidden(p, b)[::-1]
    return (jnp.square(rows) * score(p, b)[::-1, None]).mean() + rows[::-1].mean()


@loss
def first_and_last(p: Any, b: Any) -> Any:
    rows = hidden(p, b)
    return jnp.square(rows - rows[::-1]).mean()


@loss
def norm_squared(p: Any, b: Any) -> Any:
    rows = hidden(p, b)
    return jnp.linalg.norm(rows) ** 2 / len(rows)


@loss
def products_in_the_order_of_einsum(p: Any, b: Any) -> Any:
    return jnp.einsum("bi,ij,jk,bk->b", b["x"], p["w"], p["v"], b["z"]).mean()


@loss
def products_from_left_to_right(p: Any, b: Any) -> Any:
    factors = b["x"], p["w"], p["v"], b["z"]
    return jnp.einsum("bi,ij,jk,bk->b", *factors, optimize=False).mean()


@loss
def weight_of_at_least_one(p: Any, b: Any) -> Any:
    weight = b["m"][:, 0].sum()
    return wh.WeightedLoss((score(p, b) * b["m"][:, 0]).sum(), jnp.maximum(weight, 1))


@loss
def weights_above_zero(p: Any, b: Any) -> Any:
    weight = b["m"][:, 0] + 1e-6
    return wh.WeightedLoss((score(p, b) * b["m"][:, 0]).sum(), weight.sum())


@loss
def penalty_beside_a_weighted_total(p: Any, b: Any) -> Any:
    total, weight = (score(p, b) * b["m"][:, 0]).sum(), b["m"][:, 0].sum()
    return wh.WeightedLoss(total + jnp.square(p["w"]).sum(), weight)


@loss
def penalty_times_the_weight(p: Any, b: Any) -> Any:
    total, weight = (score(p, b) * b["m"][:, 0]).sum(), b["m"][:, 0].sum()
    return wh.WeightedLoss(total + weight * jnp.square(p["w"]).sum(), weight)


@loss
def rows_by_their_class(p: Any, b: Any) -> Any:
    rows = hidden(p, b)
    return jnp.square(rows - rows[b["y"]]).mean()
