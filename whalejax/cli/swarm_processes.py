"""``whalejax swarm serve --processes``: a registry and its peers, kept running."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from whalejax.cli.swarm_options import SwarmJoinCommand, SwarmServeCommand
from whalejax.distributed.launch_env import joined_address, reached_host
from whalejax.distributed.local_gpus import own_gpus, refusal, visible_gpus
from whalejax.distributed.standard_streams import say
from whalejax.meshes.errors import Problems
from whalejax.processes.keeper import Keeper, Program
from whalejax.wire.keys import make_key


def serve_with_peers(command: SwarmServeCommand) -> int:
    """Start a registry and peers, and start again what is killed.

    Args:
        command: the options, which were checked.

    Returns:
        0 where all steps were done; else the registry's status, or 1.

    Raises:
        WhaleError: options contradict each other.
    """
    count, gpus = command.processes, visible_gpus()
    with Problems("whalejax swarm serve --processes") as problems:
        if command.save is None:
            problems.add(
                "--processes was given without --save DIR, from whose newest "
                "checkpoint a registry goes on that was killed. Give it"
            )
        if not command.port:
            problems.add(
                "--port is 0 with --processes, and peers find a registry that was "
                "started again where it was before. Give a port from 1 to 65535"
            )
        if why := refusal(gpus, count):
            problems.add(f"--processes: {why}")
    make_key(command.key)
    registry = dataclasses.replace(command, processes=0)
    join = SwarmJoinCommand(
        registry=joined_address(reached_host(command.host), command.port),
        model=command.model,
        set=command.set,
        key=command.key,
        host=command.host,
        patience=command.patience,
    )
    programs = [
        Program(name="registry", command=_words("serve", registry)),
        *(
            Program(
                name=f"peer-{place + 1}",
                command=_words("join", join),
                environment=own_gpus(gpus, count, place),
            )
            for place in range(count)
        ),
    ]
    keeper = Keeper(programs, command.logs, lambda text: say(f"whalejax: {text}"))
    if not command.json:
        say(f"whalejax: {count} peers are started here, with logs in {command.logs}")
    return keeper.run()


def _words(verb: str, command: SwarmServeCommand | SwarmJoinCommand) -> list[str]:
    """The words that give these options to this Python's ``whalejax``."""
    return [sys.executable, "-m", "whalejax", "swarm", verb, *_options(command)]


def _options(command: Any) -> Iterator[str]:
    if isinstance(command, SwarmJoinCommand):
        yield command.registry
    yield command.model
    for given in dataclasses.fields(command):
        value = getattr(command, given.name)
        if given.name in ("registry", "model") or value == given.default:
            continue
        yield f"--{given.name.replace('_', '-')}"
        if not isinstance(value, bool):
            yield from map(str, value if isinstance(value, tuple) else (value,))
