"""The loop of all launches: what it starts ends with it, whatever the policy does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import runs
from whalejax.processes.local_run import LocalRun


pytestmark = pytest.mark.filterwarnings("ignore:os.fork")

STUBBORN = ("sh", "-c", "trap '' TERM; echo; while :; do sleep 0.05; done")


class Restarts:
    """Starts two processes, and whatever ends once more; the second cannot start."""

    def __init__(self, folder: Path, fails: bool) -> None:
        self.loop = LocalRun(self, folder, say=print, end_with_this=True, asks=(60.0,))
        self.fails, self.started = fails, list[int]()

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        del now
        match event:
            case ev.StartsAllowedEvent():
                yield from (ev.StartEffect(0), ev.StartEffect(1))
            case ev.ProcessExitEvent():
                yield ev.StartEffect(0)

    def start(self, slot: int) -> None:
        if slot and self.fails:
            raise WhaleError("the second cannot be started")
        pid, _ = self.loop.processes.start(f"p{slot}", command=("sleep", "1000"))
        self.loop.processes.release(f"p{slot}")
        self.started.append(pid)


def test_after_an_error_what_ends_is_not_started_again(tmp_path: Path) -> None:
    policy = Restarts(tmp_path, fails=True)
    with pytest.raises(WhaleError, match="the second"):
        policy.loop.run()
    assert len(policy.started) == 1 and not policy.loop.processes.names


class Ends:
    """Starts one process that ignores SIGTERM, and ends by a signal to this one."""

    def __init__(self, folder: Path) -> None:
        self.loop = LocalRun(
            self,
            folder,
            say=print,
            end_with_this=True,
            asks=(3600.0,),
            stopping=lambda _: os.kill(os.getpid(), signal.SIGTERM),
        )
        self.log, self.pids = folder / "p.log", list[tuple[int, str]]()

    def react(self, now: float, event: ev.Event) -> Iterator[ev.Effect]:
        del now
        match event:
            case ev.StartsAllowedEvent():
                yield ev.StartEffect(0)
            case ev.Tick() if self.log.stat().st_size:
                os.kill(os.getpid(), signal.SIGTERM)
            case ev.Terminate(at_once=at_once, number=number):
                assert not at_once
                yield ev.End(Ending.INTERRUPTED, "", 128 + number)

    def start(self, slot: int) -> None:
        self.loop.processes.start("p", command=STUBBORN)
        self.loop.processes.release("p")
        self.pids += self.loop.processes.identities().values()


def test_a_second_signal_kills_what_does_not_end(tmp_path: Path) -> None:
    policy = Ends(tmp_path)
    assert policy.loop.run().status == 143
    ((pid, began),) = policy.pids
    assert not runs(pid, began)
