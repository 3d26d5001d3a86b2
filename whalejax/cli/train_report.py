"""What a training session found, as numbers and in words.

The command line prints both; scripts read the numbers, so their names are fixed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from whalejax.adapters.base import dotted
from whalejax.cli.show import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a session found; the command line prints it as JSON.

    Attributes:
        model: name of the job.
        steps: done in this session.
        loss_first, loss_last: of its first and last step; None if none was done.
        max_rel_diff_vs_one_device: largest relative difference between the losses and
            those of one device, or None where nothing was replayed.
        mesh: mesh axes and sizes.
        predicted_step_s: seconds of a step, by the plan.
        measured_step_s: median seconds of a step, or None where too few were done.
        tokens_per_s, samples_per_s: measured speed; tokens where the batch has any.
        seconds: since the command began, everything counted.
        checked_error: largest error of a gradient or parameter of the plan at reduced
            sizes; None where it was not checked.
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


def units_of(batch: Any) -> tuple[str, int]:
    """What the speed of training counts, and how many of it a global batch holds.

    Tokens are the elements of the leaf that is named after them; without such a leaf
    samples are counted, along dimension 0.

    >>> import numpy as np
    >>> units_of({"tokens": np.zeros((4, 9)), "mask": np.zeros((4, 8))})
    ('tokens', 36)
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    for path, leaf in leaves:
        if dotted(path).rpartition(".")[2] in ("tokens", "token_ids", "input_ids"):
            return "tokens", math.prod(leaf.shape)
    return "samples", leaves[0][1].shape[0]


def words_of(report: TrainReport) -> list[str]:
    """The report in lines of text, those left out that have nothing to say."""
    lines = []
    if report.loss_first is None:
        lines.append("nothing to do: all steps were done before")
    else:
        lines.append(
            f"loss {report.loss_first:.4f} to {report.loss_last:.4f} in "
            f"{report.steps} steps, {report.seconds:.1f} s in all"
        )
    if report.measured_step_s is not None:
        ratio = report.measured_step_s / report.predicted_step_s
        lines.append(
            f"step {seconds_text(report.measured_step_s)} measured, "
            f"{seconds_text(report.predicted_step_s)} predicted ({ratio:.2f} times)"
        )
    if report.max_rel_diff_vs_one_device is not None:
        lines.append(
            "largest relative difference of a loss to one device's: "
            f"{report.max_rel_diff_vs_one_device:.1e}"
        )
    return lines
