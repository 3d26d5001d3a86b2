"""Placement of embedding tables: splits, the assignment to ranks, and its report.

``place`` is the entry point. The folder has plain data and NumPy. Only
``cpu_or_device`` and ``rank_assignment`` call SciPy's HiGHS.
"""
