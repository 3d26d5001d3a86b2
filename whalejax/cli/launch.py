"""``whalejax launch``: runs a script as a fixed number of processes."""

from __future__ import annotations

import sys

from whalejax.cli.options import LaunchCommand
from whalejax.distributed.standard_streams import say
from whalejax.meshes.errors import WhaleError
from whalejax.processes import launcher, script_process
from whalejax.processes.launch_spec import shell_words
from whalejax.processes.restarting_processes import Keeper, KeptCommand


def launch(command: LaunchCommand) -> int:
    """Runs a script as several processes.

    Args:
        command: Options of the command.

    Returns:
        0, or the status of the first process that failed.

    Raises:
        WhaleError: The script does not exist, or options contradict each other.
    """
    if not command.script.is_file():
        raise WhaleError(
            f"SCRIPT.py is {str(command.script)!r}; there is no such file "
            f"({command.script.absolute()})"
        )
    from whalejax.membership.settings import least_and_most

    least, _ = least_and_most(command.processes)
    words = (
        sys.executable,
        script_process.__file__,
        str(command.script),
        *command.arguments,
    )
    if command.keep:
        if command.processes != "1" or command.hosts != "localhost":
            raise WhaleError(
                f"--keep was given with --processes {command.processes} --hosts "
                f"{command.hosts}; it restarts a single process on this machine. Give "
                "--processes 1, or MIN:MAX without --keep"
            )
        program = KeptCommand(name="script", command=words)
        return Keeper(
            [program], command.logs, lambda text: say(f"whalejax: {text}")
        ).run()
    needs_agents = command.host is not None or command.ray is not None
    if ":" in command.processes or needs_agents or command.spares or command.restarts:
        from whalejax.cli.elastic_launch import launch_elastic

        return launch_elastic(command)
    if command.quiet:
        raise WhaleError(
            f"--quiet was given with --processes {command.processes}; only MIN:MAX "
            "prints progress. Leave --quiet out"
        )
    return launcher.run(
        launcher.Launch(
            command=words,
            processes=least,
            hosts=tuple(command.hosts.split(",")),
            quotas=_percents(command.cpu_quota),
            logs=command.logs,
            port=command.port,
            remote_shell=shell_words(command.remote_shell),
            json=command.json,
            exit_seconds=command.exit_timeout,
        )
    )


def _percents(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise WhaleError(
            f"--cpu-quota is {text!r}; expected percents of a core, separated by "
            "commas, such as 100,33"
        ) from None
