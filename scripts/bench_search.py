"""Times planning, capture included: ``wh.plan`` of plans that an executor runs.

Questions of realistic size, each asked several times; the least CPU seconds count.

    python scripts/bench_search.py [--only SUBSTRING] [--rounds N]

The last line is one JSON object with, for each question,

    NAME_runs        seconds of ``wh.plan``; of a refusal if nothing fits
    NAME_what_if_remat, NAME_what_if_cluster, NAME_what_if_batch
                     seconds of ``plan.what_if`` after the first plan: with
                     ``remat="full"``, as many H200, twice as many samples; null if
                     nothing fits

and of all of them

    refusal_ratio    seconds of refusing a model of 96 unrolled layers, over those of
                     planning it on devices with enough memory
    what_if_ratio    largest ratio of a ``what_if`` to the first plan
    replan_s         seconds of planning bert_8 again for seven devices, with the caches
                     of the first plan
    missed           names of the missed bars, with the seconds
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import optax  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import jobs, models  # noqa: E402
from whalejax.meshes import Cluster  # noqa: E402
from whalejax.meshes import cluster as parse  # noqa: E402
from whalejax.planner.plan.plan import Plan  # noqa: E402
from whalejax.planner.plan_errors import NothingFits  # noqa: E402


HOST_BYTES: Final = 96 * 2**30
"""Host memory of one V100-32 in a DGX-2: 1.5 TB for 16 of them."""

ADAM: Final = optax.adam(1e-4)


def roomy(text: str) -> Cluster:
    """Returns a cluster whose hosts have the memory of a DGX-2's."""
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
        name: Key in the output.
        bar: Largest allowed seconds.
        model, options: Arguments of ``whalejax.models.job``.
        batch: Samples of the global batch.
        cluster: Function that makes the cluster.
        optimizer: An optax transformation.
        precision: Precision for ``wh.plan``.
        rounds: Largest number of repetitions.
    """

    name: str
    bar: float
    model: str
    options: dict[str, Any]
    batch: int
    cluster: Callable[[], Cluster]
    optimizer: Any = ADAM
    precision: str = "bf16"
    rounds: int = 3


UNROLLED: Final = {
    "layers": 96,
    "embed": 12_288,
    "heads": 96,
    "mlp": 49_152,
    "vocab": 51_200,
    "sequence": 2048,
}
"""GPT-3 without a scan over its layers."""

DENSE_1T: Final = {
    "layers": 128,
    "embed": 25_600,
    "heads": 160,
    "mlp": 102_400,
    "sequence": 2048,
    "vocab": 51_200,
    "scan_layers": True,
    "annotated": False,
}

SMALL: Final = functools.partial(parse, "a100-80:128x8")

QUESTIONS: Final = (
    Question(
        name="gpt3_1024",
        bar=1.0,
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
        bar=1.5,
        model="llama-405b",
        options={},
        batch=2048,
        cluster=lambda: parse("h100:1024x8"),
    ),
    Question(
        name="moe10t_512",
        bar=2.0,
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
        bar=2.0,
        model="llama-70b",
        options={},
        batch=1024,
        cluster=lambda: parse("a100-80:32x8+h100:32x8"),
    ),
    Question(
        name="mixed3_512",
        bar=3.0,
        model="llama-70b",
        options={},
        batch=1024,
        cluster=lambda: parse("v100-32:16x8+a100-80:32x8+h100:16x8"),
    ),
    Question(
        name="bert_8",
        bar=0.3,
        model="bert-large",
        options={},
        batch=256,
        cluster=lambda: parse("h100:8"),
    ),
    Question(
        name="dense_100000",
        bar=3.0,
        model="gpt-small",
        options=DENSE_1T,
        batch=25_000,
        cluster=lambda: parse("h100:12500x8"),
    ),
    Question(
        name="bert_large",
        bar=2.0,
        model="bert-large",
        options={},
        batch=256,
        cluster=lambda: parse("h100:8"),
    ),
    Question(
        name="t5_large",
        bar=4.0,
        model="t5-large",
        options={},
        batch=128,
        cluster=lambda: parse("h100:8"),
    ),
    Question(
        name="gpt3_unrolled",
        bar=8.0,
        model="gpt",
        options=UNROLLED,
        batch=1536,
        cluster=lambda: parse("a100-80:128x8").with_memory(10**13),
        rounds=1,
    ),
)


SEVEN: Final = {"cluster": "h100:7", "allow_idle": True}
"""Options after one of eight devices has failed."""

MOST_WHAT_IF, MOST_REPLAN = 0.3, 0.3
"""Bars of ``what_if_ratio``, and of ``replan_s`` in seconds."""


def planner(question: Question, cluster: Cluster | None = None) -> Callable[..., Plan]:
    """Returns ``wh.plan`` of a question, on another cluster if given."""
    job = models.job(question.model, **question.options)
    return functools.partial(
        wh.plan,
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, question.batch)),
        optimizer=question.optimizer,
        cluster=cluster or question.cluster(),
        precision=question.precision,
    )


def seconds_of(ask: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Returns a question's least CPU seconds, and its answer, if it fits."""
    seconds, answer = [], None
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        try:
            answer = ask()
        except NothingFits:
            answer = None
        seconds.append(time.process_time() - start)
    return min(seconds), answer


def what_ifs(plan: Plan, question: Question) -> Iterator[tuple[str, float | None]]:
    """Yields the seconds of other questions to a plan, each asked once."""
    changes: dict[str, dict[str, Any]] = {
        "remat": {"remat": "full"},
        "cluster": {"cluster": f"h200:{plan.num_devices // 8}x8"},
        "batch": {"batch": 2 * question.batch},
    }
    for name, change in changes.items():
        seconds, answer = seconds_of(functools.partial(plan.what_if, **change), 1)
        yield name, None if answer is None else seconds


def refusal_seconds(rounds: int) -> tuple[float, float]:
    """Returns the seconds of refusing an unrolled model, and of planning it."""
    question = Question(
        name="", bar=0.0, model="gpt", options=UNROLLED, batch=1536, cluster=SMALL
    )
    small, large = SMALL(), SMALL().with_memory(10**13)
    refusing, refusal = seconds_of(planner(question, small), rounds)
    planning, plan = seconds_of(planner(question, large), rounds)
    assert refusal is None, "it fits"
    assert plan is not None, "it does not fit"
    return refusing, planning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="text in the names")
    parser.add_argument("--rounds", type=int, default=3, help="the least counts")
    arguments = parser.parse_args()
    rounds = max(1, arguments.rounds)
    report: dict[str, Any] = {}
    missed: dict[str, float] = {}
    for question in QUESTIONS:
        if arguments.only not in question.name:
            continue
        ask = planner(question)
        seconds, plan = seconds_of(ask, min(rounds, question.rounds))
        report[f"{question.name}_runs"] = round(seconds, 3)
        if seconds > question.bar:
            missed[question.name] = round(seconds, 3)
        text = "nothing fits" if plan is None else plan.candidates[0].layout
        print(f"{question.name:15} {seconds:6.2f} s, at most {question.bar:g}: {text}")
        for name, time_s in () if plan is None else what_ifs(plan, question):
            report[f"{question.name}_what_if_{name}"] = time_s and round(time_s, 3)
            if time_s is not None:
                ratio = max(report.get("what_if_ratio", 0.0), time_s / seconds)
                report["what_if_ratio"] = round(ratio, 3)
        if question.name == "bert_8" and plan is not None:
            replan = functools.partial(plan.what_if, **SEVEN)
            report["replan_s"] = round(seconds_of(replan, 1)[0], 3)
        sys.stdout.flush()
    if arguments.only in "refusal":
        refusing, planning = refusal_seconds(1)
        report["refusal_ratio"] = round(refusing / planning, 3)
    bars = {"refusal_ratio": 1, "what_if_ratio": MOST_WHAT_IF, "replan_s": MOST_REPLAN}
    missed.update({k: report[k] for k, bar in bars.items() if report.get(k, 0) > bar})
    print(json.dumps({**report, "missed": missed}))


if __name__ == "__main__":
    main()
