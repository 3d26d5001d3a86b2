"""The size of a model, the speed of its step and what it costs, from plans."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.api.named_jobs import find_job
from whalejax.jobs import abstract_model, first_batch
from whalejax.planner.plan.report.headline import hourly_price, run_words


def planned(name: str, cluster: str = "h100:8", **options: Any) -> wh.Plan:
    job = find_job(name, {})
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        first_batch(job, options.pop("size", None)),
        optimizer=job.optimizer,
        cluster=cluster,
        **options,
    )


def work_of(plan: wh.Plan) -> Any:
    assert plan.work is not None
    return plan.work


def test_the_work_of_an_mlp_by_hand() -> None:
    net = {"a": jnp.zeros((32, 64)), "b": jnp.zeros((64, 8))}

    def loss(net: Any, x: Any) -> Any:
        return (jnp.tanh(x @ net["a"]) @ net["b"]).mean()

    plan = wh.plan(
        loss, net, jnp.zeros((16, 32)), cluster="h100:2", optimizer=optax.sgd(0.1)
    )
    work = work_of(plan)
    assert work.parameters == work.trained == work.active == 32 * 64 + 64 * 8
    # Forward, the gradient of each weight, and that of the hidden layer.
    a, b = 2 * 16 * 32 * 64, 2 * 16 * 64 * 8
    assert work.step_flops == 2 * a + 3 * b
    assert (work.samples, work.tokens, work.unit) == (16, 0, "samples")


def test_tokens_are_those_that_the_model_reads() -> None:
    work = work_of(planned("gpt-small"))
    assert work.tokens == 32 * 1024  # the batch has 1,025 tokens a sample
    # 6 FLOPs for each parameter and token, without the embeddings' lookup but with
    # their logits, and attention: 12 layers, 2 products, 3 passes.
    dense = 6 * (work.parameters - 1024 * 768) * work.tokens
    scores = 12 * 2 * 3 * 2 * 1024 * 768 * work.tokens
    assert math.isclose(work.step_flops, dense + scores, rel_tol=0.01)


@pytest.mark.parametrize(
    ("tables", "tokens"), [(1, 16 * 24), (2, 0)], ids=["a sequence", "columns"]
)
def test_tokens_need_no_name(tables: int, tokens: int) -> None:
    """A leaf of any name whose embeddings are multiplied is one of tokens."""
    net = {
        "words": jax.ShapeDtypeStruct((256, 32), jnp.float32),
        "up": jax.ShapeDtypeStruct((32 * (tables**2), 64), jnp.float32),
    }

    def sequences(net: Any, batch: Any) -> Any:
        hidden = jnp.tanh(net["words"][batch["ids"][:, :-1]] @ net["up"])
        return (hidden.sum(-1) - batch["ids"][:, 1:].astype(jnp.float32)).mean()

    def columns(net: Any, batch: Any) -> Any:
        read = [net["words"][batch["ids"][:, i]] for i in range(4)]
        return jnp.tanh(jnp.concatenate(read, -1) @ net["up"]).mean()

    loss = sequences if tables == 1 else columns
    batch = {"ids": jax.ShapeDtypeStruct((16, 25), jnp.int32)}
    plan = wh.plan(loss, net, batch, optimizer=optax.sgd(0.1), cluster="h100:2")
    assert work_of(plan).tokens == tokens
    assert plan.throughput().work.unit == ("tokens" if tokens else "samples")


def test_candidates_of_the_same_table_are_no_tokens() -> None:
    net = {
        "items": jax.ShapeDtypeStruct((256, 32), jnp.float32),
        "up": jax.ShapeDtypeStruct((32, 32), jnp.float32),
    }

    def loss(net: Any, batch: Any) -> Any:
        hidden = jnp.tanh(net["items"][batch["seq"]] @ net["up"])
        scores = [(hidden * net["items"][batch[k]]).sum(-1) for k in ("pos", "neg")]
        return jnp.tanh(scores[0] - scores[1]).mean()

    ids = jax.ShapeDtypeStruct((16, 24), jnp.int32)
    batch = {"seq": ids, "pos": ids, "neg": ids}
    plan = wh.plan(loss, net, batch, optimizer=optax.sgd(0.1), cluster="h100:2")
    assert work_of(plan).tokens == 16 * 24


def test_the_work_does_not_depend_on_the_plan() -> None:
    plain = planned("gpt-test", "h100:4")
    other = planned(
        "gpt-test", "h100:4", remat="full", num_micro_batches=2, mesh={"tensor": 2}
    )
    assert plain.work == other.work
    assert other.what_if(attention="ring", loss_chunks=2).work == plain.work
    halved = plain.what_if(batch=plain.batch[0].shape[0] // 2)
    assert work_of(halved).step_flops * 2 == work_of(plain).step_flops
    assert work_of(halved).tokens * 2 == work_of(plain).tokens


def test_products_of_weights_alone_do_not_grow_with_the_batch() -> None:
    net = {"w": jnp.zeros((32, 64)), "a": jnp.zeros((32, 4)), "b": jnp.zeros((4, 64))}
    found = {
        work_of(
            wh.plan(
                lambda net, x: (x @ (net["w"] + net["a"] @ net["b"])).mean(),
                net,
                jnp.zeros((64, 32)),
                cluster="h100:2",
                optimizer=optax.sgd(0.1),
                num_micro_batches=count,
            )
        ).step_flops
        for count in (1, 2, 4)
    }
    assert len(found) == 1


def test_a_transposed_convolution_is_counted_without_zeros() -> None:
    kernel = {"w": jnp.zeros((2, 2, 16, 8))}

    def loss(net: Any, x: Any) -> Any:
        return jax.lax.conv_transpose(
            x, net["w"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).mean()

    plan = wh.plan(
        loss,
        kernel,
        jnp.zeros((8, 10, 10, 16)),
        cluster="h100:2",
        optimizer=optax.sgd(0.1),
    )
    forward = 2 * (8 * 10 * 10) * 16 * (2 * 2 * 8)
    assert work_of(plan).step_flops == 2 * forward  # and the gradient of the kernel


def test_images_are_no_tokens() -> None:
    net = {"w": jnp.zeros((3 * 64, 8))}
    plan = wh.plan(
        lambda net, b: (
            b["inputs"].reshape(-1, 3 * 64).astype(jnp.float32) @ net["w"]
        ).mean(),
        net,
        {"inputs": np.zeros((16, 8, 8, 3), np.uint8)},
        cluster="h100:2",
        optimizer=optax.sgd(0.1),
    )
    assert (work_of(plan).tokens, work_of(plan).unit) == (0, "samples")


def test_a_token_meets_some_of_the_experts() -> None:
    work = work_of(planned("moe", "h100:8"))
    leaves = planned("moe", "h100:8").leaves
    experts = sum(math.prod(x.shape) for x in leaves if ".experts." in x.path)
    assert 0 < experts < work.parameters
    # Two of sixteen experts take a token.
    assert work.active == work.parameters - experts + experts * 2 // 16


def test_frozen_parameters_are_not_trained() -> None:
    net = {"a": jnp.zeros((32, 64)), "b": jnp.zeros((64, 8))}
    plan = wh.plan(
        lambda net, x: (x @ net["a"] @ net["b"]).mean(),
        net,
        jnp.zeros((16, 32)),
        cluster="h100:2",
        optimizer=optax.sgd(0.1),
        trainable="b",
    )
    work = work_of(plan)
    assert (work.parameters, work.trained) == (32 * 64 + 64 * 8, 64 * 8)


def test_throughput_and_utilization_follow_from_the_step() -> None:
    plan = planned("gpt-small", precision="bf16")
    work, speed = work_of(plan), plan.throughput(step_seconds=0.05)
    assert speed.tokens_per_second == work.tokens / 0.05
    assert speed.samples_per_second == 32 / 0.05
    assert speed.device_flops_per_second == work.step_flops / 0.05 / 8
    kind = plan.cluster.kinds[0]
    used = speed.device_flops_per_second / kind.peak_flops("bf16")
    assert math.isclose(speed.utilization, used)
    predicted = plan.throughput()
    assert predicted.step_seconds == plan.time.step_seconds
    assert 0 < predicted.utilization < 1


@pytest.mark.relaxed_promotion
def test_peaks_of_unlike_devices_are_added() -> None:
    plan = planned("gpt-test", "a100-80:2+h100:2", size=32)
    speed = plan.throughput()
    kinds = {kind.name: kind for kind in plan.cluster.kinds}
    peaks = [2 * kinds[n].peak_flops(speed.dtype) for n in ("a100-80", "h100")]
    assert speed.peak_flops_per_second == pytest.approx(sum(peaks))


def test_prices_of_the_user_come_first() -> None:
    listed = hourly_price(wh.cluster("h100:8"))
    assert listed is not None and listed.currency == "USD" and listed.as_of
    own = wh.cluster("h100:8").with_prices({"h100": 2.0})
    price = hourly_price(own)
    assert price is not None and (price.amount, price.currency) == (16.0, "")
    assert hourly_price(wh.cluster("cpu:8")) is None
    partly = wh.cluster("h100:8+a100-80:8").with_prices({"h100": 2.0})
    assert hourly_price(partly) is None  # two currencies cannot be added


def test_the_price_of_a_run() -> None:
    plan = planned("gpt-small", own_cluster())
    speed = plan.throughput(step_seconds=1.0)
    assert speed.step_price == pytest.approx(36.0 / 3600)
    assert speed.million_price == pytest.approx(0.01 * 1e6 / 32768)
    assert speed.run_price(32768 * 100) == pytest.approx(1.0)
    assert speed.run_seconds(32768 * 100) == pytest.approx(100)
    assert run_words(speed, 3_276_800) == "3.28M tokens in 1.7 min for 1"
    with pytest.raises(wh.WhaleError, match="units is 0; expected a number above 0"):
        speed.run_price(0)


def own_cluster() -> Any:
    return wh.cluster("h100:8").with_prices({"h100": 4.5})


def test_the_header_says_them() -> None:
    text = str(planned("gpt-small"))
    assert "model   124M parameters · 32 samples, 32,768 tokens a step" in text
    assert " tokens/s · " in text and "MFU " in text and "(tf32)" in text
    assert "USD a million tokens" in text
    assert "parameters" not in str(dataclasses.replace(planned("mlp"), work=None))[:200]


def test_a_file_of_before_says_what_lacks(tmp_path: Any) -> None:
    plan = dataclasses.replace(planned("mlp"), work=None)
    plan.save(tmp_path / "old.json")
    old = wh.Plan.load(tmp_path / "old.json")
    assert old.work is None and "speed" not in str(old)
    with pytest.raises(wh.PlanError, match="lacks the work of its model"):
        old.throughput()
    new = planned("mlp")
    new.save(tmp_path / "new.json")
    assert wh.Plan.load(tmp_path / "new.json").work == new.work
    assert new.hash == plan.hash


def test_an_axis_that_shards_no_parameter_says_so() -> None:
    plan = planned("gpt-small", mesh={"tensor": 8})
    head = str(plan).splitlines()[0]
    assert "tensor 8 (shards no parameter)" in head
    assert "tensor 8 crosses nvlink at 331 GB/s, shards no parameter" in str(plan)
    real = str(planned("mlp", mesh={"tensor": 8}))
    assert " tensor 8 · " in real.splitlines()[0]
    assert "shards 5.31 MB of 5.35 MB of parameters" in real


def test_an_axis_that_shards_samples_alone_is_data() -> None:
    plan = planned("gpt-small", mesh={"tensor": 8})
    alone = dataclasses.replace(
        plan,
        compute=tuple(
            dataclasses.replace(region, axes=(("tensor", ("batch",)),))
            for region in plan.compute
        ),
    )
    assert "data 8 (named tensor)" in str(alone).splitlines()[0]


def test_a_step_takes_one_branch() -> None:
    """The larger one of a ``lax.cond`` counts, and what stands inside it once."""
    net = {"small": jnp.zeros((64, 64)), "large": jnp.zeros((64, 256))}
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def large(net: Any, x: Any) -> Any:
        wide = x @ net["large"]
        return jax.lax.cond(
            x[0, 0] > 0, lambda h: h.sum(), lambda h: (h @ h.T).sum(), wide
        )

    def loss(net: Any, x: Any) -> Any:
        def small(net: Any, x: Any) -> Any:
            return (x @ net["small"]).sum()

        return jax.lax.cond(x.mean() > 0, small, large, net, x) / 32

    def alone(net: Any, x: Any) -> Any:
        wide = x @ net["large"]
        return (wide @ wide.T).sum() / 32

    options = {"cluster": "cpu:1", "per_micro_batch": True}
    found = [work_of(wh.plan(f, net, x, **options)).step_flops for f in (loss, alone)]
    assert found[0] == found[1] > 0


def test_plans_are_copied_and_pickled() -> None:
    net = {"w": jnp.zeros((64, 64))}
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x, cluster="h100:8")
    assert copy.copy(plan) == plan == copy.deepcopy(plan)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and again.question is None
    assert (
        copy.deepcopy({"plan": plan})["plan"].what_if(batch=32).batch[0].shape[0] == 32
    )


def test_a_decoder_reads_tokens_too() -> None:
    net = {
        "words": jnp.zeros((512, 64)),
        "segments": jnp.zeros((2, 64)),
        "w": jnp.zeros((64, 64)),
    }

    def loss(net: Any, batch: Any) -> Any:
        seen = net["words"][batch["inputs"]] + net["segments"][batch["segments"]]
        seen = (seen @ net["w"]).mean(1, keepdims=True)
        own = net["words"][batch["targets"][:, :-1]] @ net["w"]
        logits = (own + seen) @ net["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"][:, 1:]
        ).mean()

    def shape(length: int) -> Any:
        return jax.ShapeDtypeStruct((32, length), jnp.int32)

    batch = {"inputs": shape(24), "segments": shape(24), "targets": shape(17)}
    assert work_of(wh.plan(loss, net, batch, cluster="h100:8")).tokens == 32 * (24 + 16)


def test_a_token_that_gathers_its_expert_meets_that_one() -> None:
    net = {
        "router": jnp.zeros((64, 8)),
        "up": jnp.zeros((8, 64, 256)),
        "down": jnp.zeros((8, 256, 64)),
    }

    def loss(net: Any, x: Any) -> Any:
        chosen = jnp.argmax(x @ net["router"], -1)
        wide = jnp.einsum("td,tdf->tf", x, net["up"][chosen])
        return jnp.square(
            jnp.einsum("tf,tfd->td", jnp.tanh(wide), net["down"][chosen])
        ).mean()

    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    work = work_of(wh.plan(loss, net, x, cluster="h100:1"))
    assert work.parameters == 64 * 8 + 2 * 8 * 64 * 256
    assert work.active == 64 * 8 + 2 * 64 * 256


def test_a_kind_without_a_list_price_is_named() -> None:
    plan = planned("mlp", "v5e:2x2")
    assert "price   no list price of TPU v5e: give price_per_hour in a " in str(plan)
    assert plan.throughput().price is None
    for cluster in ("h100:4", "cpu:4"):
        assert "no list price" not in str(planned("mlp", cluster))


@pytest.mark.relaxed_promotion
def test_utilization_is_of_the_type_that_devices_multiply_in() -> None:
    """JAX's default precision multiplies float32 as bfloat16 on TPUs."""
    types = {"v5e:2x2": "bf16", "h100:4": "tf32", "v100-32:4": "f32", "cpu:4": "f32"}
    for cluster, dtype in types.items():
        speed = planned("mlp", cluster).throughput()
        assert (speed.work.dtype, speed.dtype) == ("f32", dtype)
        assert f"({dtype})" in str(speed)
        assert repr(speed) == f"<Throughput {speed}>"
    mixed = planned("mlp", "v100-32:4+p100-16:4", precision="f16")
    assert mixed.throughput().dtype in ("f16", "f16 and f32")


@pytest.mark.relaxed_promotion
def test_replicas_that_differ_divide_the_batch() -> None:
    plan = planned("gpt-test", "v100-32:4+p100-16:4", mesh={"data": 8}, size=32)
    assert plan.shares
    assert "axes    default (unmarked)  data: micro-batches" in str(plan)


@pytest.mark.parametrize("shared", [True, False])
def test_both_inputs_of_a_translator_are_tokens(shared: bool) -> None:
    """Leaves of unknown or equal names whose embeddings are multiplied by weights."""
    net = {
        "source": jnp.zeros((512, 64)),
        "target": jnp.zeros((512 if shared else 256, 64)),
        "encoder": jnp.zeros((64, 64)),
        "decoder": jnp.zeros((64, 64)),
    }

    def translated(net: Any, source: Any, target: Any) -> Any:
        table = net["source" if shared else "target"]
        memory = jnp.tanh(net["source"][source] @ net["encoder"])
        hidden = jnp.tanh(table[target] @ net["decoder"])
        scores = jax.nn.softmax(jnp.einsum("bse,bte->bst", hidden, memory))
        return (hidden + jnp.einsum("bst,bte->bse", scores, memory)).mean()

    short = jax.ShapeDtypeStruct((16, 24), jnp.int32)
    long = jax.ShapeDtypeStruct((16, 40), jnp.int32)
    for batch in (
        {"french": long, "english": short},
        {"a": {"ids": long}, "b": {"ids": short}},
        {"a": {"tokens": long}, "b": {"tokens": short}},
        {"french": long, "english": long},
    ):
        plan = wh.plan(
            lambda net, batch: translated(net, *jax.tree.leaves(batch)),
            net,
            batch,
            optimizer=optax.sgd(0.1),
            cluster="h100:2",
        )
        sizes = [leaf.size for leaf in jax.tree.leaves(batch)]
        assert work_of(plan).tokens == sum(sizes)


def test_columns_of_the_same_tokens_are_counted_once() -> None:
    net = {name: jnp.zeros((512, 64)) for name in ("items", "artists", "out")}

    def loss(net: Any, batch: Any) -> Any:
        read = net["items"][batch["item"]] + net["artists"][batch["artist"]]
        return jnp.tanh(read @ net["out"].T).mean()

    ids = jax.ShapeDtypeStruct((16, 24), jnp.int32)
    batch = {"item": ids, "artist": ids}
    plan = wh.plan(loss, net, batch, optimizer=optax.sgd(0.1), cluster="h100:2")
    assert work_of(plan).tokens == 16 * 24


def test_both_sides_of_a_recurrent_translator_are_tokens() -> None:
    plan = planned("gnmt-test", "h100:2")
    words = [leaf.shape for leaf in plan.batch if leaf.dtype == "int32"]
    (samples, source), (_, target) = words
    # The last word of the target is not read.
    assert work_of(plan).tokens == samples * (source + target - 1)
