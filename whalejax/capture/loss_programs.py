"""The programs that plans derive from one loss; each is traced once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from whalejax.adapters.base import Adapter
from whalejax.capture import Captured, capture
from whalejax.capture import batch as batches
from whalejax.capture.assemble import model_hash
from whalejax.capture.batch import TracedLeaf, aval_of, batch_leaves
from whalejax.capture.passes.remat_pass import checkpoint_names
from whalejax.capture.precision import at_precision
from whalejax.capture.reported_values.combinations import check_clear
from whalejax.meshes.errors import tell
from whalejax.planner.cost_terms import ALL, Chosen, Remat
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.rebatch import rebatch_graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.search.spmd_search import ProgramCache
from whalejax.planner.sharding.program_regions import checked_precisions


T = TypeVar("T")


class Programs:
    """A loss as the user wrote it, and its variants in attention, logits and remat.

    Args:
        adapter: The model and its loss.
        capture: Function that traces the loss as the user wrote it.

    Attributes:
        adapter: The model and its loss.
        known: Results of earlier searches over these programs.
        blocks: Function from (TaskGraph, ``"ring"`` or ``"gather"``) pairs to the loss
            with attention in blocks.
        cut: Function from these pairs and a number of chunks to the same loss with
            logits computed in chunks of tokens.
        again: Function from (TaskGraph, remat policy) pairs and the arguments of
            ``cut`` to the graph of that loss with remat.
    """

    def __init__(self, adapter: Adapter, capture: Callable[[], Captured]) -> None:
        self.adapter = adapter
        self.known: ProgramCache = ProgramCache()
        self._of_optimizers: dict[tuple[object, int], tuple[Any, Any]] = {}
        self._capture = capture
        self.blocks = functools.cache(self._blocks)
        self.cut = functools.cache(self._cut)
        self.again = functools.cache(self._trace_again)

    def of_optimizer(self, compute: Callable[[Adapter, Any], T], optimizer: Any) -> T:
        """Returns a result that depends on the model and an optimizer, computed once.

        Args:
            compute: Function from the adapter and the optimizer to the result.
            optimizer: Optax transformation.
        """
        key = compute, id(optimizer)
        if key not in self._of_optimizers:
            # Storing the optimizer prevents the reuse of its id.
            self._of_optimizers[key] = optimizer, compute(self.adapter, optimizer)
        result: T = self._of_optimizers[key][1]
        return result

    @functools.cached_property
    def captured(self) -> Captured:
        """The traced loss as the user wrote it; traced at the first access."""
        return self._capture()

    @functools.cached_property
    def traced(self) -> Programs:
        """Programs of the same loss from which facts that no batch changes are read.

        Their batch may differ. They need no trace beyond those that exist anyway.
        """
        return self

    @functools.cached_property
    def graph(self) -> Graph:
        """Graph of the loss as the user wrote it."""
        return self.captured.graph

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names with which the model marks values for checkpointing."""
        return checkpoint_names(self.captured.jaxpr)

    def _blocks(self, attention: Chosen) -> Captured:
        return self.captured.with_attention(attention)

    def _cut(self, attention: Chosen, chunks: int) -> Captured:
        return self.blocks(attention).with_chunks(chunks)

    def _trace_again(self, remat: Remat, attention: Chosen, chunks: int) -> Graph:
        return self.cut(attention, chunks).with_remat(remat).graph


class ResizedPrograms(Programs):
    """Programs of a loss for another batch than the traced one.

    Args:
        like: Programs with the traced batch.
        capture: Function that traces the loss with this batch, called only if needed.
        leaves: Leaves of the batch.
        num_micro_batches: Number of micro-batches into which the batch is cut.
    """

    def __init__(
        self,
        like: Programs,
        capture: Callable[[], Captured],
        leaves: Sequence[TracedLeaf],
        num_micro_batches: int,
    ) -> None:
        super().__init__(like.adapter, capture)
        self._of_optimizers = like._of_optimizers
        self._like = like
        self._size = next(x.micro_shape[x.axis] for x in leaves if x.axis is not None)
        self._count = num_micro_batches
        self._hash = model_hash(like.graph, leaves)
        self._known: dict[int, tuple[Graph, Graph | None]] = {}

    @functools.cached_property
    def traced(self) -> Programs:
        """``like`` if its graph can be resized to this batch; else these programs."""
        return self if self._resize_graph(self._like.graph) is None else self._like

    @functools.cached_property
    def graph(self) -> Graph:
        """Graph of the loss as the user wrote it."""
        return self._resize_graph(self._like.graph) or self.captured.graph

    def _trace_again(self, remat: Remat, attention: Chosen, chunks: int) -> Graph:
        result = None
        if self.traced is self._like:
            result = self._resize_graph(self._like.again(remat, attention, chunks))
        return result or super()._trace_again(remat, attention, chunks)

    def _resize_graph(self, graph: Graph) -> Graph | None:
        if id(graph) not in self._known:
            result = rebatch_graph(graph, self._size)
            if result is not None:
                result = dataclasses.replace(
                    result, num_micro_batches=self._count, model_hash=self._hash
                )
            self._known[id(graph)] = graph, result
        return self._known[id(graph)][1]


class Traces:
    """Cache of a loss's programs by precision, batch and number of micro-batches.

    If only the number of samples or of micro-batches differs, no new trace is made
    where the graph can be resized.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Programs] = {}

    def of(
        self,
        adapter: Adapter,
        batch: Any,
        *,
        batch_axes: Any,
        num_micro_batches: int,
        precision: str | Mapping[str, str],
    ) -> Programs:
        """Returns the programs for a batch.

        Args:
            adapter: The model and its loss, the same in every call.
            batch: The GLOBAL batch, abstract.
            batch_axes: Batch dimension of each leaf, the same in every call.
            num_micro_batches: Number of micro-batches into which the batch is cut.
            precision: Precision of the model, or of each TaskGraph.

        Raises:
            WhaleError: The batch cannot be divided into so many micro-batches, or the
                loss cannot be traced.
        """
        cast = at_precision(adapter, precision if isinstance(precision, str) else "f32")

        def captured() -> Captured:
            tell("tracing the model")
            result = capture(
                cast,
                batch,
                num_micro_batches=num_micro_batches,
                batch_axes=batch_axes,
            )
            if isinstance(precision, str):
                return result
            return result.with_precisions(checked_precisions(precision, result.graph))

        one = batches.resize_batch(batch, batch_axes, 1)
        samples = str([str(aval_of(leaf)) for leaf in jax.tree.leaves(one)])
        shapes = [str(aval_of(leaf)) for leaf in jax.tree.leaves(batch)]
        key = str(precision), samples, str(num_micro_batches), *shapes
        if key not in self._known:
            like = next((p for k, p in self._known.items() if k[:2] == key[:2]), None)
            found = Programs(cast, captured)
            if like is not None:
                leaves, _ = batch_leaves(batch, batch_axes, num_micro_batches)
                found = ResizedPrograms(
                    like.traced, captured, leaves, num_micro_batches
                )
            found.graph  # noqa: B018  Raises before an untraceable loss is stored.
            self._known[key] = found
        return self._known[key]


def check_reports(programs: Programs, plan: Plan) -> None:
    """Refuses a plan whose micro-batches report values that cannot be combined.

    Args:
        programs: Programs of the loss, perhaps for another number of micro-batches.
        plan: Plan to check; a plan that cannot run passes unchecked.
    """
    count = plan.num_micro_batches
    # Ranks that combine their own gradients report separately, as micro-batches do.
    ranks = 1 if plan.combine == "mean" else plan.axis_sizes["data"]
    if plan.runnable and count * ranks > 1:
        captured = programs.traced.captured
        whole = captured.graph.batch_size * captured.graph.num_micro_batches
        asked = count == 1 or programs.graph.num_micro_batches == count
        check_clear(
            captured.apart().unclear,
            whole // (count * ranks),
            chosen=None if asked else count,
            combine=None if ranks == 1 else plan.combine,
        )


def attention_note(found: Plan, programs: Programs) -> list[str]:
    """Returns notes on why attention cannot run as a ring over ``context``."""
    if not found.runnable or found.axis_sizes.get("context", 1) == 1:
        return []
    reasons = programs.traced.blocks(found.attention or ((ALL, "ring"),)).whole
    return [
        f"keys and values are gathered over context: {reason}" for reason in reasons
    ]
