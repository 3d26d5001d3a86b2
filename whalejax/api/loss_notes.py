"""Notes of a plan on the loss, in addition to those of the search."""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.capture import Captured
from whalejax.planner.cost_terms import NO_EFFECT, Remat
from whalejax.planner.plan.plan import Plan
from whalejax.planner.step_options import remat_words


def loss_notes(captured: Captured, found: Plan) -> list[str]:
    """Returns notes on state that samples change, named axes, and averaged values.

    Args:
        captured: Captured loss.
        found: Plan of the loss.
    """
    changing = _changing_note(captured.changing, found.num_micro_batches)
    axes = _axes_note(captured.axes)
    return [*changing, *axes, *_averaged_note(captured, found)]


def _changing_note(paths: Sequence[str], count: int) -> list[str]:
    """Returns the note on state that samples change, with several micro-batches."""
    if not paths or count == 1:
        return []
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return [
        f"{', '.join(paths[:3])}{more}: not trained, and changed by the batch or by "
        f"random numbers, so {count} times a step, with every micro-batch, as on one "
        "device with as much accumulation; num_micro_batches=1 changes it once"
    ]


def _axes_note(names: Sequence[str]) -> list[str]:
    """Returns the notes on axes that the loss names."""
    return [
        f'the loss names the axis "{name}": it stands for all samples of a '
        "micro-batch, so that pmean and psum over it change nothing"
        for name in names
    ]


def _averaged_note(captured: Captured, found: Plan) -> list[str]:
    """Returns the note on values reported as means over micro-batches."""
    count = found.num_micro_batches
    if not found.runnable or count == 1 or not (averaged := captured.apart().averaged):
        return []
    why = "; ".join(dict.fromkeys(value.why for _, value in averaged))
    return [
        f"{', '.join(name for name, _ in averaged)}: reported as the mean over the "
        f"{count} micro-batches, from which the whole batch's value may differ ({why})"
        "; wh.Aux(means={...}) says that the mean is meant, and num_micro_batches=1 "
        "reports the whole batch's"
    ]


def remat_note(asked: Remat, found: Plan) -> list[str]:
    """Returns a note if a policy changes nothing."""
    if not asked or found.remat:
        return []
    return [
        f"{remat_words(asked)} {NO_EFFECT}: no layers were found there, or the model "
        "itself puts them into jax.checkpoint or another call that is kept as it is"
    ]
