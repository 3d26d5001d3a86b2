"""What the matrix does not multiply out: pairs of features on 2, 4 and 8 devices.

Sequence parallelism, context, remat, loss chunks, host memory and 16-bit precision do
not depend on the model as strategies do, but on each other. Every pair of them that
makes sense is here on every number of devices, and each of them alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Final

from tests import cases, stages
from tests.cases import Case, Dtype, Model, Precision, Strategy
from tests.covering import cover, pinned


MODELS: Final = ("gpt-scan", "gpt", "moe-top-2", "moe-dropless")
LAYOUTS: Final = (
    "zero-1",
    "fsdp",
    "tensor",
    "fsdp-tensor",
    "expert",
    "data-expert",
    "context",
    "data-context",
    "context-tensor",
)
"""Strategies that say where things lie; three axes at once are added to them."""
ATTENTION: Final = ("gather", "ring")
LOSS_CHUNKS: Final = (1, 3)
REMAT: Final = ("none", "dots", "full")
OFFLOAD: Final[tuple[tuple[str, ...], ...]] = (
    (),
    ("optimizer",),
    ("activations",),
    ("optimizer", "activations"),
    ("params",),
    ("optimizer", "params"),
    ("optimizer", "activations", "params"),
)
NUMBERS: Final[tuple[tuple[Dtype, Precision], ...]] = (
    ("float64", "f32"),
    ("float32", "bf16"),
    ("float32", "f16"),
)
"""Dtype of the parameters, and what is computed in; ``"f32"`` is as they are."""
MICRO_BATCHES: Final = (1, 2)
KINDS: Final = (
    "sequence",
    "context",
    "attention",
    "chunks",
    "remat",
    "offload",
    "precision",
)
"""Of features."""


def _layouts() -> Iterator[Strategy]:
    known = {strategy.name: strategy for strategy in cases.STRATEGIES}
    yield from (known[name] for name in LAYOUTS)
    yield Strategy(
        name="fsdp-context-tensor",
        mesh=lambda n: {"fsdp": 2, "context": 2, "tensor": 2} if n == 8 else None,
        default="split",
    )


@functools.cache
def strategies() -> tuple[Strategy, ...]:
    """Every layout with and without what strategies say beside it."""
    found = []
    for layout, sequence, attention, chunks in itertools.product(
        _layouts(), (False, True), ATTENTION, LOSS_CHUNKS
    ):
        words = [
            "features",
            layout.name,
            *["sequence"] * sequence,
            *["ring"] * (attention == "ring"),
            *["chunks"] * (chunks > 1),
        ]
        changed = {"attention": attention, "loss_chunks": chunks}
        found.append(
            dataclasses.replace(
                layout,
                name="-".join(words),
                layout=layout.name,
                sequence_parallel=sequence,
                **changed,
            )
        )
    return tuple(found)


def reason_to_skip(case: Case) -> str | None:
    """Why a combination makes no sense, or None where it does."""
    if case.strategy.mesh(case.devices) is None:
        return "its mesh takes more devices"
    if "expert" in case.strategy.layout and not case.model.experts:
        return "the model has no experts"
    if case.strategy.sequence_parallel and "tensor" not in case.strategy.layout:
        return "sequence parallelism is of the axis tensor"
    if "activations" in case.offload and case.remat == "none":
        return "only activations of what is computed again wait in host memory"
    if "params" in case.offload and case.model.name != "gpt-scan":
        return "only parameters that a scan slices are in host memory"
    if "params" in case.offload and case.strategy.zero:
        return "parameters in host memory are updated as they are stored"
    return None


def features(case: Case) -> dict[str, str]:
    """What a case switches on, by kind."""
    strategy = case.strategy
    found = (
        "on" if strategy.sequence_parallel else "",
        "on" if "context" in strategy.layout else "",
        "ring" if strategy.attention == "ring" else "",
        "on" if strategy.loss_chunks != 1 else "",
        "" if case.remat == "none" else case.remat,
        "-".join(case.offload),
        "" if case.precision == "f32" else case.precision,
    )
    return {kind: value for kind, value in zip(KINDS, found, strict=True) if value}


def interactions(case: Case) -> frozenset[Any]:
    """Every pair of choices on a number of devices, and the feature that is alone."""
    on = features(case)
    alone = [(case.devices, "alone", one) for one in on.items()] if len(on) == 1 else []
    return frozenset([*((case.devices, *pair) for pair in _pairs(case)), *alone])


def _pairs(case: Case) -> Iterator[Any]:
    choices = {
        "model": case.model.name,
        "layout": case.strategy.layout,
        "micro-batches": str(case.num_micro_batches),
        **dict.fromkeys(KINDS, ""),
        **features(case),
    }
    return itertools.combinations(choices.items(), 2)


def _every_combination() -> Iterator[Case]:
    known: dict[str, Model] = {model.name: model for model in cases.MODELS}
    for name, strategy, devices, remat, offload, numbers, count in itertools.product(
        MODELS, strategies(), cases.DEVICES, REMAT, OFFLOAD, NUMBERS, MICRO_BATCHES
    ):
        dtype, precision = numbers
        yield Case(
            model=known[name],
            strategy=strategy,
            devices=devices,
            num_micro_batches=count,
            dtype=dtype,
            remat=remat,
            offload=offload,
            precision=precision,
        )


@functools.cache
def _sensible() -> tuple[Case, ...]:
    return tuple(c for c in _every_combination() if reason_to_skip(c) is None)


@functools.cache
def covering() -> tuple[Case, ...]:
    """Few and cheap cases with every pair of features on every number of devices."""
    return cover(
        _sensible(),
        interactions,
        seconds=lambda case: case.seconds,
        reference=lambda case: case.reference,
    )


def meetings(case: Case) -> frozenset[Any]:
    """Every pair of features of a case, and each of them with its model."""
    on = (*features(case).items(), ("model", case.model.name))
    return frozenset(itertools.combinations(on, 2))


@functools.cache
def pairwise() -> tuple[Case, ...]:
    """Fewer of them: every pair of features meets, and every feature every model."""
    return pinned("features", _sensible(), lambda case: case.id)


def plain() -> tuple[Case, ...]:
    """Those of ``pairwise`` without ring attention and chunks, which take longest."""
    return tuple(
        case
        for case in pairwise()
        if case.strategy.attention != "ring" and case.strategy.loss_chunks == 1
    )


def switched_on(case: Case) -> frozenset[Any]:
    """What is in host memory, narrow or computed again; strategies have the rest."""
    return frozenset([*case.offload, case.precision, case.remat])


@functools.cache
def default() -> tuple[Case, ...]:
    """Cases of ``pairwise`` that have every feature once: what runs by default."""
    return pinned("default features", pairwise(), lambda case: case.id)


def whole() -> tuple[Case, ...]:
    """The whole matrix, with these and those of stages at its end."""
    return (*cases.full_matrix(), *covering(), *stages.whole())
