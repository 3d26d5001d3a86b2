"""Floating-point operations of the products in a compiled program.

Products are ``dot`` on some backends, convolutions on TPU, and library calls on GPU. On
TPU, batch dimensions become spatial dimensions, with a window that meets each input
once. A multiplication with its addition counts as two operations. Products with padding
or with the holes of a dilated input do not count.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter

import numpy as np

from whalejax.hlo.hlo_text import HloError, Line, Module, Shape
from whalejax.hlo.loops import Branch, Execution, executions, largest_branches


_DIMS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_CONFIG = re.compile(r"backend_config=(\{.*\})\s*$")

_PRODUCTS = re.compile(r"^__cublas\$(?:gemm|lt\$matmul)|^__triton_nested_gemm_fusion")
"""Library calls that are one product each; their backend configuration describes it."""

_RAGGED = re.compile(r'ragged_dot_tiling="')
"""Attribute of a TPU's product of rows grouped by matrix, whose last operands are the
two factors.
"""

_RAGGED_PLACES = re.compile(r"ragged-dot-metadata")
"""Calls that number the tiles of such a grouped product."""

_CUDNN = re.compile(
    r"^__cudnn\$conv(Forward|BiasActivationForward|BackwardInput|BackwardFilter)$"
)
"""Library calls that are one convolution, or one gradient of a convolution. They have
the dimensions and windows of the convolution itself."""

_NO_PRODUCT = re.compile(
    r"^(?:AllocateBuffer|Assume\w+|AsyncCollective(?:Start|Done)|ConcatBitcast"
    r"|PrepareAsyncCall(?:Start|Done)"
    r"|GatherScatterIndicesBitpacked|Sharding|SPMD\w+|(?:Approx)?TopK|PartialReduce"
    r"|HostExecute|MoveTo(?:Host|Device)|annotate_device_placement|Pad|Slice\w*"
    r"|Sort\w*"
    r"|__cub\$\w+|cu_threefry\w+|cuda_threefry\w+|RngBitGenerator|SliceToDynamic"
    r"|PadToStatic|ResultScale\w*|xla\.\w+|__xla_gpu\$\w+|BlockwiseQuantize)$"
)
"""Calls that compute no matrix products and send nothing."""


def product_flops(module: Module) -> int:
    """Returns the FLOPs of all products on one device, including those in loops.

    Of a conditional, the branch with most FLOPs counts.

    Args:
        module: Module from ``read``.

    Raises:
        HloError: The sizes of a product, or the work of a call or loop, are unknown.

    >>> from whalejax.hlo.hlo_text import read
    >>> product_flops(
    ...     read(
    ...         "ENTRY %main (x: f32[4,8], y: f32[8,3]) -> f32[4,3] {\\n"
    ...         "  %x = f32[4,8]{1,0} parameter(0)\\n"
    ...         "  %y = f32[8,3]{1,0} parameter(1)\\n"
    ...         "  ROOT %d = f32[4,3]{1,0} dot(%x, %y), lhs_contracting_dims={1}\\n"
    ...         "}"
    ...     )
    ... )
    192
    """
    total: Counter[Branch] = Counter()
    for execution in executions(module):
        flops = _flops(execution)
        if flops and execution.loop:
            raise HloError(
                f"the loop {execution.loop} contains products, but its trip count is "
                "unknown, so they cannot be counted"
            )
        total[execution.branch] += flops * execution.count
    return sum(total[branch] for branch in largest_branches(total))


def _flops(execution: Execution) -> int:
    line = execution.line
    match line.opcode:
        case "dot":
            inside = _sizes(execution, 0, _int_list(line.rest, "lhs_contracting_dims"))
            return 2 * _elements(line.shapes[0]) * inside
        case "convolution":
            return _convolution(execution)
        case "custom-call" | "custom-call-start":
            return _call(execution)
        case "cholesky" | "triangular-solve":
            raise HloError(f"the work of the {line.opcode} {line.name} is not known")
    return 0


def _operand(execution: Execution, index: int) -> Shape:
    line = execution.line
    made = execution.computation.lines.get(line.operands[index])
    if made is None or not made.shapes:
        raise HloError(f"operand {index} of {line.opcode} {line.name} has no shape")
    return made.shapes[0]


def _sizes(execution: Execution, operand: int, dims: tuple[int, ...]) -> int:
    shape = _operand(execution, operand)[1]
    return math.prod(shape[d] for d in dims)


def _elements(shape: Shape) -> int:
    return math.prod(shape[1])


def _int_list(text: str, key: str) -> tuple[int, ...]:
    match = re.search(rf"{key}=\{{([\d,]*)\}}", text)
    return tuple(int(d) for d in match[1].split(",") if d) if match else ()


def _call(execution: Execution) -> int:
    line = execution.line
    match = _TARGET.search(line.rest)
    target = match[1] if match else ""
    if _PRODUCTS.match(target):
        return _library_product(execution)
    if called := _CUDNN.match(target):
        return _library_convolution(execution, called[1])
    if _NO_PRODUCT.match(target) or _RAGGED_PLACES.match(line.name):
        return 0
    if _RAGGED.search(line.rest):
        rows = execution.computation.lines[line.operands[-2]]
        return 2 * _elements(line.shapes[0]) * rows.shapes[0][1][-1]
    raise HloError(
        f"the custom call {target!r} ({line.op_name or line.name}) is unknown: its "
        "products and transfers cannot be counted"
    )


def _library_product(execution: Execution) -> int:
    line = execution.line
    match = _CONFIG.search(line.rest)
    try:
        config = json.loads(match[1]) if match else {}
        gemm = config.get("gemm_backend_config", config)
        dims = gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    except (json.JSONDecodeError, KeyError) as error:
        raise HloError(
            f"the product {line.name} does not say what it contracts"
        ) from error
    inside = _sizes(execution, 0, tuple(int(d) for d in dims))
    return 2 * _elements(line.shapes[0]) * inside


# Convolutions.


def _convolution(execution: Execution) -> int:
    line = execution.line
    inputs, kernel = _operand(execution, 0)[1], _operand(execution, 1)[1]
    batch_groups = _GROUPS.search(line.rest)
    if batch_groups is not None and int(batch_groups[1]) > 1:
        raise HloError(f"the convolution {line.name} groups its batch; not understood")
    return _convolved(line, inputs, kernel, line.shapes[0][1])


def _library_convolution(execution: Execution, what: str) -> int:
    made = execution.line.shapes[0][1]
    first, second = (_operand(execution, index)[1] for index in (0, 1))
    inputs, kernel, result = {
        "BackwardInput": (made, second, first),
        "BackwardFilter": (first, made, second),
    }.get(what, (first, second, made))
    return _convolved(execution.line, inputs, kernel, result)


def _convolved(
    line: Line,
    inputs: tuple[int, ...],
    kernel: tuple[int, ...],
    result: tuple[int, ...],
) -> int:
    labels = _DIMS.search(line.rest)
    if labels is None:
        raise HloError(f"the convolution {line.name} has no dim_labels")
    left, right, out = labels.groups()
    flops = 2 * kernel[right.index("i")] * result[out.index("f")]
    flops *= result[out.index("b")]
    for index, window in enumerate(_windows(line, left, kernel, right)):
        label = str(index)
        flops *= _meetings(inputs[left.index(label)], result[out.index(label)], *window)
    return flops


def _windows(
    line: Line, left: str, kernel: tuple[int, ...], right: str
) -> list[tuple[int, int, int, int, int]]:
    """Returns size, stride, low padding and dilations of each spatial dimension."""
    spatial = sum(label.isdigit() for label in left)
    text = _WINDOW.search(line.rest)
    parts = dict(
        word.split("=", 1) for word in (text[1].split() if text else []) if "=" in word
    )

    def numbers(key: str, default: str) -> list[str]:
        given = parts.get(key)
        return given.split("x") if given else [default] * spatial

    return [
        (
            kernel[right.index(str(index))],
            int(numbers("stride", "1")[index]),
            int(numbers("pad", "0_0")[index].split("_")[0]),
            int(numbers("lhs_dilate", "1")[index]),
            int(numbers("rhs_dilate", "1")[index]),
        )
        for index in range(spatial)
    ]


@functools.lru_cache(maxsize=4096)
def _meetings(
    size: int, out: int, window: int, stride: int, pad: int, dilate: int, spread: int
) -> int:
    """Returns the number of (output, kernel) positions that read an input element."""
    starts = np.arange(out, dtype=np.int64) * stride - pad
    count = 0
    for k in range(window):
        at = starts + k * spread
        count += int(
            np.count_nonzero(
                (at >= 0) & (at <= (size - 1) * dilate) & (at % dilate == 0)
            )
        )
    return count
