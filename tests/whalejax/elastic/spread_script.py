"""A script whose model lies on several processes, of which so many are let in."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

import whalejax as wh
from tests.whalejax.elastic import job


MESHES: dict[str, Any] = {
    "fsdp": {"fsdp": -1},
    "tensor": lambda n: {"data": n // 2, "tensor": 2} if n % 2 == 0 else {"tensor": n},
    "stage": {"stage": -1},
}


def wait_for_seat(out: Path) -> Any:
    """Wait until fewer processes are in than the file ``seats`` allows."""
    while True:
        for number in range(int((out / "seats").read_text())):
            seat = (out / f"seat{number}").open("w")
            try:
                fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                seat.close()
                continue
            return seat
        time.sleep(0.1)


def main() -> None:
    options = json.loads(sys.argv[1])
    out = Path(options["out"])
    seat = wait_for_seat(out)
    with (out / f"steps.{os.getpid()}.jsonl").open("a", buffering=1) as lines:
        for state, metrics in wh.train_elastic(
            job.make(),
            steps=options["steps"],
            batch=12,
            save=options["save"],
            save_every=options["save_every"],
            num_micro_batches=options["micro_batches"],
            mesh=MESHES[options["mesh"]],
            copy_every=options.get("copy_every", 0),
        ):
            said = {
                "step": int(state.step),
                "loss": float(metrics["loss"]),
                "count": jax.process_count(),
                "generation": metrics["generation"],
            }
            lines.write(json.dumps(said) + "\n")
            time.sleep(options["pause"])
    seat.close()


if __name__ == "__main__":
    main()
