"""Remote shell of a Ray cluster: runs a command on a node with free resources.

``python -m whalejax.elastic.engines.ray_shell ADDRESS CPUS GPUS NAME COMMAND`` waits
until the cluster has the resources, runs the command there, and ends with its status.
SIGTERM ends the command first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

from whalejax.elastic.engines.ray_agents import connected_ray
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import start_child


_MOST_SAID: Final = 4000
_END_SECONDS: Final = 30.0


class CommandActor:
    """Actor that runs one command, and can end it from another of its threads."""

    def __init__(self) -> None:
        """Starts without a command."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> tuple[int, str]:
        """Runs a command in ``sh``; returns its status and the end of its output."""
        self._process = start_child(
            ["sh", "-c", command], output=subprocess.PIPE, ends_with_this=True
        )
        output, _ = self._process.communicate()
        return self._process.returncode, output.decode(errors="replace")[-_MOST_SAID:]

    def end(self) -> None:
        """Asks the command to end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


def main(words: Sequence[str]) -> int:
    """Runs a command on a node.

    Args:
        words: Address of the cluster, numbers of CPUs and GPUs, a name for the host,
            and the command.

    Returns:
        Exit status of the command; 0 after SIGTERM, 1 if its node is lost, and 2 if the
        cluster cannot be reached.
    """
    address, cpus, gpus, _, command = words
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        ray: Any = connected_ray(address)
    except WhaleError as error:
        print(f"whalejax: {error}", file=sys.stderr, flush=True)
        return 2
    options = {"num_cpus": int(cpus), "num_gpus": int(gpus), "max_concurrency": 2}
    actor = ray.remote(CommandActor).options(**options).remote()
    ready, running = actor.__ray_ready__.remote(), actor.run.remote(command)
    try:
        while not asked.is_set():
            if ray.wait([running], timeout=1.0)[0]:
                status, output = ray.get(running)
                print(output, end="", flush=True)
                return int(status)
        if ray.wait([ready], timeout=0)[0]:  # The actor has a node.
            actor.end.remote()
            ray.wait([running], timeout=_END_SECONDS)
        return 0
    except ray.exceptions.RayError as error:
        print(f"whalejax: the node is lost ({error})", file=sys.stderr, flush=True)
        return 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.exit(main(sys.argv[1:]))
