"""Lookups in parts give what they give whole, and so do their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from whalejax import _compat
from whalejax.lowering.pipeline_spmd.stage_ops import in_stages
from whalejax.lowering.spmd.gather_scatter import INDEXED, in_parts
from whalejax.planner.sharding.layout import Spec


DATA, TENSOR, WHOLE = ("data",), ("tensor",), ()
ROWS, COLUMNS = 8, 12

Function = Callable[..., Any]


def floats(*shape: int) -> Any:
    # By NumPy: JAX would compile something for each shape as this file is imported.
    found = np.random.default_rng(len(shape)).normal(size=shape)
    return jnp.asarray(found.astype(np.float32))


def places(*shape: int, least: int, most: int) -> Any:
    found = np.random.default_rng(7).integers(least, most, shape)
    return jnp.asarray(found.astype(np.int32))


def in_stage(function: Function, specs: list[Spec]) -> tuple[Function, list[str]]:
    """The function inside ``shard_map`` over stages, its lookups as stages do them.

    Also the list of the lookups that were, which fills as it is traced.
    """
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    names = ("stage", "data", "tensor")
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * 3)
    seen: list[str] = []

    def run(*values: Any) -> Any:
        with jax.disable_jit():
            traced, constants = _compat.open_jaxpr(jax.make_jaxpr(function)(*values))
        known = dict(zip(traced.constvars, constants, strict=True))
        known.update(zip(traced.invars, values, strict=True))
        here = jax.sharding.get_abstract_mesh()
        for equation in traced.eqns:
            atoms = equation.invars
            given = [a.val if _compat.is_literal(a) else known[a] for a in atoms]
            found = None
            if equation.primitive.name in INDEXED:
                found = in_stages(equation, given, specs, here)
                seen.append(equation.primitive.name)
            found = _compat.bind(equation, given) if found is None else found
            known.update(zip(equation.outvars, found, strict=True))
        return tuple(known[v] for v in traced.outvars)

    none = PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=none,
        out_specs=none,
        axis_names={"stage"},
        check_vma=False,
    )
    return mapped, seen


def gathered(mode: Any, **options: Any) -> Function:
    return lambda x, i: (x.at[i].get(mode=mode, **options),)


def along(mode: str) -> Function:
    return lambda x, i: (jnp.take_along_axis(x, i, 1, mode=mode),)


def pairs(x: Any, i: Any) -> Any:
    return (x[i[:, 0], i[:, 1]],)


def windows(x: Any, i: Any) -> Any:
    return (jax.vmap(lambda x, i: jax.lax.dynamic_slice(x, (i[0],), (3,)))(x, i),)


def added(x: Any, i: Any, y: Any) -> Any:
    return (x.at[jnp.squeeze(i, 1)].add(y),)


def written(x: Any, i: Any, y: Any) -> Any:
    return (jax.vmap(lambda x, i, y: x.at[i].set(y, unique_indices=True))(x, i, y),)


def ordered(x: Any, y: Any) -> Any:
    return tuple(jax.lax.sort((x, y), dimension=1, num_keys=1))


def largest(x: Any) -> Any:
    return tuple(jax.lax.top_k(x, 3))


TABLE = floats(COLUMNS, ROWS)
MATRIX = floats(ROWS, COLUMNS)
OUTSIDE = places(ROWS, least=-15, most=17)
BESIDE = places(ROWS, 2, least=-15, most=17)
INSIDE = places(ROWS, 2, least=0, most=8)
BY_WORD: list[Spec] = [(TENSOR, WHOLE), (DATA, WHOLE)]
BY_ROW: list[Spec] = [(DATA, TENSOR), (DATA, WHOLE, WHOLE)]

CASES: dict[str, tuple[Function, list[Any], list[Spec]]] = {
    "clip": (gathered("clip"), [TABLE, OUTSIDE], BY_WORD),
    "fill": (gathered("fill"), [TABLE, OUTSIDE], BY_WORD),
    "fill value": (gathered("fill", fill_value=-2.0), [TABLE, OUTSIDE], BY_WORD),
    "integers": (gathered("fill"), [jnp.arange(COLUMNS), OUTSIDE], BY_WORD),
    "truths": (gathered("fill"), [jnp.arange(COLUMNS) > 5, OUTSIDE], BY_WORD),
    "keys": (
        lambda x, i: (jax.random.key_data(x[i]),),
        [jax.random.split(jax.random.key(0), COLUMNS), jnp.abs(OUTSIDE) % COLUMNS],
        BY_WORD,
    ),
    "slices": (
        gathered("promise_in_bounds"),
        [TABLE, jnp.abs(OUTSIDE) % COLUMNS],
        [(WHOLE, TENSOR), (DATA, WHOLE)],
    ),
    "one axis": (gathered("clip"), [TABLE, OUTSIDE], [(DATA, WHOLE), (DATA, WHOLE)]),
    "along, clip": (along("clip"), [MATRIX, BESIDE], BY_ROW),
    "along, fill": (along("fill"), [MATRIX, BESIDE], BY_ROW),
    "one of each, clip": (along("clip"), [MATRIX, BESIDE[:, :1]], BY_ROW),
    "one of each, fill": (along("fill"), [MATRIX, BESIDE[:, 1:]], BY_ROW),
    "pairs": (pairs, [MATRIX, INSIDE], [(DATA, TENSOR), (DATA, WHOLE)]),
    "windows": (windows, [MATRIX, INSIDE[:, :1]], [(DATA, TENSOR), (DATA, WHOLE)]),
    "added": (
        added,
        [TABLE, INSIDE[:, :1], floats(ROWS, ROWS)],
        [(WHOLE, TENSOR), (DATA, WHOLE), (DATA, TENSOR)],
    ),
    "written": (
        written,
        [MATRIX, jnp.stack([jnp.arange(ROWS), jnp.arange(ROWS) + 2], 1), INSIDE * 1.0],
        [(DATA, TENSOR), (DATA, WHOLE, WHOLE), (DATA, WHOLE)],
    ),
    "sorted": (ordered, [MATRIX, 2 * MATRIX[::-1]], [(DATA, TENSOR), (DATA, TENSOR)]),
    "largest": (largest, [MATRIX], [(DATA, TENSOR)]),
}


def gradients(function: Function, values: list[Any]) -> Any:
    """Of all results, weighed, for the floating-point operands."""
    flows = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def total(*given: Any) -> Any:
        floats = dict(zip(flows, given, strict=True))
        found = function(*(floats.get(i, x) for i, x in enumerate(values)))
        return sum(weighed(x) for x in found if jnp.issubdtype(x.dtype, jnp.inexact))

    given = [values[i] for i in flows]
    return jax.jit(jax.grad(total, argnums=tuple(range(len(flows)))))(*given)


def weighed(x: Any) -> Any:
    weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
    return jnp.where(jnp.isnan(x), 0, x * weights).sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_in_parts_as_whole(case: str) -> None:
    function, values, specs = CASES[case]
    run, seen = in_stage(function, specs)
    for a, b in zip(jax.jit(run)(*values), function(*values), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert seen
    if jnp.issubdtype(values[0].dtype, jnp.inexact):
        found, wanted = gradients(run, values), gradients(function, values)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_where_one_axis_is_left_the_compiler_does_it() -> None:
    kinds = AxisType.Manual, AxisType.Auto, AxisType.Auto
    names = "stage", "data", "tensor"
    mesh = jax.sharding.AbstractMesh((2, 4, 1), names, axis_types=kinds)
    with jax.disable_jit():
        traced, _ = _compat.open_jaxpr(jax.make_jaxpr(jnp.sort)(MATRIX))
    (equation,) = [e for e in traced.eqns if e.primitive.name == "sort"]
    assert in_parts(equation, [MATRIX], [()], mesh) is None
