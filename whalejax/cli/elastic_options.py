"""Options of ``whalejax status``, ``agent`` and ``goodput``; see ``options``."""

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
    """folder of the run's --save, or its --logs if a script has no --save"""
    json: Switch = False
    """print the run as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """Run processes of an elastic run on this machine, until the run is over.

    First start whalejax launch --processes MIN:MAX --host ADDRESS on another machine.
    The processes run in the current folder. On SIGTERM or Ctrl-C they leave after a
    step.
    """

    supervisor: Annotated[conf.Positional[str], option(metavar="HOST:PORT")]
    """address that whalejax launch prints"""
    key: Annotated[Path, option(metavar="FILE")] = Path("logs/elastic/key")
    """file of the run's key, or a copy of it; the agent waits until it exists"""
    processes: Annotated[int, option(metavar="N")] = 1
    """largest number of processes here; each uses all devices that it sees"""
    name: Annotated[str | None, option(metavar="NAME")] = None
    """name that no other agent has; the name of this host if left out"""
    host: Annotated[str | None, option(metavar="ADDRESS")] = None
    """address of this machine at which other members reach its processes; if left out,
    the source address of the connection to the supervisor"""
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """folder of logs; its subfolder elastic has a file for each process"""
    patience: Seconds = 120.0
    """time without an answer of the supervisor after which the processes end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCommand:
    """Estimate useful time over wall time when nodes fail.

    Compares two reactions to a failure: all processes restart from the last snapshot,
    or the remaining ones continue. Each is simulated with and without spares.
    """

    plan: Annotated[conf.Positional[Path], option(metavar="PLAN.json")]
    """a file that whalejax plan wrote"""
    mtbf: Seconds
    """mean time between failures of one node"""
    restart: Seconds = 60.0
    """time from a process's start to its first step"""
    snapshot_every: Number = None
    """steps between snapshots from which a run restarts; the best number if left out"""
    spares: Annotated[int, option(metavar="N")] = 1
    """number of standby nodes"""
    snapshot: Seconds = 1.0
    """time by which a snapshot delays a step"""
    recovery: Seconds = 1.0
    """time that the other nodes lose when a node fails or joins"""
    repair: Seconds = 0.0
    """time until a failed node can start again; 0 for failures of processes"""
    nodes: Number = None
    """number of nodes, which fail independently; the plan's number if left out"""
    trace: Annotated[Path | None, option(metavar="TRACE.csv")] = None
    """CSV file of failures to simulate, with columns time, node, event (down or up)"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
