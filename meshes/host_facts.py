"""Reads processor, cores and memory of this host from the operating system.

In a container, the limits of its control group count, of version 1 or 2. The module
imports no JAX.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path


_CGROUP = Path("/sys/fs/cgroup")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, with family and model number if known.

    On virtual machines, the name is often only that of the maker.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    family, model = facts.get("cpu family"), facts.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def cpu_cores(cgroup: Path = _CGROUP) -> float:
    """Returns the number of cores that this process may use, by affinity and quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    quota = _read(cgroup / "cpu.max")
    if quota is not None:
        words = quota.split()
    else:
        v1 = cgroup / "cpu"
        words = [
            _read(v1 / "cpu.cfs_quota_us") or "max",
            _read(v1 / "cpu.cfs_period_us") or "100000",
        ]
    if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
        return min(cores, int(words[0]) / int(words[1]))
    return cores


def host_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns the memory of the machine, or of its control group if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        limit = _read(path)
        if limit is not None and limit.isdigit():
            total = min(total, int(limit))
    return total


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
