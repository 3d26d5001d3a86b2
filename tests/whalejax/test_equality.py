"""Every lowering against one device: gradients, loss, statistics, updates, state.

The cases are a subset of the matrix in ``tests/cases.py`` that makes every pair of
choices, one of the features in ``tests/features.py`` and one of the pipelines in
``tests/stages.py``; ``scripts/matrix.py`` runs all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import whalejax as wh
import whalejax.models as models
from tests import cases, features, stages, workers
from tests.cases import Case
from tests.compilations import count_compilations
from tests.equality import (
    OneDevice,
    build,
    check,
    compiled,
    distance,
    numbers,
    on_one_device,
    run_case,
    worst_leaf,
)
from whalejax.adapters.base import adapt
from whalejax.meshes.jax_mesh import partition_spec


# The matrix.


class Records:
    """What the cases that are to be tested give; they run while tests wait."""

    def __init__(self, chosen: list[Case]) -> None:
        # The other cores run other files.
        files = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        jobs = max(1, (os.cpu_count() or 1) // files)
        self.coming = workers.run_all(chosen, jobs=jobs)
        self.known: dict[str, workers.Record] = {}

    def of(self, case: Case) -> workers.Record:
        """The record of a case, as soon as it is there."""
        while case.id not in self.known:
            record = next(self.coming)
            self.known[record["id"]] = record
        return self.known[case.id]


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest) -> Iterator[Records]:
    """Starts the cases that are to be tested, on all cores that are free."""
    chosen: list[Case] = []
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        here = item.path == request.path
        if here and item.originalname == test_equals_one_device.__name__:
            case = item.callspec.params["case"]
            assert isinstance(case, Case)
            chosen.append(case)
    found = Records(chosen)
    yield found
    found.coming.close()


SUBSETS: Final = (
    (cases, cases.pairwise()),
    (features, features.pairwise()),
    (stages, stages.subset()),
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.id,
            marks=[] if case in source.default() else [pytest.mark.full],
        )
        for source, several in SUBSETS
        for case in several
    ],
)
def test_equals_one_device(case: Case, records: Records) -> None:
    record = records.of(case)
    print(record)
    assert not record["problems"], "\n".join(record["problems"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "seconds", "expected"),
    [
        ("--no_such_flag_at_all=1", 600.0, "no_such_flag_at_all"),
        (workers.environment()["XLA_FLAGS"], 0.1, "no answer in 0.1 s"),
        ("", 600.0, "devices"),
    ],
    ids=["dies", "hangs", "raises"],
)
def test_a_process_in_trouble_fails_its_case(
    flags: str, seconds: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for c in cases.full_matrix() if c.id == "mlp/dp/8/m1/float64")
    changed = {**workers.environment(), "XLA_FLAGS": flags}
    monkeypatch.setattr(workers, "environment", lambda: changed)
    monkeypatch.setattr(workers, "SECONDS_PER_CASE", seconds)
    (record,) = workers.run_all([case], jobs=1)
    assert record["id"] == case.id
    assert not record["ok"]
    assert expected in record["problems"][0]


def test_the_subset_makes_every_pair_that_the_matrix_makes() -> None:
    every = {pair for case in cases.full_matrix() for pair in cases.pairs(case)}
    made = {pair for case in cases.pairwise() for pair in cases.pairs(case)}
    assert made == every
    assert len(every) > 300
    assert len(cases.pairwise()) < len(cases.full_matrix()) / 10


@pytest.mark.parametrize(
    ("default", "several", "makes"),
    [
        (cases.default(), cases.pairwise(), cases.choices),
        (features.default(), features.pairwise(), features.switched_on),
        (stages.default(), stages.subset(), stages.kinds),
    ],
    ids=["cases", "features", "stages"],
)
def test_what_runs_by_default_makes_every_choice(
    default: tuple[Case, ...],
    several: tuple[Case, ...],
    makes: Callable[[Case], frozenset[Any]],
) -> None:
    every = {one for case in several for one in makes(case)}
    assert {one for case in default for one in makes(case)} == every


def test_the_features_make_every_pair_on_every_number_of_devices() -> None:
    found = {one for case in features.covering() for one in features.interactions(case)}
    assert len({case.id for case in features.whole()}) == len(features.whole())
    on = [
        ("attention", "ring"),
        ("chunks", "on"),
        ("sequence", "on"),
        ("context", "on"),
    ]
    on += [("remat", "full"), ("remat", "dots"), ("precision", "bf16")]
    on += [("precision", "f16"), ("offload", "optimizer"), ("offload", "activations")]
    on += [("offload", "params"), ("offload", "optimizer-params")]
    for devices, (one, other) in itertools.product(
        cases.DEVICES, itertools.combinations(on, 2)
    ):
        both = (devices, one, other) in found or (devices, other, one) in found
        # On two devices there is no room for two axes.
        apart = devices == 2 and {one, other} == {("sequence", "on"), ("context", "on")}
        assert both != (one[0] == other[0] or apart), (devices, one, other)
    alone = {one for one in found if one[1] == "alone"}
    waiting = 1  # activations wait where something is computed again
    assert len(alone) == len(cases.DEVICES) * (len(on) - waiting)
    few, every = (
        {one for case in some for one in features.meetings(case)}
        for some in (features.pairwise(), features.covering())
    )
    assert few == every


def test_the_matrix_is_whole() -> None:
    made = cases.full_matrix()
    assert len({case.id for case in made}) == len(made)
    possible = len(cases.MODELS) * len(cases.KINDS)
    possible *= len(cases.STRATEGIES) * len(cases.DEVICES)
    assert len(made) + sum(cases.skipped().values()) == possible
    assert len(made) > possible / 2


# The measure sees what is wrong.


@functools.cache
def _mlp(num_micro_batches: int = 1) -> OneDevice:
    job = next(m for m in cases.MODELS if m.name == "mlp").job(
        "float32", annotated=False
    )
    return on_one_device(job, num_micro_batches)


def test_a_wrong_loss_is_seen() -> None:
    def doubled(params: Any, batch: Any) -> Any:
        return 2.0 * _mlp().job.loss_fn(params, batch)

    one = dataclasses.replace(
        _mlp(), job=dataclasses.replace(_mlp().job, loss_fn=doubled)
    )
    found = check(one, mesh={"data": 8})
    assert found.worst == pytest.approx(1.0, rel=1e-3)
    assert found.loss_error == pytest.approx(1.0, rel=1e-3)
    assert found.update_error < 1e-6


@pytest.mark.full
def test_another_partition_into_micro_batches_is_seen() -> None:
    one = dataclasses.replace(_mlp(2), num_micro_batches=4)
    # The mean over equal parts is the same, whatever the parts.
    assert check(one, mesh={"data": 8}).worst < 1e-6
    batch = dict(_mlp().batch)
    batch["labels"] = np.roll(batch["labels"], 1)
    assert check(dataclasses.replace(_mlp(), batch=batch), mesh={"data": 8}).worst > 0.1


def test_a_plan_that_shards_too_little_is_seen() -> None:
    def strategy(name: str) -> cases.Strategy:
        return next(s for s in cases.STRATEGIES if s.name == name)

    lazy = dataclasses.replace(strategy("tensor"), mesh=strategy("dp").mesh)
    model = next(m for m in cases.MODELS if m.name == "mlp")
    case = Case(
        model=model,
        strategy=dataclasses.replace(lazy, default=None),
        devices=2,
        num_micro_batches=1,
        dtype="float64",
    )
    verdict = run_case(case, steps=1)
    assert verdict.problems == (
        "batch sharded over ['data'], expected []",
        "params sharded over [], expected ['tensor']",
        "gradients sharded over [], expected ['tensor']",
        "optimizer sharded over [], expected ['tensor']",
    )


def test_a_second_compilation_is_seen() -> None:
    one = _mlp()
    step = compiled(one.job, one.model, mesh={"data": 2}, devices=2)
    with count_compilations() as compiles:
        for key in (one.key, jax.random.key(0, impl="rbg")):
            step(step.init_from(one.model, rng=key), one.batch)
    assert compiles.count == 2


def test_the_measure() -> None:
    want = [np.full(4, 3.0), np.zeros(4), np.full(4, 1e-9)]
    got = [w + 1e-6 for w in want]
    # The root of the mean square of norms 6, 0 and 2e-9, a thousandth of it.
    floor = 1e-3 * np.sqrt(36.0 / 3.0)
    worst, path = worst_leaf(got, want, ["a", "b", "c"])
    assert worst == pytest.approx(2e-6 / floor)
    assert path == "b"
    assert worst_leaf(got[:1], want[:1], ["a"])[0] == pytest.approx(2e-6 / 6.0)
    assert worst_leaf([np.array([np.nan])], [np.ones(1)], ["a"]) == (np.inf, "a")


# Marks in programs that JAX has traced before.


WRAPPERS: Final[dict[str, Callable[..., Any]]] = {
    "jit": jax.jit,
    "nnx.jit": nnx.jit,
    "remat": lambda loss_fn: jax.jit(jax.checkpoint(loss_fn)),
    "nnx.remat": nnx.remat,
}
TRACED_BEFORE: Final = (
    "mlp",
    "gpt",
    "gpt-scan-remat",
    "bert",
    "resnet",
    "linen",
    "moe-top-2",
)
WRAPPED_BEFORE: Final = ("mlp", "gpt-scan-remat", "moe-top-2")  # one of each kind


@functools.cache
def _annotated(name: str) -> tuple[wh.Job, Any, wh.Plan]:
    """An annotated job of the matrix, its model, and the plan of its plain loss."""
    model = next(m for m in cases.MODELS if m.name == name)
    job = model.job("float32", annotated=True)
    built = build(job)
    return job, built, compiled(job, built, mesh={"tensor": 8}).plan


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        pytest.param(
            name,
            wrapper,
            marks=()
            if wrapper == "nnx.jit" or name in WRAPPED_BEFORE
            else pytest.mark.full,
        )
        for name, wrapper in itertools.product(TRACED_BEFORE, WRAPPERS)
    ],
)
def test_marks_are_found_after_a_run_on_one_device(name: str, wrapper: str) -> None:
    job, model, plain = _annotated(name)
    wrapped = WRAPPERS[wrapper](job.loss_fn)
    rng = (jax.random.key(1),) if adapt(model, job.loss_fn).takes_rng else ()
    jax.block_until_ready(wrapped(model, job.batch_at(0), *rng))
    job = dataclasses.replace(job, loss_fn=wrapped)
    plan = compiled(job, model, mesh={"tensor": 8}).plan
    marks = {mark for region in plan.compute for mark in region.marks}
    part = name.startswith("moe")
    assert marks == ({"split(axis=experts)"} if part else {"replicate()", "split()"})
    assert plan.partition_specs() == plain.partition_specs()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_loss_equals_one_device(wrapper: str) -> None:
    one = _mlp()
    job = dataclasses.replace(one.job, loss_fn=WRAPPERS[wrapper](one.job.loss_fn))
    found = check(dataclasses.replace(one, job=job), mesh={"data": 2, "tensor": 4})
    assert found.error < 1e-5


# Losses, optimizers, precision.


def _weighted_loss(params: Any, batch: Any) -> Any:
    """A mean over the valid tokens, with metrics."""
    errors = (batch["x"] @ params["w"]) ** 2
    valid = batch["valid"].astype(errors.dtype)
    total, weight = jnp.sum(errors * valid), jnp.sum(valid)
    inputs = jnp.sum(jnp.abs(batch["x"]).mean(axis=-1, keepdims=True) * valid) / weight
    metrics = {"inputs": inputs, "tokens": jnp.sum(batch["valid"])}
    return wh.WeightedLoss(total, weight), wh.Aux(metrics=metrics)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"data": 8}, {"fsdp": 8}, {"data": 2, "tensor": 4}])
@pytest.mark.parametrize("count", [1, 4])
def test_weighted_losses_divide_by_the_weight_of_all_samples(
    mesh: dict[str, int], count: int
) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 6, 24)).astype(np.float32)
    w = random.standard_normal((24, 16)).astype(np.float32)
    # The first samples have few valid tokens, and so have some micro-batches.
    valid = (
        random.random((32, 6, 16)) < (0.1 + 0.3 * (np.arange(32) % 4))[:, None, None]
    )
    batch = {"x": x, "valid": valid}
    job = wh.Job(_weighted_loss, lambda key: {"w": jnp.asarray(w)}, batch, None, 32)
    model = job.make_model(None)
    step = compiled(job, model, mesh=mesh, num_micro_batches=count)
    state = step.init_from(model)
    evaluated = step.eval(state, batch)
    state, metrics = step(state, batch)

    wide, tokens = x.astype(np.float64) @ w, int(np.sum(valid))
    expected = {
        "loss": np.sum(wide**2 * valid) / tokens,
        "inputs": np.sum(np.abs(x).mean(-1, keepdims=True) * valid) / tokens,
        "tokens": tokens,
    }
    for found in (metrics, evaluated):
        assert {k: float(v) for k, v in found.items()} == pytest.approx(expected, 1e-5)
    gradient = np.einsum("bsi,bso->io", x, 2 * wide * valid) / tokens
    np.testing.assert_allclose(
        np.asarray(state.opt_state["gradient"]["w"]), gradient, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("count", [1, 4])
def test_metrics_of_a_plain_mean_are_of_the_whole_batch(count: int) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        return jnp.mean(y**2), {"largest": jnp.max(jnp.abs(y)), "samples": y.shape[0]}

    x = np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32)
    job = wh.Job(loss_fn, lambda key: {"w": jnp.ones((24, 8))}, {"x": x}, None, 32)
    model = job.make_model(None)
    step = compiled(job, model, mesh={"data": 8}, num_micro_batches=count)
    _, metrics = step(step.init_from(model), {"x": x})
    sums = np.abs(x.sum(-1, dtype=np.float64))
    assert float(metrics["largest"]) == pytest.approx(sums.max(), rel=1e-5)
    assert int(metrics["samples"]) == 32
    assert float(metrics["loss"]) == pytest.approx(np.mean(sums**2), rel=1e-5)


OPTIMIZERS: Final = {
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "lamb": optax.lamb(1e-2),
}


LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "zero-1": {"mesh": {"data": 8}, "zero": 1},
    "hsdp": {"mesh": {"data": 2, "fsdp": 4}, "zero": 2},
    "fsdp-tensor": {"mesh": {"fsdp": 2, "tensor": 4}, "default": "split"},
}


def _layout(name: str) -> dict[str, Any]:
    """The options of ``wh.plan`` for a layout."""
    options = dict(LAYOUTS[name])
    if "default" in options:
        options["default"] = wh.split()
    return options


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion  # optax promotes its step count
@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("adamw, clipped", "zero-1"),
        ("adamw, clipped", "hsdp"),
        ("adamw, clipped", "fsdp-tensor"),
        ("adafactor", "fsdp-tensor"),
        ("lamb", "hsdp"),
    ],
)
def test_updates_equal_those_of_one_device(optimizer: str, layout: str) -> None:
    one, tx = _mlp(), OPTIMIZERS[optimizer]
    step = compiled(one.job, one.model, optimizer=tx, **_layout(layout))
    state = step.init_from(one.model)

    @jax.jit
    def advance(params: Any, opt_state: Any, batch: Any) -> Any:
        gradients = jax.grad(one.job.loss_fn)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = one.model, tx.init(one.model)
    for number in range(3):
        state, _ = step(state, one.job.batch_at(number))
        params, opt_state = advance(params, opt_state, one.job.batch_at(number))
    moved = worst_leaf(numbers(one.model), numbers(params), one.paths)[0]
    assert moved > 1e-2
    # Adam divides by the root of squares: where a gradient is all rounding, so is its
    # update, hence more than the tolerance of gradients.
    assert worst_leaf(numbers(state.params), numbers(params), one.paths)[0] < 1e-4


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"mesh": {"data": 8}, "zero": 2, "num_micro_batches": 2}),
        ("mlp", {"mesh": {"data": 2, "tensor": 4}, "default": wh.split()}),
        ("gpt", {"mesh": {"fsdp": 8}}),
    ],
    ids=["mlp-zero-2", "mlp-data-tensor", "gpt-fsdp"],
)
def test_bfloat16_computes_narrow_and_keeps_masters(
    name: str, options: dict[str, Any]
) -> None:
    exact = _exact(name)
    narrow = on_one_device(exact.job, model=exact.model, precision="bf16")
    step = compiled(exact.job, exact.model, precision="bf16", **options)
    state, metrics = step(step.init_from(exact.model), exact.batch)
    gradients = jax.tree.leaves(state.opt_state["gradient"])
    assert {str(g.dtype) for g in gradients} == {"float32"}
    assert {str(p.dtype) for p in jax.tree.leaves(state.params)} == {"float32"}
    assert str(metrics["loss"].dtype) == "float32"
    error = distance(numbers(gradients), exact.gradients)
    own = distance(narrow.gradients, exact.gradients)
    assert 1e-4 < own < 0.1, "one device is either not narrow or broken"
    assert 1e-4 < error <= 1.5 * own


@functools.cache
def _exact(name: str) -> OneDevice:
    """A model whose dtype is open: it computes in that of its parameters."""
    layers = {"layers": 1} if name == "gpt" else {}
    job = models.job(f"{name}-test", annotated=False, batch_size=32, **layers)
    return on_one_device(job)


# The state: how it starts, where it lies, what is donated.


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mlp", "zero-1"),
        ("mlp", "hsdp"),
        ("linen", "fsdp-tensor"),
        ("gpt-padded", "hsdp"),
    ],
)
def test_a_state_is_born_in_its_layout(name: str, layout: str) -> None:
    model = next(m for m in cases.MODELS if m.name == name)
    job = model.job("float32", annotated=False)
    key = jax.random.key(3)
    built = build(job, seed=3)
    step = compiled(job, built, optimizer=optax.adam(1e-3), **_layout(layout))
    born = step.init(job.make_model, rng=key)
    placed = step.init_from(built, rng=key)
    for found, wanted in zip(
        jax.tree.leaves((born.params, born.rest, born.opt_state)),
        jax.tree.leaves((placed.params, placed.rest, placed.opt_state)),
        strict=True,
    ):
        assert found.sharding == wanted.sharding
    worst, path = worst_leaf(
        numbers(born.params), numbers(placed.params), step.adapter.param_paths
    )
    assert worst < 1e-6, path
    _check_layout(step, born)


def _check_layout(step: Any, state: Any) -> None:
    """Every array lies as the plan says; the sums of Adam lie as optimizer state."""
    by_path = {leaf.path: leaf for leaf in step.plan.leaves}
    paths = step.adapter.param_paths
    adam = state.opt_state[0]
    split = 0
    for tree, spec_name in (
        (state.params, "param_spec"),
        (adam.mu, "optimizer_spec"),
        (adam.nu, "optimizer_spec"),
    ):
        for path, leaf in zip(paths, jax.tree.leaves(tree), strict=True):
            spec = partition_spec(getattr(by_path[path], spec_name))
            assert leaf.sharding == NamedSharding(step.mesh, spec), path
            (shape,) = {shard.data.shape for shard in leaf.addressable_shards}
            split += shape != leaf.shape
    assert split > len(paths)


@pytest.mark.relaxed_promotion  # optax promotes its step count
def test_a_step_consumes_its_state_and_nothing_of_the_users() -> None:
    job = _mlp().job
    model = build(job)
    before = [np.array(leaf) for leaf in jax.tree.leaves(model)]
    for mesh in ({"data": 8}, {"fsdp": 8}):
        step = compiled(job, model, mesh=mesh, optimizer=optax.adam(1e-3))
        state = step.init_from(model)
        new, _ = step(state, job.batch_at(0))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.opt_state))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new.params))
        for leaf, was in zip(jax.tree.leaves(model), before, strict=True):
            assert not leaf.is_deleted()
            np.testing.assert_array_equal(leaf, was)


def test_arrays_already_in_their_layout_survive_too() -> None:
    job = _mlp().job
    step = compiled(job, _mlp().model, mesh={"data": 8})
    mine = jax.device_put(_mlp().model, step.shardings.params)
    state, _ = step(step.init_from(mine), job.batch_at(0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    changed = zip(jax.tree.leaves(state.params), jax.tree.leaves(mine), strict=True)
    assert all(np.any(np.asarray(new) != np.asarray(old)) for new, old in changed)
