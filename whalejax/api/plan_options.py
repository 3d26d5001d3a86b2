"""What ``wh.plan`` is asked beside the model: its options, checked before it is traced.

Apart from ``plan`` so that one place says what each option may be. What an option
means for a model is checked where the model's graph is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import numpy as np
import optax

from whalejax.api.plan_request import PlanRequest
from whalejax.meshes.checks import Arguments, is_whole, shown
from whalejax.meshes.errors import Problems
from whalejax.planner.errors import PlanError
from whalejax.planner.search.request import Hosted
from whalejax.planner.sharding.remat import POLICIES
from whalejax.planner.terms import OFFLOADS
from whalejax.runtime.mixed_precision import PRECISIONS


NO_OPTIMIZER: Final = optax.identity()
"""Stands for the optimizer where none was given."""


def check_options(asked: PlanRequest) -> str | None:
    """Refuse options that are none, all at once.

    Args:
        asked: with its options as they were given.

    Returns:
        The kind of mark that is the default strategy, or None.

    Raises:
        PlanError: every option that cannot be, with what it may be.
    """
    problems = Arguments("wh.plan", PlanError)
    _check_switches(asked, problems)
    _check_words(asked, problems)
    _check_numbers(asked, problems)
    mark = _checked_default(asked.default, problems)
    problems.raise_if_any()
    return None if mark is None else str(mark.kind)


def _check_switches(asked: PlanRequest, problems: Arguments) -> None:
    for name in ("runnable", "allow_idle", "sync_batch_stats"):
        problems.switch(name, getattr(asked, name))
    value = asked.sequence_parallel
    if not isinstance(value, bool | None):
        problems.refuse(
            "sequence_parallel",
            value,
            "True, False, or None, which leaves it to the planner",
        )


def _check_words(asked: PlanRequest, problems: Arguments) -> None:
    """Options that are a word, or one for each TaskGraph."""
    known = ", ".join(PRECISIONS)
    precision = asked.precision
    if isinstance(precision, str):
        if precision not in PRECISIONS:
            problems.refuse("precision", precision, f"one of {known}")
    elif not _by_name(precision):
        problems.refuse(
            "precision",
            precision,
            f"one of {known}, or one for each TaskGraph by its name, such as "
            "{'*': 'bf16', 'split': 'f32'}",
        )
    for name, example in (("remat", "full"), ("attention", "ring")):
        value = getattr(asked, name)
        if name == "remat" and isinstance(value, str):
            if value.partition(":")[0] not in POLICIES:
                problems.refuse("remat", value, f"one of {', '.join(POLICIES)}")
            continue
        if isinstance(value, str) and value.isprintable() and value:
            continue
        if value is not None and not _by_name(value):
            problems.refuse(
                name,
                value,
                f"a word such as '{example}', one for each TaskGraph by its name, such "
                f"as {{'*': '{example}'}}, or None for the planner to choose",
            )
    offload = asked.offload
    several = isinstance(offload, list | tuple | set | frozenset)
    given = [offload] if isinstance(offload, str) else offload
    if offload is not None and not (isinstance(offload, str) or several):
        problems.refuse("offload", offload, _OFFLOAD)
        given = ()
    for name in given or ():
        if not isinstance(name, str) or name not in OFFLOADS:
            known = ", ".join(OFFLOADS)
            problems.add(f"offload: {shown(name)} is none of {known}; () is nothing")


_OFFLOAD: Final = (
    f"some of {', '.join(OFFLOADS)}, () for nothing, or None for the planner to choose"
)


def _by_name(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(text, str) and text.isprintable()
        for pair in value.items()
        for text in pair
    )


def _check_numbers(asked: PlanRequest, problems: Arguments) -> None:
    count, zero, chunks = asked.num_micro_batches, asked.zero, asked.loss_chunks
    if count is not None and not is_whole(count, 1):
        problems.refuse("num_micro_batches", count, "1 or more, or None")
    if zero is not None and not is_whole(zero, 0, 2):
        problems.refuse(
            "zero",
            zero,
            "0, 1 or 2 (over the axis data). ZeRO-3 is the mesh axis fsdp: "
            'mesh={"fsdp": n}',
        )
    if chunks is not None and (not isinstance(chunks, int) or not is_whole(chunks, 1)):
        problems.refuse(
            "loss_chunks",
            chunks,
            "a whole number, 1 or more, or None for the planner to choose",
        )
    shares: Any = asked.shares
    listed = isinstance(shares, np.ndarray | jax.Array) and shares.ndim == 1
    several = isinstance(shares, list | tuple) or listed
    if shares is None or (isinstance(shares, str) and shares == "even"):
        return
    if several and len(shares) and not any(map(_is_word, shares)):
        return  # whether devices and batch divide so is seen later
    problems.refuse(
        "shares",
        shares,
        "'even', the micro-batches of each replica such as [5, 3], or None for the "
        "planner to choose",
    )


def _is_word(value: object) -> bool:
    return not isinstance(value, int | float | np.number)


def _checked_default(default: Any, problems: Arguments) -> Any:
    """The mark of the default strategy, or None."""
    mark = getattr(default, "mark", None)
    if default is not None and (mark is None or mark.kind in ("stage", "pipeline")):
        problems.refuse("default", default, "wh.replicate(), wh.split() or None")
        return None
    if mark is not None and mark.attributes:
        problems.add(
            f"default is {shown(default)}; a default takes no arguments. Give "
            f"wh.{mark.kind}(), and mark the regions that need more"
        )
    return mark


def checked_offload(
    asked: PlanRequest, hosts: Callable[[], Hosted]
) -> tuple[str, ...] | None:
    """What is to lie in host memory, in the usual order.

    Args:
        asked: what to plan.
        hosts: what the optimizer can be cut into, when it matters.

    Raises:
        PlanError: there is no such thing, or it cannot lie there; all of them.
    """
    offload, runnable = asked.offload, asked.runnable
    if offload is None:
        return None
    problems = Problems("offload", PlanError)
    given = [offload] if isinstance(offload, str) else offload
    if "gradients" in given and "params" not in given:
        problems.add(
            "gradients lie in host memory only beside the parameters that they are of. "
            "Add 'params', or leave 'gradients' out"
        )
    if runnable and "gradients" in given:
        problems.add(
            "no executor of this version keeps gradients in host memory. Leave "
            "'gradients' out, or estimate with runnable=False"
        )
    if runnable and "params" in given and not hosts().params:
        problems.add(
            "this optimizer does not update parameters element by element (it takes "
            "norms, noise, or is wrapped in something with branches), so none of them "
            "can pass through the device in pieces. Take another optimizer, or "
            "offload=()"
        )
    if "optimizer" in given and asked.optimizer is NO_OPTIMIZER:
        problems.add(
            "no optimizer was given, so there is no state of one to keep in host "
            "memory. Pass optimizer=, or leave 'optimizer' out"
        )
    elif runnable and "optimizer" in given and not any(hosts().state.values()):
        problems.add(
            "this optimizer has no state that is updated element by element, as Adam's "
            "and momentum's is, so none of it can pass through the device in pieces. "
            "Take another optimizer, or offload=()"
        )
    problems.raise_if_any()
    return tuple(name for name in OFFLOADS if name in given)
