"""Whether samples of a loss are independent: proven, or refused where it matters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests import coupling_losses as zoo
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture
from whalejax.capture.separability.proof import Separability
from whalejax.capture.split_checks import DependentSamplesError
from whalejax.elastic.replica_programs import (
    ReplicaPrograms,
    local_cluster,
    planned_replica,
)
from whalejax.state.resume import restore_newest


pytestmark = pytest.mark.relaxed_promotion

TX = optax.sgd(0.1)

SEPARABLE = frozenset(
    """
    memory_bank grpo pairs pairs_by_strides halves halves_by_split penalty_of_the_sum
    penalty_by_vmap straight_through own_tangent over_the_shape
    times_one_over_the_shape over_a_count_of_ones over_a_root_squared
    weighted_by_tokens weighted_by_means weighted_by_the_batch regularised
    regularised_sum mean_of_classes labels_by_position one_hot_by_write labels_by_vmap
    language_model flattened_tokens merged_and_parted heads layers_by_scan
    layers_under_remat recurrent_over_time losses_added_in_a_scan mapped_samples
    mapped_by_vmap both_views_at_once preferences dropout keys_by_sample latents
    diffusion mean_of_own_sequence masked_mean_of_each lengths_of_each last_token
    sorted_within top_scores_of_each convolved pooled group_norm
    mixture_of_all_experts chosen_expert sorted_by_expert sorted_by_expert_top_2
    vector_quantised variational connectionist huber_and_clip branches fixed_loop
    own_solutions teacher hinge nothing_but_weights segments_within_a_sample
    tokens_added_up depth_of_each
    gradient_scaled_by_each binary_weights fused_product fused_product_of_each
    decay_by_a_rule fused_entropy places_squeezed places_behind_a_barrier
    keys_folded_with_labels loops_of_each_on_a_number mapped_in_chunks
    experts_counted_by_one_hot tokens_repeated_for_their_experts
    columns_of_a_triangular_system normal_log_density filters_of_each
    rule_that_calls_its_function
    labels_of_two_joined_batches weights_tiled_over_repeated_samples
    added_sample_by_sample added_by_index weighted_sums_of_a_loop added_in_chunks
    added_in_chunks_by_index added_by_class added_over_the_places keys_split_in_a_loop
    keys_folded_with_the_iteration last_to_first products_from_left_to_right
    weights_above_zero penalty_times_the_weight
    """.split()
)
"""Losses that parts of a batch compute as the whole does, as measured."""


@functools.cache
def captured_loss(name: str) -> Captured:
    return capture(adapt(zoo.parameters(), zoo.LOSSES[name]), zoo.batch())


def proof(name: str, part: int = 8, group: int | None = None) -> Separability:
    return captured_loss(name).independence(part, zoo.BATCH, group)


def planned(name: str, **options: Any) -> wh.Plan:
    given = {"optimizer": TX, "cluster": "cpu:4", **options}
    return wh.plan(zoo.LOSSES[name], zoo.parameters(), zoo.batch(), **given)


# The proof.


@pytest.mark.parametrize("name", zoo.LOSSES)
def test_what_is_separable_is_proven_and_nothing_else(name: str) -> None:
    found = proof(name)
    assert found.proven == (name in SEPARABLE), found.reason


@pytest.mark.parametrize(
    "name",
    [
        *("mean_of_classes", "language_model", "keys_by_sample", "layers_by_scan"),
        "own_solutions",
    ],
)
def test_single_samples_are_parts_too(name: str) -> None:
    assert proof(name, 1).proven


def test_a_loss_that_asks_for_the_number_of_samples_is_compared_at_both() -> None:
    def loss(p: Any, b: Any) -> Any:
        score = zoo.score(p, b)
        return (score if len(b["x"]) > 4 else score**2).mean()

    found = capture(adapt(zoo.parameters(), loss), zoo.batch()).independence
    assert found(8, 16, None).proven
    assert not found(4, 16, None).proven and not found(1, 16, None).proven


def test_single_samples_that_are_squeezed_or_have_other_numbers_are_refused() -> None:
    def squeezed(p: Any, b: Any) -> Any:
        rows = zoo.hidden(p, b).squeeze()
        return (rows.sum(0) / len(b["x"]) * p["scale"]).sum()

    def weighted(p: Any, b: Any) -> Any:
        weights = np.full(zoo.WIDTH, 2.0 if len(b["x"]) == 1 else 1.0)
        return (zoo.hidden(p, b) * weights).mean()

    for loss in (squeezed, weighted):
        found = capture(adapt(zoo.parameters(), loss), zoo.batch()).independence
        assert found(2, 16, None).proven and not found(1, 16, None).proven


def test_a_python_loop_over_samples_is_named_with_its_line() -> None:
    def loss(p: Any, b: Any) -> Any:
        rows = jnp.asarray(b["x"])
        return sum(jnp.square(x @ p["w"]).mean() for x in rows) / len(rows)

    with pytest.raises(DependentSamplesError) as error:
        wh.plan(
            loss,
            zoo.parameters(),
            zoo.batch(),
            optimizer=TX,
            cluster="cpu:1",
            num_micro_batches=2,
        )
    assert "(test_separability.py:" in str(error.value), error.value
    assert "Use jax.vmap where Python loops over the samples" in str(error.value)


def test_operations_inside_functions_of_jax_have_the_line_of_the_call() -> None:
    def loss(p: Any, b: Any) -> Any:
        rows = zoo.hidden(p, b)
        return -jnp.linalg.slogdet(rows.T @ rows + jnp.eye(rows.shape[1]))[1]

    found = capture(adapt(zoo.parameters(), loss), zoo.batch())
    reason = found.independence(8, 16, None).reason
    assert reason is not None and reason.line.startswith("test_separability.py:")


@pytest.mark.parametrize(
    ("name", "group", "runs"),
    [("grpo", 4, 1), ("pairs", 2, 1), ("pairs_by_strides", 2, 1), ("halves", 1, 2)],
)
def test_groups_are_read_from_the_program(name: str, group: int, runs: int) -> None:
    found = proof(name)
    assert (found.proven, found.group, found.runs) == (True, group, runs)
    assert proof(name, 8, 8).proven == (runs == 1)
    assert not proof(name, 1).proven


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("siglip", "compares samples with each other"),
        ("gae", "loops along the samples"),
        ("summed_after_a_layer_norm", "adds its samples up and does not divide"),
        ("over_one_less", "does not fall as the number of samples grows"),
        ("sign_changes", "is zero or changes its sign"),
        ("mean_and_sum", "depends on the number of samples"),
        ("fixed_key", "draws from a key that is not the loss's rng"),
        ("over_a_counted_mask", "applies max to a sum over the samples"),
        ("gradient_clipped", "has a derivative rule of its own"),
        ("positions", "gives each place in the batch a number of its own"),
        ("quantile", "along"),
    ],
)
def test_reasons_name_what_is_done_and_where(name: str, text: str) -> None:
    reason = proof(name).reason
    assert reason is not None and text in reason.why
    _, first = inspect.getsourcelines(zoo.LOSSES[name])
    if reason.operation and "coupling_losses.py:" in reason.line:
        assert int(reason.line.partition(":")[2]) <= first + 25


def test_callbacks_and_kernels_may_do_anything() -> None:
    def loss(p: Any, b: Any) -> Any:
        shape = jax.ShapeDtypeStruct(b["x"].shape, b["x"].dtype)
        x = jax.pure_callback(lambda x: x - x.mean(0), shape, b["x"])
        return jnp.square(x @ p["w"]).mean()

    found = capture(adapt(zoo.parameters(), loss), zoo.batch()).independence(
        8, 16, None
    )
    assert found.reason is not None and "may do anything" in found.reason.why


class Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: bool = False) -> None:
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(()))
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None

    def __call__(self, x: Any) -> Any:
        self.seen[...] += x.shape[0]
        h = self.drop(jnp.tanh(self.up(x)))
        return h if self.norm is None else self.norm(h)


def test_keys_and_counts_of_a_model_are_no_statistics() -> None:
    def loss(model: Any, b: Any) -> Any:
        return jnp.square(model(b["x"])).mean()

    for norm in (False, True):
        model = Dropping(nnx.Rngs(0), norm)
        found = capture(adapt(model, loss), zoo.batch()).independence(8, 16, None)
        assert found.proven != norm


def test_moving_averages_are_statistics_though_the_loss_reads_none() -> None:
    class Averaging(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mean = self.variable("state", "mean", lambda: jnp.zeros(8))
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
            return nn.Dense(4)(x)

    model, batch = Averaging(), zoo.batch()
    variables = model.init(jax.random.key(0), batch["x"])

    def loss(v: Any, b: Any) -> Any:
        y, updates = model.apply(v, b["x"], mutable=["state"])
        return jnp.square(y).mean(), wh.Aux(variables=updates)

    reason = capture(adapt(variables, loss), batch).independence(8, 16, None).reason
    assert reason is not None and "mean" in reason.why


# Plans.

TABLE = (
    "siglip summed_after_a_layer_norm over_the_batch_as_a_number over_half_the_batch "
    "over_batch_times_length times_one_over_the_batch gae penalty_of_the_mean"
).split()


@pytest.mark.parametrize("name", TABLE)
def test_asking_for_parts_of_dependent_samples_is_an_error(name: str) -> None:
    for parts in ({"num_micro_batches": 2}, {"shares": [3, 1], "cluster": "cpu:2"}):
        with pytest.raises(DependentSamplesError) as caught:
            planned(name, **parts)
        text = str(caught.value)
        assert text.startswith(tuple(f"{key}=" for key in parts))
        assert "would train something else than the whole batch" in text
        assert "per_micro_batch=True (--per-micro-batch) to use each part's own" in text
    sums = "sum" in name or "over_" in name
    assert (".mean()" in text) == sums


def test_a_consent_and_a_group_change_nothing_of_one_micro_batch() -> None:
    plain = planned("siglip", num_micro_batches=1)
    for given in ({"per_micro_batch": True}, {"group_size": 4}):
        plan = planned("siglip", num_micro_batches=1, **given)
        assert plan == plain and not plan.per_micro_batch and plan.group_size == 1
    with pytest.raises(wh.PlanError, match="group_size is 3, and the batch has 16"):
        planned("siglip", num_micro_batches=1, group_size=3)
    with pytest.raises(wh.PlanError, match="per_micro_batch=True has no effect"):
        planned("mean_of_classes", num_micro_batches=1, per_micro_batch=True)


REMEDIES = {
    "weight_of_at_least_one": ("max (", "Give the plain sum over the samples as the"),
    "penalty_beside_a_weighted_total": (
        "add (",
        "wh.WeightedLoss(total + weight * penalty, weight)",
    ),
    "products_in_the_order_of_einsum": ("einsum (", "such as optimize=False"),
    "one_key_for_all_in_a_loop": (
        "draws from a key that is not the loss's rng",
        "Split the keys from the rng",
    ),
    "rows_by_their_class": ("gather (coupling_losses.py:", "as h[index] does"),
    "decayed_sum": ("scan (", "carries values that are no plain sums"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_refusal_says_what_would_help(name: str) -> None:
    with pytest.raises(DependentSamplesError) as caught:
        planned(name, num_micro_batches=2)
    assert all(text in str(caught.value) for text in REMEDIES[name]), caught.value


def test_single_samples_of_an_einsum_in_another_order_are_told() -> None:
    reason = proof("products_in_the_order_of_einsum", 1).reason
    assert reason is not None and reason.operation == "einsum"


def test_a_sum_over_an_added_number_may_be_a_weighted_loss() -> None:
    def loss(p: Any, b: Any) -> Any:
        counts = b["m"][:, 0]
        return (zoo.score(p, b) * counts).sum() / (counts.sum() + 1e-8)

    given = {"optimizer": TX, "cluster": "cpu:1", "num_micro_batches": 2}
    with pytest.raises(DependentSamplesError) as caught:
        wh.plan(loss, zoo.parameters(), zoo.batch(), **given)
    assert "wh.WeightedLoss(total, weight) with the plain sum" in str(caught.value)


def test_lines_are_the_users_where_a_library_does_it() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=False)(x)

    net, batch = Net(), zoo.batch()
    variables = net.init(jax.random.key(0), batch["x"])

    def normalized(v: Any, b: Any) -> Any:
        y, updates = net.apply(v, b["x"], mutable=["batch_stats"])
        return jnp.square(y).mean(), wh.Aux(variables=updates)

    def ranked(p: Any, b: Any) -> Any:
        return optax.losses.ranking_softmax_loss(zoo.score(p, b), b["r"])

    reasons = [
        capture(adapt(params, loss), batch).independence(8, 16, None).reason
        for params, loss in ((variables, normalized), (zoo.parameters(), ranked))
    ]
    libraries = "flax's normal", "optax's _rank"
    for reason, library in zip(reasons, libraries, strict=True):
        assert reason is not None
        assert re.match(rf"test_separability.py:\d+, in {library}", reason.line), reason


def test_the_planner_takes_no_parts_of_dependent_samples_by_itself() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((4096, 256), jnp.float32)}

    def loss(p: Any, b: Any) -> Any:
        h = jnp.tanh(b["x"] @ p["w"])
        for _ in range(6):
            h = jnp.tanh(h @ p["w"])
        return jnp.square(h).mean()

    def summed(p: Any, b: Any) -> Any:
        return loss(p, b) * (len(b["x"]) / 1000)

    tight: Any = {"optimizer": TX, "cluster": wh.cluster("cpu:1").with_memory(24 << 20)}
    tight.update(remat="none", offload=(), attention="gather")
    assert wh.plan(loss, shapes, batch, **tight).num_micro_batches > 1
    with pytest.raises(DependentSamplesError, match="With the whole batch at once, no"):
        wh.plan(summed, shapes, batch, **tight)
    roomy = {**tight, "cluster": wh.cluster("cpu:1").with_memory(1 << 30)}
    assert wh.plan(summed, shapes, batch, **roomy).num_micro_batches == 1


def compared(name: str, plan: wh.Plan, parts: int = 1) -> None:
    """A step of a plan equals one device with so many micro-batches of whole groups."""
    params, batch, loss = zoo.parameters(), zoo.batch(), zoo.LOSSES[name]
    devices = jax.devices()[: plan.num_devices]
    step = wh.compile(plan, loss, params, optimizer=optax.sgd(1.0), devices=devices)
    state, metrics = step(step.init_from(params), batch)
    pieces = [
        {
            k: v.reshape(-1, parts, plan.group_size, *v.shape[1:])[:, m].reshape(
                -1, *v.shape[1:]
            )
            for k, v in batch.items()
        }
        for m in range(parts)
    ]
    several = [jax.value_and_grad(loss)(params, piece) for piece in pieces]
    assert float(metrics["loss"]) == pytest.approx(
        np.mean([float(value) for value, _ in several]), rel=1e-5, abs=1e-6
    )
    gradient = jax.tree.map(lambda *g: sum(g) / parts, *(g for _, g in several))
    for name, wanted in gradient.items():
        found = params[name] - state.model[name]
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"num_micro_batches": 2, "mesh": {"data": 4}},
        {"shares": [3, 1], "cluster": "cpu:2"},
        pytest.param(
            {"num_micro_batches": 2, "mesh": {"stage": 2}}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_groups_of_neighbours_stay_together(options: dict[str, Any]) -> None:
    options = {**options, "optimizer": optax.sgd(1.0)}
    plan = planned("grpo", **options)
    assert plan.group_size == 4
    assert "whole groups of 4 neighbouring samples" in " ".join(plan.notes)
    compared("grpo", plan)


def test_a_slice_with_a_stride_is_computed_on_several_devices() -> None:
    plan = planned("pairs_by_strides", mesh={"data": 4}, optimizer=optax.sgd(1.0))
    compared("pairs_by_strides", plan)


def test_each_part_has_its_own_loss_with_consent() -> None:
    plan = planned(
        "siglip",
        num_micro_batches=4,
        per_micro_batch=True,
        mesh={"data": 4},
        optimizer=optax.sgd(1.0),
    )
    (note,) = [note for note in plan.notes if note.startswith("per_micro_batch=True")]
    assert "each of the micro-batches of 4 of the batch's 16 samples" in note
    assert "compares samples with each other" in note
    compared("siglip", plan, 4)


def test_a_saved_plan_is_compiled_only_as_its_samples_allow(tmp_path: Path) -> None:
    plan = planned("siglip", num_micro_batches=2, per_micro_batch=True)
    plan.save(tmp_path / "kept.json")
    kept = wh.Plan.load(tmp_path / "kept.json")
    assert kept.per_micro_batch and kept == plan
    old = dataclasses.replace(kept, per_micro_batch=False)
    old.save(tmp_path / "old.json")
    with pytest.raises(DependentSamplesError, match="would train something else"):
        wh.compile(
            wh.Plan.load(tmp_path / "old.json"),
            *(zoo.LOSSES["siglip"], zoo.parameters()),
            optimizer=TX,
            devices=jax.devices()[:4],
        )
    grouped = planned("grpo", num_micro_batches=2)
    apart = dataclasses.replace(grouped, group_size=1)
    with pytest.raises(DependentSamplesError, match="groups of 4 neighbouring"):
        wh.compile(
            apart,
            *(zoo.LOSSES["grpo"], zoo.parameters()),
            optimizer=TX,
            devices=jax.devices()[:4],
        )


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("grpo", {"group_size": 3}, "group_size is 3, and the batch has 16 samples"),
        (
            "grpo",
            {"group_size": 8, "num_micro_batches": 4},
            "num_micro_batches=4 makes micro-batches of 4 samples: expected a multiple",
        ),
        ("grpo", {"group_size": 0}, "group_size is 0"),
        ("grpo", {"group_size": 8, "shares": [3, 1]}, r"shares=\[3, 1\] makes micro"),
        ("grpo", {"per_micro_batch": True}, "per_micro_batch=True has no effect"),
        (
            "weighted_by_tokens",
            {"per_micro_batch": True, "group_size": 2},
            "are both given with a wh.WeightedLoss",
        ),
        (
            "sign_changes",
            {"num_micro_batches": 2},
            "has a coefficient that is zero or changes its sign",
        ),
        (
            "siglip",
            {"per_micro_batch": True, "sync_batch_stats": True},
            "Drop one of the two",
        ),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.PlanError, match=text):
        planned(name, **options)


def test_smaller_batches_are_evaluated_in_whole_groups() -> None:
    plan = planned("grpo", num_micro_batches=1)
    devices = jax.devices()[:4]
    step = wh.compile(
        plan, zoo.LOSSES["grpo"], zoo.parameters(), optimizer=TX, devices=devices
    )
    state, batch = step.init_from(zoo.parameters()), zoo.batch()

    def first(count: int) -> Any:
        return {name: x[:count] for name, x in batch.items()}

    wanted = zoo.LOSSES["grpo"](zoo.parameters(), first(8))
    assert float(step.eval(state, first(8))["loss"]) == pytest.approx(
        float(wanted), rel=1e-4, abs=1e-6
    )
    with pytest.raises(wh.PlanError, match="cannot be had from whole batches"):
        step.eval(state, first(6))


# Elastic runs.


def job(name: str, **options: Any) -> wh.Job:
    return wh.Job(
        loss_fn=zoo.LOSSES[name],
        make_model=lambda: zoo.parameters(),
        batch=lambda step, size: zoo.batch(step, size),
        optimizer=TX,
        batch_size=zoo.BATCH,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("mean_of_classes", {}, 16),
        ("siglip", {}, 1),
        ("siglip", {"per_micro_batch": True}, 16),
        ("grpo", {"group_size": 4}, 4),
    ],
)
def test_members_share_what_may_be_shared(
    name: str, options: dict[str, Any], count: int
) -> None:
    found = planned_replica(
        job(name, **options),
        local_cluster(),
        batch=None,
        micro_batches=None,
        precision="f32",
    )
    assert found.count == found.plan.num_micro_batches == count
    with pytest.raises(DependentSamplesError):
        planned_replica(
            job("siglip"), local_cluster(), batch=None, micro_batches=4, precision="f32"
        )


def test_a_resumed_run_goes_on_at_the_next_sample() -> None:
    numbers = wh.Job(
        loss_fn=lambda p, b: jnp.square(b["x"] * p["w"]).mean(),
        make_model=lambda: {"w": jnp.ones(())},
        batch={"x": np.arange(256, dtype=np.float32)},
        optimizer=TX,
        batch_size=16,
    )
    programs = ReplicaPrograms(
        numbers, batch=16, micro_batches=None, precision="f32", seed=0
    )
    (rows,) = programs.batch(4, 32)
    assert np.asarray(rows).tolist() == [*range(32, 48)]


def test_a_resumed_run_says_that_other_parts_draw_other_numbers(tmp_path: Path) -> None:
    def step(name: str, count: int) -> Any:
        plan = planned(name, num_micro_batches=count, cluster="cpu:1")
        given: Any = {"optimizer": TX, "devices": jax.devices()[:1]}
        return wh.compile(plan, zoo.LOSSES[name], zoo.parameters(), **given)

    for name, matters in (("dropout", True), ("mean_of_classes", False)):
        two = step(name, 2)
        two.save(tmp_path / name, two.init_from(zoo.parameters()))
        for count in (2, 4):
            found = restore_newest(step(name, count), [tmp_path / name])
            assert found is not None
            told = [n for n in found.notes if "2 micro-batches per step" in n]
            assert len(told) == (matters and count == 4)
