"""Memory that a plan leaves free, and plans taken because a compiler accepts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax.api import plan_request
from whalejax.planner.plan_errors import NothingFits
from whalejax.verification import checking
from whalejax.verification.targets import NoCompiler, VerifyError


MODEL = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(4)}
BATCH = jax.ShapeDtypeStruct((64, 1024), jnp.float32)


def loss(model: Any, x: jax.Array) -> jax.Array:
    for weight in model.values():
        x = jnp.tanh(x @ weight)
    return x.mean()


def planned(cluster: wh.Cluster, margin: Any = 0, **settings: Any) -> wh.Plan:
    settings = {"optimizer": optax.sgd(1e-3, momentum=0.9), **settings}
    return wh.plan(loss, MODEL, BATCH, cluster=cluster, margin=margin, **settings)


def exactly(plan: wh.Plan) -> wh.Cluster:
    """The plan's devices with as much memory as it takes."""
    return plan.cluster.with_memory(plan.memory.total_bytes)


WHOLE = wh.cluster("h100:4")


def test_a_margin_is_left_free() -> None:
    """What fits to the byte without a margin gives way to a plan that takes less."""
    first = planned(WHOLE, mesh={"data": 4})
    tight = exactly(first)
    assert planned(tight, mesh={"data": 4}).memory == first.memory
    with pytest.raises(wh.WhaleError) as refused:
        planned(tight, mesh={"data": 4}, num_micro_batches=1, zero=0, margin=0.5)
    assert "margin=0.5 keeps" in str(refused.value)
    other = planned(tight, margin=0.5)
    assert other.memory.total_bytes * 1.5 <= tight.memory_bytes
    assert other.cluster == tight
    assert wh.Plan.from_document(other.document()) == other
    assert other.what_if(margin=None).memory.total_bytes > other.memory.total_bytes


def test_a_margin_on_stages_with_programs_of_their_own() -> None:
    cluster = wh.cluster("h100:2+a100-80:2")
    plan = planned(cluster, mesh={"stage": 2}, margin=0.1, num_micro_batches=4)
    assert plan.cluster == cluster
    memory = {kind.name: kind.memory_bytes for kind in cluster.kinds}
    for stage in plan.stage_plans:
        for kind in stage.cluster.kinds:
            assert kind.memory_bytes == memory[kind.name]
    assert wh.Plan.from_document(plan.document()) == plan


Answers = Callable[..., list[wh.Plan]]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Stands in for a compiler: programs take a factor of what is predicted."""

    def install(factor: float, failure: Exception | None = None) -> list[wh.Plan]:
        compiled: list[wh.Plan] = []

        def verify(
            self: Any, plan: wh.Plan, topology: str | None, **settings: Any
        ) -> Any:
            compiled.append(plan)
            if failure is not None:
                raise failure
            needed = int(factor * plan.memory.total_bytes)
            return SimpleNamespace(
                fits=needed <= plan.cluster.memory_bytes,
                peak=SimpleNamespace(compiled=needed),
                target=SimpleNamespace(words="h100:4"),
                failure="",
                refused="",
            )

        monkeypatch.setattr(plan_request.PlanQuestion, "verify", verify)
        return compiled

    return install


def test_a_refused_plan_gives_way_to_one_that_is_accepted(compiler: Answers) -> None:
    tight = exactly(planned(WHOLE, mesh={"data": 4}))
    compiler(1.3)
    found = planned(tight, verified=True)
    assert 1.3 * found.memory.total_bytes <= tight.memory_bytes
    (note,) = (n for n in found.notes if n.startswith("verified: h100:4 accepts it"))
    assert "was refused" in note
    assert found.cluster == tight
    changed = found.what_if(zero=0)
    assert 1.3 * changed.memory.total_bytes <= tight.memory_bytes
    assert changed.notes[-1].startswith("verified: ")
    estimate = found.what_if(runnable=False)
    assert not any(note.startswith("verified: ") for note in estimate.notes)


def test_what_the_user_fixed_stays_fixed(compiler: Answers) -> None:
    tight = exactly(planned(WHOLE, mesh={"data": 4}))
    compiler(1.3)
    fixed = {"mesh": {"data": 4}, "num_micro_batches": 1, "zero": 0}
    fixed |= {"remat": "none", "offload": ()}
    with pytest.raises(wh.WhaleError, match="and no plan leaves more room"):
        planned(tight, verified=True, **fixed)


def test_a_plan_accepted_at_once_is_the_plan(compiler: Answers) -> None:
    compiler(1.0)
    plain, found = planned(WHOLE), planned(WHOLE, verified=True)
    assert dataclasses.replace(found, notes=plain.notes) == plain
    assert found.notes[-1].startswith("verified: h100:4 accepts it")


def test_a_compiler_that_is_missing_is_said(compiler: Answers) -> None:
    compiler(1.0, NoCompiler("install it"))
    found = planned(WHOLE, verified=True)
    assert "not verified, as there is no compiler: install it" in found.notes


def test_a_compiler_that_gives_no_answer_names_the_plan(compiler: Answers) -> None:
    compiler(1.0, VerifyError("it took longer than 3600 s"))
    with pytest.raises(wh.WhaleError) as refused:
        planned(WHOLE, verified=True, mesh={"data": 4})
    assert "data 4" in str(refused.value)
    assert "it took longer than 3600 s" in str(refused.value)


def test_plans_of_several_programs_are_not_verified(compiler: Answers) -> None:
    compiled = compiler(1.0)
    with pytest.raises(wh.WhaleError, match="every rank of data of the plan"):
        planned(wh.cluster("v100-32:2+p100-16:2"), mesh={"data": 4}, verified=True)
    with pytest.raises(wh.WhaleError, match="verified=True compiles one program"):
        planned(WHOLE, verified=True, swarm=True)
    assert not compiled


def test_a_search_compiles_one_plan_of_each_cluster(compiler: Answers) -> None:
    compiled = compiler(1.0)
    settings: Any = {"optimizer": optax.sgd(1e-3), "verified": True, "each": 2}
    clusters = ["h100:4", "a100-80:4"]
    found = wh.search(loss, MODEL, BATCH, clusters=clusters, **settings)
    assert len(found.plans) > len(compiled) == len(clusters)


def test_a_refusal_is_planned_again_once(
    compiler: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that would fit, which a user's own ``verify`` reports, is not sought."""
    tight = exactly(planned(WHOLE, mesh={"data": 4}))
    compiled = compiler(1.3)
    planned(tight, verified=True)
    assert len(compiled) == 2
    sought: list[bool] = []
    monkeypatch.undo()
    monkeypatch.setattr(
        checking,
        "check",
        lambda *_, again, **__: sought.append(again is not None),
    )
    question: Any = planned(WHOLE).question
    question.verify(None, None, timeout_seconds=1.0, better=False)
    question.verify(None, None, timeout_seconds=1.0)
    assert sought == [False, True]


def test_the_band_is_that_of_most_of_the_products() -> None:
    """A loop that makes few of them does not make a program one of scanned layers."""

    def mostly_written_out(model: Any, x: jax.Array) -> jax.Array:
        small = jnp.eye(2)
        y, _ = jax.lax.scan(lambda y, _: (y @ small, None), x[:, :2], length=3)
        return loss(model, x) + y.mean()

    fixed: Any = {"mesh": {"data": 4}, "zero": 0, "num_micro_batches": 1}
    fixed |= {"remat": "none", "offload": (), "cluster": WHOLE}
    total = wh.plan(mostly_written_out, MODEL, BATCH, margin=0, **fixed)
    nearly = WHOLE.with_memory(int(1.2 * total.memory.total_bytes))
    plan = wh.plan(mostly_written_out, MODEL, BATCH, **{**fixed, "cluster": nearly})
    assert any("margin=0.15 was kept free" in note for note in plan.notes)


def test_a_compiler_that_refuses_everything(compiler: Answers) -> None:
    compiler(1e9)
    with pytest.raises(wh.WhaleError, match="no plan leaves more room"):
        planned(exactly(planned(WHOLE)), verified=True)


def test_bad_margins() -> None:
    for margin in (-0.1, float("nan"), "much", True, 1, 1.5):
        with pytest.raises(wh.WhaleError, match="margin is .* 0 to below 1"):
            planned(WHOLE, margin=margin)
    with pytest.raises(wh.WhaleError, match="verified=True compiles the plan"):
        planned(WHOLE, verified=True, runnable=False)


def test_plans_for_gpus_leave_what_compiled_programs_took_more() -> None:
    """The default is the upper edge of the band; notes of full plans give both."""
    fixed: Any = {"mesh": {"data": 4}, "zero": 0, "num_micro_batches": 1}
    fixed |= {"remat": "none", "offload": ()}
    plain = planned(WHOLE, None, **fixed)
    assert not any(note.startswith("memory: ") for note in plain.notes)
    total = plain.memory.total_bytes
    enough = WHOLE.with_memory(int(1.16 * total))
    (note,) = (
        n for n in planned(enough, None, **fixed).notes if n.startswith("memory: ")
    )
    assert "95% to 115%" in note and "margin=0.15 was kept free" in note
    short = WHOLE.with_memory(int(1.14 * total))
    with pytest.raises(NothingFits) as refused:
        planned(short, None, **fixed)
    assert refused.value.of_bytes == short.memory_bytes
    assert planned(WHOLE.with_memory(total), **fixed).memory == plain.memory


def test_a_refusal_names_what_was_fixed() -> None:
    """What the planner may not choose is the first remedy that a user has."""
    tiny = WHOLE.with_memory(1 << 20)
    with pytest.raises(NothingFits) as refused:
        planned(tiny, mesh={"data": 4}, remat="none")
    said = str(refused.value)
    assert "mesh={'data': 4} and remat='none' are fixed; without one of them" in said
    with pytest.raises(NothingFits) as refused:
        planned(tiny, mesh={"data": 4}, margin=0.5)
    said = str(refused.value)
    assert "mesh={'data': 4} is fixed; without it" in said
    assert "margin=0.5 keeps" in said
    with pytest.raises(NothingFits) as refused:
        planned(tiny)
    assert "fixed" not in str(refused.value)


def test_a_refusal_names_the_marks() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        with wh.replicate():
            return jnp.mean(jnp.tanh(x @ w))

    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    with pytest.raises(NothingFits, match=r"the mark replicate\(\) is fixed; without"):
        wh.plan(loss, w, x, cluster=wh.cluster("h100:2").with_memory(1 << 20))


def _sorted(model: Any, x: jax.Array) -> jax.Array:
    return loss(model, jnp.sort(x, axis=-1))


def _transformed(model: Any, x: jax.Array) -> jax.Array:
    return loss(model, jnp.fft.fft(x).real)


def _recurrent(model: Any, x: jax.Array) -> jax.Array:
    def turn(carry: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ model["w0"] + at), None

    steps = jnp.moveaxis(x.reshape(len(x), 2, 512), 1, 0)
    start = jnp.zeros((len(x), 1024), x.dtype)
    wide = jnp.concatenate([steps, steps], axis=-1)
    return loss(model, jax.lax.scan(turn, start, wide)[0])


def _counted(model: Any, x: jax.Array) -> jax.Array:
    """A loop that stacks nothing."""

    def turn(_: Any, carry: jax.Array) -> jax.Array:
        return jnp.tanh(carry @ model["w0"])

    return loss(model, jax.lax.fori_loop(0, 8, turn, x))


def _looked_up(model: Any, x: jax.Array) -> jax.Array:
    rows = model["table"][jnp.abs(x[:, :8]).astype(int)]
    return loss({"w": model["w0"]}, rows.sum(1)).mean()


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (_sorted, "sorts"),
        (_transformed, "Fourier transforms"),
        (_recurrent, "weights that every turn of a loop reads"),
        (_counted, "weights that every turn of a loop reads"),
        (_looked_up, "tables that hold most parameters"),
    ],
)
def test_a_program_of_no_known_kind_has_a_wider_margin_and_says_so(
    function: Callable[..., Any], pattern: str
) -> None:
    """Its memory is not nearly full: the note stands in any case."""
    model = {**MODEL, "table": jax.ShapeDtypeStruct((65_536, 1024), jnp.float32)}
    model = model if function is _looked_up else MODEL
    options = {"optimizer": optax.sgd(1e-3), "cluster": "v5e:2x2"}
    plan = wh.plan(function, model, BATCH, **options)
    (note,) = [n for n in plan.notes if n.startswith("memory: few or no programs with")]
    assert pattern in note and "margin=0.25 was kept free" in note
    known = wh.plan(loss, MODEL, BATCH, **options)
    assert not any("memory: no program" in n for n in known.notes)
