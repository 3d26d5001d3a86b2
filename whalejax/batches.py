"""The global batch as a plan remembers it, and back.

A plan is made from a batch and must be compiled without it; it keeps the path, shape
and dtype of every leaf, and the tree is rebuilt from the paths.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from whalejax.capture.batch import aval_of
from whalejax.planner.plan import BatchLeaf, Plan, PlanError


def batch_leaves(batch: Any) -> tuple[BatchLeaf, ...]:
    """The global batch as the plan remembers it, layouts left open.

    Args:
        batch: a pytree of arrays, abstract or real.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        aval = aval_of(leaf)
        found.append(
            BatchLeaf(
                path=jax.tree_util.keystr(path),
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                spec=((),) * len(aval.shape),
            )
        )
    return tuple(found)


def batch_of(plan: Plan) -> Any:
    """The abstract global batch of a plan, rebuilt from the paths of its leaves.

    Dictionaries and sequences come back (sequences as tuples).

    Raises:
        PlanError: the batch was another kind of tree; give it to ``wh.compile``.
    """
    root: dict[Any, Any] = {}
    for leaf in plan.batch:
        keys = _keys(leaf.path)
        if keys is None:
            raise PlanError(
                f"the batch has a leaf {leaf.path}, whose container a plan cannot "
                "rebuild. Pass batch= (abstract will do) to wh.compile"
            )
        node = root
        for key in (None, *keys[:-1]) if keys else ():
            node = node.setdefault(key, {})
        node[keys[-1] if keys else None] = jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(leaf.dtype)
        )
    return _sequences(root[None])


def _keys(path: str) -> list[str | int] | None:
    keys: list[str | int] = []
    rest = path
    while rest:
        match = re.match(r"\[(?:'([^']*)'|(\d+))\]", rest)
        if match is None:
            return None
        keys.append(match[1] if match[1] is not None else int(match[2]))
        rest = rest[match.end() :]
    return keys


def _sequences(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if all(isinstance(key, int) for key in node):
        return tuple(_sequences(node[key]) for key in sorted(node))
    return {key: _sequences(value) for key, value in node.items()}
