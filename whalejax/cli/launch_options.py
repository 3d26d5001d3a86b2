"""Options of commands that start processes on hosts: ``launch`` and ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from tyro import conf


def default_words(default: str) -> str:
    """Returns the help's text of a default: empty where an option is just left out.

    >>> default_words("100"), default_words("None")
    ('(default: 100)', '')
    """
    if "MISSING" in default.upper():
        return "(required)"
    return "" if default in ("", "''", "None", "False") else f"(default: {default})"


def option(**words: Any) -> Any:
    """Returns an option's help: ``tyro.conf.arg`` with our words for defaults.

    Args:
        words: Arguments of ``tyro.conf.arg``, such as ``metavar``.
    """
    return conf.arg(help_behavior_hint=default_words, **words)


Switch = Annotated[bool, option()]
"""An option that is given or left out."""

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
        help="of MIN:MAX: address of this machine at which whalejax agent joins from "
        "others; the processes run where agents are",
    ),
]
RayAddress = Annotated[
    str | None,
    option(
        metavar="ADDRESS",
        help="of MIN:MAX: hold the processes on the nodes of this Ray cluster; auto "
        "finds it",
    ),
]
RemoteShell = Annotated[
    str, option(metavar="WORDS", help="what is given a host and a command")
]
SSH: Final = "ssh -tt -o BatchMode=yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Start a script as several processes, and stop them together.

    What stands behind the script is its own. It calls wh.init_distributed() first,
    or has its loop in wh.train_elastic, which calls it where it is needed.
    """

    script: Annotated[conf.Positional[Path], option(metavar="SCRIPT.py")]
    """what each process runs"""
    arguments: Annotated[conf.Positional[tuple[str, ...]], option(metavar="ARG")] = ()
    """what the script is given, options and all that stands behind it"""
    processes: Annotated[str, option(metavar="N|MIN:MAX")] = "2"
    """how many, over all hosts; MIN:MAX goes on with those that are left, and starts
    lost ones again: see docs/survive/elastic.md"""
    spares: Annotated[int, option(metavar="N")] = 0
    """of MIN:MAX: further processes that stand by and step in at once"""
    keep: Switch = False
    """of --processes 1: start the process again when it is killed, as one with the
    dense part of a recommender, which goes on from what it keeps"""
    hosts: Hosts = "localhost"
    host: AgentsAddress = None
    ray: RayAddress = None
    cpu_quota: Annotated[str, option(metavar="P,P")] = ""
    """percent of a core for each process, to try mixed speeds: 100,33"""
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """one file per rank, rank-0.log and so on; of MIN:MAX in its folder elastic"""
    port: _Number = None
    """where process 0 listens, or the supervisor of MIN:MAX; a free one, or 8476 on
    other hosts"""
    remote_shell: RemoteShell = SSH
    exit_timeout: Annotated[float, option(metavar="SECONDS")] = 300.0
    """a rank that says nothing for so long when others have ended is stopped"""
    json: Switch = False
    """print how every rank ended as one line of JSON and nothing else"""
    quiet: Switch = False
    """of MIN:MAX: say what goes wrong, and no progress"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCommand:
    """Look for what would keep this host, or several, from running a program together.

    Versions, devices, addresses, clocks and control groups, each with its remedy. Ends
    with status 1 where there is a problem.
    """

    hosts: Annotated[str | None, option(metavar="A,B")] = None
    """start it on these too, by ssh as whalejax launch does, and compare them"""
    coordinator: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """meet others there that were started with the same words, and compare"""
    processes: _Number = None
    """how many meet at --coordinator; under Slurm all tasks if left out"""
    timeout: Annotated[float, option(metavar="SECONDS")] = 60.0
    """those that have not come after so long are missing"""
    remote_shell: RemoteShell = SSH
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
