"""What ``bench_elastic.py`` trains: a small model whose metrics hold sample numbers.

Each process writes down what every step gave it: the loss to the last bit, the numbers
of the samples that were in it, and how many programs it has compiled so far that the
persistent cache did not hold.

    python scripts/elastic_training.py OPTIONS.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


SIZE: Final = 24
MICRO_BATCHES: Final = 12
_WIDTH: Final = 32
_MISSED: Final = "/jax/compilation_cache/cache_misses"


def make_model(key: Any) -> dict[str, Any]:
    """Two layers."""
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (_WIDTH, 64), dtype=float) * 0.2,
        "second": jax.random.normal(second, (64, 4), dtype=float) * 0.2,
    }


def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
    """The mean squared error, with dropout."""
    hidden = jnp.tanh(batch["x"] @ model["first"])
    hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
    error = hidden @ model["second"] - batch["y"]
    return jnp.mean(error**2), wh.Aux(samples={"number": batch["number"]})


def batch(step: int, size: int) -> dict[str, np.ndarray]:
    """The samples of a step, by its number alone."""
    drawn = np.random.default_rng(step)
    dtype = np.float64 if jax.config.read("jax_enable_x64") else np.float32
    return {
        "x": drawn.normal(size=(size, _WIDTH)).astype(dtype),
        "y": drawn.normal(size=(size, 4)).astype(dtype),
        "number": np.arange(step * size, (step + 1) * size, dtype=np.int32),
    }


def main() -> None:
    """Train as the options say."""
    options = json.loads(Path(sys.argv[1]).read_text())
    jax.config.update("jax_enable_x64", options["x64"])
    missed: list[str] = []

    def heard(event: str, **_: Any) -> None:
        missed.extend([event] * (event == _MISSED))

    jax.monitoring.register_event_listener(heard)
    job = wh.Job(loss_fn, make_model, batch, optax.adam(1e-3), batch_size=SIZE)
    with open(f"{options['out']}/{os.getpid()}.jsonl", "w", buffering=1) as out:
        for state, metrics in wh.train_elastic(
            job,
            steps=options["steps"],
            save=options.get("save"),
            save_every=50,
            num_micro_batches=MICRO_BATCHES,
        ):
            said = {
                "step": int(state.step),
                "loss": float(metrics["loss"]),
                "samples": metrics["number"].tolist(),
                "generation": metrics["generation"],
                "compiled": len(missed),
            }
            out.write(json.dumps(said) + "\n")
            time.sleep(options["pause"])


if __name__ == "__main__":
    main()
