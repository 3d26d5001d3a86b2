"""Facts about a value, in addition to its dependence on the samples.

Positions, and the orders in which experts' tokens are sorted, are coupled to all
samples by themselves. Programs use them to look up values in each sample, or to put
tokens back, and then they couple nothing. A fact carries what such a use needs.
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
    """Element i along the last dimension is i; both traces have one length."""


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """All elements are one number of the program, in both traces."""

    numbers: tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """Natural numbers cast from a narrower dtype, so that their sums do not wrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysFalse:
    """All elements are false, as in ``index < 0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexColumns:
    """Index arrays concatenated along the last dimension."""

    columns: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Integers, known by identity; none is negative if ``natural``."""

    natural: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """Integers that are known by identity.

    Attributes:
        ids: Identity of the integers.
        wrapped: Whether a constant was added, as to negative indices.
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
        dim: Atoms of that dimension.
        ids: Identity of the numbers that it sorts by, if known.
    """

    dim: Dim
    ids: Ids | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Source positions of elements after a sort.

    Attributes:
        sorting: The sort.
        divided: Divisor of the positions: k gives the token of k choices.
        inverse: Whether it holds the target positions instead.
    """

    sorting: Sorting
    divided: int = 1
    inverse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """A value in the order of a sort; ``base`` is the value in the samples' order."""

    sorting: Sorting
    base: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """The current index of a loop along the batch, or a multiple of it.

    Attributes:
        count: Iterations of the loop in both traces.
        times: Factor of the index, such as the size of chunks.
    """

    count: tuple[int, int]
    times: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A value that a loop along the batch carries, compared by identity."""


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
    """State that samples change: as given, or with a sum over samples added.

    Attributes:
        name: Name of the state.
        share: Ratio of a part's samples to the whole batch's.
    """

    name: str
    share: float


def fact_of(value: Value, kind: type[Any]) -> Any:
    """Returns the fact about a value if it has the given type, else None."""
    return value.fact if isinstance(value.fact, kind) else None
