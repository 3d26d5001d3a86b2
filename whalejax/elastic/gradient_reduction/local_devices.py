"""The devices of this process, detected without starting JAX's backend in it.

Processes that use the platform's collectives must join before their backend starts.
But whether they use collectives depends on their devices. So another process detects
the devices, unless there are clearly only CPUs.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import jax

from whalejax import _compat_processes
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.errors import WhaleError


_LOOK_SECONDS: Final = 120.0

_DEVICE_FILES: Final = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
)
"""Device files of accelerators: NVIDIA, GPUs in WSL, AMD, TPU."""

_LOOK: Final = (
    sys.executable,
    "-m",
    "whalejax.elastic.gradient_reduction.local_devices",
)

_NET: Final = Path("/sys/class/net")
_FABRIC: Final = Path("/sys/class/infiniband")


def own_devices() -> Cluster:
    """Returns the devices of this process, detected without starting them.

    Returns:
        Devices as a cluster of one host; ``cpu:1`` for any number of CPUs.

    Raises:
        WhaleError: The devices cannot be detected.
    """
    if _compat_processes.backends_are_there():
        return _detect_local_cluster()
    named = getattr(jax.config, "jax_platforms", None) or ""
    if named == "cpu" or not (named or any(map(glob.glob, _DEVICE_FILES))):
        return parse_cluster("cpu:1")
    try:
        devices = subprocess.run(
            _LOOK,
            env={
                **os.environ,
                **({"JAX_PLATFORMS": named} if named else {}),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unseen(f"no answer within {_LOOK_SECONDS:g} s") from None
    if devices.returncode:
        raise _unseen(devices.stderr.strip()[-1000:])
    try:
        return Cluster.from_json(json.loads(devices.stdout.splitlines()[-1]))
    except (IndexError, ValueError) as error:
        raise _unseen(f"{devices.stdout[-200:]!r} was printed ({error})") from None


def _unseen(why: str) -> WhaleError:
    return WhaleError(
        f"the devices of this process cannot be detected: {why}. Give mesh='replicas' "
        "or mesh='auto', which do not depend on them"
    )


def _detect_local_cluster() -> Cluster:
    if jax.local_devices()[0].platform == "cpu":
        return parse_cluster("cpu:1")
    try:
        return Cluster.detect(calibrate=False)
    except WhaleError:  # not in the catalogue
        return Cluster.detect()


def network_bytes_per_second(net: Path = _NET) -> float | None:
    """Returns the bytes per second of this host's fastest active network card, or None.

    Args:
        net: Folder of the system that lists network cards.
    """
    rates = []
    for card in net.glob("*"):
        if not (card / "device").exists():  # a virtual card, such as loopback
            continue
        try:
            megabits = int((card / "speed").read_text())
        except (OSError, ValueError):  # The card is inactive.
            continue
        if megabits > 0:
            rates.append(megabits * 1e6 / 8)
    return max(rates, default=None)


def has_fabric(folder: Path = _FABRIC) -> bool:
    """Returns whether this host has an InfiniBand or a similar network.

    Args:
        folder: Folder of the system that lists InfiniBand adapters.
    """
    return any(folder.glob("*"))


def main() -> int:
    """Prints the devices as one line of JSON."""
    print(json.dumps(_detect_local_cluster().to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
