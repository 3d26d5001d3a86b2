"""Measures the time of WhaleJAX before the first step: imports and planning.

Every figure is a median over fresh processes, because a second import is free. They
read byte code that an unreported process has written, into a folder of this run, as
users' processes do.

    python scripts/bench_import.py [--repeats N]

The last line is one JSON object:

    import_s      seconds of `import whalejax`
    imports_jax   whether that imported JAX
    front_end_s   seconds of importing `api.plan` and `runtime.train_step`, after
                  `import jax, flax`
    plan_s        seconds of planning the quick-start GPT for 8 described devices,
                  tracing included, in a process that has imported both
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]

# Each prints one JSON object; `start` and `stop` enclose what is timed.
BARE_IMPORT: Final = """
import json, sys, time
start = time.perf_counter()
import whalejax
stop = time.perf_counter()
print(json.dumps({"seconds": stop - start, "jax": "jax" in sys.modules}))
"""

FRONT_END: Final = """
import json, time
import jax, flax
start = time.perf_counter()
import whalejax.api.plan, whalejax.runtime.train_step
stop = time.perf_counter()
print(json.dumps({"seconds": stop - start}))
"""

PLANNING: Final = """
import json, time
import jax
from flax import nnx
import whalejax as wh
import whalejax.api.plan
from whalejax import models

job = models.job("gpt")
model = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))
batch = job.batch_at(0)
start = time.perf_counter()
wh.plan(
    job.loss_fn,
    model,
    batch,
    optimizer=job.optimizer,
    cluster=wh.cluster("h100:8"),
)
stop = time.perf_counter()
print(json.dumps({"seconds": stop - start}))
"""


@functools.cache
def environment() -> dict[str, str]:
    """Returns variables that put byte code of processes in a new folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    folder = tempfile.mkdtemp(prefix="whalejax-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONPYCACHEPREFIX": folder,
    }


def in_fresh_process(code: str) -> dict[str, Any]:
    """Runs code in a new interpreter and returns the object on its last line."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        sys.exit(f"a measurement failed:\n{process.stderr}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def median_seconds(code: str, repeats: int) -> float:
    """Returns the median over ``repeats`` fresh processes, after one unreported."""
    in_fresh_process(code)  # fills the disk cache and writes the byte code
    seconds = [in_fresh_process(code)["seconds"] for _ in range(repeats)]
    print(f"  {min(seconds):.4f} to {max(seconds):.4f} s in {repeats} processes")
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times imports and planning.")
    parser.add_argument("--repeats", type=int, default=5, help="processes per figure")
    repeats = parser.parse_args().repeats
    figures: dict[str, float | bool] = {}
    print("import whalejax")
    figures["import_s"] = round(median_seconds(BARE_IMPORT, repeats), 4)
    figures["imports_jax"] = in_fresh_process(BARE_IMPORT)["jax"]
    print("the front end, after jax and flax")
    figures["front_end_s"] = round(median_seconds(FRONT_END, repeats), 4)
    print("planning the quick-start GPT")
    figures["plan_s"] = round(median_seconds(PLANNING, repeats), 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
