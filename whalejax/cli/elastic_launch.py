"""``whalejax launch`` and ``train`` with ``--processes MIN:MAX``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Final

from whalejax.cli import elastic_outcome
from whalejax.cli.options import LaunchCommand, TrainCommand, given_plan_options
from whalejax.cli.process_places import check_places, start_agents
from whalejax.elastic.elastic_worker import mesh_asked
from whalejax.elastic.launching import supervise
from whalejax.membership.settings import (
    Supervised,
    SupervisorSettings,
    least_and_most,
)
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.processes.local_processes import log_folder


_ELASTIC_TOO: Final = ("--batch", "--precision", "--micro-batches", "--mesh")
"""Planning options that elastic runs accept."""

_ONE_PROCESS: Final = ("csv", "eval_every", "best", "best_mode", "early_stop")
"""Options of the training loop of one process."""


def launch_elastic(command: LaunchCommand) -> int:
    """Runs a script as processes that may fail and rejoin.

    Args:
        command: Options of the command.

    Returns:
        0 if all steps were done, 143 if the run was asked to end, else 1 or 2.

    Raises:
        WhaleError: Options contradict each other, or the folder of logs cannot be made.
    """
    least, most = least_and_most(command.processes)
    with Problems("whalejax launch") as problems:
        check_places(command, most + command.spares, problems)
        if command.cpu_quota:
            problems.add(
                f"--cpu-quota is {command.cpu_quota} with --processes MIN:MAX, which "
                "does not support quotas. Leave --cpu-quota out"
            )
    run = Supervised(
        command=(sys.executable, str(command.script), *command.arguments),
        folder=log_folder(command.logs),
        settings=_settings(command, command.processes),
        exit_seconds=command.exit_timeout,
        quiet=command.json or command.quiet,
    )
    began = time.monotonic()
    with start_agents(command, run) as placed:
        status = supervise(placed)
    elastic_outcome.print_launched(command, status, time.monotonic() - began)
    return status


def train_elastically(command: TrainCommand) -> int:
    """Trains a job with processes that may fail and rejoin.

    Args:
        command: Options of the command.

    Returns:
        The exit status, as for ``launch_elastic``.

    Raises:
        WhaleError: Options contradict each other.
    """
    assert command.processes is not None
    least, most = least_and_most(command.processes)
    with Problems("whalejax train --processes") as problems:
        check_places(command, most + command.spares, problems)
        if command.save is None:
            problems.add(
                "--processes was given without --save, the directory of checkpoints "
                "and the journal. Give --save DIR"
            )
        given = [name for name, _ in given_plan_options(command)]
        given += ["--plan"] * (command.plan is not None)
        given += ["--replay"] * bool(command.replay)
        for name in given:
            if name not in _ELASTIC_TOO:
                problems.add(
                    f"{name} was given with --processes, which excludes it: each "
                    "process runs the whole model as one replica, or its part by "
                    f"--mesh. Leave out {name} or --processes"
                )
        if command.staleness:
            problems.add(
                f"--staleness is {command.staleness} with --processes. In an elastic "
                "run all devices hold tables, and lookups lack no update. Leave out "
                "--staleness or --processes"
            )
        for name in _ONE_PROCESS:
            value = getattr(command, name)
            if value is not None:
                problems.add(
                    f"--{name.replace('_', '-')} {value} was given with --processes; "
                    "elastic runs do not evaluate. Leave it out and evaluate the "
                    "checkpoints of --save, or leave out --processes"
                )
        try:
            mesh_asked(command.mesh)
        except WhaleError as error:
            problems.add(str(error))
    assert command.save is not None
    module = "whalejax.elastic.elastic_worker"
    run = Supervised(
        command=(sys.executable, "-m", module, encode_command(command)),
        folder=command.save,
        settings=_settings(command, command.processes),
        quiet=command.quiet,
    )
    began = time.monotonic()
    with start_agents(command, run) as placed:
        status = supervise(placed)
    elastic_outcome.print_trained(command, status, time.monotonic() - began)
    return status


def _settings(
    command: LaunchCommand | TrainCommand, processes: str
) -> SupervisorSettings:
    least, most = least_and_most(processes)
    restarts, fixed = command.restarts, ":" not in processes and not command.spares
    if restarts is None and fixed and isinstance(command, LaunchCommand):
        restarts = 0
    return SupervisorSettings(
        least=least,
        most=most,
        spares=command.spares,
        **({} if restarts is None else {"restarts": restarts}),
    )


def encode_command(command: TrainCommand) -> str:
    """Encodes a command's options as one word, for the process that it starts."""
    return json.dumps(dataclasses.asdict(command), default=str)
