"""Results of a check, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from whalejax.meshes.units import count_text


SHOWN: Final = 6
"""Number of gradients and of parameters in the report of a wrong run: those with the
largest errors. Reports of other runs have one of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafError:
    """Difference of one leaf between a plan and one device.

    Attributes:
        path: Dotted path of the parameter.
        error: ‖difference‖ / ‖true‖.
        norm: ‖true‖.
    """

    path: str
    error: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedDimension:
    """Logical dimension with its sizes in the plan and in the check."""

    name: str
    size: int
    reduced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """One step of a plan, if possible at reduced sizes, compared with one device.

    Attributes:
        extents: ``"even"`` or ``"odd"``, for the number of elements per device.
        precision: Computing type. Plans in 16 bits are checked in float32 too, where
            rounding errors are smaller than those of a wrong layout.
        way: Program of the run. ``"code"``: the user's code on smaller arrays;
            ``"program"``: its traced program, resized; ``"own sizes"``: not reduced.
        axes: Mesh axes and reduced sizes.
        num_devices: Virtual devices.
        num_micro_batches: Reduced number of micro-batches in a step.
        dimensions: Dimensions that were reduced.
        kept: Dimensions that could not be reduced, with reasons.
        refused: Reasons why the ways that were tried before did not run.
        loss, true_loss: Losses of the plan and of one device.
        loss_error: Relative difference of these losses.
        gradients: Error of each gradient.
        parameters: Error of each parameter after the update.
        limit: Largest error of a gradient or of the loss that passes.
        parameter_limit: Largest error of an updated parameter that passes.
        noise: Relative change of one device's gradients if its parameters are rounded.
        seconds: Time of the run.
    """

    extents: str = ""
    precision: str = ""
    way: str = ""
    axes: tuple[tuple[str, int], ...] = ()
    num_devices: int = 1
    num_micro_batches: int = 1
    dimensions: tuple[ReducedDimension, ...] = ()
    kept: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    loss: float
    true_loss: float
    loss_error: float
    gradients: tuple[LeafError, ...]
    parameters: tuple[LeafError, ...]
    limit: float
    parameter_limit: float
    noise: float
    seconds: float = 0.0

    @property
    def worst(self) -> LeafError:
        """Gradient or parameter with the largest error, relative to its limit."""
        gradient = max(self.gradients, key=lambda leaf: leaf.error)
        parameter = max(self.parameters, key=lambda leaf: leaf.error)
        less = gradient.error / self.limit < parameter.error / self.parameter_limit
        return parameter if less else gradient

    @property
    def error(self) -> float:
        """Largest of all errors, including the loss."""
        leaves = (*self.gradients, *self.parameters)
        return max(self.loss_error, *(leaf.error for leaf in leaves))

    @property
    def error_over_limit(self) -> float:
        """Largest ratio of an error to its limit; above 1, the run is wrong."""
        return max(
            self.loss_error / self.limit,
            *(leaf.error / self.limit for leaf in self.gradients),
            *(leaf.error / self.parameter_limit for leaf in self.parameters),
        )

    @property
    def is_right(self) -> bool:
        """Whether every error is within its limit."""
        return self.error_over_limit <= 1

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> CheckRun:
        """Returns a run from the JSON data of the checking process."""
        leaves = {
            name: tuple(LeafError(**leaf) for leaf in data[name])
            for name in ("gradients", "parameters")
        }
        dimensions = tuple(ReducedDimension(**one) for one in data["dimensions"])
        tuples = {name: tuple(data[name]) for name in ("kept", "refused")}
        axes = tuple((axis, size) for axis, size in data["axes"])
        return cls(
            **{**data, **leaves, **tuples, "axes": axes, "dimensions": dimensions}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Comparison of a plan with one device, which ``print`` shows.

    Attributes:
        plan_hash: Hash of the plan.
        runs: Comparisons with even and with odd numbers of elements per device.
        unchecked: Reasons for comparisons that were impossible.
        seconds: Time of the check.
    """

    plan_hash: str
    runs: tuple[CheckRun, ...]
    unchecked: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether all errors of all runs are within their limits."""
        return all(run.is_right for run in self.runs)

    @property
    def worst(self) -> CheckRun:
        """Run with the largest ratio of an error to its limit."""
        return max(self.runs, key=lambda run: run.error_over_limit)

    def document(self) -> dict[str, Any]:
        """Returns the result as plain JSON data."""
        return {
            "whalejax_check": 1,
            "plan_hash": self.plan_hash,
            "is_right": self.is_right,
            "worst_error": self.worst.error,
            "worst_path": self.worst.worst.path,
            "runs": [
                {
                    **dataclasses.asdict(run),
                    "is_right": run.is_right,
                    "worst_error": run.error,
                    "worst_path": run.worst.path,
                }
                for run in self.runs
            ],
            "unchecked": list(self.unchecked),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        word = "equals one device" if self.is_right else "DIFFERS FROM ONE DEVICE"
        yield f"plan {self.plan_hash} {word} ({self.seconds:.0f} s)"
        for run in self.runs:
            yield from _run_lines(run)
        yield from (f"not checked: {reason}" for reason in self.unchecked)


def _run_lines(run: CheckRun) -> Iterator[str]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in run.axes) or "one device"
    yield ""
    devices = count_text(run.num_devices, "virtual device")
    yield f"{run.extents} extents, {run.precision or 'f32'}, the {_WAYS[run.way]}:"
    parts = "1 micro-batch"
    if run.num_micro_batches > 1:
        parts = count_text(run.num_micro_batches, "micro-batch")
    yield f"  on           {mesh} ({devices}, {parts})"
    if run.dimensions:
        sizes = ", ".join(f"{d.name} {d.size} → {d.reduced}" for d in run.dimensions)
        yield f"  reduced      {sizes}"
    for reason in run.kept:
        yield f"  not reduced  {reason}"
    rows = [("loss", run.loss_error, run.true_loss, run.limit)]
    for what, leaves, limit in (
        ("gradient", run.gradients, run.limit),
        ("updated", run.parameters, run.parameter_limit),
    ):
        largest = sorted(leaves, key=lambda leaf: -leaf.error)
        shown = SHOWN if largest[0].error > limit else 1
        rows += [(f"{what} {x.path}", x.error, x.norm, limit) for x in largest[:shown]]
    width = max(len(name) for name, *_ in rows)
    yield f"  {'':{width}}    error   of norm"
    for name, error, norm, limit in rows:
        wrong = "  WRONG" if not error <= limit else ""
        yield f"  {name:{width}}  {error:7.1e}  {norm:8.2g}{wrong}"
    yield (
        f"  limit {run.limit:.1e} (updated parameters: {run.parameter_limit:.1e}); "
        f"rounding changes gradients by {run.noise:.1e}"
    )


_WAYS: Final = {
    "code": "model's own code",
    "program": "traced program at other sizes",
    "own sizes": "model at its own sizes",
    "": "model",
}
