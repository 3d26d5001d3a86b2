"""Runs a traced loss at other sizes.

Code with fixed sizes, such as ``reshape(b, s, 32, 128)``, cannot run with smaller
parameters, but its traced program can. The logical dimension of each dimension of a
value is known, so equations with sizes as parameters get other sizes. All calls are
inlined, also those with custom derivative rules.

Literals stay unchanged. For instance, a mean divides by the old count, in the plan and
on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.capture import Captured
from whalejax.capture.walk import FlatProgram
from whalejax.equality.equation_sizes import SizeError, changed_parameters
from whalejax.equality.skipped_layers import SkippedLayers, stand_ins
from whalejax.jaxpr import rebuild
from whalejax.planner.model.analysis import GraphAnalysis


Position = tuple[int, ...]
Shape = tuple[int, ...]

_NOT_CUT: Final = (TypeError, ValueError, IndexError, ZeroDivisionError)


class UnresizableError(Exception):
    """An equation that is impossible at the requested sizes.

    Attributes:
        roles: Logical dimensions of the equation that can be the cause.
        text: Text with the equation and its line of code.
    """

    def __init__(self, roles: frozenset[int], text: str) -> None:
        super().__init__(text)
        self.roles = roles
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizedProgram:
    """A traced loss that can run with other sizes of its logical dimensions.

    Attributes:
        captured: Traced loss.
        analysed: Logical dimensions of the loss.
        sizes: Reduced sizes of roles; other roles are not reduced.
        skipped: Layers that do not run.
        chosen: Roles of parameters and of the batch. Sizes of other roles may follow
            from theirs.
    """

    captured: Captured
    analysed: GraphAnalysis
    sizes: Mapping[int, int]
    skipped: SkippedLayers | None = None
    _walk: FlatProgram = field(default_factory=FlatProgram)
    _constants: dict[int, int] = field(default_factory=dict)
    _operands: dict[Position, tuple[int, ...]] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._walk.run(self.captured.jaxpr)
        self._operands.update((op.position, op.operands) for op in self._walk.ops)
        for tensor in self.captured.graph.tensors:
            if tensor.kind in ("param", "state", "batch"):
                layout = self.analysed.dims.layouts[tensor.id]
                self.chosen.update(role for atoms in layout for role in atoms)
            if tensor.kind == "const":
                self._constants[id(self._walk.constant(tensor.id))] = tensor.id

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Runs the program.

        Args:
            values: Leaves of the parameters, other state and batch, and a key. The
                batch may have any number of samples.

        Raises:
            UnresizableError: An equation is impossible at these sizes.
        """
        sizes = dict(self.sizes)
        for tensor, dim in self.captured.graph.batch_dims:
            first, *others = self.analysed.dims.layouts[tensor][dim]
            inner = self._extent(tensor, dim, sizes, first=1) if others else 1
            sizes[first] = max(1, values[tensor].shape[dim] // inner)
        return _Run(self, sizes).body(self.captured.jaxpr, values, ())

    def shape(self, tensor: int, sizes: Mapping[int, int] | None = None) -> Shape:
        """Returns the reduced shape of a value.

        Args:
            tensor: Id of the value in the graph.
            sizes: Reduced sizes of roles; default: those of the program.
        """
        rank = len(self.captured.graph.tensors[tensor].shape)
        known = self.sizes if sizes is None else sizes
        return tuple(self._extent(tensor, dim, known) for dim in range(rank))

    def _extent(
        self, tensor: int, dim: int, sizes: Mapping[int, int], *, first: int = 0
    ) -> int:
        dims = self.analysed.dims
        atoms = dims.layouts[tensor][dim], dims.sizes[tensor][dim]
        if not atoms[0]:
            return self.captured.graph.tensors[tensor].shape[dim]
        return math.prod(
            scale_size(size, dims.roles[role].size, sizes.get(role))
            for role, size in [*zip(*atoms, strict=True)][first:]
        )

    def roles(self, tensors: Sequence[int | None]) -> frozenset[int]:
        """Returns the roles of some values that are reduced."""
        layouts = self.analysed.dims.layouts
        roles = {r for t in tensors if t is not None for a in layouts[t] for r in a}
        return frozenset(r for r in roles if r in self.sizes)

    def outputs(self, position: Position) -> tuple[int | None, ...]:
        """Returns the ids of an equation's results."""
        return self.captured.outputs.get(position, ())

    def blamed(self, position: Position, error: Exception) -> frozenset[int]:
        """Returns the reduced roles of an equation that can have caused an error.

        Args:
            position: Position of the equation.
            error: Error of the equation.
        """
        given, made = self._operands.get(position, ()), self.outputs(position)
        if isinstance(error, SizeError) and given and made and made[0] is not None:
            layouts = self.analysed.dims.layouts
            result = {r for d in error.operand_dims for r in layouts[given[0]][d]}
            result |= {r for d in error.result_dims for r in layouts[made[0]][d]}
            reduced = frozenset(result & self.sizes.keys())
            if reduced:
                return reduced
        return self.roles((*given, *made))

    def constant(self, value: Any) -> Any:
        """Returns an array constant, cut to the reduced sizes."""
        tensor = self._constants.get(id(value))
        if tensor is None or not self.analysed.dims.layouts[tensor]:
            return value
        return value[tuple(slice(0, size) for size in self.shape(tensor))]


def scale_size(size: int, whole: int, reduced: int | None) -> int:
    """Reduces a size in the same proportion as its role.

    >>> scale_size(8, 16, 4), scale_size(16, 16, None)
    (2, 16)
    """
    if reduced is None or size == 1:
        return size
    return reduced if size == whole else max(1, size * reduced // whole)


class _Run:
    def __init__(self, program: ResizedProgram, sizes: dict[int, int]) -> None:
        self.program = program
        self.sizes = sizes

    def body(self, jaxpr: Any, values: Sequence[Any], position: Position) -> list[Any]:
        inner, constants = _compat.open_jaxpr(jaxpr)
        cut = map(self.program.constant, constants)
        env: dict[Any, Any] = dict(zip(inner.constvars, cut, strict=True))
        env.update(zip(inner.invars, values, strict=True))

        def read(atom: Any) -> Any:
            if not _compat.is_literal(atom):
                return env[atom]
            return self.program.constant(atom.val) if atom.aval.shape else atom.val

        others = stand_ins(self.program.skipped, position)
        for index, equation in enumerate(inner.eqns):
            if index in others:
                made = inner.eqns[others[index]].outvars
                env.update(
                    (v, env[m]) for v, m in zip(equation.outvars, made, strict=True)
                )
                continue
            given, here = [read(atom) for atom in equation.invars], (*position, index)
            with _compat.equation_context(equation):
                results = self._equation(equation, given, here)
            self._learn(here, results)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _equation(
        self, equation: Any, values: Sequence[Any], position: Position
    ) -> list[Any]:
        kind = _compat.recursion(equation)
        try:
            if kind is None:
                wanted = [
                    self._reduced_shape(tensor) for tensor in self._results(position)
                ]
                changed = changed_parameters(equation, values, wanted)
                return _compat.bind(equation, values, **changed)
            return self._call(kind, equation, values, position)
        except _NOT_CUT as error:
            roles = self.program.blamed(position, error)
            name, line = equation.primitive.name, _compat.line_text(equation)
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnresizableError(
                roles, f"{name}{f' at {line}' if line else ''}: {message:.200}"
            ) from error

    def _learn(self, position: Position, results: Sequence[Any]) -> None:
        """Records sizes of roles that follow from an operation's operands."""
        dims = self.program.analysed.dims
        for tensor, value in zip(self._results(position), results, strict=False):
            if tensor is None:
                continue
            shape = getattr(value, "shape", ())
            rows = zip(shape, dims.layouts[tensor], dims.sizes[tensor], strict=False)
            for size, atoms, whole in rows:
                if len(atoms) == 1 and atoms[0] not in self.program.chosen:
                    if whole[0] == dims.roles[atoms[0]].size:
                        self.sizes[atoms[0]] = size

    def _results(self, position: Position) -> tuple[int | None, ...]:
        return self.program.outputs(position)

    def _reduced_shape(self, tensor: int | None) -> Shape | None:
        return None if tensor is None else self.program.shape(tensor, self.sizes)

    def _call(
        self, kind: str, equation: Any, values: Sequence[Any], position: Position
    ) -> list[Any]:
        bodies = [
            self._body(inner, (*position, number))
            for number, inner in enumerate(_compat.inner_jaxprs(equation))
        ]
        if kind == "scan":
            return rebuild.scan(
                equation, values, bodies[0], self._length(equation, values, position)
            )
        if kind == "remat":
            policy = equation.params["policy"]
            return rebuild.remat(equation, values, bodies[0], policy)
        if kind == "while":
            return _while_loop(equation, values, *bodies)
        if kind == "cond":
            index, *operands = values
            branches = [lambda *args, run=run: list(run(args)) for run in bodies]
            return list(jax.lax.switch(index, branches, *operands))
        return list(bodies[0](values))

    def _body(self, jaxpr: Any, position: Position) -> rebuild.Body:
        return lambda values: self.body(jaxpr, values, position)

    def _length(self, equation: Any, values: Sequence[Any], position: Position) -> int:
        """Returns the number of iterations of a scan at reduced sizes."""
        parts = _compat.scan_parts(equation)
        stacks = values[parts.num_consts + parts.num_carries :]
        if stacks:
            return int(stacks[0].shape[0])
        made = self._results(position)[parts.num_carries :]
        shapes = [self._reduced_shape(tensor) for tensor in made]
        return next((s[0] for s in shapes if s), parts.length)


def _while_loop(
    equation: Any, values: Sequence[Any], condition: rebuild.Body, body: rebuild.Body
) -> list[Any]:
    of_condition, of_body = _compat.while_parts(equation)
    first = of_condition + of_body
    around, inside = values[:of_condition], values[of_condition:first]
    return list(
        jax.lax.while_loop(
            lambda carry: condition((*around, *carry))[0],
            lambda carry: tuple(body((*inside, *carry))),
            tuple(values[first:]),
        )
    )
