"""A script of members: trains the small job, and writes down what each step gave."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, cast

import jax

import whalejax as wh
from tests.whalejax.elastic import job
from whalejax.elastic.replica_programs import ReplicaPrograms
from whalejax.elastic.supervisor_client import Control


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("x64"):
        jax.config.update("jax_enable_x64", True)
    if "supervisor_seconds" in options:  # Which members wait for one that is gone.
        patience = {"supervisor_seconds": options["supervisor_seconds"]}
        cast(Any, Control.__init__).__kwdefaults__.update(patience)
    if "slow_save" in options:
        save = ReplicaPrograms.save

        def slowly(*given: Any) -> None:
            time.sleep(options["slow_save"])
            save(*given)

        cast(Any, ReplicaPrograms).save = slowly
    path = f"{options['out']}/steps.{os.getpid()}.jsonl"
    with open(path, "w", buffering=1) as out:
        for state, metrics in wh.train_elastic(
            job.make(),
            steps=options["steps"],
            save=options.get("save"),
            save_every=options.get("save_every", 100),
            num_micro_batches=options.get("micro_batches", 8),
            mesh=options.get("mesh"),
        ):
            said = {
                "step": int(state.step),
                "loss": float(metrics["loss"]).hex(),
                "samples": [int(metrics["number"][0]), int(metrics["number"][-1])],
                "sum": int(metrics["number"].sum()),
                "generation": metrics["generation"],
            }
            out.write(json.dumps(said) + "\n")
            time.sleep(options.get("pause", 0.0))
            if said["step"] == options.get("fails_at"):
                raise RuntimeError("a bug in the body of the loop")
            if said["step"] == options.get("breaks_at"):
                break
    # As an evaluation in the end, for longer than a lease.
    time.sleep(options.get("after", 0.0))


if __name__ == "__main__":
    main()
