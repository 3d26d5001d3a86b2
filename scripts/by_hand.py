"""GPipe by autodiff, as one writes it by hand, for benchmarks to compare with.

A forward loop over turns inside ``shard_map``, which ``jax.grad`` turns round: it keeps
all that its layers keep, of every micro-batch, and computes nothing again. Where stages
have unlike numbers of layers, all of them take as many turns as the fullest, and what
the turns too many give is masked away.
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
        """Parameters after a step; those given are consumed."""
        return self._compiled(params, self._batch)

    def memory_analysis(self) -> Any:
        """What the compiler says of it."""
        return self._compiled.memory_analysis()


def gpipe_by_autodiff(
    model: Any, batch: Any, count: int, stages: int, layers: tuple[int, ...] = ()
) -> tuple[Compiled, Any]:
    """A step at a learning rate of 1, and the parameters that it takes.

    Args:
        model: a scanned ``models.gpt``.
        batch: its tokens.
        count: micro-batches.
        stages: as many devices.
        layers: of each stage, where they are unlike.
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
    """Parameters whose stacks of layers have other rows, where stages are unlike.

    Args:
        params: of a scanned ``models.gpt``.
        layers: of each stage, where they are unlike.
        places: which rows, from ``layers``.
    """
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
    """The forward loop of one stage; its mean loss is that of the last."""
    stage, count = jax.lax.axis_index("stage"), len(tokens)
    ahead = [(i, i + 1) for i in range(stages - 1)]

    def turn(given: Any, number: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, params, copy=True)
        first, last = (
            tokens[jnp.clip(number - delay, 0, count - 1)] for delay in (0, stages - 1)
        )
        entering = jnp.where(stage == 0, _embedded(model, first), given)
        if layers:
            own, numbers = jnp.asarray(layers)[stage], jnp.arange(max(layers))
            out = _masked(entering, model.blocks, numbers, own)
        else:
            out = _layers(entering, model.blocks)

        def head(out: Any) -> Any:
            logits = model.logits(model.norm(out))
            return jnp.mean(cross_entropy(logits, last[:, 1:]))

        counts = (stage == stages - 1) & (number >= stages - 1)
        loss = jax.lax.cond(counts, head, lambda _: jnp.zeros(()), out)
        return jax.lax.ppermute(out, "stage", ahead), loss

    model = nnx.merge(graph, params, copy=True)
    handed = jax.eval_shape(lambda: _embedded(model, tokens[0]))
    nothing = jnp.zeros(handed.shape, handed.dtype)
    _, losses = jax.lax.scan(turn, nothing, jnp.arange(count + stages - 1))
    return losses.sum(keepdims=True) / count


def _embedded(model: Any, tokens: Any) -> Any:
    return model.tokens(tokens[:, :-1]) + model.positions[...]


@functools.partial(nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def _layers(x: Any, block: Any) -> Any:
    return block(x)


@functools.partial(nnx.scan, in_axes=(nnx.Carry, 0, 0, None), out_axes=nnx.Carry)
def _masked(x: Any, block: Any, number: Any, count: Any) -> Any:
    return jnp.where(number < count, block(x), x)
