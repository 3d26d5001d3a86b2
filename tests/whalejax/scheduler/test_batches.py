"""Jobs whose batch may grow: the choice, the progress that counts, and a live run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.cli.jobs.job_commands import request_of
from whalejax.cli.jobs.jobs_options import JobsAddCommand
from whalejax.elastic.elastic_worker import with_rate
from whalejax.journals.journal import read
from whalejax.meshes.errors import WhaleError
from whalejax.scheduler.batch_choice import options_with_batches, rate_factor
from whalejax.scheduler.job_table import JobError, JobOption
from whalejax.scheduler.live import plan_worker
from whalejax.scheduler.live.job_book import JOURNAL, LiveJob
from whalejax.scheduler.live.job_service import JobService, ServeSettings
from whalejax.scheduler.live.requests import Add, RequestDone
from whalejax.scheduler.live.run_reader import NoiseReader


def table(speeds: dict[int, float]) -> dict[tuple[str, int], JobOption]:
    return {
        ("", n): JobOption(place=("", n), samples_per_second=speed)
        for n, speed in speeds.items()
    }


TABLES = {64: table({1: 100.0, 2: 110.0}), 128: table({1: 100.0, 2: 200.0})}


def chosen(noise_scale: float, **more: Any) -> dict[int, tuple[int, float]]:
    """Batch and progress by number of devices."""
    given = {"own_batch": 64, "present": 64, "measured": {}, **more}
    found = options_with_batches(TABLES, noise_scale=noise_scale, **given)
    return {n: (one.batch, round(one.progress, 3)) for (_, n), one in found.items()}


def test_a_larger_batch_is_taken_where_noise_makes_it_worth_it() -> None:
    # With much noise a sample of the larger batch is worth nearly as much.
    assert chosen(6400.0) == {1: (64, 100.0), 2: (128, 198.039)}
    # With little it is worth half as much, and makes less progress.
    assert chosen(1.0) == {1: (64, 100.0), 2: (64, 110.0)}


def test_the_present_batch_is_left_for_a_clear_gain_alone() -> None:
    few = {64: table({2: 180.0}), 128: table({2: 200.0})}
    for present, batch in ((64, 64), (128, 128)):
        found = options_with_batches(
            few, own_batch=64, present=present, noise_scale=1000.0, measured={}
        )
        assert found["", 2].batch == batch


def test_measurements_replace_and_scale_predictions() -> None:
    found = options_with_batches(
        TABLES,
        own_batch=64,
        present=64,
        noise_scale=6400.0,
        measured={("", 1): 50.0},
    )
    assert found["", 1].samples_per_second == 50.0
    assert found["", 2].samples_per_second == 100.0  # half of 200, as was measured


def test_learning_rates_follow_their_rule() -> None:
    assert rate_factor(64, 64, "linear") == rate_factor(64, 64, "sqrt") == 1.0
    assert (rate_factor(256, 64, "linear"), rate_factor(256, 64, "sqrt")) == (4.0, 2.0)


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, 0.9), optax.adam(1e-2)])
def test_a_scaled_optimizer_is_that_of_another_rate(optimizer: Any) -> None:
    """Updates are four times as large, and the state has the same structure."""
    job = wh.Job(lambda m, b: 0.0, lambda: None, lambda s, n: None, optimizer)
    scaled = with_rate(job, 4.0).optimizer
    params = {"w": jnp.arange(3.0)}
    gradients = {"w": jnp.array([1.0, -2.0, 3.0])}
    state = optimizer.init(params)
    assert jax.tree.structure(scaled.init(params)) == jax.tree.structure(state)
    plain, after = optimizer.update(gradients, state, params)
    larger, same = scaled.update(gradients, state, params)
    np.testing.assert_allclose(larger["w"], 4 * plain["w"], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, after, same)


def test_what_is_left_counts_samples_by_their_worth() -> None:
    request = Add(name="one", model="m", steps=100, devices=(1, 4), folder="/")
    job = LiveJob(request=request, added_at=0.0, batch=10)
    assert job.remaining(30) == 700.0
    job.segments = [(0, 10, 1.0), (20, 40, 0.5)]
    # 20 steps of 10 samples, then 5 of 40 that are worth half as much.
    assert job.remaining(25) == 1000 - 200 - 100
    assert job.remaining(10) == 900.0
    assert job.remaining(1000) == 0.0


def test_the_noise_is_that_of_the_processes_at_the_newest_steps(tmp_path: Path) -> None:
    reader = NoiseReader(tmp_path)

    def write(name: str, *lines: dict[str, Any]) -> None:
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    write("gone", *({"step": n, "noise_scale": 1e9} for n in range(5)))
    reader.poll()
    assert reader.value is None
    write("a", *({"step": n, "noise_scale": 100.0} for n in range(90, 110)))
    write("b", {"step": 108, "noise_scale": 300.0}, {"step": 109, "loss": 1.0})
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"step": 110, "noise_')  # It is being written.
    reader.poll()
    assert reader.value == 200.0
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('scale": 500.0}\n')
    reader.poll()
    assert reader.value == 300.0


# Words of jobs add.


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"batch": "64:1024"}, "without --rate-rule"),
        ({"batch": "64", "rate_rule": "sqrt"}, "without a range of batches"),
        ({"batch": "64:100", "rate_rule": "sqrt"}, "Give --batch 64:128 or more"),
        (
            {"batch": "64:128", "rate_rule": "sqrt", "mesh": ("fsdp=2",)},
            "only replicas measure it",
        ),
    ],
)
def test_ranges_that_cannot_be_are_named(
    words: dict[str, Any], text: str, tmp_path: Path
) -> None:
    command = JobsAddCommand(model="mlp", devices="1:2", name="a", **words)
    with pytest.raises(WhaleError, match=text):
        request_of(command, tmp_path)


def test_a_batch_without_a_divisor_cannot_be_measured(tmp_path: Path) -> None:
    told = {
        "model": "mlp", "settings": [], "batch": 37, "most_batch": 74,
        "devices": [1, 2], "precision": [], "mesh": [], "micro_batches": None,
        "cluster": wh.cluster("cpu:2").to_json(),
        "units": {},
    }  # fmt: skip
    with pytest.raises(JobError, match="37 samples cannot be divided into 2 to 16"):
        plan_worker.planned(told)
    table = plan_worker.planned({**told, "batch": 16, "most_batch": 64})
    assert {one["batch"] for one in table["options"]} == {16, 32, 64}


# A run.

SCRIPT = """
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


def loss_fn(model, batch):
    return 0.5 * jnp.mean(jnp.sum((model["w"][None] - batch["x"]) ** 2, axis=-1))


def batch(step, size):
    drawn = np.random.default_rng(step).standard_normal((size, 40))
    return {"x": (0.05 + drawn).astype(np.float32)}


def make():
    start = {"w": jnp.zeros(40)}
    return wh.Job(loss_fn, lambda: start, batch, optax.sgd(1e-6), batch_size=16)
"""


def test_a_job_takes_a_larger_batch_while_it_runs(tmp_path: Path) -> None:
    """Its gradients are noise: the batch grows, and the run ends by its samples."""
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "jobs"
    settings = ServeSettings(
        folder=folder, cluster="cpu:1", every=0.5, resize=0.1, horizon=1e6
    )
    service = JobService(settings)
    service.open()
    try:
        request = Add(
            name="grows",
            model=f"{tmp_path / 'train.py'}:make",
            batch=16,
            most_batch=64,
            rate_rule="linear",
            steps=1500,
            devices=(1, 1),
            folder=str(tmp_path),
        )
        assert service.answer(request) == RequestDone()
        end = time.monotonic() + 900
        job = service._book.jobs["grows"]
        while not job.how and time.monotonic() < end:
            service.turn(0.1)
        assert job.how == "complete", (job.how, job.why)
    finally:
        service._held.close()
    events = list(read(folder / JOURNAL))
    grown = [one for one in events if one["event"] == "batch"]
    assert grown and grown[0]["batch"] in (32, 64)
    assert grown[0]["noise_scale"] > 100  # 40 / (40 · 0.05²) = 400 in the mean
    launches = [one for one in events if one["event"] == "launched"]
    assert [launches[0]["batch"], launches[-1]["batch"]] == [16, grown[-1]["batch"]]
    last = launches[-1]
    assert last["steps"] < 1500
    done = sum(
        (after["step"] - one["step"]) * one["batch"] * one["efficiency"]
        for one, after in zip(
            launches, [*launches[1:], {"step": last["steps"]}], strict=True
        )
    )
    assert done == pytest.approx(1500 * 16, rel=0.01)
