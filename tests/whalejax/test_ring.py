"""Plans with attention in blocks: chosen, explained, and run as predicted."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax import hlo, models
from whalejax.jobs import abstract_model


SMALL: dict[str, dict[str, Any]] = {
    "gpt-test": {"annotated": False, "layers": 1},
    "mlp-test": {"annotated": False},
}


def asked(name: str = "gpt-test", batch: int = 8, **options: Any) -> wh.Plan:
    job = models.job(name, **options.pop("model", SMALL.get(name, {})))
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        **{
            "cluster": "h100:8",
            "optimizer": optax.sgd(0.1),
            "zero": 0,
            "remat": "none",
            "sequence_parallel": False,
            **options,
        },
    )


RING = {"mesh": {"data": 2, "context": 4}, "attention": "ring"}


def sent(plan: wh.Plan) -> Counter[str]:
    found: Counter[str] = Counter()
    for c in plan.collectives:
        if c.axes == ("context",) and c.what in ("ring", "border"):
            found[c.kind] += c.payload_bytes * c.times(plan.num_micro_batches)
    return found


@pytest.mark.parametrize(
    ("sequence", "blocks", "window"),
    [
        (1024, (512, 3), None),  # the diagonal, and what comes before
        (512, (512, 1), None),  # one block has no hidden block
        (2048, (512, 7), 512),  # the diagonal, and the blocks beside it
    ],
)
def test_flops_are_those_of_the_blocks_that_are_computed(
    sequence: int, blocks: tuple[int, int], window: int | None
) -> None:
    def loss(p: Any, x: Any) -> Any:
        query, key, value = (jnp.einsum("bse,ehd->bshd", x, p[n]) for n in "qkv")
        near = None if window is None else (window - 1, 0)
        seen = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=near
        )
        return (seen**2).mean()

    weight = jax.ShapeDtypeStruct((16, 2, 8), jnp.float32)
    plan = wh.plan(
        loss,
        dict.fromkeys("qkv", weight),
        jax.ShapeDtypeStruct((8, sequence, 16), jnp.float32),
        optimizer=optax.sgd(0.1),
        cluster="h100:8",
        mesh={"data": 8},
        attention="ring",
        remat="none",
    )
    side, number = blocks
    # Two products of a block forward and five backward; heads of 8 numbers.
    attention = 7 * number * 2 * (2 * side * side * 8)
    projections = 3 * 2 * 2 * sequence * 16 * 16  # forward, and a gradient
    assert plan.product_flops == attention + projections


def test_values_narrower_than_keys_take_fewer_flops() -> None:
    def loss(p: Any, x: Any) -> Any:
        query, key, value = (jnp.einsum("bse,ed->bsd", x, p[n]) for n in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", query, key)
        seen = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), value)
        return (seen**2).mean()

    def flops(depth: int, width: int) -> int:
        sizes = {"q": depth, "k": depth, "v": width}
        plan = wh.plan(
            loss,
            {n: jax.ShapeDtypeStruct((16, d), jnp.float32) for n, d in sizes.items()},
            jax.ShapeDtypeStruct((8, 64, 16), jnp.float32),
            optimizer=optax.sgd(0.1),
            cluster="h100:8",
            mesh={"data": 8},
            attention="ring",
            remat="none",
        )
        return plan.product_flops

    # Scores, the same again, and the gradients of queries and keys are as deep as keys.
    # The result and the gradients of weights and values are as wide as values.
    block, projection = 2 * 64 * 64, 2 * 64 * 16
    assert flops(32, 8) == block * (4 * 32 + 3 * 8) + 2 * projection * (2 * 32 + 8)
    assert flops(32, 32) == block * 7 * 32 + 2 * projection * 3 * 32


@pytest.mark.full
def test_what_is_gathered_without_it_goes_round() -> None:
    model = {"annotated": False, "layers": 2}
    ring = asked(**RING, model=model)
    gather = asked(**{**RING, "attention": "gather"}, model=model)
    assert "ring attention" in str(ring) and "ring" not in str(gather).splitlines()[0]
    assert ring.attention == (("*", "ring"),) and gather.attention == ()
    assert set(sent(ring)) == {"collective-permute"}
    assert set(sent(gather)) == {"all-gather"}
    assert ring.memory.activations_bytes < gather.memory.activations_bytes
    assert ring.what_if(attention="gather").attention == ()


def test_a_plan_with_it_is_written_and_read(tmp_path: Path) -> None:
    plan = asked(**RING)
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == plan


def compiled(plan: wh.Plan) -> Any:
    job = models.job("gpt-test", **SMALL["gpt-test"])
    step = wh.compile(
        plan,
        job.loss_fn,
        abstract_model(job),
        optimizer=optax.sgd(0.1),
        devices=jax.devices(),
    )
    return hlo.read(step.lower().compile().as_text())


def test_the_compiled_program_sends_what_was_planned() -> None:
    plan = asked(**RING)
    found = hlo.collectives(compiled(plan))
    permutes = found.of("collective-permute")
    assert {i.axes(plan.axis_sizes) for i in permutes} == {("context",)}
    assert sum(i.nbytes * i.count for i in permutes) == sum(sent(plan).values())
    assert not found.of("all-gather")


def test_scores_of_a_single_block_are_computed_again() -> None:
    """They are equal to those of the forward pass, which compilers would keep."""
    plan = asked(mesh={"data": 8}, attention="ring")
    assert hlo.product_flops(compiled(plan)) == plan.product_flops


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 4, "context": 2}])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.relaxed_promotion  # Llama's norms rely on it
def test_no_masks_are_kept_between_blocks(mesh: dict[str, int], remat: str) -> None:
    """They depend on indices alone, so that JAX would compute all of them first."""
    job = models.job("llama-test", sequence=2048)
    model, batch = abstract_model(job), jax.eval_shape(lambda: job.batch_at(0, 8))
    options = {"cluster": "cpu:8", "optimizer": job.optimizer, "remat": remat}
    plan = wh.plan(
        job.loss_fn, model, batch, mesh=mesh, attention="ring", zero=0, **options
    )
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=job.optimizer, devices=jax.devices()
    )
    masks = re.findall(r"tensor<([0-9x]+)x512x512xi1>", step.lower().as_text())
    assert masks
    assert max(math.prod(map(int, found.split("x"))) for found in masks) <= 2 * 8


@pytest.mark.relaxed_promotion  # Llama's norms rely on it
def test_sums_of_gradients_of_attention_in_blocks_are_in_float32() -> None:
    sizes = {"embed": 512, "heads": 4, "mlp": 64, "layers": 2, "vocab": 64}
    plan = asked(
        "llama-test",
        batch=1,
        cluster="v5e:2x2",
        model={**sizes, "kv_heads": 4, "sequence": 8192},
        mesh={"context": 4},
        precision="bf16",
        attention="ring",
    )
    one = 8192 // 4 * 512 * 2  # queries, keys or values of a device, in bfloat16
    # Sums of all three, twice as large; what was kept of these, cut out of its stacks,
    # and the output's gradient. Beside them weights, and what their gradients wait for.
    least = 3 * 2 * one + 4 * one
    assert least < plan.memory.working_bytes < 2 * least


@pytest.mark.full
@pytest.mark.relaxed_promotion  # Flax's norms rely on it
def test_long_sequences_are_given_it() -> None:
    """An 8B model's layers at 131,072 tokens hold no scores that would fit."""
    sizes = {
        "layers": 4,
        "embed": 4096,
        "heads": 32,
        "kv_heads": 8,
        "mlp": 14336,
        "sequence": 131072,
        "scan_layers": True,
    }
    plan = asked(
        "llama-test",
        batch=8,
        cluster="v5p:4x4x4",
        model=sizes,
        precision="bf16",
        remat=None,
        sequence_parallel=None,
        mesh={"context": 8},
    )
    assert plan.attention == (("*", "ring"),)
    with pytest.raises(wh.PlanError, match="no plan fits"):
        plan.what_if(attention="gather", mesh={"data": 8, "tensor": 8})


def test_why_attention_is_gathered_is_said() -> None:
    plan = asked(
        "bert-test",
        mesh={"data": 2, "context": 4},
        model={"dropout_rate": 0.1, "annotated": False},
    )
    (note,) = {n for n in plan.notes if "gathered over context" in n and "layer_0" in n}
    assert "its weights are changed after the softmax (dropout" in note


def test_asked_for_where_there_is_none_it_is_refused() -> None:
    with pytest.raises(wh.PlanError) as error:
        asked("mlp-test", attention="ring")
    assert "no softmax between two products was found" in str(error.value)
    with pytest.raises(wh.PlanError) as error:
        asked(
            "bert-test",
            attention="ring",
            model={"dropout_rate": 0.1, "annotated": False},
        )
    assert "dropout" in str(error.value) and "drop attention=" in str(error.value)


def test_asked_for_where_it_does_not_stand_its_place_is_named() -> None:
    with pytest.raises(wh.PlanError) as error:
        asked("gpt-test", attention={"split": "ring"}, model={})
    assert "requested for split, where no attention can run" in str(error.value)
    assert "replicate has some that can: name that, or '*' for all" in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("blocks", "attention is 'blocks'; expected one of ring, gather"),
        ({"heads": "ring"}, "there is no TaskGraph 'heads'; expected some of default"),
        (3, "attention is 3; expected a word such as 'ring', one for each"),
    ],
)
def test_other_kinds_are_refused(given: Any, said: str) -> None:
    with pytest.raises(wh.PlanError) as error:
        asked(attention=given)
    assert said in str(error.value)


def test_estimates_run_it_as_asked() -> None:
    plan = asked(attention="ring", loss_chunks=4, runnable=False)
    assert plan.attention == (("*", "ring"),)
    assert plan.loss_chunks == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("attention", ["gather", "ring"])
def test_a_sequence_that_does_not_divide_may_be_padded(attention: str) -> None:
    with pytest.raises(wh.PlanError) as error:
        asked(
            mesh={"context": 8},
            attention=attention,
            model={"sequence": 1001, "annotated": False},
        )
    text = str(error.value)
    assert "the sequence does not divide by context" in text
    assert "It is 1001 long: pad it to 1008 (0.7% more; its activations then" in text
    assert re.search(r"take [\d.]+ [kM]B more on each device\)", text)


SHAPES = {
    # Heads of queries that share one key; and one head, so that widths are sharded.
    "shared keys": (
        "bsd,dhe->bshe",
        "bsd,de->bse",
        "bqhe,bke->bhqk",
        (8, 4, 6),
        (8, 6),
    ),
    "one head": ("bsd,de->bse", "bsd,de->bse", "bqe,bke->bqk", (8, 6), (8, 6)),
}


@pytest.mark.smoke
@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 4}, {"context": 8}])
@pytest.mark.parametrize("name", SHAPES)
def test_odd_shapes_compute_what_one_device_does(
    name: str, mesh: dict[str, int]
) -> None:
    to_query, to_key, scores, query_shape, key_shape = SHAPES[name]
    queries, keys = (text.split("->")[1] for text in (to_query, to_key))
    weighed, kept = keys.replace("s", "k"), queries.replace("s", "q")
    back = f"{scores.split('->')[1]},{weighed}->{kept}"

    def loss(params: Any, x: Any) -> Any:
        q = jnp.einsum(to_query, x, params["q"])
        k = jnp.einsum(to_key, x, params["k"])
        v = jnp.einsum(to_key, x, params["v"])
        weights = jax.nn.softmax(jnp.einsum(scores, q, k))
        return jnp.mean(jnp.sin(jnp.einsum(back, weights, v)))

    keys_of = iter(jax.random.split(jax.random.key(0), 4))
    params = {
        "q": jax.random.normal(next(keys_of), query_shape),
        "k": jax.random.normal(next(keys_of), key_shape),
        "v": jax.random.normal(next(keys_of), key_shape),
    }
    x = jax.random.normal(next(keys_of), (4, 16, 8))
    try:
        plan = wh.plan(
            loss,
            params,
            x,
            cluster="h100:8",
            optimizer=optax.sgd(1.0),
            mesh=mesh,
            attention="ring",
            remat="none",
            zero=0,
        )
    except wh.PlanError as error:
        pytest.skip(str(error).splitlines()[0])
    step = wh.compile(
        plan, loss, params, optimizer=optax.sgd(1.0), devices=jax.devices()
    )
    state, _ = step(step.init_from(params), x)
    expected = jax.grad(loss)(params, x)
    for path, gradient in expected.items():
        change = params[path] - state.params[path]
        error = jnp.linalg.norm(change - gradient) / jnp.linalg.norm(gradient)
        assert error < 1e-4, path


def test_one_task_graph_alone_may_have_it() -> None:
    def loss(params: Any, x: Any) -> Any:
        for name in ("a", "b"):
            with wh.split() if name == "a" else wh.replicate():
                q, k, v = (
                    jnp.einsum("bse,ehd->bshd", x, params[name][i]) for i in range(3)
                )
                y = wh.attention(q, k, v, is_causal=True)
                x = x + jnp.einsum("bshd,ehd->bse", y, params[name][3])
        return jnp.mean(x**2)

    weights = jax.ShapeDtypeStruct((4, 32, 4, 8), jnp.float32)
    plan = wh.plan(
        loss,
        {"a": weights, "b": weights},
        jax.ShapeDtypeStruct((8, 64, 32), jnp.float32),
        cluster="h100:8",
        attention={"split": "ring"},
        remat="none",
    )
    assert plan.attention == (("split", "ring"),)
    assert "attention in blocks in split" in str(plan)  # No axis shards the sequence.
