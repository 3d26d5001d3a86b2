"""Rows of one process of the sparse section, and the updates applied to them.

Rows of version v have the updates of the steps before v, each applied once and in
order. With staleness s, a lookup of step t reads version t - s, or the first version if
t < s. Lookups may arrive in any order. An update is applied once all earlier updates
are applied and no lookup needs the rows without it. So losses do not depend on timing,
and a process that replaces another returns the same vectors.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.meshes.errors import WhaleError
from whalejax.tables.exchange import look_up_rows, update_buffers, update_rows
from whalejax.tables.host_rows import read_rows
from whalejax.tables.layout import WidthLayout
from whalejax.tables.sparse_optimizers import RowState, SparseOptimizer


Arrays: TypeAlias = Sequence[np.ndarray]
"""One array for each buffer."""


class WrongVersionError(WhaleError):
    """Rows do not have the version that a lookup must read."""


class MissingIdsError(WhaleError):
    """Gradients arrived for a step that was not looked up here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRead:
    """Result of a lookup.

    Attributes:
        vectors: For each buffer, vectors ``[samples, elements]`` or the requested rows.
        version: Number of steps whose updates the rows included.
        seconds: Duration in seconds.
    """

    vectors: tuple[np.ndarray, ...]
    version: int
    seconds: float


class SparseRows:
    """Rows, their optimizer's state and pending updates.

    Attributes:
        widths: Layout of each buffer, with the arrays of this process.
        staleness: Maximum number of newest updates that a lookup may miss.
        version: Number of steps whose updates the rows include.
    """

    def __init__(
        self,
        widths: Mapping[int, WidthLayout],
        optimizer: SparseOptimizer,
        dtype: Any,
        staleness: int,
    ) -> None:
        """Makes rows of zeros with the initial state.

        Args:
            widths, staleness: Values of the attributes.
            optimizer: Update rule of rows.
            dtype: Element type of the rows.
        """
        self.widths, self.staleness, self.version = widths, staleness, 0
        self._optimizer, self._lock = optimizer, threading.Lock()
        self._allowed = self._begun_at = 0
        self._ids: dict[int, Arrays] = {}
        self._pending: dict[int, tuple[Arrays, Arrays]] = {}
        self._buffers: dict[int, Any] = {
            width: jnp.zeros((each.rows, width), dtype)
            for width, each in widths.items()
        }
        self._states: dict[int, RowState] = {
            width: {
                name: jnp.full(
                    (each.rows, optimizer.state_width(name, width)),
                    optimizer.initial_value(name),
                    dtype,
                )
                for name in optimizer.state_names
            }
            for width, each in widths.items()
        }
        self._look_up = jax.jit(functools.partial(_look_up, widths))
        self._update = jax.jit(
            functools.partial(_update, widths, optimizer), donate_argnums=(0, 1)
        )

    def begin(self, version: int, first: int) -> None:
        """Declares that the current rows are the rows after a number of steps.

        Args:
            version: Number of steps whose updates the rows include.
            first: Version at the start of the run; no lookup reads an older one.
        """
        with self._lock:
            self.version = self._allowed = version
            self._begun_at = first
            self._ids.clear()
            self._pending.clear()

    def commit(self, version: int, *, is_fresh: bool) -> None:
        """Applies all updates up to a version, and continues from it.

        Args:
            version: Number of steps.
            is_fresh: Whether the rows already include these updates.

        Raises:
            WrongVersionError: An update is missing.
        """
        if not is_fresh:
            with self._lock:
                self._apply(version)
                if self.version != version:
                    raise WrongVersionError(
                        f"rows of version {version} are wanted, and these are of "
                        f"version {self.version}"
                    )
        self.begin(version, version)

    def look_up(self, step: int, ids: Arrays) -> RowsRead:
        """Returns the vectors of a batch.

        Args:
            step: Number of the step.
            ids: For each buffer, ids ``int32[samples, columns]`` or rows
                ``int32[rows]``.

        Raises:
            WrongVersionError: A needed update is missing, or a later one was applied.
        """
        with self._lock:
            begun = time.perf_counter()
            wanted = max(self._begun_at, step - self.staleness)
            self._apply(wanted)
            if self.version != wanted:
                raise WrongVersionError(
                    f"step {step} reads rows of version {wanted}, and these are of "
                    f"version {self.version}"
                )
            found = self._look_up(self._buffers, tuple(ids))
            vectors = tuple(np.asarray(each) for each in found)
            self._ids[step] = ids
            seconds = time.perf_counter() - begun
            return RowsRead(vectors=vectors, version=self.version, seconds=seconds)

    def update(
        self, step: int, gradients: Arrays, ids: Arrays | None, received: int
    ) -> float:
        """Stores gradients, applies allowed updates, and returns the seconds taken.

        Args:
            step: Step number of the gradients.
            gradients: For each buffer, gradients of the vectors or requested rows.
            ids: Ids of the lookup, if this process may lack them.
            received: Number of steps whose vectors the dense section has received.

        Raises:
            MissingIdsError: The step was not looked up here, and no ids are given.
        """
        with self._lock:
            begun = time.perf_counter()
            if step >= self.version and step not in self._pending:
                known = self._ids.get(step) if ids is None else ids
                if known is None:
                    raise MissingIdsError(f"step {step} was not looked up here")
                self._pending[step] = tuple(known), tuple(gradients)
            self._apply(received - self.staleness)
            return time.perf_counter() - begun

    def _apply(self, allowed: int) -> None:
        self._allowed = max(self._allowed, allowed)
        while self.version < self._allowed and self.version in self._pending:
            ids, gradients = self._pending.pop(self.version)
            self._buffers, self._states = self._update(
                self._buffers, self._states, ids, gradients, np.int32(self.version)
            )
            jax.block_until_ready(self._buffers)
            self._ids.pop(self.version, None)
            self.version += 1

    # Current rows.

    def read(self, width: int, state: str, first: int, count: int) -> np.ndarray:
        """Returns some rows of a buffer, or of one of its state arrays.

        Args:
            width: Width of the buffer.
            state: Name of the state array; empty for the rows.
            first, count: Index of the first row, and number of rows.
        """
        with self._lock:
            whole = self._states[width][state] if state else self._buffers[width]
            return np.array(whole[first : first + count])

    def write(self, width: int, state: str, first: int, rows: np.ndarray) -> None:
        """Replaces some rows of a buffer, or of one of its state arrays.

        Args:
            width, state, first: Arguments of ``read``, unchanged.
            rows: Values to write.
        """
        with self._lock:
            held = self._states[width] if state else self._buffers
            name: Any = state or width
            held[name] = _replaced(held[name], rows, np.int32(first))

    def copy(self) -> dict[str, np.ndarray]:
        """Returns copies of all arrays, the version and the run's first step."""
        with self._lock:
            arrays = {f"{w}": np.array(x) for w, x in self._buffers.items()}
            for width, held in self._states.items():
                arrays |= {f"{width}.{k}": np.array(x) for k, x in held.items()}
            return arrays | {
                "version": np.array(self.version),
                "first": np.array(self._begun_at),
            }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores a result of ``copy``.

        Args:
            arrays: Rows, state arrays and the version, by name.
        """
        with self._lock:
            self._buffers = {w: jnp.array(arrays[f"{w}"]) for w in self.widths}
            self._states = {
                width: {k: jnp.array(arrays[f"{width}.{k}"]) for k in held}
                for width, held in self._states.items()
            }
        self.begin(int(arrays["version"]), int(arrays["first"]))


def _look_up(
    widths: Mapping[int, WidthLayout], buffers: Mapping[int, Any], ids: Arrays
) -> tuple[Any, ...]:
    found = []
    for (width, each), own in zip(widths.items(), ids, strict=True):
        if own.ndim == 1:
            found.append(read_rows(buffers[width], own, on_host=False))
        else:
            given = {width: _alone(each)}, {width: buffers[width]}
            found.append(look_up_rows(*given, own, 0))
    return tuple(found)


def _alone(each: WidthLayout) -> WidthLayout:
    return dataclasses.replace(each, first_id=0, offset=0)


def _update(
    widths: Mapping[int, WidthLayout],
    optimizer: SparseOptimizer,
    buffers: Mapping[int, Any],
    states: Mapping[int, RowState],
    ids: Arrays,
    gradients: Arrays,
    step: Any,
) -> tuple[dict[int, Any], dict[int, RowState]]:
    new_buffers: dict[int, Any] = {}
    new_states: dict[int, RowState] = {}
    given = zip(widths.items(), ids, gradients, strict=True)
    for (width, each), own, gradient in given:
        held = buffers[width], states[width]
        if own.ndim == 1:
            found = update_rows(optimizer, *held, own, gradient, step)
            new_buffers[width], new_states[width] = found
            continue
        single: list[Any] = [{width: part} for part in (_alone(each), *held)]
        layouts, tables, kept = single
        one = update_buffers(layouts, optimizer, tables, kept, own, gradient, step, 0)
        new_buffers |= one[0]
        new_states |= one[1]
    return new_buffers, new_states


@functools.partial(jax.jit, donate_argnums=0)
def _replaced(whole: Any, rows: Any, first: Any) -> Any:
    return jax.lax.dynamic_update_slice(whole, rows, (first, jnp.int32(0)))
