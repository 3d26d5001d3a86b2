"""Times the first display of a plan in a notebook, and counts the bytes of its HTML.

A plan file of Llama-3 405B's shapes, its 126 layers with parameters of their own, is
read and shown in a fresh process; then one of 10,000 parameters that do not fold, and a
long pipeline.

    python scripts/bench_display.py [--rounds N]

The last line is one JSON object with, for each plan,

    NAME_seconds     seconds of the first display with its imports, without reading
    NAME_again       seconds of the second display
    NAME_kilobytes   kilobytes of HTML
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from whalejax import jobs, models  # noqa: E402
from whalejax.api.plan import plan as find_plan  # noqa: E402
from whalejax.planner.plan.plan import Plan  # noqa: E402


SHOW: Final = """
import sys, time
from whalejax import Plan
plan = Plan.load(sys.argv[1])
shown = []
for _ in range(2):
    start = time.perf_counter()
    value = plan.timeline() if sys.argv[2] == "timeline" else plan
    html = value._repr_mimebundle_()["text/html"]
    shown.append(time.perf_counter() - start)
assert "jax" not in sys.modules
print(*shown, len(html.encode()))
"""


def plans() -> dict[str, Plan]:
    """Returns the plans to show, by name."""
    job = models.job("llama-405b")
    large = find_plan(
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 2048)),
        optimizer=job.optimizer,
        cluster="h100:1024x8",
        precision="bf16",
        runnable=False,
    )
    stacked = [leaf for leaf in large.leaves if leaf.path.startswith("blocks.")]
    others = [leaf for leaf in large.leaves if leaf not in stacked]
    layers = [
        dataclasses.replace(
            leaf,
            path=leaf.path.replace("blocks.", f"blocks.{layer}.", 1),
            shape=leaf.shape[1:],
            roles=leaf.roles[1:],
            **{
                field: getattr(leaf, field)[1:]
                for field in (
                    "compute_spec",
                    "param_spec",
                    "gradient_spec",
                    "optimizer_spec",
                )
            },
        )
        for layer in range(126)
        for leaf in stacked
    ]
    many = [dataclasses.replace(layers[0], path=f"w{i}x") for i in range(10_000)]
    job = models.job("llama-7b")
    pipeline = find_plan(
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 512)),
        optimizer=job.optimizer,
        cluster="h100:16x8",
        precision="bf16",
        mesh={"stage": 16, "fsdp": 8},
        num_micro_batches=64,
    )
    return {
        "llama405b": dataclasses.replace(large, leaves=(*others, *layers)),
        "parameters10k": dataclasses.replace(large, leaves=tuple(many)),
        "timeline": pipeline,
    }


def measure_display(path: Path, name: str) -> tuple[float, float, int]:
    """Returns the seconds of both displays, and the bytes, in a fresh process."""
    process = subprocess.run(
        [sys.executable, "-c", SHOW, str(path), name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, nbytes = process.stdout.split()
    return float(first), float(second), int(nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times displays of plans.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds: int = parser.parse_args().rounds
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in plans().items():
            path = Path(folder) / f"{name}.json"
            plan.save(path)
            runs = [measure_display(path, name) for _ in range(rounds)]
            first, second = (statistics.median(r[i] for r in runs) for i in (0, 1))
            results |= {
                f"{name}_seconds": round(first, 4),
                f"{name}_again": round(second, 4),
                f"{name}_kilobytes": runs[0][2] / 1000,
            }
            print(
                f"{name}: {first:.3f} s at first, then {second:.3f} s, "
                f"{runs[0][2] / 1000:.0f} kB, {len(plan.leaves):,} parameters"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
