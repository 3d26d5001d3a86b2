"""Trains layers for ``bench_elastic.py``, with metrics that can have sample numbers.

Each process writes the results of every step: the loss to the last bit, the numbers of
its samples, the time, and the names of programs that the process has compiled since its
first step and that the persistent cache lacked.

    python scripts/elastic_training.py OPTIONS.json

``OPTIONS.json`` has the fields of ``Options``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


MICRO_BATCHES: Final = 12
_WIDTH: Final = 32
_OUTPUTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the training.

    Attributes:
        out: Folder with one file of lines for each process.
        steps: Number of steps.
        save: Folder of checkpoints, or None.
        save_every: Steps between checkpoints.
        x64: Whether to compute in float64.
        pause: Seconds after each step.
        size: Samples of a batch.
        hidden, layers: Width, and number of layers of it after the first.
        counted: Whether metrics have sample numbers.
        ordinary: Whether it is one replicated model with collectives, which restarts as
            a whole.
        seed: Seed of the model.
    """

    out: str
    steps: int
    save: str | None = None
    save_every: int = 50
    x64: bool = False
    pause: float = 0.0
    size: int = 24
    hidden: int = 64
    layers: int = 0
    counted: bool = True
    ordinary: bool = False
    seed: int = 0


def job_of(options: Options) -> wh.Job:

    def make_model(key: Any) -> dict[str, Any]:
        sizes = [_WIDTH, *[options.hidden] * (1 + options.layers), _OUTPUTS]
        keys = jax.random.split(key, len(sizes) - 1)
        shapes = zip(sizes, sizes[1:], strict=False)
        return {
            f"layer{n}": jax.random.normal(k, shape, dtype=float) / shape[0] ** 0.5
            for n, (k, shape) in enumerate(zip(keys, shapes, strict=True))
        }

    def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ model["layer0"])
        hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
        for n in range(1, 1 + options.layers):
            hidden = jnp.tanh(hidden @ model[f"layer{n}"])
        error = hidden @ model[f"layer{1 + options.layers}"] - batch["y"]
        loss = jnp.mean(error**2)
        if not options.counted:
            return loss
        return loss, wh.Aux(samples={"number": batch["number"]})

    def batch(step: int, size: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        dtype = np.float64 if options.x64 else np.float32
        arrays: dict[str, np.ndarray] = {
            "x": rng.standard_normal((size, _WIDTH), dtype),
            "y": rng.standard_normal((size, _OUTPUTS), dtype),
        }
        if options.counted:
            numbers = np.arange(step * size, (step + 1) * size, dtype=np.int32)
            arrays["number"] = numbers
        return arrays

    optimizer = optax.adam(1e-3)
    return wh.Job(loss_fn, make_model, batch, optimizer, batch_size=options.size)


class CompiledNames(logging.Handler):
    """Names of the programs that the persistent cache lacked, in order."""

    _PREFIX: Final = "PERSISTENT COMPILATION CACHE MISS"

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        logger = logging.getLogger("jax._src.compiler")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(self._PREFIX) and isinstance(record.args, tuple):
            self.names.append(str(record.args[0]))


def steps_of(options: Options) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Returns an iterator of states and metrics, elastic or ordinary."""
    job = job_of(options)
    if options.ordinary:
        return ordinary(job, options)
    return wh.train_elastic(
        job,
        steps=options.steps,
        save=options.save,
        save_every=options.save_every,
        num_micro_batches=MICRO_BATCHES,
        seed=options.seed,
    )


def ordinary(job: wh.Job, options: Options) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the steps of a script with a fixed number of processes."""
    assert options.save is not None
    wh.init_distributed()
    folder, key = Path(options.save), jax.random.key(options.seed)
    count = jax.device_count()
    model = jax.eval_shape(job.make_model, key)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster=f"cpu:{count}",
        num_micro_batches=MICRO_BATCHES // count,
        mesh={"data": count},
    )
    step = wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer)
    state = step.restore_or_init(folder, job.make_model, rng=key)
    rows = step.batch_rows()
    while (done := int(state.step)) < options.steps:
        batch = {name: leaf[rows] for name, leaf in job.batch_at(done).items()}
        state, metrics = step(state, batch)
        float(metrics["loss"])
        yield state, metrics
        if (done + 1) % options.save_every == 0:
            start = time.monotonic()
            step.save(folder / f"step_{done + 1:06d}", state)
            seconds = time.monotonic() - start
            with (folder.parent / "saves").open("a") as saves:
                saves.write(f"{seconds}\n")


def write_lines(options: Options, out: TextIO) -> None:
    """Trains, and writes one line for each step."""
    handler = CompiledNames()
    first: int | None = None
    for state, metrics in steps_of(options):
        first = len(handler.names) if first is None else first
        record = {
            "step": int(state.step),
            "loss": float(metrics["loss"]),
            "time": time.time(),
            "compiled": handler.names[first:],
        }
        if options.counted:
            record["samples"] = metrics["number"].tolist()
        out.write(json.dumps(record) + "\n")
        time.sleep(options.pause)


def main() -> None:
    options = Options(**json.loads(Path(sys.argv[1]).read_text()))
    jax.config.update("jax_enable_x64", options.x64)
    with open(f"{options.out}/{os.getpid()}.jsonl", "w", buffering=1) as out:
        write_lines(options, out)


if __name__ == "__main__":
    main()
