"""The optimizer's step on offloaded state, a chunk at a time.

Compilers start transfers as early as possible. So transfers of full arrays would put
the state of all parameters on the device at once, and save nothing. Therefore the
optimizer is traced, and the elementwise part for every parameter (all of Adam and
momentum) runs in a loop over chunks. A chunk of the state is fetched, updated and sent
back. Other operations, such as the norm of all gradients, run before. State that one of
them reads in full, as LAMB's for its norms, is not offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from whalejax import _compat
from whalejax.capture.rules.rule_table import SAME_SHAPE
from whalejax.jaxpr.splice import spliced
from whalejax.meshes.jax_mesh import partition_spec
from whalejax.planner.sharding.layout import Spec


PIECE_BYTES = 16 << 20
"""Approximate bytes of a chunk of a parameter on one device."""

LANES, ROWS = 128, 8
"""Number of elements in the last dimension of a TPU's tile, and rows in a tile."""

_SPREAD = "broadcast_in_dim"

Update = Callable[[Sequence[Any]], Sequence[Any]]
"""Function from flat inputs to flat outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A parameter and its optimizer state, some of which is offloaded.

    Attributes:
        inputs: Numbers of the update's inputs with the parameter's shape: the
            parameter and its gradient.
        state: For each array of state, its number among the inputs and its number among
            the outputs.
        fresh: Number of the output that is the updated parameter.
        hosted: Numbers of the inputs that are offloaded; their outputs are too.
        spec: Spec of all these arrays; only needed to run the update.
    """

    inputs: tuple[int, ...]
    state: tuple[tuple[int, int], ...]
    fresh: int
    hosted: frozenset[int] = frozenset()
    spec: Spec = ()


def streamed(
    update: Update, values: Sequence[Any], followers: Sequence[Follower], mesh: Mesh
) -> list[Any]:
    """Runs an optimizer's step with some inputs in host memory.

    Args:
        update: Step of the optimizer.
        values: Inputs of the step.
        followers: State to stream, from ``streamable``.
        mesh: Mesh of the devices.

    Returns:
        The outputs; those that replace offloaded inputs are in host memory.
    """
    parts = UpdateParts(flattened(update, values), followers)
    return UpdateRun(parts, values, mesh).outputs()


def streamable(program: Any, followers: Sequence[Follower]) -> list[Follower]:
    """Returns the followers whose offloaded state no operation reads in full.

    Args:
        program: Program of the step, from ``flattened``.
        followers: Parameters and their state.
    """
    return [part.follower for part in UpdateParts(program, followers).parts]


def flattened(update: Update, values: Sequence[Any]) -> Any:
    """Traces an optimizer's step as a program without calls.

    Args:
        update: Step of the optimizer.
        values: Inputs of the step, abstract or real.
    """
    avals = [_compat.abstract(x.shape, x.dtype) for x in values]
    program = _compat.trace(lambda *xs: list(update(xs)), avals)
    return spliced(program, _inlined)


def _inlined(equation: Any) -> str | None:
    return "inline" if _compat.recursion(equation) == "inline" else None


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    return atom.val if _compat.is_literal(atom) else env[atom]


@dataclass(frozen=True, slots=True)
class FollowerPart:
    """The elementwise part of the program that computes one follower's outputs.

    Attributes:
        follower: Follower whose outputs the part computes.
        places: Numbers of the outputs: the parameter, then the state.
        equations: Equations in program order.
        whole: Other variables that the part reads, with the parameter's shape.
        single: Scalars that the part reads.
    """

    follower: Follower
    places: tuple[int, ...]
    equations: tuple[Any, ...]
    whole: tuple[Any, ...]
    single: tuple[Any, ...]


class UpdateParts:
    """The program of an update, and the parts of it that can run in chunks.

    Attributes:
        body: Jaxpr of the program.
        constants: Constants of the program.
        parts: One part for each follower whose offloaded state no other part reads.
    """

    def __init__(self, program: Any, followers: Sequence[Follower]) -> None:
        self.body, self.constants = _compat.open_jaxpr(program)
        self.maker = {
            v: (place, e) for place, e in enumerate(self.body.eqns) for v in e.outvars
        }
        self.parts = [self._part(f) for f in followers if self._same_form(f)]
        while self._drop_what_others_need():
            pass

    def variables_outside_loops(self) -> set[Any]:
        """Returns the variables that are needed outside the loops."""
        outs = self.body.outvars
        places = {p for part in self.parts for p in part.places}
        variables_outside_loops = {
            v for part in self.parts for v in (*part.whole, *part.single)
        }
        plain = (v for place, v in enumerate(outs) if place not in places)
        return variables_outside_loops | {v for v in plain if not _compat.is_literal(v)}

    def needed(self) -> tuple[list[Any], set[Any]]:
        """Returns the equations outside the loops, and all variables that they use."""
        variables = self.variables_outside_loops()
        chosen = []
        for equation in reversed(self.body.eqns):
            if any(v in variables for v in equation.outvars):
                chosen.append(equation)
                variables.update(_variables(equation))
        return chosen[::-1], variables

    def _same_form(self, follower: Follower) -> bool:
        places = [(follower.inputs[0], follower.fresh), *follower.state]
        pairs = (
            (self.body.invars[i].aval, self.body.outvars[o].aval) for i, o in places
        )
        return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)

    def _part(self, follower: Follower) -> FollowerPart:
        target = self.body.invars[follower.inputs[0]]
        shape = target.aval.shape
        held = {target, *(self.body.invars[i] for i, _ in follower.state)}
        places = (follower.fresh, *(o for _, o in follower.state))
        open_ = [self.body.outvars[place] for place in places]
        inside: dict[int, Any] = {}
        read: dict[Any, None] = {}
        while open_:
            var = open_.pop()
            made = None if _compat.is_literal(var) else self.maker.get(var)
            if made is not None and _elementwise(made[1], shape):
                place, equation = made
                if place not in inside:
                    inside[place] = equation
                    open_ += equation.invars
            elif not _compat.is_literal(var) and var not in held:
                read[var] = None
        return FollowerPart(
            follower,
            places,
            tuple(inside[place] for place in sorted(inside)),
            tuple(v for v in read if v.aval.shape == shape),
            tuple(v for v in read if v.aval.shape != shape),
        )

    def _drop_what_others_need(self) -> bool:
        """Drops parts whose offloaded state others read; returns whether it did so."""
        _, variables = self.needed()
        kept = [
            part
            for part in self.parts
            if all(self.body.invars[i] not in variables for i in part.follower.hosted)
            and all(not v.aval.shape for v in part.single)
        ]
        dropped = len(kept) < len(self.parts)
        self.parts = kept
        return dropped


class UpdateRun:
    """Runs the equations of an update outside the loops, and then the loops."""

    def __init__(self, parts: UpdateParts, values: Sequence[Any], mesh: Mesh) -> None:
        self.parts = parts
        self.body = parts.body
        self.mesh = mesh
        self.env: dict[Any, Any] = dict(
            zip(self.body.constvars, parts.constants, strict=True)
        )
        self.env.update(zip(self.body.invars, values, strict=True))

    def outputs(self) -> list[Any]:
        """Returns the results of the update."""
        for equation in self.parts.needed()[0]:
            operands = [_read(atom, self.env) for atom in equation.invars]
            results = _compat.bind(equation, operands)
            self.env.update(zip(equation.outvars, results, strict=True))
        outputs: dict[int, Any] = {}
        for part in self.parts.parts:
            outputs.update(self.part(part))
        return [
            outputs[place] if place in outputs else _read(atom, self.env)
            for place, atom in enumerate(self.body.outvars)
        ]

    def part(self, part: FollowerPart) -> dict[int, Any]:
        """Returns the outputs of a follower, by number."""
        follower, spec = part.follower, partition_spec(part.follower.spec)
        target = self.body.invars[follower.inputs[0]]
        states = [self.body.invars[i] for i, _ in follower.state]
        loop = _Loop(
            equations=part.equations,
            target=target,
            states=states,
            hosted={self.body.invars[i] for i in follower.hosted},
            whole=part.whole,
            single=part.single,
            outs=[self.body.outvars[place] for place in part.places],
        )
        read = (target, *states, *loop.whole)
        mapped = jax.shard_map(
            loop.run,
            mesh=self.mesh,
            in_specs=(*[spec] * len(read), *[PartitionSpec()] * len(part.single)),
            out_specs=(spec,) * len(part.places),
            check_vma=False,  # Equations run as they were traced.
        )
        results = mapped(*(self.env[v] for v in (*read, *part.single)))
        return dict(zip(part.places, results, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The elementwise part over chunks of one device's shard."""

    equations: Sequence[Any]
    target: Any
    states: Sequence[Any]
    hosted: Collection[Any]
    whole: Sequence[Any]
    single: Sequence[Any]
    outs: Sequence[Any]

    def run(self, target: Any, *others: Any) -> tuple[Any, ...]:
        held, others = others[: len(self.states)], others[len(self.states) :]
        whole = dict(zip(self.whole, others, strict=False))
        single = dict(zip(self.single, others[len(whole) :], strict=True))
        carried = (self.target, *self.states)
        axis, count = pieces(target.shape, target.dtype.itemsize)
        size = target.shape[axis] // count

        def piece(k: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            def at(x: Any) -> Any:
                return lax.dynamic_slice_in_dim(x, k * size, size, axis)

            env = {v: at(x) for v, x in whole.items()} | single
            for v, x in zip(carried, carry, strict=True):
                env[v] = to_device(at(x)) if v in self.hosted else at(x)
            new = [
                to_host(x) if v in self.hosted else x
                for v, x in zip(
                    carried,
                    evaluated(self.equations, self.outs, self.target, env),
                    strict=True,
                )
            ]
            return tuple(
                lax.dynamic_update_slice_in_dim(x, y, k * size, axis)
                for x, y in zip(carry, new, strict=True)
            )

        new: tuple[Any, ...] = lax.fori_loop(0, count, piece, (target, *held))
        return new


def evaluated(
    equations: Sequence[Any], outs: Sequence[Any], target: Any, env: dict[Any, Any]
) -> list[Any]:
    """Runs the elementwise part of a program on a chunk of all arrays.

    Args:
        equations: Equations of the part.
        outs: Variables to return.
        target: Variable of the parameter, whose shape all arrays have.
        env: Values of the variables that the equations read; results are added.
    """
    shape = env[target].shape
    for equation in equations:
        operands = [_read(atom, env) for atom in equation.invars]
        if equation.primitive.name == _SPREAD:
            results = [lax.broadcast_in_dim(operands[0], shape, ())]
        else:
            results = _compat.bind(equation, operands)
        env.update(zip(equation.outvars, results, strict=True))
    return [_read(atom, env) for atom in outs]


def to_device(value: Any) -> Any:
    """Returns the value in device memory."""
    return jax.device_put(value, jax.memory.Space.Device)


def to_host(value: Any) -> Any:
    """Returns the value in the host memory that devices can access."""
    return jax.device_put(value, jax.memory.Space.Host)


def pieces(shape: Sequence[int], itemsize_bytes: int) -> tuple[int, int]:
    """Returns the dimension along which a shard is split, and the number of chunks.

    TPU compilers update host memory in full rows of lanes, eight rows at a time (libtpu
    0.0.42). The last dimension is in lanes if it is a multiple of 128. Otherwise either
    of the last two may be, so neither is split. If no allowed chunks are small enough,
    larger ones are used, or the full shard.

    >>> pieces((4096, 4096), 4), pieces((8, 8), 4), pieces((7, 4096, 4096), 4)
    ((0, 4), (0, 1), (1, 32))
    >>> pieces((75_968, 448), 4), pieces((75_968, 896), 4)
    ((0, 1), (0, 8))
    """
    wanted = math.ceil(math.prod(shape) * itemsize_bytes / PIECE_BYTES)
    last = len(shape) - 1
    fills = bool(shape) and shape[last] % LANES == 0

    def is_whole(axis: int, size: int) -> bool:
        rows = fills and axis == last - 1 and size % ROWS == 0
        return axis < last - 1 or rows

    for least, most in ((wanted, 4 * wanted), (2, wanted)):
        for axis, size in enumerate(shape):
            fitting = [
                n
                for n in range(least, min(size, most) + 1)
                if size % n == 0 and (n == 1 or is_whole(axis, size // n))
            ]
            if fitting:
                return axis, fitting[0 if least == wanted else -1]
    return 0, 1


def _elementwise(equation: Any, shape: Sequence[int]) -> bool:
    if len(equation.outvars) != 1 or equation.outvars[0].aval.shape != shape:
        return False
    if equation.primitive.name == _SPREAD:
        return all(not atom.aval.shape for atom in equation.invars)
    return equation.primitive.name in SAME_SHAPE


def _variables(equation: Any) -> list[Any]:
    return [atom for atom in equation.invars if not _compat.is_literal(atom)]
