"""Follows two traces of a loss together, including the jaxprs that they call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final

from whalejax import _compat
from whalejax.capture.rules.behaviour import Position
from whalejax.capture.separability.alignment import align_dims
from whalejax.capture.separability.elementwise_rules import PLACE
from whalejax.capture.separability.fact_rules import apply_fact_rule, divided_order
from whalejax.capture.separability.random_rules import FIXED_KEY
from whalejax.capture.separability.sample_loops import SampleLoop, check_derivative
from whalejax.capture.separability.separability_rules import apply_rule
from whalejax.capture.separability.values import (
    SIZE,
    CoupledError,
    Dependence,
    Dim,
    PairedEquation,
    Reason,
    Value,
    combined_kind,
    constant,
    is_one,
    is_samples,
    plain_dim,
    same_ratio,
)


OTHER_PROGRAM: Final = "does other operations for other numbers of samples"
OTHER_OPERATION: Final = (
    "is another operation for other numbers of samples, as in a Python loop over them"
)


ORDER: Final = "multiplies its operands in another order for other numbers of samples"


LOOKED_UP: Final = "takes samples of the batch by an index, as h[index] does"
_LOOKUPS: Final = ("gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice")


UNKNOWN_FACTOR: Final = 1.7
"""Test value of a factor of cotangents; derivative rules must be linear in it."""


@dataclass(slots=True)
class Interpreter:
    """Follows values of a part of the batch and of the whole through one program.

    Attributes:
        share: Ratio of the part's samples to the whole batch's.
        group: Number of neighbouring samples in a group.
        runs: Number of consecutive runs of samples.
        scale: Factor of cotangents. It is not 1 if a derivative rule must be linear in
            its cotangent, because gradients are divided by a loss's weights, or the
            rule is called once for each sample.
        line: The user's line that calls the program, for operations without a line.
        differentiated: Whether derivatives of the program are taken. They are not for a
            traced derivative rule, which may call its own function.
        at: Position of the program in the outermost program.
        seen: Facts about every variable, by the position of its jaxpr, in calls,
            checkpointed regions and loops over layers; None if not needed.
    """

    share: float
    group: int = 1
    runs: int = 1
    scale: float = 1.0
    line: str = ""
    differentiated: bool = True
    at: Position = ()
    seen: dict[Position, Mapping[Any, Value]] | None = None

    def run(self, part: Any, whole: Any, inputs: Sequence[Value]) -> list[Value]:
        """Returns facts about a program's results.

        Args:
            part: Jaxpr of the program for the part.
            whole: Jaxpr of the program for the whole batch.
            inputs: Facts about the inputs of the program.
        """
        (body, constants), (other, others) = map(_compat.open_jaxpr, (part, whole))
        known: dict[Any, Value] = {}
        if self.seen is not None:
            self.seen[self.at] = known
        pairs = zip(body.constvars, constants, others, strict=True)
        if len(constants) != len(others) or len(body.eqns) != len(other.eqns):
            return self._different(body, other)
        for variable, a, b in pairs:
            known[variable] = _guarded(a, b)
        known.update(zip(body.invars, inputs, strict=True))
        for index, (one, two) in enumerate(zip(body.eqns, other.eqns, strict=True)):
            given = [
                self._read(known, a, b)
                for a, b in zip(one.invars, two.invars, strict=False)
            ]
            inside = self._within(one, index)
            equation = inside._equation(one, two, given)
            if self.seen is not None:
                pairs = zip(equation, one.outvars, two.outvars, strict=False)
                equation = [_with_sizes(value, a, b) for value, a, b in pairs]
            known.update(zip(one.outvars, equation, strict=True))
        return [
            self._read(known, a, b)
            for a, b in zip(body.outvars, other.outvars, strict=True)
        ]

    def _within(self, equation: Any, index: int) -> Interpreter:
        if self.seen is None:
            return self
        followed = _compat.recursion(equation) in ("inline", "remat", "opaque", "scan")
        seen = self.seen if followed else None
        return replace(self, at=(*self.at, index, 0), seen=seen)

    def _read(self, known: dict[Any, Value], part: Any, whole: Any) -> Value:
        if _compat.is_literal(part) != _compat.is_literal(whole):
            return _coupled(part, Reason(operation="", line="", why=OTHER_PROGRAM))
        if _compat.is_literal(part):
            return _guarded(part.val, whole.val)
        return known[part]

    def _different(self, body: Any, other: Any) -> list[Value]:
        pairs = zip_longest(body.eqns, other.eqns)
        apart = (
            a or b
            for a, b in pairs
            if not (a and b and a.primitive.name == b.primitive.name)
        )
        first = next(apart, None)
        reason = Reason(operation="", line="", why=OTHER_PROGRAM)
        if first is not None:
            name, line = first.primitive.name, self._line_of(first)
            reason = Reason(operation=name, line=line, why=OTHER_OPERATION)
            reason = of_einsum(reason, first)
        return [_coupled(atom, reason) for atom in body.outvars]

    def _line_of(self, equation: Any) -> str:
        line = _compat.source_text(equation)
        return self.line if self.line and line == _compat.NO_LINE else line

    def _equation(self, part: Any, whole: Any, given: list[Value]) -> list[Value]:
        name = part.primitive.name
        line = self._line_of(part)
        reason = Reason(operation=name, line=line, why=OTHER_OPERATION)
        if name != whole.primitive.name or len(given) != len(whole.invars):
            reason = of_einsum(reason, part)
            return [_coupled(atom, reason) for atom in part.outvars]
        try:
            equation = self._results(part, whole, given, reason)
            if len(equation) == len(part.outvars):
                return _with_keys(part, given, equation)
            reason = replace(reason, why="is used in a way that is not followed")
        except CoupledError as error:
            group, runs = error.group * self.group, error.runs * self.runs
            reason = replace(reason, why=error.why, group=group, runs=runs)
            if error.why == f"dimension_numbers {SIZE}":
                reason = of_einsum(reason, part)
        except Exception as error:  # An unforeseen case counts as not proven.
            why = f"is used in a way that is not followed ({type(error).__name__})"
            reason = replace(reason, why=why)
        return [_coupled(atom, reason) for atom in part.outvars]

    def _results(
        self, part: Any, whole: Any, given: list[Value], reason: Reason
    ) -> list[Value]:
        kind = _compat.recursion(part)
        if kind in ("inline", "remat", "opaque"):
            return self._call(part, whole, given, reason)
        if part.primitive.name == "custom_linear_solve":
            return self._solve(part, whole, given)
        reason = replace(reason, why="uses the positions of samples in the batch")
        equation = PairedEquation(part=part, whole=whole, values=given)
        results = apply_fact_rule(equation, reason) if kind is None else None
        if results is not None:
            return results
        coupled = next((v for v in given if v.coupled), None)
        if coupled is not None and kind is None:
            assert coupled.reason is not None
            why = coupled.reason
            if why.why == PLACE and part.primitive.name in _LOOKUPS:
                if not given[0].coupled:
                    why = replace(reason, why=LOOKED_UP)
            return [_coupled(atom, why) for atom in part.outvars]
        if kind is None:
            return apply_rule(equation)
        if kind == "scan":
            return self._scan(part, whole, given, reason)
        if kind == "cond":
            return self._cond(part, whole, given)
        return self._while(part, whole, given)

    def _call(
        self, part: Any, whole: Any, given: list[Value], reason: Reason
    ) -> list[Value]:
        why = replace(reason, why="uses the order of all samples")
        call = divided_order(part, given, why)
        if call is not None:
            return call
        (inner,), (other,) = map(_compat.inner_jaxprs, (part, whole))
        inside = replace(self, line=reason.line)
        call = inside.run(inner, other, given)
        if self.differentiated and part.primitive.name.startswith("custom_"):
            rule = replace(inside, differentiated=False, seen=None)
            return check_derivative(rule, part, whole, given, call)
        return call

    def _solve(self, part: Any, whole: Any, given: list[Value]) -> list[Value]:
        """Follows a linear solve by its solver; its other functions give gradients."""
        first = _compat.solve_parts(part)
        (inner, other) = (_compat.solve_jaxpr(e) for e in (part, whole))
        operands = [*given[first[0] : first[1]], *given[first[2] :]]
        solve = self.run(inner, other, operands)
        if not self.differentiated:
            return solve
        rule = replace(self, differentiated=False)
        return check_derivative(rule, part, whole, given, solve)

    # Loops and branches.

    def _scan(
        self, part: Any, whole: Any, given: list[Value], reason: Reason
    ) -> list[Value]:
        pair = _compat.scan_parts(part), _compat.scan_parts(whole)
        (inner,), (other,) = map(_compat.inner_jaxprs, (part, whole))
        first = pair[0].num_consts
        carries = first + pair[0].num_carries
        lengths = pair[0].length, pair[1].length
        consts, start, slices = given[:first], given[first:carries], given[carries:]
        along = [not v.coupled and is_samples(v.dims[0]) for v in slices]
        if lengths[0] != lengths[1] or any(along):
            loop = SampleLoop(
                follower=replace(self, scale=UNKNOWN_FACTOR * self.scale, seen=None),
                part=part,
                whole=whole,
                given=given,
                reason=reason,
            )
            return loop.results()
        inside = [_sliced(v) for v in slices]
        carried = list(start)
        while True:
            result = self.run(inner, other, [*consts, *carried, *inside])
            after = [_join(a, b) for a, b in zip(carried, result, strict=False)]
            if after == carried:
                break
            carried = after
        count = len(carried)
        dim = plain_dim(*lengths)
        stacked = [_stack_value(v, dim) for v in result[count:]]
        return [*(v.plain for v in carried), *stacked]

    def _cond(self, part: Any, whole: Any, given: list[Value]) -> list[Value]:
        which, *operands = given
        if which.coupled:
            assert which.reason is not None
            return [_coupled(atom, which.reason) for atom in part.outvars]
        if which.kind is Dependence.SUM or not is_one(which.ratio):
            raise CoupledError("chooses a branch by a sum over the samples")
        branches = zip(
            _compat.inner_jaxprs(part), _compat.inner_jaxprs(whole), strict=True
        )
        several = [self.run(a, b, operands) for a, b in branches]
        cond = []
        for values in zip(*several, strict=True):
            value = values[0]
            for other in values[1:]:
                value = _join(value, other)
            cond.append(_ended_by(which, value))
        return cond

    def _while(self, part: Any, whole: Any, given: list[Value]) -> list[Value]:
        of_condition, of_body = _compat.while_parts(part)
        conditions, bodies = zip(*map(_compat.inner_jaxprs, (part, whole)), strict=True)
        first, second = given[:of_condition], given[of_condition:][:of_body]
        carried = [v.plain for v in given[of_condition + of_body :]]
        while True:
            result = self.run(bodies[0], bodies[1], [*second, *carried])
            after = [_join(a, b) for a, b in zip(carried, result, strict=True)]
            if after == carried:
                break
            carried = after
        (ends,) = self.run(conditions[0], conditions[1], [*first, *carried])
        if ends.coupled:
            assert ends.reason is not None
            return [_coupled(atom, ends.reason) for atom in part.outvars]
        own = ends.kind is Dependence.SAMPLE and ends.within
        if not (ends.kind is Dependence.FIXED or own) or not is_one(ends.ratio):
            raise CoupledError("loops until all samples have met its condition")
        return [_ended_by(ends, v) for v in carried]


def of_einsum(reason: Reason, equation: Any) -> Reason:
    """Adapts the reason if a product of an einsum differs between the traces."""
    if not _compat.is_of_einsum(equation):
        return reason
    return replace(reason, operation="einsum", why=ORDER)


def _ended_by(decides: Value, value: Value) -> Value:
    if value.coupled:
        return value.plain
    kind, within = combined_kind([decides, value])
    return replace(value.plain, kind=kind, within=within)


def _sliced(value: Value) -> Value:
    return value if value.coupled else value.shaped(value.dims[1:])


def _stack_value(value: Value, dim: Dim) -> Value:
    return value.plain if value.coupled else value.shaped((dim, *value.dims))


def _guarded(part: Any, whole: Any) -> Value:
    try:
        return constant(part, whole)
    except (CoupledError, ValueError) as error:
        why = str(error) if isinstance(error, CoupledError) else f"a constant {SIZE}"
        reason = Reason(operation="", line="", why=why)
        return Value(kind=Dependence.COUPLED, reason=reason)


def _coupled(atom: Any, reason: Reason) -> Value:
    dims = tuple(plain_dim(n, n) for n in atom.aval.shape)
    return Value(kind=Dependence.COUPLED, dims=dims, reason=reason)


def _with_sizes(value: Value, part: Any, whole: Any) -> Value:
    shapes = part.aval.shape, whole.aval.shape
    if not value.coupled or value.fact is not None or len(set(map(len, shapes))) > 1:
        return value
    return replace(value, dims=tuple(map(plain_dim, *shapes)))


def _join(a: Value, b: Value) -> Value:
    """Returns facts about a value that is one of two values, as a carry is."""
    a, b = replace(a, numbers=None), replace(b, numbers=None)
    if a == b:
        return a
    a, b = a.plain, b.plain
    for value in (a, b):
        if value.coupled:
            return value
    try:
        kind, within = combined_kind([a, b])
        dims, ratio = align_dims([a.dims, b.dims]), same_ratio([a, b])
    except CoupledError as error:
        reason = Reason(operation="scan", line="", why=error.why)
        return Value(kind=Dependence.COUPLED, dims=a.dims, reason=reason)
    key = a.key if a.key == b.key else max(a.key, b.key, key=_KEYS.index)
    return Value(kind=kind, dims=dims, ratio=ratio, within=within, key=key)


_KEYS: Final = ("", FIXED_KEY, "rng", "foreign")
"""Sources of random keys. A value of several sources has the last of them."""


def _with_keys(
    part: Any, given: Sequence[Value], found: Sequence[Value]
) -> list[Value]:
    key = max((v.key for v in given), key=_KEYS.index, default="")
    if not key or part.primitive.name in ("random_bits", "random_gamma"):
        return list(found)
    return [
        replace(value, key=key) if _may_be_key(atom.aval.dtype) else value
        for atom, value in zip(part.outvars, found, strict=True)
    ]


def _may_be_key(dtype: Any) -> bool:
    return _compat.is_key_dtype(dtype) or str(dtype) == "uint32"
