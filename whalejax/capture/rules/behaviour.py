"""Treatment of dimensions by a primitive, as plain data, and records of the walk.

Rules (``capture/rules/*.py``) read an ``Equation`` and return a ``Behaviour``. Slots
number the equation's operands, literals included, and after them its results. The walk
numbers them again without the literals.

Windows of convolutions and pooling along spatial dimensions are plain data too. The
lowering derives from them what each device computes. Windows along a dimension that
devices cannot divide carry the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.planner.model.graph import Factor, FactorKind, Mark, TensorKind
from whalejax.planner.model.score_mask import ScoreMask
from whalejax.planner.model.windows import SPACES, Window
from whalejax.user_code.annotations import parse_scope


Shape = tuple[int, ...]
Member = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """An equation as a rule may read it.

    Attributes:
        name: Name of the primitive.
        params: Parameters of the primitive.
        inputs: Shapes of the operands.
        outputs: Shapes of the results.
    """

    name: str
    params: Mapping[str, Any]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def shape(self, slot: int) -> Shape:
        """Returns the shape of an operand or result by its slot."""
        count = len(self.inputs)
        return self.inputs[slot] if slot < count else self.outputs[slot - count]

    def size(self, member: Member) -> int:
        """Returns the size of one dimension of an operand or result."""
        return self.shape(member[0])[member[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Treatment of dimensions by one equation.

    Attributes:
        factors: Groups of dimensions with one index letter.
        reshape: See ``planner.model.graph.Op``.
        elementwise: See ``planner.model.graph.Op``.
        flops: See ``planner.model.graph.Op``.
        matmul: See ``planner.model.graph.Op``.
        saves: (slot, operand) pairs. The backward pass reads the slot if the operand
            is differentiable.
        stops_gradient: Whether the equation passes no gradient.
        parts: (dimension, count) if the operation cuts operand 0, or joins result 0,
            into equal parts. The walk records it as a reshape and a split.
        unknown: Whether no rule is known.
        mask, windows: See ``planner.model.graph.Op``.
    """

    factors: tuple[Factor, ...] = ()
    reshape: bool = False
    elementwise: bool = False
    flops: int = 0
    matmul: tuple[int, int, int, int] | None = None
    saves: tuple[tuple[int, int], ...] = ()
    stops_gradient: bool = False
    parts: tuple[int, int] | None = None
    unknown: bool = False
    mask: ScoreMask | None = None
    windows: tuple[Window, ...] = ()


Rule = Callable[[Equation], Behaviour]


class FactorBuilder:
    """Collects the factors of one equation, without dimensions of size 1."""

    def __init__(self, equation: Equation) -> None:
        self._equation = equation
        self._factors: list[Factor] = []

    def link(self, *members: Member, kind: FactorKind = "linked") -> None:
        """Links dimensions that have the same index."""
        above_one = tuple(m for m in members if self._equation.size(m) > 1)
        if above_one:
            self._factors.append(Factor(members=above_one, kind=kind))

    def require_whole(self, *members: Member) -> None:
        """Puts dimensions that every device needs unsharded into one factor."""
        self.link(*members, kind="unshardable")

    def each_whole(self, members: Iterable[Member]) -> None:
        """Puts each dimension that every device needs unsharded into its own factor."""
        for member in members:
            self.require_whole(member)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Factors that were added."""
        return tuple(self._factors)


def of_each(rule: Behaviour, flags: Sequence[bool], samples: int) -> Behaviour:
    """Returns the behaviour on several samples of an operation, given that on one.

    Args:
        rule: Behaviour on one sample.
        flags: Whether each slot has a leading dimension of samples.
        samples: Number of samples.
    """
    if rule.reshape:
        # The dimension of samples precedes the regrouped ones.
        return rule
    front = Factor(members=tuple((slot, 0) for slot, own in enumerate(flags) if own))
    moved = (
        replace(f, members=tuple((slot, d + flags[slot]) for slot, d in f.members))
        for f in rule.factors
    )
    product = rule.matmul
    if product is not None:
        product = (product[0] * samples, *product[1:])
    several = samples > 1 and any(flags)
    return replace(
        rule,
        factors=(front, *moved) if several else tuple(moved),
        flops=rule.flops * samples,
        matmul=product,
    )


def unknown(equation: Equation) -> Behaviour:
    """Returns a behaviour that needs every dimension unsharded."""
    letters = FactorBuilder(equation)
    slots = len(equation.inputs) + len(equation.outputs)
    letters.each_whole(
        (slot, dim) for slot in range(slots) for dim in range(len(equation.shape(slot)))
    )
    return Behaviour(factors=letters.factors, unknown=True)


Position = tuple[int, ...]
Label = tuple[Mark, Position]
"""A mark, and the position of the jaxpr in which it was entered."""

Value = int | None
"""Id of a tensor; None for a scalar literal of the program."""


@dataclass(slots=True, kw_only=True)
class TensorDraft:
    """A tensor for which it is not yet known whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    inexact: bool
    kind: TensorKind = "value"
    path: str = ""
    names: tuple[str | None, ...] = ()
    pinned: tuple[str | None, ...] = ()
    called: tuple[str | None, ...] = ()
    trained: bool = False

    def reshaped(self, shape: tuple[int, ...]) -> TensorDraft:
        """Returns a computed value like this tensor, with another shape."""
        return TensorDraft(
            shape=shape,
            dtype=self.dtype,
            itemsize_bytes=self.itemsize_bytes,
            inexact=self.inexact,
        )


@dataclass(slots=True, kw_only=True)
class OpDraft:
    """An operation without its TaskGraph and gradients; slots omit literals."""

    kind: str
    position: Position
    operands: tuple[int, ...]
    results: tuple[int, ...]
    behaviour: Behaviour
    trip: int
    remat: int | None
    kept: bool
    labels: tuple[Label, ...]
    scope: str
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Surroundings of the equations of one inner jaxpr.

    Attributes:
        prefix: Position of the jaxpr.
        labels, scope, trip, remat, chunks: Fields of ``OpDraft``.
        policy: Policy of the checkpointed region around the jaxpr.
        sorted_rows: The call around the jaxpr that sorts rows across the batch, or
            None.
        depth: Length of the position of that call's jaxpr.
    """

    prefix: Position = ()
    labels: tuple[Label, ...] = ()
    scope: str = ""
    trip: int = 1
    remat: int | None = None
    policy: Callable[..., Any] | None = None
    chunks: int = 1
    sorted_rows: Any = None
    depth: int = 0

    def enter_call(self, position: Position, index: int) -> Context:
        """Returns the surroundings inside a call's inner jaxpr."""
        return replace(self, prefix=(*position, index))

    def under(self, text: str) -> Context:
        """Returns the surroundings of equations under a relative name stack."""
        if not text:
            return self
        marks = tuple(
            (mark, self.prefix)
            for mark in map(parse_scope, text.split("/"))
            if mark is not None
        )
        return replace(
            self,
            labels=self.labels + marks,
            scope=f"{self.scope}/{text}" if self.scope else text,
        )


def without_literals(
    rule: Behaviour, operands: Sequence[Value], num_results: int
) -> Behaviour:
    """Returns a rule whose slots omit the operands that are literals."""
    if None not in operands:
        return rule
    slots: dict[int, int] = {}
    for slot, tensor in enumerate(operands):
        if tensor is not None:
            slots[slot] = len(slots)
    kept = len(slots)
    slots.update((len(operands) + k, kept + k) for k in range(num_results))
    factors: list[Factor] = []
    for factor in rule.factors:
        members = tuple((slots[s], d) for s, d in factor.members if s in slots)
        if members:
            factors.append(Factor(members=members, kind=factor.kind))
    return replace(
        rule,
        factors=tuple(factors),
        saves=tuple(
            (slots[slot], slots[wrt])
            for slot, wrt in rule.saves
            if slot in slots and wrt in slots
        ),
    )


def windows_of_convolution(equation: Equation) -> tuple[Window, ...]:
    """Returns one window for each spatial dimension of an image or a volume.

    A convolution with one spatial dimension runs along a sequence and has no windows.

    Args:
        equation: Equation of ``conv_general_dilated``.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    dims, outs = numbers.lhs_spec[2:], numbers.out_spec[2:]
    taps = [equation.inputs[1][dim] for dim in numbers.rhs_spec[2:]]
    if not 2 <= len(dims) <= len(SPACES):
        return ()
    windows = []
    for number, space in enumerate(SPACES[-len(dims) :]):
        dilation = params["rhs_dilation"][number]
        windows.append(
            Window(
                dim=dims[number],
                out=outs[number],
                space=space,
                span=dilation * (taps[number] - 1) + 1,
                stride=params["window_strides"][number],
                low=params["padding"][number][0],
                spread=params["lhs_dilation"][number],
                refused=_refused_convolution(params, number, taps[number]),
            )
        )
    return tuple(windows)


def _refused_convolution(params: Any, number: int, taps: int) -> str:
    if params["batch_group_count"] > 1:
        return "it convolves groups of samples"
    spread, stride = params["lhs_dilation"][number], params["window_strides"][number]
    if spread == 1:
        return ""
    low, high = params["padding"][number]
    inverse = taps == spread and stride == 1 and low == high == spread - 1
    if inverse and params["rhs_dilation"][number] == 1:
        return ""
    return (
        f"it is a transposed convolution of stride {spread} with a kernel of {taps} "
        f"and padding ({low}, {high}); space can be divided only if the kernel is as "
        f"large as the stride and the padding is ({spread - 1}, {spread - 1})"
    )


def windows_of_pooling(equation: Equation) -> tuple[Window, ...]:
    """Returns one window for each pooled dimension.

    Args:
        equation: Equation of ``reduce_window`` or a similar primitive.
    """
    sizes, strides, padding, spread, dilation = pooled(equation)
    if len(equation.outputs) != 1:
        return ()
    return tuple(
        Window(
            dim=dim,
            out=dim,
            span=dilation[dim] * (size - 1) + 1,
            stride=strides[dim],
            low=padding[dim][0],
            refused=_refused_pooling(equation, spread[dim]),
        )
        for dim, size in enumerate(sizes)
        if size > 1 or strides[dim] > 1
    )


def _refused_pooling(equation: Equation, spread: int) -> str:
    if equation.name == "reduce_window":
        return (
            "it reduces windows by a function without a known neutral padding; space "
            "can be divided for maximum, minimum and sum"
        )
    return "it dilates its operand" if spread > 1 else ""


def pooled(equation: Equation) -> tuple[Sequence[Any], ...]:
    """Returns sizes, strides, padding and dilation of operand and window, by dimension.

    Args:
        equation: Equation of a pooling.
    """
    params = equation.params
    rank = len(equation.inputs[0])
    ones = (1,) * rank
    return (
        params["window_dimensions"],
        params.get("window_strides") or ones,
        params.get("padding") or ((0, 0),) * rank,
        params.get("base_dilation") or ones,
        params.get("window_dilation") or ones,
    )
