"""Rules for primitives that move, cut, join or make elements without arithmetic."""

from __future__ import annotations

import math
from typing import Final

from whalejax.capture.rules.behaviour import Behaviour, Equation, FactorBuilder, Rule


def _broadcast(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    result = len(equation.inputs)
    before, after = equation.inputs[0], equation.outputs[0]
    for dim, out_dim in enumerate(equation.params["broadcast_dimensions"]):
        if before[dim] == after[out_dim]:
            letters.link((0, dim), (result, out_dim))
    return Behaviour(factors=letters.factors, elementwise=True)


def _transpose(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    for out_dim, dim in enumerate(equation.params["permutation"]):
        letters.link((0, dim), (1, out_dim))
    return Behaviour(factors=letters.factors)


def _reshape(equation: Equation) -> Behaviour:
    if equation.params.get("dimensions") is not None:
        letters = FactorBuilder(equation)
        letters.each_whole((0, dim) for dim in range(len(equation.inputs[0])))
        return Behaviour(factors=letters.factors)
    return Behaviour(reshape=True)


def _free(_: Equation) -> Behaviour:
    return Behaviour(stops_gradient=True)


def _iota(_: Equation) -> Behaviour:
    return Behaviour(elementwise=True, stops_gradient=True)


def _window(equation: Equation, sizes: tuple[int, ...]) -> Behaviour:
    """Returns the behaviour of a slice: full dimensions pass, cut ones stay unsharded.

    A slice of one element contracts its dimension, as a gather does: one device has the
    element, and a sum over devices returns it.
    """
    letters = FactorBuilder(equation)
    result = len(equation.inputs)
    for dim, (before, after) in enumerate(zip(equation.inputs[0], sizes, strict=True)):
        if before == after:
            letters.link((0, dim), (result, dim))
        elif after == 1:
            letters.link((0, dim))
        else:
            letters.require_whole((0, dim))
    return Behaviour(factors=letters.factors)


def _slice(equation: Equation) -> Behaviour:
    return _window(equation, equation.outputs[0])


def _update_slice(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    result = len(equation.inputs)
    before, update = equation.inputs[0], equation.inputs[1]
    for dim, size in enumerate(before):
        if update[dim] == size:
            letters.link((0, dim), (1, dim), (result, dim))
        else:
            letters.require_whole((0, dim), (result, dim))
            letters.require_whole((1, dim))
    return Behaviour(factors=letters.factors)


def _pad(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    for dim, (low, high, inside) in enumerate(equation.params["padding_config"]):
        if low == high == inside == 0:
            letters.link((0, dim), (2, dim))
        else:
            letters.each_whole([(0, dim), (2, dim)])
    return Behaviour(factors=letters.factors)


def _concatenate(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    along = equation.params["dimension"]
    slots = range(len(equation.inputs) + 1)
    for dim in range(len(equation.outputs[0])):
        members = [(slot, dim) for slot in slots]
        if dim == along:
            letters.each_whole(members)
        else:
            letters.link(*members)
    return Behaviour(factors=letters.factors)


def _split(equation: Equation) -> Behaviour:
    """Returns a split's behaviour; equal parts are a dimension of their own."""
    axis = equation.params["axis"]
    sizes = equation.params["sizes"]
    if len(set(sizes)) == 1:
        return Behaviour(parts=(axis, len(sizes)))
    letters = FactorBuilder(equation)
    slots = range(1 + len(equation.outputs))
    for dim in range(len(equation.inputs[0])):
        members = [(slot, dim) for slot in slots]
        if dim == axis:
            letters.each_whole(members)
        else:
            letters.link(*members)
    return Behaviour(factors=letters.factors)


def _stack(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    along = equation.params["axis"]
    result = len(equation.inputs)
    for dim in range(len(equation.inputs[0])):
        out_dim = dim if dim < along else dim + 1
        letters.link(*((slot, dim) for slot in range(result)), (result, out_dim))
    letters.require_whole((result, along))
    return Behaviour(factors=letters.factors)


def _unstack(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    along = equation.params["axis"]
    slots = range(1, 1 + len(equation.outputs))
    for dim in range(len(equation.outputs[0])):
        in_dim = dim if dim < along else dim + 1
        letters.link((0, in_dim), *((slot, dim) for slot in slots))
    letters.require_whole((0, along))
    return Behaviour(factors=letters.factors)


def _tile(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    for dim, repeats in enumerate(equation.params["reps"]):
        if repeats == 1:
            letters.link((0, dim), (1, dim))
        else:
            letters.each_whole([(0, dim), (1, dim)])
    return Behaviour(factors=letters.factors)


def _reverse(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    for dim in range(len(equation.inputs[0])):
        turned = dim in equation.params["dimensions"]
        letters.link((0, dim), (1, dim), kind="unshardable" if turned else "linked")
    return Behaviour(factors=letters.factors)


def _gather(equation: Equation) -> Behaviour:
    """Returns a gather's behaviour: indexed dimensions are contracted, others pass."""
    letters = FactorBuilder(equation)
    numbers = equation.params["dimension_numbers"]
    operand, indices = equation.inputs[0], equation.inputs[1]
    sizes = equation.params["slice_sizes"]
    offsets = list(numbers.offset_dims)
    batch = [d for d in range(len(equation.outputs[0])) if d not in offsets]
    of_index = dict(zip(range(len(indices) - 1), batch, strict=True))
    shared = dict(
        zip(
            numbers.start_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    for index_dim, out_dim in of_index.items():
        members = [(1, index_dim), (2, out_dim)]
        if index_dim in shared:
            members.append((0, shared[index_dim]))
        letters.link(*members)
    letters.require_whole((1, len(indices) - 1))
    for dim, size in enumerate(operand):
        if dim in numbers.operand_batching_dims:
            continue
        if dim in numbers.collapsed_slice_dims:
            letters.link((0, dim))
            continue
        out_dim = offsets.pop(0)
        if sizes[dim] == size:
            letters.link((0, dim), (2, out_dim))
        else:
            letters.require_whole((0, dim))
    return Behaviour(factors=letters.factors, saves=((1, 0),))


def _scatter(equation: Equation) -> Behaviour:
    """Returns a scatter's behaviour; devices may compute parts of sums alone."""
    letters = FactorBuilder(equation)
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates = equation.inputs
    windows = list(numbers.update_window_dims)
    rows = [d for d in range(len(updates)) if d not in windows]
    shared = dict(
        zip(
            numbers.scatter_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    sums = equation.name in ("scatter-add", "scatter-sub")
    one = math.prod(indices[:-1]) == 1
    for index_dim, row_dim in enumerate(rows):
        members = [(1, index_dim), (2, row_dim)]
        if index_dim in shared:
            dim = shared[index_dim]
            letters.link((0, dim), *members, (3, dim))
        else:
            letters.link(*members, kind="linked" if sums else "unshardable")
    letters.require_whole((1, len(indices) - 1))
    for dim, size in enumerate(operand):
        if dim in numbers.operand_batching_dims:
            continue
        if dim in numbers.inserted_window_dims:
            # For one index XLA updates a slice. A device without that index writes
            # there what it reads from the part of another device.
            letters.link((0, dim), (3, dim), kind="unshardable" if one else "linked")
            continue
        window = windows.pop(0)
        if updates[window] == size:
            letters.link((0, dim), (2, window), (3, dim))
        else:
            letters.require_whole((0, dim), (3, dim))
            letters.require_whole((2, window))
    saves = ((1, 0), (1, 2)) if sums else ((0, 2), (1, 0), (1, 2), (2, 0))
    return Behaviour(factors=letters.factors, saves=saves)


SHAPE_RULES: Final[dict[str, Rule]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": lambda _: Behaviour(reshape=True),
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "rev": _reverse,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max").split(),
        _scatter,
    ),
    "iota": _iota,
    **dict.fromkeys(
        (
            "random_bits random_wrap random_unwrap random_fold_in random_split "
            "random_seed random_clone threefry2x32 rng_bit_generator rng_uniform "
            "iota_2x32_shape platform_index debug_callback debug_print axis_index "
            "empty empty2 zeros_like"
        ).split(),
        _free,
    ),
}
