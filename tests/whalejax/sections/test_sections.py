"""Tables in processes of their own: as late as planned, and as one device else."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.compilations import count_compilations
from tests.whalejax.test_table_step import OneDevice, loss, make_batch, make_net
from whalejax import models
from whalejax.adapters.base import adapt
from whalejax.planner.tables.sections import SectionTimes
from whalejax.runtime.sections_step import SectionsStep
from whalejax.sections.sparse_section import SparseSection
from whalejax.tables.tables_plan import TablesPlan


OPTIMIZER: Final = optax.sgd(0.01, momentum=0.9)
PINS: Final = {"user": "rows", "item": "columns", "tag": 0, "word": 1}
TABLES: Final = ("user", "item", "tag", "word")
BUSY: Final = SectionTimes(sparse_seconds=1.0, wire_seconds=0.1, dense_seconds=0.1)
"""So that two processes are planned."""


def make_plan(
    staleness: int,
    kind: str = "adagrad",
    pins: Mapping[str, int | str] = PINS,
    inside: Sequence[str] | None = TABLES,
) -> TablesPlan:
    return wh.plan_tables(
        loss,
        make_net(np.float32),
        make_batch(0, np.float32),
        rows=wh.sparse_optimizer(kind, 0.1),  # type: ignore[arg-type]
        optimizer=OPTIMIZER,
        cluster="cpu:2+cpu:1",
        pins=pins,
        staleness=staleness,
        times=BUSY,
        in_processes=inside,
    )


def make_step(
    staleness: int,
    kind: str = "adagrad",
    inside: Sequence[str] = TABLES,
    pins: Mapping[str, int | str] = PINS,
    **settings: Any,
) -> SectionsStep:
    net, plan = make_net(np.float32), make_plan(staleness, kind, pins, inside)
    given = adapt(net, loss).without_values(), OPTIMIZER, "error", jax.devices()[:1]
    return SectionsStep(plan, *given, **settings)


def trained(
    step: Any, steps: int, at_step: Any = lambda number: None
) -> tuple[list[float], Any]:
    """Losses, and the state after some steps."""
    state, metrics = step.init_from(make_net(np.float32)), []
    for number in range(steps):
        state, found = step(state, make_batch(number, np.float32))
        metrics.append(found)
        at_step(number)
    return [float(found["loss"]) for found in metrics], state


def on_one_device(kind: str = "adagrad") -> Any:
    net, batch = make_net(np.float32), make_batch(0, np.float32)
    rows = wh.sparse_optimizer(kind, 0.1)  # type: ignore[arg-type]
    options: Any = {"optimizer": OPTIMIZER}
    plan = wh.plan_tables(loss, net, batch, rows=rows, cluster="cpu:1", **options)
    given = plan, loss, net
    return wh.compile_tables(*given, devices=jax.devices()[:1], **options)


def check_same_rows(step: Any, state: Any, other: Any, others_state: Any) -> None:
    rows, expected = step.table_values(state), other.table_values(others_state)
    assert all(np.array_equal(rows[name], expected[name]) for name in expected)
    found, wanted = step.row_states(state), other.row_states(others_state)
    for name, states in wanted.items():
        assert all(np.array_equal(found[name][kind], x) for kind, x in states.items())


@pytest.mark.parametrize(
    "kind", ["adagrad", pytest.param("lazy_adam", marks=pytest.mark.full)]
)
def test_without_staleness_every_bit_is_that_of_one_device(kind: str) -> None:
    one = on_one_device(kind)
    expected, other = trained(one, 12)
    with make_step(0, kind) as step:
        losses, state = trained(step, 12)
        assert step.pipeline.section.count == 2
        assert losses == expected
        check_same_rows(step, state, one, other)
        model, wanted = step.model(state), one.model(other)
        assert all(np.array_equal(model[name], wanted[name]) for name in wanted)
        assert step.report().lags == {0: 24}


@pytest.mark.parametrize("staleness", [1, pytest.param(4, marks=pytest.mark.full)])
def test_rows_are_as_old_as_planned(staleness: int) -> None:
    one = OneDevice("adagrad", 0.1, make_net(np.float32))
    history, expected = [], []
    for number in range(12):
        history.append({name: one.net[name] for name in TABLES})
        read = history[max(0, number - staleness)]
        expected.append(one.step(make_batch(number, np.float32), read)[0])
    with make_step(staleness) as step:
        losses, state = trained(step, 12)
        np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
        for name, rows in step.table_values(state).items():
            np.testing.assert_allclose(rows, one.net[name], rtol=0, atol=1e-5)
        report = step.report()
        assert max(report.lags) == staleness and report.over_bound == 0
        assert f"{staleness}: " in str(report)


@pytest.mark.parametrize("staleness", [2, pytest.param(0, marks=pytest.mark.full)])
def test_killed_processes_change_nothing(staleness: int) -> None:
    """Kills at drawn steps; snapshots are taken every few steps."""
    drawn = random.Random(5)

    def kill(number: int) -> None:
        pids = step.pipeline.section.pids
        if number % 7 == 3 and pids:
            os.kill(drawn.choice(sorted(pids.values())), signal.SIGKILL)

    with make_step(staleness) as step:
        expected, state = trained(step, 25)
        rows = step.table_values(state)
    with make_step(staleness, log_bytes=20_000) as step:
        losses, state = trained(step, 25, kill)
        assert losses == expected
        found = step.table_values(state)
        assert all(np.array_equal(found[name], rows[name]) for name in rows)
        report = step.report()
        assert report.replaced >= 1 and report.over_bound == 0


@pytest.mark.full
def test_a_process_that_stands_still_is_replaced() -> None:
    def stop(number: int) -> None:
        if number == 4:
            os.kill(step.pipeline.section.pids[0], signal.SIGSTOP)

    with make_step(1) as step:
        expected, _ = trained(step, 8)
    with make_step(1, answer_seconds=3.0) as step:
        assert trained(step, 8, stop)[0] == expected
        assert step.report().replaced == 1


def test_a_checkpoint_goes_from_processes_to_devices_and_back(tmp_path: Path) -> None:
    one = on_one_device()
    with make_step(2) as step:
        _, state = trained(step, 4)
        step.save(tmp_path / "four", state)
        other = one.restore(tmp_path / "four")
        check_same_rows(step, state, one, other)
        assert int(other.step) == state.step == 4
        # What was saved goes on like what was restored: with all updates.
        state, metrics = step(state, make_batch(4, np.float32))
        other, expected = one(other, make_batch(4, np.float32))
        assert float(metrics["loss"]) == float(expected["loss"])
        one.save(tmp_path / "five", other)
        again = step.restore(tmp_path / "five")
        check_same_rows(step, again, one, other)
        with pytest.raises(wh.WhaleError, match="was donated"):
            step(state, make_batch(4, np.float32))
        # By no file.
        moved = step.adopt(other, one)
        check_same_rows(step, moved, one, other)
        with pytest.raises(wh.WhaleError, match="of this step already"):
            step.adopt(moved, step)
        with pytest.raises(wh.WhaleError, match="stay where they are"):
            step.place(moved, step.plan.placement)


def test_an_evaluation_sees_all_updates() -> None:
    one = on_one_device()
    with make_step(3) as step:
        state = step.init_from(make_net(np.float32))
        other = one.init_from(make_net(np.float32))
        batch = make_batch(9, np.float32)
        assert float(step.eval(state, batch)["loss"]) == float(
            one.eval(other, batch)["loss"]
        )
        state, _ = step(state, make_batch(0, np.float32))
        other, _ = one(other, make_batch(0, np.float32))
        assert float(step.eval(state, batch)["loss"]) == float(
            one.eval(other, batch)["loss"]
        )


def test_the_processes_make_the_batches_of_a_job() -> None:
    job = models.job("dlrm-test", batch_size=32)
    model = job.make_model(jax.random.key(0))
    options: Any = {"optimizer": job.optimizer}
    plan = wh.plan_tables(
        job.loss_fn,
        model,
        job.batch_at(0),
        rows=wh.sparse_optimizer("adagrad", 0.1),
        cluster="cpu:2+cpu:1",
        staleness=1,
        times=BUSY,
        in_processes=[f"tables.c{n}.embedding" for n in range(5)],
        **options,
    )
    given: Any = plan, job.loss_fn, model
    one = jax.devices()[:1]
    with wh.compile_tables(*given, devices=one, **options) as step:  # type: ignore[attr-defined]
        state, expected = step.init_from(model), []
        for number in range(6):
            state, metrics = step(state, job.batch_at(number))
            expected.append(metrics)
        losses = [float(found["loss"]) for found in expected]
        with pytest.raises(wh.WhaleError, match="has no job"):
            next(step.run(state, 1))
    with wh.compile_tables(*given, devices=one, job="dlrm-test", **options) as step:  # type: ignore[attr-defined]
        with count_compilations() as compiled:
            found = [metrics for _, metrics in step.run(step.init_from(model), 6)]
        assert compiled.names["_clipped_ids"] == 1
        assert [float(metrics["loss"]) for metrics in found] == losses
        assert step.report().times.batch_seconds > 0
        step.forget_times()
        times = step.report().times
        assert times.batch_seconds == times.sparse_seconds == times.dense_seconds == 0


def test_an_id_without_a_row_is_refused_before_it_is_on_its_way() -> None:
    with make_step(1) as step:
        state = step.init_from(make_net(np.float32))
        bad = make_batch(0, np.float32) | {"user": np.full(32, 37, np.int32)}
        with pytest.raises(wh.WhaleError, match="user has the id 37, and user has 37"):
            step(state, bad)
        state, metrics = step(state, make_batch(0, np.float32))
        assert np.isfinite(float(metrics["loss"]))
    with pytest.raises(wh.WhaleError, match="was closed"):
        step(state, make_batch(0, np.float32))


def test_what_cannot_be_late_is_refused() -> None:
    net = {"user": jnp.zeros((9, 16))}
    batch = {"user": np.zeros(8, np.int32)}

    def plan(**options: Any) -> Any:
        return wh.plan_tables(
            lambda net, batch: net["user"][batch["user"]].mean(),
            net,
            batch,
            rows=wh.sparse_optimizer("sgd", 0.1),
            **options,
        )

    with pytest.raises(wh.WhaleError, match="staleness is -1; expected"):
        plan(cluster="cpu:1+cpu:1", staleness=-1)
    with pytest.raises(wh.WhaleError, match=r"no CPUs beside .* cpu:2\+h100:8"):
        plan(cluster="h100:2", staleness=2)
    with pytest.raises(wh.WhaleError, match="times is 3"):
        plan(cluster="cpu:1+cpu:1", times=3)


def test_a_section_that_cannot_run_ends_the_run_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{SparseSection.__module__}.PROGRAM", "whalejax.no_module")
    with make_step(1) as step, pytest.raises(wh.WhaleError, match="No module named"):
        step.init_from(make_net(np.float32))
