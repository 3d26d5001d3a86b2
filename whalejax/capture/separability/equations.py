"""One equation of both traces, as rules receive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax import _compat
from whalejax.capture.separability.facts import ArithmeticSteps
from whalejax.capture.separability.values import (
    SIZE,
    CoupledError,
    Dependence,
    Dims,
    Value,
    equal_dim,
    plain_dim,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEquation:
    """An equation in the trace of a part, and the same equation in that of the whole.

    Attributes:
        part, whole: Equation in each trace.
        values: Facts about the operands.
    """

    part: Any
    whole: Any
    values: Sequence[Value]

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.part.primitive.name)

    @property
    def params(self) -> Any:
        """Parameters in the trace of a part."""
        return self.part.params

    def equal_params(self, *names: str) -> tuple[Any, ...]:
        """Returns parameters that must be the same in both traces.

        Raises:
            CoupledError: A parameter differs.
        """
        for name in names:
            if self.part.params.get(name) != self.whole.params.get(name):
                raise CoupledError(f"{name} {SIZE}")
        return tuple(self.part.params.get(name) for name in names)

    def shapes(self, result: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shape of a result in both traces."""
        atoms = self.part.outvars[result], self.whole.outvars[result]
        return tuple(atoms[0].aval.shape), tuple(atoms[1].aval.shape)

    def operand_shapes(self, slot: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shape of an operand in both traces."""
        atoms = self.part.invars[slot], self.whole.invars[slot]
        return tuple(atoms[0].aval.shape), tuple(atoms[1].aval.shape)

    def dtype(self, slot: int) -> Any:
        """Returns the dtype of an operand."""
        return self.part.invars[slot].aval.dtype

    @property
    def result_dtype(self) -> Any:
        """Dtype of the first result."""
        return self.part.outvars[0].aval.dtype


Rule = Callable[[PairedEquation], list[Value]]
"""Function from an equation to facts about its results.

Raises:
    CoupledError: The equation couples samples.
"""


def fixed(dims: Dims = (), ratio: float | None = 1.0) -> Value:
    """Returns a value that depends on no sample."""
    return Value(kind=Dependence.FIXED, dims=dims, ratio=ratio)


def combined_kind(values: Sequence[Value]) -> tuple[Dependence, bool]:
    """Returns the dependence of a result on the samples, and whether it is inside a
    loop over them.

    Raises:
        CoupledError: Samples are combined with a sum over them, or with other samples.
    """
    kinds = {v.kind for v in values}
    if Dependence.SAMPLE in kinds and Dependence.SUM in kinds:
        raise CoupledError("combines each sample with a sum over all of them")
    within = {v.within for v in values if v.kind is Dependence.SAMPLE}
    if len(within) > 1:
        raise CoupledError("compares a sample with the others")
    return max(kinds, default=Dependence.FIXED), True in within


def number(part: Any, whole: Any) -> Value:
    """Returns facts about a scalar literal of the program."""
    a, b = np.asarray(part), np.asarray(whole)
    return Value(kind=Dependence.FIXED, ratio=_ratio(a, b), numbers=(a, b))


def constant(part: Any, whole: Any) -> Value:
    """Returns facts about an array that is a constant of the program.

    Raises:
        CoupledError: Its elements differ between the traces.
    """
    shapes = tuple(np.shape(part)), tuple(np.shape(whole))
    if shapes[0] == shapes[1] == ():
        return fixed() if _is_key(part) else number(part, whole)
    dims = [plain_dim(*sizes) for sizes in zip(*shapes, strict=True)]
    if part is whole or _is_key(part):
        return fixed(tuple(dims))
    a, b = np.asarray(part), np.asarray(whole)
    if a.size and b.size and (a == a.flat[0]).all() and (b == b.flat[0]).all():
        dims = [equal_dim(*sizes) for sizes in zip(*shapes, strict=True)]
        return fixed(tuple(dims), _ratio(a.flat[0], b.flat[0]))
    if a.shape == b.shape and not np.array_equal(a, b):
        raise CoupledError(f"an array of the program {SIZE}")
    counts = a.shape == b.shape and (a == np.arange(a.shape[-1])).all()
    return Value(
        kind=Dependence.FIXED,
        dims=tuple(dims),
        fact=ArithmeticSteps() if counts else None,
    )


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and _compat.is_key_dtype(dtype)


def _ratio(part: Any, whole: Any) -> float | None:
    """Returns the ratio of two numbers; None for two zeros, NaN for no ratio."""
    a, b = np.asarray(part), np.asarray(whole)
    if a == b or (a != a and b != b):
        return None if a == 0 and a.dtype != bool else 1.0
    if a.dtype == bool or a == 0 or b == 0:
        return float("nan")  # Not equal to any number, nor to itself.
    ratio = complex(a) / complex(b)
    return ratio.real if ratio.imag == 0 else float("nan")
