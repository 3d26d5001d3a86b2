"""Stages with unequal numbers of layers against masking, on virtual CPU devices.

A small GPT of eight scanned layers is trained on two pipeline stages that hold six and
two of them. Once each stage takes as many turns as it has layers; once both take six,
differentiated by JAX, and what the last four of the second stage give is masked away.
Both give the same gradients, which is checked first. Steps are timed in pairs in one
process, by the clock and by the time of all cores. Wall time is saved where stages
share cores, as virtual devices do. The last line is one JSON object:

    uneven_over_masked      median over pairs of the step times
    uneven_over_masked_cpu  the same of the processor's time
    layers                  of each stage
    layers_ratio            layers computed, over those of masking: what a step of
                            nothing but layers would take

    python scripts/bench_uneven.py [--layers 6 2] [--pairs 7]
"""

from __future__ import annotations

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

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402
from whalejax.lowering import pipelined  # noqa: E402
from whalejax.lowering.counted import Turns  # noqa: E402
from whalejax.planner.unequal import with_layers  # noqa: E402


LARGEST_DIFFERENCE = 1e-4
"""Of two gradients in float32, relative to the longer."""


def main() -> None:
    """Check the gradients, time the pairs and print their ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 2])
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs")
    arguments = parser.parse_args()
    layers = tuple(arguments.layers)
    uneven = _Training(layers)
    with mock.patch.object(pipelined, "counted", _masked):
        masked = _Training(layers)
    difference = uneven.distance(masked)
    print(f"gradients differ by {difference:.1e}")
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit("the gradients differ: nothing to compare")
    pairs = timed_pairs(uneven.timed, masked.timed, pairs=arguments.pairs)
    cpu = statistics.median(
        a / b
        for a, b in zip(
            uneven.cpu_seconds[-arguments.pairs :],
            masked.cpu_seconds[-arguments.pairs :],
            strict=True,
        )
    )
    print(
        f"uneven {min(pairs.first_seconds):.2f} s, masked "
        f"{min(pairs.second_seconds):.2f} s; temporaries "
        f"{uneven.temporary_bytes / 2**20:.0f} and "
        f"{masked.temporary_bytes / 2**20:.0f} MiB"
    )
    found = {
        "uneven_over_masked": round(pairs.ratio, 3),
        "uneven_over_masked_cpu": round(cpu, 3),
        "layers": layers,
        "layers_ratio": round(sum(layers) / (max(layers) * len(layers)), 3),
    }
    print(json.dumps(found))


def _masked(turns: Turns, count: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The most layers of any stage, of which those too many change nothing."""
    constants = tuple(operands[: turns.num_consts])
    stacks = tuple(operands[turns.carries.stop :])

    def turn(carry: Any, now: Any) -> tuple[Any, None]:
        index, slices = now
        found = turns.body((*constants, *carry, *slices))[: turns.num_carries]
        pairs = zip(found, carry, strict=True)
        return tuple(jnp.where(index < count, x, y) for x, y in pairs), None

    carry = tuple(operands[turns.carries])
    found: tuple[Any, ...] = jax.lax.scan(
        turn, carry, (jnp.arange(turns.most), stacks)
    )[0]
    return found


class _Training:
    """Training on stages with these numbers of layers, compiled and run once.

    Attributes:
        gradients: of the first step.
        temporary_bytes: of the compiled step, on one device.
        cpu_seconds: of all timed steps, on all cores.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        job = _job(sum(layers))
        batch, model = job.batch_at(0), jobs.abstract_model(job)
        optimizer = _remembering()
        plan = wh.plan(
            job.loss_fn,
            model,
            batch,
            optimizer=optimizer,
            cluster=f"cpu:{len(layers)}",
            mesh={"stage": len(layers)},
            num_micro_batches=8,
            remat="full",
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
        self.cpu_seconds: list[float] = []

    def timed(self) -> None:
        """One step."""
        start = time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.cpu_seconds.append(time.process_time() - start)

    def distance(self, other: _Training) -> float:
        """Of the gradients, relative to the other's length."""
        pairs = [*zip(self.gradients, other.gradients, strict=True)]
        apart = sum(float(np.sum((a - b) ** 2)) for a, b in pairs)
        return float(np.sqrt(apart / sum(float(np.sum(b**2)) for _, b in pairs)))


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


def _remembering() -> optax.GradientTransformation:
    """Gradient descent whose state is the gradient."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return jax.tree.map(lambda g: -1e-3 * g, updates), updates

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(init, update)


if __name__ == "__main__":
    main()
