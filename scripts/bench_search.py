"""Times the wide search, tracing excluded, and says how much it proved.

Six questions of the size that people ask. Every one is answered with the best plan of
its space: ``gap`` is by how much a plan that was not weighed could at most be faster.
The last line printed is one JSON object with, for each question,

    NAME             seconds of the search, from the captured model to the best case
    NAME_plan        seconds until its plan is written down as well
    NAME_runs        seconds of ``wh.plan`` for what an executor of this version runs,
                     tracing included; null where nothing of that kind fits
    NAME_what_if_remat, NAME_what_if_cluster, NAME_what_if_batch
                     seconds of ``plan.what_if`` after the first plan: with
                     ``remat="full"``, as many H200, twice as many samples; null where
                     nothing fits
    NAME_covered     combinations that it chose among
    NAME_gap         the gap

``trace_405b``, the seconds that capturing Llama-3 405B takes, and

    bert_large_plan, t5_large_plan
                     seconds of ``wh.plan`` on eight H100, tracing included, for models
                     whose layers are written out one by one

    python scripts/bench_search.py [--only SUBSTRING] [--rounds N]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import optax  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402
from whalejax.adapters.base import adapt  # noqa: E402
from whalejax.capture import capture  # noqa: E402
from whalejax.capture.precision import at_precision  # noqa: E402
from whalejax.lowering.batch_record import batch_leaves  # noqa: E402
from whalejax.lowering.optimizer_state import optimizer_bytes  # noqa: E402
from whalejax.meshes import Cluster  # noqa: E402
from whalejax.meshes import cluster as parse  # noqa: E402
from whalejax.planner.errors import PlanError  # noqa: E402
from whalejax.planner.plan.plan import Plan  # noqa: E402
from whalejax.planner.plan.plan_any import decide_any  # noqa: E402
from whalejax.planner.search.batched.branch_and_bound import WideSearch  # noqa: E402
from whalejax.planner.search.request import Request  # noqa: E402


HOST_BYTES: Final = 96 * 2**30
"""Host memory of one V100-32 in a DGX-2: 1.5 TB for 16 of them."""

ADAM: Final = optax.adam(1e-4)


def roomy(text: str) -> Cluster:
    """A cluster whose hosts have the memory of a DGX-2's."""
    machine = parse(text)
    nodes = tuple(
        dataclasses.replace(
            node, kind=dataclasses.replace(node.kind, host_memory_bytes=HOST_BYTES)
        )
        for node in machine.nodes
    )
    return dataclasses.replace(machine, nodes=nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A model, its batch and a cluster.

    Attributes:
        name: key in the output.
        asked: seconds that it may take.
        model, options: of ``whalejax.models``.
        batch: samples of the global batch.
        cluster: makes the cluster.
        optimizer: an optax transformation.
        precision: as in ``wh.plan``.
    """

    name: str
    asked: float
    model: str
    options: dict[str, Any]
    batch: int
    cluster: Callable[[], Cluster]
    optimizer: Any = ADAM
    precision: str = "bf16"


QUESTIONS: Final = (
    Question(
        name="gpt3_1024",
        asked=1.0,
        model="gpt-small",
        options={
            "layers": 96,
            "embed": 12_288,
            "heads": 96,
            "mlp": 49_152,
            "sequence": 2048,
            "vocab": 51_200,
            "scan_layers": True,
            "annotated": False,
        },
        batch=1536,
        cluster=lambda: parse("a100-80:128x8"),
    ),
    Question(
        name="llama405b_8192",
        asked=2.0,
        model="llama-405b",
        options={},
        batch=2048,
        cluster=lambda: parse("h100:1024x8"),
    ),
    Question(
        name="moe10t_512",
        asked=2.0,
        model="moe",
        options={
            "layers": 48,
            "embed": 4096,
            "heads": 32,
            "mlp": 16_384,
            "experts": 1536,
            "sequence": 512,
            "vocab": 50_000,
            "scan_layers": True,
            "annotated": False,
            "param_dtype": "bfloat16",
        },
        batch=4096,
        cluster=lambda: roomy("v100-32:64x8"),
        optimizer=optax.adafactor(1e-3),
        precision="f32",
    ),
    Question(
        name="mixed_512",
        asked=3.0,
        model="llama-70b",
        options={},
        batch=1024,
        cluster=lambda: parse("a100-80:32x8+h100:32x8"),
    ),
    Question(
        name="mixed3_512",
        asked=3.0,
        model="llama-70b",
        options={},
        batch=1024,
        cluster=lambda: parse("v100-32:16x8+a100-80:32x8+h100:16x8"),
    ),
    Question(
        name="bert_8",
        asked=0.2,
        model="bert-large",
        options={},
        batch=256,
        cluster=lambda: parse("h100:8"),
    ),
)


UNROLLED: Final = (("bert-large", 256, 4.0), ("t5-large", 128, 8.0))
"""Models without a scan, their batches, and the seconds that a plan may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds of capturing, searching and writing the plan; the search and the plan.

    ``runs`` and ``changed`` are seconds of a plan that runs, and of other questions.
    """

    traced: float
    searched: float
    planned: float
    runs: float | None
    changed: dict[str, float | None]
    search: WideSearch
    plan: Plan


def answer(question: Question, rounds: int) -> Answer:
    """Ask a question; of several rounds the least counts."""
    job = models.job(question.model, **question.options)
    model = jobs.abstract_model(job)
    batch = jax.eval_shape(lambda: job.batch_at(0, question.batch))
    start = time.perf_counter()
    adapter = at_precision(adapt(model, job.loss_fn), question.precision)
    captured = capture(adapter, batch, num_micro_batches=1, batch_axes=0)
    traced = time.perf_counter() - start
    machine = question.cluster()
    request = Request(
        optimizer=optimizer_bytes(adapter, question.optimizer),
        cast_bytes=0.5 if question.precision == "bf16" else 1.0,
        num_devices=machine.num_devices,
    )
    searched, planned = [], []
    for _ in range(max(1, rounds)):
        gc.collect()
        graph = dataclasses.replace(captured.graph)  # nothing is known of a copy
        start = time.perf_counter()
        search = WideSearch(graph, machine, request)
        search.run()
        searched.append((time.perf_counter() - start, search))
        graph = dataclasses.replace(captured.graph)
        gc.collect()
        start = time.perf_counter()
        plan = decide_any(
            graph,
            machine,
            request,
            precision=question.precision,
            batch=batch_leaves(batch),
        )
        planned.append((time.perf_counter() - start, plan))
    asked = functools.partial(
        wh.plan,
        job.loss_fn,
        model,
        batch,
        optimizer=question.optimizer,
        cluster=machine,
        precision=question.precision,
    )
    return Answer(
        runs=_seconds(asked, 1),
        changed=_changed(
            functools.partial(asked, runnable=False), question, machine, rounds
        ),
        traced=traced,
        searched=min(seconds for seconds, _ in searched),
        planned=min(seconds for seconds, _ in planned),
        search=searched[0][1],
        plan=planned[0][1],
    )


def _changed(
    ask: Callable[[], Plan], question: Question, machine: Cluster, rounds: int
) -> dict[str, float | None]:
    """Least seconds of other questions to a plan, each asked for the first time."""
    changes: dict[str, dict[str, Any]] = {
        "remat": {"remat": "full"},
        "cluster": {"cluster": f"h200:{machine.num_devices // 8}x8"},
        "batch": {"batch": 2 * question.batch},
    }
    found: dict[str, list[float | None]] = {name: [] for name in changes}
    for _ in range(max(1, rounds)):
        plan = ask()
        for name, change in changes.items():
            found[name].append(_seconds(functools.partial(plan.what_if, **change), 1))
    return {
        name: min((s for s in several if s is not None), default=None)
        for name, several in found.items()
    }


def _seconds(ask: Callable[[], Plan], rounds: int) -> float | None:
    """Least seconds of a question, or None where nothing fits."""
    found = []
    for _ in range(max(1, rounds)):
        gc.collect()
        start = time.perf_counter()
        try:
            ask()
        except PlanError:
            return None
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Ask every question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="questions whose name holds this")
    parser.add_argument("--rounds", type=int, default=3, help="the least counts")
    arguments = parser.parse_args()
    found: dict[str, float | None] = {}
    for question in QUESTIONS:
        if arguments.only not in question.name:
            continue
        given = answer(question, arguments.rounds)
        plan, tally = given.plan, given.search.tally
        print(
            f"{question.name:15} {given.searched:6.2f} s (asked {question.asked:g}), "
            f"with its plan {given.planned:.2f} s, traced in {given.traced:.2f} s: "
            f"{plan.time.step_seconds:.3g} s a step: {plan.candidates[0].layout}",
            flush=True,
        )
        name = question.name
        found[name] = round(given.searched, 3)
        found[f"{name}_plan"] = round(given.planned, 3)
        found[f"{name}_runs"] = given.runs and round(given.runs, 3)
        for change, seconds in given.changed.items():
            found[f"{name}_what_if_{change}"] = seconds and round(seconds, 3)
        found[f"{name}_covered"] = tally.covered
        found[f"{name}_gap"] = tally.gap
        if name == "llama405b_8192":
            found["trace_405b"] = round(given.traced, 3)
    for model, batch, asked in UNROLLED:
        key = f"{model.replace('-', '_')}_plan"
        if arguments.only in key:
            found[key] = _unrolled(model, batch, arguments.rounds)
            print(f"{key:15} {found[key]} s (asked {asked:g})", flush=True)
    print(json.dumps(found))


def _unrolled(name: str, batch: int, rounds: int) -> float | None:
    """Least seconds of a plan that runs, of a model with abstract parameters."""
    job = models.job(name)
    ask = functools.partial(
        wh.plan,
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        optimizer=ADAM,
        cluster="h100:8",
        precision="bf16",
    )
    seconds = _seconds(ask, rounds)
    return seconds and round(seconds, 3)


if __name__ == "__main__":
    main()
