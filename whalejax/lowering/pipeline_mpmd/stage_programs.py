"""The compiled programs of a virtual stage, made from its traced program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from whalejax.jaxpr.steps import Operand, Step, Steps
from whalejax.lowering.global_arrays import run_alone
from whalejax.lowering.pipeline_mpmd.stage_trace import TracedVirtualStage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """A compiled part of a virtual stage's program, such as its forward pass.

    Attributes:
        reads: Numbers of the values that the part reads.
        gives: Operands that the part returns.
        program: ``jax.jit`` function from values and sums to returned values and
            updated sums.
        mesh: Devices on which it runs.
    """

    reads: tuple[int, ...]
    gives: tuple[Operand, ...]
    program: Any
    mesh: Any

    def run(
        self, values: Sequence[Any], before: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns values that the part computes, and the updated sums.

        Args:
            values: Values that the part reads.
            before: Sums before the call; their buffers are donated.
        """
        result: tuple[list[Any], list[Any]] = run_alone(
            lambda both: self.program(*both), (values, before), self.mesh
        )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStagePrograms:
    """A virtual stage with its compiled programs.

    Attributes:
        number: Number of the virtual stage.
        stage: Stage on which it runs.
        place: Traced forward and backward pass.
        forward: Program that computes exports and residuals, and adds to the sums.
        backward: Program that computes cotangents, and adds to the gradients.
        weight: Program that adds to the gradients if the schedule splits the backward
            pass; otherwise None.
        forward_only: Program like ``forward`` that saves no residuals.
    """

    number: int
    stage: int
    place: TracedVirtualStage
    forward: CompiledPart
    backward: CompiledPart
    weight: CompiledPart | None
    forward_only: CompiledPart

    @property
    def later(self) -> set[int]:
        """Numbers of the values that the backward or the weight program reads."""
        return {*self.backward.reads, *(self.weight.reads if self.weight else ())}


def site_of(
    number: int,
    stage: int,
    place: TracedVirtualStage,
    *,
    mesh: Any,
    splits: bool,
    options: Any,
) -> VirtualStagePrograms:
    """Returns a virtual stage with its programs, which compile at their first run.

    Args:
        number: Number of the virtual stage.
        stage: Stage of the virtual stage.
        place: Traced forward and backward pass.
        mesh: Devices of the stage.
        splits: Whether a separate program computes the parameters' gradients.
        options: XLA options of the compiler.
    """
    names, steps, kept = place.names, place.steps, place.residuals
    inputs = {*steps.inputs}
    ahead = [*names.exports, *names.fresh]
    sums, gradients = len(names.sums), len(names.gradients)

    def piece(
        name: str,
        gives: Sequence[Operand],
        given: set[int],
        added: int,
        also: Sequence[Step] = (),
    ) -> CompiledPart:
        name = f"{name}_{number}"
        return _piece(name, steps, gives, given, added, mesh, options, also)

    weight = None
    gives, given = place.behind, {*inputs, *kept}
    if splits:
        made = {n for s in steps.needed(names.returns, given)[0] for n in s.writes}
        there = {*given, *made}
        late = [n for n in steps.avals if n not in there]
        more = steps.residual_numbers(names.gradients, late, {*kept})
        weight = piece("weight", names.gradients, {*inputs, *more}, gradients)
        gives = [*names.returns, *(n for n in more if n in made)]
    return VirtualStagePrograms(
        number=number,
        stage=stage,
        place=place,
        forward=piece(
            "forward", [*ahead, *kept, *names.sums], inputs, sums, place.acting
        ),
        backward=piece("backward", gives, given, 0 if weight else gradients),
        weight=weight,
        forward_only=piece(
            "loss", [*names.exports, *names.sums], inputs, sums, place.acting
        ),
    )


def _piece(
    name: str,
    steps: Steps,
    gives: Sequence[Operand],
    given: set[int],
    added: int,
    mesh: Any,
    options: Any,
    also: Sequence[Step],
) -> CompiledPart:
    """Returns a part of a virtual stage's program, which compiles at its first run.

    The last ``added`` operands of ``gives`` are added to sums.
    """
    _, reads = steps.needed(gives, given, also)
    first = len(gives) - added

    def part(
        values: Sequence[Any], before: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        results = steps.run(gives, dict(zip(reads, values, strict=True)), also)
        pairs = zip(before, results[first:], strict=True)
        return results[:first], [a + b for a, b in pairs]

    part.__name__ = name
    return CompiledPart(
        reads=tuple(reads),
        gives=tuple(gives[:first]),
        program=jax.jit(part, donate_argnums=1, compiler_options=options),
        mesh=mesh,
    )
