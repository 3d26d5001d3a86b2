"""Optimizer state in host memory: exact, in pieces, and chosen where it must be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.compilations import count_compilations
from tests.crossing import crossed
from whalejax import hlo, models
from whalejax.jobs import abstract_model
from whalejax.lowering.spmd import optimizer_offload


pytestmark = pytest.mark.relaxed_promotion  # optax relies on it

OPTIMIZERS: Final = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "momentum": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "narrow": optax.adam(1e-3, mu_dtype="bfloat16"),
    "partly": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.lamb(1e-3)},
        lambda params: {k: "a" if "0" in k else "b" for k in params},
    ),
}
WHOLE: Final = {
    "lamb": optax.lamb(1e-3),  # norms of its updates
    "adafactor": optax.adafactor(1e-3),
    "several": optax.MultiSteps(optax.adam(1e-3), 2),  # a cond around the update
    "watched": optax.chain(optax.adam(1e-3), optax.zero_nans()),
    "widening": optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: p.astype("bfloat16"), params),
        lambda updates, state, params=None: (updates, updates),
    ),
}

LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "zero-1": {"mesh": {"data": 8}, "zero": 1},
    "fsdp-tensor": {"mesh": {"fsdp": 4, "tensor": 2}},
}


def run(
    optimizer: Any, steps: int = 3, dtype: str = "float32", **options: Any
) -> tuple[wh.TrainStep, list[np.ndarray]]:
    job = models.job("mlp-test", annotated=False, param_dtype=dtype)
    model = abstract_model(job)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0, 16),
        optimizer=optimizer,
        cluster="h100:8",
        **options,
    )
    step = wh.compile(
        plan, job.loss_fn, model, optimizer=optimizer, devices=jax.devices()
    )
    state = step.init(job.make_model, rng=jax.random.key(0))
    with count_compilations() as compiles:
        for i in range(steps):
            state, _ = step(state, job.batch_at(i, 16))
    assert compiles.count == 1
    # What is predicted to be in host memory is there, and nothing else.
    held = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.sharding.memory_kind == "pinned_host"
    )
    assert held == plan.memory.host_bytes
    assert (held > 0) == bool(plan.offload)
    return step, [
        np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "layout"), crossed([*OPTIMIZERS], [*LAYOUTS]))
def test_it_computes_the_same(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_offload, "PIECE_BYTES", 512)
    monkeypatch.setattr(optimizer_offload, "LANES", 1)
    monkeypatch.setattr(optimizer_offload, "ROWS", 1)
    found = []
    with jax.enable_x64(True):
        for offload in ((), "optimizer"):
            options = {"dtype": "float64", "offload": offload, **LAYOUTS[layout]}
            found.append(run(OPTIMIZERS[name], **options))
        loops = hlo_loops(found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-14)
    plan = found[1][0].plan
    assert loops > 0 and plan.memory.host_bytes > 0


def hlo_loops(step: wh.TrainStep) -> int:
    """Loops over pieces of state, in the program before it is optimised."""
    return step.lower().as_text().count("stablehlo.while")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WHOLE)
def test_state_that_is_needed_whole_stays(name: str) -> None:
    with pytest.raises(wh.WhaleError, match="no state that is updated element by elem"):
        run(WHOLE[name], offload="optimizer", **LAYOUTS["zero-1"])
    assert run(WHOLE[name], 1, **LAYOUTS["zero-1"])[0].plan.offload == ()


@pytest.mark.parametrize("runnable", [True, False])
def test_without_an_optimizer_there_is_no_state(runnable: bool) -> None:
    with pytest.raises(wh.PlanError, match="no optimizer was given, so it has no"):
        wh.plan(
            lambda net, x: (x @ net).mean(),
            jax.ShapeDtypeStruct((64, 64), jnp.float32),
            jax.ShapeDtypeStruct((64, 64), jnp.float32),
            cluster="h100:8",
            offload=["optimizer"],
            runnable=runnable,
        )


@pytest.mark.full
def test_it_communicates_what_it_did() -> None:
    texts = [
        run(OPTIMIZERS["adamw"], 1, offload=o, **LAYOUTS["fsdp-tensor"])[0]
        for o in ((), "optimizer")
    ]
    plain, moved = (
        hlo.collectives(hlo.read(step.lower().compile().as_text())) for step in texts
    )
    assert plain.nbytes == moved.nbytes


@pytest.mark.full
def test_a_checkpoint_moves_between_memories(tmp_path: Path) -> None:
    job = models.job("mlp-test", annotated=False)
    steps = []
    for offload in ("optimizer", ()):
        plan = wh.plan(
            job.loss_fn,
            abstract_model(job),
            job.batch_at(0, 16),
            optimizer=OPTIMIZERS["adamw"],
            cluster="h100:8",
            offload=offload,
            **LAYOUTS["fsdp-tensor"],
        )
        steps.append(
            wh.compile(
                plan,
                job.loss_fn,
                abstract_model(job),
                optimizer=OPTIMIZERS["adamw"],
                devices=jax.devices(),
            )
        )
    moved, plain = steps
    state, _ = moved(
        moved.init(job.make_model, rng=jax.random.key(0)), job.batch_at(0, 16)
    )
    moved.save(tmp_path / "moved", state)
    restored = plain.restore(tmp_path / "moved")
    again = moved.restore(tmp_path / "moved")
    for one, other, third in zip(
        *map(jax.tree.leaves, (state.opt_state, restored.opt_state, again.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert other.sharding.memory_kind == "device"
        assert third.sharding == one.sharding


@pytest.mark.parametrize(
    ("shape", "count"),
    [((8, 8), 1), ((4096, 4096), 4), ((7, 4096, 4096), 32)],
)
def test_pieces_divide_and_are_small(shape: tuple[int, ...], count: int) -> None:
    axis, found = optimizer_offload.pieces(shape, 4)
    assert found == count and shape[axis] % found == 0
    assert math.prod(shape) * 4 / found <= optimizer_offload.PIECE_BYTES


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((75_968, 448), (0, 1)),
        ((75_968, 896), (0, 8)),
        ((13, 5000, 4096), (1, 125)),
        ((5000, 4096), (0, 5)),
    ],
)
def test_pieces_have_whole_tiles(
    shape: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    """TPU compilers refuse others, or end their process."""
    assert optimizer_offload.pieces(shape, 4) == wanted


def test_a_parameter_without_elements_stays_where_it_is() -> None:
    def loss(params: Any, x: Any) -> Any:
        return ((x @ params["w"]) ** 2).mean() + params["none"].sum()

    net = {"w": np.ones((16, 8), np.float32), "none": np.ones((0, 5), np.float32)}
    x = np.ones((8, 16), np.float32)
    plan = wh.plan(
        loss,
        net,
        x,
        optimizer=optax.adam(1e-3),
        cluster="h100:8",
        mesh={"data": 8},
        offload="optimizer",
    )
    step = wh.compile(
        plan, loss, net, optimizer=optax.adam(1e-3), devices=jax.devices()
    )
    _, metrics = step(step.init_from(net), x)
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.full
def test_a_cluster_that_does_not_know_its_host() -> None:
    plan = asked(80e9, offload="optimizer", cluster="cpu:8")
    assert any("are not counted" in note for note in plan.notes)


# Choosing.


def asked(memory: float, **options: Any) -> wh.Plan:
    job = models.job("llama-test", embed=1024, heads=8, mlp=4096, layers=12)
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 8)),
        optimizer=optax.adam(1e-3),
        mesh={"data": 8},
        zero=0,
        **{"cluster": wh.cluster("h100:8").with_memory(int(memory)), **options},
    )


@pytest.mark.full
def test_it_is_chosen_where_nothing_else_fits() -> None:
    roomy = asked(80e9)
    assert roomy.offload == () and roomy.memory.host_bytes == 0
    full = asked(80e9, remat="full")
    state = full.memory.optimizer_bytes
    tight = asked(full.memory.total_bytes - 0.5 * state)
    assert tight.offload == ("optimizer",) and tight.runnable
    assert tight.memory.host_bytes == pytest.approx(state, rel=0.01)
    assert tight.time.offload_seconds > 0
    assert "optimizer in host memory" in str(tight)
    with pytest.raises(wh.WhaleError, match="no plan fits"):
        asked(full.memory.total_bytes - 0.5 * state, offload=())


@pytest.mark.full
def test_a_plan_remembers_it(tmp_path: Path) -> None:
    plan = asked(80e9, offload="optimizer")
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == plan
    assert plan.hash != asked(80e9, offload=()).hash
    assert plan.what_if(offload=()).offload == ()


@pytest.mark.parametrize("offload", ["none", ["none"], ("none",), []])
def test_nothing_is_asked_for_by_name(offload: Any) -> None:
    """As on the command line."""
    assert asked(80e9, offload=offload).hash == asked(80e9, offload=()).hash


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ("disk", "'disk' is none of optimizer, activations, params"),
        (["none", "params"], "'none' is none of .*; 'none' must be alone"),
        (False, r"offload is False; expected some of optimizer"),
    ],
)
def test_what_cannot_be_moved_is_named(offload: Any, message: str) -> None:
    with pytest.raises(wh.WhaleError, match=message):
        asked(80e9, offload=offload)


class _Device:
    """A device without host memory."""

    platform = device_kind = "abacus"
    process_index = id = 0

    def addressable_memories(self) -> list[Any]:
        return []


def test_a_backend_without_host_memory_is_named() -> None:
    from whalejax.runtime.plan_compatibility import check_host_memory

    plan = asked(80e9, offload="optimizer")
    with pytest.raises(wh.WhaleError) as caught:
        check_host_memory(plan, _Device())
    assert "optimizer in host memory" in str(caught.value)
    assert "GB of each device" in str(caught.value)
    assert "a abacus reaches none here" in str(caught.value)


def test_a_stage_keeps_its_own_state_in_host_memory() -> None:
    """And no more: what other stages have there was taken from the device's bytes."""
    sizes = {"layers": 4, "embed": 256, "heads": 4, "scan_layers": True}
    job = models.job("gpt-test", annotated=False, **sizes)
    model = abstract_model(job)
    batch = jax.eval_shape(lambda: job.batch_at(0, 64))
    kept, away = (
        wh.plan(
            job.loss_fn,
            model,
            batch,
            optimizer=optax.adam(1e-3),
            cluster="h100:4",
            mesh={"stage": 2},
            zero=0,
            remat="none",
            runnable=False,
            offload=offload,
        ).memory
        for offload in ((), ("optimizer",))
    )
    # State of vectors is not worth moving, and stays.
    assert 0 < away.optimizer_bytes < 0.01 * kept.optimizer_bytes
    assert away.host_bytes == kept.optimizer_bytes - away.optimizer_bytes
