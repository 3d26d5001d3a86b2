"""Placement of embedding tables: splits, the assignment to ranks, and its report.

``place`` is the entry point. The folder has plain data and NumPy; only
``assignment`` calls SciPy's HiGHS.
"""
