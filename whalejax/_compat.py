"""Access to JAX's internals, and differences between JAX 0.10 and 0.12.

The package accesses jaxprs through these functions alone. So a JAX release changes only
this file, which is therefore long. Tests run it with both ends of the supported range.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.extend
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax._src import effects, source_info_util
from jax.core import Tracer
from jax.experimental import compute_on as compute_on_module
from jax.interpreters import partial_eval


Recursion = Literal["inline", "remat", "scan", "cond", "while", "opaque"]

_RECURSIONS: Final[dict[str, Recursion]] = {
    "jit": "inline",
    "pjit": "inline",
    "closed_call": "inline",
    "call": "inline",
    "core_call": "inline",
    "eval_jaxpr": "inline",
    "remat": "remat",
    "remat2": "remat",
    "checkpoint": "remat",
    "scan": "scan",
    "cond": "cond",
    "while": "while",
    "custom_jvp_call": "opaque",
    "custom_vjp_call": "opaque",
    "custom_vjp_call_jaxpr": "opaque",
    "custom_vmap_call": "opaque",
    "composite": "opaque",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanParts:
    """Division of a scan's inputs and outputs into constants, carries and slices."""

    num_consts: int
    num_carries: int
    length: int


def recursion(equation: Any) -> Recursion | None:
    """Returns how an evaluator enters an equation, or None if it does not.

    An ``opaque`` call has custom rules, such as for derivatives. Its body may be
    inspected. To run it, the call itself must be bound.
    """
    return _RECURSIONS.get(equation.primitive.name)


def differentiable_operands(equation: Any) -> list[int]:
    """Returns the indices of the operands to which a gradient may flow.

    The first operands of a call with a custom derivative rule are closed-over values.
    The rule gives no gradient for them, and JAX refuses to compute one.
    """
    ruled = equation.primitive.name.startswith("custom_")
    closed_over = equation.params.get("num_consts", 0) if ruled else 0
    return [
        i
        for i, atom in enumerate(equation.invars)
        if i >= closed_over and is_inexact(atom.aval.dtype)
    ]


def is_ruled_by_jax(equation: Any) -> bool:
    """Returns whether a call's derivative rule is JAX's own, as of ``jax.nn.relu``."""
    folder = f"at {os.path.dirname(jax.__file__)}{os.sep}"
    if equation.primitive.name == "custom_linear_solve":
        solvers = [j for j in equation.params["jaxprs"] if j is not None]
        infos = [open_jaxpr(j)[0].debug_info for j in solvers]
        return all(folder in str(getattr(i, "func_src_info", "")) for i in infos)
    (inner,) = inner_jaxprs(equation)
    body, _ = open_jaxpr(inner)
    rules = [equation.params.get(name) for name in ("jvp_jaxpr_fun", "bwd")]
    infos = [getattr(r, "debug_info", None) for r in rules if r is not None]
    sources = [
        str(getattr(info, "func_src_info", ""))
        for info in (body.debug_info, *infos)
        if info is not None
    ]
    wrapped = "custom_derivatives.py" in sources[0]  # jax.custom_gradient does so.
    return not wrapped and all(folder in source for source in sources)


def is_floor_division(equation: Any) -> bool:
    """Returns whether a call is JAX's own ``//``, and not another of that name."""
    if str(equation.params.get("name", "")) != "floor_divide":
        return False
    given = [
        jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type)
        for a in equation.invars
    ]
    (own,) = jax.make_jaxpr(jnp.floor_divide)(*given).eqns
    return str(inner_jaxprs(own)) == str(inner_jaxprs(equation))


def solve_parts(equation: Any) -> tuple[int, int, int]:
    """Returns operand indices of a linear solve.

    They are start and end of the solver's constants, and the first right-hand side.
    """
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return first, first + lengths.solve, sum(lengths)


def solve_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr of the solver of a linear solve."""
    return equation.params["jaxprs"].solve


def instantiated(cotangent: Any) -> Any:
    """Returns a cotangent as an array; zeros for a symbolic zero."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        dtype: Any = cotangent.dtype
        return jnp.zeros(cotangent.shape, dtype)
    return cotangent


def inner_jaxprs(equation: Any) -> tuple[Any, ...]:
    """Returns the jaxprs inside a call-like equation.

    A ``cond`` has its branches, a ``while`` its condition and then its body, and every
    other call its one body. They may be open or closed; see ``open_jaxpr``.
    """
    params = equation.params
    kind = recursion(equation)
    if kind is None:
        return ()
    if kind == "cond":
        return tuple(params["branches"])
    if kind == "while":
        return (params["cond_jaxpr"], params["body_jaxpr"])
    return (next(params[n] for n in ("jaxpr", "call_jaxpr", "call") if n in params),)


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jaxpr's body and the values of its ``constvars``.

    JAX 0.10 has separate classes of open and closed jaxprs. JAX 0.12 has one class,
    which may have constants.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def scan_parts(equation: Any) -> ScanParts:
    """Divides a scan's inputs and outputs by comparing outer and inner ranks.

    JAX 0.12 has no ``num_consts`` and ``num_carry``. A sliced input or stacked output
    has exactly one more dimension outside than inside.
    """
    body, _ = open_jaxpr(inner_jaxprs(equation)[0])
    num_slices = sum(
        _rank(outer) != _rank(inner)
        for outer, inner in zip(equation.invars, body.invars, strict=True)
    )
    num_carries = sum(
        _rank(outer) == _rank(inner)
        for outer, inner in zip(equation.outvars, body.outvars, strict=True)
    )
    return ScanParts(
        num_consts=len(equation.invars) - num_slices - num_carries,
        num_carries=num_carries,
        length=int(equation.params["length"]),
    )


def is_kept(equation: Any, policy: Any) -> bool:
    """Returns whether a checkpoint policy saves an equation's results.

    Args:
        equation: Equation inside the checkpointed region.
        policy: Policy of the region; None saves nothing.
    """
    if policy is None:
        return False
    avals = [atom.aval for atom in equation.invars]
    try:
        answer = policy(equation.primitive, *avals, **equation.params)
    except Exception:  # A user's policy may need more than it gets here.
        return False
    # Policies return booleans, or objects that say whether and where to save a value.
    return answer is not False and "Recompute" not in type(answer).__name__


def runs_twice(equation: Any) -> bool:
    """Returns whether an equation's effects may be in ``jax.checkpoint``."""
    return not effects.remat_allowed_effects.filter_not_in(equation.effects)


def checkpoint_name_of(equation: Any) -> str | None:
    """Returns the name from ``jax.ad_checkpoint.checkpoint_name``, or None."""
    named = equation.primitive.name == "name"
    return str(equation.params["name"]) if named else None


Kept = tuple[tuple[int, ...], Any, bool]
"""Shape and dtype of a saved value, and whether only products read it."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def scan_residuals(
    equation: Any,
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    flowing: Sequence[bool] | None = None,
) -> list[Kept]:
    """Returns the residuals of one iteration of a scan, as JAX decides them.

    Weights, and values that depend on weights alone, are omitted, as they are stored
    in any case.

    Args:
        equation: Scan to analyse.
        run: Function that runs the scan; default: as traced.
        flowing: Whether a gradient flows through each operand; default: through every
            floating-point operand.

    Returns:
        Shape and dtype of each saved value, and whether only products read it.
    """
    known = _kept_by_checkpoint(equation)
    return residuals_by_vjp(equation, run, flowing) if known is None else known


def _kept_by_checkpoint(equation: Any) -> list[Kept] | None:
    """Returns the residuals if each iteration is one checkpoint that saves its inputs.

    Returns None for other scans, which need a derivative.
    """
    (inner,) = inner_jaxprs(equation)
    body, _ = open_jaxpr(inner)
    if len(body.eqns) != 1 or recursion(body.eqns[0]) != "remat":
        return None
    (one,) = body.eqns
    if one.params["policy"] is not None:
        return None
    parts = scan_parts(equation)
    flowing = body.invars[parts.num_consts :]
    carries = [v for v in flowing[: parts.num_carries] if v in one.invars]
    flows = [not is_literal(a) and a in flowing for a in one.invars]
    for carry in carries:
        mine = [a is carry for a in one.invars]
        if not is_inexact(carry.aval.dtype) or not _multiplies(one, mine, flows):
            return None
    readers = _readers(inner)
    return [
        (tuple(v.aval.shape), v.aval.dtype, readers[v] <= _PRODUCTS) for v in carries
    ]


def _multiplies(one: Any, flags: Sequence[bool], others: Sequence[bool]) -> bool:
    """Whether a call multiplies values of some operands by values of others.

    Nested calls are not inspected.
    """
    body, _ = open_jaxpr(inner_jaxprs(one)[0])
    sets = [
        {v for v, flag in zip(body.invars, given, strict=True) if flag}
        for given in (flags, others)
    ]
    for inside in body.eqns:
        read = {a for a in inside.invars if not is_literal(a)}
        if inside.primitive.name in _PRODUCTS and sets[0] & read and read <= sets[1]:
            return True
        for result in sets:
            if result & read:
                result.update(inside.outvars)
    return False


def residuals_by_vjp(
    equation: Any,
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    flowing: Sequence[bool] | None = None,
) -> list[Kept]:
    """Returns the result of ``scan_residuals``, always by a derivative."""
    parts = scan_parts(equation)
    avals = [atom.aval for atom in equation.invars]
    flows = [
        i >= parts.num_consts
        and is_inexact(aval.dtype)
        and (flowing is None or flowing[i])
        for i, aval in enumerate(avals)
    ]

    def residual_outputs(*arguments: Any) -> list[Any]:
        def moving(*given: Any) -> list[Any]:
            values = iter(given)
            merged = [
                next(values) if f else a for f, a in zip(flows, arguments, strict=True)
            ]
            outputs = bind(equation, merged) if run is None else run(merged)
            return [x for x in outputs if is_inexact(x.dtype)]

        inputs = [a for f, a in zip(flows, arguments, strict=True) if f]
        leaves: list[Any] = jax.tree.leaves(jax.vjp(moving, *inputs)[1])
        return leaves

    traced, _ = open_jaxpr(
        trace(residual_outputs, [abstract(a.shape, a.dtype) for a in avals])
    )
    scans = [e for e in traced.eqns if recursion(e) == "scan"]
    if not scans:
        return []
    (inner,) = inner_jaxprs(scans[0])
    parts = scan_parts(scans[0])
    body, _ = open_jaxpr(inner)
    flags = [
        parts.num_consts <= i < parts.num_consts + parts.num_carries
        for i in range(len(body.invars))
    ]
    given = len(equation.outvars) - scan_parts(equation).num_carries
    outs = body.outvars[parts.num_carries + given :]
    moved = depending(inner, flags)[-len(outs) :] if outs else []
    readers = _readers(inner)
    return [
        (
            tuple(var.aval.shape),
            var.aval.dtype,
            bool(readers.get(var)) and readers[var] <= _PRODUCTS,
        )
        for var, depends in zip(outs, moved, strict=True)
        if depends
    ]


def _readers(jaxpr: Any) -> dict[Any, set[str]]:
    body, _ = open_jaxpr(jaxpr)
    readers: dict[Any, set[str]] = {}
    for equation in body.eqns:
        inside: list[set[str]] = [{equation.primitive.name}] * len(equation.invars)
        if recursion(equation) in ("inline", "remat"):
            (inner,) = inner_jaxprs(equation)
            variables = open_jaxpr(inner)[0].invars
            names = _readers(inner)
            if len(variables) == len(inside):
                inside = [names.get(v, set()) for v in variables]
        for atom, names_of in zip(equation.invars, inside, strict=True):
            if not is_literal(atom):
                readers.setdefault(atom, set()).update(names_of)
    return readers


def depending(jaxpr: Any, flags: Sequence[bool]) -> list[bool]:
    """Returns whether each result of a jaxpr depends on flagged inputs.

    Args:
        jaxpr: Open or closed jaxpr.
        flags: Whether each input is flagged.
    """
    body, _ = open_jaxpr(jaxpr)
    data = {var for var, flag in zip(body.invars, flags, strict=True) if flag}
    for equation in body.eqns:
        here = [not is_literal(a) and a in data for a in equation.invars]
        results = [any(here)] * len(equation.outvars)
        kind = recursion(equation)
        if kind in ("inline", "remat"):
            (inner,) = inner_jaxprs(equation)
            if len(open_jaxpr(inner)[0].invars) == len(here):
                results = depending(inner, here)
        elif kind in ("scan", "while") and any(here):
            results = _depending_in_loop(equation, here)
        data.update(
            v for v, flag in zip(equation.outvars, results, strict=True) if flag
        )
    return [not is_literal(v) and v in data for v in body.outvars]


def _depending_in_loop(equation: Any, flags: Sequence[bool]) -> list[bool]:
    body, flags = inner_jaxprs(equation)[-1], list(flags)
    if recursion(equation) == "while":
        of_condition, _ = while_parts(equation)
        if any(flags[:of_condition]):
            return [True] * len(equation.outvars)
        flags = flags[of_condition:]
        carries = range(while_parts(equation)[1], len(flags))
    else:
        parts = scan_parts(equation)
        carries = range(parts.num_consts, parts.num_consts + parts.num_carries)
    while True:
        results = depending(body, flags)
        more = [i for i, out in zip(carries, results, strict=False) if out]
        if all(flags[i] for i in more):
            break
        for i in more:
            flags[i] = True
    if recursion(equation) == "while" and any(_condition_reads(equation, results)):
        return [True] * len(results)
    return [flags[i] for i in carries] + results[len(carries) :]


def _condition_reads(equation: Any, flags: Sequence[bool]) -> list[bool]:
    constants, _ = while_parts(equation)
    return depending(inner_jaxprs(equation)[0], [False] * constants + list(flags))


def needed(jaxpr: Any, places: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns a function from all inputs of a jaxpr to some of its results.

    Args:
        jaxpr: Traced jaxpr.
        places: Indices of the results, in the order to return them.
    """
    closed = needed_closed(jaxpr, places)
    function: Callable[..., list[Any]] = jax.extend.core.jaxpr_as_fun(closed)
    return function


def needed_closed(jaxpr: Any, places: Sequence[int]) -> Any:
    """Returns a closed jaxpr with some of a jaxpr's results, and all its inputs."""
    _, constants = open_jaxpr(jaxpr)
    return jax.extend.core.ClosedJaxpr(needed_jaxpr(jaxpr, places), constants)


def needed_jaxpr(jaxpr: Any, places: Sequence[int]) -> Any:
    """Returns an open jaxpr with some of a jaxpr's results, and all its inputs."""
    body, _ = open_jaxpr(jaxpr)
    wanted = [i in places for i in range(len(body.outvars))]
    return partial_eval.dce_jaxpr(body, wanted, instantiate=True)[0]


def read_inputs(jaxpr: Any, place: int) -> list[int]:
    """Returns the indices of the inputs that one result of a jaxpr depends on."""
    body, _ = open_jaxpr(jaxpr)
    wanted = [i == place for i in range(len(body.outvars))]
    _, used = partial_eval.dce_jaxpr(body, wanted)
    return [i for i, flag in enumerate(used) if flag]


def passing_on(jaxpr: Any, inputs: Mapping[int, int]) -> Any:
    """Returns a closed jaxpr that returns inputs in place of some results.

    Args:
        jaxpr: Traced jaxpr.
        inputs: For each such result, the index of an input of the same type.
    """
    body, constants = open_jaxpr(jaxpr)
    outputs = [
        body.invars[inputs[i]] if i in inputs else atom
        for i, atom in enumerate(body.outvars)
    ]
    return jax.extend.core.ClosedJaxpr(body.replace(outvars=outputs), constants)


def pruned(jaxpr: Any) -> Any:
    """Returns a closed jaxpr without equations that nothing reads."""
    body, constants = open_jaxpr(jaxpr)
    result, _ = partial_eval.dce_jaxpr(
        body, [True] * len(body.outvars), instantiate=True
    )
    return jax.extend.core.ClosedJaxpr(result, constants)


def without_dead_equations(jaxpr: Any, keep: Callable[[str], bool]) -> Any:
    """Returns a closed jaxpr without equations that no result or effect needs.

    Inner programs are unchanged, as the meaning of their inputs is by position.

    Args:
        jaxpr: Closed jaxpr.
        keep: Function from a scope's text to whether all its equations are kept.
    """
    body, constants = open_jaxpr(jaxpr)
    live = {atom for atom in body.outvars if not is_literal(atom)}
    kept = []
    for equation in reversed(body.eqns):
        needed = equation.effects or not live.isdisjoint(equation.outvars)
        if needed or keep(scope_text(equation)):
            kept.append(equation)
            live.update(atom for atom in equation.invars if not is_literal(atom))
    if len(kept) == len(body.eqns):
        return jaxpr
    return jax.extend.core.ClosedJaxpr(body.replace(eqns=kept[::-1]), constants)


def scopes_in(jaxpr: Any) -> set[str]:
    """Returns the relative name stacks of all equations, including inner jaxprs."""
    found: set[str] = set()
    for equation in open_jaxpr(jaxpr)[0].eqns:
        found.add(scope_text(equation))
        found.update(*map(scopes_in, inner_jaxprs(equation)))
    return found


def while_parts(equation: Any) -> tuple[int, int]:
    """Returns the number of constants of a while's condition and of its body."""
    return int(equation.params["cond_nconsts"]), int(equation.params["body_nconsts"])


def scope_text(equation: Any) -> str:
    """Returns an equation's name stack as text, relative to its jaxpr."""
    return str(equation.source_info.name_stack)


def scope_key(equation: Any) -> int:
    """Returns a number that is equal for equations of a program with equal scopes."""
    return id(equation.source_info.name_stack)


NO_LINE: Final = "an unknown line"
"""Text for an equation without a line of the user's."""


def line_text(equation: Any) -> str:
    """Returns the user's line of an equation, such as ``"model.py:12"``."""
    return _frames_text(equation)[0]


def source_text(equation: Any) -> str:
    """Returns the user's line of an equation, and the line of a called library, if any.

    For example ``"model.py:12, in optax's _ranking.py:96"``.
    """
    line, library = _frames_text(equation)
    return f"{line}, in {library}" if library else line


def raised_at(error: BaseException) -> str:
    """Returns the user's line that raised an error, such as ``"model.py:12"``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = frame.filename
        if source_info_util.is_user_filename(path) and not _library_of(path):
            return f"{os.path.basename(path)}:{frame.lineno}"
    return NO_LINE


def is_of_einsum(equation: Any) -> bool:
    """Returns whether an equation is one of the products of a ``jnp.einsum``."""
    made = equation.source_info.traceback
    for code in made.raw_frames()[0] if made else ():
        if source_info_util.is_user_filename(code.co_filename):
            return False
        if os.path.basename(code.co_filename) == "einsum.py":
            return True
    return False


_LIBRARIES: Final = ("flax", "optax", "chex", "equinox", "haiku", "einops", "distrax")
_OWN: Final = os.path.dirname(__file__)
_OWN_MODELS: Final = os.path.join(_OWN, "models")


def _frames_text(equation: Any) -> tuple[str, str]:
    """Returns the user's innermost line, and the line of a library inside it."""
    library = ""
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        line = f"{os.path.basename(frame.file_name)}:{frame.start_line}"
        package = _library_of(frame.file_name)
        if not package:
            return line, library
        if package == "whalejax":
            break  # The remaining frames belong to code that traces the loss.
        library = library or f"{package}'s {line}"
    return (library, "") if library else (NO_LINE, "")


@functools.cache
def _library_of(path: str) -> str:
    if path.startswith(_OWN + os.sep):
        return "" if path.startswith(_OWN_MODELS + os.sep) else "whalejax"
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file and path.startswith(os.path.dirname(file) + os.sep):
            return name
    return ""


def has_explicit_axes(aval: Any) -> bool:
    """Returns whether JAX tracks a value's layout along some axis of a mesh."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    kinds = getattr(mesh, "axis_types", None) or ()
    return any(kind == jax.sharding.AxisType.Explicit for kind in kinds)


_LITERAL: Final = jax.extend.core.Literal


def is_literal(atom: Any) -> bool:
    """Returns whether an operand is a constant in the equation."""
    return isinstance(atom, _LITERAL)


def literal_key(literal: Any) -> tuple[Any, ...]:
    """Returns a key that is equal for equal constants at any position."""
    aval = literal.aval
    return aval.dtype, aval.weak_type, np.asarray(literal.val).tobytes()


def is_concrete(value: Any) -> bool:
    """Returns whether a value is an array with values, neither traced nor abstract."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def key_algorithm_name(dtype: Any) -> str:
    """Returns the name of a key dtype's algorithm, such as ``"threefry2x32"``."""
    return str(dtype._impl.name)


def dtype_name(dtype: Any) -> str:
    """Returns a dtype's name, such as ``"float32"`` or ``"key<fry>"``."""
    return str(dtype)


def itemsize_bytes(dtype: Any) -> int:
    """Returns the bytes of one element; a random key counts its raw words."""
    if is_key_dtype(dtype):
        words = jax.eval_shape(jax.random.key_data, abstract((), dtype))
        return int(words.size) * int(words.dtype.itemsize)
    return int(dtype.itemsize)


def aval_bytes(aval: Any) -> int:
    """Returns the bytes of a value."""
    return math.prod(map(int, aval.shape)) * itemsize_bytes(aval.dtype)


_short_errors: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "_short_errors", default=False
)


@contextlib.contextmanager
def short_sharding_errors() -> Iterator[None]:
    """Makes the error for a tracer's missing ``sharding`` cheap during a block.

    JAX names the inputs of the value in this error, and searches all traced equations
    for them. But ``getattr(value, "sharding", None)`` discards the error. An NNX module
    makes this query for each of its random streams. So the time to trace a model grows
    with the square of the number of layers.
    """
    if isinstance(_FULL_SHARDING, property):
        Tracer.sharding = _QUICK_SHARDING  # type: ignore[assignment]
    token = _short_errors.set(True)
    try:
        yield
    finally:
        _short_errors.reset(token)


def _sharding(tracer: Any) -> Any:
    if _short_errors.get():
        raise AttributeError("a traced value has no attribute 'sharding'")
    return _FULL_SHARDING.fget(tracer)


_FULL_SHARDING: Final[Any] = vars(Tracer).get("sharding")
_QUICK_SHARDING: Final = property(_sharding)


def trace(function: Any, arguments: Sequence[Any]) -> Any:
    """Returns the jaxpr of a flat function at abstract arguments."""
    with short_sharding_errors():
        return jax.make_jaxpr(function)(*arguments)


def unbound_axis(error: NameError) -> str | None:
    """Returns the axis in JAX's error about an unbound axis; None for other errors."""
    match = re.search(r"unbound axis name: (\w+)", str(error))
    return match[1] if match else None


def run_flowing(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr in which tangents also flow through ``stop_gradient``.

    Args:
        jaxpr: Open or closed jaxpr.
        values: Inputs of the jaxpr.
    """
    body, constants = open_jaxpr(jaxpr)
    known = dict(zip(body.constvars, constants, strict=True))
    known.update(zip(body.invars, values, strict=True))
    for equation in body.eqns:
        given = [a.val if is_literal(a) else known[a] for a in equation.invars]
        inner = (
            inner_jaxprs(equation) if recursion(equation) in ("inline", "remat") else ()
        )
        if equation.primitive.name == "stop_gradient":
            results = given
        elif inner and len(open_jaxpr(inner[0])[0].invars) == len(given):
            results = run_flowing(inner[0], given)
        else:
            results = bind(equation, given)
        known.update(zip(equation.outvars, results, strict=True))
    return [a.val if is_literal(a) else known[a] for a in body.outvars]


def _rank(atom: Any) -> int:
    return len(atom.aval.shape)


def is_inexact(dtype: Any) -> bool:
    """Returns whether a dtype is real or complex floating point, and has gradients."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def mantissa_bits(dtype: Any) -> int:
    """Returns the mantissa bits of a floating-point or complex dtype."""
    return int(jnp.finfo(dtype).nmant)  # type: ignore[no-untyped-call]


def bind(equation: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs one equation unchanged, including any custom derivative rule.

    Args:
        equation: Equation to run.
        values: Operands of the equation.
        changed: Parameters that differ from the trace.
    """
    params = equation.primitive.get_bind_params({**equation.params, **changed})
    result = equation.primitive.bind(*values, **params)
    return list(result) if equation.primitive.multiple_results else [result]


@contextlib.contextmanager
def equation_context(equation: Any, *, skip: int = 0) -> Iterator[None]:
    """Gives everything that is traced in a block an equation's name stack and line.

    Args:
        equation: The equation.
        skip: Number of outermost scopes to omit; default 0.
    """
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack[skip:]
    # Code in a JAX function has no line of the user's, so it gets the line of the call.
    own = next(source_info_util.user_frames(info.traceback), None) is not None
    with (
        source_info_util.user_context(
            info.traceback if own else None, name_stack=stack
        ),
        equation.ctx.manager,
    ):
        yield


Scope = source_info_util.SourceInfo
"""Name stack and source line of an inserted equation."""


def scope_inside(equation: Any, around: Scope | None = None) -> Scope:
    """Returns the scope of the equations inside a call.

    Args:
        equation: Call that contains the equations.
        around: Scope of the call itself; None outside all calls.
    """
    info = equation.source_info
    if around is None:
        return Scope(info.traceback, info.name_stack)
    line = around.traceback if info.traceback is None else info.traceback
    return Scope(line, around.name_stack + info.name_stack)


def moved_equation(
    equation: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    scope: Scope | None = None,
) -> Any:
    """Returns an equation with other operands and results, inside a scope."""
    info = equation.source_info if scope is None else scope_inside(equation, scope)
    return equation.replace(
        invars=list(operands), outvars=list(results), source_info=info
    )


def checkpoint_equation(policy: Any, *, prevent_cse: bool) -> Any:
    """Returns an equation of ``jax.checkpoint`` with an empty body.

    Args:
        policy: Policy of the checkpoint; None saves nothing.
        prevent_cse: Whether the compiler must not reuse values of the first pass.
    """
    region = jax.checkpoint(lambda x: x, prevent_cse=prevent_cse, policy=policy)
    body, _ = open_jaxpr(trace(region, [abstract((), jnp.float32)]))
    return body.eqns[0]


def checkpointed(
    equations: Sequence[Any], given: Sequence[Any], taken: Sequence[Any], like: Any
) -> Any:
    """Returns one equation of ``jax.checkpoint`` around several equations.

    The scope that all of them share stays outside.

    Args:
        equations: Equations in a possible order of execution.
        given: Variables that the equations read and do not make.
        taken: Variables that the equations make and others read.
        like: Equation from ``checkpoint_equation``.
    """
    stacks = [equation.source_info.name_stack for equation in equations]
    depth = _common_depth(stacks)
    names: dict[Any, Any] = {v: variable_like(v) for v in given}
    inside = []
    for equation in equations:
        operands = [a if is_literal(a) else names[a] for a in equation.invars]
        names.update((v, variable_like(v)) for v in equation.outvars)
        info = equation.source_info
        info = info.replace(name_stack=info.name_stack[depth:])
        results = [names[v] for v in equation.outvars]
        inside.append(
            equation.replace(invars=operands, outvars=results, source_info=info)
        )
    happens = set[Any]().union(*(equation.effects for equation in equations))
    body, _ = open_jaxpr(inner_jaxprs(like)[0])
    body = body.replace(
        invars=[names[v] for v in given],
        outvars=[names[v] for v in taken],
        eqns=inside,
        effects=happens,
    )
    info = equations[0].source_info.replace(name_stack=stacks[0][:depth])
    return with_inner(like, body).replace(
        invars=list(given), outvars=list(taken), effects=happens, source_info=info
    )


def with_inner(equation: Any, jaxpr: Any) -> Any:
    """Returns a call with another body of the same inputs and results."""
    name = next(n for n in ("jaxpr", "call_jaxpr", "call") if n in equation.params)
    return equation.replace(params={**equation.params, name: jaxpr})


def variable_like(variable: Any) -> Any:
    """Returns another variable of the same type."""
    return type(variable)(variable.aval)


def with_equations(
    jaxpr: Any,
    equations: Sequence[Any],
    results: Sequence[Any],
    constants: Mapping[Any, Any],
) -> Any:
    """Returns a closed jaxpr with the inputs of another and given equations.

    Args:
        jaxpr: Jaxpr with the inputs, and with the effects of the equations.
        equations: Equations of the result.
        results: Variables or literals to return, as many as ``jaxpr`` returns.
        constants: Values of the ``constvars`` of the result.
    """
    body, _ = open_jaxpr(jaxpr)
    changed = {
        "constvars": list(constants),
        "eqns": list(equations),
        "outvars": list(results),
        "debug_info": body.debug_info,
    }
    closed: Any = jax.extend.core.ClosedJaxpr(
        body.replace(**changed), list(constants.values())
    )
    return closed


def trace_within(equation: Any, function: Any, arguments: Sequence[Any]) -> Any:
    """Runs ``trace`` with an equation's source line; with None, as ``trace`` does."""
    if equation is None:
        return trace(function, arguments)
    with equation_context(equation):
        return trace(function, arguments)


def _common_depth(stacks: Sequence[Any]) -> int:
    shortest = min(len(stack.stack) for stack in stacks)
    depth = 0
    while depth < shortest and len({stack.stack[depth] for stack in stacks}) == 1:
        depth += 1
    return depth


@contextlib.contextmanager
def scopes_context(equations: Sequence[Any]) -> Iterator[int]:
    """Opens the scopes that several equations share; yields their number."""
    stacks = [equation.source_info.name_stack for equation in equations]
    depth = _common_depth(stacks)
    stack = source_info_util.current_name_stack() + stacks[0][:depth]
    traceback = equations[0].source_info.traceback
    with source_info_util.user_context(traceback, name_stack=stack):
        yield depth


def abstract(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and dtype, as JAX's constructor is untyped."""
    make: Any = jax.ShapeDtypeStruct
    made: jax.ShapeDtypeStruct = make(tuple(shape), dtype)
    return made


def host_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that the host computes on arrays in its memory.

    Args:
        function: Function of arrays to one array, which stays in host memory.
    """
    compute_on: Any = compute_on_module.compute_on
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:
        on_host: Callable[..., Any] = compute_on("device_host")(jax.jit(function))
        return on_host
    host = jax.memory.Space.Host  # JAX 0.12 needs the memory of the results.
    since: Callable[..., Any] = compute_on(
        function, compute_type="device_host", out_memory_spaces=host
    )
    return since
