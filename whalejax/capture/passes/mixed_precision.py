"""Rewrites traced programs so that some parts compute in 16 bits.

Products in such a part read their float32 operands in 16 bits. Elementwise operations
on the results stay in 16 bits until a wider operand joins. Some operations read the
results in the type of the trace, because they sum many numbers or are steep:
reductions, exponentials, logarithms, roots, powers. Values that a loop carries, or that
a part passes to a float32 part, keep their traced type. So the program is the model's
own except for casts, and gradients flow back through the casts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.capture.rules.behaviour import Position
from whalejax.jaxpr import rebuild


DTYPES: Final[Mapping[str, Any]] = {
    "bf16": np.dtype(jnp.bfloat16),
    "f16": np.dtype(jnp.float16),
}
"""Dtype of each 16-bit precision."""

_LEAST: Final[Mapping[Any, float]] = {
    DTYPES["bf16"]: 2.0**-126,
    DTYPES["f16"]: 2.0**-14,
}
"""Smallest positive normal number of each dtype."""

_WIDE: Final = np.dtype(np.float32)

_PRODUCTS: Final = frozenset(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general".split()
)

_KEPT: Final = frozenset(
    # Operations that move numbers,
    "reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice rev "
    "concatenate pad copy name sharding_constraint stop_gradient select_n split gather "
    # and operations on one or two numbers that are not steep.
    "neg abs sign max min add sub mul div add_any tanh logistic clamp".split()
)
"""Primitives that compute in 16 bits if all their operands are in 16 bits."""

_ASIDE: Final = frozenset("eq ne lt le gt ge and or not is_finite".split())
"""Primitives that are allowed too inside a function with a derivative of its own."""


_WHERE: Final[Mapping[str, str]] = {
    "cond": "inside lax.cond",
    "while": "inside lax.while_loop",
    "opaque": "inside functions with derivatives of their own",
}
"""Calls that run as traced, with the text of notes on products inside them."""

_ALGORITHM: Final = "of a chosen algorithm"


def left_wide(jaxpr: Any, precisions: Mapping[Position, str]) -> Counter[str]:
    """Counts float32 products that stay unchanged though 16 bits were requested.

    Args:
        jaxpr: Closed jaxpr of the loss.
        precisions: Precision of equations that are to compute in 16 bits, by position.

    Returns:
        Number of products by the text of the reason.
    """
    return Counter(
        why for position, why in wide_products(jaxpr) if why and position in precisions
    )


def wide_products(
    jaxpr: Any, position: Position = (), where: str = ""
) -> Iterator[tuple[Position, str]]:
    """Yields the products of a program with at least one float32 operand.

    Args:
        jaxpr: Closed jaxpr of the loss, or of a call in it.
        position: Position of the jaxpr; empty for the loss.
        where: Reason why no equation in the jaxpr can compute in 16 bits; empty by
            default.

    Yields:
        The position of each product, and why it cannot compute in 16 bits; empty if it
        can.
    """
    for index, equation in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
        here = (*position, index)
        inside = where or _WHERE.get(_compat.recursion(equation) or "", "")
        for number, inner in enumerate(_compat.inner_jaxprs(equation)):
            yield from wide_products(inner, (*here, number), inside)
        if equation.primitive.name in _PRODUCTS:
            sides = [a.aval.dtype == _WIDE for a in equation.invars[:2]]
            if any(sides) and equation.outvars[0].aval.dtype == _WIDE:
                yield here, where or ("" if _takes_any_type(equation) else _ALGORITHM)


def narrowed(
    jaxpr: Any, precisions: Mapping[Position, str], weights: Sequence[bool]
) -> Any:
    """Returns a program in which some equations compute in 16 bits.

    Args:
        jaxpr: Closed jaxpr of the loss.
        precisions: ``"bf16"`` or ``"f16"`` of these equations, by position.
        weights: Whether each input is a parameter, trained or not.

    Returns:
        The program; types of inputs and results do not change.
    """
    narrower = _PrecisionRewriter(precisions)
    body = _compat.open_jaxpr(jaxpr)[0]

    def program(*leaves: Any) -> list[Any]:
        program = narrower.run(jaxpr, leaves, (), weights)
        return _as_traced(program, body.outvars)

    return _compat.trace(program, [v.aval for v in body.invars])


@dataclass(slots=True)
class _Scope:
    """Values while one jaxpr is evaluated; they may be narrower than traced.

    ``weights`` depend on parameters alone. ``numbers`` are those that fill a variable.
    ``casts`` are made once for all readers.
    """

    values: dict[Any, Any]
    weights: set[Any]
    numbers: dict[Any, Any] = field(default_factory=dict)
    casts: dict[tuple[Any, Any], Any] = field(default_factory=dict)

    def raw(self, atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else self.values[atom]

    def read(self, atom: Any, dtype: Any = None) -> Any:
        """Returns a value in a type; by default in the type of the trace."""
        wanted = atom.aval.dtype if dtype is None else dtype
        value = self.raw(atom)
        if _compat.is_literal(atom):
            return value if dtype is None else np.asarray(value).astype(dtype)[()]
        if value.dtype == wanted:
            return value
        if (atom, wanted) not in self.casts:
            cast = jax.lax.convert_element_type(value, wanted)
            self.casts[atom, wanted] = cast
        return self.casts[atom, wanted]

    def is_narrow(self, atom: Any, dtype: Any) -> bool:
        if _compat.is_literal(atom) or atom.aval.dtype != _WIDE:
            return False
        return bool(self.values[atom].dtype == dtype)

    def may_be_narrow(self, atom: Any, dtype: Any) -> bool:
        """Whether a value is or can become narrow: a weight, or a number that fits."""
        known = not _compat.is_literal(atom) and atom in self.weights
        if known or self.is_narrow(atom, dtype):
            return True
        number = self.number(atom)
        if number is None:
            return False
        with np.errstate(over="ignore", under="ignore"):
            cast = float(np.asarray(number).astype(dtype).astype(np.float64))
        if math.isfinite(cast) != math.isfinite(float(number)):
            return False
        return number == 0 or abs(cast) >= _LEAST[dtype]

    def number(self, atom: Any) -> Any:
        if not _compat.is_literal(atom):
            return self.numbers.get(atom)
        return None if np.ndim(atom.val) else atom.val

    def remember(self, equation: Any, results: Sequence[Any]) -> None:
        self.values.update(zip(equation.outvars, results, strict=True))
        given = [a for a in equation.invars if not _compat.is_literal(a)]
        if given and all(a in self.weights for a in given):
            self.weights.update(equation.outvars)
        if equation.primitive.name in ("broadcast_in_dim", "convert_element_type"):
            (source, *_), (result,) = equation.invars, equation.outvars
            number = self.number(source)
            if number is not None and result.aval.dtype == _WIDE:
                self.numbers[result] = number


class _PrecisionRewriter:
    def __init__(self, precisions: Mapping[Position, str]) -> None:
        self.dtypes: dict[Position, Any] = {}
        for position, precision in precisions.items():
            # A call contains equations of that type.
            for length in range(1, len(position) + 1, 2):
                self.dtypes.setdefault(position[:length], DTYPES[precision])

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Any],
        position: Position,
        weights: Sequence[bool],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        """Evaluates one jaxpr; its results may be narrower than traced."""
        body, constants = _compat.open_jaxpr(jaxpr)
        scope = _Scope(
            dict(zip(body.constvars, constants, strict=True)),
            {v for v, weight in zip(body.invars, weights, strict=True) if weight},
        )
        scope.values.update(zip(body.invars, values, strict=True))
        known = zip(body.invars, numbers, strict=False)
        scope.numbers.update((v, number) for v, number in known if number is not None)
        for index, equation in enumerate(body.eqns):
            with _compat.equation_context(equation):
                results = self._equation(scope, equation, (*position, index))
            scope.remember(equation, results)
        return [scope.raw(atom) for atom in body.outvars]

    def _equation(
        self, scope: _Scope, equation: Any, position: Position
    ) -> Sequence[Any]:
        dtype = self.dtypes.get(position)
        if dtype is not None:
            kind = _compat.recursion(equation)
            if kind in ("inline", "remat", "scan"):
                return self._call(scope, equation, position)
            if kind == "opaque":
                return _opaque(scope, equation, dtype)
            if kind is None:
                return _primitive(scope, equation, dtype)
        return _compat.bind(equation, [scope.read(atom) for atom in equation.invars])

    def _call(self, scope: _Scope, equation: Any, position: Position) -> list[Any]:
        inner = _compat.inner_jaxprs(equation)[0]
        weights = [
            not _compat.is_literal(a) and a in scope.weights for a in equation.invars
        ]
        values = [scope.raw(atom) for atom in equation.invars]
        numbers = [scope.number(atom) for atom in equation.invars]
        kind = _compat.recursion(equation)
        if kind == "scan":
            return self._scan(scope, equation, position, weights)

        def run_inner(*arguments: Any) -> list[Any]:
            return self.run(inner, arguments, (*position, 0), weights, numbers)

        if kind == "remat":
            return rebuild.around(equation, values, lambda xs: run_inner(*xs))
        run_inner.__name__ = str(equation.params.get("name", "call"))
        return list(jax.jit(run_inner)(*values))

    def _scan(
        self, scope: _Scope, equation: Any, position: Position, weights: Sequence[bool]
    ) -> list[Any]:
        """Evaluates a scan, with parameters cast before it; carries keep their type.

        With casts inside, each iteration would save the parameters in both types.
        """
        inner = _compat.inner_jaxprs(equation)[0]
        body, parts = _compat.open_jaxpr(inner)[0], _compat.scan_parts(equation)
        first, end = parts.num_consts, parts.num_consts + parts.num_carries
        flags = [w and not first <= n < end for n, w in enumerate(weights)]
        values = [
            scope.read(atom) if first <= n < end else scope.raw(atom)
            for n, atom in enumerate(equation.invars)
        ]

        def turn(arguments: Sequence[Any]) -> list[Any]:
            turn = self.run(inner, arguments, (*position, 0), flags)
            carried = _as_traced(turn, body.outvars[: parts.num_carries])
            return [*carried, *turn[parts.num_carries :]]

        if any(flags):
            avals = [
                _compat.abstract(v.aval.shape, getattr(x, "dtype", v.aval.dtype))
                for v, x in zip(body.invars, values, strict=True)
            ]
            traced = _compat.trace(lambda *xs: turn(xs), avals)
            for place, var in enumerate(_compat.open_jaxpr(traced)[0].invars):
                dtype = _cast_to(traced, var) if flags[place] else None
                if dtype is not None:
                    values[place] = scope.read(equation.invars[place], dtype)
        return rebuild.scan(equation, values, turn)


def _primitive(scope: _Scope, equation: Any, dtype: Any) -> list[Any]:
    name, atoms = equation.primitive.name, equation.invars
    floats = [_compat.is_inexact(a.aval.dtype) for a in atoms]
    wide = [a.aval.dtype == _WIDE for a in atoms]
    changed = {}
    if not all(v.aval.dtype == _WIDE for v in equation.outvars):
        narrow = False
    elif name in _PRODUCTS:
        narrow = floats == wide and _takes_any_type(equation)
        changed = {"preferred_element_type": dtype}
    elif name == "convert_element_type":
        if scope.is_narrow(atoms[0], dtype):
            return [scope.raw(atoms[0])]
        narrow = False
    else:
        given = [a for a, f in zip(atoms, floats, strict=True) if f]
        narrow = _stays(equation, dtype) and _all_narrow(scope, given, dtype)
    met = not changed and any(_is_wide(scope, a, dtype) for a in atoms)
    if not narrow or met:
        primitive = _compat.bind(equation, [scope.read(atom) for atom in atoms])
        if not narrow or dtype == DTYPES["f16"]:
            return primitive  # float16 may overflow, for instance in a mask.
        # So gradients of a parameter that many values read are summed in float32.
        return [jax.lax.convert_element_type(x, dtype) for x in primitive]
    values = [
        scope.read(a, dtype) if f else scope.read(a)
        for a, f in zip(atoms, floats, strict=True)
    ]
    return _compat.bind(equation, values, **changed)


def _is_wide(scope: _Scope, atom: Any, dtype: Any) -> bool:
    known = not _compat.is_literal(atom) and atom in scope.weights
    return known and atom.aval.dtype == _WIDE and not scope.is_narrow(atom, dtype)


def _takes_any_type(product: Any) -> bool:
    """Whether a product may use any type, as no algorithm was requested by name."""
    asked = product.params.get("precision")
    several = asked if isinstance(asked, tuple) else (asked,)
    return all(one is None or isinstance(one, jax.lax.Precision) for one in several)


def _all_narrow(scope: _Scope, atoms: Sequence[Any], dtype: Any) -> bool:
    return any(scope.is_narrow(a, dtype) for a in atoms) and all(
        scope.may_be_narrow(a, dtype) for a in atoms
    )


def _stays(equation: Any, dtype: Any) -> bool:
    """Whether an operation may compute in a 16-bit type.

    Squares may not, as variances are made of them. Cubes of numbers above 40 overflow
    in float16.
    """
    name = equation.primitive.name
    if name == "integer_pow":
        return bool(equation.params["y"] == 3 and dtype == DTYPES["bf16"])
    if name == "mul" and equation.invars[0] is equation.invars[1]:
        return False
    return name in _KEPT


def _opaque(scope: _Scope, equation: Any, dtype: Any) -> list[Any]:
    results = _compat.bind(equation, [scope.read(atom) for atom in equation.invars])
    given = [a for a in equation.invars if _compat.is_inexact(a.aval.dtype)]
    tame = _is_tame(_compat.inner_jaxprs(equation)[0], dtype)
    if not (tame and _all_narrow(scope, given, dtype)):
        return results
    return [
        jax.lax.convert_element_type(x, dtype) if v.aval.dtype == _WIDE else x
        for x, v in zip(results, equation.outvars, strict=True)
    ]


def _is_tame(jaxpr: Any, dtype: Any) -> bool:
    """Whether all operations of a function may stay in 16 bits, as in ReLU."""
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        if _compat.recursion(equation) == "inline":
            if not _is_tame(_compat.inner_jaxprs(equation)[0], dtype):
                return False
        elif equation.primitive.name not in _ASIDE and not _stays(equation, dtype):
            return False
    return True


def _as_traced(values: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    return [
        x
        if getattr(x, "dtype", a.aval.dtype) == a.aval.dtype
        else jax.lax.convert_element_type(x, a.aval.dtype)
        for x, a in zip(values, atoms, strict=False)
    ]


def _cast_to(jaxpr: Any, variable: Any) -> Any:
    """Returns the one type to which all readers cast an input; None without one."""
    body = _compat.open_jaxpr(jaxpr)[0]
    result: set[Any] = set()
    if any(v is variable for v in body.outvars):
        return None
    for equation in body.eqns:
        for place, atom in enumerate(equation.invars):
            if atom is not variable:
                continue
            dtype = None
            if equation.primitive.name == "convert_element_type":
                dtype = equation.params["new_dtype"]
            elif _compat.recursion(equation) in ("inline", "remat", "scan"):
                inner = _compat.inner_jaxprs(equation)[0]
                dtype = _cast_to(inner, _compat.open_jaxpr(inner)[0].invars[place])
            result.add(dtype)
    (dtype,) = result if len(result) == 1 else (None,)
    return dtype if dtype in DTYPES.values() else None
