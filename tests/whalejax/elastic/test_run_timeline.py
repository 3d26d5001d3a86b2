"""``wh.run_timeline``: what members did when, and which steps were done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import whalejax as wh
from whalejax.display.elastic_runs import MemberSpan, RunTimeline
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.journals.status import RunJournal


def said(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": 100.0 + time, "event": event, **fields}


def commit(time: float, step: int, generation: int) -> dict[str, Any]:
    fields = {"step": step, "generation": generation, "loss": 1 / step}
    return said(time, "committed", **fields)


EVENTS = [
    said(0, "opened", host="127.0.0.1", port=1),
    said(0, "started", name="m1", slot=0, pid=1, began="1"),
    said(0, "started", name="m2", slot=1, pid=2, began="1"),
    said(2, "registered", name="m1", host="127.0.0.1", step=-1),
    said(2, "facts", steps="6"),
    said(2, "registered", name="m2", host="127.0.0.1", step=-1),
    said(3, "ready", name="m1"),
    said(3, "ready", name="m2"),
    said(4, "begun", generation=1, members=["m1", "m2"], step=-1),
    said(7, "restarted"),
    said(7, "registered", name="m2", host="127.0.0.1", step=3),
    said(8, "lost", name="m1", why="its process <ended>", step=4, how="lost"),
    said(9, "begun", generation=2, members=["m2"], step=2),
    said(14, "finished", name="m2", step=6),
    said(15, "ending", status=0, how="complete", why="", saver=""),
    said(15, "ended", name="m2", status=0, how="complete"),
]
# A generation that went back to the copies of step 2.
COMMITS = [
    *(commit(4 + step, step, 1) for step in (1, 2, 3, 4)),
    *(commit(12 + 0.5 * (step - 3), step, 2) for step in (3, 4, 5, 6)),
]


def test_what_members_did_and_which_steps_were_done_again() -> None:
    found = RunTimeline(
        RunJournal(events=EVENTS, commits=COMMITS, has_supervisor=False)
    )
    assert found.spans[:4] == tuple(
        MemberSpan(
            name="m1",
            state=state,
            start_seconds=start,
            end_seconds=end,
            generation=generation,
        )
        for state, start, end, generation in (
            ("starting", 0, 2, None),
            ("compiling", 2, 3, None),
            ("standing by", 3, 4, None),
            ("training", 4, 8, 1),
        )
    )
    # A supervisor that is started again hears of members, which go on.
    assert [s.state for s in found.spans if s.name == "m2"].count("compiling") == 1
    last = found.spans[-1]
    assert (last.name, last.state, last.end_seconds) == ("m2", "finished", 15)
    assert [step.step for step in found.steps if step.again] == [3, 4]
    assert found.steps_again == 2
    # From the last step of the first generation to the first one of the second.
    assert [step.step for step in found.steps if step.waited] == [3]
    (waited,) = (step for step in found.steps if step.waited)
    assert (waited.start_seconds, waited.end_seconds) == (8, 12)


def test_the_timeline_is_told_and_drawn(tmp_path: Path) -> None:
    found = RunTimeline(
        RunJournal(events=EVENTS, commits=COMMITS, has_supervisor=False)
    )
    text = str(found)
    assert text.startswith(
        "Elastic run: complete, 15 s, 6 steps, 2 generations, 1 lost or failed"
    )
    assert "2 steps repeated" in text
    assert "generation 2 at 9 s, step 2: m2; its first step came 3.0 s later" in text
    assert "m1 lost at 8 s: its process <ended>" in text
    root = ElementTree.fromstring(found.svg)
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert "m1 training in generation 1" in titles
    assert "m1 lost: its process <ended>" in titles
    assert any("steps 4 to 4, repeated" == title for title in titles)
    found.save(tmp_path / "run.svg")
    assert ElementTree.parse(tmp_path / "run.svg").getroot() is not None


def test_one_of_the_runs_of_a_folder(tmp_path: Path) -> None:
    home = tmp_path / FOLDER
    home.mkdir()
    second = [
        {**EVENTS[0], "time": 200.0},
        {**EVENTS[1], "time": 200.0, "name": "m3"},
    ]
    lines = [json.dumps(event) for event in (*EVENTS, *second)]
    (home / journal.EVENTS).write_text("\n".join(lines) + "\n")
    lines = [json.dumps(event) for event in COMMITS]
    (home / journal.COMMITS).write_text("\n".join(lines) + "\n")
    assert wh.run_timeline(tmp_path).status.steps_done == 0
    assert wh.run_timeline(tmp_path, run=1).status.steps_done == 6
    assert wh.run_timeline(str(tmp_path), run=1).steps_again == 2
    with pytest.raises(wh.WhaleError, match=r"run is 3; expected 1 to 2, the number"):
        wh.run_timeline(tmp_path, run=3)
    with pytest.raises(wh.WhaleError, match="run is 0; expected a whole number, 1"):
        wh.run_timeline(tmp_path, run=0)
    with pytest.raises(wh.WhaleError, match="holds no elastic run"):
        wh.run_timeline(tmp_path / "none")
