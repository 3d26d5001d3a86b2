"""Lookups, scatters and sorts of a stage, on each device for its own part.

Inside ``shard_map`` over the stages, the compiler partitions the other axes. Its
partitioner aborts the process at a gather or scatter that two axes shard, such as the
rows of logits and their vocabulary. So this module partitions these operations. It
determines the part of every value on each device, and the axes over which results are
summed. Operations that cannot be divided run in full on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from whalejax import _compat
from whalejax.meshes.jax_mesh import automatic_axes, on_automatic_axes, partition_spec
from whalejax.planner.sharding.layout import Spec


SCATTERS = frozenset(
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split()
)
INDEXED = SCATTERS | {"gather", "sort", "top_k", "approx_top_k"}
"""Operations that look up or write by an index, also in their derivatives."""

_LINEAR = frozenset({"gather", "scatter", "scatter-add", "scatter-sub"})
"""Operations whose derivatives read none of their floating-point operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationParts:
    """Division of an operation among devices.

    Attributes:
        given: Specs of the operands.
        out: Specs of the results.
        run: Function of one device, from its parts of the operands.
        summed: Axes over which the parts of a result are summed.
        finish: Function from the sum and the device's operands to the result.
    """

    given: tuple[Spec, ...]
    out: tuple[Spec, ...]
    run: Callable[..., list[Any]]
    summed: tuple[str, ...] = ()
    finish: Callable[..., list[Any]] = lambda results, *operands: results


@dataclass(slots=True)
class _Free:
    sizes: Mapping[str, int]
    taken: set[str] = field(default_factory=set)

    def take(self, spec: Spec, dim: int, size: int) -> tuple[str, ...]:
        """Takes the axes of a dimension; () if in use or if they do not divide it."""
        axes = spec[dim] if dim < len(spec) else ()
        axes = tuple(a for a in axes if self.sizes.get(a, 1) > 1)
        count = math.prod(self.sizes[a] for a in axes)
        if size % count or not self.taken.isdisjoint(axes):
            return ()
        self.taken.update(axes)
        return axes


def in_parts(
    equation: Any,
    values: Sequence[Any],
    specs: Sequence[Spec],
    mesh: Any,
    flows: Sequence[bool] | None = None,
) -> list[Any] | None:
    """Returns the results of an indexed operation, or None if the compiler can do it.

    Args:
        equation: Operation, or call with its own derivative rule.
        values: Operands of the operation.
        specs: Specs of the operands, as far as known; empty ones are unsharded.
        mesh: Mesh of the devices, inside ``shard_map`` over the stages.
        flows: Whether a gradient flows through each operand. Default: through all
            differentiable operands.
    """
    automatic = automatic_axes(mesh)
    sizes = {a: n for a, n in mesh.shape.items() if a in automatic and n > 1}
    if len(sizes) < 2:
        return None
    name = equation.primitive.name
    if name in INDEXED:
        specs = specs or ((),) * len(values)
        return on_each(_parts(equation, specs, sizes), values, mesh, name in _LINEAR)
    opaque = _compat.recursion(equation) in ("opaque", "while")
    if opaque and holds(equation, lambda one: one.primitive.name in INDEXED, flows):
        return in_whole(equation, values, mesh)
    return None


def in_whole(equation: Any, values: Sequence[Any], mesh: Any) -> list[Any]:
    """Returns the results of an operation that every device computes in full."""
    return on_each(_undivided(equation), values, mesh, linear=False)


def holds(
    equation: Any,
    wanted: Callable[[Any], bool],
    flows: Sequence[bool] | None = None,
) -> bool:
    """Returns whether a call, or its derivative, contains an equation of some kind.

    Args:
        equation: Call with an inner jaxpr.
        wanted: Predicate of equations.
        flows: Whether a gradient flows through each operand, and so a derivative is
            needed. Default: through all differentiable operands.
    """
    if _holds(_compat.inner_jaxprs(equation), wanted):
        return True
    if _compat.recursion(equation) != "opaque":
        return False
    avals = [_compat.abstract(v.aval.shape, v.aval.dtype) for v in equation.invars]
    places = _compat.differentiable_operands(equation)
    if flows is not None:
        places = [i for i in places if flows[i]]

    def derived(*values: Any) -> Any:
        def run(*floats: Any) -> list[Any]:
            given = dict(zip(places, floats, strict=True))
            whole = [given.get(i, v) for i, v in enumerate(values)]
            return _floats(_compat.bind(equation, whole))

        results, back = jax.vjp(run, *[values[i] for i in places])
        return back(results)

    return _holds([_compat.trace(derived, avals)], wanted)


def _holds(jaxprs: Sequence[Any], wanted: Callable[[Any], bool]) -> bool:
    for jaxpr in jaxprs:
        for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
            if wanted(equation):
                return True
            if _holds(_compat.inner_jaxprs(equation), wanted):
                return True
    return False


# Partitions.


def _parts(
    equation: Any, specs: Sequence[Spec], sizes: Mapping[str, int]
) -> OperationParts:
    name = equation.primitive.name
    if name == "gather":
        return _gather(equation, specs, sizes)
    if name in SCATTERS:
        return _scatter(equation, specs, sizes)
    return _rows(equation, specs, sizes)


def _undivided(equation: Any) -> OperationParts:
    return OperationParts(
        given=tuple(() for _ in equation.invars),
        out=tuple(() for _ in equation.outvars),
        run=lambda *values: _compat.bind(equation, values),
    )


def _rows(
    equation: Any, specs: Sequence[Spec], sizes: Mapping[str, int]
) -> OperationParts:
    shape = equation.invars[0].aval.shape
    params, last = equation.params, len(shape) - 1
    keys = ("dimension", "axis", "operand_axis", "reduction_dimension")
    line = next((params[key] for key in keys if key in params), last) % len(shape)
    spec, free = next((s for s in specs if s), ()), _Free(sizes)
    laid = tuple(
        () if dim == line else free.take(spec, dim, size)
        for dim, size in enumerate(shape)
    )
    return OperationParts(
        given=tuple(laid for _ in equation.invars),
        out=tuple(laid for _ in equation.outvars),
        run=lambda *values: _compat.bind(equation, values),
    )


def _scatter(
    equation: Any, specs: Sequence[Spec], sizes: Mapping[str, int]
) -> OperationParts:
    """Divides a scatter along batch dimensions and dimensions written in full."""
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates = (v.aval.shape for v in equation.invars)
    own, by_index, new = specs
    free = _Free(sizes)
    shared = numbers.scatter_indices_batching_dims
    rows = [
        free.take(by_index, dim, size) if dim in shared else ()
        for dim, size in enumerate(indices[:-1])
    ]
    of_batch = dict(zip(numbers.operand_batching_dims, shared, strict=True))
    windows = list(numbers.update_window_dims)
    laid: list[tuple[str, ...]] = []
    written = dict(
        zip((d for d in range(len(updates)) if d not in windows), rows, strict=True)
    )
    for dim, size in enumerate(operand):
        if dim in of_batch:
            laid.append(rows[of_batch[dim]])
        elif dim in numbers.inserted_window_dims:
            laid.append(())
        else:
            window = windows.pop(0)
            axes: tuple[str, ...] = ()
            if updates[window] == size:
                axes = free.take(own, dim, size) or free.take(new, window, size)
            laid.append(axes)
            written[window] = axes
    return OperationParts(
        given=(
            tuple(laid),
            (*rows, ()),
            tuple(written[dim] for dim in range(len(updates))),
        ),
        out=(tuple(laid),),
        run=lambda *values: _compat.bind(equation, values),
    )


def _gather(
    equation: Any, specs: Sequence[Spec], sizes: Mapping[str, int]
) -> OperationParts:
    """Divides a gather along rows of indices, full slices, and one-element slices."""
    numbers, slices = (
        equation.params[key] for key in ("dimension_numbers", "slice_sizes")
    )
    operand, indices = (v.aval.shape for v in equation.invars)
    own, by_index = specs
    free = _Free(sizes)
    rows = [free.take(by_index, d, n) for d, n in enumerate(indices[:-1])]
    batch, of_index = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    laid = {d: rows[i] for d, i in zip(batch, of_index, strict=True)}
    passed = [
        dim
        for dim in range(len(operand))
        if dim not in (*batch, *numbers.collapsed_slice_dims)
    ]
    for dim in passed:
        whole = slices[dim] == operand[dim]
        laid[dim] = free.take(own, dim, operand[dim]) if whole else ()
    picked = {}
    for dim in numbers.collapsed_slice_dims:
        by = dim in numbers.start_index_map and not _keys(equation)
        laid[dim] = free.take(own, dim, operand[dim]) if by else ()
        if laid[dim]:
            picked[numbers.start_index_map.index(dim)] = laid[dim]
    offsets, left = dict(zip(numbers.offset_dims, passed, strict=True)), iter(rows)
    rank = len(equation.outvars[0].aval.shape)
    out = tuple(laid[offsets[d]] if d in offsets else next(left) for d in range(rank))
    taken = _ShardedGather(
        equation, sizes, {d: laid[d] for d in range(len(operand))}, picked
    )
    return OperationParts(
        given=(tuple(laid[d] for d in range(len(operand))), (*rows, ())),
        out=(out,),
        run=taken.run,
        summed=tuple(a for axes in picked.values() for a in axes),
        finish=taken.finish,
    )


def _keys(equation: Any) -> bool:
    return _compat.is_key_dtype(equation.invars[0].aval.dtype)


@dataclass(frozen=True, slots=True)
class _ShardedGather:
    """One device's part of a gather.

    ``laid`` has the axes that shard each operand dimension. ``picked`` maps the index
    component of each sharded dimension to the axes of the dimension.
    """

    equation: Any
    sizes: Mapping[str, int]
    laid: Mapping[int, tuple[str, ...]]
    picked: Mapping[int, tuple[str, ...]]

    @property
    def _mode(self) -> Mode:
        return Mode.from_any(self.equation.params["mode"])

    def _most(self) -> list[int]:
        shape, params = self.equation.invars[0].aval.shape, self.equation.params
        dims = params["dimension_numbers"].start_index_map
        return [shape[d] - params["slice_sizes"][d] for d in dims]

    def run(self, operand: Any, indices: Any) -> list[Any]:
        """Returns this device's part, with zeros for indices on other devices."""
        slices = tuple(
            n // math.prod(self.sizes[a] for a in self.laid[d])
            if d not in self.equation.params["dimension_numbers"].collapsed_slice_dims
            and n > 1
            else n
            for d, n in enumerate(self.equation.params["slice_sizes"])
        )
        if not self.picked:
            return _compat.bind(self.equation, [operand, indices], slice_sizes=slices)
        places, here = signed(indices), self._within(indices)
        numbers = self.equation.params["dimension_numbers"]
        for part, axes in self.picked.items():
            length = operand.shape[numbers.start_index_map[part]]
            place = jnp.clip(places[..., part], 0, self._most()[part])
            place -= lax.axis_index(axes).astype(place.dtype) * length
            here = here & (place >= 0) & (place < length)
            places = places.at[..., part].set(jnp.clip(place, 0, length - 1))
        (result,) = _compat.bind(
            self.equation,
            [operand, places],
            slice_sizes=slices,
            mode=Mode.CLIP,
            unique_indices=False,
            indices_are_sorted=False,
        )
        here = jnp.expand_dims(here, numbers.offset_dims)
        return [jnp.where(here, result, jnp.zeros((), result.dtype))]

    def _within(self, indices: Any) -> Any:
        """Returns a mask of indices in bounds; all True if indices are clipped."""
        places = signed(indices)
        within = jnp.ones(places.shape[:-1], jnp.bool_)
        if self._mode == Mode.FILL_OR_DROP:
            for part, most in enumerate(self._most()):
                place = places[..., part]
                within = within & (place >= 0) & (place <= most)
        return within

    def finish(self, results: list[Any], operand: Any, indices: Any) -> list[Any]:
        """Fills the results of out-of-bounds indices, if the gather's mode says so."""
        del operand
        if not self.picked or self._mode != Mode.FILL_OR_DROP:
            return results
        (finish,), within = results, self._within(indices)
        offsets = self.equation.params["dimension_numbers"].offset_dims
        fill = filling(self.equation.params["fill_value"], finish.dtype)
        return [jnp.where(jnp.expand_dims(within, offsets), finish, fill)]


def signed(indices: Any) -> Any:
    """Converts indices to a signed integer type."""
    wide = indices.dtype.itemsize > 4
    return indices.astype(jnp.int64 if wide else jnp.int32)


def filling(value: Any, dtype: Any) -> Any:
    """Returns the value of a gather out of bounds; see ``jax.lax.gather``."""
    if value is None and _compat.is_inexact(dtype):
        value = jnp.nan
    elif value is None and dtype == jnp.bool_:
        value = True
    elif value is None:
        limits = np.iinfo(dtype)
        value = limits.min if limits.kind == "i" else limits.max
    return jnp.asarray(value, dtype)


# Execution.


def on_each(
    parts: OperationParts, values: Sequence[Any], mesh: Any, linear: bool
) -> list[Any]:
    """Runs a divided operation, with a backward pass in the same parts."""

    def mapped(function: Any, given: Sequence[Spec], out: Sequence[Spec]) -> Any:
        laid = [tuple(map(partition_spec, specs)) for specs in (given, out)]
        return on_automatic_axes(function, mesh, *laid)

    def ahead(*values: Any) -> tuple[Any, ...]:
        results = [_sum(x, parts.summed) for x in parts.run(*values)]
        return tuple(parts.finish(results, *values))

    @jax.custom_vjp
    def run(*values: Any) -> tuple[Any, ...]:
        result: tuple[Any, ...] = mapped(ahead, parts.given, parts.out)(*values)
        return result

    shapes = [(v.shape, v.dtype) for v in values]

    def forward(*primals: Any) -> Any:
        # There may be no derivative by operands without a gradient, such as a table
        # that the function closes over. So the structure of the residuals records
        # which operands have a gradient.
        values = [p.value for p in primals]
        real = [_compat.is_inexact(v.dtype) for v in values]
        pairs = list(zip(primals, real, strict=True))
        flows = tuple(() if p.perturbed and is_real else None for p, is_real in pairs)
        kept = [None if linear and is_real else p.value for p, is_real in pairs]
        return run(*values), (kept, flows)

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        kept, marks = saved
        flows = [i for i, mark in enumerate(marks) if mark is not None]
        pairs = zip(kept, shapes, strict=True)
        values = [jnp.zeros(*shape) if v is None else v for v, shape in pairs]
        floats = _floats(cotangents)
        out = [
            spec
            for spec, c in zip(parts.out, cotangents, strict=True)
            if _compat.is_inexact(c.dtype)
        ]
        back = _Backward(parts, flows, {a for s in out for axes in s for a in axes})
        there = [parts.given[i] for i in flows]
        run_back = mapped(back, (*parts.given, *out), there)
        result = run_back(*values, *map(_compat.instantiated, floats))
        by_place = dict(zip(flows, result, strict=True))
        return tuple(by_place.get(i) for i in range(len(values)))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return list(run(*values))


@dataclass(frozen=True, slots=True)
class _Backward:
    """One device's part of the backward pass; the axes ``across`` shard cotangents."""

    parts: OperationParts
    flows: Sequence[int]
    across: set[str]

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        count = len(self.parts.given)
        values, cotangents = arguments[:count], arguments[count:]

        def run(*floats: Any) -> list[Any]:
            given = dict(zip(self.flows, floats, strict=True))
            whole = [given.get(i, v) for i, v in enumerate(values)]
            return _floats(self.parts.run(*whole))

        _, back = jax.vjp(run, *[values[i] for i in self.flows])
        call = []
        for place, x in zip(self.flows, back(list(cotangents)), strict=True):
            own = {a for axes in self.parts.given[place] for a in axes}
            call.append(_sum(x, sorted(self.across - own)))
        return tuple(call)


def _floats(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if _compat.is_inexact(x.dtype)]


def _sum(value: Any, axes: Sequence[str]) -> Any:
    if not axes:
        return value
    if value.dtype == jnp.bool_:
        return lax.psum(value.astype(jnp.int32), tuple(axes)) > 0
    return lax.psum(value, tuple(axes))
