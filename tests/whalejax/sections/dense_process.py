"""A process with the dense part, which tests kill: trains some steps and goes on.

python -m tests.whalejax.sections.dense_process FOLDER STEPS STALENESS PAUSE
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import whalejax as wh
from tests.whalejax.sections.test_sections import OPTIMIZER, make_plan
from tests.whalejax.test_table_step import loss, make_batch, make_net


def main(folder: Path, steps: int, staleness: int, pause: float) -> None:
    """Writes each loss, and the rows at the end."""
    pins = {"user": "rows", "tag": 0}
    plan = make_plan(staleness, "adagrad", pins, ("user", "tag"))
    run = wh.SectionRun(folder=folder / "kept", keep_every=5)
    given: Any = {"optimizer": OPTIMIZER, "devices": jax.devices()[:1]}
    step: Any = wh.compile_tables(
        plan, loss, make_net(np.float32), section_run=run, **given
    )
    (folder / "pid").write_text(str(os.getpid()))
    with step, (folder / "losses").open("a") as file:
        state = step.resume() or step.init_from(make_net(np.float32))
        for number in range(int(state.step), steps):
            state, metrics = step(state, make_batch(number, np.float32))
            line = [number, float(metrics["loss"])]
            file.write(json.dumps(line) + "\n")
            file.flush()
            time.sleep(pause)
        report = step.report()
        np.savez(
            folder / "rows.npz", over=report.over_bound, **step.table_values(state)
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
