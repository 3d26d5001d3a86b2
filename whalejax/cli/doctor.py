"""``whalejax doctor``: what would keep hosts from running together, and the remedy."""

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
from whalejax.cli.options import DoctorCommand
from whalejax.cli.progress import make_console
from whalejax.distributed.host_checks import Check, report
from whalejax.distributed.host_comparison import HostComparison, meet
from whalejax.distributed.launch_env import launched, split_address
from whalejax.distributed.meeting import shared_key
from whalejax.meshes.errors import WhaleError
from whalejax.processes import launcher
from whalejax.processes.launch_spec import shell_words


_SLURM_TASKS: Final = "SLURM_NTASKS"
_COLORS: Final = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(command: DoctorCommand) -> int:
    """Checks this host, or several.

    Args:
        command: The options.

    Returns:
        0; 1 where something would keep processes from running together.

    Raises:
        WhaleError: Options contradict each other, or the coordinator is not reached.
    """
    if command.hosts is not None:
        return _on_all(command, tuple(command.hosts.split(",")))
    if command.coordinator is None and command.processes is not None:
        raise WhaleError("--processes is for --coordinator; give both, or neither")
    known = launched()
    coordinator = command.coordinator or (known[0] if known else None)
    key = shared_key()
    if coordinator is not None:
        split_address(coordinator)
    mine = report(__version__, coordinator)
    met = HostComparison(hosts=(mine,), between=())
    if coordinator is not None:
        met = meet(mine, coordinator, _count(command), command.timeout, key)
    show(met, as_json=command.json)
    problems = any(check.verdict == "problem" for _, check in _all(met))
    # Where a launcher looks on, process 0 says it for all.
    return int(problems and not (known and known[2]))


def _count(command: DoctorCommand) -> int:
    """Returns the number of processes that are to meet."""
    known = launched()
    given = command.processes or (known[1] if known else None)
    tasks = os.environ.get(_SLURM_TASKS, "0")
    given = given or (int(tasks) if tasks.isdecimal() else 0) or None
    if given is None or given < 1:
        raise WhaleError(
            "--coordinator needs --processes, how many hosts are to meet there, "
            f"which {_SLURM_TASKS} does not say here either; expected 1 or more"
        )
    return given


def _on_all(command: DoctorCommand, hosts: tuple[str, ...]) -> int:
    """Starts it on every host, which then meet."""
    if command.coordinator is not None or command.processes is not None:
        raise WhaleError(
            "--hosts starts whalejax doctor on every host; --coordinator and "
            "--processes are for those that are started by other means. Give one"
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
            stops=False,  # hosts that are there say who is missing
        )
        return min(1, launcher.run(launch))


def show(met: HostComparison, *, as_json: bool) -> None:
    """Prints what was found.

    Args:
        met: The hosts.
        as_json: Whether to print one line of JSON.
    """
    verdicts = [check.verdict for _, check in _all(met)]
    if as_json:
        counts = {word: verdicts.count(word) for word in ("warning", "problem")}
        ok = not counts["problem"]
        print(json.dumps({"ok": ok, **counts, **msgspec.to_builtins(met)}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("host", "check", "verdict", "found", "remedy"):
        table.add_column(name, overflow="fold")
    for host, check in _all(met):
        verdict = Text(check.verdict, style=_COLORS[check.verdict])
        table.add_row(host, check.name, verdict, check.found, check.remedy)
    console = make_console()
    console.print(table)
    problems, warnings = verdicts.count("problem"), verdicts.count("warning")
    console.print(f"\n{problems} problems, {warnings} warnings", markup=False)


def _all(met: HostComparison) -> Iterator[tuple[str, Check]]:
    for host in met.hosts:
        yield from ((host.host, check) for check in host.checks)
    yield from (("all", check) for check in met.between)
