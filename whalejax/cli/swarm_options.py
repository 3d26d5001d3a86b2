"""Options of ``whalejax swarm``: serve, train, join and show; see ``options``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from whalejax.cli.launch_options import SSH, Hosts, RemoteShell, Switch, option
from whalejax.cli.options import Model, OptionalNumber, Settings


Registry = Annotated[conf.Positional[str], option(metavar="HOST:PORT")]
Key = Annotated[Path, option(metavar="FILE")]
Host = Annotated[str, option(metavar="HOST")]
Seconds = Annotated[float, option(metavar="SECONDS")]
Number = Annotated[int, option(metavar="N")]
Wire = Literal["f32", "bf16", "int8"]
SumWire = Literal["f32", "f16", "int8"]
Narrow = Literal["f32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmServeCommand:
    """Lead a run: hold the registry that peers join, and train over them."""

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    set: Settings = ()
    """options of the model, or of your function: layers=6 embed=128"""
    stages: Number
    """number of stages into which the model is cut"""
    steps: Number = 100
    """total number of steps, including those before a resumption"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    micro_batches: OptionalNumber = None
    """micro-batches of a step, each of which finds its own route; if left out,
    the largest number up to 16 that divides the batch"""
    precision: Narrow = "f32"
    """f32: the model's own types; bf16: with float32 master weights"""
    wire: Wire = "f32"
    """type of activations and their gradients between stages: f32, or 16 or 8 bits"""
    sum_wire: SumWire = "f32"
    """type of gradients that the peers of a stage sum: f32, or 16 or 8 bits"""
    delayed_updates: Switch = False
    """sum and apply the gradients of each step while the next is computed, which
    therefore uses the parameters of the previous step"""
    seed: Number = 0
    """random seed of the initial values and of dropout"""
    save: Annotated[Path | None, option(metavar="DIR")] = None
    """write checkpoints and the ledger's journal into this directory, and continue
    from the newest checkpoint in it"""
    save_every: Number = 100
    """steps between checkpoints; the run goes back to the newest one if all peers of a
    stage are lost"""
    keep: Number = 3
    """number of checkpoints to keep"""
    key: Key = Path("swarm.key")
    """file of the key by which peers authenticate each other; created if missing"""
    host: Host = "127.0.0.1"
    """address of this machine at which peers reach it"""
    port: Number = 8476
    """port of the registry"""
    call_timeout: Seconds = 30.0
    """time after which a peer that does not answer is skipped"""
    patience: Seconds = 3600.0
    """time to wait for a stage without peers before the run ends"""
    rebalance: Seconds = 60.0
    """time between checks of the peers' loads, after which one may change stage"""
    peers: Number = 0
    """number of peers in threads of this process, in addition to those that join"""
    processes: Number = 0
    """number of peers started as processes, in turn on --hosts, and restarted if they
    fail; a killed registry is restarted too, and continues from --save"""
    hosts: Hosts = "localhost"
    slurm: Annotated[str | None, option(metavar="OPTIONS")] = None
    """in place of --hosts: each peer is an allocation by srun with these options"""
    ray: Annotated[str | None, option(metavar="ADDRESS")] = None
    """in place of --hosts: each peer is an actor of this Ray cluster, or of auto"""
    peer_gpus: Number = 0
    """with --ray: GPUs of each peer; without any, a peer has one CPU"""
    remote_shell: RemoteShell = SSH
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """with --processes: folder of one file for each peer, peer-1.log and so on"""
    json: Switch = False
    """print events and steps as lines of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmTrainCommand:
    """Lead part of each step of a run that another process serves; no step is lost with
    this one. It computes nothing and runs until the run is over or Ctrl-C."""

    registry: Registry
    """address that whalejax swarm serve prints"""
    model: Model
    """as for serve; the code must be the same"""
    set: Settings = ()
    """options of the model, or of your function, as for serve"""
    key: Key = Path("swarm.key")
    """file of the swarm's key, a copy of that of serve"""
    host: Host = "127.0.0.1"
    """address of this machine at which peers reach this trainer"""
    port: Annotated[int | None, option(metavar="N")] = None
    """port of this trainer; a free one if left out"""
    patience: Seconds = 3600.0
    """time to wait for a registry that stopped answering before this trainer ends"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmJoinCommand:
    """Serve a stage of a run, until it is over or Ctrl-C asks it to leave in order."""

    registry: Registry
    """address that whalejax swarm serve prints"""
    model: Model
    """as for serve; the code must be the same"""
    set: Settings = ()
    """options of the model, or of your function, as for serve"""
    key: Key = Path("swarm.key")
    """file of the swarm's key, a copy of that of serve"""
    stage: OptionalNumber = None
    """stage to serve; the one that lacks peers most if left out"""
    host: Host = "127.0.0.1"
    """address of this machine at which others reach this peer"""
    port: Annotated[int | None, option(metavar="N")] = None
    """port of this peer; a free one if left out"""
    patience: Seconds = 3600.0
    """time to wait for a registry that stopped answering before this peer ends"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmShowCommand:
    """Show a run: its trainers, peers, stages, queues, speeds, and what was lost."""

    registry: Registry
    """address that whalejax swarm serve prints"""
    key: Key = Path("swarm.key")
    """file of the swarm's key"""
    json: Switch = False
    """print it as one line of JSON and nothing else"""


SwarmCommand = (
    Annotated[SwarmServeCommand, conf.subcommand("serve")]
    | Annotated[SwarmTrainCommand, conf.subcommand("train")]
    | Annotated[SwarmJoinCommand, conf.subcommand("join")]
    | Annotated[SwarmShowCommand, conf.subcommand("show")]
)
