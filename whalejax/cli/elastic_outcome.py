"""Prints the result of an elastic run, with numbers from the run's journal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from whalejax.cli.options import LaunchCommand, TrainCommand
from whalejax.elastic.mesh_sizes import REPLICAS
from whalejax.journals.journal import EVENTS, FOLDER, read_events
from whalejax.journals.reduction_choice import COLLECTIVES
from whalejax.journals.status import RunStatus, document, status_of
from whalejax.processes.launcher import RankReport


_NOT_RUN: Final = 2
"""Exit status of a supervisor that could not start or that refused the run."""


def print_launched(command: LaunchCommand, status: int, seconds: float) -> None:
    """Prints the result of ``whalejax launch --processes MIN:MAX``.

    Args:
        command: Options of the command.
        status: Exit status of the run.
        seconds: Duration of the whole command.
    """
    run = _run(command.logs, status, seconds)
    if command.json:
        print(json.dumps(launched(run, command.logs, status)), flush=True)
    elif run is not None and not command.quiet:
        print(sentence(run, command.logs, seconds), flush=True)


def _run(folder: Path, status: int, seconds: float) -> RunStatus | None:
    if status == _NOT_RUN:
        events = read_events(folder / FOLDER / EVENTS)
        opened = [said for said in events if said["event"] == "opened"]
        if not opened or opened[-1]["time"] < time.time() - seconds:
            return None
    return status_of(folder)[-1]


def launched(run: RunStatus | None, logs: Path, status: int) -> dict[str, Any]:
    """Returns the result of ``whalejax launch --json``.

    It extends the result of a launch with a fixed number of processes.

    Args:
        run: Status of the run from its journal; None without a journal.
        logs: Folder of ``--logs``.
        status: Exit status of the run.
    """
    result: dict[str, Any] = {"status": status, "failure": None, "ranks": []}
    if run is None:
        return {**result, "failure": "no supervisor could run; standard error says why"}
    ranks = [
        {
            **RankReport(
                member.rank,
                member.host,
                kind=None,
                devices=None,
                cpu_quota_percent=None,
                log=str(logs / FOLDER / f"{name}.log"),
            )._asdict(),
            "name": name,
            "pid": member.pid,
            "state": member.state,
        }
        for name, member in run.members.items()
    ]
    told = document([run])
    more = {name: told[name] for name in ("generations", "lost", "goodput")}
    return {**result, "failure": run.why or None, "ranks": ranks, **more}


def print_trained(command: TrainCommand, status: int, seconds: float) -> None:
    """Prints the result of ``whalejax train --processes``.

    Args:
        command: Options of the command.
        status: Exit status of the run.
        seconds: Duration of the whole command.
    """
    assert command.save is not None
    run = _run(command.save, status, seconds)
    if run is not None and not command.quiet:
        print(sentence(run, command.save, seconds), flush=True)
    if command.json:
        print(json.dumps(trained(run, command, status, seconds)), flush=True)


def sentence(run: RunStatus, folder: Path, seconds: float) -> str:
    """Describes a run in one line.

    Args:
        run: Status of the run from its journal.
        folder: Folder of the run.
        seconds: Duration of the whole command.
    """
    where = f"whalejax status {folder} shows more"
    if run.loss is None or run.loss_first is None:
        none = ", no step was done"
        if not run.steps:  # unknown, as in a script of the user
            none = ""
        elif run.step >= run.steps:
            none = f", all {run.steps} steps were done before"
        return f"{run.state}{none}, {seconds:.1f} s in all; {where}"
    return (
        f"{run.state}, loss {run.loss_first:.4f} to {run.loss:.4f} in {run.steps_done} "
        f"steps, {seconds:.1f} s in all; {where}"
    )


def trained(
    run: RunStatus | None, command: TrainCommand, status: int, seconds: float
) -> dict[str, Any]:
    """Returns the result of ``whalejax train --json``.

    It extends the result of a run in one process.

    Args:
        run: Status of the run from its journal; None without a journal.
        command: Options of the command.
        status: Exit status of the run.
        seconds: Duration of the whole command.
    """
    last = run.generations[-1].members if run and run.generations else ()
    way = run.adding_up if run else None
    spread = list(command.mesh) not in ([], [REPLICAS])
    if way is not None:
        spread = way.by == COLLECTIVES
    result: dict[str, Any] = {
        "model": command.model,
        "steps": run.steps_done if run else 0,
        "loss_first": run.loss_first if run else None,
        "loss_last": run.loss if run else None,
        "max_rel_diff_vs_one_device": None,
        # If one model spans all processes, the plan depends on the generation.
        "mesh": None if spread else {"data": len(last)},
        "predicted_step_s": None,
        "measured_step_s": run.step_seconds if run else None,
        "tokens_per_s": None,
        "samples_per_s": None,
        "seconds": seconds,
        "status": status,
    }
    if run is not None:
        told = document([run])
        names = (
            *("state", "why", "generations", "members", "lost", "goodput"),
            *("adding_up", "tables_placed", "checkpoint"),
        )
        result |= {name: told[name] for name in names}
    return result
