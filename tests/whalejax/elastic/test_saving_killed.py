"""Whatever moment a process that saves is killed at, a whole checkpoint is there."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.whalejax.elastic import job as example
from whalejax.elastic.replica_programs import ReplicaPrograms
from whalejax.state.async_checkpoints import Saver
from whalejax.state.resume import checkpoints, restore_newest


pytestmark = pytest.mark.relaxed_promotion

_watched: list[Any] = []
"""What the hook calls, which stays as long as the interpreter does."""


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
    opens = event == "open" and isinstance(arguments[1], str) and "r" != arguments[1]
    if _watched and (changes or opens):
        _watched[0](str(arguments[0]))


def test_a_kill_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "f32", "seed": 0}
    programs = ReplicaPrograms(example.make(), batch=None, micro_batches=1, **settings)
    folder, moments = tmp_path / "run", tmp_path / "moments"
    states, seen = dict[int, Any](), set[tuple[str, ...]]()

    def look(path: str) -> None:
        """Keep what would be there if the process were killed now."""
        if str(folder) not in path or not folder.exists():
            return
        _watched.clear()  # What is copied here is no write of a save.
        whole = checkpoints(folder)
        files = sorted(str(f.relative_to(folder)) for w in whole for f in w.rglob("*"))
        if tuple(files) not in seen:
            seen.add(tuple(files))
            for one in whole:
                target = moments / str(len(seen)) / one.name
                shutil.copytree(one, target)
        _watched.append(look)

    told: list[str] = []
    saver = Saver(programs, folder, 1, 1, lambda report: told.append(report.kind))
    sys.addaudithook(_look)
    state = programs.init_state()
    for step in (1, 2, 3):
        parts: dict[Any, Any] = {}
        batch, nodes = programs.batch(step - 1), [(0, programs.count)]
        programs.add_up(state, batch, nodes, parts, lambda: None)
        state, _ = programs.finish(state, parts[nodes[0]])
        states[step] = jax.tree.map(np.asarray, state.params)
        _watched.append(look)
        saver.save(state, step)
        saver.wait()
        _watched.clear()
    assert told == ["saved"] * 3
    found = set()
    for moment in sorted(moments.iterdir()):
        back = restore_newest(programs.step, checkpoints(moment))
        assert back is not None
        step = int(back.state.step)
        found.add(step)
        jax.tree.map(np.testing.assert_array_equal, back.state.params, states[step])
    # None only before the first was whole; one beside the next until that is.
    assert found == {1, 2, 3} and len(seen) >= 4
