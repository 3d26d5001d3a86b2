"""Rules for lookups and scattered writes by index.

An index that is computed from a sample's own data stays with that sample. An index
among all samples does not, unless it is the sample's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.capture.separability.alignment import (
    align_dim,
    align_dims,
    check_one_batch,
)
from whalejax.capture.separability.equations import (
    PairedEquation,
    Rule,
    combined_kind,
    fixed,
)
from whalejax.capture.separability.facts import IndexColumns, Places, fact_of
from whalejax.capture.separability.reduction_rules import with_sum
from whalejax.capture.separability.shape_rules import TAKES, cut_dim
from whalejax.capture.separability.values import (
    CoupledError,
    Dependence,
    Dim,
    Value,
    equal_dim,
    is_one,
    is_samples,
    plain_dim,
    product_ratio,
    same_ratio,
    size_of,
)


def columns_of(indices: Value, count: int) -> list[Value] | None:
    """Returns the index arrays that were concatenated, if they are known."""
    columns = fact_of(indices, IndexColumns)
    if columns is not None:
        return list(columns.columns)
    return [indices] if count == 1 else None


def _index_dims(indices: Value, columns: Sequence[Value] | None) -> list[Dim]:
    """Returns dimensions of index arrays; a sample's own position needs none."""
    if columns is None:
        return list(indices.dims[:-1])
    dims = []
    for column in columns:
        own = list(column.dims[:-1])
        places = fact_of(column, Places)
        if places is not None:
            own[places.dim] = equal_dim(*size_of(own[places.dim]))
        dims.append(tuple(own))
    return list(align_dims(dims))


def _check_indices(values: Sequence[Value]) -> None:
    if any(v.kind is Dependence.SUM for v in values):
        raise CoupledError("looks up by a sum over the samples")
    if any(v.coupled for v in values):
        raise CoupledError("looks up by an index that other samples decide")
    if not all(is_one(v.ratio) for v in values):
        raise CoupledError("looks up by an index that depends on the number of samples")


def _gather(equation: PairedEquation) -> list[Value]:
    (numbers,) = equation.equal_params("dimension_numbers")
    operand, indices = equation.values
    pieces = equation.part.params["slice_sizes"], equation.whole.params["slice_sizes"]
    mapped = [int(i) for i in numbers.start_index_map]
    columns = columns_of(indices, len(mapped))
    _check_indices(columns or [indices])
    own = _index_dims(indices, columns)
    for o, i in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        own[i] = align_dim(operand.dims[o], own[i])
    looked_up: set[int] = set()
    for slot, d in enumerate(mapped):
        sizes = size_of(operand.dims[d])
        column = None if columns is None else columns[slot]
        places = None if column is None else fact_of(column, Places)
        if (pieces[0][d], pieces[1][d]) == sizes and places is None:
            continue
        looked_up.add(d)
        if places is not None and any(a.grows for a in operand.dims[d]):
            if size_of(own[places.dim]) != sizes or pieces[0][d] != 1:
                raise CoupledError(TAKES)
            own[places.dim] = align_dim(operand.dims[d], own[places.dim])
        elif places is not None:
            own[places.dim] = plain_dim(*size_of(own[places.dim]))
        elif any(a.grows for a in operand.dims[d]):
            raise CoupledError(TAKES)
    collapsed = {int(i) for i in numbers.collapsed_slice_dims}
    gone = collapsed | {int(i) for i in numbers.operand_batching_dims}
    behind: list[Dim] = []
    for d, dim in enumerate(operand.dims):
        if d in gone:
            continue
        sizes, taken = size_of(dim), (pieces[0][d], pieces[1][d])
        if taken == sizes:
            behind.append(dim)
        elif d in looked_up:
            behind.append(plain_dim(*taken))
        else:
            behind.append(cut_dim(dim, sizes, [(0, n, 1) for n in taken]))
    offsets = {int(i) for i in numbers.offset_dims}
    front, rest = iter(own), iter(behind)
    rank = len(equation.shapes()[0])
    dims = tuple(next(rest) if i in offsets else next(front) for i in range(rank))
    check_one_batch(dims)
    kind, within = combined_kind([operand, *(columns or [indices])])
    ratio = same_ratio([operand, _filler(equation)])
    return [Value(kind=kind, dims=dims, ratio=ratio, within=within)]


def _filler(equation: PairedEquation) -> Value:
    """Returns a lookup's fill value; without a ratio if the program gives none."""
    value = equation.params.get("fill_value")
    filled = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if not filled or (value is None and _compat.is_inexact(equation.result_dtype)):
        return fixed(ratio=None)
    return fixed(ratio=None if value == 0 else 1.0)


def _scatter(equation: PairedEquation) -> list[Value]:
    (numbers,) = equation.equal_params("dimension_numbers")
    operand, indices, updates = equation.values
    _check_applied(equation)
    mapped = [int(i) for i in numbers.scatter_dims_to_operand_dims]
    columns = columns_of(indices, len(mapped))
    _check_indices(columns or [indices])
    windows = [int(i) for i in numbers.update_window_dims]
    scattered = [i for i in range(len(updates.dims)) if i not in windows]
    own = [
        align_dim(updates.dims[u], dim)
        for u, dim in zip(scattered, _index_dims(indices, columns), strict=True)
    ]
    scatter, met = list(operand.dims), set[int]()
    for o, i in zip(
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        strict=True,
    ):
        scatter[o] = align_dim(scatter[o], own[i])
        met.add(i)
    inserted = {int(i) for i in numbers.inserted_window_dims}
    outside = inserted | {int(i) for i in numbers.operand_batching_dims}
    inner = [d for d in range(len(scatter)) if d not in outside]
    window = dict(zip(inner, windows, strict=True))
    for slot, d in enumerate(mapped):
        if d in window and size_of(scatter[d]) == size_of(updates.dims[window[d]]):
            continue
        places = None if columns is None else fact_of(columns[slot], Places)
        if places is not None and size_of(own[places.dim]) == size_of(scatter[d]):
            if places.dim in met:
                raise CoupledError("writes to a diagonal of the samples")
            scatter[d] = align_dim(scatter[d], own[places.dim])
            met.add(places.dim)
        elif places is not None or any(a.grows for a in scatter[d]):
            raise CoupledError("writes to samples by an index")
        else:
            scatter[d] = plain_dim(*size_of(scatter[d]))
    for d, u in window.items():
        if size_of(scatter[d]) == size_of(updates.dims[u]):
            scatter[d] = align_dim(scatter[d], updates.dims[u])
        elif any(a.grows for a in (*scatter[d], *updates.dims[u])):
            raise CoupledError("writes to some of the samples by their place")
        else:
            scatter[d] = plain_dim(*size_of(scatter[d]))
    gone = [dim for i, dim in enumerate(own) if i not in met]
    check_one_batch((*scatter, *gone))
    return [
        _scatter_value(equation, (operand, indices, updates), columns, gone, scatter)
    ]


def _check_applied(equation: PairedEquation) -> None:
    """Refuses a function applied in place to a sum over samples."""
    combiner = equation.params.get("update_jaxpr")
    operand = equation.values[0]
    if equation.name != "scatter" or combiner is None:
        return
    body, constants = _compat.open_jaxpr(combiner)
    plain = body.outvars == [body.invars[1]]
    if not plain and (constants or equation.params.get("update_consts")):
        raise CoupledError("applies a function at some places")
    if not plain and (operand.kind is Dependence.SUM or not is_one(operand.ratio)):
        raise CoupledError("applies a function to a sum over the samples")


def _scatter_value(
    equation: PairedEquation,
    values: tuple[Value, Value, Value],
    columns: Sequence[Value] | None,
    gone: Sequence[Dim],
    dims: Sequence[Dim],
) -> Value:
    operand, indices, updates = values
    index = list(columns or [indices])
    kind, within = combined_kind([updates, *index])
    if equation.name not in ("scatter-add", "scatter_add"):
        if any(a.grows for dim in gone for a in dim) or any(map(is_samples, gone)):
            raise CoupledError("writes samples over each other")
        if equation.name != "scatter":
            _check_combined(equation, operand, updates)
        kind, within = combined_kind([operand, updates, *index])
        ratio = same_ratio([operand, updates])
        return Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)
    added = Value(kind=kind, ratio=updates.ratio, within=within)
    added = with_sum(added, gone, dims)
    kind, within = combined_kind([operand, added])
    ratio = same_ratio([operand, added])
    return Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)


def _check_combined(equation: PairedEquation, operand: Value, updates: Value) -> None:
    """Refuses products, maxima and minima that a mean over samples excludes."""
    sums = sum(v.kind is Dependence.SUM for v in (operand, updates))
    product = equation.name in ("scatter-mul", "scatter_mul")
    if sums > product:
        raise CoupledError(f"applies {equation.name} to sums over the samples")
    if updates.kind is Dependence.SUM and not equation.params["unique_indices"]:
        raise CoupledError("may multiply sums over the samples in one place")
    if not is_one(product_ratio([operand, updates])):
        raise CoupledError("multiplies what depends on the number of samples")


RULES: Final[dict[str, Any | Rule]] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "scatter_add": _scatter,
    "scatter_mul": _scatter,
    "scatter_min": _scatter,
    "scatter_max": _scatter,
}
