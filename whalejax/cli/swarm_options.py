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
    """into how many parts the model is cut, one after the other"""
    steps: Number = 100
    """steps to be done in all, those before a resumption counted"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    micro_batches: OptionalNumber = None
    """of a step, each of which finds its own way; if left out the largest number up to
    16 that divides the batch"""
    precision: Narrow = "f32"
    """f32: the model's own types; bf16, with float32 masters"""
    wire: Wire = "f32"
    """activations and their gradients between stages: whole, or in 16 or 8 bits"""
    sum_wire: SumWire = "f32"
    """gradients while the peers of a stage add them up: whole, or in 16 or 8 bits"""
    delayed_updates: Switch = False
    """add up and apply the gradients of each step while the next is computed, which
    therefore computes with the parameters of one step before"""
    seed: Number = 0
    """of the model's initial values and of dropout"""
    save: Annotated[Path | None, option(metavar="DIR")] = None
    """write checkpoints and the ledger's journal into this directory, and go on from
    the newest checkpoint in it"""
    save_every: Number = 100
    """steps between checkpoints; the run goes back to the newest one where all peers of
    a stage are lost"""
    keep: Number = 3
    """how many checkpoints stay"""
    key: Key = Path("swarm.key")
    """file of the key by which peers know each other; made where there is none"""
    host: Host = "127.0.0.1"
    """address of this machine at which peers reach it"""
    port: Number = 8476
    """where the registry listens"""
    call_timeout: Seconds = 30.0
    """after which a peer that does not answer is passed over"""
    patience: Seconds = 3600.0
    """to wait for a stage that has no peer before the run is ended"""
    rebalance: Seconds = 60.0
    """between looks at the peers' loads, after which one may change stage"""
    peers: Number = 0
    """peers that work in threads of this process, beside those that join"""
    processes: Number = 0
    """peers that are started as processes, in turn on --hosts, and again where they
    fail; so is the registry where it is killed, which goes on from --save"""
    hosts: Hosts = "localhost"
    remote_shell: RemoteShell = SSH
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """of --processes: one file for each peer, peer-1.log and so on"""
    json: Switch = False
    """print events and steps as lines of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmTrainCommand:
    """Lead a part of each step of a run that another process serves; none is lost with
    this one. It computes nothing and runs until the run is over or Ctrl-C."""

    registry: Registry
    """what whalejax swarm serve says it listens at"""
    model: Model
    """as for serve; the code must be the same"""
    set: Settings = ()
    """options of the model, or of your function, as for serve"""
    key: Key = Path("swarm.key")
    """file of the swarm's key, a copy of that of serve"""
    host: Host = "127.0.0.1"
    """address of this machine at which peers reach this trainer"""
    port: Annotated[int | None, option(metavar="N")] = None
    """where this trainer listens; a free one if left out"""
    patience: Seconds = 3600.0
    """to wait for a registry that does not answer any more before this trainer ends"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmJoinCommand:
    """Serve a stage of a run, until it is over or Ctrl-C asks to leave in order."""

    registry: Registry
    """what whalejax swarm serve says it listens at"""
    model: Model
    """as for serve; the code must be the same"""
    set: Settings = ()
    """options of the model, or of your function, as for serve"""
    key: Key = Path("swarm.key")
    """file of the swarm's key, a copy of that of serve"""
    stage: OptionalNumber = None
    """to serve; the one that lacks peers most if left out"""
    host: Host = "127.0.0.1"
    """address of this machine at which others reach this peer"""
    port: Annotated[int | None, option(metavar="N")] = None
    """where this peer listens; a free one if left out"""
    patience: Seconds = 3600.0
    """to wait for a registry that does not answer any more before this peer ends"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmShowCommand:
    """Show a run: its trainers, peers, stages, queues, speeds, and what was lost."""

    registry: Registry
    """what whalejax swarm serve says it listens at"""
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
