"""Pipelines side by side that take unlike shares compute what one device does."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import time
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.cases import Dtype
from tests.processes import finish, start
from tests.whalejax.test_mpmd import Marked
from tests.whalejax.test_uneven import MODELS, TIGHT, apart, worst_of
from whalejax import jobs, models
from whalejax.lowering.uneven.flat_all_reduce import Exchange
from whalejax.user_code.losses import Job


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

UNLIKE: Final = "v100-32:1+p100-16:1+v100-32:2"
"""The first pipeline lies on two kinds, the second on one: they are cut elsewhere."""


def job_of(name: str, dtype: Dtype = "float64") -> Job:
    job = MODELS[name].job(dtype, annotated=False)
    clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))
    return dataclasses.replace(job, optimizer=clipped)


def planned(job: Job, cluster: str, **options: Any) -> wh.Plan:
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster=cluster,
        **{"mesh": {"stage": 2}, **jobs.split_settings(job), **options},
    )


def both(job: Job, cluster: str, **options: Any) -> tuple[wh.TrainStep, wh.TrainStep]:
    """Steps of one device and of pipelines, over the same micro-batches."""
    plan = planned(job, cluster, **options)
    count = plan.num_micro_batches
    alone = planned(job, "cpu:1", mesh=None, num_micro_batches=count)
    made = [
        wh.compile(
            one,
            job.loss_fn,
            jobs.abstract_model(job),
            optimizer=job.optimizer,
            devices=jax.devices()[: one.num_devices],
        )
        for one in (alone, plan)
    ]
    return made[0], made[1]


def compiled(plan: wh.Plan, job: Job) -> wh.TrainStep:
    return wh.compile(
        plan,
        job.loss_fn,
        jobs.abstract_model(job),
        optimizer=job.optimizer,
        devices=jax.devices()[: plan.num_devices],
    )


@pytest.mark.parametrize(
    ("name", "cluster", "options"),
    [
        pytest.param("gpt", UNLIKE, {"shares": (3, 5)}, marks=pytest.mark.full),
        pytest.param(  # moving statistics
            "resnet", UNLIKE, {"shares": (3, 1)}, marks=pytest.mark.full
        ),
        pytest.param(
            "bert",
            "cpu:6",
            {"shares": (0, 8), "mesh": {"stage": 3}},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "gpt",
            "v100-32:4+p100-16:4",
            {"shares": (5, 3), "mesh": {"stage": 2, "fsdp": 2}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_unlike_shares_equal_one_device(
    name: str, cluster: str, options: dict[str, Any]
) -> None:
    job = job_of(name)
    with jax.enable_x64(True):
        one, step = both(job, cluster, **options)
        assert step.shares == options["shares"]
        step.rebalances = False
        assert worst_of(one, step, job) <= TIGHT


def large() -> Job:
    """One whose products take most of the time."""
    sizes = {"layers": 4, "embed": 512, "mlp": 2048, "heads": 8, "sequence": 128}
    return models.job("gpt-test", batch_size=128, annotated=False, **sizes)


@pytest.mark.full
def test_the_plan_says_who_takes_what_and_what_that_gains() -> None:
    job, unlike = large(), "p100-16:1+t4:1+v100-32:2"
    plan = planned(job, unlike, num_micro_batches=8, mesh={"stage": 2, "data": 2})
    assert sum(plan.shares) == 8 and plan.shares[0] < plan.shares[1]
    first, second = plan.pipelines
    assert first.stages is not None and second.stages is not None
    assert len(first.stages.kinds) == 2 and not second.stages.kinds
    assert plan.axis_sizes == {"data": 2, "stage": 2} and plan.num_devices == 4
    assert all(leaf.summed[:1] == ("data",) for leaf in plan.leaves)
    (note,) = [n for n in plan.notes if n.startswith("pipelines take")]
    gain, bound = map(float, re.findall(r"([\d.]+)×", note))
    assert 1 < gain <= bound + 0.01 and note in str(plan)
    even = planned(job, unlike, shares=(4, 4))
    assert plan.time.step_seconds < even.time.step_seconds
    assert wh.Plan.from_document(plan.document()) == plan
    assert plan.hash != even.hash


@pytest.mark.full
def test_the_smallest_devices_say_what_is_computed_again() -> None:
    sizes = {"embed": 1024, "mlp": 4096, "heads": 16, "sequence": 1024}
    job = models.job("gpt-test", batch_size=128, layers=4, annotated=False, **sizes)
    options = {"precision": {"*": "f16"}, "compiler_options": {"xla_gpu_ftz": True}}
    for cluster in ("h100:2+p100-16:2", "p100-16:2+h100:2"):
        plan = planned(job, cluster, shares=(2, 2), **options)
        assert {one.remat for one in plan.pipelines} == {(("*", "dots"),)}
        for one in plan.pipelines:  # Their programs are compiled apart.
            assert one.compiler_options == (("xla_gpu_ftz", True),)
            assert one.precisions == plan.precisions == (("*", "f16"),)
    with pytest.raises(wh.WhaleError, match=r"shares is \[\]; expected 'even'"):
        planned(job, "cpu:4", shares=[])


@pytest.mark.full
def test_shares_are_the_best_of_all() -> None:
    job = large()
    every = [planned(job, UNLIKE, shares=(k, 8 - k)) for k in range(1, 8)]
    best = min(every, key=lambda plan: plan.time.step_seconds)
    chosen = planned(job, UNLIKE, num_micro_batches=8, mesh={"stage": 2, "data": 2})
    assert chosen.shares == best.shares
    assert chosen.time.step_seconds == pytest.approx(best.time.step_seconds)


def test_other_shares_compile_nothing(tmp_path: Path) -> None:
    job = dataclasses.replace(Marked().job(), batch_size=24)
    plan = planned(job, "cpu:6", mesh=None, shares=(4, 2), num_micro_batches=6)
    step = compiled(plan, job)
    step.rebalances = False
    state = step.init(job.make_model, rng=jax.random.key(0))
    for number, shares in enumerate([(4, 2), (1, 5)]):
        step.shares = shares
        state, _ = step(state, job.batch_at(number))
    step.save(tmp_path / "kept", state)
    again = step.restore(tmp_path / "kept")
    for a, b in zip(*map(jax.tree.leaves, (again.params, state.params)), strict=True):
        assert np.array_equal(a, b)
    alone = planned(job, "cpu:3", mesh=None, num_micro_batches=6)
    single = compiled(alone, job)
    expected = single.restore(tmp_path / "kept")
    runner: Any = step._runner
    programs = [
        piece.program
        for one in runner.pipelines
        for site in one.sites
        for piece in (site.forward, site.backward)
    ]
    made = [program._cache_size() for program in programs]
    assert made == [1] * len(programs)
    for number, shares in enumerate([(6, 0), (3, 3)], 2):
        step.shares = shares
        state, metrics = step(state, job.batch_at(number))
        expected, wanted = single(expected, job.batch_at(number))
        assert apart(metrics, wanted) <= 1e-5
    assert apart(state.model, expected.model) <= 1e-5
    assert [program._cache_size() for program in programs] == made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"shares": (3, 1, 2)},
            "4 devices do not divide into 3 pipelines of 2 equal stages",
        ),
        ({"shares": (3, 1), "mesh": {"stage": 2, "data": 1}}, "mesh asks for data 1"),
        ({"shares": (3, 2)}, "add up to 5 micro-batches; the batch has 32 samples"),
        ({"shares": (3, 1), "zero": 1}, "zero is 1: pipelines with unequal shares"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(wh.WhaleError, match=words):
        planned(job_of("gpt", "float32"), "cpu:4", **options)


PROGRAM: Final = """
import json
jax.config.update("jax_enable_x64", True)
import numpy as np
import whalejax as wh
from tests.whalejax.test_pipes import UNLIKE, job_of, planned
from tests.whalejax.test_uneven import apart
from whalejax import jobs, models

job = job_of("gpt")
model = jobs.abstract_model(job)
made = []
for cluster, devices, options in [
    (UNLIKE, jax.devices(), {"shares": (3, 5)}),
    ("cpu:1", jax.local_devices()[:1], {"mesh": None, "num_micro_batches": 8}),
]:
    plan = planned(job, cluster, **options)
    made.append(wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer,
                           devices=devices))
step, single = made
step.rebalances = False
state, expected = (s.init(job.make_model, rng=jax.random.key(0)) for s in made)
worst, losses = 0.0, []

def own(batch):
    return jax.tree.map(lambda x: x[step.batch_rows()], batch)

def compare(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        for shard in a.addressable_shards:
            yield apart(shard.data, np.asarray(b)[shard.index])

for number, shares in enumerate([(3, 5), (7, 1), (0, 8)]):
    step.shares = shares
    batch = job.batch_at(number)
    state, metrics = step(state, own(batch))
    expected, wanted = single(expected, batch)
    worst = max(worst, *(apart(metrics[k], wanted[k]) for k in wanted))
    losses.append(float(metrics["loss"]))
worst = max(worst, *compare(state.params, expected.params),
            *compare(state.opt_state, expected.opt_state),
            *compare(jax.tree.leaves(state.model), jax.tree.leaves(expected.model)))
step.save(sys.argv[5], state)
again = step.restore(sys.argv[5])
exact = all(
    np.array_equal(s.data, t.data)
    for a, b in zip(*map(jax.tree.leaves, (again.params, state.params)), strict=True)
    for s, t in zip(a.addressable_shards, b.addressable_shards, strict=True)
)
step.shares = (4, 4)
batch = own(job.batch_at(3))
found = step.eval(again, batch)["loss"]
worst = max(worst, apart(found, single.eval(expected, job.batch_at(3))["loss"]))
step.rebalances = True
for number in range(8):
    again, metrics = step(again, own(job.batch_at(number)))
jax.block_until_ready(metrics)
ends = [worst, exact, losses, step.shares, step.seconds]
for watch in step._runner._stopwatches.values():
    watch.start = watch.stop = lambda *_: None
    watch.seconds = 1.0 + jax.process_index()
again, metrics = step(again, own(job.batch_at(9)))
told = np.asarray(step._runner._told[0].addressable_shards[0].data).tolist()[:2]
starts = [one.meshes[0].devices.flat[0] for one in step._runner.pipelines]
paces = [1.0 + device.process_index for device in starts]
print(json.dumps([*ends, told, paces]), flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
def test_processes_with_stages_of_unlike_pipelines(count: int, tmp_path: Path) -> None:
    """A process holds a stage of one pipeline, or all of them."""
    running = start(PROGRAM, tmp_path / "kept", count=count, devices=4 // count)
    found = [json.loads(output.splitlines()[-1]) for output in finish(running)]
    for worst, exact, losses, shares, seconds, told, paces in found:
        assert worst <= TIGHT and exact
        assert [losses, shares, seconds, told, paces] == found[0][2:]
        assert told == paces  # of the process with each pipeline's first stage
        assert sum(shares) == 8 and min(seconds) > 0


@pytest.mark.full
def test_gradients_are_not_held_beside_what_they_cross_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = dataclasses.replace(Marked().job(), batch_size=24)
    plan = planned(job, "cpu:6", mesh=None, shares=(4, 2), num_micro_batches=6)
    step = compiled(plan, job)
    state = step.init(job.make_model, rng=jax.random.key(0))
    held: list[int] = []
    add = Exchange.add

    def looked(self: Exchange, packed: Any) -> Any:
        jax.block_until_ready(packed)
        time.sleep(0.1)  # Who times them lets go once they are there.
        gc.collect()
        shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
        held.append(sum(x.shape in shapes for x in jax.live_arrays() if x.ndim > 1))
        return add(self, packed)

    monkeypatch.setattr(Exchange, "add", looked)
    counts = []
    gc.freeze()  # What earlier tests left behind takes long to look through.
    try:
        for number in range(3):
            held.clear()
            state, metrics = step(state, job.batch_at(number))
            jax.block_until_ready(metrics)
            counts.append(held[:])
    finally:
        gc.unfreeze()
    assert counts[0] == counts[1] == counts[2]  # it is timed from the second step on
