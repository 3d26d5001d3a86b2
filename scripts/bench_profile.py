"""Checks that profiles explain steps and find a collective that the plan lacks.

Steps of reference models are traced on virtual CPU devices, under random meshes. Then
the loss of a plan gets a shuffle of the batch that the plan lacks: the profile has to
name its all-gather, and the line.

    python scripts/bench_profile.py [--seed N]

The last line is one JSON object:

    seed, profiled  seed; number of profiled steps
    unexplained     largest part of a step that belongs to no term
    other_groups    collectives on unknown mesh axes
    injected        number of injected collectives
    found           those that were found, by kind and line
"""

from __future__ import annotations

import os


os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import models  # noqa: E402


MODELS = ("gpt-test", "bert-test", "moe-test", "resnet-test", "mlp-test")
MESHES = ({"data": 4}, {"data": 2, "tensor": 2}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2})


def profile(name: str, mesh: dict[str, int]) -> Any:
    """Returns the profile of a reference model on a mesh; None without a plan."""
    job = models.job(name, batch_size=16)
    model = job.make_model(jax.random.key(0))
    try:
        plan = wh.plan(
            job.loss_fn,
            model,
            job.batch_at(0),
            optimizer=job.optimizer,
            cluster="cpu:4",
            mesh=mesh,
        )
    except wh.PlanError:
        return None
    step = wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer)
    return step.profile(step.init_from(model), job.batch_at(0), steps=3)[1]


def plain(h: Any) -> Any:
    return h


def shuffled(h: Any) -> Any:
    """Adds the same hidden layer with its samples in another order."""
    return h + jnp.take(h, jnp.argsort(jax.lax.stop_gradient(h[:, 0])), axis=0)


def finds_injected(rng: random.Random) -> bool:
    """Returns whether an all-gather that the plan lacks is found, with its line."""
    width, batch = 64 * rng.randint(1, 6), 32 * rng.randint(1, 6)
    net = {"a": np.ones((64, width), np.float32), "b": np.ones((width, 8), np.float32)}
    x = np.random.default_rng(rng.randrange(2**32)).normal(size=(batch, 64))
    x = x.astype(np.float32)
    optimizer = optax.sgd(0.1)

    def loss(change: Any) -> Any:
        return lambda net, x: ((change(jnp.tanh(x @ net["a"])) @ net["b"]) ** 2).mean()

    plan = wh.plan(
        loss(plain), net, x, optimizer=optimizer, cluster="cpu:4", mesh={"data": 4}
    )
    step = wh.compile(plan, loss(shuffled), net, optimizer=optimizer)
    profile = step.profile(step.init_from(net), x, steps=2)[1]
    line = inspect.getsourcelines(shuffled)[1] + 2
    return any(
        traffic.what.startswith("all-gather over data")
        and traffic.nbytes == batch * width * 4
        and traffic.place.endswith(f"bench_profile.py:{line}")
        for traffic in profile.unplanned
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6)
    )
    seed = parser.parse_args().seed
    rng = random.Random(seed)
    worst, others, profiled = 0.0, 0, 0
    for name in MODELS:
        for mesh in rng.sample(MESHES, 2):
            report = profile(name, mesh)
            if report is None:
                continue
            profiled += 1
            worst = max(worst, report.unexplained)
            others += sum("other groups" in term.name for term in report.terms)
            print(f"{name} on {mesh}: {report.unexplained:.1e} unexplained", flush=True)
    results = [finds_injected(rng) for _ in range(3)]
    summary = {
        "seed": seed,
        "profiled": profiled,
        "unexplained": worst,
        "other_groups": others,
        "injected": len(results),
        "found": sum(results),
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
