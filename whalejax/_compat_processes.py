"""Exchanges texts between processes through JAX, and starts JAX's processes.

Only this module and ``_compat`` use private names of JAX.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.extend.backend
from jax._src import clusters, distributed, xla_bridge


def tell_processes(key: str, text: str, *, again: bool = False) -> None:
    """Publishes a text that all processes of this program can read.

    Args:
        key: Key of the text; an unused one unless ``again``.
        text: Text to publish.
        again: Whether the text replaces an earlier text of the key; default False.
    """
    _coordination().key_value_set(key, text, allow_overwrite=again)


def all_told(folder: str) -> list[tuple[str, str]]:
    """Returns keys and texts of all messages in a folder of keys."""
    return [(str(k), str(v)) for k, v in _coordination().key_value_dir_get(folder)]


def told_at(key: str) -> list[tuple[str, str]]:
    """Returns a key and its text in a list; empty if there is no text."""
    try:
        return [(key, str(_coordination().key_value_try_get(key)))]
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return []
        raise


def told_by(key: str, wait_seconds: float) -> str | None:
    """Returns a text of another process; None if it does not arrive in time."""
    try:
        result = _coordination().blocking_key_value_get(key, int(wait_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
    return str(result)


def forget_told(key: str) -> None:
    """Removes a text of this process that all processes have read."""
    _coordination().key_value_delete(key)


def backends_are_there() -> bool:
    """Returns whether devices or arrays were requested before."""
    return bool(xla_bridge.backends_are_initialized())


def detected_cluster(timeout_seconds: float) -> tuple[str, int, int] | None:
    """Returns coordinator, process count and rank of a cluster that JAX detects.

    Args:
        timeout_seconds: Seconds to wait for an answer of the cluster, if one is needed.

    Returns:
        The three values; None if JAX detects no cluster.
    """
    given = os.environ.get("JAX_COORDINATOR_ADDRESS")  # JAX prefers this address.
    address, count, rank, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        given, None, None, None, None, math.ceil(timeout_seconds)
    )
    if address is None or count is None or rank is None:
        return None
    return str(address), int(count), int(rank)


def joined_processes() -> tuple[int, int]:
    """Returns this process's rank and the number of processes; starts no backend."""
    state = distributed.global_state
    return int(state.process_id or 0), int(state.num_processes or 1)


@contextlib.contextmanager
def preemption_service(*, on: bool) -> Iterator[None]:
    """Decides, for a block, whether JAX treats SIGTERM as a preemption notice."""
    name = "jax_enable_preemption_service"
    before = getattr(jax.config, name)
    jax.config.update(name, on)
    try:
        yield
    finally:
        jax.config.update(name, before)


def listen_at(host: str) -> None:
    """Makes CPU devices listen for each other on one address of this machine.

    Otherwise Gloo uses the address to which this machine's name resolves. Without Gloo,
    this has no effect.

    Args:
        host: Numeric address.
    """
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) != "gloo":
        return

    def make() -> Any:
        client = distributed.global_state.client
        if client is None:
            return xla_bridge.make_cpu_client()
        native: Any = vars(xla_bridge)["_jax"]  # Without types.
        collectives = native.make_gloo_tcp_collectives(
            distributed_client=client, hostname=host
        )
        return xla_bridge.make_cpu_client(collectives)

    jax.extend.backend.register_backend_factory(
        "cpu", make, priority=0, fail_quietly=False
    )


def _coordination() -> Any:
    client: Any = distributed.global_state.client
    return client
