"""The command line: what it prints, what it refuses, and with which exit status."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import pytest

import whalejax as wh
from tests.whalejax.runs import ROOT, described_cluster
from whalejax import jobs, models
from whalejax.api.named_jobs import named_values
from whalejax.cli import main
from whalejax.cli.options import (
    _PLAN_OPTIONS,
    PlanCommand,
    TrainCommand,
    plan_settings,
)
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion

COMMANDS = (
    "train",
    "plan",
    "show",
    "why",
    "diff",
    "search",
    "calibrate",
    "launch",
    "status",
    "goodput",
    "doctor",
)

JOBS = """
import dataclasses
import numpy as np
from tests.whalejax import runs

def make():
    return runs.make_job()

def makes_nothing():
    return None

def needs(size):
    return runs.make_job()

def poisoned():
    def batch(step, size):
        made = runs.batch_at(step, size)
        return {**made, "x": made["x"] * np.nan} if step == 2 else made
    return runs.make_job(batch=batch)

def interrupted():
    def batch(step, size):
        if step == 3:
            raise KeyboardInterrupt
        return runs.batch_at(step, size)
    return runs.make_job(batch=batch)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with jobs and a description of these devices."""
    (tmp_path / "jobs.py").write_text(JOBS)
    described_cluster().save(tmp_path / "eight.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


Captured = pytest.CaptureFixture[str]
TRAIN = ("train", "jobs.py:make", "--cluster", "eight.toml")


def refused(words: list[str] | tuple[str, ...], capsys: Captured) -> str:
    """The message of a command that must fail as a user error."""
    assert main.main(words) == 2
    return capsys.readouterr().err


# Help.


def test_version(capsys: Captured) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"whalejax {wh.__version__}\n"


def test_help_lists_the_commands(capsys: Captured) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} +[A-Z]\w+", text, re.MULTILINE), command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command: str, capsys: Captured) -> None:
    assert main.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    # An entry begins in the third column, whatever the box around it looks like.
    entries = re.split(r"^[│ ] (?=-|[A-Z])", text, flags=re.MULTILINE)[1:]
    assert len(entries) >= 3
    for entry in entries:
        bare = re.sub(r"\(default:.*?\)|\(required\)|[│╰─╯╭╮-]{1}", " ", entry)
        words = re.findall(r"[a-z]\w+", bare)
        assert len(words) >= 5 or entry.startswith("-h, --help"), entry


JOB_COMMANDS = ("jobs serve", "jobs add", "jobs show", "jobs simulate")


@pytest.mark.parametrize("command", [*COMMANDS, *JOB_COMMANDS])
def test_help_names_no_default_that_says_nothing(
    command: str, capsys: Captured
) -> None:
    assert main.main([*command.split(), "--help"]) == 0
    text = " ".join(re.sub(r"[│╰─╯╭╮]", " ", capsys.readouterr().out).split())
    assert "(default: None)" not in text
    assert "(default: )" not in text


def test_help_and_errors_import_nothing_heavy() -> None:
    code = (
        "import sys; from whalejax.cli import main; main.main(['train', '--help']); "
        "main.main(['trein']); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", [[], ["trein"], ["train"], ["train", "mlp", "--stepz", "3"]]
)
def test_wrong_words_are_a_user_error(words: list[str], capsys: Captured) -> None:
    assert refused(words, capsys)


# Finding the job.


def test_an_unknown_model_gets_the_nearest(capsys: Captured) -> None:
    text = refused(["train", "gtp"], capsys)
    assert text.startswith("whalejax: no reference model is named 'gtp'; nearest: gpt")
    assert "bert-base" in text and "file.py:function" in text


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("none.py:make", "there is no such file"),
        ("jobs.py", "names no function in it; expected file.py:function. It has make,"),
        ("jobs.py:mak", "jobs.py has no function 'mak'; nearest: make"),
        ("jobs.py:needs", "jobs.py:needs takes size; expected a function of no"),
        ("jobs.py:makes_nothing", "returned NoneType; expected wh.Job("),
    ],
)
def test_a_file_that_makes_no_job(
    here: Path, capsys: Captured, model: str, expected: str
) -> None:
    assert expected in refused(["train", model], capsys)


def test_a_file_may_import_its_neighbours(here: Path) -> None:
    (here / "neighbour_of_job.py").write_text("from jobs import make\n")
    (here / "other.py").write_text("from neighbour_of_job import make\n")
    assert main.find_job("other.py:make").name == "perceptron"


# Training.


def test_train_reports_in_one_last_line(here: Path, capsys: Captured) -> None:
    assert main.main([*TRAIN, "--steps", "12", "--replay", "5", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report["steps"] == 12
    assert 0 < report["loss_last"] < report["loss_first"]
    assert 0 < report["max_rel_diff_vs_one_device"] < 1e-4
    sizes = report["mesh"].values()
    assert int.__mul__(*(list(sizes) + [1])[:2]) == 8
    assert report["predicted_step_s"] > 0
    assert report["measured_step_s"] > 0
    assert report["seconds"] > 0
    text = "\n".join(lines)
    for shown in (
        "Plan ",
        "predicted",
        "training 12/12",
        "one device 5/5",
        "samples/s",
    ):
        assert shown in text


@pytest.mark.full
def test_quiet_prints_the_report_alone(here: Path, capsys: Captured) -> None:
    words = [*TRAIN, "--steps", "2", "--quiet", "--json", "--replay", "9"]
    assert main.main(words) == 0
    found = capsys.readouterr()
    report = json.loads(found.out)
    assert report["steps"] == 2
    assert report["measured_step_s"] is None
    assert report["max_rel_diff_vs_one_device"] is not None
    assert found.err == ""


def test_quiet_without_json_prints_nothing(here: Path, capsys: Captured) -> None:
    assert main.main([*TRAIN, "--steps", "1", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_train_options_reach_the_plan(here: Path, capsys: Captured) -> None:
    words = [*TRAIN, "--steps", "1", "--batch", "32", "--micro-batches", "2"]
    assert main.main([*words, "--precision", "bf16"]) == 0
    assert "2 micro-batches" in capsys.readouterr().out


def report_of(capsys: Captured) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_run_resumes_where_it_ended(here: Path, capsys: Captured) -> None:
    saving = [*TRAIN, "--json", "--save", "run", "--save-every", "2"]
    assert main.main([*saving, "--steps", "6", "--seed", "3", "--resume"]) == 0
    whole = report_of(capsys)
    assert (
        main.main([*TRAIN, "--json", "--steps", "4", "--save", "b", "--seed", "3"]) == 0
    )
    first = report_of(capsys)
    resumed = [*TRAIN, "--json", "--save", "b", "--resume", "--replay", "2"]
    assert main.main([*resumed, "--steps", "6"]) == 0
    second = report_of(capsys)
    assert first["loss_first"] == whole["loss_first"]
    assert second["loss_last"] == whole["loss_last"]
    assert second["steps"] == 2
    assert second["max_rel_diff_vs_one_device"] < 1e-4
    # There is nothing left to do now, and saying so is no error.
    assert main.main([*resumed, "--steps", "6"]) == 0
    done = capsys.readouterr().out
    assert "nothing to do: all steps were already done" in done
    assert json.loads(done.splitlines()[-1])["loss_first"] is None


def test_a_bad_loss_is_a_user_error(here: Path, capsys: Captured) -> None:
    words = ["train", "jobs.py:poisoned", "--cluster", "eight.toml", "--steps", "5"]
    text = refused([*words, "--save", "run", "--save-every", "1"], capsys)
    assert text.startswith("whalejax: step 3 of 5: the loss is nan;")
    assert "step_000002" in text


def test_an_interrupted_run(here: Path, capsys: Captured) -> None:
    words = ["train", "jobs.py:interrupted", "--cluster", "eight.toml", "--quiet"]
    assert main.main(words) == 130
    assert capsys.readouterr().err == "whalejax: interrupted\n"


@pytest.mark.full
def test_sizes_of_axes_are_fixed_by_mesh(here: Path, capsys: Captured) -> None:
    words = ["plan", "gpt-test", "--set", "scan_layers=true", "--cluster", "h100:4"]
    assert main.main([*words, "--mesh", "stage=2", "tensor=2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert dict(plan["axes"]) == {"stage": 2, "tensor": 2}
    assert main.main([*TRAIN, "--steps", "1", "--mesh", "fsdp=4", "data=2"]) == 0
    assert "data 2 × fsdp 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stage"], "'stage' is no NAME=VALUE, such as stage=2"),
        (["stage=two", "data=0"], "2. data is 0; expected a whole number of 1 or more"),
        (["rows=2"], "rows"),
    ],
)
def test_sizes_of_axes_that_cannot_be(
    here: Path, capsys: Captured, words: list[str], expected: str
) -> None:
    plan = ["plan", "mlp", "--cluster", "h100:8"]
    assert expected in refused([*plan, "--mesh", *words], capsys)


def test_every_wrong_option_is_listed_at_once(here: Path, capsys: Captured) -> None:
    (here / "run" / "step_000007").mkdir(parents=True)
    words = [*TRAIN, "--steps", "0", "--batch", "-1", "--save", "run", "--replay=-2"]
    words += ["--save-every", "0", "--micro-batches", "0", "--plan", "p.json"]
    assert refused(words, capsys).splitlines() == [
        "whalejax: whalejax train: 9 problems",
        "  1. --batch is -1; expected 1 or more",
        "  2. --steps is 0; expected 1 or more",
        "  3. --save-every is 0; expected 1 or more",
        "  4. --micro-batches is 0; expected 1 or more",
        "  5. --replay is -2; expected 0 or more",
        "  6. --cluster eight.toml was given with --plan p.json, which fixes it. "
        "Leave out --cluster, or make another plan with whalejax plan",
        "  7. --batch -1 was given with --plan p.json, which fixes it. "
        "Leave out --batch, or make another plan with whalejax plan",
        "  8. --micro-batches 0 was given with --plan p.json, which fixes it. "
        "Leave out --micro-batches, or make another plan with whalejax plan",
        "  9. --save run holds checkpoints already, the latest step_000007. Continue "
        "from it with --resume, or give another directory",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume"], "--resume was given without --save DIR"),
        (["--keep", "5"], "--keep 5 was given without --save DIR"),
        (["--best", "loss"], "--best loss was given without --save DIR"),
        (["--best-mode", "max"], "--best-mode max was given without --best METRIC"),
        (["--save", "jobs.py"], "--save jobs.py is a file; expected a directory"),
        (["--save", "gs://bucket/run"], "is an address; checkpoints are written to a"),
    ],
)
def test_wrong_places_for_checkpoints(
    here: Path, capsys: Captured, words: list[str], expected: str
) -> None:
    assert expected in refused([*TRAIN, *words], capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "train mlp-test --gpus 8",
            "train has no option '--gpus'. Did you mean --clus",
        ),
        ("train mlp-test --epochs 3", "no option '--epochs'. Did you mean --steps?"),
        ("train mlp-test --batch-size=3", "'--batch-size'. Did you mean --batch?"),
        ("train mlp-test --batch_size 3", "'--batch_size'. Did you mean --batch?"),
        (
            "train mlp-test --checkpoint-dir a",
            "'--checkpoint-dir'. Did you mean --save",
        ),
        ("train mlp-test --lr 1", "Did you mean --set learning_rate=0.001 (of a ref"),
        ("plan mlp-test --tp 2", "Did you mean --mesh data=2 tensor=4?"),
        ("plan mlp-test --clutser h100:8", "Did you mean --cluster h100:8?"),
        ("plan mlp-test --out a.json", "Did you mean --output?"),
        (
            "plan mlp-test h100:8",
            "no option takes 'h100:8'. Did you mean --cluster h100",
        ),
        ("plan mlp-test more", "plan: no option takes 'more'. Its options are --set, "),
        ("search mlp-test --cluster h100:8", "Did you mean --on h100:8?"),
        ("show plan.json -x", "show has no option '-x'. Its options are --all, "),
        (
            "swarm show here --jsn",
            "swarm show has no option '--jsn'. Did you mean --json",
        ),
        ("jobs show --jsn", "jobs show has no option '--jsn'. Did you mean --json?"),
        ("show --al plan.json", "show has no option '--al'. Did you mean --all?"),
        (
            "launch --proceses 3 train.py",
            "launch has no option '--proceses'. Did you mean --processes?",
        ),
        ("", "no command is given. Commands: train, plan, show, "),
        ("help", "whalejax --help describes them"),
        ("swarm trian", "there is no command 'swarm trian'. Did you mean 'train'?"),
    ],
)
def test_unknown_options(capsys: Captured, words: str, expected: str) -> None:
    said = refused(words.split(), capsys)
    assert expected in said and len(said.splitlines()) == 1


def test_a_loss_that_fails_is_named_with_its_line(here: Path, capsys: Captured) -> None:
    (here / "failing.py").write_text(
        "import jax.numpy as jnp, numpy as np, optax\n"
        "import whalejax as wh\n"
        "def loss(model, batch):\n"
        "    return (batch['x'] @ model['w'] @ jnp.ones((3, 3))).mean()\n"
        "def make():\n"
        "    model = lambda key: {'w': jnp.ones((4, 2))}\n"
        "    batch = {'x': np.ones((8, 4), 'f4')}\n"
        "    return wh.Job(loss, model, batch, optax.sgd(0.1), 8)\n"
    )
    said = refused(["plan", "failing.py:make", "--cluster", "h100:8"], capsys)
    first, second = said.splitlines()
    assert first.startswith("whalejax: loss_fn raised TypeError: dot_general requires")
    assert first.endswith("(at failing.py:4)")
    assert second == (
        "loss_fn was given a dict with 'w' as model, and as batch: batch['x'] "
        "float32[8, 4]"
    )


def test_a_place_that_cannot_be_written_is_refused_before_training(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    said = refused([*TRAIN, "--save", "runs/a"], capsys)
    assert "--save runs/a: . cannot be read and written. Give another" in said


# Plans.


def test_a_plan_is_made_shown_explained_and_run(here: Path, capsys: Captured) -> None:
    made = ["plan", "jobs.py:make", "--cluster", "eight.toml", "--batch", "32"]
    assert main.main([*made, "-o", "plan.json"]) == 0
    table = capsys.readouterr().out
    assert "8×CPU" in table and "written to plan.json" in table
    plan = wh.Plan.load("plan.json")
    assert plan.batch[0].shape[0] == 32

    assert main.main(["show", "plan.json"]) == 0
    assert capsys.readouterr().out.strip() in table
    assert main.main(["show", "plan.json", "--tokens", "1e9"]) == 0
    assert "run     1B samples in " in capsys.readouterr().out.splitlines()[-1]
    assert main.main(["show", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        Path("plan.json").read_text()
    )
    assert main.main([*made, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == plan.hash

    assert main.main(["why", "plan.json", "down"]) == 0
    assert capsys.readouterr().out == plan.why("down") + "\n"
    text = refused(["why", "plan.json", "dwn"], capsys)
    assert "no parameter has the path 'dwn'" in text and "down" in text

    words = ["train", "jobs.py:make", "--plan", "plan.json", "--steps", "2", "--json"]
    assert main.main(words) == 0
    assert report_of(capsys)["mesh"] == plan.axis_sizes


@pytest.mark.full
def test_planning_touches_no_device(here: Path) -> None:
    code = (
        "from whalejax.cli import main; import jax._src.xla_bridge as bridge; "
        "assert main.main(['plan', 'jobs.py:make', '--cluster', 'h100:4x8', "
        "'--batch', '64']) == 0; assert not bridge._backends"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "32×H100" in done.stdout


def test_a_plan_for_other_devices_is_refused(here: Path, capsys: Captured) -> None:
    made = ["plan", "jobs.py:make", "--cluster", "h100:8", "-o", "plan.json"]
    assert main.main(made) == 0
    capsys.readouterr()
    text = refused(["train", "jobs.py:make", "--plan", "plan.json"], capsys)
    assert "8×H100" in text and f"{jax.device_count()}×cpu" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "none.json"], "there is no such plan file"),
        (["show", "jobs.py"], "is not a plan: it is not JSON"),
        (["plan", "mlp", "--cluster", "h101:8"], "h100"),
        (["plan", "mlp", "-o", "none/plan.json"], "Create it first"),
        (["calibrate", "-o", "none/c.toml"], "Create it first"),
    ],
)
def test_files_that_cannot_be_used(
    here: Path, capsys: Captured, words: list[str], expected: str
) -> None:
    text = refused(words, capsys)
    assert text.startswith("whalejax: ") and expected in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def make():\n    return {}['x']\n", "raised KeyError: 'x' (at {path}:2)"),
        ("import nothing_of_the_kind\n", "raised ModuleNotFoundError: No module na"),
        ("def make(:\n", "raised SyntaxError: invalid syntax"),
    ],
)
def test_what_the_users_file_raises(
    here: Path, capsys: Captured, code: str, expected: str
) -> None:
    path = here / "broken.py"
    path.write_text(code)
    text = refused(["train", "broken.py:make"], capsys)
    assert text.startswith("whalejax: broken.py ")
    assert expected.format(path=path) in text
    assert "Traceback" not in text


def test_a_plan_for_another_machine_is_not_shown_first(
    here: Path, capsys: Captured
) -> None:
    words = ["plan", "mlp-test", "--cluster", "h100:4x8", "-o", "big.json"]
    assert main.main(words) == 0
    capsys.readouterr()
    assert main.main(["train", "mlp-test", "--plan", "big.json"]) == 2
    found = capsys.readouterr()
    assert "this plan is for 32×H100" in found.err
    assert "predicted" not in found.out
    assert main.main(["train", "mlp-test", "--cluster", "h100:4"]) == 2
    found = capsys.readouterr()
    assert "this plan is for 4×H100" in found.err
    assert "predicted" not in found.out


def test_a_batch_of_nothing(capsys: Captured) -> None:
    assert "--batch is 0; expected 1 or more" in refused(
        ["plan", "mlp-test", "--batch", "0"], capsys
    )


def test_options_of_a_model_are_set_from_words() -> None:
    words = ["layers=2", "hidden=64", "heads=4", "ffn=128", "dropout_rate=0.1"]
    job = main.find_job("gpt", named_values([*words, "annotated=false"]))
    assert job.name.startswith("gpt")
    with pytest.raises(WhaleError, match="has no option 'layerz'; nearest: layers"):
        main.find_job("gpt", {"layerz": 2})
    # A multilayer perceptron has hidden layers of its own.
    wide = main.find_job("mlp-test", named_values(["hidden=64,32"]))
    shapes = {x.shape for x in jax.tree.leaves(jobs.abstract_model(wide))}
    assert (64, 32) in shapes
    with pytest.raises(WhaleError, match="hidden is -3; expected whole numbers"):
        main.find_job("mlp-test", {"hidden": -3})


def test_numbers_with_commas_stay_text_for_a_function(here: Path) -> None:
    """Only reference models have options of several numbers."""
    (here / "named.py").write_text(
        "import jobs\n"
        "def make(names):\n"
        "    assert names.split(',') == ['64', '32']\n"
        "    return jobs.make()\n"
    )
    words = named_values(["names=64,32"])
    assert main.find_job("named.py:make", words).name == "perceptron"


@pytest.mark.parametrize("name", models.available())
def test_what_goes_with_the_width_is_changed_with_it(
    name: str, capsys: Captured
) -> None:
    assert models.widened(name, {}) == {}
    sizes = models.widened(name, {"embed": 4096, "heads": 16})
    assert set(sizes) <= {"mlp"}
    if name == "gpt-small":
        assert sizes == {"mlp": 16_384}
        job = main.find_job(name, named_values(["hidden=1536", "layers=2"]))
        up = jobs.abstract_model(job).blocks[0].up.kernel
        assert up.shape == (1536, 6144)
        said = capsys.readouterr().err
        assert "mlp=6144 heads=24, in proportion to hidden as in gpt-small" in said


def test_malformed_options_are_listed_together() -> None:
    with pytest.raises(WhaleError) as error:
        named_values(["layers", "4=", "x=1", "x=2"])
    text = str(error.value)
    assert "--set: 3 problems" in text
    assert "'layers' is no NAME=VALUE, such as layers=24" in text
    assert "x is given twice" in text


def test_options_are_arguments_of_the_users_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from whalejax import models\n"
        "def make(width=8):\n"
        "    return models.job('mlp', batch_size=width)\n"
    )
    job = main.find_job(f"{path}:make", {"width": 16})
    assert job.batch_size == 16
    with pytest.raises(WhaleError, match=r"--set depth: .*make takes width"):
        main.find_job(f"{path}:make", {"depth": 2})


# Options by TaskGraph.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["bf16"], "bf16"),
        (["*=bf16", "split=f32"], {"*": "bf16", "split": "f32"}),
        (["split=f32"], {"split": "f32"}),
    ],
)
def test_precision_is_a_word_or_one_for_each_task_graph(
    words: list[str], expected: object
) -> None:
    for command in (PlanCommand, TrainCommand):
        given = command(model="mlp", precision=tuple(words))
        assert plan_settings(given).get("precision") == expected
        given = command(model="mlp", remat=("*=named:a,b",), attention=tuple(words))
        found = plan_settings(given)
        assert (
            found["remat"] == {"*": "named:a,b"} and found.get("attention") == expected
        )


def test_the_help_of_train_names_what_a_plan_replaces() -> None:
    assert TrainCommand.__doc__ is not None
    text = " ".join(TrainCommand.__doc__.split())
    replaced = re.findall(r"--[a-z-]+", text.partition("--plan excludes")[2])
    names = {field.name for field in dataclasses.fields(TrainCommand)}
    names &= {"cluster", "batch", *_PLAN_OPTIONS}
    assert {*replaced} == {f"--{name.replace('_', '-')}" for name in names}


PLAN_GPT: Final = "plan gpt-test --cluster h100:8 --batch 16".split()


def test_plans_take_options_by_task_graph(here: Path, capsys: Captured) -> None:
    words = [*PLAN_GPT, "--precision", "*=bf16", "split=f32", "-o", "plan.json"]
    words += ["--remat", "replicate=full", "--attention", "*=gather", "replicate=ring"]
    assert main.main(words) == 0
    assert "f32 in split, bf16 in all others" in capsys.readouterr().out
    plan = Plan.load(here / "plan.json")
    assert plan.asked_precision == {"*": "bf16", "split": "f32"}
    assert plan.remat == (("replicate", "full"),)
    assert plan.attention == (("replicate", "ring"),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["bf16", "f32"],
            "'bf16' names no TaskGraph; expected one value for the",
        ),
        (["*=bf16", "f32"], "'f32' names no TaskGraph"),
        (["=bf16"], "'=bf16' names no TaskGraph"),
        (["*=bf16", "*=f32"], "* is given twice"),
        (["half"], "precision is 'half'; expected one of f32, bf16, f16"),
        (["*=half"], "'half' is not a precision; expected one of f32, bf16, f16"),
        (["head=bf16"], "no TaskGraph 'head'; expected some of default, replicate"),
    ],
)
def test_words_that_say_no_precision_are_named(
    words: list[str], message: str, capsys: Captured
) -> None:
    assert message in refused([*PLAN_GPT, "--precision", *words], capsys)


@pytest.mark.full
def test_offload_takes_parameters(here: Path, capsys: Captured) -> None:
    words = "plan llama-test --set scan_layers=true --cluster h100:8 --batch 16".split()
    offload = ["--offload", "params", "optimizer", "-o", "plan.json"]
    assert main.main([*words, *offload]) == 0
    assert "optimizer and params in host memory" in capsys.readouterr().out
    assert Plan.load(here / "plan.json").offload == ("optimizer", "params")


def test_an_interrupt_while_the_command_is_imported_tells_nothing() -> None:
    """Its imports are stopped in the middle, where a traceback would tell of them."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's job ignores it.
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "tyro":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from whalejax.__main__ import main
sys.exit(main(["--version"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    "words",
    ["plan mlp-test --cluster cpu:1", "swarm show a:1", "jobs show --save runs"],
)
def test_json_without_a_standard_output_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main.main([*words.split(), "--json"]) == 2
    assert "--json prints to standard output, which is closed" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["doctor", "launch"])
def test_a_host_that_is_not_reached_is_named(tmp_path: Path, command: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    words = ["--hosts", "far-1,far-2", "--remote-shell", "sh -c 'exit 255'"]
    if command == "launch":
        logs = str(tmp_path / "logs")
        words += ["--processes", "2", "--logs", logs, str(script)]
    run = subprocess.run(
        [sys.executable, "-m", "whalejax", command, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == (1 if command == "doctor" else 255)
    assert "rank 0 on far-1 failed first, with status 255" in run.stderr
    assert "sh far-1 must work without a password" in run.stderr


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("plan", "the fewest that fit in memory if left out"),
        ("jobs serve", "such as h100:2x8; or a cluster file"),
        ("launch", "or of the supervisor with MIN:MAX; if left out, 8476 with other"),
    ],
)
def test_texts_of_the_help_have_no_lines_of_their_own(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main.main([*command.split(), "--help"]) == 0
    assert text in capsys.readouterr().out
