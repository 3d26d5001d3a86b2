"""Cuts a chain of layers into pipeline stages, exactly.

The slowest stage sets the pace of a pipeline, so the cut minimises the largest stage
time within the memory of each stage. Stages may differ: a slow device has fewer layers,
and an early stage stores more activations in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a chain, for one micro-batch on the devices of one stage.

    Attributes:
        seconds: Seconds of both passes on devices of speed 1.
        static_bytes: Bytes of parameters, gradients and optimizer state.
        activation_bytes: Bytes that are saved for the backward pass.
        transfer_seconds: Seconds to send the result to another stage, and a cotangent
            back.
    """

    seconds: float
    static_bytes: float = 0.0
    activation_bytes: float = 0.0
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Devices of a stage.

    Attributes:
        speed: Speed relative to the devices on which the layers were timed.
        memory_bytes: Memory of one device.
        in_flight: Largest number of micro-batches in flight.
        seconds: Measured seconds of each layer on these devices, used instead of
            ``speed``; empty without measurements.
        kind: Name of the devices' kind.
    """

    speed: float = 1.0
    memory_bytes: float = float("inf")
    in_flight: int = 1
    seconds: tuple[float, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCut:
    """Division of a chain of layers into stages.

    Attributes:
        counts: Number of layers of each stage.
        seconds: Seconds of one micro-batch on each stage, including transfers to it.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]


def cut(layers: Sequence[Layer], stages: Sequence[Stage]) -> ChainCut:
    """Cuts a chain so that its slowest stage is as fast as possible.

    The result is exact, by dynamic programming over (stage, last layer). Every stage
    has at least one layer. Time and memory are O(stages · layers²).

    Args:
        layers: Layers in the model's order.
        stages: Stages in the order of the pipeline.

    Raises:
        PlanError: There are fewer layers than stages, or no cut fits in memory.

    >>> found = cut([Layer(seconds=s) for s in (1, 1, 2, 4)], [Stage(), Stage()])
    >>> found.counts, found.seconds
    ((3, 1), (4.0, 4.0))
    """
    if not stages or len(layers) < len(stages):
        raise PlanError(
            f"{count_text(len(layers), 'layer')} cannot be cut into "
            f"{count_text(len(stages), 'stage')} of at least "
            "one layer each. Use fewer stages, or mark finer parts"
        )
    count = len(layers)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    starts: list[np.ndarray] = []
    for stage in stages:
        cost = interval_seconds(layers, stage)
        pace = np.maximum(best[:, None], cost)  # (start, end)
        starts.append(np.argmin(pace, axis=0))
        best = pace[starts[-1], np.arange(count + 1)]
    if not np.isfinite(best[count]):
        raise PlanError(_nothing_fits(layers, stages))
    bounds = [count]
    for result in reversed(starts):
        bounds.append(int(result[bounds[-1]]))
    bounds.reverse()
    return ChainCut(
        counts=tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False)),
        seconds=tuple(
            float(interval_seconds(layers, stage)[a, b])
            for stage, a, b in zip(stages, bounds, bounds[1:], strict=False)
        ),
    )


def interval_seconds(layers: Sequence[Layer], stage: Stage) -> np.ndarray:
    """Returns the seconds of a stage, by first layer and end; infinite if impossible.

    Args:
        layers: Layers in the model's order.
        stage: Devices of the stage.

    Raises:
        PlanError: The stage has measured seconds of another number of layers.

    >>> interval_seconds([Layer(seconds=2.0), Layer(seconds=4.0)], Stage(speed=2.0))
    array([[inf,  1.,  3.],
           [inf, inf,  2.],
           [inf, inf, inf]])
    """
    count = len(layers)
    if stage.seconds and len(stage.seconds) != count:
        raise PlanError(
            f"a stage of {stage.kind or 'devices'} has seconds of {len(stage.seconds)} "
            f"layers, but there are {count}. Time each layer once on every device kind"
        )
    work = _sums([layer.seconds for layer in layers]) / stage.speed
    if stage.seconds:
        work = _sums(stage.seconds)
    entry = np.array([0.0, *(layer.transfer_seconds for layer in layers)])
    static = _sums([layer.static_bytes for layer in layers])
    held = _sums([layer.activation_bytes for layer in layers]) * stage.in_flight
    seconds = work[None, :] - work[:, None] + entry[:, None]
    nbytes = static[None, :] - static[:, None] + held[None, :] - held[:, None]
    index = np.arange(count + 1)
    possible = (index[None, :] > index[:, None]) & (
        nbytes <= stage.memory_bytes * (1 + 1e-12)
    )
    result: np.ndarray = np.where(possible, seconds, np.inf)
    return result


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def _nothing_fits(layers: Sequence[Layer], stages: Sequence[Stage]) -> str:
    problems = Problems("no cut into stages fits in memory")
    for index, layer in enumerate(layers):
        needs = [
            layer.static_bytes + layer.activation_bytes * s.in_flight for s in stages
        ]
        short = min(n - s.memory_bytes for n, s in zip(needs, stages, strict=True))
        if short > 0:
            problems.add(
                f"layer {index} fits in no stage: it lacks {short:.0f} bytes on the "
                "one with most room. Shard it over more devices, or checkpoint its "
                "activations"
            )
    if not problems:
        room = sum(s.memory_bytes for s in stages)
        static = sum(layer.static_bytes for layer in layers)
        problems.add(
            f"{len(stages)} stages have {room:.0f} bytes together; parameters, "
            f"gradients and optimizer state alone take {static:.0f}, and activations "
            "in flight come in addition. Use more stages, or checkpoint activations"
            "in flight come on top. Use more stages, or checkpoint activations"
        )
    return problems.text()
