"""Placement of embedding tables: splits, the assignment to ranks, and its report.

``place`` is the entry point. The folder has plain data and NumPy; only
``integer_program`` calls SciPy's HiGHS.
"""
