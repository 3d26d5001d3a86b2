"""Facts about a value beside its dependence on the samples.

Positions, and the orders in which experts' tokens are sorted, are coupled to all
samples by themselves. Programs use them to look something up in each sample, or to
bring tokens back where they were, and then nothing is coupled. A fact carries what such
a use needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from whalejax.capture.separability.values import Dim, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Element i along a dimension is i, and the dimension grows with the samples."""

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSteps:
    """Element i along the last dimension is i, of as many for a part as for all."""


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """All elements are one number of the program, in both traces."""

    numbers: tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """Natural numbers of a narrower dtype: sums of many in this one do not wrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysFalse:
    """All elements are false, as of ``place < 0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexColumns:
    """Index arrays beside each other along the last dimension."""

    columns: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Whole numbers, known by identity: none is negative where ``natural``."""

    natural: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """Whole numbers that are told from others.

    Attributes:
        ids: Numbers of the distinct values.
        wrapped: A constant was added, as to negative indices.
    """

    ids: Ids
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneHot:
    """Whether some numbers equal 0, 1, 2 … along the last dimension."""

    ids: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCounts:
    """Counts of the numbers 0, 1, 2 …"""

    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Sorting:
    """One sort along a dimension of samples.

    Attributes:
        dim: The atoms of that dimension.
        ids: Numbers that it sorts by, if they are told from others.
    """

    dim: Dim
    ids: Ids | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Source positions of elements after a sort.

    Attributes:
        sorting: The sort.
        divided: Divisor of the places: k gives the token of k choices.
        inverse: Whether it holds the target positions instead.
    """

    sorting: Sorting
    divided: int = 1
    inverse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """A value in the order of a sort; ``base`` is what it is in the samples' order."""

    sorting: Sorting
    base: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """The place at which a loop along the batch stands, or a multiple of it.

    Attributes:
        count: Iterations of the loop in both traces.
        times: Factor of the place, as for chunks of so many.
    """

    count: tuple[int, int]
    times: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A value that a loop along the batch carries, known by identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSum:
    """Running sum of a loop along the batch, with one iteration's increment.

    Attributes:
        carry: Value at the beginning of the iteration.
        added: Increment since then; None for nothing.
    """

    carry: Carry
    added: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """State that samples change: as it was given, or with a sum of them added.

    Attributes:
        name: Name of the state.
        share: Samples of a part over those of the whole.
    """

    name: str
    share: float


def fact_of(value: Value, kind: type[Any]) -> Any:
    """The fact that is known of a value if it is of some type, or None."""
    return value.fact if isinstance(value.fact, kind) else None
