"""``whalejax jobs simulate``, its traces, and tables from the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whalejax import models
from whalejax.cli.main import main
from whalejax.meshes import cluster
from whalejax.scheduler.job_table import JobError, best_options
from whalejax.scheduler.job_trace import read_job_trace
from whalejax.scheduler.plan_table import (
    fixed_plan_options,
    planned_options,
    plans_by_number,
)


pytestmark = pytest.mark.relaxed_promotion  # Adam promotes its count.

HEAD = "name,arrival,model,batch,steps,devices,priority,noise_scale\n"
TRACE = HEAD + (
    "second,5,gpt-test,32:64,3000,1:4,,100\nfirst,0,gpt-test,32,20000,1:4,1,\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_read_in_the_order_of_arrivals(tmp_path: Path) -> None:
    first, second = read_job_trace(written(tmp_path, TRACE))
    assert (first.name, first.priority, first.batch) == ("first", 1, (32, 32))
    assert (second.batch, second.devices) == ((32, 64), (1, 4))
    assert second.noise_scale == 100.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,arrival\n", "has no column model, batch, steps, devices"),
        (HEAD, "it holds no job"),
        ("x" * 200_000, "line 1: it is no row of a CSV file"),
        (HEAD + "a,-1,m,8,1,1,,\n", "line 2: arrival is '-1'; expected a number"),
        (HEAD + "\n\na,-1,m,8,1,1,,\n", "line 4: arrival is '-1'"),
        (HEAD + "a,0,m,8:4,1,1,,\n", "line 2: batch is '8:4'; expected N or MIN:MAX"),
        (HEAD + "a,0,m,64:100,1,1,,\n", "expected a largest batch of 128 or more"),
        (HEAD + ",0,m,8,1,1,,\n", "line 2: name is ''; expected a name"),
        (HEAD + "a,0,m,8,1,1,,\n" * 2, "2 jobs are named 'a'"),
        (HEAD + f"a,0,m,8,{'9' * 5000},1,,\n", "line 2: steps is '9999"),
        (HEAD + f"a,0,m,8,1,1:{'9' * 5000},,\n", "line 2: devices is '1:9999"),
        (HEAD + f"{'a' * 200_000},0,m,8,1,1,,\n", "line 2: it is no row of a CSV"),
    ],
)
def test_what_no_trace_says_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_job_trace(written(tmp_path, text))


def test_a_table_is_of_the_best_plans() -> None:
    job, machine = models.job("gpt-test"), cluster("h100:4")
    plans = plans_by_number(job, machine, [1, 2, 4], batch=32)
    steps = [plans[n].time.step_seconds for n in (1, 2, 4)]
    assert steps == sorted(steps, reverse=True)
    options = planned_options(job, machine, [1, 4], batches=[32, 64], noise_scale=32.0)
    assert {(o.place, o.batch) for o in options} == {
        (("", n), batch) for n in (1, 4) for batch in (32, 64)
    }
    one = next(o for o in options if o.place == ("", 4) and o.batch == 32)
    assert one.samples_per_second == pytest.approx(32 / steps[-1])
    larger = next(o for o in options if o.batch == 64)
    assert larger.efficiency == pytest.approx(64 / 96)
    kept = best_options(options)
    assert kept["", 4].progress >= kept.get(("", 1), kept["", 4]).progress


def test_a_kept_plan_is_no_faster_than_the_best() -> None:
    job, machine = models.job("gpt-test"), cluster("h100:4")
    sizes = {"mesh": {"tensor": 2}, "remat": "full"}
    plan = plans_by_number(job, machine, [2], batch=32, **sizes)[2]
    options = [*fixed_plan_options(plan, machine, [1, 2, 4], 32)]
    assert [o.place for o in options] == [("", 2), ("", 4)]
    assert all("remat full" in o.layout and "tensor 2" in o.layout for o in options)
    best = plans_by_number(job, machine, [2, 4], batch=32)
    for option in options:
        seconds = best[option.place[1]].time.step_seconds
        assert option.samples_per_second <= 32 / seconds * 1.005
    assert options[0].samples_per_second == pytest.approx(32 / plan.time.step_seconds)


def test_a_trace_is_played_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["jobs", "simulate", str(written(tmp_path, TRACE)), "--cluster", "h100:4"]
    words += ["--resize", "0.5"]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in data["jobs"]] == ["first", "second"]
    assert data["starved"] == 0 and 0 < data["utilisation"] <= 1
    kind, number = data["jobs"][0]["devices"][0][2:]
    assert kind == "" and 1 <= number <= 4
    assert main([*words, "--policy", "static"]) == 0
    text = capsys.readouterr().out
    assert "first" in text and "makespan" in text and "1.00 of static" in text


def test_a_simulation_shows_its_progress_on_a_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["jobs", "simulate", str(written(tmp_path, TRACE)), "--cluster", "h100:4"]
    monkeypatch.delenv("CI", raising=False)
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err == ""  # It is no terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    for text in ("planning first", "simulating static", "simulating throughput", "2/2"):
        assert text in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jobs"], "no command is given. Commands: simulate, serve, add, "),
        (
            ["jobs", "ad"],
            "there is no command 'jobs ad'. Did you mean 'add'? Commands: ",
        ),
        (["jobs", "add"], "--devices"),
        (
            ["jobs", "simulate", "none.csv", "--cluster", "h100:4"],
            "trace none.csv: it cannot be read",
        ),
        (
            ["jobs", "simulate", "none.csv", "--cluster", "h100:4", "--every", "0"],
            "--every is 0; expected seconds, above 0",
        ),
        (
            ["jobs", "simulate", "none.csv", "--cluster", "h100:4", "--resize", "-1"],
            "--resize is -1; expected seconds, at least 0 and below 1e+12",
        ),
        (
            ["jobs", "serve", "--cluster", "h100:4", "--resize", "-1"],
            "--resize is -1; expected seconds, at least 0 and below 1e+12",
        ),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_job_that_no_devices_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, HEAD + "large,0,llama-70b,8,1,1:2,,\n")
    assert main(["jobs", "simulate", str(path), "--cluster", "v100-16:2"]) == 2
    said = capsys.readouterr().err
    assert "job 'large': no plan of llama-70b with 8 samples on 1 to 2 devices" in said


def test_numbers_whose_odd_factor_gains_nothing_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[int] = []

    def plan_on(_: Any, part: Any, batch: Any, fewer: Any, settings: Any) -> Any:
        planned.append(part.num_devices)
        is_power = not part.num_devices & (part.num_devices - 1)
        return object() if is_power else fewer

    monkeypatch.setattr("whalejax.scheduler.plan_table._plan_on", plan_on)
    job: Any = None
    plans = plans_by_number(job, cluster("h100:2x8"), [1, 2, 3, 4, 6, 8, 12, 16])
    assert planned == [1, 2, 3, 4, 8, 16]
    assert plans[6] is plans[4] and plans[12] is plans[8]
