"""The GPU compiler: its folder, and the GPUs for which it can compile.

The compiler is JAX's CUDA plugin with NVIDIA's libraries. In a user's environment they
would change the device that the user's programs run on. So ``set_up`` installs them in
a second environment. The compiling process alone sees its packages, after all others.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from whalejax.meshes.calibration.cache import directory
from whalejax.verification.processes import VerifyError
from whalejax.verification.targets import NoCompiler, Target


PLUGIN: Final = "jax-cuda12-plugin"
_PACKAGES: Final = "lib/python*/site-packages"
_SECONDS: Final = 3600
_READY: Final = "ready"
"""File that is written last, so an installation without it was interrupted."""

_LIBRARIES: Final = {"major": 9, "minor": 10, "patch": 0}
"""Version of cuDNN to compile for; otherwise the plugin would ask a GPU for it."""


def folder() -> Path:
    """Returns the path of the second environment, by version of JAX and Python."""
    jax = importlib.metadata.version("jax")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return directory() / f"gpu-jax{jax}-python{python}"


def packages() -> Sequence[str]:
    """Returns the folders of the compiler's packages.

    Raises:
        NoCompiler: The compiler was not set up.
    """
    result = [str(path) for path in folder().glob(_PACKAGES)]
    if not (result and (folder() / _READY).exists()):
        raise NoCompiler(
            "compiling for GPUs needs JAX's CUDA plugin, in a separate environment. "
            "Make it once with whalejax verify --setup-gpu (1.4 GB to download, 5 GB "
            "on disk); this needs no GPU"
        )
    return result


def set_up() -> Path:
    """Creates the second environment, unless it exists.

    Returns:
        Folder of the environment.

    Raises:
        VerifyError: The environment cannot be created. The message has the end of the
            installer's output.
    """
    where = folder()
    if (where / _READY).exists():
        return where
    try:
        _install(where)
        (where / _READY).touch()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerifyError(
            f"the GPU compiler cannot be installed in {where}: {error}. Set "
            "WHALEJAX_CACHE to a folder with 5 GB of room"
        ) from error
    return where


def _install(where: Path) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    wanted = f"{PLUGIN}[with-cuda]=={importlib.metadata.version('jax')}"
    pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--no-input"]
    for command in (
        [sys.executable, "-m", "venv", str(where)],
        [*pip, "--quiet", wanted],
    ):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            raise VerifyError(
                f"{' '.join(command)} failed:\n"
                f"{(done.stdout + done.stderr).strip()[-1500:]}"
            )


def properties(target: Target) -> str:
    """Returns the properties of a GPU, as protobuf text for the compiler.

    Args:
        target: GPU target.

    >>> from whalejax.verification.targets import Target
    >>> target = Target(platform="gpu", words="h100:8", kind="h100",
    ...                 topology="1x1x8", slices=1, num_devices=8, memory_bytes=0)
    >>> properties(target).splitlines()[-1]
    'device_description_str: "NVIDIA H100 80GB HBM3"'
    """
    package = importlib.resources.files("whalejax.verification")
    kinds = tomllib.loads((package / "gpus.toml").read_text(encoding="utf-8"))
    facts: dict[str, Any] = dict(kinds[target.kind])
    name = facts.pop("name")
    capability = {key: facts.pop(key) for key in ("major", "minor")}
    links = facts.pop("active_links")
    lines = [f"{key}: {value}" for key, value in facts.items()]
    lines += [
        f"cuda_compute_capability {{ {_fields(capability)} }}",
        f"device_interconnect_info {{ active_links: {links} }}",
        'device_vendor: "NVIDIA Corporation"',
        f'name: "{name}"',
    ]
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"  {line}" for line in lines),
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ {_fields(_LIBRARIES)} }}",
            f'device_description_str: "{name}"',
        ]
    )


def _fields(values: dict[str, int]) -> str:
    return " ".join(f"{key}: {value}" for key, value in values.items())
