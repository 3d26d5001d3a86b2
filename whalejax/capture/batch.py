"""The batch as it is traced: checked, and cut into micro-batches.

All leaves must have the same number of samples. One error lists all that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.adapters.leaves import dotted
from whalejax.meshes.checks import MOST_SAMPLES, is_array, is_whole, plain, short_repr
from whalejax.meshes.errors import MOST_LISTED, Problems, WhaleError
from whalejax.meshes.units import count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLeaf:
    """One leaf of the batch as it is traced."""

    path: str
    shape: tuple[int, ...]
    micro_shape: tuple[int, ...]
    dtype: Any
    axis: int | None

    def sized(self, samples: int) -> tuple[int, ...]:
        """Returns the shape of a micro-batch with ``samples`` samples."""
        if self.axis is None:
            return self.micro_shape
        front, behind = self.micro_shape[: self.axis], self.micro_shape[self.axis + 1 :]
        return (*front, samples, *behind)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Abstract value that is traced in place of the leaf."""
        return _compat.abstract(self.micro_shape, self.dtype)

    def with_more_samples(self, times: int) -> TracedLeaf:
        """Returns the leaf with ``times`` times the samples in a micro-batch."""
        shape = list(self.micro_shape)
        if self.axis is not None:
            shape[self.axis] *= times
        return replace(self, micro_shape=tuple(shape))


def aval_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns a leaf's shape and dtype as JAX reads them: 64 bits only if enabled."""
    aval = jax.typeof(leaf) if not hasattr(leaf, "dtype") else leaf
    return _compat.abstract(
        tuple(aval.shape), jax.dtypes.canonicalize_dtype(aval.dtype, True)
    )


def batch_leaves(
    batch: Any, batch_axes: Any, num_micro_batches: int
) -> tuple[list[TracedLeaf], Any]:
    """Returns the leaves of a batch at the shape of a micro-batch, and their pytree.

    Raises:
        WhaleError: The batch cannot be traced. The message lists every problem.
    """
    if not is_whole(num_micro_batches, 1):
        raise WhaleError(
            f"num_micro_batches={short_repr(num_micro_batches)}: expected a positive "
            "integer."
        )
    problems = Problems("batch")
    with_paths, tree = jax.tree_util.tree_flatten_with_path(batch)
    axes = _axes_of(batch_axes, batch, tree)
    leaves: list[TracedLeaf] = []
    sizes: dict[str, int] = {}
    for (path, value), axis in zip(with_paths, axes, strict=True):
        name = f"batch.{dotted(path)}" if path else "batch"
        listed = list_problem(path, value) if axis is not None else ""
        if listed:
            problems.add(listed)
            continue
        if not _is_array(value):
            problems.add(
                f"{name} is {short_repr(value)}; expected an array with the samples "
                "along a dimension, or its jax.ShapeDtypeStruct"
            )
            continue
        dtype = getattr(value, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype.kind in _NO_NUMBERS:
            problems.add(
                f"{name} has dtype {dtype}; expected numbers or booleans. Encode texts "
                "as integers before the step, such as token ids or classes. Remove "
                "values that the loss does not read from the batch"
            )
            continue
        aval = aval_of(value)
        shape = tuple(aval.shape)
        micro = shape
        if axis is not None:
            if not -len(shape) <= axis < len(shape):
                problems.add(
                    f"{name}: shape {shape} has no dimension {axis}. By default, "
                    "dimension 0 has the samples. Give another one by batch_axes= "
                    "(None for a leaf without samples)."
                )
                continue
            axis %= len(shape)
            sizes[name] = shape[axis]
            part = shape[axis] // num_micro_batches
            micro = (*shape[:axis], part, *shape[axis + 1 :])
        leaves.append(
            TracedLeaf(
                path=name, shape=shape, micro_shape=micro, dtype=aval.dtype, axis=axis
            )
        )
    _check_sizes(sizes, len(with_paths), num_micro_batches, problems)
    problems.raise_if_any()
    return leaves, tree


def check_batch(batch: Any, batch_axes: Any) -> None:
    """Raises an error if no loss could be traced with a batch.

    Args:
        batch: Arrays or shapes.
        batch_axes: Batch dimension of each leaf, or one for all leaves.

    Raises:
        WhaleError: A leaf is not an array, or leaves differ in their number of samples.
            The message lists every problem.
    """
    batch_leaves(batch, batch_axes, 1)


_NO_NUMBERS: Final = "OSUMm"
"""Kinds of NumPy dtypes that JAX does not support: objects, texts and times."""


def list_problem(path: tuple[Any, ...], value: Any) -> str:
    """Returns the message about a list in place of an array.

    The message is equal for all items of a list.

    Args:
        path: Path of a leaf of the batch.
        value: The leaf.
    """
    parents = list(path)
    while parents and isinstance(parents[-1], jax.tree_util.SequenceKey):
        parents.pop()
    if len(parents) == len(path):
        return ""
    name = f"batch.{dotted(tuple(parents))}" if parents else "batch"
    if isinstance(value, str | bytes):
        return f"{name} is a list with texts; give an array of integers, as token ids"
    if isinstance(value, bool | int | float | complex | np.generic):
        return f"{name} is a list of numbers; give numpy.asarray(…) of it"
    return ""


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, int):
        return is_whole(int(leaf))
    return isinstance(leaf, float | complex | np.generic) or is_array(leaf)


def resize_batch(batch: Any, batch_axes: Any, size: int) -> Any:
    """Returns the shapes of a batch with another number of samples.

    Args:
        batch: Arrays or shapes.
        batch_axes: Batch dimension of each leaf, or one for all leaves.
        size: Number of samples.
    """
    leaves, tree = jax.tree.flatten(batch)
    result = []
    for leaf, axis in zip(leaves, _axes_of(batch_axes, batch, tree), strict=True):
        aval = aval_of(leaf)
        shape = list(aval.shape)
        if axis is not None:
            shape[axis] = size
        result.append(_compat.abstract(tuple(shape), aval.dtype))
    return jax.tree.unflatten(tree, result)


def has_one_batch_size(tree: Any) -> bool:
    """Returns whether all leaves are arrays with the same first dimension."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
    first = {tuple(shape[:1]) for shape in shapes}
    return len(shapes) > 1 and len(first) == 1 and () not in first


def sequence_length(batch: Any, batch_axes: Any, tokens: int) -> int | None:
    """Returns the length of the sequences that a model reads.

    The length is the size of the dimension after the samples, in leaves of integers.
    The lengths of these leaves may differ by one, since targets may be shifted. If all
    of them include the last target, the model reads one token less.

    Args:
        batch: Arrays or shapes.
        batch_axes: Batch dimension of each leaf, or one for all leaves.
        tokens: Number of tokens of a sample that the model reads.

    Returns:
        The length in tokens; None without sequences, or with several lengths.
    """
    lengths = {leaf.shape[axis + 1] for leaf, axis in _sequences(batch, batch_axes)}
    if not tokens or not lengths or max(lengths) - min(lengths) > 1:
        return None
    return tokens if tokens in {*lengths, min(lengths) - 1} else min(lengths)


def with_length(batch: Any, batch_axes: Any, size: int, tokens: int) -> list[Any]:
    """Returns the shapes of a batch with sequences of another length.

    A floating-point leaf of the same length may be a mask, which changes with the
    tokens, or a feature, which does not.

    Args:
        batch: Arrays or shapes.
        batch_axes: Batch dimension of each leaf, or one for all leaves.
        size: Length in tokens that replaces ``sequence_length``.
        tokens: Number of tokens of a sample that the model reads.

    Returns:
        One batch of shapes; two if there are such floating-point leaves. The first
        changes their length too, the second does not.

    Raises:
        WhaleError: The samples are not sequences, or have several lengths.
    """
    now = sequence_length(batch, batch_axes, tokens)
    if now is None:
        every = [leaf.shape[axis + 1] for leaf, axis in _sequences(batch, batch_axes)]
        first, last = sorted({*every})[:-1], max(every, default=0)
        lengths = " and ".join([", ".join(map(str, first)), str(last)])
        raise WhaleError(
            "sequence is the number of tokens of a sample, and "
            + (
                f"this batch has sequences of {lengths} elements. Plan a batch of the "
                "other lengths with wh.plan"
                if tokens and every
                else "this loss reads no sequences of tokens. Drop sequence"
            )
        )
    changed = _sequences(batch, batch_axes)
    tokens_only = [
        (leaf, axis)
        for leaf, axis in changed
        if jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    ways = [changed] if len(changed) == len(tokens_only) else [changed, tokens_only]
    return [_longer(batch, way, size - now) for way in ways]


def _longer(batch: Any, changed: Sequence[tuple[Any, int]], more: int) -> Any:
    axes = {id(leaf): axis + 1 for leaf, axis in changed}
    leaves, tree = jax.tree.flatten(batch)
    found = []
    for leaf in leaves:
        aval = aval_of(leaf)
        shape = list(aval.shape)
        if id(leaf) in axes:
            shape[axes[id(leaf)]] += more
        found.append(_compat.abstract(tuple(shape), aval.dtype))
    return jax.tree.unflatten(tree, found)


def _sequences(batch: Any, batch_axes: Any) -> list[tuple[Any, int]]:
    """Returns the sequences of a batch, each with the axis of its samples.

    A sequence is a leaf of integers with one dimension after the samples. A
    floating-point leaf with an equal length counts too, as it may be a mask.
    """
    leaves, tree = jax.tree.flatten(batch)
    axes = _axes_of(batch_axes, batch, tree)
    rows = [
        (leaf, axis)
        for leaf, axis in zip(leaves, axes, strict=True)
        if axis is not None and len(leaf.shape) == axis + 2
    ]
    lengths = {
        leaf.shape[axis + 1]
        for leaf, axis in rows
        if jnp.issubdtype(leaf.dtype, jnp.integer)
    }
    lengths |= {length - 1 for length in lengths}  # without the last target
    return [(leaf, axis) for leaf, axis in rows if leaf.shape[axis + 1] in lengths]


def _axes_of(batch_axes: Any, batch: Any, tree: Any) -> list[int | None]:
    for axis in jax.tree.leaves(batch_axes):
        if not is_whole(axis):
            raise WhaleError(
                f"batch_axes has {short_repr(axis)}; expected the number of a "
                "dimension, or None for a leaf without samples. Give one for all "
                "leaves, or one for each leaf."
            )
    batch_axes = plain(batch_axes)
    if batch_axes is None or isinstance(batch_axes, int):
        return [batch_axes] * tree.num_leaves
    # Where the batch has None in place of a leaf, the axes may have any value.
    given, result = _with_gaps(batch_axes), _with_gaps(batch)
    if [path for path, _ in given] == [path for path, _ in result]:
        return [
            a for (_, a), (_, x) in zip(given, result, strict=True) if x is not None
        ]
    axes = [axis for _, axis in given]
    if isinstance(batch_axes, list | tuple) and len(axes) == tree.num_leaves:
        return axes
    structure = jax.tree.structure(batch_axes, is_leaf=lambda x: x is None)
    raise WhaleError(
        f"batch_axes has the structure {structure}, the batch has {tree}. Give one "
        "integer, or one for every leaf of the batch."
    )


def _with_gaps(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]


def _no_samples(num_leaves: int) -> str:
    if not num_leaves:
        return "no leaf has a batch dimension. Give at least one array."
    arrays = "the 1 array" if num_leaves == 1 else f"none of the {num_leaves} arrays"
    has = "has no batch dimension" if num_leaves == 1 else "has a batch dimension"
    return (
        f"{arrays} {has} by batch_axes=, and a step divides the samples among devices "
        "and micro-batches. Choose the dimension over which the loss is a mean, such "
        "as the nodes of a graph, and give None for leaves without it: batch_axes= "
        'takes a tree like the batch, as in {"nodes": 0, "edges": None}'
    )


def _check_sizes(
    sizes: dict[str, int], num_leaves: int, num_micro_batches: int, problems: Problems
) -> None:
    if not sizes:
        if not problems:
            problems.add(_no_samples(num_leaves))
        return
    if len(set(sizes.values())) > 1:
        first = [f"{name} has {size}" for name, size in sizes.items()][:MOST_LISTED]
        listed = ", ".join([*first, *["…"][: len(sizes) - len(first)]])
        problems.add(
            f"the leaves differ in their number of samples: {listed}. Give all of them "
            "the same batch dimension, or name it by batch_axes=."
        )
        return
    size = next(iter(sizes.values()))
    if size > MOST_SAMPLES:
        problems.add(
            f"the batch has {count_text(size, 'sample')}; expected at most "
            f"{MOST_SAMPLES}. If another dimension has the samples, give it by "
            "batch_axes="
        )
        return
    if size == 0:
        problems.add(
            "the batch has 0 samples; expected 1 or more. If another dimension has the "
            "samples, give it by batch_axes="
        )
        return
    if size % num_micro_batches:
        lower = size - size % num_micro_batches
        near = f"{lower} or " if lower else ""
        do = "does" if size == 1 else "do"
        problems.add(
            f"{count_text(size, 'sample')} {do} not divide into "
            f"{count_text(num_micro_batches, 'micro-batch')}. Use a batch of {near}"
            f"{lower + num_micro_batches}, or another num_micro_batches."
        )
