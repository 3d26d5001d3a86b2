"""``whalejax status``, and options of elastic commands that contradict each other."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.whalejax.elastic.driven import Driven
from whalejax.cli.elastic_launch import encode_command
from whalejax.cli.elastic_outcome import sentence
from whalejax.cli.main import main
from whalejax.cli.options import TrainCommand
from whalejax.elastic import elastic_worker
from whalejax.elastic.supervisor.event_messages import event_message
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.journals.status import MemberStatus, status_of
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.state.folder_lock import FolderLock


def member(state: str, rank: int | None, pid: int | None = None) -> MemberStatus:
    host = None if pid is None else "127.0.0.1"
    return MemberStatus(state=state, rank=rank, pid=pid, host=host)


class Journal:
    """Writes what a supervisor would."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / FOLDER
        self.home.mkdir(parents=True, exist_ok=True)

    def tell(self, *events: tuple[str, dict[str, Any]]) -> None:
        lines = journal.JournalLines(self.home / journal.EVENTS, durable=False)
        for event, fields in events:
            lines.write(event, fields)
        lines.close()

    def open(self, *names: str) -> None:
        facts = {"steps": "40", "micro-batches": "8"}
        self.tell(("opened", {"host": "127.0.0.1", "port": 1}), ("facts", facts))
        for pid, name in enumerate(names, start=11):
            started = {"name": name, "slot": 0, "pid": pid, "began": "1"}
            told = {"name": name, "host": "127.0.0.1", "step": -1}
            self.tell(("started", started), ("registered", told))

    def begin(self, generation: int, members: list[str], step: int) -> None:
        fields = {"generation": generation, "members": members, "step": step}
        self.tell(("begun", fields))

    def end(self, status: int, why: str = "", **fields: Any) -> None:
        self.tell(("ending", {"status": status, "why": why, **fields}))

    def lose(self, name: str, why: str) -> None:
        self.tell(("lost", {"name": name, "why": why, "step": 3}))

    def commit(self, generation: int, *steps: int) -> None:
        lines = journal.JournalLines(self.home / journal.COMMITS, durable=False)
        for step in steps:
            fields = {"step": step, "generation": generation, "loss": 1 / step}
            lines.write("committed", fields)
        lines.close()


def written(folder: Path) -> Journal:
    found = Journal(folder)
    found.open("m1", "m2", "m3")
    found.tell(("ready", {"name": "m3"}))
    found.begin(1, ["m1", "m2"], -1)
    found.lose("m1", "it was silent for 10.1 s")
    found.begin(3, ["m3", "m2"], 3)
    path = "runs/mine/step_000004"
    found.tell(("saved", {"name": "m3", "step": 4, "path": path}))
    found.commit(1, 1, 2, 3)
    found.commit(3, 4)
    return found


def test_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = written(tmp_path / "logs").home
    save = tmp_path / "save"
    save.mkdir()
    (save / f"{FOLDER}.json").write_text(json.dumps({"folder": str(home)}))
    (found,) = status_of(save)
    assert (found.step, found.steps, found.loss) == (4, 40, 0.25)
    assert [one.number for one in found.generations] == [1, 3]
    assert found.members == {
        "m1": member("lost", 0, 11),
        "m2": member("training", 1, 12),
        "m3": member("training", 0, 13),
    }
    assert [one.name for one in found.lost] == ["m1"] and found.ended is None
    assert main(["status", str(save)]) == 0
    said = capsys.readouterr().out
    assert "run         without supervisor" in said
    assert "step        4 of 40, loss 0.25" in said
    assert "member      m3  training, rank 0, pid 13, host 127.0.0.1" in said
    assert re.search(r"^generation  3  at [\d.]+ s, step 3: m3, m2$", said, re.M)
    assert re.search(r"^lost        m1  at [\d.]+ s: it was silent for", said, re.M)
    with FolderLock(home):
        assert status_of(save)[-1].state == "running"
    assert main(["status", str(tmp_path / "logs"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 4 and len(told["runs"]) == 1
    assert told["members"]["m2"] == {
        "state": "training",
        "rank": 1,
        "pid": 12,
        "host": "127.0.0.1",
    }


def test_a_generation_has_the_step_of_the_state_that_it_found(tmp_path: Path) -> None:
    """Processes of one model start anew, and find the state after they have begun."""
    told = written(tmp_path)
    told.begin(4, ["m4", "m5"], -1)
    assert [one.step for one in status_of(tmp_path)[-1].generations] == [-1, 3, -1]
    told.tell(("recovered", {"name": "m4", "step": 4, "source": "step_000004"}))
    assert [one.step for one in status_of(tmp_path)[-1].generations] == [-1, 3, 4]


def test_steps_of_a_loop_that_reports_none_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Journal(tmp_path)
    found.tell(("opened", {"host": "127.0.0.1", "port": 1}))
    found.begin(1, ["m1", "m2"], -1)
    found.end(0)
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step        not known: the script has a loop of its own\n" in out
    assert "checkpoint  not known: the script saves its own\n" in out


def test_earlier_runs_of_a_folder_are_shown_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = written(tmp_path)
    found.end(1, "8 failures without a step between them")
    found.lose("m2", "its process ended with status 1")
    found.open("m4")
    found.begin(4, ["m4"], 4)
    found.commit(4, 5)
    first, second = status_of(tmp_path)
    assert (first.state, first.step, first.ended) == ("failed", 4, 1)
    assert first.why == "8 failures without a step between them"
    assert first.members["m2"].state == "ended"
    assert [one.name for one in first.lost] == ["m1"]
    assert (second.state, second.step) == ("without supervisor", 5)
    assert [one.number for one in second.generations] == [4]
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.index("run 1 of 2") < said.index("run 2 of 2")
    assert "why         8 failures" in said and "generation  1  at" in said


@pytest.mark.parametrize(
    ("status", "run", "state"),
    [
        (0, "complete", "complete"),
        (143, "interrupted", "interrupted"),
        (1, "failed", "ended"),
    ],
)
def test_who_ends_in_order_is_not_lost(
    tmp_path: Path, status: int, run: str, state: str
) -> None:
    found = Journal(tmp_path)
    found.open("m1", "m2", "m3", "m4", "m5")
    found.begin(1, ["m1", "m2", "m3"], -1)
    found.tell(("leaving", {"name": "m3", "why": "SIGTERM"}))
    found.tell(("ended", {"name": "m3", "status": 0}))
    found.tell(("finished", {"name": "m1", "step": 40}))
    found.lose("m5", "it was silent for 10.1 s")
    found.end(status)
    # One ends as it was told, one says nothing more, and one is ended.
    found.tell(("ended", {"name": "m1", "status": 0}))
    found.lose("m4", "its process ended with status -9")
    (told,) = status_of(tmp_path)
    assert (told.state, told.ended) == (run, status)
    states = {name: member.state for name, member in told.members.items()}
    assert states == {
        "m1": state,
        "m2": state,
        "m3": "drained",
        "m4": state,
        "m5": "lost",
    }
    assert [one.name for one in told.lost] == ["m5"]


def test_how_runs_and_members_end_is_taken_from_events_that_say_so(
    tmp_path: Path,
) -> None:
    found = Journal(tmp_path)
    found.open("m1", "m2", "m3", "m4")
    found.begin(1, ["m1", "m2", "m3", "m4"], -1)
    found.tell(("left", {"name": "m1", "step": 7}))
    found.tell(("failed", {"name": "m2", "why": "ValueError"}))
    (told,) = status_of(tmp_path)
    assert told.members["m1"].state == "left its loop"
    found.lose("m2", "its process ended with status 1")
    found.end(143, how="drained", saver="m1")
    found.tell(("ended", {"name": "m1", "status": 143, "how": "complete"}))
    (told,) = status_of(tmp_path)
    assert told.state == "drained"
    states = {name: member.state for name, member in told.members.items()}
    assert states == {
        "m1": "complete",
        "m2": "failed",
        "m3": "drained",
        "m4": "drained",
    }
    found.open("m5")
    found.end(1, "1 of at least 2 members are there", how="lost", saver="")
    assert status_of(tmp_path)[-1].state == "lost"
    assert status_of(tmp_path)[-1].members["m5"].state == "ended"


def test_a_run_that_begins_with_all_steps_done_says_so(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    found.open("m1")
    found.begin(1, ["m1"], -1)
    found.tell(("finished", {"name": "m1", "step": 40}))
    found.end(0)
    (told,) = status_of(tmp_path)
    assert (told.step, told.steps, told.steps_done) == (40, 40, 0)
    said = sentence(told, tmp_path, 2.0)
    assert said.startswith("complete, all 40 steps were done before, 2.0 s in all")


def test_members_train_on_while_a_supervisor_is_started_again(tmp_path: Path) -> None:
    found = written(tmp_path)
    told = {"name": "m2", "host": "127.0.0.1", "step": 3}
    found.tell(("restarted", {}), ("registered", told))
    (run,) = status_of(tmp_path)
    assert run.members["m2"].state == "training"


def test_a_process_that_failed_is_not_called_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Journal(tmp_path)
    found.open("m1", "m2")
    fields = {"name": "m1", "why": "its process ended with status 1", "step": -1}
    found.tell(("lost", {**fields, "how": "failed", "said": "ValueError: no"}))
    found.lose("m2", "its process ended with status -9")
    (told,) = status_of(tmp_path)
    assert {one.name: one.state for one in told.lost} == {"m1": "failed", "m2": "lost"}
    assert told.members["m1"].state == "failed" and told.members["m2"].state == "lost"
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"^failed      m1  at .*; its log ends: ValueError: no$", said, re.M
    )
    assert re.search(r"^lost        m2  at .* status -9$", said, re.M)


def test_the_reason_of_an_end_is_shown_with_all_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Journal(tmp_path)
    found.open("m1")
    found.end(1, "The first error: m1 ended with status 1:\nRuntimeError: disk gone")
    assert main(["status", str(tmp_path)]) == 0
    assert "ended with status 1: RuntimeError: disk gone\n" in capsys.readouterr().out


def test_a_file_is_no_folder_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert main(["status", str(tmp_path / "train.py")]) == 2
    assert "train.py is a file; name the folder of" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="holds no elastic run. Name the folder"):
        status_of(tmp_path)


def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "mlp-test", "--processes", "1:2", "--remat", "full"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--processes was given without --save, the directory" in said
    assert "--remat was given with --processes, which excludes it" in said
    script = tmp_path / "script.py"
    script.write_text("")
    words = ["launch", "--processes", "1:2", "--hosts", "a,b", "--cpu-quota", "50,50"]
    assert main([*words, str(script)]) == 2
    said = capsys.readouterr().err
    assert "--cpu-quota is 50,50 with --processes MIN:MAX, which" in said


@pytest.mark.parametrize(
    "words",
    [
        ("--csv", "rows.csv"),
        ("--eval-every", "2"),
        ("--best", "loss"),
        ("--early-stop", "2"),
    ],
)
def test_options_of_one_process_are_refused(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ["--save", str(tmp_path / "run")]
    assert main(["train", "mlp-test", "--processes", "1:2", *save, *words]) == 2
    said = capsys.readouterr().err
    assert f"{' '.join(words)} was given with --processes; elastic runs do" in said


def test_members_keep_the_asked_number_of_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def train(job: Any, **options: Any) -> list[Any]:
        given.update(options)
        return []

    monkeypatch.setattr("whalejax.elastic.training.train_elastic", train)
    command = TrainCommand(model="mlp-test", save=Path("run"), keep=5)
    assert elastic_worker.main([encode_command(command)]) == 0
    assert given["keep"] == 5
    elastic_worker.main([encode_command(dataclasses.replace(command, keep=None))])
    assert given["keep"] == 3


def test_lines_without_their_fields_end_nothing(tmp_path: Path) -> None:
    """Each is JSON with an event, and lacks what it should tell or has another kind."""
    kinds = [*journal._FIELDS, "opened", "restarting", "draining", "unheard"]
    more: list[dict[str, object]] = [
        {},
        {"time": "now"},
        {"time": 1.0},
        {"time": 1.0, "name": 3, "members": [[]], "generation": "a", "step": None},
        {"time": 1.0, "name": "m9", "members": ["m9"], "generation": 1, "after": 1},
        {"time": 1.0, "status": 0, "how": "oddly"},
        {"time": 1.0, "steps": "many", "micro-batches": "4", "save": ""},
    ]
    home = tmp_path / FOLDER
    home.mkdir()
    opened = {"time": 0.0, "event": "opened", "host": "127.0.0.1", "port": 1}
    for kind in kinds:
        for fields in more:
            lines = [opened, {"event": kind, **fields}]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (home / journal.EVENTS).write_text(text)
            (home / journal.COMMITS).write_text(text)
            assert status_of(tmp_path)
            events = journal.read_events(home / journal.EVENTS)
            commits = journal.read_commits(home / journal.COMMITS)
            there = Driven(SupervisorSettings(least=1, most=1))
            there.go_on(0.0, events, journal.losses(commits))


@pytest.mark.parametrize(
    ("event", "fields", "said"),
    [
        (
            "begun",
            {"generation": 5, "members": ["m1", "m2"], "step": -1},
            "generation 5: m1, m2",
        ),
        (
            "begun",
            {"generation": 5, "members": ["m1"], "step": 7},
            "generation 5 from step 7: m1",
        ),
        (
            "recovered",
            {"name": "m1", "step": 51, "source": "copies in memory, of step 51"},
            "the run goes on from copies in memory, of step 51",
        ),
        (
            "recovered",
            {"name": "m1", "step": 50, "source": "step_000050"},
            "the run goes on from step_000050",
        ),
        (
            "recovered",
            {"name": "m1", "step": 0, "source": "a new state"},
            "the run begins with a new state",
        ),
        ("note", {"name": "m1", "why": "it is damaged"}, "m1: it is damaged"),
    ],
)
def test_from_what_a_run_goes_on_is_said(
    event: str, fields: dict[str, Any], said: str
) -> None:
    assert event_message(event, fields) == said


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER / journal.EVENTS).mkdir(parents=True)
    with pytest.raises(WhaleError, match=r"events\.jsonl: .* cannot be read"):
        status_of(tmp_path)
