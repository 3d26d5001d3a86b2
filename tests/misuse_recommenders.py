"""How the functions for embedding tables are called rightly; see ``misuse``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import whalejax as wh
from tests.misuse import Entry
from tests.misuse_world import NONE, OPTIMIZER, PLANNING, World, given
from whalejax.api.tables_request import USUAL_SPLITS


def lookup_loss(model: Any, batch: Any) -> jax.Array:
    """Of a table's rows and a product."""
    return jnp.mean(model["table"][batch["ids"]] @ model["w"])


MODEL: Final = {"table": jnp.ones((9, 16)), "w": jnp.ones((16, 4))}
BATCH: Final = {"ids": np.arange(16, dtype=np.int32) % 9}
_ROWS: Final = wh.sparse_optimizer("sgd", 0.1)


def _plan_arguments(world: World) -> dict[str, Any]:
    return {
        "loss_fn": lookup_loss,
        "model": MODEL,
        "batch": BATCH,
        "rows": _ROWS,
        "optimizer": OPTIMIZER,
        "cluster": world.cluster,
        "splits": ("whole", "rows"),
        "together": (),
        "pins": None,
        "counts": None,
        "mesh": None,
        "trainable": None,
        "staleness": 0,
        "times": None,
        "in_processes": None,
        "precision": "f32",
    }


TABLE_ARGUMENTS: Final[dict[str, Any]] = {
    "tables": None,
    "splits": USUAL_SPLITS,
    "together": (),
    "pins": None,
    "counts": None,
    "staleness": 0,
    "times": None,
    "in_processes": None,
}
"""Of ``wh.plan`` without tables."""


def _compile_arguments(world: World) -> dict[str, Any]:
    return {
        "plan": wh.plan_tables(**_plan_arguments(world)),
        "loss_fn": lookup_loss,
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "out_of_range": "error",
        "trainable": None,
        "devices": None,
        "job": None,
        "job_settings": None,
        "replace_every": None,
        "section_run": None,
    }


RECOMMENDERS: Final[Mapping[str, Entry]] = {
    "sparse_optimizer": Entry(
        given=given(
            kind="adagrad",
            learning_rate=0.1,
            initial_accumulator=0.1,
            epsilon=1e-7,
            b1=0.9,
            b2=0.999,
        ),
        legal={
            "learning_rate": ("zero half huge", "any number from 0"),
            "initial_accumulator": ("zero half huge", "any number from 0"),
            "epsilon": ("none zero half huge", "any number from 0, or the usual"),
            "b1": ("zero", "no memory"),
            "b2": ("zero", "no memory"),
        },
    ),
    "plan_tables": Entry(
        given=_plan_arguments,
        legal={
            "batch": ("array? arange? shape?", "a batch of another loss"),
            "optimizer": ("none", "evaluation needs none"),
            "cluster": ("none", "the devices of this process"),
            "together": ("list", "no group"),
            "pins": ("none dict entry?", "nothing is fixed; or a table's device"),
            "counts": ("none dict", "nothing was counted"),
            "mesh": ("none dict", "nothing is fixed"),
            "trainable": NONE,
            "staleness": ("zero", "no lookup lacks an update"),
            "times": NONE,
            "in_processes": NONE,
            "precision": ("dict?", "no TaskGraph is named"),
        },
        stops=PLANNING,
    ),
    "count_lookups": Entry(
        given=given(loss_fn=lookup_loss, model=MODEL, batches=[BATCH], trainable=None),
        legal={"trainable": NONE},
    ),
    "compile_tables": Entry(
        given=_compile_arguments,
        legal={
            "optimizer": ("none", "evaluation needs none"),
            "trainable": NONE,
            "devices": ("none", "all there are"),
            "job": NONE,
            "replace_every": ("none numpy?", "nothing is counted; or steps"),
            "job_settings": ("none dict", "the job as it is"),
            "section_run": NONE,
        },
    ),
    "SectionRun": Entry(
        given=given(
            folder="run",
            keep_every=10,
            hosts=("localhost",),
            host="127.0.0.1",
            remote_shell=("ssh",),
        ),
        legal={
            "folder": ("text", "a folder"),
            "keep_every": ("none numpy?", "nothing is kept; or steps"),
            "host": ("text", "an address"),
            "remote_shell": ("texts", "any words"),
        },
    ),
}
