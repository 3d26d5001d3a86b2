"""Report of a training session, as text or as numbers with fixed names for scripts."""

from __future__ import annotations

from dataclasses import dataclass

from whalejax.cli.show import seconds_text
from whalejax.meshes.units import count_text
from whalejax.planner.plan.report.headline import flops_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Report of a session; ``whalejax train --json`` prints it.

    Attributes:
        model: Name of the job.
        steps: Number of steps done in this session.
        loss_first, loss_last: Loss of the first and last of these steps, or None.
        max_rel_diff_vs_one_device: Largest relative difference between a loss and that
            of the same step on one device, or None without ``--replay``.
        mesh: Mesh axes and sizes.
        predicted_step_s: Seconds of a step, as predicted by the plan.
        measured_step_s: Median measured seconds of a step; None after too few steps.
        tokens_per_s, samples_per_s: Measured speed; None after too few steps.
            ``tokens_per_s`` is also None if the batch has no tokens.
        seconds: Seconds since the command began.
        checked_error: Largest error of a gradient or parameter in ``--check``; None
            without a check.
        parameters: Number of elements of all parameters.
        device_flops_per_s: Measured FLOP/s of the model per device, on average and
            without recomputation.
        utilization: Used fraction of the devices' peak FLOP/s (MFU).
    """

    model: str
    steps: int
    loss_first: float | None
    loss_last: float | None
    max_rel_diff_vs_one_device: float | None
    mesh: dict[str, int]
    predicted_step_s: float
    measured_step_s: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    seconds: float
    checked_error: float | None = None
    parameters: int | None = None
    device_flops_per_s: float | None = None
    utilization: float | None = None


def words_of(report: TrainReport) -> list[str]:
    """Returns the report as lines of text."""
    lines = []
    if report.loss_first is None:
        lines.append("nothing to do: all steps were already done")
    else:
        lines.append(
            f"loss {report.loss_first:.4f} to {report.loss_last:.4f} in "
            f"{count_text(report.steps, 'step')}, {report.seconds:.1f} s in all"
        )
    if report.measured_step_s is not None:
        ratio = report.measured_step_s / report.predicted_step_s
        lines.append(
            f"step {seconds_text(report.measured_step_s)} measured, "
            f"{seconds_text(report.predicted_step_s)} predicted ({ratio:.2f} times)"
        )
        lines.append(_speed_text(report))
    if report.max_rel_diff_vs_one_device is not None:
        lines.append(
            "largest relative difference from a loss on one device: "
            f"{report.max_rel_diff_vs_one_device:.1e}"
        )
    return lines


def _speed_text(report: TrainReport) -> str:
    unit = "tokens" if report.tokens_per_s else "samples"
    rate = report.tokens_per_s or report.samples_per_s or 0.0
    words = [f"{rate:,.0f} {unit}/s" if rate >= 1000 else f"{rate:.3g} {unit}/s"]
    if report.device_flops_per_s and report.utilization:
        words.append(f"{flops_text(report.device_flops_per_s)}/s a device")
        words.append(f"MFU {report.utilization:.1%}")
    return f"speed {' · '.join(words)}"
