"""Leaves of a model: their paths, shapes and dtypes, which no step changes.

Everything here works on any pytree, for adapters of all kinds of models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.meshes.checks import is_array, is_whole, short_repr
from whalejax.meshes.errors import Problems, WhaleError, visible


Path = tuple[Any, ...]

WHOLE = "value"
"""Dotted path of a tree that is a single leaf."""


def dotted(path: Path) -> str:
    """Returns a pytree key path as dotted text, such as ``"blocks.0.kernel"``.

    >>> dotted((jax.tree_util.DictKey("a"), jax.tree_util.SequenceKey(0)))
    'a.0'
    """
    return ".".join(_key_text(key) for key in path) or WHOLE


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return visible(str(getattr(key, attribute)))
    return visible(str(key))


def paths_of(tree: Any) -> tuple[str, ...]:
    """Returns the dotted path of every leaf, in flatten order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(dotted(path) for path, _ in leaves)


def is_leaf(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a number that JAX converts to one."""
    if isinstance(leaf, int):
        return is_whole(int(leaf))
    return isinstance(leaf, float | complex) or is_array(leaf)


def dtype_of(leaf: Any) -> Any:
    """Returns a leaf's dtype; plain numbers have JAX's default."""
    dtype = getattr(leaf, "dtype", None)
    return jnp.result_type(leaf) if dtype is None else dtype


def abstract_tree(tree: Any) -> Any:
    """Returns a tree with shapes and dtypes in place of arrays."""

    def abstract(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(abstract, tree)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a floating-point array, real or abstract."""
    return is_array(leaf) and _compat.is_inexact(dtype_of(leaf))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is one random key or an array of them."""
    return is_array(leaf) and _compat.is_key_dtype(leaf.dtype)


def fold_key(leaf: Any, number: Any) -> Any:
    """Returns the leaf with a number folded in, if it is a key."""
    if not is_key(leaf):
        return leaf
    fold = jax.random.fold_in
    for _ in leaf.shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(leaf, number)


def cast_floats(tree: Any, source: Any, target: Any) -> Any:
    """Returns a tree with every leaf of one float type cast to another."""

    def cast(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        return leaf.astype(target) if dtype == source else leaf

    return jax.tree.map(cast, tree)


def cast_back(after: Any, used: Any, before: Any, computed: Any) -> Any:
    """Returns state that was computed in another float type in its original type.

    Args:
        after: State after a call.
        used: State that was given to the call; what the call did not change returns
            without a cast.
        before: State before any cast.
        computed: Float type of the computation.
    """
    given = dict(
        zip(
            paths_of(before),
            zip(jax.tree.leaves(before), jax.tree.leaves(used), strict=True),
            strict=True,
        )
    )

    def cast(path: Path, leaf: Any) -> Any:
        original, cast_to = given.get(dotted(path), (leaf, leaf))
        had = dtype_of(original)
        if leaf is cast_to:
            return original
        if not dtype_of(leaf) == computed != had:
            return leaf
        back = leaf.astype(had)
        if dtype_of(cast_to) != computed:
            return back
        # A transform inside the loss may return unchanged values as other objects.
        return jnp.where(leaf == cast_to, original, back)

    return jax.tree_util.tree_map_with_path(cast, after)


def check_leaves(params: Any, rest: Any, problems: Problems) -> None:
    """Reports leaves that are no arrays or numbers, and equal dotted paths."""
    seen: set[str] = set()
    for tree in (params, rest):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = dotted(path)
            if name in seen:
                problems.add(
                    f"{name}: two leaves have this dotted path. Use names without dots."
                )
            seen.add(name)
            if not is_leaf(leaf):
                remedy = "Keep what is no array out of the model"
                if "equinox" in sys.modules:
                    remedy += (
                        ": params, static = eqx.partition(model, eqx.is_array); plan "
                        "params, and call eqx.combine(params, static) in the loss"
                    )
                problems.add(
                    f"{name} is {_kind_text(leaf)}; expected an array, a number "
                    f"or a jax.ShapeDtypeStruct. {remedy}."
                )


def conformed(paths: Sequence[str], before: Any, after: Any) -> Any:
    """Returns ``after`` in the exact structure of ``before``.

    Raises:
        WhaleError: A leaf is missing or additional, or has another shape or dtype.
    """
    problems = Problems("model")
    for path, change in differences(paths, before, after):
        problems.add(
            f"state {path} {change}; a model keeps its leaves from step to step."
        )
    problems.raise_if_any()
    return _ordered(paths, before, after)


def same_model(paths: Sequence[str], before: Any, after: Any) -> Any:
    """Returns the leaves of a built model in the structure of the planned model.

    Raises:
        WhaleError: A leaf is missing or additional, or has another shape or dtype.
    """
    refuse_other(" ".join(pair) for pair in differences(paths, before, after))
    return _ordered(paths, before, after)


def refuse_other(differing: Iterable[str]) -> None:
    """Raises an error if a model differs from the planned model.

    Args:
        differing: Differing leaves, each with its difference.

    Raises:
        WhaleError: Some leaf differs. The message has the first difference and the
            number of differing leaves.
    """
    first, *others = (*differing, "")
    if first:
        more = f" ({len(others)} leaves differ)" if len(others) > 1 else ""
        raise WhaleError(
            f"the model that was built differs from the plan's: {first}{more}. Build "
            "the model that the plan was made for, or plan again for this one."
        )


def differences(
    paths: Sequence[str], before: Any, after: Any
) -> Iterator[tuple[str, str]]:
    """Yields the path of each leaf that differs between two trees, and how."""
    old = dict(zip(paths, jax.tree.leaves(before), strict=True))
    new = dict(zip(paths_of(after), jax.tree.leaves(after), strict=True))
    for path in [*old, *(p for p in new if p not in old)]:
        if path not in new or path not in old:
            yield path, "is gone" if path not in new else "is new"
            continue
        was, now = _form_text(old[path]), _form_text(new[path])
        if was != now:
            yield path, f"changed from {was} to {now}"


def _ordered(paths: Sequence[str], before: Any, after: Any) -> Any:
    tree: Any = jax.tree.structure(before)
    new = dict(zip(paths_of(after), jax.tree.leaves(after), strict=True))
    return tree.unflatten([new[path] for path in paths])


def _form_text(leaf: Any) -> str:
    if not is_leaf(leaf):
        return _kind_text(leaf)
    return f"{dtype_of(leaf)}{list(jnp.shape(leaf))}"


def _kind_text(leaf: Any) -> str:
    return short_repr(leaf) if isinstance(leaf, int) else f"a {type(leaf).__name__}"
