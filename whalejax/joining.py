"""Start JAX over several processes, with deadlines on what they wait for."""

from __future__ import annotations

import math
import socket
from typing import Any

import jax

from whalejax import beats
from whalejax.meshes.checks import Arguments, is_number, is_printable, is_whole
from whalejax.meshes.launched import introduce, launched
from whalejax.meshes.problems import WhaleError


_MOST_PROCESSES = 2**20
_LONGEST_SECONDS = 10**6
"""A week and more; what JAX takes as whole seconds of 32 bits."""


def init_distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: float = 300.0,
    heartbeat_seconds: float = 30.0,
) -> int:
    """Make this process one of several that run the same program.

    Call it before anything touches a device. With no argument ``whalejax launch`` has
    said who is who, or JAX asks the cluster: Slurm, Open MPI, Kubernetes (jobs with
    indices), TPU. A process that dies or stands still ends the others, with an error
    that names it, once it was silent for ``heartbeat_seconds``; one that fails ends
    them at once.

    Args:
        coordinator: address and port of process 0, ``"host:port"``.
        num_processes: how many there are.
        process_id: the number of this one, from 0.
        timeout_seconds: after which a process that has not come is missed.
        heartbeat_seconds: after which one that says nothing is gone; Python must get a
            turn in this time in each.

    Returns:
        The number of processes. It may be called again, and does nothing then.

    Raises:
        WhaleError: what was given is not enough or contradicts itself; no cluster is
            known; or not all processes came in time.
    """
    if coordinator is None and num_processes is None and process_id is None:
        coordinator, num_processes, process_id = launched() or (None, None, None)
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    _check(given, timeout_seconds, heartbeat_seconds)
    if jax.distributed.is_initialized():
        return _again(given)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=math.ceil(timeout_seconds),
            # JAX's own end is for what ours does not see, and tells less.
            heartbeat_timeout_seconds=math.ceil(2 * heartbeat_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise _problem(error, given, timeout_seconds) from error
    introduce(jax.local_devices()[0].device_kind, jax.local_device_count())
    if jax.process_count() > 1:
        beats.begun(heartbeat_seconds)
    return int(jax.process_count())


def _check(given: dict[str, Any], timeout: float, heartbeat: float) -> None:
    problems = Arguments("init_distributed", WhaleError)
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        problems.add(
            f"{' and '.join(missing)} not given; give all of coordinator, "
            "num_processes and process_id, or none of them on a cluster that JAX knows"
        )
    address, count, number = given.values()
    if address is not None and not _is_address(address):
        problems.refuse("coordinator", address, "'host:port', such as 'node0:8476'")
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
    problems.raise_if_any()


def _is_address(address: Any) -> bool:
    """Whether it is a host and a port."""
    if not is_printable(address):
        return False
    host, _, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) < 6
    return bool(host) and digits and 0 < int(port) < 65536


def _again(given: dict[str, Any]) -> int:
    """A second call is as good as none, if it asks for the same."""
    count, number = given["num_processes"], given["process_id"]
    here = jax.process_count(), jax.process_index()
    if number is not None and (count, number) != here:
        raise WhaleError(
            f"this process is {here[1]} of {here[0]} already, and init_distributed "
            f"asks for {number} of {count}. Call it once, before anything else"
        )
    return int(here[0])


def _problem(error: Exception, given: dict[str, Any], timeout: float) -> WhaleError:
    said = str(error).splitlines()[0][:200]
    if given["coordinator"] is None:
        return WhaleError(
            f"no cluster is known here ({said}). Under Slurm start with srun, under "
            "Open MPI with mpirun, or give coordinator, num_processes and process_id; "
            "one process alone needs no init_distributed"
        )
    if "must be called before" in said:
        return WhaleError(
            f"init_distributed came too late ({said}). Call it before anything asks "
            "for devices or arrays"
        )
    host, _, port = given["coordinator"].rpartition(":")
    if given["process_id"] and not _listens(host, int(port)):
        return WhaleError(
            f"nothing listens at {given['coordinator']} after {timeout:.0f} s ({said})"
            ". Is process 0 running, is the address that of its machine, and is the "
            "port open between them?"
        )
    return WhaleError(
        f"not all {given['num_processes']} processes came to {given['coordinator']} in "
        f"{timeout:.0f} s ({said}). Look for the first error of the others; each needs "
        "a process_id of its own, and the same coordinator and num_processes"
    )


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False
