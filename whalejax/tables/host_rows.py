"""Rows of a buffer, read and written in its memory: on the device or the host.

A buffer in host memory is never copied to the device in full: the host reads the
requested rows, and stores changed rows. ``copied_bytes`` detects compilers that copy
the full buffer to change some rows, as XLA for GPUs does (jaxlib 0.10.2).
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax._compat import host_function


HOST_KIND: Final = "pinned_host"
"""JAX's name of the host memory that devices can access."""


def read_rows(table: Any, places: Any, *, on_host: bool) -> Any:
    """Returns some rows of a table on the device; zeros for rows past its end.

    Args:
        table: Array of rows, ``[rows, columns]``.
        places: Indices of rows, of any shape.
        on_host: Whether the table is in host memory.
    """
    if not on_host:
        return table.at[places].get(mode="fill", fill_value=0)
    last = table.shape[0] - 1
    near = jax.device_put(jnp.minimum(places, last), jax.memory.Space.Host)
    rows = jax.device_put(_take(table, near), jax.memory.Space.Device)
    return jnp.where((places <= last)[..., None], rows, 0)


def write_rows(table: Any, places: Any, rows: Any, *, on_host: bool) -> Any:
    """Returns the table with some rows replaced; rows past its end are ignored.

    Args:
        table: Array of rows, ``[rows, columns]``.
        places: Indices of rows, ``[count]``.
        rows: Values of these rows, ``[count, columns]``.
        on_host: Whether the table is in host memory.
    """
    rows = rows.astype(table.dtype)
    if not on_host:
        return table.at[places].set(rows, mode="drop")
    return _put(table, *jax.device_put((places, rows), jax.memory.Space.Host))


_TESTED_ROWS: Final = 16_384
_TESTED_COLUMNS: Final = 128


def copied_bytes(device: Any) -> tuple[int, int]:
    """Returns the bytes that a test program copies to change 8 rows, and the table's.

    Args:
        device: Device whose compiler is tested; may be a device of a topology.
    """
    mesh = Mesh(np.array([device]), ("data",))
    hosted = NamedSharding(mesh, PartitionSpec(), memory_kind=HOST_KIND)
    here = NamedSharding(mesh, PartitionSpec())

    def shape(count: int, sharding: NamedSharding, *columns: int) -> Any:
        kind = np.float32 if columns else np.int32
        return jax.ShapeDtypeStruct((count, *columns), kind, sharding=sharding)

    write = functools.partial(write_rows, on_host=True)
    program = jax.jit(write, donate_argnums=0, out_shardings=hosted)
    table = shape(_TESTED_ROWS, hosted, _TESTED_COLUMNS)
    rows = shape(8, here, _TESTED_COLUMNS)
    compiled = program.lower(table, shape(8, here), rows).compile()
    found: Any = compiled.memory_analysis()
    copied = found.temp_size_in_bytes + found.host_temp_size_in_bytes
    return copied, _TESTED_ROWS * _TESTED_COLUMNS * 4


# Neither function may create a constant, which would not be in host memory.


@host_function
def _take(table: Any, places: Any) -> Any:
    return table.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


@host_function
def _put(table: Any, places: Any, rows: Any) -> Any:
    return table.at[places].set(rows, mode="drop", wrap_negative_indices=False)
