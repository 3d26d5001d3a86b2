"""Facts about values of a traced loss, for few and for many samples at once.

Two traces of one loss are followed together: of a part of the batch, and of the whole.
A value is described once for both. Its dimensions are lists of atoms, outermost first,
and an atom has a size in each trace. A value without a better description is
``COUPLED``, with the equation that made it so.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final


class Dependence(enum.IntEnum):
    """Dependence of a value on the samples."""

    FIXED = 0
    """Depends on no sample."""
    SAMPLE = 1
    """Element i along the samples depends on sample i alone."""
    SUM = 2
    """A fixed value plus a sum of one value for each sample."""
    COUPLED = 3
    """Depends on samples in another or an unknown way."""


class Along(enum.Enum):
    """Meanings of an atom of a dimension."""

    SAMPLES = "samples"
    """The samples of the batch (or its groups), in order."""
    PLAIN = "plain"
    """Anything else; elements may differ from each other."""
    EQUAL = "equal"
    """Copies: all elements along it are equal."""
    DRAWN = "drawn"
    """Random numbers, drawn independently."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of a dimension, with its size in the trace of a part and of the whole."""

    along: Along
    part: int
    whole: int

    @property
    def grows(self) -> bool:
        """Whether it has more elements if the batch has more samples."""
        return self.part != self.whole

    def sized(self, part: int, whole: int) -> Atom:
        """Returns the atom with other sizes."""
        return Atom(self.along, part, whole)


Dim = tuple[Atom, ...]
"""A dimension: its atoms, outermost first; empty if it has one element."""

Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Operation that couples samples.

    Attributes:
        operation: Name of the primitive, or empty.
        line: The user's source line, such as ``"model.py:12"``.
        why: Effect of the operation on the samples.
        group: Number of samples in the groups of neighbours that the operation forms; 0
            if it forms none.
        runs: Number of equal consecutive runs into which the operation divides the
            batch; 0 if it does not.
    """

    operation: str
    line: str
    why: str
    group: int = 0
    runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Facts about one value.

    Attributes:
        kind: Dependence on the samples.
        dims: Dimensions of the value.
        ratio: Factor by which elements are larger in the trace of a part than in that
            of the whole, if both read the same samples. For a sum, the mean over the
            parts is compared with the whole. None for zero, where any factor is right.
        within: Whether it belongs to the current sample of a loop over samples, and so
            has no dimension of samples.
        key: Source of its random key: ``"rng"`` for the loss's own, ``"fixed"`` for one
            made from a constant, or ``"foreign"``; empty if there is none.
        fact: Further fact; see ``facts``.
        numbers: Its value in both traces if it is a scalar literal.
        reason: Reason for the coupling.
    """

    kind: Dependence
    dims: Dims = ()
    ratio: float | None = 1.0
    within: bool = False
    key: str = ""
    fact: Any = None
    numbers: tuple[Any, Any] | None = None
    reason: Reason | None = None

    @property
    def coupled(self) -> bool:
        """Whether nothing is known of its dependence on the samples."""
        return self.kind is Dependence.COUPLED

    @property
    def batched(self) -> bool:
        """Whether it has a value for each sample."""
        return self.kind is Dependence.SAMPLE

    @property
    def plain(self) -> Value:
        """Same value without further facts."""
        if self.fact is None and self.numbers is None:
            return self
        return replace(self, fact=None, numbers=None)

    def shaped(self, dims: Sequence[Dim]) -> Value:
        """Returns the same elements along other dimensions."""
        return replace(self, dims=tuple(dims), fact=None, numbers=None)

    def scale_by(self, by: float | None) -> Value:
        """Returns the value times a number with a ratio; 1 changes nothing."""
        ratio = None if self.ratio is None or by is None else self.ratio * by
        return replace(self, ratio=ratio, fact=None, numbers=None)


class CoupledError(Exception):
    """An operation couples samples.

    Args:
        why: Effect of the operation on the samples.
        group: Number of samples in the groups of neighbours that it forms.
        runs: Number of equal runs into which it divides the batch.
    """

    def __init__(self, why: str, group: int = 0, runs: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.group = group
        self.runs = runs


SIZE: Final = "depends on the number of samples"
"""Reason for a value whose factor differs between a part and the whole."""


OTHER_RATIO: Final = f"adds or compares values one of which {SIZE}"
"""Reason for a sum of terms that grow with the samples and terms that do not."""


def same_ratio(values: Sequence[Value]) -> float | None:
    """Returns the common ratio of some values; None if all are zeros, which have any.

    Raises:
        CoupledError: Two values have different ratios.
    """
    known = [v.ratio for v in values if v.ratio is not None]
    if not known:
        return None
    if not all(math.isclose(r, known[0], rel_tol=1e-5) for r in known):
        raise CoupledError(OTHER_RATIO)
    return known[0]


def is_one(ratio: float | None) -> bool:
    """Returns whether a ratio is 1, or None for zero."""
    return ratio is None or math.isclose(ratio, 1.0, rel_tol=1e-5)


def product_ratio(values: Sequence[Value]) -> float | None:
    """Returns the ratio of a product; None if a factor is zero."""
    if any(v.ratio is None for v in values):
        return None
    return math.prod(v.ratio for v in values if v.ratio is not None)


def is_samples(dim: Dim) -> bool:
    """Returns whether a dimension contains samples."""
    return any(a.along is Along.SAMPLES for a in dim)


def size_of(dim: Dim) -> tuple[int, int]:
    """Returns the size of a dimension in the traces of part and whole."""
    return math.prod(a.part for a in dim), math.prod(a.whole for a in dim)


def plain_dim(part: int, whole: int) -> Dim:
    """Returns a dimension without known facts."""
    return () if part == whole == 1 else (Atom(Along.PLAIN, part, whole),)


def equal_dim(part: int, whole: int) -> Dim:
    """Returns a dimension of copies."""
    return () if part == whole == 1 else (Atom(Along.EQUAL, part, whole),)


def has_own_places(dim: Dim) -> bool:
    """Returns whether elements along a dimension belong to different samples."""
    return any(
        a.along is Along.SAMPLES or (a.along is Along.PLAIN and a.grows) for a in dim
    )
