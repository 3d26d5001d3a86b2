"""How the values that a loss reports are put together, as far as its program shows it.

It stands between the trace, which knows the values by name, and ``samples``, which
knows where their rows are; and it says in words what cannot be put together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from whalejax import _compat
from whalejax.adapters_leaves import dotted
from whalejax.capture.judged import Said, judged
from whalejax.capture.paired import Trace, shapes_of
from whalejax.capture.samples import Rows, Unclear, reported_rows
from whalejax.losses import Merged
from whalejax.meshes.problems import Problems, WhaleError
from whalejax.planner.graph import Graph


Told = tuple[tuple[str, Unclear], ...]
"""What cannot be put together, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The values that a loss reports.

    Attributes:
        out_tree: structure of ``(total, weight, metrics, new_rest)`` in which a value
            is a ``Merged`` that says how it is put together, unless it is a mean.
        unclear: values of which no parts can be put together.
    """

    out_tree: Any
    unclear: Told


def reports(
    trace: Trace,
    out_tree: Any,
    again: Callable[[int], Trace],
    changing: Collection[int],
) -> Reports:
    """Find out how reported values are put together of values of micro-batches.

    Args:
        trace: of the loss.
        out_tree: structure of ``(total, weight, metrics, new_rest)``.
        again: traces the loss with another number of samples.
        changing: inputs that every micro-batch changes, and random keys.
    """
    _, _, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))
    named = _open_leaves(metrics)
    if not named:
        return Reports(out_tree=out_tree, unclear=())
    graph = trace.graph
    whole = graph.batch_size * graph.num_micro_batches
    try:
        small = trace if graph.batch_size > 1 else again(2)
        least = small.graph.batch_size
        large = again(whole if whole > least else 2 * least)
        wide = {t.graph.batch_size: t for t in (trace, small, large)}[whole]
    except Exception:  # Of the loss itself, which may take this batch only.
        if graph.num_micro_batches > 1:
            return _rows_alone(trace, out_tree, again)
        return Reports(out_tree=out_tree, unclear=_untold(trace, named))
    state = jax.tree.leaves(rest)
    found = judged(small, large, [*named.values()], changing, state)
    for n, (before, after) in enumerate(
        zip(shapes_of(trace), shapes_of(wide), strict=True)
    ):
        if n in found and not _scaled(found[n], before, after, whole):
            why = f"has the shape {after} of the whole batch"
            found[n] = Unclear(shape=before, why=why)

    return _with(out_tree, found, weighted=graph.weighted)


def _scaled(
    said: Said, before: tuple[int, ...], after: tuple[int, ...], whole: int
) -> bool:
    """Whether a shape is that of the whole batch as parts give it."""
    if not isinstance(said, Rows):
        return isinstance(said, Unclear) or before == after
    rows = said.outer * whole * said.inner
    return (*before[: said.axis], rows, *before[said.axis + 1 :]) == after


def check_keys(program: Any, out_tree: Any) -> None:
    """Refuse random keys among what a loss reports, of which there is no number.

    Args:
        program: the traced loss.
        out_tree: structure of ``(total, weight, metrics, new_rest)``.

    Raises:
        WhaleError: which are, and what to do.
    """
    avals = [atom.aval for atom in _compat.open_jaxpr(program)[0].outvars]
    metrics = out_tree.unflatten(range(out_tree.num_leaves))[2]
    problems = Problems()
    for path, n in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        if _compat.is_key_dtype(avals[n].dtype):
            problems.add(f"metrics[{dotted(path)!r}] is a random key")
    problems.raise_if_any(
        WhaleError,
        title="loss_fn reports what is no number. Report jax.random.key_data(key) "
        "as wh.Aux(samples={...}) if it has a row for each sample, or leave it out",
    )


def undivided(out_tree: Any) -> Any:
    """The structure of what is reported of a batch that is not cut: all as it is.

    Args:
        out_tree: structure of ``(total, weight, metrics, new_rest)``.
    """
    total, weight, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))

    def merged(leaf: Any) -> Any:
        return leaf if isinstance(leaf, Merged) else Merged(leaf, "same")

    metrics = jax.tree.map(merged, metrics, is_leaf=_is_merged)
    return jax.tree.structure((total, weight, metrics, rest))


def _rows_alone(trace: Trace, out_tree: Any, again: Callable[[int], Trace]) -> Reports:
    """The same as ``reports`` where the loss takes no whole batch."""
    graph, results = trace.graph, trace.results
    named = _open_leaves(out_tree.unflatten(range(len(results)))[2])
    if not any(_has_shape(graph, results[n]) for n in named.values()):
        return Reports(out_tree=out_tree, unclear=())
    if graph.batch_size == 1:  # Dimensions of size 1 are in no operation's factors.
        try:
            trace = again(2)
            graph, results = trace.graph, trace.results
        except Exception:  # Of the loss itself, which may take one sample only.
            unclear = _untold(trace, named, shaped=True)
            return Reports(out_tree=out_tree, unclear=unclear)
    where = {n: results[n] for n in named.values() if _has_shape(graph, results[n])}
    values = [v for v in where.values() if v is not None]
    found = dict(zip(where, reported_rows(graph, values), strict=True))
    return _with(out_tree, found)


def _with(
    out_tree: Any, found: Mapping[int, Said], *, weighted: bool = False
) -> Reports:
    """Reports that are put together as was found.

    Args:
        out_tree: structure of ``(total, weight, metrics, new_rest)``.
        found: by number of the result.
        weighted: the loss's weights are no numbers of samples.
    """
    total, weight, metrics, rest = out_tree.unflatten(range(out_tree.num_leaves))

    def merged(leaf: Any) -> Any:
        said = None if isinstance(leaf, Merged) else found.get(leaf)
        if isinstance(said, Rows):
            axis, outer, inner = said.axis, said.outer, said.inner
            return Merged(leaf, "rows", axis=axis, outer=outer, inner=inner)
        own = isinstance(said, str) and said in ("sum", "same", "average")
        if not own or (said == "average" and not weighted):
            return leaf
        return Merged(leaf, str(said))

    unclear = [(name, found.get(n)) for name, n in _open_leaves(metrics).items()]
    metrics = jax.tree.map(merged, metrics, is_leaf=_is_merged)
    return Reports(
        out_tree=jax.tree.structure((total, weight, metrics, rest)),
        unclear=tuple((name, x) for name, x in unclear if isinstance(x, Unclear)),
    )


def check_clear(
    unclear: Told, size: int, *, traced: int | None = None, chosen: int | None = None
) -> None:
    """Refuse what several micro-batches report and cannot be put together.

    Args:
        unclear: by name.
        size: samples of a micro-batch.
        traced: of the one that was traced, if another.
        chosen: how many micro-batches the planner chose, if it did.

    Raises:
        WhaleError: every such value, and what to do.
    """
    problems = Problems()
    for name, value in unclear:
        if not value.sizes or {size, traced or size}.intersection(value.sizes):
            problems.add(_words(name, value))
    planner = f"the planner chose num_micro_batches={chosen}, and " if chosen else ""
    problems.raise_if_any(
        WhaleError,
        title=f"{planner}micro-batches of {size} sample{'s' * (size > 1)} report what "
        "cannot be put together. Give what has a row for each sample as "
        "wh.Aux(samples={...}), what is to be added up as sums={...} and what is to be "
        "averaged as means={...}, or plan with num_micro_batches=1",
    )


def _words(name: str, value: Unclear) -> str:
    return f"{name} of shape {value.shape} {value.why}"


def told_words(unclear: Told) -> list[str]:
    """What is unclear whatever the micro-batches, in words."""
    return [_words(name, value) for name, value in unclear if not value.sizes]


def _open_leaves(metrics: Any) -> dict[str, int]:
    """Numbers of the results whose merging the user has not said, by name."""
    leaves = jax.tree_util.tree_flatten_with_path(metrics, is_leaf=_is_merged)[0]
    return {
        f"metrics[{dotted(path)!r}]": leaf
        for path, leaf in leaves
        if not isinstance(leaf, Merged)
    }


def _untold(trace: Trace, named: Mapping[str, int], *, shaped: bool = False) -> Told:
    """Every value, or all with a shape, where the loss takes this batch only."""
    count = "two samples" if shaped else "another number of samples"
    why = f"is of a loss that cannot be traced with {count} to see its rows"
    shapes = {n: shape for n, shape in enumerate(shapes_of(trace))}
    return tuple(
        (name, Unclear(shape=shapes[n], why=why))
        for name, n in named.items()
        if shapes[n] or not shaped
    )


def _is_merged(x: Any) -> bool:
    return isinstance(x, Merged)


def _has_shape(graph: Graph, value: int | None) -> bool:
    return value is not None and bool(graph.tensors[value].shape)
