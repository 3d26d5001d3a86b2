"""The time of a step: operations, collectives and the optimizer's update."""
