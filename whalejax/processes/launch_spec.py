"""Specification of a launch: its program, processes, hosts and environments."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whalejax.distributed.cgroup_quota import check_quota
from whalejax.distributed.launch_env import (
    COORDINATOR,
    EXIT,
    EXIT_SECONDS,
    KEY_FILE,
    NUM_PROCESSES,
    PORT,
    PROCESS_ID,
    is_loopback,
    split_address,
)
from whalejax.distributed.reserved_port import HELD_PORT, is_held, reserve_port
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.processes import local_gpus
from whalejax.wire.addresses import joined_address


REMOTE_SHELL: Final = ("ssh", "-tt", "-o", "BatchMode=yes")
"""Default remote shell, to which a host and a command are appended. With ``-tt``, the
command ends when the shell ends."""

PASSED_ON: Final = (
    KEY_FILE,
    "JAX_MTLS_CERT_FILE",
    "JAX_MTLS_KEY_FILE",
    "JAX_MTLS_CA_FILE",
    "JAX_MTLS_PEER_URI_PREFIX",
    "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS",
)
"""Environment variables that other hosts get: names of files, a prefix and a flag of
JAX, but no keys.
"""

_HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Program, processes and hosts of a launch.

    Attributes:
        command: Words of the program, equal in all processes.
        processes: Number of processes.
        hosts: Names of hosts, which get equal parts of the ranks in order; if these do
            not divide, some get one rank more.
        quotas: CPU quotas in percent of a core, one per process; empty for no quotas.
        logs: Folder of one log per rank, on this machine.
        port: Port of process 0; default: a free one if all processes are local, else
            8476.
        remote_shell: Words before a host's name and the command for it.
        tells: Whether to print the table of ranks, the progress of stopping, and a
            message if rank 0 fails. Messages on other ranks are always printed.
        stops: Whether the failure of any rank stops all. If not, only a failure of rank
            0 stops all. After another failure, the ranks run to their ends, and the
            failed rank is named then.
        json: Whether to print only one line of JSON, with the status of the run and a
            report on each rank.
        exit_seconds: Seconds without output of any running rank after which all are
            stopped, once a rank has ended. Without ``stops`` none is stopped for that.
    """

    command: tuple[str, ...]
    processes: int
    hosts: tuple[str, ...] = ("localhost",)
    quotas: tuple[float, ...] = ()
    logs: Path = Path("logs")
    port: int | None = None
    remote_shell: tuple[str, ...] = REMOTE_SHELL
    tells: bool = True
    stops: bool = True
    json: bool = False
    exit_seconds: float = EXIT_SECONDS

    def __post_init__(self) -> None:
        with Problems("launch") as problems:
            self._check(problems)

    def _check(self, problems: Problems) -> None:
        if self.processes < 1:
            problems.add(f"--processes is {self.processes}; expected at least 1")
        check_hosts(problems, self.hosts, self.processes, self.remote_shell)
        away = [host for host in self.hosts if not is_here(host)]
        if away and self.hosts[0] in _HERE:
            problems.add(
                f"--hosts begins with {self.hosts[0]}, which {', '.join(away)} cannot "
                f"reach under that name. Give it as {socket.gethostname()}"
            )
        if self.port is not None and not 0 < self.port < 65536:
            problems.add(f"--port is {self.port}; expected 1 to 65535")
        if not self.exit_seconds >= 1:
            problems.add(
                f"--exit-timeout is {self.exit_seconds:g}; expected at least 1 s"
            )
        if self.quotas and len(self.quotas) != self.processes:
            problems.add(
                f"--cpu-quota has {len(self.quotas)} values for {self.processes} "
                "processes; expected one for each"
            )
        gpus = () if problems else local_gpus.visible_gpus()
        if gpus and (why := local_gpus.refusal(gpus, len(self._ranks_here()))):
            problems.add(f"--processes: {why}")
        for percent in self.quotas:
            try:
                check_quota(percent)
            except WhaleError as error:
                problems.add(f"--cpu-quota: {error}")
        if self.quotas and away:
            problems.add(
                f"--cpu-quota works on this machine only, and {', '.join(away)} are "
                "others"
            )

    def host_of(self, rank: int) -> str:
        """Returns the host of a rank."""
        return self.hosts[rank * len(self.hosts) // self.processes]

    def _ranks_here(self) -> list[int]:
        here = {host for host in self.hosts if is_here(host)}
        return [r for r in range(self.processes) if self.host_of(r) in here]

    def is_local(self) -> bool:
        """Returns whether all processes run on this machine."""
        return all(map(is_here, self.hosts))

    def coordinator(self) -> str:
        """Returns the address of process 0, ``"host:port"``.

        If all processes are local, this process occupies the port until
        ``release_port``, so that no other program takes it before process 0 listens.

        Raises:
            WhaleError: All processes are local, and the port is in use or none is free.
        """
        if not self.is_local():
            return joined_address(self.hosts[0], self.port or PORT)
        if self.port is not None:
            _check_free(self.port)
        try:
            port = reserve_port("127.0.0.1", self.port or 0)
        except OSError as error:
            raise WhaleError(
                "no port of this machine can be held for process 0 to listen at "
                f"({error.strerror or error}). Give another --port, or stop what "
                "holds so many"
            ) from error
        return f"127.0.0.1:{port}"

    def listens(self, coordinator: str) -> str:
        """Returns text that says where process 0 listens, and how it is protected."""
        host, port = split_address(coordinator)
        if is_loopback(host):
            return (
                f"process 0 listens at {coordinator}, which this machine alone can "
                "reach"
            )
        if os.environ.get("JAX_MTLS_CERT_FILE"):
            how = "by the mutual TLS of JAX_MTLS_CERT_FILE"
        else:
            how = (
                "without authentication or encryption: keep the network closed, or "
                "use JAX's mutual TLS (docs/hosts/many-hosts.md)"
            )
        return f"process 0 listens on all addresses of {host} at port {port}, {how}"

    def environment_of(self, rank: int, coordinator: str) -> dict[str, str]:
        """Returns the environment variables of one process.

        They have its rank, its GPUs, the address of process 0 and the exit timeout.
        """
        port = split_address(coordinator)[1]
        held = {HELD_PORT: str(port)} if is_held(port) else {}
        return {
            **held,
            **self._gpus_of(rank),
            COORDINATOR: coordinator,
            NUM_PROCESSES: str(self.processes),
            PROCESS_ID: str(rank),
            EXIT: f"{self.exit_seconds:g}",
            "PYTHONUNBUFFERED": "1",
        }

    def _gpus_of(self, rank: int) -> dict[str, str]:
        """Returns the variables for a local rank's GPUs; empty for other hosts."""
        gpus = local_gpus.visible_gpus()
        here = self._ranks_here() if gpus else []
        if rank not in here:
            return {}
        return local_gpus.own_gpus(gpus, len(here), here.index(rank))

    def gpus_shared(self) -> str:
        """Returns a warning if GPUs of other hosts are not divided among their ranks.

        Returns:
            Warning with the remedy; empty if no other host has several ranks, or no
            rank uses GPUs.
        """
        ranks = Counter(map(self.host_of, range(self.processes)))
        away = [host for host, n in ranks.items() if n > 1 and not is_here(host)]
        if not away or not local_gpus.may_use_gpus():
            return ""
        return (
            f"several ranks run on {', '.join(away)}, and each sees all GPUs there: "
            "only those of this machine are divided. Run one rank on each host, or "
            "set CUDA_VISIBLE_DEVICES there for each rank before JAX is imported"
        )

    def shared_environment(self) -> dict[str, str]:
        """Returns this process's environment variables that other hosts get."""
        return {name: os.environ[name] for name in PASSED_ON if name in os.environ}

    def words(self, rank: int, environment: Mapping[str, str]) -> list[str]:
        """Returns the command that starts a rank from this machine.

        Args:
            rank: Number of the rank.
            environment: Variables in addition to the environment of another host.

        >>> launch = Launch(command=("python", "a b.py"), processes=1)
        >>> launch.words(0, {"X": "1"})
        ['python', 'a b.py']
        """
        host = self.host_of(rank)
        if is_here(host):
            return list(self.command)
        given = [f"{name}={value}" for name, value in environment.items()]
        return words_there(self.remote_shell, host, ["env", *given, *self.command])


def check_hosts(
    problems: Problems, hosts: Sequence[str], processes: int, shell: Sequence[str]
) -> None:
    """Collects errors in the hosts of processes.

    Args:
        problems: Collector of the command's errors.
        hosts: Names of the hosts.
        processes: Maximum number of processes on all hosts together.
        shell: Words before a host's name and the command for it.
    """
    if not hosts or not all(hosts):
        problems.add("--hosts has an empty name; expected one or more, as in a,b")
    elif len(set(hosts)) < len(hosts):
        problems.add(f"--hosts {','.join(hosts)} has a host twice")
    elif processes < len(hosts):
        problems.add(
            f"--processes is {processes} on {len(hosts)} hosts; expected at least one "
            f"on each. Raise it to {len(hosts)}, or leave hosts out"
        )
    away = [host for host in hosts if not is_here(host)]
    if away and not (shell and shutil.which(shell[0])):
        problems.add(
            f"--remote-shell: there is no program {(*shell, '')[0]!r} here, and "
            f"{', '.join(away)} are other hosts. Install it, or name another"
        )


def shell_words(text: str) -> tuple[str, ...]:
    """Parses the words of ``--remote-shell``.

    Raises:
        WhaleError: A quotation is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise WhaleError(f"--remote-shell is {text!r} ({error})") from None


def words_there(shell: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Returns the command that starts a program on another host.

    Args:
        shell: Words before a host's name and the command for it.
        host: Name of the host.
        command: Words of the program, which starts in this process's folder.
    """
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [*shell, host, there]


def is_here(host: str) -> bool:
    """Returns whether a host is this machine, by one of its usual names.

    Other names and addresses of this machine count as other hosts, which a remote shell
    reaches.

    >>> is_here("localhost")
    True
    """
    return host in _HERE or host in (socket.gethostname(), socket.getfqdn())


def _check_free(port: int) -> None:
    with socket.socket() as result:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            result.bind(("127.0.0.1", port))
            result.listen()
        except OSError as error:
            raise WhaleError(
                f"--port is {port}, which cannot be listened at on this machine "
                f"({error.strerror}). Leave it out for a free one, give another, or "
                "stop what holds it"
            ) from error
