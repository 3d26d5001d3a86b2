"""Estimates of pipelines whose stages are on mixed devices.

The full run is estimated on every kind of device. A stage then takes as long as its
slowest replica, and the schedule's rows give the waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from whalejax.estimates.published_run import PublishedRun, ReplicaDevices
from whalejax.estimates.step_model import Array, Runs, pipeline_seconds
from whalejax.estimates.workload import EMBED, HEAD, LAYER
from whalejax.meshes.fitted_constants import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousEstimate:
    """Prediction of one run; see ``estimate_table.Prediction``."""

    step_seconds: float
    peak_bytes: float
    fits: bool


def price_unlike(run: PublishedRun, constants: Constants) -> HeterogeneousEstimate:
    """Predicts a run with ``unlike`` stages."""
    replicas = list(dict.fromkeys(r for stage in run.unlike for r in stage.replicas))
    runs = Runs([_alone(run, replica) for replica in replicas])
    ahead, behind = runs.places(constants)
    at = {replica: index for index, replica in enumerate(replicas)}
    forward: list[float] = []
    backward: list[float] = []
    for number, stage in enumerate(run.unlike):
        places = [(LAYER, stage.layers)]
        places += [(EMBED, 1)] if number == 0 else []
        places += [(HEAD, 1)] if number == len(run.unlike) - 1 else []
        for result, seconds in ((forward, ahead), (backward, behind)):
            result.append(max(_sum(places, seconds, at[r]) for r in stage.replicas))
    sent = run.itemsize_bytes * run.micro_batch * run.sizes.seq * run.sizes.hidden
    network = float((runs.network * runs.shares(constants, "point")).min())
    step = pipeline_seconds(run, forward, backward, sent / network)
    exposed, update = _after(run, runs, at, constants)
    peaks = _peaks(run, runs, at, constants)
    fits = all(
        need <= runs.entries[index].kind.memory_bytes for index, need in peaks.items()
    )
    fixed = float(runs.shares(constants, "step_seconds").max())
    between = float(runs.shares(constants, "micro_seconds").max())
    fixed += run.num_micro_batches * between * (not run.framework.compiled)
    return HeterogeneousEstimate(
        step_seconds=step + exposed + update + fixed,
        peak_bytes=max(peaks.values()),
        fits=fits,
    )


def _alone(run: PublishedRun, replica: ReplicaDevices) -> PublishedRun:
    return dataclasses.replace(
        run, device=replica.device, tensor=replica.tensor, unlike=()
    )


def _sum(places: list[tuple[int, int]], seconds: Array, index: int) -> float:
    return float(sum(count * seconds[place, index] for place, count in places))


def _after(
    run: PublishedRun,
    runs: Runs,
    at: Mapping[ReplicaDevices, int],
    constants: Constants,
) -> tuple[float, float]:
    """Returns the seconds of gradient reduction and update of the slowest stage."""
    s = run.sizes
    network = runs.network * runs.shares(constants, "network")
    moved = runs.shares(constants, "update_bytes")
    reduction, update = 0.0, 0.0
    for number, stage in enumerate(run.unlike):
        params = stage.layers * s.layer_params
        params += s.embedding_params if number in (0, len(run.unlike) - 1) else 0
        ranks = len(stage.replicas)
        for replica in stage.replicas:
            index, own = at[replica], params / replica.tensor
            sent = 2.0 * own * run.framework.gradient_bytes * (ranks - 1) / ranks
            reduction = max(reduction, sent / float(network[index]))
            seconds = own * float(moved[index]) / float(runs.memory[index])
            update = max(update, seconds)
    return reduction, update


def _peaks(
    run: PublishedRun,
    runs: Runs,
    at: Mapping[ReplicaDevices, int],
    constants: Constants,
) -> dict[int, float]:
    whole = runs.peak_bytes(constants)
    reserve = runs.shares(constants, "reserve_bytes")
    peaks: dict[int, float] = {}
    most = run.layers_per_stage
    for stage in run.unlike:
        for replica in stage.replicas:
            index = at[replica]
            part = (float(whole[index]) - float(reserve[index])) * stage.layers / most
            peaks[index] = max(peaks.get(index, 0.0), part + float(reserve[index]))
    return {index: float(np.ceil(need)) for index, need in peaks.items()}
