"""Results of a verification as data: quantities, and findings as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whalejax.planner.plan.plan import Plan
from whalejax.runtime.planned_traffic import Finding as Finding
from whalejax.runtime.planned_traffic import Quantity as Quantity
from whalejax.verification.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationData:
    """A plan compared with its compiled program.

    Attributes:
        plan_hash: Hash of the plan.
        target: Target of the compilation.
        device_kind: Compiler's name of the device.
        versions: Versions of JAX and the compiler.
        fits: Whether the program fits the device. The compiler decides, or, if it does
            not check, the comparison of peak and capacity.
        capacity_bytes: Bytes of one device that programs may use; 0 if unknown.
        memory: Memory by term, of each stage with stage programs; empty if nothing was
            compiled.
        collectives: Collectives, or transfers between stages with stage programs; empty
            if nothing was compiled.
        product_flops: FLOPs of matrix products on one device in one step.
        lower_seconds: Seconds of lowering.
        compile_seconds: Seconds of compilation.
        host_peak_bytes: Peak memory of the compilation on this machine.
        refused: Reason why traffic and products are not reported; empty if they are.
        rematerializations: Tensors that the compiler gathers in full to change their
            layout.
        unplanned: Traffic that the plan does not predict.
        failure: Compiler's reason why there is no program; empty if there is one.
        better: The next plan that is expected to fit, if this one does not.
        left_out: Part of the plan that was not compiled, with the reason; empty if all
            was.
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
    left_out: str = ""

    @property
    def peak(self) -> Quantity:
        """Peak memory of one device."""
        return self.memory[-1]
