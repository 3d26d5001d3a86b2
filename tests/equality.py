"""The measure that every lowering is held to: its gradient against one device's.

``|g - g1| <= tol * max(|g1|, 1e-3 * RMS of all leaves' norms)`` for every leaf, with
the norms Euclidean. The reference runs the user's own loss on one device over the same
micro-batches, with no part of the lowering in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh
from whalejax import hlo
from whalejax.adapters import Adapter, adapt
from whalejax.losses import Job
from whalejax.train import TrainStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case gave.

    Attributes:
        plan: the plan.
        worst: the largest error of a leaf, in units of the measure.
        worst_path: the leaf.
        loss_error: relative error of the loss.
        compilations: programs compiled over the steps.
        collectives: of the compiled step.
        step: the compiled step.
    """

    plan: wh.Plan
    worst: float
    worst_path: str
    loss_error: float
    compilations: int
    collectives: hlo.Collectives
    step: TrainStep


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer whose state is the gradient it was given; parameters stay."""

    def init(params: Any) -> Any:
        return {"gradient": jax.tree.map(jnp.zeros_like, params)}

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return jax.tree.map(jnp.zeros_like, gradients), {"gradient": gradients}

    return optax.GradientTransformation(init, update)


def reference(
    adapter: Adapter, params: Any, rest: Any, batch: Any, key: Any, count: int
) -> tuple[Any, list[np.ndarray]]:
    """Loss and flat gradient on one device, micro-batch ``m`` being ``m::count``."""

    def total(params: Any, rest: Any, part: Any, index: int) -> Any:
        folded = adapter.fold_rest(adapter.fold_rest(rest, 0), index)
        rng = jax.random.fold_in(jax.random.fold_in(key, 0), index)
        result = adapter.loss(params, folded, part, rng if adapter.takes_rng else None)
        fresh = adapter.restore_keys(result.rest, rest)
        return result.total, (result.weight, fresh)

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=3)
    sums: Any = None
    weight: Any = 0.0
    loss: Any = 0.0
    for index in range(count):
        part = jax.tree.map(lambda x: jnp.asarray(x[index::count]), batch)  # noqa: B023
        (value, (w, rest)), grads = run(params, rest, part, index)
        sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        weight, loss = weight + w, loss + value
    flat = [np.asarray(g / weight.astype(g.dtype)) for g in jax.tree.leaves(sums)]
    return loss / weight, flat


def worst_leaf(
    got: list[np.ndarray], want: list[np.ndarray], paths: tuple[str, ...]
) -> tuple[float, str]:
    """The largest error in units of the measure, and its leaf."""
    norms = [float(np.linalg.norm(g.astype(np.float64))) for g in want]
    floor = 1e-3 * float(np.sqrt(np.mean(np.square(norms))))
    errors = [
        float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))
        / max(norm, floor)
        for a, b, norm in zip(got, want, norms, strict=True)
    ]
    index = int(np.argmax(errors))
    return errors[index], paths[index]


class _Compiles(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.count += text.startswith("Compiling jit(_advance)")


@contextmanager
def count_compilations() -> Iterator[_Compiles]:
    """Counts the programs that the training step compiles."""
    handler = _Compiles()
    logger = logging.getLogger("jax._src.interpreters.pxla")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def check(
    job: Job,
    *,
    devices: int = 8,
    mesh: Mapping[str, int] | None = None,
    zero: int | None = None,
    num_micro_batches: int = 1,
    default: Any = None,
    precision: str = "f32",
    steps: int = 1,
    seed: int = 0,
) -> Outcome:
    """Plan a job on some devices, run it, and compare its gradient with one device's.

    Args:
        job: the model.
        devices: how many.
        mesh, zero, num_micro_batches, default, precision: as for ``wh.plan``.
        steps: how many steps to run for counting compilations.
        seed: of the parameters.
    """
    key = jax.random.key(seed)
    model = job.make_model(key)
    batch = job.batch_at(0)
    optimizer = keep_gradient()
    plan = wh.plan(
        job.loss_fn,
        model,
        batch,
        optimizer=optimizer,
        cluster=f"h100:{devices}",
        mesh=mesh,
        zero=zero,
        num_micro_batches=num_micro_batches,
        default=default,
        precision=precision,
    )
    step = wh.compile(
        plan,
        job.loss_fn,
        model,
        optimizer=optimizer,
        devices=jax.devices()[:devices],
    )
    adapter = adapt(model, job.loss_fn)
    params, rest = adapter.take_apart(model)
    want_loss, want = reference(adapter, params, rest, batch, key, num_micro_batches)
    state = step.init_from(model, rng=key)
    with count_compilations() as compiles:
        state, metrics = step(state, batch)
        got = [np.asarray(g) for g in jax.tree.leaves(state.opt_state["gradient"])]
        for _ in range(steps - 1):
            state, _ = step(state, batch)
    worst, path = worst_leaf(got, want, adapter.param_paths)
    found = float(metrics["loss"])
    return Outcome(
        plan=plan,
        worst=worst,
        worst_path=path,
        loss_error=abs(found - float(want_loss)) / max(abs(float(want_loss)), 1e-30),
        compilations=compiles.count,
        collectives=hlo.collectives(step.lower(state).compile().as_text()),
        step=step,
    )
