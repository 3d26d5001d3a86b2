"""Checks of optimizers and functions, for arguments of several public functions.

Checks for a single function are beside it. Models import modules that import this one,
so its import starts no JAX.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError


def check_optimizer(problems: Arguments, optimizer: Any) -> None:
    """Records an optimizer that is no optax transformation.

    Args:
        problems: Collector of the errors.
        optimizer: Object to check, or None.
    """
    parts = (getattr(optimizer, name, None) for name in ("init", "update"))
    if optimizer is None or (all(map(callable, parts)) and not _is_class(optimizer)):
        return
    if hasattr(optimizer, "tx"):
        problems.refuse("optimizer", optimizer, "its transformation, optimizer.tx")
        return
    problems.refuse(
        "optimizer",
        optimizer,
        "an optax transformation such as optax.adam(1e-3), or None",
    )


def refuse_bad_optimizer(optimizer: Any) -> None:
    """Raises an error for an optimizer that is no optax transformation.

    Raises:
        WhaleError: ``optimizer`` is neither an optax transformation nor None.
    """
    problems = Arguments("optimizer")
    check_optimizer(problems, optimizer)
    if problems:
        raise WhaleError(problems.messages[0])


def check_order(name: str, loss_fn: Any, model: Any, batch: Any) -> None:
    """Refuses a loss, a model and a batch in the wrong order.

    Args:
        name: Names of the called function's arguments, in order.
        loss_fn: Argument for the loss.
        model: Argument for the model.
        batch: Argument for the batch.

    Raises:
        WhaleError: The order is wrong. The message has the right one.
    """
    result = []
    if _is_plain_function(model):
        result.append(f"model is the function {_name(model)}")
    if is_module(loss_fn) or not callable(loss_fn):
        result.append(f"loss_fn is {_kind(loss_fn)}")
    if is_module(batch) or _is_plain_function(batch):
        result.append(f"batch is {_kind(batch)}")
    flax = any(base.__module__.startswith("flax") for base in type(batch).__mro__)
    if len(result) > 1 or _is_plain_function(model) or (flax and is_module(batch)):
        raise WhaleError(f"{'; '.join(result)}. The order is {name}")


def check_function(
    problems: Arguments, name: str, function: Any, *parameters: str
) -> None:
    """Records a function of the user's that takes other arguments than it will get.

    Args:
        problems: Collector of the errors.
        name: Name of the argument that has the function as its value.
        function: Function of the user's; without a signature, it passes unchecked.
        parameters: Usual name of each argument that it will get, in order.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        takes = f"({', '.join(signature.parameters)})"
        given = ", ".join(parameters)
        problems.add(
            f"{name} takes {'no argument' if takes == '()' else takes}; it is called "
            f"as {name}({given}). Write lambda{' ' if given else ''}{given}: …"
        )


def _is_plain_function(value: Any) -> bool:
    """Returns whether a value is a function, perhaps partial; no callable module."""
    if isinstance(value, functools.partial):
        return type(value) is functools.partial
    return inspect.isfunction(value) or inspect.ismethod(value)


def is_module(value: Any) -> bool:
    """Returns whether a value is an instance of a network module of any library."""
    return any(
        base.__name__ == "Module" and base.__module__.partition(".")[0] != "builtins"
        for base in type(value).__mro__
    )


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _kind(value: Any) -> str:
    if _is_plain_function(value):
        return f"the function {_name(value)}"
    return f"a {type(value).__name__}"


def is_function(value: Any) -> bool:
    """Returns whether a value is callable and no class."""
    return callable(value) and not _is_class(value)


def _is_class(value: Any) -> bool:
    return inspect.isclass(value)
