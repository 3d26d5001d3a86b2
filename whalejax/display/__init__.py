"""Displays for notebooks: HTML and SVG that need no network, no script and no JAX.

Apart from ``whalejax.cli.show``, which is for terminals; both show what
``planner.plan.report.plan_page`` says. Pictures read plans and never a value of an
array.
"""
