"""Asks the supervisor for the rank of an ordinary script's process.

The processes of such a script use the platform's collectives, so the loss of one
process ends the generation for all. The supervisor restarts the processes, and they
resume from their newest checkpoint.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from whalejax.distributed.launch_env import KEY_FILE, is_loopback, split_address
from whalejax.distributed.reserved_port import reserve_port
from whalejax.elastic.environment import SUPERVISOR, local_host
from whalejax.membership.phases import STOPPED, WAITING
from whalejax.wire import run_messages as wire
from whalejax.wire.addresses import joined_address


if TYPE_CHECKING:
    from whalejax.elastic.supervisor_client import Control
    from whalejax.wire.run_messages import ToMember


_FLUSH_SECONDS: Final = 5.0

_held: list[Control] = []
"""Connection to the supervisor, kept until the process ends."""


def connection() -> Control:
    """Returns the connection to the supervisor that ``await_placement`` has made."""
    return _held[-1]


def await_placement(
    environment: Mapping[str, str] = os.environ,
    *,
    told: Mapping[str, Any] | None = None,
    hears: Callable[[ToMember], bool] = lambda said: False,
) -> tuple[str, int, int] | None:
    """Returns coordinator, number of processes and rank; None without a supervisor.

    It waits until a generation begins. Afterwards one thread sends heartbeats, and
    another ends the process when the supervisor asks for it.

    Args:
        environment: Environment of the process.
        told: More fields to register with the supervisor: ``steps``, ``save``,
            ``micro_batches`` and ``facts``.
        hears: Handler of the supervisor's later messages, called in a thread. Returns
            whether it has handled the message.

    Raises:
        WhaleError: No supervisor answers, or it refuses this process.
    """
    address = environment.get(SUPERVISOR)
    if address is None:
        return None
    from whalejax.agreement.facts import versions
    from whalejax.elastic.supervisor_client import Control
    from whalejax.membership.elastic_run import IN_GENERATIONS, MODE

    host = local_host(address)
    # For the coordinator, if this is the first process of a generation.
    port = reserve_port(host)

    more = {"micro_batches": 0, "steps": 0, "save": "", "facts": {}, **(told or {})}
    more["facts"] = {MODE: IN_GENERATIONS, **versions(), **more["facts"]}

    def registers() -> dict[str, Any]:
        return {"host": host, "port": port, "generation": 0, **more}

    control = Control(address, environment.get(KEY_FILE, ""), registers)
    control.open()
    control.phase = STOPPED
    control.post(wire.Ready())
    while True:
        said = control.wait()
        if said is None:
            continue
        if isinstance(said, wire.Begin):
            break
        _obey(control, said)
    control.phase, control.generation = WAITING, said.generation
    _held.append(control)
    atexit.register(_finished, control)
    threading.Thread(target=_listen, args=(control, hears), daemon=True).start()
    names = [m[0] for m in said.members]
    _, first_host, first_port = said.members[0]
    coordinator, rank = (
        joined_address(first_host, first_port),
        names.index(control.name),
    )
    if not rank:
        print(f"whalejax: {listens(coordinator)}", file=sys.stderr, flush=True)
    return coordinator, len(names), rank


def listens(coordinator: str) -> str:
    """Returns a warning that names who can reach the coordinator of a generation.

    >>> listens("10.0.0.1:8476").partition(";")[0]
    'the coordination service of JAX listens at 10.0.0.1:8476'
    """
    host, _ = split_address(coordinator)
    who = "any user of this machine" if is_loopback(host) else "whoever reaches it"
    return (
        f"the coordination service of JAX listens at {coordinator}; it does not check "
        f"the key of the run, so {who} can end a generation or join it "
        "(docs/survive/machines.md, Security)"
    )


def _obey(control: Any, said: Any) -> None:
    match said:
        case wire.Prepare(generation=generation):
            control.post(wire.Prepared(generation=generation, step=-1, held=[]))
        case wire.RunEnded() | wire.Stop():
            if isinstance(said, wire.RunEnded) and said.well:
                control.flush(_FLUSH_SECONDS)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGTERM)


def _finished(control: Any) -> None:
    """Reports success to a supervisor that may be unable to read the exit status."""
    if not hasattr(sys, "last_value"):  # No exception ended it.
        control.post(wire.Finished(step=-1))
    control.flush(_FLUSH_SECONDS)


def _listen(control: Any, hears: Callable[[ToMember], bool]) -> None:
    from whalejax.meshes.errors import WhaleError

    while True:
        try:
            said = control.wait()
        except WhaleError:
            return  # Without a supervisor the script goes on to its end.
        if said is not None and not hears(said):
            _obey(control, said)
