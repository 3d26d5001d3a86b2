"""``whalejax swarm serve --processes``: runs and restarts a registry and its peers."""

from __future__ import annotations

import dataclasses
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from whalejax.cli.swarm_options import SwarmJoinCommand, SwarmServeCommand
from whalejax.distributed.launch_env import is_loopback, reached_host
from whalejax.distributed.standard_streams import say
from whalejax.elastic.engines.engine_shells import (
    leave_allocation,
    ray_shell,
    slurm_allocation,
    slurm_options,
    slurm_shell,
)
from whalejax.meshes.errors import Problems
from whalejax.processes.launch_spec import (
    check_hosts,
    is_here,
    shell_words,
    words_there,
)
from whalejax.processes.local_gpus import own_gpus, refusal, visible_gpus
from whalejax.processes.restarting_processes import Keeper, KeptCommand
from whalejax.wire.addresses import joined_address
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
        WhaleError: Options contradict each other, or a program is missing.
    """
    count, gpus = command.processes, visible_gpus()
    shell, hosts = _places(command)
    run = f"swarm-{secrets.token_hex(4)}"
    here = [n for n in range(count) if is_here(hosts[n % len(hosts)])]
    with Problems("whalejax swarm serve --processes") as problems:
        if command.save is None:
            problems.add(
                "--processes was given without --save DIR, from which a restarted "
                "registry continues. Give --save DIR"
            )
        if not command.port:
            problems.add(
                "--port is 0 with --processes; a restarted registry needs the same "
                "port. Give a port from 1 to 65535"
            )
        check_hosts(problems, hosts, count, shell)
        if len(here) < count and is_loopback(command.host):
            problems.add(
                f"--host is {command.host}, which the machines of {_engine(command)} "
                f"cannot reach. Give {socket.gethostname()}, or another address of "
                "this machine"
            )
        if why := refusal(gpus, len(here)):
            problems.add(f"--processes: {why}")
    make_key(command.key)
    places = "hosts", "slurm", "ray", "peer_gpus", "remote_shell"
    registry = dataclasses.replace(
        command, processes=0, **{name: getattr(HERE, name) for name in places}
    )
    named = command.slurm is None and command.ray is None
    programs = [KeptCommand(name="registry", command=_words("serve", registry))]
    for place in range(count):
        host = hosts[place % len(hosts)]
        # The address of a node that Slurm or Ray allocates is unknown here.
        reached = command.host if place in here else host if named else "0.0.0.0"  # noqa: S104
        words = _words("join", _join(command, reached))
        name, own, release = f"peer-{place + 1}", dict[str, str](), list[str]()
        if place in here:
            own = own_gpus(gpus, len(here), here.index(place))
        else:
            words = words_there(shell, host, words)
        if command.slurm is not None:
            own, release = slurm_allocation(f"{run}-{name}")
        kept = KeptCommand(name=name, command=words, environment=own, release=release)
        programs.append(kept)
    keeper = Keeper(programs, command.logs, lambda text: say(f"whalejax: {text}"))
    if not command.json:
        where = "here" if len(here) == count else f"on {_engine(command)}"
        say(f"whalejax: {count} peers are started {where}, with logs in {command.logs}")
    return keeper.run()


def _places(command: SwarmServeCommand) -> tuple[Sequence[str], list[str]]:
    """Returns the command that runs another command on a host, and the hosts' names."""
    given = {
        "--hosts": None if command.hosts == HERE.hosts else command.hosts,
        "--slurm": command.slurm,
        "--ray": command.ray,
    }
    both = [f"{n} {value}".strip() for n, value in given.items() if value is not None]
    with Problems("whalejax swarm serve --processes") as problems:
        if len(both) > 1:
            problems.add(
                f"{' and '.join(both)} were given; only one of them can start the "
                "peers. Leave out the others"
            )
        if command.peer_gpus and command.ray is None:
            problems.add(
                f"--peer-gpus is {command.peer_gpus} without --ray. Leave it out; for "
                "--slurm, give GPUs in its options"
            )
    numbers = range(1, command.processes + 1)
    if command.slurm is not None:
        options = slurm_options(command.slurm)
        shell = slurm_shell(options)
        leave_allocation()
        return shell, [f"slurm-{number}" for number in numbers]
    if command.ray is not None:
        shell = ray_shell(
            command.ray, cpus=int(not command.peer_gpus), gpus=command.peer_gpus
        )
        return shell, [f"ray-{number}" for number in numbers]
    return shell_words(command.remote_shell), command.hosts.split(",")


def _engine(command: SwarmServeCommand) -> str:
    if command.slurm is not None:
        return "Slurm"
    return f"--hosts {command.hosts}" if command.ray is None else "Ray"


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
