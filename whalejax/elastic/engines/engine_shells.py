"""Remote shells that run a command on a node that Slurm or Ray allocates.

As with ssh, a host's name and a command for ``sh`` are appended to each.
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
        WhaleError: There is no ``srun`` here, a quotation is not closed, or the options
            have ``--job-name``.
    """
    try:
        options = shlex.split(text)
    except ValueError as error:
        raise WhaleError(f"--slurm is {text!r} ({error})") from None
    if any(word.startswith(("--job-name", "-J")) for word in options):
        raise WhaleError(
            f"--slurm is {text}; each allocation gets a job name of its own, by which "
            "it is ended. Leave --job-name out"
        )
    if shutil.which("srun") is None:
        raise WhaleError(
            "--slurm: there is no srun here. Run this command on a login node of the "
            "cluster, or leave --slurm out"
        )
    return options


def slurm_shell(options: Sequence[str]) -> list[str]:
    """Returns the words that run a command in an allocation of one node.

    Args:
        options: Further options of ``srun``.
    """
    return ["srun", "--nodes=1", "--ntasks=1", *options, "sh", "-c", 'eval "$1"']


def slurm_allocation(name: str) -> tuple[dict[str, str], list[str]]:
    """Returns the environment of ``srun`` and the command that ends its allocation.

    The command is needed because Slurm keeps an allocation whose ``srun`` was killed.

    Args:
        name: Unique name of the allocation.
    """
    return {"SLURM_JOB_NAME": name}, ["scancel", "--quiet", f"--name={name}"]


def leave_allocation() -> None:
    """Removes Slurm's variables from this process's environment.

    With these variables, ``srun`` would use the current allocation, not make another.
    """
    for variable in [n for n in os.environ if n.startswith(("SLURM_", "SRUN_"))]:
        if variable != "SLURM_CONF":
            del os.environ[variable]


def ray_shell(address: str, *, cpus: int, gpus: int) -> list[str]:
    """Returns the words that run a command as an actor of a Ray cluster.

    Args:
        address: Address of the cluster, or ``"auto"``.
        cpus, gpus: Resources of the actor.
    """
    module = "whalejax.elastic.engines.ray_shell"
    return [sys.executable, "-m", module, address, str(cpus), str(gpus)]
