"""Compares predicted with compiled collective bytes, layout by layout.

Every pair of a model and a layout is planned, lowered and compiled for eight virtual
CPU devices; the payload of every collective of the plan is compared with that of the
program, loops multiplied out. A pair is exact if the totals agree to the byte.

    python scripts/bench_collectives.py [--only NAME]

The last line is one JSON object:

    pairs           number of pairs
    exact           number of exact pairs
    exact_fraction  part of exact pairs
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paired import eight_devices


eight_devices()

MESHES: tuple[tuple[dict[str, int], int], ...] = (
    ({"data": 8}, 0),
    ({"data": 8}, 1),
    ({"data": 8}, 2),
    ({"fsdp": 8}, 0),
    ({"data": 2, "fsdp": 4}, 0),
    ({"tensor": 8}, 0),
    ({"data": 2, "tensor": 4}, 0),
    ({"data": 4, "tensor": 2}, 0),
    ({"data": 4, "tensor": 2}, 1),
    ({"fsdp": 4, "tensor": 2}, 0),
    ({"expert": 8}, 0),
    ({"data": 2, "expert": 4}, 0),
    ({"expert": 4, "tensor": 2}, 0),
    ({"data": 2, "expert": 2, "tensor": 2}, 0),
    ({"context": 8}, 0),
    ({"data": 2, "context": 4}, 0),
    ({"data": 2, "context": 4}, 1),
    ({"fsdp": 2, "context": 4}, 0),
    ({"context": 4, "tensor": 2}, 0),
)
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt-test", {}),
    ("gpt-test", {"fused_qkv": True}),
    ("bert-test", {}),
    ("mlp-test", {}),
    ("resnet-test", {}),
    ("moe-test", {}),
    ("moe-test", {"mlp": 1024}),
)


@dataclass(frozen=True)
class Pair:
    """One model under one layout.

    Attributes:
        model, layout: Texts of the model and of the layout.
        predicted, compiled: Payload bytes on one device by kind of collective.
    """

    model: str
    layout: str
    predicted: dict[str, int]
    compiled: dict[str, int]

    @property
    def exact(self) -> bool:
        """Whether all collectives together carry the predicted bytes."""
        return sum(self.predicted.values()) == sum(self.compiled.values())


def pairs(only: str | None) -> Iterator[Pair]:
    """Plans and compiles every possible pair."""
    import jax
    import optax
    from flax import nnx

    import whalejax as wh
    from whalejax import hlo, models
    from whalejax.meshes import Cluster

    cluster = Cluster.detect(calibrate=False)
    # Clipping by the global norm adds reductions that belong to the optimizer alone.
    optimizer = optax.adam(1e-3)
    for name, options in MODELS:
        if only and only not in name:
            continue
        job = models.job(name, batch_size=32, annotated=False, **options)
        model: Any = (
            nnx.eval_shape(lambda job=job: job.make_model(jax.random.key(0)))
            if name != "bert-test"
            else jax.eval_shape(lambda job=job: job.make_model(jax.random.key(0)))
        )
        for mesh, zero in MESHES:
            try:
                plan = wh.plan(
                    job.loss_fn,
                    model,
                    job.batch_at(0),
                    optimizer=optimizer,
                    cluster=cluster,
                    mesh=mesh,
                    zero=zero,
                    num_micro_batches=1,
                    sequence_parallel=False,
                    attention="gather",
                    loss_chunks=1,
                )
            except wh.PlanError as error:
                print(f"{name} {mesh}: not possible ({str(error).splitlines()[0]})")
                continue
            step = wh.compile(plan, job.loss_fn, model, optimizer=optimizer)
            collectives = hlo.collectives(step.lower().compile().as_text())
            predicted: Counter[str] = Counter()
            for c in plan.collectives:
                predicted[c.kind] += c.payload_bytes * c.times(plan.num_micro_batches)
            text = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
            yield Pair(
                model=" ".join((name, *options)),
                layout=f"{text}, ZeRO-{zero}" if zero else text,
                predicted=dict(predicted),
                compiled=dict(collectives.nbytes),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME")
    arguments = parser.parse_args()
    compared = []
    for pair in pairs(arguments.only):
        compared.append(pair)
        word = "exact" if pair.exact else "OFF"
        print(f"{word:6}{pair.model} {pair.layout}")
        if not pair.exact:
            print(f"      predicted {pair.predicted}")
            print(f"      compiled  {pair.compiled}")
    exact = sum(pair.exact for pair in compared)
    print(
        json.dumps(
            {
                "pairs": len(compared),
                "exact": exact,
                "exact_fraction": round(exact / max(1, len(compared)), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
