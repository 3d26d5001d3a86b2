"""The GPUs of one machine, divided among the processes that are started on it.

Each process gets as many as any other, of its own: JAX takes all that it sees, and two
processes cannot take the same. No JAX here: who starts processes must not take their
devices.
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
"""Names, by number or UUID, of the GPUs that a process sees."""

HELD_SECONDS: Final = 30.0
"""That a process may take to end after it was given up, before its number is told."""

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
    """The GPUs that processes with this environment would see; none of CPU runs.

    Parts of GPUs (``MIG-…``) count as GPUs, though CUDA shows a process one at most.

    Args:
        environment: Environment of the processes; that of this one if None.
        devices: Folder of the system's device files.
        has_plugin: JAX can use NVIDIA's GPUs; looked up if None.

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
            break  # CUDA takes what stands before it.
        gpus.append(name.strip())
    return tuple(gpus)


def may_use_gpus(
    environment: Mapping[str, str] | None = None, *, has_plugin: bool | None = None
) -> bool:
    """Whether processes with this environment use NVIDIA's GPUs, if there are any."""
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
    """Returns the reason why so many processes cannot have GPUs of their own; empty
    where they can.

    Args:
        gpus: GPUs of the machine; none of CPU runs, which are never refused.
        processes: Number of processes on it at the same time.

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
    """The variables of one process that give it GPUs of its own.

    Args:
        gpus: GPUs of the machine; none of CPU runs, whose variables stay.
        processes: Number of processes on it at the same time; one alone takes all.
        place: Index of this process among them, from 0.

    Raises:
        WhaleError: There are not enough, or there is no such place.

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


def shared_words(gpus: Sequence[str], processes: int) -> str:
    """Describes the division of the GPUs; empty where they are not divided.

    >>> shared_words(["0", "1", "2", "3", "4"], 2)
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
    """Returns the number of GPUs of each process; one of those that CUDA
    shows singly.
    """
    if any(name.startswith(_PART) for name in gpus):
        return 1
    return len(gpus) // processes


class SlotGpus:
    """GPUs of this machine, divided among the slots of a run."""

    def __init__(self, environment: Mapping[str, str], places: int) -> None:
        """Finds the GPUs of the machine.

        Args:
            environment: Environment of the processes.
            places: Slots among which they are divided.
        """
        self.gpus, self.places = visible_gpus(environment), places
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def journal_fields(self) -> dict[str, Any]:
        """Returns the journal's fields on GPUs at the beginning of a run."""
        return {"gpus": list(self.gpus), "places": self.places}

    def go_on(self, opened: Mapping[str, Any]) -> None:
        """Divides the GPUs as the run did that is taken back: its members have theirs.

        Args:
            opened: The event with which its journal begins.
        """
        self.gpus = tuple(opened.get("gpus", self.gpus))
        self.places = opened.get("places", self.places)

    def words(self) -> str:
        """Describes the division of the GPUs for the user; empty where they are not
        divided.
        """
        return shared_words(self.gpus, self.places)

    def of(self, slot: int, devices: Sequence[str] | None = None) -> dict[str, str]:
        """The variables that give a slot its GPUs.

        Args:
            slot: Slot whose process is started.
            devices: Names of the GPUs of each slot, where others have shared them out.

        Raises:
            WhaleError: The run has no such slot.
        """
        if devices is not None:
            if slot >= len(devices):
                raise WhaleError(f"slot {slot} has no device of {len(devices)}")
            return {VISIBLE: devices[slot]}
        return own_gpus(self.gpus, self.places, slot)

    def is_late(self, now: float, slot: int, pid: int) -> bool:
        """Whether to say, this once, that a process keeps the GPUs of its slot.

        Args:
            now: The time.
            slot: Slot whose next process waits for its GPUs.
            pid: Process id that has not ended; 0 where there is none any more.
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
