"""From a plan to a program: constraints on a traced loss, and the compiled step."""

from whalejax.lowering.spmd.constraints import Constraints as Constraints
from whalejax.lowering.spmd.constraints import constraints_of as constraints_of
from whalejax.lowering.spmd.evaluate import evaluate as evaluate
