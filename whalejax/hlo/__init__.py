"""Reads the work of a compiled program from its HLO text.

``read`` parses the text, and ``executions`` gives the number of executions of every
instruction in loops. ``collectives`` counts the bytes that devices send to each other,
and ``product_flops`` the work of products. Text is the only form of a compiled program
that every backend gives. Unknown constructs are refused by name, as incomplete counts
would not be noticed.
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
