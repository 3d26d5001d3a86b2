"""Losses that couple samples: whether any plan trains something else without a word.

Each loss of ``tests/coupling_losses.py`` is planned, compiled and run for a step on
four virtual devices under data parallelism with 1, 2 and 4 micro-batches, fsdp with 2,
shares of 3 and 1, and two stages with 2. Its loss and gradient are compared in float64
with those of the whole batch on one device, or the plan is refused. A loss is separable
where on one device the micro-batches of three batches give what the whole batch does;
one that draws random numbers is compared with one device at equal micro-batches. What
was run is kept in ``coupling.json`` beside this script; without options that is read,
and a few runs, drawn by --seed, are made anew. The last line is one JSON object:

    losses, runs            how many are kept
    refused, unplanned      runs that are refused because samples are coupled, or for
                            another reason, such as too few parameters for two stages
    failed                  runs that the compiler does not take
    silent_differences      runs that differ from one device by more than 1e-5, and the
                            names of these runs
    worst                   the largest relative difference of all others
    separable               pairs of loss and micro-batches that one device splits
    needless_refusals       part of these that is refused
    consent_differences     runs with per_micro_batch=True that differ from one device
                            with as many micro-batches
    fresh_runs, fresh_unlike    runs made anew, and those with another outcome

    python scripts/bench_coupling.py [--refresh] [--only TEXT] [--seed N] [--fresh N]

``--refresh`` runs what is not kept yet (with ``--only``, all whose names hold it); it
can be interrupted.
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
    """Run what was asked for, and print all that is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=12)
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    runs = kept.setdefault("runs", {})
    if given.refresh:
        for name in [n for n in names() if given.only in n]:
            if name not in runs or given.only:
                runs[name] = outcome(name)
                jax.clear_caches()
                print(name, json.dumps(runs[name]), flush=True)
                kept.update(commit=commit(), jax=jax.__version__)
                FILE.write_text(json.dumps(kept, indent=1) + "\n")
    drawn = random.Random(given.seed).sample([*names()], given.fresh)
    unlike = [n for n in drawn if not alike(runs.get(n), outcome(n))]
    print(json.dumps({**summary(runs), "fresh_runs": drawn, "fresh_unlike": unlike}))


def names() -> Iterator[str]:
    """Every run, as ``loss/layout/micro-batches``."""
    for loss in zoo.LOSSES:
        for layout, count in RUNS:
            yield f"{loss}/{layout}/{count}"
        yield f"{loss}/consent/2"


def outcome(name: str) -> dict[str, Any]:
    """What becomes of one run.

    Args:
        name: As ``names`` gives it.
    """
    loss, layout, text = name.split("/")
    function, count = zoo.LOSSES[loss], int(text)
    found: dict[str, Any] = {}
    if layout == "consent":
        options: dict[str, Any] = {"mesh": {"data": 4}, "per_micro_batch": True}
    else:
        options = dict(LAYOUTS[layout])
        found["separable"] = count > 1 and is_separable(function, count)
    options.setdefault("cluster", "cpu:4")
    if layout != "shares":
        options["num_micro_batches"] = count
    try:
        plan, got = stepped(function, options)
    except DependentSamplesError:
        return {**found, "outcome": "refused"}
    except (wh.WhaleError, TypeError, ValueError, ZeroDivisionError) as error:
        return {**found, "outcome": "unplanned", "why": str(error).splitlines()[0][:90]}
    except jax.errors.JaxRuntimeError as error:
        return {**found, "outcome": "failed", "why": str(error).splitlines()[0][:90]}
    if takes_key(function):
        same = {"cluster": "cpu:1", "num_micro_batches": count, "per_micro_batch": True}
        if layout != "consent":
            del same["per_micro_batch"]
        _, want = stepped(function, same)
    else:
        parts = count if layout == "consent" else 1
        want = accumulated(function, zoo.batch(), parts, plan.group_size)
    return {**found, "outcome": "ran", "difference": difference(got, want)}


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a loss draws random numbers."""
    return len(inspect.signature(function).parameters) == 3


Result = tuple[Any, Any]
"""A loss and its gradient."""


def stepped(
    function: Callable[..., Any], options: dict[str, Any]
) -> tuple[Any, Result]:
    """The plan, and the loss and gradient of one step under it."""
    params, batch, tx = zoo.parameters(), zoo.batch(), optax.sgd(1.0)
    plan = wh.plan(function, params, batch, optimizer=tx, **options)
    devices = jax.devices()[: plan.num_devices]
    step = wh.compile(plan, function, params, optimizer=tx, devices=devices)
    state, metrics = step(step.init_from(params, rng=jax.random.key(7)), batch)
    after = jax.tree.map(np.asarray, state.model)
    gradient = jax.tree.map(lambda a, b: np.asarray(a) - b, params, after)
    return plan, (float(metrics["loss"]), gradient)


def accumulated(
    function: Callable[..., Any], batch: Any, count: int, group: int
) -> Result:
    """Loss and gradient on one device, as the mean over micro-batches."""

    def parts(params: Any, part: Any) -> Any:
        result = function(params, part)
        if isinstance(result, wh.WeightedLoss):
            return result.total, jnp.asarray(result.weight, jnp.float64)
        return result, jnp.float64(1)

    def cut(leaf: Any, number: int) -> Any:
        rows = leaf.reshape(-1, count, group, *leaf.shape[1:])[:, number]
        return rows.reshape(-1, *leaf.shape[1:])

    params, one = zoo.parameters(), jax.value_and_grad(parts, has_aux=True)
    several = [
        one(params, {k: cut(v, number) for k, v in batch.items()})
        for number in range(count)
    ]
    weight = sum(w for (_, w), _ in several)
    total = sum(t for (t, _), _ in several) / weight
    gradient = jax.tree.map(lambda *g: sum(g) / weight, *(g for _, g in several))
    return float(total), gradient


def difference(got: Result, want: Result) -> float:
    """The larger of the relative differences of loss and gradient.

    What is NaN in both is alike; what is NaN in one is as far apart as can be.
    """
    pairs = [
        (np.atleast_1d(np.asarray(a, float)), np.atleast_1d(np.asarray(b, float)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    if any((np.isnan(a) != np.isnan(b)).any() for a, b in pairs):
        return float("inf")
    loss, *leaves = [(np.nan_to_num(a), np.nan_to_num(b)) for a, b in pairs]
    return max(_apart([loss]), _apart(leaves))


def _apart(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    away = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    size = np.sqrt(sum(np.sum(np.square(b)) for _, b in pairs))
    return float(away / max(size, 1e-6))


def is_separable(function: Callable[..., Any], count: int) -> bool:
    """Whether micro-batches of one device give what whole batches do."""
    if takes_key(function):
        return False
    for seed in range(3):
        batch = zoo.batch(seed)
        try:
            whole = accumulated(function, batch, 1, 1)
            parts = [
                difference(accumulated(function, batch, count, group), whole)
                for group in (1, 2, 4)
                if zoo.BATCH % (count * group) == 0
            ]
        except (TypeError, ValueError, ZeroDivisionError):
            return False
        if np.isnan(whole[0]) or min(parts) > TOLERANCE:
            return False
    return True


def alike(kept: Any, fresh: Any) -> bool:
    """Whether a run has the outcome that is kept."""
    if kept is None or kept["outcome"] != fresh["outcome"]:
        return kept is None
    right = [run.get("difference", 0.0) <= TOLERANCE for run in (kept, fresh)]
    return right[0] == right[1]


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """What all kept runs come to."""
    own = {n: r for n, r in runs.items() if "/consent/" not in n}
    consent = {n: r for n, r in runs.items() if "/consent/" in n}
    wrong = [n for n, r in own.items() if r.get("difference", 0.0) > TOLERANCE]
    right = [
        r["difference"] for n, r in own.items() if "difference" in r and n not in wrong
    ]
    separable = {n: r for n, r in own.items() if r.get("separable")}
    needless = [n for n, r in separable.items() if r["outcome"] == "refused"]
    return {
        "losses": len({n.split("/")[0] for n in runs}),
        "runs": len(own),
        "refused": sum(r["outcome"] == "refused" for r in own.values()),
        "unplanned": sum(r["outcome"] == "unplanned" for r in own.values()),
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
