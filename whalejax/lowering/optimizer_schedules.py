"""Continues the schedules of a new optimizer for a model that was trained before.

It depends on the states of optax, and reads no file.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from whalejax.meshes.errors import WhaleError, warn


COUNT: Final = "count"
"""Field of optax's states that counts updates."""


def with_schedule(state: Any, updates: int, keep: bool | None) -> Any:
    """Returns a training state whose schedules continue, if requested.

    Args:
        state: Training state with an initial optimizer state.
        updates: Number of earlier updates.
        keep: Whether schedules continue. With None they do not, and a warning says so.

    Raises:
        WhaleError: ``keep`` is True, and there are no schedules.
    """
    going_on, schedule_counts = with_schedule_counts(state.opt_state, updates)
    if keep and not schedule_counts:
        raise WhaleError(
            "keep_schedule is True, but nothing in this optimizer's state counts the "
            "updates of a schedule (optax names such a number count). Leave "
            "keep_schedule out"
        )
    if keep:
        return dataclasses.replace(state, opt_state=going_on)
    if keep is None and schedule_counts and updates:
        warn(
            "the optimizer begins anew, and its schedule counts from 0, although "
            f"the checkpoint's optimizer had made {updates} updates. Pass "
            f"keep_schedule=True to continue from {updates}, or False to begin it "
            "anew without this warning"
        )
    return state


def with_schedule_counts(state: Any, updates: int) -> tuple[Any, int]:
    """Returns an optimizer state with continued schedules, and their number.

    A count beside moments, as in Adam, corrects the bias of the moments. Both start at
    zero, so such a count is not changed.

    Args:
        state: Initial state of an optimizer.
        updates: Number of earlier updates.

    >>> import optax
    >>> fresh = optax.adam(optax.constant_schedule(0.1)).init({"w": np.zeros(3)})
    >>> (adam, schedule), found = with_schedule_counts(fresh, 7)
    >>> int(adam.count), int(schedule.count), found
    (0, 7, 1)
    """
    found = 0

    def going_on(node: Any) -> Any:
        nonlocal found
        if not _counts(node):
            return node
        fields: dict[str, Any] = node._asdict()
        changed = {name: every(x) for name, x in fields.items() if name != COUNT}
        if not any(_holds_moments(x) for name, x in fields.items() if name != COUNT):
            found += 1
            array = np.asarray(updates, node.count.dtype)
            sharding = getattr(node.count, "sharding", None)
            changed[COUNT] = jax.device_put(array, sharding)
        return node._replace(**changed)

    def every(tree: Any) -> Any:
        return jax.tree.map(going_on, tree, is_leaf=_counts)

    return every(state), found


def _counts(node: Any) -> bool:
    return isinstance(node, tuple) and COUNT in getattr(node, "_fields", ())


def _holds_moments(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "_fields"))
    return any(getattr(leaf, "ndim", 0) > 0 for leaf in leaves)
