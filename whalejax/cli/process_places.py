"""Chooses the machines of an elastic run: this machine, or those of agents."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from whalejax.cli.options import LaunchCommand, TrainCommand
from whalejax.distributed.launch_env import PORT
from whalejax.elastic.agents.on_hosts import HostAgents
from whalejax.membership.settings import Supervised
from whalejax.meshes.errors import Problems
from whalejax.processes.launch_spec import check_hosts, is_here, shell_words
from whalejax.processes.local_gpus import refusal, visible_gpus
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import listen


_HERE: Final = LaunchCommand(script=Path()).hosts
_REMOTE_SHELL: Final = LaunchCommand(script=Path()).remote_shell


def check_places(
    command: LaunchCommand | TrainCommand, most: int, problems: Problems
) -> None:
    """Records errors in the options that choose the machines of processes.

    Args:
        command: Options of the command.
        most: Largest number of processes of the run, including spares.
        problems: Collector of the command's errors.
    """
    hosts = _hosts(command)
    if not hosts and command.host is None and command.ray is None:
        if why := refusal(visible_gpus(), most):
            problems.add(f"--processes: {why}")
    if command.host is not None:
        try:
            listen(command.host).close()
        except (OSError, UnicodeError) as error:
            problems.add(
                f"--host is {command.host!r}, at which this machine cannot listen "
                f"({getattr(error, 'strerror', None) or error}). Give an address of "
                "this machine, or 0.0.0.0 for all its addresses"
            )
    if hosts:
        check_hosts(problems, hosts, most, shell_words(command.remote_shell))
    if hosts and command.ray is not None:
        problems.add(
            f"--hosts is {command.hosts} with --ray {command.ray}; only one of them "
            "can start the agents. Leave one out"
        )
    if not hosts and command.remote_shell != _REMOTE_SHELL:
        problems.add(
            f"--remote-shell is {command.remote_shell} without --hosts. Leave it out, "
            "or name hosts"
        )


@contextlib.contextmanager
def start_agents(
    command: LaunchCommand | TrainCommand, run: Supervised
) -> Iterator[Supervised]:
    """Starts the agents of a run, which end with the context.

    Args:
        command: Options of the command.
        run: Run of the command.

    Yields:
        The run, with the machines of the agents.

    Raises:
        WhaleError: An agent cannot be started.
    """
    hosts, host = _hosts(command), command.host
    most = run.settings.most + run.settings.spares
    if host is None and hosts:
        host = address_for(hosts)
    if host is None and command.ray is not None:
        host = socket.gethostname()
    if host is None:
        yield dataclasses.replace(run, port=command.port or 0)
        return
    port = command.port or PORT
    where = joined_address(host, port)
    awaited = hosts
    with contextlib.ExitStack() as stack:
        if command.ray is not None:
            from whalejax.elastic.engines.ray_agents import RayAgents

            agents = stack.enter_context(
                RayAgents(command.ray, where, run.folder, processes=most)
            )
            awaited = tuple(agents.names)
        elif hosts:
            stack.enter_context(
                HostAgents(
                    dict.fromkeys(hosts, shell_words(command.remote_shell)),
                    where,
                    run.folder,
                    processes=-(-most // len(hosts)),
                )
            )
        yield dataclasses.replace(
            run, host=host, port=port, places=True, awaited=awaited
        )


def _hosts(command: LaunchCommand | TrainCommand) -> tuple[str, ...]:
    return () if command.hosts == _HERE else tuple(command.hosts.split(","))


def address_for(hosts: Sequence[str]) -> str:
    """Returns the address at which agents on these hosts reach this machine."""
    return "127.0.0.1" if all(map(is_here, hosts)) else socket.gethostname()
