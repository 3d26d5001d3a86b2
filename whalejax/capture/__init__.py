"""From a user's loss to plain data: tracing, walking, regions.

The one place where a jaxpr is read. What leaves it is ``planner.model.graph.Graph``,
which holds no JAX type, and the jaxpr itself for lowering.
"""

from whalejax.capture.trace import Captured as Captured
from whalejax.capture.trace import capture as capture
