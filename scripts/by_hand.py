"""Provides a hand-written GPipe by autodiff for benchmarks to compare with.

A forward loop over turns inside ``shard_map``, which ``jax.grad`` reverses: it saves
all values of its layers, of every micro-batch, and recomputes nothing. If stages have
different numbers of layers, all of them take as many turns as the largest, and the
results of surplus turns are masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from whalejax.lowering.pipeline_spmd.uneven_layer_exchange import rows_of
from whalejax.models.common.layers import cross_entropy


class Compiled:
    """A compiled step of gradient descent, with its batch."""

    def __init__(self, compiled: Any, batch: Any) -> None:
        self._compiled, self._batch = compiled, batch

    def __call__(self, params: Any) -> Any:
        """Returns the parameters after a step; the given ones are donated."""
        return self._compiled(params, self._batch)

    def memory_analysis(self) -> Any:
        return self._compiled.memory_analysis()


def gpipe_by_autodiff(
    model: Any, batch: Any, count: int, stages: int, layers: tuple[int, ...] = ()
) -> tuple[Compiled, Any]:
    """Returns a step at a learning rate of 1, and its parameters.

    Args:
        model: A scanned ``models.gpt``.
        batch: Batch of tokens.
        count: Number of micro-batches.
        stages: Number of stages and devices.
        layers: Layers of each stage, if they differ.
    """
    graph, params = nnx.split(model)
    params = dealt(params, layers, rows_of)
    mesh = jax.make_mesh(
        (stages,),
        ("stage",),
        devices=jax.devices()[:stages],
        axis_types=(AxisType.Auto,),
    )
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: PartitionSpec(*["stage"] * ("blocks" in map(_name, path))),
        params,
    )
    stored = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    samples, length = batch["tokens"].shape
    tokens = batch["tokens"].reshape(samples // count, count, length).swapaxes(0, 1)
    losses = jax.shard_map(
        functools.partial(_turns, graph, layers, stages),
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec("stage"),
        axis_names={"stage"},
        check_vma=False,
    )

    def step(params: Any, tokens: Any) -> Any:
        gradients = jax.grad(lambda params: losses(params, tokens).sum())(params)
        return jax.tree.map(jnp.subtract, params, gradients)

    params = jax.device_put(jax.tree.map(jnp.copy, params), stored)
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec()))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=stored)
    return Compiled(jitted.lower(params, tokens).compile(), tokens), params


def dealt(
    params: Any, layers: tuple[int, ...], places: Callable[[Any], np.ndarray]
) -> Any:
    """Returns parameters whose stacks of layers have the rows of ``places(layers)``."""
    if not layers:
        return params
    rows = places(layers).reshape(-1)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x[rows] if "blocks" in map(_name, path) else x, params
    )


def _name(key: Any) -> Any:
    return getattr(key, "key", None)


def _turns(
    graph: Any, layers: tuple[int, ...], stages: int, params: Any, tokens: Any
) -> Any:
    """Runs the forward loop of one stage; the mean loss is that of the last."""
    stage, count = jax.lax.axis_index("stage"), len(tokens)
    ahead = [(i, i + 1) for i in range(stages - 1)]

    def turn(received: Any, number: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, params, copy=True)
        first, last = (
            tokens[jnp.clip(number - delay, 0, count - 1)] for delay in (0, stages - 1)
        )
        entering = jnp.where(stage == 0, _embedded(model, first), received)
        if layers:
            own, numbers = jnp.asarray(layers)[stage], jnp.arange(max(layers))
            output = _masked(entering, model.blocks, numbers, own)
        else:
            output = _layers(entering, model.blocks)

        def head(output: Any) -> Any:
            logits = model.logits(model.norm(output))
            return jnp.mean(cross_entropy(logits, last[:, 1:]))

        counts = (stage == stages - 1) & (number >= stages - 1)
        loss = jax.lax.cond(counts, head, lambda _: jnp.zeros(()), output)
        return jax.lax.ppermute(output, "stage", ahead), loss

    model = nnx.merge(graph, params, copy=True)
    aval = jax.eval_shape(lambda: _embedded(model, tokens[0]))
    zeros = jnp.zeros(aval.shape, aval.dtype)
    _, losses = jax.lax.scan(turn, zeros, jnp.arange(count + stages - 1))
    return losses.sum(keepdims=True) / count


def _embedded(model: Any, tokens: Any) -> Any:
    return model.tokens(tokens[:, :-1]) + model.positions[...]


@functools.partial(nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def _layers(x: Any, block: Any) -> Any:
    return block(x)


@functools.partial(nnx.scan, in_axes=(nnx.Carry, 0, 0, None), out_axes=nnx.Carry)
def _masked(x: Any, block: Any, number: Any, count: Any) -> Any:
    return jnp.where(number < count, block(x), x)
