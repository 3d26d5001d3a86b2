"""Placement of embedding tables: splits, the assignment to ranks, and its report.

``place`` is the entry. ``table`` and ``ranks`` describe what is placed, ``ways`` lists
how a table may be divided and what that costs a rank, ``greedy`` and ``program``
choose, ``placement`` is the result, ``published`` has sizes of public ones. Plain
data and NumPy; ``program`` asks SciPy's HiGHS.
"""
