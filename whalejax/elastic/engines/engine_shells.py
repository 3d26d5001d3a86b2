"""Commands that run another one on a node that Slurm or Ray gives.

A host's name and a command for ``sh`` follow the words, as after those of ssh.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from whalejax.meshes.errors import WhaleError


def slurm_options(text: str) -> list[str]:
    """Parses the options of ``srun``.

    Raises:
        WhaleError: There is no ``srun`` here, or a quotation does not end.
    """
    if shutil.which("srun") is None:
        raise WhaleError(
            "--slurm: there is no srun here. Run this command on a login node of the "
            "cluster, or leave --slurm out"
        )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise WhaleError(f"--slurm is {text!r} ({error})") from None


def slurm_shell(options: Sequence[str]) -> list[str]:
    """Returns the words that run a command in an allocation of one node.

    Args:
        options: Further options of ``srun``.
    """
    return ["srun", "--nodes=1", "--ntasks=1", *options, "sh", "-c", 'eval "$1"']


def slurm_release(name: str) -> list[str]:
    """Returns the words that end the allocations of a name.

    Slurm keeps an allocation whose ``srun`` was killed.

    Args:
        name: Name of the allocations, ``--job-name`` of ``srun``.
    """
    return ["scancel", "--quiet", f"--name={name}"]


def leave_allocation(name: str) -> None:
    """Removes Slurm's variables from this process's environment.

    Inside an allocation ``srun`` would start steps of it, not allocations.

    Args:
        name: Name of the allocations of this process.
    """
    for variable in [n for n in os.environ if n.startswith(("SLURM_", "SRUN_"))]:
        if variable != "SLURM_CONF":
            del os.environ[variable]
    os.environ["SLURM_JOB_NAME"] = name


def ray_shell(address: str, *, cpus: int, gpus: int) -> list[str]:
    """Returns the words that run a command as an actor of a Ray cluster.

    Args:
        address: Address of the cluster, or ``"auto"``.
        cpus, gpus: Resources of the actor.
    """
    module = "whalejax.elastic.engines.ray_shell"
    return [sys.executable, "-m", module, address, str(cpus), str(gpus)]
