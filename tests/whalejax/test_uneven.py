"""Replicas that take unlike numbers of micro-batches compute what one device does."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests import cases
from whalejax import jobs, models
from whalejax.jobs import split_settings
from whalejax.lowering.sample_shares import checked_shares
from whalejax.planner.balance.measured_shares import Rebalance
from whalejax.planner.plan import uneven_replica_plans
from whalejax.planner.search.uneven_replicas import most_shares
from whalejax.user_code.losses import Job


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

TIGHT = 1e-10


def both(
    job: Job,
    shares: tuple[int, ...],
    inner: dict[str, int] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Steps of one device and of replicas, over the same micro-batches."""
    inner = inner or {}
    devices = len(shares) * int(np.prod([*inner.values()]))
    model = jobs.abstract_model(job)
    made = []
    for kind, count in (({}, 1), ({"mesh": inner, "shares": shares}, devices)):
        plan = wh.plan(
            job.loss_fn,
            model,
            job.batch_at(0),
            optimizer=job.optimizer,
            cluster=f"cpu:{count}",
            num_micro_batches=sum(shares),
            **{**split_settings(job), **kind, **options},
        )
        step = wh.compile(
            plan,
            job.loss_fn,
            model,
            optimizer=job.optimizer,
            devices=jax.devices()[:count],
        )
        made.append(step)
    assert made[1].plan.shares == shares
    return made[0], made[1]


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference of two trees, against the largest number of each leaf."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        scale = max(np.abs(b).max(initial=0), 1e-3)
        worst = max(worst, float(np.abs(a - b).max(initial=0) / scale))
    return worst


def worst_of(one: Any, step: Any, job: Job, steps: int = 2) -> float:
    """The largest difference of losses, metrics and states over some steps."""
    state, expected = (
        s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
    )
    worst = 0.0
    for index in range(steps):
        batch = job.batch_at(index)
        worst = max(worst, apart(step.eval(state, batch), one.eval(expected, batch)))
        state, metrics = step(state, batch)
        expected, wanted = one(expected, batch)
        worst = max(worst, apart(metrics, wanted))
        for part in ("params", "rest", "opt_state", "model"):
            ours, theirs = getattr(state, part), getattr(expected, part)
            worst = max(worst, apart(ours, theirs))
    assert int(state.step) == steps
    return worst


MODELS = {model.name: model for model in cases.MODELS}


@pytest.mark.parametrize(
    ("name", "shares", "inner"),
    [
        pytest.param("gpt", (5, 2, 1), {}, marks=pytest.mark.full),
        pytest.param("bert", (0, 8), {}, marks=pytest.mark.full),
        pytest.param(
            "gpt-scan", (3, 1), {"fsdp": 2, "tensor": 2}, marks=pytest.mark.full
        ),
        pytest.param(  # moving statistics
            "resnet", (3, 1), {"fsdp": 2}, marks=pytest.mark.full
        ),
        pytest.param("linen", (1, 2, 1), {}, marks=pytest.mark.full),
        pytest.param("moe-top-2", (3, 1), {"tensor": 2}, marks=pytest.mark.full),
        # One replica computes the whole batch of a loss that couples its samples.
        ("resnet", (1, 0), {"fsdp": 2}),
        ("moe-top-2", (0, 1), {"tensor": 2}),
    ],
)
def test_unlike_shares_equal_one_device(
    name: str, shares: tuple[int, ...], inner: dict[str, int]
) -> None:
    job = MODELS[name].job("float64", annotated=False)
    # Adam makes steps of what rounding leaves of a gradient that is zero.
    job = dataclasses.replace(job, optimizer=optax.sgd(0.1, momentum=0.9))
    with jax.enable_x64(True):
        assert worst_of(*both(job, shares, inner), job) <= TIGHT


class Dropping(nnx.Module):
    """A stream of random keys that counts, and a moving average of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs, param_dtype=jnp.float64)
        self.norm = nnx.BatchNorm(16, rngs=rngs, param_dtype=jnp.float64)
        self.norm.mean = nnx.BatchStat(jnp.zeros(16, jnp.float64))
        self.norm.var = nnx.BatchStat(jnp.ones(16, jnp.float64))
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs, param_dtype=jnp.float64)
        self.largest = nnx.BatchStat(jnp.zeros((), jnp.float64))

    def __call__(self, x: Any) -> Any:
        hidden = self.drop(self.norm(jnp.tanh(self.first(x))))
        top = jax.lax.stop_gradient(jnp.abs(x).max())
        self.largest[...] = jnp.maximum(self.largest[...], top)
        return self.last(hidden)


def dropping() -> Job:
    def loss(model: Dropping, batch: Any) -> Any:
        out = model(batch["x"])
        weight = batch["mask"].sum()
        total = (((out - batch["y"]) ** 2).mean(axis=1) * batch["mask"]).sum()
        return wh.WeightedLoss(total, weight), {"size": jnp.abs(out).mean()}

    def batch_at(index: int, size: int) -> Any:
        rng, samples = np.random.default_rng(index), size
        return {
            "x": rng.normal(size=(samples, 8)),
            "y": rng.normal(size=(samples, 4)),
            "mask": (rng.uniform(size=samples) < 0.7).astype("float64"),
        }

    return Job(
        loss_fn=loss,
        make_model=lambda key: Dropping(nnx.Rngs(key)),
        batch=batch_at,
        batch_size=16,
        optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        per_micro_batch=True,
    )


def test_weights_masks_counters_and_statistics() -> None:
    """Only a statistic that is no moving average differs: here a maximum."""
    job = dropping()
    with jax.enable_x64(True):
        one, step = both(job, (1, 3, 4))
        state, expected = (
            s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
        )
        for index in range(3):
            state, metrics = step(state, job.batch_at(index))
            expected, wanted = one(expected, job.batch_at(index))
            assert apart(metrics, wanted) <= TIGHT
        assert apart(state.params, expected.params) <= TIGHT
        model, same = state.model, expected.model
        assert apart(nnx.state(model.norm), nnx.state(same.norm)) <= TIGHT
        assert int(model.drop.rngs.count[...]) == int(same.drop.rngs.count[...]) == 3
        assert 0 < float(model.largest[...]) < float(same.largest[...])


@pytest.mark.full
def test_other_shares_compile_nothing_and_change_nothing(tmp_path: Path) -> None:
    job = dropping()
    with jax.enable_x64(True):
        one, step = both(job, (4, 4))
        step.rebalances = False
        state, expected = (
            s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
        )
        for index, shares in enumerate([(4, 4), (7, 1), (0, 8), (5, 3)]):
            step.shares = shares
            assert step.shares == shares
            state, _ = step(state, job.batch_at(index))
            expected, _ = one(expected, job.batch_at(index))
            assert apart(state.params, expected.params) <= TIGHT
        for replica in step._runner._replicas.values():
            programs = replica.begin, replica.add, replica.pack, replica.finish
            assert [p._cache_size() for p in programs] == [1, 1, 1, 1]  # type: ignore[attr-defined]
        step.save(tmp_path / "kept", state)
        alone, again = one.restore(tmp_path / "kept"), step.restore(tmp_path / "kept")
        assert (
            apart((alone.params, alone.opt_state), (state.params, state.opt_state)) == 0
        )
        alone, _ = one(alone, job.batch_at(9))
        again, _ = step(again, job.batch_at(9))
        assert apart(again.params, alone.params) <= TIGHT
        step(state, job.batch_at(9))
        with pytest.raises(wh.WhaleError, match="was donated to a step"):
            step(state, job.batch_at(9))


def test_replicas_meet_in_one_all_reduce_of_each_dtype() -> None:
    job = dropping()
    with jax.enable_x64(True):
        _, step = both(job, (3, 1), {"fsdp": 2})
        exchange = step._runner.exchange
        text = exchange.program.lower(exchange.abstract()).compile().as_text()
    lines = [line for line in text.splitlines() if "= " in line and "ROOT" not in line]
    kinds = ("all-reduce(", "all-gather(", "all-to-all(", "reduce-scatter(", "permute(")
    found = [kind for line in text.splitlines() for kind in kinds if f" {kind}" in line]
    assert lines and found == ["all-reduce("] * len(exchange.abstract())
    assert len(exchange.abstract()) == 2  # float64, and the paces in float32


@pytest.mark.full
def test_devices_of_unlike_kinds_in_one_process_add_up_by_copies() -> None:
    job = dropping()
    with jax.enable_x64(True):
        one, step = both(job, (3, 1))
        step._runner.exchange.program = step._runner._telling.program = None
        state, expected = (
            s.init(job.make_model, rng=jax.random.key(0)) for s in (step, one)
        )
        state, metrics = step(state, job.batch_at(0))
        expected, wanted = one(expected, job.batch_at(0))
        assert apart(metrics, wanted) <= TIGHT
        assert apart(state.params, expected.params) <= TIGHT


def simple(m: Any, b: Any) -> Any:
    return ((jnp.tanh(b["x"] @ m["a"]) @ m["b"] - 1) ** 2).mean()


WIDE = {
    "a": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
    "b": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
}
ROWS = {"x": jax.ShapeDtypeStruct((65536, 1024), jnp.float32)}


def test_a_replica_lies_inside_a_node_or_on_whole_ones() -> None:
    def planned(cluster: str) -> wh.Plan:
        options = {"cluster": cluster, "shares": [1, 1, 1, 1]}
        return wh.plan(simple, WIDE, ROWS, optimizer=optax.sgd(0.1), **options)

    assert planned("h100:4+h100:4+h100:8+a100-80:2x8").num_devices == 32
    with pytest.raises(wh.WhaleError, match="inside one node or on full nodes"):
        planned("h100:4+h100:8+h100:4+a100-80:2x8")


def test_mixed_devices_are_given_shares_by_their_speed(tmp_path: Path) -> None:
    plan = wh.plan(
        simple,
        WIDE,
        ROWS,
        optimizer=optax.adam(1e-3),
        cluster="v100-32:2+p100-16:2",
        num_micro_batches=32,
    )
    kinds = [plan.cluster.nodes[0].kind, plan.cluster.nodes[1].kind]
    assert kinds[0].name == "v100-32"
    assert sum(plan.shares) == 32 and len(plan.shares) == plan.axis_sizes["data"]
    half = len(plan.shares) // 2
    fast, slow = plan.shares[:half], plan.shares[half:]
    assert min(fast) > max(slow) > 0
    assert "as fast as even shares" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json").shares == plan.shares
    even = plan.what_if(shares=[16, 16] if half == 1 else [8] * 4)
    assert even.time.step_seconds > plan.time.step_seconds
    alike = plan.what_if(shares="even")
    assert len({*alike.shares}) == 1 and alike.num_devices == 4
    assert alike.time.step_seconds > plan.time.step_seconds
    assert not any("even shares" in note for note in alike.notes)


def test_programs_of_several_kinds_use_all_devices() -> None:
    options: Any = {"optimizer": optax.adam(1e-3), "cluster": "v100-32:1+p100-16:2"}
    found = wh.plan(simple, WIDE, ROWS, allow_idle=True, **options)
    assert len(found.shares) == found.num_devices == 3
    with pytest.raises(
        wh.WhaleError, match="have unequal shares and use all devices. Drop allow_idle"
    ):
        wh.plan(simple, WIDE, ROWS, allow_idle=True, mesh={"tensor": 2}, **options)


def test_a_split_on_one_device_has_no_effect() -> None:
    def split(model: Any, x: Any) -> Any:
        with wh.split():
            return simple(model, x)

    options: Any = {"optimizer": optax.adam(1e-3)}
    plan = wh.plan(split, WIDE, ROWS, cluster="v100-32:1+p100-16:1", **options)
    assert "without effect: split() in split: one device holds all" in str(plan)
    wide = wh.plan(split, WIDE, ROWS, cluster="v100-32:2", **options)
    assert "obeyed: split() in split" in str(wide)


@pytest.mark.full
def test_first_parameters_may_all_be_read_elsewhere_too() -> None:
    """A tied table is at both ends: then no parameter is the first stage's own."""
    job = models.job("gpt-small", layers=4, embed=48, mlp=96, heads=4, sequence=16)
    model = jobs.abstract_model(job)
    options: Any = {"optimizer": job.optimizer, "cluster": "v100-32:8+p100-16:8"}
    plan = wh.plan(job.loss_fn, model, job.batch_at(0), **options)
    assert plan.num_devices == 16 and plan.shares


def test_marks_that_no_replica_can_obey() -> None:
    def split(model: Any, x: Any) -> Any:
        with wh.split(devices=4):
            return simple(model, x)

    options: Any = {"optimizer": optax.adam(1e-3), "cluster": "v100-32:2+p100-16:2"}
    with pytest.raises(
        wh.WhaleError, match="full nodes, here 1 or 2: the marks cannot"
    ):
        wh.plan(split, WIDE, ROWS, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("a100-80:4x8+v100-32:4x8", {}),
        ("h100:2x8+a100-80:4x8", {}),
        pytest.param("v100-32:8+t4:8", {}, marks=pytest.mark.full),
        pytest.param(
            "a100-80:8+v100-32:8", {"default": wh.split()}, marks=pytest.mark.full
        ),
        pytest.param(
            "a100-80:8+v100-32:8", {"offload": "optimizer"}, marks=pytest.mark.full
        ),
    ],
)
def test_promising_replicas_are_no_worse_than_all(
    monkeypatch: pytest.MonkeyPatch, cluster: str, options: dict[str, Any]
) -> None:
    job = models.job(
        "gpt-test",
        layers=8,
        embed=1024,
        mlp=4096,
        sequence=512,
        vocab=8192,
        scan_layers=True,
        annotated=False,
    )

    def ask() -> wh.Plan:
        return wh.plan(
            job.loss_fn,
            jobs.abstract_model(job),
            jax.eval_shape(lambda: job.batch_at(0, 768)),
            optimizer=optax.adam(1e-3),
            cluster=cluster,
            precision="f16",
            **options,
        )

    some = ask()
    monkeypatch.setattr(uneven_replica_plans, "MANY_DEVICES", math.inf)
    every = ask()
    assert some.shares and every.shares
    assert some.time.step_seconds <= every.time.step_seconds * 1.001
    assert some.offload == every.offload


@pytest.mark.full
@pytest.mark.parametrize("scan", [True, False])
def test_stages_on_mixed_kinds_keep_a_scan_whole(scan: bool) -> None:
    """A scan stays on one stage, where the fast kind may run all of it."""
    job = models.job(
        "gpt-test",
        layers=4,
        embed=512,
        mlp=2048,
        scan_layers=scan,
        annotated=False,
    )

    def planned(**options: Any) -> wh.Plan:
        return wh.plan(
            job.loss_fn,
            jobs.abstract_model(job),
            jax.eval_shape(lambda: job.batch_at(0, 64)),
            optimizer=optax.adam(1e-3),
            cluster="v100-32:2+p100-16:2",
            **options,
        )

    plan, others = planned(), [planned(mesh={"stage": 1}), planned(mesh={"data": 4})]
    assert plan.axis_sizes["stage"] == 2 and others[1].shares
    assert all(plan.time.step_seconds < one.time.step_seconds for one in others)
    assert ("cut before norm.scale" in str(plan)) == scan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shares": [3, 1, 1]}, "4 devices do not divide into 3 equal replicas"),
        ({"shares": [3, 2]}, "add up to 5 micro-batches; the batch has 65536"),
        ({"shares": [3, -1]}, "expected whole numbers"),
        ({"shares": [6, 2], "num_micro_batches": 4}, "num_micro_batches is 4"),
        ({"shares": [6, 2], "mesh": {"data": 4}}, "mesh asks for data 4"),
        ({"shares": "odd"}, "shares is 'odd'; expected 'even'"),
        ({"shares": [6, 2], "runnable": False}, "runnable=False"),
    ],
)
def test_shares_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        wh.plan(
            simple, WIDE, ROWS, optimizer=optax.sgd(0.1), cluster="h100:4", **options
        )


def test_batches_and_shares_that_do_not_match_are_refused() -> None:
    job = dropping()
    with jax.enable_x64(True):
        one, step = both(job, (3, 1))
        state = step.init(job.make_model, rng=jax.random.key(0))
        with pytest.raises(wh.WhaleError, match=r"has shape \(8, 8\).*\(16, 8\)"):
            step(state, job.batch_at(0, 8))
        for shares in ((1, 2), (2, 2, 0), (5, -1), (1.5, 2.5)):
            with pytest.raises(wh.WhaleError, match="add up to 4 micro-batches"):
                step.shares = shares
        with pytest.raises(wh.WhaleError, match="equal parts of every micro-batch"):
            one.shares = (2, 2)
    assert one.shares == () and not one.rebalances


def test_plans_of_replicas_are_for_their_number_of_devices() -> None:
    plan = wh.plan(simple, WIDE, ROWS, cluster="cpu:4", shares=[6, 2], mesh={"fsdp": 2})
    assert plan.axes == (("data", 2), ("fsdp", 2)) and plan.num_devices == 4
    assert dataclasses.replace(plan, shares=(5, 3)).hash != plan.hash


def test_shares_are_any_sequence_of_whole_numbers() -> None:
    def planned(shares: Any, **options: Any) -> wh.Plan:
        return wh.plan(simple, WIDE, ROWS, cluster="cpu:2", shares=shares, **options)

    assert planned(np.array([6, 2])).shares == (6, 2)
    assert "1 of 2 devices idle" in repr(planned([8, 0]))
    (note,) = (note for note in planned([8, 0]).notes if "no micro-batch" in note)
    assert note.startswith("replica 1 takes no micro-batch: shares asks for that")
    for wrong in ([[6], 2], [6.5, 1.5], np.array([[6, 2]]), [True, 7]):
        with pytest.raises(wh.WhaleError, match="shares is .*expected"):
            planned(wrong)


def test_shares_are_what_memory_holds() -> None:
    def planned(v100: int, p100: int, **options: Any) -> wh.Plan:
        machine, room = wh.cluster("v100-32:1+p100-16:1"), (v100, p100)
        nodes = [
            dataclasses.replace(
                node, kind=dataclasses.replace(node.kind, memory_bytes=nbytes)
            )
            for node, nbytes in zip(machine.nodes, room, strict=True)
        ]
        shape = jax.ShapeDtypeStruct
        return wh.plan(
            lambda m, b: (
                (jnp.tanh(b["x"] @ m["up"]) @ m["down"] - b["y"]) ** 2
            ).mean(),
            {"up": shape((64, 256), "float32"), "down": shape((256, 64), "float32")},
            {name: shape((32768, 64), "float32") for name in "xy"},
            optimizer=optax.adam(1e-3),
            cluster=dataclasses.replace(machine, nodes=tuple(nodes)),
            **{"num_micro_batches": 64, "margin": 0, **options},
        )

    roomy = planned(10**9, 10**9, shares=[32, 32]).memory
    piece = roomy.batch_bytes // 32
    static = roomy.total_bytes - roomy.batch_bytes
    # A replica holds its own micro-batches, not all of them.
    assert planned(10**9, static + 32 * piece, shares=[32, 32]).shares == (32, 32)
    assert planned(10**9, static + 7 * piece).shares == (57, 7)
    assert planned(static + 40 * piece, static + 24 * piece).shares == (40, 24)
    words = r"device 1 \(P100-16\) got 32 pieces, but only 2\d fit, .* at most 2\d"
    with pytest.raises(wh.WhaleError, match=words):
        planned(10**9, static + 20 * piece, shares=[32, 32])
    with pytest.raises(wh.WhaleError, match=r"memory holds [56]\d of 64 micro-batches"):
        planned(static + 30 * piece, static + 20 * piece, mesh={"data": 2})


def test_shares_of_a_run_stay_within_memory() -> None:
    plan = wh.plan(simple, WIDE, ROWS, cluster="cpu:2", shares=[4, 4])
    memory = plan.memory
    piece = memory.batch_bytes // 4
    static = memory.total_bytes - memory.batch_bytes
    (node,) = plan.cluster.nodes
    kind = dataclasses.replace(node.kind, memory_bytes=static + 5 * piece)
    nodes = (dataclasses.replace(node, kind=kind),)
    short = dataclasses.replace(
        plan, cluster=dataclasses.replace(plan.cluster, nodes=nodes)
    )
    most = most_shares(short)
    assert most == (5, 5) and most_shares(plan) == (8, 8)
    assert checked_shares([3, 5], short, most) == (3, 5)
    with pytest.raises(wh.WhaleError, match=r"replica 1: 6 of 5\). Give at most"):
        checked_shares([2, 6], short, most)
    balance = Rebalance([4, 4], most)
    for _ in range(8):
        balance.saw([1.0, 4.0])
    assert balance.shares == (5, 3)


def test_a_kind_that_holds_nothing_is_named() -> None:
    def loss(model: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ model["up"])
        return ((hidden @ model["down"] - batch["y"]) ** 2).mean()

    def planned(nbytes: dict[str, int], **options: Any) -> wh.Plan:
        machine = wh.cluster("v100-32:2+p100-16:2")
        nodes = [
            dataclasses.replace(
                node,
                kind=dataclasses.replace(
                    node.kind,
                    memory_bytes=nbytes.get(node.kind.name, node.kind.memory_bytes),
                ),
            )
            for node in machine.nodes
        ]
        shape = jax.ShapeDtypeStruct
        return wh.plan(
            loss,
            {
                "up": shape((256, 1024), "float32"),
                "down": shape((1024, 256), "float32"),
            },
            {"x": shape((1024, 256), "float32"), "y": shape((1024, 256), "float32")},
            optimizer=optax.adam(1e-3),
            cluster=dataclasses.replace(machine, nodes=tuple(nodes)),
            **options,
        )

    few = {"p100-16": 2_000_000}
    words = r"no plan fits P100-16, .* lacks [\s\S]*Or plan without P100-16"
    with pytest.raises(wh.WhaleError, match=words):
        planned(few, num_micro_batches=8, mesh={"data": 4})
    with pytest.raises(wh.WhaleError, match=words):
        planned(few, shares=[1, 1, 3, 3])
    both_few = {**few, "v100-32": 1_000_000}
    words = r"no plan fits V100-32, of these kinds[\s\S]*All the others lack memory"
    with pytest.raises(wh.WhaleError, match=words):
        planned(both_few)


def test_one_micro_batch_is_planned_alike_if_the_user_or_the_loss_wants_it() -> None:
    def coupled(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        hidden = batch["x"] @ model["w"]
        return ((hidden - hidden.mean(0)) / (1 + hidden.var(0))).var()

    def planned(**options: Any) -> wh.Plan:
        shape = jax.ShapeDtypeStruct
        return wh.plan(
            coupled,
            {"w": shape((256, 256), "float32")},
            {"x": shape((8192, 256), "float32")},
            optimizer=optax.adam(1e-3),
            cluster="a100-80:4+v100-32:4",
            **options,
        )

    free, one = planned(), planned(num_micro_batches=1)
    assert free.num_micro_batches == 1
    assert (free.shares, free.time) == (one.shares, one.time)
    # One program gives all devices as many samples; replicas cannot share one part.
    even = planned(shares="even")
    assert even.shares == () and even.time.step_seconds >= free.time.step_seconds
