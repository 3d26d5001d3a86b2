"""Checkpoints of states with tables: full tables, independent of the placement.

Tables and the state of their rows are written in row order, under their paths, so that
a checkpoint of any placement can be read into any other. Files, hashes and records are
the same as for other checkpoints.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from whalejax import _compat
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.state.checkpoint import (
    ARRAYS,
    checked,
    existing_path,
    nested,
    new_path,
    raw_array,
    read_leaves,
    write_arrays,
)
from whalejax.state.checkpoint_files import being_built, hashed, write_failure_message
from whalejax.state.checkpoint_record import Leaf, check_same, write_record


Sections = dict[str, dict[str, Any]]
"""Arrays of a state by section and by path."""


def save_sections(
    path: str | os.PathLike[str], sections: Sections, plan: Plan, batch_size: int
) -> None:
    """Writes a checkpoint atomically.

    Args:
        path: Directory that does not exist yet.
        sections: Arrays by section and path.
        plan: Plan of the dense part, for the record.
        batch_size: Number of samples of a global batch.

    Raises:
        WhaleError: The path exists already, or it cannot be written.
    """
    target = new_path(path)
    leaves = [
        (_leaf(section, name, array), array)
        for section, arrays in sections.items()
        for name, array in arrays.items()
    ]
    with being_built(target) as building:
        try:
            arrays = nested([(leaf, raw_array(array)) for leaf, array in leaves])
            write_arrays(building / ARRAYS, arrays)
        except Exception as error:  # Orbax reports a full disk by many classes
            raise WhaleError(write_failure_message(target, error)) from error
        described = [leaf for leaf, _ in leaves]
        write_record(building, described, plan, hashed(building), None, batch_size)


def restore_sections(path: str | os.PathLike[str], wanted: Sections) -> Sections:
    """Reads a checkpoint as host arrays, after checking the hashes of its files.

    Args:
        path: Path of a checkpoint of ``save_sections``.
        wanted: Arrays, real or abstract, with the required shapes and types.

    Raises:
        WhaleError: No checkpoint exists, it is damaged, or it is another model's.
    """
    target = existing_path(path)
    record = checked(target)
    leaves = [
        _leaf(section, name, array)
        for section, arrays in wanted.items()
        for name, array in arrays.items()
    ]
    saved = {leaf.place: leaf for leaf in record.leaves}
    asked = {leaf.place: leaf for leaf in leaves}
    check_same(target, saved, asked, "compile with the optimizers that saved it")
    values = read_leaves(target, record, [(leaf, None) for leaf in leaves])
    return nested(list(zip(leaves, values, strict=True)))


def _leaf(section: str, name: str, array: Any) -> Leaf:
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
