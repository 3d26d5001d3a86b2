"""Facts that all processes of a run must share, as short texts, and their comparison.

Members of an elastic run and processes of a swarm compare all facts before they train
together. Processes of a launch compare only the versions. JAX is imported at first use,
because a supervisor compares facts without JAX.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from whalejax._version import __version__


_DIGITS: Final = 12
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")


def versions() -> dict[str, str]:
    """Returns the versions of this package, JAX, jaxlib and Python (x.y), by name."""
    import jax
    import jaxlib.version

    return {
        "whalejax": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def training_facts(
    loss: Any, *, plan: str, optimizer: str, first_batch: str, seed: int
) -> dict[str, str]:
    """Returns the facts that all processes of a job must share, by name.

    Args:
        loss: Traced loss, a ``ClosedJaxpr``.
        plan: Hash of the plan.
        optimizer: Fingerprint of the optimizer.
        first_batch: Hash of the first batch.
        seed: Seed of the initial values.
    """
    return {
        "code of the loss": program_hash(loss),
        "plan": plan,
        "optimizer": optimizer,
        "data of the first batch": first_batch,
        "seed": str(seed),
        **versions(),
    }


def program_hash(program: Any) -> str:
    """Returns a hash of a traced program, which does not depend on the process."""
    text = _ADDRESS.sub("", str(program))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def values_hash(leaves: Sequence[Any]) -> str:
    """Returns a hash of the dtypes, shapes and values of arrays."""
    import numpy as np

    digest = hashlib.sha256()
    for leaf in leaves:
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:_DIGITS]


def difference(who: str, facts: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Returns text about a process's facts that differ from the run's; empty if equal.

    Args:
        who: Name of the process.
        facts: Facts of the process, by name.
        known: Facts of the run.

    >>> difference("m1", {"jax": "0.10.1"}, {"jax": "0.10.2"})[:52]
    'm1 differs from the others: jax is 0.10.1, not 0.10.'
    """
    wrong = [
        f"{name} is {facts.get(name, 'not given')}, not {known.get(name, 'given')}"
        for name in sorted({*facts, *known})
        if facts.get(name) != known.get(name)
    ]
    if not wrong:
        return ""
    return (
        f"{who} differs from the others: {'; '.join(wrong)}. Run the same code, "
        "options, versions, data and optimizer in all"
    )
