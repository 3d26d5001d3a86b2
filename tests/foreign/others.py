"""Haiku, Equinox, graph networks, a diffusion U-Net, ODEs, a VQ-VAE, a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import diffusers
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import mamba2_jax
import optax
from flax import nnx
from jax.experimental import ode

from tests.foreign.harness import Built, foreign, images, key, tokens


SAMPLES = 8


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def _haiku(function: Callable[[jax.Array], jax.Array], inputs: jax.Array) -> Built:
    transformed = hk.without_apply_rng(hk.transform(function))
    params = jax.jit(transformed.init)(key(), inputs)
    batch = {"inputs": inputs, "labels": jnp.arange(SAMPLES) % 10}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = transformed.apply(params, batch["inputs"])
        return _cross_entropy(logits, batch["labels"])

    return Built(loss_fn=loss_fn, model=params, batch=batch)


@foreign("haiku")
def haiku_mlp() -> Built:
    return _haiku(lambda x: hk.nets.MLP([64, 64, 10])(x), images(SAMPLES, 32))


@foreign("haiku")
def haiku_attention() -> Built:
    def function(x: jax.Array) -> jax.Array:
        h = hk.LayerNorm(-1, True, True)(x)
        h = hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling())(
            h, h, h
        )
        return hk.Linear(10)((x + h).mean(1))

    return _haiku(function, images(SAMPLES, 12, 32))


@foreign("haiku")
def haiku_lstm() -> Built:
    def function(x: jax.Array) -> jax.Array:
        core = hk.LSTM(32)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), False)
        return hk.Linear(10)(out[:, -1])

    return _haiku(function, images(SAMPLES, 12, 16))


@foreign("haiku")
def haiku_resnet() -> Built:
    transformed = hk.without_apply_rng(
        hk.transform_with_state(lambda x: hk.nets.ResNet18(10)(x, is_training=True))
    )
    pictures = images(SAMPLES, 32, 32, 3)
    params, state = jax.jit(transformed.init)(key(), pictures)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits, _ = transformed.apply(params, state, batch)
        return jnp.square(logits - 1).mean()

    return Built(loss_fn=loss_fn, model=params, batch=pictures)


@foreign("vq-vae")
def haiku_vq_vae() -> Built:
    def function(x: jax.Array) -> jax.Array:
        encoded = hk.Conv2D(16, 4, stride=2)(x)
        quantizer = hk.nets.VectorQuantizer(16, 32, commitment_cost=0.25)
        found = quantizer(encoded, is_training=True)
        decoded = hk.Conv2DTranspose(3, 4, stride=2)(found["quantize"])
        return found["loss"] + jnp.square(decoded - x).mean()

    transformed = hk.without_apply_rng(hk.transform(function))
    pictures = images(SAMPLES, 16, 16, 3)
    params = jax.jit(transformed.init)(key(), pictures)
    return Built(loss_fn=transformed.apply, model=params, batch=pictures)


def _equinox(model: Any, inputs: jax.Array) -> Built:
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        out = jax.vmap(eqx.combine(params, static))(batch)
        return jnp.square(out - 1).mean()

    return Built(loss_fn=loss_fn, model=params, batch=inputs)


@foreign("equinox")
def equinox_mlp() -> Built:
    return _equinox(eqx.nn.MLP(16, 4, 64, 2, key=key()), images(SAMPLES, 16))


@foreign("equinox")
def equinox_convolutions() -> Built:
    one, two, three = jax.random.split(key(), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 16, 3, key=one),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16 * 7 * 7, 64, key=two),
            eqx.nn.LayerNorm(64),
            eqx.nn.Linear(64, 10, key=three),
        ]
    )
    return _equinox(model, images(SAMPLES, 3, 16, 16))


class _Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.attention(x, x, x).mean(0))


@foreign("equinox")
def equinox_attention() -> Built:
    one, two = jax.random.split(key())
    model = _Attention(
        eqx.nn.MultiheadAttention(4, 32, key=one), eqx.nn.Linear(32, 10, key=two)
    )
    return _equinox(model, images(SAMPLES, 12, 32))


class _GRU(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            return self.cell(at, h), None

        h, _ = jax.lax.scan(turn, jnp.zeros(self.cell.hidden_size), x)
        return self.out(h)


@foreign("equinox")
def equinox_gru() -> Built:
    one, two = jax.random.split(key())
    model = _GRU(eqx.nn.GRUCell(8, 32, key=one), eqx.nn.Linear(32, 4, key=two))
    return _equinox(model, images(SAMPLES, 12, 8))


@foreign("ode")
def jax_odeint() -> Built:
    params = {"w": 0.1 * images(4, 4), "b": jnp.zeros(4)}
    times = jnp.linspace(0.0, 1.0, 3)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def field(y: jax.Array, t: jax.Array, params: Any) -> jax.Array:
            return jnp.tanh(y @ params["w"] + params["b"])

        found = ode.odeint(field, batch, times, params)
        return jnp.square(found[-1] - 1).mean()

    return Built(loss_fn=loss_fn, model=params, batch=images(SAMPLES, 4))


@foreign("ode")
def equinox_neural_ode() -> Built:
    mlp = eqx.nn.MLP(4, 4, 32, 2, activation=jax.nn.softplus, key=key())
    params, static = eqx.partition(mlp, eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        field = eqx.combine(params, static)

        def solve(y0: jax.Array) -> jax.Array:
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=y0,
                stepsize_controller=diffrax.ConstantStepSize(),
                max_steps=16,
            )
            assert found.ys is not None
            return found.ys[-1]

        return jnp.square(jax.vmap(solve)(batch) - 1).mean()

    return Built(loss_fn=loss_fn, model=params, batch=images(SAMPLES, 4))


def _graphs() -> jraph.GraphsTuple:
    nodes, edges = 6 * SAMPLES, 10 * SAMPLES
    return jraph.GraphsTuple(
        nodes=images(nodes, 8),
        edges=images(edges, 4, seed=3),
        senders=jax.random.randint(key(4), (edges,), 0, nodes),
        receivers=jax.random.randint(key(5), (edges,), 0, nodes),
        globals=jnp.ones((SAMPLES, 2)),
        n_node=jnp.full(SAMPLES, 6),
        n_edge=jnp.full(SAMPLES, 10),
    )


@foreign("graph")
def jraph_network() -> Built:
    def network(graph: jraph.GraphsTuple) -> jax.Array:
        def update(size: int) -> Callable[..., jax.Array]:
            linear = hk.nets.MLP([32, size])
            return jraph.concatenated_args(lambda x: linear(x))

        found = jraph.GraphNetwork(
            update_edge_fn=update(8),
            update_node_fn=update(8),
            update_global_fn=update(4),
        )(graph)
        return jnp.square(found.globals - 1).mean()

    transformed = hk.without_apply_rng(hk.transform(network))
    graph = _graphs()
    # The loss is a mean over graphs, whose nodes and edges stand one after the other.
    axes = jax.tree.map(lambda _: None, graph)
    axes = axes._replace(globals=0, n_node=0, n_edge=0)
    params = jax.jit(transformed.init)(key(), graph)
    return Built(
        loss_fn=transformed.apply,
        model=params,
        batch=graph,
        options={"batch_axes": axes},
    )


@foreign("diffusion")
def diffusers_unet() -> Built:
    unet = diffusers.FlaxUNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=8,
        cross_attention_dim=16,
    )
    params = jax.jit(unet.init_weights)(key())
    batch = {
        "latents": images(SAMPLES, 4, 8, 8),
        "noise": images(SAMPLES, 4, 8, 8, seed=3),
        "times": jnp.arange(SAMPLES) * 100,
        "text": images(SAMPLES, 6, 16, seed=4),
    }

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        level = (batch["times"] / 1000.0)[:, None, None, None]
        noisy = (
            jnp.sqrt(1 - level) * batch["latents"] + jnp.sqrt(level) * batch["noise"]
        )
        found = unet.apply({"params": params}, noisy, batch["times"], batch["text"])
        return jnp.square(found.sample - batch["noise"]).mean()

    return Built(loss_fn=loss_fn, model=params, batch=batch)


@foreign("state-space")
def mamba2_language_model() -> Built:
    config = mamba2_jax.Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        state_size=16,
        head_dim=16,
        chunk_size=8,
        num_hidden_layers=2,
    )
    model = mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))

    def loss_fn(model: Any, ids: Any) -> jax.Array:
        logits = model(ids)["logits"]
        return _cross_entropy(logits[:, :-1], ids[:, 1:])

    return Built(loss_fn=loss_fn, model=model, batch=tokens(SAMPLES, 16, 64))
