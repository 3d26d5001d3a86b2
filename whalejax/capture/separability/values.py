"""Facts about values of a traced loss, of few and of many samples at once.

Two traces of one loss are followed side by side: of a part of the batch, and of the
whole. A value is described once for both. Its dimensions are lists of atoms, outermost
first, and an atom has a size in each trace. What is not known to be anything better is
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
    """On none of them."""
    SAMPLE = 1
    """Element i along the samples depends on sample i alone."""
    SUM = 2
    """A fixed value plus a sum over the samples of a value of each."""
    COUPLED = 3
    """In another way, or in one that is not known."""


class Along(enum.Enum):
    """Meanings of an atom of a dimension."""

    SAMPLES = "samples"
    """The samples of the batch (or its groups), in order."""
    PLAIN = "plain"
    """Anything else; elements may differ from each other."""
    EQUAL = "equal"
    """Copies: all elements along it are equal."""
    DRAWN = "drawn"
    """Random numbers, each drawn for itself."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of a dimension, with its size in the trace of a part and of the whole."""

    along: Along
    part: int
    whole: int

    @property
    def grows(self) -> bool:
        """Returns whether it has more elements where the batch has more samples."""
        return self.part != self.whole

    def sized(self, part: int, whole: int) -> Atom:
        """The same with other sizes."""
        return Atom(self.along, part, whole)


Dim = tuple[Atom, ...]
"""A dimension: its atoms, outermost first; empty where it has one element."""

Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Operation that couples samples.

    Attributes:
        operation: Name of the primitive, or empty.
        line: The user's source line, such as ``"model.py:12"``.
        why: Effect of the operation on the samples.
        group: Samples in a group of neighbours that the batch is parted into; 0 if it
            is not.
        runs: Equal runs, one behind the other, that the batch is parted into; 0 if it
            is not.
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
        dims: Its dimensions.
        ratio: Factor by which elements are larger in the trace of a part than in that
            of the whole, where both see the same samples. For a sum the mean over the
            parts is compared with the whole. None for zero, where any factor is right.
        within: Whether it is of the one sample at which a loop over samples stands,
            and so has no dimension of samples.
        key: Source of its random key: ``"rng"``, the loss's own, ``"fixed"``, one that
            it makes of a number, or ``"foreign"``; empty where there is none.
        fact: Further fact; see ``facts``.
        numbers: Its value in both traces where it is a scalar of the program.
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
        """Whether it is of samples."""
        return self.kind is Dependence.SAMPLE

    @property
    def plain(self) -> Value:
        """The same without what else is known of it."""
        if self.fact is None and self.numbers is None:
            return self
        return replace(self, fact=None, numbers=None)

    def shaped(self, dims: Sequence[Dim]) -> Value:
        """The same elements along other dimensions."""
        return replace(self, dims=tuple(dims), fact=None, numbers=None)

    def scale_by(self, by: float | None) -> Value:
        """Returns its multiple by a number of known ratio; 1 leaves it unchanged."""
        ratio = None if self.ratio is None or by is None else self.ratio * by
        return replace(self, ratio=ratio, fact=None, numbers=None)


class CoupledError(Exception):
    """Raised by a rule for what couples samples.

    Args:
        why: Effect of the operation on the samples.
        group: Samples in a group of neighbours that it parts the batch into.
        runs: Equal runs that it parts the batch into.
    """

    def __init__(self, why: str, group: int = 0, runs: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.group = group
        self.runs = runs


SIZE: Final = "depends on the number of samples"
"""Why a value is coupled that is another multiple for a part than for the whole."""


OTHER_RATIO: Final = f"adds or compares values one of which {SIZE}"
"""Why a sum is coupled of what grows with the samples and of what does not."""


def same_ratio(values: Sequence[Value]) -> float | None:
    """The ratio that all of some values have; zeros have any.

    Raises:
        CoupledError: Two have different ones.
    """
    known = [v.ratio for v in values if v.ratio is not None]
    if not known:
        return None
    if not all(math.isclose(r, known[0], rel_tol=1e-5) for r in known):
        raise CoupledError(OTHER_RATIO)
    return known[0]


def is_one(ratio: float | None) -> bool:
    """A value is the same for a part and for the whole."""
    return ratio is None or math.isclose(ratio, 1.0, rel_tol=1e-5)


def product_ratio(values: Sequence[Value]) -> float | None:
    """The ratio of a product."""
    if any(v.ratio is None for v in values):
        return None
    return math.prod(v.ratio for v in values if v.ratio is not None)


def is_samples(dim: Dim) -> bool:
    """Whether samples run along a dimension, among other things."""
    return any(a.along is Along.SAMPLES for a in dim)


def size_of(dim: Dim) -> tuple[int, int]:
    """Elements along a dimension, in the trace of a part and of the whole."""
    return math.prod(a.part for a in dim), math.prod(a.whole for a in dim)


def sample_dims(value: Value) -> list[int]:
    """Dimensions along which samples run."""
    return [i for i, dim in enumerate(value.dims) if is_samples(dim)]


def plain_dim(part: int, whole: int) -> Dim:
    """A dimension of which nothing is known."""
    return () if part == whole == 1 else (Atom(Along.PLAIN, part, whole),)


def equal_dim(part: int, whole: int) -> Dim:
    """A dimension of copies."""
    return () if part == whole == 1 else (Atom(Along.EQUAL, part, whole),)


def has_own_places(dim: Dim) -> bool:
    """Whether it matters which of many samples an element along it belongs to."""
    return any(
        a.along is Along.SAMPLES or (a.along is Along.PLAIN and a.grows) for a in dim
    )
