"""Finds how reported values are combined, as far as the program shows it.

The trace has the names of the values, and ``sample_dims`` the position of their rows.
``batch_combination`` finds the form of a value from two traces of a loss. This module
chooses between rows and form, and describes values that cannot be combined.

It also finds the statistics: operations on several samples whose result reaches the
loss or the state. It follows the batch dimension, and values reduced over it, forward
through the factors of a graph's operations. Values that depend on a statistic, such as
those after batch normalisation, still have a row for each sample, though each
micro-batch computes its own statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.adapters.leaves import dotted
from whalejax.capture.reported_values.batch_combination import (
    HOWS,
    MADE_OTHERWISE,
    ValueForms,
)
from whalejax.capture.reported_values.paired_traces import (
    Pairing,
    Trace,
    avals,
    power_of,
)
from whalejax.capture.reported_values.sample_dims import (
    SampleRows,
    UnknownCombination,
    reported_rows,
    rows_of,
)
from whalejax.capture.rules.behaviour import Value
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.model.graph import Graph, Op
from whalejax.user_code.losses import ReportedValue, is_merged


Sources = frozenset[int]
"""Indices of the operations that reduced over the batch."""

_NONE: Final[Sources] = frozenset()


def statistics(graph: Graph, loss: Sequence[int], state: Sequence[int]) -> set[int]:
    """Returns indices of operations whose statistics of the samples reach the loss.

    Args:
        graph: Graph of the loss.
        loss: Tensors of the loss's results.
        state: Tensors of the model's state after the step.
    """
    follow = _Follow(graph, [*loss, *state])
    follow.run()
    for tensor in state:
        follow.statistics |= follow.reduced.get(tensor, _NONE)
    return follow.statistics


class _Follow:
    """Follows the batch dimension, and values that were reduced over it.

    Attributes:
        statistics: Operations that mix samples and keep their dimension, or whose
            reduced result is combined with the samples again.
        reduced: Operations that reduced each tensor over the batch.
    """

    def __init__(self, graph: Graph, roots: Iterable[int]) -> None:
        self.graph = graph
        self.statistics: set[int] = set()
        self.reduced: dict[int, Sources] = {}
        self._matters = _reaching(graph, roots)
        self._batch: dict[int, set[int]] = {}
        for tensor, dim in graph.batch_dims:
            self._batch.setdefault(tensor, set()).add(dim)

    def run(self) -> None:
        for index, op in enumerate(self.graph.ops):
            mixes, across = self._spread(op)
            if not any(t in self._matters for t in op.results):
                continue
            sources = _NONE.union(*(self.reduced.get(t, _NONE) for t in op.operands))
            if not any(self._batch.get(t) for t in op.results):
                sources |= {index} if mixes else _NONE
                self.reduced.update(dict.fromkeys(op.results, sources))
            elif mixes:
                self.statistics |= {index} if across else _NONE
            else:
                self.statistics |= sources

    def _spread(self, op: Op) -> tuple[bool, bool]:
        """Passes the batch dimension on; returns whether samples are mixed, and kept.

        Samples are kept if the operation mixes them along a batch dimension that it
        needs unsharded, as a running sum does.
        """
        slots = op.operands + op.results
        count = len(op.operands)
        mixes = across = False
        for factor in op.factors:
            if not any(
                s < count and d in self._batch.get(slots[s], ())
                for s, d in factor.members
            ):
                continue
            onward = [(slots[s], d) for s, d in factor.members if s >= count]
            for tensor, dim in onward:
                self._batch.setdefault(tensor, set()).add(dim)
            across |= factor.needs_all
            mixes |= across or not onward
        if op.reshape:
            self._reshape(op)
        return mixes and bool(op.results), across

    def _reshape(self, op: Op) -> None:
        """Gives the batch to the dimension of the result that has its stride."""
        before = self.graph.tensors[op.operands[0]].shape
        after = self.graph.tensors[op.results[0]].shape
        for dim in self._batch.get(op.operands[0], ()):
            front = 1
            for size in before[:dim]:
                front *= size
            reached = 1
            for out, size in enumerate(after):
                reached *= size
                if reached > front and size > 1:
                    self._batch.setdefault(op.results[0], set()).add(out)
                    break


def _reaching(graph: Graph, roots: Iterable[int]) -> set[int]:
    wanted = set(roots)
    for _ in range(2):  # What a loop's carry needs is known only after its body.
        for op in reversed(graph.ops):
            if any(t in wanted for t in op.results):
                wanted.update(op.operands)
    return wanted


Said = SampleRows | UnknownCombination | str | None
"""Position of a value's rows, the name of another combination (one of ``HOWS``), or why
the combination is unknown."""


def judged(
    small: Trace,
    large: Trace,
    wanted: Sequence[int],
    changing: Collection[int],
    state: Sequence[int],
) -> dict[int, Said]:
    """Returns the combination of each result, by its index.

    Args:
        small: Trace of the loss with fewer samples.
        large: Trace of the loss with more samples.
        wanted: Indices of the results.
        changing: Inputs that every micro-batch changes, and random keys.
        state: Indices of the results that are the model's state after the step.
    """
    times = large.graph.batch_size // small.graph.batch_size
    pairing = Pairing(small=small, large=large, times=times)
    pairing.run([*range(2), *wanted])  # Reported means may use the loss's weight.
    loss, after = (_tensors(small, numbers) for numbers in (range(2), state))
    parts = ValueForms(
        pairing=pairing,
        rows=frozenset(rows_of(small.graph)),
        changing=changing,
        statistics=statistics(small.graph, [*loss.values()], [*after.values()]),
    )
    parts.run()
    tensors = _tensors(small, wanted)
    shaped = [n for n, t in tensors.items() if small.graph.tensors[t].shape]
    rows = reported_rows(small.graph, [tensors[n] for n in shaped])
    where: Mapping[int, Any] = dict(zip(shaped, rows, strict=True))
    result: dict[int, Said] = {}
    for n in wanted:
        if n not in tensors:
            result[n] = _scalar(pairing, n)
            continue
        aval = avals(small)[n]
        inexact = _compat.is_inexact(aval.dtype)
        said: SampleRows | str = MADE_OTHERWISE
        if n not in pairing.lost:
            said = _with_row_axis(
                parts.combination_rule(tensors[n], inexact=inexact), where.get(n)
            )
        if isinstance(said, str) and said not in HOWS:
            result[n] = UnknownCombination(shape=aval.shape, why=said)
        else:
            result[n] = said
    return result


def _with_row_axis(
    said: str, stands: SampleRows | UnknownCombination | None
) -> SampleRows | str:
    if said == "rows" and isinstance(stands, SampleRows):
        return stands
    if said == "rows":
        unknown = "has rows whose position is unknown"
        return stands.why if isinstance(stands, UnknownCombination) else unknown
    if said not in HOWS and isinstance(stands, UnknownCombination):
        return stands.why
    return said


def _tensors(trace: Trace, numbers: Sequence[int]) -> dict[int, int]:
    tensors: dict[int, Value] = {n: trace.results[n] for n in numbers}
    return {n: t for n, t in tensors.items() if t is not None}


def _scalar(pairing: Pairing, number: int) -> Said:
    a, b = (values[number] for values in pairing.literals)
    unclear = UnknownCombination(shape=(), why="depends on the number of samples")
    try:
        power = power_of(a, b, pairing.times)
    except (ValueError, TypeError):
        return unclear
    hows = {0: "same", None: "same", 1: "sum"}
    return hows.get(power, unclear)


Told = tuple[tuple[str, UnknownCombination], ...]
"""Values that cannot be combined, with their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The values that a loss reports.

    Attributes:
        out_tree: Structure of ``(total, weight, metrics, new_rest)``. A value that is
            not combined by a mean is a ``ReportedValue`` with its combination.
        unclear: Values that cannot be combined.
        averaged: Floating-point values that are averaged over micro-batches, though
            the average may differ from the value of the whole batch.
    """

    out_tree: Any
    unclear: Told = ()
    averaged: Told = ()

    def mismatch_messages(self) -> list[str]:
        """Returns messages for values that may differ from the whole batch's."""
        return [_words(*one) for one in (*self.unclear, *self.averaged)]


def reports(
    trace: Trace,
    out_tree: Any,
    again: Callable[[int], Trace],
    changing: Collection[int],
) -> Reports:
    """Finds how reported values are combined from values of micro-batches.

    Args:
        trace: Trace of the loss.
        out_tree: Structure of ``(total, weight, metrics, new_rest)``.
        again: Function that traces the loss with a number of samples.
        changing: Inputs that every micro-batch changes, and random keys.
    """
    _, _, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))
    wanted = [*_open_leaves(metrics).values()]
    if not wanted:
        return Reports(out_tree=out_tree)
    graph = trace.graph
    whole = graph.batch_size * graph.num_micro_batches
    try:
        small = trace if graph.batch_size > 1 else again(2)
        least = small.graph.batch_size
        large = again(whole if whole > least else 2 * least)
        wide = {t.graph.batch_size: t for t in (trace, small, large)}[whole]
    except Exception:  # The loss may accept only this batch.
        return _with(trace, out_tree, _alone(trace, wanted))
    result = judged(small, large, wanted, changing, jax.tree.leaves(rest))
    for n, (before, after) in enumerate(zip(avals(trace), avals(wide), strict=True)):
        if n in result and not _is_batch_shape(
            result[n], before.shape, after.shape, whole
        ):
            why = f"has the shape {after.shape} of the whole batch"
            result[n] = UnknownCombination(shape=before.shape, why=why)
    return _with(trace, out_tree, result)


def _is_batch_shape(
    said: Said, before: tuple[int, ...], after: tuple[int, ...], whole: int
) -> bool:
    if not isinstance(said, SampleRows):
        return isinstance(said, UnknownCombination) or before == after
    rows = said.outer * whole * said.inner
    return (*before[: said.axis], rows, *before[said.axis + 1 :]) == after


def _alone(trace: Trace, wanted: Sequence[int]) -> dict[int, Said]:
    result: dict[int, Said] = {
        n: UnknownCombination(shape=avals(trace)[n].shape, why=_ONE_SIZE)
        for n in wanted
    }
    tensors = {n: trace.results[n] for n in wanted if avals(trace)[n].shape}
    shaped = {n: t for n, t in tensors.items() if t is not None}
    if trace.graph.batch_size > 1:  # A dimension of size 1 need not be the samples.
        rows = reported_rows(trace.graph, [*shaped.values()])
        places = zip(shaped, rows, strict=True)
        result.update((n, said) for n, said in places if isinstance(said, SampleRows))
    return result


_ONE_SIZE: Final = (
    "is of a loss that cannot be traced with another number of samples, so its "
    "computation is unclear"
)


def check_keys(trace: Trace, out_tree: Any) -> None:
    """Refuses random keys among reported values, as they cannot be combined.

    Args:
        trace: Trace of the loss.
        out_tree: Structure of ``(total, weight, metrics, new_rest)``.

    Raises:
        WhaleError: A value is a random key. The message lists all, with the remedy.
    """
    metrics = out_tree.unflatten(range(out_tree.num_leaves))[2]
    problems = Problems()
    for path, n in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        if _compat.is_key_dtype(avals(trace)[n].dtype):
            problems.add(f"metrics[{dotted(path)!r}] is a random key")
    problems.raise_if_any(
        WhaleError,
        title="loss_fn reports random keys. Report jax.random.key_data(key) "
        "as wh.Aux(samples={...}) if it has a row for each sample, or leave it out",
    )


def undivided(out_tree: Any) -> Any:
    """Returns the structure of the values of a batch that is not cut.

    Args:
        out_tree: Structure of ``(total, weight, metrics, new_rest)``.

    Returns:
        The structure, in which every value stays as reported.
    """
    total, weight, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))

    def as_reported(leaf: Any) -> Any:
        return leaf if isinstance(leaf, ReportedValue) else ReportedValue(leaf, "same")

    metrics = jax.tree.map(as_reported, metrics, is_leaf=is_merged)
    return jax.tree.structure((total, weight, metrics, rest))


def _with(trace: Trace, out_tree: Any, found: Mapping[int, Said]) -> Reports:
    total, weight, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))
    # The loss's weight is the number of samples, unless the user gave it.
    plain = ("mean",) if trace.graph.weighted else ("mean", "average")

    def as_reported(leaf: Any) -> Any:
        said = None if isinstance(leaf, ReportedValue) else found.get(leaf)
        if isinstance(said, SampleRows):
            axis, outer, inner = said.axis, said.outer, said.inner
            return ReportedValue(leaf, "rows", axis=axis, outer=outer, inner=inner)
        own = isinstance(said, str) and said not in plain
        return ReportedValue(leaf, str(said)) if own else leaf

    unclear: list[tuple[str, UnknownCombination]] = []
    averaged: list[tuple[str, UnknownCombination]] = []
    for name, n in _open_leaves(metrics).items():
        said, aval = found.get(n), avals(trace)[n]
        if isinstance(said, UnknownCombination):
            number = not aval.shape and _compat.is_inexact(aval.dtype)
            (averaged if number else unclear).append((name, said))
    metrics = jax.tree.map(as_reported, metrics, is_leaf=is_merged)
    return Reports(
        out_tree=jax.tree.structure((total, weight, metrics, rest)),
        unclear=tuple(unclear),
        averaged=tuple(averaged),
    )


def check_clear(
    unclear: Told,
    size: int,
    *,
    chosen: int | None = None,
    combine: str | None = None,
) -> None:
    """Refuses reported values of several micro-batches that cannot be combined.

    Args:
        unclear: Values without a known combination, with their names.
        size: Number of samples of a micro-batch.
        chosen: Number of micro-batches if the planner chose it; default None.
        combine: Combination of gradients over ranks, if each rank reports values of
            micro-batches of its own; default None.

    Raises:
        WhaleError: Some values cannot be combined. The message lists all, with the
            remedy.
    """
    problems = Problems()
    for name, value in unclear:
        problems.add(_words(name, value))
    whole = "num_micro_batches=1" if combine is None else 'combine="mean"'
    planner = f"the planner chose num_micro_batches={chosen}, and " if chosen else ""
    problems.raise_if_any(
        WhaleError,
        title=f"{planner}micro-batches of {count_text(size, 'sample')} report what "
        "cannot be put together. Give what has a row for each sample as "
        "wh.Aux(samples={...}), what is to be added up as sums={...} and what is to be "
        f"averaged as means={{...}}, or plan with {whole}",
    )


def _words(name: str, value: UnknownCombination) -> str:
    return f"{name} of shape {value.shape} {value.why}"


def _open_leaves(metrics: Any) -> dict[str, int]:
    leaves = jax.tree_util.tree_flatten_with_path(metrics, is_leaf=is_merged)[0]
    return {
        f"metrics[{dotted(path)!r}]": leaf
        for path, leaf in leaves
        if not isinstance(leaf, ReportedValue)
    }
