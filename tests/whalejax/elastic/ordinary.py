"""An ordinary script of several processes, fit for being started again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

import whalejax as wh
from tests.whalejax.elastic import job as example


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    wh.init_distributed()
    job, key, count = example.make(), jax.random.key(0), jax.device_count()
    model = jax.eval_shape(job.make_model, key)
    first = job.batch_at(0)
    plan = wh.plan(
        job.loss_fn,
        model,
        first,
        optimizer=job.optimizer,
        cluster=f"cpu:{count}",
        num_micro_batches=1,
        mesh={"data": count},
    )
    step = wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer)
    state = step.restore_or_init(folder, job.make_model, rng=key)
    rows = step.batch_rows()
    while (done := int(state.step)) < steps:
        batch = {name: leaf[rows] for name, leaf in job.batch_at(done).items()}
        state, metrics = step(state, batch)
        print(f"step {done + 1} of {count}: {float(metrics['loss']):.6f}", flush=True)
        time.sleep(0.1)
        if (done + 1) % 10 == 0:
            step.save(folder / f"step_{done + 1:06d}", state)


if __name__ == "__main__":
    main()
