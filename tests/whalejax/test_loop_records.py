"""``wh.loop.train``: evaluations, the best checkpoint, an early end, tables, hooks."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import models
from whalejax.runtime.run_records import StepTable


SIZE = 16


def loss_fn(net: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    error = batch["x"] @ net["w"] - batch["y"]
    return (error**2).mean(), {"largest": jnp.abs(error).max()}


def data(seed: int, size: int = SIZE) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 4)).astype(np.float32)
    return {"x": x, "y": x @ np.arange(4, dtype=np.float32)[:, None]}


@pytest.fixture(scope="module")
def step() -> wh.TrainStep:
    net = {"w": jnp.zeros((4, 1))}
    optimizer = optax.sgd(0.05)
    plan = wh.plan(loss_fn, net, data(0), optimizer=optimizer, cluster="cpu:2")
    devices = jax.devices()[:2]
    return wh.compile(plan, loss_fn, net, optimizer=optimizer, devices=devices)


def fresh(step: wh.TrainStep) -> Any:
    return step.init_from({"w": jnp.zeros((4, 1))})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_evaluations_are_means_over_their_samples(step: wh.TrainStep) -> None:
    batches = [data(100), data(101, 4)]  # the last one of a set may be smaller
    run = wh.loop.train(
        step, fresh(step), data, steps=4, eval_batches=batches, eval_every=2
    )
    assert [number for number, _ in run.evaluations] == [2, 4]
    both = {k: np.concatenate([b[k] for b in batches]) for k in ("x", "y")}
    want = loss_fn({"w": run.state.params["w"]}, both)[0]
    np.testing.assert_allclose(run.evaluations[-1][1]["loss"], want, rtol=1e-5)


def test_the_best_checkpoint_stays_over_runs(
    step: wh.TrainStep, tmp_path: Path
) -> None:
    options = {"eval_batches": [data(100)], "eval_every": 1, "save_every": 2, "keep": 1}
    first = wh.loop.train(
        step,
        fresh(step),
        data,
        steps=4,
        save_dir=tmp_path,
        best="largest",
        best_mode="max",
        **options,
    )
    assert first.best is not None and first.best == wh.loop.best(tmp_path)
    values = [metrics["largest"] for _, metrics in first.evaluations]
    assert first.best.value == max(values)
    assert first.best.step == 1 + int(np.argmax(values))
    names = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert names == [first.best.path.name, "step_000004"]
    kept = step.restore(first.best.path)
    assert int(kept.step) == first.best.step

    state = step.restore_or_init(tmp_path, lambda: None, rng=jax.random.key(0))
    second = wh.loop.train(
        step,
        state,
        data,
        steps=6,
        save_dir=tmp_path,
        best="largest",
        best_mode="max",
        **options,
    )
    assert second.best == first.best  # the later ones are no better


def test_a_better_value_at_the_step_of_the_best_checkpoint(
    step: wh.TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run evaluates the step again; an interruption loses no checkpoint."""
    options = {"steps": 2, "save_dir": tmp_path, "eval_every": 2, "best": "loss"}

    def train(batch: Any) -> Any:
        state = step.restore_or_init(
            tmp_path, lambda: {"w": jnp.zeros((4, 1))}, rng=jax.random.key(0)
        )
        return wh.loop.train(
            step, state, data, eval_batches=[batch], save_every=1, keep=2, **options
        )

    worse = data(100)
    better = jax.tree.map(lambda x: x / 2, worse)
    first = train(worse).best
    shutil.rmtree(tmp_path / "step_000002")

    class Interrupted(Exception):
        pass

    def interrupted(*args: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(step, "save", interrupted)
        with pytest.raises(Interrupted):
            train(better)
    assert first is not None and wh.loop.best(tmp_path) == first
    assert int(step.restore(first.path).step) == 2

    for batch in (better, jax.tree.map(lambda x: x / 2, better)):
        last = train(batch).best
        assert last is not None and last.step == 2 and last.path != first.path
        assert last.value < first.value
        assert last == wh.loop.best(tmp_path) and not first.path.exists()
        shutil.rmtree(tmp_path / "step_000002")
        first = last


def test_training_ends_when_evaluations_become_no_better(
    step: wh.TrainStep, tmp_path: Path
) -> None:
    run = wh.loop.train(
        step,
        fresh(step),
        data,
        steps=50,
        save_dir=tmp_path,
        eval_batches=lambda: iter([data(100)]),
        eval_every=1,
        best="loss",
        best_mode="max",  # which falls from the first step on
        patience=3,
    )
    assert run.stopped_early and len(run.losses) == 4
    assert run.best is not None and run.best.step == 1


def test_a_table_goes_on_where_it_ended(step: wh.TrainStep, tmp_path: Path) -> None:
    table = tmp_path / "deep" / "steps.csv"
    run = wh.loop.train(step, fresh(step), data, steps=5, csv=table)
    assert [int(row["step"]) for row in rows_of(table)] == [1, 2, 3, 4, 5]
    losses = [float(row["loss"]) for row in rows_of(table)]
    np.testing.assert_allclose(losses, run.losses)
    half = wh.loop.train(step, fresh(step), data, steps=3)
    again = wh.loop.train(
        step, half.state, data, steps=6, csv=table, eval_batches=[data(100)]
    )
    rows = rows_of(table)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert float(rows[-1]["eval/loss"]) == again.evaluations[-1][1]["loss"]
    assert rows[0]["eval/loss"] == ""


def test_hooks_get_every_metric(step: wh.TrainStep) -> None:
    seen: list[tuple[int, list[str]]] = []
    wh.loop.train(
        step,
        fresh(step),
        data,
        steps=2,
        eval_batches=[data(100)],
        hooks=[lambda step, values: seen.append((step, sorted(values)))],
    )
    names = ["largest", "loss"]
    assert seen[0] == (1, names) and seen[1] == (2, names)
    assert seen[2] == (2, [f"eval/{name}" for name in names])


def test_batches_may_come_one_after_the_other(step: wh.TrainStep) -> None:
    def stream() -> Iterator[Any]:
        yield from map(data, range(3))

    run = wh.loop.train(step, fresh(step), stream(), steps=3)
    want = wh.loop.train(step, fresh(step), data, steps=3)
    assert run.losses == want.losses
    with pytest.raises(wh.WhaleError, match="batches ended before step 4"):
        wh.loop.train(step, fresh(step), stream(), steps=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"best": "loss"}, "there is no evaluation: give eval_batches"),
        ({"patience": 2}, "there is no evaluation: give eval_batches"),
        ({"eval_batches": [data(1)], "best": "loss"}, "it needs save_dir"),
        ({"eval_batches": [data(1)], "patience": 1}, "patience needs best"),
        ({"keep": 5}, "keep is 5; it needs save_dir, the folder of the checkpoints"),
        ({"save_every": 2}, "save_every is 2; it needs save_dir"),
        ({"keep": 0}, "keep is 0; expected a whole number, 1 or more"),
        ({"best_mode": "least"}, "best_mode is 'least'"),
        ({"eval_batches": []}, "eval_batches gave no batch"),
    ],
)
def test_what_contradicts_is_refused(
    step: wh.TrainStep, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(wh.WhaleError, match=words):
        wh.loop.train(step, fresh(step), data, steps=1, **options)


def test_another_metric_than_evaluations_have_is_refused(
    step: wh.TrainStep, tmp_path: Path
) -> None:
    with pytest.raises(wh.WhaleError, match="best is 'accuracy', and an evaluation"):
        wh.loop.train(
            step,
            fresh(step),
            data,
            steps=1,
            save_dir=tmp_path,
            eval_batches=[data(1)],
            best="accuracy",
        )


def test_a_file_that_is_no_table_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("name,value\na,1\n")
    with pytest.raises(wh.WhaleError, match="first column is 'name'"):
        StepTable(path, 0)
    assert path.read_text() == "name,value\na,1\n"


class Samples:
    """Numbered samples, which remember that they were read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {name: leaf[0] for name, leaf in data(index, 1).items()}


def test_a_feed_goes_on_where_the_state_is(step: wh.TrainStep) -> None:
    whole = wh.loop.train(step, fresh(step), wh.Feed(Samples(), SIZE, step), steps=4)
    half = wh.loop.train(step, fresh(step), wh.Feed(Samples(), SIZE, step), steps=2)
    state = step.adopt(half.state)
    with pytest.raises(wh.WhaleError, match="batches comes to step 0 next, and the"):
        wh.loop.train(step, state, wh.Feed(Samples(), SIZE, step), steps=4)
    feed = wh.Feed(Samples(), SIZE, step, first_sample=half.state.samples)
    rest = wh.loop.train(step, state, feed, steps=4)
    assert [*half.losses, *rest.losses] == [*whole.losses]


def test_a_run_that_stops_early_can_go_on(step: wh.TrainStep, tmp_path: Path) -> None:
    run = wh.loop.train(
        step,
        fresh(step),
        data,
        steps=50,
        save_dir=tmp_path,
        save_every=50,
        eval_batches=[data(100)],
        eval_every=2,
        best="loss",
        best_mode="max",
        patience=2,
    )
    assert run.stopped_early
    assert run.checkpoint == wh.loop.latest(tmp_path)
    assert int(step.restore(run.checkpoint).step) == len(run.losses)


def test_a_new_run_takes_no_best_of_another(step: wh.TrainStep, tmp_path: Path) -> None:
    options = {"save_dir": tmp_path, "eval_batches": [data(100)], "best": "loss"}
    first = wh.loop.train(step, fresh(step), data, steps=2, **options)
    assert first.checkpoint is not None
    state = step.restore(first.checkpoint)
    with pytest.raises(wh.WhaleError, match="keeps the best checkpoint by the minimum"):
        wh.loop.train(step, state, data, steps=3, best_mode="max", **options)
    for path in tmp_path.glob("step_*"):
        path.rename(tmp_path.parent / path.name)
    with pytest.raises(wh.WhaleError, match="keeps the best checkpoint of another run"):
        wh.loop.train(step, fresh(step), data, steps=2, **options)


def test_what_fails_in_an_evaluation_is_done_again(
    step: wh.TrainStep, tmp_path: Path
) -> None:
    calls: list[int] = []

    def sets() -> list[Any]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("ended")
        return [data(100)]

    options: Any = {
        "save_dir": tmp_path / "run",
        "save_every": 2,
        "eval_batches": sets,
        "csv": tmp_path / "steps.csv",
    }
    with pytest.raises(RuntimeError, match="ended"):
        wh.loop.train(step, fresh(step), data, steps=6, **options)
    state = step.restore(wh.loop.latest(tmp_path / "run"))
    wh.loop.train(step, state, data, steps=6, **options)
    rows = rows_of(tmp_path / "steps.csv")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [bool(row["eval/loss"]) for row in rows] == [False, True] * 3


def test_a_metric_may_have_the_name_of_a_column(tmp_path: Path) -> None:
    def named(net: Any, batch: Any) -> Any:
        return loss_fn(net, batch)[0], {"step": jnp.float32(7.0)}

    net, optimizer = {"w": jnp.zeros((4, 1))}, optax.sgd(0.05)
    plan = wh.plan(named, net, data(0), optimizer=optimizer, cluster="cpu:2")
    own = wh.compile(plan, named, net, optimizer=optimizer, devices=jax.devices()[:2])
    table = tmp_path / "steps.csv"
    run = wh.loop.train(own, own.init_from(net), data, steps=3, csv=table)
    wh.loop.train(own, run.state, data, steps=5, csv=table)
    assert [int(row["step"]) for row in rows_of(table)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eval_batches": data(1)}, "eval_batches is .*expected a list of batches"),
        ({"eval_batches": 3}, "eval_batches is 3; expected a list of batches"),
        ({"hooks": print}, "hooks is .*expected a list of functions"),
        ({"hooks": None}, "hooks is None; expected a list of functions"),
        ({"csv": 3}, "csv is 3; expected the path of a CSV file"),
    ],
)
def test_other_types_are_refused_at_once(
    step: wh.TrainStep, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(wh.WhaleError, match=words):
        wh.loop.train(step, fresh(step), data, steps=1, **options)


def test_patience_counts_over_runs(step: wh.TrainStep, tmp_path: Path) -> None:
    options: Any = {
        "save_dir": tmp_path,
        "save_every": 1,
        "eval_batches": [data(100)],
        "best": "loss",
        "best_mode": "max",  # which falls from the first step on
        "patience": 3,
    }
    whole = wh.loop.train(step, fresh(step), data, steps=9, **options)
    assert whole.stopped_early and len(whole.losses) == 4
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    wh.loop.train(step, fresh(step), data, steps=3, **options)
    for more in (1, 0):  # One evaluation is left; then there is nothing to do.
        state = step.restore(wh.loop.latest(tmp_path))
        rest = wh.loop.train(step, state, data, steps=9, **options)
        assert rest.stopped_early and len(rest.losses) == more


def test_steps_with_tables_take_all_of_it(tmp_path: Path) -> None:
    job = models.job("dlrm-test")
    model, optimizer = job.make_model(jax.random.key(0)), optax.adagrad(0.1)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0),
        optimizer=optimizer,
        cluster="cpu:2",
        tables=wh.sparse_optimizer("adagrad", 0.1),
    )
    own = wh.compile(
        plan, job.loss_fn, model, optimizer=optimizer, devices=jax.devices()[:2]
    )
    run = wh.loop.train(
        own,
        own.init_from(model),
        job.batch_at,
        steps=3,
        save_dir=tmp_path / "run",
        eval_batches=[job.batch_at(9)],
        best="loss",
        csv=tmp_path / "steps.csv",
        progress=True,
    )
    assert len(run.losses) == 3 and run.best is not None
    assert own.restore(run.best.path) is not None
