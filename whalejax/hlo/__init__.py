"""Reads the work of a compiled program from its HLO text.

``read`` takes the text apart, ``executions`` multiplies loops out, and on that
``collectives`` counts what devices send each other and ``product_flops`` what they
multiply. Text is the one form of a compiled program that every backend gives. What is
not understood is refused by name, because a count that left something out would look
like any other.
"""

from whalejax.hlo.hlo_collectives import KINDS, Collectives, Instruction, collectives
from whalejax.hlo.hlo_text import HloError, Module, read
from whalejax.hlo.loops import executions
from whalejax.hlo.products import product_flops


__all__ = [
    "KINDS",
    "Collectives",
    "HloError",
    "Instruction",
    "Module",
    "collectives",
    "executions",
    "product_flops",
    "read",
]
