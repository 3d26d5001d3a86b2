"""Options of the commands about elastic runs; see ``options``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro import conf

from whalejax.cli.launch_options import Switch, option


Number = Annotated[int | None, option(metavar="N")]
Seconds = Annotated[float, option(metavar="SECONDS")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCommand:
    """Show an elastic run: its generations, members, lost members and goodput."""

    folder: Annotated[conf.Positional[Path], option(metavar="FOLDER")]
    """folder of --save, or of --logs if a script saves nothing"""
    json: Switch = False
    """print it as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """Hold processes of an elastic run on this machine, until the run is over.

    The processes are those of whalejax launch --processes MIN:MAX --host ADDRESS, and
    run in this folder. On SIGTERM or Ctrl-C they leave after a step.
    """

    supervisor: Annotated[conf.Positional[str], option(metavar="HOST:PORT")]
    """address that whalejax launch prints"""
    key: Annotated[Path, option(metavar="FILE")] = Path("logs/elastic/key")
    """file of the run's key, or a copy; waited for if it does not exist yet"""
    processes: Annotated[int, option(metavar="N")] = 1
    """largest number of processes here; each uses all devices that it sees"""
    name: Annotated[str | None, option(metavar="NAME")] = None
    """name that no other agent has; the name of this host if left out"""
    host: Annotated[str | None, option(metavar="ADDRESS")] = None
    """address of this machine at which other members reach those here; if left out, the
    one from which it reaches the supervisor"""
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """folder of logs: one file per process, in its subfolder elastic"""
    patience: Seconds = 120.0
    """time to wait for a supervisor that does not answer; then the processes end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCommand:
    """Estimate useful time over wall time under failures, with and without spares.

    Compares a restart of all processes from the last snapshot with continuing on the
    remaining ones.
    """

    plan: Annotated[conf.Positional[Path], option(metavar="PLAN.json")]
    """a file that whalejax plan wrote"""
    mtbf: Seconds
    """mean time between failures of one node"""
    restart: Seconds = 60.0
    """time from a process's start to its first step"""
    snapshot_every: Number = None
    """steps between snapshots for a restart; the best number if left out"""
    spares: Annotated[int, option(metavar="N")] = 1
    """number of standby nodes"""
    snapshot: Seconds = 1.0
    """time that a step waits for a snapshot"""
    recovery: Seconds = 1.0
    """time that the others lose when a node is lost or joins"""
    repair: Seconds = 0.0
    """time after which a lost node can be started again; 0 if only a process crashed"""
    nodes: Number = None
    """number of nodes, which fail one by one; the plan's own if left out"""
    trace: Annotated[Path | None, option(metavar="TRACE.csv")] = None
    """failures to simulate: columns time, node, event (down or up)"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
