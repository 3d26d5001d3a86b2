"""Decides what to shard, over which mesh axis, and predicts the cost. Needs no JAX."""

if __name__ == "planner":
    raise ImportError("import whalejax.planner, not planner")

from whalejax.planner.model.graph import Graph as Graph
from whalejax.planner.model.graph import TaskGraph as TaskGraph
from whalejax.planner.plan.plan import Plan as Plan
from whalejax.planner.plan.spmd_plan import decide as decide
from whalejax.planner.plan_errors import PlanError as PlanError
from whalejax.planner.search.request import Request as Request
