"""Adasum over the ranks of ``data``; see ``planner.cost.adasum_cost``.

Every device combines a part of every tensor for all ranks, so all ranks get the same
bits. A power of two scales each tensor so that its largest element is near one. Dot
products and norms are summed as pairs of floats. So they have about twice the digits,
and overflow only if the tensors do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from whalejax.meshes.jax_mesh import partition_spec
from whalejax.planner.cost.adasum_cost import COLUMN, DATA, Part
from whalejax.planner.sharding.layout import Spec


Pair = tuple[Any, Any]
"""A number as the sum of two floats.

The second float has the digits that the first lacks; None stands for 0.
"""


def adasum_reduce(
    stacked: Sequence[Any],
    weights: Any,
    specs: Sequence[Spec],
    slices: Sequence[int],
    mesh: Mesh,
    *,
    node: int = 1,
) -> list[Any]:
    """Returns tensors combined over the ranks of ``data``, equal on all ranks.

    Args:
        stacked: For each parameter, the sums over the samples of each rank. The ranks
            are along a leading dimension that ``data`` shards.
        weights: Weight of each rank's samples. The sums of a rank, or of the ranks that
            are averaged first, are divided by the sum of their weights.
        specs: Spec of each parameter on the axes other than ``data``.
        slices: Number of layers that each tensor stacks; each layer counts as a tensor.
        mesh: Mesh of the devices.
        node: Number of consecutive ranks that are averaged first; default 1.
    """
    double = any(x.dtype == jnp.float64 for x in stacked)
    dtype = jnp.float64 if double else jnp.float32
    sizes = dict(mesh.shape)
    shapes = [x.shape[1:] for x in stacked]
    parts = [Part.of(*one, sizes) for one in zip(shapes, specs, slices, strict=True)]
    order = sorted(range(len(parts)), key=lambda i: parts[i].columns)
    packing = _Packing(parts=tuple(parts[i] for i in order), ranks=sizes[DATA])
    laid = tuple(specs[i] for i in order)

    def local(stacked: Sequence[Any], weights: Any) -> list[Any]:
        own = [stacked[i][0].astype(dtype) for i in order]
        shapes = [x.shape for x in own]
        buffer = packing.packed(own, weights.astype(dtype))
        rows = jax.lax.all_to_all(buffer, DATA, 0, 0, tiled=True)
        means = _node_means(rows[:, :, :-1], rows[:, 0, -1], node)
        rows = _Rows.of(means, packing)
        partial = _PartialDots(packing=packing, specs=laid, mesh=mesh)
        while rows.count > 1:
            # Without the barrier, each reader would recompute the level.
            rows = jax.lax.optimization_barrier(_level(rows, partial))
        whole = jax.lax.all_gather(rows.values(packing)[0], DATA)
        local = dict(zip(order, packing.unpacked(whole, shapes), strict=True))
        return [local[i] for i in range(len(local))]

    plain = [partition_spec(spec) for spec in specs]
    ranked = [PartitionSpec(DATA, *spec) for spec in plain]
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(ranked, PartitionSpec(DATA)),
        out_specs=plain,
        check_vma=False,  # Gathered values are equal on all ranks.
    )
    found: list[Any] = mapped(list(stacked), weights)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packing:
    """Packs tensors into one buffer of columns, in equal parts for all ranks.

    Attributes:
        parts: Part of each parameter on one rank. Parts with equal numbers of columns
            are adjacent.
        ranks: Number of ranks, each of which combines one part of every parameter.
    """

    parts: tuple[Part, ...]
    ranks: int

    def packed(self, tensors: Sequence[Any], weight: Any) -> Any:
        """Returns the buffer (rank, element of a column, column).

        The last column is the weight.
        """
        result = []
        for x, part in zip(tensors, self.parts, strict=True):
            flat = x.reshape(part.here, part.numbers)
            room = self.ranks * COLUMN * part.columns
            flat = jnp.pad(flat, ((0, 0), (0, room - part.numbers)))
            cut = flat.reshape(part.here, self.ranks, COLUMN, part.columns)
            cut = cut.transpose(1, 2, 0, 3)
            result.append(cut.reshape(self.ranks, COLUMN, part.width))
        last = jnp.broadcast_to(weight, (self.ranks, COLUMN, 1))
        return jnp.concatenate([*result, last], axis=2)

    def unpacked(self, whole: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        result, first = [], 0
        for shape, part in zip(shapes, self.parts, strict=True):
            cut = whole[:, :, first : first + part.width]
            first += part.width
            cut = cut.reshape(self.ranks, COLUMN, part.here, part.columns)
            flat = cut.transpose(2, 0, 1, 3).reshape(part.here, -1)
            result.append(flat[:, : part.numbers].reshape(shape))
        return result

    @property
    def tensor_of(self) -> np.ndarray:
        widths = [part.columns for part in self.parts for _ in range(part.here)]
        return np.repeat(np.arange(len(widths)), widths)

    def by_column(self, each: Sequence[Any]) -> list[Any]:
        """Repeats values (group, tensor) for columns, as (group, 1, column)."""
        return [x[:, self.tensor_of][:, None] for x in each]

    def by_tensor(self, columns: Any) -> list[Any]:
        """Splits (…, column) into arrays (…, tensor, column), one per column count."""
        tensor, first = [], 0
        for count, several in itertools.groupby(self.parts, lambda x: x.columns):
            tensors = sum(part.here for part in several)
            cut = columns[..., first : first + tensors * count]
            first += tensors * count
            tensor.append(cut.reshape(*columns.shape[:-1], tensors, count))
        return tensor


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["high", "low", "exponents"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Tensors of several groups of ranks: (high + low) times a power of two.

    Attributes:
        high, low: Arrays (group, element of a column, column); ``low`` is None if it
            is 0.
        exponents: Exponents of the powers of two, (group, tensor).
    """

    high: Any
    low: Any
    exponents: Any

    @classmethod
    def of(cls, high: Any, packing: _Packing) -> _Rows:
        tensors = sum(part.here for part in packing.parts)
        nothing = jnp.zeros((len(high), tensors), jnp.int32)
        return cls(high=high, low=None, exponents=nothing)

    @property
    def count(self) -> int:
        return len(self.high)

    @property
    def pair(self) -> Pair:
        return self.high, self.low

    def select(self, which: slice) -> _Rows:
        result: _Rows = jax.tree.map(lambda x: x[which], self)
        return result

    def normalised(self, packing: _Packing) -> _Rows:
        """Rescales so that each tensor's largest element on this device is near one."""
        largest = jnp.abs(self.high).max(1)
        result = [x.max(-1, initial=0.0) for x in packing.by_tensor(largest)]
        # Zeros are scaled too, and stay zero. To treat them apart would read the maxima
        # twice, and XLA on CPU would then compute them again for every element.
        return self.shift_exponents(-_exponents(jnp.concatenate(result, -1)), packing)

    def shift_exponents(self, shifts: Any, packing: _Packing) -> _Rows:
        half = shifts >> 1  # Two factors, as the power itself may overflow.
        powers = [_power(x, self.high.dtype) for x in (half, shifts - half)]
        first, second = packing.by_column(powers)
        high, low = _each(lambda x: x * first * second, self.pair)
        return _Rows(high=high, low=low, exponents=self.exponents - shifts)

    def values(self, packing: _Packing) -> Any:
        return self.shift_exponents(self.exponents, packing).high


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartialDots:
    packing: _Packing
    specs: tuple[Spec, ...]
    mesh: Mesh

    def gather_numbers(self, own: Any) -> Any:
        """Gathers the scalars of all devices for each tensor of their parts.

        Args:
            own: Scalars of this device: (scalar, two groups, tensor on this device).

        Returns:
            Scalars of all devices: (device, scalar, two groups, tensor). Those of a
            device are zero if it has no part of the tensor, or the same part as an
            earlier device.
        """
        axes = [axis for axis, size in self.mesh.shape.items() if size > 1]
        result, first = [], 0
        for part, spec in zip(self.packing.parts, self.specs, strict=True):
            mine = own[..., first : first + part.here]
            first += part.here
            sharing = {DATA, *(axis for several in spec for axis in several)}
            for axis in axes:
                if axis not in sharing:
                    is_first = jax.lax.axis_index(axis) == 0
                    mine = jnp.where(is_first, mine, jnp.zeros_like(mine))
            if part.here < part.slices:
                whole = jnp.zeros((*mine.shape[:-1], part.slices), mine.dtype)
                start = jax.lax.axis_index(spec[0]) * part.here
                mine = jax.lax.dynamic_update_slice_in_dim(whole, mine, start, -1)
            result.append(mine)
        return jax.lax.all_gather(jnp.concatenate(result, -1), tuple(axes))

    def local(self, every: Any) -> Any:
        local, first = [], 0
        for part, spec in zip(self.packing.parts, self.specs, strict=True):
            whole = every[:, first : first + part.slices]
            first += part.slices
            if part.here < part.slices:
                start = jax.lax.axis_index(spec[0]) * part.here
                whole = jax.lax.dynamic_slice_in_dim(whole, start, part.here, -1)
            local.append(whole)
        return jnp.concatenate(local, -1)


def _node_means(rows: Any, weights: Any, node: int) -> Any:
    groups = len(rows) // node
    sums = rows.reshape(groups, node, *rows.shape[1:]).sum(1)
    return weighted_means(sums, weights.reshape(groups, node).sum(1))


def weighted_means(sums: Any, weights: Any) -> Any:
    """Converts sums over samples to means; zero for a rank whose weight is zero.

    Args:
        sums: Sums of several ranks, stacked along the first dimension.
        weights: Weight of each rank's samples.
    """
    by = weights.reshape(-1, *[1] * (sums.ndim - 1)).astype(sums.dtype)
    nonzero = by != 0
    # The sums of a rank of zero weight may be NaN, if its loss divided by the weight.
    means = sums / jnp.where(nonzero, by, 1)
    return jnp.where(nonzero, means, jnp.zeros_like(sums))


def _level(rows: _Rows, partial: _PartialDots) -> _Rows:
    """Combines pairs of rows; a row without a partner is unchanged.

    Adasum(a, b) = (a - p b) + (b - q a) with p = a·b / 2‖b‖² and q = a·b / 2‖a‖². Both
    a and b are divided by powers of two before, and the two terms are added at the
    larger scale. So nothing overflows unless the result does.
    """
    packing, end = partial.packing, rows.count // 2 * 2
    pair = [rows.select(slice(i, end, 2)).normalised(packing) for i in range(2)]
    a, b = pair
    sums = _by_tensor(_column_dots(a.pair, b.pair), packing)
    own = [*(x for several in sums for x in several), a.exponents, b.exponents]
    dtype = rows.high.dtype
    every = partial.gather_numbers(jnp.stack([x.astype(dtype) for x in own]))
    ratios, exponents = _ratios(every)
    common = [partial.local(x) for x in exponents]
    least = _exponent_range(dtype)[0]
    a, b = (
        # The part of a tensor on a device may be far below the maximum of the tensor.
        x.shift_exponents(jnp.clip(x.exponents - e, least, 0), packing)
        for x, e in zip(pair, common, strict=True)
    )
    p, q = (
        tuple(packing.by_column([partial.local(x) for x in ratio])) for ratio in ratios
    )
    top = jnp.maximum(*common)
    terms = []
    for x, y, ratio, e in ((a, b, p, common[0]), (b, a, q, common[1])):
        removed = _multiplied(ratio, y.pair)
        left = _added(_with_low(x.pair), _each(jnp.negative, removed))
        (weight,) = packing.by_column([_power(jnp.clip(e - top, least, 0), dtype)])
        terms.append(_each(functools.partial(jnp.multiply, weight), left))
    high, low = _added(*terms)
    rest = rows.select(slice(end, None))
    return _Rows(
        high=jnp.concatenate([high, rest.high]),
        low=jnp.concatenate([low, _with_low(rest.pair)[1]]),
        exponents=jnp.concatenate([top, rest.exponents]),
    )


def _column_dots(ones: Pair, others: Pair) -> tuple[Pair, Pair, Pair]:
    def body(number: Any, sums: Any) -> Any:
        def row(x: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(x, number, 1, keepdims=False)

        a, b = (_each(row, pair) for pair in (ones, others))
        products = (_multiplied(a, b), _multiplied(a, a), _multiplied(b, b))
        pairs = zip(sums, products, strict=True)
        return tuple(_added(x, y) for x, y in pairs)

    high = ones[0]
    nothing = jnp.zeros((high.shape[0], high.shape[2]), high.dtype)
    start = ((nothing, nothing),) * 3
    column_dots: tuple[Pair, Pair, Pair] = jax.lax.fori_loop(0, COLUMN, body, start)
    return column_dots


def _by_tensor(sums: Sequence[Pair], packing: _Packing) -> list[Pair]:
    high, low = (jnp.stack(x) for x in zip(*sums, strict=True))
    cut = zip(packing.by_tensor(high), packing.by_tensor(low), strict=True)
    each = [_total(pair, 3) for pair in cut]
    highs, lows = (jnp.concatenate(x, -1) for x in zip(*each, strict=True))
    return [*zip(highs, lows, strict=True)]


def _ratios(every: Any) -> tuple[tuple[Pair, Pair], Any]:
    """Returns the coefficients p and q of ``_level``, and the tensors' exponents.

    ``every`` is (device, number, pair, tensor). The coefficients are (pair, tensor);
    they hold for a and b divided by two to the power of the exponents. The exponents
    are (2, pair, tensor). A zero tensor has its partner's exponent, and two zeros have
    0.
    """
    every = jnp.moveaxis(every, 1, 0)
    highs, lows, exponents = every[0:6:2], every[1:6:2], every[6:].astype(jnp.int32)
    least, most = _exponent_range(every.dtype)
    nonzero = highs[1:] > 0
    common = jnp.where(nonzero, exponents, -4 * most).max(1)
    known = nonzero.any(1)
    shifts = _power(jnp.clip(exponents - common[:, None], least, 0), every.dtype)
    # Scales of the dot product and of both norms, each with its own exponents.
    by_first = jnp.stack([shifts[0], shifts[0], shifts[1]])
    by_second = jnp.stack([shifts[1], shifts[0], shifts[1]])
    high, low = _total((highs * by_first * by_second, lows * by_first * by_second), 1)
    dot, a_squared, b_squared = zip(high, low, strict=True)
    ratios = _ratio(dot, b_squared, known[1]), _ratio(dot, a_squared, known[0])
    either = jnp.where(known[::-1], common[::-1], 0)
    return ratios, jnp.where(known, common, either)


def _ratio(dot: Pair, squared: Pair, nonzero: Any) -> Pair:
    high, low = squared
    double = jnp.where(nonzero, 2 * high, 1), jnp.where(nonzero, 2 * low, 0)
    return _each(lambda x: jnp.where(nonzero, x, 0), _quotient(dot, double))


def _exponent_range(dtype: Any) -> tuple[int, int]:
    """Returns the exponents of the smallest and largest normal powers of two."""
    info: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return int(info.minexp), int(info.maxexp) - 1


def _power(exponents: Any, dtype: Any) -> Any:
    info: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    bits = jnp.dtype(f"int{info.bits}")
    biased = exponents.astype(bits) + bits.type(info.maxexp - 1)
    return jax.lax.bitcast_convert_type(biased << bits.type(info.nmant), dtype)


def _exponents(x: Any) -> Any:
    """Returns the exponent of the least power of two above each non-negative number.

    Zero and denormal numbers count as half of the smallest normal number.
    """
    info: Any = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call]
    bits = jnp.dtype(f"int{info.bits}")
    biased = jax.lax.bitcast_convert_type(x, bits) >> bits.type(info.nmant)
    return biased.astype(jnp.int32) - jnp.int32(info.maxexp - 2)


# Numbers as pairs of floats (Dekker, "A floating-point technique for extending the
# available precision", 1971; Ogita, Rump and Oishi, "Accurate sum and dot product",
# 2005).


def _two_sum(a: Any, b: Any) -> Pair:
    """Returns a sum and its rounding error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _added(x: Pair, y: Pair) -> Pair:
    total, lost = _two_sum(x[0], y[0])
    low = lost + (x[1] + y[1])
    high = total + low
    return high, low - (high - total)


def _product(a: Any, b: Any) -> Pair:
    """Returns a product and its rounding error."""
    high = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return high, ((a1 * b1 - high) + a1 * b2 + a2 * b1) + a2 * b2


def _multiplied(x: Pair, y: Pair) -> Pair:
    high, low = _product(x[0], y[0])
    for one, other in ((x[0], y[1]), (y[0], x[1])):
        if other is not None:
            low = low + one * other
    return high, low


def _each(of: Callable[[Any], Any], pair: Pair) -> Pair:
    return of(pair[0]), None if pair[1] is None else of(pair[1])


def _quotient(x: Pair, y: Pair) -> Pair:
    high = x[0] / y[0]
    near = _multiplied((high, None), y)
    left = _added(x, (-near[0], -near[1]))
    return _two_sum(high, left[0] / y[0])


def _with_low(pair: Pair) -> Pair:
    high, low = pair
    return high, jnp.zeros_like(high) if low is None else low


def _halves(a: Any) -> Pair:
    digits = 12 if a.dtype == jnp.float32 else 27  # Half of the significand's digits.
    scaled = a * (2**digits + 1)
    high = scaled - (scaled - a)
    return high, a - high


def _total(pair: Pair, axis: int) -> Pair:
    high, low = pair
    nothing = jnp.zeros((), high.dtype)

    def add(x: Any, y: Any) -> Any:
        return _added(x, y)

    total: Pair = jax.lax.reduce((high, low), (nothing, nothing), add, (axis,))
    return total
