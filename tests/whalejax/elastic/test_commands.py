"""Options of commands with MIN:MAX: each is taken, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flags import QUICK
from tests.whalejax.elastic.runs import ROOT
from tests.whalejax.elastic.test_status import Journal, written
from whalejax.cli import launch
from whalejax.cli.main import main
from whalejax.cli.options import LaunchCommand
from whalejax.elastic.supervisor.event_messages import event_message
from whalejax.membership.settings import Supervised
from whalejax.meshes.errors import WhaleError


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("")
    return path


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Supervised]:
    """Runs are not started: their journal is written, and how they were asked for."""
    calls: list[Supervised] = []

    def supervise(run: Supervised) -> int:
        calls.append(run)
        found = written(run.folder)
        found.end(0)
        return 0

    monkeypatch.setattr("whalejax.cli.elastic_launch.supervise", supervise)
    return calls


@pytest.mark.parametrize(
    "text", ["two", "4:2", "0:3", ":", "2:", ":2", "1:2:3", "-1:2", "1.5", "1:5000"]
)
@pytest.mark.parametrize("command", ["launch", "train"])
def test_a_wrong_number_of_processes_is_one_error(
    script: Path, capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    words = [f"--processes={text}", str(script)]
    if command == "train":
        words = ["mlp-test", f"--processes={text}", "--save", str(script.parent / "s")]
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert any(
        f"--processes is {words}" in said
        for words in (
            f"{text!r}; expected a number",
            f"{text}, with MIN above MAX; expected 2:4",
            f"{text}; expected a MAX of at most 4096",
        )
    )
    assert "Traceback" not in said and said.count("--processes is") == 1
    assert not (script.parent / "s").exists()


def test_a_wrong_number_is_refused_without_the_command_line_too(script: Path) -> None:
    with pytest.raises(WhaleError, match="(?s)--processes: .*'two'; expected MIN:MAX"):
        launch.launch(LaunchCommand(script=script, processes="two"))


def test_options_of_the_other_way_to_launch_are_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--processes", "1:2", "--remote-shell", "rsh", str(script)]
    assert main(words) == 2
    assert "--remote-shell is rsh without --hosts" in capsys.readouterr().err
    for hosts, why in [("a,a", "has a host twice"), ("a,b,c", "is 2 on 3 hosts")]:
        assert (
            main(["launch", "--processes", "1:2", "--hosts", hosts, str(script)]) == 2
        )
        assert why in capsys.readouterr().err
    assert main(["train", "mlp-test", "--spares", "2"]) == 2
    said = capsys.readouterr().err
    assert "--spares is 2 without --processes MIN:MAX" in said
    assert main(["train", "mlp-test", "--restarts", "2"]) == 2
    assert "--restarts is 2 without --processes" in capsys.readouterr().err
    places = ["--hosts", "a", "--host", "b", "--ray", "auto", "--port", "1"]
    assert main(["train", "mlp-test", *places]) == 2
    said = capsys.readouterr().err
    assert all(f"{n} was given without --processes" in said for n in places[::2])
    assert main(["launch", "--processes", "2", "--quiet", str(script)]) == 2
    assert "--quiet was given with --processes 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        (["--processes", "2", "--host", "127.0.0.1"], 0),
        (["--processes", "2", "--restarts", "3"], 3),
        (["--processes", "2", "--spares", "1"], 100),
        (["--processes", "1:2"], 100),
        (["--processes", "1:2", "--restarts", "0"], 0),
    ],
)
def test_a_launch_of_a_fixed_number_restarts_only_if_asked(
    script: Path, supervised: list[Supervised], words: list[str], restarts: int
) -> None:
    logs = str(script.parent / "logs")
    assert main(["launch", *words, "--logs", logs, str(script)]) == 0
    (call,) = supervised
    assert call.settings.restarts == restarts
    assert call.settings.most == 2


def test_train_runs_where_agents_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], supervised: list[Supervised]
) -> None:
    words = ["train", "mlp-test", "--processes", "1:2", "--save", str(tmp_path)]
    assert main([*words, "--host", "127.0.0.1"]) == 0
    assert main([*words, "--host", "127.0.0.1", "--port", "9"]) == 0
    assert main(words) == 0
    assert [(run.places, run.host, run.port) for run in supervised] == [
        (True, "127.0.0.1", 8476),
        (True, "127.0.0.1", 9),
        (False, "127.0.0.1", 0),
    ]
    assert main([*words, "--hosts", "a,b,c"]) == 2
    assert "--processes is 2 on 3 hosts" in " ".join(capsys.readouterr().err.split())


def test_launch_says_what_it_came_to_unless_it_is_quiet(
    script: Path, capsys: pytest.CaptureFixture[str], supervised: list[Supervised]
) -> None:
    logs = script.parent / "logs"
    words = ["launch", "--processes", "1:2", "--logs", str(logs)]
    assert main([*words, str(script)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("complete, loss 1.0000 to 0.2500 in 4 steps, ")
    assert f"whalejax status {logs} shows more" in said
    assert main([*words, "--quiet", str(script)]) == 0
    assert capsys.readouterr().out == ""
    assert [call.quiet for call in supervised] == [False, True]


def test_launch_prints_how_all_ended_as_json(
    script: Path, capsys: pytest.CaptureFixture[str], supervised: list[Supervised]
) -> None:
    logs = script.parent / "logs"
    words = ["launch", "--processes", "1:2", "--json", "--logs", str(logs), str(script)]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["failure"]) == (0, None)
    assert [(r["name"], r["rank"], r["pid"], r["state"]) for r in told["ranks"]] == [
        ("m1", 0, 11, "lost"),
        ("m2", 1, 12, "complete"),
        ("m3", 0, 13, "complete"),
    ]
    assert told["ranks"][0]["log"] == str(logs / "elastic" / "m1.log")
    assert [one["number"] for one in told["generations"]] == [1, 3]
    assert [call.quiet for call in supervised] == [True]


@pytest.mark.parametrize("quiet", [False, True])
def test_train_prints_what_it_came_to(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    supervised: list[Supervised],
    quiet: bool,
) -> None:
    save = tmp_path / "save"
    words = ["train", "mlp-test", "--processes", "1:2", "--json", "--save", str(save)]
    assert main([*words, *(["--quiet"] if quiet else [])]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert (told["steps"], told["loss_first"], told["loss_last"]) == (4, 1.0, 0.25)
    assert told["mesh"] == {"data": 2} and told["state"] == "complete"
    assert told["members"]["m1"]["state"] == "lost"
    assert bool(lines) != quiet
    if lines:
        assert lines[0].startswith("complete, loss 1.0000 to 0.2500 in 4 steps")
        assert lines[0].endswith(f"whalejax status {save} shows more")
    assert [call.quiet for call in supervised] == [quiet]


def test_train_takes_the_mesh_of_one_model_over_all_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], supervised: list[Supervised]
) -> None:
    words = [
        "train",
        "mlp-test",
        "--processes",
        "1:2",
        "--save",
        str(tmp_path),
        "--json",
    ]
    assert main([*words, "--mesh", "fsdp=-1", "tensor=1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mesh"] is None
    assert json.loads(supervised[0].command[-1])["mesh"] == ["fsdp=-1", "tensor=1"]
    assert main([*words, "--mesh", "replicas"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mesh"] == {"data": 2}


@pytest.mark.parametrize(
    "mesh", [["fsdp=0"], ["fsdp=-1", "data=-1"], ["fsdp"], ["fsdp=1.5"], ["bar=2"]]
)
def test_train_refuses_a_mesh_of_other_sizes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    supervised: list[Supervised],
    mesh: list[str],
) -> None:
    words = ["train", "mlp-test", "--processes", "1:2", "--save", str(tmp_path)]
    assert main([*words, "--mesh", *mesh]) == 2
    said = capsys.readouterr().err
    assert "--mesh" in said and mesh[0].split("=")[0] in said
    assert "Traceback" not in said
    assert not supervised


@pytest.mark.full
def test_train_spreads_one_model_as_told(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "whalejax", "train", "mlp-test", "--steps", "6"]
    words += ["--json", "--seed", "3"]
    one = ["--save", str(tmp_path / "one"), "--cluster", "cpu:1"]
    two = ["--save", str(tmp_path / "two"), "--processes", "2:2", "--mesh", "fsdp=-1"]
    found = []
    for more in (one, two):
        run = subprocess.run(
            [*words, *more],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XLA_FLAGS": QUICK, "PYTHONPATH": str(ROOT)},
        )
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert found[1]["steps"] == 6
    for name in ("loss_first", "loss_last"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-6)


def test_train_goes_on_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], supervised: list[Supervised]
) -> None:
    (tmp_path / "step_000010").mkdir()
    words = ["train", "mlp-test", "--processes", "1:2", "--save", str(tmp_path)]
    assert main(words) == 2
    assert "the latest step_000010. Continue from it with --resume" in (
        capsys.readouterr().err
    )
    assert not supervised
    assert main([*words, "--resume"]) == 0
    assert len(supervised) == 1


def test_a_supervisor_that_could_not_run_is_said_in_json_too(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalejax.cli.elastic_launch.supervise", lambda *a, **k: 2)
    logs, save = script.parent / "logs", script.parent / "save"
    words = ["launch", "--processes", "1:2", "--json", "--logs", str(logs), str(script)]
    assert main(words) == 2
    assert json.loads(capsys.readouterr().out)["ranks"] == []
    words = ["train", "mlp-test", "--processes", "1:2", "--json", "--save", str(save)]
    assert main(words) == 2
    assert json.loads(capsys.readouterr().out)["status"] == 2


def test_quiet_runs_say_what_goes_wrong_and_no_more() -> None:
    begun = {"generation": 1, "members": ["m1"], "step": 0}
    lost = {"name": "m1", "why": "it was silent", "step": 1}
    assert event_message("begun", begun) and event_message("lost", lost)
    assert not event_message("begun", begun, quiet=True)
    assert "m1 is lost" in event_message("lost", lost, quiet=True)


def test_a_run_without_steps_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervise(run: Supervised) -> int:
        found = Journal(run.folder)
        found.open("m1")
        found.end(1, "1 of at least 2 members are there\nmore")
        return 1

    monkeypatch.setattr("whalejax.cli.elastic_launch.supervise", supervise)
    words = ["train", "mlp-test", "--processes", "1:2", "--save", str(tmp_path / "s")]
    assert main([*words, "--json"]) == 1
    line, told = capsys.readouterr().out.splitlines()
    assert line.startswith("failed, no step was done")
    assert json.loads(told)["loss_first"] is None
