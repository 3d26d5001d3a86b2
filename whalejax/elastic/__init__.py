"""Elastic training: a run that goes on when members are lost, and grows when they come.

A supervisor outside the workers keeps the list of members and numbers the generations;
members exchange gradients by messages, so that none shares the fate of another.
"""
