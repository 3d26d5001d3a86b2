"""Changes the parameters of traced equations that contain sizes to other sizes.

Most primitives take all sizes from their operands. The rules here are for the others:
they create, regroup or slice dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final


Shape = tuple[int, ...]


class SizeError(ValueError):
    """Reduced sizes of an equation that are incompatible.

    Attributes:
        operand_dims: Affected dimensions of the first operand.
        result_dims: Affected dimensions of the first result.
    """

    def __init__(
        self, text: str, *, operand_dims: Sequence[int], result_dims: Sequence[int]
    ) -> None:
        super().__init__(text)
        self.operand_dims = operand_dims
        self.result_dims = result_dims


def changed_parameters(
    equation: Any, values: Sequence[Any], wanted: Sequence[Shape | None]
) -> dict[str, Any]:
    """Returns an equation's parameters for operands of other sizes.

    Args:
        equation: Traced equation.
        values: New operands.
        wanted: Shapes of the results; None if the logical dimensions do not determine
            one.

    Raises:
        ValueError: The equation is impossible at these sizes.
    """
    rule = _RULES.get(equation.primitive.name)
    if rule is None:
        return {}
    whole = [tuple(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    result = wanted[0] if wanted else None
    if result is None:
        result = tuple(equation.outvars[0].aval.shape)
    shapes = [tuple(getattr(value, "shape", ())) for value in values]
    if shapes == whole and result == tuple(equation.outvars[0].aval.shape):
        return {}
    return rule(equation, whole, shapes, result)


def _result_shape_rule(name: str) -> Callable[..., dict[str, Any]]:
    """Returns a rule for a parameter that is the result's shape."""

    def rule(equation: Any, whole: Any, shapes: Any, result: Shape) -> dict[str, Any]:
        del equation, whole, shapes
        return {name: result}

    return rule


def _split_keys(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    del equation, whole
    return {"shape": result[len(shapes[0]) :]}


def _broadcast(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    made = list(result)
    full = equation.params["shape"]
    for before, now, dim in zip(
        whole[0], shapes[0], equation.params["broadcast_dimensions"], strict=True
    ):
        if before == full[dim]:
            made[dim] = now
    return {"shape": tuple(made)}


def _reshape(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    """Returns the new shape; a merged dimension has the product of its parts' sizes."""
    full, reshape = tuple(equation.outvars[0].aval.shape), list(result)
    for before, after in _groups(whole[0], full):
        elements = math.prod(shapes[0][dim] for dim in before)
        wide = [dim for dim in after if full[dim] > 1]
        if len(wide) == 1:
            reshape[wide[0]] = elements
        elif elements != math.prod(reshape[dim] for dim in after):
            raise SizeError(
                f"{list(whole[0])} is reduced to {list(shapes[0])}, and the number of "
                f"elements differs from that of {list(result)}",
                operand_dims=before,
                result_dims=after,
            )
    return {"new_sizes": tuple(reshape)}


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Groups dimensions of a shape and of its reshaped form with equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs, a, b = list[int](), list[int](), 1, 1
        while True:
            if a <= b and i < len(before) and (a < b or not ins):
                a, i = a * before[i], i + 1
                ins.append(i - 1)
            elif j < len(after) and (b < a or not outs):
                b, j = b * after[j], j + 1
                outs.append(j - 1)
            else:
                break
        groups.append((ins, outs))
        if not ins and not outs:
            break
    return groups


def _slice(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    params = equation.params
    strides = params["strides"] or (1,) * len(result)
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    for dim, (before, now) in enumerate(zip(whole[0], shapes[0], strict=True)):
        if before == now:
            continue
        start, limit, stride = starts[dim], limits[dim], strides[dim]
        left = before - limit
        if start + left <= _EDGE:
            limits[dim] = now - left  # all but the edges
        elif start * now % before == 0:
            starts[dim] = start * now // before  # a part, in proportion
            limits[dim] = starts[dim] + (result[dim] - 1) * stride + 1
        else:
            raise ValueError(
                f"elements {start} to {limit} of {before} have no counterpart in {now}"
            )
        if not 0 <= starts[dim] < limits[dim] <= now:
            raise ValueError(f"{now} elements are too few for a slice of {before}")
    return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


_EDGE: Final = 4
"""Most elements that a slice omits at the ends of a dimension to count as an edge."""


def _slice_sizes(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    del result
    sizes = tuple(
        now if size == before else size * now // before if size > 1 else size
        for size, before, now in zip(
            equation.params["slice_sizes"], whole[0], shapes[0], strict=True
        )
    )
    return {"slice_sizes": sizes}


def _split(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    del result
    axis, sizes = equation.params["axis"], equation.params["sizes"]
    before, now = whole[0][axis], shapes[0][axis]
    values = tuple(size * now // before for size in sizes)
    if sum(values) != now or min(values) < 1:
        raise ValueError(f"the split of {before} into {sizes} does not fit {now}")
    return {"sizes": values}


def _top_k(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    del whole, result
    axis = equation.params.get("axis", equation.params.get("reduction_dimension", -1))
    return {"k": min(equation.params["k"], shapes[0][axis])}


def _convolution(
    equation: Any, whole: Sequence[Shape], shapes: Sequence[Shape], result: Shape
) -> dict[str, Any]:
    del whole, result
    numbers = equation.params["dimension_numbers"]
    channels = shapes[0][numbers.lhs_spec[1]]
    inputs = shapes[1][numbers.rhs_spec[1]]
    if channels % inputs:
        raise ValueError(
            f"{channels} channels are no multiple of the kernel's {inputs}"
        )
    return {"feature_group_count": channels // inputs}


_RULES: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {
    "iota": _result_shape_rule("shape"),
    "random_bits": _result_shape_rule("shape"),
    "random_split": _split_keys,
    "rng_bit_generator": _result_shape_rule("shape"),
    "rng_uniform": _result_shape_rule("shape"),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "gather": _slice_sizes,
    "dynamic_slice": _slice_sizes,
    "split": _split,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "conv_general_dilated": _convolution,
}
