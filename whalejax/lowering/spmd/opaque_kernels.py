"""Kernels that the compiler cannot divide among devices.

A Pallas kernel, or a function of another library, says nothing of how a part of its
result follows from parts of its operands, and compilers for TPU refuse it in a program
of several devices. So every device is told to run it whole.
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
"""Primitives that run code which JAX does not see into."""


def is_kernel(equation: Any) -> bool:
    """Whether an equation runs a kernel."""
    return equation.primitive.name in _KERNELS


def runs_whole(equation: Any, flows: Sequence[bool] | None = None) -> bool:
    """Whether every device has to run an equation whole.

    That is a kernel, and a call or loop that holds one, or holds a convolution in
    groups of channels.

    Args:
        equation: The equation.
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
