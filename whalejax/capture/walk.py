"""Flattens a jaxpr into a list of operations, with calls inlined.

Every equation has a position, a tuple of integers. At the top it is the equation's
index. Inside a call-like equation at position ``p``, the k-th equation of the j-th
inner jaxpr has position ``(*p, j, k)``. For instance ``(5, 0, 2)`` is the third
equation of a jitted function that equation 5 of the program calls. For a ``cond``,
``j`` is the index of the branch. For a ``while``, it is 0 for the condition and 1 for
the body. For any other call it is 0. ``recursion`` and ``inner_jaxprs`` give the same
positions.

Operations of kind ``scan`` and ``while`` are added, to connect a loop's carries and
slices. They have the position of the loop, and compute nothing.

The module is long because one walk reads every kind of equation, at any nesting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from whalejax import _compat
from whalejax._compat import inner_jaxprs as inner_jaxprs
from whalejax._compat import recursion as recursion
from whalejax.capture.patterns.named_calls import is_attention, keeping, makes_logits
from whalejax.capture.rules.attention_rule import attention_behaviour
from whalejax.capture.rules.behaviour import (
    Behaviour,
    Context,
    Equation,
    OpDraft,
    Position,
    Shape,
    TensorDraft,
    Value,
    of_each,
    without_literals,
)
from whalejax.capture.rules.rule_table import behaviour
from whalejax.jaxpr.fewer_rows import BatchRows
from whalejax.planner.model.graph import ATTENTION, Factor, LoopResidual, TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptScan:
    """A scan whose iterations save residuals for their backward pass.

    Attributes:
        equation: The scan.
        inputs: Input tensors of one iteration: constants, carries, slices.
        inside: Constants of the scan, and all tensors of the body that are no inputs.
    """

    equation: Any
    inputs: tuple[Value, ...]
    inside: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRows:
    """A call that sorts rows across the batch and restores their order.

    Its tensors have the samples as a separate first dimension.

    Attributes:
        rows: Positions of the rows in the call.
        tensors: Tensors with a dimension of samples.
    """

    rows: BatchRows
    tensors: set[int]


@dataclass(slots=True)
class _EquationView:
    view: Equation
    rule: Behaviour | None = None


class KnownRules:
    """Cache of the rules of equations, which equal layers share."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Behaviour] = {}
        self._seen: dict[Hashable, _EquationView] = {}
        self._attention: dict[int, tuple[Any, Behaviour]] = {}
        self._without: dict[Hashable, tuple[Behaviour, Behaviour]] = {}

    def view_equation(
        self, equation: Any, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]
    ) -> _EquationView:
        """Returns an equation as rules see it; the same object for a known equation.

        Programs of one loss share the parameter objects of their equations, so the id
        of such an object can be part of the key.
        """
        name, params = equation.primitive.name, equation.params
        key = id(params), inputs, outputs
        known = self._seen.get(key)
        if known is None:
            view = Equation(name=name, params=params, inputs=inputs, outputs=outputs)
            # The view keeps the parameters alive, so their ids are not reused.
            known = self._seen[key] = _EquationView(view)
        return known

    def of(self, seen: _EquationView) -> Behaviour:
        """Returns the behaviour of an equation."""
        if seen.rule is None:
            seen.rule = self._of(seen.view)
        return seen.rule

    def _of(self, view: Equation) -> Behaviour:
        key = view.name, view.inputs, view.outputs, tuple(view.params.items())
        try:
            known = self._known.get(key)
        except TypeError:  # A parameter is not hashable.
            return behaviour(view)
        if known is None:
            known = self._known[key] = behaviour(view)
        return known

    def of_attention(self, jaxpr: Any) -> Behaviour:
        """Returns the behaviour of an attention call whose body is ``jaxpr``."""
        key = id(jaxpr)
        if key not in self._attention:
            # The body is kept alive, so its id is not reused.
            self._attention[key] = jaxpr, attention_behaviour(jaxpr)
        return self._attention[key][1]

    def without_literals(
        self, rule: Behaviour, operands: Sequence[Value], num_results: int
    ) -> Behaviour:
        """Returns a rule with operands numbered without those that are literals."""
        if None not in operands:
            return rule
        key = id(rule), tuple(t is None for t in operands), num_results
        if key not in self._without:
            # The rule is kept alive, so its id is not reused.
            self._without[key] = rule, without_literals(rule, operands, num_results)
        return self._without[key][1]


@dataclass(slots=True)
class FlatProgram:
    """A flattened program, and the state of the walk that makes it.

    Attributes:
        tiled: Whether slices that cut a value into equal parts are read as one split.
        rings: Function from a position to whether the attention call there becomes one
            operation; other calls are flattened.
        chunks: Number of chunks of tokens in calls that make logits; above 1, the
            backward pass recomputes these calls.
        rows: Positions of the rows in calls that sort rows across the batch, by name.
        rules: Rules of equations, which other walks may share.
        tensors: Tensors by id; the program's inputs come first.
        ops: Operations in program order.
        outputs: Tensor ids of the results of every equation, call-like ones included,
            by the equation's position.
        given: Tensor ids of the inputs of every checkpointed region, by its position.
        given_rules: Tensor ids of the inputs of every call with a derivative rule of
            its own, by its position.
        sorted_rows: Calls that sort rows across the batch, by position.
        loops: For every loop, pairs of a carry as an iteration produces it and as the
            next consumes it.
        ruled: Operands and results of each call with a derivative rule of its own.
            Gradients may flow through it even if operations inside have no derivative.
        kept: Outermost scans whose iterations save residuals for their backward pass.
        notes: Sentences on work that could not be counted.
    """

    tiled: bool = False
    rings: Callable[[Position], bool] = lambda position: False
    chunks: int = 1
    rows: Mapping[str, BatchRows] = field(default_factory=dict)
    rules: KnownRules = field(default_factory=KnownRules)
    tensors: list[TensorDraft] = field(default_factory=list)
    ops: list[OpDraft] = field(default_factory=list)
    outputs: dict[Position, tuple[Value, ...]] = field(default_factory=dict)
    given: dict[Position, tuple[Value, ...]] = field(default_factory=dict)
    given_rules: dict[Position, tuple[Value, ...]] = field(default_factory=dict)
    sorted_rows: dict[Position, SortedRows] = field(default_factory=dict)
    loops: list[tuple[int, int]] = field(default_factory=list)
    ruled: list[tuple[list[int], list[int]]] = field(default_factory=list)
    kept: list[KeptScan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _constants: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _dtypes: dict[Any, tuple[str, int, bool]] = field(default_factory=dict)
    _remats: int = 0
    _ringed: set[int] = field(default_factory=set)
    _tiles: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def run(self, jaxpr: Any) -> tuple[Value, ...]:
        """Flattens a complete program, whose inputs become the first tensors."""
        body, _ = _compat.open_jaxpr(jaxpr)
        inputs = [self._tensor(var.aval) for var in body.invars]
        return self._body(jaxpr, inputs, Context())

    # Values.

    def _tensor(self, aval: Any, kind: TensorKind = "value") -> int:
        return self._shaped(tuple(aval.shape), aval.dtype, kind)

    def _shaped(
        self, shape: tuple[int, ...], dtype: Any, kind: TensorKind = "value"
    ) -> int:
        facts = self._dtypes.get(dtype)
        if facts is None:
            facts = self._dtypes[dtype] = (
                _compat.dtype_name(dtype),
                _compat.itemsize_bytes(dtype),
                _compat.is_inexact(dtype),
            )
        name, itemsize, inexact = facts
        self.tensors.append(
            TensorDraft(
                shape=shape,
                dtype=name,
                itemsize_bytes=itemsize,
                inexact=inexact,
                kind=kind,
            )
        )
        return len(self.tensors) - 1

    def _constant(self, value: Any, aval: Any) -> int:
        known = self._constants.get(id(value))
        if known is None:
            known = self._constants[id(value)] = (value, self._tensor(aval, "const"))
        return known[1]

    def _read(self, atom: Any, env: dict[Any, Value]) -> Value:
        if not _compat.is_literal(atom):
            return env[atom]
        return self._constant(atom.val, atom.aval) if atom.aval.shape else None

    def constant(self, tensor: int) -> Any:
        """Returns the value of a constant of the program, by its tensor id."""
        return next(value for value, t in self._constants.values() if t == tensor)

    # Equations.

    def _body(
        self, jaxpr: Any, inputs: Sequence[Value], context: Context
    ) -> tuple[Value, ...]:
        body, constants = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Value] = dict(zip(body.invars, inputs, strict=True))
        for var, value in zip(body.constvars, constants, strict=True):
            env[var] = self._constant(value, var.aval)
        scopes: dict[str, Context] = {}
        stacks: dict[int, Context] = {}
        if self.tiled:
            self._tiles.update(tiles(body.eqns))
        for index, equation in enumerate(body.eqns):
            stack = _compat.scope_key(equation)
            here = stacks.get(stack)
            if here is None:
                text = _compat.scope_text(equation)
                if text not in scopes:
                    scopes[text] = context.under(text)
                here = stacks[stack] = scopes[text]
            operands = tuple(self._read(atom, env) for atom in equation.invars)
            position = (*context.prefix, index)
            results = self._equation(equation, position, operands, here)
            env.update(zip(equation.outvars, results, strict=True))
            self.outputs[position] = results
        return tuple(self._read(atom, env) for atom in body.outvars)

    def _equation(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        kind = recursion(equation)
        if kind is None:
            return self._primitive(equation, position, operands, here)
        if is_attention(equation) and self.rings(position):
            return self._attention(equation, position, operands, here)
        if equation.params.get("name") in self.rows:
            return self._sorted_rows(equation, position, operands, here)
        if makes_logits(equation) and self.chunks > 1:
            number, self._remats = self._remats, self._remats + 1
            here = replace(here, remat=number, policy=None, chunks=self.chunks)
        descend: Callable[..., tuple[Value, ...]] = {
            "inline": self._call,
            "opaque": self._call,
            "remat": self._remat,
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }[kind]
        return descend(equation, position, operands, here)

    def _primitive(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        inputs = tuple([_shape(atom) for atom in equation.invars])
        outputs = tuple([_shape(var) for var in equation.outvars])
        seen = self.rules.view_equation(equation, inputs, outputs)
        view = seen.view
        if here.sorted_rows is not None:
            return self._on_rows(view, equation, position, operands, here)
        parts = self._tiles.get(equation.outvars[0]) if equation.outvars else None
        rule = self.rules.of(seen) if parts is None else Behaviour(parts=parts)
        results = tuple(self._tensor(var.aval) for var in equation.outvars)
        if rule.parts is not None:
            self._equal_parts(rule.parts, view, position, operands, results, here)
        elif _is_constant(equation, operands, rule):
            rule = Behaviour(elementwise=True)
            self._emit(_FULL, position, (), results, rule, here)
        else:
            kept = _compat.is_kept(equation, here.policy)
            self._emit(view.name, position, operands, results, rule, here, kept=kept)
        return results

    def _attention(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        self._ringed.add(id(equation))
        results = tuple(self._tensor(var.aval) for var in equation.outvars)
        rule = self.rules.of_attention(inner_jaxprs(equation)[0])
        self._emit(ATTENTION, position, operands, results, rule, here)
        return results

    def _emit(
        self,
        kind: str,
        position: Position,
        operands: Sequence[Value],
        results: Sequence[int],
        rule: Behaviour,
        here: Context,
        *,
        kept: bool = False,
    ) -> None:
        self.ops.append(
            OpDraft(
                kind=kind,
                position=position,
                operands=tuple(t for t in operands if t is not None),
                results=tuple(results),
                behaviour=self.rules.without_literals(rule, operands, len(results)),
                trip=here.trip,
                remat=here.remat,
                kept=kept,
                labels=here.labels,
                scope=here.scope,
                chunks=here.chunks,
            )
        )

    def _equal_parts(
        self,
        parts: tuple[int, int],
        view: Equation,
        position: Position,
        operands: tuple[Value, ...],
        results: tuple[int, ...],
        here: Context,
    ) -> None:
        axis, count = parts
        (whole,) = operands
        if whole is None:
            return
        shape, out = view.inputs[0], view.outputs[0]
        apart = (*shape[:axis], count, *out[axis:])
        source = self.tensors[whole]
        self.tensors.append(source.reshaped(apart))
        middle = len(self.tensors) - 1
        self._emit("reshape", position, [whole], [middle], _RESHAPE, here)
        factors = [Factor(members=((0, axis),), kind="unshardable")]
        for dim, size in enumerate(out):
            if size > 1:
                inside = dim if dim < axis else dim + 1
                slots = range(1, len(results) + 1)
                factors.append(
                    Factor(members=((0, inside), *((slot, dim) for slot in slots)))
                )
        rule = Behaviour(factors=tuple(factors))
        self._emit(view.name, position, [middle], results, rule, here)

    # Rows sorted across the batch, treated as if each sample were sorted separately.

    def _sorted_rows(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        rows = self.rows[equation.params["name"]]
        result = self.sorted_rows[position] = SortedRows(rows=rows, tensors=set())
        (inner,) = inner_jaxprs(equation)
        given = [
            t if dim is None else self._split(t, rows.samples, position, here)
            for t, dim in zip(operands, rows.inputs, strict=True)
        ]
        result.tensors.update(
            t
            for t, dim in zip(given, rows.inputs, strict=True)
            if t is not None and dim is not None
        )
        context = replace(
            here.enter_call(position, 0), sorted_rows=result, depth=len(position) + 1
        )
        results = []
        pairs = zip(
            self._body(inner, given, context),
            equation.outvars,
            rows.outputs,
            strict=True,
        )
        for value, variable, dim in pairs:
            if value is None or dim is None:
                results.append(value)
                continue
            whole = self._tensor(variable.aval)
            self._emit("reshape", position, [value], [whole], _RESHAPE, here)
            results.append(whole)
        return tuple(results)

    def _split(
        self, tensor: Value, samples: int, position: Position, here: Context
    ) -> Value:
        if tensor is None:
            return None
        draft = self.tensors[tensor]
        first, *rest = draft.shape
        self.tensors.append(draft.reshaped((samples, first // samples, *rest)))
        split = len(self.tensors) - 1
        self._emit("reshape", position, [tensor], [split], _RESHAPE, here)
        return split

    def _on_rows(
        self,
        view: Equation,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        assert here.sorted_rows is not None
        one = here.sorted_rows
        dims = one.rows.results[position[here.depth :]]
        samples = one.rows.samples
        given = [t is not None and t in one.tensors for t in operands]
        inputs = tuple(
            self.tensors[t].shape[1:] if own and t is not None else shape
            for t, own, shape in zip(operands, given, view.inputs, strict=True)
        )
        outputs = tuple(
            tuple(one.rows.shape(shape, dim, samples))
            for shape, dim in zip(view.outputs, dims, strict=True)
        )
        results = []
        for variable, shape, dim in zip(equation.outvars, outputs, dims, strict=True):
            front = () if dim is None else (samples,)
            results.append(self._shaped((*front, *shape), variable.aval.dtype))
            if dim is not None:
                one.tensors.add(results[-1])
        flags = (*given, *(dim is not None for dim in dims))
        each = replace(view, inputs=inputs, outputs=outputs)
        rule = behaviour(each)
        if rule.parts is not None:
            axis, count = rule.parts
            shapes = [
                self.tensors[t].shape for t in (*operands, *results) if t is not None
            ]
            split = replace(view, inputs=(shapes[0],), outputs=tuple(shapes[1:]))
            parts = axis + flags[0], count
            self._equal_parts(parts, split, position, operands, tuple(results), here)
            return tuple(results)
        rule = of_each(rule, flags, samples)
        kept = _compat.is_kept(equation, here.policy)
        self._emit(view.name, position, operands, results, rule, here, kept=kept)
        return tuple(results)

    # Calls and loops.

    def _call(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        (inner,) = inner_jaxprs(equation)
        results = self._body(inner, operands, here.enter_call(position, 0))
        if recursion(equation) == "opaque":
            self.given_rules[position] = operands
            given, result = (
                [t for t in values if t is not None] for values in (operands, results)
            )
            self.ruled.append((given, result))
        return results

    def _remat(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        number, self._remats = self._remats, self._remats + 1
        (inner,) = inner_jaxprs(equation)
        policy = equation.params["policy"]
        self.given[position] = operands
        context = replace(here.enter_call(position, 0), remat=number, policy=policy)
        return self._body(inner, operands, context)

    def _scan(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        parts = _compat.scan_parts(equation)
        (inner,) = inner_jaxprs(equation)
        variables = _compat.open_jaxpr(inner)[0].invars
        first_slice = parts.num_consts + parts.num_carries
        consts = operands[: parts.num_consts]
        entering = [self._tensor(v.aval) for v in variables[parts.num_consts :]]
        carried, slices = entering[: parts.num_carries], entering[parts.num_carries :]
        self._tie_all(
            "scan", position, operands[parts.num_consts : first_slice], carried, here
        )
        for stacked, one in zip(operands[first_slice:], slices, strict=True):
            if stacked is not None:
                self._tie("scan", position, [stacked], one, here, shift=1)
        context = replace(here.enter_call(position, 0), trip=here.trip * parts.length)
        produced = self._body(inner, (*consts, *entering), context)
        outermost = here.trip == 1 and here.remat is None
        if outermost and parts.length > 1:
            inside = range(entering[0], len(self.tensors))
            self.kept.append(
                KeptScan(
                    equation=equation,
                    inputs=(*consts, *entering),
                    inside=(*consts, *inside),
                )
            )
        results = [self._tensor(v.aval) for v in equation.outvars]
        self._close("scan", position, produced, carried, results, here)
        stacks = results[parts.num_carries :]
        for last, stack in zip(produced[parts.num_carries :], stacks, strict=True):
            if last is not None:
                self._tie("scan", position, [last], stack, here, shift=-1)
        layers = [t for t in (*operands[first_slice:], *stacks) if t is not None]
        if layers and parts.length > 1:
            factor = Factor(
                members=tuple((slot, 0) for slot in range(len(layers))),
                kind="unshardable",
            )
            rule = Behaviour(factors=(factor,), stops_gradient=True)
            self._emit("scan", position, layers, [], rule, here)
        return tuple(results)

    def scan_residuals(self, flows: Sequence[bool]) -> tuple[LoopResidual, ...]:
        """Returns the residuals of scans, each with a tensor of the body like it.

        Args:
            flows: For every tensor, whether a gradient flows through it.
        """
        data = self._data()
        kept = (self._scan_residuals(scan, flows, data) for scan in self.kept)
        return tuple(one for several in kept for one in several)

    def _data(self) -> set[int]:
        data = {i for i, t in enumerate(self.tensors) if t.kind == "batch"}
        for op in self.ops:
            if not data.isdisjoint(op.operands):
                data.update(op.results)
        return data

    def _scan_residuals(
        self, scan: KeptScan, flows: Sequence[bool], data: set[int]
    ) -> Iterator[LoopResidual]:
        alike: dict[tuple[int, ...], int] = {}
        of_rows = {t for call in self.sorted_rows.values() for t in call.tensors}
        length = _compat.scan_parts(scan.equation).length
        # Batch-dependent tensors first: a weight may have the same shape by chance.
        inside = [i for i in scan.inside if i is not None and self.tensors[i].inexact]
        for index in sorted(inside, key=lambda i: i not in data):
            shape = self.tensors[index].shape
            alike.setdefault(_row_shape(shape) if index in of_rows else shape, index)
        run = keeping(scan.equation, self._ringed) if self._ringed else None
        flowing = [t is not None and flows[t] for t in scan.inputs]
        residuals = _compat.scan_residuals(scan.equation, run, flowing)
        for shape, dtype, multiplied in residuals:
            # Residuals of an inner loop have one more stacked dimension.
            like = alike.get(shape, alike.get(shape[1:]))
            if like is not None:
                nbytes = math.prod(shape) * _compat.itemsize_bytes(dtype)
                narrow = multiplied and _compat.dtype_name(dtype) == "float32"
                yield LoopResidual(
                    tensor=like,
                    nbytes=nbytes,
                    trip=length,
                    multiplied=narrow,
                    gathered=multiplied,
                )

    def _while(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        num_condition, num_body = _compat.while_parts(equation)
        condition, body = inner_jaxprs(equation)
        first = num_condition + num_body
        of_condition, of_body = operands[:num_condition], operands[num_condition:first]
        carried = [self._tensor(v.aval) for v in equation.outvars]
        self._tie_all("while", position, operands[first:], carried, here)
        self._body(condition, (*of_condition, *carried), here.enter_call(position, 0))
        produced = self._body(body, (*of_body, *carried), here.enter_call(position, 1))
        results = [self._tensor(v.aval) for v in equation.outvars]
        self._close("while", position, produced, carried, results, here)
        place = f" at {here.scope}" if here.scope else ""
        self.notes.append(
            f"a while loop{place} runs an unknown number of times; the work of one "
            "iteration is counted"
        )
        return tuple(results)

    def _cond(
        self,
        equation: Any,
        position: Position,
        operands: tuple[Value, ...],
        here: Context,
    ) -> tuple[Value, ...]:
        before = len(self.ops)
        branches = [
            self._body(branch, operands[1:], here.enter_call(position, index))
            for index, branch in enumerate(inner_jaxprs(equation))
        ]
        if here.trip > 1 and any(op.behaviour.flops for op in self.ops[before:]):
            where = f" at {here.scope}" if here.scope else ""
            self.notes.append(
                f"one of {len(branches)} branches{where} runs in each of {here.trip} "
                "iterations; the work of all branches is counted as an upper bound"
            )
        results = [self._tensor(v.aval) for v in equation.outvars]
        for place, result in enumerate(results):
            sources = [branch[place] for branch in branches]
            self._tie("cond", position, sources, result, here)
        return tuple(results)

    def _close(
        self,
        kind: str,
        position: Position,
        produced: Sequence[Value],
        carried: Sequence[int],
        results: Sequence[int],
        here: Context,
    ) -> None:
        for out, back, result in zip(produced, carried, results, strict=False):
            self._tie(kind, position, [out, back], result, here)
            if out is not None:
                self.loops.append((out, back))

    def _tie_all(
        self,
        kind: str,
        position: Position,
        sources: Sequence[Value],
        results: Sequence[int],
        here: Context,
    ) -> None:
        for source, result in zip(sources, results, strict=True):
            self._tie(kind, position, [source], result, here)

    def _tie(
        self,
        kind: str,
        position: Position,
        sources: Sequence[Value],
        result: int,
        here: Context,
        *,
        shift: int = 0,
    ) -> None:
        """Gives a result the dimensions of its sources, moved by ``shift``."""
        kept = [t for t in sources if t is not None]
        shape = self.tensors[result].shape
        factors: list[Factor] = []
        for dim, size in enumerate(shape):
            inner = dim + shift
            if size > 1 and inner >= 0:
                sides = ((slot, inner) for slot in range(len(kept)))
                factors.append(Factor(members=(*sides, (len(kept), dim))))
        rule = Behaviour(factors=tuple(factors) if kept else ())
        self._emit(kind, position, kept, [result], rule, here)


_RESHAPE = Behaviour(reshape=True)
_FULL = "broadcast_in_dim"


def _is_constant(equation: Any, operands: Sequence[Value], rule: Behaviour) -> bool:
    """Returns whether all operands are literals, so that one number fills the result.

    ``jnp.zeros`` is an example. A random key made of a number does not count.
    """
    if not operands or any(t is not None for t in operands):
        return False
    is_key = any(_compat.is_key_dtype(var.aval.dtype) for var in equation.outvars)
    return not (rule.elementwise or rule.unknown or is_key)


def tiles(equations: Sequence[Any]) -> dict[Any, tuple[int, int]]:
    """Returns slices that together cut a value into equal parts, as a split does.

    Args:
        equations: Equations of one jaxpr.

    Returns:
        Dimension and number of parts, by the variable that each such slice makes.
    """
    values: dict[tuple[Any, int, int], dict[Any, int]] = defaultdict(dict)
    for equation in equations:
        if equation.primitive.name != "slice" or equation.params["strides"]:
            continue
        (source,), (result,) = equation.invars, equation.outvars
        if _compat.is_literal(source):
            continue
        before, after = _shape(source), _shape(result)
        cut = [dim for dim, size in enumerate(after) if size != before[dim]]
        if len(cut) == 1 and after[cut[0]] > 1:
            start = equation.params["start_indices"][cut[0]]
            values[source, cut[0], after[cut[0]]][result] = start
    return {
        result: (dim, _shape(source)[dim] // part)
        for (source, dim, part), starts in values.items()
        if sorted({*starts.values()}) == [*range(0, _shape(source)[dim], part)]
        for result in starts
    }


def holds_tiles(jaxpr: Any) -> bool:
    """Returns whether a program or its inner jaxprs contain slices as in ``tiles``.

    Args:
        jaxpr: Open or closed jaxpr.
    """
    equations = _compat.open_jaxpr(jaxpr)[0].eqns
    return bool(tiles(equations)) or any(
        holds_tiles(inner) for e in equations for inner in inner_jaxprs(e)
    )


def _row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    samples, first, *rest = shape
    return samples * first, *rest


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
