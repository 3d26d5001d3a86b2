"""Converts the global batch to its record in a plan, and back.

Planning needs a batch; compilation may lack it. So a plan stores the shape and
dtype of each leaf, and the containers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from whalejax.capture.batch import aval_of
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import BatchLeaf
from whalejax.planner.plan_errors import PlanError


_LEAF = "leaf"


def batch_leaves(batch: Any) -> tuple[BatchLeaf, ...]:
    """Returns the plan's records of the batch's leaves, without shardings.

    Args:
        batch: Pytree of arrays, abstract or real.
    """
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        aval = aval_of(leaf)
        leaves.append(
            BatchLeaf(
                path=jax.tree_util.keystr(path),
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                spec=((),) * len(aval.shape),
            )
        )
    return tuple(leaves)


def batch_tree(batch: Any) -> str:
    """Returns the containers of a batch as JSON text.

    Args:
        batch: Pytree of dictionaries, lists, tuples and None. Other containers are
            named, but cannot be restored.

    >>> batch_tree({"x": 0, "mask": None})
    '{"dict": [["mask", null], ["x", "leaf"]]}'
    """
    return json.dumps(_described(batch))


def _described(node: Any) -> Any:
    if node is None:
        return None
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        # Items are in JAX's flattening order.
        return {"dict": [[key, _described(node[key])] for key in sorted(node)]}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_described(item) for item in node]}
    if jax.tree_util.all_leaves([node]):
        return _LEAF
    name = type(node).__name__
    # A dictionary with other keys, or a user's class of that name.
    return {f"another {name}" if name in ("dict", "list", "tuple") else name: []}


def batch_of(plan: Plan) -> Any:
    """Returns the abstract global batch of a plan, with its containers.

    Raises:
        PlanError: The batch had containers that a plan cannot restore, or random keys
            of another algorithm than JAX's default in this process.
    """
    leaves = (jax.ShapeDtypeStruct(x.shape, dtype_of(x.dtype)) for x in plan.batch)
    return _rebuilt(json.loads(plan.batch_tree or "{}"), leaves)


def dtype_of(text: str) -> Any:
    """Returns the dtype that a plan names.

    Raises:
        PlanError: Random keys have another algorithm than JAX's default in this
        process.
    """
    if not text.startswith("key<"):
        return jnp.dtype(text)
    here = jax.eval_shape(lambda: jax.random.key(0)).dtype
    if str(here) != text:
        raise PlanError(
            f"the batch of this plan holds random keys of type {text}; JAX makes "
            f"{here} here. Set jax_default_prng_impl to its value during planning"
        )
    return here


def _rebuilt(described: Any, leaves: Iterator[Any]) -> Any:
    if described is None:
        return None
    if described == _LEAF:
        return next(leaves)
    for kind, items in described.items():
        if kind == "dict":
            return {key: _rebuilt(item, leaves) for key, item in items}
        if kind in ("list", "tuple"):
            parts = [_rebuilt(item, leaves) for item in items]
            return parts if kind == "list" else tuple(parts)
    raise PlanError(
        f"the batch holds a container ({', '.join(described) or 'unknown'}) that a "
        "plan cannot rebuild. Pass batch= (abstract will do) to wh.compile"
    )


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves of a tree, with 8 for a random key."""
    total = 0
    for leaf in map(aval_of, jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += 8 * math.prod(leaf.shape)
        else:
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total
