"""Notes of a plan on its loss, and a refusal of losses without a gradient.

JAX cannot differentiate a loop with an unknown number of iterations, or a callback
without its own rule. It reports this only when a gradient is taken. Tracing the
gradient takes as long as tracing the loss, so it is tried only for losses with such
operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import jax

from whalejax import _compat
from whalejax.capture import Captured
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost_terms import NO_EFFECT, Remat
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.why import NOT_READ
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.step_options import remat_words


_DOUBTFUL: Final = frozenset(
    ("while", "pure_callback", "io_callback", "custom_call", "ffi_call")
)
"""Kinds of operations that may have no derivative."""


def check_has_gradient(captured: Captured) -> None:
    """Refuses a loss whose gradient JAX cannot take.

    Args:
        captured: The traced loss.

    Raises:
        WhaleError: The loss has no gradient. The message has JAX's reason, and the
            lines of the operations in question.
    """
    graph = captured.graph
    doubtful = {op.kind for op in graph.ops} & _DOUBTFUL
    doubtful |= {*graph.unknown_primitives}
    if not doubtful or captured.axes:  # The user's axes are not bound here.
        return
    loss = _compat.needed(captured.jaxpr, [0])
    avals = [
        _compat.abstract(v.aval.shape, v.aval.dtype)
        for v in _compat.open_jaxpr(captured.jaxpr)[0].invars
    ]
    count = len(captured.adapter.param_paths)
    params, rest = avals[:count], avals[count:]
    gradient = jax.grad(lambda params, rest: loss(*params, *rest)[0])
    try:
        jax.eval_shape(gradient, params, rest)
    except (ValueError, RuntimeError, TypeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise WhaleError(
            f"the loss has no gradient ({', '.join(sorted(doubtful))}): {first} Use a "
            "loop of fixed length, jax.lax.stop_gradient or jax.custom_vjp there, or "
            "leave optimizer= out to plan an evaluation"
        ) from error


def loss_notes(captured: Captured, found: Plan) -> list[str]:
    """Returns notes on what a user may have overlooked in a loss.

    They are about unread parameters, unused collections, state that samples change,
    named axes, and averaged values.

    Args:
        captured: The traced loss.
        found: Plan of the loss.
    """
    changing = _changing_note(captured.changing, found.num_micro_batches)
    axes = _axes_note(captured.axes)
    averaged = _averaged_note(captured, found)
    unread = unread_note(captured.graph)
    if captured.adapter.kind == "linen":
        unread += _forgotten_note(captured.graph)
    return [*unread, *changing, *axes, *averaged]


def _forgotten_note(graph: Graph) -> list[str]:
    names = [tensor.path for tensor in graph.unused_state()]
    if not names:
        return []
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return [
        f"{', '.join(names[:2])}{more}: the loss neither reads nor changes "
        f"{'it' if len(names) == 1 else 'them'}. Collections that apply updates are "
        "returned as (loss, wh.Aux(variables=updated))"
    ]


def unread_note(graph: Graph) -> list[str]:
    """Returns the note on trained parameters without an effect on the loss."""
    unread = graph.unread_weights(gradient=True)
    if not unread:
        return []
    names = [tensor.path for tensor in unread]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    size = gigabytes(sum(tensor.nbytes for tensor in unread))
    return [
        f"{', '.join(names[:3])}{more} ({size}): no gradient of the loss reaches "
        f"{'it' if len(names) == 1 else 'them'}. Memory and update are counted all the "
        "same; trainable= leaves parameters out"
    ]


def optimizer_note(optimizer: object) -> list[str]:
    """Returns the note on a plan that was made without an optimizer."""
    if optimizer is not None:
        return []
    return [
        "no optimizer was given: the numbers are those of a training step without "
        "optimizer state. With optimizer= they include the state; an evaluation needs "
        "less time and memory"
    ]


def with_unread_noted(leaves: Sequence[LeafPlan], graph: Graph) -> tuple[LeafPlan, ...]:
    """Returns the leaves of a plan, with the reason on unread ones for no shards."""
    unread = {tensor.path for tensor in graph.unread_weights()}
    return tuple(
        dataclasses.replace(leaf, note=NOT_READ)
        if leaf.path in unread and not any(leaf.param_spec)
        else leaf
        for leaf in leaves
    )


def _changing_note(paths: Sequence[str], count: int) -> list[str]:
    if not paths or count == 1:
        return []
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return [
        f"{', '.join(paths[:3])}{more}: not trained, and changed by the batch or by "
        f"random numbers, so {count} times a step, with every micro-batch, as on one "
        "device with as much accumulation; num_micro_batches=1 changes it once"
    ]


def _axes_note(names: Sequence[str]) -> list[str]:
    return [
        f'the loss names the axis "{name}": it stands for all samples of a '
        "micro-batch, so that pmean and psum over it change nothing"
        for name in names
    ]


def _averaged_note(captured: Captured, found: Plan) -> list[str]:
    count = found.num_micro_batches
    if not found.runnable or count == 1 or not (averaged := captured.apart().averaged):
        return []
    why = "; ".join(dict.fromkeys(value.why for _, value in averaged))
    return [
        f"{', '.join(name for name, _ in averaged)}: reported as the mean over the "
        f"{count} micro-batches, from which the whole batch's value may differ ({why})"
        "; wh.Aux(means={...}) says that the mean is meant, and num_micro_batches=1 "
        "reports the whole batch's"
    ]


def remat_note(asked: Remat, found: Plan) -> list[str]:
    """Returns the note on a remat policy that changes nothing."""
    if not asked or found.remat:
        return []
    return [
        f"{remat_words(asked)} {NO_EFFECT}: no layers were found there, or the model "
        "itself puts them into jax.checkpoint or another call that is kept as it is"
    ]
