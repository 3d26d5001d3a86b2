"""Copies the first replica's initial state to all replicas.

On different kinds of devices, the last bits of a program's results differ. So replicas
that initialise separately would never be equal. The gradient exchange adds the first
replica's state to the zeros of the others, which changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from whalejax.lowering.global_arrays import impl_of, unwrapped, wrapped
from whalejax.lowering.train_state import TrainState
from whalejax.lowering.uneven.flat_all_reduce import Buffers, Exchange


MOST_BYTES: Final = 2**28
"""Most bytes of one exchange, unless one array is larger. They are needed in addition
to the state."""


def several_kinds(mesh: Mesh) -> bool:
    """Returns whether the devices of all processes are of several kinds."""
    return len({device.device_kind for device in mesh.devices.flat}) > 1


def as_first(
    copies: Mapping[int, TrainState],
    places: Mapping[int, TrainState],
    mesh: Mesh,
    replicas: Sequence[Mesh],
) -> dict[int, TrainState]:
    """Returns states with the values of replica 0.

    Args:
        copies: State of each replica that has devices in this process, equal except for
            values.
        places: Shardings of each state.
        mesh: Mesh of all devices, replicas along its first axis.
        replicas: Mesh of each replica.
    """
    leaves = {r: jax.tree.leaves(copy) for r, copy in copies.items()}
    layouts = {r: jax.tree.leaves(place) for r, place in places.items()}
    for numbers in _bundles(next(iter(leaves.values()))):
        there = {r: [layouts[r][i] for i in numbers] for r in leaves}
        bundle = {r: [leaves[r][i] for i in numbers] for r in leaves}
        told = _bundle_as_first(bundle, there, mesh, replicas)
        for r, several in told.items():
            for i, leaf in zip(numbers, several, strict=True):
                leaves[r][i] = leaf
    return {
        r: jax.tree.unflatten(jax.tree.structure(copies[r]), several)
        for r, several in leaves.items()
    }


def _bundles(leaves: Sequence[Any]) -> Iterator[list[int]]:
    result, size = list[int](), 0
    for number, leaf in enumerate(leaves):
        nbytes = unwrapped(leaf).nbytes
        if result and size + nbytes > MOST_BYTES:
            yield result
            result, size = [], 0
        result.append(number)
        size += nbytes
    if result:
        yield result


def _bundle_as_first(
    bundle: Mapping[int, Sequence[Any]],
    places: Mapping[int, Sequence[NamedSharding]],
    mesh: Mesh,
    replicas: Sequence[Mesh],
) -> dict[int, list[Any]]:
    avals = [jax.eval_shape(_as_addable, x) for x in next(iter(bundle.values()))]
    buffers = {r: Buffers(replicas[r], avals, places[r]) for r in bundle}

    def pack(leaves: Sequence[Any], *, replica: int) -> list[Any]:
        raw = [_as_addable(x) for x in leaves]
        if replica:
            raw = [jnp.zeros_like(x) for x in raw]
        return buffers[replica].pack(raw)

    def unpack(
        flat: Sequence[Any], *, replica: int, like: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        several = zip(buffers[replica].unpack(flat), like, strict=True)
        return [wrapped(x.astype(dtype), impl) for x, (dtype, impl) in several]

    packed = {
        r: jax.jit(functools.partial(pack, replica=r))(list(leaves))
        for r, leaves in bundle.items()
    }
    first = next(iter(buffers.values()))
    told = Exchange(mesh, replicas, first.avals).add(packed)
    bundle_as_first = {}
    for r, leaves in bundle.items():
        like = [(jax.eval_shape(unwrapped, x).dtype, impl_of(x)) for x in leaves]
        made = functools.partial(unpack, replica=r, like=like)
        bundle_as_first[r] = jax.jit(made, out_shardings=list(places[r]))(told[r])
    return bundle_as_first


def _as_addable(leaf: Any) -> Any:
    raw = unwrapped(leaf)
    return raw.astype(jnp.uint8) if raw.dtype == jnp.bool_ else raw
