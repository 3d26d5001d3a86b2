"""One process that dies, stands still or fails ends the others, and they name it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import pytest

from tests.flags import QUICK
from tests.processes import ROOT, free_port
from whalejax.distributed.launch_env import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from whalejax.membership import launch_heartbeat
from whalejax.membership.launch_heartbeat import Beats, PeerLiveness, ProcessHeartbeat


SCRIPT: Final = """
import os, signal, sys, time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 1)
import numpy as np, optax
import whalejax as wh

kind, who, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
count = wh.init_distributed(heartbeat_seconds=10)
index = jax.process_index()
x, y = np.ones((24, 8), np.float32), np.ones((24, 4), np.float32)
model = {"w": np.full((8, 4), 0.1, np.float32)}
tx = optax.sgd(0.1)
loss = lambda m, b: ((b["x"] @ m["w"] - b["y"]) ** 2).mean()
options = {"mesh": {"data": count}} if kind == "spmd" else {
    "num_micro_batches": 8, "shares": [4, 2, 2]}
plan = wh.plan(loss, model, {"x": x, "y": y}, optimizer=tx, cluster=f"h100:{count}",
               **options)
step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
state = step.init_from(model)
for turn in range(1000):
    if turn == 3 and index == who:
        print("begins to", how, os.getpid(), flush=True)
        if how == "fail":
            raise ValueError("no such file: part-7")
        name = {"die": "SIGKILL", "stand": "SIGSTOP", "interrupt": "SIGINT"}[how]
        os.kill(os.getpid(), getattr(signal, name))
    rows = step.batch_rows()
    state, metrics = step(state, {"x": x[rows], "y": y[rows]})
    float(metrics["loss"])
"""


def launched(
    tmp_path: Path, *words: str
) -> tuple[subprocess.CompletedProcess[str], dict[int, str]]:
    """Run the script as three processes; what the launcher and the ranks wrote."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-m", "whalejax", "launch", "--logs", str(tmp_path)]
    done = subprocess.run(
        [*command, "--processes", "3", str(script), *words],
        env={
            **kept,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    logs = {r: (tmp_path / f"rank-{r}.log").read_text() for r in range(3)}
    return done, logs


FAILED: Final = "failed (first, with status 1|with ValueError: no such file: part-7)"
INTERRUPTED: Final = r"failed (first, with signal SIGINT|with KeyboardInterrupt \(rank)"
"""Process 0 goes last, for the service is in it, and others end for it before."""

CASES: Final = [
    ("uneven", 1, "die", "failed first, with signal SIGKILL"),
    ("spmd", 0, "stand", r"has said nothing for \d+ s: it is gone or stands still"),
    ("spmd", 1, "die", "failed first, with signal SIGKILL"),
    ("spmd", 2, "stand", r"has said nothing for \d+ s: it is gone or stands still"),
    ("uneven", 2, "stand", r"has said nothing for \d+ s: it is gone or stands still"),
    ("uneven", 0, "die", "failed first, with signal SIGKILL"),
    ("spmd", 2, "fail", FAILED),
    ("uneven", 0, "fail", FAILED),
    ("spmd", 1, "interrupt", "failed first, with signal SIGINT"),
    ("uneven", 0, "interrupt", INTERRUPTED),
]


@pytest.mark.parametrize(
    ("kind", "who", "how", "says"),
    [
        pytest.param(*case, marks=[] if number == 1 else pytest.mark.full)
        for number, case in enumerate(CASES)
    ],
)
def test_the_launcher_names_the_rank(
    kind: str, who: int, how: str, says: str, tmp_path: Path
) -> None:
    done, logs = launched(tmp_path, kind, str(who), how)
    assert f"begins to {how}" in logs[who], done.stderr
    assert done.returncode != 0
    assert re.search(rf"whalejax: rank {who} on localhost ({says})", done.stderr), (
        done.stderr
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", ["spmd", "uneven"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("die", "has said nothing for"),
        ("stand", "has said nothing for"),
        ("fail", "failed with ValueError: no such file: part-7"),
    ],
)
def test_without_a_launcher_the_others_name_it(kind: str, how: str, says: str) -> None:
    port = free_port()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    given = {
        **kept,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
        COORDINATOR: f"127.0.0.1:{port}",
        NUM_PROCESSES: "3",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", SCRIPT, kind, "1", how],
            env={**given, PROCESS_ID: str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [running[rank].communicate(timeout=180)[0] for rank in (0, 2)]
    finally:
        for process in running:
            process.kill()
        running[1].communicate()
    for rank, text in zip((0, 2), said, strict=True):
        assert running[rank].returncode != 0
        assert re.search(rf"process 1 \(pid \d+ on .*\) {says}", text), text[-2000:]


def hearing(*beats: ProcessHeartbeat, silent_seconds: float = 10.0) -> PeerLiveness:
    """What process 1 knows, at second 100, of those with numbers from 0."""
    found = PeerLiveness(1, silent_seconds)
    found.hear(dict(enumerate(beats)), 100.0)
    found.look(100.0)
    return found


def beat(count: int = 1, **more: Any) -> ProcessHeartbeat:
    return ProcessHeartbeat(count=count, host="node", pid=7, **more)


def quiet(found: PeerLiveness, until: int, *beats: ProcessHeartbeat) -> dict[int, str]:
    """Look every second while the service answers with the same beats."""
    gone: dict[int, str] = {}
    for now in range(101, until + 1):
        found.hear(dict(enumerate(beats)), float(now))
        gone = found.look(float(now))
    return gone


def test_who_says_nothing_is_missed_after_its_time() -> None:
    beats = [beat(), beat(), beat()]
    found = hearing(*beats)
    assert not quiet(found, 110, *beats)
    found.hear({0: beat(2)}, 110.5)
    assert found.look(111.0) == {
        2: "has said nothing for 11 s: it is gone or stands still"
    }
    assert found.process_text(2) == "process 2 (pid 7 on node)"


def test_a_service_that_does_not_answer_is_process_0() -> None:
    found = hearing(beat(), beat(), beat())
    gone = {now: found.look(float(now)) for now in range(101, 112)}
    assert not gone[110]
    assert list(gone[111]) == [0] and "for 11 s" in gone[111][0]


def test_who_was_heard_before_the_service_fell_silent_is_not_missed_for_it() -> None:
    found = hearing(beat(), beat(), beat())
    found.hear({0: beat(2), 1: beat(2)}, 100.9)
    gone = {second: found.look(100 + second) for second in (3.0, 6.0, 9.0, 10.5, 11.0)}
    # Process 2 was silent for 10.5 s, but for 9.6 of them nobody could hear it.
    assert not any(gone[second] for second in (3.0, 6.0, 9.0, 10.5))
    assert list(gone[11.0]) == [0]


def test_who_stood_still_itself_accuses_nobody() -> None:
    found = hearing(beat(), beat(), beat())
    assert not found.look(500.0)
    assert not found.look(505.0)


def test_who_always_looks_late_misses_others_still() -> None:
    beats = [beat(), beat(), beat()]
    found, gone = hearing(*beats), dict[int, str]()
    for now in range(106, 200, 6):
        found.hear(dict(enumerate(beats)), float(now))
        gone = gone or found.look(float(now))
    assert list(gone) == [0, 2]


def test_who_failed_is_named_at_once_and_who_ended_is_not() -> None:
    found = hearing(beat(failed="ValueError: no"), beat(steps=3), beat(ended=True))
    assert found.look(101.0) == {0: "failed with ValueError: no"}
    assert found.ended_ranks() and found.behind() == [0, 2]
    assert not hearing(beat(), beat(), beat()).ended_ranks()


def together(*beats: ProcessHeartbeat, processes: int = 3) -> PeerLiveness:
    """As ``hearing``, where all processes begin to beat at once."""
    found = PeerLiveness(1, 10.0, processes)
    found.hear(dict(enumerate(beats)), 100.0)
    found.look(100.0)
    return found


def test_who_was_never_heard_is_missed_where_all_begin_at_once() -> None:
    beats = [beat(), beat()]
    assert not quiet(together(*beats), 109, *beats)
    found = together(*beats)
    gone: dict[int, str] = {}
    for now in range(101, 112):
        found.hear({0: beat(now), 1: beat(now)}, float(now))
        gone = found.look(float(now))
    assert gone == {2: "has said nothing for 11 s: it is gone or stands still"}
    assert found.process_text(2) == "process 2"
    assert 2 not in quiet(hearing(*beats), 120, *beats)


def test_who_ends_before_its_devices_are_there_is_missed() -> None:
    found = together(beat(), beat(), beat(ended=True, ready=False))
    assert found.look(101.0) == {2: "ended before the devices of all were there"}
    found = together(beat(), beat(), beat(ended=True))
    assert not found.look(101.0)
    assert found.running_ranks() == [0]


def test_one_hears_of_a_silent_process_what_the_one_before_it_has_found() -> None:
    found = PeerLiveness(1, 10.0, 5, {2})
    gone: dict[int, str] = {}
    for now in range(100, 130):  # It is heard of 2 alone, and misses no other.
        found.hear({2: beat(now)}, float(now))
        gone = found.look(float(now))
        assert not gone
    found.hear({2: beat(130), 4: beat(7, silent="has said nothing")}, 130.0)
    assert found.look(130.0) == {4: "has said nothing"}
    assert found.unheard({4: ""}) == [] and found.unheard({2: ""}) == [2]
    assert found.process_text(4) == "process 4 (pid 7 on node)"


def test_what_a_process_reads_does_not_grow_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve that beat in one process; then one of them beats no more."""
    count, lost, silent_seconds = 12, 5, 4.0
    store: dict[str, str] = {}
    read, ends = [0], dict[int, str]()
    joined = threading.local()

    def tell(key: str, text: str, *, again: bool) -> None:
        assert again
        store[key] = text

    def all_told(folder: str) -> list[tuple[str, str]]:
        found = [x for x in [*store.items()] if x[0].startswith(f"{folder}/")]
        read[0] += len(found)
        return found

    def told_at(key: str) -> list[tuple[str, str]]:
        read[0] += 1
        return [(key, store[key])] if key in store else []

    def end(beats: Beats, said: str) -> None:
        ends.setdefault(beats._mine, said)

    compat = launch_heartbeat._compat_processes
    monkeypatch.setattr(compat, "tell_processes", tell)
    monkeypatch.setattr(compat, "all_told", all_told)
    monkeypatch.setattr(compat, "told_at", told_at)
    monkeypatch.setattr(compat, "joined_processes", lambda: (joined.rank, count))
    monkeypatch.setattr(
        launch_heartbeat.jax.distributed, "is_initialized", lambda: True
    )
    monkeypatch.setattr(launch_heartbeat.atexit, "register", lambda _: None)
    monkeypatch.setattr(Beats, "_end", end)
    made = []
    for rank in range(count):
        joined.rank = rank
        made.append(Beats(silent_seconds, count))
    try:
        while min(beats._count for beats in made) < 10:
            time.sleep(0.05)
        said = sum(beats._count for beats in made)
        assert read[0] <= said + count and not ends
        made[lost]._over.set()
        made[lost]._stirred.set()
        while len(ends) < count - 1:
            time.sleep(0.05)
    finally:
        for beats in made:
            beats._over.set()
            beats._stirred.set()
            for thread in beats._threads:
                thread.join()
    assert lost not in ends
    for text in ends.values():
        assert re.match(rf"process {lost} \(pid \d+ on .*\) has said nothing", text)
