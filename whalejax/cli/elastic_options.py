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
    """Show an elastic run: its generations, who is there, goodput, what was lost."""

    folder: Annotated[conf.Positional[Path], option(metavar="FOLDER")]
    """of --save, or of --logs where a script saves nothing"""
    json: Switch = False
    """print it as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """Hold processes of an elastic run on this machine, until the run is over.

    They are those of whalejax launch --processes MIN:MAX --host ADDRESS, and run in
    this folder. SIGTERM or Ctrl-C lets them leave after a step.
    """

    supervisor: Annotated[conf.Positional[str], option(metavar="HOST:PORT")]
    """what whalejax launch says it listens at"""
    key: Annotated[Path, option(metavar="FILE")] = Path("logs/elastic/key")
    """file of the key of the run, or a copy; waited for where it is not there yet"""
    processes: Annotated[int, option(metavar="N")] = 1
    """how many it may hold; each takes all devices that it sees"""
    name: Annotated[str | None, option(metavar="NAME")] = None
    """unlike that of any other agent; the name of this host if left out"""
    host: Annotated[str | None, option(metavar="ADDRESS")] = None
    """address of this machine at which other members reach those here; that from
    which it reaches the supervisor if left out"""
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """one file per process, in its folder elastic"""
    patience: Seconds = 120.0
    """to wait for a supervisor that does not answer; then the processes are ended"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCommand:
    """Estimate useful time over wall time under failures, with and without spares.

    Compared are restarting the whole world from the last snapshot and going on with
    those that are left.
    """

    plan: Annotated[conf.Positional[Path], option(metavar="PLAN.json")]
    """a file that whalejax plan wrote"""
    mtbf: Seconds
    """mean time between failures of one node"""
    restart: Seconds = 60.0
    """from a process's start to its first step"""
    snapshot_every: Number = None
    """steps between snapshots for a restart; the best if left out"""
    spares: Annotated[int, option(metavar="N")] = 1
    """nodes that stand by"""
    snapshot: Seconds = 1.0
    """that a step waits for a snapshot"""
    recovery: Seconds = 1.0
    """that the others lose when a node is lost or joins"""
    repair: Seconds = 0.0
    """after which a lost node can be started again; 0 where only a process crashed"""
    nodes: Number = None
    """that fail one by one; those of the plan's cluster if left out"""
    trace: Annotated[Path | None, option(metavar="TRACE.csv")] = None
    """failures to play through: columns time, node, event (down or up)"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
