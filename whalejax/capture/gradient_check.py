"""Refuses losses without a gradient when they are planned, not at their first step.

JAX cannot differentiate a loop with an unknown number of iterations, or a callback
without its own rule. It says so only when a gradient is taken. Tracing the gradient
takes as long as tracing the loss, so only losses with such operations are tried.
"""

from __future__ import annotations

from typing import Final

import jax

from whalejax import _compat
from whalejax.capture.trace import Captured
from whalejax.meshes.errors import WhaleError


_DOUBTFUL: Final = frozenset(
    ("while", "pure_callback", "io_callback", "custom_call", "ffi_call")
)
"""Kinds of operations that may have no derivative."""


def check_has_gradient(captured: Captured) -> None:
    """Refuses a loss whose gradient JAX cannot take.

    Args:
        captured: The loss.

    Raises:
        WhaleError: Has JAX's reason, and the lines of the operations in doubt.
    """
    graph = captured.graph
    doubtful = {op.kind for op in graph.ops} & _DOUBTFUL
    doubtful |= {*graph.unknown_primitives}
    if not doubtful or captured.axes:  # Axes of the user's are bound elsewhere.
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
