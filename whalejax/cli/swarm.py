"""``whalejax swarm``: serves, trains, joins or shows a swarm."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from whalejax.api.named_jobs import named_values
from whalejax.cli.swarm_options import (
    SwarmJoinCommand,
    SwarmServeCommand,
    SwarmShowCommand,
    SwarmTrainCommand,
)
from whalejax.distributed.launch_env import split_address
from whalejax.distributed.standard_streams import say
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import count_text
from whalejax.user_code.losses import Job
from whalejax.wire.addresses import joined_address
from whalejax.wire.keys import Key, load_key
from whalejax.wire.messages import A, Question
from whalejax.wire.service import (
    Address,
    Caller,
    UnansweredError,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import AskTerms, ShowSwarm, Terms


if TYPE_CHECKING:
    from whalejax.swarm_runtime.peer import Peer
    from whalejax.swarm_runtime.staged_job import StagedJob
    from whalejax.swarm_runtime.trainers.secondary_trainer import SecondaryTrainer


FindJob = Callable[[str, Mapping[str, Any]], Job]

_ASK_SECONDS: Final = 10.0
_LISTENS_SECONDS: Final = 30.0
"""Time that a joining process waits for a registry to start listening."""

_AGAIN_SECONDS: Final = 0.5
_SILENT_SECONDS: Final = 5.0
"""Time without an answer of the registry after which a message reports it."""

_MOST: Final = 2**20
_EVENTS: Final = {
    "joined": "{peer} serves stage {stage} from step {step} on",
    "left": "{peer} has left stage {stage}",
    "lost": "{peer} is lost; its {parts} parts of the step are computed again: {why}",
    "failed": "{peer} failed: {why}",
    "refused": "data from {peer} was refused: {why}",
    "differs": "{peer} differs from the other peers of its stage and copies their "
    "state: {why}",
    "not synced": "{peer} did not copy the state: {why}",
    "waiting": "step {step} waits for a peer of stage {stages}",
    "resumed": "step {step} continues",
    "went back": "all peers of stage {stage} are lost; the run returns from step "
    "{before} to step {step}",
    "moves": "{peer} moves from stage {source} to stage {target}",
    "moved": "{peer} now serves stage {target} instead of stage {source}",
    "unreached": "{peer} cannot reach {other}, which the registry reaches; {dropped} "
    "is dropped: {why}",
    "restored": "continues from the checkpoint of step {step}",
    "saved": "step {step} is saved as {path}",
    "not_saved": "no checkpoint of step {step}: {why}",
    "not written": "{why}",
    "trainer joined": "{trainer} leads micro-batches",
    "trainer left": "{trainer} leads no more micro-batches",
    "trainer lost": "trainer {trainer} is lost; others lead its micro-batches: {why}",
    "gave back": "{trainer} returned micro-batch {number}: {why}",
    "not counted": "another trainer leads micro-batch {number}: {why}",
    "note": "{why}",
}


def serve(command: SwarmServeCommand, find_job: FindJob) -> int:
    """Serves the registry of a run, and trains.

    Args:
        command: Options of the command.
        find_job: Returns the job for a model's name.

    Raises:
        WhaleError: An option is invalid, the job cannot be divided into stages, or the
            run cannot start or continue.
    """
    _check(command)
    if command.processes:
        from whalejax.cli.swarm_processes import serve_with_peers

        return serve_with_peers(command)
    from whalejax.swarm_runtime.swarm_process import open_listener
    from whalejax.wire.keys import make_key

    # Listen before tracing the job, so that joining processes know to wait.
    make_key(command.key)
    with open_listener("the registry", command.host, command.port) as listening:
        return _serve(command, find_job, listening)


def _serve(
    command: SwarmServeCommand, find_job: FindJob, listening: socket.socket
) -> int:
    from whalejax.swarm_runtime.staged_job import StagedJob
    from whalejax.swarm_runtime.swarm_run import SwarmRun, SwarmRunPaths
    from whalejax.swarm_runtime.trainers.trainer_state import Settings

    cut = StagedJob(
        find_job(command.model, named_values(command.set)),
        stages=command.stages,
        batch=command.batch,
        micro_batches=command.micro_batches,
        precision=command.precision,
        seed=command.seed,
        delayed_updates=command.delayed_updates,
    )
    place = SwarmRunPaths(
        save=command.save,
        save_every=command.save_every,
        keep=command.keep,
        key=command.key,
        host=command.host,
        port=command.port,
        wire=command.wire,
        sum_wire=command.sum_wire,
        rebalance_seconds=command.rebalance,
    )
    settings = Settings(
        steps=command.steps,
        call_seconds=command.call_timeout,
        patience_seconds=command.patience,
        snapshot_every=command.save_every,
    )

    def tell(kind: str, **more: Any) -> None:
        if command.json:
            _print(json.dumps({"event": kind, **more}))
        else:
            say(f"whalejax: {_words(kind, more)}")

    run = SwarmRun(cut, place, settings, tell, peers=command.peers, listening=listening)
    host, port = run.serving.address
    where = joined_address(host, port)
    at = f"{where} {command.model} --key {command.key}"
    joins = f"whalejax swarm join {at}"
    if command.json:
        fields = {"event": "listening", "host": host, "port": port}
        _print(json.dumps(fields))
    else:
        say(f"whalejax: listening at {where}; to add a peer: {joins}")
        say(f"whalejax: to add a trainer: whalejax swarm train {at}")
    signal.signal(signal.SIGTERM, _interrupt)
    begun = time.monotonic()
    _print_steps(command, run.run())
    if not command.json:
        say(
            f"whalejax: {count_text(command.steps, 'step')} in "
            f"{time.monotonic() - begun:.1f} s"
        )
    return 0


def _print_steps(
    command: SwarmServeCommand, steps: Iterable[tuple[int, Mapping[str, Any]]]
) -> None:
    step = 0
    try:
        for step, metrics in steps:
            _print(_step_words(command, step, metrics))
    except KeyboardInterrupt:
        if not command.json:
            say(f"whalejax: {_unsaved(command, step)}")
        raise


def _print(line: str) -> None:
    """Prints a line in one call, because several threads print."""
    print(f"{line}\n", end="", flush=True)


def _step_words(
    command: SwarmServeCommand, step: int, metrics: Mapping[str, Any]
) -> str:
    loss = float(metrics["loss"])
    errors = {n: metrics[n] for n in ("wire_error", "sum_error") if n in metrics}
    if command.json:
        fields = {"event": "step", "step": step, "loss": loss, **errors}
        return json.dumps(fields)
    lost = "".join(f"  {n.replace('_', ' ')} {x:.2g}" for n, x in errors.items())
    return f"step {step}/{command.steps}  loss {loss:.6g}{lost}"


def _unsaved(command: SwarmServeCommand, step: int) -> str:
    if command.save is None:
        return f"ended after step {step}; nothing was saved, without --save"
    return (
        f"ended after step {step}; steps after the newest checkpoint in "
        f"{command.save} are lost (--save-every {command.save_every})"
    )


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _words(kind: str, more: Mapping[str, Any]) -> str:
    said = {**more, "stages": ", ".join(map(str, more.get("stages", ())))}
    text = _EVENTS.get(kind)
    return f"{kind} {dict(more)}" if text is None else text.format(**said)


def join(command: SwarmJoinCommand, find_job: FindJob) -> int:
    """Serves a stage of a run as a peer.

    Args:
        command: Options of the command.
        find_job: Returns the job for a model's name.

    Raises:
        WhaleError: An option is invalid, the key file is missing, the registry cannot
            be reached or refuses this peer, or the peer ended unexpectedly.
    """
    _check(command)
    from whalejax.swarm_runtime.peer import Peer
    from whalejax.swarm_runtime.registry import ANY

    address, key, terms = _terms(command)
    cut = _cut_by(terms, command, find_job)
    peer = Peer(
        cut,
        key,
        address,
        stage=ANY if command.stage is None else command.stage,
        host=command.host,
        port=command.port or 0,
        wire=terms.wire,
        sum_wire=terms.sum_wire,
        pull_seconds=terms.pull_seconds,
        patience_seconds=command.patience,
    )

    def started() -> str:
        stage = peer.worker.stage
        number = "?" if stage is None else stage.number
        return f"{peer.name} serves stage {number} of {cut.stages}"

    _until_over(peer, started, "leaving after this step")
    return 0


def train(command: SwarmTrainCommand, find_job: FindJob) -> int:
    """Leads some micro-batches of each step, as a secondary trainer.

    Args:
        command: Options of the command.
        find_job: Returns the job for a model's name.

    Raises:
        WhaleError: An option is invalid, the key file is missing, the registry cannot
            be reached or refuses this trainer, or the trainer ended unexpectedly.
    """
    _check(command)
    from whalejax.swarm_runtime.trainers.secondary_trainer import SecondaryTrainer

    address, key, terms = _terms(command)
    trainer = SecondaryTrainer(
        _cut_by(terms, command, find_job),
        key,
        address,
        host=command.host,
        port=command.port or 0,
        wire=terms.wire,
        sum_wire=terms.sum_wire,
        call_seconds=terms.call_seconds,
        patience_seconds=command.patience,
        tell=lambda kind, **more: say(f"whalejax: {_words(kind, more)}"),
    )
    said = f"{trainer.name} leads micro-batches of {joined_address(*address)}"
    _until_over(trainer, lambda: said, "leaving after its micro-batches")
    return 0


def _terms(
    command: SwarmJoinCommand | SwarmTrainCommand,
) -> tuple[Address, Key, Terms]:
    """Waits for the registry, and returns its address, key and terms."""
    address = split_address(command.registry, "HOST:PORT")
    begun, waits = time.monotonic(), False
    most = min(command.patience, _LISTENS_SECONDS)
    while True:
        waited = time.monotonic() - begun
        if waited >= most or command.key.exists():
            key = load_key(command.key)
            try:
                return address, key, _query_registry(address, key, AskTerms())
            except _Absent as error:
                if waited >= (command.patience if error.starts else most):
                    raise
        if not waits:
            waits = True
            say(f"whalejax: waiting for the registry at {command.registry}")
        time.sleep(_AGAIN_SECONDS)


def _cut_by(
    terms: Terms,
    command: SwarmJoinCommand | SwarmTrainCommand,
    find_job: FindJob,
) -> StagedJob:
    from whalejax.swarm_runtime.staged_job import StagedJob

    return StagedJob(
        find_job(command.model, named_values(command.set)),
        stages=terms.stages,
        batch=terms.batch,
        micro_batches=terms.micro_batches,
        precision=terms.precision,
        seed=terms.seed,
        delayed_updates=terms.delayed_updates,
    )


def _until_over(
    process: Peer | SecondaryTrainer, started: Callable[[], str], leaving: str
) -> None:
    """Runs a peer or trainer until the run is over or this process has left."""
    asked = 0

    def leave(*_: Any) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise KeyboardInterrupt
        say(f"whalejax: {leaving}; interrupt again to end at once")
        process.leave()

    try:
        process.start()
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        say(f"whalejax: {started()}")
        silent = False
        while not process.wait(1.0):
            before, silent = silent, process.silent_seconds > _SILENT_SECONDS
            if silent and not before:
                say(
                    f"whalejax: the registry has not answered for "
                    f"{process.silent_seconds:.0f} s; waiting for it"
                )
            elif before and not silent:
                say("whalejax: the registry answers again")
    finally:
        process.close()
    if process.failed:
        raise WhaleError(process.over)
    say(f"whalejax: {process.over}")


def show(command: SwarmShowCommand) -> int:
    """Prints the state of a run.

    Args:
        command: Options of the command.

    Raises:
        WhaleError: The address or key file is invalid, or no registry answers.
    """
    address, key = split_address(command.registry, "HOST:PORT"), load_key(command.key)
    result = _query_registry(address, key, ShowSwarm()).fields
    if command.json:
        print(json.dumps(result))
        return 0
    print(as_text(result))
    return 0


def as_text(found: Mapping[str, Any]) -> str:
    """Returns the text of ``whalejax swarm show``.

    Args:
        found: State of the run, as the registry sent it.
    """
    lost = {
        name: "" if found[name] is None else f" (relative error {found[name]:.2g})"
        for name in ("wire_error", "sum_error")
    }
    loss = "none yet" if found["loss"] is None else f"{found['loss']:.6g}"
    lines = [
        f"step {found['step']} of {found['steps']}, generation {found['generation']}, "
        f"loss {loss}, wire {found['wire']}{lost['wire_error']}, sums in "
        f"{found['sum_wire']}{lost['sum_error']}",
        f"ledger: {found['left']} parts of the current step are not counted yet",
        ", ".join(
            f"{n} {name.replace('_', ' ')}" for name, n in found["counts"].items()
        ),
    ]
    for trainer in found["trainers"]:
        failed = trainer["counts"].get("failed", 0)
        lines.append(
            f"trainer {trainer['name'] or 'with the registry'}  {trainer['address']}  "
            f"{trainer['state']}  leads {trainer['leads']}  has led {trainer['led']}"
            + (f"  {failed} failed" if failed else "")
        )
    for stage in range(found["stages"]):
        peers = [p for p in found["peers"] if p["stage"] == stage]
        lines.append(f"stage {stage}: {count_text(len(peers), 'peer')}")
        for peer in peers:
            speed = f"{peer['seconds']:.3g} s a forward" if peer["seconds"] else "-"
            lines.append(
                f"  {peer['name']}  {peer['address']}  {peer['state']}  queue "
                f"{peer['queue']}  done {peer['done']}  {speed}"
            )
    return "\n".join(lines)


class _Absent(WhaleError):
    """No registry answers at an address.

    Attributes:
        starts: Whether a process listens there that may still start the registry.
    """

    def __init__(self, text: str, *, starts: bool = False) -> None:
        super().__init__(text)
        self.starts = starts


def _query_registry(address: Address, key: Key, question: Question[A]) -> A:
    caller = Caller(key)
    try:
        return caller.ask(address, question, seconds=_ASK_SECONDS)
    except UnansweredError as error:
        text = (
            f"{joined_address(*address)}: no registry of a swarm answers there with "
            f"this key ({error}). Give the address that whalejax swarm serve prints, "
            "and a copy of its key file"
        )
        if isinstance(error, UnreachableProcessError) and not error.hopeless:
            raise _Absent(text, starts=error.late) from None
        raise WhaleError(text) from None
    finally:
        caller.close()


def _check(
    command: SwarmServeCommand | SwarmJoinCommand | SwarmTrainCommand,
) -> None:
    problems = Problems("options")
    if isinstance(command, SwarmServeCommand):
        limits = {
            "stages": (command.stages, 2, 4096),
            "steps": (command.steps, 1, _MOST * _MOST),
            "batch": (command.batch, 1, _MOST * _MOST),
            "micro-batches": (command.micro_batches, 1, _MOST),
            "save-every": (command.save_every, 1, _MOST * _MOST),
            "keep": (command.keep, 1, _MOST),
            "port": (command.port, 0, 65535),
            "peers": (command.peers, 0, 1024),
            "processes": (command.processes, 0, 1024),
            "peer-gpus": (command.peer_gpus, 0, 1024),
            "seed": (command.seed, -(2**31), 2**31 - 1),
        }
        hosts = None if command.hosts == "localhost" else command.hosts
        places = {"hosts": hosts, "slurm": command.slurm, "ray": command.ray}
        for name, given in places.items():
            if given is not None and not command.processes:
                problems.add(
                    f"--{name} is {given} without --processes, the number of peers to "
                    "start there. Give --processes"
                )
        waits = {
            "call-timeout": command.call_timeout,
            "patience": command.patience,
            "rebalance": command.rebalance,
        }
    else:
        limits = {"port": (command.port, 1, 65535)}
        if isinstance(command, SwarmJoinCommand):
            limits["stage"] = command.stage, 0, 4095
        waits = {"patience": command.patience}
    for name, seconds in waits.items():
        if not 0.1 <= seconds <= 1e6:
            problems.add(f"--{name} is {seconds:g}; expected 0.1 to 1e6 seconds")
    for name, (value, least, most) in limits.items():
        if value is not None and not least <= value <= most:
            problems.add(f"--{name} is {value}; expected {least} to {most}")
    problems.raise_if_any()
