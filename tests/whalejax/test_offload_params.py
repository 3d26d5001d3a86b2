"""Parameters in host memory: exact, a layer at a time, and chosen where needed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.equality import OneDevice, check, on_one_device
from whalejax import _compat, models
from whalejax.jobs import abstract_model


pytestmark = pytest.mark.relaxed_promotion  # Flax's own layers rely on it

MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama-test", {"layers": 3}),
    "its own checkpoints": ("llama-test", {"layers": 3, "remat": "dots"}),
    "fused": ("gpt-test", {"scan_layers": True, "fused_qkv": True}),
}
CASES: Final[dict[str, tuple[str, int, dict[str, Any]]]] = {
    "tensor": ("llama", 1, {"mesh": {"fsdp": 4, "tensor": 2}}),
    "all three": (
        "llama",
        1,
        {
            "mesh": {"fsdp": 8},
            "remat": "full",
            "offload": ["optimizer", "activations", "params"],
        },
    ),
    "micro-batches": (
        "its own checkpoints",
        2,
        {"mesh": {"fsdp": 2, "tensor": 2}, "offload": ["optimizer", "params"]},
    ),
    "ring": (
        "llama",
        1,
        {"mesh": {"data": 2, "context": 4}, "zero": 0, "attention": "ring"},
    ),
    "chunks": (
        "fused",
        1,
        {"mesh": {"fsdp": 2, "tensor": 2}, "remat": "dots", "loss_chunks": 2},
    ),
}


@functools.cache
def one_device(name: str, parts: int) -> OneDevice:
    model, changes = MODELS[name]
    kinds = {"dtype": "float64", "param_dtype": "float64"}
    return on_one_device(models.job(model, **kinds, **changes), parts)


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("tensor", marks=pytest.mark.full),
        "all three",
        "micro-batches",
        pytest.param("ring", marks=pytest.mark.full),
        pytest.param("chunks", marks=pytest.mark.full),
    ],
)
def test_it_computes_the_same(case: str) -> None:
    name, parts, options = CASES[case]
    with jax.enable_x64(True):
        outcome = check(
            one_device(name, parts), steps=3, **{"offload": "params", **options}
        )
        brought, kept = transfers(outcome.step)
    plan = outcome.plan
    assert outcome.error < 1e-10, outcome.worst_path
    assert outcome.compilations == 1
    hosted = [leaf for leaf in plan.leaves if leaf.hosted]
    assert {leaf.path.split(".")[0] for leaf in hosted} == {"blocks"}
    assert all(len(leaf.shape) > 2 for leaf in hosted)
    # A slice of each comes in the forward pass and again in the backward pass, and
    # comes and goes for the update; as a whole none does.
    slices = [int(np.prod(leaf.shape[1:])) * 8 for leaf in hosted]
    for nbytes in slices:
        assert brought.count(nbytes) >= 2 * slices.count(nbytes)
    if "activations" not in plan.offload:
        assert max(brought) <= max(slices) * 3  # a shard's pieces, of all layers
    assert len(kept) >= len(hosted)


def transfers(step: wh.TrainStep) -> tuple[list[int], list[int]]:
    """Bytes of each array that a step brings from host memory, and puts there."""
    found: dict[str, list[int]] = {"Device": [], "Host": []}

    def inside(jaxpr: Any) -> None:
        for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
            if equation.primitive.name == "device_put":
                where = str(equation.params["devices"])
                aval = equation.outvars[0].aval
                nbytes = int(np.prod(aval.shape)) * aval.dtype.itemsize
                for name, sizes in found.items():
                    if name in where:
                        sizes.append(nbytes)
            held = jax.tree.leaves(
                [*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns")
            )
            for inner in held:
                if hasattr(inner, "eqns"):
                    inside(inner)

    arguments = step.abstract_state(), step._layout.abstract()
    inside(jax.make_jaxpr(step._runner.advance)(*arguments))
    return found["Device"], found["Host"]


def layers_of(net: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, net["layers"])[0]


def small_loss(net: Any, x: Any) -> Any:
    return ((layers_of(net, x) @ net["head"]) ** 2).mean()


@pytest.mark.smoke
def test_they_are_there_from_the_start_and_saved(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = {"layers": (3, 32, 32), "head": (32, 8)}
    net = {k: random.standard_normal(s).astype("f") / 6 for k, s in shapes.items()}
    x, optimizer = random.standard_normal((16, 32)).astype("f"), optax.adam(1e-3)
    plain, moved = (
        wh.compile(
            wh.plan(
                small_loss,
                net,
                x,
                optimizer=optimizer,
                cluster="cpu:8",
                mesh={"fsdp": 8},
                offload=offload,
            ),
            small_loss,
            net,
            optimizer=optimizer,
        )
        for offload in ((), "params")
    )
    state = moved.init_from(net)
    kinds = {k: x.sharding.memory_kind for k, x in state.params.items()}
    assert kinds == {"layers": "pinned_host", "head": "device"}
    before = float(moved.eval(state, x)["loss"])
    assert before == pytest.approx(float(small_loss(net, x)), rel=1e-5)
    # The model itself is on the devices, for functions of one's own.
    own = jax.jit(small_loss)(state.model, x)
    assert float(own) == pytest.approx(before, rel=1e-5)
    moved.save(tmp_path / "one", state)
    state, metrics = moved(state, x)
    assert float(metrics["loss"]) == pytest.approx(before, rel=1e-6)
    # Another plan reads it, and its step is the same.
    other, expected = plain(plain.restore(tmp_path / "one"), x)
    for name in shapes:
        here, there = (np.asarray(s.params[name]) for s in (state, other))
        np.testing.assert_allclose(here, there, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)


# Choosing.


def asked(memory: float = 80e9, **options: Any) -> wh.Plan:
    job = models.job("llama-test", embed=1024, heads=8, mlp=4096, layers=12)
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 8)),
        **{
            "optimizer": optax.sgd(1e-3),
            "mesh": {"data": 8},
            "zero": 0,
            "cluster": wh.cluster("h100:8").with_memory(int(memory)),
            **options,
        },
    )


@pytest.mark.full
def test_it_is_chosen_where_nothing_else_fits() -> None:
    full = asked(remat="full")
    assert full.offload == () and full.memory.host_bytes == 0
    params = full.memory.params_bytes
    tight = asked(full.memory.total_bytes - 0.5 * params)
    assert tight.offload == ("params",) and tight.runnable
    moved = [leaf for leaf in tight.leaves if leaf.hosted]
    assert tight.memory.host_bytes == sum(
        int(np.prod(leaf.shape)) * 4 for leaf in moved
    )
    assert tight.memory.host_bytes > 0.9 * params
    assert tight.time.offload_seconds > 0
    assert "params in host memory" in str(tight)
    with pytest.raises(wh.WhaleError, match="no plan fits"):
        asked(full.memory.total_bytes - 0.5 * params, offload=())


def test_a_plan_remembers_them(tmp_path: Path) -> None:
    plan = asked(offload="params")
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == plan
    assert any(leaf.hosted for leaf in plan.leaves)
    assert not any(leaf.hosted for leaf in plan.what_if(offload=()).leaves)


def test_what_cannot_lie_there_is_named() -> None:
    job = models.job("gpt-test", layers=1)
    with pytest.raises(wh.WhaleError, match="Put its layers into a scan"):
        wh.plan(
            job.loss_fn,
            abstract_model(job),
            job.batch_at(0, 8),
            optimizer=job.optimizer,
            cluster="h100:8",
            offload="params",
        )
    with pytest.raises(
        wh.WhaleError, match="ZeRO 1 and 2 update in other shards: take zero=0"
    ):
        asked(offload="params", zero=1)


@pytest.mark.parametrize(
    "whole",
    [
        optax.lamb(1e-3),
        pytest.param(optax.MultiSteps(optax.adam(1e-3), 2), marks=pytest.mark.full),
    ],
)
def test_optimizers_that_update_no_slices_are_named(whole: Any) -> None:
    with pytest.raises(wh.WhaleError, match=r"noise, or a wrapper adds branches"):
        asked(offload="params", optimizer=whole)


def test_what_loops_inside_of_layers_slice_again_stays() -> None:
    """Compilers cannot slice host memory along two dimensions."""

    def layer(x: Any, params: Any) -> Any:
        x = jnp.tanh(x @ params["out"])
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["in"])

    def loss(net: Any, x: Any) -> Any:
        return (jax.lax.scan(layer, x, net)[0] ** 2).mean()

    net = {"in": np.ones((3, 2, 16, 16), "f"), "out": np.ones((3, 16, 16), "f")}
    x = np.ones((8, 16), "f")
    plan = wh.plan(loss, net, x, cluster="h100:8", offload="params", mesh={"data": 8})
    assert {leaf.path for leaf in plan.leaves if leaf.hosted} == {"out"}


def test_state_and_parameters_are_hosted_together() -> None:
    """What can lie there alone and not beside its state stays, whatever is asked."""
    optimizer = optax.chain(
        optax.trace(0.9), optax.clip_by_global_norm(1.0), optax.scale(-0.01)
    )
    with pytest.raises(wh.WhaleError, match="offload: 2 problems"):
        asked(offload=["optimizer", "params"], optimizer=optimizer)


@pytest.mark.full
def test_another_optimizer_that_needs_the_whole_is_named() -> None:
    job = models.job("llama-test", layers=2)
    model = abstract_model(job)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0, 8),
        optimizer=optax.adam(1e-3),
        mesh={"fsdp": 8},
        offload="params",
    )
    with pytest.raises(wh.PlanError, match="but this optimizer reads each of them in"):
        wh.compile(plan, job.loss_fn, model, optimizer=optax.lamb(1e-3))
    state = plan.what_if(offload="optimizer")
    with pytest.raises(wh.PlanError, match="does not update its state element by"):
        wh.compile(state, job.loss_fn, model, optimizer=optax.lamb(1e-3))
