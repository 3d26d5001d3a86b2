"""Exceptions of planning, which all folders of the planner may import."""

from __future__ import annotations

from whalejax.meshes.errors import WhaleError


class PlanError(WhaleError):
    """A plan cannot be made, read or used."""


class DeviceCountError(PlanError):
    """The request is impossible on this number of devices, perhaps not on others."""


class NotFaster(PlanError):
    """No plan with stages is faster than a known one."""


class NothingFits(PlanError):
    """No plan fits in memory.

    Attributes:
        lacks_bytes: Bytes that the nearest plan lacks on one device.
        of_bytes: Bytes of this memory that a plan may use on one device.
        nearest: Text of the nearest plan's layout.
        what: ``"device memory"`` or ``"host memory"``.
    """

    def __init__(
        self,
        text: str,
        *,
        lacks_bytes: int,
        of_bytes: int,
        nearest: str,
        what: str = "device memory",
    ) -> None:
        super().__init__(text)
        self.lacks_bytes = lacks_bytes
        self.of_bytes = of_bytes
        self.nearest = nearest
        self.what = what

    def with_sentence(
        self,
        more: str,
        *,
        lacks_bytes: int | None = None,
        of_bytes: int | None = None,
    ) -> NothingFits:
        """Returns the same error with a sentence appended to its text.

        Args:
            more: Sentence to append.
            lacks_bytes, of_bytes: Values of the attributes; None keeps the present
                ones.
        """
        return NothingFits(
            f"{self}. {more}",
            lacks_bytes=self.lacks_bytes if lacks_bytes is None else lacks_bytes,
            of_bytes=self.of_bytes if of_bytes is None else of_bytes,
            nearest=self.nearest,
            what=self.what,
        )
