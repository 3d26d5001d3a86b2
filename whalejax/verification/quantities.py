"""What a verification found, as data: quantities, and findings in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whalejax.planner.plan.plan import Plan
from whalejax.verification.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number that was predicted and compiled.

    Attributes:
        name: what it is.
        predicted, compiled: None where there is none.
        unit: ``"bytes"``, ``"flops"`` or ``"seconds"``.
        predicted_count, compiled_count: of a collective, its executions.
    """

    name: str
    predicted: float | None
    compiled: float | None
    unit: str = "bytes"
    predicted_count: int | None = None
    compiled_count: int | None = None

    @property
    def difference(self) -> float | None:
        """Predicted over compiled, less one; None where one of them is missing or 0."""
        if not self.predicted or not self.compiled:
            return 0.0 if self.predicted == self.compiled == 0 else None
        return self.predicted / self.compiled - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something in the compiled program that the plan does not say.

    Attributes:
        what: in words.
        nbytes: that it moves or holds in one step on one device; 0 where not known.
        name: name stack of the operation behind it.
        place: the user's line behind it, as ``file:line``, or empty.
    """

    what: str
    nbytes: int = 0
    name: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationData:
    """A plan held against the program that its compiler makes of it.

    Attributes:
        plan_hash: of the plan.
        target: what it was compiled for.
        device_kind: what the compiler calls the device.
        versions: of JAX and the compiler.
        fits: the compiler's word on whether the program fits the device; where the
            compiler does not check, the comparison of peak and capacity.
        capacity_bytes: of one device that programs may use; 0 where not known.
        memory, collectives: by term; empty where nothing was compiled. Where stages
            have programs of their own, those of each, and what they hand each other.
        product_flops: of matrix products on one device in one step.
        lower_seconds, compile_seconds: of the compilation.
        host_peak_bytes: memory that compiling took on this machine.
        refused: why traffic and products are not reported, or empty.
        rematerializations: tensors that the compiler gathers whole to change their
            layout.
        unplanned: traffic that the plan does not predict.
        failure: why there is no program, in the compiler's words, or empty.
        better: the next plan that is expected to fit, if this one does not.
    """

    plan_hash: str
    target: Target
    device_kind: str
    versions: Mapping[str, str]
    fits: bool
    capacity_bytes: int
    memory: tuple[Quantity, ...] = ()
    collectives: tuple[Quantity, ...] = ()
    product_flops: Quantity | None = None
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    host_peak_bytes: int = 0
    refused: str = ""
    rematerializations: tuple[Finding, ...] = ()
    unplanned: tuple[Finding, ...] = ()
    failure: str = ""
    better: Plan | None = None

    @property
    def peak(self) -> Quantity:
        """Peak memory of one device."""
        return self.memory[-1]
