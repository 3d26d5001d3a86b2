"""The GPUs of a supervisor's machine: each slot has the same ones for the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from whalejax.distributed.local_gpus import own_gpus, shared_words, visible_gpus


HELD_SECONDS: Final = 30.0
"""That a process may take to end after it was given up, before its number is told."""


class SlotGpus:
    """GPUs of this machine, shared out among the slots of a run."""

    def __init__(self, environment: Mapping[str, str], places: int) -> None:
        """Look which there are.

        Args:
            environment: of the processes.
            places: slots among which they are shared out.
        """
        self.gpus, self.places = visible_gpus(environment), places
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def opened(self) -> dict[str, Any]:
        """What the journal keeps of them when a run begins."""
        return {"gpus": list(self.gpus), "places": self.places}

    def go_on(self, opened: Mapping[str, Any]) -> None:
        """Share out as the run did that is taken back: its members have theirs.

        Args:
            opened: the event with which its journal begins.
        """
        self.gpus = tuple(opened.get("gpus", self.gpus))
        self.places = opened.get("places", self.places)

    def words(self) -> str:
        """How they are shared out, for the user; nothing where they are not."""
        return shared_words(self.gpus, self.places)

    def of(self, slot: int) -> dict[str, str]:
        """The variables that give a slot its GPUs.

        Raises:
            WhaleError: the run has no such slot.
        """
        return own_gpus(self.gpus, self.places, slot)

    def is_late(self, now: float, slot: int, pid: int) -> bool:
        """Whether to say, this once, that a process keeps the GPUs of its slot.

        Args:
            now: the time.
            slot: whose next process waits for them.
            pid: of the process that has not ended; 0 where there is none any more.
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
