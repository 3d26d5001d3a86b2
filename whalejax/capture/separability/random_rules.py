"""Rules for random numbers.

By contract, draws from the loss's own ``rng`` belong to each sample: a step is compared
with one device's step of the same number of micro-batches. Draws from any other key
would be the same in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from whalejax.capture.separability.alignment import align_dims, check_one_batch
from whalejax.capture.separability.values import (
    Along,
    Atom,
    CoupledError,
    Dependence,
    Dim,
    PairedEquation,
    Rule,
    Value,
    combined_kind,
    is_one,
    plain_dim,
)


FIXED_KEY: Final = "fixed"
"""Source of keys that the loss makes from a constant."""

FOREIGN: Final = "draws from a key that is not the loss's rng"


def _drawn_dim(part: int, whole: int) -> Dim:
    return () if part == whole == 1 else (Atom(Along.DRAWN, part, whole),)


def _of_key(key: Value, dims: Sequence[Dim], *others: Value) -> Value:
    kind, within = combined_kind([key, *others])
    if kind is Dependence.SUM or not all(is_one(v.ratio) for v in (key, *others)):
        raise CoupledError("draws from a key that depends on all samples")
    check_one_batch(tuple(dims))
    return Value(kind=kind, dims=tuple(dims), within=within, key=key.key)


def _fresh_dims(equation: PairedEquation) -> list[Dim]:
    """Returns the dimensions of a key, followed by those that are drawn.

    A key that comes neither from the loss's rng nor from a sample draws the same
    numbers for the same indices in every part.
    """
    key, (part, whole) = equation.values[0], equation.shapes()
    behind = [*zip(part, whole, strict=True)][len(key.dims) :]
    if key.key != "rng" and any(a != b for a, b in behind):
        raise CoupledError(FOREIGN)
    dim = _drawn_dim if _is_own(key) else plain_dim
    return [*key.dims, *(dim(a, b) for a, b in behind)]


def _is_own(key: Value) -> bool:
    return key.key == "rng" or key.kind is Dependence.SAMPLE


def _bits(equation: PairedEquation) -> list[Value]:
    key = equation.values[0]
    dims = _fresh_dims(equation)
    own = _is_own(key)
    grows = any(a.grows for d in dims for a in d)
    if not own and (grows or key.key == "foreign"):
        raise CoupledError(FOREIGN)
    return [replace(_of_key(key, dims), key="")]


def _split(equation: PairedEquation) -> list[Value]:
    key = equation.values[0]
    return [_of_key(key, _fresh_dims(equation))]


def _fold_in(equation: PairedEquation) -> list[Value]:
    key, data = equation.values
    own = key.key == "rng"
    numbers = data.dims
    if own:  # By contract, the keys for different indices belong to each sample.
        numbers = tuple(
            tuple(
                Atom(Along.DRAWN, a.part, a.whole)
                if a.along is Along.PLAIN and data.kind is Dependence.FIXED
                else a
                for a in dim
            )
            for dim in data.dims
        )
    dims = [key.dims, numbers]
    longest = max(dims, key=len)
    return [_of_key(key, align_dims([d for d in dims if len(d) == len(longest)]), data)]


def _seed(equation: PairedEquation) -> list[Value]:
    value = equation.values[0]
    result = _of_key(value, value.dims)
    return [replace(result, key=value.key or FIXED_KEY)]


def _unwrap(equation: PairedEquation) -> list[Value]:
    key = equation.values[0]
    return [_of_key(key, _fresh_dims(equation))]


def _wrap(equation: PairedEquation) -> list[Value]:
    words = equation.values[0]
    return [_of_key(words, words.dims[:-1])]


def _check_equal_draws(equation: PairedEquation) -> list[Value]:
    return [equation.values[0]]


def _gamma(equation: PairedEquation) -> list[Value]:
    key, shape = equation.values[:2]
    if not _is_own(key):
        raise CoupledError(FOREIGN)
    if shape.kind is Dependence.SUM or not is_one(shape.ratio):
        raise CoupledError("draws from values that depend on all samples")
    front = key.dims if len(key.dims) == len(shape.dims) else shape.dims
    dims = align_dims([front, shape.dims])
    return [replace(_of_key(key, dims, shape), key="")]


RULES: Final[dict[str, Any | Rule]] = {
    "random_bits": _bits,
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_seed": _seed,
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
    "random_clone": _check_equal_draws,
    "random_gamma": _gamma,
}
