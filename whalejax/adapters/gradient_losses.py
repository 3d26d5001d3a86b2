"""Refuses a loss that is already differentiated, such as ``jax.value_and_grad(loss)``.

Its gradients would be reported as metrics, and all products would be computed twice.
Such a loss is recognised by its result: a tree with the paths and shapes of the trained
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from whalejax.adapters.leaves import paths_of
from whalejax.meshes.errors import WhaleError


def refuse_gradients(
    returned: Any, paths: Sequence[str], params: Sequence[Any]
) -> None:
    """Raises an error if a loss returned gradients of its model.

    Args:
        returned: Return value of the user's function.
        paths: Dotted path of each trained leaf.
        params: Trained leaves.

    Raises:
        WhaleError: The function is ``jax.value_and_grad(loss)``, ``jax.grad(loss)``, or
            another function that returns gradients.
    """
    shapes = {path: np.shape(leaf) for path, leaf in zip(paths, params, strict=True)}
    if not any(shapes.values()):  # Scalars with these names may be metrics.
        return
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not _holds_all(returned[1] if pair else returned, shapes):
        return
    what = "a value and a tree" if pair else "a tree"
    name = "jax.value_and_grad(loss)" if pair else "jax.grad(loss)"
    raise WhaleError(
        f"loss_fn returned {what} with the paths and shapes of the model's parameters, "
        f"as {name} does. Give the loss itself, as the step takes its gradient. Report "
        "other values as wh.Aux(metrics={...})"
    )


def _holds_all(tree: Any, shapes: dict[str, tuple[int, ...]]) -> bool:
    if tree is None or hasattr(tree, "shape"):
        return False
    leaves = jax.tree.leaves(tree)
    if len(leaves) < len(shapes):
        return False
    found = {
        _bare(path): np.shape(leaf)
        for path, leaf in zip(paths_of(tree), leaves, strict=True)
    }
    return all(found.get(_bare(path)) == shape for path, shape in shapes.items())


def _bare(path: str) -> str:
    return path.removesuffix(".value").removeprefix("params.")
