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
    """Start a run: serve the registry that peers join, and train over the peers."""

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    set: Settings = ()
    """options of the model, or of your function: layers=6 embed=128"""
    stages: Number
    """number of stages into which the model is divided"""
    steps: Number = 100
    """total number of steps, including those of the checkpoint in --save"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    micro_batches: OptionalNumber = None
    """micro-batches of a step, each with its own route; if left out, the largest number
    up to 16 that divides the batch"""
    precision: Narrow = "f32"
    """f32: the model's own types; bf16: with float32 master weights"""
    wire: Wire = "f32"
    """type of activations and their gradients between stages: f32, or 16 or 8 bits"""
    sum_wire: SumWire = "f32"
    """type of gradients that the peers of a stage sum: f32, or 16 or 8 bits"""
    delayed_updates: Switch = False
    """apply the gradients of a step while the next step is computed, whose parameters
    therefore lack this update"""
    seed: Number = 0
    """random seed of the initial values and of dropout"""
    save: Annotated[Path | None, option(metavar="DIR")] = None
    """directory of checkpoints and the journal; a run continues from the newest
    checkpoint in it"""
    save_every: Number = 100
    """steps between checkpoints; if all peers of a stage are lost, the run returns to
    the newest checkpoint"""
    keep: Number = 3
    """number of checkpoints to keep"""
    key: Key = Path("swarm.key")
    """file of the key by which peers authenticate each other; created if missing"""
    host: Host = "127.0.0.1"
    """address of this machine at which peers reach the registry"""
    port: Number = 8476
    """port of the registry"""
    call_timeout: Seconds = 30.0
    """time to wait for a peer's answer before another peer is chosen"""
    patience: Seconds = 3600.0
    """time to wait for a peer of a stage without peers before the run ends"""
    rebalance: Seconds = 60.0
    """time between decisions whether a peer moves to a stage with more load"""
    peers: Number = 0
    """number of peers that run as threads of this process"""
    processes: Number = 0
    """number of peers to start as processes, in turn on --hosts. They are restarted if
    they fail, as is the registry, which continues from --save"""
    hosts: Hosts = "localhost"
    slurm: Annotated[str | None, option(metavar="OPTIONS")] = None
    """instead of --hosts: options of srun, which starts each peer in an allocation"""
    ray: Annotated[str | None, option(metavar="ADDRESS")] = None
    """instead of --hosts: address of a Ray cluster, or auto; each peer is an actor"""
    peer_gpus: Number = 0
    """with --ray: GPUs of each peer; without GPUs, a peer has one CPU"""
    remote_shell: RemoteShell = SSH
    logs: Annotated[Path, option(metavar="FOLDER")] = Path("logs")
    """with --processes: folder of the peers' logs, peer-1.log and so on"""
    json: Switch = False
    """print events and steps as lines of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmTrainCommand:
    """Lead part of each step of a run, as a secondary trainer beside swarm serve.

    It sends micro-batches to peers, and computes no stage. If it fails, no step is
    lost. It ends when the run is over or on Ctrl-C.
    """

    registry: Registry
    """address that whalejax swarm serve prints"""
    model: Model
    """model, as for serve; the code must be the same"""
    set: Settings = ()
    """options of the model, or of your function, as for serve"""
    key: Key = Path("swarm.key")
    """copy of the key file of serve"""
    host: Host = "127.0.0.1"
    """address of this machine at which peers reach this trainer"""
    port: Annotated[int | None, option(metavar="N")] = None
    """port of this trainer; a free one if left out"""
    patience: Seconds = 3600.0
    """time without an answer of the registry after which this trainer ends"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmJoinCommand:
    """Serve a stage of a run, until the run is over. Ctrl-C leaves after a step."""

    registry: Registry
    """address that whalejax swarm serve prints"""
    model: Model
    """model, as for serve; the code must be the same"""
    set: Settings = ()
    """options of the model, or of your function, as for serve"""
    key: Key = Path("swarm.key")
    """copy of the key file of serve"""
    stage: OptionalNumber = None
    """stage to serve; if left out, the one that most needs peers"""
    host: Host = "127.0.0.1"
    """address of this machine at which others reach this peer"""
    port: Annotated[int | None, option(metavar="N")] = None
    """port of this peer; a free one if left out"""
    patience: Seconds = 3600.0
    """time without an answer of the registry after which this peer ends"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmShowCommand:
    """Show the trainers, stages, peers, queues, speeds and failures of a run."""

    registry: Registry
    """address that whalejax swarm serve prints"""
    key: Key = Path("swarm.key")
    """file of the swarm's key"""
    json: Switch = False
    """print the run as one line of JSON and nothing else"""


SwarmCommand = (
    Annotated[SwarmServeCommand, conf.subcommand("serve")]
    | Annotated[SwarmTrainCommand, conf.subcommand("train")]
    | Annotated[SwarmJoinCommand, conf.subcommand("join")]
    | Annotated[SwarmShowCommand, conf.subcommand("show")]
)
