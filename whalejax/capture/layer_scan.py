"""Finds, in a traced loss, the scan over layers that pipeline stages divide.

Equal stages run one program. Each stage runs some iterations of a scan over stacked
parameters, and passes the scan's carry to the next stage. This module returns the
position of the scan and the parameters that it slices, or the reason why stages cannot
divide its iterations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.adapters.leaves import dtype_of
from whalejax.capture.batch_independent_state import advances
from whalejax.planner.model.repeated_layers import stacked_loop
from whalejax.planner.pipeline.layer_stack import NO_LAYERS
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.offload_candidates import FORMS


if TYPE_CHECKING:
    from whalejax.capture.trace import Captured


class IndivisibleLayersError(PlanError):
    """The layers of a model cannot be divided among equal stages.

    Attributes:
        reason: Reason why they cannot, as a clause.
        remedy: Remedy, as the beginning of a sentence.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A scan over layers.

    Attributes:
        position: Position of the scan's equation.
        params: Indices of the trained parameters that the scan slices.
        frozen: Indices, among the non-trained leaves, of the weights that it slices.
        length: Number of layers.
        advances: Increment of each non-trainable leaf in one micro-batch.
    """

    position: tuple[int, ...]
    params: frozenset[int]
    length: int
    frozen: frozenset[int] = frozenset()
    advances: tuple[int, ...] = ()


def stack_of(captured: Captured) -> Stack:
    """Returns the scan over layers of a traced loss.

    Args:
        captured: The traced loss.

    Raises:
        IndivisibleLayersError: Stages cannot divide the iterations of any scan.
    """
    position = stacked_loop(captured.graph)
    if position is None:
        raise IndivisibleLayersError(*NO_LAYERS)
    if len(position) != 1:
        raise IndivisibleLayersError(
            "the scan over layers is inside a jit, a remat or another loop; stages "
            "divide only a scan at the top of the loss",
            "Move the scan to the top, or drop the axis stage",
        )
    (place,) = position
    jaxpr, _ = _compat.open_jaxpr(captured.jaxpr)
    equation = jaxpr.eqns[place]
    obstacle = _obstacle(captured, jaxpr, equation)
    if obstacle:
        reason, remedy = obstacle
        raise IndivisibleLayersError(
            f"stages cannot divide the layers: {reason}", remedy
        )
    parts = _compat.scan_parts(equation)
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    first = parts.num_consts + parts.num_carries
    sources = (_source(v, made) for v in equation.invars[first:])
    count = len(captured.adapter.param_paths)
    weights = captured.weights
    stack = {numbers[v] for v in sources if v in numbers and weights[numbers[v]]}
    return Stack(
        position=position,
        params=frozenset(i for i in stack if i < count),
        frozen=frozenset(i - count for i in stack if i >= count),
        length=parts.length,
        advances=tuple(n or 0 for n in _advances(captured, jaxpr)),
    )


def _obstacle(captured: Captured, jaxpr: Any, equation: Any) -> tuple[str, str] | None:
    parts = _compat.scan_parts(equation)
    carried = equation.outvars[: parts.num_carries]
    if equation.params["reverse"]:
        return "they run from the last to the first", "Reverse their order"
    if not all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in carried):
        return (
            "besides the activations, their scan carries values that are no "
            "floating-point numbers",
            "Let the scan slice those values",
        )
    used = _read_by_loss(captured, jaxpr)
    given = sum(v in used for v in equation.outvars[parts.num_carries :])
    if given:
        return (
            f"each returns {given} value{'s' if given > 1 else ''} per layer (metrics, "
            "auxiliary losses, statistics) besides the carry, and the loss reads those "
            "of all layers",
            "Let the scan carry these values: return (x, total + aux), None",
        )
    weights = _weights(captured, jaxpr)
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    first = parts.num_consts + parts.num_carries
    for v in equation.invars[first:]:
        if v in weights and _source(v, made) not in jaxpr.invars:
            return (
                "their parameters are stacked or changed in the loss before the scan "
                "slices them",
                "Store them stacked",
            )
    frozen = {v for v, own in zip(jaxpr.invars, captured.weights, strict=False) if own}
    if _read_elsewhere(jaxpr, equation, weights | frozen, made):
        return (
            "their parameters are read outside the scan too (as a penalty on weights "
            "does), where no stage has all of them",
            "Read them inside the layers, or in the optimizer",
        )
    changed = next(_changed(captured, jaxpr), "")
    if changed:
        return (
            f"the step changes {changed}, which is not trained: each stage would have "
            "a different value",
            "Keep it constant (use running statistics), or drop it",
        )
    return None


def _source(atom: Any, made: Any) -> Any:
    while atom in made and made[atom].primitive.name in FORMS:
        (before,) = made[atom].invars
        if before.aval.shape[:1] != atom.aval.shape[:1]:
            break
        atom = before
    return atom


def _read_elsewhere(
    jaxpr: Any, scan: Any, weights: set[Any], made: Mapping[Any, Any]
) -> bool:
    parts = _compat.scan_parts(scan)
    first = parts.num_consts + parts.num_carries
    sliced = {v for v in scan.invars[first:] if v in weights}
    own = set(jaxpr.invars)
    forms: list[Any] = []
    wanted = list(sliced)
    while wanted:
        atom = wanted.pop()
        if atom in made and made[atom] not in forms:
            forms.append(made[atom])
            sliced.update(made[atom].invars)
            wanted += made[atom].invars
    others = (e for e in jaxpr.eqns if e is not scan and e not in forms)
    atoms = [v for e in others for v in e.invars]
    # An input that the program returns unchanged does not count as read.
    results = [v for v in jaxpr.outvars if not _compat.is_literal(v)]
    atoms += [*scan.invars[:first], *(v for v in results if v not in own)]
    return not sliced.isdisjoint(v for v in atoms if not _compat.is_literal(v))


def _weights(captured: Captured, jaxpr: Any) -> set[Any]:
    weights = set(jaxpr.invars[: len(captured.adapter.param_paths)])
    for equation in jaxpr.eqns:
        inputs = [v for v in equation.invars if not _compat.is_literal(v)]
        if inputs and weights.issuperset(inputs):
            weights.update(equation.outvars)
    return weights


def _changed(captured: Captured, jaxpr: Any) -> Iterator[str]:
    leaves = jax.tree.leaves(captured.adapter.rest)
    added = _advances(captured, jaxpr)
    for path, leaf, n in zip(captured.adapter.rest_paths, leaves, added, strict=True):
        if n is None:
            yield f"{path} ({dtype_of(leaf)}{list(jnp.shape(leaf))})"


def _advances(captured: Captured, jaxpr: Any) -> tuple[int | None, ...]:
    adapter = captured.adapter
    return advances(adapter.rest, jaxpr, len(adapter.param_paths))


def _read_by_loss(captured: Captured, jaxpr: Any) -> set[Any]:
    count = len(jaxpr.outvars) - len(captured.adapter.rest_paths)
    wanted = {v for v in jaxpr.outvars[:count] if not _compat.is_literal(v)}
    for equation in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(equation.outvars):
            wanted |= {v for v in equation.invars if not _compat.is_literal(v)}
    return wanted
