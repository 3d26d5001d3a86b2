"""Turns a user's loss into plain data: tracing, walking, regions.

This is the one place that reads a jaxpr. It gives ``planner.model.graph.Graph``, which
holds no JAX type, and passes the jaxpr itself to lowering.
"""

from whalejax.capture.trace import Captured as Captured
from whalejax.capture.trace import capture as capture
