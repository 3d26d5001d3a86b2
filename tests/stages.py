"""What stages are tested with: models × stages × schedules × what goes on inside.

Data and nothing else, as ``tests/cases.py`` is for models in one piece. What a plan
refuses is no case: rules say which those are, by how often a model can be cut.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import whalejax as wh
from tests import cases
from tests.cases import Case, Dtype, Model, Precision, Strategy
from tests.covering import cover, pinned
from whalejax.planner.plan.pipeline_mpmd import CHUNKS, SCHEDULES
from whalejax.planner.plan.pipeline_spmd import LOCKSTEP


STAGES: Final = (2, 4, 8)
KINDS: Final[tuple[tuple[Dtype, Precision, int], ...]] = (
    ("float64", "f32", 2),
    ("float64", "f32", 8),
    ("float32", "f32", 4),
    ("float32", "bf16", 4),
)
"""Dtype, what is computed in, and micro-batches: fewer than stages, as many, more."""

REMATS: Final = ("none", "dots")
"""Policies: with the second, stages in lockstep keep products."""


def _scanned(name: str, layers: int) -> Model:
    """A GPT whose layers stages divide."""
    return Model(
        name=name,
        family="scan",
        make=cases.reference_model("gpt-test"),
        options={"layers": layers, "scan_layers": True},
        attention=True,
        seconds=4.0,
    )


def _apart(name: str, family: str, seconds: float, **options: Any) -> Model:
    """A model whose stages have programs of their own; it has dropout."""
    return Model(
        name=name,
        family=family,
        make=cases.reference_model(f"{name}-test"),
        options=options,
        quiet={"deterministic": True},
        seconds=seconds,
    )


_KNOWN: Final = {model.name: model for model in cases.MODELS}

MODELS: Final = (
    _KNOWN["gpt"],
    _scanned("gpt-deep", 8),
    _scanned("gpt-uneven", 5),
    _KNOWN["bert"],
    _apart("t5", "two-towers", 9.0, layers=1),
    _apart("m6", "two-towers", 10.0, layers=1),
    _apart("gnmt", "recurrent", 7.0, layers=2),
    _KNOWN["resnet"],
    _apart("vgg", "convolutions", 5.0),
)

PARTS: Final = 6
"""Of a model whose layers are one scan, which is one of them. The others can be cut
into the 16 of eight stages that interleave two parts each, or more."""


def _inside(kind: str, devices: int) -> dict[str, int] | None:
    """The mesh of a stage; None where its devices are too few, or too many."""
    if kind == "data-tensor":
        return {"data": 2, "tensor": devices // 2} if devices >= 4 else None
    if kind in ("alone", "split"):
        return {} if (devices == 1) == (kind == "alone") else None
    return {kind: devices} if devices > 1 else None


INSIDE: Final[dict[str, dict[str, Any]]] = {
    "alone": cases.sharded(cases.axes()),
    "data": cases.sharded(cases.axes("data")),
    "fsdp": cases.sharded(cases.axes("fsdp"), cases.axes("fsdp")),
    "tensor": cases.sharded(cases.axes(), cases.axes("tensor")),
    "data-tensor": cases.sharded(cases.axes("data"), cases.axes("tensor")),
    "split": {"annotated": True},
}
"""What goes on inside a stage, and what it shards; the planner lays out ``split``."""


@functools.cache
def _strategy(stages: int, schedule: str, kind: str) -> Strategy:
    def mesh(devices: int) -> dict[str, int] | None:
        inside = _inside(kind, devices // stages) if devices >= stages else None
        return None if inside is None else {"stage": stages, **inside}

    return Strategy(
        name=f"stages-{stages}-{schedule}-{kind}",
        mesh=mesh,
        layout=kind,
        default="split" if "tensor" in kind else None,
        stages=stages,
        schedule=schedule,
        **INSIDE[kind],
    )


def alike(case: Case) -> bool:
    """One program runs all stages, in lockstep."""
    return case.model.family == "scan" and case.strategy.schedule in LOCKSTEP


def stash(case: Case) -> str:
    """What stages in lockstep keep of a micro-batch in flight."""
    return "inputs" if case.remat == "none" else "residuals"


def program(case: Case) -> str:
    """What kind of programs stages run; others differ in the order of rows only."""
    schedule = case.strategy.schedule
    if alike(case):
        return f"lockstep, {stash(case)}"
    return schedule if schedule in ("interleaved", "zb-h1") else "apart"


def _chunks(case: Case) -> int:
    return CHUNKS if case.strategy.schedule == "interleaved" else 1


def reason_to_skip(case: Case) -> str | None:
    """Why a plan refuses a combination, or None where it does not."""
    strategy, stages = case.strategy, case.strategy.stages
    if strategy.mesh(case.devices) is None:
        return "its mesh takes other numbers of devices"
    if strategy.schedule == "interleaved" and case.num_micro_batches % stages:
        return "interleaving takes micro-batches in rounds, one for each stage"
    if case.remat != "none" and not alike(case):
        return "remat changes what stages in lockstep keep, and is tested with them"
    if alike(case):
        few = stages > case.model.options["layers"]
        return "there are fewer layers than stages" if few else None
    if case.model.family == "scan" and stages * _chunks(case) > PARTS:
        return "the model cannot be cut into as many parts"
    return None


def every_combination() -> Iterator[Case]:
    """All combinations, sensible or not; those that share a reference together."""
    for model, (
        dtype,
        precision,
        count,
    ), remat, stages, schedule, kind, devices in itertools.product(
        MODELS, KINDS, REMATS, STAGES, SCHEDULES, INSIDE, cases.DEVICES
    ):
        yield Case(
            model=model,
            strategy=_strategy(stages, schedule, kind),
            devices=devices,
            num_micro_batches=count,
            dtype=dtype,
            precision=precision,
            remat=remat,
        )


def _dealt(sensible: Iterable[Case]) -> Iterator[Case]:
    """Each pipeline once in float64, in turn with each number of micro-batches."""
    pipelines: dict[tuple[Any, ...], list[Case]] = {}
    for case in sensible:
        if case.dtype == "float64":
            key = (case.model.name, case.strategy.name, case.devices)
            pipelines.setdefault(key, []).append(case)
    for turn, choices in enumerate(pipelines.values()):
        yield choices[turn % len(choices)]


def _narrow_meetings(case: Case) -> frozenset[Any]:
    """What a case in 32 or 16 bits brings together that one in 64 bits does not."""
    chosen = (case.model.name, program(case), case.strategy.layout)
    places = (case.strategy.stages, case.devices)
    pairs = itertools.product([case.precision], [*chosen, *enumerate(places)])
    return frozenset([*pairs, *itertools.combinations([case.precision, *chosen], 3)])


@functools.cache
def _sensible() -> tuple[Case, ...]:
    return tuple(c for c in every_combination() if reason_to_skip(c) is None)


@functools.cache
def whole() -> tuple[Case, ...]:
    """Every pipeline that makes sense in float64, and a cover of those in fewer bits.

    A pipeline is a model, stages, a schedule, what goes on inside, and devices.
    """
    sensible = _sensible()
    narrow = cover(
        [case for case in sensible if case.dtype != "float64"],
        _narrow_meetings,
        seconds=lambda case: case.seconds,
        reference=lambda case: case.reference,
    )
    taken = {case.id for case in (*_dealt(sensible), *narrow)}
    return tuple(case for case in sensible if case.id in taken)


def skipped() -> dict[str, int]:
    """How many combinations each reason takes out."""
    found = Counter(map(reason_to_skip, every_combination()))
    others = found.pop(None) - len(whole())
    reasons = {why: count for why, count in found.items() if why is not None}
    return {**reasons, "other cases run the pipeline, or its like in few bits": others}


def meetings(case: Case) -> frozenset[Any]:
    """What a case brings together with the programs of its stages, and more."""
    count, stages = case.num_micro_batches, case.strategy.stages
    # What is wrong in float32 is wrong in float64, whatever it meets.
    width = "wide" if case.precision == "f32" else case.precision
    axes = case.strategy.layout.split("-")
    kind = "lockstep" if alike(case) else program(case)
    return frozenset(
        [
            case.model.name,
            case.dtype,
            (alike(case), case.strategy.schedule),
            # Cut again, a backward shows what any other cut does, and more.
            *[("cut again", case.model.family)] * (program(case) == "zb-h1"),
            (kind, stages),
            (program(case), width),
            (kind, "fewer" if count < stages else "more"),
            *((program(case), axis) for axis in axes),
            *((width, axis) for axis in axes),
        ]
    )


@functools.cache
def subset() -> tuple[Case, ...]:
    """Few and cheap cases with all that any case brings together."""
    return pinned("stages", _sensible(), lambda case: case.id)


def kinds(case: Case) -> frozenset[Any]:
    """The programs of a case's stages, and what goes on inside of them."""
    axes = case.strategy.layout.split("-")
    return frozenset([(alike(case), program(case)), case.precision, *axes])


@functools.cache
def default() -> tuple[Case, ...]:
    """Cases of ``subset`` with each kind of programs once: what runs by default."""
    return pinned("default stages", subset(), lambda case: case.id)


# What is expected of a plan.


def expected_axes(case: Case) -> dict[str, frozenset[str] | None]:
    """The mesh axes that shard the batch, the parameters and what follows them."""
    found = cases.expected_axes(case)
    if case.precision != "f32" and case.strategy.default == "split":
        # In few bits the batch may be the cheapest dimension to split.
        found["batch"] = None
    if case.strategy.stages > 1 and alike(case):
        for what in ("params", "gradients", "optimizer"):
            axes = found[what]
            found[what] = None if axes is None else axes | {"stage"}
    return found


def unlike(case: Case, plan: wh.Plan) -> dict[str, tuple[Any, Any]]:
    """What a plan's stages are, and what they are to be."""
    strategy, stages = case.strategy, plan.stages
    if strategy.stages == 1 or stages is None:
        return {"stages": (stages is not None, strategy.stages > 1)}
    inside = {"stage": strategy.stages, **(strategy.mesh(case.devices) or {})}
    del inside["stage"]
    meshes = [p.axis_sizes for p in stages.plans] or [plan.axis_sizes]
    found = [{a: n for a, n in m.items() if a != "stage" and n > 1} for m in meshes]
    suffix = "-lockstep" if alike(case) else ""
    return {
        "stages": (plan.axis_sizes["stage"], strategy.stages),
        "schedule": (stages.schedule, strategy.schedule + suffix),
        "executor": (stages.executor, "spmd" if alike(case) else "mpmd"),
        "stash": (stages.stash, stash(case) if alike(case) else ""),
        "parts of a stage": (stages.chunks, _chunks(case)),
        "mesh of stages": (
            any("tensor" in mesh for mesh in found) if strategy.annotated else found,
            strategy.annotated or [inside] * len(found),
        ),
    }


def scheduled(job: wh.Job, stages: int, schedule: str) -> wh.Job:
    """A job whose whole loss is a pipeline of so many stages."""
    mark = wh.pipeline(num_stages=stages, schedule=schedule)

    def marked(model: Any, batch: Any, rng: Any) -> Any:
        with mark:
            return job.loss_fn(model, batch, rng)

    def without_key(model: Any, batch: Any) -> Any:
        with mark:
            return job.loss_fn(model, batch)

    keyed = len(inspect.signature(job.loss_fn).parameters) == 3
    loss: Callable[..., Any] = marked if keyed else without_key
    return dataclasses.replace(job, loss_fn=loss)
