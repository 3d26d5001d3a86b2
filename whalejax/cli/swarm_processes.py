"""``whalejax swarm serve --processes``: a registry and its peers, kept running."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Iterator
from typing import Any, Final

from whalejax.cli.swarm_options import SwarmJoinCommand, SwarmServeCommand
from whalejax.distributed.launch_env import is_loopback, joined_address, reached_host
from whalejax.distributed.standard_streams import say
from whalejax.meshes.errors import Problems
from whalejax.processes.launch_spec import (
    check_hosts,
    is_here,
    shell_words,
    words_there,
)
from whalejax.processes.local_gpus import own_gpus, refusal, visible_gpus
from whalejax.processes.restarting_processes import Keeper, KeptCommand
from whalejax.wire.keys import make_key


HERE: Final = SwarmServeCommand(model="", stages=2)
"""All options with their defaults."""


def serve_with_peers(command: SwarmServeCommand) -> int:
    """Starts a registry and peers, and restarts those that are killed.

    Args:
        command: Options of the command, already checked.

    Returns:
        0 if all steps were done; else the registry's status, or 1.

    Raises:
        WhaleError: Options contradict each other.
    """
    count, hosts = command.processes, command.hosts.split(",")
    shell, gpus = shell_words(command.remote_shell), visible_gpus()
    here = [n for n in range(count) if is_here(hosts[n % len(hosts)])]
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
        check_hosts(problems, hosts, count, shell)
        if len(here) < count and is_loopback(command.host):
            problems.add(
                f"--host is {command.host}, which other machines of --hosts "
                f"{command.hosts} cannot reach. Give it as {socket.gethostname()}, or "
                "another address of this machine"
            )
        if why := refusal(gpus, len(here)):
            problems.add(f"--processes: {why}")
    make_key(command.key)
    registry = dataclasses.replace(
        command, processes=0, hosts=HERE.hosts, remote_shell=HERE.remote_shell
    )
    programs = [KeptCommand(name="registry", command=_words("serve", registry))]
    for place in range(count):
        host = hosts[place % len(hosts)]
        words = _words("join", _join(command, command.host if place in here else host))
        own = {}
        if place in here:
            own = own_gpus(gpus, len(here), here.index(place))
        else:
            words = words_there(shell, host, words)
        name = f"peer-{place + 1}"
        programs.append(KeptCommand(name=name, command=words, environment=own))
    keeper = Keeper(programs, command.logs, lambda text: say(f"whalejax: {text}"))
    if not command.json:
        where = "here" if len(here) == count else f"on {command.hosts}"
        say(f"whalejax: {count} peers are started {where}, with logs in {command.logs}")
    return keeper.run()


def _join(command: SwarmServeCommand, host: str) -> SwarmJoinCommand:
    return SwarmJoinCommand(
        registry=joined_address(reached_host(command.host), command.port),
        model=command.model,
        set=command.set,
        key=command.key,
        host=host,
        patience=command.patience,
    )


def _words(verb: str, command: SwarmServeCommand | SwarmJoinCommand) -> list[str]:
    """Returns the command line that runs ``whalejax`` with these options."""
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
