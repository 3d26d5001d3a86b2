"""Turns a user's loss into plain data: it traces, flattens and finds TaskGraphs.

The result is a ``planner.model.graph.Graph``, which holds no JAX type, and the jaxpr of
the loss, from which ``lowering`` makes programs.
"""

from whalejax.capture.trace import Captured as Captured
from whalejax.capture.trace import capture as capture
