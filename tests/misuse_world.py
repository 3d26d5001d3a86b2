"""What the tests of wrong calls stand on: one small model, planned and compiled.

Also the shorthands in which ``misuse_table`` and ``misuse_hardware`` say which odd
values are right for a parameter, and why.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh
from whalejax import meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One small model, planned, compiled and saved, and what came of it."""

    folder: Path
    model: Any
    batch: Any
    plan: wh.Plan
    step: wh.TrainStep
    state: wh.TrainState
    found: Any
    sliders: Any
    document: dict[str, Any]

    @property
    def cluster(self) -> wh.Cluster:
        return self.plan.cluster

    @property
    def kind(self) -> meshes.DeviceKind:
        return self.cluster.kinds[0]


def loss(model: Any, batch: Any) -> jax.Array:
    """Of a product."""
    return jnp.mean((batch["x"] @ model["w"]) ** 2)


def make_model(key: Any) -> Any:
    """Its weights."""
    return {"w": jax.random.normal(key, (8, 16))}


OPTIMIZER: Final = optax.sgd(0.1)


def planned() -> wh.Plan:
    """The plan of the small model, on the devices of this process."""
    model, batch = make_model(jax.random.key(0)), {"x": np.ones((16, 8), np.float32)}
    cluster = wh.Cluster.detect(calibrate=False)
    return wh.plan(loss, model, batch, optimizer=OPTIMIZER, cluster=cluster)


def world(folder: Path) -> World:
    """Everything that calls need, made once.

    Args:
        folder: an empty one.
    """
    model, batch = make_model(jax.random.key(0)), {"x": np.ones((16, 8), np.float32)}
    plan = planned()
    step = wh.compile(plan, loss, model, optimizer=OPTIMIZER)
    state = step.init(make_model, rng=jax.random.key(1))
    step.save(folder / "checkpoint", state)
    plan.save(folder / "plan.json")
    plan.cluster.save(folder / "cluster.toml")
    journal = folder / "elastic" / "events.jsonl"
    journal.parent.mkdir()
    journal.write_text('{"time": 1.0, "event": "opened", "host": "a", "port": 1}\n')
    added = {
        "name": "one",
        "model": "mlp",
        "steps": 1,
        "devices": [1, 1],
        "folder": "/",
    }
    event = json.dumps({"time": 1.0, "event": "added", "job": added})
    (folder / "jobs.jsonl").write_text(event + "\n")
    found = wh.search(loss, model, batch, clusters=["h100:8"], optimizer=OPTIMIZER)
    return World(
        folder=folder,
        model=model,
        batch=batch,
        plan=plan,
        step=step,
        state=state,
        found=found,
        sliders=plan.sliders(),
        document=plan.document(),
    )


NONE: Final = ("none", "it may be left out")
SWITCH: Final = ("true", "it is a switch")
FILE: Final = ("text", "any name will do for a file")
NUMBER: Final = ("zero half", "any number from 0")
POSITIVE: Final = ("half", "any number above 0")
SIZES: Final = (
    "minus zero huge endless",
    "the kind or cluster that holds it refuses it, with its place among others",
)
RATES: Final = (f"{SIZES[0]} nan inf half", SIZES[1])
PLANNING: Final = (
    "whalejax.api.plan_request:PlanQuestion.programs",
    "whalejax.meshes.detect:detect",
)


def fields_of(value: Any) -> dict[str, Any]:
    """What a dataclass was made of, by name."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def given(*names: str, **values: Any) -> Callable[[World], dict[str, Any]]:
    """Arguments from the world by name, and others as they are."""
    return lambda w: {name: getattr(w, name) for name in names} | values
