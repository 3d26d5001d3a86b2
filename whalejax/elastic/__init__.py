"""Elastic training: a run that continues when members fail, and grows when they join.

A supervisor outside the workers has the list of members and numbers the generations;
members exchange gradients by messages, so that one failure does not end the others.
"""
