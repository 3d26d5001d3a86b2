"""Activations in host memory: exact, counted to the byte, and chosen where needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.equality import OneDevice, check, compiled, on_one_device
from whalejax import _compat, models
from whalejax.cli import main
from whalejax.jobs import abstract_model


pytestmark = pytest.mark.relaxed_promotion  # Flax's own layers rely on it

MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "scanned": ("llama-test", {"layers": 3}),
    "unrolled": ("llama-test", {"layers": 3, "scan_layers": False}),
    "its own checkpoints": ("llama-test", {"layers": 3, "remat": "dots"}),
    "experts": ("moe-test", {"layers": 2, "gating": "top_2"}),
}
LAYOUTS: Final[dict[str, dict[str, int]]] = {
    "fsdp-tensor": {"fsdp": 4, "tensor": 2},
    "fsdp": {"fsdp": 8},
}
CASES: Final = [
    pytest.param("scanned", "full", "fsdp-tensor", marks=pytest.mark.full),
    ("scanned", "dots", "fsdp"),
    pytest.param("unrolled", "full", "fsdp", marks=pytest.mark.full),
    pytest.param("unrolled", "dots", "fsdp-tensor", marks=pytest.mark.full),
    ("its own checkpoints", "none", "fsdp"),
    pytest.param("experts", "dots", "fsdp-tensor", marks=pytest.mark.full),
]


@functools.cache
def one_device(name: str, parts: int = 1) -> OneDevice:
    model, changes = MODELS[name]
    kinds = {"dtype": "float64", "param_dtype": "float64"}
    return on_one_device(models.job(model, **kinds, **changes), parts)


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "remat", "layout"), CASES)
def test_it_computes_the_same(name: str, remat: str, layout: str) -> None:
    with jax.enable_x64(True):
        outcome = check(
            one_device(name),
            steps=3,
            mesh=LAYOUTS[layout],
            remat=remat,
            offload="activations",
        )
        moved = puts(outcome.step)
    assert outcome.error < 1e-10, outcome.worst_path
    assert outcome.compilations == 1
    # What is predicted to wait in host memory is what the program puts there; under
    # fsdp alone all of it is sharded over all devices.
    if layout == "fsdp":
        assert outcome.plan.memory.host_bytes == sum(moved) // 8 > 0
    assert moved


@pytest.mark.full
def test_each_micro_batch_waits_on_its_own() -> None:
    with jax.enable_x64(True):
        outcome = check(
            one_device("scanned", 2),
            mesh=LAYOUTS["fsdp"],
            remat="full",
            offload="activations",
        )
        moved = puts(outcome.step)
    assert outcome.error < 1e-10, outcome.worst_path
    assert outcome.plan.memory.host_bytes == sum(moved) // 8 // 2 > 0


@pytest.mark.full
def test_attention_that_goes_round() -> None:
    with jax.enable_x64(True):
        outcome = check(
            one_device("scanned"),
            mesh={"fsdp": 4, "context": 2},
            remat="dots",
            offload="activations",
            attention="ring",
        )
        moved = puts(outcome.step)
    assert outcome.error < 1e-10, outcome.worst_path
    assert outcome.plan.memory.host_bytes == sum(moved) // 8 > 0


def test_a_loop_inside_a_layer() -> None:
    """What a policy keeps of its turns waits, and the layer's input."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def layer(params: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["inner"])
        return x + y @ params["out"]

    def loss(net: Any, x: Any) -> Any:
        for params in net["layers"]:
            x = jax.checkpoint(layer, policy=policy)(params, x)
        return (x**2).mean()

    layers = [{"inner": np.ones((3, 16, 16), "f"), "out": np.ones((16, 16), "f")}] * 2
    net, x = {"layers": layers}, np.ones((64, 16), "f")
    plan = wh.plan(
        loss, net, x, cluster="h100:8", mesh={"fsdp": 8}, offload="activations"
    )
    step = wh.compile(plan, loss, net, devices=jax.devices())
    kept, given = 3 * 64 * 16 * 4, 64 * 16 * 4  # of both layers; the second's
    assert sorted(puts(step)) == [given, kept, kept]
    assert plan.memory.host_bytes == (given + 2 * kept) // 8


def puts(step: wh.TrainStep) -> list[int]:
    """Bytes of each array that a step puts into host memory, of all turns of loops."""
    arguments = step.abstract_state(), step._layout.abstract()

    def inside(jaxpr: Any, turns: int) -> Iterator[int]:
        for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
            if equation.primitive.name == "device_put":
                if "Host" in str(equation.params["devices"]):
                    aval = equation.outvars[0].aval
                    yield turns * int(np.prod(aval.shape)) * aval.dtype.itemsize
            loops = _compat.recursion(equation) == "scan"
            times = _compat.scan_parts(equation).length if loops else 1
            for inner in _compat.inner_jaxprs(equation):
                yield from inside(inner, turns * times)

    return [*inside(jax.make_jaxpr(step._runner.advance)(*arguments), 1)]


@pytest.mark.full
def test_parameters_and_what_no_region_is_around_stay() -> None:
    job = models.job("llama-test", layers=3)
    one = compiled(
        job,
        abstract_model(job),
        mesh={"fsdp": 8},
        remat="full",
        offload="activations",
    )
    tokens = 16 * 24
    assert puts(one) == [3 * tokens * 64 * 4]  # the stream between layers, no more


@pytest.mark.full
def test_it_goes_with_the_optimizers_state() -> None:
    job = models.job("llama-test", layers=3)
    step, plain = (
        compiled(
            job,
            abstract_model(job),
            optimizer=optax.adam(1e-3),
            mesh={"fsdp": 8},
            remat="full",
            offload=offload,
            cluster="h100:8",
        )
        for offload in (["activations", "optimizer"], ())
    )
    assert step.plan.offload == ("optimizer", "activations")
    alone = [step.plan.what_if(offload=name).memory for name in step.plan.offload]
    assert step.plan.memory.host_bytes == sum(one.host_bytes for one in alone)
    losses = [trained(one, job) for one in (step, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def trained(step: wh.TrainStep, job: wh.Job) -> float:
    """The loss after an update."""
    state = step.init(job.make_model, rng=jax.random.key(0))
    state, _ = step(state, job.batch_at(0))
    return float(step(state, job.batch_at(1))[1]["loss"])


# Choosing.


def asked(memory: float = 80e9, **options: Any) -> wh.Plan:
    job = models.job("llama-test", embed=512, heads=8, layers=12, sequence=512)
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 512)),
        optimizer=optax.sgd(1e-3),
        mesh={"data": 8},
        zero=0,
        num_micro_batches=1,
        attention="gather",  # in blocks it keeps less
        **{"cluster": wh.cluster("h100:8").with_memory(int(memory)), **options},
    )


@pytest.mark.full
def test_it_is_chosen_where_nothing_else_fits() -> None:
    full = asked(remat="full")
    assert full.offload == () and full.memory.host_bytes == 0
    kept = full.memory.activations_bytes
    tight = asked(full.memory.total_bytes - 0.5 * kept)
    assert tight.offload == ("activations",) and tight.runnable
    assert tight.remat and tight.memory.host_bytes >= 0.5 * kept
    assert "activations in host memory" in str(tight)
    with pytest.raises(wh.WhaleError, match="no plan fits"):
        asked(full.memory.total_bytes - 0.5 * kept, offload=())


@pytest.mark.full
def test_transfers_hide_behind_the_computation() -> None:
    """Those of a fast link do, and of a slow one what is longer is exposed."""
    plans = [
        asked(remat="full", offload="activations", cluster=linked(speed))
        for speed in (1e12, 1e9, 0.5e9)
    ]
    fast, slow, slower = (plan.time.offload_seconds for plan in plans)
    moved = plans[0].memory.host_bytes
    assert fast == 0
    assert slower - slow == pytest.approx(2 * moved / 1e9, rel=1e-6)
    assert 0 < slow < 2 * moved / 1e9
    assert not any("not counted" in note for note in plans[0].notes)


def linked(bytes_per_second: float) -> wh.Cluster:
    cluster = wh.cluster("h100:8")
    kind = dataclasses.replace(
        cluster.slowest, host_link_bytes_per_second=bytes_per_second
    )
    nodes = [dataclasses.replace(node, kind=kind) for node in cluster.nodes]
    return dataclasses.replace(cluster, nodes=tuple(nodes))


@pytest.mark.full
def test_a_plan_remembers_it(tmp_path: Path) -> None:
    plan = asked(remat="dots", offload="activations")
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == plan
    assert plan.hash != asked(remat="dots").hash
    assert plan.memory.host_bytes > plan.what_if(remat="full").memory.host_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "none"}, 'remat="none" recomputes no layers. Take remat= one of'),
        ({"offload": ["activations", "disk"]}, "'disk' is none of optimizer, activ"),
    ],
)
def test_what_cannot_be_moved_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wh.WhaleError, match=message):
        asked(**{"offload": "activations", **options})


def test_a_model_without_layers_is_named() -> None:
    def loss(net: Any, x: Any) -> Any:
        return (x @ net["w"]).mean()

    net = {"w": np.ones((16, 8), np.float32)}
    with pytest.raises(wh.WhaleError, match="Put jax.checkpoint around"):
        wh.plan(
            loss,
            net,
            np.ones((8, 16), np.float32),
            cluster="h100:8",
            offload="activations",
        )


def test_a_backend_without_host_memory_is_named() -> None:
    from tests.whalejax.test_offload import _Device
    from whalejax.runtime.plan_compatibility import check_host_memory

    plan = asked(remat="full", offload="activations")
    with pytest.raises(wh.WhaleError) as caught:
        check_host_memory(plan, _Device())
    amount = f"{plan.memory.host_bytes / 1e6:.0f} MB of each device"
    assert f"activations in host memory ({amount})" in str(caught.value)


@pytest.mark.full
def test_a_cluster_that_does_not_know_its_host() -> None:
    cpu = wh.cluster("cpu:8").with_memory(80 * 10**9)
    plan, there = (
        asked(remat="full", offload=offload, cluster=cpu)
        for offload in ("activations", ())
    )
    assert any("are not counted" in note for note in plan.notes)
    assert plan.time.offload_seconds == 0
    kept = there.memory.activations_bytes - plan.memory.activations_bytes
    # Versions of JAX differ in what else a layer is given.
    assert plan.memory.host_bytes == pytest.approx(kept, rel=0.1)


# The command line.

COMMAND: Final = "plan llama-test --set layers=3 --cluster h100:8 --batch 16".split()


@pytest.mark.full
def test_the_command_line_takes_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    options = ["--remat", "full", "--offload", "activations", "optimizer", "-o", path]
    assert main.main([*COMMAND, *options]) == 0
    assert "optimizer and activations in host memory" in capsys.readouterr().out
    plan = wh.Plan.load(path)
    assert plan.offload == ("optimizer", "activations") and plan.runnable
    again = ["train", "llama-test", "--plan", path, "--offload", "none"]
    assert main.main(again) == 2
    assert f"--offload none was given with --plan {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (["none", "optimizer"], "'none' is none of optimizer, activations, params"),
        (["disk"], "invalid choice"),
    ],
)
def test_the_command_line_names_what_it_does_not_know(
    what: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*COMMAND, "--offload", *what]) == 2
    assert message in capsys.readouterr().err
