"""Process that restarts the supervisor of a job's run if it is killed.

The scheduler starts this process, which runs until the run is over, even if the
scheduler ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from whalejax.elastic.agents.on_hosts import HostAgents
from whalejax.elastic.engines.engine_shells import (
    leave_allocation,
    slurm_allocation,
)
from whalejax.elastic.launching import supervise
from whalejax.journals.journal import EVENTS, FOLDER, read
from whalejax.membership.settings import Supervised, SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.scheduler.live.job_hosts import JobHosts, slurm_refusal
from whalejax.scheduler.live.job_run import (
    FRONT,
    JobLaunch,
    read_hosts,
    write_refusals,
)
from whalejax.state.folder_lock import FolderLock, is_held
from whalejax.wire.addresses import joined_address


IS_HELD: Final = 75
"""Exit status if another process of this kind already runs for the job."""

_EXIT_SECONDS: Final = 60.0
_LEASE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.5
_QUEUE_SECONDS: Final = 1e9
"""Longest wait for members of a job whose hosts are in a queue: no limit."""


def main(words: Sequence[str]) -> int:
    """Runs the supervisor of a job, and restarts it when it is killed.

    Args:
        words: Single argument: the fields of ``JobLaunch`` as JSON.

    Returns:
        Exit status of the run's supervisor. ``IS_HELD`` if the job already has such a
        process, and 1 after an error.
    """
    told = msgspec.json.decode(words[0], type=JobLaunch)
    home = Path(told.home)
    lock = FolderLock(home / FRONT)
    try:
        lock.__enter__()
    except WhaleError as error:
        print(f"whalejax: {error}", file=sys.stderr, flush=True)
        return IS_HELD
    try:
        command = [sys.executable, "-m", "whalejax.elastic.elastic_worker"]
        with contextlib.ExitStack() as stack:
            run = Supervised(
                command=(*command, json.dumps(told.options)),
                folder=home,
                settings=_settings(told),
                exit_seconds=_EXIT_SECONDS,
                devices=None if told.devices is None else tuple(told.devices),
                environment={"JAX_PLATFORMS": "cpu"} if told.platform == "cpu" else {},
            )
            if told.hosts is not None:
                run = _start_agents(told, told.hosts, run, stack)
                if _outlives_supervisor(home):
                    return 0
            return supervise(run)
    except WhaleError as error:
        print(f"whalejax: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        lock.__exit__(None, None, None)


def _settings(told: JobLaunch) -> SupervisorSettings:
    settings = SupervisorSettings(
        least=told.least,
        most=told.most,
        first=told.first,
        lease_seconds=_LEASE_SECONDS,
    )
    if told.hosts is None or told.hosts.engine is None:
        return settings
    return dataclasses.replace(settings, wait_seconds=_QUEUE_SECONDS)


def _outlives_supervisor(home: Path) -> bool:
    """Waits for a supervisor whose earlier process of this kind was killed, if any.

    Returns whether that supervisor has ended its run.
    """
    if not is_held(home / FOLDER):
        return False
    while is_held(home / FOLDER):
        time.sleep(_LOOK_SECONDS)
    has_ended = False
    for said in read(home / FOLDER / EVENTS):
        if said["event"] in ("opened", "ending"):
            has_ended = said["event"] == "ending"
    return has_ended


def _start_agents(
    told: JobLaunch, hosts: JobHosts, run: Supervised, stack: contextlib.ExitStack
) -> Supervised:
    """Starts an agent on each host of the job; closing the stack ends them."""
    home, allocations = run.folder, {}
    if hosts.engine == "slurm":
        leave_allocation()
        # Another scheduler may have a job of the same name.
        prefix = f"{home.name}-{zlib.crc32(str(home.absolute()).encode()):08x}"
        allocations = {
            host: slurm_allocation(f"{prefix}-{host}") for host in hosts.shells
        }
    agents = HostAgents(
        hosts.shells,
        joined_address(hosts.address, told.port),
        home,
        processes=hosts.room,
        hosts=read_hosts(home),
        is_queued=hosts.engine is not None,
        refusal=slurm_refusal if hosts.engine == "slurm" else None,
        environments={host: given for host, (given, _) in allocations.items()},
        releases={host: words for host, (_, words) in allocations.items()},
    )
    is_over = threading.Event()
    follower = threading.Thread(
        target=_follow_hosts, args=(agents, home, is_over), daemon=True
    )
    stack.enter_context(agents)
    follower.start()
    stack.callback(follower.join)
    stack.callback(is_over.set)
    used = {name.partition("/")[0] for name in told.devices or ()}
    return dataclasses.replace(
        run,
        host=hosts.address,
        port=told.port,
        places=True,
        awaited=tuple(sorted(used)),
    )


def _follow_hosts(agents: HostAgents, home: Path, is_over: threading.Event) -> None:
    """Starts and ends agents as the scheduler changes the hosts of the job.

    It tells the scheduler which hosts are refused.
    """
    before: dict[str, float] | None = None
    told: dict[str, str] = {}
    while not is_over.wait(_LOOK_SECONDS):
        with contextlib.suppress(OSError, ValueError):  # The next turn retries.
            wanted = read_hosts(home)
            if wanted != before:
                agents.set_hosts(wanted)
                before = wanted
            if (refused := dict(agents.refused)) != told:
                write_refusals(home, refused)
                told = refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
