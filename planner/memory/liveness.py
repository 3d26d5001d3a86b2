"""Residuals of the forward pass and temporaries of the backward pass, by span.

A step is divided into spans of consecutive operations. Each loop is one span. Residuals
are the values that fusions cannot recompute. Loops save exactly the residuals of their
differentiation, as compilers do not optimise across iterations.

The module is long because residuals, recomputed values and temporaries all depend on
the sources from which values are recomputed.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost_terms import FETCHED
from whalejax.planner.memory.saved_tensors import (
    CHEAP,
    SMALL,
    SPREAD,
    FewSamples,
    TensorEntry,
)
from whalejax.planner.model.graph import (
    ATTENTION,
    CHOOSING_WINDOWS,
    CONVOLUTION,
    LOOKUPS,
    LOOPS,
    RAGGED,
    Graph,
    LoopResidual,
    Op,
    rereads,
)


_PIECES = 12
"""Largest number of spans outside loops. Each loop between them may add one."""

_LONG = frozenset({"erf", "erfc", "erf_inv", "lgamma", "digamma"})
"""Elementwise operations that are too costly for fusions to recompute."""

_WORKING = 2.0
"""Temporaries of a product's backward pass, as a multiple of an operand or result. They
are its gradients before and after the operations up to the next product.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive operations, as a half-open range of their indices."""

    first: int
    end: int
    loop: bool


_SUMS = ("add", "add_any")

NOWHERE = -1
"""Index that stands for no operation."""

Works = list[dict[TensorEntry, float]]

_PutOff = tuple[int, list[tuple[int, TensorEntry]], list[tuple[int, int, TensorEntry]]]
"""(Index of a product, gradients that it reads, residuals that it reads with the first
reader of each).
"""


def regathered_operands(graph: Graph, weight: Sequence[bool]) -> frozenset[int]:
    """Returns data operands of products outside loops whose weights are gathered again.

    The lowering computes such a product in a checkpointed region of its own. The inputs
    of the region must be in memory, as fusions do not recompute values across its
    boundary.

    Args:
        graph: Captured loss.
        weight: Whether each tensor depends on parameters alone.
    """
    operands: set[int] = set()
    for op in graph.ops:
        if op.regathers and op.remat is None and op.trip == 1:
            data = [t for t in op.operands[:2] if not weight[t]]
            operands.update(data if len(data) == 1 else ())
    return frozenset(operands)


class TensorUses:
    """Producers and readers of each tensor, and the spans of a step.

    They depend neither on TaskGraphs nor on offload or repeated gathers, so all
    analyses of one program share them.

    Args:
        graph: Captured loss.
        weight: Whether each tensor depends on parameters alone.
        compiler: Model of the compiler, with its fusions and their dtypes.

    Attributes:
        maker: Index of the operation that produces each tensor.
        readers: Number of operations that read each tensor.
        reader: Last operation that reads each tensor.
        masks: Random tensors that are saved.
        data: Whether each tensor depends on the batch, or on one of ``masks``.
        value: Whether each tensor is computed from data, so that it is neither an input
            of the program nor a weight.
        narrow: Whether products read each tensor in a narrower dtype.
        leaving: Values that are assembled from chunks.
        homes: Operation whose TaskGraph owns each tensor.
        regions: Indices of the operations of each checkpointed region.
        spans: Spans of operations, in program order.
        last: Index of each parameter's last reader, or -1.
        users: Readers of each parameter, without operations on weights alone.
    """

    def __init__(
        self, graph: Graph, weight: Sequence[bool], compiler: CompilerProfile
    ) -> None:
        self.graph = graph
        self.weight = weight
        self.compiler = compiler
        halves = compiler.narrow_products
        self.narrow = [halves and flag for flag in graph.only_multiplied()]
        self.maker = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        self.readers = Counter(t for op in graph.ops for t in {*op.operands})
        self.reader = {t: op for op in graph.ops for t in op.operands}
        self.leaving = graph.leaving()
        self.masks: set[int] = set()
        self.data = self._data()
        self.value = [
            t.kind == "value" and data and not own
            for t, data, own in zip(graph.tensors, self.data, weight, strict=True)
        ]
        self.homes = self._homes()
        self.regions = self._regions()
        self.spans = self._spans()
        self.last, self.users = self._parameters()

    def _data(self) -> list[bool]:
        data = [t.kind == "batch" for t in self.graph.tensors]
        drawn = [False] * len(data)
        for op in self.graph.ops:
            random = op.kind == "random_bits" or any(drawn[t] for t in op.operands)
            if any(data[t] for t in op.operands):
                for t in op.results:
                    data[t] = True
            elif random and self.compiler.keeps_masks:
                for t in op.results:
                    data[t] = self.graph.tensors[t].dtype == "bool"
                    drawn[t] = not data[t]
                    self.masks |= {t} if data[t] else set()
        return data

    def _homes(self) -> dict[int, int]:
        homes: dict[int, int] = {}
        for i, op in enumerate(self.graph.ops):
            for t in (*op.results, *op.operands):
                homes.setdefault(t, i)
        return homes

    def _regions(self) -> dict[int, list[int]]:
        regions: dict[int, list[int]] = {}
        for i, op in enumerate(self.graph.ops):
            if op.remat is not None:
                regions.setdefault(op.remat, []).append(i)
        return regions

    def _spans(self) -> list[Span]:
        ops = self.graph.ops
        cuts = [0]
        for i in range(1, len(ops)):
            if (ops[i].trip > 1) != (ops[i - 1].trip > 1):
                cuts.append(i)
        cuts.append(len(ops))
        outside = sum(op.trip == 1 for op in ops)
        step = max(1, math.ceil(outside / _PIECES))
        spans = []
        for first, end in zip(cuts, cuts[1:], strict=False):
            if first < end and ops[first].trip > 1:
                spans.append(Span(first, end, True))
                continue
            spans += [
                Span(at, min(end, at + step), False) for at in range(first, end, step)
            ]
        return spans or [Span(0, 0, False)]

    def _parameters(self) -> tuple[list[int], list[list[int]]]:
        params = self.graph.params
        of: dict[int, set[int]] = {t.id: {i} for i, t in enumerate(params)}
        users: list[list[int]] = [[] for _ in params]
        for i, op in enumerate(self.graph.ops):
            leaves = {leaf for t in op.operands for leaf in of.get(t, ())}
            if not leaves:
                continue
            if all(self.weight[t] for t in op.operands):
                for t in op.results:
                    of.setdefault(t, set()).update(leaves)
            else:
                for leaf in leaves:
                    users[leaf].append(i)
        return [max(places, default=-1) for places in users], users

    def used(self, until: Mapping[int, int]) -> np.ndarray:
        """Returns the use of each parameter by each span; see ``StepLiveness.used``.

        Args:
            until: For each product, the later operation that reads its result in
                another form.
        """
        result = np.zeros((len(self.spans), len(self.users)), int)
        ends = [span.end for span in self.spans]
        for leaf, places in enumerate(self.users):
            for at in places:
                first, last = (
                    bisect_right(ends, at),
                    bisect_right(ends, until.get(at, at)),
                )
                how = 1 if self.graph.ops[at].matmul is None else 2
                here = result[first : last + 1, leaf]
                np.maximum(here, how, out=here)
        return result

    @functools.cached_property
    def reread(self) -> np.ndarray:
        """Value of ``StepLiveness.reread``."""
        times, spans = rereads(self.graph, self.weight), self.spans
        reread = np.zeros((len(spans), len(self.users)), bool)
        ends = [span.end for span in spans]
        for leaf, places in enumerate(self.users):
            for at in places:
                if times[at] > 1 and self.graph.ops[at].matmul is not None:
                    reread[bisect_right(ends, at), leaf] = True
        return reread


class Timeline:
    """Lifetimes of the tensors that the forward pass saves, without their TaskGraphs.

    Args:
        uses: Producers and readers of the tensors.
        waiting: Number of offloaded copies by tensor.
        regathers: Whether the backward pass gathers the weights of products again.
    """

    def __init__(
        self, uses: TensorUses, waiting: Mapping[int, int], *, regathers: bool
    ) -> None:
        self.graph, self.weight, self.compiler = uses.graph, uses.weight, uses.compiler
        self.uses, self.waiting = uses, waiting
        graph, compiler = uses.graph, uses.compiler
        self.multiplied = {
            t
            for op in (() if compiler.fuses_products else graph.ops)
            if op.matmul is not None
            for t in op.operands
        }
        if regathers:
            self.multiplied |= regathered_operands(graph, uses.weight)
        self.halves = compiler.narrow_products
        self.narrow, self.leaving = uses.narrow, uses.leaving
        self.maker, self.readers, self.reader = uses.maker, uses.readers, uses.reader
        self.masks, self.data = uses.masks, uses.data
        self.homes, self.spans = uses.homes, uses.spans
        self._sources: dict[tuple[int, int | None], frozenset[int]] = {}
        self._entries: dict[int, TensorEntry] = {}
        self.multiplied |= self._narrowed_operands() | self._pooled()
        self.hard = self._hard()
        lanes = compiler.lanes
        self.few_samples = FewSamples(graph, lanes, self._value, self._entry)
        # The inputs of a checkpointed product, and its gradient, must be in memory.
        self.fused = set() if regathers else self._fused_gradients()
        self.saved = self._saved()
        self._last_readers = self._read_last()
        self._put_off = self._products_put_off()

    def _narrowed_operands(self) -> set[int]:
        """Returns the operands of products that are narrower than their sources.

        An example is bfloat16 probabilities of a float32 softmax. If each product
        recomputed them, it would read the wider value. So compilers write them once,
        and both values are saved.
        """
        if not self.compiler.repeats:
            return set()
        tensors, result = self.graph.tensors, set()
        for op in self.graph.ops:
            if op.matmul is None or op.remat is not None or op.trip > 1:
                continue
            for t in op.operands[:2]:
                wider = [
                    s for s in self.sources(t) if tensors[s].nbytes > tensors[t].nbytes
                ]
                if wider and self._value(t):
                    result.add(t)
        self._sources.clear()
        return result

    def _pooled(self) -> set[int]:
        """Returns the operands of windows that choose elements, as in max pooling.

        The gradient of a window is scattered to the chosen elements. Fusions do not
        recompute an operand of this scatter, so it is saved.
        """
        return {
            op.operands[0]
            for op in self.graph.ops
            if op.remat is None and self._scatters(op)
        }

    def _value(self, tensor: int) -> bool:
        return self.uses.value[tensor]

    def sources(self, tensor: int, region: int | None = None) -> frozenset[int]:
        """Returns the tensors from which fusions recompute a value, or the value.

        Weights and inputs of the program are no sources and have none. A sum of several
        large tensors counts as one source, as the number of sources would otherwise
        grow with depth.

        Args:
            tensor: Id of the value.
            region: Checkpointed region that limits the search for sources.
        """
        stack = [tensor]
        while stack:
            one = stack[-1]
            made_of = self._made_of(one, region)
            open_ = [t for t in made_of if (t, region) not in self._sources]
            if (one, region) in self._sources or not open_:
                self._sources[one, region] = self._find_materialized(
                    one, made_of, region
                )
                stack.pop()
            else:
                stack.extend(open_)
        return self._sources[tensor, region]

    def _made_of(self, tensor: int, region: int | None) -> tuple[int, ...]:
        """Returns the operands from which fusions recompute a value, if they do."""
        op = self.graph.ops[self.maker[tensor]] if tensor in self.maker else None
        if (
            op is None
            or op.remat != region
            or tensor in self.multiplied
            or tensor in self.masks
        ):
            return ()
        return op.operands if self._value(tensor) and self._repeats(op) else ()

    def _repeats(self, op: Op) -> bool:
        if self.compiler.repeats and op.kind == "div" and len(op.operands) == 1:
            return True  # Division by a constant is multiplication by its inverse.
        return op.reshape or op.kind in (CHEAP if self.compiler.repeats else SPREAD)

    def _find_materialized(
        self, tensor: int, made_of: tuple[int, ...], region: int | None
    ) -> frozenset[int]:
        if not self._value(tensor):
            return frozenset()
        if not made_of:
            return frozenset({tensor})
        result = frozenset[int]().union(*(self._sources[t, region] for t in made_of))
        size = self.graph.tensors[tensor].nbytes
        large = [t for t in result if self.graph.tensors[t].nbytes * SMALL > size]
        adds = self.graph.ops[self.maker[tensor]].kind in _SUMS
        return frozenset({tensor}) if adds and len(large) > 1 else result

    def _hard(self) -> set[int]:
        """Returns operands of operations that do not fuse, which are in memory."""
        hard: set[int] = set()
        for op in self.graph.ops:
            for t in op.operands if _hard(op) else ():
                hard |= self.sources(t, op.remat)
        return hard

    def _lean(self, kept: dict[int, int], region: int | None) -> dict[int, int]:
        """Returns the saved tensors, without those that are recomputed from others.

        ``kept`` has the index of each tensor's first reader.
        """
        ops = self.graph.ops

        def is_recomputed(t: int) -> bool:
            op = ops[self.maker[t]] if t in self.maker else None
            if op is None or t in self.multiplied or t in self.masks:
                return False
            if not self.compiler.repeats:
                return op.kind in SPREAD
            return op.elementwise and op.kind not in _LONG

        lean = {t: first for t, first in kept.items() if not is_recomputed(t)}
        firm = {*lean}
        for t, first in sorted(kept.items(), key=lambda pair: self.maker[pair[0]]):
            if t in lean:
                continue
            base: set[int] = set()
            for operand in ops[self.maker[t]].operands:
                base |= self.sources(operand, region)
            size = self.graph.tensors[t].nbytes
            base = {b for b in base if self.graph.tensors[b].nbytes * SMALL > size}
            if all(b in firm or b in self.hard for b in base):
                for b in base:
                    lean[b] = min(lean.get(b, first), first)
            else:
                lean[t] = first
            firm.add(t)
        return lean

    def _saved(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Returns (first reader, bytes, owner) by (tensor, copy), outside regions."""
        ops = self.graph.ops
        kept: dict[int, int] = {}
        stacked = bool(self.graph.stacked)
        for i, op in enumerate(ops):
            if stacked and op.trip > 1:
                continue
            slots = op.operands + op.results
            if op.kept:
                there = [t for t in op.results if t not in self.waiting]
                kept.update(dict.fromkeys(there, i))
            if op.remat is None:
                for slot in op.saves:
                    for t in self.sources(slots[slot]):
                        kept.setdefault(t, i)
                continue
            for t in op.operands:
                made = ops[self.maker[t]].remat if t in self.maker else None
                if made != op.remat and self._value(t) and t not in self.waiting:
                    for b in self.sources(t):
                        kept.setdefault(b, i)
        kept = self._lean(kept, None)
        home = self.homes
        result = {}
        for t, first in kept.items():
            times = ops[self.maker[t]].trip if t in self.maker else 1
            result[t, 0] = first, self._nbytes(t) * times, home.get(t, NOWHERE)
        for i, op in enumerate(ops if self.compiler.copies_kernels else ()):
            turned = op.kind == CONVOLUTION and op.remat is None
            if turned and self.graph.tensors[op.operands[0]].differentiable:
                kernel = op.operands[1]
                nbytes = self._nbytes(kernel) * op.trip
                result[kernel, -1 - i] = i, nbytes, home.get(kernel, NOWHERE)
        loop = next((s.first for s in self.spans if s.loop), 0)
        for copy, one in enumerate(self._loop_residuals(), start=1):
            at = max(self.maker.get(one.tensor, loop), loop)
            first = next((s.first for s in self.spans if s.first <= at < s.end), loop)
            result[one.tensor, copy] = (
                first,
                self._kept_bytes(one) * one.trip,
                self._kept_by(one),
            )
        return result

    def _kept_by(self, one: LoopResidual) -> int:
        shape = self.graph.tensors[one.tensor].shape
        for i, op in enumerate(self.graph.ops if one.gathered else ()):
            if op.trip > 1 and op.matmul is not None:
                for t in op.operands[:2]:
                    if self._value(t) and self.graph.tensors[t].shape == shape:
                        return i
        return self.homes.get(one.tensor, NOWHERE)

    def _loop_residuals(self) -> list[LoopResidual]:
        away = Counter(
            (self.graph.tensors[t].shape, self.graph.tensors[t].nbytes)
            for t in self.waiting
        )
        loop_residuals = []
        for one in self.graph.stacked:
            key = self.graph.tensors[one.tensor].shape, one.nbytes
            if away[key]:
                away[key] -= 1
            else:
                loop_residuals.append(one)
        return loop_residuals

    def waits(self) -> Counter[TensorEntry]:
        """Returns the values in host memory at the end of the forward pass."""
        waits: Counter[TensorEntry] = Counter()
        if not self.waiting:
            return waits
        trips = {
            t: op.trip
            for op in self.graph.ops
            for t in op.operands + op.results
            if op.remat is not None
        }
        for t, copies in self.waiting.items():
            nbytes, home = self.graph.tensors[t].nbytes, self.homes.get(t, NOWHERE)
            waits[TensorEntry(t, nbytes, home)] += copies * trips[t]
        return waits

    @functools.cached_property
    def _fetched(self) -> dict[int, list[int]]:
        result: dict[int, dict[int, None]] = {}
        for op in self.graph.ops if self.waiting else ():
            if op.remat is not None:
                slots = op.operands + op.results
                here = (t for t in slots if t in self.waiting)
                result.setdefault(op.remat, {}).update(dict.fromkeys(here))
        return {region: [*tensors] for region, tensors in result.items()}

    @functools.cached_property
    def _saved_entries(self) -> list[tuple[int, int, TensorEntry]]:
        return [
            (
                first,
                first if copy else self.maker.get(tensor, 0),
                TensorEntry(tensor, nbytes, home),
            )
            for (tensor, copy), (first, nbytes, home) in self.saved.items()
        ]

    def saved_before(self, end: int) -> Counter[TensorEntry]:
        """Returns the tensors that are saved when the backward pass reaches ``end``."""
        return Counter(
            [entry for first, _, entry in self._saved_entries if first < end]
        )

    def made_before(self, end: int) -> Counter[TensorEntry]:
        """Returns the tensors that are saved when the forward pass reaches ``end``."""
        return Counter([entry for _, made, entry in self._saved_entries if made < end])

    def gradients_before(self, span: Span) -> Counter[TensorEntry]:
        """Returns the partial gradients that are live in a span's backward pass.

        A value that is made before the span and read after it, such as a skip
        connection, has one since the backward pass of its last reader.
        """
        gradients: Counter[TensorEntry] = Counter()
        for t, last in self._last_readers.items():
            if last >= span.end and self.maker.get(t, last) < span.first:
                gradients[self._entry(t)] += 1
        return gradients

    def postponed_behind(self, span: Span) -> Counter[TensorEntry]:
        """Returns the tensors that postponed products of weights' gradients will read.

        They are residuals and gradients of the products that the backward pass has
        reached before the span. Gradients that a fusion computes inside the product do
        not count. Products in loops and in checkpointed regions are not postponed.
        """
        kept: dict[int, TensorEntry] = {}
        gradients: dict[int, TensorEntry] = {}
        for i, own, read in self._put_off:
            if i < span.end:
                continue
            gradients.update(own)
            kept.update((t, entry) for t, first, entry in read if first >= span.end)
        return Counter(kept.values()) + Counter(gradients.values())

    def _products_put_off(self) -> list[_PutOff]:
        products_put_off: list[_PutOff] = []
        for i, op in enumerate(self.graph.ops):
            if op.trip > 1 or op.remat is not None or op.matmul is None:
                continue
            data = [t for t in op.operands[:2] if not self.weight[t]]
            if len(data) != 1:
                continue
            values = {self._part_of(t) for t in op.results if self._value(t)}
            fused = values & self.fused
            gradients = [(t, self._entry(t)) for t in values - fused]
            read = {t for t in op.results if t in self.reader}
            inside = {t for t in read if self.reader[t].elementwise}
            saved = [
                (t, first, TensorEntry(t, nbytes, home))
                for t in self.sources(data[0]) | fused | inside
                for first, nbytes, home in [self.saved.get((t, 0), (0, 0, NOWHERE))]
            ]
            products_put_off.append((i, gradients, saved))
        return products_put_off

    def _part_of(self, tensor: int) -> int:
        """Returns the sum of which a value is a term, or the value itself."""
        t = tensor
        while self.readers[t] == 1:
            op = self.reader[t]
            if op.kind in _SUMS and all(
                self._value(operand) for operand in op.operands
            ):
                return op.results[0]
            if not (op.reshape or op.kind in (*_SUMS, "convert_element_type")):
                break
            t = op.results[0]
        return tensor

    def _read_last(self) -> dict[int, int]:
        """Returns each differentiable value's last reader outside loops and regions."""
        last: dict[int, int] = {}
        for i, op in enumerate(self.graph.ops):
            for t in op.operands:
                made = self.graph.ops[self.maker[t]] if t in self.maker else None
                if made is None or made.trip > 1 or made.remat is not None:
                    continue
                if self._value(t) and self.graph.tensors[t].differentiable:
                    last[t] = i
        return last

    def _fused_gradients(self) -> set[int]:
        """Returns the results of products whose gradients are never in memory.

        They are logits whose readers all end in one number per row. From these numbers
        and the logits, fusions compute the gradient inside each product that reads it.
        """
        fused_gradients: set[int] = set()
        readers: dict[int, list[Op]] = {}
        for op in reversed(self.graph.ops if self.compiler.fuses_products else ()):
            for t in op.operands:
                readers.setdefault(t, []).append(op)
            if op.matmul is not None and op.chunks == 1 and op.trip == 1:
                fused_gradients.update(
                    t for t in op.results if self._ends_in_rows(t, readers)
                )
        return fused_gradients

    def _ends_in_rows(self, tensor: int, readers: Mapping[int, list[Op]]) -> bool:
        """Returns whether all readers of a value fuse, up to reductions of its rows."""
        tensors, stack = self.graph.tensors, [tensor]
        least = tensors[tensor].size
        while stack:
            here = readers.get(stack.pop(), [])
            if not here:
                return False
            for op in here:
                if op.matmul is not None or (_hard(op) and op.kind not in LOOKUPS):
                    return False
                stack += (r for r in op.results if tensors[r].size * SMALL > least)
        return True

    def ahead(self, span: Span) -> Iterator[dict[TensorEntry, float]]:
        """Yields the temporaries of the forward pass: results that cannot fuse."""
        kept = {tensor for tensor, _ in self.saved}
        rows = []
        for op in self.graph.ops[span.first : span.end]:
            if _hard(op):
                there = [
                    t
                    for t in op.operands
                    if self._value(t) and not self._written_as(t, kept)
                ]
                rows.append({self._entry(t): 1.0 for t in there})
            rows.append({self._entry(t): n for t, n in self._masked(op)[:1]})
        yield from _undominated([row for row in rows if row] or rows[:1])

    def _written_as(self, tensor: int, kept: set[int]) -> bool:
        """Returns whether a tensor, or a form of it that is not narrower, is saved.

        The product that computes the saved tensor writes it in this form.
        """
        nbytes, t = self.graph.tensors[tensor].nbytes, tensor
        while t not in kept or self.graph.tensors[t].nbytes < nbytes:
            op = self.graph.ops[self.maker[t]] if t in self.maker else None
            if op is None or not self._repeats(op):
                return False
            large = [
                operand
                for operand in op.operands
                if self.graph.tensors[operand].size == self.graph.tensors[t].size
            ]
            if len(large) != 1 or self.readers[large[0]] > 1:
                return False
            t = large[0]
        return True

    def behind(self, span: Span) -> tuple[Works, Works]:
        """Returns the temporaries of each product's backward pass.

        Returns:
            Temporaries while the operations after a product run backward, and
            temporaries while the product's own gradients are computed.
        """
        before: dict[Any, dict[TensorEntry, float]] = {}
        making: dict[Any, dict[TensorEntry, float]] = {}
        inside: dict[int | None, dict[int, int]] = {}
        slice_of, fetched, few = self._slice(span), self._fetched, self.few_samples
        for i in range(span.first, span.end):
            op = self.graph.ops[i]
            if op.remat is not None:
                if op.remat not in inside:
                    inside[op.remat] = self._rebuilt(op.remat)
            works = few.working(i) if few.convolves else None
            chooses = self._scatters(op)
            if op.matmul is None and not chooses and not works:
                continue
            held: dict[TensorEntry, float] = {**Counter(slice_of)}
            if works:
                _hold(held, works.items())
            if op.remat is not None:
                there = fetched.get(op.remat, ())
                _hold(held, ((self._entry(t), FETCHED) for t in there))
                kept = inside[op.remat].items()
                _hold(held, ((self._entry(t), 1) for t, n in kept if n <= i))
                if few.kept:
                    _hold(held, few.before(i + 1, op.remat).items())
            if op.matmul is None:
                # Gradients of the windows' operands and results.
                read = (*op.operands, *op.results) if chooses else ()
                _hold(held, ((self._entry(t), 1) for t in read))
                before[frozenset(held.items())] = held
                continue
            if op.kind == ATTENTION:
                attended = self._attended(i, span)
                _hold(held, ((self._entry(t), n) for t, n in attended))
                before[frozenset(held.items())] = held
                continue
            masked = self._masked(op)
            _hold(held, ((self._entry(t), int(n)) for t, n in masked))
            for t in op.results:
                if self._value(t):
                    # A chunk's logits are recomputed next to both gradients.
                    times = _WORKING + (op.chunks > 1)
                    if t in self.fused:
                        first, _, _ = self.saved.get((t, 0), (span.end, 0, 0))
                        times = 1.0 * (first >= span.end)
                    made = times if op.chunks > 1 else min(times, 1.0)
                    _add(before, held, self._entry(t), times * self._share(t))
                    _add(making, held, self._entry(t), made * self._share(t))
            for t in op.operands[:2]:
                if self._value(t):
                    _add(making, held, self._entry(t), _WORKING * self._share(t))
        return [*_undominated([*before.values()])], [*_undominated([*making.values()])]

    def _masked(self, op: Op) -> list[tuple[int, float]]:
        """Returns the masked values of a grouped product, with their numbers of copies.

        A product of all rows with the matrices of all groups needs a masked copy of the
        rows for each group. The backward pass also needs such copies of the results'
        gradients.
        """
        if op.kind not in RAGGED or self.compiler.groups_rows:
            return []
        groups = float(self.graph.tensors[op.operands[2]].shape[-1])
        return [(t, groups) for t in (op.operands[0], *op.results) if self._value(t)]

    def _attended(self, at: int, span: Span) -> Iterator[tuple[int, float]]:
        """Yields the temporaries of blocked attention's backward pass.

        They are float32 sums of the gradients of queries, keys and values, and the
        gradient of the output, each with a factor on the tensor's bytes. In a loop,
        residuals are also sliced out of their stacks, or recomputed. Compilers postpone
        gradients of weights, as nothing else in the loop needs them.
        """
        op = self.graph.ops[at]
        given = op.operands[:3]
        for t in dict.fromkeys(given):
            elements = math.prod(self.graph.tensors[t].shape)
            sums = 4 * elements * given.count(t) / self._nbytes(t)
            yield t, sums + (span.loop and self._value(t))
        for t in op.results:
            yield t, 1.0
        for t in self._deferred(at, span) if span.loop else ():
            yield t, 1.0

    def _deferred(self, at: int, span: Span) -> dict[int, None]:
        """Returns the tensors that postponed products of weights' gradients read.

        Such products read their operands and the gradients of their results. They come
        after operation ``at``, and other products of the loop read their results.
        """
        ops, result = self.graph.ops, dict[int, None]()
        for j in range(at + 1, span.end):
            read = [t for t in ops[j].operands[:2] if self._value(t)]
            makers = {
                self.maker.get(source, NOWHERE)
                for t in (read if ops[j].matmul is not None else ())
                for source in self.sources(t, ops[j].remat)
            }
            for i in sorted(makers):
                if i > at and ops[i].matmul is not None and ops[i].kind != ATTENTION:
                    data = [t for t in ops[i].operands[:2] if self._value(t)]
                    result |= dict.fromkeys((*data, *ops[i].results))
        return result

    def _scatters(self, op: Op) -> bool:
        chooses = op.kind in CHOOSING_WINDOWS
        return chooses and self.graph.tensors[op.results[0]].differentiable

    def _share(self, tensor: int) -> float:
        """Returns the size factor of a gradient that two products read.

        One product may read it in a dtype of half the width.
        """
        wide = self.graph.tensors[tensor].dtype == "float32"
        return 0.75 if self.halves and wide and not self.narrow[tensor] else 1.0

    def _entry(self, tensor: int) -> TensorEntry:
        entry = self._entries.get(tensor)
        if entry is None:
            home = self.homes.get(tensor, NOWHERE)
            entry = self._entries[tensor] = TensorEntry(
                tensor, self._nbytes(tensor), home
            )
        return entry

    def _nbytes(self, tensor: int) -> int:
        made = self.maker.get(tensor)
        chunks = 1 if made is None else self._chunks(made, tensor)
        nbytes = self.graph.tensors[tensor].nbytes * self._widened(tensor)
        return nbytes // (1 + self.narrow[tensor]) // chunks

    def _widened(self, tensor: int) -> int:
        narrow = self.graph.tensors[tensor].dtype in ("bfloat16", "float16")
        return 2 if narrow and self.compiler.widens else 1

    def _chunks(self, maker: int, tensor: int) -> int:
        op = self.graph.ops[maker]
        return 1 if tensor in self.leaving else op.chunks

    def _kept_bytes(self, one: LoopResidual) -> int:
        nbytes = one.nbytes * self._widened(one.tensor)
        return nbytes // (1 + (self.halves and one.multiplied))

    def _slice(self, span: Span) -> list[TensorEntry]:
        """Returns one iteration's slice of the largest residual of a loop."""
        if not span.loop or not self._loop_residuals():
            return []
        largest = max(self._loop_residuals(), key=lambda s: s.nbytes)
        home = self.homes.get(largest.tensor, NOWHERE)
        return [TensorEntry(largest.tensor, self._kept_bytes(largest), home)]

    def _rebuilt(self, region: int) -> dict[int, int]:
        """Returns the first reader of each residual that a region recomputes."""
        kept: dict[int, int] = {}
        for i in self.uses.regions.get(region, ()):
            op = self.graph.ops[i]
            slots = op.operands + op.results
            for slot in op.saves:
                for t in self.sources(slots[slot], region):
                    maker = self.graph.ops[self.maker[t]] if t in self.maker else op
                    if t in self.maker and maker.remat == region and not maker.kept:
                        kept.setdefault(t, i)
        return self._lean(kept, region)

    def written_until(self) -> dict[int, int]:
        """Returns the operation that reads each product's result in another form.

        An example is the lookup of labels, which reads float32 logits. The product
        writes this form too, so its weight stays in memory until then.
        """
        written_until: dict[int, int] = {}
        for j, op in enumerate(self.graph.ops):
            if not _hard(op) or op.trip > 1:
                continue
            for t in op.operands:
                for source in self.sources(t, op.remat) - {t}:
                    i = self.maker.get(source, j)
                    if self.graph.ops[i].matmul is not None and i < j:
                        written_until[i] = j
        return written_until


def _hard(op: Op) -> bool:
    fuses = op.elementwise or op.reshape or op.kind.startswith("reduce")
    return not (fuses or op.matmul is not None or op.kind in LOOPS)


def _add(
    rows: dict[Any, dict[TensorEntry, float]],
    held: Mapping[TensorEntry, float],
    entry: TensorEntry,
    times: float,
) -> None:
    row = {**held, entry: held.get(entry, 0.0) + times}
    rows[frozenset(row.items())] = row


def _hold(
    held: dict[TensorEntry, float], more: Iterable[tuple[TensorEntry, float]]
) -> None:
    for entry, times in more:
        held[entry] = held.get(entry, 0) + times


def _undominated(
    rows: list[dict[TensorEntry, float]],
) -> Iterator[dict[TensorEntry, float]]:
    """Yields the rows that no other row dominates, and the first of equal rows."""
    holding: dict[TensorEntry, list[int]] = {}
    for i, row in enumerate(rows):
        for entry in row:
            holding.setdefault(entry, []).append(i)
    for i, row in enumerate(rows):
        places = (holding[entry] for entry, n in row.items() if n > 0)
        near = min(places, key=len, default=range(len(rows)))
        if not any(
            all(rows[j].get(e, 0) >= n for e, n in row.items())
            for j in near
            if j != i and (j < i or rows[j] != row)
        ):
            yield row
