"""Embedding tables on devices: found in a loss, looked up on their devices, updated.

``recognize`` finds the tables of a loss and cuts it at its lookups;
``sparse_optimizers`` define how rows change; ``layout`` turns a placement into arrays
of one size on every rank; ``exchange`` has the lookups and the updates, with one
all-to-all in each direction; ``programs`` puts them around the dense part;
``tables_plan`` is the result of planning.
"""
