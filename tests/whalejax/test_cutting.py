"""Programs cut in pieces: what a piece needs, keeps and gives; updates by stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import whalejax as wh
from whalejax.cutting import Fixed, Steps
from whalejax.lowering.parted import Parted, Where


def written(function: Any, *arguments: Any) -> Steps:
    return Steps.of(jax.make_jaxpr(function)(*arguments))


def block(x: Any, w: Any) -> Any:
    """A product and a smooth function, in a call of its own."""
    inside = jax.jit(lambda u: jax.nn.gelu(u * 2.0 + 1.0, approximate=True))
    return inside(x @ w)


def both(x: Any, w: Any, cotangent: Any) -> Any:
    out, back = jax.vjp(block, x, w)
    return out, *back(cotangent)


def test_pieces_make_what_the_whole_makes() -> None:
    x, w = (jax.random.normal(jax.random.key(i), (8, 8)) for i in (0, 1))
    steps = written(both, x, w, x)
    values = dict(zip(steps.inputs, (x, w, x), strict=True))
    late = steps.depending([steps.inputs[2]])
    kept = steps.kept(steps.outputs[1:], late)
    ahead = steps.run(
        [steps.outputs[0], *kept], {n: values[n] for n in steps.inputs[:2]}
    )
    given = {**values, **dict(zip(kept, ahead[1:], strict=True))}
    found = [ahead[0], *steps.run(steps.outputs[1:], given)]
    for a, b in zip(found, both(x, w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_cheap_is_made_again() -> None:
    """Of the smooth function its argument and its one costly part are kept."""
    x = jnp.ones((8, 8))
    steps = written(both, x, x, x)
    kept = steps.kept(steps.outputs[1:], steps.depending([steps.inputs[2]]))
    names = [steps.maker(n).equation.primitive.name for n in kept]  # type: ignore[union-attr]
    assert sorted(names) == ["dot_general", "tanh"]
    assert not {*kept} & {*steps.inputs}


def test_what_is_not_needed_does_not_run() -> None:
    steps = written(lambda x, y: (x + 1, jnp.sin(y)), 1.0, 2.0)
    needed, read = steps.needed(steps.outputs[:1], steps.inputs)
    assert [step.equation.primitive.name for step in needed] == ["add"]
    assert read == [steps.inputs[0]]
    assert steps.run([Fixed(3)], {}) == [3]


def meshes() -> list[Mesh]:
    return [Mesh(np.array([d]), ("data",)) for d in jax.devices()[:2]]


def parted(function: Any, owners: Any, *arguments: Any) -> tuple[Parted, Any]:
    """A program of two stages whose outputs lie where its inputs do."""
    whole = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes()]
    steps = written(function, *arguments)
    inputs = [Where(owner=o, stage=o or 0) for o in owners]
    outputs = [
        Where(owner=o, stage=o or 0, sharding=whole[o or 0])
        for o in owners[: len(steps.outputs)]
    ]
    values = [
        jax.device_put(x, whole[o or 0]) for x, o in zip(arguments, owners, strict=True)
    ]
    return Parted(steps, inputs, outputs, whole), values


def test_numbers_of_several_stages_are_joined_once() -> None:
    def clipped(a: Any, b: Any, rate: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        return a * rate / norm, b * rate / norm, rate + 1

    a, b = jnp.arange(4.0), jnp.arange(6.0)
    program, values = parted(clipped, [0, 1, None], a, b, jnp.float32(0.5))
    for x, y in zip(program(values), clipped(a, b, 0.5), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    # Each sums its own, the first joins them and counts, then each clips.
    assert [part.stage for part in program._parts] == [0, 1, 0, 0, 1]


def test_stages_do_not_wait_for_what_is_not_theirs() -> None:
    def step(a: Any, b: Any, count: Any) -> Any:
        return a - 1 / (count + 1), b - 1 / (count + 1), count + 1

    program, values = parted(
        step, [0, 1, None], jnp.ones(3), jnp.ones(5), jnp.float32(1)
    )
    assert len(program._parts) == 2
    assert float(program(values)[1][0]) == 0.5


def test_arrays_of_several_stages_are_refused() -> None:
    with pytest.raises(wh.WhaleError, match="several stages into one operation"):
        parted(lambda a, b: (a + b, b), [0, 1], jnp.ones(3), jnp.ones(3))


@pytest.mark.relaxed_promotion
def test_adam_of_two_stages() -> None:
    tx = optax.adam(0.1)
    params = {"a": jnp.ones(3), "b": jnp.ones(5)}
    state = tx.init(params)
    leaves, tree = jax.tree.flatten((params, state))

    def step(*leaves: Any) -> Any:
        params, state = tree.unflatten(leaves)
        updates, new = tx.update(params, state)
        return jax.tree.leaves((optax.apply_updates(params, updates), new))

    owners = [None if not x.shape else int(x.shape[0] == 5) for x in leaves]
    program, values = parted(step, owners, *leaves)
    for x, y in zip(program(values), step(*leaves), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
