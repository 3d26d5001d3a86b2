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
from whalejax.jaxpr.steps import FixedValue, Steps
from whalejax.lowering.pipeline_mpmd.update import MultiStageProgram, ValuePlacement


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
    kept = steps.residual_numbers(steps.outputs[1:], late)
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
    kept = steps.residual_numbers(steps.outputs[1:], steps.depending([steps.inputs[2]]))
    names = [steps.maker(n).equation.primitive.name for n in kept]  # type: ignore[union-attr]
    assert sorted(names) == ["dot_general", "tanh"]
    assert not {*kept} & {*steps.inputs}


def test_what_is_not_needed_does_not_run() -> None:
    steps = written(lambda x, y: (x + 1, jnp.sin(y)), 1.0, 2.0)
    needed, read = steps.needed(steps.outputs[:1], steps.inputs)
    assert [step.equation.primitive.name for step in needed] == ["add"]
    assert read == [steps.inputs[0]]
    assert steps.run([FixedValue(3)], {}) == [3]


def meshes() -> list[Mesh]:
    return [Mesh(np.array([d]), ("data",)) for d in jax.devices()[:2]]


def parted(
    function: Any, owners: Any, *arguments: Any, consumed: bool = False
) -> tuple[MultiStageProgram, Any]:
    """A program of two stages whose outputs lie where its inputs do."""
    whole = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes()]
    both = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("stage", "device"))
    where = {0: whole[0], 1: whole[1], None: NamedSharding(both, PartitionSpec())}
    steps = written(function, *arguments)
    inputs = [ValuePlacement(owner=o, consumed=consumed) for o in owners]
    outputs = [
        ValuePlacement(owner=o, sharding=where[o]) for o in owners[: len(steps.outputs)]
    ]
    values = [
        jax.device_put(x, where[o]) for x, o in zip(arguments, owners, strict=True)
    ]
    return MultiStageProgram(steps, inputs, outputs, whole), values


def groups(program: MultiStageProgram) -> list[tuple[int, int]]:
    """When and where each part runs."""
    return [part.group for parts in program._parts.values() for part in parts]


def test_numbers_of_several_stages_are_joined() -> None:
    def clipped(a: Any, b: Any, rate: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        return a * rate / norm, b * rate / norm, rate + 1

    a, b = jnp.arange(4.0), jnp.arange(6.0)
    program, values = parted(clipped, [0, 1, None], a, b, jnp.float32(0.5))
    for x, y in zip(program(values), clipped(a, b, 0.5), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    # Each sums its own and tells it; then each joins both, clips and counts.
    assert groups(program) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_stages_do_not_wait_for_what_is_not_theirs() -> None:
    def step(a: Any, b: Any, count: Any) -> Any:
        return a - 1 / (count + 1), b - 1 / (count + 1), count + 1

    program, values = parted(
        step, [0, 1, None], jnp.ones(3), jnp.ones(5), jnp.float32(1)
    )
    assert groups(program) == [(0, 0), (0, 1)]
    assert float(program(values)[1][0]) == 0.5


def test_arrays_of_several_stages_are_refused() -> None:
    with pytest.raises(wh.WhaleError, match="several stages in one operation"):
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


def test_one_value_for_two_outputs_is_two_buffers() -> None:
    """A step consumes both, and an array that the optimizer holds must outlive it."""
    held = jnp.arange(3.0)

    def step(a: Any, b: Any, c: Any) -> Any:
        new = a + b * c
        return new, new, held

    ones = [jnp.full(3, x) for x in (1.0, 2.0, 3.0)]
    program, values = parted(step, [0, 0, 0], *ones, consumed=True)
    for _ in range(3):
        expected = step(*values)
        values = program(values)
        for x, y in zip(values, expected, strict=True):
            np.testing.assert_allclose(x, y)
        buffers = {x.unsafe_buffer_pointer() for x in (*values, held)}
        assert len(buffers) == 4


def test_numbers_that_are_laid_out_on_a_stage_run_there() -> None:
    """A parameter without dimensions is as much a number as a norm is."""
    there = NamedSharding(meshes()[1], PartitionSpec())

    def step(weight: Any, scale: Any) -> Any:
        fresh = jax.lax.with_sharding_constraint(scale / weight, there)
        return weight + 1.0, jax.lax.with_sharding_constraint(fresh * 2.0, there)

    program, values = parted(step, [0, 1], jnp.float32(2.0), jnp.float32(3.0))
    found = program(values)
    assert [float(x) for x in found] == [3.0, 3.0]
    assert found[1].devices() == {jax.devices()[1]}


def test_what_parts_made_makes_room_where_it_is_read_last() -> None:
    """Of a state and its gradient nothing is there twice while norms are joined."""

    def clipped(a: Any, b: Any) -> Any:
        one, other = a * 2.0, b * 3.0
        norm = jnp.sqrt(jnp.sum(one**2) + jnp.sum(other**2))
        return one / norm, other / norm

    a, b = jnp.arange(4.0), jnp.arange(6.0)
    expected = clipped(a, b)
    program, values = parted(clipped, [0, 1], a, b, consumed=True)
    for x, y in zip(program(values), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    avals = program._steps.avals
    for parts in program._parts.values():
        for part in parts:
            assert not [n for n in part.reads if avals[n].shape], part.group
    assert all(x.is_deleted() for x in values)
