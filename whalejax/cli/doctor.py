"""``whalejax doctor``: finds what keeps hosts from running one program together."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table
from rich.text import Text

from whalejax._version import __version__
from whalejax.agreement.host_checks import Check, report
from whalejax.agreement.host_comparison import HostComparison, meet
from whalejax.cli.options import DoctorCommand
from whalejax.cli.progress import make_console
from whalejax.distributed.first_connection import shared_key
from whalejax.distributed.launch_env import launched, split_address
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.processes import launcher
from whalejax.processes.launch_spec import shell_words


_SLURM_TASKS: Final = "SLURM_NTASKS"
_COLORS: Final = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(command: DoctorCommand) -> int:
    """Checks this host, or several hosts, and prints the results.

    Args:
        command: Options of the command.

    Returns:
        Exit status: 1 if there is a problem, else 0. Processes of a launch other than
        process 0 always return 0.

    Raises:
        WhaleError: Options contradict each other, or the coordinator cannot be reached.
    """
    if command.hosts is not None:
        return _on_all(command, tuple(command.hosts.split(",")))
    if command.coordinator is None and command.processes is not None:
        raise WhaleError("--processes is for --coordinator; give both, or neither")
    launch = launched()
    coordinator = command.coordinator or (launch[0] if launch else None)
    key = shared_key()
    if coordinator is not None:
        split_address(coordinator)
    own = report(__version__, coordinator)
    comparison = HostComparison(hosts=(own,), between=())
    if coordinator is not None:
        comparison = meet(own, coordinator, _count(command), command.timeout, key)
    show(comparison, as_json=command.json)
    problems = any(check.verdict == "problem" for _, check in _checks(comparison))
    # Process 0 of a launch reports the status of all.
    return int(problems and not (launch and launch[2]))


def _count(command: DoctorCommand) -> int:
    launch = launched()
    count = command.processes or (launch[1] if launch else None)
    tasks = os.environ.get(_SLURM_TASKS, "0")
    count = count or (int(tasks) if tasks.isdecimal() else 0) or None
    if count is None or count < 1:
        raise WhaleError(
            "--coordinator was given without --processes, the number of hosts that "
            f"meet there, and {_SLURM_TASKS} is no number from 1. Give --processes"
        )
    return count


def _on_all(command: DoctorCommand, hosts: tuple[str, ...]) -> int:
    if command.coordinator is not None or command.processes is not None:
        raise WhaleError(
            "--hosts starts whalejax doctor on every host; --coordinator and "
            "--processes are for hosts where you start it yourself. Give one of the two"
        )
    words = [sys.executable, "-m", "whalejax", "doctor", "--timeout"]
    words += [str(command.timeout), *(["--json"] if command.json else [])]
    with tempfile.TemporaryDirectory() as logs:
        launch = launcher.Launch(
            command=tuple(words),
            processes=len(hosts),
            hosts=hosts,
            logs=Path(logs),
            remote_shell=shell_words(command.remote_shell),
            tells=False,
            stops=False,  # The other hosts report a missing one.
        )
        return min(1, launcher.run(launch))


def show(met: HostComparison, *, as_json: bool) -> None:
    """Prints the results of all checks.

    Args:
        met: Reports of the hosts, with problems found by comparing them.
        as_json: Whether to print one line of JSON.
    """
    verdicts = [check.verdict for _, check in _checks(met)]
    if as_json:
        counts = {word: verdicts.count(word) for word in ("warning", "problem")}
        ok = not counts["problem"]
        print(json.dumps({"ok": ok, **counts, **msgspec.to_builtins(met)}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("host", "check", "verdict", "found", "remedy"):
        table.add_column(name, overflow="fold")
    for host, check in _checks(met):
        verdict = Text(check.verdict, style=_COLORS[check.verdict])
        table.add_row(host, check.name, verdict, check.found, check.remedy)
    console = make_console()
    console.print(table)
    problems, warnings = verdicts.count("problem"), verdicts.count("warning")
    console.print(
        f"\n{count_text(problems, 'problem')}, {count_text(warnings, 'warning')}",
        markup=False,
    )


def _checks(met: HostComparison) -> Iterator[tuple[str, Check]]:
    for host in met.hosts:
        yield from ((host.host, check) for check in host.checks)
    yield from (("all", check) for check in met.between)
