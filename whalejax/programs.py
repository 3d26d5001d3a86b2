"""One loss and the programs that plans make of it, each of which is traced once."""

from __future__ import annotations

import functools

from whalejax.adapters import Adapter
from whalejax.capture import Captured
from whalejax.planner.decide import Known
from whalejax.planner.graph import Graph
from whalejax.planner.plan import Chosen, Remat
from whalejax.planner.space import Spaces


class Programs:
    """A captured loss, with attention in blocks, logits in parts, layers run again.

    Attributes:
        adapter: the model and its loss.
        captured: the loss as it was written.
        known: what searches have found of the programs.
        spaces: what wide searches have ranged over.
    """

    def __init__(self, adapter: Adapter, captured: Captured) -> None:
        self.adapter = adapter
        self.captured = captured
        self.known: Known = {}
        self.spaces = Spaces()
        self.blocks = functools.cache(captured.with_attention)
        self.cut = functools.cache(self._cut)

    def _cut(self, attention: Chosen, chunks: int) -> Captured:
        return self.blocks(attention).with_chunks(chunks)

    def again(self, remat: Remat, attention: Chosen, chunks: int) -> Graph:
        """The graph of one of them.

        Args:
            remat: (TaskGraph, policy) pairs of what the backward pass computes again.
            attention: (TaskGraph, ``"ring"`` or ``"gather"``) pairs.
            chunks: into how many the tokens are cut where logits are made.
        """
        return self.cut(attention, chunks).with_remat(remat).graph
