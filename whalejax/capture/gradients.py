"""Values that a gradient flows through, and values that the backward pass reads.

It is separate from ``walk`` because it needs the whole program: a loop's carry may
depend on parameters only through the end of the loop's body. If a call has its own
derivative rule, gradients may flow from any of its inputs to any result, whatever the
call contains: a straight-through estimator, for instance, contains a rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.capture.walk import FlatProgram
from whalejax.capture.walk_records import OpDraft


def differentiable(walk: FlatProgram, loss: int) -> list[bool]:
    """Returns whether each tensor is trained, or passes a gradient to a trained one.

    A trained tensor counts even if the loss does not depend on it.

    Args:
        walk: The flat program, which records which inputs are trained.
        loss: Id of the loss's total.
    """
    reached = _forward(walk)
    needed = _backward(walk, loss, reached)
    return [
        tensor.trained or (reached[t] and needed[t])
        for t, tensor in enumerate(walk.tensors)
    ]


def saved_slots(op: OpDraft, flows: Sequence[bool]) -> tuple[int, ...]:
    """Returns the slots of an operation that its backward pass reads."""
    saves = op.behaviour.saves
    if not saves or not any(flows[t] for t in op.results):
        return ()
    slots = (slot for slot, wrt in saves if flows[op.operands[wrt]])
    return tuple(sorted(set(slots)))


def _forward(walk: FlatProgram) -> list[bool]:
    reached = [tensor.trained for tensor in walk.tensors]
    inexact = [tensor.inexact for tensor in walk.tensors]
    changed = True
    while changed:
        changed = False
        for op in walk.ops:
            if op.behaviour.stops_gradient:
                continue
            if any(reached[t] for t in op.operands):
                for t in op.results:
                    reached[t] = inexact[t]
        for given, results in walk.ruled:
            if any(reached[t] for t in given):
                for t in results:
                    if inexact[t] and not reached[t]:
                        reached[t] = changed = True
        for produced, consumed in walk.loops:
            if reached[produced] and inexact[consumed] and not reached[consumed]:
                reached[consumed] = changed = True
    return reached


def _backward(walk: FlatProgram, loss: int, reached: Sequence[bool]) -> list[bool]:
    needed = [False] * len(walk.tensors)
    needed[loss] = True
    changed = True
    while changed:
        changed = False
        for op in reversed(walk.ops):
            if op.behaviour.stops_gradient:
                continue
            if any(needed[t] for t in op.results):
                for t in op.operands:
                    needed[t] = needed[t] or reached[t]
        for given, results in walk.ruled:
            if any(needed[t] for t in results):
                for t in given:
                    if reached[t] and not needed[t]:
                        needed[t] = changed = True
        for produced, consumed in walk.loops:
            if needed[consumed] and reached[produced] and not needed[produced]:
                needed[produced] = changed = True
    return needed
