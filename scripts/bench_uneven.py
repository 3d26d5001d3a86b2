"""Times stages with unequal numbers of layers against masking, on virtual CPU devices.

A small GPT of eight scanned layers is trained on two pipeline stages that have six and
two of them, each of which takes as many turns as it has layers. With masking both take
six, of which the last four of the second are computed and dropped. Masking comes in two
kinds, which must give the same gradients: hand-written GPipe by autodiff
(``by_hand.py``), and the same executor, schedule and remat. Steps are timed in pairs in
one process, by the clock and by the time of all cores. Wall time falls if stages share
cores, as virtual devices do.

    python scripts/bench_uneven.py [--layers 6 2] [--pairs 7]

The last line is one JSON object:

    uneven_over_masked            over GPipe by autodiff, masked: the median over pairs
                                  of the step times; at most 0.6
    uneven_over_masked_cpu        the same of the processor's time
    memory_over_masked            the same of the temporaries
    uneven_over_masked_alike      over the same executor, masked
    uneven_over_masked_alike_cpu  the same of the processor's time
    memory_over_masked_alike      the same of the temporaries
    layers                        layers of each stage
    layers_ratio                  layers that the executor computes, over those that it
                                  computes masked: the last two time ratios of a step
                                  that has only layers
"""

from __future__ import annotations

import abc
import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from paired import eight_devices, timed_pairs


eight_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from by_hand import dealt, gpipe_by_autodiff  # noqa: E402
from flax import nnx  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402
from whalejax.lowering.pipeline_spmd import stage_body  # noqa: E402
from whalejax.lowering.pipeline_spmd.dynamic_layers import DynamicLoop  # noqa: E402
from whalejax.lowering.pipeline_spmd.uneven_layer_exchange import places_of  # noqa: E402
from whalejax.planner.pipeline.uneven_layers import with_layers  # noqa: E402


MICRO_BATCHES = 8
LARGEST_DIFFERENCE = 1e-4
"""Largest distance of two float32 gradients, relative to the other's length."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 2])
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs")
    arguments = parser.parse_args()
    layers = tuple(arguments.layers)
    uneven = _Training(layers)
    with mock.patch.object(stage_body, "run_dynamic_loop", _run_masked):
        masked_executor = _Training(layers)
    report: dict[str, Any] = {}
    for key, masked in (("", _ByHand(layers)), ("_alike", masked_executor)):
        difference = uneven.distance(masked)
        print(f"masked{key}: gradients differ by {difference:.1e}", flush=True)
        if not difference <= LARGEST_DIFFERENCE:
            raise SystemExit("the gradients differ: nothing to compare")
        pairs = timed_pairs(uneven.timed, masked.timed, pairs=arguments.pairs)
        cpu = (x.cpu_seconds[-arguments.pairs :] for x in (uneven, masked))
        mib = [x.temporary_bytes / 2**20 for x in (uneven, masked)]
        print(
            f"uneven {min(pairs.first_seconds):.2f} s and {mib[0]:.0f} MiB, masked"
            f"{key} {min(pairs.second_seconds):.2f} s and {mib[1]:.0f} MiB",
            flush=True,
        )
        ratios = [a / b for a, b in zip(*cpu, strict=True)]
        report[f"uneven_over_masked{key}"] = round(pairs.ratio, 3)
        report[f"uneven_over_masked{key}_cpu"] = round(statistics.median(ratios), 3)
        report[f"memory_over_masked{key}"] = round(mib[0] / mib[1], 3)
    print(json.dumps({**report, "layers": layers, "layers_ratio": _ratio(layers)}))


def _ratio(layers: Sequence[int]) -> float:
    """Returns the computed layers, over those of masking.

    In units of one layer's forward pass: a backward pass takes two, and repeats the
    forward pass. The last stage has no other forward pass.
    """
    most, last = max(layers), layers[-1]
    full = 4 * most * len(layers) - most
    return round((4 * sum(layers) - last) / full, 3)


def _run_masked(
    loop: DynamicLoop, count: Any, operands: Sequence[Any]
) -> tuple[Any, ...]:
    """Runs the most layers of any stage, of which the surplus changes nothing."""
    constants = tuple(operands[: loop.num_consts])
    stacks = tuple(operands[loop.carries.stop :])

    def turn(carry: Any, inputs: Any) -> tuple[Any, None]:
        index, slices = inputs
        results = loop.body((*constants, *carry, *slices))[: loop.num_carries]
        pairs = zip(results, carry, strict=True)
        return tuple(jnp.where(index < count, x, y) for x, y in pairs), None

    carry = tuple(operands[loop.carries])
    results: tuple[Any, ...] = jax.lax.scan(
        turn, carry, (jnp.arange(loop.most), stacks)
    )[0]
    return results


class _Timed(abc.ABC):
    """A step, compiled and run once.

    Attributes:
        gradients: Gradients of the first step.
        temporary_bytes: Temporaries of the compiled step on one device.
        cpu_seconds: Seconds of all timed steps on all cores.
    """

    gradients: list[np.ndarray]
    temporary_bytes: int
    cpu_seconds: list[float]

    @abc.abstractmethod
    def advance(self) -> Any:
        """Runs one step, and returns its results."""

    def timed(self) -> None:
        start = time.process_time()
        jax.block_until_ready(self.advance())
        self.cpu_seconds.append(time.process_time() - start)


class _Training(_Timed):
    """Training on stages with these numbers of layers."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        job = _job(sum(layers))
        batch, model = job.batch_at(0), jobs.abstract_model(job)
        optimizer = _recording_sgd()
        plan = wh.plan(
            job.loss_fn,
            model,
            batch,
            optimizer=optimizer,
            cluster=f"cpu:{len(layers)}",
            mesh={"stage": len(layers)},
            num_micro_batches=MICRO_BATCHES,
            remat="none",
            loss_chunks=1,
            attention="gather",
        )
        devices = jax.devices()[: len(layers)]
        self.step = wh.compile(
            with_layers(plan, layers),
            job.loss_fn,
            model,
            optimizer=optimizer,
            devices=devices,
        )
        self.batch = batch
        compiled = self.step.lower().compile()
        self.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        state = self.step.init(job.make_model, rng=jax.random.key(0))
        self.state, _ = self.step(state, batch)
        self.gradients = [np.asarray(x) for x in jax.tree.leaves(self.state.opt_state)]
        self.cpu_seconds = []

    def advance(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics

    def distance(self, other: _Timed) -> float:
        """Returns the distance of the gradients, relative to the other's length."""
        pairs = [*zip(self.gradients, other.gradients, strict=True)]
        squares = sum(float(np.sum((a - b) ** 2)) for a, b in pairs)
        return float(np.sqrt(squares / sum(float(np.sum(b**2)) for _, b in pairs)))


class _ByHand(_Timed):
    """Masked GPipe by autodiff of the same model."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        job = _job(sum(layers))
        model = job.make_model(jax.random.key(0))
        old_params = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
        self.step, params = gpipe_by_autodiff(
            model, job.batch_at(0), MICRO_BATCHES, len(layers), layers
        )
        self.temporary_bytes = self.step.memory_analysis().temp_size_in_bytes
        self.params = self.step(params)
        new_params = jax.tree.leaves(dealt(self.params, layers, places_of))
        pairs = zip(old_params, new_params, strict=True)
        self.gradients = [old - np.asarray(new) for old, new in pairs]
        self.cpu_seconds = []

    def advance(self) -> Any:
        self.params = self.step(self.params)
        return self.params


def _job(layers: int) -> wh.Job:
    return models.job(
        "gpt-test",
        annotated=False,
        scan_layers=True,
        layers=layers,
        embed=256,
        heads=4,
        mlp=1024,
        sequence=256,
        batch_size=16,
    )


def _recording_sgd() -> optax.GradientTransformation:
    """Returns gradient descent whose state is the gradient."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return jax.tree.map(lambda g: -1e-3 * g, updates), updates

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(init, update)


if __name__ == "__main__":
    main()
