"""Searches losses that couple samples for plans that silently train something else.

Each loss of ``tests/coupling_losses.py`` is planned, compiled and run for a step on
four virtual devices under data parallelism with 1, 2 and 4 micro-batches, fsdp with 2,
shares of 3 and 1, and two stages with 2. Its loss and gradient are compared in float64
with those of the full batch on one device, or the plan is refused. A loss is separable
if on one device the micro-batches of three batches give the results of the full batch;
a loss with random numbers is compared with one device at equal micro-batches.
``coupling.json`` beside this script has the results; without options the script reads
it, and repeats a few runs, chosen by --seed.

    python scripts/bench_coupling.py [--refresh] [--only TEXT] [--seed N] [--fresh N]

``--refresh`` runs what the file lacks (with ``--only``, all whose names contain TEXT);
it can be interrupted. The last line is one JSON object:

    losses, runs            numbers of stored losses and runs
    refused, unplanned      runs that are refused because samples are coupled, or for
                            another reason, such as too few parameters for two stages
    failed                  runs that the compiler rejects
    silent_differences      runs that differ from one device by more than 1e-5; their
                            names are in ``silent``
    worst                   largest relative difference of all others
    separable               pairs of loss and micro-batches that one device splits
    needless_refusals       part of these that is refused; their names in ``needless``
    consent_differences     runs with per_micro_batch=True that differ from one device
                            with as many micro-batches, of ``consents`` runs
    fresh_runs, fresh_unlike    repeated runs, and those with another outcome
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from checkout import commit
from paired import eight_devices


eight_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import whalejax as wh  # noqa: E402
from tests import coupling_losses as zoo  # noqa: E402
from whalejax.capture.split_checks import DependentSamplesError  # noqa: E402


jax.config.update("jax_enable_x64", True)

FILE: Final = Path(__file__).with_name("coupling.json")
TOLERANCE: Final = 1e-5
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "data": {"mesh": {"data": 4}},
    "fsdp": {"mesh": {"fsdp": 4}},
    "shares": {"shares": [3, 1], "cluster": "cpu:2"},
    "stages": {"mesh": {"stage": 2}},
}
RUNS: Final = (
    ("data", 1),
    ("data", 2),
    ("data", 4),
    ("fsdp", 2),
    ("shares", 4),
    ("stages", 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=12)
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    runs = record.setdefault("runs", {})
    if args.refresh:
        for name in [n for n in names() if args.only in n]:
            if name not in runs or args.only:
                runs[name] = outcome(name)
                jax.clear_caches()
                print(name, json.dumps(runs[name]), flush=True)
                record.update(commit=commit(), jax=jax.__version__)
                FILE.write_text(json.dumps(record, indent=1) + "\n")
    sample = random.Random(args.seed).sample([*names()], args.fresh)
    changed = [n for n in sample if not has_same_outcome(runs.get(n), outcome(n))]
    print(json.dumps({**summary(runs), "fresh_runs": sample, "fresh_unlike": changed}))


def names() -> Iterator[str]:
    """Yields the name of every run: ``loss/layout/micro-batches``."""
    for loss in zoo.LOSSES:
        for layout, count in RUNS:
            yield f"{loss}/{layout}/{count}"
        yield f"{loss}/consent/2"


def outcome(name: str) -> dict[str, Any]:
    """Runs one case and returns its outcome.

    Args:
        name: Name of ``names``.
    """
    loss, layout, text = name.split("/")
    function, count = zoo.LOSSES[loss], int(text)
    row: dict[str, Any] = {}
    if layout == "consent":
        options: dict[str, Any] = {"mesh": {"data": 4}, "per_micro_batch": True}
    else:
        options = dict(LAYOUTS[layout])
        row["separable"] = count > 1 and is_separable(function, count)
    options.setdefault("cluster", "cpu:4")
    if layout != "shares":
        options["num_micro_batches"] = count
    try:
        plan, actual = run_step(function, options)
    except DependentSamplesError:
        return {**row, "outcome": "refused"}
    except (wh.WhaleError, TypeError, ValueError, ZeroDivisionError) as error:
        return {**row, "outcome": "unplanned", "why": str(error).splitlines()[0][:90]}
    except jax.errors.JaxRuntimeError as error:
        return {**row, "outcome": "failed", "why": str(error).splitlines()[0][:90]}
    if takes_key(function):
        opts = {"cluster": "cpu:1", "num_micro_batches": count, "per_micro_batch": True}
        if layout != "consent":
            del opts["per_micro_batch"]
        _, expected = run_step(function, opts)
    else:
        parts = count if layout == "consent" else 1
        expected = reference_step(function, zoo.batch(), parts, plan.group_size)
    return {**row, "outcome": "ran", "difference": difference(actual, expected)}


def takes_key(function: Callable[..., Any]) -> bool:
    """Returns whether a loss draws random numbers."""
    return len(inspect.signature(function).parameters) == 3


Result = tuple[Any, Any]
"""A loss and its gradient."""


def run_step(
    function: Callable[..., Any], options: dict[str, Any]
) -> tuple[Any, Result]:
    """Returns the plan, and the loss and gradient of one step under it."""
    params, batch, tx = zoo.parameters(), zoo.batch(), optax.sgd(1.0)
    plan = wh.plan(function, params, batch, optimizer=tx, **options)
    devices = jax.devices()[: plan.num_devices]
    step = wh.compile(plan, function, params, optimizer=tx, devices=devices)
    state, metrics = step(step.init_from(params, rng=jax.random.key(7)), batch)
    after = jax.tree.map(np.asarray, state.model)
    gradient = jax.tree.map(lambda a, b: np.asarray(a) - b, params, after)
    return plan, (float(metrics["loss"]), gradient)


def reference_step(
    function: Callable[..., Any], batch: Any, count: int, group: int
) -> Result:
    """Returns loss and gradient on one device, as the mean over micro-batches."""

    def loss_and_weight(params: Any, part: Any) -> Any:
        result = function(params, part)
        if isinstance(result, wh.WeightedLoss):
            return result.total, jnp.asarray(result.weight, jnp.float64)
        return result, jnp.float64(1)

    def micro_batch(leaf: Any, number: int) -> Any:
        rows = leaf.reshape(-1, count, group, *leaf.shape[1:])[:, number]
        return rows.reshape(-1, *leaf.shape[1:])

    params, grad = zoo.parameters(), jax.value_and_grad(loss_and_weight, has_aux=True)
    results = [
        grad(params, {k: micro_batch(v, number) for k, v in batch.items()})
        for number in range(count)
    ]
    weight = sum(w for (_, w), _ in results)
    total = sum(t for (t, _), _ in results) / weight
    gradient = jax.tree.map(lambda *g: sum(g) / weight, *(g for _, g in results))
    return float(total), gradient


def difference(actual: Result, expected: Result) -> float:
    """Returns the larger of the relative differences of loss and gradient.

    Values that are NaN in both are equal; if only one is NaN, the result is infinite.
    """
    pairs = [
        (np.atleast_1d(np.asarray(a, float)), np.atleast_1d(np.asarray(b, float)))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]
    if any((np.isnan(a) != np.isnan(b)).any() for a, b in pairs):
        return float("inf")
    loss, *leaves = [(np.nan_to_num(a), np.nan_to_num(b)) for a, b in pairs]
    return max(_relative_distance([loss]), _relative_distance(leaves))


def _relative_distance(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    distance = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    size = np.sqrt(sum(np.sum(np.square(b)) for _, b in pairs))
    return float(distance / max(size, 1e-6))


def is_separable(function: Callable[..., Any], count: int) -> bool:
    """Returns whether micro-batches on one device equal the full batch."""
    if takes_key(function):
        return False
    for seed in range(3):
        batch = zoo.batch(seed)
        try:
            full = reference_step(function, batch, 1, 1)
            differences = [
                difference(reference_step(function, batch, count, group), full)
                for group in (1, 2, 4)
                if zoo.BATCH % (count * group) == 0
            ]
        except (TypeError, ValueError, ZeroDivisionError):
            return False
        if np.isnan(full[0]) or min(differences) > TOLERANCE:
            return False
    return True


def has_same_outcome(stored: Any, fresh: Any) -> bool:
    """Returns whether a run has the stored outcome."""
    if stored is None or stored["outcome"] != fresh["outcome"]:
        return stored is None
    are_right = [run.get("difference", 0.0) <= TOLERANCE for run in (stored, fresh)]
    return are_right[0] == are_right[1]


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Returns the totals of all stored runs."""
    plain = {n: r for n, r in runs.items() if "/consent/" not in n}
    consent = {n: r for n, r in runs.items() if "/consent/" in n}
    wrong = [n for n, r in plain.items() if r.get("difference", 0.0) > TOLERANCE]
    right = [
        r["difference"]
        for n, r in plain.items()
        if "difference" in r and n not in wrong
    ]
    separable = {n: r for n, r in plain.items() if r.get("separable")}
    needless = [n for n, r in separable.items() if r["outcome"] == "refused"]
    return {
        "losses": len({n.split("/")[0] for n in runs}),
        "runs": len(plain),
        "refused": sum(r["outcome"] == "refused" for r in plain.values()),
        "unplanned": sum(r["outcome"] == "unplanned" for r in plain.values()),
        "failed": [n for n, r in runs.items() if r["outcome"] == "failed"],
        "silent_differences": len(wrong),
        "silent": wrong,
        "worst": max(right, default=0.0),
        "separable": len(separable),
        "needless_refusals": len(needless) / max(1, len(separable)),
        "needless": needless,
        "consent_differences": sum(
            r.get("difference", 0.0) > TOLERANCE for r in consent.values()
        ),
        "consents": sum("difference" in r for r in consent.values()),
    }


if __name__ == "__main__":
    main()
