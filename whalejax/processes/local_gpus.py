"""The GPUs of one machine, divided among the processes that are started on it.

Each process gets an equal number of GPUs of its own, because JAX takes all GPUs that it
sees, and processes cannot share one. This module uses no JAX: a process that starts
others must not take their devices.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whalejax.meshes.errors import WhaleError


VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the numbers or UUIDs of the GPUs that a process sees."""

HELD_SECONDS: Final = 30.0
"""Seconds after which a lost process that still keeps its GPUs is reported."""

_PLATFORMS: Final = "JAX_PLATFORMS"
_FILE: Final = re.compile(r"nvidia\d+")
_PART: Final = "MIG-"
_NAME: Final = re.compile(rf"\d+|GPU-.+|{_PART}.+")


def visible_gpus(
    environment: Mapping[str, str] | None = None,
    devices: Path = Path("/dev"),
    *,
    has_plugin: bool | None = None,
) -> tuple[str, ...]:
    """Returns the GPUs that processes with this environment see; none for CPU runs.

    Parts of GPUs (``MIG-…``) count as GPUs, though a process sees only one part.

    Args:
        environment: Environment of the processes; None for that of this process.
        devices: Folder of the system's device files.
        has_plugin: Whether JAX can use NVIDIA's GPUs; looked up if None.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, has_plugin=True)
    ('2', '3')
    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3", "JAX_PLATFORMS": "cpu"})
    ()
    """
    known = os.environ if environment is None else environment
    if not may_use_gpus(known, has_plugin=has_plugin):
        return ()
    if VISIBLE not in known:
        try:
            count = sum(bool(_FILE.fullmatch(x.name)) for x in devices.iterdir())
        except OSError:
            count = 0
        return tuple(map(str, range(count)))
    gpus = []
    for name in known[VISIBLE].split(","):
        if not _NAME.fullmatch(name.strip()):
            break  # CUDA uses only the entries before an invalid one.
        gpus.append(name.strip())
    return tuple(gpus)


def may_use_gpus(
    environment: Mapping[str, str] | None = None, *, has_plugin: bool | None = None
) -> bool:
    """Returns whether processes with this environment may use NVIDIA's GPUs."""
    known = os.environ if environment is None else environment
    platforms = known.get(_PLATFORMS, "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return _has_plugin() if has_plugin is None else has_plugin


def _has_plugin() -> bool:
    result = importlib.util.find_spec("jax_plugins")
    places = result.submodule_search_locations if result is not None else None
    return any("cuda" in x.name for x in pkgutil.iter_modules(places or []))


def refusal(gpus: Sequence[str], processes: int) -> str:
    """Returns why processes cannot have GPUs of their own; empty if they can.

    Args:
        gpus: GPUs of the machine; none for CPU runs, which are never refused.
        processes: Number of processes that run on it at the same time.

    >>> refusal(["0", "1"], 3)[:60]
    '3 processes on this machine, which has 2 GPUs (0, 1): each n'
    """
    if not gpus or processes <= len(gpus):
        return ""
    return (
        f"{processes} processes on this machine, which has {len(gpus)} GPUs "
        f"({', '.join(gpus)}): each needs one of its own. Start at most {len(gpus)}, "
        f"spares included, or set {_PLATFORMS}=cpu"
    )


def own_gpus(gpus: Sequence[str], processes: int, place: int) -> dict[str, str]:
    """Returns the environment variables that give one process its own GPUs.

    Args:
        gpus: GPUs of the machine; none for CPU runs, which need no variables.
        processes: Number of simultaneous processes on it; a single process gets all.
        place: Index of this process among them, from 0.

    Raises:
        WhaleError: There are too few GPUs, or ``place`` is out of range.

    >>> own_gpus(["0", "1", "2", "3"], 2, 1), own_gpus(["0", "1"], 1, 0)
    ({'CUDA_VISIBLE_DEVICES': '2,3'}, {})
    """
    if not gpus:
        return {}
    if place >= processes:
        raise WhaleError(
            f"process {place + 1} on this machine has no GPUs of its own: all "
            f"{len(gpus)} ({', '.join(gpus)}) are divided among {processes} "
            f"processes. End the run, and start it again for {place + 1}"
        )
    if processes == 1:
        return {}
    if why := refusal(gpus, processes):
        raise WhaleError(why)
    each = _each(gpus, processes)
    return {VISIBLE: ",".join(gpus[place * each : (place + 1) * each])}


def gpu_division_text(gpus: Sequence[str], processes: int) -> str:
    """Describes the division of the GPUs; empty if they are not divided.

    >>> gpu_division_text(["0", "1", "2", "3", "4"], 2)
    'each of 2 processes gets 2 of the 5 GPUs of this machine'
    """
    if not gpus or processes == 1:
        return ""
    said = (
        f"each of {processes} processes gets {_each(gpus, processes)} of the "
        f"{len(gpus)} GPUs of this machine"
    )
    parts = any(name.startswith(_PART) for name in gpus)
    return f"{said} (of {_PART} names, CUDA shows a process one)" if parts else said


def _each(gpus: Sequence[str], processes: int) -> int:
    """Returns the number of GPUs, or one part of a GPU, for each process."""
    if any(name.startswith(_PART) for name in gpus):
        return 1
    return len(gpus) // processes


class SlotGpus:
    """GPUs of this machine, divided among the slots of a run."""

    def __init__(self, environment: Mapping[str, str], places: int) -> None:
        """Finds the GPUs of the machine.

        Args:
            environment: Environment of the processes.
            places: Number of slots among which the GPUs are divided.
        """
        self.gpus, self.places = visible_gpus(environment), places
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def journal_fields(self) -> dict[str, Any]:
        """Returns the journal's fields on GPUs at the beginning of a run."""
        return {"gpus": list(self.gpus), "places": self.places}

    def go_on(self, opened: Mapping[str, Any]) -> None:
        """Divides the GPUs as in a resumed run, whose members keep theirs.

        Args:
            opened: First event of the resumed run's journal.
        """
        self.gpus = tuple(opened.get("gpus", self.gpus))
        self.places = opened.get("places", self.places)

    def division_text(self) -> str:
        """Describes the division of the GPUs; empty if they are not divided."""
        return gpu_division_text(self.gpus, self.places)

    def of(self, slot: int, devices: Sequence[str] | None = None) -> dict[str, str]:
        """Returns the environment variables that give a slot its GPUs.

        Args:
            slot: Slot whose process is started.
            devices: Names of the GPUs of each slot, if a scheduler has assigned them.

        Raises:
            WhaleError: ``slot`` is out of range.
        """
        if devices is not None:
            if slot >= len(devices):
                raise WhaleError(f"slot {slot} has no device of {len(devices)}")
            return {VISIBLE: devices[slot]}
        return own_gpus(self.gpus, self.places, slot)

    def is_late(self, now: float, slot: int, pid: int) -> bool:
        """Returns True, once, if a process keeps the GPUs of a slot for too long.

        Args:
            now: Current time, in seconds.
            slot: Slot whose next process waits for its GPUs.
            pid: Id of the process that keeps them; 0 if there is none.
        """
        if not pid:
            self._since.pop(slot, None)
            self._told.discard(slot)
            return False
        since = self._since.setdefault(slot, now)
        if now - since < HELD_SECONDS or slot in self._told:
            return False
        self._told.add(slot)
        return True
