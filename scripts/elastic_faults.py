"""Random faults of elastic runs, and an audit of the members that a run gives up."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from elastic_runs import HANGS_SECONDS, Run
from network_namespaces import set_link, shape, unshape

from whalejax.journals.journal import EVENTS, FOLDER
from whalejax.processes.local_processes import began_at


LEASE_SECONDS: Final = 8.0
LINK_PART_OF_CASE: Final = 0.6
"""Fraction of the faults of a case with links that are faults of links."""

SEVERAL_PART: Final = 0.2
"""Fraction of the other faults that hit several processes, or the journal's disk."""

MEGABITS: Final = 200
SUCCESSOR_SECONDS: Final = 30.0
DISK_BYTES: Final = 2**22
"""Size of the journal's disk in cases in which it is filled."""

_FILLER: Final = "filler"

Fault = dict[str, Any]
"""Record of a fault: ``what`` was hit, by which ``signal``, at which time and step, the
``names`` of members that may be lost by it (those of ``killed`` must be), and the
seconds to the next committed step, or None."""


def cause_fault(run: Run, rng: random.Random) -> Fault | None:
    """Causes a random fault, and waits for the next step.

    Returns:
        The record of the fault, or None if there was nothing to hit.
    """
    if run.agents is not None and rng.random() < LINK_PART_OF_CASE:
        return _disturb_link(run, rng)
    if rng.random() < SEVERAL_PART:
        kinds = [_end_two_supervisors, _kill_all_members]
        return rng.choice([*kinds, _fill_disk] if has_small_disk(run) else kinds)(
            run, rng
        )
    return _signal(run, rng)


def has_small_disk(run: Run) -> bool:
    """Whether the journal is on a disk of its own."""
    return os.path.ismount(run.folder / FOLDER)


def _record(run: Run, what: str, name: str, **more: Any) -> Fault:
    step = run.step()
    return {"what": what, "signal": name, "at": time.time(), "step": step, **more}


def _awaited(run: Run, fault: Fault, *, step: int | None = None) -> Fault:
    after = fault["step"] if step is None else step
    return {**fault, "seconds": run.moves_on(after + 1, HANGS_SECONDS)}


def _signal(run: Run, rng: random.Random) -> Fault | None:
    processes = run.processes()
    if not processes:
        return None
    role, pid, name = rng.choice(processes)
    kills, thaws = rng.random() < 0.7, rng.random() < 0.5
    thaw_seconds = rng.uniform(0.1, LEASE_SECONDS / 2)
    said = "SIGKILL" if kills else "SIGSTOP, SIGCONT" if thaws else "SIGSTOP"
    names = _members_of(run, role, name) if kills or not thaws else []
    killed = names if role not in ("agent", "supervisor") else []
    fault = _record(run, role, said, names=names, killed=killed)
    start = began_at(pid)
    try:
        os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
    except ProcessLookupError:
        return None
    if role == "agent" and not kills and not thaws and run.agents is not None:
        run.agents.freezes(pid)
    if not kills and thaws:
        time.sleep(thaw_seconds)
        if began_at(pid) == start:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return _awaited(run, fault)


def _members_of(run: Run, role: str, name: str) -> list[str]:
    """Returns the members that the end of a process ends."""
    if role == "supervisor":
        return []
    if role != "agent":
        return [name]
    return run.members_of_agent(name)


def _end_two_supervisors(run: Run, rng: random.Random) -> Fault | None:
    """Kills the supervisor, and kills or freezes its successor in its start."""
    first = run.supervisor()
    if first is None:
        return None
    freezes, wait = rng.random() < 0.5, rng.uniform(0.0, 1.0)
    said = "SIGKILL, then " + ("SIGSTOP" if freezes else "SIGKILL") + " of the next"
    fault = _record(run, "supervisor", said, names=[], killed=[])
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    end = time.monotonic() + SUCCESSOR_SECONDS
    while (successor := run.supervisor()) in (None, first):
        if time.monotonic() > end:
            return _awaited(run, fault)
        time.sleep(0.01)
    time.sleep(wait)
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(successor or 0, signal.SIGSTOP if freezes else signal.SIGKILL)
    return _awaited(run, fault, step=run.step())


def _kill_all_members(run: Run, rng: random.Random) -> Fault | None:
    del rng
    members = run.members()
    if not members:
        return None
    fault = _record(run, "all members", "SIGKILL", names=[*members], killed=[*members])
    for _, pid in members.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _awaited(run, fault)


def _fill_disk(run: Run, rng: random.Random) -> Fault | None:
    """Fills the journal's disk for a while; kills the supervisor meanwhile.

    Without a journal there is nothing to hit: a run on a full disk does not begin.
    """
    if not (run.folder / FOLDER / EVENTS).is_file():
        return None
    fault = _record(run, "disk", "full, SIGKILL of the supervisor", names=[], killed=[])
    filler = run.folder / FOLDER / _FILLER
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    time.sleep(rng.uniform(0.0, 3.0))
    supervisor = run.supervisor()
    if supervisor is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGKILL)
    time.sleep(rng.uniform(1.0, 10.0))
    filler.unlink()
    return _awaited(run, fault, step=run.step())


def _disturb_link(run: Run, rng: random.Random) -> Fault:
    assert run.agents is not None
    space = rng.choice(run.agents.spaces)
    inside = rng.random() < 0.5
    kind = rng.choice(("down", "down beyond the lease", f"{MEGABITS} Mb/s"))
    seconds = {
        "down": rng.uniform(0.5, LEASE_SECONDS / 2),
        "down beyond the lease": rng.uniform(LEASE_SECONDS * 1.25, LEASE_SECONDS * 3),
        f"{MEGABITS} Mb/s": rng.uniform(5.0, 20.0),
    }[kind]
    is_down = kind != f"{MEGABITS} Mb/s"

    def restore_link() -> None:
        if is_down:
            set_link(space, "up", inside=inside)
        else:
            unshape(space)

    beyond = kind == "down beyond the lease"
    names = run.members_of_agent(space.name) if beyond else []
    fault = _record(run, "link", kind, names=names, killed=[], inside=inside)
    if is_down:
        set_link(space, "down", inside=inside)
    else:
        shape(space, MEGABITS)
    timer = threading.Timer(seconds, restore_link)
    timer.start()
    fault = _awaited(run, {**fault, "for_seconds": seconds})
    timer.join()
    return fault


# Audit.


def audited_losses(run: Run, faults: Sequence[Fault]) -> dict[str, Any]:
    """Compares the members that a run gave up with those that faults hit.

    Args:
        run: The run.
        faults: Faults of the run, in order.

    Returns:
        ``wrong_victims``: members that were given up and that no fault could end, with
        the reasons; ``killed`` and ``blamed``: numbers of members that were hit, and of
        those that were given up by name; ``rolled_back``: number of committed steps
        that were computed again although a member with them was alive.
    """
    lost = [event for event in run.events() if event["event"] == "lost"]
    may = {name for fault in faults for name in fault["names"]}
    must = {name for fault in faults for name in fault["killed"]}
    given_up = {event["name"]: event["why"] for event in lost if event["counts"]}
    return {
        "wrong_victims": {n: why for n, why in given_up.items() if n not in may},
        "killed": len(must),
        "blamed": len(must & {event["name"] for event in lost}),
        "rolled_back": rolled_back(run.events(), run.commits()),
    }


def rolled_back(
    events: Sequence[Mapping[str, Any]], commits: Sequence[Mapping[str, Any]]
) -> int:
    """Returns the committed steps that were computed again without need.

    A generation may compute steps again only if every member of the one before is lost.
    """
    newest, steps = 0, 0
    lost, before = set[str](), set[str]()
    ordered = sorted([*events, *commits], key=lambda line: float(line["time"]))
    for line in ordered:
        match line["event"]:
            case "committed":
                steps += line["step"] <= newest
                newest = max(newest, line["step"])
            case "lost" | "ended":
                lost.add(line["name"])
            case "begun":
                if before <= lost:  # Nobody has the newer steps.
                    newest = max(0, line["step"])
                before = {*line["members"]}
    return steps


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a disk of ``DISK_BYTES`` for a run's journal in the block; needs root."""
    journal = folder / FOLDER
    journal.mkdir(mode=0o700)
    options = f"size={DISK_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", journal], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", journal], check=True)
