"""The verdict on a loss: a mean of independent samples, or the reason why not.

A part of the batch computes the same as the whole on two conditions. The loss is a sum
over samples, and its coefficient times the number of samples is equal for both. The
program is traced with both numbers of samples. Numbers in the program need no rules, as
the two traces show how they change.

A dimension of size 1 is often treated by another rule than a longer one, as in
``jnp.squeeze``, and a loss may branch on it. So the proof uses parts of two or more
samples. The program for one sample must then have the same operations with the same
operands and parameters, and its shapes must depend on the number of samples in the same
way. Operations that only add or drop dimensions of size 1 do not count.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.separability.elementwise_rules import RULES as ELEMENTWISE_RULES
from whalejax.capture.separability.interpret import (
    UNKNOWN_FACTOR,
    Interpreter,
    of_einsum,
)
from whalejax.capture.separability.values import (
    Along,
    Atom,
    Counter,
    Dependence,
    Dim,
    Reason,
    Value,
    fact_of,
    is_one,
    plain_dim,
)


OTHER_PROGRAM: Final = "does other operations for one sample"
OTHER_OPERATION: Final = "does something else for one sample"
OTHER_ARRAY: Final = "has a different array for one sample"

Shape = tuple[int, ...]
Three = tuple[Any, Any, Any]
"""Items at one position of the three traces: for one sample, and for two larger
numbers."""

_MOVING: Final = (
    "squeeze",
    "expand_dims",
    "copy",
    "reshape",
    "broadcast_in_dim",
    "transpose",
)
_SWITCHES: Final = (bool, str, bytes, enum.Enum, np.dtype)
_CALLS: Final = (
    "jit pjit closed_call core_call remat checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr cond while custom_linear_solve"
).split()
"""Calls whose bodies are compared, as operands may have dimensions of size 1."""

_MATRICES: Final = tuple("lu cholesky eigh qr svd geqrf triangular_solve".split())
"""Operations on the last two dimensions."""

_DIMENSIONS: Final = frozenset(
    "dimension dimensions broadcast_dimensions shape new_sizes permutation sharding "
    "axes dimension_numbers slice_sizes".split()
)
"""Parameters that name or number dimensions."""

_REDUCING: Final = tuple(
    f"reduce_{name}" for name in "sum max min prod and or xor".split()
)


def single_sample_reason(
    single: Any, pair: tuple[Any, Any], sizes: tuple[int, int, int]
) -> Reason | None:
    """Returns why the proof for more samples does not cover one sample.

    Args:
        single: Program for one sample, or one group.
        pair: Traces with more samples.
        sizes: Number of samples of each program.

    Returns:
        The reason; None if the proof covers one sample.
    """
    try:
        _Comparison(sizes=sizes).compare((single, *pair))
    except _UnlikeError as error:
        return error.reason
    return None


class _UnlikeError(Exception):
    def __init__(self, why: str, equation: Any = None) -> None:
        super().__init__(why)
        self.reason = Reason(operation="", line="", why=why)
        if equation is not None:
            name, line = equation.primitive.name, _compat.source_text(equation)
            reason = Reason(operation=name, line=line, why=why)
            self.reason = of_einsum(reason, equation)


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Compares three traces. Equal arrays of different traces get one name."""

    sizes: tuple[int, int, int]

    def compare(self, programs: Three) -> None:
        opened = [_compat.open_jaxpr(p) for p in programs]
        bodies = [body for body, _ in opened]
        self._compare_arrays([constants for _, constants in opened])
        names = _Names()
        for role in ("constvars", "invars"):
            atoms = [getattr(body, role) for body in bodies]
            if len({len(a) for a in atoms}) > 1:
                raise _UnlikeError(OTHER_PROGRAM)
            for one, small, _ in zip(*atoms, strict=True):
                names.add(one, small)
        if len(bodies[1].eqns) != len(bodies[2].eqns):
            raise _UnlikeError(OTHER_PROGRAM)
        pairs = zip(bodies[1].eqns, bodies[2].eqns, strict=True)
        ones = [e for e in bodies[0].eqns if not self._is_left_out(names.same[0], e)]
        more = [p for p in pairs if not self._is_left_out(names.same[1], *p)]
        if len(ones) != len(more):
            raise _UnlikeError(OTHER_PROGRAM)
        for one, (small, large) in zip(ones, more, strict=True):
            three = one, small, large
            if len({e.primitive for e in three}) > 1 or not self._is_same(names, three):
                raise _UnlikeError(OTHER_OPERATION, one)
            for a, b in zip(one.outvars, small.outvars, strict=True):
                names.add(a, b)
        if len({len(body.outvars) for body in bodies}) > 1:
            raise _UnlikeError(OTHER_PROGRAM)
        outputs = zip(*(body.outvars for body in bodies), strict=True)
        if not all(self._is_one(names, three) for three in outputs):
            raise _UnlikeError(OTHER_PROGRAM)

    def _compare_arrays(self, constants: Sequence[Any]) -> None:
        if len({len(arrays) for arrays in constants}) > 1:
            raise _UnlikeError(OTHER_ARRAY)
        for three in zip(*constants, strict=True):
            if any(_compat.is_key_dtype(array.dtype) for array in three):
                continue
            if not self._follow([_values(array) for array in three]):
                raise _UnlikeError(OTHER_ARRAY)

    # Shapes.

    def _shape(self, atoms: Sequence[Any]) -> Shape:
        """Returns an array's shape for one sample.

        It is read from the trace for one sample, or follows from the two others.
        """
        shapes = [tuple(a.aval.shape) for a in atoms]
        if len(shapes) == 1:
            return shapes[0]
        pairs = zip(*shapes, strict=True)
        return tuple(round(self._expected(*pair)) for pair in pairs)

    def _expected(self, small: Any, large: Any) -> Any:
        if small == large or not (small and large):
            return small
        power = math.log(abs(large / small)) / math.log(self.sizes[2] / self.sizes[1])
        return small * (self.sizes[0] / self.sizes[1]) ** power

    def _is_left_out(self, same: dict[Any, Any], *equations: Any) -> bool:
        """Returns whether an operation only adds or drops dimensions of size 1."""
        first = equations[0]
        if first.primitive.name not in _MOVING:
            return False
        before = self._shape([e.invars[0] for e in equations])
        after = self._shape([e.outvars[0] for e in equations])
        moved = _dim_positions(first, before, after)
        if _wide(before) != _wide(after) or moved != [*range(len(moved))]:
            return False
        source = first.invars[0]
        literal = _compat.is_literal(source)
        same[first.outvars[0]] = source if literal else same.get(source, source)
        return True

    # Operations.

    def _is_same(self, names: _Names, three: Three) -> bool:
        if len({(len(e.invars), len(e.outvars)) for e in three}) > 1:
            return False
        operands = [*zip(*(e.invars for e in three), strict=True)]
        if not all(self._is_one(names, atoms) for atoms in operands):
            return False
        results = [*zip(*(e.outvars for e in three), strict=True)]
        pairs = [
            (self._shape(atoms[:1]), self._shape(atoms[1:]))
            for atoms in (*operands, *results)
        ]
        if any(_wide(a) != _wide(b) for a, b in pairs):
            return False
        ways = [
            _dim_treatment(e, [p[i] for p in pairs]) for i, e in enumerate(three[:2])
        ]
        if ways[0] != ways[1]:
            return False
        if ways[0] is None and any(a != b for a, b in pairs):
            return False
        compared = set(three[0].params)
        if ways[0] is not None:
            compared -= _DIMENSIONS
        return all(self._follow([e.params.get(key) for e in three]) for key in compared)

    def _is_one(self, names: _Names, atoms: Three) -> bool:
        atoms = (*(names.source(i, a) for i, a in enumerate(atoms[:2])), atoms[2])
        literal = [_compat.is_literal(a) for a in atoms[:2]]
        if not any(literal):
            return names.given[0][atoms[0]] == names.given[1][atoms[1]]
        if not all(literal):
            return False
        large = atoms[2]
        third = large.val if _compat.is_literal(large) else atoms[1].val
        return self._follow([_values(a.val) for a in atoms[:2]] + [_values(third)])

    def _follow(self, three: Sequence[Any]) -> bool:
        """Returns whether a parameter for one sample follows from those for more."""
        one, small, large = three
        if one is None or isinstance(one, _SWITCHES):
            return bool(one == small == large)
        if isinstance(one, int | float | complex):
            return self._is_power(one, small, large)
        if isinstance(one, tuple | list):
            if not len(one) == len(small) == len(large):
                return False
            return all(map(self._follow, zip(*three, strict=True)))
        if dataclasses.is_dataclass(one) and type(one).__module__.startswith("jax"):
            keys = [f.name for f in dataclasses.fields(one)]
            values = [[getattr(x, key, None) for x in three] for key in keys]
            return all(map(self._follow, values))
        if hasattr(_compat.open_jaxpr(one)[0], "eqns"):
            self.compare((one, small, large))
        return True

    def _is_power(self, one: Any, small: Any, large: Any) -> bool:
        if small == large or (small != small and large != large):
            return bool(one == small or one != one)
        if not (one and small and large and one == one):
            return False
        away = abs(one - self._expected(small, large)) / abs(small)
        return math.isclose(away, 0.0, abs_tol=1e-5)


class _Names:
    def __init__(self) -> None:
        self.given: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
        self.same: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})

    def add(self, one: Any, small: Any) -> None:
        self.given[0][one] = self.given[1][small] = len(self.given[0])

    def source(self, trace: int, atom: Any) -> Any:
        if _compat.is_literal(atom):
            return atom
        return self.same[trace].get(atom, atom)


def _wide(shape: Shape) -> list[int]:
    return [n for n in shape if n != 1]


def _numbers(shape: Shape) -> dict[int, int]:
    return {d: i for i, d in enumerate(d for d, n in enumerate(shape) if n != 1)}


def _dim_treatment(equation: Any, shapes: Sequence[Shape]) -> Any:
    """Returns how an operation treats dimensions larger than 1.

    The treatment is equal for one sample and for more if the operation is the same.
    Returns None if all dimensions must be equal.
    """
    name, params = equation.primitive.name, equation.params
    if name in _MOVING:
        return _dim_positions(equation, shapes[0], shapes[-1])
    if name in _REDUCING:
        number = _numbers(shapes[0])
        return sorted(number[d] for d in params["axes"] if d in number)
    if name in _CALLS:
        return ()
    if name in _MATRICES:
        return [shape[-2:] for shape in shapes[: len(equation.invars)]]
    if name == "lu_pivots_to_permutation":
        return [shape[-1:] for shape in shapes]
    if name == "sort":
        return _numbers(shapes[0]).get(params["dimension"])
    if name == "dot_general":
        return _paired(params["dimension_numbers"], shapes)
    if name == "gather":
        return _looked_up(params, shapes)
    if name in ELEMENTWISE_RULES and len(equation.outvars) == 1:
        number = _numbers(shapes[-1])
        return [
            [number[d] for d, n in enumerate(shape) if n != 1] for shape in shapes[:-1]
        ]
    return None


def _dim_positions(equation: Any, before: Shape, after: Shape) -> list[int]:
    number = _numbers(after)
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        where = params["broadcast_dimensions"]
        return [number[where[d]] for d in _numbers(before)]
    if name == "transpose":
        where = [*params["permutation"]]
        return [number[where.index(d)] for d in _numbers(before)]
    return [*range(len(_wide(before)))]


def _paired(numbers: Any, shapes: Sequence[Shape]) -> Any:
    left, right = map(_numbers, shapes[:2])
    contracted, batch = (
        [(left[i], right[j]) for i, j in zip(*both, strict=True) if i in left]
        for both in numbers
    )
    return sorted(contracted), batch


def _looked_up(params: Any, shapes: Sequence[Shape]) -> Any:
    """Returns the dimension numbers of a lookup; None if it looks up one element."""
    numbers = params["dimension_numbers"]
    operand, indices, result = map(_numbers, shapes)
    if any(d not in operand for d in numbers.start_index_map):
        return None
    batching = zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    )
    return (
        [operand[d] for d in numbers.start_index_map],
        [(operand[o], indices[i]) for o, i in batching if o in operand],
        [operand[d] for d in numbers.collapsed_slice_dims if d in operand],
        [result[d] for d in numbers.offset_dims if d in result],
        [params["slice_sizes"][d] for d in operand],
    )


def _values(array: Any) -> list[complex]:
    result = np.asarray(array)
    if not np.issubdtype(result.dtype, np.number):
        result = result.astype(np.float64)
    flat = [complex(n) for n in result.ravel()]
    return flat[:1] if all(n == flat[0] for n in flat) else flat


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """One flat input of a traced loss.

    Attributes:
        axis: Dimension of the samples; None without one.
        key: Source of the random key: ``"rng"``, ``"foreign"``, or empty for an input
            that is no key.
        state: Name of the state that samples change; empty for other inputs.
    """

    axis: int | None = None
    key: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPrograms:
    """Programs from which the independence of samples is proven.

    Attributes:
        at: Function from a number of samples to the loss's jaxpr, whose results are
            total, weight and the state that samples may change.
        inputs: Every flat input.
        state: Names of the state, in the order of the results.
        weighted: Whether the loss is a ``WeightedLoss``.
    """

    at: Callable[[int], Any]
    inputs: Sequence[LossInput]
    state: Sequence[str]
    weighted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """Verdict on whether parts of a batch compute the same as the whole.

    Attributes:
        group: Number of neighbouring samples that must stay together; default 1.
        runs: Number of equal runs of the batch; default 1. A part must have the same
            indices of each run. An example is a run of chosen and one of rejected
            samples.
        reason: Reason why parts differ from the whole; None if they do not.
        sums: Whether the loss is a sum over its samples instead of a mean.
        in_weight: Whether the reason concerns the weight of a ``WeightedLoss``.
    """

    group: int = 1
    runs: int = 1
    reason: Reason | None = None
    sums: bool = False
    in_weight: bool = False

    @property
    def proven(self) -> bool:
        """Whether parts compute the same as the whole."""
        return self.reason is None


MOST_GROUPS: Final = 4
"""Maximum number of group sizes to try, if reshapes require larger groups."""


def prove(
    programs: LossPrograms, part: int, whole: int, group: int | None = None
) -> Separability:
    """Decides whether parts of a batch compute the same as the whole.

    Args:
        programs: Programs of the loss.
        part: Number of samples of a part.
        whole: Number of samples of the whole batch.
        group: Number of neighbouring samples that stay together. None tries 1 first,
            and then the size that reshapes of the batch require.

    Returns:
        The verdict. If the loss cannot be traced with both sizes, that is its reason.
    """
    if part == whole:
        return Separability(group=group or 1)
    tried, first = (group or 1, 1), None
    for _ in range(MOST_GROUPS):
        result = _prove(programs, part, whole, *tried)
        first = first or result
        if result.reason is None:
            return result
        wanted = result.reason.group or tried[0], result.reason.runs or tried[1]
        if wanted == tried or (group is not None and wanted[0] != group):
            break
        if any(n % math.prod(wanted) for n in (part, whole)):
            break
        tried = wanted
    assert first is not None
    return first


def _prove(
    programs: LossPrograms, part: int, whole: int, group: int, runs: int
) -> Separability:
    unit = group * runs
    if part % unit or whole % unit:
        why = f"{part} samples are no whole groups of {unit}"
        return _refuse(Reason(operation="", line="", why=why))
    small, large = part, whole
    if part == unit:  # One group makes a dimension of size 1; the proof needs two.
        small, large = 2 * unit, whole if whole > 2 * unit else 4 * unit
    try:
        pair = programs.at(small), programs.at(large)
        if small != part:
            sizes = part, small, large
            unlike = single_sample_reason(programs.at(part), pair, sizes)
            if unlike is not None:
                return _refuse(unlike)
    except Exception as error:  # Raised by the user's loss.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = f"cannot be traced with another number of samples ({text:.120})"
        return _refuse(Reason(operation="", line="", why=why))
    share = small / large
    inputs = known_inputs(programs.inputs, pair, share, group=group, runs=runs)
    scale = UNKNOWN_FACTOR if programs.weighted else 1.0
    follower = Interpreter(share=share, group=group, runs=runs, scale=scale)
    total, weight, *state = follower.run(*pair, inputs)
    verdict = _verdict(total, weight, share, weighted=programs.weighted)
    for name, value in zip(programs.state, state, strict=True):
        if verdict.proven:
            verdict = _of_state(name, value)
    return replace(verdict, group=group, runs=runs)


def known_inputs(
    inputs: Sequence[LossInput],
    pair: Sequence[Any],
    share: float,
    *,
    group: int = 1,
    runs: int = 1,
) -> list[Value]:
    """Returns facts about the inputs of a loss, traced with two numbers of samples.

    Args:
        inputs: Every flat input.
        pair: Jaxprs with fewer and with more samples.
        share: Ratio of the first jaxpr's samples to the second one's.
        group: Number of neighbouring samples that must stay together; default 1.
        runs: Number of equal runs of the batch; default 1.
    """
    bodies = [_compat.open_jaxpr(p)[0].invars for p in pair]
    return [
        _input(one, a.aval.shape, b.aval.shape, group, runs, share)
        for one, a, b in zip(inputs, *bodies, strict=True)
    ]


def _refuse(reason: Reason, *, sums: bool = False) -> Separability:
    return Separability(reason=reason, sums=sums)


def _input(
    one: LossInput,
    part: Sequence[int],
    whole: Sequence[int],
    group: int,
    runs: int,
    share: float,
) -> Value:
    dims: list[Dim] = [plain_dim(a, b) for a, b in zip(part, whole, strict=True)]
    if one.state:
        why = f"reads {one.state}, which every micro-batch changes"
        return Value(
            kind=Dependence.COUPLED,
            dims=tuple(dims),
            fact=Counter(name=one.state, share=share),
            reason=Reason(operation="", line="", why=why),
        )
    if one.axis is None:
        return Value(kind=Dependence.FIXED, dims=tuple(dims), key=one.key)
    unit, axis = group * runs, one.axis
    samples = Atom(Along.SAMPLES, part[axis] // unit, whole[axis] // unit)
    dims[axis] = (*plain_dim(runs, runs), samples, *plain_dim(group, group))
    return Value(kind=Dependence.SAMPLE, dims=tuple(dims))


def _verdict(
    total: Value, weight: Value, share: float, *, weighted: bool
) -> Separability:
    for value in (total, weight) if weighted else (total,):
        if value.coupled:
            assert value.reason is not None
            of_weight = value is weight and weighted
            return replace(_refuse(value.reason), in_weight=of_weight)
        if value.kind is Dependence.SAMPLE:
            why = "depends on one sample alone"
            return _refuse(Reason(operation="", line="", why=why))
    over = weight.ratio if weighted else 1.0
    ratio = total.ratio
    if ratio is None:
        return Separability()
    if over and math.isfinite(ratio) and math.isclose(ratio, over, rel_tol=1e-5):
        return Separability()
    if weighted or not ratio > 0:
        why = "is divided by a number that is not proportional to the samples"
        if not weighted:
            why = "has a coefficient that is zero or changes its sign"
        return _refuse(Reason(operation="", line="", why=why))
    if math.isclose(ratio, share, rel_tol=1e-5):
        return _refuse(Reason(operation="", line="", why=SUM), sums=True)
    why = (
        "has a coefficient that does not fall as the number of samples grows: for a "
        f"part, the mean is {ratio:.4g} times that of the whole"
    )
    return _refuse(Reason(operation="", line="", why=why), sums=True)


SUM: Final = "adds its samples up and does not divide by their number"


def _of_state(name: str, value: Value) -> Separability:
    counter = fact_of(value, Counter)
    if counter is not None and counter.name == name:
        return Separability()
    if value.coupled:
        assert value.reason is not None
        why = f"makes {name} of several samples: it {value.reason.why}"
        return _refuse(replace(value.reason, why=why))
    if value.kind is not Dependence.FIXED or not is_one(value.ratio):
        why = f"makes {name} of several samples"
        return _refuse(Reason(operation="", line="", why=why))
    return Separability()
