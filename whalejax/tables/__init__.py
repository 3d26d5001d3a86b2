"""Embedding tables on devices: found in a loss, looked up where they are, updated.

``recognize`` finds the tables of a loss and cuts it at its lookups;
``sparse_optimizers`` say how rows change; ``layout`` turns a placement into arrays of
one size a rank; ``exchange`` has the lookups and the updates, with one all-to-all each
way; ``programs`` puts them around the dense part; ``plan`` is what was decided.
"""
