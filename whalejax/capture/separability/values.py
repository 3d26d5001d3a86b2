"""Facts about values of a traced loss, for few and for many samples at once.

Two traces of one loss are followed together: of a part of the batch, and of the whole.
A value is described once for both. Each of its dimensions is a list of atoms, outermost
first, and an atom has a size in each trace. A value that no rule describes is
``COUPLED``; its reason is the equation that made it so.

Positions, and the orders in which experts' tokens are sorted, depend on all samples by
themselves. But programs use them to look up values of each sample, or to put tokens
back, and such a use couples nothing. A fact has what rules must know about such a
value. Rules receive an equation of both traces.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from whalejax import _compat


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
    """Kinds of atoms of a dimension."""

    SAMPLES = "samples"
    """The samples of the batch, or its groups of samples, in order."""
    PLAIN = "plain"
    """Anything else; elements may differ from each other."""
    EQUAL = "equal"
    """Copies: all elements along the atom are equal."""
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
        """Whether the atom is larger if the batch has more samples."""
        return self.part != self.whole

    def sized(self, part: int, whole: int) -> Atom:
        """Returns the atom with other sizes."""
        return Atom(self.along, part, whole)


Dim = tuple[Atom, ...]
"""A dimension: its atoms, outermost first; empty if it has one element."""

Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Reason for coupled samples: an operation and what it does.

    Attributes:
        operation: Name of the primitive, or empty.
        line: The user's source line, such as ``"model.py:12"``.
        why: Effect of the operation on the samples.
        group: Number of samples in each group of neighbours that the operation forms; 0
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
        ratio: Factor by which elements are larger in the trace of a part than in the
            trace of the whole, if both read the same samples. For a sum, the mean over
            the parts is compared with the whole. None for zero, which has any ratio.
        within: Whether the value belongs to the current sample of a loop over samples,
            and so has no dimension of samples.
        key: Source of the value's random key: ``"rng"`` for the loss's own, ``"fixed"``
            for a key made from a constant, or ``"foreign"``; empty without a key.
        fact: Further fact, such as ``Filled``; None without one.
        numbers: The number in both traces if the value is a scalar literal.
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
        """Whether nothing is known about the dependence on the samples."""
        return self.kind is Dependence.COUPLED

    @property
    def batched(self) -> bool:
        """Whether the value has a part for each sample."""
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
        """Returns the value times a number whose ratio is ``by``."""
        ratio = None if self.ratio is None or by is None else self.ratio * by
        return replace(self, ratio=ratio, fact=None, numbers=None)


class CoupledError(Exception):
    """An operation couples samples.

    Args:
        why: Effect of the operation on the samples.
        group: Number of samples in each group of neighbours that the operation forms.
        runs: Number of equal runs into which the operation divides the batch.
    """

    def __init__(self, why: str, group: int = 0, runs: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.group = group
        self.runs = runs


SIZE: Final = "depends on the number of samples"
"""Reason for a value with different factors for a part and for the whole."""


OTHER_RATIO: Final = f"adds or compares values one of which {SIZE}"
"""Reason for a sum of terms that grow with the samples and terms that do not."""


def same_ratio(values: Sequence[Value]) -> float | None:
    """Returns the common ratio of some values; None if all are zeros.

    Zeros have any ratio.

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
    """Returns whether a ratio may be 1; zeros, whose ratio is None, have any."""
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
    """Returns a dimension of one plain atom."""
    return () if part == whole == 1 else (Atom(Along.PLAIN, part, whole),)


def equal_dim(part: int, whole: int) -> Dim:
    """Returns a dimension of copies."""
    return () if part == whole == 1 else (Atom(Along.EQUAL, part, whole),)


def has_own_places(dim: Dim) -> bool:
    """Returns whether elements along a dimension belong to different samples."""
    return any(
        a.along is Along.SAMPLES or (a.along is Along.PLAIN and a.grows) for a in dim
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Element i along a dimension is i, and the dimension grows with the samples."""

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSteps:
    """Element i along the last dimension is i; both traces have the same length."""


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
    """Integers whose identity is known; none is negative if ``natural``."""

    natural: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """Integers that are equal to known ones.

    Attributes:
        ids: The known integers.
        wrapped: Whether a constant was added, as to indices that count from the end.
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
        dim: Atoms of the dimension.
        ids: Identity of the numbers by which the sort orders, if known.
    """

    dim: Dim
    ids: Ids | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Source positions of elements after a sort.

    Attributes:
        sorting: The sort.
        divided: Divisor of the positions. Divided by k, the position of one of a
            token's k choices is the position of the token.
        inverse: Whether the value has target positions instead of source positions.
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
    """The current index of a loop along the batch, or a multiple of the index.

    Attributes:
        count: Number of iterations in both traces.
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
        added: Sum of what the iteration added; None for nothing.
    """

    carry: Carry
    added: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """State that samples change: as given, or after a sum over samples was added.

    Attributes:
        name: Name of the state.
        share: Ratio of a part's samples to the whole batch's.
    """

    name: str
    share: float


def fact_of(value: Value, kind: type[Any]) -> Any:
    """Returns the fact about a value if it has the given type, else None."""
    return value.fact if isinstance(value.fact, kind) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEquation:
    """An equation in the trace of a part, and the same equation in that of the whole.

    Attributes:
        part: Equation in the trace of the part.
        whole: Equation in the trace of the whole.
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
    """Returns how a result depends on the samples, and whether it is in a sample loop.

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
        CoupledError: Elements of the array differ between the traces.
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
    a, b = np.asarray(part), np.asarray(whole)
    if a == b or (a != a and b != b):
        return None if a == 0 and a.dtype != bool else 1.0
    if a.dtype == bool or a == 0 or b == 0:
        return float("nan")  # NaN differs from every other ratio and from itself.
    ratio = complex(a) / complex(b)
    return ratio.real if ratio.imag == 0 else float("nan")
