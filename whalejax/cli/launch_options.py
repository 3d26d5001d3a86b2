"""Options of commands that start processes on hosts: ``launch`` and ``doctor``."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from tyro import conf


def default_words(default: str) -> str:
    """Returns the help text for a default; empty if the default is None.

    >>> default_words("100"), default_words("None")
    ('(default: 100)', '')
    """
    if "MISSING" in default.upper():
        return "(required)"
    return "" if default in ("", "''", "None", "False") else f"(default: {default})"


def option(**words: Any) -> Any:
    """Returns ``tyro.conf.arg`` with the text of ``default_words`` for defaults.

    Args:
        words: Arguments of ``tyro.conf.arg``, such as ``metavar``.
    """
    return conf.arg(help_behavior_hint=default_words, **words)


def join_help_lines(command: type) -> None:
    """Joins the lines of each option's help text, which tyro would print as lines.

    Args:
        command: Class of a command, whose annotations get the joined texts.
    """
    hints = get_type_hints(command, include_extras=True)
    for kind in command.__mro__[:-1]:
        (node,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(node, ast.ClassDef)
        for field, after in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                name, text = ast.unparse(field.target), ast.literal_eval(after.value)
                joined = option(help=" ".join(text.split()))
                if "\n" in text:
                    command.__annotations__[name] = Annotated[hints[name], joined]


Switch = Annotated[bool, option()]
"""Type of an option without a value."""

_Number = Annotated[int | None, option(metavar="N")]
Hosts = Annotated[
    str,
    option(
        metavar="A,B",
        help="hosts of the processes; other hosts are reached by ssh and need this "
        "folder and this Python",
    ),
]
AgentsAddress = Annotated[
    str | None,
    option(
        metavar="ADDRESS",
        help="address of this machine to which whalejax agent connects; the processes "
        "then run on the machines of the agents",
    ),
]
RayAddress = Annotated[
    str | None,
    option(
        metavar="ADDRESS",
        help="run the processes on the nodes of this Ray cluster; auto finds it",
    ),
]
Restarts = Annotated[
    int | None,
    option(
        metavar="N",
        help="number of failures per hour that a run survives; one more ends it "
        "(default: 100; 0 for launch with a fixed number of processes)",
    ),
]
RemoteShell = Annotated[
    str, option(metavar="WORDS", help="command that runs a command on a host")
]
SSH: Final = "ssh -tt -o BatchMode=yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Start a script as several processes, and stop them together.

    Arguments after the script belong to it. The script calls wh.init_distributed()
    first, or trains with wh.train_elastic.
    """

    script: Annotated[conf.Positional[Path], option(metavar="SCRIPT.py")]
    """script that each process runs"""
    arguments: Annotated[conf.Positional[tuple[str, ...]], option(metavar="ARG")] = ()
    """all words after the script, which are its arguments and options"""
    processes: Annotated[str, option(metavar="N|MIN:MAX")] = "2"
    """number of processes over all hosts. With MIN:MAX, a run continues without lost
    processes and restarts them; see docs/survive/elastic.md"""
    spares: Annotated[int, option(metavar="N")] = 0
    """number of standby processes, which replace lost ones at once"""
    restarts: Restarts = None
    keep: Switch = False
    """with --processes 1: restart the process when it is killed; for scripts that save
    their state, such as the dense part of a recommender"""
    hosts: Hosts = "localhost"
    host: AgentsAddress = None
    ray: RayAddress = None
    cpu_quota: Annotated[str, option(metavar="P,P")] = ""
    """percent of a core that each process may use, to test unequal speeds: 100,33"""
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """folder of the logs: rank-0.log and so on; with MIN:MAX, in its subfolder
    elastic"""
    port: _Number = None
    """port of process 0, or of the supervisor with MIN:MAX; if left out, 8476 with
    other hosts, else a free port"""
    remote_shell: RemoteShell = SSH
    exit_timeout: Annotated[float, option(metavar="SECONDS")] = 300.0
    """time without output after which the remaining ranks are stopped once one ended"""
    json: Switch = False
    """print how every rank ended as one line of JSON and nothing else"""
    quiet: Switch = False
    """with MIN:MAX: print problems, but no progress"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCommand:
    """Find what keeps this host, or several hosts, from running a program together.

    Checks versions, devices, addresses, clocks and control groups, and prints remedies.
    The exit status is 1 if there is a problem.
    """

    hosts: Annotated[str | None, option(metavar="A,B")] = None
    """also check these hosts, by ssh as whalejax launch does, and compare all"""
    coordinator: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """address where hosts meet to be compared; run the same command on each of them"""
    processes: _Number = None
    """number of hosts that meet at --coordinator; under Slurm, all tasks if left out"""
    timeout: Annotated[float, option(metavar="SECONDS")] = 60.0
    """time after which absent hosts are reported as missing"""
    remote_shell: RemoteShell = SSH
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
