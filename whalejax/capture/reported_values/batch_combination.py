"""Finds how values reported by micro-batches combine to the value of the whole batch.

It compares two traces of a loss, with fewer and with more samples, and finds the form
of every value. A value is equal for all samples, has a row for each sample, or is a
sum, a mean, a maximum or a minimum over the samples. The form of a result follows
from the forms of its operands. If no combination gives what one device would compute
for the whole batch, the value is reported with the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from whalejax import _compat
from whalejax.capture.reported_values.paired_traces import (
    UNKNOWN,
    Pairing,
    decides,
    power_of,
)
from whalejax.planner.model.graph import LOOKUPS, LOOPS, Op


class Kind(enum.IntEnum):
    """Kinds of values, simplest first."""

    SAME = 0
    """Depends on no sample."""
    NOISE = 1
    """Depends on random numbers, or on state that every micro-batch changes."""
    PLACE = 2
    """Indices of the samples in the batch."""
    ROWS = 3
    """Rows, each of one sample."""
    ADDED = 4
    """Linear in a sum over the samples."""
    WEIGHED = 5
    """A mean over the samples, weighted as the loss is."""
    MOST = 6
    """Non-decreasing function of the maximum over the samples, and of nothing else."""
    LEAST = 7
    """Non-decreasing function of the minimum over the samples, and of nothing else."""
    MIXED = 8
    """Anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueForm:
    """Form of one value.

    Attributes:
        kind: Kind of the value.
        power: Exponent p for which the value of the whole batch is the mean of the
            parts' values times ``num_micro_batches ** p``; None for a value of zero,
            for which any exponent holds.
        sources: Indices of operations that mixed the samples; ``APART`` if none did.
    """

    kind: Kind = Kind.SAME
    power: int | None = 0
    sources: frozenset[int] = frozenset()


APART: Final = -1
"""Source of a value that no operation over samples mixed."""

SAME: Final = ValueForm()
MIXED: Final = ValueForm(kind=Kind.MIXED, sources=frozenset((APART,)))
_ENDS: Final = frozenset((Kind.MOST, Kind.LEAST))
_TAKEN: Final = frozenset((Kind.ADDED, Kind.WEIGHED)) | _ENDS
_PLAIN: Final = (Kind.SAME, Kind.NOISE, Kind.ROWS)

LINEAR: Final = frozenset(
    "add add_any sub neg copy copy_p name reduce_sum reshape squeeze expand_dims "
    "broadcast_in_dim transpose slice concatenate pad split rev real imag complex conj "
    "stop_gradient optimization_barrier sharding_constraint reduce_precision "
    "device_put cumsum convert_element_type gather dynamic_slice stack unstack "
    "tile".split()
)
"""Operations that are linear in all of their operands, except indices."""

_MOVES: Final = frozenset(
    "copy copy_p name reshape squeeze expand_dims broadcast_in_dim transpose slice "
    "concatenate split rev stop_gradient optimization_barrier sharding_constraint "
    "reduce_precision device_put convert_element_type gather dynamic_slice "
    "stack unstack tile".split()
)
"""Operations that move elements, or round each element to a type with fewer bits."""

_RISES: Final = frozenset("add add_any exp tanh logistic floor ceil max min".split())
"""Operations whose result does not decrease when an operand increases."""

_FIRST: Final = {"reduce_max": Kind.MOST, "reduce_min": Kind.LEAST}
"""Reductions to the greatest or the least sample."""

_PRODUCTS: Final = frozenset(("mul", "dot_general", "conv_general_dilated"))


def mixed(forms: Iterable[ValueForm], *sources: int) -> ValueForm:
    """Returns the form of a value in which some operations mixed samples."""
    behind = frozenset[int]().union(*(form.sources for form in forms))
    return ValueForm(kind=Kind.MIXED, sources=behind | frozenset(sources or (APART,)))


def join_forms(forms: Sequence[ValueForm]) -> ValueForm:
    """Returns the form of a value that is linear in several values, or is one of them.

    The carry of a loop, for example, is one of several values.
    """
    if not forms:
        return SAME
    powers = {form.power for form in forms} - {None}
    kind = max(form.kind for form in forms)
    sources = frozenset[int]().union(*(form.sources for form in forms))
    kinds = {form.kind for form in forms if form.power is not None} or {kind}
    if kind == Kind.MIXED:
        return ValueForm(kind=kind, sources=sources)
    if len(powers) > 1 or (kind >= Kind.ADDED and kinds - {Kind.SAME, kind}):
        return mixed(forms)
    if Kind.PLACE in kinds and len(kinds) > 1:
        return mixed(forms)
    if kind == Kind.WEIGHED and powers - {0}:
        return mixed(forms)
    return ValueForm(kind=kind, power=next(iter(powers), None), sources=sources)


def passed(kind: str, forms: Sequence[ValueForm]) -> ValueForm:
    """Returns the form of a result whose operation does not mix samples.

    Args:
        kind: Kind of the operation.
        forms: Forms of its operands, scalar literals included.
    """
    kinds = {form.kind for form in forms}
    if Kind.MIXED in kinds or (Kind.PLACE in kinds and kinds - {Kind.PLACE, Kind.SAME}):
        return mixed(forms, *_behind(forms))
    if Kind.ROWS in kinds and kinds & _TAKEN:
        return mixed(forms, *_behind(forms))
    if kind in LOOKUPS and any(form.kind in _TAKEN for form in forms[1:]):
        return mixed(forms)
    if kinds & _ENDS:
        return _end(kind, forms)
    if kind in _PRODUCTS and len(forms) > 1:
        return _product(forms)
    if kind == "div" and len(forms) == 2 and forms[1].kind <= Kind.ROWS:
        under = forms[1]
        if under.kind == Kind.ROWS and under.power is None:
            return mixed(forms)
        power = -(under.power or 0)
        return _product((forms[0], replace(under, power=power)))
    if kind in LINEAR:
        return join_forms(forms)
    if kinds & _TAKEN:
        return mixed(forms, *_behind(forms))
    if any(form.power not in (0, None) for form in forms):
        # The larger of two values keeps their power if both powers are equal.
        same = kind in ("max", "min", "reduce_max", "reduce_min", "abs", "sign")
        return join_forms(forms) if same else mixed(forms)
    return ValueForm(kind=max(kinds, default=Kind.SAME))


def added(kind: str, forms: Sequence[ValueForm], index: int) -> ValueForm:
    """Returns the form of a result whose operation reduces over samples.

    Args:
        kind: Kind of the operation.
        forms: Forms of its operands.
        index: Index of the operation.
    """
    plain = all(form.kind in _PLAIN for form in forms)
    if plain and kind in _FIRST and forms[0].power in (0, None):
        return ValueForm(kind=_FIRST[kind], sources=frozenset((index,)))
    if plain and kind == "scatter-add" and len(forms) == 3 and forms[0].power is None:
        forms = forms[2:]  # Samples' values are added to zeros at their own indices.
    elif not plain or kind not in ("reduce_sum", "dot_general"):
        return mixed(forms, index, *_behind(forms))
    product = _product(forms)
    if product.kind == Kind.MIXED:
        return product
    power = None if product.power is None else product.power + 1
    return ValueForm(kind=Kind.ADDED, power=power, sources=frozenset((index,)))


def _end(kind: str, forms: Sequence[ValueForm]) -> ValueForm:
    places = [n for n, form in enumerate(forms) if form.kind in _ENDS]
    own = {forms[n].kind for n in places}
    rest = [form for n, form in enumerate(forms) if n not in places]
    fixed = all(form.kind == Kind.SAME and form.power in (0, None) for form in rest)
    (end, *others) = own
    result = ValueForm(kind=end, sources=_behind(forms))
    if others or not fixed:
        return mixed(forms, *result.sources)
    alike = {"max": Kind.MOST, "min": Kind.LEAST, **_FIRST}.get(kind) == end
    if kind in _MOVES or alike:
        return result
    if len(places) == 1 and (kind in _RISES or (kind == "sub" and places == [0])):
        return result
    if kind in ("neg", "not") or (kind == "sub" and places == [1]):
        return replace(result, kind=Kind.LEAST if end == Kind.MOST else Kind.MOST)
    return mixed(forms, *result.sources)


def _product(forms: Sequence[ValueForm]) -> ValueForm:
    kinds = [form.kind for form in forms]
    sums = [kind for kind in kinds if kind in _TAKEN]
    if sums and (len(sums) > 1 or set(kinds) - {Kind.SAME, sums[0]}):
        return mixed(forms, *_behind(forms))
    powers = [form.power for form in forms]
    known = [power for power in powers if power is not None]
    power = sum(known) if len(known) == len(powers) else None
    sources = frozenset[int]().union(*(form.sources for form in forms))
    return ValueForm(kind=max(kinds), power=power, sources=sources)


def _behind(forms: Iterable[ValueForm]) -> frozenset[int]:
    return frozenset[int]().union(*(form.sources for form in forms))


HOWS = ("same", "sum", "average", "mean", "max", "min", "rows")
"""Combinations of the values of micro-batches: the first value, the sum, the mean over
samples, the mean by the loss's weights, the maximum, the minimum, the rows in order."""

MADE_OTHERWISE = "is made in another way where the batch has more samples"
"""Reason for a value that is not computed alike in both traces."""

_KEYS = frozenset("random_bits random_gamma rng_uniform threefry2x32".split())
"""Operations that draw random numbers."""

_TRUTHS = {"reduce_or": "reduce_max", "reduce_and": "reduce_min"}
"""Reductions of booleans, each with the same reduction of the numbers 0 and 1."""

_PLACES = frozenset(
    "lt select_n broadcast_in_dim reshape squeeze convert_element_type concatenate "
    "expand_dims copy".split()
)
"""Operations that turn sample numbers into an index."""

_SMALL = frozenset(("max", "convert_element_type", "copy", "reshape", "squeeze"))
"""Operations that keep a weight above zero, or cast it."""


@dataclass(slots=True)
class ValueForms:
    """The forms of all values of a program.

    Attributes:
        pairing: The two traces.
        rows: Tensors for which the dimension of the samples is known.
        changing: Inputs that every micro-batch changes, and random keys.
        statistics: Operations that mix samples for the loss itself, as batch
            normalisation does. They do not make the values after them unclear.
        forms: Form of each value by the id of its tensor, filled by ``run``.
    """

    pairing: Pairing
    rows: frozenset[int]
    changing: Collection[int]
    statistics: Collection[int]
    forms: dict[int, ValueForm] = field(default_factory=dict)
    _names: dict[int, Any] = field(default_factory=dict)
    _turns: Mapping[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Passes over the program until no form changes; loops need several passes."""
        small = self.pairing.small
        batch = {tensor for tensor, _ in small.graph.batch_dims}
        for tensor in small.graph.tensors:
            if tensor.kind in ("param", "state", "batch", "rng", "const"):
                kind = Kind.NOISE if tensor.id in self.changing else Kind.SAME
                kind = Kind.ROWS if tensor.id in batch else kind
                self._put(tensor.id, ValueForm(kind=kind))
        self._turns = {back: out for out, back in small.walk.loops}
        before: Mapping[int, ValueForm] = {}
        while before != self.forms:
            before = dict(self.forms)
            for index, op in enumerate(small.graph.ops):
                if any(t in self.pairing.pairs for t in op.results):
                    self._op(index, op)

    def combination_rule(self, tensor: int, *, inexact: bool) -> str:
        """Returns the combination of a reported value, or why there is none.

        Args:
            tensor: Tensor of the smaller program.
            inexact: Whether the value is floating-point.
        """
        form = self.forms.get(tensor, MIXED)
        grown = bool(self.pairing.grown.get(tensor))
        if tensor in self.pairing.torn:
            return MADE_OTHERWISE
        if form.kind == Kind.ROWS and form.power in (0, None) and grown:
            return "rows"
        if form.kind == Kind.NOISE:
            return "is made of random numbers, or of state that micro-batches change"
        if form.kind == Kind.MIXED:
            one = form.sources == {APART}
            return _APART if one else "is neither a sum nor a mean over the samples"
        if grown or form.kind in (Kind.PLACE, Kind.ROWS):
            return "depends on more than one sample in every row"
        if form.kind == Kind.WEIGHED:
            return "mean" if form.power in (0, None) else _APART
        if form.kind in (Kind.MOST, Kind.LEAST):
            return "max" if form.kind == Kind.MOST else "min"
        if form.power == 1:
            return "sum"
        if form.power not in (0, None):
            return "depends on the number of samples"
        if form.kind == Kind.SAME:
            return "same"
        return "average" if inexact else "is neither a sum nor a count of the samples"

    def _put(self, tensor: int, form: ValueForm) -> None:
        if tensor in self.pairing.torn:
            form = MIXED
        known = form.sources and form.sources <= set(self.statistics)
        if form.kind == Kind.MIXED and known and self.pairing.grown.get(tensor):
            form = ValueForm(kind=Kind.ROWS, sources=form.sources)
        if form.kind == Kind.SAME and self.pairing.grown.get(tensor):
            form = ValueForm(kind=Kind.ROWS, power=form.power)
        self.forms[tensor] = form

    def _op(self, index: int, op: Op) -> None:
        if op.kind in LOOPS:
            self._loop(op)
            return
        given = self.pairing.operands(op)
        try:
            forms = [self._form(x) for x in given]
        except ValueError:
            forms = [MIXED]
        operation_form = self._operation_form(index, op, given, forms)
        for t in op.results:
            self._put(t, operation_form)

    def _form(self, operand: int | tuple[Any, Any]) -> ValueForm:
        if isinstance(operand, int):
            return self.forms.get(operand, MIXED)
        return ValueForm(power=power_of(*operand, self.pairing.times))

    def _operation_form(
        self, index: int, op: Op, given: Sequence[Any], forms: Any
    ) -> ValueForm:
        kinds = {form.kind for form in forms}
        grown = any(self.pairing.grown.get(t) for t in op.results)
        if op.unknown or op.kind in _KEYS:
            plain = kinds <= {Kind.SAME, Kind.NOISE, Kind.ROWS}
            if plain and (grown or Kind.ROWS not in kinds):
                return ValueForm(kind=max(kinds, default=Kind.SAME))
            return mixed(forms, index)
        if op.kind == "iota" and grown:
            along = self.pairing.equation(op).params["dimension"]
            own = along in self.pairing.grown[op.results[0]]
            return ValueForm(kind=Kind.PLACE if own else Kind.ROWS)
        if Kind.PLACE in kinds and Kind.MIXED not in kinds:
            return self._row_form(op, forms)
        if op.kind in ("convert_element_type", "div") and self._cut_off(op):
            return passed("round", forms)
        if op.reshape and grown and not self.rows.isdisjoint(op.operands):
            # In a larger batch, a dimension of samples has other neighbours.
            if self.rows.isdisjoint(op.results):
                return MIXED
        truths = op.kind in _TRUTHS and self._dtype(op.results[0]) == "bool"
        kind = _TRUTHS[op.kind] if truths else op.kind
        mixes, takes = self._spread(op)
        if mixes or (takes and grown):
            return mixed(forms, index)
        if takes:
            return added(kind, forms, index)
        several = any(len(self.pairing.grown.get(t, ())) > 1 for t in op.results)
        if several:
            return mixed(forms, index)
        if op.kind == "div" and len(given) == 2 and forms[0].kind == Kind.ADDED:
            return self._ratio(given, forms)
        return passed(kind, forms)

    def _dtype(self, tensor: int) -> str:
        return self.pairing.small.graph.tensors[tensor].dtype

    def _ratio(self, given: Sequence[Any], forms: Sequence[ValueForm]) -> ValueForm:
        """Returns the form of a quotient, a mean if a sum is divided by the weight."""
        weight, over = self.pairing.small.results[1], forms[0]
        if weight is not None and isinstance(given[1], int):
            own, under = self._base(weight), self._base(given[1])
            form = self.forms.get(under, MIXED)
            same = form.kind == Kind.ADDED and form.power == over.power
            if same and self._source_name(own) == self._source_name(under):
                return ValueForm(kind=Kind.WEIGHED, sources=over.sources)
        return passed("div", forms)

    def _base(self, tensor: int) -> int:
        makers = self.pairing.makers[0][tensor]
        op = self.pairing.small.graph.ops[makers[0]] if makers else None
        if op is None or op.kind not in _SMALL or len(op.operands) != 1:
            return tensor
        scalars = [x[0] for x in self.pairing.operands(op) if not isinstance(x, int)]
        return tensor if any(x > 1 for x in scalars) else self._base(op.operands[0])

    def _row_form(self, op: Op, forms: Sequence[ValueForm]) -> ValueForm:
        kinds = {form.kind for form in forms}
        if op.kind in LOOKUPS:
            known = all(t in self.rows for t in op.results)
            right = forms[0].kind == Kind.ROWS and forms[0].power in (0, None)
            return ValueForm(kind=Kind.ROWS) if known and right else MIXED
        if op.kind == "concatenate" and kinds <= {Kind.PLACE, Kind.ROWS, Kind.SAME}:
            return ValueForm(kind=Kind.PLACE)
        whole = [form.power for form in forms if form.kind == Kind.SAME]
        if op.kind == "add" and whole == [1]:  # Offset of a negative index.
            return ValueForm(kind=Kind.PLACE)
        own = kinds <= {Kind.PLACE, Kind.SAME} and op.kind in _PLACES
        return ValueForm(kind=Kind.PLACE) if own else MIXED

    def _cut_off(self, op: Op) -> bool:
        equation = self.pairing.equation(op)
        before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        truth = str(after) == "bool" != str(before)
        divides = op.kind == "div" or _compat.is_inexact(before)
        return truth or (divides and not _compat.is_inexact(after))

    def _spread(self, op: Op) -> tuple[bool, bool]:
        """Returns whether an operation mixes the samples, and whether it reduces them.

        A dimension of samples that is in no factor was cut or concatenated.
        """
        if op.reshape:
            return False, False
        count, mixes, takes = len(op.operands), False, False
        left = {
            (slot, dim)
            for slot, t in enumerate(op.operands)
            for dim in self.pairing.grown.get(t, ())
        }
        onto = {
            (slot, dim)
            for slot, t in enumerate(op.results, count)
            for dim in self.pairing.grown.get(t, ())
        }
        for factor in op.factors:
            here = left & set(factor.members)
            if not here:
                continue
            left -= here
            mixes |= factor.needs_all
            takes |= not onto & set(factor.members)
        return mixes or bool(left), takes

    def _loop(self, op: Op) -> None:
        pairing = self.pairing
        forms = [self.forms[t] for t in op.operands if t in self.forms]
        values = join_forms(forms) if op.operands else self._start(op)
        result = op.results[0] if op.results else None
        if result is None:
            return
        if (out := self._turns.get(result)) in self.forms:
            values = join_forms([values, self.forms[out]])  # of the previous iteration
        lost = {len(pairing.grown.get(t, ())) for t in op.operands}
        if lost - {
            len(pairing.grown.get(result, ()))
        } or not self._is_batch_independent(op):
            values = mixed(forms)
        self._put(result, values)

    def _start(self, op: Op) -> ValueForm:
        """Returns the form of a carry that begins as a scalar literal, such as zero."""
        pair = self.pairing.equation(op), self.pairing.other_equation(op)
        if None in pair:
            return MIXED
        values = [
            [float(a.val) for a in e.invars if _compat.is_literal(a)] for e in pair
        ]
        if values[0] != values[1]:
            return MIXED
        return SAME if any(values[0]) else ValueForm(power=None)

    def _is_batch_independent(self, op: Op) -> bool:
        pairing = self.pairing
        pair = pairing.equation(op), pairing.other_equation(op)
        if None in pair:
            return False
        if op.kind == "scan":
            lengths = [_compat.scan_parts(e).length for e in pair]
            return lengths[0] == lengths[1]
        tensor = decides(pairing.small, op)
        if tensor == UNKNOWN:
            return False
        # Forms not known in the first pass are found in the next.
        start = SAME if tensor is None or tensor in pairing.pairs else MIXED
        form = start if tensor is None else self.forms.get(tensor, start)
        return form.kind <= Kind.NOISE and form.power in (0, None)

    def _source_name(self, operand: Any, depth: int = 0) -> Any:
        """Returns a name for how a value is computed; equal values have equal names."""
        if not isinstance(operand, int):
            return "scalar", float(abs(operand[0]))
        makers = self.pairing.makers[0][operand]
        if len(makers) != 1 or depth > _DEPTH:
            return operand
        op = self.pairing.small.graph.ops[makers[0]]
        if operand not in self._names:
            equation = self.pairing.equation(op)
            given = [self._source_name(x, depth + 1) for x in self.pairing.operands(op)]
            text = "" if equation is None else str(equation.params)
            place = op.results.index(operand)
            own = () if op.operands and op.kind not in LOOPS else (operand,)
            self._names[operand] = hash((op.kind, tuple(given), place, text, own))
        return self._names[operand]


_DEPTH = 100
"""Number of operations through which two values are compared at most."""

_APART = "cannot be computed from the values of micro-batches"
