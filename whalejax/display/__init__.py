"""Displays for notebooks: HTML and SVG that need no network, no script and no JAX.

It is separate from ``whalejax.cli.show``, which is for terminals; both show the result
of ``planner.plan.report.plan_page``. Pictures read plans and never a value of an array.
"""
