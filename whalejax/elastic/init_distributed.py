"""Starts JAX over several processes, with a deadline for every wait.

Processes first meet (``rendezvous``), then send heartbeats, and only then let JAX join
them and initialise their devices. If a process fails meanwhile, an error names it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import jax

from whalejax import _compat_processes
from whalejax.distributed.first_connection import shared_key
from whalejax.distributed.launch_env import (
    DeviceReport,
    Joining,
    is_loopback,
    launched,
    split_address,
    tell_launcher,
)
from whalejax.distributed.rendezvous import ProcessPlace, end_process, rendezvous
from whalejax.elastic.environment import SUPERVISOR, local_host
from whalejax.elastic.script_placement import await_placement
from whalejax.membership import launch_heartbeat as beats
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number, is_whole
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.wire.addresses import joined_address


INTERRUPT_SECONDS: Final = 2.0
"""Seconds for which a process waits for JAX to return after Ctrl-C before it ends."""

_JOIN_SECONDS: Final = 86_400  # Rendezvous has a deadline; JAX's would abort.
_MOST_PROCESSES: Final = 2**20
_LONGEST_SECONDS: Final = 10**6
"""Largest deadline in seconds: over a week, and within JAX's 32-bit limit."""


@names_arguments("wh.init_distributed")
def init_distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: float = 300.0,
    heartbeat_seconds: float = 30.0,
    preemption: bool = False,
) -> int:
    """Makes this process one of several that run the same program.

    Call it in all processes before anything touches a device. Without arguments the
    ranks come from ``whalejax launch``, or from the cluster through JAX: Slurm, Open
    MPI, Kubernetes (jobs with indices), TPU. If a process dies or freezes, the others
    end after ``heartbeat_seconds`` with an error that names it. If a process fails with
    an error, the others end immediately.

    Args:
        coordinator: Address and port of process 0, ``"host:port"``; an IPv6 address
            in brackets. A loopback address opens no port to other machines.
        num_processes: Number of processes.
        process_id: Rank of this process, from 0.
        timeout_seconds: Longest wait for all processes to join.
        heartbeat_seconds: Seconds without a heartbeat after which a process counts as
            dead. No process may block Python threads for longer.
        preemption: Whether SIGTERM is a preemption notice and does not end the process.
            If so, the program must call
            ``jax.experimental.multihost_utils.reached_preemption_sync_point`` in every
            step.

    Returns:
        The number of processes. A second call only returns this number.

    Raises:
        WhaleError: The arguments are incomplete or contradictory, or differ from those
            of an earlier call; no cluster is known; devices are in use already; the
            port is in use; or not all processes joined in time.
    """
    if coordinator is None and num_processes is None and process_id is None:
        known = launched()
        if known is None and not jax.distributed.is_initialized():
            known = await_placement()
        coordinator, num_processes, process_id = known or (None, None, None)
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    _check(given, timeout_seconds, heartbeat_seconds, preemption)
    if jax.distributed.is_initialized():
        return _check_second_call(given)
    place = _place(given, timeout_seconds, heartbeat_seconds)
    with _interruptible(place.rank):
        _join(place, heartbeat_seconds, preemption)
        if place.count > 1:
            # JAX waits here for the devices of all processes; one may fail meanwhile.
            beats.start_heartbeat(heartbeat_seconds, processes=place.count)
        kind, devices = jax.local_devices()[0].device_kind, jax.local_device_count()
        tell_launcher(DeviceReport(kind=kind, devices=devices))
        if place.count > 1:
            beats.start_heartbeat().ready()
    return int(jax.process_count())


def _place(given: dict[str, Any], timeout: float, heartbeat: float) -> ProcessPlace:
    known: tuple[str, int, int] | None = None
    if given["coordinator"] is not None:
        known = given["coordinator"], given["num_processes"], given["process_id"]
    else:
        with contextlib.suppress(RuntimeError, ValueError, OSError, KeyError):
            known = _compat_processes.detected_cluster(timeout)
    if known is None:
        raise WhaleError(
            "no cluster is known here. Under Slurm start with srun, under Open MPI "
            "with mpirun, or give coordinator, num_processes and process_id; one "
            "process alone needs no init_distributed"
        )
    split_address(known[0], "coordinator")
    return ProcessPlace(
        coordinator=known[0],
        count=known[1],
        rank=known[2],
        seconds=timeout,
        join_seconds=max(10.0, heartbeat),
        key=shared_key(),
    )


def _join(place: ProcessPlace, heartbeat: float, preemption: bool) -> None:
    if _compat_processes.backends_are_there():
        raise WhaleError(
            "init_distributed came too late. Call it before anything asks for devices "
            "or arrays"
        )
    host, port = split_address(place.coordinator)
    local = is_loopback(host)
    supervisor = os.environ.get(SUPERVISOR)
    # Under a supervisor, all members use exactly this address, so bind no other.
    narrow = local or supervisor is not None
    if place.count > 1:
        tell_launcher(Joining())
    came = rendezvous(place, functools.partial(end_process, rank=place.rank))
    try:
        if local:
            # Gloo needs a numeric address of the same family.
            _compat_processes.listen_at("::1" if ":" in host else "127.0.0.1")
        elif supervisor is not None:
            _compat_processes.listen_at(local_host(supervisor))
        bind = None if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else (host, port)
        with _compat_processes.preemption_service(on=preemption):
            jax.distributed.initialize(
                place.coordinator,
                place.count,
                place.rank,
                initialization_timeout=_JOIN_SECONDS,
                # JAX's check finds failures that ours misses, but reports less.
                heartbeat_timeout_seconds=math.ceil(2 * heartbeat),
                coordinator_bind_address=joined_address(*bind)
                if narrow and bind
                else None,
            )
    except (RuntimeError, ValueError) as error:
        came.close()
        said = str(error).splitlines()[0][:200]
        raise WhaleError(
            f"JAX cannot join {count_text(place.count, 'process')} at "
            f"{place.coordinator} ({said})"
        ) from error
    except BaseException:  # an interrupt, or an end by sys.exit
        came.close()
        raise
    came.mark_joined()


@contextlib.contextmanager
def _interruptible(rank: int) -> Iterator[None]:
    """Lets Ctrl-C end this process even while JAX waits and Python cannot raise.

    A thread reads the socket to which Python writes the number of each signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    written, read = socket.socketpair()
    written.setblocking(False)
    before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    over = threading.Event()

    def look_on() -> None:
        while data := read.recv(64):
            if signal.SIGINT in data and not over.wait(INTERRUPT_SECONDS):
                _end_interrupted(rank)

    thread = threading.Thread(target=look_on, name="whalejax-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        written.close()
        thread.join()
        read.close()


def _end_interrupted(rank: int) -> None:
    text = (
        f"whalejax: process {rank} was interrupted while it waited in "
        "init_distributed, and ends\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    beats.failed("KeyboardInterrupt in init_distributed")
    os._exit(128 + signal.SIGINT)


def _check(
    given: dict[str, Any], timeout: float, heartbeat: float, preemption: bool
) -> None:
    problems = Arguments("init_distributed", WhaleError)
    problems.switch("preemption", preemption)
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        problems.add(
            f"{' and '.join(missing)} not given; give all of coordinator, "
            "num_processes and process_id, or none of them on a cluster that JAX knows"
        )
    address, count, number = given.values()
    if address is not None:
        if not isinstance(address, str):
            problems.refuse("coordinator", address, "'host:port', such as 'node0:8476'")
        else:
            try:
                split_address(address, "coordinator")
            except WhaleError as error:
                problems.add(str(error))
    if count is not None and not is_whole(count, 1, _MOST_PROCESSES):
        problems.refuse(
            "num_processes", count, f"at least 1, at most {_MOST_PROCESSES}"
        )
        count = None
    if number is not None and not is_whole(number, 0, _MOST_PROCESSES):
        problems.refuse("process_id", number, "the number of a process, from 0")
    elif count is not None and number is not None and not number < count:
        problems.add(f"process_id is {number}; expected 0 to {count - 1}")
    for name, value in (("timeout_seconds", timeout), ("heartbeat_seconds", heartbeat)):
        if not is_number(value) or not 1 <= value <= _LONGEST_SECONDS:
            problems.refuse(name, value, f"at least 1, at most {_LONGEST_SECONDS}")
    taken = inspect.signature(jax.distributed.initialize).parameters
    secure = [name for name in os.environ if name.startswith("JAX_MTLS_")]
    if secure and "mtls_cert_file" not in taken:
        problems.add(
            f"{' and '.join(sorted(secure))} set, and JAX {jax.__version__} has no "
            "mutual TLS: it would be ignored. Install JAX 0.12 or later, or unset it"
        )
    problems.raise_if_any()


def _check_second_call(given: dict[str, Any]) -> int:
    """Accepts a second call with the same arguments; returns the process count."""
    count, number = given["num_processes"], given["process_id"]
    here = jax.process_count(), jax.process_index()
    if number is not None and (count, number) != here:
        raise WhaleError(
            f"this process is {here[1]} of {here[0]} already, and init_distributed "
            f"asks for {number} of {count}. Call it once, before anything else"
        )
    return int(here[0])
