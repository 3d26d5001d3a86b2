"""Measures stages in lockstep: time and memory against GPipe, compile time, TPU memory.

``by_hand.py`` has a hand-written GPipe by autodiff: a forward loop over turns inside
``shard_map``, which ``jax.grad`` reverses. It saves all values of its layers, of every
micro-batch, and recomputes nothing; the plan saves the products of micro-batches in
flight, or, with ``remat="none"``, the inputs of its stages. Both train one small
scanned GPT on the same micro-batches, head and loss on the last stage alone, and their
gradients are compared before anything is timed.

    python scripts/bench_pipeline.py [--pairs 9] [--compiles 2] [--only steps] [--tpu]

The last line is one JSON object; the keys of the TPU need ``--tpu`` and the extra
tpu-compile:

    time_1f1b_over_gpipe     median over pairs of the step times, stage 2, 32
                             micro-batches, on two virtual CPU devices: at most 0.78
    time_inputs_over_gpipe   the same where stages save their inputs
    memory_m32_over_m8       temporaries of the 1F1B step with 32 micro-batches over
                             those with 8 of the same size: at most 1.02
    memory_1f1b_over_gpipe   the same with 32, over those of GPipe by autodiff
    uneven_over_masked       stages of six and two layers, over GPipe by autodiff whose
                             stages both take six turns, of which the last four of the
                             second are masked: at most 0.6
                             (scripts/bench_uneven.py also masks within 1F1B)
    compile_stage8_over_plain
                             median over pairs of the seconds to trace, lower and
                             compile eight stages over those of the step without, on
                             eight virtual CPU devices; a scanned GPT of the size of
                             BERT-large, whose reference model has no scan: at most 2.5
    tpu_predicted_over_compiled
                             peak of a GPT-2 of medium size, stage 4 x data 2 x tensor
                             2 and 16 micro-batches, as predicted and by the compiler
                             of v5p:2x2x4: from 0.9 to 1.1
    tpu_m64_over_m16         the same peak with 64 micro-batches over that with 16, as
                             compiled: at most 1.02
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from paired import eight_devices, timed_pairs


eight_devices()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from by_hand import dealt, gpipe_by_autodiff  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402
from whalejax.lowering.pipeline_spmd.uneven_layer_exchange import places_of  # noqa: E402
from whalejax.planner.pipeline.uneven_layers import with_layers  # noqa: E402


STAGES, FEW, MANY, SAMPLES = 2, 8, 32, 4
UNEVEN = 6, 2
SMALL = {
    "layers": 8,
    "embed": 128,
    "heads": 4,
    "mlp": 512,
    "sequence": 128,
    "vocab": 1024,
}
BERT_LARGE = {
    "layers": 24,
    "embed": 1024,
    "heads": 16,
    "mlp": 4096,
    "sequence": 128,
    "vocab": 30_522,
}
LARGE_MEMORY = 2**43
"""Bytes of a device on which everything fits."""
SGD = optax.sgd(1.0)
"""A step with it subtracts the gradients."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9, help="timed pairs of steps")
    parser.add_argument("--compiles", type=int, default=2, help="pairs of compilations")
    parser.add_argument("--tpu", action="store_true", help="compile for v5p:2x2x4 too")
    parser.add_argument("--only", choices=("steps", "uneven", "compiles"))
    arguments = parser.parse_args()
    parts = {
        "steps": lambda: _steps(arguments.pairs),
        "uneven": lambda: _uneven(arguments.pairs),
        "compiles": lambda: _compiles(arguments.compiles),
    }
    results: dict[str, float] = {}
    for name, run in parts.items():
        if arguments.only in (None, name):
            results.update(run())
    if arguments.tpu:
        results.update(_tpu())
    print(json.dumps({key: round(value, 4) for key, value in results.items()}))


def _job(sizes: Mapping[str, int]) -> wh.Job:
    return models.job("gpt-test", annotated=False, scan_layers=True, **sizes)


def _plan(job: wh.Job, batch: int, cluster: str, **options: Any) -> wh.Plan:
    """Plans a model without further sharding, remat or offload."""
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, batch),
        cluster=wh.cluster(cluster).with_memory(LARGE_MEMORY),
        zero=0,
        offload=(),
        attention="gather",
        loss_chunks=1,
        **options,
    )
    print(str(plan).splitlines()[0], flush=True)
    return plan


def _steps(pairs: int) -> dict[str, float]:
    """Measures step times and temporaries of 1F1B and of GPipe by autodiff."""
    job = _job(SMALL)
    few, many = (_staged_step(job, count) for count in (FEW, MANY))
    memory = [_temporaries(step.lower().compile()) for step in (few, many)]
    time, gpipe = _against_gpipe(job, many, pairs)
    memory.append(gpipe)
    inputs, _ = _against_gpipe(job, _staged_step(job, MANY, remat="none"), pairs)
    return {
        "time_1f1b_over_gpipe": time,
        "time_inputs_over_gpipe": inputs,
        "memory_m32_over_m8": memory[1] / memory[0],
        "memory_1f1b_over_gpipe": memory[1] / memory[2],
    }


def _uneven(pairs: int) -> dict[str, float]:
    """Measures the step time of uneven stages, over masking."""
    job = _job(SMALL)
    time, _ = _against_gpipe(job, _staged_step(job, MANY, UNEVEN), pairs, UNEVEN)
    return {"uneven_over_masked": time}


def _staged_step(
    job: wh.Job, count: int, layers: tuple[int, ...] = (), **options: Any
) -> wh.TrainStep:
    """Returns the step of a plan with ``layers`` in each stage, or equally many."""
    plan = _plan(
        job,
        count * SAMPLES,
        f"cpu:{STAGES}",
        optimizer=SGD,
        mesh={"stage": STAGES},
        num_micro_batches=count,
        **options,
    )
    return wh.compile(
        with_layers(plan, layers) if layers else plan,
        job.loss_fn,
        jobs.abstract_model(job),
        optimizer=SGD,
        devices=jax.devices()[:STAGES],
    )


def _against_gpipe(
    job: wh.Job, many: wh.TrainStep, pairs: int, layers: tuple[int, ...] = ()
) -> tuple[float, int]:
    """Returns the ratio of step times, and the temporaries of GPipe by autodiff."""
    model, batch = job.make_model(jax.random.key(0)), job.batch_at(0, MANY * SAMPLES)
    state = many.init_from(model)
    before = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    gpipe, params = gpipe_by_autodiff(model, batch, MANY, STAGES, layers)

    def run_1f1b() -> None:
        nonlocal state
        state, metrics = many(state, batch)
        jax.block_until_ready((state, metrics))

    def run_gpipe() -> None:
        nonlocal params
        params = jax.block_until_ready(gpipe(params))

    run_1f1b()
    run_gpipe()
    _check_equal(before, state.params, dealt(params, layers, places_of))
    times = timed_pairs(run_1f1b, run_gpipe, pairs=pairs, warm=1)
    memory = _temporaries(gpipe)
    print(
        f"1f1b {min(times.first_seconds):.2f} s and "
        f"{_temporaries(many.lower().compile()) / 2**20:.1f} MiB, GPipe by autodiff "
        f"{min(times.second_seconds):.2f} s and {memory / 2**20:.1f} MiB"
    )
    return times.ratio, memory


def _temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _check_equal(before: list[Any], first: Any, second: Any) -> None:
    """Compares gradients: the differences of parameters after a step of ``SGD``.

    Some are zero but for rounding, so the norm of all counts too.
    """
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    gradients = [
        (old - np.asarray(a), old - np.asarray(b))
        for old, (a, b) in zip(before, pairs, strict=True)
    ]
    norm = np.sqrt(sum(np.sum(b**2) for _, b in gradients))
    for a, b in gradients:
        error = np.linalg.norm(a - b)
        if error > 1e-3 * np.linalg.norm(b) + 1e-5 * norm:
            raise SystemExit(f"gradients differ: {error} of {norm}, in {b.shape}")


def _compiles(pairs: int) -> dict[str, float]:
    """Measures compile times of eight stages and of none."""
    job = _job(BERT_LARGE)
    staged, plain = (_compiler(job, mesh) for mesh in ({"stage": 8}, {"data": 8}))
    times = timed_pairs(staged, plain, pairs=pairs, warm=1)
    print(
        f"compiled: stage 8 in {min(times.first_seconds):.1f} s, data 8 in "
        f"{min(times.second_seconds):.1f} s"
    )
    return {"compile_stage8_over_plain": times.ratio}


def _compiler(job: wh.Job, mesh: dict[str, int]) -> Callable[[], Any]:
    """Returns a function that traces, lowers and compiles a step."""
    optimizer = job.optimizer
    plan = _plan(
        job, 128, "cpu:8", mesh=mesh, optimizer=optimizer, num_micro_batches=16
    )

    def run() -> None:
        jax.clear_caches()
        model = jobs.abstract_model(job)
        step = wh.compile(plan, job.loss_fn, model, optimizer=optimizer)
        step.lower().compile()

    return run


def _tpu() -> dict[str, float]:
    """Measures peaks by the TPU's compiler, with few and many micro-batches."""
    topology = "v5p:2x2x4"
    job = models.job("gpt-medium", annotated=False, scan_layers=True)
    peaks = []
    for count in (16, 64):
        plan = _plan(
            job,
            SAMPLES * count,
            topology,
            mesh={"stage": 4, "data": 2, "tensor": 2},
            optimizer=job.optimizer,
            num_micro_batches=count,
            precision="bf16",
            sequence_parallel=False,
        )
        document = plan.verify(topology).document()
        if document["refused"] or document["failure"]:
            raise SystemExit(document["refused"] or document["failure"])
        quantities = {q["name"]: q for q in document["memory"]}
        peaks.append(quantities["peak"])
        print(
            f"{topology}: peak {peaks[-1]['compiled'] / 1e9:.3f} GB, predicted "
            f"{peaks[-1]['predicted'] / 1e9:.3f}",
            flush=True,
        )
    few, many = peaks
    return {
        "tpu_predicted_over_compiled": few["predicted"] / few["compiled"],
        "tpu_m64_over_m16": many["compiled"] / few["compiled"],
    }


if __name__ == "__main__":
    main()
