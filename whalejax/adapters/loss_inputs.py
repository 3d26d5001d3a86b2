"""Notes on errors of a user's loss: which arguments it got, and in which order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.meshes.errors import WhaleError, visible


_MOST_LEAVES: Final = 8
"""Largest number of leaves of a batch that a note lists."""

_BATCHES: Final = ("batch", "data", "inputs", "x", "xy")
_MODELS: Final = ("model", "params", "net", "network", "module", "variables", "weights")
"""Usual names of the parameters of losses."""


TRACED: Final = "raised in loss_fn, traced without values"
"""Note on errors of a traced loss; the message of ``loss_error_text`` implies it."""


def add_inputs_note(
    error: Exception, loss_fn: Callable[..., Any], model: Any, batch: Any
) -> None:
    """Adds notes to an error of a loss: its arguments, and hints on common mistakes.

    The model's type, the keys of a mapping and the batch's leaves are listed.

    Args:
        error: Error that the loss raised; a ``WhaleError`` gets no notes.
        loss_fn: The loss.
        model: Model that the loss got.
        batch: Batch that the loss got.
    """
    if isinstance(error, WhaleError):
        return
    params = isinstance(model, Mapping) and "params" not in model
    if params and type(error).__module__ == "flax.errors":
        error.add_note(
            "whalejax: apply of a Linen module takes its variables, such as {'params': "
            "…, 'batch_stats': …}. Pass everything that init returned as the model "
            "argument of wh.plan"
        )
    error.add_note(
        f"whalejax: loss_fn was given {_model_text(model)} as model, and as batch: "
        f"{_batch_text(batch)}{_order_text(loss_fn)}"
    )


def _model_text(model: Any) -> str:
    name = type(model).__name__
    if isinstance(model, Mapping):
        keys = [repr(key) for key in model]
        more = ["…"] if len(keys) > _MOST_LEAVES else []
        held = ", ".join([*keys[:_MOST_LEAVES], *more])
        article = "an" if name[0] in "AEIOUaeiou" else "a"
        return f"{article} {name} with {held}" if held else f"an empty {name}"
    return f"an object of class {name}"


def _batch_text(batch: Any) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    texts = [
        f"batch{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves[:_MOST_LEAVES]
    ]
    more = len(leaves) - len(texts)
    others = f" and {more} more {'leaf' if more == 1 else 'leaves'}" if more else ""
    return visible(", ".join(texts)) + others


def _order_text(loss_fn: Callable[..., Any]) -> str:
    """Returns a hint if parameter names suggest that a loss takes its batch first."""
    try:
        names = list(inspect.signature(loss_fn).parameters)[:2]
    except (TypeError, ValueError):
        return ""
    if len(names) == 2 and names[0] in _BATCHES and names[1] in _MODELS:
        return (
            f". loss_fn takes ({', '.join(names)}), and the model is given first: "
            "write loss_fn(model, batch)"
        )
    return ""


def loss_error_text(error: Exception) -> str:
    """Returns the message for an error that a loss raised; empty for other errors.

    Args:
        error: Error with the notes of the code that called the loss.
    """
    notes = [
        note.removeprefix("whalejax: ")
        for note in getattr(error, "__notes__", ())
        if note.startswith("whalejax: ")
    ]
    if not any("loss_fn" in note for note in notes):
        return ""
    first = str(error).strip().partition("\n")[0]
    where = _compat.raised_at(error)
    text = f"loss_fn raised {type(error).__name__}: {first} (at {where})"
    others = [note for note in notes if note != TRACED]
    return "\n".join([text, *others])
