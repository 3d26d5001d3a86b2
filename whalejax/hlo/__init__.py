"""Reads the work of a compiled program from its HLO text.

``read`` parses the text, ``executions`` multiplies loops out; with these,
``collectives`` counts what devices send each other and ``product_flops`` what they
multiply. Text is the only form of a compiled program that every backend gives. Unknown
constructs are refused by name, because an incomplete count would look like any other.
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
