"""Agents as actors of a Ray cluster: one on each node, including later nodes.

Ray is an extra, ``whalejax[ray]``. It unpickles all data of its cluster, so anyone who
reaches the cluster can run any code on its nodes. Only commands go over Ray. Members
exchange messages over the run's own connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from whalejax.elastic.agents.on_hosts import agent_words
from whalejax.elastic.supervisor.event_messages import tell_user
from whalejax.elastic.supervisor.run_folder import KEY
from whalejax.journals.journal import FOLDER
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import handled_signals, start_child
from whalejax.wire.keys import make_key


_LOOK_SECONDS: Final = 2.0
_END_SECONDS: Final = 30.0
_NAME_LETTERS: Final = 12
_FAILED_SECONDS: Final = 10.0


def hold_agent(words: Sequence[str], folder: str, log: str) -> int:
    """Runs an agent in an actor until it ends.

    Args:
        words: Arguments with which the node's Python starts the agent.
        folder: Working directory of the agent.
        log: Path of its log.

    Returns:
        Exit status of the agent.
    """
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return start_child(
            [sys.executable, *words],
            folder=folder,
            output=file.fileno(),
            ends_with_this=True,
        ).wait()


def name_of(node: Mapping[str, Any]) -> str:
    """Returns the name of the agent on a node of ``ray.nodes()``.

    >>> name_of({"NodeID": "0123456789abcdef"})
    'ray-0123456789ab'
    """
    return f"ray-{node['NodeID'][:_NAME_LETTERS]}"


def connected_ray(address: str) -> Any:
    """Connects to a Ray cluster, and returns the module ``ray``.

    Args:
        address: Address of the cluster, or ``"auto"``.

    Raises:
        WhaleError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports] (of the extra ray)
    except ImportError:
        raise WhaleError(
            "--ray needs Ray, which is not installed here. Install whalejax[ray]"
        ) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise WhaleError(
            f"--ray is {address}, where no Ray cluster answers "
            f"({str(error).splitlines()[0][:200]}). Start one by ray start --head, "
            "or give its address"
        ) from error
    return ray


class RayAgents:
    """One agent on each node of a Ray cluster while a block runs.

    Attributes:
        names: Names of the agents on the initial nodes.
    """

    def __init__(
        self, address: str, supervisor: str, logs: Path, *, processes: int
    ) -> None:
        """Connects to the cluster; starts no agent yet.

        Args:
            address: Address of the cluster, or ``"auto"``.
            supervisor: Host and port of the supervisor.
            logs: Folder of ``--logs``, with the same path on all nodes.
            processes: Number of processes of the run, divided among the current nodes.

        Raises:
            WhaleError: Ray is not installed, or there is no cluster.
        """
        self._ray = connected_ray(address)
        self._supervisor, self._logs = supervisor, logs.absolute()
        nodes = self._nodes()
        self.names = tuple(map(name_of, nodes))
        self._room = max(-(-processes // max(len(nodes), 1)), 1)
        self._over = threading.Event()
        self._running: dict[str, tuple[Any, Any]] = {}
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def _nodes(self) -> list[Mapping[str, Any]]:
        nodes = self._ray.nodes()
        return [n for n in nodes if n["Alive"] and n["Resources"].get("CPU", 0) > 0]

    def __enter__(self) -> RayAgents:
        """Starts the agents."""
        make_key(self._logs / FOLDER / KEY)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for agents that end with the run, and kills the others."""
        self._over.set()
        self._thread.join(_END_SECONDS)
        ends = [end for _, end in self._running.values()]
        with handled_signals(lambda *_: None, signal.SIGINT):
            if exc is None and ends:
                with contextlib.suppress(Exception):  # The node may be gone.
                    self._ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
            self._ray.shutdown()

    def _keep(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Exception):  # The cluster may be changing.
                self._look()
            self._over.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        for node in self._nodes():
            name = name_of(node)
            if name in self._running:
                ready, _ = self._ray.wait([self._running[name][1]], timeout=0)
                if not ready:
                    continue
                tell_user(f"agent {name} ended; it is started again")
                del self._running[name]
                if self._over.wait(_FAILED_SECONDS):
                    return
            self._running[name] = self._start(node, name)

    def _start(self, node: Mapping[str, Any], name: str) -> tuple[Any, Any]:
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            NodeAffinitySchedulingStrategy,
        )

        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # Ray hides GPUs that an actor does not request.
        gpus = node["Resources"].get("GPU", 0)
        actor = (
            self._ray.remote(_Holder)
            .options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy)
            .remote()
        )
        words = agent_words(self._supervisor, self._logs, name, self._room)
        log = str(self._logs / FOLDER / f"agent-{name}.log")
        return actor, actor.hold.remote(words, os.getcwd(), log)


class _Holder:
    """Actor that runs the agent of a node."""

    def hold(self, words: Sequence[str], folder: str, log: str) -> int:
        return hold_agent(words, folder, log)
