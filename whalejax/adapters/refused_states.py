"""Refuses training states in place of a model.

A Flax ``TrainState``, an ``nnx.Optimizer``, or a pair of parameters and optimizer state
is a tree of arrays like any model. As a model, its optimizer moments would be trained
and counted as parameters. Such a state is recognised by its fields, without imports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import jax

from whalejax.adapters.leaves import dotted
from whalejax.meshes.errors import Problems


_MOMENTS: Final = frozenset(("mu", "nu", "trace", "momentum", "velocity", "v_row"))
"""Fields of optimizer states that have an array for every parameter."""


def refuse_training_states(model: Any) -> None:
    """Raises an error if a model is or contains the state of an optimizer.

    Args:
        model: Model from the user.

    Raises:
        WhaleError: There is such a part. The message lists each with its replacement.
    """
    problems = Problems("model")
    for path, node in _suspects(model):
        problems.add(f"{path}{_words(node)}")
    problems.raise_if_any()


def _suspects(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields parts that are training states, each with its name for the message."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_stops)
    for path, node in pairs:
        where = f"{dotted(path)}: it " if path else "it "
        if _is_state(node):
            yield where, node
            continue
        # In some versions of Flax modules are no pytrees, so attributes are checked.
        for name, value in _values(node).items() if _is_module(node) else ():
            if _is_state(value):
                yield f"{dotted(path) + '.' if path else ''}{name}: it ", value


def _stops(node: Any) -> bool:
    return _is_state(node) or _is_module(node)


def _is_module(node: Any) -> bool:
    return any(c.__module__.startswith("flax.nnx") for c in type(node).__mro__)


def _fields(node: Any) -> frozenset[str]:
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return frozenset(field.name for field in dataclasses.fields(node))
    named = getattr(type(node), "_fields", ()) if isinstance(node, tuple) else ()
    return frozenset((*named, *_values(node)))


def _values(node: Any) -> dict[str, Any]:
    held = getattr(node, "__dict__", None)
    return held if isinstance(held, dict) and not isinstance(node, type) else {}


def _is_state(node: Any) -> bool:
    fields = _fields(node)
    if {"opt_state", "params"} <= fields or {"opt_state", "tx"} <= fields:
        return True
    return _is_optax(node) or (
        isinstance(node, tuple)
        and type(node).__name__.endswith("State")
        and not fields.isdisjoint(_MOMENTS)
    )


def _is_optax(node: Any) -> bool:
    made_by = type(node).__module__.partition(".")[0]
    return made_by == "optax" and isinstance(node, tuple)


def _words(node: Any) -> str:
    fields, name = _fields(node), type(node).__name__
    if "opt_state" in fields and "origin" in fields:
        return (
            f"is the {name} of a step, whose optimizer state would be trained as if it "
            "were the model's. Give state.model"
        )
    if {"opt_state", "params"} <= fields:
        return (
            f"is a {name} with an optimizer state, which would be trained as if it "
            "were the model's. Give model=state.params, or {'params': state.params} "
            "and its other collections beside that, and optimizer=state.tx"
        )
    if "opt_state" in fields:
        return (
            f"is the {name} around a module, whose state would be trained as if it "
            "were the module's. Give the module itself as model, and optimizer="
            "optimizer.tx"
        )
    return (
        f"is {name}, an optimizer's state, whose moments would be trained as if they "
        "were parameters. Give the parameters alone, and the optimizer as optimizer="
    )
