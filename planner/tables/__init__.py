"""Placement of embedding tables: splits, the assignment to ranks, and its report.

``place`` is the entry point. ``table`` and ``ranks`` describe the input,
``storage_options`` lists the ways to divide a table with their costs for a rank,
``greedy`` and ``integer_program`` choose, ``placement`` is the result, ``published``
has sizes of public tables. Plain data and NumPy; ``integer_program`` calls SciPy's
HiGHS.
"""
