"""Geometry of convolution and pooling windows along spatial dimensions, as plain data.

The rules of both read it, and so does the lowering, which derives from it what each
device computes. Windows that devices cannot share carry the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whalejax.capture.rules.behaviour import Equation
from whalejax.planner.model.windows import SPACES, Window


def windows_of_convolution(equation: Equation) -> tuple[Window, ...]:
    """Returns one window for each spatial dimension of an image or a volume.

    A convolution with one spatial dimension runs along a sequence and has none.

    Args:
        equation: ``conv_general_dilated``.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    dims, outs = numbers.lhs_spec[2:], numbers.out_spec[2:]
    taps = [equation.inputs[1][dim] for dim in numbers.rhs_spec[2:]]
    if not 2 <= len(dims) <= len(SPACES):
        return ()
    windows = []
    for number, space in enumerate(SPACES[-len(dims) :]):
        dilation = params["rhs_dilation"][number]
        windows.append(
            Window(
                dim=dims[number],
                out=outs[number],
                space=space,
                span=dilation * (taps[number] - 1) + 1,
                stride=params["window_strides"][number],
                low=params["padding"][number][0],
                spread=params["lhs_dilation"][number],
                refused=_refused_convolution(params, number, taps[number]),
            )
        )
    return tuple(windows)


def _refused_convolution(params: Any, number: int, taps: int) -> str:
    """Returns why devices cannot share a convolution's spatial dimension, or ""."""
    if params["batch_group_count"] > 1:
        return "it convolves groups of samples"
    spread, stride = params["lhs_dilation"][number], params["window_strides"][number]
    if spread == 1:
        return ""
    low, high = params["padding"][number]
    inverse = taps == spread and stride == 1 and low == high == spread - 1
    if inverse and params["rhs_dilation"][number] == 1:
        return ""
    return (
        f"it is a transposed convolution of stride {spread} with a kernel of {taps} "
        f"and padding ({low}, {high}); only one whose kernel is its stride, with "
        f"padding ({spread - 1}, {spread - 1}), can share space"
    )


def windows_of_pooling(equation: Equation) -> tuple[Window, ...]:
    """Returns one window for each pooled dimension.

    Args:
        equation: ``reduce_window`` or a similar primitive.
    """
    sizes, strides, padding, spread, dilation = pooled(equation)
    if len(equation.outputs) != 1:
        return ()
    return tuple(
        Window(
            dim=dim,
            out=dim,
            span=dilation[dim] * (size - 1) + 1,
            stride=strides[dim],
            low=padding[dim][0],
            refused=_refused_pooling(equation, spread[dim]),
        )
        for dim, size in enumerate(sizes)
        if size > 1 or strides[dim] > 1
    )


def _refused_pooling(equation: Equation, spread: int) -> str:
    """Returns why devices cannot share a pooled dimension, or an empty text."""
    if equation.name == "reduce_window":
        return (
            "it reduces windows by a function of its own, of which no padding is known "
            "that changes nothing; maximum, minimum and sum can share space"
        )
    return "it spreads its operand" if spread > 1 else ""


def pooled(equation: Equation) -> tuple[Sequence[Any], ...]:
    """Returns sizes, strides, padding and dilation of operand and window, by dimension.

    Args:
        equation: Equation of a pooling.
    """
    params = equation.params
    rank = len(equation.inputs[0])
    ones = (1,) * rank
    return (
        params["window_dimensions"],
        params.get("window_strides") or ones,
        params.get("padding") or ((0, 0),) * rank,
        params.get("base_dilation") or ones,
        params.get("window_dilation") or ones,
    )
