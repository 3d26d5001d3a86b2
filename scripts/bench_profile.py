"""What profiles of steps explain, and whether a collective that is put in is found.

Steps of reference models are traced on virtual CPU devices, under drawn meshes. Then a
shuffle of the batch is put into a loss that was planned without it: the profile has to
name the all-gather that it makes, and the line.

    python scripts/bench_profile.py [--seed N]

The last line is JSON: ``unexplained`` (the largest part of a step that no term has),
``other_groups`` (collectives whose mesh axes are not known), ``injected`` (how many of
those put in), ``found`` (by kind and line), and seconds of each part.
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
    """The profile of a reference model's step on a mesh; None where none serves it."""
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
    """What the plan is made for."""
    return h


def shuffled(h: Any) -> Any:
    """A hidden layer with one whose samples are in another order added."""
    return h + jnp.take(h, jnp.argsort(jax.lax.stop_gradient(h[:, 0])), axis=0)


def injected(rng: random.Random) -> bool:
    """Whether an all-gather that the plan lacks is found, with its line."""
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
    found = step.profile(step.init_from(net), x, steps=2)[1]
    line = inspect.getsourcelines(shuffled)[1] + 2
    return any(
        one.what.startswith("all-gather over data")
        and one.nbytes == batch * width * 4
        and one.place.endswith(f"bench_profile.py:{line}")
        for one in found.unplanned
    )


def main() -> int:
    """Run the bench.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6)
    )
    seed = parser.parse_args().seed
    rng = random.Random(seed)
    worst, others, profiled = 0.0, 0, 0
    for name in MODELS:
        for mesh in rng.sample(MESHES, 2):
            found = profile(name, mesh)
            if found is None:
                continue
            profiled += 1
            worst = max(worst, found.unexplained)
            others += sum("other groups" in term.name for term in found.terms)
            print(f"{name} on {mesh}: {found.unexplained:.1e} unexplained", flush=True)
    wanted = [injected(rng) for _ in range(3)]
    said = {
        "seed": seed,
        "profiled": profiled,
        "unexplained": worst,
        "other_groups": others,
        "injected": len(wanted),
        "found": sum(wanted),
    }
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
