"""Options of commands that start processes on hosts: ``launch`` and ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from tyro import conf


def default_words(default: str) -> str:
    """Returns the help's text for a default; empty for an option without one.

    >>> default_words("100"), default_words("None")
    ('(default: 100)', '')
    """
    if "MISSING" in default.upper():
        return "(required)"
    return "" if default in ("", "''", "None", "False") else f"(default: {default})"


def option(**words: Any) -> Any:
    """Returns an option's help: ``tyro.conf.arg`` with our text for defaults.

    Args:
        words: Arguments of ``tyro.conf.arg``, such as ``metavar``.
    """
    return conf.arg(help_behavior_hint=default_words, **words)


Switch = Annotated[bool, option()]
"""Type of an option that is given or left out."""

_Number = Annotated[int | None, option(metavar="N")]
Hosts = Annotated[
    str,
    option(
        metavar="A,B",
        help="where processes run; others than this one by ssh, in this folder, with "
        "this Python",
    ),
]
AgentsAddress = Annotated[
    str | None,
    option(
        metavar="ADDRESS",
        help="address of this machine at which whalejax agent joins from others; the "
        "processes run where agents are",
    ),
]
RayAddress = Annotated[
    str | None,
    option(
        metavar="ADDRESS",
        help="hold the processes on the nodes of this Ray cluster; auto finds it",
    ),
]
Restarts = Annotated[
    int | None,
    option(
        metavar="N",
        help="failures within an hour that restarts repair; one more ends the run "
        "(default: 100; of launch with a fixed number 0)",
    ),
]
RemoteShell = Annotated[
    str, option(metavar="WORDS", help="what is given a host and a command")
]
SSH: Final = "ssh -tt -o BatchMode=yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Start a script as several processes, and stop them together.

    Arguments after the script belong to it. It calls wh.init_distributed() first, or
    runs its loop in wh.train_elastic, which calls that if needed.
    """

    script: Annotated[conf.Positional[Path], option(metavar="SCRIPT.py")]
    """script that each process runs"""
    arguments: Annotated[conf.Positional[tuple[str, ...]], option(metavar="ARG")] = ()
    """arguments of the script: all that follow it, options included"""
    processes: Annotated[str, option(metavar="N|MIN:MAX")] = "2"
    """number of processes over all hosts; MIN:MAX continues with the remaining
    ones, and restarts lost ones: see docs/survive/elastic.md"""
    spares: Annotated[int, option(metavar="N")] = 0
    """standby processes, which replace lost ones at once"""
    restarts: Restarts = None
    keep: Switch = False
    """with --processes 1: restart the process when it is killed, such as one with the
    dense part of a recommender, which continues from its kept state"""
    hosts: Hosts = "localhost"
    host: AgentsAddress = None
    ray: RayAddress = None
    cpu_quota: Annotated[str, option(metavar="P,P")] = ""
    """percent of a core for each process, to try mixed speeds: 100,33"""
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """folder of one file per rank, rank-0.log and so on; with MIN:MAX in its subfolder
    elastic"""
    port: _Number = None
    """port of process 0, or of the supervisor with MIN:MAX; a free one, or 8476
    on other hosts"""
    remote_shell: RemoteShell = SSH
    exit_timeout: Annotated[float, option(metavar="SECONDS")] = 300.0
    """silence after which a rank is stopped once others have ended"""
    json: Switch = False
    """print how every rank ended as one line of JSON and nothing else"""
    quiet: Switch = False
    """print problems only, no progress; not with a fixed number of processes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCommand:
    """Find problems that keep this host, or several, from running a program together.

    Checks versions, devices, addresses, clocks and control groups, and prints remedies.
    Ends with status 1 if there is a problem.
    """

    hosts: Annotated[str | None, option(metavar="A,B")] = None
    """also run it on these hosts, by ssh as whalejax launch does, and compare them"""
    coordinator: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """address to meet others that were started with the same words, and compare"""
    processes: _Number = None
    """number that meet at --coordinator; under Slurm all tasks if left out"""
    timeout: Annotated[float, option(metavar="SECONDS")] = 60.0
    """time after which absent ones are reported missing"""
    remote_shell: RemoteShell = SSH
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
