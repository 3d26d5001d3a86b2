"""``whalejax status``, and options of elastic commands that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whalejax.cli.main import main
from whalejax.elastic.status import status_of
from whalejax.elastic.supervisor import journal
from whalejax.elastic.supervisor.supervisor import FOLDER
from whalejax.meshes.errors import WhaleError


def written(folder: Path) -> None:
    home = folder / FOLDER
    home.mkdir(parents=True)
    events = journal.Lines(home / journal.EVENTS, durable=False)
    events.write("opened", {"host": "127.0.0.1", "port": 1})
    events.write("facts", {"steps": "40", "micro-batches": "8"})
    for name in ("m1", "m2", "m3"):
        events.write("started", {"name": name, "slot": 0, "pid": 1, "began": "1"})
    events.write("ready", {"name": "m3"})
    begun = {"generation": 1, "members": ["m1", "m2"], "step": -1}
    events.write("begun", begun)
    events.write("lost", {"name": "m1", "why": "it was silent for 10.1 s", "step": 3})
    events.write("begun", {"generation": 3, "members": ["m3", "m2"], "step": 3})
    events.write("saved", {"name": "m3", "step": 4, "path": "runs/mine/step_000004"})
    events.close()
    commits = journal.Lines(home / journal.COMMITS, durable=False)
    for step in range(1, 5):
        commits.write("committed", {"step": step, "generation": 1, "loss": 1 / step})
    commits.close()


def test_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "logs")
    save = tmp_path / "save"
    save.mkdir()
    home = tmp_path / "logs" / FOLDER
    (save / f"{FOLDER}.json").write_text(json.dumps({"folder": str(home)}))
    found = status_of(save)
    assert (found.step, found.steps, found.loss) == (4, 40, 0.25)
    assert [one.number for one in found.generations] == [1, 3]
    assert found.members == {"m3": "rank 0", "m2": "rank 1"}
    assert [one.name for one in found.lost] == ["m1"] and found.ended is None
    assert main(["status", str(save)]) == 0
    said = capsys.readouterr().out
    assert "step        4 of 40, loss 0.25" in said
    assert "member      m3  rank 0" in said
    assert "lost        m1  at 0 s: it was silent for 10.1 s" in said
    assert main(["status", str(tmp_path / "logs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="holds no elastic run. Name the folder"):
        status_of(tmp_path)


def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "mlp-test", "--processes", "1:2", "--mesh", "data=2"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--processes was given without --save DIR" in said
    assert "--mesh was given, and each process runs the whole model" in said
    script = tmp_path / "script.py"
    script.write_text("")
    words = ["launch", "--processes", "1:2", "--hosts", "a,b", "--cpu-quota", "50,50"]
    assert main([*words, str(script)]) == 2
    said = capsys.readouterr().err
    assert "--hosts is a,b; MIN:MAX starts processes of this machine only" in said
    assert "--cpu-quota is 50,50; with MIN:MAX no process has one" in said
