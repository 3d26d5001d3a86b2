"""Checkpoints of states with tables: full tables, independent of the placement.

Tables and the state of their rows are written in row order under their paths, so any
placement can read a checkpoint of any other. If several processes write it, each writes
a part of the rows of every table. Files, hashes and records have the format of other
checkpoints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax import _compat
from whalejax.planner.plan.plan import Plan
from whalejax.state.checkpoint import (
    checked,
    existing_path,
    new_path,
    read_leaves,
    write_contents,
)
from whalejax.state.checkpoint_files import being_built
from whalejax.state.checkpoint_record import Leaf, Record, check_same


Sections = dict[str, dict[str, Any]]
"""Arrays of a state, by section and then by path."""

_GROUP_BYTES: Final = 2**28
"""Maximum bytes of the arrays that are read from a checkpoint together."""


def save_sections(
    path: str | os.PathLike[str],
    sections: Sections,
    plan: Plan,
    batch_size: int,
    *,
    wanted: Sections | None = None,
    before_it_appears: Callable[[], None] = lambda: None,
) -> None:
    """Writes a checkpoint atomically; all processes call this.

    Args:
        path: Directory that does not exist yet.
        sections: Arrays by section and path.
        plan: Plan of the dense part, for the record.
        batch_size: Number of samples of a global batch.
        wanted: Arrays, real or abstract, without the padding of ``rows_by_process``;
            None if no array is padded.
        before_it_appears: Function called when everything is written; if it raises,
            the files are removed.

    Raises:
        WhaleError: The path exists already, or it cannot be written.
    """
    target = new_path(path)
    shapes = sections if wanted is None else wanted
    leaves = [
        (leaf_of(section, name, shapes[section][name]), array)
        for section, arrays in sections.items()
        for name, array in arrays.items()
    ]
    with being_built(target) as building:
        write_contents(target, building, leaves, plan, None, batch_size)
        before_it_appears()


def restore_sections(
    path: str | os.PathLike[str], wanted: Sections
) -> Mapping[str, Mapping[str, Any]]:
    """Opens a checkpoint, after checking the hashes of its files.

    All processes call this, and read the same arrays in the same order.

    Args:
        path: Path of a checkpoint of ``save_sections``.
        wanted: Arrays, real or abstract, with the required shapes and types.

    Returns:
        Host arrays by section and path; each is read on access.

    Raises:
        WhaleError: No checkpoint exists, or it is damaged or of another model.
    """
    target = existing_path(path)
    record = checked(target)
    leaves = [
        leaf_of(section, name, array)
        for section, arrays in wanted.items()
        for name, array in arrays.items()
    ]
    saved = {leaf.place: leaf for leaf in record.leaves}
    asked = {leaf.place: leaf for leaf in leaves}
    check_same(target, saved, asked, "compile with the optimizers that saved it")
    reader = _Reader(target, record, leaves)
    found: dict[str, Mapping[str, Any]] = {}
    for leaf in leaves:
        if leaf.section not in found:
            names = tuple(x.name for x in leaves if x.section == leaf.section)
            found[leaf.section] = _SavedSection(reader, leaf.section, names)
    return found


class _Reader:
    """Reads arrays of a checkpoint in groups."""

    def __init__(self, target: Path, record: Record, leaves: Sequence[Leaf]) -> None:
        self._target, self._record = target, record
        self._groups: list[list[Leaf]] = [[]]
        held = 0
        for leaf in leaves:
            size = math.prod(leaf.shape) * (
                8 if leaf.key_impl else np.dtype(leaf.dtype).itemsize
            )
            if held and held + size > _GROUP_BYTES:
                self._groups.append([])
                held = 0
            self._groups[-1].append(leaf)
            held += size
        self._read: dict[tuple[str, ...], Any] = {}

    def value(self, place: tuple[str, ...]) -> Any:
        """Returns an array; reads its group, unless that was the last group read."""
        if place not in self._read:
            group = next(g for g in self._groups if any(x.place == place for x in g))
            self._read = {}
            entries = [(leaf, None) for leaf in group]
            values = read_leaves(self._target, self._record, entries)
            self._read = {
                leaf.place: value if leaf.key_impl else _unpadded(value, leaf.shape)
                for leaf, value in zip(group, values, strict=True)
            }
        return self._read[place]


class _SavedSection(Mapping[str, Any]):
    """Arrays of a section of a checkpoint by path, each read on access."""

    def __init__(self, reader: _Reader, section: str, names: tuple[str, ...]) -> None:
        self._reader, self._section, self._names = reader, section, names

    def __getitem__(self, name: str) -> Any:
        return self._reader.value((self._section, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _unpadded(value: Any, shape: tuple[int, ...]) -> Any:
    return value[: shape[0]] if shape and value.shape != shape else value


def rows_by_process(gather: Callable[[range], np.ndarray], rows: int) -> Any:
    """Returns an array for a checkpoint, with an equal number of rows in each process.

    It is in host memory, and padded to a multiple of the number of processes.

    Args:
        gather: Function that returns some rows, which all processes call at once.
        rows: Number of rows of the array.
    """
    hosts: dict[int, Any] = {}
    for device in jax.devices("cpu"):
        hosts.setdefault(device.process_index, device)
    mesh = Mesh(np.array([hosts[n] for n in range(jax.process_count())]), ("process",))
    each = -(-rows // jax.process_count())
    first = each * jax.process_index()
    own = gather(range(min(first, rows), min(first + each, rows)))
    own = np.pad(own, ((0, each - len(own)), (0, 0)))
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    return jax.make_array_from_process_local_data(
        sharding, own, (each * jax.process_count(), own.shape[1])
    )


def leaf_of(section: str, name: str, array: Any) -> Leaf:
    """Returns the description of an array, real or abstract, in a checkpoint.

    Args:
        section, name: Section and path of the array.
        array: The array.
    """
    is_key = _compat.is_key_dtype(array.dtype)
    return Leaf(
        section=section,
        name=name,
        shape=tuple(np.shape(array)),
        dtype=str(array.dtype),
        key_impl=_compat.key_algorithm_name(array.dtype) if is_key else "",
    )


def leaf_names(tree: Any) -> list[str]:
    """Returns a name for each leaf of a tree, from its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        for path, _ in flat
    ]
