"""The measure that every lowering is held to: its gradient against one device's.

``|g - g1| <= tol * max(|g1|, 1e-3 * RMS of all leaves' norms)`` for every leaf, with
the norms Euclidean. The reference runs the user's own loss on one device over the same
micro-batches, with no part of the lowering in between.

In 16 bits no two programs agree: there the gradient is compared with that in float32,
and may be half as far again from it as one device's own in 16 bits is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import whalejax as wh
from tests import cases, stages
from tests.cases import Case, Dtype, Precision
from tests.compilations import count_compilations
from whalejax.adapters.base import adapt
from whalejax.jobs import split_settings
from whalejax.lowering.loss_scale import FIRST_SCALE
from whalejax.lowering.spmd import optimizer_offload
from whalejax.runtime.train_step import TrainStep
from whalejax.user_code.losses import Job


FLOAT64_TOLERANCE: Final = 1e-10
FLOAT32_TOLERANCE: Final = 1e-5
NOISE_FACTOR: Final = 3.0
NARROW_FACTOR: Final = 1.5
PIECE_BYTES: Final = 4096  # of state in host memory: several pieces at test size
_MODELS: Final = {m.name: m for m in (*cases.MODELS, *stages.MODELS)}
LEARNING_RATE: Final = 0.125  # a power of two: multiplying by it rounds nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDevice:
    """What one device computes for a job, one micro-batch after the other.

    Attributes:
        job: whose loss.
        model: the user's own model, with real arrays.
        batch: the global batch.
        key: the run's random key.
        num_micro_batches: micro-batch ``m`` holds samples ``m::num_micro_batches``.
        paths: of the gradient's leaves.
        loss: the mean loss.
        gradients: of the mean loss, in flat order.
        metrics: what the loss reports, averaged over the micro-batches; by their
            weights where the loss has some.
        rest: numbers that are not trained, after the step, in flat order.
    """

    job: Job
    model: Any
    batch: Any
    key: Any
    num_micro_batches: int
    paths: tuple[str, ...]
    loss: float
    gradients: list[np.ndarray]
    metrics: Mapping[str, float]
    rest: list[np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case gave, every error relative.

    Attributes:
        plan: the plan.
        worst: the largest error of a gradient leaf, in units of the measure.
        worst_path: the leaf.
        distance: of the gradients as one vector.
        loss_error: of the loss.
        metric_error: the largest of a metric.
        rest_error: the largest of what is not trained (running statistics), in units
            of the measure.
        update_error: the largest of a parameter after the update, against the update
            computed from the gradients that the step itself reports.
        compilations: how often the step's programs were compiled over the steps: the
            one of all stages, or of those of each stage the one that was most often.
        recompiled: what was compiled after the first step.
        step: the compiled step.
    """

    plan: wh.Plan
    worst: float
    worst_path: str
    distance: float
    loss_error: float
    metric_error: float
    rest_error: float
    update_error: float
    compilations: int
    recompiled: tuple[str, ...]
    step: TrainStep

    @property
    def error(self) -> float:
        """The largest of all errors."""
        return max(
            self.worst,
            self.loss_error,
            self.metric_error,
            self.rest_error,
            self.update_error,
        )


def keep_gradient() -> optax.GradientTransformation:
    """Gradient descent whose state is the gradient that it was given."""

    def init(params: Any) -> Any:
        return {"gradient": jax.tree.map(jnp.zeros_like, params)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        scaled = jax.tree.map(lambda g: g * -LEARNING_RATE, updates)
        return scaled, {"gradient": updates}

    return optax.GradientTransformation(init, update)


def build(job: Job, seed: int = 0) -> Any:
    """The job's model, initialised in one compiled program."""
    # The same for all models: it does not mind what is no module.
    return nnx.jit(job.make_model)(jax.random.key(seed))


def on_one_device(
    job: Job,
    num_micro_batches: int = 1,
    *,
    model: Any = None,
    seed: int = 0,
    permuted: bool = False,
    precision: Precision = "f32",
) -> OneDevice:
    """Run a job on one device.

    Args:
        job: the model, its loss and its batches.
        num_micro_batches: how many to accumulate.
        model: built from the seed where left out.
        seed: of the parameters and the run.
        permuted: order the samples inside each micro-batch differently.
        precision: what to cast float32 to before it is computed with.
    """
    model = build(job, seed) if model is None else model
    run = one_device(job, model, seed=seed, precision=precision)
    return run(num_micro_batches, permuted)


def one_device(
    job: Job, model: Any, *, seed: int = 0, precision: Precision = "f32"
) -> Callable[[int, bool], OneDevice]:
    """What ``on_one_device`` runs, of micro-batches and whether samples are permuted.

    Runs with as many micro-batches share what is compiled for them.
    """
    batch, key = job.batch_at(0), jax.random.key(seed)
    adapter = adapt(model, job.loss_fn)
    params, before = adapter.take_apart(model)
    scale = FIRST_SCALE if precision == "f16" else 1.0

    def total(params: Any, rest: Any, part: Any, index: Any) -> Any:
        folded = adapter.fold_rest(adapter.fold_rest(rest, 0), index)
        rng = jax.random.fold_in(jax.random.fold_in(key, 0), index)
        params, part = _narrowed(params, precision), _narrowed(part, precision)
        result = adapter.loss(params, folded, part, rng if adapter.takes_rng else None)
        fresh = adapter.restore_keys(result.rest, rest)
        count_of = result.weight if result.weighted else jnp.ones_like(result.weight)
        metrics = {k: v * count_of for k, v in result.metrics.items()}
        value = jnp.asarray(result.total)
        value = value if precision == "f32" else value.astype(jnp.float32)
        return value * scale, (result.weight, metrics, fresh)

    compiled_once = jax.jit(jax.value_and_grad(total, has_aux=True))

    def run(count: int, permuted: bool) -> OneDevice:
        sums: Any = None
        rest = before
        for index in range(count):
            part = jax.tree.map(lambda x: _part(x, index, count, permuted), batch)  # noqa: B023
            (value, (weight, metrics, rest)), grads = compiled_once(
                params, _counted_once(rest, before), part, index
            )
            # NumPy adds without compiling a program for each shape.
            added = jax.tree.map(np.asarray, (value, weight, metrics, grads))
            sums = added if sums is None else jax.tree.map(np.add, sums, added)
        loss, weight, metrics, grads = sums
        return OneDevice(
            job=job,
            model=model,
            batch=batch,
            key=key,
            num_micro_batches=count,
            paths=adapter.param_paths,
            loss=float(loss / weight / scale),
            gradients=[
                np.asarray(g / weight.astype(g.dtype) / scale)
                for g in jax.tree.leaves(grads)
            ],
            metrics={name: float(value / weight) for name, value in metrics.items()},
            rest=numbers(rest),
        )

    return run


def _counted_once(rest: Any, before: Any) -> Any:
    """What is counted in whole numbers is counted once a step."""
    return jax.tree.map(
        lambda new, old: old if jnp.issubdtype(new.dtype, jnp.integer) else new,
        rest,
        before,
    )


def _narrowed(tree: Any, precision: Precision) -> Any:
    """A tree with its float32 leaves in what is computed in."""
    if precision == "f32":
        return tree
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float16
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == "float32" else x, tree)


def _part(leaf: Any, index: int, count: int, permuted: bool) -> Any:
    rows = np.asarray(leaf)[index::count]
    return rows[np.random.default_rng(7).permutation(len(rows))] if permuted else rows


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree that are numbers and not random keys."""
    leaves = jax.tree.leaves(tree)
    keys = jax.dtypes.prng_key
    return [np.asarray(x) for x in leaves if not jnp.issubdtype(x.dtype, keys)]


def worst_leaf(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], paths: Sequence[str]
) -> tuple[float, str]:
    """The largest error in units of the measure, and its leaf.

    Args:
        got, want: leaves in the same order.
        paths: their names.
    """
    norms = [float(np.linalg.norm(g.astype(np.float64))) for g in want]
    floor = 1e-3 * float(np.sqrt(np.mean(np.square(norms))))
    errors = [
        float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))
        / max(norm, floor, np.finfo(np.float64).tiny)
        for a, b, norm in zip(got, want, norms, strict=True)
    ]
    index = int(np.argmax(errors))
    # A leaf that is no number must not pass for small.
    broken = [i for i, error in enumerate(errors) if not np.isfinite(error)]
    if broken:
        return float("inf"), paths[broken[0]]
    return errors[index], paths[index]


def distance(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Of two gradients as vectors, relative to the second's length."""
    wide = [
        (a.astype(np.float64), b.astype(np.float64))
        for a, b in zip(got, want, strict=True)
    ]
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in wide)
    return float(np.sqrt(difference / sum(float(np.sum(b**2)) for _, b in wide)))


def free_links(num_devices: int) -> wh.Cluster:
    """Devices between which nothing takes time.

    At test size a real machine would rather leave a tensor axis idle; here the search
    shards whatever divides work, which is what the tests are about.
    """
    cluster = wh.cluster(f"h100:{num_devices}")
    kind = dataclasses.replace(cluster.slowest, op_overhead_seconds=0.0)
    return dataclasses.replace(
        cluster,
        nodes=tuple(dataclasses.replace(node, kind=kind) for node in cluster.nodes),
        levels=tuple(
            dataclasses.replace(
                level, latency_seconds=0.0, bandwidth_bytes_per_second=1e18
            )
            for level in cluster.levels
        ),
    )


def compiled(
    job: Job, model: Any, *, devices: int = 8, optimizer: Any = None, **options: Any
) -> TrainStep:
    """Plan a job on devices with free links, and compile the plan.

    Args:
        job: the loss and the batch.
        model: the model, abstract or real.
        devices: how many.
        optimizer: ``keep_gradient()`` where left out.
        options: of ``wh.plan``; one micro-batch unless they say otherwise.
    """
    optimizer = keep_gradient() if optimizer is None else optimizer
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0),
        optimizer=optimizer,
        **{
            "cluster": free_links(devices),
            "num_micro_batches": 1,
            **split_settings(job),
            **options,
        },
    )
    return wh.compile(
        plan,
        job.loss_fn,
        model,
        optimizer=optimizer,
        devices=jax.devices()[:devices],
    )


def peak_bytes(program: Any) -> int:
    """What a compiled program holds on a device; what it gives anew is part of it."""
    stats = program.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + fresh)


def check(one: OneDevice, *, steps: int = 1, **options: Any) -> Outcome:
    """Plan a job on some devices, run it, and compare it with one device.

    Args:
        one: what one device computes.
        steps: how many steps to run for counting compilations.
        options: of ``compiled``.
    """
    options = {"num_micro_batches": one.num_micro_batches, **options}
    step = compiled(one.job, one.model, **options)
    before = numbers(step.adapter.take_apart(one.model)[0])
    state = step.init_from(one.model, rng=one.key)
    with count_compilations() as compiles:
        state, metrics = step(state, one.batch)
        got = [np.asarray(g) for g in jax.tree.leaves(state.opt_state["gradient"])]
        after, rest = numbers(state.params), numbers(state.rest)
        first = compiles.names.copy()
        for _ in range(steps - 1):
            state, _ = step(state, one.batch)
    worst, worst_path = worst_leaf(got, one.gradients, one.paths)
    updated = [p - LEARNING_RATE * g for p, g in zip(before, got, strict=True)]
    return Outcome(
        plan=step.plan,
        worst=worst,
        worst_path=worst_path,
        distance=distance(got, one.gradients),
        loss_error=_relative(metrics["loss"], one.loss),
        metric_error=max(
            (_relative(metrics[k], v) for k, v in one.metrics.items()), default=0.0
        ),
        rest_error=worst_leaf(rest, one.rest, [""] * len(rest))[0] if rest else 0.0,
        update_error=worst_leaf(after, updated, one.paths)[0],
        compilations=compiles.count,
        recompiled=tuple(compiles.names - first),
        step=step,
    )


def _relative(got: Any, want: float) -> float:
    return abs(float(got) - want) / max(abs(want), 1e-30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the errors of a case may be.

    Attributes:
        each: of a gradient leaf, the loss, a metric and the running statistics.
        whole: of the gradients as one vector.
        update: of a parameter after the update.
        noise: what one device differs from itself by, which the others follow from; 0
            in float64.
    """

    each: float
    whole: float
    update: float
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a case passes, and by how much.

    Attributes:
        case: which.
        outcome: what it gave.
        limits: what its errors may be.
        problems: what is wrong, in words.
    """

    case: Case
    outcome: Outcome
    limits: Limits
    problems: tuple[str, ...]


def run_case(case: Case, *, steps: int = 5) -> Verdict:
    """Run one case of the matrix.

    Args:
        case: which; consecutive cases should share model, dtype and micro-batches,
            because their reference is computed once.
        steps: how many steps must make do with one compilation.
    """
    changes = {"annotated": case.strategy.annotated, **_follows(case.precision)}
    name, dtype, count = case.model.name, case.dtype, case.num_micro_batches
    with (
        jax.enable_x64(dtype == "float64"),
        mock.patch.object(optimizer_offload, "PIECE_BYTES", PIECE_BYTES),
    ):
        job, strategy = _job(name, dtype, **changes), case.strategy
        if strategy.schedule:
            job = stages.scheduled(job, strategy.stages, strategy.schedule)
        one = dataclasses.replace(
            _reference(name, dtype, count),
            job=job,
            model=_model(name, dtype, **changes),
        )
        limits = _limits(name, dtype, count, case.precision)
        outcome = check(one, steps=steps, devices=case.devices, **case.options)
    problems = [*_too_large(outcome, limits), *_unlike(case, outcome.step)]
    problems += _unsharded(case, outcome.plan)
    if outcome.compilations != 1:
        problems.append(f"{outcome.compilations} compilations in {steps} steps")
    if outcome.recompiled:
        problems.append(f"compiled again after a step: {outcome.recompiled}")
    return Verdict(case=case, outcome=outcome, limits=limits, problems=tuple(problems))


def _limits(name: str, dtype: Dtype, count: int, precision: Precision) -> Limits:
    if precision != "f32":
        each, whole = _narrow(name, count, precision)
        return Limits(
            each=NARROW_FACTOR * each,
            whole=NARROW_FACTOR * whole,
            update=FLOAT32_TOLERANCE,
            noise=each,
        )
    noise = 0.0 if dtype == "float64" else _noise(name, count)
    limit = FLOAT64_TOLERANCE
    if dtype == "float32":
        limit = max(FLOAT32_TOLERANCE, NOISE_FACTOR * noise)
    return Limits(each=limit, whole=limit, update=limit, noise=noise)


def _too_large(outcome: Outcome, limits: Limits) -> list[str]:
    errors = {
        f"gradient of {outcome.worst_path}": (outcome.worst, limits.each),
        "gradient": (outcome.distance, limits.whole),
        "loss": (outcome.loss_error, limits.each),
        "metrics": (outcome.metric_error, limits.each),
        "running statistics": (outcome.rest_error, limits.each),
        "update": (outcome.update_error, limits.update),
    }
    return [
        f"{what}: error {error:.2e} > {limit:.1e}"
        for what, (error, limit) in errors.items()
        if not error <= limit
    ]


def _unlike(case: Case, step: TrainStep) -> list[str]:
    """Where a step is not what was asked for."""
    plan, options = step.plan, case.options
    kinds = {s.memory_kind for s in jax.tree.leaves(step.shardings.opt_state)}
    ring = {name for _, name in plan.attention} == {"ring"}
    attention = options["attention"]
    hosted = {s.memory_kind for s in jax.tree.leaves(step.shardings.params)}
    pairs = {
        "remat": ({name for _, name in plan.remat} or {"none"}, {case.remat}),
        "ring attention": (ring, None if attention is None else attention == "ring"),
        "sequence_parallel": (plan.sequence_parallel, options["sequence_parallel"]),
        "loss_chunks": (plan.loss_chunks, options["loss_chunks"]),
        "offload": (set(plan.offload), set(case.offload)),
        # Where a model insists on float32 somewhere, all products are asked for.
        "precision": (dict(plan.precisions).get("*", plan.precision), case.precision),
        "something in host memory": (plan.memory.host_bytes > 0, bool(case.offload)),
        "state in host memory": ("pinned_host" in kinds, "optimizer" in case.offload),
        "parameters there": ("pinned_host" in hosted, "params" in case.offload),
        **stages.unlike(case, plan),
    }
    return [
        f"{what} is {found}, expected {wanted}"
        for what, (found, wanted) in pairs.items()
        if wanted is not None and found != wanted
    ]


def _unsharded(case: Case, plan: wh.Plan) -> list[str]:
    """Where a plan does not shard what its strategy is about."""
    # A row-parallel first product shards the batch's features, not its samples.
    samples = case.strategy.default == "split"
    specs = {
        "batch": [leaf.spec[:1] if samples else leaf.spec for leaf in plan.batch],
        "params": [leaf.param_spec for leaf in plan.leaves],
        "gradients": [leaf.gradient_spec for leaf in plan.leaves],
        "optimizer": [leaf.optimizer_spec for leaf in plan.leaves],
    }
    problems = []
    for what, wanted in stages.expected_axes(case).items():
        found = specs[what]
        axes = {axis for spec in found for dim in spec for axis in dim}
        if wanted is not None and axes != wanted:
            problems.append(
                f"{what} sharded over {sorted(axes)}, expected {sorted(wanted)}"
            )
    return problems


def _follows(precision: Precision) -> dict[str, bool]:
    """A model computes in 16 bits if its own dtype is that of its parameters."""
    return {} if precision == "f32" else {"follows": True}


@functools.cache
def _job(name: str, dtype: Dtype, **changes: Any) -> Job:
    return _MODELS[name].job(dtype, **{"annotated": False, **changes})


@functools.cache
def _model(name: str, dtype: Dtype, **changes: Any) -> Any:
    """A model with the numbers of the first of its name, where it has as many."""
    job, first = _job(name, dtype, **changes), _numbers(name)
    empty = nnx.eval_shape(job.make_model, jax.random.key(0))
    leaves, structure = jax.tree.flatten(empty)
    if [x.shape for x in leaves] != [x.shape for x in first]:
        return build(job)
    # What marks and dtypes change is how numbers are used, not which they are.
    casts = [
        x if x.dtype == e.dtype else x.astype(e.dtype)
        for x, e in zip(first, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, casts)


@functools.cache
def _numbers(name: str) -> list[Any]:
    """The leaves of a model as it is built; building takes longer than most cases."""
    return jax.tree.leaves(build(_job(name, "float32")))


@functools.cache
def _one_device(name: str, dtype: Dtype, **changes: Any) -> Any:
    return one_device(_job(name, dtype, **changes), _model(name, dtype, **changes))


@functools.cache
def _reference(name: str, dtype: Dtype, count: int) -> OneDevice:
    one: OneDevice = _one_device(name, dtype)(count, False)
    return one


@functools.cache
def _narrow(name: str, count: int, precision: Precision) -> tuple[float, float]:
    """Errors of one device in 16 bits: the worst leaf's, and of all as one vector."""
    exact, changes = _reference(name, "float32", count), _follows(precision)
    narrow = on_one_device(
        _job(name, "float32", **changes),
        count,
        model=_model(name, "float32", **changes),
        precision=precision,
    )
    pair = narrow.gradients, exact.gradients
    return worst_leaf(*pair, exact.paths)[0], distance(*pair)


@functools.cache
def _noise(name: str, count: int) -> float:
    """What one device differs from itself by in float32.

    Between two runs whose samples are permuted; without dropout, whose masks go by the
    sample's place and would be other ones.
    """
    run = _one_device(name, "float32", **_MODELS[name].quiet)
    one, other = run(count, False), run(count, True)
    return worst_leaf(other.gradients, one.gradients, one.paths)[0]
