"""Flax's own layers in the shapes of its examples, Linen and NNX."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.foreign.harness import Built, foreign, images, key, tokens


def _labels(samples: int, classes: int) -> jax.Array:
    return jax.random.randint(key(3), (samples,), 0, classes)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _classifier(module: nn.Module, inputs: jax.Array, classes: int = 10) -> Built:
    variables = jax.jit(module.init)(key(), inputs)
    batch = {"inputs": inputs, "labels": _labels(len(inputs), classes)}

    def loss_fn(variables: Any, batch: Any) -> jax.Array:
        return _cross_entropy(module.apply(variables, batch["inputs"]), batch["labels"])

    return Built(loss_fn=loss_fn, model=variables, batch=batch)


def _nnx_classifier(module: nnx.Module, inputs: jax.Array, classes: int = 10) -> Built:
    batch = {"inputs": inputs, "labels": _labels(len(inputs), classes)}

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return _cross_entropy(model(batch["inputs"]), batch["labels"])

    return Built(loss_fn=loss_fn, model=module, batch=batch)


class _MnistCNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


@foreign("flax-linen")
def linen_mnist() -> Built:
    return _classifier(_MnistCNN(), images(8, 28, 28, 1))


class _NNXCNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(7 * 7 * 64, 256, rngs=rngs)
        self.linear2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.linear2(nnx.relu(self.linear1(x.reshape(len(x), -1))))


@foreign("flax-nnx")
def nnx_mnist() -> Built:
    return _nnx_classifier(_NNXCNN(nnx.Rngs(0)), images(8, 28, 28, 1))


class _BiLSTM(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(50, 32)(ids)
        forward = nn.RNN(nn.OptimizedLSTMCell(32))
        backward = nn.RNN(nn.OptimizedLSTMCell(32))
        x = nn.Bidirectional(forward, backward)(x)
        return nn.Dense(2)(jnp.tanh(nn.Dense(16)(x.mean(1))))


@foreign("flax-linen")
def linen_sst2() -> Built:
    return _classifier(_BiLSTM(), tokens(8, 12, 50), classes=2)


class _Block(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32)(
            h, h, mask=mask
        )
        h = nn.relu(nn.Dense(64)(nn.LayerNorm()(x)))
        return x + nn.Dense(32)(h)


class _Lm1b(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(64, 32)
        shifted = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
        position = self.param("position", nn.initializers.normal(0.02), (1, 16, 32))
        x = embed(shifted) + position
        mask = nn.make_causal_mask(ids)
        for _ in range(2):
            x = _Block()(x, mask)
        return embed.attend(nn.LayerNorm()(x)) / jnp.sqrt(32.0)


@foreign("flax-linen")
def linen_lm1b() -> Built:
    module, ids = _Lm1b(), tokens(8, 16, 64)
    variables = jax.jit(module.init)(key(), ids)

    def loss_fn(variables: Any, ids: Any) -> jax.Array:
        return _cross_entropy(module.apply(variables, ids), ids)

    return Built(loss_fn=loss_fn, model=variables, batch=ids)


class _ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(32, (8, 8), strides=(4, 4))(x / 255.0))
        x = nn.relu(nn.Conv(64, (4, 4), strides=(2, 2))(x))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.log_softmax(nn.Dense(6)(x)), nn.Dense(1)(x)


@foreign("flax-linen")
def linen_ppo() -> Built:
    module, frames = _ActorCritic(), 128 * images(8, 42, 42, 4)
    variables = jax.jit(module.init)(key(), frames)
    batch = {
        "frames": frames,
        "actions": _labels(8, 6),
        "returns": images(8),
        "old": -jnp.ones(8),
    }

    def loss_fn(variables: Any, batch: Any) -> jax.Array:
        log_probs, values = module.apply(variables, batch["frames"])
        taken = jnp.take_along_axis(log_probs, batch["actions"][:, None], 1)[:, 0]
        ratios = jnp.exp(taken - batch["old"])
        advantages = batch["returns"] - jax.lax.stop_gradient(values[:, 0])
        clipped = jnp.clip(ratios, 0.9, 1.1)
        actor = -jnp.minimum(ratios * advantages, clipped * advantages).mean()
        critic = jnp.square(batch["returns"] - values[:, 0]).mean()
        entropy = (-jnp.exp(log_probs) * log_probs).sum(1).mean()
        return actor + 0.5 * critic - 0.01 * entropy

    return Built(loss_fn=loss_fn, model=variables, batch=batch)


class _VAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.mean = nnx.Linear(32, 8, rngs=rngs)
        self.log_variance = nnx.Linear(32, 8, rngs=rngs)
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.out = nnx.Linear(32, 64, rngs=rngs)


@foreign("flax-nnx")
def nnx_vae() -> Built:
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        h = nnx.relu(model.hidden(batch["x"]))
        mean, log_variance = model.mean(h), model.log_variance(h)
        z = mean + jnp.exp(0.5 * log_variance) * batch["noise"]
        logits = model.out(nnx.relu(model.up(z)))
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).mean()
        kl = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).mean()
        return reconstruction + kl

    batch = {"x": jax.nn.sigmoid(images(8, 64)), "noise": images(8, 8, seed=5)}
    return Built(loss_fn=loss_fn, model=_VAE(nnx.Rngs(0)), batch=batch)


class _NNXTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up = nnx.LoRALinear(32, 64, lora_rank=4, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))


@foreign("flax-nnx")
def nnx_transformer() -> Built:
    def loss_fn(model: Any, ids: Any) -> jax.Array:
        return _cross_entropy(model(ids)[:, :-1], ids[:, 1:])

    return Built(
        loss_fn=loss_fn, model=_NNXTransformer(nnx.Rngs(0)), batch=tokens(8, 16, 64)
    )


class _NNXGRU(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(16, 32, rngs=rngs))
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.rnn(x)[:, -1])


@foreign("flax-nnx")
def nnx_gru() -> Built:
    return _nnx_classifier(_NNXGRU(nnx.Rngs(0)), images(8, 12, 16))


class _Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.relu(nn.GroupNorm(4)(nn.Conv(16, (3, 3), strides=(2, 2))(x)))
        h = nn.relu(nn.ConvTranspose(16, (3, 3), strides=(2, 2))(h))
        return nn.WeightNorm(nn.Conv(3, (3, 3)))(h)


@foreign("flax-linen")
def linen_autoencoder() -> Built:
    module, x = _Autoencoder(), images(8, 16, 16, 3)
    variables = jax.jit(module.init)(key(), x)

    def loss_fn(variables: Any, x: Any) -> jax.Array:
        return jnp.mean((module.apply(variables, x) - x) ** 2)

    return Built(loss_fn=loss_fn, model=variables, batch=x)
