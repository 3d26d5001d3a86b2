"""Worker process of ``whalejax train --processes``: builds the job and trains it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from whalejax.meshes.errors import WhaleError
from whalejax.user_code.losses import Job


_USER_ERROR: Final = 2
_MOST_VALUES: Final = 4096
"""Number of elements above which an array is omitted from a line of metrics."""


def precision_asked(words: Sequence[str]) -> str | dict[str, str]:
    """Returns the value of ``--precision`` for ``wh.plan``; default: ``"f32"``."""
    named: dict[str, str] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        named[name] = value
    return named[""] if "" in named else named or "f32"


def mesh_asked(words: Sequence[str]) -> dict[str, int] | str | None:
    """Returns the value of ``--mesh`` for ``wh.train_elastic``.

    Raises:
        WhaleError: It is neither ``auto``, ``replicas`` nor sizes of mesh axes.

    >>> mesh_asked(["fsdp=-1", "tensor=2"]), mesh_asked(["auto"]), mesh_asked([])
    ({'fsdp': -1, 'tensor': 2}, 'auto', None)
    """
    from whalejax.api.named_jobs import named_values
    from whalejax.elastic.mesh_sizes import AUTO, REPLICAS, refusal

    if not words:
        return None
    if list(words) in ([AUTO], [REPLICAS]):
        return words[0]
    if not all("=" in word for word in words):
        expected = "auto, replicas, or sizes of mesh axes such as fsdp=-1 tensor=2"
        raise WhaleError(f"--mesh is {' '.join(words):.100}; expected {expected}")
    asked = named_values(words, "--mesh", "fsdp=-1")
    if expected := refusal(asked):
        commas = any("," in word for word in words)
        raise WhaleError(
            f"--mesh is {' '.join(words)}; expected {expected}. Give, say, fsdp=-1 "
            f"tensor=2{', with spaces, not commas' * commas}, or auto"
        )
    return asked


def write_metrics(folder: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Appends a line to the metrics file of this process.

    If the write fails, as on a full disk, the line is lost and training goes on.

    Args:
        folder: Folder with one file for each process.
        step: Number of the step.
        metrics: Metrics that ``wh.train_elastic`` yielded; large arrays are omitted.
    """
    record = {"step": step, "time": round(time.time(), 3)}
    leaves = ((name, np.asarray(x)) for name, x in metrics.items())
    record |= {name: x.tolist() for name, x in leaves if x.size <= _MOST_VALUES}
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def with_rate(job: Job, factor: float) -> Job:
    """Returns the job with its optimizer's updates scaled by a factor.

    The state of the optimizer keeps its structure, so that checkpoints fit.

    Args:
        job: Job to train.
        factor: Factor by which each update is multiplied.
    """
    if factor == 1.0 or job.optimizer is None:
        return job
    import jax
    import optax

    inner = optax.with_extra_args_support(job.optimizer)

    def update(
        gradients: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, state, params, **extra)
        return jax.tree.map(lambda x: x * np.asarray(factor, x.dtype), updates), state

    scaled = optax.GradientTransformationExtraArgs(inner.init, update)
    return dataclasses.replace(job, optimizer=scaled)


def main(words: Sequence[str]) -> int:
    """Trains until the last step, and returns the exit status.

    Args:
        words: Single argument: the options of the command as JSON.
    """
    from whalejax.api.named_jobs import find_job, named_values
    from whalejax.elastic.refusals import reported_refusals
    from whalejax.elastic.training import train_elastic
    from whalejax.runtime.steps_in_flight import is_divergent
    from whalejax.tables.sparse_optimizers import optimizer_named

    options = json.loads(words[0])
    tables = options.get("tables")
    try:
        with reported_refusals():
            job = find_job(options["model"], named_values(options["set"]))
            job = with_rate(job, options.get("rate_factor", 1.0))
        for state, metrics in train_elastic(
            job,
            steps=options["steps"],
            save=options["save"],
            save_every=options["save_every"],
            keep=options.get("keep") or 3,
            batch=options["batch"],
            num_micro_batches=options["micro_batches"],
            precision=precision_asked(options["precision"]),
            seed=options["seed"],
            mesh=mesh_asked(options["mesh"]),
            noise_scale=options.get("noise_scale", False),
            tables=None if tables is None else optimizer_named(tables),
            replace_every=options.get("replace_every"),
        ):
            step, loss = int(state.step), float(metrics["loss"])
            print(f"step {step}  loss {loss:.6g}", flush=True)
            if is_divergent(loss, metrics):
                raise WhaleError(
                    f"step {step} of {options['steps']}: the loss is {loss}; training "
                    "has stopped, and this step is not saved. A lower learning rate, a "
                    "longer warm-up or clipping the gradient's norm are the usual "
                    "remedies"
                )
            if options.get("metrics"):
                write_metrics(Path(options["metrics"]), step, metrics)
    except WhaleError as error:
        print(f"whalejax: {error}", file=sys.stderr, flush=True)
        return _USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
