"""Plans held against real compilers: this machine's, and TPU's where it is there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import models
from whalejax.cli import main
from whalejax.jobs import abstract_model
from whalejax.verification import checking, compile_worker, gpu
from whalejax.verification.comparison import Verification, rematerializations
from whalejax.verification.processes import VerifyError, _by_value
from whalejax.verification.quantities import Quantity
from whalejax.verification.targets import target_of


needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the extra tpu-compile (libtpu) is not installed",
)
needs_gpu_compiler = pytest.mark.skipif(
    not (gpu.folder() / "ready").exists(),
    reason="the GPU compiler was not set up (whalejax verify --setup-gpu)",
)


def planned(
    name: str, cluster: str | wh.Cluster, batch: int = 16, **options: Any
) -> wh.Plan:
    """A plan of a reference model."""
    job = models.job(name, annotated=False, **options.pop("model", {}))
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        job.batch_at(0, batch),
        optimizer=job.optimizer,
        cluster=cluster,
        **options,
    )


def traffic(found: Verification) -> dict[str, tuple[float, float]]:
    """Predicted and compiled bytes by kind and axes."""
    return {q.name: (q.predicted or 0, q.compiled or 0) for q in found.collectives}


# The real TPU compiler.

LARGER: Final = {"sequence": 512, "vocab": 16_384, "embed": 512, "mlp": 2048}
TPU: Final = [
    ("gpt-test", {**LARGER, "scan_layers": True}, "v5e:2x2", {"fsdp": 4}),
    ("moe-test", {}, "v5e:4x4", {"data": 4, "expert": 4}),
    ("gpt-test", {}, "v5p:2x2x4", {"data": 4, "tensor": 4}),
]


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.relaxed_promotion
def test_compiler_options_are_planned_with_and_compiled_with() -> None:
    plan = planned(
        "gpt-test",
        "v5e:2x2",
        model={"embed": 512, "mlp": 2048, "scan_layers": True},
        mesh={"fsdp": 4},
        precision="bf16",
    )
    off = {"xla_tpu_enable_all_reduce_scatter_fusion": False}
    for one in (plan, plan.what_if(compiler_options=off)):
        assert wh.Plan.from_document(one.document()) == one
        found = traffic(one.verify(timeout_seconds=300))
        scattered = found.get("reduce-scatter over fsdp", (0, 0))
        assert all(scattered) if one is plan else not any(scattered)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize(
    ("topology", "kind"), [("v4:2x2x2", "TPU v4"), ("v7x:2x2x1", "TPU7x")]
)
def test_kinds_with_two_cores_a_chip(topology: str, kind: str) -> None:
    """JAX sees a v4's two cores as one device, and a v7x's as two."""
    found = planned("mlp-test", topology).verify(timeout_seconds=300)
    assert found.device_kind == kind
    assert not found.refused and not found.failure
    assert found.product_flops.compiled == found.product_flops.predicted


@pytest.mark.full
@needs_tpu_compiler
def test_an_option_the_compiler_does_not_know_is_named() -> None:
    plan = planned("mlp-test", "v5e:2x2", compiler_options={"xla_cpu_ftz": "x"})
    with pytest.raises(wh.WhaleError, match="does not accept xla_cpu_ftz=x"):
        plan.verify(timeout_seconds=300)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("name", "sizes", "topology", "mesh"),
    [*(pytest.param(*one, marks=pytest.mark.full) for one in TPU[:-1]), TPU[-1]],
)
def test_a_tpu_compiles_what_was_planned(
    name: str, sizes: Mapping[str, Any], topology: str, mesh: Mapping[str, int]
) -> None:
    options: dict[str, Any] = {"mesh": mesh, "zero": 0, "precision": "bf16"}
    plan = planned(name, topology, batch=64, model=sizes, **options)
    found = plan.verify(timeout_seconds=300)
    assert found.fits and not found.failure and not found.refused
    assert "libtpu" in found.versions
    arguments = found.memory[0]
    assert arguments.name == "arguments"
    # Rows of a few numbers are padded to whole tiles.
    assert arguments.compiled >= arguments.predicted > 0
    memory = {q.name: q.compiled for q in found.memory}
    assert memory["arguments"] + memory["temporaries"] == memory["peak"]
    assert found.peak.compiled > arguments.compiled
    assert found.product_flops.compiled == pytest.approx(
        found.product_flops.predicted, rel=0.02
    )
    predicted, compiled = map(sum, zip(*traffic(found).values(), strict=True))
    assert predicted == pytest.approx(compiled, rel=0.02)
    if sizes:  # small programs live on the chip
        assert found.peak.predicted == pytest.approx(found.peak.compiled, rel=0.15)
    assert set(found.document()["versions"]) == {"jax", "libtpu"}
    json.dumps(found.document())
    assert "memory: peak" in str(found)
    # What compilers run as another collective of the same traffic shows in the sum.
    moved = (
        Quantity(name="reduce-scatter over data", predicted=3e7, compiled=None),
        Quantity(name="all-reduce over data", predicted=1e7, compiled=4e7),
    )
    said = str(dataclasses.replace(found, collectives=moved)).splitlines()
    (line,) = (one for one in said if one.startswith("all collectives"))
    assert line.split()[2:] == ["40", "MB", "40", "MB", "+0.0%"]


@needs_tpu_compiler
@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_what_is_gathered_while_blocks_of_attention_run_counts_once() -> None:
    sizes = {**LARGER, "sequence": 1024, "vocab": 1024, "heads": 4, "layers": 2}
    plan = planned(
        "gpt-test",
        "v5e:2x2",
        batch=8,
        model={**sizes, "scan_layers": True},
        mesh={"fsdp": 4},
        precision="bf16",
        attention="ring",
        remat="none",
    )
    found = plan.verify(timeout_seconds=300)
    predicted, compiled = traffic(found)["all-gather over fsdp"]
    assert compiled == pytest.approx(predicted, rel=0.02)


@needs_tpu_compiler
@pytest.mark.full
@pytest.mark.parametrize("window", [(256, 0), (256, 256)])
def test_blocks_outside_a_window_are_neither_planned_nor_compiled(
    window: tuple[int, int],
) -> None:
    def loss(p: Any, x: Any) -> Any:
        query, key, value = (jnp.einsum("bse,ehd->bshd", x, p[n]) for n in "qkv")
        seen = jax.nn.dot_product_attention(query, key, value, local_window_size=window)
        return (seen**2).mean()

    weight = jax.ShapeDtypeStruct((128, 4, 32), jnp.float32)
    plan = wh.plan(
        loss,
        dict.fromkeys("qkv", weight),
        jax.ShapeDtypeStruct((8, 2048, 128), jnp.float32),
        optimizer=optax.sgd(0.1),
        cluster="v5e:2x2",
        mesh={"data": 4},
        attention="ring",
    )
    found = plan.verify(timeout_seconds=300)
    assert found.product_flops is not None and found.product_flops.difference == 0


@needs_tpu_compiler
@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_long_sequences_take_what_was_planned() -> None:
    sizes = {"embed": 512, "heads": 4, "mlp": 1024, "layers": 2, "scan_layers": True}
    plan = planned(
        "gpt-test",
        "v5e:2x2",
        batch=1,
        model={**sizes, "vocab": 1024, "sequence": 65_536},
        mesh={"context": 4},
        precision="bf16",
        attention="ring",
        remat="none",
    )
    found = plan.verify(timeout_seconds=600)
    # Without sums of gradients, that of a Llama was 15 % too small.
    assert found.peak.predicted == pytest.approx(found.peak.compiled, rel=0.08)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.relaxed_promotion  # optimizers are traced for the better plan
def test_what_does_not_fit_is_said_with_the_compilers_figure() -> None:
    plan = _too_large()
    found = plan.verify(timeout_seconds=300)
    assert not found.fits
    assert found.peak.compiled > found.capacity_bytes > 15 * 2**30
    assert "RESOURCE_EXHAUSTED" in found.failure
    assert found.better is not None
    assert found.better.memory.total_bytes < plan.memory.total_bytes
    assert "DOES NOT FIT" in str(found)


def _too_large() -> wh.Plan:
    """A plan that would fit a device of twice the memory."""
    cluster = wh.cluster("v5e:2x2").with_memory(64 * 2**30)
    job = models.job("gpt-test", annotated=False, sequence=512, vocab=32768)
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        job.batch_at(0, 1024),
        optimizer=job.optimizer,
        cluster=cluster,
        mesh={"data": 4},
        num_micro_batches=1,
    )


# This machine's compiler.


@pytest.mark.full
def test_the_local_compiler_answers_with_the_same_table() -> None:
    mesh = {"data": 2, "tensor": 4}
    # Where the sequence is divided, XLA adds one number to another before it reduces
    # them, of 768 bytes that the plan counts.
    plan = planned("gpt-test", "cpu:8", mesh=mesh, sequence_parallel=False)
    found = plan.verify("local", timeout_seconds=300)
    assert found.fits and not found.refused
    assert found.capacity_bytes == plan.cluster.memory_bytes
    predicted, compiled = zip(*traffic(found).values(), strict=True)
    # Clipping by the global norm adds a few numbers that belong to the optimizer.
    assert sum(predicted) == pytest.approx(sum(compiled), rel=1e-3)
    assert found.product_flops.difference == 0
    assert found.memory[0].difference == pytest.approx(0, abs=1e-3)
    assert not found.unplanned


@pytest.mark.full
def test_a_plan_for_other_hardware_compiles_here_too() -> None:
    plan = planned("mlp-test", "v5e:2x2", batch=32)
    found = plan.verify("local", timeout_seconds=300)
    assert not found.refused and not found.failure
    assert found.device_kind == "cpu"
    assert "capacity is unknown" in str(found)


def test_the_model_line_behind_a_warning_is_named() -> None:
    words = (
        "W0000 spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The "
        "compiler was not able to go from sharding {devices=[2,1]<=[2]} to "
        "{replicated} without doing a full rematerialization of the tensor for HLO "
        "operation: %dot.1 = f32[8,4]{1,0} dot(%a, %b), metadata={"
        'op_name="jit(_advance)/head/dot_general" source_file="net.py" source_line=7}.'
    )
    (found,) = rematerializations(words + "\n" + words)
    assert found.place == "net.py:7"
    assert found.name == "jit(_advance)/head/dot_general"
    assert "from {devices=[2,1]<=[2]} to {replicated}" in found.what


# What a user may get wrong.


def test_an_unknown_topology_lists_the_known_ones() -> None:
    plan = planned("mlp-test", "v5e:2x2")
    with pytest.raises(wh.WhaleError, match=r"v9:4(.|\n)*for v4:4x4x4, v5e:4x4"):
        target_of(plan, "v9:4")
    with pytest.raises(wh.WhaleError, match="there is no compiler for t4:4"):
        target_of(plan, "t4:4")


def test_a_plan_for_another_number_of_devices_is_refused() -> None:
    plan = planned("mlp-test", "v5e:2x2")
    with pytest.raises(wh.PlanError, match="is for 4 devices .*v5e:4x4 has 16"):
        plan.verify("v5e:4x4")


def test_a_missing_compiler_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned("mlp-test", "v5e:2x2")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(VerifyError, match=r"extra whalejax\[tpu-compile\]"):
            checking._compiler(target_of(plan))
    monkeypatch.setenv("WHALEJAX_CACHE", str(tmp_path))
    with pytest.raises(VerifyError, match="whalejax verify --setup-gpu"):
        checking._compiler(target_of(plan, "h100:4"))


@pytest.mark.relaxed_promotion  # Adam promotes its count.
def test_an_estimate_cannot_be_verified() -> None:
    plan = planned("gpt-test", "v5e:2x2", runnable=False, offload="params")
    with pytest.raises(wh.PlanError, match="is an estimate"):
        plan.verify()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_limit_must_be_a_time(seconds: float) -> None:
    plan = planned("mlp-test", "cpu:8")
    with pytest.raises(VerifyError, match="expected a number of seconds above 0"):
        plan.verify(timeout_seconds=seconds)


def _in_a_worker() -> bool:
    return os.environ.get("WHALEJAX_TEST_WORKER") == str(os.getppid())


def _dying(w: Any, x: Any) -> Any:
    if _in_a_worker():
        print("the compiler is not well", flush=True)
        os.abort()
    return (x @ w).mean()


def _hanging(w: Any, x: Any) -> Any:
    if _in_a_worker():
        print("still thinking", flush=True)
        time.sleep(600)
    return (x @ w).mean()


def _plan_of(loss: Any) -> wh.Plan:
    w = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    return wh.plan(loss, w, x, optimizer=optax.sgd(0.1), cluster="cpu:8")


def test_a_compiler_that_dies_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALEJAX_TEST_WORKER", str(os.getpid()))
    with pytest.raises(VerifyError, match=r"SIGABRT(.|\n)*compiler is not well"):
        _plan_of(_dying).verify(timeout_seconds=120)


@pytest.mark.full
def test_a_compiler_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALEJAX_TEST_WORKER", str(os.getpid()))
    with pytest.raises(VerifyError, match=r"did not end in 20 s(.|\n)*still thinking"):
        _plan_of(_hanging).verify(timeout_seconds=20)


@pytest.mark.parametrize(
    "options, first",
    [
        ({"cluster": "v100-32:2+p100-16:2", "mesh": {"stage": 1}}, "v100-32:2"),
        ({"cluster": "h100:4", "mesh": {"stage": 2}, "shares": [3, 1]}, "h100:2"),
        ({"cluster": "v100-32:2x1+p100-16:2x1", "shares": [1, 1]}, "v100-32:2x1"),
    ],
)
def test_programs_of_their_own_are_verified_one_by_one(
    options: dict[str, Any], first: str
) -> None:
    def loss(w: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean()

    weights = {name: np.zeros((256, 256), np.float32) for name in "ab"}
    plan = wh.plan(loss, weights, np.zeros((16, 256), np.float32), **options)
    with pytest.raises(wh.PlanError, match=f'what_if.cluster="{first}", shares=None'):
        plan.verify()
    assert plan.what_if(cluster=first, shares=None, mesh=None).num_devices == 2


def test_stages_with_their_own_programs_are_verified_together() -> None:
    def loss(w: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean()

    weights = {name: np.zeros((256, 256), np.float32) for name in "ab"}
    plan = wh.plan(
        loss,
        weights,
        np.zeros((16, 256), np.float32),
        optimizer=optax.sgd(0.1),
        cluster="cpu:2",
        mesh={"stage": 2},
        num_micro_batches=2,
    )
    assert len(plan.stage_plans) == 2
    text = str(plan.verify())
    assert "memory: stage 1: peak" in text and "handed back by part 1" in text


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def loss(w: Any, x: Any) -> Any:
        with lock:
            return (x @ w).mean()

    with pytest.raises(VerifyError, match="cannot be sent to another process"):
        _plan_of(loss).verify()


class Unsent:
    def __getstate__(self) -> Any:
        raise RuntimeError("it stays here")


def test_whatever_an_object_raises_is_named() -> None:
    here = Unsent()

    def loss(w: Any, x: Any) -> Any:
        assert here is not None
        return (x @ w).mean()

    with pytest.raises(VerifyError, match="to another process: it stays here"):
        _plan_of(loss).verify()


@pytest.mark.full
def test_a_failing_model_is_not_blamed_on_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHALEJAX_TEST_WORKER", str(os.getpid()))

    def loss(w: Any, x: Any) -> Any:
        if _in_a_worker():
            raise ValueError("not today")
        return (x @ w).mean()

    with pytest.raises(VerifyError, match="tracing the model .*ValueError: not today"):
        _plan_of(loss).verify()


def test_another_model_is_the_plans_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    planned("mlp-test", "cpu:8", batch=32).save(file)
    assert main.main(["verify", str(file), "--model", "gpt-test"]) == 2
    assert "made for another model or batch" in capsys.readouterr().err
    assert main.main(["verify", str(file), "--set", "layers=3"]) == 2
    assert "--set was given without --model" in capsys.readouterr().err


@pytest.mark.full
def test_two_at_once_both_work() -> None:
    plan = planned("mlp-test", "cpu:8")
    found: list[Verification] = []
    threads = [
        threading.Thread(target=lambda: found.append(plan.verify(timeout_seconds=300)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = found
    assert first.memory == second.memory
    assert first.collectives == second.collectives


# The command.


def test_the_command_verifies_a_plan_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main.main(["plan", "mlp-test", "--cluster", "cpu:8", "-o", str(file)]) == 0
    before = file.read_bytes()
    capsys.readouterr()
    assert main.main(["verify", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] and said["topology"] == "local"
    assert {q["name"] for q in said["memory"]} >= {"arguments", "peak"}
    assert file.read_bytes() == before


def test_a_plan_without_its_model_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    plan = planned("mlp-test", "cpu:8")
    plan.save(file)
    assert dataclasses.replace(plan, source=("mlp-test",)).hash == plan.hash
    assert main.main(["verify", str(file)]) == 2
    assert "Name the model with --model" in capsys.readouterr().err
    assert main.main(["verify"]) == 2
    assert "PLAN.json is missing" in capsys.readouterr().err


@needs_gpu_compiler
@pytest.mark.slow
def test_a_gpu_compiles_what_was_planned() -> None:
    plan = planned("gpt-test", "h100:2x8", mesh={"fsdp": 8, "data": 2})
    found = plan.verify(timeout_seconds=300)
    assert found.fits and not found.refused
    assert found.device_kind == "NVIDIA H100 80GB HBM3"


def test_functions_with_rules_that_a_program_defines_are_sent() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    ruled = jax.custom_vjp(double)
    # It refers to itself, as functions that a program defines at its top do.
    ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (3 * g,))
    again = cloudpickle.loads(_by_value({"loss": ruled}))["loss"]
    assert again is not ruled
    assert jax.value_and_grad(again)(1.0) == (2.0, 3.0)


@pytest.mark.parametrize("from_file", [False, True])
def test_models_of_modules_that_nobody_else_can_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_file: bool
) -> None:
    """Modules made by hand, or loaded from a file that no import finds."""
    name, source = "a_module_of_this_test", "def loss(x):\n    return 2 * x\n"
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    module = types.ModuleType(name)
    if from_file:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, module.__dict__)
    sent = _by_value({"loss": module.__dict__["loss"]})
    monkeypatch.delitem(sys.modules, name)
    assert cloudpickle.loads(sent)["loss"](3) == 6


@pytest.mark.full
def test_a_plan_that_the_compiler_refuses_gives_way_to_one_it_accepts() -> None:
    """By prediction the first choice fits to the byte; compiled it needs more."""
    first = planned("mlp-test", "cpu:4", mesh={"data": 4})
    needed = first.verify("local", timeout_seconds=300).peak.compiled
    assert needed > first.memory.total_bytes
    tight = first.cluster.with_memory((needed + first.memory.total_bytes) // 2)
    assert not planned("mlp-test", tight, mesh={"data": 4}).verify().fits
    found = planned("mlp-test", tight, mesh={"data": 4}, verified=True)
    assert "was refused" in found.notes[-1]
    assert found.verify(timeout_seconds=300).fits


def test_an_error_of_the_loss_comes_back_with_its_notes() -> None:
    error = KeyError("z")
    error.add_note(
        "whalejax: loss_fn was given an object of class Net as model, and as batch: …"
    )
    error.add_note("For simplicity, JAX has removed its internal frames")
    failure = compile_worker._failure(error, "asking")["failure"]
    assert failure == (
        "KeyError: 'z'\nwhalejax: loss_fn was given an object of class Net as model, "
        "and as batch: …"
    )


@needs_tpu_compiler
@pytest.mark.full
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("part", ["stages", "fewer devices"])
def test_some_of_the_chips_of_a_topology_are_compiled_for(part: str) -> None:
    if part == "stages":
        sizes = {"layers": 4, "scan_layers": False}
        plan = planned("gpt-test", "v5e:4x4", 32, model=sizes, mesh={"stage": 4})
        assert len(plan.stage_plans) == 4
    else:
        mesh = {"data": 8, "fsdp": 1, "tensor": 1, "context": 1, "stage": 1}
        plan = planned("gpt-test", "v5e:4x4", 8, mesh=mesh, allow_idle=True)
        assert plan.num_devices == 8
    found = plan.verify(timeout_seconds=300)
    assert not found.failure and not found.refused
    assert found.peak.compiled


@needs_tpu_compiler
@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_a_number_of_chips_that_no_compiler_takes_is_refused() -> None:
    plan = planned("gpt-test", "v5e:4x4", 12, mesh={"data": 12}, allow_idle=True)
    with pytest.raises(wh.PlanError, match="uses 12 of 16 chips"):
        plan.verify(timeout_seconds=300)


def test_the_program_that_a_compiler_dumps_is_left_out() -> None:
    text = (
        "INTERNAL: no such device.\n\t\n\nError while compiling %all-reduce = (f32[8])"
    )
    failure = compile_worker._failure(RuntimeError(text), "compiling")
    assert failure == {
        "failure": "RuntimeError: INTERNAL: no such device.",
        "phase": "compiling",
    }
