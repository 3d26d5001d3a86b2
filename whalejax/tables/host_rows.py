"""Rows of a buffer read and written where it is: on the device, or in host memory.

What is in host memory is never brought to the device whole: the host reads the rows
that are asked for, and takes those that changed.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp

from whalejax._compat import host_function


HOST_BACKENDS: Final = ("cpu",)
"""Backends on which steps with tables in host memory were tested."""

HOST_KIND: Final = "pinned_host"
"""JAX's name for the memory of a host that its devices can reach."""


def read_rows(table: Any, places: Any, *, on_host: bool) -> Any:
    """Some rows of a table on the device; zeros for places behind its end.

    Args:
        table: ``[rows, columns]``.
        places: Numbers of rows, of any shape.
        on_host: The table is in host memory.
    """
    if not on_host:
        return table.at[places].get(mode="fill", fill_value=0)
    last = table.shape[0] - 1
    near = jax.device_put(jnp.minimum(places, last), jax.memory.Space.Host)
    rows = jax.device_put(_take(table, near), jax.memory.Space.Device)
    return jnp.where((places <= last)[..., None], rows, 0)


def write_rows(table: Any, places: Any, rows: Any, *, on_host: bool) -> Any:
    """The table with some rows replaced; places behind its end are left out.

    Args:
        table: ``[rows, columns]``.
        places: Numbers of rows, ``[count]``.
        rows: New values, ``[count, columns]``.
        on_host: The table is in host memory.
    """
    rows = rows.astype(table.dtype)
    if not on_host:
        return table.at[places].set(rows, mode="drop")
    return _put(table, *jax.device_put((places, rows), jax.memory.Space.Host))


# Neither may make a constant, which would not be in host memory.


@host_function
def _take(table: Any, places: Any) -> Any:
    return table.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


@host_function
def _put(table: Any, places: Any, rows: Any) -> Any:
    return table.at[places].set(rows, mode="drop", wrap_negative_indices=False)
