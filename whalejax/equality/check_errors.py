"""Errors of plans that cannot be checked."""

from __future__ import annotations

from whalejax.meshes.errors import WhaleError


class CheckError(WhaleError):
    """The plan could not be checked; the text has the reason."""
