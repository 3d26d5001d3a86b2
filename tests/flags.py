"""The options of XLA that tests run with: eight CPU devices, and quick compilation.

Nothing that is tested depends on the optimisations of machine code that are off here:
layouts, collectives and memory are settled before. What a test compiles takes half the
time.

``python -m tests.flags`` prints them.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Final


def _flags() -> tuple[str, ...]:
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        # Later versions do not know it, and stop at a flag that they do not know.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return tuple(flags)


FLAGS: Final = _flags()
QUICK: Final = " ".join(FLAGS[1:])
"""For ``XLA_FLAGS`` of processes whose devices are set in another way."""


def added(given: str) -> str:
    """Options with those of the tests, each unless it is among them already.

    Args:
        given: options as in ``XLA_FLAGS``.
    """
    missing = [flag for flag in FLAGS if flag.split("=")[0] not in given]
    return " ".join([*given.split(), *missing])


if __name__ == "__main__":
    print(added(os.environ.get("XLA_FLAGS", "")))
