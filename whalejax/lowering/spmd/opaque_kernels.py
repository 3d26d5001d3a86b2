"""Kernels that the compiler cannot divide among devices.

A Pallas kernel, or a function of another library, is opaque to JAX: it is unknown how
parts of the result depend on parts of the operands. TPU compilers refuse such kernels
in a program of several devices. So every device runs them in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from whalejax import _compat
from whalejax.lowering.spmd.gather_scatter import holds
from whalejax.lowering.spmd.grouped_conv import is_grouped


_KERNELS: Final = frozenset(
    ("pallas_call", "tpu_custom_call", "triton_kernel_call", "ffi_call")
)
"""Primitives that run code that is opaque to JAX."""


def is_kernel(equation: Any) -> bool:
    """Returns whether an equation runs a kernel."""
    return equation.primitive.name in _KERNELS


def runs_whole(equation: Any, flows: Sequence[bool] | None = None) -> bool:
    """Returns whether every device must run an equation in full.

    This holds for a kernel. It holds for a ``while`` loop with a kernel inside, and for
    a call with its own derivative rule and a kernel or a grouped convolution inside.

    Args:
        equation: Equation to check.
        flows: Whether a gradient flows through each operand of a call with its own
            derivative rule.
    """
    if is_kernel(equation):
        return True
    if _compat.recursion(equation) == "while":
        return holds(equation, is_kernel)
    return _compat.recursion(equation) == "opaque" and holds(
        equation, lambda one: is_kernel(one) or is_grouped(one), flows
    )
