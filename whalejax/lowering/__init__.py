"""Lowers a plan to a program: constraints, executors and their state."""

from whalejax.lowering.spmd.constraints import Constraints as Constraints
from whalejax.lowering.spmd.constraints import constraints_of as constraints_of
from whalejax.lowering.spmd.evaluate import evaluate as evaluate
