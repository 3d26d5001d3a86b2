"""How the values that a loss reports are put together, as far as its program shows it.

It stands between the trace, which knows the values by name, and ``sample_dims``, which
knows where their rows are; and it says in words what cannot be put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from whalejax.adapters.leaves import dotted
from whalejax.api.losses import Merged
from whalejax.capture.drafts import Value
from whalejax.capture.reported.sample_dims import Rows, Unclear, reported_rows
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.model.graph import Graph


Told = tuple[tuple[str, Unclear], ...]
"""What cannot be put together, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The values that a loss reports.

    Attributes:
        out_tree: structure of ``(total, weight, metrics, new_rest)`` in which every
            value with rows is a ``Merged``.
        unclear: values whose micro-batches cannot be put together.
    """

    out_tree: Any
    unclear: Told


def reports(
    graph: Graph,
    results: Sequence[Value],
    out_tree: Any,
    again: Callable[[], tuple[Graph, Sequence[Value]]],
) -> Reports:
    """Find out how reported values are put together.

    Args:
        graph: of the loss.
        results: of the program, as tensors of the graph.
        out_tree: structure of ``(total, weight, metrics, new_rest)``.
        again: traces the loss with more than one sample.
    """
    total, weight, metrics, rest = out_tree.unflatten(range(len(results)))
    named = _open_leaves(metrics)
    if not any(_has_shape(graph, results[n]) for n in named.values()):
        return Reports(out_tree=out_tree, unclear=())
    if graph.batch_size == 1:  # Dimensions of size 1 are in no operation's factors.
        if graph.num_micro_batches == 1:
            return Reports(out_tree=out_tree, unclear=())
        try:
            graph, results = again()
        except Exception:  # Of the loss itself, which may take one sample only.
            return Reports(out_tree=out_tree, unclear=_untold(graph, results, named))
    where = {n: results[n] for n in named.values() if _has_shape(graph, results[n])}
    values = [v for v in where.values() if v is not None]
    found = dict(zip(where, reported_rows(graph, values), strict=True))

    def merged(leaf: Any) -> Any:
        rows = None if isinstance(leaf, Merged) else found.get(leaf)
        if not isinstance(rows, Rows):
            return leaf
        return Merged(leaf, "rows", axis=rows.axis, outer=rows.outer, inner=rows.inner)

    metrics = jax.tree.map(merged, metrics, is_leaf=_is_merged)
    unclear = [(name, found.get(n)) for name, n in named.items()]
    return Reports(
        out_tree=jax.tree.structure((total, weight, metrics, rest)),
        unclear=tuple((name, x) for name, x in unclear if isinstance(x, Unclear)),
    )


def check_clear(unclear: Told, size: int, *, traced: int | None = None) -> None:
    """Refuse what several micro-batches report and cannot be put together.

    Args:
        unclear: by name.
        size: samples of a micro-batch.
        traced: of the one that was traced, if another.

    Raises:
        WhaleError: every such value, and what to do.
    """
    problems = Problems()
    for name, value in unclear:
        if not value.sizes or {size, traced or size}.intersection(value.sizes):
            problems.add(_words(name, value))
    problems.raise_if_any(
        WhaleError,
        title=f"micro-batches of {size} sample{'s' * (size > 1)} report what cannot be "
        "put together. Give what has a row for each sample as wh.Aux(samples={...}), "
        "what is to be added up as sums={...} and what is to be averaged as "
        "means={...}, or plan with num_micro_batches=1",
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


def _untold(graph: Graph, results: Sequence[Value], named: Mapping[str, int]) -> Told:
    """Every value with a shape, where the loss can be traced with one sample only."""
    why = "is of a loss that cannot be traced with two samples to see its rows"
    shapes = {
        name: graph.tensors[value].shape
        for name, n in named.items()
        if (value := results[n]) is not None
    }
    return tuple(
        (name, Unclear(shape=shape, why=why)) for name, shape in shapes.items() if shape
    )


def _is_merged(x: Any) -> bool:
    return isinstance(x, Merged)


def _has_shape(graph: Graph, value: Value) -> bool:
    return value is not None and bool(graph.tensors[value].shape)
