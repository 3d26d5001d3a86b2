"""Displays plans, searches and runs in notebooks, as static HTML and SVG.

Displays of plans read no array, and this package imports no JAX.
"""
