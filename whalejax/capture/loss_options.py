"""Options of a step for one loss: checked against the loss, and applied to it.

``fixed_options`` returns the options that a search must respect, or raises an error
that says why the loss does not support one. ``as_planned`` returns the loss with a
plan's options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whalejax.capture.loss_programs import Programs
from whalejax.capture.patterns.named_calls import most_tokens
from whalejax.capture.trace import Captured
from whalejax.meshes.errors import Problems
from whalejax.planner.cost_terms import ALL, OFFLOADS, Chosen
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.host_offload import unhosted
from whalejax.planner.search.request import OffloadableState
from whalejax.planner.sharding.program_regions import (
    check_rings,
    checked_attention,
    checked_policies,
)
from whalejax.planner.step_options import FixedOptions, UserOptions, is_nothing


def fixed_options(
    options: UserOptions,
    programs: Programs,
    *,
    runnable: bool,
    has_optimizer: bool,
    hosts: Callable[[], OffloadableState],
) -> FixedOptions:
    """Returns the options that a search of a loss must respect.

    Args:
        options: Options that the user gave.
        programs: Programs of the loss.
        runnable: Whether an executor has to run the plan.
        has_optimizer: Whether an optimizer was given.
        hosts: Function that returns the offloadable state, called only if needed.

    Raises:
        PlanError: The loss or the optimizer does not support an option.
    """
    remat = checked_policies(options.remat, programs.graph, programs.traced.names)
    return FixedOptions(
        remat=None if options.remat is None else remat,
        offload=_offload(options.offload, runnable, has_optimizer, hosts),
        sequence_parallel=options.sequence_parallel,
        attention=_attention(options, programs),
        loss_chunks=_loss_chunks(options.loss_chunks, programs),
        combine=options.combine,
    )


def as_planned(captured: Captured, plan: PlanData) -> Captured:
    """Returns a loss with every change that a plan makes to its program.

    Args:
        captured: Loss as the user wrote it, at the planned precision.
        plan: Plan with the options and the precision of its TaskGraphs.
    """
    result = captured.with_precisions(plan.precisions).with_attention(plan.attention)
    return result.with_chunks(plan.loss_chunks).with_remat(plan.remat)


def _attention(options: UserOptions, programs: Programs) -> Chosen | None:
    chosen = checked_attention(options.attention, programs.graph)
    if chosen:
        check_rings(
            programs.again((), chosen, 1),
            chosen,
            programs.traced.blocks(chosen).whole,
            lambda: programs.again((), ((ALL, "ring"),), 1),
        )
    return chosen


def _loss_chunks(count: int | None, programs: Programs) -> int | None:
    if count is None or count == 1:
        return count
    traced = programs.traced
    cut = traced.cut((), count)
    if cut is traced.captured and traced is not programs:
        traced, cut = programs, programs.cut((), count)
    if cut is traced.captured:
        raise PlanError(
            f"loss_chunks is {count}, and the model has no logits that can be computed "
            "in chunks: each token must be treated alone from the product that makes "
            "its logits until they are reduced over the vocabulary. Reduce over tokens "
            "last, or drop loss_chunks"
        )
    # Tokens grow with the samples of a micro-batch.
    samples, known = programs.graph.batch_size, traced.graph.batch_size
    most = most_tokens(cut.jaxpr) * samples // known
    if count > most:
        raise PlanError(
            f"loss_chunks is {count}, and a micro-batch computes the logits of {most} "
            f"tokens (num_micro_batches is {programs.graph.num_micro_batches})"
            f"; expected at most {most}, divided by the devices that share them"
        )
    return count


def check_runs(
    offload: Sequence[str] | None, hosts: Callable[[], OffloadableState]
) -> None:
    """Refuses state that no executor of this version keeps in host memory.

    Args:
        offload: Kinds of state to keep in host memory, as ``fixed_options`` returns it.
        hosts: Function that returns the offloadable state.

    Raises:
        PlanError: Some state cannot be kept in host memory. The message lists it all.
    """
    problems = Problems("offload", PlanError)
    for problem in unhosted(offload or (), hosts, has_optimizer=True):
        problems.add(problem)
    problems.raise_if_any()


def _offload(
    offload: str | Sequence[str] | None,
    runnable: bool,
    has_optimizer: bool,
    hosts: Callable[[], OffloadableState],
) -> tuple[str, ...] | None:
    if offload is None:
        return None
    if is_nothing(offload):
        return ()
    problems = Problems("offload", PlanError)
    given = [offload] if isinstance(offload, str) else offload
    if "gradients" in given and "params" not in given:
        problems.add(
            "gradients can be kept in host memory only together with their parameters. "
            "Add 'params', or leave 'gradients' out"
        )
    if "optimizer" in given and not has_optimizer:
        problems.add(
            "no optimizer was given, so it has no state to keep in host memory. Pass "
            "optimizer=, or leave 'optimizer' out"
        )
    if runnable:
        for problem in unhosted(given, hosts, has_optimizer=has_optimizer):
            problems.add(problem)
    problems.raise_if_any()
    return tuple(name for name in OFFLOADS if name in given)
