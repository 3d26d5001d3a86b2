"""Elastic training: a run that continues when members fail, and grows when they join.

A supervisor process lists the members and numbers the generations. Members exchange
gradients by messages, so the failure of one member does not end the others.
"""
