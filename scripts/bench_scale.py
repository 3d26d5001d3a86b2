"""Measures the time of a supervisor of many members, over real sockets.

``python scripts/bench_scale.py --members 1000`` starts a supervisor in a process of its
own and members that compute nothing in a few others, and measures the supervisor: CPU
time by ``/proc``, as shares of one core, so that a busy machine counts little. The last
line is one JSON object:

    members           members of the run
    start_seconds     seconds from the first that dials until a generation of all has
                      begun; at most 60
    start_cpu_seconds CPU time of the supervisor in that
    beats_share       share of a core, while each beats every 1.25 s; at most 0.25
    step_cpu_seconds  CPU time to record that all have committed a step
    dialled, entered  members that dial it at once, each one time, and those accepted
    rules             by members, microseconds of a heartbeat and a commit, and
                      milliseconds of a turn of the loop, in the rules alone
    within_bars       whether start_seconds and beats_share are within their bars
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import resource
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from whalejax.distributed.launch_env import split_address
from whalejax.elastic.supervisor.supervisor import (
    ADDRESS,
    KEY,
    Supervised,
    Supervisor,
)
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership.elastic_run import ElasticRun
from whalejax.membership.events import MemberMessageEvent, RegisterEvent, Tick
from whalejax.membership.react import react
from whalejax.membership.settings import SupervisorSettings
from whalejax.wire import run_messages as wire
from whalejax.wire.connection import Channel, dial
from whalejax.wire.keys import Key, load_key
from whalejax.wire.messages import WireError


START_SECONDS: Final = 60.0
BEATS_SHARE: Final = 0.25
BEAT_SECONDS: Final = 1.25
_WAIT_SECONDS: Final = 120.0
_AGAIN_SECONDS: Final = 0.2
_DIALLERS: Final = 16
_MICRO_BATCHES: Final = 1024


def registration(number: int) -> wire.Register:
    """Returns the message with which a member joins."""
    return wire.Register(
        run="",
        name="",
        machine=f"host-{number}",
        pid=1,
        host="127.0.0.1",
        port=1 + number % 60_000,
        generation=0,
        step=-1,
        micro_batches=_MICRO_BATCHES,
        steps=1 << 20,
        save="",
        facts={"jax": "0"},
        token=secrets.token_hex(8),
    )


# Processes that this script starts.


def supervise(folder: Path, members: int) -> None:
    """Runs a supervisor that waits for ``members`` members."""
    settings = SupervisorSettings(least=members, most=members)
    Supervisor(Supervised(command=(), folder=folder, settings=settings)).run()


class Members:
    """Members in one process: they answer, beat and commit, and compute nothing."""

    def __init__(self, address: tuple[str, int], key: Key, count: int) -> None:
        self._count, self._step = count, 0
        self._numbers, self._generations = [0] * count, [0] * count
        self._joined: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._channels: dict[int, Channel] = {}
        pool = ThreadPoolExecutor(_DIALLERS)
        for number in range(count):
            pool.submit(self._join, address, key, number)

    def _join(self, address: tuple[str, int], key: Key, number: int) -> None:
        """Dials until it is accepted, as members do."""
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                channel = dial(address, key, seconds=10.0)
                channel.send(registration(number))
                channel.receive(wire.TO_MEMBER, seconds=_WAIT_SECONDS)
                self._report(channel, number, wire.Ready)
                self._joined.put((number, channel))
                return
            except WireError:
                if time.monotonic() > end:
                    raise
                time.sleep(_AGAIN_SECONDS)

    def _report(
        self, channel: Channel, number: int, kind: type[wire.Report], **fields: Any
    ) -> None:
        self._numbers[number] += 1
        channel.send(kind(number=self._numbers[number], **fields))

    def _answer(self, number: int) -> None:
        channel = self._channels[number]
        match channel.next(wire.TO_MEMBER):
            case wire.Prepare(generation=generation):
                fields = {"generation": generation, "step": -1, "held": []}
                self._report(channel, number, wire.Prepared, **fields)
            case wire.Begin(generation=generation):
                self._generations[number] = generation

    def _commit(self) -> None:
        self._step += 1
        for number, channel in self._channels.items():
            fields = {"step": self._step, "loss": 1.0 / self._step, "seconds": 0.1}
            generation_fields = {"generation": self._generations[number], "parts": {}}
            self._report(channel, number, wire.Committed, **fields, **generation_fields)

    def run(self, orders: Iterator[str]) -> None:
        """Beats until the orders end; each line of them is a step to commit."""
        commits, ended = threading.Semaphore(0), threading.Event()

        def listen() -> None:
            for _ in orders:
                commits.release()
            ended.set()

        threading.Thread(target=listen, daemon=True).start()
        count, start = self._count, time.monotonic()
        beats = 0
        while not ended.is_set():
            time.sleep(0.01)
            for number, channel in self._channels.items():
                while channel.has_more:
                    self._answer(number)
            while not self._joined.empty():
                number, channel = self._joined.get()
                self._channels[number] = channel
            # Each in turn, so that they are spread over the time of a beat.
            due = int((time.monotonic() - start) / BEAT_SECONDS * count)
            while beats < due:
                beat = wire.Beat(phase="waiting", step=self._step, done=beats)
                if beats % count in self._channels:
                    self._channels[beats % count].send(beat)
                beats += 1
            if commits.acquire(blocking=False):
                self._commit()


# Measuring.


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def try_all(address: tuple[str, int], key: Key, count: int) -> int:
    """Returns how many of ``count`` that dial at once are accepted at the first try."""
    gate, channels = threading.Barrier(count), list[Channel]()

    def try_once() -> None:
        gate.wait()
        with contextlib.suppress(WireError):
            channels.append(dial(address, key, seconds=30.0))

    threads = [threading.Thread(target=try_once) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel in channels:
        channel.close()
    return len(channels)


def rules_cost(members: int) -> dict[str, float]:
    """Returns microseconds of a beat and a commit, milliseconds of a turn."""
    run = ElasticRun(settings=SupervisorSettings(least=members, most=members))
    names = [f"x{number}" for number in range(members)]
    for number, name in enumerate(names):
        react(run, 0.0, RegisterEvent(name, None, registration(number)))
        react(run, 0.0, MemberMessageEvent(name, wire.Ready()))
    react(run, 0.1, Tick())
    prepared = wire.Prepared(generation=run.generation, step=0, held=[])
    for name in names:
        react(run, 0.2, MemberMessageEvent(name, prepared))
    react(run, 0.3, Tick())
    assert run.phase == "running" and len(run.active) == members

    def each_us(message: wire.OfMember) -> float:
        events = [MemberMessageEvent(name, message) for name in names]
        start = time.process_time()
        for event in events:
            react(run, 0.4, event)
        return (time.process_time() - start) / members * 1e6

    commit = {"generation": run.generation, "loss": 0.5, "seconds": 0.1, "parts": {}}
    beat = min(each_us(wire.Beat(phase="waiting", step=1, done=n)) for n in range(5))
    committed = min(each_us(wire.Committed(step=s, **commit)) for s in range(1, 6))
    start = time.process_time()
    for turn in range(10):
        react(run, 0.5 + 0.1 * turn, Tick())
    turn_ms = (time.process_time() - start) / 10 * 1e3
    return {"beat_us": beat, "committed_us": committed, "turn_ms": turn_ms}


def wait_for_event(path: Path, event: str) -> None:
    """Waits for an event of a journal."""
    end = time.monotonic() + _WAIT_SECONDS
    while not any(e["event"] == event for e in journal.read(path)):
        if time.monotonic() > end:
            raise TimeoutError(f"no {event!r} after {_WAIT_SECONDS:g} s")
        time.sleep(0.05)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Starts a supervisor and members, and measures."""
    script = [sys.executable, __file__, "--folder", str(folder)]
    run = subprocess.Popen(
        [*script, "--role", "supervisor", "--members", str(args.members)]
    )
    members: list[subprocess.Popen[str]] = []
    home = folder / FOLDER
    try:
        while not (home / ADDRESS).exists():
            time.sleep(0.01)
        address = split_address(json.loads((home / ADDRESS).read_text())["address"])
        taken = try_all(address, load_key(home / KEY), args.dialled)
        before, start = cpu_seconds(run.pid), time.monotonic()
        for place in range(args.processes):
            count = len(range(place, args.members, args.processes))
            command = [*script, "--role", "members", "--members", str(count)]
            members.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        wait_for_event(home / journal.EVENTS, "begun")
        start_seconds = time.monotonic() - start
        start_cpu = cpu_seconds(run.pid) - before
        time.sleep(2 * BEAT_SECONDS)
        before, start = cpu_seconds(run.pid), time.monotonic()
        time.sleep(args.seconds)
        share = (cpu_seconds(run.pid) - before) / (time.monotonic() - start)
        before, start = cpu_seconds(run.pid), time.monotonic()
        for _ in range(args.steps):
            for process in members:
                assert process.stdin is not None
                process.stdin.write("commit\n")
                process.stdin.flush()
            time.sleep(2 * BEAT_SECONDS)
        beats = share * (time.monotonic() - start)
        step = (cpu_seconds(run.pid) - before - beats) / max(args.steps, 1)
        lost = [e for e in journal.read(home / journal.EVENTS) if e["event"] == "lost"]
        commits = journal.read_commits(home / journal.COMMITS)
        assert not lost and len(commits) == args.steps, (lost[:3], len(commits))
    finally:
        for process in (*members, run):
            process.kill()
            process.communicate()
    return {
        "members": args.members,
        "start_seconds": round(start_seconds, 2),
        "start_cpu_seconds": round(start_cpu, 2),
        "beats_share": round(share, 4),
        "step_cpu_seconds": round(max(step, 0.0), 4),
        "dialled": args.dialled,
        "entered": taken,
        "rules": {
            n: {k: round(v, 2) for k, v in rules_cost(n).items()}
            for n in (64, 256, 1000)
        },
        "within_bars": start_seconds <= START_SECONDS and share <= BEATS_SHARE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dialled", type=int, default=500)
    parser.add_argument("--role", choices=["supervisor", "members"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.role == "supervisor":
        supervise(args.folder, args.members)
    elif args.role == "members":
        home = args.folder / FOLDER
        address = split_address(json.loads((home / ADDRESS).read_text())["address"])
        Members(address, load_key(home / KEY), args.members).run(sys.stdin)
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), args)))


if __name__ == "__main__":
    main()
