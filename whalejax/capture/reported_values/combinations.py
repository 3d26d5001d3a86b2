"""Finds how reported values are combined, as far as the program shows it.

The trace knows the values by name, and ``sample_dims`` the position of their rows. This
module connects both, and describes values that cannot be combined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.adapters.leaves import dotted
from whalejax.capture.reported_values.paired_traces import Trace, avals
from whalejax.capture.reported_values.sample_dims import (
    SampleRows,
    UnknownCombination,
    reported_rows,
)
from whalejax.capture.reported_values.trace_comparison import Said, judged
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.user_code.losses import ReportedValue, is_merged


Told = tuple[tuple[str, UnknownCombination], ...]
"""Values that cannot be combined, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The values that a loss reports.

    Attributes:
        out_tree: Structure of ``(total, weight, metrics, new_rest)``; each value in it
            that is not a mean is a ``ReportedValue`` with its combination.
        unclear: Values that cannot be combined.
        averaged: Floating-point values that are averaged over micro-batches, though the
            mean is not known to be that of the whole batch.
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
        again: Traces the loss with another number of samples.
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
    """Returns combinations from one trace of a loss that accepts no other size."""
    result: dict[int, Said] = {
        n: UnknownCombination(shape=avals(trace)[n].shape, why=_ONE_SIZE)
        for n in wanted
    }
    tensors = {n: trace.results[n] for n in wanted if avals(trace)[n].shape}
    shaped = {n: t for n, t in tensors.items() if t is not None}
    if trace.graph.batch_size > 1:  # Samples are not recognisable at size 1.
        rows = reported_rows(trace.graph, [*shaped.values()])
        places = zip(shaped, rows, strict=True)
        result.update((n, said) for n, said in places if isinstance(said, SampleRows))
    return result


_ONE_SIZE: Final = (
    "is of a loss that cannot be traced with another number of samples to see what it "
    "is made of"
)


def check_keys(trace: Trace, out_tree: Any) -> None:
    """Refuses random keys among reported values, as they cannot be combined.

    Args:
        trace: Trace of the loss.
        out_tree: Structure of ``(total, weight, metrics, new_rest)``.

    Raises:
        WhaleError: A value is a random key; lists all, with the remedy.
    """
    metrics = out_tree.unflatten(range(out_tree.num_leaves))[2]
    problems = Problems()
    for path, n in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        if _compat.is_key_dtype(avals(trace)[n].dtype):
            problems.add(f"metrics[{dotted(path)!r}] is a random key")
    problems.raise_if_any(
        WhaleError,
        title="loss_fn reports what is no number. Report jax.random.key_data(key) "
        "as wh.Aux(samples={...}) if it has a row for each sample, or leave it out",
    )


def undivided(out_tree: Any) -> Any:
    """Returns the structure of the values of an uncut batch: all as reported.

    Args:
        out_tree: Structure of ``(total, weight, metrics, new_rest)``.
    """
    total, weight, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))

    def as_reported(leaf: Any) -> Any:
        return leaf if isinstance(leaf, ReportedValue) else ReportedValue(leaf, "same")

    metrics = jax.tree.map(as_reported, metrics, is_leaf=is_merged)
    return jax.tree.structure((total, weight, metrics, rest))


def _with(trace: Trace, out_tree: Any, found: Mapping[int, Said]) -> Reports:
    """Returns reports with the combinations that were found, by index of the result."""
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
        unclear: Values without a known combination, by name.
        size: Number of samples of a micro-batch.
        chosen: Number of micro-batches that the planner chose, if any.
        combine: Combination over ranks that have micro-batches of their own, if any.

    Raises:
        WhaleError: Some values cannot be combined; lists all, with the remedy.
    """
    problems = Problems()
    for name, value in unclear:
        problems.add(_words(name, value))
    whole = "num_micro_batches=1" if combine is None else 'combine="mean"'
    planner = f"the planner chose num_micro_batches={chosen}, and " if chosen else ""
    problems.raise_if_any(
        WhaleError,
        title=f"{planner}micro-batches of {size} sample{'s' * (size > 1)} report what "
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
