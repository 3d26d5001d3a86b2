"""A small program that detects compilers with wrong gradient sums of repeated rows.

If a scan accumulates gradients of sharded tables, some XLA releases sum them wrongly
(openxla/xla issues 49143 and 42481). The program compares sums with exact ones of
NumPy, so no list of versions is needed.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.lowering.global_arrays import put_global, run_alone
from whalejax.tables.exchange import update_rows
from whalejax.tables.sparse_optimizers import SparseOptimizer


_WIDTH, _IDS, _STEPS = 16, 8, 2
_ROWS_EACH, _SAMPLES_EACH = 24, 4
_SUMS: Final = SparseOptimizer(kind="sgd", learning_rate=1.0)


@functools.cache
def wrong_sums(mesh: Mesh) -> tuple[int, int]:
    """Returns the number of wrong elements of the results, and of all elements.

    Args:
        mesh: Devices of the step, including some of this process. Results are cached.
    """
    rows, samples = _ROWS_EACH * mesh.size, _SAMPLES_EACH * mesh.size
    random = np.random.default_rng(0)
    shape = _STEPS, samples, _IDS
    ids = random.integers(0, rows // 3, shape).astype(np.int32)
    gradients = random.integers(-8, 9, (*shape, _WIDTH)).astype(np.float32) / 16
    expected = np.zeros((rows, _WIDTH), np.float32)
    np.add.at(expected, ids, gradients)
    by_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    by_samples = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names))
    table = put_global(np.zeros_like(expected), by_rows)
    given = table, *(put_global(x, by_samples) for x in (ids, gradients))
    single = jax.device_put(
        (np.zeros_like(expected), ids, gradients), mesh.local_devices[0]
    )
    whole = NamedSharding(mesh, PartitionSpec())
    sharded = functools.partial(_accumulate, by_rows)
    program = jax.jit(sharded, out_shardings=whole)
    found = [
        run_alone(lambda arrays: program(*arrays), given, mesh),
        jax.jit(_update)(*single),
    ]
    wrong = sum(int((np.asarray(each) != expected).sum()) for each in found)
    return wrong, len(found) * expected.size


def _accumulate(by_rows: NamedSharding, table: Any, ids: Any, gradients: Any) -> Any:
    def advance(total: Any, given: tuple[Any, Any]) -> tuple[Any, None]:
        own, gradient = given
        change = jax.grad(lambda t: jnp.sum(t[own] * gradient))(table)
        change = jax.lax.with_sharding_constraint(change, by_rows)
        return total + change, None

    total, _ = jax.lax.scan(advance, jnp.zeros_like(table), (ids, gradients))
    return total


def _update(table: Any, ids: Any, gradients: Any) -> Any:
    given = ids.reshape(-1), gradients.reshape(-1, _WIDTH)
    new, _ = update_rows(_SUMS, table, {}, *given, 0)
    return -new
