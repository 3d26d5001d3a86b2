"""Logits of some tokens at a time: found in any loss, exact, and never all at once."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import hlo, models
from whalejax.capture.patterns.named_calls import (
    called_logits,
    makes_logits,
    with_logits,
)
from whalejax.jobs import abstract_model


BATCH, LENGTH, EMBED, VOCAB = 8, 24, 16, 96
ALL = {BATCH // 4 * LENGTH * VOCAB // parts for parts in (1, 2)}
"""Numbers in the logits of a device under data 4 × tensor 2, whatever that shards."""

Function = Callable[..., Any]


def _labels(params: Any, h: Any, y: Any) -> Any:
    logits = h @ params["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _one_hot(params: Any, h: Any, y: Any) -> Any:
    hot = jax.nn.one_hot(y, VOCAB, dtype=h.dtype)
    return -(hot * jax.nn.log_softmax(h @ params["kernel"])).sum(-1).mean()


def _tied(params: Any, h: Any, y: Any) -> Any:
    logits = jnp.einsum("bse,ve->bsv", h, params["kernel"].T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _biased(params: Any, h: Any, y: Any) -> Any:
    logits = jnp.tanh((h @ params["kernel"] + params["bias"]) / 9.0) * 9.0
    right = (logits.argmax(-1) == y).mean()
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    square = jax.nn.logsumexp(logits, -1) ** 2
    masked = jnp.where(y > 3, nats + 1e-2 * square, 0.0)
    return masked.sum() / (y > 3).sum() + 0.0 * right


def _smoothed(params: Any, h: Any, y: Any) -> Any:
    labels = optax.smooth_labels(jax.nn.one_hot(y, VOCAB, dtype=h.dtype), 0.1)
    return optax.softmax_cross_entropy(h @ params["kernel"], labels).mean()


FORMS = {
    "labels": _labels,
    "one hot": _one_hot,
    "tied": _tied,
    "biased": _biased,
    "smoothed": _smoothed,
}


def _whole(step: wh.TrainStep) -> bool:
    """Whether a compiled program has some value of as many numbers as all logits."""
    text = step.lower().compile().as_text()
    shapes = re.findall(r"f32\[([0-9,]+)\]", text)
    return any(math.prod(map(int, shape.split(","))) in ALL for shape in shapes)


def _data(samples: int = BATCH) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    params = {
        "kernel": jnp.asarray(draw.normal(size=(EMBED, VOCAB)), jnp.float32),
        "bias": jnp.asarray(draw.normal(size=(VOCAB,)), jnp.float32),
    }
    h = jnp.asarray(draw.normal(size=(samples, LENGTH, EMBED)), jnp.float32)
    return params, h, jnp.asarray(draw.integers(0, VOCAB, (samples, LENGTH)))


def _step(
    form: Function, samples: int = BATCH, **options: Any
) -> tuple[wh.TrainStep, Any, Any, Any]:
    params, h, y = _data(samples)
    params["mix"] = jnp.eye(EMBED)

    def loss_fn(params: Any, batch: Any) -> Any:
        return form(params, batch["h"] @ params["mix"], batch["y"])

    batch = {"h": h, "y": y}
    plan = wh.plan(
        loss_fn,
        params,
        batch,
        optimizer=optax.sgd(1.0),
        cluster="h100:8",
        **{"zero": 0, "remat": "none", "num_micro_batches": 1, **options},
    )
    step = wh.compile(
        plan, loss_fn, params, optimizer=optax.sgd(1.0), devices=jax.devices()
    )
    gradient = jax.jit(jax.grad(loss_fn))(params, batch)
    return step, params, batch, gradient


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_cut_and_exact(name: str) -> None:
    step, params, batch, expected = _step(
        FORMS[name], mesh={"data": 4, "tensor": 2}, loss_chunks=3, default=wh.split()
    )
    assert "logits in 3 chunks" in str(step.plan)
    assert not _whole(step)
    state, _ = step(step.init_from(params), batch)
    for path, gradient in expected.items():
        change = params[path] - state.params[path]
        assert np.allclose(change, gradient, atol=2e-6), path


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("name", ["labels", "biased"])
def test_one_sample_is_cut_along_its_sequence(name: str) -> None:
    step, params, batch, expected = _step(
        FORMS[name], samples=1, mesh={"tensor": 8}, loss_chunks=3, default=wh.split()
    )
    assert "logits in 3 chunks" in str(step.plan)
    state, _ = step(step.init_from(params), batch)
    for path, gradient in expected.items():
        change = params[path] - state.params[path]
        assert np.allclose(change, gradient, atol=2e-6), path


@pytest.mark.relaxed_promotion
def test_uncut_all_logits_exist() -> None:
    step, *_ = _step(
        _labels, mesh={"data": 4, "tensor": 2}, loss_chunks=1, default=wh.split()
    )
    assert _whole(step)


@pytest.mark.relaxed_promotion
def test_the_kernel_is_reduced_once_for_all_chunks() -> None:
    step, *_ = _step(_labels, mesh={"data": 8}, loss_chunks=4)
    found = hlo.collectives(hlo.read(step.lower().compile().as_text()))
    compiled, planned = Counter[str](), Counter[str]()
    for i in found.instructions:
        compiled[i.kind] += i.payload_bytes * i.count
    for c in step.plan.collectives:
        planned[c.kind] += c.payload_bytes * c.count
    assert compiled == planned


def _summed(params: Any, h: Any, y: Any) -> Any:
    probabilities = jax.nn.softmax(h @ params["kernel"])
    return (probabilities.mean((0, 1)) ** 2).sum() + 0.0 * y.sum()


def _shown(params: Any, h: Any, y: Any) -> Any:
    logits = h @ params["kernel"]
    return jnp.linalg.norm(logits @ params["kernel"].T) + 0.0 * y.sum()


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("form", [_summed, _shown])
def test_where_tokens_meet_nothing_is_cut(form: Function) -> None:
    program = jax.make_jaxpr(form)(*_data())
    called = with_logits(program, [True, True, True, False])
    assert not any(makes_logits(e) for e in called.jaxpr.eqns)
    with pytest.raises(wh.PlanError, match="no logits that can be computed in chunks"):
        _step(form, loss_chunks=2)


def _contrasted(params: Any, h: Any, y: Any) -> Any:
    rows = h.reshape(-1, EMBED)
    scores = rows @ params["kernel"]
    own = jnp.eye(*scores.shape, dtype=bool)
    scores = jnp.where(own, -1e9, scores)
    return optax.softmax_cross_entropy_with_integer_labels(scores, y.ravel()).mean()


def _symmetric(params: Any, h: Any, y: Any) -> Any:
    scores = h[0] @ params["kernel"][:, :LENGTH]
    return jax.nn.logsumexp(scores + scores.T, -1).mean() + 0.0 * y.sum()


def _single(params: Any, h: Any, y: Any) -> Any:
    one = jax.nn.logsumexp(h.mean((0, 1))[None] @ params["kernel"], -1).sum()
    return _labels(params, h, y) + one


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("form", [_contrasted, _symmetric, _single])
def test_odd_losses_keep_their_numbers(form: Function) -> None:
    options = {} if form is _symmetric else {"loss_chunks": 2}
    step, params, batch, expected = _step(form, mesh={"data": 8}, **options)
    state, _ = step(step.init_from(params), batch)
    for path, gradient in expected.items():
        change = params[path] - state.params[path]
        assert np.allclose(change, gradient, atol=1e-5), path


@pytest.mark.relaxed_promotion
def test_scores_of_a_matrix_with_itself_are_left() -> None:
    called = with_logits(
        jax.make_jaxpr(_symmetric)(*_data()), [True, True, True, False]
    )
    assert not any(makes_logits(e) for e in called.jaxpr.eqns)


@pytest.mark.relaxed_promotion
def test_what_is_trained_beside_the_kernel_is_known() -> None:
    program = jax.make_jaxpr(_biased)(*_data())
    called = with_logits(program, [True, True, True, False])
    (equation,) = (e for e in called.jaxpr.eqns if makes_logits(e))
    one = called_logits(equation)
    trained = [v.aval.shape for v, t in zip(one.outside, one.trained, strict=True) if t]
    assert trained == [(VOCAB,)] or trained == [(1, 1, VOCAB)]
    assert one.kernel.aval.shape == (EMBED, VOCAB) and not one.turned


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "loss_chunks is 0; expected a whole number, 1 or more"),
        (True, "loss_chunks is True; expected a whole number"),
        ("all", "loss_chunks is 'all'; expected a whole number"),
    ],
)
def test_other_counts_are_refused(given: Any, said: str) -> None:
    with pytest.raises(wh.PlanError) as error:
        asked(loss_chunks=given)
    assert said in str(error.value)


def asked(**options: Any) -> wh.Plan:
    job = models.job("gpt-test", annotated=False, vocab=8192, sequence=256, layers=2)
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 8)),
        **{
            "cluster": "h100:8",
            "optimizer": optax.sgd(0.1),
            "mesh": {"data": 8},
            "attention": "gather",
            **options,
        },
    )


def test_memory_falls_by_the_logits() -> None:
    plain, cut = (asked(loss_chunks=n, remat="none") for n in (1, 8))
    logits = 256 * 8192 * 4
    saved = plain.memory.total_bytes - cut.memory.total_bytes
    assert saved > 0.8 * logits
    assert cut.time.compute_seconds > plain.time.compute_seconds


@pytest.mark.full
def test_the_planner_takes_it_where_memory_is_short(tmp_path: Path) -> None:
    plain = asked()
    assert plain.loss_chunks == 1
    least = asked(remat="full", loss_chunks=16, zero=0, offload=())
    limit = least.memory.total_bytes + 1000
    cluster = plain.cluster.with_memory(limit)
    tight = asked(cluster=cluster, zero=0, offload=(), margin=0)
    assert tight.loss_chunks > 1
    tight.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == tight
    with pytest.raises(wh.PlanError, match="no plan fits"):
        tight.what_if(loss_chunks=1)


def test_more_chunks_than_tokens_are_refused() -> None:
    with pytest.raises(wh.PlanError) as error:
        asked(loss_chunks=10_000)
    found = re.search(r"the logits of (\d+) tokens", str(error.value))
    assert found is not None and "expected at most " + found[1] in str(error.value)
    most = int(found[1])
    assert asked(loss_chunks=most).loss_chunks == most
    with pytest.raises(
        wh.PlanError, match=rf"of {most // 2} tokens .*\(num_mic.* is 2\)"
    ):
        asked(loss_chunks=most, num_micro_batches=2)
