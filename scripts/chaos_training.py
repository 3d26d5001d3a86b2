"""Trains a model for ``bench_chaos.py`` and prints its progress and every loss.

Started by ``whalejax launch`` as one of several processes. It continues from the latest
checkpoint in its folder, so that a run that was ended can be started again.

    whalejax launch --processes 2 scripts/chaos_training.py KIND FOLDER

KIND is ``data`` (one program), ``pipeline`` (marked stages, each a program in a process
of its own) or ``uneven`` (three replicas with unequal shares).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


OPTIONS: dict[str, Any] = {
    "data": {"mesh": {"data": 2}},
    "pipeline": {},
    "uneven": {"num_micro_batches": 8, "shares": [4, 2, 2]},
}
STEPS = 14
SAVE_EVERY = 4
STEP_SECONDS = 0.15
"""Pause after each loss, so that signals arrive during training too."""


def report(point: str) -> None:
    """Prints the point of the run, for which the bench waits."""
    print(f"chaos at {point}", flush=True)


def loss_of(kind: str) -> Any:
    """Returns the loss of two layers; in a pipeline, each is a stage."""
    from jax.numpy import tanh

    import whalejax as wh

    pipeline = wh.pipeline(num_micro_batches=4)

    def loss_fn(model: Any, batch: Any) -> Any:
        if kind != "pipeline":
            hidden = tanh(batch["x"] @ model["first"])
            return ((hidden @ model["second"] - batch["y"]) ** 2).mean()
        with wh.replicate(), pipeline:
            with wh.stage():
                hidden = tanh(batch["x"] @ model["first"])
            with wh.stage():
                return ((hidden @ model["second"] - batch["y"]) ** 2).mean()

    return loss_fn


def main() -> None:
    """Trains, from the beginning or from the latest checkpoint."""
    report("begins")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    import numpy as np
    import optax

    import whalejax as wh
    from whalejax.runtime import loop

    report("imported")
    count = wh.init_distributed(timeout_seconds=120, heartbeat_seconds=10)
    report("joined")
    noise = np.random.default_rng(0).normal(size=(STEPS, 24, 8)).astype("float32")
    loss_fn = loss_of(kind)

    def batch_at(index: int) -> Any:
        return {"x": noise[index], "y": np.ones((24, 4), np.float32)}

    model = {
        "first": np.full((8, 16), 0.1, np.float32),
        "second": np.full((16, 4), 0.1, np.float32),
    }
    tx = optax.adam(1e-2)
    cluster, opts = f"h100:{count}", OPTIONS[kind]
    plan = wh.plan(loss_fn, model, batch_at(0), optimizer=tx, cluster=cluster, **opts)
    report("planned")
    step = wh.compile(plan, loss_fn, model, optimizer=tx, devices=jax.devices())
    checkpoint = loop.latest(folder) if folder.exists() else None
    state = step.init_from(model) if checkpoint is None else step.restore(checkpoint)
    report("compiled")

    def own_batch(index: int) -> Any:
        if kind != "uneven":
            return batch_at(index)
        rows = step.batch_rows()
        return {name: array[rows] for name, array in batch_at(index).items()}

    def on_step(progress: loop.Progress) -> None:
        print(f"chaos loss {progress.step} {progress.loss!r}", flush=True)
        report(f"step {progress.step}")
        time.sleep(STEP_SECONDS)

    loop.train(
        step,
        state,
        own_batch,
        steps=STEPS,
        save_dir=folder,
        save_every=SAVE_EVERY,
        resumed_from=checkpoint,
        on_step=on_step,
    )
    report("ends")


if __name__ == "__main__":
    main()
